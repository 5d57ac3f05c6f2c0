//! Guest memory for the engine: the one place where `virtqueue` and `blockio` meet.
//!
//! A chain's [`Segments`] become the [`Buffers`] of an op without a copy and without an
//! allocation.

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;

use blockio::Buffers;
use virtqueue::{LocalMemory, Segments};

/// A queue's memory map, as an owner that buffers can hold.
pub(crate) struct GuestOwner {
    memory: LocalMemory,
    owner: Rc<dyn Any>,
}

impl GuestOwner {
    pub(crate) fn new(memory: LocalMemory) -> Self {
        let owner = Rc::new(memory.clone());
        Self { memory, owner }
    }

    /// The same ranges, for an op.
    pub(crate) fn buffers(&self, segments: Segments) -> Buffers {
        let (ranges, first, memory) = segments.into_raw_parts();
        let owner: Rc<dyn Any> = if Arc::ptr_eq(memory.shared(), self.memory.shared()) {
            Rc::clone(&self.owner)
        } else {
            Rc::new(memory)
        };
        // SAFETY: the ranges of segments are guest memory, which stays mapped while the
        // `LocalMemory` they came with, or one of the same map, lives: `owner` is such a one. No
        // Rust reference is ever made to guest memory.
        unsafe { Buffers::from_raw_parts(ranges, first, owner) }
    }

    /// All of the memory map, for an engine that keeps its pages at hand.
    pub(crate) fn whole(&self) -> Buffers {
        // SAFETY: as in `buffers`; these are the ranges of the map itself.
        unsafe { Buffers::from_raw_parts(self.memory.host_ranges(), 0, Rc::clone(&self.owner)) }
    }

    /// Takes the storage of used buffers back for later chains.
    pub(crate) fn recycle(&self, buffers: Buffers) {
        self.memory.recycle(buffers.into_storage());
    }
}
