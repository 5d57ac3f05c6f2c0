//! The device side of a split virtqueue (virtio 1.3, section 2.7).
//!
//! Setup checks the rings once; then host pointers access them. The avail idx is read on request
//! and when all announced chains are popped. The used idx is written once per batch.

mod back;

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use crate::chain::{self, Chain};
use crate::error::{ChainFault, InflightError, QueueError, RingPart};
use crate::inflight::{Inflight, InflightQueue, Recovery, RingNow};
use crate::limits::MAX_QUEUE_SIZE;
use crate::memory::{AnswerPlace, DESCRIPTOR_BYTES, GuestMemory, LocalMemory, Translator};
use crate::rings::{AvailIdx, RingParts, Rings, map_part};

const DESC_TABLE_ALIGN: usize = 16;
/// The driver wants no calls; not used with event idx (virtio 1.3, section 2.7.6).
const AVAIL_F_NO_INTERRUPT: u16 = 1;
/// The device wants no kicks; not used with event idx (virtio 1.3, section 2.7.8).
const USED_F_NO_NOTIFY: u16 = 1;

/// How the driver set up the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueConfig {
    /// Entries: a power of two from 1 to [`MAX_QUEUE_SIZE`].
    pub size: u16,
    /// Guest address of the descriptor table, aligned to 16 bytes.
    pub desc_table: u64,
    /// Guest address of the avail ring, aligned to 2 bytes.
    pub avail_ring: u64,
    /// Guest address of the used ring, aligned to 4 bytes.
    pub used_ring: u64,
    /// Whether `VIRTIO_F_EVENT_IDX` was negotiated.
    pub event_idx: bool,
    /// Whether `VIRTIO_F_INDIRECT_DESC` was negotiated.
    pub indirect: bool,
    /// The avail entry to begin with: 0, or where the queue was stopped.
    pub next_avail: u16,
}

/// A split virtqueue, as the device sees it. Belongs to one thread.
///
/// Chains are popped, and pushed when they are done, in any order. Pushed elements become visible
/// to the driver with [`SplitQueue::publish`]. Dropping the queue touches no ring; chains keep
/// their memory by themselves.
#[derive(Debug)]
pub struct SplitQueue {
    translator: Translator,
    rings: Rings,
    config: QueueConfig,
    /// The avail entry to pop next.
    next_avail: u16,
    /// The driver's avail idx as last read.
    avail_shadow: u16,
    /// The used entry to write next.
    next_used: u16,
    in_device: u16,
    /// The used idx in the ring.
    published_used: u16,
    /// How far the avail ring was ahead of the used ring when the queue started.
    avail_ahead: u16,
    /// The driver's wish for a call was looked at for all used elements before this one.
    checked_used: u16,
    /// The driver's last event is not known, so call it regardless.
    call_forced: bool,
    /// Chains that an earlier process had seen and not answered, and that are still to be popped.
    again_left: u16,
    /// Where requests are marked while they are in the device.
    inflight: Option<Box<Inflight>>,
    /// Whether the processor fetches what the next chains need.
    prefetch: bool,
}

impl SplitQueue {
    /// Takes over a queue that the driver has set up.
    ///
    /// The used idx is taken from the ring, kicks are disabled, and the first
    /// [`publish`](Self::publish) asks for a call.
    ///
    /// # Errors
    ///
    /// When the size is not a power of two from 1 to [`MAX_QUEUE_SIZE`], or a part of the ring is
    /// misaligned or not within one memory region.
    pub fn new(memory: LocalMemory, config: QueueConfig) -> Result<Self, QueueError> {
        if !config.size.is_power_of_two() || config.size > MAX_QUEUE_SIZE {
            return Err(QueueError::Size { size: config.size, max: MAX_QUEUE_SIZE });
        }
        let (translator, rings) = map_parts(memory, &config)?;
        let next_used = rings.load_used_idx();
        let queue = Self {
            translator,
            rings,
            config,
            next_avail: config.next_avail,
            avail_shadow: config.next_avail,
            next_used,
            published_used: next_used,
            checked_used: next_used,
            in_device: 0,
            avail_ahead: config.next_avail.wrapping_sub(next_used),
            call_forced: true,
            again_left: 0,
            inflight: None,
            prefetch: true,
        };
        queue.rings.store_used_flags(if config.event_idx { 0 } else { USED_F_NO_NOTIFY });
        Ok(queue)
    }

