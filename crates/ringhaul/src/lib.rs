//! Ringhaul serves disks to virtual machines.
//!
//! The program is in `main.rs`. This library holds its parts, so that a VMM can embed a device:
//! [`blk::BlkDevice`] is a virtio-blk device that works on a memory map, rings and eventfds.
//! Where somebody else may truncate the files of that memory, the VMM calls
//! [`virtqueue::install_sigbus_handler`], and where the size of files is limited
//! [`file_limit::survive`]; the library takes over no signal by itself.

pub mod blk;
mod call_watch;
pub mod control;
pub mod export;
pub mod file_limit;
mod guest_buf;
mod heap;
mod inherit;
pub mod io_threads;
mod lists;
pub mod log;
mod log_limit;
pub mod memory_limits;
pub mod options;
mod pending;
pub mod queue;
mod queue_task;
pub mod serve;
mod thread_watch;
pub mod vhost_user;
