//! Guest memory: the map, translation of guest addresses, and every access to guest bytes.
//!
//! Guest memory changes under our hands, so nothing here makes a Rust reference to it: bytes are
//! copied with volatile accesses. What other modules get to hold is narrow by construction. A list
//! of [`Buffers`](iomem::Buffers) is made by a [`Translator`] from one map, can only shrink
//! afterwards, and keeps that map alive; so its pointers are good for as long as anyone can reach
//! them, and the modules that use it need no `unsafe`.

mod local;
mod map;
mod table;
mod translator;

pub use local::LocalMemory;
pub use map::GuestMemory;
pub(crate) use table::{DESC_F_INDIRECT, DESCRIPTOR_BYTES, Descriptor};
pub use translator::AnswerPlace;
pub(crate) use translator::{Direction, Translator};
