//! The handle that tasks and disks of an IoThread get: [`Io`].

use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use rustix::fd::OwnedFd;

use crate::clock;
use crate::config::{EngineConfig, EngineKind};
use crate::error::Error;
pub use crate::io_state::Io;
use crate::io_state::Ops;
use crate::op::{Completion, Op, Start};
use crate::reactor::{Source, SourceId};
use crate::stats::Stats;
use crate::task::Owner;
use crate::task_key::TaskKey;

/// Names a task of an IoThread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskRef(TaskKey);

impl Io {
    /// Starts a task.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        self.executor.borrow_mut().insert(Box::pin(future), &self.mailbox);
    }

    /// Moves `op` into a slot and queues it; outside of a turn it is also submitted.
    #[inline]
    pub(crate) fn start_op(&self, op: Op, owner: Owner) -> u32 {
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
        self.op_was_queued();
        slot
    }

    /// The completion of an op that was just started, if it is there.
    #[inline]
    pub(crate) fn completion_at_once(&self, slot: u32) -> Option<Completion> {
        self.ops.borrow_mut().slots.take(slot)
    }

    /// The completion in `slot`, if it is there; else the waker of `cx` is woken by it later.
    #[inline]
    pub(crate) fn take_completion(&self, slot: u32, cx: &Context<'_>) -> Option<Completion> {
        let slots = &mut self.ops.borrow_mut().slots;
        let completion = slots.take(slot);
        if completion.is_none() {
            slots.set_owner(slot, self.running.owner(cx));
        }
        completion
    }

    pub(crate) fn abandon_op(&self, slot: u32) {
        self.ops.borrow_mut().slots.abandon(slot);
    }

    /// Gives way once: the task goes on when something wakes it.
    pub async fn suspend(&self) {
        let mut suspended = false;
        poll_fn(|cx| {
            if std::mem::replace(&mut suspended, true) {
                return Poll::Ready(());
            }
            if !self.running.polls(cx) {
                let waker = cx.waker().clone();
                self.executor.borrow_mut().suspend(self.running.current(), waker);
            }
            Poll::Pending
        })
        .await;
    }

    /// Wakes the task that calls it, for the next round. In a [`TaskSet`](crate::TaskSet) that is
    /// the future of the set.
    pub fn wake_me(&self) {
        self.executor.borrow_mut().wake(self.running.current());
    }

    /// A key with which [`wake`](Self::wake) finds the task that calls it.
    #[must_use]
    pub(crate) fn this_task(&self) -> TaskRef {
        TaskRef(self.running.current())
    }

    /// Wakes a task of this IoThread.
    pub fn wake(&self, task: TaskRef) {
        self.executor.borrow_mut().wake(task.0);
    }

    /// Waits until `when`.
    pub(crate) async fn sleep_until(&self, when: Instant) {
        let mut waits: Option<Owner> = None;
        poll_fn(|cx| {
            if clock::now() >= when {
                return Poll::Ready(());
            }
            let owner = self.running.owner(cx);
            // One timer for each that has to be woken, however often it is polled.
            if !waits.as_ref().is_some_and(|waits| waits.is(&owner)) {
                self.reactor.borrow_mut().add_timer(when, owner.clone());
                waits = Some(owner);
            }
            Poll::Pending
        })
        .await;
    }

    /// Wakes the task that calls it at `when`, besides all else that wakes it.
    pub fn wake_me_at(&self, when: Instant) {
        self.reactor.borrow_mut().add_timer(when, Owner::Key(self.running.current()));
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

    /// Sets up one more engine, which disks that are attached from now on may
    /// [prefer](crate::DiskSource::prefer_engine). One that is there stays as it is. Returns
    /// whether it is new.
    ///
    /// # Errors
    ///
    /// When the kernel offers no such engine, or a limit on descriptors or AIO is reached. An
    /// [embedded](crate::IoThreadConfig::embedded) IoThread has io_uring only from the start.
    pub fn add_engine(&self, engine: EngineConfig) -> Result<bool, Error> {
        let engines = &mut self.ops.borrow_mut().engine;
        let is_new = !engines.has(engine.kind());
        engines.add(engine, |engines| self.reactor.borrow().watch_all(engines))?;
        Ok(is_new)
    }

    /// The engine of a disk on this IoThread that prefers one, if it does.
    pub(crate) fn engine_for(&self, preferred: Option<EngineKind>) -> EngineKind {
        let engines = &self.ops.borrow().engine;
        preferred.filter(|&engine| engines.has(engine)).unwrap_or(self.engine_kind)
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

    /// Makes [`IoThread::run`](crate::IoThread::run) return after this turn.
    pub fn stop(&self) {
        self.stopped.set(true);
    }
}
