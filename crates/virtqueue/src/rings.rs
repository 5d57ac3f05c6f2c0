//! Host pointers to the avail and used rings of a split virtqueue, and all accesses to the rings.

use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicU16, Ordering};

use crate::death::before_store;
use crate::error::{QueueError, RingPart};
use crate::memory::LocalMemory;

const AVAIL_RING_ALIGN: usize = 2;
const USED_RING_ALIGN: usize = 4;

/// Offset of `idx` in both rings; `flags` is at 0.
pub(crate) const RING_IDX: usize = 2;
/// Offset of the entries in both rings.
const RING_ENTRIES: usize = 4;
const AVAIL_ENTRY_BYTES: usize = 2;
const USED_ENTRY_BYTES: usize = 8;
/// Bytes of `used_event` after the avail ring's entries, and of `avail_event` after the used
/// ring's.
pub(crate) const RING_EVENT_BYTES: usize = 2;

/// The size and the guest addresses of both rings.
pub(crate) struct RingParts {
    pub(crate) size: u16,
    pub(crate) avail_ring: u64,
    pub(crate) used_ring: u64,
    pub(crate) event_idx: bool,
}

/// Checks a part of the ring, and returns its host address. Atomic accesses need an aligned host
/// address. It is aligned if the guest address is, unless a front-end placed a region at an odd
/// address.
pub(crate) fn map_part(
    memory: &LocalMemory,
    part: RingPart,
    addr: u64,
    len: usize,
    align: usize,
) -> Result<*mut u8, QueueError> {
    let host = memory.host_of(addr, len).ok_or(QueueError::Unmapped { part, addr, len })?;
    if !addr.is_multiple_of(align as u64) || !host.addr().is_multiple_of(align) {
        return Err(QueueError::Misaligned { part, addr, align });
    }
    Ok(host)
}

/// Host pointers to the avail and used rings.
///
/// Both rings were checked to be aligned and within one memory region each. They have as many
/// entries as `mask` lets through, and their event if event idx is on. The queue's translator keeps
/// the map, and `SplitQueue::set_memory` replaces both together, so the pointers are good while the
/// queue has them. The driver accesses the same memory, so every access is atomic or volatile.
#[derive(Debug)]
pub(crate) struct Rings {
    avail: *mut u8,
    used: *mut u8,
    /// Null without event idx.
    used_event: *mut u8,
    /// Null without event idx.
    avail_event: *mut u8,
    /// The queue size minus one.
    mask: u16,
}

impl Rings {
    pub(crate) fn new(memory: &LocalMemory, parts: &RingParts) -> Result<Self, QueueError> {
        let event_bytes = if parts.event_idx { RING_EVENT_BYTES } else { 0 };
        let size = usize::from(parts.size);
        let avail_event_offset = RING_ENTRIES + size * USED_ENTRY_BYTES;
        let used_event_offset = RING_ENTRIES + size * AVAIL_ENTRY_BYTES;
        let avail = map_part(
            memory,
            RingPart::AvailRing,
            parts.avail_ring,
            used_event_offset + event_bytes,
            AVAIL_RING_ALIGN,
        )?;
        let used = map_part(
            memory,
            RingPart::UsedRing,
            parts.used_ring,
            avail_event_offset + event_bytes,
            USED_RING_ALIGN,
        )?;
        let event = |ring: *mut u8, offset| {
            if parts.event_idx { ring.wrapping_add(offset) } else { ptr::null_mut() }
        };
        Ok(Self {
            avail,
            used,
            used_event: event(avail, used_event_offset),
            avail_event: event(used, avail_event_offset),
            mask: parts.size - 1,
        })
    }

    #[inline]
    pub(crate) fn load_avail_idx(&self) -> u16 {
        // SAFETY: the avail ring is mapped and aligned, see `Rings`.
        unsafe { load(self.avail.add(RING_IDX), Ordering::Acquire) }
    }

    #[inline]
    pub(crate) fn load_avail_flags(&self) -> u16 {
        // SAFETY: the avail ring is mapped and aligned, see `Rings`.
        unsafe { load(self.avail, Ordering::Relaxed) }
    }

