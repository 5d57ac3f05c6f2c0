//! The power goes, and comes back.

use super::{Inner, World};

impl World {
    /// The power goes. Ops get answers that nobody will see.
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

    /// The power is back; what is on the disk has been decided.
    pub(crate) fn power_on(&self) {
        let Inner { rng, disks, is_void, .. } = &mut *self.inner.borrow_mut();
        disks.iter_mut().for_each(|disk| disk.device.lose_power(rng));
        *is_void = false;
    }

    /// Everything that was written is on stable storage. No op may be in the kernel.
    pub(crate) fn settle(&self) {
        let disks = &mut self.inner.borrow_mut().disks;
        disks.iter_mut().for_each(|disk| disk.device.settle());
    }
}
