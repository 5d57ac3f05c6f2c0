//! Waiting for eventfds by epoll, for IoThreads without a ring to wait in.

use std::time::Instant;

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;

use super::kernel;
use super::kernel::Interest;
use crate::clock;
use crate::error::Error;
use crate::stats::Stats;

/// The most events taken by one epoll_wait.
const EVENTS_MAX: usize = 64;

pub(crate) struct Epoll {
    epoll: OwnedFd,
    events: Vec<Event>,
}

impl Epoll {
    pub(super) fn new() -> Result<Self, Error> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)
            .map_err(Error::system("create an epoll instance"))?;
        Ok(Self { epoll, events: Vec::with_capacity(EVENTS_MAX) })
    }

    pub(super) fn watch(
        &self,
        fd: BorrowedFd<'_>,
        token: u64,
        interest: Interest,
    ) -> Result<(), Errno> {
        let flags = match interest {
            Interest::Readable => EventFlags::IN,
            Interest::Writable => EventFlags::OUT,
        };
        epoll::add(&self.epoll, fd, EventData::new_u64(token), flags | EventFlags::ET)
    }

    pub(super) fn unwatch(&self, fd: BorrowedFd<'_>) {
        // Explicitly: the peer may hold another descriptor of the same eventfd, and then closing
        // ours would not end the watch.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits from `now` until `deadline` (`None`: forever). Appends the tokens of watches that
    /// fired.
    pub(super) fn wait(
        &mut self,
        deadline: Option<Instant>,
        now: Instant,
        events: &mut Vec<u64>,
        stats: &Stats,
    ) -> Result<(), Error> {
        let timeout = deadline.map(|deadline| timeout(deadline, now));
        clock::yield_to_simulation();
        let timeout = kernel::sleep(&self.epoll, deadline, timeout);
        stats.syscalls.epoll_wait.add(1);
        match epoll::wait(&self.epoll, spare_capacity(&mut self.events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::system("wait for events")(errno)),
        }
        events.extend(self.events.drain(..).map(|event| event.data.u64()));
        Ok(())
    }
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

fn timeout(deadline: Instant, now: Instant) -> Timespec {
    if deadline <= now {
        return Timespec { tv_sec: 0, tv_nsec: 0 };
    }
    let left = deadline.saturating_duration_since(now);
    Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 })
}
