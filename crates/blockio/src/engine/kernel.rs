//! The kernel under the engines: Linux, or with `--cfg ringhaul_sim` a simulated one.
//!
//! Both sides offer the same: [`AioContext`], [`Ring`], [`sleep`], [`start_thread`] and
//! [`simulate_jobs`].

pub(super) mod abi;
#[cfg(not(ringhaul_sim))]
mod linux;
#[cfg(ringhaul_sim)]
pub mod sim;

#[cfg(not(ringhaul_sim))]
pub use linux::start_thread;
#[cfg(not(ringhaul_sim))]
pub(super) use linux::{AioContext, Ring, simulate_jobs, sleep};
#[cfg(ringhaul_sim)]
pub use sim::start_thread;
#[cfg(ringhaul_sim)]
pub(super) use sim::{AioContext, Ring, simulate_jobs, sleep};

/// The event to await at a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interest {
    /// An eventfd that is written, or a socket with data.
    Readable,
    /// A socket that has room.
    Writable,
}
