//! Opens disks and creates devices.

pub mod cancellation;
pub(crate) mod device;
pub mod disk;
pub(crate) mod image;
#[cfg(feature = "luks")]
pub(crate) mod luks;
pub(crate) mod parallel;
pub(crate) mod shared_disks;
