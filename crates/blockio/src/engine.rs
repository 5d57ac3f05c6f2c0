//! The engines of an IoThread, through which ops reach the kernel, and the waiter for events.
//!
//! Each file has one engine. The program that sets an IoThread up chooses its engines. The pool of
//! threads is always there, also for ops that the kernel cannot do asynchronously. These verbs are
//! for all engines together:
//!
//! * `queue` takes the index of a filled slot. It makes no system call and never fails.
//! * `submit` hands queued ops to the kernel, as many as it takes, in order.
//! * `harvest` stores the results that are visible now in their slots, in most cases without a
//!   system call.
//! * `wait` sleeps until there is something to do; with io_uring the same system call submits.
//!
//! Every outcome arrives as a completion, from `harvest`, `submit` or `wait`, even that of an op
//! that the kernel refused. An op that the kernel has no room for stays queued.
//!
//! There is one waiter: the ring if there is one, else epoll. A ring waits for eventfds as well as
//! epoll does, including the eventfd that announces completions of `aio` and `threads`.

mod aio;
mod aio_ring;
mod announce;
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

use crate::config::{EngineConfig, EngineKind, IoThreadConfig};
use crate::error::Error;
use crate::executor::mailbox::Mailbox;
use crate::op::{Completer, IoFile, Slots};
use crate::stats::Stats;
use aio::Aio;
use epoll::Epoll;
use io_uring::IoUring;
use kernel::Interest;
use threads::Threads;

/// The token of the mailbox's eventfd, which Linux AIO writes too: there may be completions.
pub(crate) const TOKEN_ENGINE: u64 = u64::MAX;

/// The engines of an IoThread, and its waiter.
pub(crate) struct Engine {
    waiter: Waiter,
    aio: Option<Box<Aio>>,
    threads: Threads,
    config: IoThreadConfig,
}

/// The object in which an IoThread waits.
enum Waiter {
    /// The ring of engine io_uring.
    Ring(Box<IoUring>),
    Epoll(Epoll),
}

impl Waiter {
    fn watch(&mut self, fd: BorrowedFd<'_>, token: u64, interest: Interest) -> Result<(), Errno> {
        match self {
            Self::Ring(ring) => ring.watch(fd, token, interest),
            Self::Epoll(epoll) => epoll.watch(fd, token, interest),
        }
    }

    fn ring(&self) -> Option<&IoUring> {
        match self {
            Self::Ring(ring) => Some(ring),
            Self::Epoll(_) => None,
        }
    }
}

impl Engine {
    /// Sets up `config.engine` and the pool, and watches `mailbox`.
    pub(crate) fn new(config: &IoThreadConfig, mailbox: &Arc<Mailbox>) -> Result<Self, Error> {
        let waiter = match config.engine {
            EngineConfig::IoUring { sqpoll, iopoll } => ring(config, sqpoll, iopoll)?,
            _ => Waiter::Epoll(Epoll::new()?),
        };
        let threads = Threads::new(mailbox);
        let mut engine = Self { waiter, aio: None, threads, config: config.clone() };
        engine.watch_mailbox()?;
        engine.add(config.engine, |_| Ok(()))?;
        Ok(engine)
    }

