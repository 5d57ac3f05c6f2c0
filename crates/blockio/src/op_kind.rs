//! What an op does, and how it ends.

use iomem::fits;

/// What the kernel is asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpKind {
    /// Fill the buffers from the file.
    Read,
    /// Write the buffers to the file.
    Write {
        /// Whether the data must be on stable storage before the op completes (`RWF_DSYNC`).
        fua: bool,
    },
    /// Bring all completed writes to stable storage (fdatasync).
    Flush,
    /// `fallocate` with these `FALLOC_FL_*` flags over `len` bytes.
    Fallocate {
        /// Mode flags.
        mode: libc::c_int,
        /// Bytes.
        len: u64,
    },
    /// `BLKDISCARD` over `len` bytes.
    DiscardBlocks {
        /// Bytes.
        len: u64,
    },
    /// `BLKZEROOUT` over `len` bytes.
    ZeroBlocks {
        /// Bytes.
        len: u64,
    },
    /// Find out how many bytes are a hole, or are none (`SEEK_DATA`, `SEEK_HOLE`). The result is
    /// [made](Self::extent_result) of both.
    FindExtent {
        /// At most so many.
        len: u64,
    },
}

impl OpKind {
    /// Whether it moves data. Everything else is slow, and seldom.
    #[inline]
    pub(crate) fn is_transfer(self) -> bool {
        matches!(self, Self::Read | Self::Write { .. })
    }

    /// Whether its success says that data is on stable storage.
    #[inline]
    pub(crate) fn is_for_stable_storage(self) -> bool {
        matches!(self, Self::Flush | Self::Write { fua: true })
    }

    /// The result of a [`FindExtent`](Self::FindExtent): bytes, and whether they are a hole.
    pub(crate) fn extent_result(bytes: u64, is_hole: bool) -> i64 {
        let bytes: i64 = fits(bytes, "the length of an extent");
        bytes << 1 | i64::from(is_hole)
    }

    /// What such a result was made of.
    pub(crate) fn extent_of(result: usize) -> (u64, bool) {
        ((result >> 1) as u64, result & 1 != 0)
    }

    /// What the log calls it.
    pub(crate) fn noun(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write { .. } => "write",
            Self::Flush => "flush",
            Self::Fallocate { .. } => "discard or zeroing",
            Self::DiscardBlocks { .. } => "discard",
            Self::ZeroBlocks { .. } => "zeroing",
            Self::FindExtent { .. } => "look for holes",
        }
    }
}

/// The errno in a result that is negative.
pub(crate) fn errno_of(result: i64) -> i32 {
    i32::try_from(-result).unwrap_or(libc::EIO)
}
