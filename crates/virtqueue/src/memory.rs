//! Guest memory: the map, the translation of guest addresses, and every access to guest bytes.
//!
//! Guest memory may change at any time, so no Rust reference to it is ever made. Bytes are copied
//! through raw pointers, and read with volatile accesses. Other modules get only narrow handles. A
//! [`Translator`] makes a list of [`Buffers`](iomem::Buffers) from one map. The list can only
//! shrink afterwards, and keeps that map alive. Its pointers are good for as long as the list can
//! be reached, so the modules that use it need no `unsafe`.

mod dirty_log;
mod local;
mod map;
mod shadows;
mod table;
mod translator;

pub use dirty_log::{DirtyLog, QueueLog};
pub use local::LocalMemory;
pub use map::GuestMemory;
pub(crate) use shadows::Shadows;
pub(crate) use table::{DESC_F_INDIRECT, DESCRIPTOR_BYTES, Descriptor};
pub use table::{MAX_INDIRECT_ENTRIES, MAX_QUEUE_SIZE};
pub use translator::AnswerPlace;
pub(crate) use translator::{Direction, Translator};
