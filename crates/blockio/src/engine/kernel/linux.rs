//! The kernel that the program runs on.

mod aio;
mod ring;

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use rustix::event::Timespec;
use rustix::fd::OwnedFd;

pub(in crate::engine) use aio::AioContext;
pub(in crate::engine) use ring::Ring;

use crate::engine::pool::Pool;
use crate::stay;

/// Whether the kernel has taken the jobs of the pool, which then needs no threads: never.
#[inline]
pub(in crate::engine) fn takes_jobs(_: &Arc<Pool>) -> bool {
    false
}

/// Sleeps until `fd` is readable or `deadline` has come, as far as the look at `fd` that follows
/// would not. Returns the time-out of that look.
#[inline]
pub(in crate::engine) fn sleep(
    _: &OwnedFd,
    _: Option<Instant>,
    timeout: Option<Timespec>,
) -> Option<Timespec> {
    timeout
}

/// Starts a thread for work that may block.
pub(crate) fn start_thread(name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
    let be_anywhere = stay::for_new_thread();
    let work = move || {
        be_anywhere();
        work();
    };
    thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
}
