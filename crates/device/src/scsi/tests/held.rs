//! Commands that an earlier process took for a unit that is not there yet.

use super::limits::compare_and_write;
use super::sharing::{
    ABORT_TASK_SET, ABORTED, CLEAR_TASK_SET, Control, FAILURE, NEXUS_RESET, OK, RESET, UNIT_RESET,
    read, write,
};
use super::*;
use crate::queue::queue_setup::StopKind;

const BUSY: u8 = 0x08;
const INQUIRY: [u8; 6] = [0x12, 0, 0, 0, 36, 0];
const POWER_ON: [u8; 3] = [6, 0x29, 0];
const PERHAPS_DONE: [u8; 3] = [0xb, 0x00, 0x06];

impl Initiator {
    fn remove_unit(&mut self) {
        let removed = Self::scsi(&self.device).remove_unit(UNIT).unwrap();
        self.scene.turn(10);
        removed.close();
    }

    fn add_unit(&mut self) {
        let source = DiskSource::file(self.disk.path(), &DiskOptions::default()).unwrap();
        Self::scsi(&self.device).add_unit(UNIT, source, options()).unwrap();
    }

    fn held(&self) -> Vec<(UnitAddress, usize)> {
        Self::scsi(&self.device).held_requests()
    }

    /// Starts the queue of a driver with a command that an earlier process took for the unit.
    fn begin_held(&mut self, cdb: &[u8], out: &[u8], room: u32) {
        self.remove_unit();
        self.begin_again(cdb, out, room);
        self.scene.turn(10);
        assert!(!self.has_answer() && self.held() == [(UNIT, 1)], "it waits");
    }
}

#[test]
fn a_command_of_an_earlier_process_waits_for_its_unit() {
    let mut initiator = Initiator::new();
    for (cdb, out) in [(write(), vec![7; BLOCK]), (read(), Vec::new()), (vec![0; 6], Vec::new())] {
        let room = if cdb == read() { 512 } else { 0 };
        initiator.begin_held(&cdb, &out, room);
        let heard = initiator.scene.events.take();
        assert!(heard.contains(&"held: 0:1".to_owned()), "{heard:?}");
        initiator.add_unit();
        // Every unit begins with this attention, and drivers repeat the command.
        let answer = initiator.end();
        assert_eq!((answer.status, answer.sense), (2, POWER_ON), "{cdb:x?}");
        assert!(initiator.held().is_empty());
        assert_eq!(initiator.run(&cdb, &out, room).status, 0);
    }
    assert_eq!(initiator.on_disk(0), [7; BLOCK]);
}

/// Another queue may hear first that the unit is new.
#[test]
fn a_command_that_has_waited_for_its_unit_is_in_doubt_if_its_success_makes_it_fail() {
    for was_done in [false, true] {
        let mut initiator = Initiator::new();
        let pair = [[0; BLOCK], [7; BLOCK]].concat();
        if was_done {
            initiator.good(&compare_and_write(), &pair, 0);
        }
        initiator.begin_held(&compare_and_write(), &pair, 0);
        initiator.add_unit();
        assert!(initiator.unit().attentions.take().is_some());
        let answer = initiator.end();
        let expected = if was_done { (2, PERHAPS_DONE) } else { (0, [0; 3]) };
        assert_eq!((answer.status, answer.sense), expected);
        assert_eq!(initiator.on_disk(0), [7; BLOCK]);
    }
}

/// An interrupted scan asks for units that never existed.
#[test]
fn a_question_whether_there_is_a_unit_is_answered() {
    let mut initiator = Initiator::new();
    initiator.remove_unit();
    let other = UnitAddress { target: 0, lun: 9 };
    let naa = [0x30, 0, 0, 0, 0, 0, 0, 9];
    let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
    let there = UnitOptions { naa, ..options() };
    Initiator::scsi(&initiator.device).add_unit(other, source, there).unwrap();
    initiator.begin_again(&INQUIRY, &[], 36);
    assert_eq!(initiator.end().data[0], 0x7f, "no unit can be there");
    // A command that no earlier process took is not held either.
    assert_eq!(initiator.sense(&read(), &[], 512), [5, 0x25, 0]);
}

#[test]
fn a_command_without_its_unit_can_be_aborted() {
    for (function, response) in [
        (ABORT_TASK_SET, ABORTED),
        (CLEAR_TASK_SET, ABORTED),
        (UNIT_RESET, RESET),
        (NEXUS_RESET, RESET),
    ] {
        let mut initiator = Initiator::new();
        initiator.begin_held(&read(), &[], 512);
        let mut control = Control::start(&initiator.device);
        assert_eq!(control.send(&[&initiator.scene], function), OK, "{function}");
        assert_eq!(initiator.end().response, response, "{function}");
        assert!(initiator.held().is_empty());
        assert_ne!(control.send(&[&initiator.scene], function), OK, "there is no unit");
    }
}

/// The chains left in the ring may be carried out when it starts again.
#[test]
fn a_function_without_a_unit_is_not_complete_while_a_ring_is_bad() {
    for function in [ABORT_TASK_SET, CLEAR_TASK_SET, UNIT_RESET, NEXUS_RESET] {
        let mut initiator = Initiator::new();
        initiator.begin_held(&read(), &[], 512);
        let mut control = Control::start(&initiator.device);
        initiator.scene.driver.ring().put_avail_idx(1000);
        initiator.scene.kick();
        initiator.scene.turn(10);
        assert_eq!(initiator.held(), [(UNIT, 1)], "it still waits");
        assert_eq!(control.send(&[&initiator.scene], function), FAILURE, "{function}");
        assert!(initiator.held().is_empty());
    }
}

#[test]
fn a_queue_that_stops_leaves_a_command_without_its_unit_or_answers_it() {
    let mut initiator = Initiator::new();
    initiator.begin_held(&write(), &[9; BLOCK], 0);
    let stopped = initiator.take_queue().begin_stop(StopKind::KeepInflight);
    initiator.scene.wait(&stopped);
    assert!(!initiator.has_answer() && initiator.held().is_empty(), "it is left");
    initiator.start_queue();
    initiator.scene.turn(10);
    assert!(!initiator.has_answer() && initiator.held() == [(UNIT, 1)], "it waits again");
    let stopped = initiator.take_queue().begin_final_stop();
    initiator.scene.wait(&stopped);
    assert_eq!(initiator.end().status, BUSY);
    assert!(initiator.held().is_empty());
}
