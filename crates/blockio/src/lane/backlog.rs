//! The ops of a lane that wait for room.

use std::collections::VecDeque;

/// Two lines that take turns, because ops of either kind may keep coming.
#[derive(Default)]
pub(super) struct Backlog {
    /// Reads and writes.
    transfers: VecDeque<u32>,
    others: VecDeque<u32>,
    /// True if the last op taken was neither a read nor a write.
    other_went: bool,
}

impl Backlog {
    pub(super) fn len(&self) -> usize {
        self.transfers.len() + self.others.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.transfers.is_empty() && self.others.is_empty()
    }

    pub(super) fn has_transfers(&self) -> bool {
        !self.transfers.is_empty()
    }

    /// Returns true if an op waits that is neither a read nor a write.
    pub(super) fn has_others(&self) -> bool {
        !self.others.is_empty()
    }

    pub(super) fn push(&mut self, slot: u32, is_transfer: bool) {
        if is_transfer {
            self.transfers.push_back(slot);
        } else {
            self.others.push_back(slot);
        }
    }

    /// The op whose turn it is, and true if it is a read or a write. `may_be_other`: the engine may
    /// have one more that is neither.
    pub(super) fn first(&self, may_be_other: bool) -> Option<(u32, bool)> {
        let is_other =
            may_be_other && self.has_others() && (self.transfers.is_empty() || !self.other_went);
        let line = if is_other { &self.others } else { &self.transfers };
        Some((*line.front()?, !is_other))
    }

    /// Takes the first op out of a line.
    pub(super) fn take(&mut self, is_transfer: bool) {
        self.other_went = !is_transfer;
        let line = if is_transfer { &mut self.transfers } else { &mut self.others };
        line.pop_front();
    }
}
