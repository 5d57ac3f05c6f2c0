//! Commands that wait while another command has the medium to itself.

use std::sync::atomic::{AtomicUsize, Ordering};

use blockio::disk::{Direction, Limits, Requester};
use blockio::thread::ROUNDS_UNTIL_SERVED;

use super::blk_guests::{BLK_ERROR, BLK_OUT, BlkGuest};
use super::limits::{begin_write, compare_and_write};
use super::sharing::{
    ABORT_TASK_SET, ABORTED, CLEAR_TASK_SET, Control, NEXUS_RESET, OK, RESET, UNIT_RESET, hold,
    read, three, turn_until, write,
};
use super::*;
use crate::access::MediumGuard;
use crate::access::task_set::Tasks;
use crate::queue::queue_setup::StopKind;
use crate::scsi::outcome::TaskHandle;
use crate::scsi::task_wait::DiskTask;

const BUSY: u8 = 0x08;
const RESERVATION_CONFLICT: u8 = 0x18;

/// The time at which a command begins to wait for the medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waits {
    Begins,
    WantsItAlone,
    /// After a wait for limits.
    GoesOn,
}

const EACH: [Waits; 3] = [Waits::Begins, Waits::WantsItAlone, Waits::GoesOn];

/// Three initiators of a disk that is held; the second has begun a command that waits.
fn held_up(waits: Waits) -> ([Initiator; 3], MediumGuard) {
    held_up_of(three(), waits)
}

/// Like [`held_up`], with commands that are marked. The command with the medium waits itself.
fn held_up_and_marked(waits: Waits) -> ([Initiator; 3], MediumGuard) {
    let mut all = three();
    all[1].mark_commands();
    let (all, held) = held_up_of(all, waits);
    held.set_owner_waits(true);
    (all, held)
}

fn held_up_of(mut all: [Initiator; 3], waits: Waits) -> ([Initiator; 3], MediumGuard) {
    if waits == Waits::GoesOn {
        begin_write(&mut all[1]);
    }
    let held = hold(&mut all);
    match waits {
        Waits::Begins => all[1].begin(UNIT.bytes(), &read(), &[], 512),
        Waits::WantsItAlone => {
            all[1].begin(UNIT.bytes(), &compare_and_write(), &[0; 2 * BLOCK], 0);
        }
        Waits::GoesOn => all[1].unit().source.set_limits(&Limits::default()).unwrap(),
    }
    all[1].scene.turn(10);
    assert!(!all[1].has_answer(), "it waits");
    (all, held)
}

/// The command with the medium waits too, as after a failure of its disk.
#[test]
fn a_task_behind_a_waiting_task_is_ended_by_functions() {
    for (function, by, response) in [
        (ABORT_TASK_SET, 1, ABORTED),
        (CLEAR_TASK_SET, 0, RESET),
        (NEXUS_RESET, 1, RESET),
        (UNIT_RESET, 0, RESET),
    ] {
        for waits in EACH {
            for comes_before in [false, true] {
                let (mut all, held) = held_up(waits);
                let before = all[1].on_disk(0);
                let mut control = Control::start(&all[by].device);
                if !comes_before {
                    held.set_owner_waits(true);
                    all[1].scene.turn(10);
                }
                control.begin(function);
                let scenes = all.each_ref().map(|initiator| &initiator.scene);
                if comes_before {
                    for _ in 0..10 {
                        assert_eq!(control.turn(&scenes), None, "its turn comes soon");
                    }
                    held.set_owner_waits(true);
                }
                assert_eq!(control.end(&scenes), OK, "{function} {waits:?}");
                assert_eq!(all[1].end().response, response, "{function} {waits:?}");
                drop(held);
                all[1].scene.turn(10);
                assert_eq!(all[1].on_disk(0), before);
                assert_eq!(all[1].run(&read(), &[], 512).response, OK);
            }
        }
    }
}

