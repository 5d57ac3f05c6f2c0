//! The back-end of vhost-user: a [`Device`](device::Device) on a socket, for one front-end.
//!
//! ```
//! use std::os::unix::net::UnixListener;
//! use std::sync::{Arc, mpsc};
//!
//! use blockio::{DiskOptions, DiskSource, IoThread, IoThreadConfig};
//! use device::blk::config::BlkOptions;
//! use device::{Device, LogEvents};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A disk, and a virtio-blk device on it.
//! let source = DiskSource::null(1 << 30, &DiskOptions::default())?;
//! let device = Device::blk(source, BlkOptions::default(), Arc::new(LogEvents::new("vm1")));
//!
//! // A thread for the I/O. Any number of devices can share it.
//! let (sender, receiver) = mpsc::sync_channel(1);
//! let io_thread = std::thread::spawn(move || {
//!     let thread = IoThread::new(&IoThreadConfig::default())?;
//!     let _ = sender.send(thread.remote());
//!     thread.run()
//! });
//! let remote = receiver.recv()?;
//!
//! // One front-end after another.
//! let folder = tempfile::tempdir()?;
//! let listener = UnixListener::bind(folder.path().join("vm1.sock"))?;
//! # drop(std::os::unix::net::UnixStream::connect(folder.path().join("vm1.sock"))?);
//! for socket in listener.incoming() {
//!     let end = vhost_user::serve(socket?, device.clone(), vec![remote.clone()])?;
//!     println!("the front-end has gone: {end:?}");
//! #   break;
//! }
//! remote.post(|io| io.stop());
//! # io_thread.join().unwrap()?;
//! # Ok(())
//! # }
//! ```
//!
//! The specification is "Vhost-user Protocol" of the QEMU project; names in quotes are its
//! sections. [`message`] is the encoding, `channel` the socket, `connection` the state that a
//! front-end sets up through messages, and [`Session`] puts them together. A [`Session`] never
//! waits: one thread can drive the sessions of many devices, and a simulation can drive one by
//! hand. [`serve()`] drives a single one.

mod body;
mod call;
mod channel;
mod config;
mod connection;
mod describe;
mod details;
mod examiner;
mod inflight;
mod load;
pub mod message;
mod outcome;
mod passed_fds;
mod peer_fds;
mod ring;
mod run_lock;
mod serve;
mod session;
mod session_state;
mod shared_memory;

pub use config::PROTOCOL_FEATURES;
pub use connection::SessionSetup;
pub use details::{MemoryDetails, QueueDetails, QueueRole, QueueState, SessionDetails};
pub use examiner::Examiner;
pub use load::Load;
pub use passed_fds::{FdIndex, FdSink, PassedFds};
pub use run_lock::RunLock;
pub use serve::serve;
pub use session::{End, Session, SessionProgress};
pub use session_state::{SessionState, StateKeeper};
