//! Tasks that wait for the limits of their disk, and for which no other task waits.

use blockio::disk::{Limits, Rate, Rates};

use super::blk_guests::{BLK_ERROR, BLK_OUT, BlkGuest};
use super::sharing::{
    ABORT_TASK_SET, ABORTED, CLEAR_TASK_SET, Control, NEXUS_RESET, OK, RESET, UNIT_RESET, hold,
    hold_with, read, switch_cache, three, turn_until, write,
};
use super::*;
use crate::stats::ErrorCause;

const RESERVATION_CONFLICT: u8 = 0x18;
const CAUSES: [ErrorCause; 3] = [ErrorCause::Disk, ErrorCause::Reserved, ErrorCause::Unavailable];

/// A limit of one byte per second, or none.
pub(super) fn limit(is_slow: bool) -> Limits {
    let slow = Rates { total: Some(Rate { per_second: 1, burst: None }), ..Rates::default() };
    if is_slow { Limits { bytes: slow, ..Limits::default() } } else { Limits::default() }
}

/// Begins a write that waits for limits, after a write that does not.
pub(super) fn begin_write(initiator: &mut Initiator) {
    initiator.unit().source.set_limits(&limit(true)).unwrap();
    initiator.good(&write(), &[1; BLOCK], 0);
    initiator.begin(UNIT.bytes(), &write(), &[2; BLOCK], 0);
    initiator.scene.turn(10);
    assert!(!initiator.has_answer(), "it waits");
}

/// COMPARE AND WRITE of the first block.
pub(super) fn compare_and_write() -> Vec<u8> {
    let mut cdb = cdb16(0x89, 0, 0, 0);
    cdb[13] = 1;
    cdb
}

/// Three initiators; the second has begun a write that waits.
fn throttled() -> [Initiator; 3] {
    let mut all = three();
    begin_write(&mut all[1]);
    all
}

/// Runs a command at one initiator, while all of them take turns.
fn run(all: &mut [Initiator], place: usize, cdb: &[u8], out: &[u8]) -> Answer {
    all[place].begin(UNIT.bytes(), cdb, out, 0);
    turn_until(all, |all| all[place].has_answer());
    all[place].end()
}

/// Reserves the disk for the first initiator, so that no other may write.
fn reserve(all: &mut [Initiator]) {
    for (action, kind, keys) in [(0, 0, [0, 1]), (1, 1, [1, 0])] {
        let (cdb, list) = reserve_out(action, kind, keys);
        assert_eq!(run(all, 0, &cdb, &list).status, 0);
    }
}

#[test]
fn functions_end_tasks_that_wait_for_limits() {
    for (function, by, response) in [
        (ABORT_TASK_SET, 1, ABORTED),
        (CLEAR_TASK_SET, 1, ABORTED),
        (CLEAR_TASK_SET, 0, RESET),
        (NEXUS_RESET, 1, RESET),
        (UNIT_RESET, 0, RESET),
    ] {
        let mut all = throttled();
        // A second one waits for its turn.
        let chain = all[1].put(UNIT.bytes(), &write(), &[3; BLOCK], 0);
        all[1].scene.offer(&chain);
        all[1].scene.turn(10);
        let mut control = Control::start(&all[by].device);
        let scenes: Vec<&Scene> = all.iter().map(|initiator| &initiator.scene).collect();
        assert_eq!(control.send(&scenes, function), OK, "{function}");
        for _ in 0..2 {
            assert_eq!(all[1].end().response, response, "{function}");
        }
        assert_eq!(all[1].on_disk(0), [1; BLOCK]);
    }
}

#[test]
fn a_reservation_holds_for_tasks_that_wait_for_limits() {
    let mut all = throttled();
    reserve(&mut all);
    assert!(!all[1].has_answer(), "it waits");
    all[1].unit().source.set_limits(&limit(false)).unwrap();
    assert_eq!(all[1].end().status, RESERVATION_CONFLICT);
    assert_eq!(all[1].on_disk(0), [1; BLOCK]);
}

