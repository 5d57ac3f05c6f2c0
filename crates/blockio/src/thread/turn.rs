//! One turn of the loop, with all phases in order. **Read this first.**
//!
//! The order is the performance feature. The requests of a run share one submit, are complete at
//! the harvest right behind it on a fast device, and cost one call to the source's peer. A source
//! may show results and call its peer before the notify phase, but in it at the latest.
//!
//! ```text
//! repeat   run ready tasks · submit and harvest
//! until    nothing is ready and no op was kept for a next round, or a check of the eventfds is due
//! notify   each source that has asked for it, once (and in each round of several tasks)
//! wait     busy-poll · arm the sources and check once more · sleep · submit and harvest · calls
//! ```
//!
//! Ops are submitted and completions harvested in five cases, marked "submits and harvests":
//!
//! 1. in each round of a turn, for the ops that its tasks have queued;
//! 2. at the end of a wait, for the completions of the kernel;
//! 3. when an op is queued outside of a turn, or by memory that is dropped after a harvest;
//! 4. after each poll of the future of `block_on`;
//! 5. when an IoThread ends, until the kernel has answered everything.
//!
//! A sleep may submit too, in the same system call (see [`Io::may_submit_in_wait`]), but harvests
//! nothing. No task runs inside of a submit or a harvest: they only make tasks ready.

use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Instant;

use crate::clock;
use crate::engine::{Engine, TOKEN_ENGINE};
use crate::error::Error;
use crate::executor::mailbox::{NO_TASK, TaskKey};
use crate::executor::task::{self, Owner};
use crate::op::{Completer, Slots};
use crate::thread::fairness::ROUNDS_BETWEEN_SOURCES;
use crate::thread::io_state::{Io, Ops};
use crate::thread::poll_window::{Awaited, Sleep};
use crate::thread::reactor::Reactor;

/// The end of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Sleep until something happens.
    ForEvent,
    /// Check for events and return.
    Never,
}

/// The need for another turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// Call [`IoThread::turn`](crate::IoThread::turn) again: tasks are ready.
    Ready,
    /// Nothing to do until the IoThread's descriptor is readable or
    /// [`IoThread::deadline`](crate::IoThread::deadline) comes.
    Idle,
}

/// The step that [`Io::wait`] takes at the end of a turn.
enum NextStep {
    /// Tasks have work, and the last check of the kernel is recent.
    Work,
    /// Tasks have work. A check of the kernel is due, and no source is armed that it could find.
    SkippedCheck,
    /// Asks the kernel for events without waiting.
    Check,
    /// Sleeps until an event.
    Sleep(Sleep),
}

/// The most times that completions let ops out of their lanes before the round ends.
const MOVES_MAX: u32 = 4;

impl Io {
    /// Runs one turn.
    pub(crate) fn turn(self: &Rc<Self>, wait: Wait) -> Result<Activity, Error> {
        self.tasks.running.enter(|| self.turn_inside(wait))
    }

    #[inline]
    fn turn_inside(self: &Rc<Self>, wait: Wait) -> Result<Activity, Error> {
        assert!(!self.state.in_turn.get(), "invariant 2: a task takes no turn of its own IoThread");
        self.state.in_turn.set(true);
        while self.has_work() && !self.checks.is_due() {
            self.stats.rounds.add(1);
            if self.checks.count_round().is_multiple_of(ROUNDS_BETWEEN_SOURCES) {
                self.poll_sources();
            }
            if self.run_ready_tasks() > 1 {
                // Otherwise deferred notifies of one task would wait for the submits of all.
                self.notify();
            }
            // Submits and harvests: one system call for all ops that the tasks of this round have
            // queued. Left out if the sleep will submit.
            if !self.may_submit_in_wait(wait) {
                self.submit_and_harvest();
            }
        }
        self.notify();
        self.state.in_turn.set(false);
        self.stats.turns.add(1);
        self.wait(wait)
    }

    // Phase: run ready tasks.

    #[inline(always)]
    pub(super) fn has_ready(&self) -> bool {
        task::has_ready(&self.tasks.executor, &self.tasks.running)
    }

    /// True while a round has tasks to run, or ops that had no room in the last round.
    #[inline(always)]
    fn has_work(&self) -> bool {
        self.has_ready() || self.state.has_kept_ops.get()
    }

    /// Returns the number of tasks that were ready.
    fn run_ready_tasks(&self) -> usize {
        let count = self.tasks.executor.borrow().begin_round();
        debug_assert!(
            self.ops.try_borrow_mut().is_ok(),
            "invariant 2: tasks are polled inside of a submit or a harvest"
        );
        for place in 0..count {
            let begun = self.tasks.executor.borrow_mut().begin_poll(place);
            let Some((task, (mut future, waker))) = begun else { continue };
            let mut cx = Context::from_waker(&waker);
            let poll = || future.as_mut().poll(&mut cx);
            let poll = self.tasks.running.run(TaskKey::task(task), &waker, poll);
            let rest = poll.is_pending().then_some((future, waker));
            self.tasks.executor.borrow_mut().end_poll(task, rest);
        }
        self.tasks.executor.borrow_mut().end_round(count);
        count
    }

