//! Where engines put the results of ops.

use std::time::Instant;

use crate::op::Slots;
use crate::stats::Stats;
use crate::task_key::TaskKey;

/// Where an engine stores results and whom it wakes.
pub(crate) struct Completer<'a> {
    pub(crate) slots: &'a mut Slots,
    pub(crate) stats: &'a Stats,
    pub(crate) woken: &'a mut Vec<TaskKey>,
    pub(crate) now: Instant,
}

impl Completer<'_> {
    /// Stores one result: bytes, or a negative errno.
    #[inline]
    pub(crate) fn complete(&mut self, slot: u32, result: i64) {
        if let Some(owner) = self.slots.complete(slot, result, self.now, self.stats) {
            self.woken.push(owner);
        }
    }
}

/// The token of the mailbox's eventfd, to which Linux AIO adds, too: there may be completions.
pub(crate) const TOKEN_ENGINE: u64 = u64::MAX;
