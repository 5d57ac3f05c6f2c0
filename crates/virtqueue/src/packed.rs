//! The device side of a packed virtqueue (virtio 1.3, section 2.8).
//!
//! Driver and device share one ring of descriptors. Chains are popped in the order of the ring, and
//! used descriptors are written from its first unanswered place on, in the order of completion. A
//! batch of used elements becomes visible by its first one, which is written last.

mod log;
mod popped;
mod start;
mod walk;

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use crate::avail_idx::Progress;
use crate::chain::{self, Chain, DESC_F_NEXT};
use crate::descriptor_ring::{DescriptorRing, EventSuppression, UsedWord};
use crate::device_queue::DeviceQueue;
use crate::error::{ChainFault, QueueError};
use crate::inflight::{PackedInflight, Taken};
use crate::memory::Descriptor;
use crate::position::Position;
use crate::queue_memory::{QueueMemory, lost_with_memory};
use crate::split::QueueConfig;
use walk::{ChainFacts, PackedLinks, Slots};

/// A packed virtqueue, as the device sees it. Belongs to one thread.
///
/// It has the operations of a [`SplitQueue`](crate::SplitQueue). A chain's head is its buffer id.
#[derive(Debug)]
pub struct PackedQueue {
    pub(crate) memory: QueueMemory,
    ring: DescriptorRing,
    config: QueueConfig,
    /// The first descriptor of the next chain.
    next: Position,
    /// The place of the next used element.
    used: Position,
    /// The place of the first used element that is not visible.
    published: Position,
    /// That element, if there is one.
    first: UsedWord,
    /// The number of chains that were pushed and are not visible.
    unpublished: u16,
    /// The number of descriptors that the driver may make available: neither popped nor in a used
    /// element that it does not see.
    room: u16,
    /// Chains in the device, by buffer id.
    chains: Box<[InDevice]>,
    in_device: u16,
    /// The number of chains that were popped. It wraps.
    popped: u32,
    seen: SeenChains,
    /// The place of the first used element that was not yet compared with the driver's event
    /// suppression.
    checked: Position,
    /// The number of descriptors from there on, up to a lap and one.
    unchecked: u16,
    /// True if the driver must be called regardless, because its last event is not known.
    call_forced: bool,
    /// The number of chains still to be popped that an earlier process took and did not answer.
    recovered: u16,
    /// The account that marks requests while they are in the device.
    inflight: Option<Box<PackedInflight>>,
    /// The progress for other threads, which some devices need.
    progress: Option<Arc<Progress>>,
}

/// A chain in the device. Its count is 0 if the device does not have it.
#[derive(Debug, Clone, Copy)]
struct InDevice {
    /// Descriptors of the ring.
    count: u16,
    /// Its entry in the account.
    entry: u16,
    is_recovered: bool,
    /// True if the first descriptor names an indirect table.
    is_indirect: bool,
    /// The first descriptor's address and length.
    addr: u64,
    bytes: u32,
}

const NOT_IN_DEVICE: InDevice =
    InDevice { count: 0, entry: 0, is_recovered: false, is_indirect: false, addr: 0, bytes: 0 };

/// Chains that were seen and not popped. A driver that changes their descriptors makes the numbers
/// wrong, which only plans rely on.
#[derive(Debug, Clone, Copy)]
struct SeenChains {
    end: Position,
    chains: u16,
    descriptors: u16,
}

impl PackedQueue {
    /// Returns true if chains of an earlier process, which only the region has, are to be popped.
    #[inline]
    pub fn has_recovered(&self) -> bool {
        self.recovered > 0
    }

    /// Returns true if an earlier process took this chain, which must be popped and not yet pushed.
    pub fn is_recovered(&self, head: u16) -> bool {
        self.chains.get(usize::from(head)).is_some_and(|chain| chain.is_recovered)
    }

