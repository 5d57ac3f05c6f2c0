//! Logical units of a device, and their addresses in requests and events (virtio 1.3, section
//! 5.6.6).

use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

/// The highest LUN of a target: a single level has 14 bits.
pub const LUN_MAX: u16 = 0x3fff;

/// A logical unit: a target of the device, and a number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitAddress {
    /// 0 to 255.
    pub target: u8,
    /// 0 to [`LUN_MAX`].
    pub lun: u16,
}

/// A unit, unique among all units ever made: a later unit may have the same address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UnitNumber(NonZeroU64);

impl UnitNumber {
    /// Returns the number of no other unit.
    pub(crate) fn next() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let last = LAST.fetch_add(1, Ordering::Relaxed);
        Self(NonZeroU64::MIN.checked_add(last).expect("a process makes fewer than 2^64 units"))
    }
}

/// The destination of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Address {
    Unit(UnitAddress),
    /// The well-known unit that every device has.
    ReportLuns,
    /// No unit can have this address.
    Invalid,
}

impl Address {
    /// Parses the address in a request.
    #[inline]
    pub(crate) fn parse(bytes: [u8; 8]) -> Self {
        const FIRST_AND_LAST_BYTES: u64 = 0xff00_0000_ffff_ffff;
        let [_, target, l0, l1, ..] = bytes;
        // Compares all these bytes at once, since every request is parsed.
        let word = u64::from_be_bytes(bytes);
        if word & FIRST_AND_LAST_BYTES != 1 << 56 {
            return if word == 0xc101 << 48 { Self::ReportLuns } else { Self::Invalid };
        }
        let lun = match l0 {
            // Flat space addressing, which drivers use for all LUNs.
            0x40..0x80 => u16::from_be_bytes([l0 & 0x3f, l1]),
            // Peripheral device addressing, of bus 0.
            0 => l1.into(),
            _ => return Self::Invalid,
        };
        Self::Unit(UnitAddress { target, lun })
    }
}

impl UnitAddress {
    /// The address as written in requests.
    #[cfg(test)]
    pub(crate) fn bytes(self) -> [u8; 8] {
        let [l0, l1] = self.lun_field();
        [1, self.target, l0 | 0x40, l1, 0, 0, 0, 0]
    }

    /// The address as written in events. The LUN is that of REPORT LUNS, for which drivers search.
    pub(crate) fn event_bytes(self) -> [u8; 8] {
        let [l0, l1, ..] = self.lun_bytes();
        [1, self.target, l0, l1, 0, 0, 0, 0]
    }

    /// The eight bytes of a LUN (SAM-6, section 4.7): a peripheral device address if it fits.
    pub(crate) fn lun_bytes(self) -> [u8; 8] {
        let [l0, l1] = self.lun_field();
        [if self.lun < 256 { 0 } else { l0 | 0x40 }, l1, 0, 0, 0, 0, 0, 0]
    }

    fn lun_field(self) -> [u8; 2] {
        assert!(self.lun <= LUN_MAX, "a LUN of more than a level has");
        self.lun.to_be_bytes()
    }
}

impl fmt::Display for UnitAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.target, self.lun)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_has_one_address_and_is_found_by_it() {
        for (target, lun) in [(0, 0), (255, 0), (3, 255), (3, 256), (0, LUN_MAX)] {
            let unit = UnitAddress { target, lun };
            assert_eq!(Address::parse(unit.bytes()), Address::Unit(unit));
        }
        let short = [1, 9, 0, 7, 0, 0, 0, 0];
        assert_eq!(Address::parse(short), Address::Unit(UnitAddress { target: 9, lun: 7 }));
        assert_eq!(UnitAddress { target: 0, lun: 300 }.lun_bytes()[..2], [0x41, 44]);
        assert_eq!(UnitAddress { target: 0, lun: 7 }.lun_bytes()[..2], [0, 7]);
        assert_eq!(UnitAddress { target: 2, lun: 7 }.event_bytes()[..4], [1, 2, 0, 7]);
        assert_eq!(UnitAddress { target: 2, lun: 256 }.event_bytes()[..4], [1, 2, 0x41, 0]);
    }

    #[test]
    fn other_luns_are_no_address() {
        assert_eq!(Address::parse([0xc1, 1, 0, 0, 0, 0, 0, 0]), Address::ReportLuns);
        for bytes in [
            [0, 0, 0x40, 0, 0, 0, 0, 0],
            [1, 0, 0x80, 0, 0, 0, 0, 0],
            [1, 0, 1, 0, 0, 0, 0, 0],
            [1, 0, 0x40, 0, 0, 0, 0, 1],
            [0xc1, 2, 0, 0, 0, 0, 0, 0],
        ] {
            assert_eq!(Address::parse(bytes), Address::Invalid, "{bytes:x?}");
        }
    }
}
