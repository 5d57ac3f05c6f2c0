//! The executor of one IoThread: slots for tasks, a ready list, local wakes.
//!
//! A task is one future. A task that serves many requests keeps their futures in a [`TaskSet`]:
//! these have one concrete type, live in storage that is used again, and are polled without a
//! virtual call. A completion wakes a request by its [`TaskKey`], two small numbers that its slot
//! remembers; no `Waker` is cloned on the way.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::mem;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use crate::io_thread::Io;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Eventfd, Mutex, MutexGuard};

/// Names a task, and a future in its [`TaskSet`].
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TaskKey {
    pub(crate) task: u32,
    pub(crate) child: u32,
}

/// A child number that stands for the task itself.
pub(crate) const NO_CHILD: u32 = u32::MAX;

type TaskFuture = Pin<Box<dyn Future<Output = ()>>>;

/// A future and the waker that it is polled with.
pub(crate) type TaskBody = (TaskFuture, Waker);

struct Task {
    /// `None` while it is polled, and after it has ended.
    body: Option<TaskBody>,
    /// Whether the task is on the ready list.
    queued: bool,
    /// Children that were woken since the task last ran.
    woken_children: Vec<u32>,
    /// Whether the task was woken through its `Waker`, which cannot say for which child.
    woken_by_waker: bool,
}

/// The tasks of one IoThread.
#[derive(Default)]
pub(crate) struct Executor {
    tasks: Vec<Task>,
    free: Vec<u32>,
    ready: Vec<u32>,
}

impl Executor {
    /// Adds a task and makes it ready.
    pub(crate) fn insert(&mut self, future: TaskFuture, wakes: &Arc<ForeignWakes>) {
        let index = self.free.pop().unwrap_or_else(|| {
            u32::try_from(self.tasks.len()).unwrap_or_else(|_| unreachable!("2^32 tasks at once"))
        });
        let waker = Waker::from(Arc::new(TaskWaker { wakes: Arc::clone(wakes), task: index }));
        let task = Task {
            body: Some((future, waker)),
            queued: false,
            woken_children: Vec::new(),
            woken_by_waker: false,
        };
        if index as usize == self.tasks.len() {
            self.tasks.push(task);
        } else {
            self.tasks[index as usize] = task;
        }
        self.wake(TaskKey { task: index, child: NO_CHILD });
    }

    /// Puts a task on the ready list, once.
    #[inline]
    pub(crate) fn wake(&mut self, key: TaskKey) {
        let Some(task) = self.tasks.get_mut(key.task as usize) else {
            return;
        };
        if key.child != NO_CHILD {
            task.woken_children.push(key.child);
        }
        if !task.queued {
            task.queued = true;
            self.ready.push(key.task);
        }
    }

    fn wake_by_waker(&mut self, task: u32) {
        if let Some(entry) = self.tasks.get_mut(task as usize) {
            entry.woken_by_waker = true;
        }
        self.wake(TaskKey { task, child: NO_CHILD });
    }

    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Swaps the ready list with `list`, which is empty.
    pub(crate) fn take_ready(&mut self, list: &mut Vec<u32>) {
        mem::swap(&mut self.ready, list);
    }

    /// Takes a task out to be polled.
    pub(crate) fn begin_poll(&mut self, task: u32) -> Option<TaskBody> {
        let entry = self.tasks.get_mut(task as usize)?;
        entry.queued = false;
        entry.body.take()
    }

    /// Puts a task back that is not finished, or frees its place.
    pub(crate) fn end_poll(&mut self, task: u32, unfinished: Option<TaskBody>) {
        if unfinished.is_none() {
            self.free.push(task);
        }
        self.tasks[task as usize].body = unfinished;
    }

    /// Takes all tasks out, for the caller to drop when nothing is borrowed.
    pub(crate) fn clear(&mut self) -> Vec<TaskBody> {
        self.ready.clear();
        self.tasks.iter_mut().filter_map(|task| task.body.take()).collect()
    }

    /// Tasks that have not ended.
    pub(crate) fn tasks(&self) -> usize {
        self.tasks.len() - self.free.len()
    }

