//! Events, and buffers for them.

use super::*;

const EVENT_BYTES: u32 = 16;
/// The most events that wait for a buffer.
const KEPT: usize = 64;

/// The event queue of the initiator's device.
struct EventQueue {
    scene: Scene,
    handle: QueueHandle,
}

impl EventQueue {
    fn start(device: &Device) -> Self {
        let scene = Scene::new();
        let handle = scene.start_queue_of(device, 1);
        Self { scene, handle }
    }

    /// Offers a buffer, and returns the event in it.
    fn take(&mut self) -> [u8; EVENT_BYTES as usize] {
        self.scene.offer(&[Desc::writable(DATA, EVENT_BYTES)]);
        assert_eq!(self.scene.answer().bytes, EVENT_BYTES);
        let mut event = [0; EVENT_BYTES as usize];
        self.scene.memory.read(DATA, &mut event).unwrap();
        event
    }
}

/// CAPACITY DATA HAS CHANGED on the unit, as an event.
fn capacity_changed(flags: u8) -> [u8; EVENT_BYTES as usize] {
    [3, 0, 0, flags, 1, 0, 0, 1, 0, 0, 0, 0, 0x2a, 9, 0, 0]
}

#[test]
fn the_first_event_after_some_that_were_missed_says_so() {
    const MISSED: u8 = 0x80;
    let initiator = Initiator::new();
    let mut queue = EventQueue::start(&initiator.device);
    (0..=KEPT).for_each(|_| initiator.access().refresh());
    queue.scene.turn(5);
    assert_eq!(queue.take(), capacity_changed(MISSED));
    for _ in 1..KEPT {
        assert_eq!(queue.take(), capacity_changed(0));
    }
    // Nothing is left: the next buffer waits for the next event.
    queue.scene.offer(&[Desc::writable(DATA, EVENT_BYTES)]);
    queue.scene.turn(20);
    assert_eq!(queue.scene.driver.take_used(), None);
    initiator.access().refresh();
    assert_eq!(queue.scene.answer().bytes, EVENT_BYTES);
    let mut event = [0; EVENT_BYTES as usize];
    queue.scene.memory.read(DATA, &mut event).unwrap();
    assert_eq!(event, capacity_changed(0));
}

#[test]
fn a_new_driver_has_missed_nothing_of_the_last_one() {
    let initiator = Initiator::new();
    let mut queue = EventQueue::start(&initiator.device);
    (0..=KEPT).for_each(|_| initiator.access().refresh());
    initiator.device.reset();
    initiator.device.set_features(split_features(&initiator.device)).unwrap();
    initiator.access().refresh();
    assert_eq!(queue.take(), capacity_changed(0));
    queue.scene.offer(&[Desc::writable(DATA, EVENT_BYTES)]);
    queue.scene.turn(20);
    assert_eq!(queue.scene.driver.take_used(), None, "only the last event is its own");
}

#[test]
fn no_event_is_lost_in_a_buffer_that_does_not_take_it() {
    let initiator = Initiator::new();
    let mut queue = EventQueue::start(&initiator.device);
    initiator.access().refresh();
    let bad: [&[Desc]; 3] = [
        &[Desc::writable(DATA, EVENT_BYTES - 1)],
        &[Desc::writable(DATA, EVENT_BYTES), Desc::writable(1 << 40, 1)],
        &[Desc::writable(DATA, EVENT_BYTES), Desc::readable(DATA, 1)],
    ];
    for chain in bad {
        queue.scene.offer(chain);
        assert_eq!(queue.scene.answer().bytes, 0, "{chain:?}");
    }
    assert_eq!(queue.take(), capacity_changed(0));
    // A held buffer is returned at a stop.
    queue.scene.offer(&[Desc::writable(DATA, EVENT_BYTES)]);
    queue.scene.turn(5);
    queue.scene.wait(&queue.handle.begin_final_stop());
    assert_eq!(queue.scene.answer().bytes, EVENT_BYTES);
    let mut event = [0xee; EVENT_BYTES as usize];
    queue.scene.memory.read(DATA, &mut event).unwrap();
    assert_eq!(event, [0; EVENT_BYTES as usize]);
}

/// Linux looks for a new target at LUN 0 alone.
#[test]
fn units_that_come_and_go_are_announced_by_their_addresses() {
    const RESCAN: u8 = 1;
    const REMOVED: u8 = 2;
    let initiator = Initiator::new();
    let mut queue = EventQueue::start(&initiator.device);
    let scsi = Initiator::scsi(&initiator.device);
    let expect = |queue: &mut EventQueue, (target, lun): (u8, u8), reason: u8| {
        let expected = [1, 0, 0, 0, 1, target, 0, lun, 0, 0, 0, 0, reason, 0, 0, 0];
        assert_eq!(queue.take(), expected, "unit {target}:{lun}");
    };
    for (number, (target, lun, is_first)) in
        (1..).zip([(0, 9, false), (1, 5, true), (1, 6, false), (200, 255, true), (0, 2, false)])
    {
        let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
        let unit = UnitOptions { naa: [0x31, 0, 0, 0, 0, 0, 0, number], ..options() };
        scsi.add_unit(UnitAddress { target, lun: lun.into() }, source, unit).unwrap();
        expect(&mut queue, (target, if is_first { 0 } else { lun }), RESCAN);
    }
    for (target, lun) in [(1, 5), (1, 6), (200, 255), (0, 9)] {
        let address = UnitAddress { target, lun: lun.into() };
        assert!(scsi.remove_unit(address).is_some());
        expect(&mut queue, (target, lun), REMOVED);
    }
}
