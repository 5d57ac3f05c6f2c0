//! One turn of the loop: every phase of it, in order. **Read this first.**
//!
//! The order is the performance feature: the requests of a run share one submit, are complete at
//! the harvest right behind it where the device is fast, and cost one call to the other side. A
//! source may show results, and tell the other side, before the notify; it must not forget to.
//!
//! ```text
//! repeat   run ready tasks · submit and harvest
//! until    nothing is ready and no op was kept for a next round, or the eventfds have to be
//!          looked at
//! notify   each source that has asked for it, once (and in each round of several tasks)
//! wait     busy-poll · arm the sources and look once more · sleep · submit and harvest · calls
//! ```
//!
//! Ops are submitted and completions harvested in five places, each marked "submits and harvests":
//!
//! 1. in each round of a turn, for what its tasks have queued;
//! 2. at the end of a wait, for what the kernel has done meanwhile;
//! 3. when an op is queued outside of a turn;
//! 4. after each poll of the future of `block_on`;
//! 5. when an IoThread ends, until the kernel has answered everything.
//!
//! A sleep may submit too, in the same system call (see [`Io::may_submit_in_wait`]); it harvests
//! nothing. No task runs inside of a submit or a harvest: those only make tasks ready.

use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::clock;
use crate::engine::{Engine, TOKEN_ENGINE};
use crate::error::Error;
use crate::io_state::{Io, Ops};
use crate::looks::ROUNDS_BETWEEN_SOURCES;
use crate::op::{Completer, Slots};
use crate::poll_window::Awaited;
use crate::reactor::Reactor;
use crate::task::{self, Owner};
use crate::task_key::{NO_TASK, TaskKey};

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
    /// Call [`IoThread::turn`](crate::IoThread::turn) again: tasks are ready.
    Ready,
    /// Nothing to do until the IoThread's descriptor is readable or
    /// [`IoThread::deadline`](crate::IoThread::deadline) comes.
    Idle,
}

/// How often completions let ops out of their lanes before the round ends.
const MOVES_MAX: u32 = 4;

/// How long to put off a wait that failed because the kernel had no memory.
const RETRY_WAIT: Duration = Duration::from_millis(1);

impl Io {
    /// One turn.
    pub(crate) fn turn(self: &Rc<Self>, wait: Wait) -> Result<Activity, Error> {
        self.running.enter(|| self.turn_inside(wait))
    }

    #[inline]
    fn turn_inside(self: &Rc<Self>, wait: Wait) -> Result<Activity, Error> {
        assert!(!self.in_turn.get(), "invariant 2: a task takes no turn of its own IoThread");
        self.in_turn.set(true);
        while self.has_work() && !self.look_is_due() {
            if self.count_round().is_multiple_of(ROUNDS_BETWEEN_SOURCES) {
                self.look_at_sources();
            }
            if self.run_ready_tasks() > 1 {
                // What one task has put off would wait for the submits of others.
                self.notify();
            }
            // Submits and harvests: one system call for all that the tasks of this round have
            // queued. It is left out where the sleep will do it.
            if !self.may_submit_in_wait(wait) {
                self.submit_and_harvest();
            }
        }
        self.notify();
        self.in_turn.set(false);
        self.stats.turns.add(1);
        self.wait(wait)
    }

    // Phase: run ready tasks.

    #[inline(always)]
    fn has_ready(&self) -> bool {
        task::has_ready(&self.executor, &self.running)
    }

    /// True while a round has something to do: tasks, or ops that had no room in the last one.
    #[inline(always)]
    fn has_work(&self) -> bool {
        self.has_ready() || self.has_kept_ops.get()
    }

    /// Returns how many tasks there were.
    fn run_ready_tasks(&self) -> usize {
        let count = self.executor.borrow().begin_round();
        debug_assert!(
            self.ops.try_borrow_mut().is_ok(),
            "invariant 2: tasks are polled inside of a submit or a harvest"
        );
        for place in 0..count {
            let begun = self.executor.borrow_mut().begin_poll(place);
            let Some((task, (mut future, waker))) = begun else { continue };
            let mut cx = Context::from_waker(&waker);
            let poll = || future.as_mut().poll(&mut cx);
            let poll = self.running.run(TaskKey::task(task), &waker, poll);
            let rest = poll.is_pending().then_some((future, waker));
            self.executor.borrow_mut().end_poll(task, rest);
        }
        self.executor.borrow_mut().end_round(count);
        count
    }

    // Phase: notify.

