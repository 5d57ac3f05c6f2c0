//! The knowledge of a virtio-scsi guest about its device, and its requests.

use device::unit_address::UnitAddress;

use super::command::Target;
use super::{Guest, GuestQueue, Outstanding, State};
use crate::chain_request::ChainRequest;
use crate::failure::Failure;
use crate::scsi::attentions::CauseOutcome;
use crate::scsi::events::{Events, UnitChange};
use crate::scsi::function::Function;
use crate::scsi::shared::ExpectedAttention;
use crate::scsi::unit::{Unit, address};
use crate::scsi::{CAPACITY_CHANGED, CONTROL_QUEUE, EVENT_QUEUE, POWER_ON, UNITS_CHANGED};
use crate::timeline::Timeline;

/// A small number of tags, so that different units have tasks with the same one.
const TAGS: u64 = 12;

/// A task management function that was requested.
pub(super) struct FunctionRecord {
    pub(super) function: Function,
    pub(super) begin: u64,
    /// The time at which the device had taken the function: later commands are not affected.
    pub(super) taken: u64,
    /// The time of the answer.
    pub(super) end: u64,
    /// Unit attentions that the function may raise, with their disks.
    pub(super) attentions: Vec<(usize, ExpectedAttention)>,
}

/// A command that was answered.
pub(super) struct CommandRecord {
    pub(super) address: UnitAddress,
    pub(super) tag: u64,
    pub(super) begin: u64,
    pub(super) end: u64,
}

/// The guest's knowledge of its device; empty for virtio-blk.
#[derive(Default)]
pub(super) struct Scsi {
    /// Units by the number of their disks.
    pub(super) units: Vec<Unit>,
    pub(super) managed: Vec<FunctionRecord>,
    pub(super) done: Vec<CommandRecord>,
    pub(super) events: Events,
    /// True while a queue runs.
    pub(super) runs: Vec<Timeline<bool>>,
    /// True while a queue is stopped and the control queue knows it.
    pub(super) known_stopped: Vec<Timeline<bool>>,
    /// The time of the last daemon's death.
    pub(super) died: u64,
}

impl Guest {
    /// The knowledge about a new device.
    pub(super) fn new_scsi(&self) -> Scsi {
        let units = (0..self.disks.len()).map(|disk| Unit::new(address(self.device, disk)));
        let lines = || (0..self.plan.queue_count()).map(|_| Timeline::new(false)).collect();
        Scsi { units: units.collect(), runs: lines(), known_stopped: lines(), ..Scsi::default() }
    }

    /// Notes that a queue of the device runs from now on, or does not.
    pub(crate) fn set_running(&self, queue: usize, runs: bool) {
        let now = self.world.tick();
        let scsi = &mut self.state.borrow_mut().scsi;
        if let Some(line) = scsi.runs.get_mut(queue) {
            line.set(now, runs);
        }
        if queue == CONTROL_QUEUE {
            scsi.known_stopped.iter_mut().for_each(|line| line.set(now, false));
        }
    }

    /// Notes that a queue begins to run.
    pub(crate) fn set_starting(&self, queue: usize) {
        let now = self.world.tick();
        if let Some(line) = self.state.borrow_mut().scsi.known_stopped.get_mut(queue) {
            line.set(now, false);
        }
    }

    /// Notes that a queue has stopped. A control queue that starts forgets stopped queues.
    pub(crate) fn set_stopped(&self, queue: usize) {
        let now = self.world.tick();
        let scsi = &mut self.state.borrow_mut().scsi;
        let Some(since) = scsi.runs.get(queue).map(Timeline::since) else { return };
        let knows = scsi.runs[CONTROL_QUEUE].during(since, now).all(|runs| *runs);
        scsi.known_stopped[queue].set(now, knows);
    }

    /// Notes that the device has taken all chains of a queue before this place.
    pub(crate) fn set_popped(&self, queue: usize, next: u16) {
        let now = self.world.tick();
        let State { queues, scsi, .. } = &mut *self.state.borrow_mut();
        let GuestQueue { driver, outstanding, .. } = &mut queues[queue];
        let start = scsi.runs[queue].since();
        let is_popped = |chain: &Outstanding| driver.has_taken(next, chain.entry);
        // The queue may start behind chains that are in its inflight region. It pops them later,
        // but before all further ones.
        let is_further = |chain: &Outstanding| chain.begin > start && is_popped(chain);
        let has_further = outstanding.iter().flatten().any(is_further);
        for outstanding in outstanding.iter_mut().flatten() {
            let is_known = has_further || outstanding.begin > start;
            if is_known && is_popped(outstanding) && outstanding.popped.is_none() {
                outstanding.popped = Some(now);
                let mut managed = scsi.managed.iter_mut();
                let function = managed.find(|managed| managed.begin == outstanding.begin);
                function.into_iter().for_each(|function| function.taken = now);
            }
        }
    }

