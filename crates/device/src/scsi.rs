//! virtio-scsi (virtio 1.3, section 5.6): the logical units of a device, its negotiated state and
//! its configuration space.

use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Waker};
use std::time::Instant;

use blockio::{DiskSource, Io};
use virtqueue::AnswerPlace;

use crate::access::sense::Sense;
use crate::access::task_set::{TaskId, TaskSelector, Treatment, WaitGroup};
use crate::access::{DiskAccess, Peer};
use crate::device_core::DeviceCore;
use crate::events::Events;
use crate::queue::Queue;
use crate::unit_address::{LUN_MAX, UnitAddress, UnitNumber};
use config::{FIRST_REQUEST_QUEUE, ScsiOptions};
use event_queue::EventSink;
use held::HeldCommands;
use request_queue::{RequestQueue, RequestQueues};
use unit::{Attentions, Unit, UnitOptions};
use units::{AddUnitError, Units};

pub(crate) mod answer;
pub(crate) mod block;
pub(crate) mod cdb;
pub mod config;
pub(crate) mod control_queue;
pub(crate) mod event_queue;
pub(crate) mod held;
mod inquiry;
pub(crate) mod mode;
pub(crate) mod outcome;
pub(crate) mod report;
pub(crate) mod request;
pub(crate) mod request_queue;
pub(crate) mod reserve;
pub(crate) mod task_wait;
pub mod unit;
pub(crate) mod units;
pub(crate) mod unmap;
pub(crate) mod verify;

/// A virtio-scsi device: its own state, and the state common to devices of all kinds.
#[derive(Clone)]
pub struct ScsiDevice {
    shared: Arc<ScsiState>,
}

struct ScsiState {
    core: DeviceCore,
    options: ScsiOptions,
    units: Arc<Units>,
    /// `sense_size` and `cdb_size` of the configuration space.
    sizes: [AtomicU32; 2],
    queues: Arc<RequestQueues>,
    /// Commands that wait for units to be added.
    held: HeldCommands,
    events: EventSink,
}

/// A logical unit that cannot be added.
#[derive(Debug, thiserror::Error)]
pub enum UnitError {
    /// The address is taken.
    #[error("the device already has a unit {0}; choose another number or remove that unit first")]
    Exists(UnitAddress),
    /// The number is too high.
    #[error("there is no LUN {0}; LUNs are 0 to {LUN_MAX}")]
    Number(u16),
    /// The unit's port is attached to the disk by another export.
    #[error("{0}")]
    Port(String),
    /// Initiators would take two disks for one, and write the data of one to the second.
    #[error("unit {0} has the same WWN on another disk; give each disk its own WWN")]
    SameName(UnitAddress),
    /// A text is too long, or not printable ASCII.
    #[error("the {0}")]
    Text(String),
}

