//! Ends and starts of daemons, killed or not, while a device's guest stays or restarts.

use super::{Export, QueueState, places, stopped, units};

impl Export {
    /// Drops the state of the queues, when the IoThreads go.
    pub(crate) fn clear_queues(&mut self) {
        self.queue_states.clear();
        self.region = None;
        self.removed.clear();
        self.waiting = None;
        (self.log, self.changes_log) = (None, false);
        self.new_logs.clear();
        if let Some(front_end) = &mut self.front_end {
            front_end.disconnect();
        }
    }

    /// Continues with the content of the disk, after the IoThreads are gone.
    pub(crate) fn restart(&mut self) {
        self.guest.reboot();
        self.device = units::device(&self.plan, self.index, &self.disks);
        if self.plan.scsi > 0 {
            self.guest.units_begin();
        }
        self.queue_states = stopped(&self.plan);
        self.places = places(&self.plan);
        self.begin();
    }

    /// Starts with a new device that has received nothing.
    fn begin(&mut self) {
        match &mut self.front_end {
            Some(front_end) => front_end.restart(&self.device),
            None => self.begin_directly(),
        }
    }

    /// Notes that the daemon is dead. The guest does not know.
    pub(crate) fn died(&mut self) {
        self.clear_queues();
        self.guest.daemon_died();
        if self.plan.scsi > 0 {
            self.guest.device_died();
        }
        // The bases that front-ends name when they have no answer of the daemon.
        let base = |queue| self.guest.base(queue, &[]);
        self.queue_states =
            (0..self.places.len()).map(|queue| QueueState::Stopped(base(queue))).collect();
        self.places = places(&self.plan);
        self.disks.iter().for_each(|disk| disk.set_write_through(false));
    }

    /// Continues with another daemon.
    pub(crate) fn revived(&mut self) {
        self.device = units::device(&self.plan, self.index, &self.disks);
        if self.plan.scsi > 0 {
            self.guest.units_return();
        }
        self.begin();
    }

    /// Without a session: sets the device up before its queues start.
    pub(super) fn begin_directly(&mut self) {
        self.negotiate();
        let has_region = self.plan.inflight > 0;
        self.region = has_region.then(|| self.guest.keep_region().map());
        self.log = self.guest.with_log(|log| log.map());
        // The queues will start with it.
        self.changes_log = self.log.is_some();
    }
}
