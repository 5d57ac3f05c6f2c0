//! An async block-I/O core: one [`IoThread`] for each OS thread, with one or several engines.
//!
//! A disk operation is an `async fn` of [`Disk`]. It puts an op into a slot that owns the memory
//! and the file until the kernel has answered (see [`op`]). The loop of an [`IoThread`] submits
//! many ops with one system call and reads completions from the kernel's ring in userspace.
//!
//! ```
//! use blockio::{Buffers, DiskOptions, DiskSource, IoThread, IoThreadConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let file = tempfile::NamedTempFile::new()?;
//! # file.as_file().set_len(1 << 20)?;
//! # let path = file.path();
//! let source = DiskSource::file(path, &DiskOptions::default())?;
//! let thread = IoThread::for_disk(&source, &IoThreadConfig::default())?;
//! let disk = source.attach(thread.io());
//! let sector = thread.block_on(async {
//!     disk.write(512, Buffers::from_vec(vec![7; 512]), false).await?;
//!     disk.read_vec(512, 512).await
//! })??;
//! assert_eq!(sector, [7; 512]);
//! # Ok(())
//! # }
//! ```
//!
//! [`driver`] is the seam for other kinds of disks, [`thread`] for other sources of events. Parts
//! that only the crates of this workspace share are public, and left out of these pages.

mod admission;
#[doc(hidden)]
pub mod clock;
pub mod config;
#[cfg(test)]
mod contract_tests;
pub mod disk;
pub mod driver;
#[doc(hidden)]
pub mod engine;
mod error;
#[doc(hidden)]
pub mod executor;
#[doc(hidden)]
pub mod file;
pub mod op;
pub mod stats;
#[cfg(any(test, feature = "testing"))]
#[allow(clippy::unwrap_used)]
pub mod testing;
pub mod thread;
mod watchdog;

pub use config::{EngineConfig, EngineKind, IoThreadConfig};
pub use disk::{Disk, DiskOptions, DiskSource};
pub use error::Error;
#[doc(hidden)]
pub use executor::oneshot;
pub use iomem::{BufferMemory, Buffers};
pub use thread::IoThread;
pub use thread::io::Io;
pub use thread::remote::Remote;
#[doc(hidden)]
pub use thread::task_set::TaskSet;
pub use thread::turn::{Activity, Wait};
