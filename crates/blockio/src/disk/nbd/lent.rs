//! Memory and result of a request that another IoThread carries out.

use std::io;

use iomem::{Buffers, Memory};
use libc::iovec;

use crate::disk::info::{Extent, ExtentKind};

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

/// A result as an op of something else has it.
pub(super) fn encode(result: Result<Extent, i32>) -> io::Result<usize> {
    let extent = result.map_err(io::Error::from_raw_os_error)?;
    let kind = match extent.kind {
        ExtentKind::Data => 0,
        ExtentKind::Zero => 1,
        ExtentKind::Hole => 2,
    };
    let bytes = usize::try_from(extent.bytes).unwrap_or(usize::MAX).min(usize::MAX >> 3);
    Ok(bytes << 2 | kind)
}

/// What [`encode`] has made of it.
pub(super) fn decode(result: io::Result<usize>) -> Result<Extent, i32> {
    let code = result.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
    let kind = match code & 3 {
        0 => ExtentKind::Data,
        1 => ExtentKind::Zero,
        _ => ExtentKind::Hole,
    };
    Ok(Extent { bytes: (code >> 2) as u64, kind })
}
