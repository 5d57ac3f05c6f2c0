//! Memory of a request that another IoThread carries out.

use iomem::{Buffers, Memory};
use libc::iovec;

/// The memory of a foreign op, for another thread. It is good until the op is completed.
pub(super) struct Lent {
    ranges: Vec<iovec>,
}

// SAFETY: the ranges are addresses of memory that any thread may read and write, as long as the
// foreign op owns it.
unsafe impl Send for Lent {}

impl Lent {
    pub(super) fn new(buffers: &Buffers) -> Self {
        Self { ranges: buffers.iovecs().to_vec() }
    }

    /// The memory as a list of this thread.
    ///
    /// # Safety
    ///
    /// The list and all lists that are made of it must have gone when the op is completed that
    /// owns the memory.
    pub(super) unsafe fn into_buffers(self) -> Buffers {
        // SAFETY: the slot of the foreign op keeps the ranges mapped until its completion, which
        // the caller makes last.
        unsafe { Buffers::from_raw_parts(self.ranges.into(), Memory::new(())) }
    }
}
