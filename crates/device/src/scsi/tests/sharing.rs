//! Several initiators, each with an export of the same disk.

use std::task::{Context, Poll, Waker};
use std::time::Instant;

use super::*;
use crate::access::MediumGuard;
use crate::access::persist::CommandClass;
use crate::access::task_set::TaskId;
use crate::scsi::request_queue::LocalUnit;
use crate::scsi::units::Borrowed;
use crate::testing::TIMEOUT;

pub(super) const ABORT_TASK_SET: u32 = 1;
pub(super) const CLEAR_TASK_SET: u32 = 3;
pub(super) const NEXUS_RESET: u32 = 4;
pub(super) const UNIT_RESET: u32 = 5;

/// Responses.
pub(super) const OK: u8 = 0;
pub(super) const RESET: u8 = 4;
pub(super) const ABORTED: u8 = 2;
pub(super) const BAD_TARGET: u8 = 3;
pub(super) const FAILURE: u8 = 9;

/// Unit attentions.
const UNIT_WAS_RESET: [u8; 3] = [6, 0x29, 3];
const NEXUS_LOST: [u8; 3] = [6, 0x29, 7];
const COMMANDS_CLEARED: [u8; 3] = [6, 0x2f, 0];
const MODE_CHANGED: [u8; 3] = [6, 0x2a, 1];
const CAPACITY_CHANGED: [u8; 3] = [6, 0x2a, 9];
const REGISTRATIONS_PREEMPTED: [u8; 3] = [6, 0x2a, 5];

const TEST_UNIT_READY: [u8; 6] = [0; 6];
const CACHING_PAGE: [u8; 6] = [0x1a, 8, 0x08, 0, 255, 0];
pub(super) const STOP: [u8; 6] = [0x1b, 0, 0, 0, 0, 0];
pub(super) const START: [u8; 6] = [0x1b, 0, 0, 0, 1, 0];

impl Initiator {
    pub(super) fn unit(&self) -> Borrowed {
        Self::scsi(&self.device).units().borrow(UNIT).unwrap()
    }

    /// A local unit on the IoThread of the initiator.
    pub(super) fn local_unit(&self) -> LocalUnit {
        let units = Self::scsi(&self.device).units();
        let unit = units.with_all(|mut all| all.next().map(Arc::clone)).unwrap();
        LocalUnit::new(&unit, self.scene.thread.io())
    }

    pub(super) fn access(&self) -> Arc<DiskAccess> {
        Arc::clone(&self.unit().access)
    }
}

/// Three initiators of one disk.
pub(super) fn three() -> [Initiator; 3] {
    with_caches([true; 3])
}

fn with_caches(caches: [bool; 3]) -> [Initiator; 3] {
    let disk = NamedTempFile::new().unwrap();
    disk.as_file().set_len(BLOCKS * BLOCK as u64).unwrap();
    let (disk, common) = (Arc::new(disk), options());
    let disk_options = DiskOptions { no_lock: true, ..DiskOptions::default() };
    [0, 1, 2].map(|place| {
        let mut options = UnitOptions { write_cache: caches[place], ..common.clone() };
        options.port[6] = u8::try_from(place).unwrap();
        Initiator::on(Arc::clone(&disk), &disk_options, options)
    })
}

pub(super) fn read() -> Vec<u8> {
    cdb10(0x28, 0, 0, 1)
}

pub(super) fn write() -> Vec<u8> {
    cdb10(0x2a, 0, 0, 1)
}

/// Takes turns on all threads until `done`.
pub(super) fn turn_until(all: &mut [Initiator], mut done: impl FnMut(&mut [Initiator]) -> bool) {
    let start = Instant::now();
    while !done(all) {
        all.iter().for_each(|initiator| initiator.scene.turn(1));
        assert!(start.elapsed() < TIMEOUT, "nothing more happens");
        std::thread::yield_now();
    }
}

/// Takes the disk from all initiators, so that commands that begin wait.
pub(super) fn hold(all: &mut [Initiator]) -> MediumGuard {
    hold_with(all, || ())
}

/// Like [`hold`], with turns of more guests of the disk.
pub(super) fn hold_with(all: &mut [Initiator], mut turn_more: impl FnMut()) -> MediumGuard {
    let access = all[0].access();
    let mut exclude = Box::pin(access.take_medium_anyway(TaskId::NONE));
    let mut exclusive = None;
    turn_until(all, |_| {
        let mut cx = Context::from_waker(Waker::noop());
        if let Poll::Ready(held) = exclude.as_mut().poll(&mut cx) {
            exclusive = Some(held);
        }
        turn_more();
        exclusive.is_some()
    });
    exclusive.unwrap()
}

