//! The device behind a socket: what it says about itself, and its virtqueues.

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use iomem::fits;
use virtqueue::driver::Ring;

use crate::blk;
use crate::driver::{Eventfds, Layout, Virtqueue};
use crate::memory::SharedMemory;
use crate::plan::{DeviceFacts, QueueShape};
use crate::requests::Requests;
use crate::vhost_user::{Connection, feature};

/// A connected device without queues.
pub(crate) struct Device {
    connection: Arc<Connection>,
    requests: Requests,
    facts: DeviceFacts,
}

impl Device {
    /// Connects and negotiates features. Blocks for as long as the server does not answer, as all
    /// methods do.
    pub(crate) fn connect(path: &Path) -> io::Result<Self> {
        let wanted = feature::VERSION_1 | feature::EVENT_IDX | blk::FEATURES;
        let connection = Arc::new(Connection::open(path, wanted)?);
        let facts = blk::facts(&connection)?;
        Ok(Self { connection, requests: Requests::Blk, facts })
    }

    pub(crate) fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    pub(crate) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Shares memory with the server and starts the queues.
    pub(crate) fn start(&self, shape: &QueueShape) -> io::Result<Vec<Virtqueue>> {
        let layout = Layout::new(shape.queues, shape, &self.requests.form())?;
        let memory = Arc::new(SharedMemory::new(layout.bytes)?);
        self.connection.share(&memory)?;
        let event_idx = self.connection.features() & feature::EVENT_IDX != 0;
        let make = |index| {
            let ring = Ring::new(Arc::clone(&memory), layout.ring(index, &memory, event_idx));
            let eventfds = Eventfds::new()?;
            let both = (eventfds.kick.as_fd(), eventfds.call.as_fd());
            let number = fits(index, "the number of a queue");
            self.connection.start_queue(number, &ring.config, &memory, both)?;
            let (requests, connection) = (self.requests.clone(), Arc::clone(&self.connection));
            Ok(Virtqueue::new(index, ring, (&layout, shape), requests, eventfds, connection))
        };
        (0..shape.queues).map(make).collect()
    }
}