/// One write has waited for the medium before, and goes another way since.
#[test]
fn a_write_that_waits_while_the_cache_is_switched_off_is_stable_when_it_is_answered() {
    for waits_for_medium in [false, true] {
        let mut all = three();
        if waits_for_medium {
            all[1].unit().source.set_limits(&limit(true)).unwrap();
            all[1].good(&write(), &[1; BLOCK], 0);
            let held = hold(&mut all);
            all[1].begin(UNIT.bytes(), &write(), &[2; BLOCK], 0);
            all[1].scene.turn(10);
            drop(held);
            all[1].scene.turn(10);
        } else {
            begin_write(&mut all[1]);
        }
        let flushes = |all: &[Initiator]| all[1].scene.thread.io().stats().flush.ops.get();
        switch_cache(&mut all, 0, false);
        let before = flushes(&all);
        assert!(!all[1].has_answer(), "it waits");
        all[1].unit().source.set_limits(&limit(false)).unwrap();
        assert_eq!(all[1].end().status, 0);
        assert_eq!(flushes(&all), before + 1, "{waits_for_medium}");
        assert_eq!(all[1].on_disk(0), [2; BLOCK]);
    }
}

#[test]
fn a_task_for_the_whole_disk_does_not_wait_for_limited_tasks() {
    let mut all = throttled();
    let data = [[1; BLOCK], [7; BLOCK]].concat();
    assert_eq!(run(&mut all, 0, &compare_and_write(), &data).status, 0);
    assert!(!all[1].has_answer(), "it waits");
    all[1].unit().source.set_limits(&limit(false)).unwrap();
    assert_eq!(all[1].end().status, 0);
    assert_eq!(all[1].on_disk(0), [2; BLOCK]);
}

#[test]
fn a_limited_task_for_the_medium_delays_no_task() {
    let mut all = three();
    all[1].unit().source.set_limits(&limit(true)).unwrap();
    all[1].good(&write(), &[1; BLOCK], 0);
    let begin = |all: &mut [Initiator]| {
        let data = [[1; BLOCK], [7; BLOCK]].concat();
        all[1].begin(UNIT.bytes(), &compare_and_write(), &data, 0);
        all[1].scene.turn(10);
        assert!(!all[1].has_answer(), "it waits");
        all[0].begin(UNIT.bytes(), &read(), &[], 512);
        turn_until(all, |all| all[0].has_answer());
        assert_eq!(all[0].end().status, 0, "it has the medium already");
    };
    begin(&mut all);
    let mut control = Control::start(&all[1].device);
    let scenes = all.each_ref().map(|initiator| &initiator.scene);
    assert_eq!(control.send(&scenes, ABORT_TASK_SET), OK);
    assert_eq!(all[1].end().response, ABORTED);
    begin(&mut all);
    let stopped = all[1].take_queue().begin_final_stop();
    turn_until(&mut all, |_| stopped.poll().is_some());
    assert_eq!(all[1].end().status, 0);
    assert_eq!(all[1].on_disk(0), [7; BLOCK]);
}

/// A command with the medium to itself would make all other commands wait for its limits.
#[test]
fn one_that_has_the_medium_has_waited_for_limits_before() {
    let mut all = three();
    let slow = Rates { read: Some(Rate { per_second: 1, burst: None }), ..Rates::default() };
    let limits = Limits { bytes: slow, ..Limits::default() };
    all[1].unit().source.set_limits(&limits).unwrap();
    // The first read may begin at once; later ones wait for long.
    let data = [[0; BLOCK], [7; BLOCK]].concat();
    assert_eq!(run(&mut all, 1, &compare_and_write(), &data).status, 0);
    assert_eq!(all[1].on_disk(0), [7; BLOCK]);
}

#[test]
fn a_disk_becomes_smaller_while_tasks_wait_for_limits() {
    let mut all = three();
    begin_write(&mut all[1]);
    let mut guest = BlkGuest::beside(&all[0]);
    guest.limit(&limit(true));
    assert_eq!(guest.run(BLK_OUT, 1), 0);
    guest.begin(BLK_OUT, 3);
    guest.scene.turn(10);
    let access = all[0].access();
    let cut_off = std::thread::spawn(move || access.cut_off(0));
    turn_until(&mut all, |_| {
        guest.scene.turn(1);
        cut_off.is_finished()
    });
    cut_off.join().unwrap();
    guest.limit(&limit(false));
    assert_eq!(guest.end(), BLK_ERROR);
    all[1].unit().source.set_limits(&limit(false)).unwrap();
    assert_eq!(all[1].end().status, 2);
    assert_eq!(all[1].on_disk(0), [1; BLOCK]);
}

