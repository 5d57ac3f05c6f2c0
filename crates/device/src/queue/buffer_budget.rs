//! A bound on the memory of buffer lists.
//!
//! A chain may name thousands of buffers, and a ring may hold a thousand such chains: while a disk
//! is slow, their lists would take gigabytes. So long lists count for their IoThread, and a queue
//! takes no further chains while their sum is at the limit. A queue without a long list of its own
//! may always take one, so the lists of other queues never stop it.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use blockio::stats::Stats;
use virtqueue::Chain;

/// Lists of up to this many ranges do not count. The fullest ring has 256 KiB of them. The number
/// is a constant because each chain is compared with it.
const SHORT_RANGES: usize = 16;
/// The default limit on the long lists of one IoThread.
pub(crate) const LONG_LISTS_BYTES: u64 = 8 << 20;

/// The long lists of one queue.
pub(crate) struct ListBudget {
    /// The limit in bytes on the long lists of the IoThread. The last list may exceed it.
    limit: u64,
    /// Bytes of this queue's long lists.
    own: Rc<Cell<u64>>,
    /// Counters of the IoThread.
    stats: Arc<Stats>,
}

/// The lists of one chain, counted until they are dropped. They are not tracked by head, because a
/// driver may give one head to several chains at the same time.
struct Counted {
    bytes: u64,
    own: Rc<Cell<u64>>,
    stats: Arc<Stats>,
}

impl ListBudget {
    pub(crate) fn new(limit: u64, stats: Arc<Stats>) -> Self {
        Self { limit, own: Rc::default(), stats }
    }

    /// True if the queue may take another chain.
    pub(crate) fn has_room(&self) -> bool {
        self.own.get() == 0 || self.stats.lists.bytes.get() < self.limit
    }

    /// True if the lists of a chain count.
    #[inline]
    pub(crate) fn is_long(chain: &Chain) -> bool {
        ranges_of(chain) > SHORT_RANGES
    }

    /// Counts the long lists of a popped chain.
    #[cold]
    pub(crate) fn add(&self, chain: &mut Chain) {
        let bytes = (ranges_of(chain) * size_of::<libc::iovec>()) as u64;
        self.own.set(self.own.get() + bytes);
        let lists = &self.stats.lists;
        lists.bytes.set(lists.bytes.get() + bytes);
        lists.bytes_most.set(lists.bytes_most.get().max(lists.bytes.get()));
        let (own, stats) = (Rc::clone(&self.own), Arc::clone(&self.stats));
        let counted = Rc::new(Counted { bytes, own, stats });
        chain.readable.keep(counted.clone());
        chain.writable.keep(counted);
        if !self.has_room() {
            lists.waits.add(1);
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.own.set(self.own.get() - self.bytes);
        let all = &self.stats.lists.bytes;
        all.set(all.get() - self.bytes);
    }
}

#[inline]
fn ranges_of(chain: &Chain) -> usize {
    chain.readable.ranges() + chain.writable.ranges()
}

#[cfg(test)]
mod tests {
    use super::*;
    use virtqueue::{GuestMemory, LocalMemory, QueueConfig, SplitQueue};

    const ENTRIES: u16 = 64;
    const AVAIL: u64 = 0x1000;

    /// A queue with one chain of each of these lengths. Each buffer is one separate byte.
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
        let [full, other] = [(); 2].map(|()| ListBudget::new(LONG_LISTS_BYTES, Arc::clone(&stats)));
        let mut queue = queue_with(&[short, short + 1, short + 2]);
        let mut pop = || queue.pop().unwrap().unwrap();
        let first = pop();
        assert!(!ListBudget::is_long(&first), "a short list counts");
        let mut second = pop();
        assert!(ListBudget::is_long(&second));
        full.add(&mut second);
        let bytes = 16 * (u64::from(short) + 1);
        assert_eq!((stats.lists.bytes.get(), stats.lists.waits.get()), (bytes, 0));
        assert!(full.has_room());
        // The lists of other queues fill the rest.
        stats.lists.bytes.set(bytes + LONG_LISTS_BYTES);
        assert!(!full.has_room() && other.has_room());
        let mut third = pop();
        full.add(&mut third);
        assert_eq!(stats.lists.waits.get(), 1);
        drop((first, third.readable));
        assert!(!full.has_room(), "a part of its lists is left");
        drop(third.writable);
        assert!(!full.has_room());
        let rest = second.writable.duplicate();
        drop((second.readable, second.writable));
        assert!(!full.has_room());
        drop(rest);
        assert!(full.has_room());
        assert_eq!(stats.lists.bytes.get(), LONG_LISTS_BYTES);
    }

    /// A driver that breaks the rules makes such chains.
    #[test]
    fn chains_with_the_same_head_count_as_often_as_they_are_there() {
        let stats = Arc::<Stats>::default();
        let lists = ListBudget::new(1, Arc::clone(&stats));
        let again = || queue_with(&[20]).pop().unwrap().unwrap();
        let mut chains = [again(), again()];
        chains.iter_mut().for_each(|chain| lists.add(chain));
        for left in [1, 0] {
            assert!(!lists.has_room());
            drop(std::mem::replace(&mut chains[left], queue_with(&[1]).pop().unwrap().unwrap()));
            assert_eq!(stats.lists.bytes.get(), left as u64 * 20 * 16);
        }
        assert!(lists.has_room());
    }
}
