//! A virtqueue of either layout.

use crate::avail_idx::AvailIdx;
use crate::chain::Chain;
use crate::device_queue::DeviceQueue;
use crate::error::QueueError;
use crate::inflight::{InflightAccount, Recovery, RingLayout};
use crate::memory::{AnswerPlace, LocalMemory, QueueLog};
use crate::packed::PackedQueue;
use crate::queue_memory::QueueMemory;
use crate::split::{QueueConfig, SplitQueue};

/// A virtqueue of either layout, as the device sees it. Belongs to one thread.
///
/// Its methods are the methods of [`SplitQueue`] and [`PackedQueue`], and of [`DeviceQueue`].
#[derive(Debug)]
#[expect(missing_docs, reason = "the variants are named like their types")]
#[allow(clippy::large_enum_variant, reason = "split rings are the usual ones, and stay direct")]
pub enum Virtqueue {
    Split(SplitQueue),
    Packed(PackedQueue),
}

use Virtqueue::{Packed, Split};

/// Calls the method of the queue's layout.
macro_rules! either {
    ($queue:expr, $method:ident($($argument:expr),*)) => {
        match $queue {
            Split(queue) => queue.$method($($argument),*),
            Packed(queue) => queue.$method($($argument),*),
        }
    };
}

impl DeviceQueue for Virtqueue {
    #[inline]
    fn available(&mut self, fresh: bool) -> Result<u16, QueueError> {
        either!(self, available(fresh))
    }

    #[inline]
    fn in_device(&self) -> u16 {
        either!(self, in_device())
    }

    #[inline]
    fn next_chain(&self) -> u16 {
        either!(self, next_chain())
    }

    #[inline]
    fn publish_quietly(&mut self) -> u16 {
        either!(self, publish_quietly())
    }

    #[inline]
    fn needs_call(&mut self) -> bool {
        either!(self, needs_call())
    }

    #[inline]
    fn driver_sleeps(&self) -> bool {
        either!(self, driver_sleeps())
    }
}

impl Virtqueue {
    /// Takes over a queue that the driver has set up. `next_used` is the place of the next used
    /// element in a packed ring; a split ring has it in memory.
    ///
    /// # Errors
    ///
    /// As for [`SplitQueue::new`] and [`PackedQueue::new`].
    pub fn new(
        memory: LocalMemory,
        layout: RingLayout,
        config: QueueConfig,
        next_used: u16,
    ) -> Result<Self, QueueError> {
        match layout {
            RingLayout::Split => SplitQueue::new(memory, config).map(Split),
            RingLayout::Packed => PackedQueue::new(memory, config, next_used).map(Packed),
        }
    }

    /// Takes over a queue whose requests are marked in an inflight region for rings of this layout.
    ///
    /// # Errors
    ///
    /// As for [`SplitQueue::with_inflight`] and [`PackedQueue::with_inflight`].
    ///
    /// # Panics
    ///
    /// If the region is for a ring of another layout.
    pub fn with_inflight(
        memory: LocalMemory,
        layout: RingLayout,
        config: QueueConfig,
        next_used: u16,
        inflight: &InflightAccount,
    ) -> Result<(Self, Recovery), QueueError> {
        match layout {
            RingLayout::Split => SplitQueue::with_inflight(memory, config, inflight)
                .map(|(queue, recovery)| (Split(queue), recovery)),
            RingLayout::Packed => PackedQueue::with_inflight(memory, config, next_used, inflight)
                .map(|(queue, recovery)| (Packed(queue), recovery)),
        }
    }

    fn memory_mut(&mut self) -> &mut QueueMemory {
        match self {
            Split(queue) => &mut queue.memory,
            Packed(queue) => &mut queue.memory,
        }
    }

    /// Turns prefetching for the next chains on or off; on at first.
    pub fn set_prefetch(&mut self, on: bool) {
        self.memory_mut().prefetch = on;
    }

    /// Sets the place of the answer in chains that have a fault. At first it is the last byte.
    pub fn set_answer_place(&mut self, place: AnswerPlace) {
        self.memory_mut().translator.set_answer_place(place);
    }

    /// Returns true if chains of an earlier process, which only the region has, are to be popped.
    #[inline]
    pub fn has_recovered(&self) -> bool {
        either!(self, has_recovered())
    }

    /// Returns true if an earlier process saw this chain, which must be popped and not yet pushed.
    pub fn is_recovered(&self, head: u16) -> bool {
        either!(self, is_recovered(head))
    }

    /// Pops the next chain that the driver made available, if there is one.
    ///
    /// # Errors
    ///
    /// If the ring is bad: the device must stop this queue. No earlier chain is lost.
    #[inline]
    pub fn pop(&mut self) -> Result<Option<Chain>, QueueError> {
        let popped = either!(self, pop());
        if cfg!(debug_assertions)
            && let Ok(Some(chain)) = &popped
        {
            self.memory().begin_check(chain);
        }
        popped
    }

    /// Gives the chain that was popped last back to the ring. The next pop returns it again. It
    /// must not be a chain that an earlier process had taken.
    pub fn put_back(&mut self, head: u16) {
        if cfg!(debug_assertions) {
            self.memory().end_check(head);
        }
        match self {
            Split(queue) => queue.put_back(),
            Packed(queue) => queue.put_back(head),
        }
    }

    /// Reads the first bytes of a chain that was popped and not pushed. They may differ from those
    /// at the pop. `None` if its first descriptor has fewer, or the driver has changed it.
    #[cold]
    pub fn header<const BYTES: usize>(&self, head: u16) -> Option<[u8; BYTES]> {
        either!(self, header(head))
    }