    /// As [`new`](Self::new), for a queue whose requests are marked in an inflight region. If the
    /// region knows the ring, it says where to continue: first with the chains that an earlier
    /// process had taken and not answered, in the order in which it had taken them.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and when the region cannot be understood.
    pub fn with_inflight(
        memory: LocalMemory,
        config: QueueConfig,
        inflight: &InflightQueue,
    ) -> Result<(Self, Recovery), QueueError> {
        let mut queue = Self::new(memory, config)?;
        let ring = RingNow {
            size: config.size,
            used_idx: queue.next_used,
            avail_idx: queue.rings.load_avail_idx(),
        };
        let (inflight, recovery) = Inflight::open(inflight, ring)?;
        let requests = match recovery {
            Recovery::Known { requests } => requests,
            Recovery::New | Recovery::Stale { .. } => 0,
        };
        // As if they were the next in the avail ring. Their order there may have been another. All
        // accounts of a ring begin at its used idx, whatever the front-end says.
        queue.next_avail = queue.next_used;
        queue.avail_shadow = queue.next_used.wrapping_add(requests);
        queue.again_left = requests;
        queue.inflight = Some(Box::new(inflight));
        Ok((queue, recovery))
    }

    /// Whether a pop has the processor fetch what the chains after it need: it takes its time to do
    /// so, as the driver has just written that on another processor. On at first.
    pub fn set_prefetch(&mut self, on: bool) {
        self.prefetch = on;
    }

    /// Where chains are answered that have a fault. In the last byte at first.
    pub fn set_answer_place(&mut self, place: AnswerPlace) {
        self.translator.set_answer_place(place);
    }

    /// Whether chains are left to be popped that an earlier process had taken. The avail ring does
    /// not have them any more: nobody but this queue and the region knows of them.
    #[inline]
    pub fn has_again(&self) -> bool {
        self.again_left > 0
    }

    /// Whether an earlier process has seen the chain with this head, popped but not pushed here.
    pub fn is_of_earlier(&self, head: u16) -> bool {
        self.inflight.as_ref().is_some_and(|inflight| inflight.is_of_earlier(head))
    }

    /// Takes the next chain that the driver made available, if there is one.
    ///
    /// # Errors
    ///
    /// When the ring is bad: the device must stop this queue. No chain has been lost before.
    #[inline]
    pub fn pop(&mut self) -> Result<Option<Chain>, QueueError> {
        let again_left = self.again_left;
        let walked = self.walk_next();
        if !self.translator.memory().is_intact() {
            self.again_left = again_left;
            return self.pop_after_loss();
        }
        let Some((head, fault)) = walked? else { return Ok(None) };
        self.next_avail = self.next_avail.wrapping_add(1);
        self.in_device += 1;
        // The chain is made where the caller wants it: nothing copies it.
        Ok(Some(chain::finish(&mut self.translator, head, fault)))
    }

    /// What was popped may come from memory that is gone, so it is popped again without it.
    #[cold]
    fn pop_after_loss(&mut self) -> Result<Option<Chain>, QueueError> {
        let gone = |part, addr, len| QueueError::MemoryGone { part, addr, len };
        let memory = self.translator.memory();
        // A part of the regions of a map is a map as well.
        let rest = memory.without_lost().unwrap_or_else(|_| GuestMemory::empty());
        match self.set_memory(LocalMemory::new(Arc::new(rest))) {
            Err(QueueError::Unmapped { part, addr, len }) => return Err(gone(part, addr, len)),
            other => other?,
        }
        self.pop()
    }

