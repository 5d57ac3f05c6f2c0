//! The executor of one IoThread: slots for tasks, a ready list, and the wakes of futures.
//!
//! A task is one future. A task that serves many requests keeps their futures in a `TaskSet`: these
//! have one concrete type, live in storage that is used again, and are polled without a virtual
//! call.
//!
//! Every event that a future waits for has an [`Owner`]. As a rule that is a [`TaskKey`], two small
//! numbers, and no `Waker` is cloned on the way of a request. But a future must wake the waker of
//! its last poll, and combinators poll futures with wakers of their own. So a future compares its
//! waker with that of the running task, and keeps a clone if the two differ.
//!
//! Wakers of tasks may be used anywhere. On other threads they post to the mailbox; within a turn
//! of their own loop they need neither its lock nor its eventfd.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::ptr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Context, Wake, Waker};

use crate::executor::mailbox::{Mailbox, NO_CHILD, NO_TASK, TaskKey};

/// The target of a wake.
#[derive(Debug, Clone)]
pub enum Owner {
    /// A future that this IoThread runs.
    Key(TaskKey),
    /// A future that foreign code polls.
    Waker(Waker),
}

impl Default for Owner {
    fn default() -> Self {
        Self::Key(NO_TASK)
    }
}

impl Owner {
    /// Returns true if both wake the same future.
    pub(crate) fn wakes_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Key(key), Self::Key(other)) => key == other,
            (Self::Waker(waker), Self::Waker(other)) => waker.will_wake(other),
            _ => false,
        }
    }
}

type TaskFuture = Pin<Box<dyn Future<Output = ()>>>;

/// A future and the waker for its polls.
pub(crate) type TaskBody = (TaskFuture, Waker);

struct Task {
    /// `None` while it is polled, and after it has ended.
    body: Option<TaskBody>,
    /// True if the task is on the ready list.
    queued: bool,
}

/// The executor's record of a set of futures.
#[derive(Default)]
struct Set {
    /// The last poller of the set.
    owner: Owner,
    /// Children that were woken since the owner last took this list. The first wakes the owner.
    woken: Vec<u32>,
}

/// The tasks of one IoThread.
#[derive(Default)]
pub(crate) struct Executor {
    tasks: Vec<Task>,
    free: Vec<u32>,
    ready: Vec<u32>,
    sets: Vec<Set>,
    free_sets: Vec<u32>,
    /// Futures that are suspended until their task is woken, and were polled with other wakers.
    suspended: Vec<(TaskKey, Waker)>,
    running: Rc<Running>,
}

/// The running future, and the wakes that came while the executor was out of reach.
pub(crate) struct Running {
    current: Cell<TaskKey>,
    /// The data pointer of the waker of the current poll.
    waker: Cell<*const ()>,
    noted_wakes: RefCell<Vec<Owner>>,
    has_noted_wakes: Cell<bool>,
    /// True if a task may be ready or an owner was woken.
    is_due: Cell<bool>,
    /// True if the future outside of any task, in `block_on` for example, was woken.
    is_root_woken: Cell<bool>,
    /// True while the thread is in the loop.
    is_entered: Cell<bool>,
}

/// An address that no waker has as its data.
static NO_WAKER: u8 = 0;

impl Default for Running {
    fn default() -> Self {
        Self {
            current: Cell::new(NO_TASK),
            waker: Cell::new((&raw const NO_WAKER).cast()),
            noted_wakes: RefCell::default(),
            has_noted_wakes: Cell::new(false),
            is_due: Cell::new(false),
            is_root_woken: Cell::new(false),
            is_entered: Cell::new(false),
        }
    }
}

impl Running {
    /// The task, or the future of a set, that runs now.
    #[inline]
    pub(crate) fn current(&self) -> TaskKey {
        self.current.get()
    }

    /// Polls as `key`, with `waker`.
    #[inline]
    pub(crate) fn run<T>(&self, key: TaskKey, waker: &Waker, poll: impl FnOnce() -> T) -> T {
        let outer = (self.current.replace(key), self.waker.replace(waker.data()));
        let result = poll();
        self.current.set(outer.0);
        self.waker.set(outer.1);
        result
    }

    /// Returns true if `cx` comes from the running task itself, not from a combinator. Wakers that
    /// exist at the same time have different data.
    #[inline]
    pub(crate) fn is_polled_by_task(&self, cx: &Context<'_>) -> bool {
        ptr::eq(cx.waker().data(), self.waker.get())
    }

    /// The owner to wake for a future that is polled with `cx`.
    #[inline]
    pub(crate) fn owner(&self, cx: &Context<'_>) -> Owner {
        if self.is_polled_by_task(cx) { Owner::Key(self.current.get()) } else { other(cx) }
    }

    /// Runs `turn` within the loop. Wakers of its tasks need no mailbox there, because the loop has
    /// yet to check for ready tasks.
    #[inline]
    pub(crate) fn enter<T>(&self, turn: impl FnOnce() -> T) -> T {
        let outer = self.is_entered.replace(true);
        let result = turn();
        self.is_entered.set(outer);
        result
    }

