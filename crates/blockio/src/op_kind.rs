//! What an op does, and how it ends.

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

    /// What the log calls it.
    pub(crate) fn noun(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write { .. } => "write",
            Self::Flush => "flush",
            Self::Fallocate { .. } => "discard or zeroing",
            Self::DiscardBlocks { .. } => "discard",
            Self::ZeroBlocks { .. } => "zeroing",
        }
    }
}

/// The errno in a result that is negative.
pub(crate) fn errno_of(result: i64) -> i32 {
    i32::try_from(-result).unwrap_or(libc::EIO)
}
