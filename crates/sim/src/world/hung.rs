//! Disks that hang: they take ops, and answer none until they are released.

use super::{Event, World};

impl World {
    /// Whether this disk has ops that it does not answer.
    pub(crate) fn holds_ops(&self, disk: usize) -> bool {
        let held = &self.inner.borrow().disks[disk].held;
        held.as_ref().is_some_and(|ops| !ops.is_empty())
    }

    /// Whether this disk hangs, or would if it had ops.
    pub(crate) fn hangs(&self, disk: usize) -> bool {
        self.inner.borrow().disks[disk].held.is_some()
    }

    /// Disks that hang answer what they have, and hang no more.
    pub(crate) fn release(&self) {
        let inner = &mut *self.inner.borrow_mut();
        let held: Vec<u64> =
            inner.disks.iter_mut().filter_map(|disk| disk.held.take()).flatten().collect();
        for id in held {
            let Some(moved) = inner.ops.get(&id).map(|op| op.moved) else { continue };
            let delay = inner.rng.between(1, self.plan.latency_us * 1000);
            self.schedule_effects(inner, id, moved, delay);
            self.schedule(inner, delay, Event::Answer(id));
        }
    }
}
