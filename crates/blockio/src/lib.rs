//! An async block-I/O core: one [`IoThread`] for each OS thread, one engine for each IoThread.
//!
//! A disk operation is an `async fn` of [`Disk`]. It puts an op into a slot that owns the memory
//! and the file until the kernel has answered (see [`op`]), and the loop in [`io_thread`] submits
//! many ops with one system call and reads completions from the kernel's ring in userspace.
//!
//! ```
//! use blockio::{Buffers, DiskOptions, DiskSource, IoThread, IoThreadConfig};
//!
//! let source = DiskSource::null(1 << 20, &DiskOptions::default())?;
//! let thread = IoThread::new(&IoThreadConfig::default())?;
//! let disk = source.attach(thread.io());
//! let (result, _buffers) = thread.block_on(disk.read(0, Buffers::from_vec(vec![0; 4096])))?;
//! assert!(result.is_ok());
//! # Ok::<(), blockio::Error>(())
//! ```

pub mod buf;
pub mod choose;
pub mod clock;
mod device;
pub mod disk;
pub mod engine;
mod error;
mod io_file;
pub mod io_thread;
mod lane;
mod late;
#[cfg(all(test, any(loom, shuttle)))]
mod models;
pub mod op;
mod open_file;
mod pacing;
mod poll_window;
mod rare;
mod reactor;
mod remote;
pub mod stats;
mod sync;
pub mod task;

pub use buf::{BufferMemory, Buffers};
pub use disk::{Disk, DiskOptions, DiskSource};
pub use engine::{CompletionRing, EngineKind, EventfdAdder};
pub use error::Error;
pub use io_thread::{Activity, Io, IoThread, IoThreadConfig, ROUNDS_UNTIL_SERVED, Wait};
pub use reactor::{Armed, Source, SourceId};
pub use remote::Remote;
pub use task::TaskSet;
