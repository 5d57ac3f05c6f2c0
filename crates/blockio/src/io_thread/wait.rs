//! The last phase of a turn: busy-polling, arming, sleeping.

use std::rc::Rc;
use std::time::Instant;

use super::{Activity, Io, ROUNDS_BETWEEN_LOOKS, Wait};
use crate::error::Error;
use crate::reactor::Reactor;
use crate::task::TaskKey;

impl Io {
    /// Busy-polls for as long as that pays, arms the sources, looks once more, and sleeps if there
    /// is still nothing to do.
    pub(super) fn wait(self: &Rc<Self>, wait: Wait) -> Result<Activity, Error> {
        let mut woken = std::mem::take(&mut self.ops.borrow_mut().woken);
        let mut reactor = self.reactor.borrow_mut();
        let mut busy = self.has_ready() || self.foreign.is_posted() || self.stopped.get();
        let since = (!busy && wait == Wait::ForEvent).then(Instant::now);
        if let Some(since) = since {
            busy = self.busy_poll(since, &reactor, &mut woken);
        }
        if !busy {
            reactor.arm(&mut woken);
            busy = !woken.is_empty();
        }
        let look_is_due = self.rounds_since_look.get() >= ROUNDS_BETWEEN_LOOKS;
        if look_is_due {
            self.rounds_since_look.set(0);
        }
        if !busy || (look_is_due && reactor.has_armed()) {
            self.assert_may_sleep();
            let deadline = if busy || wait == Wait::Never {
                Some(Instant::now())
            } else {
                Self::earlier(reactor.next_timer(), self.ops.borrow().engine.retry_at())
            };
            reactor.wait(deadline, &mut woken, &self.stats)?;
            if let Some(since) = since
                && !busy
            {
                self.poll_window.slept(since.elapsed());
            }
        }
        reactor.expire_timers(&mut woken);
        drop(reactor);
        for key in woken.drain(..) {
            self.executor.borrow_mut().wake(key);
        }
        self.ops.borrow_mut().woken = woken;
        self.submit_and_harvest();
        Ok(if self.run_foreign() || self.has_ready() { Activity::Ready } else { Activity::Idle })
    }

    /// Spins on the rings. True when there is something to do.
    fn busy_poll(&self, since: Instant, reactor: &Reactor, woken: &mut Vec<TaskKey>) -> bool {
        let window = self.poll_window.get();
        if window.is_zero() {
            return false;
        }
        let ops = self.ops.borrow();
        loop {
            reactor.look(woken);
            if !woken.is_empty() || ops.engine.has_completions() || self.foreign.is_posted() {
                return true;
            }
            if since.elapsed() >= window {
                return false;
            }
            std::hint::spin_loop();
        }
    }

    /// The loop must not sleep on ops that nothing will ever submit.
    fn assert_may_sleep(&self) {
        let ops = self.ops.borrow();
        debug_assert!(
            ops.engine.queued() == 0
                || ops.engine.in_kernel() > 0
                || ops.engine.retry_at().is_some(),
            "going to sleep with {} ops queued and none in the kernel",
            ops.engine.queued()
        );
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        Self::earlier(self.reactor.borrow().next_timer(), self.ops.borrow().engine.retry_at())
    }

    fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
        [a, b].into_iter().flatten().min()
    }
}
