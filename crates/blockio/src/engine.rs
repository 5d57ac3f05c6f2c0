//! How an op reaches the kernel: `enum Engine` and its verbs.
//!
//! * `queue` takes the index of a filled slot. It makes no system call and never fails.
//! * `submit` hands queued ops to the kernel, as many as it takes, in order.
//! * `harvest` stores the results that are visible now in their slots, in most cases without a
//!   system call.
//! * `wait` sleeps until there is something to do; with io_uring the same system call submits.
//!
//! Every outcome arrives as a completion, from `harvest`, `submit` or `wait`, even that of an op
//! that the kernel refused. An op that the kernel has no room for stays queued.

mod aio;
mod aio_ring;
mod announce;
mod completer;
mod epoll;
mod io_uring;
pub mod kernel;
pub(crate) mod pool;
mod retry;
mod threads;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::fd::AsFd;
use rustix::io::Errno;

use crate::config::{EngineConfig, IoThreadConfig};
use crate::error::Error;
use crate::mailbox::Mailbox;
use crate::op::{IoFile, Slots};
use crate::stats::Stats;
use aio::Aio;
pub(crate) use completer::{Completer, TOKEN_ENGINE};
use epoll::Epoll;
use io_uring::IoUring;
use threads::Threads;

/// One IoThread's way to the kernel, and what it waits with.
pub(crate) enum Engine {
    Aio(Box<Aio>, Epoll),
    Threads(Threads, Epoll),
    IoUring(Box<IoUring>),
}

impl Engine {
    /// Waits for what is posted to `mailbox`, too.
    pub(crate) fn new(config: &IoThreadConfig, mailbox: &Arc<Mailbox>) -> Result<Self, Error> {
        let threads = Threads::new(mailbox);
        let mut engine = match config.engine {
            EngineConfig::Aio { completion_ring } => {
                let aio = Aio::new(config, completion_ring, threads)?;
                Self::Aio(Box::new(aio), Epoll::new()?)
            }
            EngineConfig::Threads => Self::Threads(threads, Epoll::new()?),
            EngineConfig::IoUring { sqpoll, iopoll } => {
                Self::IoUring(Box::new(IoUring::new(config, sqpoll, iopoll, threads)?))
            }
        };
        engine.watch_own_eventfd().map_err(Error::system("watch an eventfd"))?;
        Ok(engine)
    }

    fn watch_own_eventfd(&mut self) -> Result<(), Errno> {
        match self {
            Self::Aio(engine, epoll) => epoll.watch(engine.threads().eventfd(), TOKEN_ENGINE),
            Self::Threads(engine, epoll) => epoll.watch(engine.eventfd(), TOKEN_ENGINE),
            Self::IoUring(engine) => engine.watch_own_eventfd(),
        }
    }

