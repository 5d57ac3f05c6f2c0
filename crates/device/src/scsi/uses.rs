//! What a task uses, so that others wait for it.

/// What a task uses, by how many covers its queue had had when it could.
#[derive(Clone, Copy)]
pub(super) struct Uses {
    /// The disk. Nothing: since before anybody could ask.
    pub(super) disk_since: u64,
    pub(super) medium_since: u64,
    /// It uses nothing while it waits, but did use the medium.
    pub(super) had_medium: bool,
}

/// That of a task that may not use it.
pub(super) const NOT: u64 = u64::MAX;

impl Uses {
    /// Of a task that begins.
    #[inline(always)]
    pub(super) const fn medium_since(medium_since: u64) -> Self {
        Self { disk_since: 0, medium_since, had_medium: false }
    }
}
