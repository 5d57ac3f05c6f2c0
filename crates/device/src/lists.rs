//! A bound on the memory that lists of buffers take.
//!
//! A chain may name thousands of buffers, and a ring may have a thousand such chains: while a disk
//! is slow their lists would take gigabytes. So lists that are long count for their IoThread, and
//! a queue takes no more chains while all of them together are at the limit. A queue that has no
//! long list of its own always may take one, so what other queues have never stops it.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::Arc;

use blockio::stats::Stats;
use virtqueue::Chain;

/// Lists of up to this many ranges do not count. The fullest ring has 256 KiB of them. It is a
/// constant because each chain is compared with it.
const SHORT_RANGES: usize = 16;
/// What the long lists of one IoThread may take by default.
pub(crate) const LONG_LISTS_BYTES: u64 = 8 << 20;

/// The long lists of one queue.
pub(crate) struct Lists {
    /// What the long lists of the IoThread may take in bytes. The last one may go beyond it.
    limit: u64,
    /// Bytes of them.
    own: Cell<u64>,
    /// Bytes of each, by the head of its chain.
    chains: RefCell<HashMap<u16, u64>>,
    /// Of the IoThread.
    stats: Arc<Stats>,
}

impl Lists {
    pub(crate) fn new(limit: u64, stats: Arc<Stats>) -> Self {
        Self { limit, own: Cell::new(0), chains: RefCell::default(), stats }
    }

    /// Whether another chain may be taken.
    pub(crate) fn has_room(&self) -> bool {
        self.own.get() == 0 || self.stats.lists.bytes.get() < self.limit
    }

    /// Whether the lists of a chain count.
    #[inline]
    pub(crate) fn are_long(chain: &Chain) -> bool {
        ranges_of(chain) > SHORT_RANGES
    }

    /// Counts a chain with long lists that was popped.
    #[cold]
    pub(crate) fn add(&self, chain: &Chain) {
        let bytes = (ranges_of(chain) * size_of::<libc::iovec>()) as u64;
        let before = self.chains.borrow_mut().insert(chain.head, bytes);
        // A head that is in the device is not popped again.
        debug_assert!(before.is_none(), "chain {} was popped twice", chain.head);
        self.own.set(self.own.get() + bytes);
        let lists = &self.stats.lists;
        lists.bytes.set(lists.bytes.get() + bytes);
        lists.bytes_most.set(lists.bytes_most.get().max(lists.bytes.get()));
        if !self.has_room() {
            lists.waits.add(1);
        }
    }

    /// Notes that the chain with this head was answered. Returns whether others are left.
    pub(crate) fn remove(&self, head: u16) -> bool {
        if let Some(bytes) = self.chains.borrow_mut().remove(&head) {
            self.own.set(self.own.get() - bytes);
            let all = &self.stats.lists.bytes;
            all.set(all.get() - bytes);
        }
        self.own.get() > 0
    }
}

#[inline]
fn ranges_of(chain: &Chain) -> usize {
    chain.readable.ranges() + chain.writable.ranges()
}

impl Drop for Lists {
    fn drop(&mut self) {
        // Requests that end with their IoThread are not answered.
        let all = &self.stats.lists.bytes;
        all.set(all.get() - self.own.get());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use virtqueue::{GuestMemory, LocalMemory, QueueConfig, SplitQueue};

    const ENTRIES: u16 = 64;
    const AVAIL: u64 = 0x1000;

    /// A queue with a chain of each of these lengths, each of its buffers one byte for itself.
    fn queue_with(lengths: &[u16]) -> SplitQueue {
        let memory = GuestMemory::anonymous(&[(0, 1 << 16)]).unwrap();
        let mut descriptor = 0u16;
        for (chain, &len) in (0u64..).zip(lengths) {
            memory.write(AVAIL + 4 + 2 * chain, &descriptor.to_le_bytes()).unwrap();
            for left in (0..len).rev() {
                let mut bytes = (0x8000 + 16 * u64::from(descriptor)).to_le_bytes().to_vec();
                bytes.extend(1u32.to_le_bytes());
                bytes.extend(u16::from(left > 0).to_le_bytes());
                descriptor += 1;
                bytes.extend(descriptor.to_le_bytes());
                memory.write(16 * (u64::from(descriptor) - 1), &bytes).unwrap();
            }
        }
        let count = u16::try_from(lengths.len()).unwrap();
        memory.write(AVAIL + 2, &count.to_le_bytes()).unwrap();
        let config = QueueConfig {
            size: ENTRIES,
            desc_table: 0,
            avail_ring: AVAIL,
            used_ring: 0x2000,
            event_idx: false,
            indirect: false,
            next_avail: 0,
        };
        SplitQueue::new(LocalMemory::new(Arc::new(memory)), config).unwrap()
    }

    #[test]
    fn a_queue_with_a_long_list_waits_for_room_and_one_without_never() {
        let short = u16::try_from(SHORT_RANGES).unwrap();
        let stats = Arc::<Stats>::default();
        let [full, other] = [(); 2].map(|()| Lists::new(LONG_LISTS_BYTES, Arc::clone(&stats)));
        let mut queue = queue_with(&[short, short + 1, short + 2]);
        let mut pop = || queue.pop().unwrap().unwrap();
        let first = pop();
        assert!(!Lists::are_long(&first), "a short list counts");
        let second = pop();
        assert!(Lists::are_long(&second));
        full.add(&second);
        let bytes = 16 * (u64::from(short) + 1);
        assert_eq!((stats.lists.bytes.get(), stats.lists.waits.get()), (bytes, 0));
        assert!(full.has_room());
        // Others fill the rest.
        stats.lists.bytes.set(bytes + LONG_LISTS_BYTES);
        assert!(!full.has_room() && other.has_room());
        let third = pop();
        full.add(&third);
        assert_eq!(stats.lists.waits.get(), 1);
        assert!(full.remove(first.head) && full.remove(third.head) && !full.has_room());
        assert!(!full.remove(second.head) && full.has_room());
        assert_eq!(stats.lists.bytes.get(), LONG_LISTS_BYTES);
        full.add(&second);
        drop(full);
        assert_eq!(stats.lists.bytes.get(), LONG_LISTS_BYTES, "a queue that is gone has no lists");
    }
}
