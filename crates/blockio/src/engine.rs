//! How an op reaches the kernel: `enum Engine` and its three verbs.
//!
//! * `queue` takes the index of a filled slot. It makes no system call and never fails.
//! * `submit` hands queued ops to the kernel, as many as it takes, in order.
//! * `harvest` stores the results that are visible now in their slots, without a system call.
//!
//! Every outcome arrives by `harvest` or from inside `submit` as a completion, that of an op which
//! the kernel refused included. An op that the kernel has no room for stays queued.

mod aio;
mod aio_ring;
mod threads;

use std::fmt;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, OwnedFd};

use crate::error::Error;
use crate::op::Slots;
use crate::stats::Stats;
use crate::task::TaskKey;
use aio::Aio;
use threads::Threads;

/// Which engine an IoThread has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    /// Linux AIO with the completion ring read in userspace. Asynchronous for files opened with
    /// `O_DIRECT`; with the page cache a submit waits for the disk.
    Aio,
    /// Blocking system calls on a pool of threads.
    Threads,
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Aio => "aio",
            Self::Threads => "threads",
        })
    }
}

/// Where an engine stores results and whom it wakes.
pub(crate) struct Completer<'a> {
    pub(crate) slots: &'a mut Slots,
    pub(crate) stats: &'a Stats,
    pub(crate) woken: &'a mut Vec<TaskKey>,
    pub(crate) now: Instant,
}

impl Completer<'_> {
    /// Stores one result: bytes, or a negative errno.
    #[inline]
    pub(crate) fn complete(&mut self, slot: u32, result: i64) {
        if let Some(owner) = self.slots.complete(slot, result, self.now, self.stats) {
            self.woken.push(owner);
        }
    }
}

/// One IoThread's way to the kernel.
pub(crate) enum Engine {
    Aio(Aio),
    Threads(Threads),
}

impl Engine {
    pub(crate) fn new(kind: EngineKind, depth: u32) -> Result<Self, Error> {
        // Never read: it is watched edge-triggered, so each write is a new event, and taking that
        // event is what clears it, before the handler looks for completions.
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(Error::system("create an eventfd for completions"))?;
        let threads = Threads::new(wake);
        Ok(match kind {
            EngineKind::Aio => Self::Aio(Aio::new(depth, threads)?),
            EngineKind::Threads => Self::Threads(threads),
        })
    }

    /// The eventfd that is written when completions arrive. It is to be watched edge-triggered.
    pub(crate) fn eventfd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Aio(engine) => engine.threads().eventfd(),
            Self::Threads(engine) => engine.eventfd(),
        }
    }

    /// Takes the op in `slot` for the next submit.
    #[inline]
    pub(crate) fn queue(&mut self, slot: u32, slots: &Slots) {
        match self {
            Self::Aio(engine) => engine.queue(slot, slots),
            Self::Threads(engine) => engine.queue(slot),
        }
    }

    /// Gives queued ops to the kernel. One system call if all goes well, none if there are none.
    #[inline]
    pub(crate) fn submit(&mut self, done: &mut Completer<'_>) {
        match self {
            Self::Aio(engine) => engine.submit(done),
            Self::Threads(engine) => engine.submit(done),
        }
    }

    /// Finds completions that are visible now.
    #[inline]
    pub(crate) fn harvest(&mut self, done: &mut Completer<'_>) {
        let found = match self {
            Self::Aio(engine) => engine.harvest(done),
            Self::Threads(engine) => engine.harvest(done),
        };
        if found > 0 {
            done.stats.harvested_at_once.record(found);
        }
    }

    /// Whether a harvest would find something: a cheap look, for busy-polling.
    #[inline]
    pub(crate) fn has_completions(&self) -> bool {
        match self {
            Self::Aio(engine) => engine.has_completions(),
            Self::Threads(engine) => engine.has_completions(),
        }
    }

    /// Ops that wait for a submit.
    pub(crate) fn queued(&self) -> usize {
        match self {
            Self::Aio(engine) => engine.queued(),
            Self::Threads(engine) => engine.queued(),
        }
    }

    /// Ops that were submitted and have not completed.
    pub(crate) fn in_kernel(&self) -> usize {
        match self {
            Self::Aio(engine) => engine.in_kernel(),
            Self::Threads(engine) => engine.in_kernel(),
        }
    }

    /// When a submit that the kernel refused is to be tried again.
    pub(crate) fn retry_at(&self) -> Option<Instant> {
        match self {
            Self::Aio(engine) => engine.retry_at(),
            Self::Threads(_) => None,
        }
    }
}

/// The eventfd of an engine, shared with whoever signals completions.
type WakeFd = std::sync::Arc<OwnedFd>;

fn wake_fd(fd: &WakeFd) -> BorrowedFd<'_> {
    fd.as_fd()
}

#[cfg(test)]
mod tests;
