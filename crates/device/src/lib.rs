//! Virtio-blk and virtio-scsi devices for a virtual machine monitor: queues in memory shared with a
//! driver, served by IoThreads.
//!
//! [`Device`] works on a memory map, rings and eventfds. It has no socket, no command line and no
//! log of its own. A VMM runs it with an IoThread of its own process and receives failures through
//! [`Events`]. The device offers its features and its configuration space before it has a queue:
//!
//! ```
//! use std::sync::Arc;
//!
//! use blockio::{DiskOptions, DiskSource};
//! use device::blk::config::{BlkOptions, F_VERSION_1};
//! use device::{Device, LogEvents};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let disk = DiskSource::null(8 << 20, &DiskOptions::default())?;
//! let device = Device::blk(disk, BlkOptions::default(), Arc::new(LogEvents::new("disk")));
//! assert!(device.features() & 1 << F_VERSION_1 != 0);
//! let sectors: u64 = (8 << 20) / 512;
//! assert_eq!(device.read_config(0, 8), sectors.to_le_bytes());
//! # Ok(())
//! # }
//! ```
//!
//! `examples/embed.rs` continues with the memory, a queue and an IoThread.
//!
//! Where other processes may truncate the files of guest memory, the VMM calls
//! [`virtqueue::install_sigbus_handler`]. Where the size of files is limited, it ignores SIGXFSZ.
//! Where other processes may make the call eventfds block, it keeps a [`CallWatch`]. The library
//! installs no signal handler on its own.

pub mod access;
pub mod blk;
mod device;
mod device_core;
mod events;
mod hand_over;
mod moved_state;
mod queue;
pub mod scsi;
mod stats;
#[cfg(test)]
mod testing;
pub mod unit_address;

pub use blockio::oneshot;
pub use device::{Device, Negotiated, QueueRole};
pub use events::{
    Events, KICK_NOT_WATCHED_TEXT, LogEvents, QUEUE_CONTINUED_TEXT, QueueFault, REQUESTS_HELD_TEXT,
    SlowRequest,
};
pub use hand_over::DeviceState;
pub use moved_state::{MoveError, MovedState};
pub use queue::QueueHandle;
pub use queue::call_watch::{CallWatch, WatchError, prepare_calls};
pub use queue::data_budget::SMALL_REQUEST_BYTES;
pub use queue::queue_setup::{QueueSetup, QueueTuning, Ring, StartError, StopKind};
pub use queue::queue_status::QueueView;
pub use stats::{
    BATCH_BOUNDS, BatchSizes, BatchStats, ErrorCause, KindStats, LATENCY_BOUNDS, Latency,
    LatencyStats, Peaks, QueueStats, RequestCounts, RequestKind, RequestTotals, batch_bound,
    latency_bound_ns,
};
