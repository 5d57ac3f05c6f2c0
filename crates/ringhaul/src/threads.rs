//! IoThreads: their engines, their watch, and the events that end them.

pub(crate) mod engines;
pub mod io_threads;
pub(crate) mod ownership;
pub mod shutdown;
pub(crate) mod thread_watch;
