//! Task management functions that a driver sends without waiting for answers.

use std::sync::atomic::{AtomicU16, Ordering};
use std::task::{Context, Wake, Waker};

use virtqueue::GuestMemory;

use super::sharing::{
    ABORT_TASK_SET, ABORTED, BAD_TARGET, CLEAR_TASK_SET, Control, FAILURE, NEXUS_RESET, OK, RESET,
    UNIT_RESET, hold, read, three, turn_until,
};
use super::*;
use crate::access::task_set::{Abort, TaskSelector, Treatment};
use crate::access::{FUNCTIONS_MAX, MediumGuard};
use crate::testing::RING;

const ABORT_TASK: u32 = 0;
const QUERY_TASK: u32 = 6;
const QUERY_TASK_SET: u32 = 7;

const INCORRECT_LUN: u8 = 12;
/// The number of functions for which the control queue has room.
const MANY: usize = 30;

/// Three initiators of a disk that is held; the first has begun a read.
fn held_up() -> ([Initiator; 3], MediumGuard) {
    let mut all = three();
    let held = hold(&mut all);
    all[0].offer_read(0);
    all[0].scene.turn(10);
    (all, held)
}

fn scenes(all: &[Initiator]) -> Vec<&Scene> {
    all.iter().map(|initiator| &initiator.scene).collect()
}

impl Initiator {
    /// Makes a read available, with its response `apart` bytes after the usual place.
    fn offer_read(&mut self, apart: u64) {
        let mut chain = self.put(UNIT.bytes(), &read(), &[], 512);
        chain[1..].iter_mut().for_each(|part| part.addr += apart);
        self.scene.offer(&chain);
    }

    /// The response of an answered read, until a later one is written there.
    fn response(&self, apart: u64) -> u8 {
        let mut response = [0];
        self.scene.memory.read(RESPONSE + 11 + apart, &mut response).unwrap();
        response[0]
    }
}

/// For any number of functions, and any cause of delay.
#[test]
fn a_function_covers_earlier_tasks() {
    for function in [ABORT_TASK_SET, CLEAR_TASK_SET, NEXUS_RESET, UNIT_RESET] {
        let (mut all, held) = held_up();
        let mut control = Control::start(&all[0].device);
        for _ in 0..MANY {
            control.begin(function);
        }
        for _ in 0..2 * MANY {
            assert_eq!(control.turn(&scenes(&all)), None, "a task has not ended");
        }
        drop(held);
        turn_until(&mut all, |all| all[0].has_answer());
        let before = all[0].end().response;
        let answered = (0..2 * MANY).filter_map(|_| control.turn(&[])).count();
        // Functions that still had to scan for tasks would find this one.
        all[0].offer_read(0x1000);
        for _ in answered..MANY {
            assert_eq!(control.end(&scenes(&all)), OK);
        }
        all[0].scene.answer();
        let after = all[0].response(0x1000);
        let ended = if function < NEXUS_RESET { ABORTED } else { RESET };
        assert_eq!([before, after], [ended, OK], "{function}");
    }
}

#[test]
fn a_function_spares_tasks_that_come_before_its_queue_is_notified() {
    let (mut all, held) = held_up();
    let mut control = Control::start(&all[0].device);
    control.begin(ABORT_TASK_SET);
    for _ in 0..10 {
        assert_eq!(control.turn(&[]), None, "a task has not ended");
    }
    all[0].offer_read(0x1000);
    for _ in 0..10 {
        assert_eq!(control.turn(&scenes(&all)), None, "a task has not ended");
    }
    drop(held);
    assert_eq!(control.end(&scenes(&all)), OK);
    for _ in 0..2 {
        all[0].scene.answer();
    }
    assert_eq!([0, 0x1000].map(|apart| all[0].response(apart)), [ABORTED, OK]);
}

/// The driver knows of one unit at the address, and expects tasks from before the function to end.
#[test]
fn a_function_covers_earlier_tasks_though_another_unit_is_there_when_they_are_popped() {
    for (function, ended) in [(CLEAR_TASK_SET, ABORTED), (UNIT_RESET, RESET)] {
        let mut initiator = Initiator::new();
        let mut control = Control::start(&initiator.device);
        // The queue sleeps, and scans for tasks before it pops one.
        initiator.scene.turn(10);
        let chain = initiator.put(UNIT.bytes(), &read(), &[], 512);
        initiator.scene.offer_without_kick(&chain);
        control.begin(function);
        for _ in 0..10 {
            assert_eq!(control.turn(&[]), None, "nobody has popped the command");
        }
        let scsi = Initiator::scsi(&initiator.device);
        let removed = scsi.remove_unit(UNIT).unwrap();
        let disk_options = DiskOptions { no_lock: true, ..DiskOptions::default() };
        let source = DiskSource::file(initiator.disk.path(), &disk_options).unwrap();
        scsi.add_unit(UNIT, source, options()).unwrap();
        assert_eq!(control.end(&[&initiator.scene]), OK);
        assert_eq!(initiator.end().response, ended, "{function}");
        drop(removed);
    }
}