    /// The head of the next used element, if chains are answered in the order of the avail ring and
    /// none is of an earlier process.
    ///
    /// # Panics
    ///
    /// If the ring is packed: it does not keep that order.
    pub fn in_order_head(&self) -> u16 {
        match self {
            Split(queue) => queue.in_order_head(),
            Packed(_) => unreachable!("a packed ring does not keep the order of its chains"),
        }
    }

    /// Writes the used element of a chain that is done. The driver does not see it yet.
    ///
    /// # Panics
    ///
    /// If the device does not hold this chain. In a debug build also if a byte of its buffers was
    /// written without a mark in the log.
    #[inline]
    pub fn push(&mut self, head: u16, written_bytes: u32) {
        if cfg!(debug_assertions) {
            self.memory().check_marks(head);
        }
        either!(self, push(head, written_bytes));
    }

    /// Makes the next [`publish`](DeviceQueue::publish) ask for a call.
    pub fn force_call(&mut self) {
        either!(self, force_call());
    }

    /// Returns true if there is a chain to pop. Cheap enough for busy-polling.
    #[inline]
    pub fn has_available(&self) -> bool {
        either!(self, has_available())
    }

    /// Asks the driver to kick when it makes the next chain available. Returns true if chains are
    /// available already.
    #[must_use = "chains that are available already may come without a kick"]
    pub fn enable_kicks(&mut self) -> bool {
        either!(self, enable_kicks())
    }

    /// Lets the driver omit kicks.
    pub fn disable_kicks(&mut self) {
        either!(self, disable_kicks());
    }

    /// The place at which the next start continues, as a front-end keeps it: the next avail entry
    /// of a split ring, or [`PackedQueue::base`].
    #[inline]
    pub fn base(&self) -> u32 {
        match self {
            Split(queue) => queue.next_avail().into(),
            Packed(queue) => queue.base(),
        }
    }

    /// Returns a handle with which other threads learn the driver's progress.
    pub fn avail_idx(&mut self) -> AvailIdx {
        either!(self, avail_idx())
    }

    /// The number of entries of the ring.
    pub fn size(&self) -> u16 {
        either!(self, size())
    }

    fn memory(&self) -> &QueueMemory {
        match self {
            Split(queue) => &queue.memory,
            Packed(queue) => &queue.memory,
        }
    }

    /// Sets, replaces or removes the log of writes.
    pub fn set_log(&mut self, log: Option<QueueLog>) {
        either!(self, set_log(log));
    }

    /// Continues in a changed memory map, in which the rings have the same guest addresses.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new). The queue then keeps the old map.
    pub fn set_memory(&mut self, memory: LocalMemory) -> Result<(), QueueError> {
        either!(self, set_memory(memory))
    }

    /// Leaves chains that were seen and not popped to the next process.
    ///
    /// # Panics
    ///
    /// If [chains of an earlier process](Self::has_recovered) are still to be popped.
    pub fn unmark_rest(&mut self) {
        either!(self, unmark_rest());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::death::tests::Follower;
    use crate::driver::{Desc, Driver, PACKED_START, PackedDriver};
    use crate::inflight::tests::world::GuestDriver;
    use crate::memory::GuestMemory;

    /// A split ring has flags and used idx on a page of their own, and its event on another one. In
    /// a packed ring the first element of a batch is written last, and shows all of them.
    fn config(layout: RingLayout, event_idx: bool) -> QueueConfig {
        let (size, desc_table, avail_ring, used_ring, next_avail) = match layout {
            RingLayout::Split => (512, 0x4000, 0x7000, 0x8ffc, 0),
            RingLayout::Packed => (8, 0x1000, 0x2000, 0x3000, PACKED_START),
        };
        QueueConfig {
            size,
            desc_table,
            avail_ring,
            used_ring,
            event_idx,
            indirect: false,
            next_avail,
        }
    }

    fn driver(layout: RingLayout, memory: &Arc<GuestMemory>, config: QueueConfig) -> GuestDriver {
        match layout {
            RingLayout::Split => GuestDriver::Split(Driver::new(Arc::clone(memory), config)),
            RingLayout::Packed => {
                GuestDriver::Packed(PackedDriver::new(Arc::clone(memory), config))
            }
        }
    }

    fn serve(queue: &mut Virtqueue, count: u16) {
        for _ in 0..count {
            let chain = queue.pop().unwrap().unwrap();
            queue.push(chain.head, 1);
        }
        assert_eq!(queue.publish_quietly(), count);
        assert!(!queue.enable_kicks());
    }

    #[test]
    fn a_front_end_that_copies_between_marks_and_stores_copies_the_ring_as_it_is() {
        for (layout, counts) in
            [(RingLayout::Split, [1, 2, 400, 300]), (RingLayout::Packed, [1, 2, 7, 3])]
        {
            for event_idx in [false, true] {
                let config = config(layout, event_idx);
                let memory = Arc::new(GuestMemory::anonymous(&[(0, 0x10000)]).unwrap());
                let mut driver = driver(layout, &memory, config);
                let local = LocalMemory::new(Arc::clone(&memory));
                let mut queue = Virtqueue::new(local, layout, config, PACKED_START).unwrap();
                let follower = Follower::new(&memory);
                driver.offer(&[Desc::writable(0xf000, 1)], None);
                // A process that was killed may have written to the ring without marks.
                follower.check(|| {
                    serve(&mut queue, 1);
                    queue.set_log(Some(follower.log(config.used_ring)));
                });
                driver.take_used().unwrap();
                for count in counts {
                    for _ in 0..count {
                        driver.offer(&[Desc::writable(0xf000, 1)], None);
                    }
                    follower.check(|| serve(&mut queue, count));
                    follower.check(|| queue.disable_kicks());
                    assert_eq!((0..count).filter_map(|_| driver.take_used()).count(), count.into());
                }
            }
        }
    }
}