    /// Walks the next chain, which leaves its buffers in the translator.
    #[inline]
    fn walk_next(&mut self) -> Result<Option<(u16, Option<ChainFault>)>, QueueError> {
        if self.next_avail == self.avail_shadow && !self.look_for_more()? {
            return Ok(None);
        }
        let head = if self.again_left == 0 {
            if self.prefetch {
                self.prefetch_next();
            }
            self.rings.avail_entry(self.next_avail)
        } else {
            self.head_again()
        };
        let fault = chain::walk(&mut self.translator, head, self.config.indirect)?;
        Ok(Some((head, fault)))
    }

    /// Each step needs what the step before has fetched, so each pop takes one of them for each of
    /// the next chains.
    #[inline]
    fn prefetch_next(&self) {
        let after = self.avail_shadow.wrapping_sub(self.next_avail) - 1;
        let head = |ahead| self.rings.avail_entry(self.next_avail.wrapping_add(ahead));
        let mut ahead = 1;
        // Drivers have indirect tables for all requests or for few.
        if self.translator.is_indirect() && after >= ahead {
            self.translator.prefetch_in_indirect(head(ahead));
            ahead += 1;
        }
        if after >= ahead {
            self.translator.prefetch_named(head(ahead));
            // If there is no such chain, an older one is fetched.
            self.translator.prefetch_descriptor(head(ahead + 1));
        }
    }

    /// The next head that an earlier process had seen.
    #[cold]
    fn head_again(&mut self) -> u16 {
        let left = self.again_left;
        self.again_left -= 1;
        match &self.inflight {
            Some(inflight) => inflight.head_again(left),
            None => unreachable!("nobody else knows of earlier processes"),
        }
    }

    /// The head of the next used element, if all are answered in the order in which they were made
    /// available, and with nothing of an earlier process.
    pub fn head_in_order(&self) -> u16 {
        self.rings.avail_entry(self.next_used.wrapping_add(self.avail_ahead))
    }

    /// Writes a used element: the chain with this head is done, and the device wrote this many
    /// bytes to it, counted from the start of what is writable. The driver does not see it yet.
    ///
    /// Chains may be pushed in any order, each once. Pushing what was not popped confuses the
    /// driver.
    ///
    /// # Panics
    ///
    /// When all chains that were popped have been pushed.
    #[inline]
    pub fn push(&mut self, head: u16, written_bytes: u32) {
        assert!(self.in_device > 0, "chain {head} was pushed twice or never popped");
        self.rings.store_used_entry(self.next_used, head, written_bytes);
        self.next_used = self.next_used.wrapping_add(1);
        self.in_device -= 1;
    }

    /// Makes all pushed elements visible, and returns how many are new. A driver that sleeps sees
    /// them when [`publish`](Self::publish) has asked for a call, as it must in the end.
    #[inline]
    pub fn publish_quietly(&mut self) -> u16 {
        let count = self.next_used.wrapping_sub(self.published_used);
        if count > 0 {
            let (first, end) = (self.published_used, self.next_used);
            match &mut self.inflight {
                None => self.rings.store_used_idx(end),
                Some(inflight) if count == 1 => inflight.publish_one(&self.rings, first),
                Some(inflight) => inflight.publish(&self.rings, first, end),
            }
            self.published_used = end;
        }
        let unchecked = self.next_used.wrapping_sub(self.checked_used);
        assert!(unchecked <= UNCHECKED_MAX, "nobody has asked if {unchecked} elements want a call");
        count
    }

    /// Whether the driver seems to sleep until it is called for what was pushed since the last
    /// [`publish`](Self::publish), or for the next element: a cheap look, which may miss a driver
    /// that has just asked.
    #[inline]
    pub fn is_awaited(&self) -> bool {
        if self.config.event_idx {
            let asked = self.rings.load_used_event().wrapping_sub(self.checked_used);
            asked <= self.next_used.wrapping_sub(self.checked_used)
        } else {
            self.rings.load_avail_flags() & AVAIL_F_NO_INTERRUPT == 0
        }
    }

