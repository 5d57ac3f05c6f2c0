//! virtio-blk (virtio 1.3, section 5.2).

pub mod config;
pub(crate) mod device;
pub(crate) mod request;

pub use device::BlkDevice;
