//! IoThread and its [`turn`](IoThread::turn): one OS thread's loop. Read this first.

mod bounce;
mod config;
mod looks;
mod memory;
mod submit;
mod wait;

use bounce::BounceBudget;
pub(crate) use bounce::BounceShare;
pub use config::IoThreadConfig;
pub(crate) use looks::ROUNDS_BETWEEN_SOURCES;
pub use looks::ROUNDS_UNTIL_SERVED;
pub use memory::RegisteredMemory;

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::clock;
use crate::engine::{Engine, EngineKind};
use crate::error::Error;
use crate::late::LateOps;
use crate::op::{Completion, Op, OpFuture, Slots, Start};
use crate::poll_window::PollWindow;
use crate::reactor::{Reactor, Source, SourceId};
use crate::remote::Remote;
use crate::stats::Stats;
use crate::task::{self, Executor, ForeignWakes, NO_CHILD, TaskKey};

/// How a turn ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Sleep until something happens.
    ForEvent,
    /// Look for events and return.
    Never,
}

/// Whether another turn has anything to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// Call [`IoThread::turn`] again: tasks are ready.
    Ready,
    /// Nothing to do until the IoThread's descriptor is readable or [`IoThread::deadline`] comes.
    Idle,
}

/// One loop, for the thread that made it. Its descriptor ([`AsFd`]) is readable when a turn with
/// [`Wait::Never`] has something to do, for programs that embed the loop in their own: they take a
/// first turn, and then wait for it.
///
/// Dropping it ends in good order: ops in the kernel are waited for, then tasks are dropped.
pub struct IoThread {
    io: Rc<Io>,
    descriptor: OwnedFd,
    /// Empty between rounds; kept so that they allocate nothing.
    ready: Cell<Vec<u32>>,
}

/// What tasks and disks of one IoThread share.
pub struct Io {
    executor: RefCell<Executor>,
    ops: RefCell<Ops>,
    reactor: RefCell<Reactor>,
    foreign: Arc<ForeignWakes>,
    stats: Arc<Stats>,
    bounce_budget: BounceBudget,
    engine_kind: EngineKind,
    submit_max: usize,
    harvest_on_submit: bool,
    /// Without `harvest_on_submit`: the kernel has said that there are completions.
    harvest_is_due: Cell<bool>,
    current: Cell<TaskKey>,
    in_turn: Cell<bool>,
    /// An op that belongs to no task has completed: `block_on` is to ask its future.
    root_woken: Cell<bool>,
    stopped: Cell<bool>,
    rounds_since_look: Cell<u32>,
    /// When the eventfds are to be looked at, once there were some rounds without a look.
    look_at: Cell<Option<Instant>>,
    /// That time has come.
    look_is_late: Cell<bool>,
    /// The time at the last harvest, or at the end of the last sleep.
    recently: Cell<Instant>,
    /// Tasks of sources that have work. Empty between waits; kept so that they allocate nothing.
    found: Cell<Vec<TaskKey>>,
    poll_window: PollWindow,
    late: RefCell<LateOps>,
    /// When late ops are to be looked for.
    late_due: Cell<Instant>,
}

struct Ops {
    /// Before the slots, whose memory the kernel uses until the engine has gone.
    engine: Engine,
    slots: Slots,
    woken: Vec<TaskKey>,
    /// Tokens of eventfds that were written; empty except on the way to the reactor.
    happened: Vec<u64>,
}

impl Drop for Ops {
    fn drop(&mut self) {
        // An IoThread waits for its ops before it ends, unless it could not. What the kernel may
        // still write to must stay then, for as long as the program runs.
        if self.engine.in_kernel() > 0 {
            tracing::error!(
                "an IoThread has ended with {} operations in the kernel; their memory is kept",
                self.engine.in_kernel()
            );
            let none = Slots::new(EngineKind::Threads, 1);
            std::mem::forget(std::mem::replace(&mut self.slots, none));
        }
    }
}

impl IoThread {
    /// Sets up a loop for the calling thread.
    ///
    /// # Errors
    ///
    /// When the kernel offers no such engine, or a limit on descriptors or AIO is reached.
    pub fn new(config: &IoThreadConfig) -> Result<Self, Error> {
        if config.depth == 0 || config.depth > 65_535 {
            let depth = config.depth;
            return Err(Error::Options(format!("an IoThread's depth is 1 to 65535, not {depth}")));
        }
        config.check_engine()?;
        let mut engine = Engine::new(config)?;
        let foreign = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(Error::system("create an eventfd for wakes"))?;
        let foreign = Arc::new(ForeignWakes::new(foreign));
        let reactor = Reactor::new(&mut engine, foreign.eventfd().as_fd())?;
        let descriptor = rustix::io::fcntl_dupfd_cloexec(engine.descriptor(), 0)
            .map_err(Error::system("duplicate a descriptor"))?;
        let slots = Slots::new(config.engine, config.depth);
        let (woken, happened) = (Vec::new(), Vec::new());
        let now = clock::now();
        let stats = Arc::<Stats>::default();
        let io = Io {
            executor: RefCell::default(),
            ops: RefCell::new(Ops { slots, engine, woken, happened }),
            reactor: RefCell::new(reactor),
            foreign,
            bounce_budget: BounceBudget::new(config.bounce_bytes, Arc::clone(&stats)),
            stats,
            engine_kind: config.engine,
            submit_max: config.submit_max.max(1) as usize,
            harvest_on_submit: config.harvest_on_submit,
            harvest_is_due: Cell::new(false),
            current: Cell::new(NO_TASK),
            in_turn: Cell::new(false),
            root_woken: Cell::new(false),
            stopped: Cell::new(false),
            rounds_since_look: Cell::new(0),
            look_at: Cell::new(None),
            look_is_late: Cell::new(false),
            recently: Cell::new(now),
            found: Cell::default(),
            poll_window: PollWindow::new(config.poll_max, config.poll_budget_percent, now),
            late: RefCell::new(LateOps::new(now)),
            late_due: Cell::new(now),
        };
        Ok(Self { io: Rc::new(io), descriptor, ready: Cell::default() })
    }

