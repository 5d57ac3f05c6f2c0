//! Lists of memory that is shared with a guest, a kernel or another process.
//!
//! The bytes behind a [`Buffers`] may change at any moment, so no Rust reference to them is ever
//! made. They are reached through raw pointers, and read with volatile accesses. A list keeps its
//! memory mapped through its [`Memory`]. Dropping the list returns the storage of its ranges. A
//! [`WriteLog`], where there is one, receives the address and length of each write.
//!
//! ```
//! use iomem::BufferMemory;
//!
//! let memory = BufferMemory::new(4096, 512);
//! memory.buffers(4096).copy_from(1000, b"data");
//! let mut data = [0; 4];
//! memory.buffers(4096).copy_to(1000, &mut data);
//! assert_eq!(&data, b"data");
//! ```

mod block;
mod copy;
mod fits;
mod list;
mod memory;
mod shared_byte;

pub use block::{BufferMemory, LentBlock, RepeatedBlock};
pub use copy::{copy_in, copy_out};
pub use fits::fits;
pub use list::{Buffers, SharedBytes};
pub use memory::{IOVECS_MAX, Memory, Ranges, WeakMemory, WriteLog};
pub use shared_byte::SharedByte;