#[test]
fn a_queue_that_stops_does_not_wait_for_one_that_waits_itself() {
    const ABORTED_COMMAND: [u8; 3] = [0x0b, 0, 0];
    for (waits, status, sense) in [
        (Waits::Begins, BUSY, [0; 3]),
        (Waits::WantsItAlone, BUSY, [0; 3]),
        (Waits::GoesOn, 2, ABORTED_COMMAND),
    ] {
        for is_held in [false, true] {
            let (mut all, held) = held_up(waits);
            held.set_owner_waits(is_held);
            all[1].scene.turn(10);
            let stopped = all[1].take_queue().begin_final_stop();
            if !is_held {
                all[1].scene.turn(10);
                assert_eq!(stopped.poll(), None, "{waits:?}: the one that has it is done soon");
                held.set_owner_waits(true);
            }
            all[1].scene.wait(&stopped);
            let answer = all[1].end();
            assert_eq!((answer.status, answer.sense), (status, sense), "{waits:?}");
        }
    }
}

#[test]
fn a_queue_that_pauses_waits_for_one_that_waits_itself_and_fails_nothing() {
    for waits in EACH {
        let (mut all, held) = held_up(waits);
        held.set_owner_waits(true);
        let stopped = all[1].take_queue().begin_stop(StopKind::Pause);
        all[1].scene.turn(10);
        assert_eq!(stopped.poll(), None, "{waits:?}");
        drop(held);
        turn_until(&mut all, |_| stopped.poll().is_some());
        let answer = all[1].end();
        assert_eq!((answer.status, answer.response), (0, OK), "{waits:?}");
    }
}

#[test]
fn commands_that_wait_are_left_in_the_inflight_region() {
    for waits in EACH {
        let (mut all, held) = held_up_and_marked(waits);
        let stopped = all[1].take_queue().begin_stop(StopKind::KeepInflight);
        all[1].scene.wait(&stopped);
        assert!(!all[1].has_answer(), "{waits:?}");
        let io = all[1].scene.thread.io();
        assert_eq!((io.tasks(), io.ops()), (0, 0));
        all[1].start_queue();
        all[1].scene.turn(10);
        assert!(!all[1].has_answer(), "{waits:?}: another has the medium");
        drop(held);
        turn_until(&mut all, |all| all[1].has_answer());
        let answer = all[1].end();
        assert_eq!((answer.status, answer.response), (0, OK), "{waits:?}");
    }
}

/// The command is answered as aborted, and not carried out again.
#[test]
fn a_command_that_is_aborted_while_it_waits_is_not_left() {
    for waits in EACH {
        let (mut all, held) = held_up_and_marked(waits);
        let mut control = Control::start(&all[1].device);
        let scenes = all.each_ref().map(|initiator| &initiator.scene);
        assert_eq!(control.send(&scenes, ABORT_TASK_SET), OK);
        let stopped = all[1].take_queue().begin_stop(StopKind::KeepInflight);
        all[1].scene.wait(&stopped);
        assert_eq!(all[1].end().response, ABORTED);
        drop(held);
        all[1].start_queue();
        all[1].scene.turn(10);
        assert!(!all[1].has_answer(), "{waits:?}");
    }
}

#[test]
fn a_unit_is_removed_though_commands_wait_for_one_that_waits_itself() {
    let (mut all, held) = held_up(Waits::Begins);
    held.set_owner_waits(true);
    let removed = Initiator::scsi(&all[1].device).remove_unit(UNIT).unwrap();
    turn_until(&mut all, |_| removed.is_unused());
    assert_eq!(all[1].end().status, BUSY);
}

#[test]
fn a_queue_of_virtio_blk_that_stops_does_not_wait_for_one_that_waits_itself() {
    for is_held in [false, true] {
        let mut all = three();
        let held = hold(&mut all);
        held.set_owner_waits(is_held);
        let mut guest = BlkGuest::beside(&all[0]);
        guest.begin(BLK_OUT, 1);
        guest.scene.turn(10);
        let stopped = guest.take_queue().begin_final_stop();
        if !is_held {
            guest.scene.turn(10);
            assert_eq!(stopped.poll(), None, "the one that has it is done soon");
            held.set_owner_waits(true);
        }
        guest.scene.wait(&stopped);
        assert_eq!(guest.end(), BLK_ERROR);
        drop(held);
        assert_eq!(all[0].on_disk(0), [0; BLOCK]);
    }
}

