//! Resources that a task uses, and for which other tasks wait.

/// The uses of a task. Each is dated by the number of covers that its queue had made when the use
/// became possible.
#[derive(Clone, Copy)]
pub(crate) struct TaskResources {
    /// Use of the disk; 0 precedes every cover.
    pub(crate) disk_since: u64,
    pub(crate) medium_since: u64,
    /// True if the task uses nothing while it waits, but used the medium before.
    pub(crate) had_medium: bool,
}

/// The date of a use that is not possible.
pub(crate) const NEVER: u64 = u64::MAX;

impl TaskResources {
    /// The uses of a task that begins.
    #[inline(always)]
    pub(crate) const fn medium_since(medium_since: u64) -> Self {
        Self { disk_since: 0, medium_since, had_medium: false }
    }
}
