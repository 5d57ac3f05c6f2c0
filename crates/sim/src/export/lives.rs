//! Daemons come and go, killed or not, and a device's guest stays or starts anew.

use super::{Export, Service, places, stopped, units};

impl Export {
    /// The IoThreads go: nobody knows of the queues any more.
    pub(crate) fn leave(&mut self) {
        self.services.clear();
        self.region = None;
        self.removed.clear();
        self.waiting = None;
        if let Some(front_end) = &mut self.front_end {
            front_end.disconnect();
        }
    }

    /// Goes on with what is on the disk, once the IoThreads are gone.
    pub(crate) fn restart(&mut self) {
        self.guest.reboot();
        self.device = units::device(&self.plan, self.index, &self.disks);
        if self.plan.scsi > 0 {
            self.guest.units_begin();
        }
        self.services = stopped(&self.plan);
        self.places = places(&self.plan);
        self.begin();
    }

    /// The device is one that nobody has said anything to.
    fn begin(&mut self) {
        match &mut self.front_end {
            Some(front_end) => front_end.restart(&self.device),
            None => self.begin_directly(),
        }
    }

    /// The daemon is dead, and the guest knows nothing of it.
    pub(crate) fn died(&mut self) {
        self.leave();
        if self.plan.scsi > 0 {
            self.guest.device_died();
        }
        // What front-ends say that have heard nothing of the daemon.
        let used = |queue| self.guest.indexes(queue).0;
        self.services = (0..self.places.len()).map(|queue| Service::Stopped(used(queue))).collect();
        self.places = places(&self.plan);
        self.disks.iter().for_each(|disk| disk.set_write_through(false));
    }

    /// Another daemon goes on.
    pub(crate) fn revived(&mut self) {
        self.device = units::device(&self.plan, self.index, &self.disks);
        if self.plan.scsi > 0 {
            self.guest.units_return();
        }
        self.begin();
    }

    /// Without a session: what the daemon is told before queues start.
    pub(super) fn begin_directly(&mut self) {
        self.negotiate();
        let has_region = self.plan.inflight > 0;
        self.region = has_region.then(|| self.guest.keep_region().map());
    }
}