    #[inline]
    fn notify(&self) {
        let polls = !self.poll_window.is_closed(self.awaited());
        self.reactor.borrow_mut().notify(polls);
    }

    /// Polls `future` in a loop of turns. It runs outside of any task: it is asked before each
    /// turn, and a turn does not sleep when one of its ops has completed, or once it was woken.
    pub(crate) fn block_on<T>(
        self: &Rc<Self>,
        future: impl Future<Output = T>,
    ) -> Result<T, Error> {
        let mut future = pin!(future);
        let waker = task::waker(&self.mailbox, NO_TASK);
        let mut cx = Context::from_waker(&waker);
        loop {
            self.running.take_root_woken();
            self.in_turn.set(true);
            let poll = || self.running.run(NO_TASK, &waker, || future.as_mut().poll(&mut cx));
            let poll = self.running.enter(poll);
            self.in_turn.set(false);
            // Submits and harvests: as in a turn, all ops of one poll share a submit.
            self.submit_and_harvest();
            if let Poll::Ready(value) = poll {
                self.leave_announced();
                return Ok(value);
            }
            self.turn(Wait::ForEvent)?;
        }
    }

    // Phases: submit, harvest.

    /// An op was queued. In a turn the end of the round submits it, with all others.
    #[inline]
    pub(crate) fn op_was_queued(&self) {
        if !self.in_turn.get() {
            // Submits and harvests: nobody else would. The op may be complete then, and its future
            // ready at the first poll.
            self.submit_and_harvest();
            self.leave_announced();
        }
    }

    /// A harvest outside of a turn may have taken the event that makes the descriptor readable, for
    /// something that only a turn does. So there is another one.
    fn leave_announced(&self) {
        if self.running.is_due() || self.mailbox.has_anything() || self.has_kept_ops.get() {
            self.mailbox.wake();
        }
    }

    /// One system call for all queued ops, then completions that are visible without one.
    fn submit_and_harvest(&self) {
        let mut ops = self.ops.borrow_mut();
        let Ops { slots, engine, woken, happened, .. } = &mut *ops;
        let foreign = slots.foreign();
        if engine.is_quiet() && foreign == 0 {
            return;
        }
        let mut done = Completer { slots, stats: &self.stats, woken, now: clock::now() };
        let mut moves = 0;
        loop {
            let queued = engine.queued();
            let more = engine.submit(self.submit_max, &mut done);
            let submitted = engine.queued() < queued;
            let harvests = self.harvest_on_submit || self.harvest_is_due.take();
            let found = if harvests { engine.harvest(&mut done, happened) } else { 0 };
            if found > 0 || submitted {
                done.slots.lanes.harvested(submitted, done.now);
            }
            // Completions have made room for what waits in lanes.
            let moved = done.slots.lanes.has_backlog()
                && moves < MOVES_MAX
                && queue_from_lanes(engine, done.slots);
            moves += u32::from(moved);
            // They may have made room for what is queued, too.
            if !more && !moved && (found == 0 || engine.queued() == 0) {
                break;
            }
        }
        self.recently.set(done.now);
        self.poll_window.others_completed(foreign - done.slots.foreign(), done.now);
        let was_full = done.slots.lanes.keeps_for_next_round() || moves == MOVES_MAX;
        self.round_ends(done.now, done.slots.lanes.begin_round());
        // The next round has room for ops that have waited. These come before its tasks.
        let keeps = was_full && queue_from_lanes(engine, done.slots);
        self.has_kept_ops.set(keeps);
        self.take_in(&mut ops);
        if !ops.slots.unwanted.is_empty() {
            let unwanted = std::mem::take(&mut ops.slots.unwanted);
            drop(ops);
            drop(unwanted);
            if self.ops.borrow().engine.queued() > 0 {
                // An owner has begun an op, which nobody else would submit.
                self.submit_and_harvest();
            }
        }
    }

    /// Wakes the tasks of completed ops, and those of sources whose eventfds were written.
    fn take_in(&self, ops: &mut Ops) {
        if !ops.happened.is_empty() {
            if ops.happened.contains(&TOKEN_ENGINE) {
                self.harvest_is_due.set(true);
            }
            self.reactor.borrow_mut().dispatch(&mut ops.happened, &mut ops.woken);
        }
        ops.detach_files();
        for waker in ops.slots.wakers.drain(..) {
            self.running.wake(Owner::Waker(waker));
        }
        let mut executor = self.executor.borrow_mut();
        for key in ops.woken.drain(..) {
            executor.wake(key);
        }
    }

    // Phase: wait.

