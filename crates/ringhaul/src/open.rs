//! Opens disks and creates devices.

pub(crate) mod device;
pub mod disk;
pub(crate) mod parallel;
pub(crate) mod shared_disks;