    /// Pops the next chain that the driver made available, if there is one.
    ///
    /// # Errors
    ///
    /// If the ring is bad: the device must stop this queue. No earlier chain is lost.
    #[inline(never)]
    pub fn pop(&mut self) -> Result<Option<Chain>, QueueError> {
        if self.recovered > 0 {
            return self.pop_recovered();
        }
        if self.room == 0 || !self.next.is_available(self.ring.flags(self.next.slot)) {
            if !self.memory.map().is_intact() {
                self.drop_lost()?;
            }
            // A driver that takes chains back has nothing to pop.
            self.seen = SeenChains::none(self.next);
            return Ok(None);
        }
        self.memory.translator.start_chain();
        let limits = (self.room, self.config.size);
        let links = PackedLinks::new(&self.ring, self.next.slot, limits, self.config.indirect);
        let walked = chain::walk_links(&mut self.memory.translator, links);
        if !self.memory.map().is_intact() {
            self.drop_lost()?;
            return self.pop();
        }
        let (fault, found) = walked?;
        self.check_id(found.id)?;
        let entry = match &mut self.inflight {
            None => 0,
            Some(inflight) => inflight.take(&self.ring, self.next, found.count)?,
        };
        self.next = self.next.after(found.count, self.config.size);
        self.room -= found.count;
        self.popped = self.popped.wrapping_add(1);
        self.seen.take(found.count, self.next);
        self.note_progress();
        if self.memory.prefetch {
            self.prefetch_next();
        }
        Ok(Some(self.enter(found, entry, false, fault)))
    }

    /// Pops the next chain that an earlier process took, from the copy in the account.
    #[cold]
    fn pop_recovered(&mut self) -> Result<Option<Chain>, QueueError> {
        let Some(taken) = self.inflight.as_mut().and_then(|inflight| inflight.take_again()) else {
            unreachable!("as many were found as were counted");
        };
        let mut walked = self.walk_recovered(taken);
        while !self.memory.map().is_intact() {
            self.drop_lost()?;
            walked = self.walk_recovered(taken);
        }
        let (fault, found) = walked?;
        self.check_id(found.id)?;
        self.recovered -= 1;
        self.popped = self.popped.wrapping_add(1);
        // The account knows how many descriptors of the ring the chain has.
        let found = ChainFacts { count: taken.count, ..found };
        Ok(Some(self.enter(found, taken.entry, true, fault)))
    }

    /// Walks the copy of a chain that an earlier process took.
    fn walk_recovered(
        &mut self,
        taken: Taken,
    ) -> Result<(Option<ChainFault>, ChainFacts), QueueError> {
        let Self { memory, inflight: Some(inflight), config, .. } = self else {
            unreachable!("only an account has chains of earlier processes");
        };
        memory.translator.start_chain();
        let limits = (taken.count, config.size);
        let links = PackedLinks::new(&**inflight, taken.entry, limits, config.indirect);
        chain::walk_links(&mut memory.translator, links)
    }

    /// Refuses an id that no ring of this size has, or that the device holds.
    #[inline]
    fn check_id(&self, id: u16) -> Result<(), QueueError> {
        match self.chains.get(usize::from(id)) {
            Some(chain) if chain.count == 0 => Ok(()),
            Some(_) => Err(QueueError::DuplicateId { id }),
            None => Err(QueueError::HeadOutOfRange { head: id, entries: self.config.size }),
        }
    }

    /// Enters a walked chain into the list of those in the device.
    #[inline(always)]
    fn enter(
        &mut self,
        found: ChainFacts,
        entry: u16,
        is_recovered: bool,
        fault: Option<ChainFault>,
    ) -> Chain {
        let ChainFacts { id, count, addr, bytes, is_indirect } = found;
        self.chains[usize::from(id)] =
            InDevice { count, entry, is_recovered, is_indirect, addr, bytes };
        self.in_device += 1;
        chain::finish(&mut self.memory.translator, id, fault)
    }

    /// Continues without lost regions.
    #[cold]
    fn drop_lost(&mut self) -> Result<(), QueueError> {
        self.set_memory(self.memory.without_lost()).map_err(lost_with_memory)
    }

    /// Prefetches the start of the buffer or indirect table that the next chain names first.
    #[inline]
    fn prefetch_next(&self) {
        let Descriptor { addr, flags, .. } = self.ring.descriptor(self.next.slot);
        if self.next.is_available(flags) {
            self.memory.translator.prefetch(addr);
        }
    }