/// Begins a read at each initiator, which waits.
fn begin_reads(all: &mut [Initiator]) {
    for initiator in all {
        initiator.begin(UNIT.bytes(), &read(), &[], 512);
        initiator.scene.turn(10);
    }
}

/// The control queue of an initiator.
pub(super) struct Control {
    scene: Scene,
    _queue: QueueHandle,
}

impl Control {
    pub(super) fn start(device: &Device) -> Self {
        let scene = Scene::new();
        let queue = scene.start_queue_of(device, 0);
        Self { scene, _queue: queue }
    }

    pub(super) fn begin(&mut self, function: u32) {
        self.begin_at(UNIT, function);
    }

    pub(super) fn begin_at(&mut self, unit: UnitAddress, function: u32) {
        let mut request = vec![0; 24];
        request[4..8].copy_from_slice(&function.to_le_bytes());
        request[8..16].copy_from_slice(&unit.bytes());
        self.scene.memory.write(DATA, &request).unwrap();
        self.scene.memory.write(RESPONSE, &[0xee]).unwrap();
        self.scene.offer(&[Desc::readable(DATA, 24), Desc::writable(RESPONSE, 1)]);
    }

    /// The response, if there is one after a turn of all scenes.
    pub(super) fn turn(&mut self, others: &[&Scene]) -> Option<u8> {
        self.scene.turn(1);
        others.iter().for_each(|other| other.turn(1));
        self.scene.driver.take_used()?;
        let mut response = [0];
        self.scene.memory.read(RESPONSE, &mut response).unwrap();
        Some(response[0])
    }

    /// Sends a request, and returns the `N` bytes of its response.
    pub(super) fn answer<const N: usize>(&mut self, request: &[u8]) -> [u8; N] {
        self.scene.memory.write(DATA, request).unwrap();
        let request = Desc::readable(DATA, iomem::fits(request.len(), "bytes of a request"));
        let room = Desc::writable(RESPONSE, iomem::fits(N, "bytes of a response"));
        self.answer_to(&[request, room])
    }

    /// Sends a chain, and returns `N` bytes of its response.
    pub(super) fn answer_to<const N: usize>(&mut self, chain: &[Desc]) -> [u8; N] {
        let mut response = [0xee; N];
        self.scene.memory.write(RESPONSE, &response).unwrap();
        self.scene.offer(chain);
        self.end(&[]);
        self.scene.memory.read(RESPONSE, &mut response).unwrap();
        response
    }

    /// Sends a task management function. Returns its response.
    pub(super) fn send(&mut self, others: &[&Scene], function: u32) -> u8 {
        self.begin(function);
        self.end(others)
    }

    pub(super) fn end(&mut self, others: &[&Scene]) -> u8 {
        let start = Instant::now();
        loop {
            if let Some(response) = self.turn(others) {
                return response;
            }
            assert!(start.elapsed() < TIMEOUT, "nothing more happens");
            std::thread::yield_now();
        }
    }
}

/// Sends a task management function of the first initiator while reads wait for the disk. Returns
/// its response.
fn manage(all: &mut [Initiator], function: u32, held: MediumGuard) -> u8 {
    let mut control = Control::start(&all[0].device);
    control.begin(function);
    let scenes: Vec<&Scene> = all.iter().map(|initiator| &initiator.scene).collect();
    for _ in 0..10 {
        assert_eq!(control.turn(&scenes), None, "tasks have not ended");
    }
    drop(held);
    control.end(&scenes)
}

fn responses(all: &mut [Initiator]) -> Vec<u8> {
    all.iter_mut().map(|initiator| initiator.end().response).collect()
}

fn heard(all: &mut [Initiator]) -> Vec<[u8; 3]> {
    all.iter_mut().map(|initiator| initiator.run(&TEST_UNIT_READY, &[], 0).sense).collect()
}

fn hear_nothing(all: &mut [Initiator]) {
    for initiator in all {
        initiator.good(&TEST_UNIT_READY, &[], 0);
    }
}

#[test]
fn a_reset_of_the_unit_ends_the_tasks_of_all_and_all_learn_of_it() {
    let mut all = three();
    all[1].good(&STOP, &[], 0);
    all[1].good(&START, &[], 0);
    let held = hold(&mut all);
    begin_reads(&mut all);
    assert_eq!(manage(&mut all, UNIT_RESET, held), OK);
    assert_eq!(responses(&mut all), [RESET; 3]);
    assert_eq!(heard(&mut all), [UNIT_WAS_RESET; 3]);
    hear_nothing(&mut all);
}