#[test]
fn a_shrink_does_not_wait_for_tasks_behind_a_waiting_task() {
    const OUT_OF_RANGE: [u8; 3] = [5, 0x21, 0];
    for waits in EACH {
        let (mut all, held) = held_up(waits);
        held.set_owner_waits(true);
        let access = all[0].access();
        let cut_off = std::thread::spawn(move || access.cut_off(0));
        turn_until(&mut all, |_| cut_off.is_finished());
        cut_off.join().unwrap();
        assert!(!all[1].has_answer(), "it waits");
        drop(held);
        turn_until(&mut all, |all| all[1].has_answer());
        let answer = all[1].end();
        assert_eq!((answer.status, answer.sense), (2, OUT_OF_RANGE), "{waits:?}");
    }
}

/// A command with the medium that its disk has failed reports its wait.
#[test]
fn one_that_has_the_medium_says_that_it_waits() {
    let (mut all, held) = held_up(Waits::Begins);
    let stopped = all[1].take_queue().begin_final_stop();
    let tasks = Tasks::new(0);
    let number = tasks.begin(0, (UNIT, None), 7, 1, || ()).unwrap();
    let unit = all[0].local_unit();
    let disk_task = DiskTask::new(&unit, TaskHandle { tasks: &tasks, number }).with_medium(&held);
    let goes_on = |disk_task: &DiskTask<'_>| {
        disk_task.on_wait();
        let goes_on = all[0].scene.thread.block_on(disk_task.on_resume(Direction::Write));
        goes_on.unwrap().unwrap();
        all[1].scene.turn(10);
        stopped.poll()
    };
    assert_eq!(goes_on(&disk_task), None, "it waits no more");
    disk_task.on_wait();
    all[1].scene.wait(&stopped);
    assert_eq!(all[1].end().status, BUSY);
    disk_task.on_cancel();
    assert!(tasks.suspended() == 0);
}

/// A reservation may have changed between the arrival of a command and its execution.
#[test]
fn a_reservation_holds_for_commands_that_wait_for_the_medium() {
    // The write cache is switched off, so no other command must write in the meantime.
    let mode_select = [0x15, 0x10, 0, 0, 24, 0].to_vec();
    let mut caching = vec![0; 24];
    caching[4..6].copy_from_slice(&[0x08, 18]);
    for (cdb, data) in [
        (write(), vec![0; BLOCK]),
        (compare_and_write(), vec![0; 2 * BLOCK]),
        (mode_select, caching),
    ] {
        let mut all = three();
        let (register, list) = reserve_out(0, 0, [0, 1]);
        all[0].good(&register, &list, 0);
        let held = hold(&mut all);
        all[1].begin(UNIT.bytes(), &cdb, &data, 0);
        all[1].scene.turn(10);
        let (reserve, list) = reserve_out(1, 1, [1, 0]);
        all[0].begin(UNIT.bytes(), &reserve, &list, 0);
        turn_until(&mut all, |all| all[0].has_answer());
        assert_eq!(all[0].end().status, 0);
        assert!(!all[1].has_answer(), "it waits");
        drop(held);
        turn_until(&mut all, |all| all[1].has_answer());
        assert_eq!(all[1].end().status, RESERVATION_CONFLICT, "{cdb:02x?}");
    }
}

/// A command that takes the medium waits for commands that have begun.
#[test]
fn commands_on_two_threads_do_not_wait_for_each_other() {
    const COMMANDS: u32 = 10_000;
    let disk = NamedTempFile::new().unwrap();
    disk.as_file().set_len(BLOCKS * BLOCK as u64).unwrap();
    let (disk, common) = (Arc::new(disk), options());
    let disk_options = DiskOptions { no_lock: true, ..DiskOptions::default() };
    let unmap = vec![0x42, 0, 0, 0, 0, 0, 0, 0, 8, 0];
    let kinds = [(compare_and_write(), vec![0; 2 * BLOCK]), (unmap, vec![0, 6, 0, 0, 0, 0, 0, 0])];
    // A thread that ends would be waited for: it takes turns until all have sent their commands.
    let busy = AtomicUsize::new(kinds.len());
    let drive = |place: u8, cdb: &[u8], data: &[u8]| {
        let mut options = common.clone();
        options.port[6] = place;
        let mut initiator = Initiator::on(Arc::clone(&disk), &disk_options, options);
        for _ in 0..COMMANDS {
            initiator.good(cdb, data, 0);
        }
        busy.fetch_sub(1, Ordering::Relaxed);
        while busy.load(Ordering::Relaxed) > 0 {
            initiator.scene.turn(1);
            std::thread::yield_now();
        }
    };
    std::thread::scope(|scope| {
        let drive = &drive;
        for (place, (cdb, data)) in (0..).zip(&kinds) {
            scope.spawn(move || drive(place, cdb, data));
        }
    });
}

