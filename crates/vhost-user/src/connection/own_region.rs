//! The daemon's own inflight region, for front-ends that keep none.
//!
//! It serves only the case that this process is killed and the next one continues the session. In
//! all other cases rings behave as without a region.

use std::io;
use std::sync::Arc;

use iomem::fits;
use virtqueue::{MAX_QUEUE_SIZE, RingLayout};

use super::Connection;
use crate::inflight::{self, Inflight};
use crate::message::{InflightArea, Region, protocol_feature};
use crate::peer_fds::PeerFd;
use crate::ring::invalid;
use crate::shared_memory::SharedMemory;

impl Connection {
    /// Makes a region before the state is kept with which a ring may start: the marks of its first
    /// requests must be found. A front-end that has negotiated a region of its own is about to send
    /// it.
    pub(crate) fn prepare_own_region(&mut self) {
        if self.protocol_features & protocol_feature::INFLIGHT_SHMFD == 0 && self.lacks_region() {
            // The start of a ring tries again, and reports the error.
            self.own_region = self.new_region().ok();
            self.own_region_is_new = true;
        }
    }

    /// Makes a region if `ring` may start without one.
    pub(super) fn make_own_region(&mut self, ring: usize) -> io::Result<()> {
        if self.lacks_region() && self.rings[ring].is_up() {
            self.own_region = Some(self.new_region()?);
            self.own_region_is_new = true;
        }
        Ok(())
    }

    /// Lets the front-end decide where a packed ring continues, now that it has stopped: the driver
    /// may have set it up again. The account of a split ring notices that by the used idx.
    pub(super) fn note_stale_account(&mut self, ring: usize) {
        self.rings[ring].has_stale_account =
            self.layout() == RingLayout::Packed && self.own_region.is_some();
    }

    /// Returns true if accounts are to be forgotten before a ring starts.
    pub(crate) fn has_stale_accounts(&self) -> bool {
        self.has_stale_accounts || self.rings.iter().any(|ring| ring.has_stale_account)
    }

    /// Lets the front-end decide where rings continue: those with a new base, or all, because its
    /// driver has reset the device. Descriptors of new packed rings may look like a later state of
    /// the old ones.
    ///
    /// The state is kept before: rings that ran in an earlier state would start at an old place
    /// without their accounts.
    pub(crate) fn forget_stale_accounts(&mut self) {
        let layout = self.layout();
        if std::mem::take(&mut self.has_stale_accounts) {
            let regions = self.inflight.iter().chain(&self.own_region);
            regions.for_each(|inflight| inflight.region.forget(layout));
        }
        for (index, ring) in self.rings.iter_mut().enumerate() {
            if std::mem::take(&mut ring.has_stale_account)
                && let Some(own) = &self.own_region
                && let Ok(account) = own.region.queue(fits(index, "the number of a queue"), layout)
            {
                account.forget();
            }
        }
    }

    fn lacks_region(&self) -> bool {
        self.keeps_own_region
            && self.inflight.is_none()
            && self.own_region.as_ref().is_none_or(|own| !own.region.has_room(self.layout()))
            && self.memory.map.num_regions() > 0
    }

    fn new_region(&self) -> io::Result<Inflight> {
        let device = &self.setup.device;
        let queues = fits(self.rings.len(), "the number of queues");
        // Rings may change their size later. Pages that no account uses take no memory.
        let queue_size = MAX_QUEUE_SIZE;
        let area = InflightArea { size: 0, file_offset: 0, queues, queue_size };
        let (area, file) = inflight::make(area, device)?;
        let region = Region { guest_addr: 0, size: area.size, user_addr: 0, file_offset: 0 };
        let file = PeerFd::new(file, Arc::clone(&self.setup.examiner));
        let memory = SharedMemory::map(None, &[region], vec![file], &self.setup.rules)?;
        Inflight::new(area, memory).map_err(|error| invalid(error.to_string()))
    }
}
