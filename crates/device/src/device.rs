//! A device of either kind: the handle of a session, an export or a VMM.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use blockio::thread::RegisteredMemory;
use blockio::{DiskSource, EngineKind, Io, Remote, oneshot};
use serde::{Deserialize, Serialize};
use virtqueue::RingLayout;

use crate::access::DiskAccess;
use crate::blk::BlkDevice;
use crate::blk::config::{self as blk_config, BlkOptions};
use crate::blk::request::Blk;
use crate::device_core::{DeviceCore, read_space, writable_parts};
use crate::events::Events;
use crate::queue::queue_setup::{QueueSetup, StartError};
use crate::queue::queue_task::{self, Handler};
use crate::queue::{Queue, QueueHandle};
use crate::scsi::ScsiDevice;
use crate::scsi::config::{self as scsi_config, FIRST_REQUEST_QUEUE, ScsiOptions};
use crate::scsi::control_queue::ControlHandler;
use crate::scsi::event_queue::EventQueue;
use crate::scsi::request::RequestHandler;
use crate::stats::{Peaks, QueueStats, RequestTotals};

/// The capacity, at the start of virtio-blk's configuration space (virtio 1.3, section 5.2.4).
const CAPACITY_BYTES: usize = 8;

/// A virtio device, shared by its queues and its controller. Clones are handles of the same device.
#[derive(Clone)]
pub enum Device {
    /// virtio-blk (virtio 1.3, section 5.2).
    Blk(BlkDevice),
    /// virtio-scsi (virtio 1.3, section 5.6).
    Scsi(ScsiDevice),
}

/// The purpose of a queue, which follows from its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueRole {
    /// Requests for the data of a disk.
    Request,
    /// Requests that control the device: the controlq of virtio-scsi.
    Control,
    /// Buffers for events. They go back to the driver when the queue stops.
    Event,
}

/// The features and the configuration space that a driver has negotiated and written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Negotiated {
    features: u64,
    space: Vec<u8>,
}

impl Negotiated {
    /// The features, as bits.
    pub fn features(&self) -> u64 {
        self.features
    }
}

impl Device {
    /// A virtio-blk device on a disk. `events` receives its failures.
    pub fn blk(source: DiskSource, options: BlkOptions, events: Arc<dyn Events>) -> Self {
        Self::blk_with_access(source, options, Arc::default(), events)
    }

    /// Like [`blk`](Self::blk), on a disk that logical units with the same `access` may share. The
    /// device obeys their persistent reservations and their commands that exclude all other
    /// requests.
    pub fn blk_with_access(
        source: DiskSource,
        options: BlkOptions,
        access: Arc<DiskAccess>,
        events: Arc<dyn Events>,
    ) -> Self {
        Self::Blk(BlkDevice::new(source, options, access, events))
    }

    /// A virtio-scsi device without logical units. `events` receives its failures.
    pub fn scsi(options: ScsiOptions, events: Arc<dyn Events>) -> Self {
        Self::Scsi(ScsiDevice::new(options, events))
    }

    /// The most queues that a driver may use.
    pub fn num_queues(&self) -> u16 {
        match self {
            Self::Blk(blk) => blk.num_queues(),
            Self::Scsi(scsi) => scsi.num_queues(),
        }
    }

    /// The purpose of queue `index`; `None` if the device has no such queue.
    pub fn queue_role(&self, index: u16) -> Option<QueueRole> {
        match self {
            Self::Blk(blk) => (index < blk.num_queues()).then_some(QueueRole::Request),
            Self::Scsi(scsi) => (index < scsi.num_queues()).then_some(match index {
                0 => QueueRole::Control,
                1 => QueueRole::Event,
                FIRST_REQUEST_QUEUE.. => QueueRole::Request,
            }),
        }
    }

    /// The features that the device offers: bits of virtio 1.3, section 6, and of the device's
    /// section.
    pub fn features(&self) -> u64 {
        match self {
            Self::Blk(blk) => blk.features(),
            Self::Scsi(scsi) => scsi.features(),
        }
    }

    /// The layout of the rings that the driver negotiated.
    pub fn layout(&self) -> RingLayout {
        self.core().layout()
    }

