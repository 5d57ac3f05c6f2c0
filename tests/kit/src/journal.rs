//! The content of a disk with all changes from its start, so that a test can cut the power at any
//! moment.
//!
//! A device keeps each change that a completed flush covers: the change was answered before the
//! flush began. Every other change may be there, may be missing, or may be torn at a sector.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::random::Random;

/// The bytes that a device writes as a unit.
const SECTOR: usize = 512;

/// A change of a disk.
#[derive(Clone, Debug)]
pub enum Change {
    /// Bytes at an offset. Zeroes and discarded bytes are writes of zeroes.
    Write(u64, Vec<u8>),
    /// A new length of the file.
    Size(u64),
    /// A request to make changes stable.
    Flush,
}

/// A change, from its request to its answer, by the clock of its journal.
#[derive(Clone, Debug)]
struct Entry {
    change: Change,
    begun: usize,
    /// The time of the answer; `None` before it.
    ended: Option<usize>,
    /// True if the answer makes the change stable.
    is_forced: bool,
}

#[derive(Debug, Default)]
struct State {
    first: Vec<u8>,
    content: Vec<u8>,
    entries: Vec<Entry>,
    clock: usize,
}

impl State {
    fn tick(&mut self) -> usize {
        self.clock += 1;
        self.clock
    }
}

/// The content and the changes of a disk, for the thread that serves it and the thread that tests.
#[derive(Debug)]
pub struct Journal(Mutex<State>);

/// A loss of power.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// Its time, by the journal's clock.
    pub at: usize,
    /// Percentage of the changes that survive without a flush.
    pub kept_percent: u64,
    /// True if the device carries flushes out.
    pub heeds_flushes: bool,
}

impl Journal {
    /// A disk with this content.
    #[must_use]
    pub fn new(content: Vec<u8>) -> Self {
        let state = State { first: content.clone(), content, ..State::default() };
        Self(Mutex::new(state))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The current time. No two callers get the same.
    pub fn now(&self) -> usize {
        self.state().tick()
    }

    /// The size of the disk in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.state().content.len() as u64
    }

    /// Reads bytes at an offset, up to the end of the disk.
    #[must_use]
    pub fn read(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let state = self.state();
        let start = place(offset).min(state.content.len());
        state.content[start..(start + bytes).min(state.content.len())].to_vec()
    }

    /// Makes a change, and returns its number for [`end`](Self::end). With `is_forced` its answer
    /// promises that it is stable.
    pub fn begin(&self, change: Change, is_forced: bool) -> usize {
        let mut state = self.state();
        apply(&mut state.content, &change, |_| true);
        let begun = state.tick();
        state.entries.push(Entry { change, begun, ended: None, is_forced });
        state.entries.len() - 1
    }

    /// Records that a change is about to be answered.
    pub fn end(&self, number: usize) {
        let mut state = self.state();
        let ended = state.tick();
        state.entries[number].ended = Some(ended);
    }

    /// The number of writes, the number of flushes, and the bytes of all writes.
    #[must_use]
    pub fn totals(&self) -> (usize, usize, usize) {
        let state = self.state();
        let (mut writes, mut flushes, mut bytes) = (0, 0, 0);
        for entry in &state.entries {
            match &entry.change {
                Change::Write(_, data) => (writes, bytes) = (writes + 1, bytes + data.len()),
                Change::Flush => flushes += 1,
                Change::Size(_) => {}
            }
        }
        (writes, flushes, bytes)
    }

    /// A possible content of the device after a loss of power.
    #[must_use]
    pub fn cut(&self, cut: Cut, random: &mut Random) -> Vec<u8> {
        let state = self.state();
        let has_ended = |entry: &Entry| entry.ended.is_some_and(|ended| ended <= cut.at);
        let flushes = state.entries.iter().filter(|entry| matches!(entry.change, Change::Flush));
        let covered = flushes.filter(|flush| has_ended(flush)).map(|flush| flush.begun).max();
        let is_stable = |entry: &Entry| {
            let is_covered = entry.ended.zip(covered).is_some_and(|(ended, begun)| ended < begun);
            cut.heeds_flushes && (is_covered || entry.is_forced && has_ended(entry))
        };
        let mut content = state.first.clone();
        for entry in state.entries.iter().filter(|entry| entry.begun < cut.at) {
            if is_stable(entry) {
                apply(&mut content, &entry.change, |_| true);
            } else if random.below(2) == 0 {
                let is_kept = random.below(100) < cut.kept_percent;
                apply(&mut content, &entry.change, |_| is_kept);
            } else {
                apply(&mut content, &entry.change, |_| random.below(100) < cut.kept_percent);
            }
        }
        content
    }
}