    /// Writes the used element of a chain that is done. `written_bytes` counts from the start of
    /// the writable bytes. The driver does not see the element yet.
    ///
    /// # Panics
    ///
    /// If the device does not hold this chain.
    #[inline(never)]
    pub fn push(&mut self, head: u16, written_bytes: u32) {
        let chain = std::mem::replace(&mut self.chains[usize::from(head)], NOT_IN_DEVICE);
        assert!(chain.count > 0, "chain {head} was pushed twice or never popped");
        let element = UsedWord::new(self.used, head, written_bytes);
        if self.unpublished == 0 {
            self.first = element;
        } else {
            self.ring.store_used(self.used.slot, element);
        }
        if let Some(inflight) = &mut self.inflight {
            inflight.push(chain.entry);
        }
        self.unpublished += 1;
        self.used = self.used.after(chain.count, self.config.size);
        self.in_device -= 1;
    }

    /// Returns true if `count` used descriptors from `since` on pass the driver's event.
    #[inline]
    fn wants_call(&self, since: Position, count: u16) -> bool {
        match self.ring.driver_suppression() {
            EventSuppression::Always => true,
            EventSuppression::Never => false,
            // After more than a lap, the place does not tell laps apart.
            EventSuppression::At(event)
                if event.slot >= self.config.size || count > self.config.size =>
            {
                true
            }
            EventSuppression::At(event) => since.distance(event, self.config.size) < count,
        }
    }

    /// Makes the next [`publish`](DeviceQueue::publish) ask for a call. Needed when a call may have
    /// been lost, for example with a call eventfd that was replaced.
    pub fn force_call(&mut self) {
        self.call_forced = true;
    }

    /// Counts the chains behind those that were seen.
    #[inline]
    fn scan(&mut self) -> Result<(), QueueError> {
        let size = self.config.size;
        while self.seen.descriptors < self.room {
            let head = self.seen.end;
            let mut flags = self.ring.flags(head.slot);
            if !head.is_available(flags) {
                break;
            }
            let (mut end, mut count) = (head.after(1, size), 1);
            while flags & DESC_F_NEXT != 0 {
                if self.seen.descriptors + count == self.room {
                    return Err(QueueError::Loop { head: head.slot, entries: size });
                }
                flags = self.ring.flags(end.slot);
                (end, count) = (end.after(1, size), count + 1);
            }
            self.seen.end = end;
            self.seen.chains += 1;
            self.seen.descriptors += count;
        }
        Ok(())
    }

    /// Returns true if there is a chain to pop. Cheap enough for busy-polling.
    #[inline]
    pub fn has_available(&self) -> bool {
        self.recovered > 0
            || (self.room > 0 && self.next.is_available(self.ring.flags(self.next.slot)))
    }

    /// Asks the driver to kick when it makes the next chain available.
    ///
    /// Returns true if chains are available already, for which no kick may come. Then call
    /// [`disable_kicks`](Self::disable_kicks) and pop them. After false it is safe to sleep.
    #[must_use = "chains that are available already may come without a kick"]
    pub fn enable_kicks(&mut self) -> bool {
        let suppression = if self.config.event_idx {
            EventSuppression::At(self.next)
        } else {
            EventSuppression::Always
        };
        self.ring.store_device_suppression(suppression);
        self.mark_kick_wish();
        // The counterpart of the fence in `publish`, for available flags and the kick.
        fence(Ordering::SeqCst);
        self.has_available()
    }

    /// Lets the driver omit kicks.
    pub fn disable_kicks(&mut self) {
        self.ring.store_device_suppression(EventSuppression::Never);
        self.mark_kick_wish();
    }

    /// The places of the next chain (low half) and of the next used element (high half), for a
    /// front-end that stops the queue. Each has the wrap counter in its last bit.
    pub fn base(&self) -> u32 {
        u32::from(self.next.bits()) | u32::from(self.published.bits()) << 16
    }

