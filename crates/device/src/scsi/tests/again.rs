//! Commands that an earlier process had taken, and may have carried out before it was killed.

use virtqueue::{GuestMemory, InflightRegion, LocalMemory, SplitQueue};

use super::*;
use crate::queue_setup::Ring;
use crate::testing::RING;

const PERHAPS_DONE: [u8; 3] = [0xb, 0x00, 0x06];

impl Initiator {
    /// Runs a command that an earlier process has taken, whatever it has done.
    fn run_again(&mut self, cdb: &[u8], out: &[u8]) -> Answer {
        let stopped = self.take_queue().begin_stop();
        let next_avail = self.scene.wait(&stopped);
        let chain = self.put(UNIT.bytes(), cdb, out, 0);
        self.leave(&chain, next_avail);
        self.queue = Some(self.scene.start_queue_of(&self.device, 2));
        self.end()
    }

    /// Makes a chain available that an earlier process has taken.
    fn leave(&mut self, chain: &[Desc], next_avail: u16) {
        let region = Arc::new(GuestMemory::anonymous(&[(0, 0x1000)]).unwrap());
        let region = InflightRegion::new(region, 1, RING.size).unwrap();
        let account = region.queue(0).unwrap();
        self.scene.offer_silently(chain);
        let memory = LocalMemory::new(Arc::clone(&self.scene.memory));
        let config = Ring { next_avail, ..RING }.config(false, false);
        let mut dying = SplitQueue::with_inflight(memory, config, &account).unwrap().0;
        assert!(dying.pop().unwrap().is_some());
        drop(dying);
        self.scene.inflight = Some(account);
    }
}

#[test]
fn buffers_for_events_are_not_told_of_as_requests() {
    for (queue, heard) in [(1, None), (2, Some("queue 2: Known { requests: 1 }"))] {
        let mut initiator = Initiator::new();
        let stopped = initiator.take_queue().begin_stop();
        let next_avail = initiator.scene.wait(&stopped);
        initiator.leave(&[Desc::writable(DATA, 16)], next_avail);
        let handle = initiator.scene.start_queue_of(&initiator.device, queue);
        let said = initiator.scene.events.take();
        assert_eq!(said.iter().map(String::as_str).collect::<Vec<_>>(), Vec::from_iter(heard));
        let _ = initiator.scene.wait(&handle.begin_stop());
    }
}

#[test]
fn what_fails_because_it_has_succeeded_before_is_said_to_be_in_doubt() {
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
    // Nor has a unit attention told the truth: that says that it was not carried out.
    if let Device::Scsi(scsi) = &initiator.device {
        scsi.access(UNIT).unwrap().refresh();
    }
    let answer = initiator.run_again(&compare_and_write, &pair);
    assert_eq!((answer.status, answer.sense), (2, PERHAPS_DONE));
    assert_eq!(initiator.sense(&[0; 6], &[], 0)[..2], [6, 0x2a], "nobody has heard of it");
    // A new command is in no doubt, also with a head that was in it.
    assert_eq!(initiator.sense(&compare_and_write, &pair, 0), [0xe, 0x1d, 0]);

    let (register, list) = reserve_out(0, 0, [0, 1]);
    assert_eq!(initiator.run_again(&register, &list).status, 0);
    let answer = initiator.run_again(&register, &list);
    assert_eq!((answer.status, answer.sense), (2, PERHAPS_DONE));
    assert_eq!(initiator.run(&register, &list, 0).status, 0x18);
    // What succeeds twice is only done.
    let (reserve, list) = reserve_out(1, 1, [1, 0]);
    for _ in 0..2 {
        assert_eq!(initiator.run_again(&reserve, &list).status, 0);
    }
}