#[test]
fn a_request_about_notifications_is_answered_behind_the_events() {
    for kind in [1, 2] {
        let mut control = Control::start(&three()[0].device);
        let mut request = vec![0; 16];
        request[0] = kind;
        assert_eq!(control.answer(&request), [0; 5]);
        assert_eq!(control.answer(&request[..15]), [0, 0, 0, 0, FAILURE]);
        assert_eq!(control.answer(&request[..3]), [FAILURE, 0xee, 0xee, 0xee, 0xee]);
    }
}

#[test]
fn clearing_the_task_set_ends_all_tasks_and_notifies_other_initiators() {
    let mut all = three();
    let held = hold(&mut all);
    begin_reads(&mut all[..2]);
    assert_eq!(manage(&mut all, CLEAR_TASK_SET, held), OK);
    assert_eq!(responses(&mut all[..2]), [ABORTED, RESET]);
    assert_eq!(heard(&mut all[1..2]), [COMMANDS_CLEARED]);
    // The last initiator had none.
    hear_nothing(&mut all);
}

#[test]
fn aborts_of_own_tasks_notify_no_other_initiator() {
    for (function, response) in [(ABORT_TASK_SET, ABORTED), (NEXUS_RESET, RESET)] {
        let mut all = three();
        all[0].good(&STOP, &[], 0);
        all[0].good(&START, &[], 0);
        switch_cache(&mut all, 0, false);
        assert_eq!(heard(&mut all[1..]), [MODE_CHANGED; 2]);
        let held = hold(&mut all);
        begin_reads(&mut all);
        assert_eq!(manage(&mut all, function, held), OK);
        assert_eq!(responses(&mut all), [response, OK, OK]);
        if function == NEXUS_RESET {
            assert_eq!(heard(&mut all[..1]), [NEXUS_LOST]);
        }
        hear_nothing(&mut all);
        assert!(!has_cache(&mut all[0]), "the unit is as it was");
    }
}

#[test]
fn preempt_and_abort_ends_the_tasks_of_preempted_initiators() {
    const REGISTER: u8 = 0;
    const RESERVE: u8 = 1;
    const PREEMPT_AND_ABORT: u8 = 5;
    const WRITE_EXCLUSIVE: u8 = 1;
    let mut all = three();
    for (key, initiator) in (1..).zip(&mut all[..2]) {
        let (cdb, list) = reserve_out(REGISTER, 0, [0, key]);
        initiator.good(&cdb, &list, 0);
    }
    let (cdb, list) = reserve_out(RESERVE, WRITE_EXCLUSIVE, [2, 0]);
    all[1].good(&cdb, &list, 0);
    let held = hold(&mut all);
    begin_reads(&mut all[1..]);
    let (cdb, list) = reserve_out(PREEMPT_AND_ABORT, WRITE_EXCLUSIVE, [1, 2]);
    all[0].begin(UNIT.bytes(), &cdb, &list, 0);
    // A thread carries it out.
    turn_until(&mut all, |all| all[1].unit().attached.conflicts(CommandClass::Writes));
    all.iter().for_each(|initiator| initiator.scene.turn(50));
    assert!(!all[0].has_answer(), "tasks have not ended");
    assert_eq!(heard(&mut all[1..2]), [REGISTRATIONS_PREEMPTED]);
    drop(held);
    turn_until(&mut all, |all| all[0].has_answer());
    assert_eq!(responses(&mut all), [OK, RESET, OK]);
    assert_eq!(heard(&mut all[1..2]), [COMMANDS_CLEARED]);
    hear_nothing(&mut all);
}

fn has_cache(initiator: &mut Initiator) -> bool {
    initiator.good(&CACHING_PAGE, &[], 255)[6] & 4 != 0
}

/// Switches the cache at the initiator at `place`, after all writes at further initiators.
pub(super) fn switch_cache(all: &mut [Initiator], place: usize, on: bool) {
    let initiator = &mut all[place];
    let mut list = initiator.good(&CACHING_PAGE, &[], 255);
    list[0] = 0;
    list[2] = 0;
    list[6] = if on { list[6] | 4 } else { list[6] & !4 };
    let length = u8::try_from(list.len()).unwrap();
    initiator.begin(UNIT.bytes(), &[0x15, 0x10, 0, 0, length, 0], &list, 0);
    turn_until(all, |all| all[place].has_answer());
    assert_eq!(all[place].end().status, 0);
}

