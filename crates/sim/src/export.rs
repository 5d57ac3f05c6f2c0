//! A device, its queues and its guest, and the changes that a VMM makes to them while they run.

mod lives;
mod migration;
mod units;
pub(crate) mod waits;

use std::rc::Rc;
use std::sync::Arc;

use blockio::Remote;
use device::blk::config::{F_CONFIG_WCE, F_EVENT_IDX, F_FLUSH, F_INDIRECT_DESC, WRITEBACK_OFFSET};
use device::scsi::RemovedUnit;
use device::{Device, QueueHandle, QueueSetup, StartError, StopKind, oneshot};
use virtio_bindings::virtio_scsi::{VIRTIO_SCSI_F_CHANGE, VIRTIO_SCSI_F_HOTPLUG};
use virtqueue::{DirtyLog, GuestMemory, InflightRegion};

use crate::disk::Disk;
use crate::failure::Failure;
use crate::front_end::{Event, FrontEnd};
use crate::guest::Guest;
use crate::guest::ring::first_base;
use crate::plan::Plan;
use crate::rng::Rng;
use crate::world::World;
use waits::WaitingChain;

/// The state of a queue. With a front-end, a session starts and stops the queues and keeps the
/// inner values.
enum QueueState {
    /// At this base.
    Stopped(u32),
    Starting(Option<oneshot::Receiver<Result<QueueHandle, StartError>>>),
    Running(Option<QueueHandle>),
    Stopping(Option<oneshot::Receiver<u32>>),
}

/// A change to one running device, or to all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// A queue stops, and starts again later.
    Stop,
    /// All queues stop and continue in another map of the memory.
    Remap,
    /// The front-end goes: all queues stop and the device is reset.
    Reset,
    /// A call eventfd is replaced.
    SetCall,
    /// The driver switches the write cache.
    Writeback,
    /// A migration begins.
    Migrate,
    /// The log of a migration is replaced.
    ReplaceLog,
    /// A migration fails, or all queues stop and continue on the copy of the memory.
    EndMigration,
    /// A unit is removed, or added again.
    Hotplug,
    /// A disk gets another size.
    Resize,
    /// The machine loses power.
    Crash,
    /// The IoThreads end, and new ones start.
    Kill,
    /// The daemon dies at an arbitrary point.
    Die,
}

impl Change {
    /// True if the change concerns all devices.
    pub(crate) fn is_of_all(self) -> bool {
        matches!(self, Self::Crash | Self::Kill | Self::Die)
    }
}

pub(crate) struct Export {
    plan: Plan,
    /// Number of the export.
    index: usize,
    world: Rc<World>,
    pub(crate) guest: Rc<Guest>,
    disks: Vec<Rc<Disk>>,
    device: Device,
    memory: Arc<GuestMemory>,
    /// The daemon's map of the inflight region. A session has its own.
    region: Option<InflightRegion>,
    queue_states: Vec<QueueState>,
    /// The front-end that controls the device, if it is not controlled directly.
    pub(crate) front_end: Option<FrontEnd>,
    /// The IoThread of each queue, and the chain that waits there.
    places: Vec<(usize, Option<WaitingChain>)>,
    /// Without a session: the daemon's map of the log of a migration.
    log: Option<Arc<DirtyLog>>,
    /// Answers of queues that are about to take that log.
    new_logs: Vec<oneshot::Receiver<()>>,
    /// The log has changed, and queues may use another one.
    changes_log: bool,
    /// Removed units, until their disks are unused.
    removed: Vec<RemovedUnit>,
    /// A change to make once all queues have stopped.
    waiting: Option<Change>,
    /// All queues must stay stopped.
    ending: bool,
}

impl Export {
    /// Export number `index` with its plan.
    pub(crate) fn new(plan: &Plan, world: &Rc<World>, index: usize, disks: &[Rc<Disk>]) -> Self {
        let guest = Rc::new(Guest::new(plan, world, index, disks));
        let mut export = Self {
            plan: plan.clone(),
            index,
            world: Rc::clone(world),
            device: units::device(plan, index, disks),
            disks: disks.to_vec(),
            memory: Arc::new(guest.layout().map()),
            region: None,
            guest,
            queue_states: stopped(plan),
            places: places(plan),
            log: None,
            new_logs: Vec::new(),
            changes_log: false,
            removed: Vec::new(),
            waiting: None,
            ending: false,
            front_end: None,
        };
        if plan.scsi > 0 {
            export.guest.units_begin();
        }
        if plan.session > 0 {
            let Self { guest, device, .. } = &export;
            let features = export.features();
            let front_end = FrontEnd::new(plan, world, guest, index, device, features);
            export.front_end = Some(front_end);
        } else {
            export.begin_directly();
        }
        export
    }