    /// How many chains there are to pop: by a look now, or the last one if that has left some and
    /// `fresh` is false.
    ///
    /// # Errors
    ///
    /// As [`pop`](Self::pop).
    #[inline]
    pub fn available(&mut self, fresh: bool) -> Result<u16, QueueError> {
        if fresh || self.next_avail == self.avail_shadow {
            self.look_for_more()?;
        }
        Ok(self.avail_shadow.wrapping_sub(self.next_avail))
    }

    /// As [`available`](Self::available), by a look now. A ring that is bad has none; the next pop
    /// finds out that it is.
    pub fn available_now(&mut self) -> u16 {
        self.available(true).unwrap_or(0)
    }

    /// Makes all pushed elements visible to the driver, and returns whether it wants a call for
    /// any element since this was last asked. Also true when a call is forced, with or without new
    /// elements.
    #[inline]
    #[must_use = "the driver may sleep until it is called"]
    pub fn publish(&mut self) -> bool {
        self.publish_quietly();
        let (old, new) = (self.checked_used, self.next_used);
        self.checked_used = new;
        if self.call_forced {
            self.call_forced = false;
            return true;
        }
        if old == new {
            return false;
        }
        // The driver writes its event (or flag) and then looks at used idx; we write used idx and
        // then look at the event. Only a full fence on both sides lets one of us see the other.
        fence(Ordering::SeqCst);
        if self.config.event_idx {
            need_event(self.rings.load_used_event(), new, old)
        } else {
            self.rings.load_avail_flags() & AVAIL_F_NO_INTERRUPT == 0
        }
    }

    /// Makes the next [`publish`](Self::publish) ask for a call: when a call may have been lost,
    /// for example because the call eventfd was replaced.
    pub fn force_call(&mut self) {
        self.call_forced = true;
    }

    /// Whether there is something to pop: a cheap look, for busy-polling.
    #[inline]
    pub fn has_available(&self) -> bool {
        self.next_avail != self.avail_shadow || self.next_avail != self.rings.load_avail_idx()
    }

    /// Asks the driver to kick when it makes the next chain available.
    ///
    /// Returns true when chains are available already, for which no kick may come: then call
    /// [`disable_kicks`](Self::disable_kicks) and pop them. On false it is safe to sleep.
    #[must_use = "chains that are available already may come without a kick"]
    pub fn enable_kicks(&mut self) -> bool {
        if self.config.event_idx {
            self.rings.store_avail_event(self.next_avail);
        } else {
            self.rings.store_used_flags(0);
        }
        // The counterpart of the fence in `publish`, for avail idx and the kick.
        fence(Ordering::SeqCst);
        self.next_avail != self.rings.load_avail_idx()
    }

    /// Tells the driver that it need not kick. With event idx nothing is written: the event falls
    /// behind on its own.
    pub fn disable_kicks(&mut self) {
        if !self.config.event_idx {
            self.rings.store_used_flags(USED_F_NO_NOTIFY);
        }
    }

    /// The avail entry that will be popped next: what a front-end wants to know when it stops the
    /// queue, provided that nothing is in the device.
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// What tells other threads how far the driver is.
    pub fn avail_idx(&self) -> AvailIdx {
        AvailIdx::new(self.translator.memory(), self.config.avail_ring)
    }

    /// Entries of the ring.
    pub fn size(&self) -> u16 {
        self.config.size
    }

    /// How many chains were popped and not pushed yet.
    #[inline]
    pub fn in_device(&self) -> u16 {
        self.in_device
    }

    /// Continues in a changed memory map, in which the rings have the same guest addresses.
    /// Chains that were popped keep the old map.
    ///
    /// # Errors
    ///
    /// As [`SplitQueue::new`]; then the queue still uses the old map.
    pub fn set_memory(&mut self, memory: LocalMemory) -> Result<(), QueueError> {
        let answer_place = self.translator.answer_place();
        (self.translator, self.rings) = map_parts(memory, &self.config)?;
        self.translator.set_answer_place(answer_place);
        Ok(())
    }