#[test]
fn a_long_verify_holds_up_neither_others_nor_its_queue() {
    let begin = |bytes: u64| {
        let disk = NamedTempFile::new().unwrap();
        disk.as_file().set_len(bytes).unwrap();
        let disk_options = DiskOptions { no_lock: true, ..DiskOptions::default() };
        let options = options();
        let one = Initiator::on(Arc::new(disk), &disk_options, options.clone());
        let other = one.beside(&options);
        let mut all = [one, other];
        all[1].mark_commands();
        let blocks = u32::try_from(bytes / BLOCK as u64).unwrap();
        all[1].begin(UNIT.bytes(), &cdb16(0x8f, 0, 0, blocks), &[], 0);
        let reads = |all: &[Initiator]| all[1].scene.thread.io().stats().read.ops.get();
        turn_until(&mut all, |all| reads(all) > 0);
        all
    };
    let mut all = begin(64 << 20);
    let held = hold(&mut all);
    all[1].scene.turn(10);
    assert!(!all[1].has_answer(), "it waits in the middle of its blocks");
    drop(held);
    assert_eq!(all[1].end().status, 0);
    let mut all = begin(64 << 20);
    let held = hold(&mut all);
    let (cdb, list) = reserve_out(0, 0, [0, 1]);
    all[0].begin(UNIT.bytes(), &cdb, &list, 0);
    turn_until(&mut all, |all| all[0].has_answer());
    assert_eq!(all[0].end().status, 0);
    let (cdb, list) = reserve_out(1, 3, [1, 0]);
    all[0].begin(UNIT.bytes(), &cdb, &list, 0);
    turn_until(&mut all, |all| all[0].has_answer());
    assert_eq!(all[0].end().status, 0);
    drop(held);
    assert_eq!(all[1].end().status, RESERVATION_CONFLICT);
}

/// Commands that fill and compare the whole disk, far more than the queue could wait for.
#[test]
fn a_queue_that_stops_waits_for_one_piece_of_commands_that_move_much_data() {
    const BYTES: u64 = 1 << 30;
    const COMMANDS: u16 = 18;
    let blocks = |bytes: u64| u32::try_from(bytes / BLOCK as u64).unwrap();
    let verify = || (cdb16(0x8f, 0, 0, blocks(BYTES)), vec![]);
    let fill = || (cdb16(0x93, 0, 0, blocks(32 << 20)), vec![0x5a; BLOCK]);
    let zero = || (cdb16(0x93, 0, 0, blocks(32 << 20)), vec![0; BLOCK]);
    let each: [&dyn Fn() -> (Vec<u8>, Vec<u8>); 3] = [&verify, &fill, &zero];
    for kind in [StopKind::Final, StopKind::Pause, StopKind::KeepInflight] {
        let disk = NamedTempFile::new().unwrap();
        disk.as_file().set_len(BYTES).unwrap();
        let disk_options = DiskOptions { no_lock: true, ..DiskOptions::default() };
        let mut initiator = Initiator::on(Arc::new(disk), &disk_options, options());
        initiator.mark_commands();
        for number in 0..COMMANDS {
            let (cdb, data) = each[usize::from(number * 3 / COMMANDS)]();
            let place = DATA + u64::from(number) * 4096;
            let chain = initiator.put_at(place, UNIT.bytes(), &cdb, &data, 0);
            initiator.scene.offer(&chain);
        }
        // All wait in the ring, so a few rounds pop them. Each round may move a piece, and commands
        // that had come one by one could be done too soon.
        while initiator.queue.as_ref().unwrap().next_avail() < COMMANDS {
            initiator.scene.turn(1);
        }
        assert!(!initiator.has_answer(), "a command was done too soon");
        let moved = |initiator: &Initiator| {
            let stats = initiator.scene.thread.io().stats();
            stats.read.bytes.get() + stats.write.bytes.get()
        };
        let before = moved(&initiator);
        let stopped = initiator.take_queue().begin_stop(kind);
        initiator.scene.wait(&stopped);
        let after = moved(&initiator) - before;
        // The loop may look for the stop after some rounds, each of which moves at most 1 MiB.
        let until_seen = u64::from(ROUNDS_UNTIL_SERVED) << 20;
        assert!(after <= until_seen, "{kind:?} waited for {after} bytes");
        for _ in 0..COMMANDS {
            assert_eq!(initiator.end().status, BUSY, "{kind:?}");
        }
    }
}