    /// Sets up one more engine; an existing one stays as it is. If the waiter is replaced,
    /// `watch_others` adds all watches from outside to the new one.
    pub(crate) fn add(
        &mut self,
        engine: EngineConfig,
        watch_others: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<(), Error> {
        match engine {
            _ if self.has(engine.kind()) => Ok(()),
            EngineConfig::Threads => Ok(()),
            EngineConfig::Aio { completion_ring } => {
                self.aio = Some(Box::new(Aio::new(&self.config, completion_ring)?));
                Ok(())
            }
            EngineConfig::IoUring { .. } if self.config.embedded => Err(Error::Options(
                "cannot add engine io_uring to an embedded IoThread: the descriptor that the \
                 program waits for would change; choose io_uring at its start"
                    .into(),
            )),
            EngineConfig::IoUring { sqpoll, iopoll } => {
                let ring = ring(&self.config, sqpoll, iopoll)?;
                let epoll = std::mem::replace(&mut self.waiter, ring);
                // A new watch reports past events, so none is lost.
                let watched = self.watch_mailbox().and_then(|()| watch_others(self));
                watched.inspect_err(|_| self.waiter = epoll)
            }
        }
    }

    /// Returns true if files may use this engine.
    pub(crate) fn has(&self, engine: EngineKind) -> bool {
        match engine {
            EngineKind::IoUring => self.waiter.ring().is_some(),
            EngineKind::Aio => self.aio.is_some(),
            EngineKind::Threads => true,
        }
    }

    /// Watches the one eventfd for results of the pool, completions of Linux AIO and all posts.
    fn watch_mailbox(&mut self) -> Result<(), Error> {
        let watched = self.waiter.watch(self.threads.eventfd(), TOKEN_ENGINE, Interest::Readable);
        watched.map_err(Error::system("watch an eventfd"))
    }

    /// A descriptor that is readable when something has happened.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        match &self.waiter {
            Waiter::Ring(ring) => ring.as_fd(),
            Waiter::Epoll(epoll) => epoll.as_fd(),
        }
    }

    /// Watches an eventfd, edge-triggered: it is never read. Or a socket, which its owner reads.
    pub(crate) fn watch(
        &mut self,
        fd: BorrowedFd<'_>,
        token: u64,
        interest: Interest,
    ) -> Result<(), Errno> {
        self.waiter.watch(fd, token, interest)
    }

    /// Ends the watch of `fd` with this token.
    pub(crate) fn unwatch(&mut self, fd: BorrowedFd<'_>, token: u64) {
        match &mut self.waiter {
            Waiter::Ring(ring) => ring.unwatch(token),
            Waiter::Epoll(epoll) => epoll.unwatch(fd),
        }
    }

    /// Waits until something happens or `deadline` comes (`None`: for ever). A ring submits up to
    /// `max` of its queued ops in the same system call. Appends to `events` the tokens of
    /// eventfds that were written; with a ring, only the next harvest finds them.
    pub(crate) fn wait(
        &mut self,
        deadline: Option<Instant>,
        max: usize,
        done: &mut Completer<'_>,
        events: &mut Vec<u64>,
    ) -> Result<(), Error> {
        match &mut self.waiter {
            Waiter::Ring(ring) => ring.wait(deadline, max, done),
            Waiter::Epoll(epoll) => epoll.wait(deadline, done.now, events, done.stats),
        }
    }

    /// Returns true if a wait submits queued ops of io_uring, and leaves all events to the harvest.
    pub(crate) fn waiter_is_ring(&self) -> bool {
        matches!(self.waiter, Waiter::Ring(_))
    }

    /// Returns true if the next wait may submit all queued ops. A wait submits only ops of the
    /// ring, and ops of the pool may even fail in their submit.
    #[inline]
    pub(crate) fn may_submit_in_wait(&self) -> bool {
        self.waiter_is_ring()
            && self.threads.queued() == 0
            && self.aio.as_ref().is_none_or(|aio| aio.queued() == 0)
    }

    /// Returns true if each queued op is submitted by a wait or awaits an event that ends one.
    pub(crate) fn may_sleep(&self) -> bool {
        let threads = self.threads.queued() == 0 || self.threads.in_kernel() > 0;
        threads && self.aio.as_ref().is_none_or(|aio| aio.may_sleep())
    }

    /// Sets the number of disks.
    pub(crate) fn set_disks(&mut self, disks: usize) {
        self.threads.set_disks(disks);
    }

    /// Registers `file`, if its engine can, so that the kernel looks it up once instead of for each
    /// op.
    pub(crate) fn register_file(&mut self, file: &IoFile) {
        if let Waiter::Ring(ring) = &mut self.waiter
            && file.engine() == EngineKind::IoUring
        {
            ring.register_file(file);
        }
    }

    /// Ends a registration. No op of the file may be on its way: entries that the kernel has not
    /// taken name an index, which may belong to another file from now on.
    pub(crate) fn unregister_file(&mut self, registered: i32) {
        if let Waiter::Ring(ring) = &mut self.waiter {
            ring.unregister_file(registered);
        }
    }

    /// Registers the pages of `memory` with the kernel, if an engine can. Returns true if it does.
    pub(crate) fn register_memory(&mut self, memory: &[libc::iovec]) -> io::Result<bool> {
        match &mut self.waiter {
            Waiter::Ring(ring) => ring.register_memory(memory).map(|()| true),
            Waiter::Epoll(_) => Ok(false),
        }
    }

    /// Ends a registration of memory. Ops on their way finish.
    pub(crate) fn unregister_memory(&mut self, memory: &[libc::iovec]) {
        if let Waiter::Ring(ring) = &mut self.waiter {
            ring.unregister_memory(memory);
        }
    }

    /// Takes the op in `slot` for the next submit.
    #[inline(always)]
    pub(crate) fn queue(&mut self, slot: u32, slots: &Slots) {
        let Some(op) = slots.op(slot) else { unreachable!("an op that is queued is in its slot") };
        let is_taken = match (op.file.engine(), &mut self.waiter, &mut self.aio) {
            (EngineKind::IoUring, Waiter::Ring(ring), _) => ring.queue(slot, op),
            (EngineKind::Aio, _, Some(aio)) => aio.queue(slot, op),
            // The pool can do every op.
            _ => false,
        };
        if !is_taken {
            self.threads.queue(slot);
        }
    }

    /// Gives queued ops to the kernel, at most `max` of each engine. Costs one system call for each
    /// engine with queued ops if all goes well. Returns true if the kernel would take more.
    #[inline]
    pub(crate) fn submit(&mut self, max: usize, done: &mut Completer<'_>) -> bool {
        let mut more = self.threads.submit(max, done);
        if let Waiter::Ring(ring) = &mut self.waiter {
            more |= ring.submit(max, done);
        }
        // Last, because a submit of Linux AIO may wait for its disk.
        if let Some(aio) = &mut self.aio {
            more |= aio.submit(max, &mut self.threads, done);
        }
        more
    }

    /// Finds completions that are visible now, and returns their number. Appends to `events` the
    /// tokens of written eventfds, as far as they are seen here.
    #[inline]
    pub(crate) fn harvest(&mut self, done: &mut Completer<'_>, events: &mut Vec<u64>) -> u64 {
        let mut found = 0;
        // First: the ring takes the events that announce completions of `aio` and the pool, which
        // are visible when announced.
        if let Waiter::Ring(ring) = &mut self.waiter {
            found += ring.harvest(&mut self.threads, done, events);
        }
        found += self.threads.harvest(done);
        if let Some(aio) = &mut self.aio {
            found += aio.harvest(done);
        }
        if found > 0 {
            done.stats.count_harvest(found);
        }
        found
    }

    /// Returns true if a harvest would find something. Cheap enough for busy-polling.
    #[inline]
    pub(crate) fn has_completions(&mut self, now: Instant, stats: &Stats) -> bool {
        let in_ring = match &mut self.waiter {
            Waiter::Ring(ring) => ring.has_completions(now, stats),
            Waiter::Epoll(_) => false,
        };
        in_ring
            || self.threads.has_completions()
            || self.aio.as_ref().is_some_and(|aio| aio.has_completions())
    }

    /// Returns true if there is nothing to submit and nothing to harvest.
    #[inline]
    pub(crate) fn is_quiet(&self) -> bool {
        let (threads, aio) = (&self.threads, self.aio.as_ref());
        threads.queued() + threads.in_kernel() == 0
            && aio.is_none_or(|aio| aio.queued() + aio.in_kernel() == 0)
            && self.waiter.ring().is_none_or(IoUring::is_quiet)
    }

    /// Returns true if some work does not make the descriptor readable: entries (of watches, say)
    /// that the next wait submits, ops without an entry in a full submission ring, or ops whose
    /// completions are polled for.
    pub(crate) fn has_unannounced_work(&mut self) -> bool {
        match &mut self.waiter {
            Waiter::Ring(ring) => ring.has_unannounced_work(),
            Waiter::Epoll(_) => false,
        }
    }

    /// The number of ops that wait for a submit.
    #[inline]
    pub(crate) fn queued(&self) -> usize {
        self.waiter.ring().map_or(0, IoUring::queued)
            + self.threads.queued()
            + self.aio.as_ref().map_or(0, |aio| aio.queued())
    }

    /// The number of ops that were submitted and have not completed.
    #[inline]
    pub(crate) fn in_kernel(&self) -> usize {
        self.waiter.ring().map_or(0, IoUring::in_kernel)
            + self.threads.in_kernel()
            + self.aio.as_ref().map_or(0, |aio| aio.in_kernel())
    }

    /// The time of the next try of a submit that the kernel refused.
    pub(crate) fn retry_at(&self) -> Option<Instant> {
        let of_ring = self.waiter.ring().and_then(IoUring::retry_at);
        let of_aio = self.aio.as_ref().and_then(|aio| aio.retry_at());
        [of_ring, of_aio].into_iter().flatten().min()
    }
}

fn ring(config: &IoThreadConfig, sqpoll: bool, iopoll: bool) -> Result<Waiter, Error> {
    Ok(Waiter::Ring(Box::new(IoUring::new(config, sqpoll, iopoll)?)))
}

#[cfg(test)]
mod embedding_tests;
#[cfg(test)]
mod hung_disk_tests;
#[cfg(test)]
mod kernel_tests;
#[cfg(test)]
mod lifetime_tests;
#[cfg(test)]
mod mixed_engines_tests;
#[cfg(test)]
mod tests;