    pub(crate) fn trace(&self, what: impl FnOnce() -> String) {
        self.world.trace(|| format!("control: device {}: {}", self.index, what()));
    }

    /// The features that the driver negotiates.
    fn features(&self) -> u64 {
        let (is_blk, no_events) = (self.plan.scsi == 0, self.plan.no_events > 0);
        let left_out = [
            (F_EVENT_IDX, self.plan.event_idx == 0),
            (F_INDIRECT_DESC, self.plan.indirect == 0),
            (device::blk::config::F_RING_PACKED, self.plan.packed == 0),
            (F_FLUSH, is_blk && self.plan.no_flush > 0),
            (F_CONFIG_WCE, is_blk && self.plan.no_wce > 0),
            (VIRTIO_SCSI_F_HOTPLUG, !is_blk && no_events),
            (VIRTIO_SCSI_F_CHANGE, !is_blk && no_events),
        ];
        let left_out = left_out.iter().filter(|(_, is_out)| *is_out);
        left_out.fold(self.device.features(), |all, (feature, _)| all & !(1 << feature))
    }

    /// Negotiates like a driver before its queues start.
    fn negotiate(&self) {
        let features = self.features();
        self.device.set_features(features).expect("only what is offered is negotiated");
        self.note_write_through();
    }

    /// Sets if the guest may expect its writes on stable storage at their answer.
    fn note_write_through(&self) {
        let plan = &self.plan;
        if plan.scsi > 0 {
            // Units have their own caches.
            return;
        }
        let cached = if plan.no_wce == 0 {
            self.device.config_space()[WRITEBACK_OFFSET] == 1
        } else {
            plan.no_flush == 0 && plan.no_write_cache == 0
        };
        self.disks[0].set_write_through(!cached);
    }

    /// Takes the answers that IoThreads have given since the last call.
    pub(crate) fn advance(&mut self) -> Result<(), Failure> {
        for index in 0..self.queue_states.len() {
            let next = match &self.queue_states[index] {
                QueueState::Starting(Some(pending)) => pending.poll().map(|started| {
                    let handle = started.map_err(|e| Failure::new("no start", e.to_string()))?;
                    self.trace(|| format!("queue {index} runs"));
                    self.guest.set_running(index, true);
                    Ok(QueueState::Running(Some(handle)))
                }),
                QueueState::Stopping(Some(pending)) => pending.poll().map(|base| {
                    self.trace(|| format!("queue {index} stopped at {base:#x}"));
                    self.guest.set_stopped(index);
                    self.guest.note_marked(index);
                    let left = self.guest.marked(index);
                    let expected = self.guest.base(index, &left);
                    if base != expected {
                        let text = format!(
                            "queue {index} stopped at {base:#x} and not {expected:#x}; it has left \
                             {left:?}"
                        );
                        return Err(Failure::new("bad stop", text));
                    }
                    Ok(QueueState::Stopped(base))
                }),
                _ => None,
            };
            if let Some(next) = next {
                self.queue_states[index] = next?;
            }
        }
        self.take_events()?;
        self.advance_log();
        self.close_unused();
        match self.waiting {
            Some(change) if self.is_stopped() => {
                self.waiting = None;
                self.change_stopped(change)
            }
            _ => Ok(()),
        }
    }

    /// Takes the results of the front-end's messages.
    fn take_events(&mut self) -> Result<(), Failure> {
        let Some(front_end) = &mut self.front_end else { return Ok(()) };
        for event in front_end.take_events() {
            match event {
                Event::Started(queue) => self.queue_states[queue] = QueueState::Running(None),
                Event::Stopped(queue, base) => {
                    self.queue_states[queue] = QueueState::Stopped(base);
                }
                Event::AllStopped => {
                    for (queue, state) in self.queue_states.iter_mut().enumerate() {
                        *state = QueueState::Stopped(self.guest.base(queue, &[]));
                    }
                    self.switch_over_session()?;
                }
                Event::Cached(is_cached) => self.disks[0].set_write_through(!is_cached),
            }
        }
        Ok(())
    }

