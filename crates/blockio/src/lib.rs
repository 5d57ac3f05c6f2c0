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

mod bounce;
pub mod choose;
pub mod clock;
mod config;
#[cfg(test)]
mod contract;
mod device;
pub mod disk;
pub mod engine;
mod error;
mod foreign_op;
mod interest;
mod io;
mod io_file;
mod io_memory;
mod io_state;
pub mod io_thread;
mod lane;
mod late;
mod looks;
mod loss;
mod mailbox;
#[cfg(all(test, any(loom, shuttle)))]
mod models;
pub mod op;
mod op_kind;
mod open_file;
mod pacing;
mod pending;
mod poll_window;
mod rare;
mod reactor;
mod regular_file;
mod remote;
pub mod stats;
mod sync;
mod task;
mod task_key;
mod task_set;
mod time_slice;
mod trial;
mod turn;
mod unanswered;

pub use config::{
    BounceConfig, ByteLimits, CompletionRing, EngineConfig, EngineKind, EngineOptions,
    IoThreadConfig, PacingConfig,
};
pub use disk::{Disk, DiskOptions, DiskSource, Unfinished};
pub use error::Error;
pub use foreign_op::{ForeignCompleter, ForeignOp};
pub use io::{Io, TaskRef};
pub use io_memory::RegisteredMemory;
pub use io_thread::IoThread;
pub use iomem::{BufferMemory, Buffers};
pub use looks::{ROUND_BYTES_UNTIL_SERVED, ROUNDS_UNTIL_SERVED};
pub use pending::{Answer, Pending};
pub use reactor::{Armed, Source, SourceId};
pub use regular_file::{check_regular, open_regular};
pub use remote::Remote;
pub use task_set::TaskSet;
pub use turn::{Activity, Wait};

/// Compiles the examples of docs/internals/embedding.md.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/internals/embedding.md")]
struct Embedding;
