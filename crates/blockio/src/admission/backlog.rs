//! The ops of a lane that wait for room.

use std::collections::VecDeque;

/// Two lines that take turns, because ops of either kind may keep coming.
#[derive(Default)]
pub(super) struct Backlog {
    /// Reads and writes.
    transfers: VecDeque<u32>,
    non_transfers: VecDeque<u32>,
    /// True if the last op taken was neither a read nor a write.
    last_was_other: bool,
}

impl Backlog {
    pub(super) fn len(&self) -> usize {
        self.transfers.len() + self.non_transfers.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.transfers.is_empty() && self.non_transfers.is_empty()
    }

    pub(super) fn has_transfers(&self) -> bool {
        !self.transfers.is_empty()
    }

    /// Returns true if an op waits that is neither a read nor a write.
    pub(super) fn has_non_transfers(&self) -> bool {
        !self.non_transfers.is_empty()
    }

    pub(super) fn push(&mut self, slot: u32, is_transfer: bool) {
        if is_transfer {
            self.transfers.push_back(slot);
        } else {
            self.non_transfers.push_back(slot);
        }
    }

    /// The op whose turn it is, and true if it is a read or a write. `may_be_other`: the engine may
    /// have one more that is neither.
    pub(super) fn first(&self, may_be_other: bool) -> Option<(u32, bool)> {
        let is_other = may_be_other
            && self.has_non_transfers()
            && (self.transfers.is_empty() || !self.last_was_other);
        let line = if is_other { &self.non_transfers } else { &self.transfers };
        Some((*line.front()?, !is_other))
    }

    /// Takes the first op out of a line.
    pub(super) fn take(&mut self, is_transfer: bool) {
        self.last_was_other = !is_transfer;
        let line = if is_transfer { &mut self.transfers } else { &mut self.non_transfers };
        line.pop_front();
    }
}
