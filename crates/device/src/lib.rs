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

pub mod blk;
mod call_watch;
mod common;
mod config_space;
mod device;
mod eventfd;
mod events;
mod fence;
mod hand_over;
mod in_order;
mod lists;
mod load;
mod queue;
mod queue_setup;
mod queue_task;
mod queue_watch;
mod reach;
mod runs;
pub mod scsi;
mod stats;
#[cfg(test)]
mod testing;

pub use blockio::{Answer, Pending};
pub use call_watch::{CallWatch, WatchError, prepare_calls};
pub use device::{Device, Negotiated, QueueRole};
pub use events::{Events, HELD, LOST_IF_KILLED, LogEvents, NOT_WATCHED, QueueFault};
pub use hand_over::DeviceState;
pub use load::SMALL_REQUEST_BYTES;
pub use queue::QueueHandle;
pub use queue_setup::{QueueSetup, Ring, StartError, StopKind};
pub use queue_watch::QueueWatch;
pub use stats::{KindStats, QueueStats, RequestCounts, RequestKind, RequestTotals};
