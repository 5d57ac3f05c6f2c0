//! Guest memory and virtqueues, split and packed, device side.
//!
//! The crate knows rings and memory, and does no disk I/O. A device builds a [`GuestMemory`] from
//! the regions that it receives. On the thread that serves the queue, it wraps the map in a
//! [`LocalMemory`] and makes a [`SplitQueue`], a [`PackedQueue`], or a [`Virtqueue`] of either
//! layout. Then it pops [`Chain`]s, moves data through their
//! [`Buffers`](iomem::Buffers), pushes used elements, and publishes them once for each batch:
//!
//! ```
//! use std::sync::Arc;
//! use virtqueue::{DeviceQueue, GuestMemory, LocalMemory, QueueConfig, SplitQueue};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let memory = Arc::new(GuestMemory::anonymous(&[(0, 0x10000)])?);
//! // The part of a driver: one writable descriptor of 512 bytes, made available.
//! memory.write(0x0000, &0x4000_u64.to_le_bytes())?;
//! memory.write(0x0008, &512_u32.to_le_bytes())?;
//! memory.write(0x000c, &2_u16.to_le_bytes())?;
//! memory.write(0x1002, &1_u16.to_le_bytes())?;
//!
//! let config = QueueConfig {
//!     size: 16,
//!     desc_table: 0x0000,
//!     avail_ring: 0x1000,
//!     used_ring: 0x2000,
//!     event_idx: false,
//!     indirect: true,
//!     next_avail: 0,
//! };
//! let mut queue = SplitQueue::new(LocalMemory::new(memory), config)?;
//! while let Some(mut chain) = queue.pop()? {
//!     let status = chain.writable.take_last_byte();
//!     let written = chain.writable.copy_from(0, &[0x5a; 511]);
//!     if let Some(status) = status {
//!         status.write(0);
//!     }
//!     queue.push(chain.head, u32::try_from(written)? + 1);
//! }
//! assert!(queue.publish(), "the first publish always calls the driver");
//! # Ok(())
//! # }
//! ```
//!
//! All input from the guest is hostile. A bad request yields a [`ChainFault`] and a bad ring a
//! [`QueueError`], and neither can make the crate touch memory outside the regions. A chain is made
//! from a single read of each of its descriptors, so a later change by the driver has no effect.
//! An access to memory that its owner truncated raises SIGBUS. After [`install_sigbus_handler`],
//! queues with rings in such memory stop instead, and requests with buffers in it fail.
//!
//! The crate is for 64-bit Linux. It follows the virtio 1.3 specification, sections 2.7 and 2.8.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("guest addresses and lengths are 64 bits wide and must fit a usize");

mod avail_idx;
mod budget;
mod chain;
pub mod death;
mod descriptor_ring;
mod device_queue;
#[cfg(feature = "driver")]
pub mod driver;
mod error;
mod inflight;
mod memory;
mod packed;
mod position;
mod queue_memory;
mod region;
mod rings;
mod sigbus;
mod split;
mod virtqueue;

pub use avail_idx::AvailIdx;
pub use budget::MappingBudget;
pub use chain::Chain;
pub use device_queue::DeviceQueue;
pub use error::{ChainFault, InflightError, MemoryError, QueueError, RingPart};
pub use inflight::{InflightAccount, InflightRegion, Recovery, RingLayout};
pub use memory::{
    AnswerPlace, DirtyLog, GuestMemory, LocalMemory, MAX_INDIRECT_ENTRIES, MAX_QUEUE_SIZE, QueueLog,
};
pub use packed::PackedQueue;
pub use region::{MAX_REGIONS, MappingRules, MemoryFiles, RegionConfig};
pub use sigbus::{install_sigbus_handler, lost_regions};
pub use split::{QueueConfig, SplitQueue};
pub use virtqueue::Virtqueue;
