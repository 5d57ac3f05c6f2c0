//! The kernel that the program runs on.

mod aio;
mod ring;

use std::io;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::Timespec;
use rustix::fd::OwnedFd;
use tracing::Span;

pub(in crate::engine) use aio::AioContext;
pub(in crate::engine) use ring::Ring;

use crate::engine::pool::Pool;
use crate::executor;

/// Returns true if the kernel has taken the jobs of the pool, which then needs no threads: never.
#[inline]
pub(in crate::engine) fn simulate_jobs(_: &Arc<Pool>) -> bool {
    false
}

/// Does nothing, because the caller's wait sleeps here. Returns the time-out of that wait.
#[inline]
pub(in crate::engine) fn sleep(
    _: &OwnedFd,
    _: Option<Instant>,
    timeout: Option<Timespec>,
) -> Option<Timespec> {
    timeout
}

/// Starts a thread for work that may block. Its lines in the log have the span of the caller.
pub fn start_thread(name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
    let span = Span::current();
    executor::start_thread(name, move || span.in_scope(work)).map(drop)
}