    /// What tasks and disks on this thread need.
    #[must_use]
    pub fn io(&self) -> &Rc<Io> {
        &self.io
    }

    /// A way for other threads to reach this one.
    #[must_use]
    pub fn remote(&self) -> Remote {
        Remote::new(Arc::clone(&self.io.foreign), Arc::clone(&self.io.stats))
    }

    /// Runs until [`Io::stop`] is called.
    ///
    /// # Errors
    ///
    /// When the kernel refuses to wait for events.
    pub fn run(&self) -> Result<(), Error> {
        while !self.io.stopped.get() {
            self.turn(Wait::ForEvent)?;
        }
        Ok(())
    }

    /// One turn of the loop. The order of the phases is the performance feature: many requests
    /// share one submit, are complete at the harvest right behind it where the device is fast, and
    /// cost one call to the other side.
    ///
    /// # Errors
    ///
    /// When the kernel refuses to wait for events.
    pub fn turn(&self, wait: Wait) -> Result<Activity, Error> {
        let io = &self.io;
        io.in_turn.set(true);
        while io.has_ready() && !io.look_is_due() {
            if io.count_round().is_multiple_of(ROUNDS_BETWEEN_SOURCES) {
                io.look_at_sources();
            }
            self.run_ready_tasks();
            if !io.may_submit_in_wait(wait) {
                io.submit_and_harvest();
            }
            io.notify();
        }
        io.in_turn.set(false);
        io.stats.turns.add(1);
        io.wait(wait)
    }

    fn run_ready_tasks(&self) {
        let mut ready = self.ready.take();
        self.io.executor.borrow_mut().take_ready(&mut ready);
        for task in ready.drain(..) {
            self.io.poll_task(task);
        }
        self.ready.set(ready);
    }

    /// Runs the loop until `future` is done: for set-up and tests.
    ///
    /// # Errors
    ///
    /// When the kernel refuses to wait for events.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> Result<T, Error> {
        let mut future = pin!(future);
        // The future runs outside of any task: it is asked each turn, and a turn does not sleep
        // when one of its ops has completed.
        let mut cx = Context::from_waker(Waker::noop());
        loop {
            // As in a turn, all ops of one poll share a submit.
            self.io.root_woken.set(false);
            self.io.in_turn.set(true);
            let poll = future.as_mut().poll(&mut cx);
            self.io.in_turn.set(false);
            self.io.submit_and_harvest();
            if let Poll::Ready(value) = poll {
                return Ok(value);
            }
            self.turn(Wait::ForEvent)?;
        }
    }

    /// When a turn is due even if the descriptor is not readable.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.io.deadline()
    }
}

impl AsFd for IoThread {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for IoThread {
    fn drop(&mut self) {
        self.io.drain();
        // Tasks hold the `Io` that holds them; taking them out ends that circle.
        let tasks = self.io.executor.borrow_mut().clear();
        drop(tasks);
        drop(self.io.foreign.close());
        self.io.drain();
        // A disk may outlive its IoThread; nobody would submit its ops, or take their results.
        self.io.ops.borrow_mut().slots.lanes.close();
    }
}

/// The key while no task runs.
const NO_TASK: TaskKey = TaskKey { task: u32::MAX, child: NO_CHILD };

impl Io {
    /// Starts a task.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        self.executor.borrow_mut().insert(Box::pin(future), &self.foreign);
    }