    /// Returns true if the future of `block_on` was woken since the last call.
    #[inline]
    pub(crate) fn take_root_woken(&self) -> bool {
        self.is_root_woken.take()
    }

    /// Returns true if a task may be ready or an owner was woken.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.is_due.get()
    }

    /// Wakes `owner` before the loop checks for ready tasks the next time.
    pub(crate) fn wake(&self, owner: Owner) {
        self.has_noted_wakes.set(true);
        self.is_due.set(true);
        self.noted_wakes.borrow_mut().push(owner);
    }

    #[cold]
    fn wake_other(&self, waker: &Waker) {
        self.wake(Owner::Waker(waker.clone()));
    }

    fn take_noted_wakes(&self) -> Vec<Owner> {
        self.has_noted_wakes.set(false);
        self.noted_wakes.take()
    }
}

#[cold]
fn other(cx: &Context<'_>) -> Owner {
    Owner::Waker(cx.waker().clone())
}

/// Returns true if any task is ready.
#[inline(always)]
pub(crate) fn has_ready(executor: &RefCell<Executor>, running: &Running) -> bool {
    running.is_due.get() && check_ready(executor, running)
}

#[inline]
fn check_ready(executor: &RefCell<Executor>, running: &Running) -> bool {
    if running.has_noted_wakes.get() {
        take_noted_wakes(executor, running);
    }
    let has_ready = !executor.borrow().ready.is_empty();
    running.is_due.set(has_ready);
    has_ready
}

/// Passes on the wakes that came without the executor. Foreign wakers may run any code.
#[cold]
fn take_noted_wakes(executor: &RefCell<Executor>, running: &Running) {
    while running.has_noted_wakes.get() {
        for owner in running.take_noted_wakes() {
            match owner {
                Owner::Key(key) => executor.borrow_mut().wake(key),
                Owner::Waker(waker) => {
                    waker.wake();
                    // The waker may be that of a future which is polled between turns.
                    running.is_root_woken.set(true);
                }
            }
        }
    }
}

/// The loops of a thread.
type Loops = Vec<(*const Mailbox, Weak<Running>)>;

thread_local! {
    static LOOPS: RefCell<Loops> = const { RefCell::new(Loops::new()) };
}

/// Keeps a loop known to its thread, so that wakers of its tasks find it there.
pub(crate) struct LoopRegistration(*const Mailbox);

impl LoopRegistration {
    /// `mailbox` is that of the loop.
    pub(crate) fn new(mailbox: &Arc<Mailbox>, running: &Rc<Running>) -> Self {
        let mailbox = Arc::as_ptr(mailbox);
        LOOPS.with_borrow_mut(|loops| loops.push((mailbox, Rc::downgrade(running))));
        Self(mailbox)
    }
}

impl Drop for LoopRegistration {
    fn drop(&mut self) {
        // A thread that ends has dropped the list already.
        let forget = |loops: &RefCell<Loops>| {
            loops.borrow_mut().retain(|(mailbox, _)| *mailbox != self.0);
        };
        let _ = LOOPS.try_with(forget);
    }
}

/// Returns the loop with `mailbox`, if this thread is in it.
fn entered(mailbox: &Arc<Mailbox>) -> Option<Rc<Running>> {
    let own = Arc::as_ptr(mailbox);
    let find = |loops: &RefCell<Loops>| {
        let loops = loops.borrow();
        let (_, running) = loops.iter().find(|(mailbox, _)| *mailbox == own)?;
        running.upgrade().filter(|running| running.is_entered.get())
    };
    LOOPS.try_with(find).ok().flatten()
}

/// Runs `act` as another thread would: a simulation plays several threads on this one.
#[cfg(ringhaul_sim)]
pub(crate) fn as_other_thread<T>(act: impl FnOnce() -> T) -> T {
    let loops = LOOPS.take();
    let result = act();
    // `act` may have added loops.
    LOOPS.with_borrow_mut(|new| new.extend(loops));
    result
}

/// Makes a waker that wakes `key` from any thread. [`NO_TASK`] ends a sleep.
pub(crate) fn waker(mailbox: &Arc<Mailbox>, key: TaskKey) -> Waker {
    Waker::from(Arc::new(TaskWaker { mailbox: Arc::clone(mailbox), key }))
}

struct TaskWaker {
    mailbox: Arc<Mailbox>,
    key: TaskKey,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        match entered(&self.mailbox) {
            Some(running) => running.wake(Owner::Key(self.key)),
            None => drop(self.mailbox.post(|posted| posted.woken.push(self.key))),
        }
    }
}

/// Wakes the futures whose keys were in the mailbox.
pub(crate) fn wake_all(executor: &RefCell<Executor>, woken: &[TaskKey]) {
    let mut executor = executor.borrow_mut();
    woken.iter().for_each(|&key| executor.wake(key));
}