    pub(crate) fn is_stopped(&self) -> bool {
        let is_connected = self.front_end.as_ref().is_some_and(|f| !f.is_disconnected());
        !is_connected && self.queue_states.iter().all(|s| matches!(s, QueueState::Stopped(_)))
    }

    /// True if no queue is between two states, and no change waits for that.
    pub(crate) fn is_settled(&self) -> bool {
        let on_the_way =
            |s: &QueueState| matches!(s, QueueState::Starting(_) | QueueState::Stopping(_));
        let is_idle = self.front_end.as_ref().is_none_or(FrontEnd::is_idle);
        is_idle
            && !self.changes_log
            && self.waiting.is_none()
            && !self.queue_states.iter().any(on_the_way)
    }

    /// Queues that can be started.
    pub(crate) fn startable(&self) -> impl Iterator<Item = usize> {
        let is_open = self.waiting.is_none()
            && !self.ending
            && self.front_end.as_ref().is_none_or(FrontEnd::is_open);
        let stopped = move |s: &QueueState| is_open && matches!(s, QueueState::Stopped(_));
        let queues = self.queue_states.iter().enumerate().filter(move |(_, s)| stopped(s));
        queues.map(|(index, _)| index)
    }

    /// Starts a queue on IoThread number `place`, behind `thread`.
    pub(crate) fn start(&mut self, queue: usize, thread: &Remote, place: usize) {
        let QueueState::Stopped(base) = self.queue_states[queue] else { return };
        if let Some(front_end) = &mut self.front_end {
            front_end.start(queue, base);
            self.queue_states[queue] = QueueState::Starting(None);
            return;
        }
        let (kick, call) = self.guest.eventfds(queue);
        let setup = QueueSetup {
            memory: Arc::clone(&self.memory),
            ring: self.guest.ring(queue, base),
            inflight: self.region.as_ref().map(|region| {
                region
                    .queue(number(queue), self.plan.layout())
                    .expect("the region has an account for each queue")
            }),
            region_is_own: false,
            kick,
            call,
            err: None,
            log: self.queue_log(queue),
        };
        self.places[queue] = (place, None);
        self.guest.set_starting(queue);
        let started = self.device.begin_start_queue(number(queue), thread, setup);
        self.queue_states[queue] = QueueState::Starting(Some(started));
    }

    /// The kind of stop for a queue that will start again.
    fn stop_kind(&self, rng: &mut Rng) -> StopKind {
        match self.region {
            None => rng.pick(&[StopKind::Final, StopKind::Pause]),
            Some(_) => rng.pick(&[StopKind::Final, StopKind::Pause, StopKind::KeepInflight]),
        }
    }

    fn stop(&mut self, queue: usize, kind: StopKind) {
        self.guest.set_running(queue, false);
        let state = &mut self.queue_states[queue];
        *state = match std::mem::replace(state, QueueState::Stopped(0)) {
            QueueState::Running(handle) => {
                QueueState::Stopping(handle.map(|handle| handle.begin_stop(kind)))
            }
            other => other,
        };
    }

    /// Stops all queues for good.
    pub(crate) fn stop_all(&mut self) {
        self.ending = true;
        self.guest.end_rush();
        if let Some(front_end) = &mut self.front_end {
            front_end.close();
        }
        (0..self.queue_states.len()).for_each(|queue| self.stop(queue, StopKind::Final));
    }

    fn running(&self) -> Vec<usize> {
        let queue_states = self.queue_states.iter().enumerate();
        let running = queue_states.filter(|(_, state)| matches!(state, QueueState::Running(_)));
        running.map(|(index, _)| index).collect()
    }

    pub(crate) fn can_change(&self, change: Change) -> bool {
        match change {
            Change::Crash | Change::Kill | Change::Die => !self.ending,
            Change::Writeback => {
                let is_heard = |f: &FrontEnd| f.is_open() && f.has_protocol();
                self.plan.no_wce == 0 && self.front_end.as_ref().is_none_or(is_heard)
            }
            Change::Hotplug | Change::Resize => !self.ending && self.plan.scsi > 0,
            Change::Stop | Change::SetCall => !self.ending && !self.running().is_empty(),
            Change::Migrate | Change::ReplaceLog | Change::EndMigration => self.can_migrate(change),
            Change::Remap | Change::Reset => {
                !self.ending && self.is_settled() && !self.running().is_empty()
            }
        }
    }