fn place(offset: u64) -> usize {
    usize::try_from(offset).expect("a test has its disk in memory")
}

/// Applies the parts of a change for which `is_kept` returns true. Each part is a sector at most.
fn apply(content: &mut Vec<u8>, change: &Change, mut is_kept: impl FnMut(usize) -> bool) {
    match change {
        Change::Write(offset, data) => {
            let first = SECTOR - place(*offset) % SECTOR;
            let (head, rest) = data.split_at(first.min(data.len()));
            let mut at = place(*offset);
            for sector in std::iter::once(head).chain(rest.chunks(SECTOR)) {
                if is_kept(at) {
                    let end = at + sector.len();
                    content.resize(content.len().max(end), 0);
                    content[at..end].copy_from_slice(sector);
                }
                at += sector.len();
            }
        }
        Change::Size(bytes) if is_kept(0) => content.resize(place(*bytes), 0),
        Change::Size(_) | Change::Flush => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(at: usize, kept_percent: u64) -> Cut {
        Cut { at, kept_percent, heeds_flushes: true }
    }

    #[test]
    fn a_flush_covers_the_changes_that_were_answered_before_it_began() {
        let journal = Journal::new(vec![0; 2048]);
        let write = |at: u64, byte| journal.begin(Change::Write(at, vec![byte; 512]), false);
        journal.end(write(0, 1));
        let late = write(512, 2);
        let flush = journal.begin(Change::Flush, false);
        journal.end(late);
        let during = journal.now();
        journal.end(flush);
        let forced = journal.begin(Change::Write(1024, vec![3; 512]), true);
        let unanswered = journal.now();
        journal.end(forced);
        let end = journal.now();
        let random = &mut Random::new(1);
        let firsts = |content: Vec<u8>| [0, 512, 1024].map(|at| content[at]);
        assert_eq!(firsts(journal.cut(cut(during, 0), random)), [0, 0, 0]);
        assert_eq!(firsts(journal.cut(cut(unanswered, 0), random)), [1, 0, 0]);
        assert_eq!(firsts(journal.cut(cut(end, 0), random)), [1, 0, 3]);
        assert_eq!(firsts(journal.cut(cut(end, 100), random)), [1, 2, 3]);
        let blind = Cut { heeds_flushes: false, ..cut(end, 0) };
        assert_eq!(firsts(journal.cut(blind, random)), [0, 0, 0]);
        assert_eq!(journal.totals(), (3, 1, 1536));
    }

    #[test]
    fn a_write_is_torn_at_sectors() {
        let journal = Journal::new(vec![0; 4096]);
        journal.end(journal.begin(Change::Write(100, vec![1; 3000]), false));
        let random = &mut Random::new(1);
        let mut torn = 0;
        for _ in 0..50 {
            let content = journal.cut(cut(journal.now(), 50), random);
            let kept: Vec<bool> = content.chunks(512).map(|sector| sector[200] == 1).collect();
            torn += usize::from(kept[..6].contains(&true) && kept[..6].contains(&false));
            assert!(content[512..1024].iter().all(|byte| *byte == content[512]));
        }
        assert!(torn > 0);
    }

    #[test]
    fn a_size_that_was_not_flushed_may_be_lost() {
        let journal = Journal::new(vec![1; 512]);
        journal.end(journal.begin(Change::Size(4096), false));
        let random = &mut Random::new(1);
        assert_eq!(journal.size(), 4096);
        assert_eq!(journal.cut(cut(journal.now(), 0), random).len(), 512);
        assert_eq!(journal.cut(cut(journal.now(), 100), random).len(), 4096);
    }
}
