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

mod admission;
pub mod clock;
mod config;
#[cfg(test)]
mod contract_tests;
pub mod disk;
pub mod driver;
pub mod engine;
mod error;
mod executor;
mod file;
pub mod op;
pub mod stats;
#[cfg(any(test, feature = "testing"))]
#[allow(clippy::unwrap_used)]
pub mod testing;
mod thread;
mod watchdog;

pub use config::{
    BounceConfig, ByteLimits, CompletionRing, EngineConfig, EngineKind, EngineOptions,
    IoThreadConfig, PacingConfig,
};
pub use disk::{Disk, DiskOptions, DiskSource, TransferError};
pub use error::Error;
pub use executor::notify::Notify;
pub use executor::oneshot;
pub use executor::semaphore::FairSemaphore;
pub use file::regular_file::{check_regular, open_regular};
pub use iomem::{BufferMemory, Buffers};
pub use thread::fairness::{ROUND_BYTES_UNTIL_SERVED, ROUNDS_UNTIL_SERVED};
pub use thread::foreign_op::{ForeignCompleter, ForeignOp};
pub use thread::io::{Io, TaskRef};
pub use thread::io_thread::IoThread;
pub use thread::reactor::{Armed, Source, SourceId};
pub use thread::registered::RegisteredMemory;
pub use thread::remote::Remote;
pub use thread::task_set::TaskSet;
pub use thread::turn::{Activity, Wait};
