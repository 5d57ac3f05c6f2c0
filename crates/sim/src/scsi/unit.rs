//! A logical unit as its guest knows it.

use device::unit_address::UnitAddress;

use crate::timeline::Timeline;

pub(crate) struct Unit {
    pub(crate) address: UnitAddress,
    /// True while the device has the unit.
    pub(crate) present: Timeline<bool>,
}

impl Unit {
    pub(crate) fn new(address: UnitAddress) -> Self {
        Self { address, present: Timeline::new(true) }
    }

    /// True if the device had the unit all the time.
    pub(crate) fn is_there(&self, (begin, end): (u64, u64)) -> bool {
        self.present.during(begin, end).all(|is_there| *is_there)
    }
}

/// The address of the unit of a device on a disk.
pub(crate) fn address(device: usize, disk: usize) -> UnitAddress {
    let small = |number| u16::try_from(number).expect("plans have a few of each");
    let target = u8::try_from(disk / 2).expect("plans have a few disks");
    UnitAddress { target, lun: 299 * small(disk % 2) + small(device) }
}