    /// A descriptor that is readable when something has happened.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        match self {
            Self::Aio(_, epoll) | Self::Threads(_, epoll) => epoll.as_fd(),
            Self::IoUring(engine) => engine.as_fd(),
        }
    }

    /// Watches an eventfd, edge-triggered: it is never read.
    pub(crate) fn watch(&mut self, fd: BorrowedFd<'_>, token: u64) -> Result<(), Errno> {
        match self {
            Self::Aio(_, epoll) | Self::Threads(_, epoll) => epoll.watch(fd, token),
            Self::IoUring(engine) => engine.watch(fd, token),
        }
    }

    /// Ends the watch of `fd` that has this token.
    pub(crate) fn unwatch(&mut self, fd: BorrowedFd<'_>, token: u64) {
        match self {
            Self::Aio(_, epoll) | Self::Threads(_, epoll) => epoll.unwatch(fd),
            Self::IoUring(engine) => engine.unwatch(token),
        }
    }

    /// Waits until something happens or `deadline` comes (`None`: for ever). An engine that can
    /// submits up to `max` of its queued ops in the same system call. Appends to `happened` the
    /// tokens of eventfds that were written; some engines find them at the next harvest only.
    pub(crate) fn wait(
        &mut self,
        deadline: Option<Instant>,
        max: usize,
        done: &mut Completer<'_>,
        happened: &mut Vec<u64>,
    ) -> Result<(), Error> {
        match self {
            Self::Aio(_, epoll) | Self::Threads(_, epoll) => {
                epoll.wait(deadline, done.now, happened, done.stats)
            }
            Self::IoUring(engine) => engine.wait(deadline, max, done),
        }
    }

    /// Whether a wait submits what is queued.
    pub(crate) fn waits_with_submit(&self) -> bool {
        matches!(self, Self::IoUring(_))
    }

    /// Whether the next wait may submit what is queued. Ops of the pool may fail in their submit,
    /// and a wait would not see that they are complete.
    #[inline]
    pub(crate) fn may_submit_in_wait(&self) -> bool {
        matches!(self, Self::IoUring(engine) if !engine.has_jobs())
    }

    /// So many disks are there now.
    pub(crate) fn set_disks(&mut self, disks: usize) {
        match self {
            Self::Aio(engine, _) => engine.threads().set_disks(disks),
            Self::Threads(engine, _) => engine.set_disks(disks),
            Self::IoUring(engine) => engine.set_disks(disks),
        }
    }

    /// Has the kernel look `file` up once instead of for each op, where the engine can.
    pub(crate) fn register_file(&mut self, file: &IoFile) {
        if let Self::IoUring(engine) = self {
            engine.register_file(file);
        }
    }

    /// Ends what `register_file` began. No op of the file may be on its way: entries that the
    /// kernel has not taken name an index, which may be that of another file from now on.
    pub(crate) fn unregister_file(&mut self, registered: i32) {
        if let Self::IoUring(engine) = self {
            engine.unregister_file(registered);
        }
    }

    /// Has the kernel keep the pages of `memory` at hand, where the engine can. Returns whether
    /// it does.
    pub(crate) fn register_memory(&mut self, memory: &[libc::iovec]) -> io::Result<bool> {
        match self {
            Self::IoUring(engine) => engine.register_memory(memory).map(|()| true),
            _ => Ok(false),
        }
    }

    /// Ends what `register_memory` began. Ops that are on their way finish.
    pub(crate) fn unregister_memory(&mut self, memory: &[libc::iovec]) {
        if let Self::IoUring(engine) = self {
            engine.unregister_memory(memory);
        }
    }

    /// Takes the op in `slot` for the next submit.
    #[inline(always)]
    pub(crate) fn queue(&mut self, slot: u32, slots: &Slots) {
        match self {
            Self::Aio(engine, _) => engine.queue(slot, slots),
            Self::Threads(engine, _) => engine.queue(slot),
            Self::IoUring(engine) => engine.queue(slot, slots),
        }
    }

    /// Gives queued ops to the kernel, at most `max` of them: one system call if all goes well,
    /// none if there are none. True: the kernel would take more.
    #[inline]
    pub(crate) fn submit(&mut self, max: usize, done: &mut Completer<'_>) -> bool {
        match self {
            Self::Aio(engine, _) => engine.submit(max, done),
            Self::Threads(engine, _) => engine.submit(max, done),
            Self::IoUring(engine) => engine.submit(max, done),
        }
    }

    /// Finds completions that are visible now; returns how many. Appends to `happened` the tokens
    /// of eventfds that were written, as far as they are seen here.
    #[inline]
    pub(crate) fn harvest(&mut self, done: &mut Completer<'_>, happened: &mut Vec<u64>) -> u64 {
        let found = match self {
            Self::Aio(engine, _) => engine.harvest(done),
            Self::Threads(engine, _) => engine.harvest(done),
            Self::IoUring(engine) => engine.harvest(done, happened),
        };
        if found > 0 {
            done.stats.harvested_at_once.record(found);
        }
        found
    }

    /// Whether a harvest would find something: a cheap look, for busy-polling.
    #[inline]
    pub(crate) fn has_completions(&mut self, now: Instant, stats: &Stats) -> bool {
        match self {
            Self::Aio(engine, _) => engine.has_completions(),
            Self::Threads(engine, _) => engine.has_completions(),
            Self::IoUring(engine) => engine.has_completions(now, stats),
        }
    }

    /// Whether there is nothing to submit and nothing to harvest.
    #[inline]
    pub(crate) fn is_quiet(&self) -> bool {
        match self {
            Self::IoUring(engine) => engine.is_quiet(),
            _ => self.queued() == 0 && self.in_kernel() == 0,
        }
    }

    /// Whether the descriptor says nothing of some work: entries, of watches say, that the next
    /// wait submits, or ops whose completions are polled for.
    pub(crate) fn must_be_asked(&mut self) -> bool {
        match self {
            Self::IoUring(engine) => engine.must_be_asked(),
            _ => false,
        }
    }

    /// Ops that wait for a submit.
    pub(crate) fn queued(&self) -> usize {
        match self {
            Self::Aio(engine, _) => engine.queued(),
            Self::Threads(engine, _) => engine.queued(),
            Self::IoUring(engine) => engine.queued(),
        }
    }

    /// Ops that were submitted and have not completed.
    pub(crate) fn in_kernel(&self) -> usize {
        match self {
            Self::Aio(engine, _) => engine.in_kernel(),
            Self::Threads(engine, _) => engine.in_kernel(),
            Self::IoUring(engine) => engine.in_kernel(),
        }
    }

    /// When a submit that the kernel refused is to be tried again.
    pub(crate) fn retry_at(&self) -> Option<Instant> {
        match self {
            Self::Aio(engine, _) => engine.retry_at(),
            Self::Threads(..) => None,
            Self::IoUring(engine) => engine.retry_at(),
        }
    }
}

#[cfg(test)]
mod kernel_tests;
#[cfg(test)]
mod lifetimes;
#[cfg(test)]
mod neighbours;
#[cfg(test)]
mod tests;
