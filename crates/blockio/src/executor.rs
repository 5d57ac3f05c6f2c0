//! Tasks, their wakers, and messages from other threads. Knows no I/O.

pub(crate) mod mailbox;
#[cfg(all(test, any(loom, shuttle)))]
pub(crate) mod model_tests;
pub mod oneshot;
pub(crate) mod sync;
pub(crate) mod task;
pub(crate) mod task_key;
