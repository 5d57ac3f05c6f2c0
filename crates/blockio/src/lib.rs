//! An async block-I/O core: one [`IoThread`] for each OS thread, with one or several engines.
//!
//! A disk operation is an `async fn` of [`Disk`]. It puts an op into a slot that owns the memory
//! and the file until the kernel has answered (see [`op`]). The loop of an [`IoThread`] submits
//! many ops with one system call and reads completions from the kernel's ring in userspace.
//!
//! ```
//! use blockio::{BufferMemory, DiskOptions, DiskSource, IoThread, IoThreadConfig};
//!
//! let source = DiskSource::null(1 << 20, &DiskOptions::default())?;
//! let thread = IoThread::new(&IoThreadConfig::default())?;
//! let disk = source.attach(thread.io());
//! let memory = BufferMemory::new(4096, 4096);
//! let result = thread.block_on(disk.read(0, memory.buffers(4096)))?;
//! assert!(result.is_ok());
//! # Ok::<(), blockio::Error>(())
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
pub use executor::oneshot;
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

/// Compiles the examples of docs/internals/embedding.md.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/internals/embedding.md")]
struct Embedding;
