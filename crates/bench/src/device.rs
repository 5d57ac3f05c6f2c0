//! The device behind a socket: its properties and its virtqueues.

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use iomem::fits;

use crate::args::DeviceKind;
use crate::blk;
use crate::driver::{Eventfds, Layout, Virtqueue};
use crate::memory::SharedMemory;
use crate::plan::{DeviceInfo, QueueShape, UnitInfo};
use crate::probe;
use crate::quantities::LunChoice;
use crate::requests::RequestKind;
use crate::ring::DriverRing;
use crate::scsi;
use crate::scsi::lun::Unit;
use crate::vhost_user::{Connection, Options, feature};

/// A connected device without queues.
pub(crate) struct Device {
    connection: Arc<Connection>,
    requests: RequestKind,
    info: DeviceInfo,
}

impl Device {
    /// Connects and negotiates features. Like all methods, blocks while the server does not answer.
    pub(crate) fn connect(path: &Path, kind: DeviceKind, options: Options) -> io::Result<Self> {
        let own_features = match kind {
            DeviceKind::Blk => blk::FEATURES,
            DeviceKind::Scsi => 0,
        };
        let packed = if options.packed { feature::RING_PACKED } else { 0 };
        let indirect = if options.indirect { feature::INDIRECT_DESC } else { 0 };
        let wanted = feature::VERSION_1 | feature::EVENT_IDX | packed | indirect | own_features;
        let connection = Arc::new(Connection::open(path, wanted, options)?);
        let (requests, info) = match kind {
            DeviceKind::Blk => (RequestKind::Blk, blk::read_info(&connection)?),
            DeviceKind::Scsi => (RequestKind::Scsi([].into()), scsi::read_info(&connection)?),
        };
        Ok(Self { connection, requests, info })
    }

    pub(crate) fn info(&self) -> &DeviceInfo {
        &self.info
    }

    pub(crate) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Finds the units, on temporary queues: the size of the queues of the run depends on the
    /// units.
    pub(crate) fn find_units(mut self, choice: LunChoice) -> io::Result<Self> {
        if self.info.max_queues == 0 {
            return Err(io::Error::other("it has no request queue; is it a SCSI device?"));
        }
        let mut queues = self.start_queues(&probe::SHAPE)?;
        let units = match queues.first_mut() {
            Some(queue) => probe::find_units(queue, choice)?,
            None => Vec::new(),
        };
        let rings = self.requests.first_queue() + queues.len();
        (0..rings).try_for_each(|index| self.connection.stop_queue(ring_number(index)))?;
        self.info.units = units.iter().map(unit_info).collect();
        self.requests = RequestKind::Scsi(units.into());
        Ok(self)
    }

    /// Shares memory with the server, starts the queues, and makes the units ready.
    pub(crate) fn start(&self, shape: &QueueShape) -> io::Result<Vec<Virtqueue>> {
        let mut queues = self.start_queues(shape)?;
        if let (RequestKind::Scsi(units), Some(queue)) = (&self.requests, queues.first_mut()) {
            probe::make_ready(queue, units)?;
        }
        Ok(queues)
    }

    /// Starts the request queues and the unused queues before them, which a server may insist on.
    fn start_queues(&self, shape: &QueueShape) -> io::Result<Vec<Virtqueue>> {
        let first = self.requests.first_queue();
        let rings = first + shape.queues;
        let layout = Layout::new(rings, shape, &self.requests.layout())?;
        let memory = Arc::new(SharedMemory::new(layout.bytes)?);
        self.connection.share(&memory)?;
        self.connection.share_inflight(rings, shape.size)?;
        let event_idx = self.connection.features() & feature::EVENT_IDX != 0;
        let indirect = self.connection.features() & feature::INDIRECT_DESC != 0;
        let is_packed = self.connection.is_packed();
        let mut queues = Vec::new();
        for index in 0..rings {
            let config = layout.ring(index, &memory, is_packed, (event_idx, indirect));
            let memory_of_ring = Arc::clone(&memory);
            let of_slot = if indirect { 1 } else { shape.descriptors };
            let ring = DriverRing::new(memory_of_ring, config, is_packed, of_slot);
            let eventfds = Eventfds::new()?;
            let both = (eventfds.kick.as_fd(), eventfds.call.as_fd());
            self.connection.start_queue(ring_number(index), ring.config(), &memory, both)?;
            if let Some(index) = index.checked_sub(first) {
                let (requests, connection) = (self.requests.clone(), Arc::clone(&self.connection));
                let places = (&layout, shape);
                queues.push(Virtqueue::new(index, ring, places, requests, eventfds, connection));
            }
        }
        Ok(queues)
    }
}

fn unit_info(unit: &Unit) -> UnitInfo {
    UnitInfo {
        name: format!("unit {}", unit.address),
        disk_bytes: unit.blocks << unit.block_shift,
        logical_block_bytes: unit.block_bytes(),
        read_only: unit.read_only,
    }
}

fn ring_number(index: usize) -> u32 {
    fits(index, "the number of a queue")
}
