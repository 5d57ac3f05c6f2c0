//! Places in a packed virtqueue: a descriptor, and the wrap counter of the lap (virtio 1.3, section
//! 2.8.1).

/// The bit of the wrap counter in a place of 16 bits.
const WRAP_BIT: u16 = 1 << 15;
/// The driver has made the descriptor available, if this bit is equal to its wrap counter.
const DESC_F_AVAIL: u16 = 1 << 7;
/// The device has used the descriptor, if this bit is equal to its wrap counter.
const DESC_F_USED: u16 = 1 << 15;
/// Both bits.
pub(crate) const DESC_F_LAP: u16 = DESC_F_AVAIL | DESC_F_USED;

/// A place in a packed virtqueue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Position {
    /// The descriptor.
    pub(crate) slot: u16,
    /// The wrap counter.
    pub(crate) wrap: bool,
}

impl Position {
    /// The first descriptor of a new ring.
    pub(crate) const START: Self = Self { slot: 0, wrap: true };

    /// The place that 16 bits name: the descriptor, and the wrap counter in the last bit.
    #[inline]
    pub(crate) const fn from_bits(bits: u16) -> Self {
        Self { slot: bits & !WRAP_BIT, wrap: bits & WRAP_BIT != 0 }
    }

    /// The 16 bits of the place.
    #[inline]
    pub(crate) const fn bits(self) -> u16 {
        if self.wrap { self.slot | WRAP_BIT } else { self.slot }
    }

    /// Returns the place `count` descriptors later, at most one lap, in a ring of `size`.
    #[inline]
    pub(crate) fn after(self, count: u16, size: u16) -> Self {
        let slot = self.slot + count;
        if slot < size {
            Self { slot, ..self }
        } else {
            Self { slot: slot - size, wrap: !self.wrap }
        }
    }

    /// Returns the number of descriptors from this place to `end`, less than two laps: the wrap
    /// counter does not tell more laps apart.
    #[inline]
    pub(crate) fn distance(self, end: Self, size: u16) -> u16 {
        let laps = if self.wrap == end.wrap { 0 } else { size };
        let ahead = laps + end.slot;
        if ahead >= self.slot { ahead - self.slot } else { ahead + 2 * size - self.slot }
    }

    /// The bits of an available descriptor at this place.
    #[inline]
    pub(crate) const fn available_flags(self) -> u16 {
        if self.wrap { DESC_F_AVAIL } else { DESC_F_USED }
    }

    /// The bits of a used descriptor at this place.
    #[inline]
    pub(crate) const fn used_flags(self) -> u16 {
        if self.wrap { DESC_F_LAP } else { 0 }
    }

    /// Returns true if a descriptor with these flags, at this place, is available and not used.
    #[inline]
    pub(crate) const fn is_available(self, flags: u16) -> bool {
        flags & DESC_F_LAP == self.available_flags()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_follow_each_other_for_two_laps_and_then_repeat() {
        for size in [1, 2, 3, 7, 8, 1000, 1024] {
            let start = Position { slot: size / 2, wrap: true };
            let mut place = start;
            for count in 0..2 * size {
                assert_eq!(start.distance(place, size), count, "{size}");
                if count <= size {
                    assert_eq!(start.after(count, size), place);
                }
                assert_eq!(Position::from_bits(place.bits()), place);
                place = place.after(1, size);
            }
            assert_eq!(place, start);
        }
    }

    #[test]
    fn a_descriptor_is_available_in_its_lap_alone() {
        for wrap in [false, true] {
            let (place, next) = (Position { slot: 0, wrap }, Position { slot: 0, wrap: !wrap });
            assert!(place.is_available(place.available_flags() | 0x7f));
            assert!(!place.is_available(place.used_flags()));
            assert!(!place.is_available(next.available_flags()));
            assert!(!place.is_available(next.used_flags()));
        }
    }
}
