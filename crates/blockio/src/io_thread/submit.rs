//! The middle of a turn: submit, harvest, and who is woken by it.

use std::time::Duration;

use super::{Io, NO_TASK, Ops};
use crate::clock;
use crate::engine::{Completer, Engine, TOKEN_ENGINE};
use crate::error::Error;
use crate::op::Slots;

/// How long a wait that failed for want of memory is put off.
const RETRY_WAIT: Duration = Duration::from_millis(1);

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

impl Io {
    /// One system call for all queued ops, then completions that are visible without one.
    pub(super) fn submit_and_harvest(&self) {
        let mut ops = self.ops.borrow_mut();
        let Ops { slots, engine, woken, happened } = &mut *ops;
        if engine.is_quiet() {
            return;
        }
        let mut done = Completer { slots, stats: &self.stats, woken, now: clock::now() };
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
            let moved = done.slots.lanes.has_backlog() && queue_from_lanes(engine, done.slots);
            // They may have made room for what is queued, too.
            if !more && !moved && (found == 0 || engine.queued() == 0) {
                break;
            }
        }
        self.recently.set(done.now);
        self.round_ends(done.now);
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
        ops.detach_files();
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
            if let Err(error) = self.wait_in_kernel(&mut ops, retry) {
                if !is_transient(&error) {
                    return;
                }
                std::thread::sleep(RETRY_WAIT);
            }
        }
    }
}