#[test]
fn however_many_functions_there_are_few_wait_for_the_tasks_of_others() {
    let (mut all, held) = held_up();
    all[1].offer_read(0);
    all[1].scene.turn(10);
    let mut control = Control::start(&all[0].device);
    for _ in 0..MANY {
        control.begin(UNIT_RESET);
    }
    for _ in 0..2 * MANY {
        assert_eq!(control.turn(&scenes(&all)), None, "a task has not ended");
    }
    let awaited = [0, 1].map(|place| Initiator::scsi(&all[place].device).queues().awaited());
    scenes(&all).iter().for_each(|scene| scene.turn(10));
    let awaited = awaited.map(|awaited| awaited.load(Ordering::Relaxed));
    assert_eq!(awaited, [MANY, FUNCTIONS_MAX]);
    drop(held);
    for _ in 0..MANY {
        assert_eq!(control.end(&scenes(&all)), OK);
    }
}

#[test]
fn functions_about_a_unit_that_hangs_hold_up_none_about_others() {
    let mut all = three();
    let healthy = UnitAddress { target: 0, lun: 2 };
    let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
    let other =
        UnitOptions { naa: [0x30, 0, 0, 0, 0, 0, 0, 9], access: Arc::default(), ..options() };
    Initiator::scsi(&all[0].device).add_unit(healthy, source, other).unwrap();
    assert_eq!(all[0].sense(&[0; 6], &[], 0), [6, 0x3f, 0x0e]);
    let held = hold(&mut all);
    all[0].offer_read(0);
    all[0].scene.turn(10);
    let mut control = Control::start(&all[0].device);
    for _ in 0..=FUNCTIONS_MAX {
        control.begin(UNIT_RESET);
        for _ in 0..10 {
            assert_eq!(control.turn(&scenes(&all)), None, "a task has not ended");
        }
    }
    let none = UnitAddress { target: 9, lun: 0 };
    let absent = UnitAddress { target: 0, lun: 3 };
    for (unit, response) in [(healthy, OK), (none, BAD_TARGET), (absent, INCORRECT_LUN)] {
        control.begin_at(unit, UNIT_RESET);
        assert_eq!(control.end(&scenes(&all)), response, "{unit}");
    }
    drop(held);
    for _ in 0..=FUNCTIONS_MAX {
        assert_eq!(control.end(&scenes(&all)), OK);
    }
    assert_eq!(all[0].end().response, RESET);
}

/// Counts the answers that the driver can see when a wait for tasks ends.
struct Witness {
    memory: Arc<GuestMemory>,
    used: AtomicU16,
}

impl Wake for Witness {
    fn wake(self: Arc<Self>) {
        let mut used = [0; 2];
        self.memory.read(RING.used_ring + 2, &mut used).unwrap();
        self.used.store(u16::from_le_bytes(used), Ordering::Relaxed);
    }
}

/// When drivers learn that tasks are aborted, they search for these tasks, and reuse the memory if
/// they find none.
#[test]
fn a_task_is_answered_before_its_abort() {
    let mut all = three();
    let held = hold(&mut all);
    // This read waits for the disk, although its block is beyond the end.
    let beyond = cdb10(0x28, 0, u32::MAX, 1);
    all[0].begin(UNIT.bytes(), &beyond, &[], 512);
    all[0].scene.turn(10);
    let used = all[0].scene.driver.ring().used_idx();
    let elsewhere = UnitAddress { target: 0, lun: 9 };
    let mut next = all[0].put(elsewhere.bytes(), &[0; 6], &[], 0);
    next[1..].iter_mut().for_each(|part| part.addr += 0x1000);
    all[0].scene.offer_without_kick(&next);
    let queues = Initiator::scsi(&all[0].device).queues();
    let waiting = queues.cover(TaskSelector::At(UNIT), Treatment::Abort(Abort::Aborted));
    let memory = Arc::clone(&all[0].scene.memory);
    let witness = Arc::new(Witness { memory, used: AtomicU16::new(0) });
    let waker = Waker::from(Arc::clone(&witness));
    assert!(waiting.poll(&Context::from_waker(&waker)).is_pending());
    // The queue learns all these changes at once.
    drop(held);
    turn_until(&mut all, |_| waiting.poll(&Context::from_waker(&waker)).is_ready());
    assert!(witness.used.load(Ordering::Relaxed) > used, "its answer is not in the ring");
}