    /// Runs `op` to its completion; `ECANCELED` once the IoThread has ended. In a turn it is
    /// submitted at the end of the run, with all others; outside of one at once, and then it may be
    /// complete without waiting.
    pub(crate) fn op(&self, op: Op) -> OpFuture<'_> {
        OpFuture::new(self, op)
    }

    /// Moves `op` into a slot and queues it; outside of a turn it is also submitted.
    pub(crate) fn start_op(&self, op: Op) -> u32 {
        let owner = self.current.get();
        let slot = {
            let Ops { slots, engine, .. } = &mut *self.ops.borrow_mut();
            let (slot, start) = slots.start(op, owner);
            match start {
                Start::Queue => engine.queue(slot, slots),
                Start::Wait => {}
                Start::Cancel => slots.cancel(slot),
            }
            slot
        };
        if !self.in_turn.get() {
            self.submit_and_harvest();
        }
        slot
    }

    /// The completion in `slot`, if it is there; else the current task is woken by it later.
    pub(crate) fn take_completion(&self, slot: u32) -> Option<Completion> {
        self.ops.borrow_mut().slots.take(slot, self.current.get())
    }

    pub(crate) fn abandon_op(&self, slot: u32) {
        self.ops.borrow_mut().slots.abandon(slot);
    }

    /// Gives way once: the task goes on when something wakes it.
    pub async fn suspend(&self) {
        let mut suspended = false;
        poll_fn(|_| {
            if std::mem::replace(&mut suspended, true) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Wakes the task that calls it, for the next round.
    pub fn wake_me(&self) {
        self.executor.borrow_mut().wake(self.current.get());
    }

    /// A key with which [`wake`](Self::wake) finds the task that calls it.
    #[must_use]
    pub fn this_task(&self) -> TaskRef {
        TaskRef(TaskKey { child: NO_CHILD, ..self.current.get() })
    }

    /// Wakes a task of this IoThread.
    pub fn wake(&self, task: TaskRef) {
        self.executor.borrow_mut().wake(task.0);
    }

    /// Waits until `when`.
    pub async fn sleep_until(&self, when: Instant) {
        while clock::now() < when {
            self.wake_me_at(when);
            self.suspend().await;
        }
    }

    /// Wakes the task that calls it at `when`, besides all else that wakes it.
    pub fn wake_me_at(&self, when: Instant) {
        self.reactor.borrow_mut().add_timer(when, self.current.get());
    }

    /// Serves `source` on behalf of the task that calls it: `kick`, if there is one, wakes that
    /// task, and so does work found while arming. The source starts disarmed.
    ///
    /// # Errors
    ///
    /// When `kick` cannot be watched: it is no eventfd, or a limit is reached.
    pub fn add_source(
        &self,
        source: Rc<dyn Source>,
        kick: Option<OwnedFd>,
    ) -> Result<SourceId, Error> {
        let engine = &mut self.ops.borrow_mut().engine;
        self.reactor.borrow_mut().add(engine, source, kick, self.this_task().0)
    }

    /// Ends the service of a source. Its kick is closed.
    pub fn remove_source(&self, id: SourceId) {
        self.reactor.borrow_mut().remove(&mut self.ops.borrow_mut().engine, id);
    }

    /// Has [`Source::notify`] called at the end of this round.
    #[inline]
    pub fn notify_at_end(&self, id: SourceId) {
        self.reactor.borrow_mut().notify_at_end(id);
    }

    /// What this IoThread counts.
    #[must_use]
    pub fn stats(&self) -> &Arc<Stats> {
        &self.stats
    }

    /// The engine of this IoThread.
    #[must_use]
    pub fn engine(&self) -> EngineKind {
        self.engine_kind
    }

    /// Ops that have not completed, and results that nobody has taken.
    #[must_use]
    pub fn ops(&self) -> usize {
        self.ops.borrow().slots.occupied()
    }

    /// Tasks that have not ended.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.executor.borrow().tasks()
    }

    /// Makes [`IoThread::run`] return after this turn.
    pub fn stop(&self) {
        self.stopped.set(true);
    }

    fn has_ready(&self) -> bool {
        self.executor.borrow().has_ready()
    }

    fn poll_task(&self, task: u32) {
        let Some((mut future, waker)) = self.executor.borrow_mut().begin_poll(task) else {
            return;
        };
        self.current.set(TaskKey { task, child: NO_CHILD });
        let poll = future.as_mut().poll(&mut Context::from_waker(&waker));
        self.current.set(NO_TASK);
        let rest = poll.is_pending().then_some((future, waker));
        self.executor.borrow_mut().end_poll(task, rest);
    }

    /// Runs `poll` as child number `child` of the current task.
    #[inline]
    pub(crate) fn as_child<T>(&self, child: u32, poll: impl FnOnce() -> T) -> T {
        let parent = self.current.get();
        self.current.set(TaskKey { child, ..parent });
        let result = poll();
        self.current.set(parent);
        result
    }

    pub(crate) fn take_woken_children(&self, list: &mut Vec<u32>) -> bool {
        self.executor.borrow_mut().take_woken_children(self.current.get().task, list)
    }

    fn notify(&self) {
        self.reactor.borrow_mut().notify();
    }

    /// Takes in what other threads have posted. Returns whether there was anything.
    fn run_foreign(self: &Rc<Self>) -> bool {
        if !self.foreign.is_posted() {
            return false;
        }
        let inbox = self.foreign.take();
        task::wake_all(&self.executor, &inbox.tasks);
        for call in inbox.calls {
            call(self);
        }
        true
    }
}

/// Names a task of an IoThread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskRef(TaskKey);
