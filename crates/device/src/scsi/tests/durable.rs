//! Changes that are stable when their command is answered.

use blockio::testing::{Event, RemoteStub};

use super::*;

const LUN: UnitAddress = UnitAddress { target: 0, lun: 7 };
const FUA: u8 = 0x08;

/// A unit on a disk that keeps a journal.
struct Journaled {
    initiator: Initiator,
    disk: RemoteStub,
}

impl Journaled {
    fn new(has_cache: bool) -> Self {
        let mut initiator = Initiator::new();
        let disk = RemoteStub::new(&[0; 64 * BLOCK]);
        let unit = UnitOptions { naa: [0x31; 8], write_cache: has_cache, ..options() };
        Initiator::scsi(&initiator.device).add_unit(LUN, disk.clone().source(), unit).unwrap();
        assert_eq!(initiator.run_at(LUN.bytes(), &[0; 6], &[], 0).sense, [6, 0x29, 0]);
        Self { initiator, disk }
    }

    /// Carries a command out. Returns the number of the changes so far that a power cut could undo.
    fn unstable_after(&mut self, cdb: &[u8], out: &[u8]) -> usize {
        let answer = self.initiator.run_at(LUN.bytes(), cdb, out, 0);
        assert_eq!((answer.response, answer.status), (0, 0), "{cdb:x?}: {answer:x?}");
        self.disk.journal().iter().fold(0, |unstable, event| match event {
            Event::Write(..) => unstable + 1,
            Event::Stable => unstable - 1,
            Event::Flush => 0,
        })
    }
}

fn compare_and_write(flags: u8) -> Vec<u8> {
    let mut cdb = cdb16(0x89, flags, 0, 0);
    cdb[13] = 1;
    cdb
}

fn unmap_list() -> Vec<u8> {
    let head = [0, 22, 0, 16, 0, 0, 0, 0];
    [&head[..], &2_u64.to_be_bytes(), &[0, 0, 0, 7, 0, 0, 0, 0]].concat()
}

/// Without a write cache each change is stable. With one, FUA and a verification make it so.
#[test]
fn changes_are_stable_without_a_cache_and_by_fua() {
    let cdb12 = |opcode, flags| vec![opcode, flags, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0];
    let block = vec![3; BLOCK];
    let pair = [[0; BLOCK], [7; BLOCK]].concat();
    for (cdb, out, is_always_stable) in [
        (vec![0x0a, 0, 0, 1, 1, 0], &block, false),
        (cdb10(0x2a, 0, 1, 1), &block, false),
        (cdb12(0xaa, 0), &block, false),
        (cdb16(0x8a, 0, 1, 1), &block, false),
        (cdb10(0x2a, FUA, 1, 1), &block, true),
        (cdb12(0xaa, FUA), &block, true),
        (cdb16(0x8a, FUA, 1, 1), &block, true),
        (cdb10(0x2e, 0, 1, 1), &block, true),
        (cdb10(0x2e, 2, 1, 1), &block, true),
        (cdb12(0xae, 0), &block, true),
        (cdb16(0x8e, 2, 1, 1), &block, true),
        (cdb10(0x41, 0, 1, 4), &block, false),
        (cdb16(0x93, 0, 1, 4), &block, false),
        (cdb16(0x93, 1, 1, 4), &vec![], false),
        (cdb16(0x93, 9, 1, 4), &vec![], false),
        (cdb10(0x42, 0, 0, 24), &unmap_list(), false),
        (compare_and_write(0), &pair, false),
        (compare_and_write(FUA), &pair, true),
    ] {
        for has_cache in [true, false] {
            let mut unit = Journaled::new(has_cache);
            let is_stable = unit.unstable_after(&cdb, out) == 0;
            assert_eq!(is_stable, is_always_stable || !has_cache, "{has_cache} {cdb:x?}");
            assert!(unit.disk.events() > 0, "{cdb:x?} changes nothing");
        }
    }
}

/// Commands that make earlier changes stable.
#[test]
fn earlier_changes_are_stable_after_a_synchronization_a_stop_or_a_read_of_the_medium() {
    for (cdb, out, is_stable) in [
        (cdb10(0x35, 0, 0, 0), 0, true),
        (cdb10(0x35, 2, 0, 1), 0, true),
        (cdb16(0x91, 0, 0, 0), 0, true),
        (vec![0x1b, 0, 0, 0, 0, 0], 0, true),
        (vec![0x1b, 0, 0, 0, 4, 0], 0, false),
        (vec![0x1b, 0, 0, 0, 1, 0], 0, false),
        (cdb10(0x2f, 0, 1, 1), 0, true),
        (cdb10(0x2f, 2, 1, 1), BLOCK, true),
        (cdb16(0x8f, 0, 1, 1), 0, true),
        (vec![0; 6], 0, false),
    ] {
        let mut unit = Journaled::new(true);
        assert_eq!(unit.unstable_after(&cdb10(0x2a, 0, 1, 1), &[3; BLOCK]), 1);
        let unstable = unit.unstable_after(&cdb, &vec![3; out]);
        assert_eq!(unstable == 0, is_stable, "{cdb:x?}");
    }
}

/// The initiator need not flush any longer.
#[test]
fn earlier_changes_are_stable_when_the_cache_is_off() {
    let mut unit = Journaled::new(true);
    assert_eq!(unit.unstable_after(&cdb10(0x2a, 0, 1, 1), &[3; BLOCK]), 1);
    let list = [&[0; 4][..], &[0x08, 18], &[0; 18]].concat();
    assert_eq!(unit.unstable_after(&[0x15, 0x10, 0, 0, 24, 0], &list), 0);
    assert_eq!(unit.unstable_after(&cdb10(0x2a, 0, 1, 1), &[4; BLOCK]), 0);
}
