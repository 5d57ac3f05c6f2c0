//! What other threads hand to an IoThread.

use std::any::Any;
use std::mem;
use std::sync::PoisonError;

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Eventfd, Mutex, MutexGuard};
use crate::task_key::TaskKey;

/// Work that other threads (or wakers) hand to an IoThread.
pub(crate) struct Mailbox {
    inbox: Mutex<Inbox>,
    /// Whether the inbox holds anything, so that a turn can look without a lock.
    posted: AtomicBool,
    eventfd: Eventfd,
}

/// A closure that another thread wants run here. It is given what tasks get, an `Rc<Io>`, of which
/// this floor does not know.
pub(crate) type Call = Box<dyn FnOnce(&dyn Any) + Send>;

#[derive(Default)]
pub(crate) struct Inbox {
    /// Tasks that wakers have woken.
    pub(crate) woken: Vec<TaskKey>,
    pub(crate) calls: Vec<Call>,
    /// Set once the IoThread is gone: nobody will look any more.
    closed: bool,
}

impl Mailbox {
    pub(crate) fn new(eventfd: rustix::fd::OwnedFd) -> Self {
        Self {
            inbox: Mutex::default(),
            posted: AtomicBool::new(false),
            eventfd: Eventfd::new(eventfd),
        }
    }

    pub(crate) fn eventfd(&self) -> &Eventfd {
        &self.eventfd
    }

    #[cfg(all(test, shuttle))]
    pub(crate) fn watch_with(&mut self, other: &Eventfd) {
        self.eventfd.watch_with(other);
    }

    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the inbox, then makes the IoThread look at it. False when that thread is gone.
    pub(crate) fn post(&self, change: impl FnOnce(&mut Inbox)) -> bool {
        let mut inbox = self.lock();
        if inbox.closed {
            return false;
        }
        change(&mut inbox);
        self.posted.store(true, Ordering::Release);
        drop(inbox);
        self.eventfd.add_one();
        true
    }

    pub(crate) fn is_posted(&self) -> bool {
        self.posted.load(Ordering::Acquire)
    }

    /// Takes everything out.
    pub(crate) fn take(&self) -> Inbox {
        let mut inbox = self.lock();
        self.posted.store(false, Ordering::Relaxed);
        mem::take(&mut *inbox)
    }

    /// Takes everything out and refuses all that comes later.
    pub(crate) fn close(&self) -> Inbox {
        let mut inbox = self.lock();
        let rest = mem::take(&mut *inbox);
        inbox.closed = true;
        rest
    }
}