    #[inline]
    pub(crate) fn avail_entry(&self, index: u16) -> u16 {
        let offset = RING_ENTRIES + usize::from(index & self.mask) * AVAIL_ENTRY_BYTES;
        // SAFETY: the avail ring is mapped and aligned and has `mask` + 1 entries, see `Rings`.
        unsafe { load(self.avail.add(offset), Ordering::Relaxed) }
    }

    /// The driver's `used_event`. Requires event idx.
    #[inline]
    pub(crate) fn load_used_event(&self) -> u16 {
        // SAFETY: with event idx the event is mapped and aligned, see `Rings`.
        unsafe { load(self.used_event, Ordering::Relaxed) }
    }

    pub(crate) fn load_used_idx(&self) -> u16 {
        // SAFETY: the used ring is mapped and aligned, see `Rings`.
        unsafe { load(self.used.add(RING_IDX), Ordering::Relaxed) }
    }

    /// Stores used idx with release ordering: a driver that sees the idx also sees the entries, and
    /// the data from the device.
    #[inline]
    pub(crate) fn store_used_idx(&self, index: u16) {
        before_store();
        // SAFETY: the used ring is mapped and aligned, see `Rings`.
        unsafe { store(self.used.add(RING_IDX), index, Ordering::Release) }
    }

    #[inline]
    pub(crate) fn store_used_entry(&self, index: u16, head: u16, written_bytes: u32) {
        before_store();
        let offset = RING_ENTRIES + usize::from(index & self.mask) * USED_ENTRY_BYTES;
        // SAFETY: the used ring is mapped and aligned to 4 and has `mask` + 1 entries of two u32,
        // see `Rings`.
        unsafe {
            let entry = self.used.add(offset).cast::<u32>();
            entry.write_volatile(u32::from(head).to_le());
            entry.add(1).write_volatile(written_bytes.to_le());
        }
    }

    /// The head of a stored used element, unless the driver has written over it.
    #[inline]
    pub(crate) fn used_head(&self, index: u16) -> u16 {
        let offset = RING_ENTRIES + usize::from(index & self.mask) * USED_ENTRY_BYTES;
        // SAFETY: the used ring is mapped and aligned to 4 and has `mask` + 1 entries that begin
        // with a u32, see `Rings`.
        unsafe { load(self.used.add(offset), Ordering::Relaxed) }
    }

    /// The offsets in the used ring of the elements from index `first` up to `end`, which wrap at
    /// the end of the ring. Either part may be empty.
    pub(crate) fn used_entry_ranges(&self, first: u16, end: u16) -> [Range<usize>; 2] {
        let size = usize::from(self.mask) + 1;
        let start = usize::from(first & self.mask);
        let count = usize::from(end.wrapping_sub(first)).min(size);
        let tail = count.min(size - start);
        let offset = |entry| RING_ENTRIES + entry * USED_ENTRY_BYTES;
        [offset(start)..offset(start + tail), offset(0)..offset(count - tail)]
    }

    /// The offset in the used ring of `avail_event`, behind the elements.
    pub(crate) fn avail_event_offset(&self) -> usize {
        RING_ENTRIES + (usize::from(self.mask) + 1) * USED_ENTRY_BYTES
    }

    pub(crate) fn store_used_flags(&self, flags: u16) {
        // SAFETY: the used ring is mapped and aligned, see `Rings`.
        unsafe { store(self.used, flags, Ordering::Relaxed) }
    }

    /// Stores the device's `avail_event`. Requires event idx.
    pub(crate) fn store_avail_event(&self, index: u16) {
        // SAFETY: with event idx the event is mapped and aligned, see `Rings`.
        unsafe { store(self.avail_event, index, Ordering::Relaxed) }
    }
}

/// # Safety
///
/// `host` must point to two bytes of mapped guest memory, aligned to two.
#[inline]
unsafe fn load(host: *mut u8, order: Ordering) -> u16 {
    // SAFETY: the caller vouches for the bytes. A reference to an atomic allows concurrent changes
    // of the value, and this one ends with the statement.
    u16::from_le(unsafe { AtomicU16::from_ptr(host.cast()) }.load(order))
}

/// # Safety
///
/// `host` must point to two bytes of mapped guest memory, aligned to two.
#[inline]
unsafe fn store(host: *mut u8, value: u16, order: Ordering) {
    // SAFETY: as in `load`.
    unsafe { AtomicU16::from_ptr(host.cast()) }.store(value.to_le(), order);
}