/// The driver sends the command again.
#[test]
fn a_queue_that_stops_and_leaves_nothing_answers_a_giant_command_with_busy() {
    const BUFFERS: u64 = 50;
    let buffer = Desc::writable(1 << 20, 2 << 20);
    let bytes = BUFFERS * u64::from(buffer.len);
    for kind in [StopKind::DriverGone, StopKind::Final, StopKind::Pause] {
        let disk = NamedTempFile::new().unwrap();
        disk.as_file().set_len(bytes).unwrap();
        let mut initiator = Initiator::on(Arc::new(disk), &DiskOptions::default(), options());
        let blocks = u32::try_from(bytes / BLOCK as u64).unwrap();
        let mut chain = initiator.put(UNIT.bytes(), &cdb16(0x88, 0, 0, blocks), &[], 0);
        chain.extend((0..BUFFERS).map(|_| buffer));
        initiator.scene.offer(&chain);
        let read = |initiator: &Initiator| initiator.scene.thread.io().stats().read.bytes.get();
        while read(&initiator) == 0 {
            initiator.scene.turn(1);
        }
        let stopped = initiator.take_queue().begin_stop(kind);
        initiator.scene.wait(&stopped);
        assert!(read(&initiator) < bytes - (64 << 20), "{kind:?}: {}", read(&initiator));
        assert!(initiator.has_answer());
        let mut status = [0];
        initiator.scene.memory.read(RESPONSE + 10, &mut status).unwrap();
        assert_eq!(status, [BUSY], "{kind:?}");
    }
}

/// The command waits for its turn among the commands that move much data.
#[test]
fn no_piece_of_a_command_is_moved_that_was_aborted_before_its_turn() {
    let fill = (cdb16(0x93, 0, 0, 8), vec![0x5a; BLOCK]);
    let zero = (cdb16(0x93, 0, 0, 8), vec![0; BLOCK]);
    let unmap = (cdb16(0x93, 8, 0, 8), vec![0; BLOCK]);
    for (cdb, data) in [fill, zero, unmap] {
        let mut initiator = Initiator::new();
        initiator.good(&write(), &[1; BLOCK], 0);
        let local = initiator.local_unit();
        // A part that was read keeps the turn until it is dropped.
        let part = initiator.scene.thread.block_on(local.disk.read_part(0, 512)).unwrap().unwrap();
        initiator.begin(UNIT.bytes(), &cdb, &data, 0);
        initiator.scene.turn(10);
        assert!(!initiator.has_answer(), "{cdb:x?}: it waits");
        let stats = Arc::clone(initiator.scene.thread.io().stats());
        let ops = || [&stats.read, &stats.write, &stats.deallocate].map(|ops| ops.ops.get());
        let before = ops();
        let mut control = Control::start(&initiator.device);
        control.begin(ABORT_TASK_SET);
        for _ in 0..10 {
            assert_eq!(control.turn(&[&initiator.scene]), None, "{cdb:x?}: its turn comes soon");
        }
        drop(part);
        assert_eq!(control.end(&[&initiator.scene]), OK, "{cdb:x?}");
        assert_eq!(initiator.end().response, ABORTED, "{cdb:x?}");
        assert_eq!((ops(), initiator.on_disk(0)), (before, vec![1; BLOCK]), "{cdb:x?}");
    }
}