    // Phase: notify.

    #[inline]
    fn notify(&self) {
        let polls = !self.poll_window.is_closed(self.awaited());
        self.reactor.borrow_mut().notify(polls);
    }

    /// Polls `future` in a loop of turns, outside of any task: once before each turn. A turn does
    /// not sleep if an op of the future has completed or the future was woken.
    pub(crate) fn block_on<T>(
        self: &Rc<Self>,
        future: impl Future<Output = T>,
    ) -> Result<T, Error> {
        let mut future = pin!(future);
        let waker = task::waker(&self.tasks.mailbox, NO_TASK);
        let mut cx = Context::from_waker(&waker);
        loop {
            self.tasks.running.take_root_woken();
            self.state.in_turn.set(true);
            let poll = || self.tasks.running.run(NO_TASK, &waker, || future.as_mut().poll(&mut cx));
            let poll = self.tasks.running.enter(poll);
            self.state.in_turn.set(false);
            // Submits and harvests: all ops of one poll share a submit, like those of a turn.
            self.submit_and_harvest();
            if let Poll::Ready(value) = poll {
                self.announce_turn();
                return Ok(value);
            }
            self.turn(Wait::ForEvent)?;
        }
    }

    // Phases: submit, harvest.

    /// Notes that an op was queued. In a turn, the end of the round submits all queued ops.
    #[inline]
    pub(crate) fn submit_if_outside(&self) {
        if !self.state.in_turn.get() {
            // Submits and harvests: no turn would. The op may complete here, so that its future is
            // ready at the first poll.
            self.submit_and_harvest();
            self.announce_turn();
        }
    }

    /// Announces a turn if one is needed. A harvest outside of a turn may have taken the event that
    /// made the descriptor readable.
    fn announce_turn(&self) {
        if self.tasks.running.is_due()
            || self.tasks.mailbox.has_anything()
            || self.state.has_kept_ops.get()
        {
            self.tasks.mailbox.wake();
        }
    }

    /// Submits all queued ops with one system call, then harvests visible completions without one.
    pub(super) fn submit_and_harvest(&self) {
        let mut ops = self.ops.borrow_mut();
        let Ops { slots, engine, woken, events, .. } = &mut *ops;
        let foreign = slots.foreign();
        if engine.is_quiet() && foreign == 0 {
            return;
        }
        let mut done = Completer { slots, stats: &self.stats, woken, now: clock::now() };
        let mut moves = 0;
        loop {
            let queued = engine.queued();
            let more = engine.submit(self.settings.submit_max, &mut done);
            let submitted = engine.queued() < queued;
            let harvests = self.settings.harvest_on_submit || self.state.harvest_is_due.take();
            let found = if harvests { engine.harvest(&mut done, events) } else { 0 };
            if found > 0 || submitted {
                done.slots.lanes.after_harvest(submitted, done.now);
            }
            // Completions have made room for ops that wait in lanes.
            let moved = done.slots.lanes.has_backlog()
                && moves < MOVES_MAX
                && queue_from_lanes(engine, done.slots);
            moves += u32::from(moved);
            // Completions may have made room for queued ops, too.
            if !more && !moved && (found == 0 || engine.queued() == 0) {
                break;
            }
        }
        self.state.clock.set(done.now);
        self.poll_window.record_foreign_ops(foreign - done.slots.foreign(), done.now);
        let was_full = done.slots.lanes.keeps_for_next_round() || moves == MOVES_MAX;
        self.checks.end_round(done.now, done.slots.lanes.begin_round());
        // The next round has room for ops that have waited. They come before its tasks.
        let keeps = was_full && queue_from_lanes(engine, done.slots);
        self.state.has_kept_ops.set(keeps);
        self.take_in(&mut ops);
        if !ops.slots.unwanted.is_empty() {
            let unwanted = std::mem::take(&mut ops.slots.unwanted);
            drop(ops);
            drop(unwanted);
            if self.ops.borrow().engine.queued() > 0 {
                // Submits and harvests: dropping the memory has queued an op.
                self.submit_and_harvest();
            }
        }
    }

