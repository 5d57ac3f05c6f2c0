//! An eventfd that ends the wait of a thread.

use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;

/// A bell for one thread.
pub(crate) struct Bell {
    eventfd: OwnedFd,
    /// True while the thread awaits a call of [`note_work`](Self::note_work).
    awaits_work: AtomicBool,
}

impl Bell {
    /// # Errors
    ///
    /// When no descriptor is left.
    pub(crate) fn new() -> io::Result<Self> {
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { eventfd, awaits_work: AtomicBool::new(false) })
    }

    /// Ends the present wait, or the next one.
    pub(crate) fn ring(&self) {
        // By `writev`, to distinguish it from a call to a driver in a trace of system calls. A full
        // counter rings, too.
        let _ = rustix::io::writev(&self.eventfd, &[IoSlice::new(&1_u64.to_ne_bytes())]);
    }

    /// Rings if the thread awaits work. Otherwise it costs no system call.
    pub(crate) fn note_work(&self) {
        // Pairs with the fence in `await_work`: the thread sees the work, or this its wait.
        fence(Ordering::SeqCst);
        if self.awaits_work.load(Ordering::Relaxed) {
            self.ring();
        }
    }

    /// Lets work ring until the end of the next wait. The thread checks for work after this call
    /// and before the wait.
    pub(crate) fn await_work(&self) {
        self.awaits_work.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Waits until the bell rings, a second descriptor is readable, or the time has passed. Returns
    /// true if the second descriptor is readable.
    pub(crate) fn wait(&self, second: Option<BorrowedFd<'_>>, limit: Option<Duration>) -> bool {
        let end = limit.map(|limit| Instant::now() + limit);
        let second_is_readable = loop {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let own = PollFd::new(&self.eventfd, PollFlags::IN);
            let second = second.map(|second| PollFd::from_borrowed_fd(second, PollFlags::IN));
            let mut polled: Vec<PollFd<'_>> = [own].into_iter().chain(second).collect();
            if poll(&mut polled, left.as_ref()) != Err(Errno::INTR) {
                break polled.get(1).is_some_and(|second| !second.revents().is_empty());
            }
        };
        self.awaits_work.store(false, Ordering::Relaxed);
        let _ = rustix::io::read(&self.eventfd, &mut [0; 8]);
        second_is_readable
    }
}

#[cfg(test)]
mod tests {
    use rustix::fd::AsFd;

    use super::*;

    #[test]
    fn a_bell_ends_a_wait_once() {
        let bell = Bell::new().unwrap();
        let rings = || {
            let mut polled = [PollFd::new(&bell.eventfd, PollFlags::IN)];
            poll(&mut polled, Some(&Timespec::default())).unwrap() == 1
        };
        bell.note_work();
        assert!(!rings(), "the thread awaits no work");
        bell.ring();
        bell.wait(None, None);
        assert!(!rings());
        bell.await_work();
        bell.note_work();
        bell.wait(None, None);
        bell.note_work();
        assert!(!rings(), "the wait is over");
        let (second, written) = (Bell::new().unwrap(), Bell::new().unwrap());
        written.ring();
        assert!(second.wait(Some(written.eventfd.as_fd()), None));
        written.wait(None, None);
        assert!(!second.wait(Some(written.eventfd.as_fd()), Some(Duration::ZERO)));
    }
}