    /// Notes that the device has gained or lost its unit on this disk.
    pub(crate) fn unit_changed(&self, disk: usize, is_there: bool) {
        let now = self.world.tick();
        let scsi = &mut self.state.borrow_mut().scsi;
        scsi.units[disk].present.set(now, is_there);
        {
            let mut shared = self.disks[disk].shared_mut();
            let attentions = shared.nexus(self.device);
            attentions.forget(now);
            if is_there {
                attentions.raise(POWER_ON, now);
            }
        }
        let address = scsi.units[disk].address;
        let mut has_others = false;
        for (other, unit) in scsi.units.iter().enumerate() {
            if other != disk && unit.address.target == address.target && *unit.present.now() {
                has_others = true;
                self.disks[other].shared_mut().nexus(self.device).raise(UNITS_CHANGED, now);
            }
        }
        if self.plan.no_events == 0 {
            let what = if is_there { UnitChange::Added } else { UnitChange::Removed };
            // The first unit of a target is announced by LUN 0, so that the driver scans the
            // target.
            let lun = if is_there && !has_others { 0 } else { address.lun };
            scsi.events.expect(what, UnitAddress { lun, ..address });
        }
        self.world.tick();
    }

    /// Notes that all units are there from the beginning.
    pub(crate) fn units_begin(&self) {
        let now = self.world.tick();
        let target = |place| address(self.device, place).target;
        for (place, disk) in self.disks.iter().enumerate() {
            let mut shared = disk.shared_mut();
            let attentions = shared.nexus(self.device);
            attentions.raise(POWER_ON, now);
            if (place + 1..self.disks.len()).any(|later| target(later) == target(place)) {
                // Units are added one by one.
                attentions.raise(UNITS_CHANGED, now);
            }
        }
        self.world.tick();
    }

    /// Notes that a disk has another size.
    pub(crate) fn capacity_changed(&self, disk: usize) {
        let now = self.world.tick();
        let scsi = &mut self.state.borrow_mut().scsi;
        let unit = &scsi.units[disk];
        if *unit.present.now() {
            self.disks[disk].shared_mut().nexus(self.device).raise(CAPACITY_CHANGED, now);
            if self.plan.no_events == 0 {
                scsi.events.expect(UnitChange::CapacityChanged, unit.address);
            }
        }
        self.world.tick();
    }

    /// Notes that the device has forgotten its driver. No queue runs.
    pub(crate) fn was_reset(&self) {
        let now = self.world.tick();
        let State { scsi, queues, .. } = &mut *self.state.borrow_mut();
        let queue = &queues[EVENT_QUEUE];
        let reported = queue.outstanding.iter().enumerate().filter(|(head, outstanding)| {
            let answer = outstanding.as_ref().filter(|_| queue.is_answered(*head));
            let bytes = answer.and_then(|outstanding| self.collect(outstanding).ok());
            bytes.is_some_and(|(_, bytes)| bytes.iter().any(|byte| *byte != 0))
        });
        scsi.events.forget(reported.count());
        for (unit, disk) in scsi.units.iter().zip(&self.disks) {
            let mut shared = disk.shared_mut();
            shared.cache_may_change(now);
            if *unit.present.now() {
                shared.nexus(self.device).raise(POWER_ON, now);
            }
        }
        self.world.tick();
    }

    /// True if the device has a unit on this disk.
    pub(crate) fn unit_is_there(&self, disk: usize) -> bool {
        *self.state.borrow().scsi.units[disk].present.now()
    }

    /// True if a task management function is due: they are spread over the commands.
    pub(super) fn is_function_due(&self, state: &State) -> bool {
        let (all, total) = (self.plan.functions, self.plan.requests);
        let done = all - state.functions_left;
        let made = total.saturating_sub(state.requests_left);
        state.functions_left > 0 && (state.requests_left == 0 || made * all >= done * total)
    }