    /// Wakes the tasks of completed ops, and the tasks of sources whose eventfds were written.
    fn take_in(&self, ops: &mut Ops) {
        if !ops.events.is_empty() {
            if ops.events.contains(&TOKEN_ENGINE) {
                self.state.harvest_is_due.set(true);
            }
            self.reactor.borrow_mut().dispatch(&mut ops.events, &mut ops.woken);
        }
        ops.detach_files();
        for waker in ops.slots.wakers.drain(..) {
            self.tasks.running.wake(Owner::Waker(waker));
        }
        let mut executor = self.tasks.executor.borrow_mut();
        for key in ops.woken.drain(..) {
            executor.wake(key);
        }
    }

    // Phase: wait.

    /// True if the wait that ends this turn is to submit, so that both cost one system call. A loop
    /// that busy-polls submits before it polls.
    #[inline]
    fn may_submit_in_wait(&self, wait: Wait) -> bool {
        wait == Wait::ForEvent
            && self.poll_window.is_closed(self.awaited())
            && self.ops.borrow().may_submit_in_wait()
            && self.settings.submit_max >= u32::MAX as usize
            && !self.has_work()
            && !self.tasks.mailbox.is_posted()
            && !self.state.stopped.get()
    }

    /// Takes the [next step](Self::next_step), takes in its events, and submits.
    fn wait(self: &Rc<Self>, wait: Wait) -> Result<Activity, Error> {
        let mut found = self.state.found.borrow_mut();
        let woken = &mut *found;
        let was_root_woken = self.tasks.running.take_root_woken();
        match self.next_step(wait, was_root_woken, woken) {
            NextStep::Work => {}
            NextStep::SkippedCheck => self.checks.note(),
            NextStep::Check => {
                self.sleep(false)?;
                self.checks.note();
            }
            NextStep::Sleep(sleep) => {
                self.sleep(true)?;
                self.checks.note();
                let now = clock::now();
                self.poll_window.end_sleep(&sleep, now);
                self.state.clock.set(now);
            }
        }
        self.reactor
            .borrow_mut()
            .expire_timers(&self.state.clock, |owner| self.tasks.running.wake(owner));
        for key in woken.drain(..) {
            self.tasks.executor.borrow_mut().wake(key);
        }
        drop(found);
        // Submits and harvests: completions and events of the sleep, which the kernel has only
        // announced; and ops that the sleep was to submit, if there was no sleep.
        self.submit_and_harvest();
        if wait == Wait::Never && !self.stalled.is_empty() {
            // If all late ops are answered, no harvest sets the time.
            self.state.clock.set(clock::now());
        }
        let recently = self.state.clock.recently();
        if self.stalled.is_due(recently) {
            self.stalled.check_and_log(recently, &self.ops.borrow().slots, &self.stats);
        }
        // A wake outside of tasks has kept the sources from being armed, too.
        let is_ready = self.run_foreign() || self.has_work() || was_root_woken;
        let is_busy =
            is_ready || self.ops.borrow_mut().engine.has_unannounced_work() || self.arm_mailbox();
        if wait == Wait::Never && !is_busy {
            self.ops.borrow().assert_may_sleep(false);
        }
        Ok(if is_busy { Activity::Ready } else { Activity::Idle })
    }

    /// Busy-polls while that pays, arms the sources, and checks once more: decides whether the loop
    /// sleeps.
    #[inline]
    fn next_step(
        self: &Rc<Self>,
        wait: Wait,
        was_root_woken: bool,
        woken: &mut Vec<TaskKey>,
    ) -> NextStep {
        let mut is_busy = self.has_work()
            || self.tasks.mailbox.is_posted()
            || was_root_woken
            || self.state.stopped.get();
        let since = (!is_busy && wait == Wait::ForEvent).then(clock::now);
        let awaited = self.awaited();
        if let Some(since) = since {
            is_busy = self.busy_poll(since, awaited, &self.reactor.borrow(), woken);
        }
        self.poll_window.review_budget(self.state.clock.recently(), || self.stats.ops());
        if is_busy {
            self.poll_sources();
        } else {
            clock::yield_to_simulation();
            self.reactor.borrow_mut().arm(since, woken);
            is_busy = self.arm_mailbox() || !woken.is_empty();
        }
        let is_check_due = self.checks.is_due();
        if is_check_due && !self.settings.harvest_on_submit {
            // A loop that is never idle arms no mailbox, and results are announced only once.
            self.state.harvest_is_due.set(true);
        }
        match since {
            Some(since) if !is_busy => {
                NextStep::Sleep(self.poll_window.begin_sleep(awaited, since))
            }
            _ if !is_busy => NextStep::Check,
            _ if !is_check_due => NextStep::Work,
            _ if self.reactor.borrow().has_armed() || !self.settings.harvest_on_submit => {
                NextStep::Check
            }
            _ => NextStep::SkippedCheck,
        }
    }

