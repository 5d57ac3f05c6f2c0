//! An eventfd that ends the wait of a thread.

use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;

/// An eventfd for one thread.
pub(crate) struct WakeFd {
    eventfd: OwnedFd,
    /// True while the thread awaits a call of [`wake_for_work`](Self::wake_for_work).
    awaits_work: AtomicBool,
}

impl WakeFd {
    /// # Errors
    ///
    /// When no descriptor is left.
    pub(crate) fn new() -> io::Result<Self> {
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { eventfd, awaits_work: AtomicBool::new(false) })
    }

    /// Ends the present wait, or the next one.
    pub(crate) fn wake(&self) {
        // By `writev`, to distinguish it from a call to a driver in a trace of system calls. A full
        // counter wakes, too.
        let _ = rustix::io::writev(&self.eventfd, &[IoSlice::new(&1_u64.to_ne_bytes())]);
    }

    /// Wakes the thread if it awaits work. Otherwise it costs no system call.
    pub(crate) fn wake_for_work(&self) {
        // Pairs with the fence in `await_work`: the thread sees the work, or this its wait.
        fence(Ordering::SeqCst);
        if self.awaits_work.load(Ordering::Relaxed) {
            self.wake();
        }
    }

    /// Lets work wake the thread until the end of the next wait. The thread checks for work after
    /// this call and before the wait.
    pub(crate) fn await_work(&self) {
        self.awaits_work.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Waits until a wake, a second descriptor is readable, or the time has passed. Returns
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
        self.clear();
        second_is_readable
    }

    /// Forgets a wake, so that the descriptor is not readable. Returns true if there was one.
    pub(crate) fn clear(&self) -> bool {
        rustix::io::read(&self.eventfd, &mut [0; 8]).is_ok()
    }
}

impl AsFd for WakeFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_ends_a_wait_once() {
        let wake_fd = WakeFd::new().unwrap();
        let is_woken = || {
            let mut polled = [PollFd::new(&wake_fd.eventfd, PollFlags::IN)];
            poll(&mut polled, Some(&Timespec::default())).unwrap() == 1
        };
        wake_fd.wake_for_work();
        assert!(!is_woken(), "the thread awaits no work");
        wake_fd.wake();
        wake_fd.wait(None, None);
        assert!(!is_woken());
        wake_fd.await_work();
        wake_fd.wake_for_work();
        wake_fd.wait(None, None);
        wake_fd.wake_for_work();
        assert!(!is_woken(), "the wait is over");
        let (second, written) = (WakeFd::new().unwrap(), WakeFd::new().unwrap());
        written.wake();
        assert!(second.wait(Some(written.eventfd.as_fd()), None));
        written.wait(None, None);
        assert!(!second.wait(Some(written.eventfd.as_fd()), Some(Duration::ZERO)));
    }
}