#[test]
fn another_format_of_sense_data_is_told_to_others() {
    let mut all = three();
    let mut list = all[0].good(&[0x1a, 8, 0x0a, 0, 255, 0], &[], 255);
    (list[0], list[2]) = (0, 0);
    let select = [0x15, 0x10, 0, 0, u8::try_from(list.len()).unwrap(), 0];
    for (format, told) in [(4, true), (4, false), (0, true)] {
        list[6] = list[6] & !4 | format;
        all[0].good(&select, &list, 0);
        for other in &mut all[1..] {
            let status = other.run(&TEST_UNIT_READY, &[], 0).status;
            assert_eq!(status, if told { 2 } else { 0 }, "{format}");
            let raw = other.raw_sense();
            match (told, format) {
                (true, 4) => assert_eq!(raw[..4], [0x72, 6, 0x2a, 1]),
                (true, _) => assert_eq!([raw[0], raw[2], raw[12], raw[13]], [0x70, 6, 0x2a, 1]),
                (false, _) => {}
            }
        }
    }
}

#[test]
fn the_write_cache_is_switched_for_all_initiators_with_one() {
    let mut all = with_caches([true, true, false]);
    let caches = |all: &mut [Initiator]| [0, 1, 2].map(|place| has_cache(&mut all[place]));
    assert_eq!(caches(&mut all), [true, true, false]);
    switch_cache(&mut all, 0, false);
    assert_eq!(heard(&mut all[1..]), [MODE_CHANGED; 2]);
    assert_eq!(caches(&mut all), [false; 3]);
    // Setting the current value is no change.
    switch_cache(&mut all, 1, false);
    hear_nothing(&mut all);
    switch_cache(&mut all, 1, true);
    assert_eq!([heard(&mut all[..1]), heard(&mut all[2..])], [[MODE_CHANGED]; 2]);
    assert_eq!(caches(&mut all), [true, true, false], "the last was set up to have none");
}

#[test]
fn a_unit_that_one_initiator_stops_is_stopped_for_all_while_there_are_others() {
    let mut all = three();
    all[0].good(&STOP, &[], 0);
    for initiator in &mut all {
        assert_eq!(initiator.sense(&read(), &[], 512), [2, 4, 2]);
    }
    all[0].device.reset();
    all[0].device.set_features(split_features(&all[0].device)).unwrap();
    assert_eq!(heard(&mut all[..1]), [[6, 0x29, 0]]);
    assert_eq!(all[0].sense(&read(), &[], 512), [2, 4, 2], "others use it as it is");
    all[2].good(&START, &[], 0);
    hear_nothing(&mut all);
    all[0].good(&STOP, &[], 0);
    let mut left = all.into_iter().next().unwrap();
    left.device.reset();
    assert_eq!(left.sense(&TEST_UNIT_READY, &[], 0), [6, 0x29, 0]);
    left.good(&read(), &[], 512);
}

/// Functions for it do not affect the unit that now has its address, on another disk.
#[test]
fn a_unit_that_was_removed_has_no_part_in_its_successor() {
    let mut all = three();
    let removed = Initiator::scsi(&all[0].device).remove_unit(UNIT).unwrap();
    let other = NamedTempFile::new().unwrap();
    other.as_file().set_len(BLOCKS * BLOCK as u64).unwrap();
    let source = DiskSource::file(other.path(), &DiskOptions::default()).unwrap();
    Initiator::scsi(&all[0].device).add_unit(UNIT, source, options()).unwrap();
    assert_eq!(heard(&mut all[..1]), [[6, 0x29, 0]]);
    let held = hold(&mut all);
    begin_reads(&mut all[..1]);
    let mut control = Control::start(&all[1].device);
    let scenes: Vec<&Scene> = all.iter().map(|initiator| &initiator.scene).collect();
    assert_eq!(control.send(&scenes, UNIT_RESET), OK);
    Initiator::scsi(&all[1].device).access(UNIT).unwrap().refresh();
    assert!(!all[0].has_answer(), "its disk is held");
    drop(held);
    assert_eq!(responses(&mut all[..1]), [OK]);
    hear_nothing(&mut all[..1]);
    drop(removed);
}