    /// Draws a request for a queue.
    pub(super) fn draw_scsi(&self, state: &mut State, index: usize) -> ChainRequest {
        let State { rng, queues, scsi, .. } = state;
        let outstanding = queues.iter().flat_map(|queue| queue.outstanding.iter().flatten());
        let tasks = outstanding.filter_map(|outstanding| match &outstanding.request {
            ChainRequest::Command(command) => Some((scsi.units[command.unit].address, command.tag)),
            _ => None,
        });
        let tasks: Vec<(UnitAddress, u64)> = tasks.collect();
        match index {
            CONTROL_QUEUE => {
                let units: Vec<UnitAddress> = scsi.units.iter().map(|unit| unit.address).collect();
                ChainRequest::Function(Function::draw(rng, &units, &tasks))
            }
            EVENT_QUEUE => ChainRequest::event(),
            _ => {
                let id = self.next_id.get();
                self.next_id.set(id + 1);
                let unit = rng.index(scsi.units.len());
                let address = scsi.units[unit].address;
                let first = rng.below(TAGS);
                let free =
                    (first..TAGS).chain(0..first).find(|tag| !tasks.contains(&(address, *tag)));
                let (tag, device, disk) = (free.unwrap_or(id), self.device, &*self.disks[unit]);
                let target = Target { unit, address, disk, tag, device };
                ChainRequest::Command(target.draw(&self.plan, rng, id))
            }
        }
    }

    /// Records a request that goes out.
    pub(super) fn begin_scsi(&self, scsi: &mut Scsi, request: &ChainRequest, begin: u64) {
        match request {
            ChainRequest::Command(command) => {
                let disk = &self.disks[command.unit];
                disk.begin(&command.disk_effect(), begin);
                disk.shared_mut().begin(self.device, command, begin);
            }
            ChainRequest::Function(function) => {
                let attentions = self.expect_attentions(&scsi.units, function, begin);
                if function.is_of_all() {
                    for disk in self.covered_disks(&scsi.units, function) {
                        self.disks[disk].shared_mut().begin_abort_all(self.device, begin);
                    }
                }
                let function = function.clone();
                let [taken, end] = [u64::MAX; 2];
                scsi.managed.push(FunctionRecord { function, begin, taken, end, attentions });
            }
            ChainRequest::Blk(_) | ChainRequest::Event(_) => {}
        }
    }

    /// The disks of the units that a function is about.
    fn covered_disks(&self, units: &[Unit], function: &Function) -> Vec<usize> {
        let units = units.iter().enumerate();
        let meant = units.filter(|(_, unit)| function.covers(unit.address, function.tag));
        meant.map(|(disk, _)| disk).collect()
    }

    /// Expects the unit attentions that a function may raise. Returns them with their disks.
    fn expect_attentions(
        &self,
        units: &[Unit],
        function: &Function,
        begin: u64,
    ) -> Vec<(usize, ExpectedAttention)> {
        let mut attentions = Vec::new();
        let [own, others] = function.attentions();
        if own.is_none() && others.is_none() {
            return attentions;
        }
        for disk in self.covered_disks(units, function) {
            let mut shared = self.disks[disk].shared_mut();
            shared.cache_may_change(begin);
            if let Some(code) = own {
                let id = shared.nexus(self.device).expect(code, begin);
                attentions.push((disk, (self.device, code, id)));
            }
            if let Some(code) = others {
                let expected = shared.expect_for_others(self.device, code, begin);
                attentions.extend(expected.into_iter().map(|attention| (disk, attention)));
            }
        }
        attentions
    }

    /// Notes that the daemon is dead. The guest takes the answers that are there, and requests that
    /// are out begin once more.
    pub(crate) fn device_died(&self) {
        let state = &mut *self.state.borrow_mut();
        for index in 0..state.queues.len() {
            while state.queues[index].driver.has_used() && state.failure.is_none() {
                self.take_answer(state, index);
            }
        }
        let now = self.world.tick();
        let State { scsi, queues, failure, .. } = state;
        let lines = scsi.runs.iter_mut().chain(&mut scsi.known_stopped);
        lines.for_each(|line| line.set(now, false));
        scsi.died = now;
        let out = queues.iter_mut().flat_map(|queue| queue.outstanding.iter_mut().flatten());
        out.for_each(|outstanding| outstanding.popped = None);
        scsi.events.forget(0);
        let Scsi { units, managed, .. } = scsi;
        for managed in managed.iter_mut().filter(|managed| managed.end == u64::MAX) {
            for (disk, attention) in std::mem::take(&mut managed.attentions) {
                let settled =
                    self.disks[disk].shared_mut().settle(&[attention], now, CauseOutcome::Maybe);
                if let Err(text) = settled {
                    failure.get_or_insert(Failure::new("bad answer", text));
                }
            }
            managed.attentions = self.expect_attentions(units, &managed.function, now);
            managed.taken = u64::MAX;
        }
        self.world.tick();
    }

    /// Notes that another daemon has all units, without the state of the last one.
    pub(crate) fn units_return(&self) {
        let now = self.world.tick();
        let units = &mut self.state.borrow_mut().scsi.units;
        units.iter_mut().for_each(|unit| unit.present.set(now, true));
        self.units_begin();
    }
}
