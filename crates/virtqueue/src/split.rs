//! The device side of a split virtqueue (virtio 1.3, section 2.7).
//!
//! Setup checks the rings once; then host pointers access them. The avail idx is read on request,
//! and when all announced chains are popped. The used idx is written once per batch.

mod log;
mod popped;

use std::sync::atomic::{Ordering, fence};

use crate::chain::{self, Chain};
use crate::device_queue::DeviceQueue;
use crate::error::{ChainFault, InflightError, QueueError, RingPart};
use crate::inflight::{Inflight, InflightAccount, Recovery, RingState};
use crate::memory::{DESCRIPTOR_BYTES, LocalMemory, MAX_QUEUE_SIZE, Translator};
use crate::queue_memory::{QueueMemory, lost_with_memory};
use crate::rings::{RingParts, Rings, map_part};

const DESC_TABLE_ALIGN: usize = 16;
/// The driver wants no calls; not used with event idx (virtio 1.3, section 2.7.6).
const AVAIL_F_NO_INTERRUPT: u16 = 1;
/// The device wants no kicks; not used with event idx (virtio 1.3, section 2.7.8).
const USED_F_NO_NOTIFY: u16 = 1;

/// The driver's set-up of a queue. The fields have the names of a split queue's parts;
/// [`PackedQueue::new`](crate::PackedQueue::new) states those of a packed one.
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
    /// True if `VIRTIO_F_EVENT_IDX` was negotiated.
    pub event_idx: bool,
    /// True if `VIRTIO_F_INDIRECT_DESC` was negotiated.
    pub indirect: bool,
    /// The avail entry to begin with: 0, or the entry at which the queue was stopped.
    pub next_avail: u16,
}

/// A split virtqueue, as the device sees it. Belongs to one thread.
///
/// Chains are popped, and pushed when they are done, in any order. [`DeviceQueue::publish`] makes
/// pushed elements visible to the driver. Dropping the queue touches no ring. Chains keep their own
/// memory mapped.
#[derive(Debug)]
pub struct SplitQueue {
    pub(crate) memory: QueueMemory,
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
    /// The configured `next_avail` minus the used idx at the start.
    avail_lead: u16,
    /// The first used element that was not yet compared with the driver's wish for a call.
    checked_used: u16,
    /// True if the driver must be called regardless, because its last event is not known.
    call_forced: bool,
    /// The number of chains still to be popped that an earlier process saw and did not answer.
    recovered: u16,
    /// The account that marks requests while they are in the device.
    inflight: Option<Box<Inflight>>,
}

impl SplitQueue {
    /// Takes over a queue that the driver has set up.
    ///
    /// Takes used idx from the ring and disables kicks. The first `publish` asks for a call.
    ///
    /// # Errors
    ///
    /// If the size is not a power of two from 1 to [`MAX_QUEUE_SIZE`], or a part of the ring is
    /// misaligned or not within one memory region.
    pub fn new(memory: LocalMemory, config: QueueConfig) -> Result<Self, QueueError> {
        if !config.size.is_power_of_two() || config.size > MAX_QUEUE_SIZE {
            return Err(QueueError::Size { size: config.size, max: MAX_QUEUE_SIZE });
        }
        let (translator, rings) = map_parts(memory, &config)?;
        let next_used = rings.load_used_idx();
        let queue = Self {
            memory: QueueMemory::new(translator),
            rings,
            config,
            next_avail: config.next_avail,
            avail_shadow: config.next_avail,
            next_used,
            published_used: next_used,
            checked_used: next_used,
            in_device: 0,
            avail_lead: config.next_avail.wrapping_sub(next_used),
            call_forced: true,
            recovered: 0,
            inflight: None,
        };
        queue.rings.store_used_flags(if config.event_idx { 0 } else { USED_F_NO_NOTIFY });
        Ok(queue)
    }

    /// Takes over a queue whose requests are marked in an inflight region. If the region knows the
    /// ring, the queue continues from it. The chains that an earlier process took and did not
    /// answer come first, in the order in which they were taken.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new), and if the region is invalid.
    pub fn with_inflight(
        memory: LocalMemory,
        config: QueueConfig,
        inflight: &InflightAccount,
    ) -> Result<(Self, Recovery), QueueError> {
        let mut queue = Self::new(memory, config)?;
        let ring = RingState {
            size: config.size,
            used_idx: queue.next_used,
            avail_idx: queue.rings.load_avail_idx(),
        };
        let (inflight, recovery) = Inflight::open(inflight, ring)?;
        let requests = match recovery {
            Recovery::Known { requests } => requests,
            Recovery::New | Recovery::Stale { .. } => 0,
        };
        // Take the requests for the next ones in the avail ring, although their order there may
        // differ. All accounts of a ring begin at its used idx, regardless of the front-end.
        queue.next_avail = queue.next_used;
        queue.avail_lead = 0;
        queue.avail_shadow = queue.next_used.wrapping_add(requests);
        queue.recovered = requests;
        queue.inflight = Some(Box::new(inflight));
        Ok((queue, recovery))
    }

