//! Disks that hang: they take ops, and answer none until they are released.

use super::{Event, World};

impl World {
    /// True if a disk has ops that it does not answer.
    pub(crate) fn holds_ops(&self) -> bool {
        let disks = &self.inner.borrow().disks;
        disks.iter().filter_map(|disk| disk.held.as_ref()).any(|ops| !ops.is_empty())
    }

    /// True if this disk hangs, or would if it had ops.
    pub(crate) fn hangs(&self, disk: usize) -> bool {
        self.inner.borrow().disks[disk].held.is_some()
    }

    /// Makes hung disks answer their ops, and no longer hang.
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
