//! Host pointers to the three parts of a packed virtqueue, and all accesses to them (virtio 1.3,
//! section 2.8).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::death::before_store;
use crate::error::{QueueError, RingPart};
use crate::memory::{DESCRIPTOR_BYTES, Descriptor, LocalMemory};
use crate::position::{DESC_F_LAP, Position};
use crate::rings::map_part;

const RING_ALIGN: usize = 16;
const EVENT_ALIGN: usize = 4;
const EVENT_BYTES: usize = 4;
/// The device has written to the buffer.
const USED_F_WRITE: u16 = 2;

/// The event suppression of one side (virtio 1.3, section 2.8.10).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EventSuppression {
    /// Every step causes an event.
    Always,
    /// No step does.
    Never,
    /// The step over this place does.
    At(Position),
}

const ENABLE: u16 = 0;
const DISABLE: u16 = 1;
/// Valid only with event idx.
const AT_DESCRIPTOR: u16 = 2;
const FLAGS_MASK: u16 = 3;

impl EventSuppression {
    /// Decodes the suppression, at first its place and then its flags. A reserved value asks for
    /// too much, which loses no event.
    fn from_word(word: u32, event_idx: bool) -> Self {
        let [p0, p1, f0, f1] = word.to_le_bytes();
        match u16::from_le_bytes([f0, f1]) & FLAGS_MASK {
            DISABLE => Self::Never,
            AT_DESCRIPTOR if event_idx => {
                Self::At(Position::from_bits(u16::from_le_bytes([p0, p1])))
            }
            _ => Self::Always,
        }
    }

    fn word(self) -> u32 {
        let (place, flags) = match self {
            Self::Always => (0, ENABLE),
            Self::Never => (0, DISABLE),
            Self::At(place) => (place.bits(), AT_DESCRIPTOR),
        };
        let ([p0, p1], [f0, f1]) = (place.to_le_bytes(), flags.to_le_bytes());
        u32::from_le_bytes([p0, p1, f0, f1])
    }
}

/// A used descriptor: its second word. The first word, the address, has no meaning.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct UsedWord(u64);

impl UsedWord {
    #[inline]
    pub(crate) fn new(place: Position, id: u16, written_bytes: u32) -> Self {
        let write = if written_bytes > 0 { USED_F_WRITE } else { 0 };
        let flags = place.used_flags() | write;
        Self(u64::from(written_bytes) | u64::from(id) << 32 | u64::from(flags) << 48)
    }
}

/// The addresses of the parts of a packed virtqueue, and its size.
pub(crate) struct PackedParts {
    pub(crate) size: u16,
    pub(crate) descriptors: u64,
    pub(crate) driver_events: u64,
    pub(crate) device_events: u64,
    pub(crate) event_idx: bool,
}

/// Host pointers to a packed virtqueue.
///
/// The parts were checked to be aligned and within one memory region each, with as many descriptors
/// as `size`. The queue's translator keeps the map, and both are replaced together, so the pointers
/// are good while the queue has them. The driver accesses the same memory: every access is atomic.
#[derive(Debug)]
pub(crate) struct DescriptorRing {
    descriptors: *mut u64,
    driver_events: *mut u32,
    device_events: *mut u32,
    pub(crate) size: u16,
    event_idx: bool,
}

impl DescriptorRing {
    pub(crate) fn new(memory: &LocalMemory, parts: &PackedParts) -> Result<Self, QueueError> {
        let bytes = usize::from(parts.size) * DESCRIPTOR_BYTES;
        let table = RingPart::DescTable;
        let descriptors = map_part(memory, table, parts.descriptors, bytes, RING_ALIGN)?;
        let events = |part, addr| map_part(memory, part, addr, EVENT_BYTES, EVENT_ALIGN);
        Ok(Self {
            descriptors: descriptors.cast(),
            driver_events: events(RingPart::AvailRing, parts.driver_events)?.cast(),
            device_events: events(RingPart::UsedRing, parts.device_events)?.cast(),
            size: parts.size,
            event_idx: parts.event_idx,
        })
    }

    /// The address and the second word of a descriptor.
    #[inline]
    fn words(&self, slot: u16) -> (&AtomicU64, &AtomicU64) {
        assert!(slot < self.size, "descriptor {slot} of a ring of {}", self.size);
        let first = self.descriptors.wrapping_add(2 * usize::from(slot));
        // SAFETY: the ring has `size` descriptors of two words, is mapped and aligned, see
        // `DescriptorRing`. A reference to an atomic allows concurrent changes of the value, and
        // these live no longer than the reference to the ring.
        unsafe { (AtomicU64::from_ptr(first), AtomicU64::from_ptr(first.wrapping_add(1))) }
    }

    /// The flags of a descriptor. With acquire ordering: if it is available, so are its fields and
    /// the rest of its chain.
    #[inline]
    pub(crate) fn flags(&self, slot: u16) -> u16 {
        (u64::from_le(self.words(slot).1.load(Ordering::Acquire)) >> 48) as u16
    }

    /// Reads a descriptor, each byte once, its flags first. The id is in place of the link.
    #[inline]
    pub(crate) fn descriptor(&self, slot: u16) -> Descriptor {
        let (low, high) = self.words(slot);
        let high = high.load(Ordering::Acquire);
        Descriptor::from_words([low.load(Ordering::Relaxed), high]).of_packed()
    }

    /// Writes a used descriptor that the driver does not look at yet: one before it is not used.
    #[inline]
    pub(crate) fn store_used(&self, slot: u16, used: UsedWord) {
        before_store();
        self.words(slot).1.store(used.0.to_le(), Ordering::Relaxed);
    }

    /// Writes a used descriptor with release ordering: a driver that sees it also sees the used
    /// descriptors behind it, and the data from the device.
    #[inline]
    pub(crate) fn store_first_used(&self, slot: u16, used: UsedWord) {
        before_store();
        self.words(slot).1.store(used.0.to_le(), Ordering::Release);
    }

    /// Marks a descriptor as available and not used, as the driver did. Only for descriptors that
    /// the driver does not look at.
    pub(crate) fn restore_available(&self, place: Position) {
        let high = self.words(place.slot).1;
        let word = u64::from_le(high.load(Ordering::Relaxed));
        let flags = (word >> 48) as u16 & !DESC_F_LAP | place.available_flags();
        before_store();
        let word = word & !(u64::from(u16::MAX) << 48) | u64::from(flags) << 48;
        high.store(word.to_le(), Ordering::Relaxed);
    }

    /// The driver's event suppression.
    #[inline]
    pub(crate) fn driver_suppression(&self) -> EventSuppression {
        // SAFETY: the structure is mapped and aligned, see `DescriptorRing`.
        let word = unsafe { AtomicU32::from_ptr(self.driver_events) }.load(Ordering::Relaxed);
        EventSuppression::from_word(u32::from_le(word), self.event_idx)
    }

    /// Stores the device's event suppression.
    #[inline]
    pub(crate) fn store_device_suppression(&self, suppression: EventSuppression) {
        let word = suppression.word().to_le();
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.device_events) }.store(word, Ordering::Relaxed);
    }
}
