//! The names of tasks.

/// The name of a task, or of a future in a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskKey {
    /// The number of the task, or of the set.
    pub(crate) home: u32,
    /// The place in the set; [`NO_CHILD`] for a task.
    pub(crate) child: u32,
}

/// A child number that stands for a task.
pub(crate) const NO_CHILD: u32 = u32::MAX;

/// The key while no task runs: it names the future in `block_on`, if there is one.
pub(crate) const NO_TASK: TaskKey = TaskKey::task(u32::MAX);

impl TaskKey {
    #[inline]
    pub(crate) const fn task(home: u32) -> Self {
        Self { home, child: NO_CHILD }
    }
}
