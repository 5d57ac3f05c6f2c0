//! The middle of a turn: submit, harvest, and who is woken by it.

use super::{Io, NO_TASK, Ops};
use crate::clock;
use crate::engine::{Completer, TOKEN_ENGINE};

impl Io {
    /// One system call for all queued ops, then completions that are visible without one.
    pub(super) fn submit_and_harvest(&self) {
        let mut ops = self.ops.borrow_mut();
        let Ops { slots, engine, woken, happened, pacing } = &mut *ops;
        if engine.is_quiet() {
            return;
        }
        let mut done = Completer { slots, stats: &self.stats, woken, now: clock::now() };
        loop {
            let (queued, in_kernel) = (engine.queued(), engine.in_kernel());
            let room = pacing.room(queued, in_kernel).min(self.submit_max);
            let mut more = false;
            if room > 0 {
                more = engine.submit(room, &mut done);
            }
            if queued > 0 {
                done.now = clock::now();
            }
            let submitted = engine.queued() < queued;
            let harvests = self.harvest_on_submit || self.harvest_is_due.take();
            let found = if harvests { engine.harvest(&mut done, happened) } else { 0 };
            if found > 0 || submitted {
                pacing.harvested(found, in_kernel, submitted, done.now);
            }
            // Completions may have made room for what is queued.
            if !more && (found == 0 || engine.queued() == 0) {
                break;
            }
        }
        self.harvested.set(done.now);
        self.take_in(&mut ops);
    }

    /// Wakes the tasks of completed ops, and those of sources whose eventfds were written.
    pub(super) fn take_in(&self, ops: &mut Ops) {
        if !ops.happened.is_empty() {
            if ops.happened.contains(&TOKEN_ENGINE) {
                self.harvest_is_due.set(true);
            }
            self.reactor.borrow_mut().dispatch(&mut ops.happened, &mut ops.woken);
        }
        let mut executor = self.executor.borrow_mut();
        for key in ops.woken.drain(..) {
            if key.task == NO_TASK.task {
                self.root_woken.set(true);
            }
            executor.wake(key);
        }
    }

    /// Waits until the kernel has answered every op.
    pub(super) fn drain(&self) {
        loop {
            self.harvest_is_due.set(true);
            self.submit_and_harvest();
            let mut ops = self.ops.borrow_mut();
            if ops.engine.queued() + ops.engine.in_kernel() == 0 {
                return;
            }
            let retry = ops.engine.retry_at();
            if self.wait_in_kernel(&mut ops, retry).is_err() {
                std::thread::yield_now();
            }
        }
    }
}
