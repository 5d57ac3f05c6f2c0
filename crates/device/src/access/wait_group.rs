//! Waits for tasks to end, on any threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use blockio::executor::Lock;

/// A wait for queues to scan their tasks, and for the found tasks to end.
#[derive(Default)]
struct WaitState {
    /// Queues that have not scanned, and tasks that have not ended.
    open: AtomicUsize,
    found: AtomicUsize,
    /// True if a queue with chains that were not popped has stopped, or its ring is bad.
    has_lost: AtomicBool,
    waker: Lock<Option<Waker>>,
}

/// A queue or task that is awaited. Dropping it marks its end.
pub(crate) struct WaitToken(Arc<WaitState>);

impl WaitToken {
    /// Counts a task that was found.
    pub(crate) fn count_found(&self) {
        self.0.found.fetch_add(1, Ordering::Relaxed);
    }

    /// Marks that covered tasks may be popped later.
    pub(crate) fn mark_lost(&self) {
        self.0.has_lost.store(true, Ordering::Relaxed);
    }
}

impl Clone for WaitToken {
    fn clone(&self) -> Self {
        self.0.open.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(&self.0))
    }
}

impl Drop for WaitToken {
    fn drop(&mut self) {
        if self.0.open.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(waker) = self.0.waker.lock().take()
        {
            waker.wake();
        }
    }
}

/// Waits until every [`WaitToken`] is gone.
pub(crate) struct WaitGroup(Arc<WaitState>);

impl WaitGroup {
    /// Creates a wait, with the first [`WaitToken`].
    pub(crate) fn new() -> (Self, WaitToken) {
        let wait = Arc::new(WaitState::default());
        wait.open.store(1, Ordering::Relaxed);
        (Self(Arc::clone(&wait)), WaitToken(wait))
    }

    /// Ready with the number of tasks found.
    pub(crate) fn poll(&self, cx: &Context<'_>) -> Poll<usize> {
        *self.0.waker.lock() = Some(cx.waker().clone());
        if self.0.open.load(Ordering::Acquire) > 0 {
            return Poll::Pending;
        }
        Poll::Ready(self.0.found.load(Ordering::Relaxed))
    }

    /// Blocks this thread, which must not be an IoThread.
    pub(crate) fn wait(&self) {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        while self.poll(&Context::from_waker(&waker)).is_pending() {
            std::thread::park();
        }
    }

    /// True if covered chains may be popped later, as if they had not been covered.
    pub(crate) fn has_lost(&self) -> bool {
        self.0.has_lost.load(Ordering::Relaxed)
    }
}

/// Wakes a thread.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
