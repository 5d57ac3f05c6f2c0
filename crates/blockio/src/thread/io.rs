//! The handle of tasks and disks to their IoThread, [`Io`], and the future of an op.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use iomem::Buffers;
use rustix::fd::OwnedFd;

use crate::clock;
use crate::config::{EngineConfig, EngineKind};
use crate::engine::kernel::Interest;
use crate::error::Error;
use crate::executor::mailbox::TaskKey;
use crate::executor::task::Owner;
use crate::op::{Completion, FileRef, Op, OpKind, Start};
use crate::stats::Stats;
pub use crate::thread::io_state::Io;
use crate::thread::io_state::Ops;
use crate::thread::reactor::{Source, SourceId};

/// The largest logical block in bytes, which is never cut.
const LOGICAL_BLOCK_MAX: usize = 65_536;

/// The name of a task on its IoThread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskRef(TaskKey);

impl Io {
    /// Starts a task.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        self.tasks.executor.borrow_mut().insert(Box::pin(future), &self.tasks.mailbox);
    }

    /// Runs an op to its completion; `ECANCELED` once the IoThread has ended. In a turn, the end of
    /// the run submits all ops together. Outside of a turn the op is submitted at once, and may
    /// then complete without waiting.
    #[inline]
    pub(crate) fn op(
        &self,
        kind: OpKind,
        file: &FileRef,
        offset: u64,
        buffers: Buffers,
    ) -> OpFuture<'_> {
        debug_assert!(
            !kind.is_transfer()
                || buffers.bytes() <= self.settings.op_bytes_max.max(LOGICAL_BLOCK_MAX),
            "invariant 14: an op of {} bytes holds up the loop",
            buffers.bytes()
        );
        let op = Op { kind, file: Rc::clone(file), offset, buffers };
        OpFuture { io: self, state: OpState::New(op) }
    }

    /// Returns the completion in `slot`, if there is one. Otherwise the completion will wake the
    /// waker of `cx`.
    #[inline]
    pub(crate) fn take_completion(&self, slot: u32, cx: &Context<'_>) -> Option<Completion> {
        let completion = self.ops.borrow_mut().slots.take(slot);
        if completion.is_none() {
            // Foreign wakers may run any code when they are cloned or dropped.
            let owner = self.tasks.running.owner(cx);
            let (before, completion) = {
                let slots = &mut self.ops.borrow_mut().slots;
                // Cloning the waker may have run a harvest.
                (slots.set_owner(slot, owner), slots.take(slot))
            };
            drop(before);
            return completion;
        }
        completion
    }

    pub(crate) fn abandon_op(&self, slot: u32) {
        let unwanted = self.ops.borrow_mut().slots.abandon(slot);
        drop(unwanted);
    }

    /// Suspends the task once, until it is woken.
    pub async fn suspend(&self) {
        let mut suspended = false;
        poll_fn(|cx| {
            if std::mem::replace(&mut suspended, true) {
                return Poll::Ready(());
            }
            if !self.tasks.running.is_polled_by_task(cx) {
                let waker = cx.waker().clone();
                self.tasks.executor.borrow_mut().suspend(self.tasks.running.current(), waker);
            }
            Poll::Pending
        })
        .await;
    }

    /// Yields the thread once if outside of a turn, where ops may complete at once, one after the
    /// next. In a turn an op completes at the end of the round at the earliest, so no yield is due.
    pub(crate) async fn yield_once(&self) {
        let mut is_polled_again = self.state.in_turn.get();
        poll_fn(|cx| {
            if std::mem::replace(&mut is_polled_again, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    /// Wakes the calling task for the next round. In a [`TaskSet`](crate::TaskSet) the future of
    /// the set is woken.
    pub fn wake_me(&self) {
        self.tasks.executor.borrow_mut().wake(self.tasks.running.current());
    }

    /// Waits until the tasks that are ready have run.
    pub async fn next_round(&self) {
        let mut has_waited = false;
        poll_fn(|_| match std::mem::replace(&mut has_waited, true) {
            true => Poll::Ready(()),
            false => {
                self.wake_me();
                Poll::Pending
            }
        })
        .await;
    }

    /// Returns the name of the calling task for [`wake`](Self::wake).
    pub fn current_task(&self) -> TaskRef {
        TaskRef(self.tasks.running.current())
    }

    /// Wakes a task of this IoThread.
    pub fn wake(&self, task: TaskRef) {
        self.tasks.executor.borrow_mut().wake(task.0);
    }

    /// Waits until `when`.
    pub(crate) async fn sleep_until(&self, when: Instant) {
        let mut waits: Option<Owner> = None;
        poll_fn(|cx| {
            if clock::now() >= when {
                return Poll::Ready(());
            }
            let owner = self.tasks.running.owner(cx);
            // One timer for each owner, however often it is polled.
            if !waits.as_ref().is_some_and(|waits| waits.wakes_same(&owner)) {
                self.reactor.borrow_mut().add_timer(when, owner.clone());
                waits = Some(owner);
            }
            Poll::Pending
        })
        .await;
    }

    /// Wakes the calling task at `when`, in addition to any other wake.
    pub fn wake_me_at(&self, when: Instant) {
        self.reactor.borrow_mut().add_timer(when, Owner::Key(self.tasks.running.current()));
    }

    /// Serves `source` on behalf of the calling task. The task is woken by `kick`, if there is one,
    /// and by work that is found while the source is armed. The source starts disarmed.
    ///
    /// # Errors
    ///
    /// If `kick` cannot be watched: it is no eventfd, or a limit is reached.
    pub fn add_source(
        &self,
        source: Rc<dyn Source>,
        kick: Option<OwnedFd>,
    ) -> Result<SourceId, Error> {
        let kick = kick.map(|kick| (kick, Interest::Readable));
        let engine = &mut self.ops.borrow_mut().engine;
        self.reactor.borrow_mut().add(engine, source, kick, self.current_task().0)
    }

    /// Like [`add_source`](Self::add_source), but watches a socket for `interest`.
    pub fn add_socket(
        &self,
        source: Rc<dyn Source>,
        socket: OwnedFd,
        interest: Interest,
    ) -> Result<SourceId, Error> {
        let engine = &mut self.ops.borrow_mut().engine;
        let socket = Some((socket, interest));
        self.reactor.borrow_mut().add(engine, source, socket, self.current_task().0)
    }

    /// Keeps a weak reference to an object of this IoThread, for calls from other threads and for
    /// its disks. `key` is a number that no other object of its type has, such as the address of
    /// the state that these threads share.
    pub fn share<T: Any>(&self, key: usize, object: &Rc<T>) {
        let mut all = self.shared.objects.borrow_mut();
        all.retain(|(_, object)| object.strong_count() > 0);
        let object: Rc<dyn Any> = Rc::<T>::clone(object);
        all.push((key, Rc::downgrade(&object)));
    }

    /// Returns an object that was [shared](Self::share), if it still exists.
    pub fn shared<T: Any>(&self, key: usize) -> Option<Rc<T>> {
        let all = self.shared.objects.borrow();
        let mut with_key = all.iter().filter(|(other, _)| *other == key);
        with_key.find_map(|(_, object)| object.upgrade()?.downcast().ok())
    }

    /// Ends the service of a source. Closes its kick.
    pub fn remove_source(&self, id: SourceId) {
        self.reactor.borrow_mut().remove(&mut self.ops.borrow_mut().engine, id);
    }

    /// Schedules a call of [`Source::notify`] at the end of this turn.
    #[inline]
    pub fn notify_at_end(&self, id: SourceId) {
        self.reactor.borrow_mut().notify_at_end(id);
    }

    /// The counters of this IoThread.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.stats
    }

    /// Sets up one more engine, which disks that are attached from now on may
    /// [prefer](crate::DiskSource::prefer_engine). An existing engine stays as it is. Returns true
    /// if the engine is new.
    ///
    /// # Errors
    ///
    /// If the kernel does not offer the engine, or a limit on descriptors or AIO is reached. An
    /// [embedded](crate::IoThreadConfig::embedded) IoThread has io_uring only from the start.
    pub fn add_engine(&self, engine: EngineConfig) -> Result<bool, Error> {
        let engines = &mut self.ops.borrow_mut().engine;
        let is_new = !engines.has(engine.kind());
        engines.add(engine, |engines| self.reactor.borrow().watch_all(engines))?;
        Ok(is_new)
    }

    /// Sets the limits of busy-polling from now on: the longest time, and the CPU time in percent
    /// that it may add to an op. [`IoThreadConfig`](crate::IoThreadConfig) has the initial limits.
    pub fn set_poll_limits(&self, max: Duration, budget_percent: u32) {
        self.poll_window.set_limits(max, budget_percent);
    }

    /// Returns the engine for a disk: the preferred one if this IoThread has it, else the default.
    pub(crate) fn engine_for(&self, preferred: Option<EngineKind>) -> EngineKind {
        let engines = &self.ops.borrow().engine;
        preferred.filter(|&engine| engines.has(engine)).unwrap_or(self.settings.engine_kind)
    }

    /// The number of ops that have not completed, and of results that are not yet taken.
    pub fn ops(&self) -> usize {
        self.ops.borrow().slots.occupied()
    }

    /// The number of tasks that have not ended.
    pub fn tasks(&self) -> usize {
        self.tasks.executor.borrow().tasks()
    }

    /// Makes [`IoThread::run`](crate::IoThread::run) return after this turn.
    pub fn stop(&self) {
        self.state.stopped.set(true);
    }
}

/// The future of an op. Dropping it does not cancel the op: until the completion, the slot keeps
/// everything that the kernel uses.
pub(crate) struct OpFuture<'a> {
    io: &'a Io,
    state: OpState,
}

enum OpState {
    New(Op),
    Waiting(u32),
    Taken,
}

impl Future for OpFuture<'_> {
    type Output = Completion;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Completion> {
        let io = self.io;
        let (slot, completion) = match std::mem::replace(&mut self.state, OpState::Taken) {
            OpState::New(op) => {
                let owner = io.tasks.running.owner(cx);
                let slot = {
                    let Ops { slots, engine, .. } = &mut *io.ops.borrow_mut();
                    let (slot, start) = slots.start(op, owner);
                    match start {
                        Start::Queue => engine.queue(slot, slots),
                        Start::Wait => {}
                        Start::Cancel => slots.cancel(slot),
                    }
                    slot
                };
                io.submit_if_outside();
                (slot, io.ops.borrow_mut().slots.take(slot))
            }
            OpState::Waiting(slot) => (slot, io.take_completion(slot, cx)),
            OpState::Taken => return Poll::Pending,
        };
        if let Some(completion) = completion {
            return Poll::Ready(completion);
        }
        self.state = OpState::Waiting(slot);
        Poll::Pending
    }
}

impl Drop for OpFuture<'_> {
    fn drop(&mut self) {
        if let OpState::Waiting(slot) = self.state {
            self.io.abandon_op(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{IoThread, IoThreadConfig};

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_shared_object_is_found_by_its_key_and_type_until_it_is_gone() {
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let io = thread.io();
        let (number, text) = (Rc::new(7), Rc::new("text"));
        io.share(1, &number);
        io.share(1, &text);
        io.share(2, &Rc::new(8));
        assert_eq!(io.shared::<i32>(1), Some(Rc::clone(&number)));
        assert_eq!(io.shared::<&str>(1), Some(Rc::clone(&text)));
        assert_eq!(io.shared::<i32>(2), None);
        drop(number);
        assert_eq!(io.shared::<i32>(1), None);
        assert_eq!(io.shared::<&str>(1), Some(text));
    }
}