    /// Whether the wait that ends this turn is to submit, so that both cost one system call.
    /// While the loop busy-polls, ops go to the kernel before it does.
    #[inline]
    fn may_submit_in_wait(&self, wait: Wait) -> bool {
        wait == Wait::ForEvent
            && self.poll_window.is_closed(self.awaited())
            && self.ops.borrow().may_submit_in_wait()
            && self.submit_max >= u32::MAX as usize
            && !self.has_work()
            && !self.mailbox.is_posted()
            && !self.stopped.get()
    }

    /// Busy-polls for as long as that pays, arms the sources, looks once more, and sleeps if there
    /// is still nothing to do.
    fn wait(self: &Rc<Self>, wait: Wait) -> Result<Activity, Error> {
        let mut found = self.found.borrow_mut();
        let woken = &mut *found;
        let was_root_woken = self.running.take_root_woken();
        let mut busy =
            self.has_work() || self.mailbox.is_posted() || was_root_woken || self.stopped.get();
        let since = (!busy && wait == Wait::ForEvent).then(clock::now);
        let awaited = self.awaited();
        if let Some(since) = since {
            busy = self.busy_poll(since, awaited, &self.reactor.borrow(), woken);
        }
        if busy {
            self.look_at_sources();
        } else {
            clock::preempt();
            self.reactor.borrow_mut().arm(since, woken);
            busy = self.arm_mailbox() || !woken.is_empty();
        }
        let look_is_due = self.look_is_due();
        if look_is_due && !self.harvest_on_submit {
            // A loop that is never idle arms no mailbox, and results announce themselves once.
            self.harvest_is_due.set(true);
        }
        let looks = look_is_due && (self.reactor.borrow().has_armed() || !self.harvest_on_submit);
        let sleeps = !busy && wait == Wait::ForEvent;
        let sleep = since.filter(|_| sleeps).map(|s| self.poll_window.falls_asleep(awaited, s));
        if !busy || looks {
            self.sleep(sleeps)?;
        }
        if !busy || look_is_due {
            self.looked();
        }
        if let Some(sleep) = sleep {
            let now = clock::now();
            self.poll_window.slept(&sleep, now);
            self.recently.set(now);
        }
        self.reactor.borrow_mut().expire_timers(&self.recently, |owner| self.running.wake(owner));
        for key in woken.drain(..) {
            self.executor.borrow_mut().wake(key);
        }
        drop(found);
        // Submits and harvests: completions and events of the sleep, which the kernel has only
        // announced; and what tasks have queued, if the sleep was to submit that and did not come.
        self.submit_and_harvest();
        if wait == Wait::Never && self.late.borrow().any() {
            // They may all be answered, and nobody harvests any more.
            self.recently.set(clock::now());
        }
        if self.recently.get() >= self.late_due.get() {
            self.look_for_late_ops();
        }
        // Who wakes something outside of tasks has kept the sources from being armed, too.
        let is_ready = self.run_foreign() || self.has_work() || was_root_woken;
        let is_busy =
            is_ready || self.ops.borrow_mut().engine.must_be_asked() || self.arm_mailbox();
        Ok(if is_busy { Activity::Ready } else { Activity::Idle })
    }

    /// Has the next post wake the loop. True: there was one before, which does not.
    #[inline]
    fn arm_mailbox(&self) -> bool {
        self.stats.woken.add(u64::from(self.mailbox.arm()));
        let has_anything = self.mailbox.has_anything();
        if has_anything {
            // It may be results.
            self.harvest_is_due.set(true);
        }
        has_anything
    }

    /// Looks at the eventfds; `sleeps`: until something happens or a timer is due.
    fn sleep(&self, sleeps: bool) -> Result<(), Error> {
        let mut ops = self.ops.borrow_mut();
        ops.assert_may_sleep(!sleeps && self.has_kept_ops.get());
        if !sleeps {
            // A deadline that has passed: it does not wait, and the clock need not be asked.
            let now = self.recently.get();
            return self.wait_in_kernel(&mut ops, Some(now), now);
        }
        // Whoever watches the thread wakes it now and then to look for late ops.
        let deadline = earlier(self.reactor.borrow().next_timer(), ops.engine.retry_at());
        let is_idle =
            ops.engine.in_kernel() + ops.engine.queued() == 0 && !self.late.borrow().any();
        if !is_idle {
            return self.wait_in_kernel(&mut ops, deadline, clock::now());
        }
        self.stats.is_idle.set(1);
        let result = self.wait_in_kernel(&mut ops, deadline, clock::now());
        self.stats.is_idle.set(0);
        result
    }

