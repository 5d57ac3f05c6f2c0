//! Marks of writes to the used ring in the log, and the log of a queue.

use super::SplitQueue;
use crate::memory::QueueLog;
use crate::rings::{RING_EVENT_BYTES, RING_IDX};

/// Bytes of used idx, and of the flags of the used ring.
const FIELD_BYTES: usize = 2;

impl SplitQueue {
    /// Sets, replaces or removes the log of writes: to the used ring, and through the buffers of
    /// all chains, popped ones too. The previous log is not touched afterwards. The log must reach
    /// to the end of guest memory, and of the used ring.
    ///
    /// The new log gets marks for the whole used ring: a process that was killed may have written
    /// there without a mark.
    pub fn set_log(&mut self, log: Option<QueueLog>) {
        self.memory.set_log(log);
        self.memory.mark_used_ring(0, self.rings.avail_event_offset() + self.event_bytes());
    }

    /// Makes `count` elements visible, with marks: elements before they are visible, and used idx
    /// after it was stored.
    #[cold]
    #[inline(never)]
    pub(super) fn publish_with_marks(&mut self, count: u16) {
        for range in self.rings.used_entry_ranges(self.published_used, self.next_used) {
            self.memory.mark_used_ring(range.start, range.len());
        }
        self.store_used_idx(count);
        self.memory.mark_used_ring(RING_IDX, FIELD_BYTES);
    }

    /// Marks the field that was stored to enable or disable kicks.
    #[inline]
    pub(super) fn mark_kick_wish(&self) {
        if self.memory.is_logged() {
            self.mark_wish();
        }
    }

    #[cold]
    #[inline(never)]
    fn mark_wish(&self) {
        if self.config.event_idx {
            self.memory.mark_used_ring(self.rings.avail_event_offset(), RING_EVENT_BYTES);
        } else {
            self.memory.mark_used_ring(0, FIELD_BYTES);
        }
    }

    fn event_bytes(&self) -> usize {
        if self.config.event_idx { RING_EVENT_BYTES } else { 0 }
    }
}
