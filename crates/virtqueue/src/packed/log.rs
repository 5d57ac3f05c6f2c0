//! Marks of writes to the ring in the log, and the log of a queue.

use std::sync::Arc;

use super::PackedQueue;
use crate::memory::{DESCRIPTOR_BYTES, DirtyLog, QueueLog};
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
        self.log = log;
        for memory in self.before_loss.iter().chain([self.translator.memory()]) {
            memory.set_log(self.log_of_data());
        }
        self.mark_descriptors(0, self.config.size);
        self.mark_kick_wish();
    }

    /// The log of writes through the buffers of chains.
    pub(super) fn log_of_data(&self) -> Option<&Arc<DirtyLog>> {
        self.log.as_ref().filter(|log| log.marks_data).map(|log| &log.log)
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
        if let Some(QueueLog { log, used_ring: Some(start), .. }) = &self.log {
            log.mark(*start, EVENT_BYTES);
        }
    }

    fn mark_descriptors(&self, first: u16, count: u16) {
        if let Some(QueueLog { log, used_ring: Some(_), .. }) = &self.log {
            let place = |slots: u16| usize::from(slots) * DESCRIPTOR_BYTES;
            log.mark(self.config.desc_table + place(first) as u64, place(count));
        }
    }
}
