//! The mailbox of an IoThread: the one way in for other threads.
//!
//! A check of the mailbox takes no lock, and a post costs a system call only when the loop may
//! sleep. For that the loop *arms* the mailbox before its last check. The first post after that
//! disarms it and writes the eventfd. Later posts do not, until the loop is about to sleep again.
//! Each side writes its flag, passes a full fence and reads the opposite flag, so at least one of
//! them sees the opposite write: no wake is lost.

use std::any::Any;
use std::mem;
use std::sync::PoisonError;

use crate::executor::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use crate::executor::sync::{Eventfd, Mutex, MutexGuard};

/// The name of a task, or of a future in a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskKey {
    /// The number of the task, or of the set.
    pub(crate) home: u32,
    /// The place in the set; [`NO_CHILD`] for a task.
    pub(crate) child: u32,
}

/// A child number that stands for a task.
pub(crate) const NO_CHILD: u32 = u32::MAX;

/// The key while no task runs: it names the future in `block_on`, if there is one.
pub(crate) const NO_TASK: TaskKey = TaskKey::task(u32::MAX);

impl TaskKey {
    #[inline]
    pub(crate) const fn task(home: u32) -> Self {
        Self { home, child: NO_CHILD }
    }
}

/// Work that other threads (or wakers) hand to an IoThread.
pub(crate) struct Mailbox {
    inbox: Mutex<Inbox>,
    /// The content of the inbox: [`POSTED`], [`RESULTS`].
    flags: AtomicU32,
    /// The loop may sleep: the next post wakes it.
    armed: AtomicBool,
    eventfd: Eventfd,
}

/// Woken tasks or calls.
const POSTED: u32 = 1;
/// Results of ops.
const RESULTS: u32 = 2;

/// A closure of another thread, to run here. Its argument is the `Rc<Io>` that tasks get, of which
/// this floor does not know.
pub(crate) type Call = Box<dyn FnOnce(&dyn Any) + Send>;

/// The slot of an op that a thread has completed, and bytes or a negative errno.
pub(crate) type OpResult = (u32, i64);

/// Posts that a turn takes out.
#[derive(Default)]
pub(crate) struct Posted {
    /// Tasks that wakers have woken.
    pub(crate) woken: Vec<TaskKey>,
    pub(crate) calls: Vec<Call>,
}

#[derive(Default)]
pub(crate) struct Inbox {
    posted: Posted,
    /// A harvest takes them out.
    results: Vec<OpResult>,
    /// Set at the end of the IoThread: posts are refused.
    closed: bool,
}

impl Mailbox {
    pub(crate) fn new(eventfd: rustix::fd::OwnedFd) -> Self {
        Self {
            inbox: Mutex::default(),
            flags: AtomicU32::new(0),
            armed: AtomicBool::new(true),
            eventfd: Eventfd::new(eventfd),
        }
    }

    pub(crate) fn eventfd(&self) -> &Eventfd {
        &self.eventfd
    }

    pub(crate) fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a post, and wakes the IoThread if needed. Returns false if the IoThread has ended.
    pub(crate) fn post(&self, add: impl FnOnce(&mut Posted)) -> bool {
        let is_open = self.post_quietly(add);
        if is_open && self.must_wake() {
            self.wake();
        }
        is_open
    }

    /// Adds a post that waits until the loop wakes for another reason. Returns false if the
    /// IoThread has ended.
    pub(crate) fn post_quietly(&self, add: impl FnOnce(&mut Posted)) -> bool {
        let mut inbox = self.inbox();
        if inbox.closed {
            return false;
        }
        add(&mut inbox.posted);
        self.set_flag(&inbox, POSTED);
        true
    }

    /// Adds the result of an op. Returns true if the loop may sleep and the caller must wake it.
    #[must_use]
    pub(crate) fn put_result(&self, slot: u32, result: i64) -> bool {
        self.add_result(slot, result);
        self.must_wake()
    }

    /// Posts the result of an op, even to a loop that has ended, so that the op's memory can be
    /// freed. Returns false if it has ended.
    pub(crate) fn post_result(&self, slot: u32, result: i64) -> bool {
        let is_open = self.add_result(slot, result);
        if self.must_wake() {
            self.wake();
        }
        is_open
    }

    fn add_result(&self, slot: u32, result: i64) -> bool {
        let mut inbox = self.inbox();
        inbox.results.push((slot, result));
        self.set_flag(&inbox, RESULTS);
        !inbox.closed
    }

    /// Only the holder of the lock writes this, so no read-modify-write is needed.
    fn set_flag(&self, _: &MutexGuard<'_, Inbox>, what: u32) {
        self.flags.store(self.flags.load(Ordering::Relaxed) | what, Ordering::Release);
    }

    fn clear_flag(&self, _: &MutexGuard<'_, Inbox>, what: u32) {
        self.flags.store(self.flags.load(Ordering::Relaxed) & !what, Ordering::Release);
    }

    /// Disarms the mailbox. Returns true if the loop may sleep and no other thread is about to wake
    /// it.
    fn must_wake(&self) -> bool {
        // Pairs with the fence in `arm`.
        fence(Ordering::SeqCst);
        self.armed.load(Ordering::Relaxed) && self.armed.swap(false, Ordering::Relaxed)
    }

    pub(crate) fn wake(&self) {
        self.eventfd.add_one();
    }

    /// Makes the next post wake the loop, which must check once more before it sleeps. Returns true
    /// if a post since the last call has woken it, or is about to.
    #[inline]
    pub(crate) fn arm(&self) -> bool {
        // After a disarm that this load misses, the eventfd is not written yet, or its event is
        // still to come.
        let was_disarmed = !self.armed.load(Ordering::Relaxed);
        if was_disarmed {
            // A swap, as in `must_wake`: all changes of the flag have one order.
            self.armed.swap(true, Ordering::Relaxed);
            // Pairs with the fence in `must_wake`.
            fence(Ordering::SeqCst);
        }
        was_disarmed
    }

    /// Returns true if the inbox is not empty.
    #[inline]
    pub(crate) fn has_anything(&self) -> bool {
        self.flags.load(Ordering::Acquire) != 0
    }

    #[inline]
    pub(crate) fn is_posted(&self) -> bool {
        self.flags.load(Ordering::Acquire) & POSTED != 0
    }

    #[inline]
    pub(crate) fn has_results(&self) -> bool {
        self.flags.load(Ordering::Acquire) & RESULTS != 0
    }

    /// Takes out all posts, but no results.
    pub(crate) fn take(&self) -> Posted {
        let mut inbox = self.inbox();
        self.clear_flag(&inbox, POSTED);
        mem::take(&mut inbox.posted)
    }

    /// Swaps the results with `harvested`, which is empty.
    pub(crate) fn take_results(&self, harvested: &mut Vec<OpResult>) {
        let mut inbox = self.inbox();
        mem::swap(&mut inbox.results, harvested);
        self.clear_flag(&inbox, RESULTS);
    }

    /// Takes out all posts, and refuses later ones. Results are still accepted.
    pub(crate) fn close(&self) -> Posted {
        let mut inbox = self.inbox();
        inbox.closed = true;
        mem::take(&mut inbox.posted)
    }
}