    fn wait_in_kernel(
        &self,
        ops: &mut Ops,
        deadline: Option<Instant>,
        now: Instant,
    ) -> Result<(), Error> {
        let Ops { slots, engine, woken, happened, .. } = &mut *ops;
        let mut done = Completer { slots, stats: &self.stats, woken, now };
        engine.wait(deadline, usize::MAX, &mut done, happened)?;
        if engine.waits_in_ring() {
            self.harvest_is_due.set(true);
        }
        self.take_in(ops);
        Ok(())
    }

    /// What the loop waits for when no task is ready.
    fn awaited(&self) -> Awaited {
        let Ops { engine, slots, .. } = &*self.ops.borrow();
        let ops = engine.in_kernel() + engine.queued() + slots.foreign();
        Awaited::with(ops, slots.lanes.have_many_bytes())
    }

    /// Spins on the rings. True when there is something to do.
    fn busy_poll(
        &self,
        since: Instant,
        awaited: Awaited,
        reactor: &Reactor,
        woken: &mut Vec<TaskKey>,
    ) -> bool {
        let window = self.poll_window.at(awaited, since);
        if window.is_zero() {
            return false;
        }
        loop {
            reactor.look(|task| woken.push(task));
            let now = clock::now();
            let engine = &mut self.ops.borrow_mut().engine;
            let found = !woken.is_empty()
                || (self.harvest_on_submit && engine.has_completions(now, &self.stats))
                || self.mailbox.is_posted();
            let polled = now.saturating_duration_since(since);
            if found || polled >= window {
                self.poll_window.polled(awaited, polled, found);
                return found;
            }
            clock::spin();
        }
    }

    /// When a turn has something to do, whatever the kernel answers until then.
    pub(crate) fn deadline_of_work(&self) -> Option<Instant> {
        earlier(self.reactor.borrow().next_timer(), self.ops.borrow().engine.retry_at())
    }

    // Phase: calls of other threads.

    /// Takes in what other threads have posted. Returns whether there was anything.
    fn run_foreign(self: &Rc<Self>) -> bool {
        if !self.mailbox.is_posted() {
            return false;
        }
        let posted = self.mailbox.take();
        task::wake_all(&self.executor, &posted.woken);
        for call in posted.calls {
            call(self);
        }
        true
    }

    // The end.

    /// Waits until the kernel has answered every op. Calls stay where they are: who waits for one
    /// takes its end to mean that nothing of this IoThread is left in the kernel.
    pub(crate) fn drain(&self) {
        self.drain_until(false);
    }

    /// As [`drain`](Self::drain), and waits for what something else completes. Calls that nobody
    /// will run are dropped: they may hold what such an op waits for.
    pub(crate) fn drain_all(&self) {
        self.drain_until(true);
        // Nothing else calls the wakers of those who poll ops from outside.
        self.has_ready();
    }

    fn drain_until(&self, foreign_too: bool) {
        loop {
            if foreign_too {
                drop(self.mailbox.take());
            }
            self.harvest_is_due.set(true);
            // Submits and harvests: no turn does it any more.
            self.submit_and_harvest();
            if self.has_kept_ops.get() {
                continue;
            }
            let mut ops = self.ops.borrow_mut();
            let foreign = if foreign_too { ops.slots.foreign() } else { 0 };
            if ops.engine.queued() + ops.engine.in_kernel() + foreign == 0 {
                return;
            }
            self.mailbox.arm();
            if self.mailbox.has_results() || (foreign_too && self.mailbox.has_anything()) {
                continue;
            }
            let retry = ops.engine.retry_at();
            if let Err(error) = self.wait_in_kernel(&mut ops, retry, clock::now()) {
                if !is_transient(&error) {
                    return;
                }
                std::thread::sleep(RETRY_WAIT);
            }
        }
    }
}

/// Whether a wait that failed may succeed when it is tried again.
fn is_transient(error: &Error) -> bool {
    let errno = error.system_error().and_then(std::io::Error::raw_os_error);
    matches!(errno, Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ENOMEM))
}

/// Gives the engine what has room now. True if there was something.
#[cold]
fn queue_from_lanes(engine: &mut Engine, slots: &mut Slots) -> bool {
    let mut moved = false;
    while let Some(slot) = slots.next_from_lanes() {
        engine.queue(slot, slots);
        moved = true;
    }
    moved
}

/// The earlier of two times that may be.
pub(crate) fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    [a, b].into_iter().flatten().min()
}
