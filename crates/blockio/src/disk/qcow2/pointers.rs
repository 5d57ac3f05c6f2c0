//! Pointers to new tables of an image, which wait for the tables' reference counts.
//!
//! imago writes the pointer to a new table at once, and the count of the table with the next flush.
//! If the process is killed in between, the image has a table that counts as free space. So what is
//! written to the table of tables (L1), and to the header while that table moves, is kept here
//! until the counts are in the file, and is read from here meanwhile.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// What a header is held in: its pointer to the first table lies in it.
const HEADER_BYTES: u64 = 512;

/// Writes that wait, by where they go.
pub(super) type Held = BTreeMap<u64, Vec<u8>>;

#[derive(Debug, Default)]
pub(super) struct Pointers(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Where pointers are.
    table: Range<u64>,
    /// The header has one that is about to change.
    moves: bool,
    held: Held,
}

impl Pointers {
    /// Says where the first table is, which the front of an image tells.
    pub(super) fn find(&self, front: &[u8; 48]) {
        let (_, rest) = front.split_at(36);
        let number = |bytes: &[u8]| bytes.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        let (entries, offset) = (number(&rest[..4]), number(&rest[4..]));
        let end = offset.saturating_add(entries * 8);
        self.change(|state| state.table = offset..end);
    }

    /// Whether the table moves: then the header waits too.
    pub(super) fn set_moves(&self, moves: bool) {
        self.change(|state| state.moves = moves);
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Keeps a write, if it is one of a pointer. It is one of whole blocks, of which the last may
    /// be longer than what it is about.
    pub(super) fn hold(&self, offset: u64, data: &[u8], block_bytes: u64) -> bool {
        let end = offset + data.len() as u64;
        self.change(|state| {
            let table_end = state.table.end.next_multiple_of(block_bytes);
            let is_pointer = state.table.start <= offset && end <= table_end
                || state.moves && end <= HEADER_BYTES.max(block_bytes);
            if is_pointer {
                let size = iomem::fits(block_bytes, "a block");
                for (place, block) in (offset..).step_by(size).zip(data.chunks(size)) {
                    state.held.insert(place, block.to_vec());
                }
            }
            is_pointer
        })
    }

    /// Puts what waits over what was read from the file.
    pub(super) fn cover(&self, offset: u64, data: &mut [u8]) {
        let end = offset + data.len() as u64;
        self.change(|state| {
            for (place, block) in state.held.range(offset..end) {
                let at: usize = iomem::fits(place - offset, "a place in memory");
                let len = block.len().min(data.len() - at);
                data[at..at + len].copy_from_slice(&block[..len]);
            }
        });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.change(|state| state.held.is_empty())
    }

    /// What waits, to be written now. It is read from here until [`written`](Self::written).
    pub(super) fn held(&self) -> Held {
        self.change(|state| state.held.clone())
    }

    /// All that waited is in the file.
    pub(super) fn written(&self) {
        self.change(|state| state.held.clear());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointers_wait_and_are_read_meanwhile() {
        let pointers = Pointers::default();
        let mut front = [0; 48];
        front[39] = 100;
        front[46] = 4;
        pointers.find(&front);
        assert!(!pointers.hold(0, &[1; 512], 512), "the header does not wait");
        assert!(!pointers.hold(512, &[1; 512], 512) && !pointers.hold(2048, &[1; 512], 512));
        assert!(pointers.is_empty() && pointers.hold(1024, &[2; 1024], 512));
        let mut data = [0; 2048];
        pointers.cover(512, &mut data);
        assert!(
            data[..512] == [0; 512] && data[512..1536] == [2; 1024] && data[1536..] == [0; 512]
        );
        assert_eq!(pointers.held().len(), 2);
        pointers.written();
        pointers.set_moves(true);
        assert!(pointers.is_empty() && pointers.hold(0, &[3; 512], 512));
    }
}