    /// Moves the woken children of a task into `list`. True: look at every child.
    pub(crate) fn take_woken_children(&mut self, task: u32, list: &mut Vec<u32>) -> bool {
        let Some(entry) = self.tasks.get_mut(task as usize) else {
            return false;
        };
        mem::swap(&mut entry.woken_children, list);
        mem::take(&mut entry.woken_by_waker)
    }
}

/// Work that other threads (or wakers) hand to an IoThread.
pub(crate) struct ForeignWakes {
    inbox: Mutex<Inbox>,
    /// Whether the inbox holds anything, so that a turn can look without a lock.
    posted: AtomicBool,
    eventfd: Eventfd,
}

/// A closure that another thread wants run here.
type ForeignCall = Box<dyn FnOnce(&Rc<Io>) + Send>;

#[derive(Default)]
pub(crate) struct Inbox {
    pub(crate) tasks: Vec<u32>,
    pub(crate) calls: Vec<ForeignCall>,
    /// Set once the IoThread is gone: nobody will look any more.
    closed: bool,
}

impl ForeignWakes {
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

struct TaskWaker {
    wakes: Arc<ForeignWakes>,
    task: u32,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Wakers are not on the data path (slots wake by key), so one way serves all threads.
        self.wakes.post(|inbox| inbox.tasks.push(self.task));
    }
}

/// Marks the tasks that wakers have woken.
pub(crate) fn wake_all(executor: &RefCell<Executor>, tasks: &[u32]) {
    let mut executor = executor.borrow_mut();
    for &task in tasks {
        executor.wake_by_waker(task);
    }
}

/// A set of futures of one type that one task runs.
///
/// Storage is allocated when the set grows and used again afterwards: starting a future on a set
/// that has been as full before allocates nothing.
pub struct TaskSet<F> {
    io: Rc<Io>,
    futures: Vec<Pin<Box<Option<F>>>>,
    free: Vec<u32>,
    woken: Vec<u32>,
}

impl<F: Future<Output = ()>> TaskSet<F> {
    /// An empty set for a task on `io`.
    #[must_use]
    pub fn new(io: Rc<Io>) -> Self {
        Self { io, futures: Vec::new(), free: Vec::new(), woken: Vec::new() }
    }

    /// Futures that have not ended.
    #[must_use]
    pub fn len(&self) -> usize {
        self.futures.len() - self.free.len()
    }

    /// Whether no future is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a future and polls it once.
    pub fn spawn(&mut self, cx: &mut Context<'_>, future: F) {
        let child = self.free.pop().unwrap_or_else(|| {
            self.futures.push(Box::pin(None));
            u32::try_from(self.futures.len() - 1)
                .unwrap_or_else(|_| unreachable!("2^32 futures in a set"))
        });
        self.futures[child as usize].as_mut().set(Some(future));
        self.poll_child(cx, child);
    }

    /// As [`spawn`](Self::spawn), in an `async fn`.
    pub async fn start(&mut self, future: F) {
        let mut future = Some(future);
        poll_fn(|cx| {
            if let Some(future) = future.take() {
                self.spawn(cx, future);
            }
            Poll::Ready(())
        })
        .await;
    }

    /// Polls the futures that were woken since the last call.
    pub fn run_woken(&mut self, cx: &mut Context<'_>) {
        let mut woken = mem::take(&mut self.woken);
        if self.io.take_woken_children(&mut woken) {
            for child in (0..self.futures.len()).filter_map(|index| u32::try_from(index).ok()) {
                self.poll_child(cx, child);
            }
        } else {
            for &child in &woken {
                self.poll_child(cx, child);
            }
        }
        woken.clear();
        self.woken = woken;
    }

    /// Waits until no future is left.
    pub async fn finish(&mut self) {
        poll_fn(|cx| {
            self.run_woken(cx);
            if self.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    #[inline]
    fn poll_child(&mut self, cx: &mut Context<'_>, child: u32) {
        let Some(place) = self.futures.get_mut(child as usize) else {
            return;
        };
        let Some(future) = place.as_mut().as_pin_mut() else {
            return;
        };
        let ended = self.io.as_child(child, || future.poll(cx).is_ready());
        if ended {
            place.as_mut().set(None);
            self.free.push(child);
        }
    }
}
