//! The answers and calls of a disk in a hand-over.

/// Answers of a disk about its state, for a hand-over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandOverFacts {
    /// The answer of `is_flushed`.
    pub is_flushed: bool,
    /// The answer of `may_still_change`.
    pub may_still_change: bool,
    /// The answer of `is_written_back`.
    pub is_written_back: bool,
}

impl Default for HandOverFacts {
    fn default() -> Self {
        Self { is_flushed: false, may_still_change: false, is_written_back: true }
    }
}

/// A call of a method of the disk's source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// `inherit` with these arguments.
    Inherit(Option<i32>, bool),
    /// `abandon`.
    Abandon,
    /// `write_back`.
    WriteBack,
    /// `release_lock`.
    ReleaseLock,
    /// `probe_space`.
    ProbeSpace,
    /// `check_new_size` with this size.
    CheckSize(u64),
    /// `adopt_size` with this size.
    AdoptSize(u64),
}