/// The chains left in the ring may be carried out when it starts again.
#[test]
fn a_function_does_not_say_complete_while_a_ring_is_bad() {
    let functions = [
        ABORT_TASK,
        ABORT_TASK_SET,
        CLEAR_TASK_SET,
        NEXUS_RESET,
        UNIT_RESET,
        QUERY_TASK,
        QUERY_TASK_SET,
    ];
    let mut initiator = Initiator::new();
    let mut control = Control::start(&initiator.device);
    initiator.scene.offer(&[Desc::readable(DATA, 51), Desc::writable(RESPONSE, 107)]);
    initiator.scene.answer();
    for function in functions {
        assert_eq!(control.send(&[&initiator.scene], function), OK, "{function}: nothing is left");
    }
    initiator.offer_read(0);
    for function in functions {
        assert_eq!(control.send(&[&initiator.scene], function), FAILURE, "{function}");
    }
    assert!(!initiator.has_answer());
}

/// The loss of a nexus does not replace news about its units.
#[test]
fn a_reset_nexus_keeps_the_attentions_of_its_units() {
    const UNIT_WAS_RESET: [u8; 3] = [6, 0x29, 3];
    const NEXUS_LOST: [u8; 3] = [6, 0x29, 7];
    const CAPACITY_CHANGED: [u8; 3] = [6, 0x2a, 9];
    let mut all = three();
    let mut own = Control::start(&all[0].device);
    let mut of_other = Control::start(&all[1].device);
    let refresh = |all: &[Initiator]| all[0].access().refresh();
    let said = |all: &mut [Initiator]| {
        let senses = (0..4).map(|_| all[0].run(&[0; 6], &[], 0).sense);
        senses.filter(|sense| *sense != [0; 3]).collect::<Vec<_>>()
    };
    assert_eq!(of_other.send(&scenes(&all), UNIT_RESET), OK);
    refresh(&all);
    assert_eq!(own.send(&scenes(&all), NEXUS_RESET), OK);
    assert_eq!(said(&mut all), [UNIT_WAS_RESET, NEXUS_LOST, CAPACITY_CHANGED]);
    refresh(&all);
    assert_eq!(own.send(&scenes(&all), NEXUS_RESET), OK);
    assert_eq!(said(&mut all), [NEXUS_LOST, CAPACITY_CHANGED]);
    // A reset covers all earlier attentions.
    refresh(&all);
    assert_eq!(own.send(&scenes(&all), NEXUS_RESET), OK);
    assert_eq!(of_other.send(&scenes(&all), UNIT_RESET), OK);
    assert_eq!(said(&mut all), [UNIT_WAS_RESET]);
}

#[test]
fn functions_that_cannot_be_carried_out_are_told_apart() {
    const REJECTED: u8 = 11;
    const CLEAR_ACA: u32 = 2;
    let initiator = Initiator::new();
    let mut control = Control::start(&initiator.device);
    let others = [&initiator.scene];
    for function in [CLEAR_ACA, 8, 99, u32::MAX] {
        assert_eq!(control.send(&others, function), REJECTED, "{function}");
    }
    for function in [NEXUS_RESET, UNIT_RESET, CLEAR_ACA, 99] {
        control.begin_at(UnitAddress { target: 1, lun: 0 }, function);
        assert_eq!(control.end(&others), BAD_TARGET, "{function}");
    }
    let request = |kind: u32, function: u32| {
        [&kind.to_le_bytes()[..], &function.to_le_bytes(), &UNIT.bytes(), &[0; 8]].concat()
    };
    for bytes in [0, 3, 4, 8, 23] {
        let incomplete = &request(0, QUERY_TASK_SET)[..bytes];
        assert_eq!(control.answer(incomplete), [FAILURE], "{bytes} bytes");
    }
    for kind in [3, 99, u32::MAX] {
        assert_eq!(control.answer(&request(kind, QUERY_TASK_SET)), [FAILURE], "type {kind}");
    }
    assert_eq!(control.send(&others, QUERY_TASK_SET), OK);
}

/// Another initiator must not inherit what the one before it has set (SAM-5, section 6.3.3).
#[test]
fn a_reset_of_the_unit_restores_its_initial_state() {
    let mut all = [Initiator::new()];
    let pages = [0x1a, 8, 0x3f, 0, 255, 0];
    let before = all[0].good(&pages, &[], 255);
    let mut list = before.clone();
    list[0] = 0;
    list[2] = 0;
    // WCE and D_SENSE.
    list[4 + 2] &= !4;
    list[4 + 20 + 2] |= 4;
    let select = [0x15, 0x10, 0, 0, u8::try_from(list.len()).unwrap(), 0];
    all[0].good(&select, &list, 0);
    assert_ne!(all[0].good(&pages, &[], 255), before);
    all[0].good(&[0x1b, 0, 0, 0, 0, 0], &[], 0);
    let mut control = Control::start(&all[0].device);
    assert_eq!(control.send(&scenes(&all), UNIT_RESET), OK);
    for initiator in &mut all {
        while initiator.run(&[0; 6], &[], 0).sense[0] == 6 {}
        initiator.good(&[0; 6], &[], 0);
        assert_eq!(initiator.good(&pages, &[], 255), before);
    }
}