    /// Reads avail idx; true when it announces chains that were not popped.
    #[inline]
    fn look_for_more(&mut self) -> Result<bool, QueueError> {
        // Acquire: what the driver wrote before avail idx, entries and descriptors, is seen after.
        let avail_idx = self.rings.load_avail_idx();
        let available = avail_idx.wrapping_sub(self.next_avail);
        let QueueConfig { size, .. } = self.config;
        if available > size - self.in_device {
            return Err(if available > size {
                QueueError::AvailIndex { avail_idx, next_avail: self.next_avail, size }
            } else {
                QueueError::TooManyChains { available, in_device: self.in_device, size }
            });
        }
        if avail_idx != self.avail_shadow {
            // It does not go back: what has been seen is taken.
            if avail_idx.wrapping_sub(self.avail_shadow) > size {
                let next_avail = self.avail_shadow;
                return Err(QueueError::AvailIndex { avail_idx, next_avail, size });
            }
            if self.inflight.is_some() {
                self.mark_up_to(avail_idx)?;
            }
            self.avail_shadow = avail_idx;
        }
        Ok(available > 0)
    }

    /// Marks chains that are seen for the first time. Without marks a queue does not go on.
    #[inline(never)]
    fn mark_up_to(&mut self, avail_idx: u16) -> Result<(), InflightError> {
        let Self { inflight, rings, avail_shadow, .. } = self;
        let Some(inflight) = inflight else { return Ok(()) };
        let count = avail_idx.wrapping_sub(*avail_shadow);
        let entries = (0..count).map(|at| avail_shadow.wrapping_add(at));
        inflight.seen(entries.map(|index| rings.avail_entry(index)));
        if inflight.is_intact() { Ok(()) } else { Err(InflightError::Gone) }
    }

    /// Leaves chains that were seen and not popped to whoever serves the ring next, and to the
    /// avail ring alone.
    pub fn leave_rest(&mut self) {
        assert!(self.again_left == 0, "the avail ring does not have {} chains", self.again_left);
        let Self { inflight, rings, next_avail, avail_shadow, .. } = self;
        if let Some(inflight) = inflight {
            let count = avail_shadow.wrapping_sub(*next_avail);
            let entries = (0..count).rev().map(|at| next_avail.wrapping_add(at));
            inflight.leave(entries.map(|index| rings.avail_entry(index)));
        }
        self.avail_shadow = self.next_avail;
    }
}

/// Used elements that may be published before the driver's wish for a call is looked at, for the
/// comparison in `need_event` wraps.
const UNCHECKED_MAX: u16 = 1 << 15;

/// Whether publishing the entries from `old` up to `new` passes the entry that the other side waits
/// for (virtio 1.3, section 2.7.7.1). All of it wraps.
#[inline]
fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

fn map_parts(memory: LocalMemory, config: &QueueConfig) -> Result<(Translator, Rings), QueueError> {
    let desc_table_bytes = usize::from(config.size) * DESCRIPTOR_BYTES;
    map_part(&memory, RingPart::DescTable, config.desc_table, desc_table_bytes, DESC_TABLE_ALIGN)?;
    let QueueConfig { size, avail_ring, used_ring, event_idx, .. } = *config;
    let rings = Rings::new(&memory, &RingParts { size, avail_ring, used_ring, event_idx })?;
    let translator =
        Translator::new(memory, config.desc_table, config.size).ok_or(QueueError::Unmapped {
            part: RingPart::DescTable,
            addr: config.desc_table,
            len: desc_table_bytes,
        })?;
    Ok((translator, rings))
}

#[cfg(test)]
mod tests {
    use super::need_event;

    #[test]
    #[cfg_attr(miri, ignore = "tries every index")]
    fn an_event_is_passed_exactly_when_it_is_among_what_is_published() {
        for old in 0..=u16::MAX {
            for count in [0, 1, 2, 3, 1024, 0x8000, u16::MAX] {
                let new = old.wrapping_add(count);
                // Those around both ends of what is published decide.
                for near in [old, new] {
                    for event in
                        [near.wrapping_sub(2), near.wrapping_sub(1), near, near.wrapping_add(1)]
                    {
                        let position = event.wrapping_sub(old);
                        assert_eq!(need_event(event, new, old), position < count);
                    }
                }
            }
        }
    }
}
