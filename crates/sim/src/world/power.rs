//! Loss and return of power.

use super::{Inner, World};

impl World {
    /// Switches the power off. Ops get answers that are never seen.
    pub(crate) fn power_off(&self) {
        {
            let inner = &mut *self.inner.borrow_mut();
            inner.is_void = true;
            inner.orphans.clear();
        }
        let ids: Vec<u64> = self.inner.borrow().ops.keys().copied().collect();
        for id in ids {
            self.answer(id);
        }
        while self.run_event() {}
    }

    /// Switches the power on and decides the content of the disks.
    pub(crate) fn power_on(&self) {
        let Inner { rng, disks, is_void, .. } = &mut *self.inner.borrow_mut();
        disks.iter_mut().for_each(|disk| disk.device.lose_power(rng));
        *is_void = false;
    }

    /// Brings all writes to stable storage. No op may be in the kernel.
    pub(crate) fn settle(&self) {
        let disks = &mut self.inner.borrow_mut().disks;
        disks.iter_mut().for_each(|disk| disk.device.settle());
    }
}
