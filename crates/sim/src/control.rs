//! The controller of the exports: starts their queues on IoThreads, and makes changes while they
//! run.

use std::rc::Rc;

use blockio::Remote;

use crate::disk::Disk;
use crate::export::{Change, Export};
use crate::failure::Failure;
use crate::guest::Guest;
use crate::plan::Plan;
use crate::rng::Rng;

pub(crate) struct Control {
    rng: Rng,
    pub(crate) exports: Vec<Export>,
    pub(crate) disks: Vec<Rc<Disk>>,
    /// IoThreads for queues to start on. Empty while the IoThreads are replaced.
    pub(crate) threads: Vec<Remote>,
    /// The number of times that each change may still be made.
    changes: Vec<(Change, u64)>,
    has_sessions: bool,
}

impl Control {
    pub(crate) fn new(plan: &Plan, exports: Vec<Export>, disks: Vec<Rc<Disk>>) -> Self {
        let changes = vec![
            (Change::Stop, plan.stops),
            (Change::Remap, plan.remaps),
            (Change::Reset, plan.resets),
            (Change::SetCall, plan.set_calls),
            (Change::Writeback, plan.writebacks),
            (Change::Migrate, plan.migrations),
            (Change::ReplaceLog, plan.log_changes),
            (Change::EndMigration, plan.migrations),
            (Change::Hotplug, plan.hotplugs),
            (Change::Resize, plan.resizes),
            (Change::Crash, plan.crashes),
            (Change::Kill, plan.kills),
            (Change::Die, plan.deaths),
        ];
        let rng = Rng::new(plan.seed ^ plan.schedule << 40, 5);
        let has_sessions = exports.iter().any(|export| export.front_end.is_some());
        Self { rng, exports, disks, threads: Vec::new(), changes, has_sessions }
    }

    pub(crate) fn guests(&self) -> impl Iterator<Item = &Rc<Guest>> {
        self.exports.iter().map(|export| &export.guest)
    }

    /// True if all requests are made and answered.
    pub(crate) fn is_done(&self) -> bool {
        self.guests().all(|guest| guest.is_done())
    }

    /// Queues that can be started: devices and numbers.
    pub(crate) fn startable(&self) -> impl Iterator<Item = (usize, usize)> {
        let exports = self.exports.iter().enumerate();
        exports.flat_map(|(device, export)| export.startable().map(move |queue| (device, queue)))
    }

    /// Starts a queue on any IoThread.
    pub(crate) fn start(&mut self, device: usize, queue: usize) {
        if self.threads.is_empty() {
            return;
        }
        let thread = self.rng.index(self.threads.len());
        let export = &mut self.exports[device];
        export.trace(|| format!("queue {queue} is started on IoThread {thread}"));
        export.start(queue, &self.threads[thread], thread);
    }

    /// The changes that are possible now.
    pub(crate) fn possible(&self) -> impl Iterator<Item = Change> {
        let open = self.changes.iter().filter(|(_, left)| *left > 0 && !self.is_done());
        let changes = open.map(|(change, _)| *change);
        changes.filter(|change| self.exports.iter().any(|export| export.can_change(*change)))
    }

    /// Makes a change. A change of all devices is left to the caller.
    pub(crate) fn change(&mut self, change: Change) -> Result<(), Failure> {
        if let Some((_, left)) = self.changes.iter_mut().find(|(other, _)| *other == change) {
            *left -= 1;
        }
        let exports = self.exports.iter().enumerate();
        let able: Vec<usize> =
            exports.filter(|(_, export)| export.can_change(change)).map(|(at, _)| at).collect();
        if change.is_of_all() || able.is_empty() {
            return Ok(());
        }
        if change == Change::Resize {
            self.resize();
            return Ok(());
        }
        let device = self.rng.pick(&able);
        self.exports[device].change(change, &mut self.rng)
    }

    /// Resizes one of the disks, which all devices report.
    fn resize(&mut self) {
        let disk = Rc::clone(&self.disks[self.rng.index(self.disks.len())]);
        let blocks = self.rng.between(1, disk.plan.blocks);
        disk.resize(blocks * disk.plan.block_sectors());
        self.guests().for_each(|guest| guest.capacity_changed(disk.index));
        // The first device with a unit there notifies all.
        let _ = self.exports.iter().any(|export| export.resized(disk.index));
    }

    /// Continues the guest that always keeps its first queue busy.
    pub(crate) fn rush(&self) {
        if let Some(export) = self.exports.first() {
            export.guest.rush();
        }
    }

    /// Acts at a point within a turn of an IoThread. Mostly the CPU of a guest takes a step;
    /// sometimes a queue starts or a change is made.
    pub(crate) fn act(&mut self) -> Result<(), Failure> {
        if self.has_sessions && self.rng.chance(150) {
            return self.act_over_session();
        }
        if !self.rng.chance(50) {
            let device = self.rng.index(self.exports.len());
            self.exports[device].guest.act();
            return Ok(());
        }
        let startable = self.startable().next();
        if let Some((device, queue)) = startable {
            self.start(device, queue);
            return Ok(());
        }
        let changes: Vec<Change> = self.possible().filter(|change| !change.is_of_all()).collect();
        if changes.is_empty() || self.threads.is_empty() {
            return Ok(());
        }
        let change = self.rng.pick(&changes);
        self.change(change)
    }

    /// Lets a front-end or a session take a step.
    fn act_over_session(&mut self) -> Result<(), Failure> {
        let device = self.rng.index(self.exports.len());
        let Some(front_end) = &mut self.exports[device].front_end else { return Ok(()) };
        if front_end.session_can_step() {
            front_end.step_session()
        } else {
            front_end.step(&self.threads)
        }
    }
}
