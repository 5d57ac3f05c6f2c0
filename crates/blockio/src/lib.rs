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

mod ab_test;
mod admission;
mod bounce;
pub mod clock;
mod config;
#[cfg(test)]
mod contract;
mod device_queue;
pub mod disk;
pub mod engine;
pub mod engine_trial;
mod error;
mod fairness;
mod foreign_op;
mod interest;
mod io;
mod io_file;
mod io_state;
pub mod io_thread;
mod mailbox;
#[cfg(all(test, any(loom, shuttle)))]
mod models;
pub mod oneshot;
pub mod op;
mod op_kind;
mod open_file;
mod pacing;
mod poll_window;
mod rate_limit;
mod reactor;
mod registered;
mod regular_file;
mod remote;
mod stall_log;
mod stalled_ops;
pub mod stats;
mod sync;
mod task;
mod task_key;
mod task_set;
mod time_slice;
mod turn;
mod write_loss;

pub use config::{
    BounceConfig, ByteLimits, CompletionRing, EngineConfig, EngineKind, EngineOptions,
    IoThreadConfig, PacingConfig,
};
pub use disk::{Disk, DiskOptions, DiskSource, TransferError};
pub use error::Error;
pub use fairness::{ROUND_BYTES_UNTIL_SERVED, ROUNDS_UNTIL_SERVED};
pub use foreign_op::{ForeignCompleter, ForeignOp};
pub use io::{Io, TaskRef};
pub use io_thread::IoThread;
pub use iomem::{BufferMemory, Buffers};
pub use reactor::{Armed, Source, SourceId};
pub use registered::RegisteredMemory;
pub use regular_file::{check_regular, open_regular};
pub use remote::Remote;
pub use task_set::TaskSet;
pub use turn::{Activity, Wait};

/// Compiles the examples of docs/internals/embedding.md.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/internals/embedding.md")]
struct Embedding;