impl ScsiDevice {
    pub(crate) fn new(options: ScsiOptions, events: Arc<dyn Events>) -> Self {
        let shared = ScsiState {
            core: DeviceCore::new(options.tuning, false, AnswerPlace::Front, events),
            options,
            units: Arc::default(),
            sizes: [config::SENSE_SIZE.into(), config::CDB_SIZE.into()],
            queues: Arc::default(),
            held: HeldCommands::default(),
            events: EventSink::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Adds a logical unit. A driver that has negotiated HOTPLUG is notified.
    ///
    /// # Errors
    ///
    /// If the LUN is too high, the address or the port is taken, another disk has the unit's name,
    /// or a text does not fit.
    pub fn add_unit(
        &self,
        address: UnitAddress,
        source: DiskSource,
        options: UnitOptions,
    ) -> Result<(), UnitError> {
        if address.lun > LUN_MAX {
            return Err(UnitError::Number(address.lun));
        }
        options.check().map_err(UnitError::Text)?;
        let unit = Unit::new(address, source, options);
        let unit = Arc::new(unit.map_err(|error| UnitError::Port(error.to_string()))?);
        let peer = Arc::new(UnitPeer {
            address,
            number: unit.number,
            attentions: Arc::downgrade(&unit.attentions),
            queues: Arc::downgrade(&self.shared.queues),
            device: Arc::downgrade(&self.shared),
        });
        // Before the unit has commands: a command that excludes all other commands must find them.
        unit.access.add_peer(unit.attached.nexus(), peer);
        let has_others = self.shared.units.add(unit).map_err(|why| match why {
            AddUnitError::Taken => UnitError::Exists(address),
            AddUnitError::SameName(other) => UnitError::SameName(other),
        })?;
        if !self.shared.held.is_empty() {
            self.shared.queues.wake_held();
        }
        // Linux adds no unit of an unknown target. When notified about LUN 0, it asks the target
        // for all of its units.
        let lun = if has_others { address.lun } else { 0 };
        self.notify_driver(|| self.shared.events.rescan(UnitAddress { lun, ..address }));
        Ok(())
    }

    /// Removes a logical unit. Requests in progress are finished; later ones find no unit. `None`
    /// if there was none.
    #[must_use]
    pub fn remove_unit(&self, address: UnitAddress) -> Option<RemovedUnit> {
        let (unit, borrowed) = self.shared.units.remove(address)?;
        let used = self.shared.queues.release(unit.number);
        self.notify_driver(|| self.shared.events.removed(address));
        Some(RemovedUnit { unit, uses: [used, borrowed] })
    }

    /// The state that a unit shares with other devices on its disk. `None` if there is no unit.
    pub fn access(&self, address: UnitAddress) -> Option<Arc<DiskAccess>> {
        self.units().with_unit(address, |unit| Arc::clone(&unit.access))
    }

    /// The missing units that requests of an earlier process wait for, each with its number of
    /// requests.
    pub fn held_requests(&self) -> Vec<(UnitAddress, usize)> {
        self.shared.held.all()
    }

    /// True if commands of an earlier process may wait for units that are not there.
    fn holds_commands(&self) -> bool {
        self.shared.options.holds_commands
    }

    fn held(&self) -> &HeldCommands {
        &self.shared.held
    }

    fn notify_driver(&self, event: impl FnOnce()) {
        if self.core().has(config::F_HOTPLUG) {
            event();
        }
    }

    /// The logical units.
    pub(crate) fn units(&self) -> &Units {
        &self.shared.units
    }

    /// Starts a request queue on this IoThread.
    fn start_queue(&self, index: u16, io: &Rc<Io>, queue: &Rc<Queue>) -> Rc<RequestQueue> {
        self.shared.queues.start(index, io, queue, Arc::clone(&self.shared.units))
    }

    fn queues(&self) -> &RequestQueues {
        &self.shared.queues
    }

    pub(crate) fn events(&self) -> &EventSink {
        &self.shared.events
    }

    pub(crate) fn core(&self) -> &DeviceCore {
        &self.shared.core
    }

    /// True if one of the disks matches.
    pub(crate) fn has_disk(&self, is_one: impl Fn(&DiskSource) -> bool) -> bool {
        self.units().with_all(|mut all| all.any(|unit| is_one(&unit.source)))
    }

    pub(crate) fn stalled_since(&self) -> Option<Instant> {
        self.units().with_all(|all| all.filter_map(|unit| unit.source.stalled_since()).min())
    }

    pub(crate) fn num_queues(&self) -> u16 {
        FIRST_REQUEST_QUEUE + self.shared.options.num_queues
    }

    pub(crate) fn features(&self) -> u64 {
        config::features()
    }

    /// Reacts to the negotiation of `features`, after the same or another driver had negotiated
    /// `before`.
    pub(crate) fn negotiated(&self, before: u64, features: u64) {
        if before != 0 && before != features {
            self.reset();
        }
    }

    /// Restores the negotiated sizes from an earlier configuration space.
    pub(crate) fn restore(&self, space: &[u8]) {
        for (field, size) in config::SIZE_FIELDS.into_iter().zip(&self.shared.sizes) {
            if let Some(bytes) = space.get(field).and_then(|bytes| bytes.try_into().ok()) {
                size.store(u32::from_le_bytes(bytes), Ordering::Relaxed);
            }
        }
    }

    /// Prepares for another driver, for which a new nexus begins at each unit.
    pub(crate) fn reset(&self) {
        self.shared.events.clear();
        self.shared.sizes[0].store(config::SENSE_SIZE, Ordering::Relaxed);
        self.shared.sizes[1].store(config::CDB_SIZE, Ordering::Relaxed);
        self.units().with_all(|all| all.for_each(|unit| unit.restart()));
    }

    pub(crate) fn config_space(&self) -> Vec<u8> {
        config::space(&self.shared.options, self.sense_size(), self.cdb_size())
    }

    /// Takes a write to `sense_size` or `cdb_size`.
    ///
    /// # Errors
    ///
    /// If the write is to another field or a part of one, or the size is too large.
    pub(crate) fn write_config(&self, offset: usize, data: &[u8]) -> io::Result<()> {
        let mut fields = config::SIZE_FIELDS.iter().zip(&self.shared.sizes);
        let field = fields.find(|(field, _)| field.start == offset);
        if let (Some((_, size)), Ok(bytes)) = (field, data.try_into()) {
            let value = u32::from_le_bytes(bytes);
            if value <= config::SIZES_MAX {
                size.store(value, Ordering::Relaxed);
                return Ok(());
            }
        }
        let text =
            format!("the driver wrote {data:x?} at offset {offset} of the configuration space");
        Err(io::Error::new(io::ErrorKind::InvalidInput, text))
    }

    #[inline]
    fn sense_size(&self) -> u32 {
        self.shared.sizes[0].load(Ordering::Relaxed)
    }

    #[inline]
    fn cdb_size(&self) -> u32 {
        self.shared.sizes[1].load(Ordering::Relaxed)
    }
}

/// A removed logical unit. Keeps the disk open while requests use it, so that no IoThread closes
/// it: a close waits for as long as the file system does.
pub struct RemovedUnit {
    unit: Arc<Unit>,
    /// Uses by requests, and by other threads.
    uses: [WaitGroup; 2],
}

impl RemovedUnit {
    /// True if the disk is unused, so that dropping this closes it, unless other devices use it.
    pub fn is_unused(&self) -> bool {
        let cx = Context::from_waker(Waker::noop());
        self.uses.iter().all(|used| used.poll(&cx).is_ready())
    }

    /// Waits until the disk is unused, and closes it. Then it can be opened again.
    pub fn close(self) {
        self.uses.iter().for_each(WaitGroup::wait);
        drop(self.unit);
    }
}

/// A unit of a device, as units of other devices reach it. IoThreads use it, so it keeps no disk
/// open.
struct UnitPeer {
    address: UnitAddress,
    number: UnitNumber,
    attentions: Weak<Attentions>,
    queues: Weak<RequestQueues>,
    device: Weak<ScsiState>,
}

impl Peer for UnitPeer {
    fn is_gone(&self) -> bool {
        self.attentions.strong_count() == 0
    }

    fn add_attention(&self, sense: Sense) {
        if let Some(attentions) = self.attentions.upgrade() {
            attentions.add(sense);
        }
    }

    fn cover(&self, treatment: Treatment, except: Option<TaskId>) -> Option<WaitGroup> {
        let unit = self.number;
        let selector = match (treatment, except) {
            // Chains that are not popped belong to the address, whichever unit is there later.
            (Treatment::Abort(_), None) => TaskSelector::At(self.address),
            (_, None) => TaskSelector::Unit(unit),
            (_, Some(task)) => TaskSelector::AllBut(unit, task),
        };
        Some(self.queues.upgrade()?.cover(selector, treatment))
    }

    fn cut_off(&self, size_bytes: u64) {
        let unit = self.device.upgrade().and_then(|device| device.units.borrow(self.address));
        if let Some(unit) = unit.filter(|unit| unit.number == self.number) {
            unit.source.cut_off(size_bytes);
        }
    }

    fn refresh(&self) {
        let Some(device) = self.device.upgrade() else { return };
        let unit = device.units.borrow(self.address);
        let Some(unit) = unit.filter(|unit| unit.number == self.number) else { return };
        // On failure the disk keeps its size.
        let _ = unit.source.refresh();
        unit.attentions.add(Sense::CAPACITY_CHANGED);
        if device.core.has(config::F_CHANGE) {
            device.events.capacity_changed(self.address);
        }
    }
}

#[cfg(test)]
mod tests;