impl Executor {
    pub(crate) fn new(running: &Rc<Running>) -> Self {
        Self { running: Rc::clone(running), ..Self::default() }
    }

    /// Adds a task and makes it ready.
    pub(crate) fn insert(&mut self, future: TaskFuture, mailbox: &Arc<Mailbox>) {
        let index = self.free.pop().unwrap_or_else(|| {
            u32::try_from(self.tasks.len()).unwrap_or_else(|_| unreachable!("2^32 tasks at once"))
        });
        let key = TaskKey::task(index);
        let task = Task { body: Some((future, waker(mailbox, key))), queued: false };
        if index as usize == self.tasks.len() {
            self.tasks.push(task);
        } else {
            self.tasks[index as usize] = task;
        }
        self.wake(key);
    }

    /// Wakes a future: puts its task on the ready list, once.
    #[inline(always)]
    pub(crate) fn wake(&mut self, mut key: TaskKey) {
        if !self.suspended.is_empty() {
            self.wake_suspended(key);
        }
        while key.child != NO_CHILD {
            let Some(set) = self.sets.get_mut(key.home as usize) else {
                return;
            };
            let is_owner_woken = !set.woken.is_empty();
            set.woken.push(key.child);
            if is_owner_woken {
                return;
            }
            match &set.owner {
                Owner::Key(owner) => key = *owner,
                Owner::Waker(waker) => return self.running.wake_other(waker),
            }
        }
        let Some(task) = self.tasks.get_mut(key.home as usize) else {
            self.running.is_root_woken.set(true);
            return;
        };
        if !task.queued {
            task.queued = true;
            self.running.is_due.set(true);
            self.ready.push(key.home);
        }
    }

    /// Wakes `waker` when `key` is woken, or soon if `key` was woken since it began to run.
    #[cold]
    pub(crate) fn suspend(&mut self, key: TaskKey, waker: Waker) {
        let is_woken = match key {
            NO_TASK => self.running.is_root_woken.get(),
            TaskKey { home, child: NO_CHILD } => {
                self.tasks.get(home as usize).is_some_and(|task| task.queued)
            }
            TaskKey { home, child } => {
                self.sets.get(home as usize).is_some_and(|set| set.woken.contains(&child))
            }
        };
        if is_woken {
            self.running.wake(Owner::Waker(waker));
        } else {
            self.suspended.push((key, waker));
        }
    }

    #[cold]
    fn wake_suspended(&mut self, key: TaskKey) {
        let running = &self.running;
        self.suspended.retain(|(suspended, waker)| {
            let is_woken = *suspended == key;
            if is_woken {
                running.wake(Owner::Waker(waker.clone()));
            }
            !is_woken
        });
    }

    /// Adds a set of futures. Returns its number.
    pub(crate) fn add_set(&mut self) -> u32 {
        if let Some(set) = self.free_sets.pop() {
            // A child of the previous set may have been woken since that was removed.
            self.sets[set as usize] = Set::default();
            return set;
        }
        self.sets.push(Set::default());
        u32::try_from(self.sets.len() - 1).unwrap_or_else(|_| unreachable!("2^32 sets at once"))
    }

    pub(crate) fn remove_set(&mut self, set: u32) {
        // Drops the owner.
        self.sets[set as usize] = Set::default();
        self.free_sets.push(set);
    }

    /// Makes `owner` the poller of the set, and wakes it if a child was woken.
    #[cold]
    pub(crate) fn set_owner_of(&mut self, set: u32, owner: Owner) {
        let set = &mut self.sets[set as usize];
        if !set.woken.is_empty() {
            self.running.wake(owner.clone());
        }
        set.owner = owner;
    }

    /// Swaps the woken children of a set with `list`, which is empty.
    #[inline]
    pub(crate) fn take_woken_children(&mut self, set: u32, list: &mut Vec<u32>) {
        if let Some(set) = self.sets.get_mut(set as usize) {
            mem::swap(&mut set.woken, list);
        }
    }

    /// Begins a round with the tasks that are ready, and returns their number. Tasks that become
    /// ready during the round belong to the next one.
    #[inline]
    pub(crate) fn begin_round(&self) -> usize {
        self.ready.len()
    }

    /// Ends a round of `count` tasks.
    #[inline]
    pub(crate) fn end_round(&mut self, count: usize) {
        if count == self.ready.len() {
            self.ready.clear();
        } else {
            self.ready.drain(..count);
        }
    }

    /// Takes a task of the round out for its poll, by its place.
    #[inline]
    pub(crate) fn begin_poll(&mut self, place: usize) -> Option<(u32, TaskBody)> {
        let task = *self.ready.get(place)?;
        let entry = self.tasks.get_mut(task as usize)?;
        entry.queued = false;
        Some((task, entry.body.take()?))
    }

    /// Puts an unfinished task back, or frees its place.
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

    /// The number of tasks that have not ended.
    pub(crate) fn tasks(&self) -> usize {
        self.tasks.len() - self.free.len()
    }
}