    /// Returns true if chains of an earlier process, which only the region has, are to be popped.
    #[inline]
    pub fn has_recovered(&self) -> bool {
        self.recovered > 0
    }

    /// Pops the next chain that the driver made available, if there is one.
    ///
    /// # Errors
    ///
    /// If the ring is bad: the device must stop this queue. No earlier chain is lost.
    #[inline]
    pub fn pop(&mut self) -> Result<Option<Chain>, QueueError> {
        let recovered = self.recovered;
        let walked = self.walk_next();
        if !self.memory.map().is_intact() {
            self.recovered = recovered;
            return self.pop_after_loss();
        }
        let Some((head, fault)) = walked? else { return Ok(None) };
        self.next_avail = self.next_avail.wrapping_add(1);
        self.in_device += 1;
        // The chain is made in the caller's place: nothing copies it.
        Ok(Some(chain::finish(&mut self.memory.translator, head, fault)))
    }

    /// Pops again without lost regions, since the chain may have come from memory that is gone.
    #[cold]
    fn pop_after_loss(&mut self) -> Result<Option<Chain>, QueueError> {
        self.set_memory(self.memory.without_lost()).map_err(lost_with_memory)?;
        self.pop()
    }

    /// Walks the next chain, and leaves its buffers in the translator.
    #[inline]
    fn walk_next(&mut self) -> Result<Option<(u16, Option<ChainFault>)>, QueueError> {
        if self.next_avail == self.avail_shadow && !self.read_avail_idx()? {
            return Ok(None);
        }
        let head = if self.recovered == 0 {
            if self.memory.prefetch {
                self.prefetch_next();
            }
            self.rings.avail_entry(self.next_avail)
        } else {
            self.recovered_head()
        };
        let fault = chain::walk(&mut self.memory.translator, head, self.config.indirect)?;
        Ok(Some((head, fault)))
    }

    /// Prefetches for the next chains. Each step needs the result of the step before, so each pop
    /// takes one step for each of these chains.
    #[inline]
    fn prefetch_next(&self) {
        let after = self.avail_shadow.wrapping_sub(self.next_avail) - 1;
        let head = |ahead| self.rings.avail_entry(self.next_avail.wrapping_add(ahead));
        let mut ahead = 1;
        // Drivers use indirect tables for all requests or for few.
        if self.memory.translator.is_indirect() && after >= ahead {
            self.memory.translator.prefetch_in_indirect(head(ahead));
            ahead += 1;
        }
        if after >= ahead {
            self.memory.translator.prefetch_named(head(ahead));
            // Without such a chain, an older one is fetched.
            self.memory.translator.prefetch_descriptor(head(ahead + 1));
        }
    }

    /// Returns the next head that an earlier process saw.
    #[cold]
    fn recovered_head(&mut self) -> u16 {
        let left = self.recovered;
        self.recovered -= 1;
        match &self.inflight {
            Some(inflight) => inflight.recovered_head(left),
            None => unreachable!("nobody else knows of earlier processes"),
        }
    }

    /// Writes the used element of a chain that is done. `written_bytes` counts from the start of
    /// the writable bytes. The driver does not see the element yet.
    ///
    /// Chains may be pushed in any order, each once. Pushing any other head confuses the driver.
    ///
    /// # Panics
    ///
    /// If all chains that were popped have been pushed.
    #[inline]
    pub fn push(&mut self, head: u16, written_bytes: u32) {
        assert!(self.in_device > 0, "chain {head} was pushed twice or never popped");
        self.rings.store_used_entry(self.next_used, head, written_bytes);
        self.next_used = self.next_used.wrapping_add(1);
        self.in_device -= 1;
    }

    /// Makes `count` elements visible.
    #[inline]
    fn store_used_idx(&mut self, count: u16) {
        let (first, end) = (self.published_used, self.next_used);
        match &mut self.inflight {
            None => self.rings.store_used_idx(end),
            Some(inflight) if count == 1 => inflight.publish_one(&self.rings, first),
            Some(inflight) => inflight.publish(&self.rings, first, end),
        }
        self.published_used = end;
    }

    /// Makes the next [`publish`](DeviceQueue::publish) ask for a call. Needed when a call may have
    /// been lost, for example with a call eventfd that was replaced.
    pub fn force_call(&mut self) {
        self.call_forced = true;
    }

    /// Returns true if there is a chain to pop. Cheap enough for busy-polling.
    #[inline]
    pub fn has_available(&self) -> bool {
        self.next_avail != self.avail_shadow || self.next_avail != self.rings.load_avail_idx()
    }

