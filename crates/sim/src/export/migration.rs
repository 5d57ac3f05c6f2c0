//! Migrations of a guest while its requests run: with a log, which may be replaced, up to a failure
//! or to the switch to another device.

use std::sync::Arc;

use device::QueueHandle;
use virtqueue::QueueLog;

use super::{Change, Export, QueueState, units};
use crate::failure::Failure;
use crate::guest::copy::Phase;
use crate::rng::Rng;

impl Export {
    /// True if a migration can begin, continue or end.
    pub(super) fn can_migrate(&self, change: Change) -> bool {
        let is_heard = self.front_end.as_ref().is_none_or(|f| f.is_open() && f.has_protocol());
        let phase = match change {
            Change::Migrate => None,
            _ => Some(Phase::Copies),
        };
        !self.ending && self.is_settled() && is_heard && self.guest.migration() == phase
    }

    /// Makes a change of a migration.
    pub(super) fn migrate(&mut self, change: Change, rng: &mut Rng) -> Result<(), Failure> {
        self.guest.check_logs()?;
        let is_cancelled = rng.chance(self.plan.cancels);
        let kind = self.stop_kind(rng);
        let front_end = &mut self.front_end;
        match (change, front_end) {
            (Change::Migrate, Some(front_end)) => front_end.begin_log(),
            (Change::ReplaceLog, Some(front_end)) => front_end.replace_log(),
            (_, Some(front_end)) if is_cancelled => front_end.end_log(),
            (_, Some(front_end)) => {
                self.disks[0].set_write_through(false);
                front_end.switch();
                self.queue_states.iter_mut().for_each(|state| *state = QueueState::Stopping(None));
            }
            (Change::Migrate, None) => {
                self.guest.begin_migration();
                self.spread_log();
            }
            (Change::ReplaceLog, None) => {
                self.guest.add_log();
                self.spread_log();
            }
            (_, None) if is_cancelled => {
                self.guest.cancel_migration();
                self.spread_log();
            }
            (_, None) => {
                self.guest.pause();
                (0..self.queue_states.len()).for_each(|queue| self.stop(queue, kind));
                self.waiting = Some(change);
            }
        }
        Ok(())
    }

    /// Without a session: gives the present log to the running queues.
    fn spread_log(&mut self) {
        self.log = self.guest.with_log(|log| log.map());
        self.changes_log = true;
        let give = |(queue, state): (usize, &QueueState)| match state {
            QueueState::Running(Some(handle)) => Some(self.set_log(queue, handle)),
            _ => None,
        };
        self.new_logs = self.queue_states.iter().enumerate().filter_map(give).collect();
    }

    fn set_log(&self, queue: usize, handle: &QueueHandle) -> device::oneshot::Receiver<()> {
        handle.begin_set_log(self.queue_log(queue))
    }

    /// The log of a queue.
    pub(super) fn queue_log(&self, queue: usize) -> Option<QueueLog> {
        let log = Arc::clone(self.log.as_ref()?);
        let used_ring = Some(self.guest.ring(queue, 0).used_ring);
        Some(QueueLog { log, marks_data: true, used_ring })
    }

    /// Without a session: continues once all queues have the present log.
    pub(super) fn advance_log(&mut self) {
        self.new_logs.retain(|is_set| is_set.check().is_pending());
        if !self.changes_log || !self.new_logs.is_empty() {
            return;
        }
        self.changes_log = false;
        match self.guest.migration() {
            Some(Phase::Begins) => self.guest.begin_copy(),
            Some(Phase::Ends) => self.guest.end_migration(),
            _ => self.guest.has_taken_log(),
        }
    }

    /// Without a session: switches to the copy of the memory after all queues have stopped.
    pub(super) fn switch_directly(&mut self) -> Result<(), Failure> {
        self.guest.complete_copy();
        let has_moved = self.guest.switch()?;
        self.log = None;
        self.memory = Arc::new(self.guest.layout().map());
        // Another virtio-scsi device would know nothing of the first one's reservations.
        if has_moved && self.plan.scsi == 0 {
            self.device = units::device(&self.plan, self.index, &self.disks);
            self.begin_directly();
        }
        Ok(())
    }

    /// Switches to the copy of the memory after the connection has ended.
    pub(super) fn switch_over_session(&mut self) -> Result<(), Failure> {
        if self.guest.switch()? {
            self.device = units::device(&self.plan, self.index, &self.disks);
            if let Some(front_end) = &mut self.front_end {
                front_end.restart(&self.device);
            }
        }
        Ok(())
    }
}
