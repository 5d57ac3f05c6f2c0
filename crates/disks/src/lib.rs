//! Disks by name: files and parts of them, images, encrypted disks, disks of servers and clusters.
//!
//! One text names a disk with all its layers, in the grammar of [`spec`]. [`open()`] takes it, and
//! returns a [`DiskSource`](blockio::DiskSource) like that of a plain file:
//!
//! ```
//! use blockio::{Buffers, DiskOptions, IoThread, IoThreadConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let file = tempfile::NamedTempFile::new()?;
//! # file.as_file().set_len(1 << 20)?;
//! # let path = file.path().display();
//! // An image would be `qcow2:/srv/disk.qcow2`.
//! let source = disks::open(&format!("raw,offset=512K,over={path}"), &DiskOptions::default())?;
//! let thread = IoThread::for_disk(&source, &IoThreadConfig::default())?;
//! let disk = source.attach(thread.io());
//! thread.block_on(disk.write(0, Buffers::from_vec(vec![7; 512]), false))??;
//! assert_eq!(thread.block_on(disk.read_vec(0, 512))??, [7; 512]);
//! # Ok(())
//! # }
//! ```
//!
//! Each kind of disk has a module with a function `open` of its own, over the seam of
//! `blockio::driver`. A layer, such as `qcow2` or `luks`, is opened over the source of the disk
//! below. Features add the kinds that need further packages.
//!
//! `blockio::driver` explains how to add a kind, and [`spec`] how to give it a name.

#[cfg(test)]
#[cfg(feature = "luks")]
mod kinds_tests;
#[cfg(feature = "luks")]
pub mod luks;
pub mod nbd;
pub mod open;
#[cfg(feature = "qcow2")]
pub mod qcow2;
#[cfg(feature = "rbd")]
pub mod rbd;
#[cfg(any(feature = "luks", feature = "nbd-tls"))]
pub mod secret_heap;
pub mod spec;
#[cfg(test)]
#[cfg(feature = "luks")]
mod stable_tests;
#[cfg(test)]
mod test_log;
#[cfg(test)]
#[cfg(any(feature = "luks", feature = "nbd-tls"))]
mod testing;

pub use open::open;
pub use spec::DiskSpec;