    /// Makes the next post wake the loop. Returns true if there are earlier posts, which do not.
    #[inline]
    fn arm_mailbox(&self) -> bool {
        self.stats.woken.add(u64::from(self.tasks.mailbox.arm()));
        let has_anything = self.tasks.mailbox.has_anything();
        if has_anything {
            // Pool threads may have posted results.
            self.state.harvest_is_due.set(true);
        }
        has_anything
    }

    /// Checks the eventfds. If `sleeps`, waits until an event arrives or a timer is due.
    fn sleep(&self, sleeps: bool) -> Result<(), Error> {
        let mut ops = self.ops.borrow_mut();
        ops.assert_may_sleep(!sleeps && self.state.has_kept_ops.get());
        if !sleeps {
            // A deadline in the past: the call does not wait, and the clock need not be read.
            let now = self.state.clock.recently();
            return self.wait_in_kernel(&mut ops, Some(now), now);
        }
        // A watcher outside of the thread ends this sleep now and then, to check for late ops.
        let deadline = earlier(self.reactor.borrow().next_timer(), ops.engine.retry_at());
        let is_idle = ops.engine.in_kernel() + ops.engine.queued() == 0 && self.stalled.is_empty();
        if !is_idle {
            let check = self.settings.watches_itself.then(|| self.stalled.due());
            return self.wait_in_kernel(&mut ops, earlier(deadline, check), clock::now());
        }
        self.stats.is_idle.set(1);
        let result = self.wait_in_kernel(&mut ops, deadline, clock::now());
        self.stats.is_idle.set(0);
        result
    }

    pub(super) fn wait_in_kernel(
        &self,
        ops: &mut Ops,
        deadline: Option<Instant>,
        now: Instant,
    ) -> Result<(), Error> {
        let Ops { slots, engine, woken, events, .. } = &mut *ops;
        let mut done = Completer { slots, stats: &self.stats, woken, now };
        engine.wait(deadline, usize::MAX, &mut done, events)?;
        if engine.waiter_is_ring() {
            self.state.harvest_is_due.set(true);
        }
        self.take_in(ops);
        Ok(())
    }

    /// The kind of event that the loop awaits when no task is ready.
    pub(crate) fn awaited(&self) -> Awaited {
        let Ops { engine, slots, .. } = &*self.ops.borrow();
        let foreign = slots.foreign() + self.poll_window.remote_ops();
        let ops = engine.in_kernel() + engine.queued() + foreign;
        Awaited::new(ops, slots.lanes.are_busy_with_bytes())
    }

    /// Spins on the rings. Returns true if there is something to do.
    fn busy_poll(
        &self,
        since: Instant,
        awaited: Awaited,
        reactor: &Reactor,
        woken: &mut Vec<TaskKey>,
    ) -> bool {
        let window = self.poll_window.window(awaited);
        if window.is_zero() {
            return false;
        }
        loop {
            reactor.poll_unarmed(|task| woken.push(task));
            let now = clock::now();
            let engine = &mut self.ops.borrow_mut().engine;
            let found = !woken.is_empty()
                || (self.settings.harvest_on_submit && engine.has_completions(now, &self.stats))
                || self.tasks.mailbox.is_posted();
            let polled = now.saturating_duration_since(since);
            if found || polled >= window {
                self.poll_window.record_poll(awaited, polled, found);
                self.stats.record_poll(polled, found);
                // The next round may read no clock.
                self.state.clock.set(now);
                return found;
            }
            clock::spin();
        }
    }

    /// The time at which a turn has something to do, regardless of the kernel's answers.
    pub(crate) fn work_deadline(&self) -> Option<Instant> {
        earlier(self.reactor.borrow().next_timer(), self.ops.borrow().engine.retry_at())
    }

    /// Wakes the tasks of unarmed sources with work, which is not announced.
    fn poll_sources(&self) {
        let mut executor = self.tasks.executor.borrow_mut();
        self.reactor.borrow().poll_unarmed(|task| executor.wake(task));
    }

    // Phase: calls of other threads.

    /// Takes in the wakes and calls that other threads have posted. Returns true if there were any.
    fn run_foreign(self: &Rc<Self>) -> bool {
        if !self.tasks.mailbox.is_posted() {
            return false;
        }
        let posted = self.tasks.mailbox.take();
        task::wake_all(&self.tasks.executor, &posted.woken);
        for call in posted.calls {
            call(self);
        }
        true
    }
}

/// Gives the engine the ops that have room now. Returns true if there were any.
#[cold]
fn queue_from_lanes(engine: &mut Engine, slots: &mut Slots) -> bool {
    let mut moved = false;
    while let Some(slot) = slots.next_from_lanes() {
        engine.queue(slot, slots);
        moved = true;
    }
    moved
}

/// The earlier of two optional times.
pub(crate) fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    [a, b].into_iter().flatten().min()
}
