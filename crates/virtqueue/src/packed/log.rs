//! Marks of writes to the ring in the log, and the log of a queue.

use super::PackedQueue;
use crate::memory::{DESCRIPTOR_BYTES, QueueLog};
use crate::position::Position;

/// Bytes of the device's event structure.
const EVENT_BYTES: usize = 4;

impl PackedQueue {
    /// Sets, replaces or removes the log of writes: to the ring and the device's event structure,
    /// and through the buffers of all chains, popped ones too. The previous log is not touched
    /// afterwards. The log must reach to the end of guest memory, and of the event structure, which
    /// is in the place of the used ring. Used elements are in the descriptor ring, and are marked
    /// by its guest address.
    ///
    /// The new log gets marks for the whole ring: a process that was killed may have written there
    /// without a mark.
    pub fn set_log(&mut self, log: Option<QueueLog>) {
        self.memory.set_log(log);
        self.mark_descriptors(0, self.config.size);
        self.mark_kick_wish();
    }

    /// Marks used elements that were written, in `count` descriptors from `first` on.
    #[cold]
    pub(super) fn mark_elements(&self, first: Position, count: u16) {
        let tail = count.min(self.config.size - first.slot);
        self.mark_descriptors(first.slot, tail);
        self.mark_descriptors(0, count - tail);
    }

    /// Marks the event structure, which was stored to enable or disable kicks.
    pub(super) fn mark_kick_wish(&self) {
        self.memory.mark_used_ring(0, EVENT_BYTES);
    }

    fn mark_descriptors(&self, first: u16, count: u16) {
        let place = |slots: u16| usize::from(slots) * DESCRIPTOR_BYTES;
        self.memory.mark_ring(self.config.desc_table + place(first) as u64, place(count));
    }
}
