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

/// The simulation has short chains, and is to reach the limit.
const IS_SMALL: bool = cfg!(feature = "sim");
/// Lists of up to so many ranges do not count. The fullest ring has 256 KiB of them.
const SHORT_RANGES: usize = if IS_SMALL { 3 } else { 16 };
/// What the long lists of one IoThread may take. The last one to be taken may go beyond it.
const LIMIT_BYTES: u64 = if IS_SMALL { 16 << 4 } else { 8 << 20 };

/// The long lists of one queue.
pub(crate) struct Lists {
    /// Bytes of them.
    own: Cell<u64>,
    /// Bytes of each, by the head of its chain.
    chains: RefCell<HashMap<u16, u64>>,
    /// No chain was taken for want of room, since the last one that was answered.
    waits: Cell<bool>,
    /// Of the IoThread.
    stats: Arc<Stats>,
}

impl Lists {
    pub(crate) fn new(stats: Arc<Stats>) -> Self {
        let (own, waits) = (Cell::new(0), Cell::new(false));
        Self { own, chains: RefCell::default(), waits, stats }
    }

    /// Whether another chain may be taken.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        self.own.get() == 0 || self.stats.lists.bytes.get() < LIMIT_BYTES
    }

    /// Takes in that a chain was popped.
    #[inline]
    pub(crate) fn add(&self, chain: &Chain) {
        let ranges = chain.readable.ranges() + chain.writable.ranges();
        if ranges > SHORT_RANGES {
            self.add_long(chain.head, (ranges * size_of::<libc::iovec>()) as u64);
        }
    }

    /// Takes in that the chain with this head was answered.
    #[inline]
    pub(crate) fn remove(&self, head: u16) {
        if self.own.get() > 0 {
            self.remove_one_of_some(head);
        }
    }

    #[cold]
    fn remove_one_of_some(&self, head: u16) {
        let Some(bytes) = self.chains.borrow_mut().remove(&head) else { return };
        self.own.set(self.own.get() - bytes);
        let all = &self.stats.lists.bytes;
        all.set(all.get() - bytes);
        self.waits.set(false);
    }

    /// Takes in that no chain is taken for want of room.
    #[cold]
    pub(crate) fn wait(&self) {
        if !self.waits.replace(true) {
            self.stats.lists.waits.add(1);
        }
    }

    #[cold]
    fn add_long(&self, head: u16, bytes: u64) {
        let before = self.chains.borrow_mut().insert(head, bytes);
        // A head that is in the device is not popped again.
        debug_assert!(before.is_none(), "chain {head} was popped twice");
        self.own.set(self.own.get() + bytes);
        let lists = &self.stats.lists;
        lists.bytes.set(lists.bytes.get() + bytes);
        lists.bytes_most.set(lists.bytes_most.get().max(lists.bytes.get()));
    }
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
        let (full, other) = (Lists::new(Arc::clone(&stats)), Lists::new(Arc::clone(&stats)));
        let mut queue = queue_with(&[short, short + 1, 2]);
        let mut pop = |lists: &Lists| {
            let chain = queue.pop().unwrap().unwrap();
            lists.add(&chain);
            chain.head
        };
        let first = pop(&full);
        assert_eq!(stats.lists.bytes.get(), 0, "a short list counts");
        let long = pop(&full);
        assert_eq!(stats.lists.bytes.get(), 16 * (u64::from(short) + 1));
        assert!(full.has_room());
        // Others fill the rest.
        stats.lists.bytes.set(stats.lists.bytes.get() + LIMIT_BYTES);
        assert!(!full.has_room() && other.has_room());
        full.wait();
        full.wait();
        assert_eq!(stats.lists.waits.get(), 1, "one wait counts once");
        full.remove(first);
        assert!(!full.has_room());
        full.remove(long);
        assert!(full.has_room());
        assert_eq!(stats.lists.bytes.get(), LIMIT_BYTES);
        full.add_long(7, 512);
        drop(full);
        assert_eq!(stats.lists.bytes.get(), LIMIT_BYTES, "a queue that is gone has no lists");
    }
}