    /// Takes the features that the driver negotiated. Call it while no queue runs.
    ///
    /// Features that differ from the previous ones restore the initial configuration. The same
    /// features may come from the same driver, which continues after a pause and relies on its
    /// choices. A caller that knows that the driver is a new one calls [`reset`](Self::reset).
    ///
    /// # Errors
    ///
    /// When a bit was never offered.
    pub fn set_features(&self, features: u64) -> io::Result<()> {
        let unknown = features & !self.features();
        if unknown != 0 {
            let text = format!("the driver negotiated features that are not offered: {unknown:#x}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let before = self.core().set_features(features);
        match self {
            Self::Blk(blk) => blk.negotiated(before, features),
            Self::Scsi(scsi) => scsi.negotiated(before, features),
        }
        Ok(())
    }

    /// The features and choices of the driver so far.
    pub fn negotiated(&self) -> Negotiated {
        Negotiated { features: self.core().features(), space: self.config_space() }
    }

    /// Restores the state that [`negotiated`](Self::negotiated) returned. Call it while no queue
    /// runs.
    pub fn restore(&self, negotiated: &Negotiated) {
        self.core().set_features(negotiated.features);
        match self {
            Self::Blk(blk) => blk.restore(&negotiated.space),
            Self::Scsi(scsi) => scsi.restore(&negotiated.space),
        }
    }

    /// Takes over the features and choices that the driver negotiated with this device in another
    /// process. Call it while no queue runs. Returns true if the driver should read the
    /// configuration space again.
    ///
    /// # Errors
    ///
    /// When the driver relies on something that this device does not have. The device is then as
    /// after a [`reset`](Self::reset).
    pub fn take_over(&self, negotiated: &Negotiated) -> io::Result<bool> {
        // These first bytes may change under a driver.
        let changes = match self {
            Self::Blk(_) => CAPACITY_BYTES,
            Self::Scsi(_) => 0,
        };
        let taken = self.set_features(negotiated.features).and_then(|()| {
            let (_, fixed) = negotiated.space.split_at_checked(changes).unwrap_or_default();
            self.restore_config(changes, fixed)
        });
        taken.inspect_err(|_| self.reset())?;
        let space = self.config_space();
        Ok(!negotiated.space.starts_with(&space[..changes]))
    }

    /// Restores the state before any driver. Call it when a driver goes away.
    pub fn reset(&self) {
        self.core().set_features(0);
        match self {
            Self::Blk(blk) => blk.reset(),
            Self::Scsi(scsi) => scsi.reset(),
        }
    }

    /// The present configuration space, as long as the fields of the device.
    pub fn config_space(&self) -> Vec<u8> {
        match self {
            Self::Blk(blk) => blk.config_space(),
            Self::Scsi(scsi) => scsi.config_space(),
        }
    }

    /// Reads `len` bytes of the configuration space. Bytes beyond its end read as zeroes.
    pub fn read_config(&self, offset: usize, len: usize) -> Vec<u8> {
        read_space(&self.config_space(), offset, len)
    }

    /// Takes a write of the driver to the configuration space.
    ///
    /// # Errors
    ///
    /// When the driver cannot write this field.
    pub fn write_config(&self, offset: usize, data: &[u8]) -> io::Result<()> {
        match self {
            Self::Blk(blk) => blk.write_config(offset, data),
            Self::Scsi(scsi) => scsi.write_config(offset, data),
        }
    }

    /// Takes a part of the configuration space of another device, such as before a migration.
    /// Writable fields are written; all other fields must have the values that they have here.
    ///
    /// # Errors
    ///
    /// When a read-only field differs: the text names the field, its values here and there, and the
    /// setting or disk that both devices should share. Nothing is written then.
    pub fn restore_config(&self, offset: usize, data: &[u8]) -> io::Result<()> {
        let fields = match self {
            Self::Blk(_) => &blk_config::FIELDS[..],
            Self::Scsi(_) => &scsi_config::FIELDS,
        };
        let space = self.config_space();
        let parts = writable_parts(&space, fields, offset, data)?;
        parts.into_iter().try_for_each(|(offset, part)| self.write_config(offset, part))
    }

    /// Starts queue `index` on the IoThread behind `thread`. The queue must not run already. It is
    /// processed once unasked, and calls the driver once.
    ///
    /// # Errors
    ///
    /// When the device has no such queue, the ring violates the specification, or the IoThread has
    /// ended.
    pub fn start_queue(
        &self,
        index: u16,
        thread: &Remote,
        setup: QueueSetup,
    ) -> Result<QueueHandle, StartError> {
        self.begin_start_queue(index, thread, setup).wait().unwrap_or(Err(StartError::ThreadEnded))
    }

    /// Like [`start_queue`](Self::start_queue), for callers that must not block, such as a program
    /// that runs the IoThread's turns itself.
    #[must_use]
    pub fn begin_start_queue(
        &self,
        index: u16,
        thread: &Remote,
        setup: QueueSetup,
    ) -> oneshot::Receiver<Result<QueueHandle, StartError>> {
        let device = self.clone();
        thread.begin_call(move |io| device.start_here(index, io, setup))
    }

    /// Counters of queue `index`; `None` if it was never started.
    pub fn queue_stats(&self, index: u16) -> Option<Arc<QueueStats>> {
        self.core().queue_stats(index)
    }

    /// Counters of all queues together since the device was made, with those that were
    /// [added](Self::add_totals).
    pub fn totals(&self) -> RequestTotals {
        self.core().totals()
    }

    /// Adds the totals of the process from which this one has taken over.
    pub fn add_totals(&self, earlier: RequestTotals) {
        self.core().add_earlier(earlier);
    }

    /// Takes the greatest depth of a queue and the longest latencies since the last call. Several
    /// readers must share the result.
    #[must_use]
    pub fn take_peaks(&self) -> Peaks {
        self.core().take_peaks()
    }

    /// The moment since which the disk has not answered, if that is some seconds ago.
    pub fn stalled_since(&self) -> Option<Instant> {
        match self {
            Self::Blk(blk) => blk.stalled_since(),
            Self::Scsi(scsi) => scsi.stalled_since(),
        }
    }

    /// Starts a queue on this IoThread.
    fn start_here(
        &self,
        index: u16,
        io: &Rc<Io>,
        setup: QueueSetup,
    ) -> Result<QueueHandle, StartError> {
        let Some(role) = self.queue_role(index) else {
            return Err(StartError::NoSuchQueue { index, count: self.num_queues() });
        };
        let options = self.core().queue_options(index, role != QueueRole::Event);
        let (queue, handle) = Queue::new(setup, io, options)?;
        match (self, role) {
            (Self::Blk(blk), QueueRole::Request) => {
                blk.start_queue(index, io, &queue);
                self.spawn(io, queue, Rc::new(Blk::new(blk, io)));
            }
            (Self::Blk(_), _) => unreachable!("virtio-blk has no such queue"),
            (Self::Scsi(scsi), QueueRole::Request) => {
                let handler = RequestHandler::new(scsi, index, io, &queue);
                self.spawn(io, queue, Rc::new(handler));
            }
            (Self::Scsi(scsi), QueueRole::Control) => {
                self.spawn(io, queue, Rc::new(ControlHandler::new(scsi)));
            }
            (Self::Scsi(scsi), QueueRole::Event) => {
                let handler = EventQueue::start(scsi.events(), index, io, &queue);
                self.spawn(io, queue, handler);
            }
        }
        Ok(handle)
    }

    fn spawn(&self, io: &Rc<Io>, queue: Rc<Queue>, handler: Rc<impl Handler>) {
        let memory = self.register_memory(io, &queue);
        let task = queue_task::serve(Rc::clone(io), queue, handler);
        io.spawn(async move {
            let stopped = task.await;
            drop(memory);
            stopped.send();
        });
    }

    fn register_memory(&self, io: &Rc<Io>, queue: &Queue) -> Option<RegisteredMemory> {
        let core = self.core();
        if !core.tuning.fixed_buffers || !self.has_io_uring(io) {
            return None;
        }
        let registered = queue.register_memory(io);
        registered.inspect_err(|error| core.events.memory_not_registered(error)).ok()
    }

    /// True if the device's ops on this IoThread go through io_uring.
    fn has_io_uring(&self, io: &Io) -> bool {
        let is_one = |source: &DiskSource| source.engine_on(io) == Some(EngineKind::IoUring);
        match self {
            Self::Blk(blk) => is_one(blk.source()),
            Self::Scsi(scsi) => scsi.has_disk(is_one),
        }
    }

    pub(crate) fn core(&self) -> &DeviceCore {
        match self {
            Self::Blk(blk) => blk.core(),
            Self::Scsi(scsi) => scsi.core(),
        }
    }
}