    /// Makes a change to this device.
    pub(crate) fn change(&mut self, change: Change, rng: &mut Rng) -> Result<(), Failure> {
        self.trace(|| format!("{change:?}"));
        if matches!(change, Change::Migrate | Change::ReplaceLog | Change::EndMigration) {
            return self.migrate(change, rng);
        }
        if self.front_end.is_some() {
            self.change_over_session(change, rng);
            return Ok(());
        }
        match change {
            Change::Stop => {
                let kind = self.stop_kind(rng);
                self.stop(rng.pick(&self.running()), kind);
            }
            Change::SetCall => {
                let queue = rng.pick(&self.running());
                let call = self.guest.replace_call(queue);
                if let QueueState::Running(Some(handle)) = &self.queue_states[queue] {
                    handle.set_call(call);
                }
            }
            Change::Writeback => {
                let value = rng.next().to_le_bytes()[0] & 1;
                // The guest may not rely on the new value before the device has taken it.
                self.disks[0].set_write_through(false);
                let written = self.device.write_config(WRITEBACK_OFFSET, &[value]);
                written.map_err(|error| Failure::new("config", error.to_string()))?;
                self.note_write_through();
            }
            Change::Remap | Change::Reset => {
                let kind = match change {
                    Change::Remap => self.stop_kind(rng),
                    _ => StopKind::Final,
                };
                (0..self.queue_states.len()).for_each(|queue| self.stop(queue, kind));
                self.waiting = Some(change);
            }
            Change::Hotplug => self.plug(rng),
            _ => {}
        }
        Ok(())
    }

    /// Makes a change through the front-end.
    fn change_over_session(&mut self, change: Change, rng: &mut Rng) {
        let running = self.running();
        let Some(front_end) = &mut self.front_end else { return };
        match change {
            Change::Stop => {
                let queue = rng.pick(&running);
                front_end.stop(queue);
                self.queue_states[queue] = QueueState::Stopping(None);
            }
            Change::SetCall => front_end.replace_eventfd(rng.pick(&running)),
            Change::Writeback => {
                // The guest may not rely on the new value before the device has taken it.
                self.disks[0].set_write_through(false);
                front_end.write_cache(rng.next().to_le_bytes()[0] & 1);
            }
            Change::Remap => front_end.remap(),
            Change::Reset => {
                self.disks[0].set_write_through(false);
                front_end.reset();
                self.queue_states.iter_mut().for_each(|state| *state = QueueState::Stopping(None));
            }
            _ => {}
        }
    }

    /// Makes a change for which all queues have stopped.
    fn change_stopped(&mut self, change: Change) -> Result<(), Failure> {
        self.check_memory()?;
        if change == Change::EndMigration {
            return self.switch_directly();
        }
        if change == Change::Reset {
            self.device.reset();
            if self.plan.scsi > 0 {
                self.guest.was_reset();
            }
            self.negotiate();
        }
        self.memory = Arc::new(self.guest.layout().map());
        self.trace(|| "a new memory map".to_owned());
        Ok(())
    }

    /// A number that changes when requests are answered.
    pub(crate) fn answered(&self) -> u64 {
        (0..self.places.len()).map(|queue| u64::from(self.guest.used_place(queue))).sum()
    }

    /// Checks that the memory map is unused while no queue runs.
    pub(crate) fn check_memory(&self) -> Result<(), Failure> {
        if let Some(front_end) = &self.front_end {
            front_end.check_memory()?;
        }
        match Arc::strong_count(&self.memory) {
            1 => Ok(()),
            count => {
                let text = format!("{} references to a memory map that nobody uses", count - 1);
                Err(Failure::new("leak", text))
            }
        }
    }

    pub(crate) fn describe(&self) -> String {
        let mut text = self.guest.describe_outstanding();
        for (index, state) in self.queue_states.iter().enumerate() {
            let state = match state {
                QueueState::Stopped(_) => "stopped",
                QueueState::Starting(_) => "starting",
                QueueState::Running(_) => "running",
                QueueState::Stopping(_) => "stopping",
            };
            text += &format!("\n  queue {index} is {state}");
        }
        text
    }
}

/// The number of a queue as its device counts.
fn number(queue: usize) -> u16 {
    u16::try_from(queue).expect("plans have a few queues")
}

fn stopped(plan: &Plan) -> Vec<QueueState> {
    (0..plan.queue_count()).map(|_| QueueState::Stopped(first_base(plan))).collect()
}

fn places(plan: &Plan) -> Vec<(usize, Option<WaitingChain>)> {
    (0..plan.queue_count()).map(|_| (0, None)).collect()
}