    /// Asks the driver to kick when it makes the next chain available.
    ///
    /// Returns true if chains are available already, for which no kick may come. Then call
    /// [`disable_kicks`](Self::disable_kicks) and pop them. After false it is safe to sleep.
    #[inline]
    #[must_use = "chains that are available already may come without a kick"]
    pub fn enable_kicks(&mut self) -> bool {
        if self.config.event_idx {
            self.rings.store_avail_event(self.next_avail);
        } else {
            self.rings.store_used_flags(0);
        }
        self.mark_kick_wish();
        // The counterpart of the fence in `publish`, for avail idx and the kick.
        fence(Ordering::SeqCst);
        self.next_avail != self.rings.load_avail_idx()
    }

    /// Lets the driver omit kicks. With event idx nothing is written: the event becomes stale
    /// anyway.
    #[inline]
    pub fn disable_kicks(&mut self) {
        if !self.config.event_idx {
            self.rings.store_used_flags(USED_F_NO_NOTIFY);
            self.mark_kick_wish();
        }
    }

    /// The avail entry to pop next, for a front-end that stops the queue with nothing in the
    /// device.
    #[inline]
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// The number of entries of the ring.
    pub fn size(&self) -> u16 {
        self.config.size
    }

    /// Continues in a changed memory map, in which the rings have the same guest addresses. Chains
    /// that were popped keep the old map.
    ///
    /// # Errors
    ///
    /// As for [`SplitQueue::new`]. The queue then keeps the old map.
    pub fn set_memory(&mut self, memory: LocalMemory) -> Result<(), QueueError> {
        let (translator, rings) = map_parts(memory, &self.config)?;
        self.memory.replace(translator);
        self.rings = rings;
        Ok(())
    }

    /// Reads avail idx. Returns true if it announces chains that were not popped.
    #[inline]
    fn read_avail_idx(&mut self) -> Result<bool, QueueError> {
        // Acquire: entries and descriptors from before avail idx are seen after it.
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
            // Avail idx does not go back: chains that were seen count as taken.
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

    /// Marks chains that are seen for the first time. A queue does not continue without marks.
    #[inline(never)]
    fn mark_up_to(&mut self, avail_idx: u16) -> Result<(), InflightError> {
        let Self { inflight, rings, avail_shadow, .. } = self;
        let Some(inflight) = inflight else { return Ok(()) };
        let count = avail_idx.wrapping_sub(*avail_shadow);
        let entries = (0..count).map(|at| avail_shadow.wrapping_add(at));
        inflight.seen(entries.map(|index| rings.avail_entry(index)));
        if inflight.is_intact() { Ok(()) } else { Err(InflightError::Gone) }
    }
}

impl DeviceQueue for SplitQueue {
    #[inline]
    fn available(&mut self, fresh: bool) -> Result<u16, QueueError> {
        if fresh || self.next_avail == self.avail_shadow {
            self.read_avail_idx()?;
        }
        Ok(self.avail_shadow.wrapping_sub(self.next_avail))
    }

    #[inline]
    fn publish_quietly(&mut self) -> u16 {
        let count = self.next_used.wrapping_sub(self.published_used);
        if count > 0 && !self.memory.is_logged() {
            self.store_used_idx(count);
        } else if count > 0 {
            self.publish_with_marks(count);
        }
        let unchecked = self.next_used.wrapping_sub(self.checked_used);
        assert!(unchecked <= UNCHECKED_MAX, "no call was considered for {unchecked} elements");
        count
    }

    #[inline]
    fn needs_call(&mut self) -> bool {
        let (old, new) = (self.checked_used, self.next_used);
        self.checked_used = new;
        if self.call_forced {
            self.call_forced = false;
            return true;
        }
        if old == new {
            return false;
        }
        // The driver writes its event (or flag) and then reads used idx. We write used idx and then
        // read the event. Without a full fence on both sides, both could miss the opposite write.
        fence(Ordering::SeqCst);
        if self.config.event_idx {
            need_event(self.rings.load_used_event(), new, old)
        } else {
            self.rings.load_avail_flags() & AVAIL_F_NO_INTERRUPT == 0
        }
    }

    #[inline]
    fn driver_sleeps(&self) -> bool {
        if self.config.event_idx {
            let asked = self.rings.load_used_event().wrapping_sub(self.checked_used);
            asked <= self.next_used.wrapping_sub(self.checked_used)
        } else {
            self.rings.load_avail_flags() & AVAIL_F_NO_INTERRUPT == 0
        }
    }

    #[inline]
    fn next_chain(&self) -> u16 {
        self.next_avail
    }

    #[inline]
    fn in_device(&self) -> u16 {
        self.in_device
    }
}

/// The most used elements between two checks of the driver's wish for a call: `need_event` wraps.
const UNCHECKED_MAX: u16 = 1 << 15;

/// Returns true if publishing the entries from `old` up to `new` passes `event`, for which the
/// driver waits (virtio 1.3, section 2.7.7.1). All of it wraps.
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
    fn an_event_is_passed_exactly_when_it_is_in_the_published_range() {
        for old in 0..=u16::MAX {
            for count in [0, 1, 2, 3, 1024, 0x8000, u16::MAX] {
                let new = old.wrapping_add(count);
                // Events around both ends of the published range decide.
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
