//! The last phase of a turn: busy-polling, arming, sleeping.

use std::rc::Rc;
use std::time::Instant;

use super::{Activity, Io, Ops, Wait};
use crate::clock;
use crate::engine::Completer;
use crate::error::Error;
use crate::late::News;
use crate::reactor::Reactor;
use crate::task::TaskKey;

impl Io {
    /// Whether the wait that ends this turn is to submit, so that both cost one system call.
    /// While the loop busy-polls, ops go to the kernel before it does.
    #[inline]
    pub(super) fn may_submit_in_wait(&self, wait: Wait) -> bool {
        wait == Wait::ForEvent
            && self.poll_window.is_closed()
            && self.ops.borrow().engine.waits_with_submit()
            && self.submit_max >= u32::MAX as usize
            && !self.has_ready()
            && !self.foreign.is_posted()
            && !self.stopped.get()
    }

    /// Busy-polls for as long as that pays, arms the sources, looks once more, and sleeps if there
    /// is still nothing to do.
    pub(super) fn wait(self: &Rc<Self>, wait: Wait) -> Result<Activity, Error> {
        let mut woken = self.found.take();
        let mut busy = self.has_ready()
            || self.foreign.is_posted()
            || self.root_woken.get()
            || self.stopped.get();
        let since = (!busy && wait == Wait::ForEvent).then(clock::now);
        if let Some(since) = since {
            busy = self.busy_poll(since, &self.reactor.borrow(), &mut woken);
        }
        if busy {
            self.look_at_sources();
        } else {
            clock::preempt();
            self.reactor.borrow_mut().arm(&mut woken);
            busy = !woken.is_empty();
        }
        let look_is_due = self.look_is_due();
        let looks = look_is_due && (self.reactor.borrow().has_armed() || !self.harvest_on_submit);
        let sleeps = !busy && wait == Wait::ForEvent;
        if !busy || looks {
            self.sleep(sleeps)?;
        }
        if !busy || look_is_due {
            self.looked();
        }
        if let Some(since) = since
            && sleeps
        {
            let now = clock::now();
            self.poll_window.slept(now.saturating_duration_since(since));
            self.recently.set(now);
        }
        self.reactor.borrow_mut().expire_timers(&mut woken);
        for key in woken.drain(..) {
            self.executor.borrow_mut().wake(key);
        }
        self.found.set(woken);
        self.submit_and_harvest();
        if self.recently.get() >= self.late_due.get() {
            self.look_for_late_ops();
        }
        let is_ready = self.run_foreign() || self.has_ready();
        let is_busy = is_ready || self.ops.borrow_mut().engine.must_be_asked();
        Ok(if is_busy { Activity::Ready } else { Activity::Idle })
    }

    /// After a harvest: what has completed while this thread did not run is not late.
    #[cold]
    fn look_for_late_ops(&self) {
        let mut late = self.late.borrow_mut();
        let ops = self.ops.borrow();
        for news in late.look(self.recently.get(), &ops.slots, &self.stats) {
            match news {
                News::Late { .. } => tracing::warn!("{news}"),
                News::Answers { .. } => tracing::info!("{news}"),
            }
        }
        self.late_due.set(late.due());
    }

    /// Looks at the eventfds; `sleeps`: until something happens or a timer is due.
    fn sleep(&self, sleeps: bool) -> Result<(), Error> {
        let mut ops = self.ops.borrow_mut();
        assert_may_sleep(&ops);
        let deadline = if sleeps {
            Self::earlier(self.reactor.borrow().next_timer(), ops.engine.retry_at())
        } else {
            Some(clock::now())
        };
        let is_idle = sleeps
            && ops.engine.in_kernel() + ops.engine.queued() == 0
            && !self.late.borrow().any();
        if !is_idle {
            return self.wait_in_kernel(&mut ops, deadline);
        }
        self.stats.is_idle.set(1);
        let result = self.wait_in_kernel(&mut ops, deadline);
        self.stats.is_idle.set(0);
        result
    }

    pub(super) fn wait_in_kernel(
        &self,
        ops: &mut Ops,
        deadline: Option<Instant>,
    ) -> Result<(), Error> {
        let Ops { slots, engine, woken, happened } = &mut *ops;
        let mut done = Completer { slots, stats: &self.stats, woken, now: clock::now() };
        engine.wait(deadline, usize::MAX, &mut done, happened)?;
        if engine.waits_with_submit() {
            self.harvest_is_due.set(true);
        }
        self.take_in(ops);
        Ok(())
    }

    /// Spins on the rings. True when there is something to do.
    fn busy_poll(&self, since: Instant, reactor: &Reactor, woken: &mut Vec<TaskKey>) -> bool {
        let window = self.poll_window.at(since);
        if window.is_zero() {
            return false;
        }
        loop {
            reactor.look(|task| woken.push(task));
            let now = clock::now();
            let engine = &mut self.ops.borrow_mut().engine;
            let found = !woken.is_empty()
                || (self.harvest_on_submit && engine.has_completions(now, &self.stats))
                || self.foreign.is_posted();
            let polled = now.saturating_duration_since(since);
            if found || polled >= window {
                self.poll_window.spent(polled);
                return found;
            }
            clock::spin();
        }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        Self::earlier(self.reactor.borrow().next_timer(), self.ops.borrow().engine.retry_at())
    }

    fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
        [a, b].into_iter().flatten().min()
    }
}

/// The loop must not sleep on ops that nothing will ever submit.
fn assert_may_sleep(ops: &Ops) {
    let engine = &ops.engine;
    let checked = cfg!(debug_assertions) || cfg!(feature = "sim");
    assert!(
        !checked || !ops.slots.lanes.has_backlog() || engine.queued() + engine.in_kernel() > 0,
        "going to sleep with ops in lanes that nothing will take out"
    );
    assert!(
        !checked
            || engine.queued() == 0
            || engine.in_kernel() > 0
            || engine.retry_at().is_some()
            || engine.waits_with_submit(),
        "going to sleep with {} ops queued and none in the kernel",
        engine.queued()
    );
}