    /// The number of entries of the ring.
    pub fn size(&self) -> u16 {
        self.config.size
    }

    /// The number of the next chain in the ring: chains of an earlier process come before it.
    #[inline]
    fn next_in_ring(&self) -> u32 {
        self.popped.wrapping_add(self.recovered.into())
    }

    /// Shows other threads the next chain in the ring.
    #[inline]
    fn note_progress(&self) {
        if let Some(progress) = &self.progress {
            progress.store(self.next_in_ring(), self.next);
        }
    }

    /// Forgets chains that were seen and not popped. The next process finds them in the ring.
    ///
    /// # Panics
    ///
    /// If [chains of an earlier process](Self::has_recovered) are still to be popped.
    pub fn unmark_rest(&mut self) {
        assert!(self.recovered == 0, "the ring does not have {} chains", self.recovered);
        self.seen = SeenChains::none(self.next);
    }
}

impl DeviceQueue for PackedQueue {
    #[inline(never)]
    fn available(&mut self, fresh: bool) -> Result<u16, QueueError> {
        if fresh || self.seen.chains == 0 {
            self.scan()?;
        }
        Ok(self.recovered + self.seen.chains)
    }

    #[inline(never)]
    fn publish_quietly(&mut self) -> u16 {
        let count = std::mem::take(&mut self.unpublished);
        if count > 0 {
            let size = self.config.size;
            let descriptors = self.published.distance(self.used, size);
            if self.memory.is_logged() {
                self.mark_elements(self.published, descriptors);
            }
            match &mut self.inflight {
                None => self.ring.store_first_used(self.published.slot, self.first),
                Some(inflight) => {
                    inflight.publish(&self.ring, (self.published, self.used), self.first);
                }
            }
            if self.memory.is_logged() {
                // The first element is written now, and may have lost its mark.
                self.mark_elements(self.published, 1);
            }
            self.published = self.used;
            self.room += descriptors;
            self.unchecked = self.unchecked.saturating_add(descriptors).min(size + 1);
        }
        count
    }

    #[inline(never)]
    fn needs_call(&mut self) -> bool {
        let since = std::mem::replace(&mut self.checked, self.used);
        let count = std::mem::take(&mut self.unchecked);
        if self.call_forced {
            self.call_forced = false;
            return true;
        }
        if count == 0 {
            return false;
        }
        // The driver writes its event suppression, and then reads the next used flags. We write
        // these flags, and then read the suppression. Without a full fence on both sides, both
        // could miss the opposite write.
        fence(Ordering::SeqCst);
        self.wants_call(since, count)
    }

    #[inline]
    fn driver_sleeps(&self) -> bool {
        let pushed = self.published.distance(self.used, self.config.size);
        self.wants_call(self.checked, self.unchecked.saturating_add(pushed).saturating_add(1))
    }

    #[inline]
    fn next_chain(&self) -> u16 {
        let [low, high, ..] = self.popped.to_le_bytes();
        u16::from_le_bytes([low, high])
    }

    #[inline]
    fn in_device(&self) -> u16 {
        self.in_device
    }
}

impl SeenChains {
    fn none(next: Position) -> Self {
        Self { end: next, chains: 0, descriptors: 0 }
    }

    /// Removes the first chain, after which the next one begins at `next`.
    #[inline]
    fn take(&mut self, count: u16, next: Position) {
        if self.chains <= 1 || self.descriptors <= count {
            *self = Self::none(next);
        } else {
            self.chains -= 1;
            self.descriptors -= count;
        }
    }
}

impl Slots for DescriptorRing {
    #[inline]
    fn descriptor(&self, slot: u16) -> Result<Descriptor, QueueError> {
        Ok(Self::descriptor(self, slot))
    }

    #[inline]
    fn after(&self, slot: u16) -> u16 {
        if slot + 1 == self.size { 0 } else { slot + 1 }
    }
}

impl Slots for PackedInflight {
    fn descriptor(&self, slot: u16) -> Result<Descriptor, QueueError> {
        Self::descriptor(self, slot)
    }

    fn after(&self, slot: u16) -> u16 {
        Self::after(self, slot)
    }
}
