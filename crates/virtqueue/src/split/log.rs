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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::death::tests::Follower;
    use crate::device_queue::DeviceQueue;
    use crate::driver::{Desc, Driver};
    use crate::memory::{GuestMemory, LocalMemory};
    use crate::split::QueueConfig;

    /// Flags and used idx are on a page of their own, and so is the event.
    #[test]
    fn a_front_end_that_copies_between_marks_and_stores_copies_the_ring_as_it_is() {
        for event_idx in [false, true] {
            let config = QueueConfig {
                size: 512,
                desc_table: 0x4000,
                avail_ring: 0x7000,
                used_ring: 0x8ffc,
                event_idx,
                indirect: false,
                next_avail: 0,
            };
            let memory = Arc::new(GuestMemory::anonymous(&[(0, 0x10000)]).unwrap());
            let mut driver = Driver::new(Arc::clone(&memory), config);
            let local = LocalMemory::new(Arc::clone(&memory));
            let mut queue = SplitQueue::new(local, config).unwrap();
            let follower = Follower::new(&memory);
            driver.add(&[Desc::writable(0xf000, 1)], None);
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
            for count in [1, 2, 400, 300] {
                for _ in 0..count {
                    driver.add(&[Desc::writable(0xf000, 1)], None);
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