#[test]
fn another_size_is_told_to_all() {
    let mut all = three();
    let file = std::fs::OpenOptions::new().write(true).open(all[0].disk.path()).unwrap();
    file.set_len(2 * BLOCKS * BLOCK as u64).unwrap();
    Initiator::scsi(&all[1].device).access(UNIT).unwrap().refresh();
    assert_eq!(heard(&mut all), [CAPACITY_CHANGED; 3]);
    let last = u32::try_from(2 * BLOCKS - 1).unwrap().to_be_bytes();
    for initiator in &mut all {
        assert_eq!(initiator.good(&cdb10(0x25, 0, 0, 0), &[], 8)[..4], last);
    }
    hear_nothing(&mut all);
}

#[test]
fn no_write_comes_between_the_two_halves_of_compare_and_write() {
    let mut all = three();
    let mut compare = cdb16(0x89, 0, 0, 0);
    compare[13] = 1;
    all[0].begin(UNIT.bytes(), &compare, &[[0; BLOCK], [2; BLOCK]].concat(), 0);
    all[0].scene.turn(50);
    all[1].begin(UNIT.bytes(), &write(), &[1; BLOCK], 0);
    all[1].scene.turn(50);
    // The command waits until the third queue has reported no task in progress, and the write waits
    // for the command.
    assert!(!all[0].has_answer() && !all[1].has_answer());
    turn_until(&mut all, |all| all[0].has_answer());
    assert_eq!(responses(&mut all[..2]), [OK; 2]);
    assert_eq!(all[0].on_disk(0), [1; BLOCK]);
}

#[test]
fn the_disk_of_a_removed_unit_is_closed_by_its_remover() {
    let disk = NamedTempFile::new().unwrap();
    disk.as_file().set_len(BLOCKS * BLOCK as u64).unwrap();
    let folder = std::fs::canonicalize(disk.path()).unwrap();
    // The test has the file open, too.
    let count = || {
        let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let open = open.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        open.filter(|path| *path == folder).count()
    };
    let mut all = [Initiator::on(Arc::new(disk), &DiskOptions::default(), options())];
    let held = hold(&mut all);
    begin_reads(&mut all);
    let borrowed = all[0].unit();
    let removed = Initiator::scsi(&all[0].device).remove_unit(UNIT).unwrap();
    all[0].scene.turn(20);
    assert!(!removed.is_unused(), "a read is in progress");
    drop(held);
    turn_until(&mut all, |all| all[0].has_answer());
    all[0].scene.turn(20);
    assert!(!removed.is_unused(), "another thread looks at its size");
    drop(borrowed);
    turn_until(&mut all, |_| removed.is_unused());
    assert_eq!((all[0].end().status, count()), (0, 2));
    removed.close();
    assert_eq!(count(), 1);
    let answer = all[0].run(&TEST_UNIT_READY, &[], 0);
    assert_eq!((answer.response, answer.sense), (BAD_TARGET, [0; 3]));
}

/// The chains left in the ring of such a queue may be carried out when it starts again.
#[test]
fn a_function_does_not_say_complete_while_a_queue_is_stopped() {
    let mut initiator = Initiator::new();
    let mut control = Control::start(&initiator.device);
    assert_eq!(control.send(&[&initiator.scene], ABORT_TASK_SET), OK);
    let stopped = initiator.take_queue().begin_final_stop();
    initiator.scene.wait(&stopped);
    for function in [ABORT_TASK_SET, CLEAR_TASK_SET, NEXUS_RESET, UNIT_RESET] {
        assert_eq!(control.send(&[&initiator.scene], function), FAILURE);
    }
    initiator.queue = Some(initiator.scene.start_queue_of(&initiator.device, 2));
    assert_eq!(control.send(&[&initiator.scene], ABORT_TASK_SET), OK);
    let stopped = initiator.take_queue().begin_final_stop();
    initiator.scene.wait(&stopped);
    // Another driver, without that queue.
    let mut control = Control::start(&initiator.device);
    initiator.scene.turn(5);
    assert_eq!(control.send(&[&initiator.scene], ABORT_TASK_SET), OK);
}

/// A thread that is slow to check keeps its turn.
#[test]
fn a_command_that_has_waited_for_the_disk_goes_before_another_that_wants_it() {
    let mut all = three();
    let held = hold(&mut all);
    begin_reads(&mut all[1..2]);
    let access = all[0].access();
    let mut next = Box::pin(access.take_medium_anyway(TaskId::NONE));
    let mut cx = Context::from_waker(Waker::noop());
    drop(held);
    assert!(next.as_mut().poll(&mut cx).is_pending() && !access.is_exclusive());
    turn_until(&mut all, |_| next.as_mut().poll(&mut cx).is_ready());
    assert!(all[1].has_answer() && all[1].end().status == 0);
}
