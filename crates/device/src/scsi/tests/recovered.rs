//! Commands that an earlier process took, and may have carried out before it was killed.

use virtqueue::{LocalMemory, SplitQueue};

use super::limits::{begin_write, limit};
use super::sharing::read;
use super::*;
use crate::queue::queue_setup::{Ring, StopKind};
use crate::testing::RING;

const PERHAPS_DONE: [u8; 3] = [0xb, 0x00, 0x06];

impl Initiator {
    /// Runs a command that an earlier process took and may have carried out.
    fn run_again(&mut self, cdb: &[u8], out: &[u8]) -> Answer {
        self.begin_again(cdb, out, 0);
        self.end()
    }

    /// Starts a queue with a command that an earlier process took.
    pub(super) fn begin_again(&mut self, cdb: &[u8], out: &[u8], room: u32) {
        let stopped = self.take_queue().begin_final_stop();
        let next_avail = self.scene.wait(&stopped);
        let chain = self.put(UNIT.bytes(), cdb, out, room);
        self.make_recovered(&chain, next_avail);
        self.start_queue();
    }

    /// Makes a chain available that an earlier process took.
    fn make_recovered(&mut self, chain: &[Desc], base: u32) {
        let next_avail = u16::try_from(base).unwrap();
        let account = self.scene.mark_requests();
        self.scene.offer_without_kick(chain);
        let memory = LocalMemory::new(Arc::clone(&self.scene.memory));
        let config = Ring { next_avail, ..RING }.config(false, false);
        let mut dying = SplitQueue::with_inflight(memory, config, &account).unwrap().0;
        assert!(dying.pop().unwrap().is_some());
    }

    /// Marks commands from now on.
    pub(super) fn mark_commands(&mut self) {
        let stopped = self.take_queue().begin_final_stop();
        self.scene.wait(&stopped);
        self.scene.mark_requests();
        self.start_queue();
    }

    /// Starts the queue, which has stopped.
    pub(super) fn start_queue(&mut self) {
        self.queue = Some(self.scene.start_queue_of(&self.device, 2));
    }
}

#[test]
fn buffers_for_events_are_not_told_of_as_requests() {
    for (queue, heard) in [(1, None), (2, Some("queue 2: Known { requests: 1 }"))] {
        let mut initiator = Initiator::new();
        let stopped = initiator.take_queue().begin_final_stop();
        let next_avail = initiator.scene.wait(&stopped);
        initiator.make_recovered(&[Desc::writable(DATA, 16)], next_avail);
        let handle = initiator.scene.start_queue_of(&initiator.device, queue);
        let said = initiator.scene.events.take();
        assert_eq!(said.iter().map(String::as_str).collect::<Vec<_>>(), Vec::from_iter(heard));
        let _ = initiator.scene.wait(&handle.begin_final_stop());
    }
}

#[test]
fn a_failure_after_an_earlier_success_is_reported_as_doubtful() {
    let mut initiator = Initiator::new();
    let compare_and_write = {
        let mut cdb = cdb16(0x89, 0, 3, 0);
        cdb[13] = 1;
        cdb
    };
    let pair = [[0; BLOCK], [7; BLOCK]].concat();
    // Not carried out before: it is now.
    assert_eq!(initiator.run_again(&compare_and_write, &pair).status, 0);
    assert_eq!(initiator.on_disk(3), [7; BLOCK]);
    // Carried out before.
    let answer = initiator.run_again(&compare_and_write, &pair);
    assert_eq!((answer.status, answer.sense), (2, PERHAPS_DONE));
    // A unit attention would be wrong too: it implies that the command was not carried out.
    let Device::Scsi(scsi) = &initiator.device else { panic!("it is a virtio-scsi device") };
    scsi.access(UNIT).unwrap().refresh();
    let answer = initiator.run_again(&compare_and_write, &pair);
    assert_eq!((answer.status, answer.sense), (2, PERHAPS_DONE));
    assert_eq!(initiator.sense(&[0; 6], &[], 0)[..2], [6, 0x2a], "nobody has heard of it");
    // A new command is not in doubt, even with a head that was.
    assert_eq!(initiator.sense(&compare_and_write, &pair, 0), [0xe, 0x1d, 0]);

    let (register, list) = reserve_out(0, 0, [0, 1]);
    assert_eq!(initiator.run_again(&register, &list).status, 0);
    let answer = initiator.run_again(&register, &list);
    assert_eq!((answer.status, answer.sense), (2, PERHAPS_DONE));
    assert_eq!(initiator.run(&register, &list, 0).status, 0x18);
    // A command that succeeds twice is only done.
    let (reserve, list) = reserve_out(1, 1, [1, 0]);
    for _ in 0..2 {
        assert_eq!(initiator.run_again(&reserve, &list).status, 0);
    }
}

/// For the next process, a command that was left during its wait may have written.
#[test]
fn a_compare_and_write_that_was_left_is_in_doubt_when_it_does_not_compare() {
    let mut initiator = Initiator::new();
    initiator.mark_commands();
    let mut compare_and_write = cdb16(0x89, 0, 0, 0);
    compare_and_write[13] = 1;
    begin_write(&mut initiator);
    let stopped = initiator.take_queue().begin_stop(StopKind::KeepInflight);
    initiator.scene.wait(&stopped);
    initiator.unit().source.set_limits(&limit(false)).unwrap();
    initiator.start_queue();
    assert_eq!(initiator.end().status, 0, "the write was left, too");
    initiator.unit().source.set_limits(&limit(true)).unwrap();
    initiator.good(&read(), &[], 512);
    let pair = [[0; BLOCK], [7; BLOCK]].concat();
    initiator.begin(UNIT.bytes(), &compare_and_write, &pair, 0);
    initiator.scene.turn(10);
    let stopped = initiator.take_queue().begin_stop(StopKind::KeepInflight);
    initiator.scene.wait(&stopped);
    assert!(!initiator.has_answer(), "it waits");
    initiator.unit().source.set_limits(&limit(false)).unwrap();
    initiator.start_queue();
    let answer = initiator.end();
    assert_eq!((answer.status, answer.sense), (2, PERHAPS_DONE));
    assert_eq!(initiator.on_disk(0), [2; BLOCK]);
}