/// The blocks are gone, but the medium has no error.
#[test]
fn commands_that_have_waited_find_that_their_blocks_are_gone() {
    const OUT_OF_RANGE: [u8; 3] = [5, 0x21, 0];
    let mut descriptor = [[0, 22, 0, 16, 0, 0, 0, 0], [0; 8], [0; 8]].concat();
    descriptor[19] = 1;
    let block = vec![2; BLOCK];
    for (cdb, out, room) in [
        (read(), Vec::new(), 512),
        (write(), block.clone(), 0),
        (cdb10(0x2e, 0, 0, 1), block.clone(), 0),
        (cdb10(0x2f, 0, 0, 1), Vec::new(), 0),
        (cdb10(0x41, 0, 0, 1), vec![0; BLOCK], 0),
        (cdb10(0x41, 0, 0, 1), block.clone(), 0),
        (vec![0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], descriptor, 0),
        (compare_and_write(), [block.clone(), block].concat(), 0),
    ] {
        let mut all = three();
        let source = |all: &[Initiator]| all[1].unit().source.clone();
        source(&all).set_limits(&limit(true)).unwrap();
        all[1].good(&write(), &[1; BLOCK], 0);
        all[1].begin(UNIT.bytes(), &cdb, &out, room);
        all[1].scene.turn(10);
        assert!(!all[1].has_answer(), "it waits");
        source(&all).cut_off(0);
        source(&all).set_limits(&limit(false)).unwrap();
        turn_until(&mut all, |all| all[1].has_answer());
        let answer = all[1].end();
        assert_eq!((answer.status, answer.sense), (2, OUT_OF_RANGE), "{cdb:02x?}");
    }
}

#[test]
fn guests_of_virtio_blk_that_wait_for_limits_heed_reservations() {
    let mut all = three();
    let mut guest = BlkGuest::beside(&all[0]);
    guest.limit(&limit(true));
    assert_eq!(guest.run(BLK_OUT, 1), 0);
    guest.begin(BLK_OUT, 3);
    guest.scene.turn(10);
    for (action, kind, keys) in [(0, 0, [0, 1]), (1, 1, [1, 0])] {
        let (cdb, list) = reserve_out(action, kind, keys);
        all[0].begin(UNIT.bytes(), &cdb, &list, 0);
        turn_until(&mut all, |all| {
            guest.scene.turn(1);
            all[0].has_answer()
        });
        assert_eq!(all[0].end().status, 0);
    }
    guest.limit(&limit(false));
    assert_eq!(guest.end(), BLK_ERROR);
    assert_eq!(guest.errors(CAUSES), [0, 1, 0]);
    assert_eq!(all[0].on_disk(0), [1; BLOCK]);
}

/// The initiator may have the disk for as long as its command waits for a retry.
#[test]
fn a_stop_ends_requests_that_have_waited_for_limits_and_wait_for_an_initiator() {
    let mut all = three();
    let mut guest = BlkGuest::beside(&all[0]);
    guest.limit(&limit(true));
    assert_eq!(guest.run(BLK_OUT, 1), 0);
    guest.begin(BLK_OUT, 3);
    guest.scene.turn(10);
    let held = hold_with(&mut all, || guest.scene.turn(1));
    held.set_owner_waits(true);
    guest.limit(&limit(false));
    guest.scene.turn(20);
    let stopped = guest.take_queue().begin_final_stop();
    guest.scene.wait(&stopped);
    assert_eq!(guest.end(), BLK_ERROR);
    assert_eq!(guest.errors(CAUSES), [0, 0, 1]);
    assert_eq!(all[0].on_disk(0), [1; BLOCK]);
    drop(held);
}

/// It has passed its checks before.
#[test]
fn a_command_that_has_waited_for_limits_finds_its_unit_stopped() {
    let mut all = three();
    all[1].unit().source.set_limits(&limit(true)).unwrap();
    all[1].good(&write(), &[1; BLOCK], 0);
    let data = [[1; BLOCK], [7; BLOCK]].concat();
    all[1].begin(UNIT.bytes(), &compare_and_write(), &data, 0);
    all[1].scene.turn(10);
    assert!(!all[1].has_answer(), "it waits");
    all[0].access().set_stopped(true);
    all[1].unit().source.set_limits(&limit(false)).unwrap();
    turn_until(&mut all, |all| all[1].has_answer());
    let answer = all[1].end();
    assert_eq!((answer.status, answer.sense), (2, [2, 4, 2]));
    assert_eq!(all[1].on_disk(0), [1; BLOCK]);
}
