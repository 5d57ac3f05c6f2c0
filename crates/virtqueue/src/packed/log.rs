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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::death::tests::Follower;
    use crate::device_queue::DeviceQueue;
    use crate::driver::{Desc, PACKED_START, PackedDriver};
    use crate::memory::{GuestMemory, LocalMemory};
    use crate::split::QueueConfig;

    /// The first element of a batch is written last, and shows all of them.
    #[test]
    fn a_front_end_that_copies_between_marks_and_stores_copies_the_ring_as_it_is() {
        for event_idx in [false, true] {
            let config = QueueConfig {
                size: 8,
                desc_table: 0x1000,
                avail_ring: 0x2000,
                used_ring: 0x3000,
                event_idx,
                indirect: false,
                next_avail: PACKED_START,
            };
            let memory = Arc::new(GuestMemory::anonymous(&[(0, 0x10000)]).unwrap());
            let mut driver = PackedDriver::new(Arc::clone(&memory), config);
            let local = LocalMemory::new(Arc::clone(&memory));
            let mut queue = PackedQueue::new(local, config, PACKED_START).unwrap();
            let follower = Follower::new(&memory);
            driver.add(&[Desc::writable(0x8000, 1)], None);
            driver.publish();
            // A process that was killed may have written to the ring without marks.
            follower.check(|| {
                let chain = queue.pop().unwrap().unwrap();
                queue.push(chain.head, 1);
                let _ = queue.publish();
                assert!(!queue.enable_kicks());
                queue.set_log(Some(follower.log(config.used_ring)));
            });
            driver.take_used().unwrap();
            for count in [1, 2, 7, 3] {
                for _ in 0..count {
                    driver.add(&[Desc::writable(0x8000, 1)], None);
                }
                driver.publish();
                follower.check(|| {
                    for _ in 0..count {
                        let chain = queue.pop().unwrap().unwrap();
                        queue.push(chain.head, 1);
                    }
                    assert_eq!(queue.publish_quietly(), count);
                    assert!(!queue.enable_kicks());
                });
                follower.check(|| queue.disable_kicks());
                assert_eq!((0..count).filter_map(|_| driver.take_used()).count(), count.into());
            }
        }
    }
}
