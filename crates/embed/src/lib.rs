//! Ringhaul for programs: disks, devices and sessions, from one crate.
//!
//! | to embed | start with |
//! |---|---|
//! | disk I/O | [`IoThread`], [`disks::open()`] for a disk by its name, [`DiskSource`] |
//! | a disk for a guest of this process | [`Device`], [`QueueSetup`], [`GuestMemory`] |
//! | a disk for the guest of another process | [`vhost_user::serve`] |
//!
//! ```
//! use ringhaul_embed::{Buffers, DiskOptions, IoThread, IoThreadConfig, disks};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let file = tempfile::NamedTempFile::new()?;
//! # file.as_file().set_len(1 << 20)?;
//! # let name = file.path().display().to_string();
//! let source = disks::open(&name, &DiskOptions::default())?;
//! let thread = IoThread::for_disk(&source, &IoThreadConfig::default())?;
//! let disk = source.attach(thread.io());
//! thread.block_on(disk.write(0, Buffers::from_vec(vec![7; 512]), true))??;
//! assert_eq!(thread.block_on(disk.read_vec(0, 512))??, [7; 512]);
//! # Ok(())
//! # }
//! ```

pub use blockio::{
    self, BufferMemory, Buffers, Disk, DiskOptions, DiskSource, IoThread, IoThreadConfig, Remote,
    Wait,
};
pub use device::blk::config::BlkOptions;
pub use device::{self, Device, LogEvents, QueueHandle, QueueSetup, Ring};
pub use disks;
pub use vhost_user;
pub use virtqueue::{self, GuestMemory, MappingRules, RegionConfig};

/// Compiles the examples of docs/internals/embedding.md.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/internals/embedding.md")]
struct Embedding;
