//! Virtio-blk and virtio-scsi devices for a virtual machine monitor: queues in memory shared with a
//! driver, served by IoThreads.
//!
//! [`Device`] works on a memory map, rings and eventfds. It has no socket, no command line and no
//! log of its own. A VMM runs it with an IoThread of its own process (see `examples/embed.rs`) and
//! receives failures through [`Events`].
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
