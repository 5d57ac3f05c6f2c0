//! The kinds of ops, and their results.

use iomem::fits;

/// The operation that the kernel performs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpKind {
    /// Fill the buffers from the file.
    Read,
    /// Write the buffers to the file.
    Write {
        /// True if the data must be on stable storage before the op completes (`RWF_DSYNC`).
        fua: bool,
    },
    /// Bring all completed writes to stable storage (fdatasync).
    Flush,
    /// `fallocate` with these `FALLOC_FL_*` flags over `len` bytes.
    Fallocate {
        /// Mode flags.
        mode: libc::c_int,
        /// Length in bytes.
        len: u64,
    },
    /// `BLKDISCARD` over `len` bytes.
    DiscardBlocks {
        /// Length in bytes.
        len: u64,
    },
    /// `BLKZEROOUT` over `len` bytes.
    ZeroBlocks {
        /// Length in bytes.
        len: u64,
    },
    /// Find the length of the hole or of the data at the offset (`SEEK_DATA`, `SEEK_HOLE`).
    /// [`extent_result`](Self::extent_result) makes the result.
    FindExtent {
        /// The most bytes to report.
        len: u64,
    },
}

impl OpKind {
    /// True if the op moves data. All other kinds are slow and rare.
    #[inline]
    pub(crate) fn is_transfer(self) -> bool {
        matches!(self, Self::Read | Self::Write { .. })
    }

    /// True if success means that data is on stable storage.
    #[inline]
    pub(crate) fn is_for_stable_storage(self) -> bool {
        matches!(self, Self::Flush | Self::Write { fua: true })
    }

    /// Encodes the result of a [`FindExtent`](Self::FindExtent): its bytes, and true for a hole.
    pub(crate) fn extent_result(bytes: u64, is_hole: bool) -> i64 {
        let bytes: i64 = fits(bytes, "the length of an extent");
        bytes << 1 | i64::from(is_hole)
    }

    /// Decodes such a result.
    pub(crate) fn extent_of(result: usize) -> (u64, bool) {
        ((result >> 1) as u64, result & 1 != 0)
    }

    /// The name in the log.
    pub(crate) fn noun(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write { .. } => "write",
            Self::Flush => "flush",
            Self::Fallocate { .. } => "discard or zeroing",
            Self::DiscardBlocks { .. } => "discard",
            Self::ZeroBlocks { .. } => "zeroing",
            Self::FindExtent { .. } => "search for holes",
        }
    }
}

/// The errno in a negative result.
pub(crate) fn errno_of(result: i64) -> i32 {
    i32::try_from(-result).unwrap_or(libc::EIO)
}
