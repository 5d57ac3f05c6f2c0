//! The inflight region, which the front-end keeps and sends over each connection.

use vhost_user::message::{InflightArea, Request};

use super::{FrontEnd, OnReply};
use crate::inflight::Region;

impl FrontEnd {
    /// Sends the region, or asks for one if there is none.
    pub(super) fn send_region(&mut self) {
        if self.plan.inflight == 0 {
            return;
        }
        match self.guest.region() {
            None => {
                self.push(Request::GetInflightFd(Region::wanted(&self.plan)), OnReply::Region);
            }
            Some(region) => {
                let fds = vec![region.descriptor()];
                self.push_with(Request::SetInflightFd(region.area), fds, OnReply::HasRegion);
            }
        }
    }

    /// Takes the answer to `GetInflightFd`. Returns false if it is not valid.
    pub(super) fn take_region(&mut self, body: &[u8]) -> bool {
        let file = self.link.as_mut().and_then(|link| link.fds.pop());
        let (Some(area), Some(file)) = (InflightArea::decode(body), file) else { return false };
        let wanted = Region::wanted(&self.plan);
        if (InflightArea { size: 0, file_offset: 0, ..area }) != wanted {
            return false;
        }
        self.guest.set_region(Some(Region::from_parts(&self.plan, area, file)));
        self.send_region();
        true
    }

    /// Sometimes drops the region after all queues have stopped, so that the next connection asks
    /// for a new one.
    pub(super) fn may_drop_region(&mut self) {
        let has_left = (0..self.vrings.len()).any(|queue| !self.guest.marked(queue).is_empty());
        if self.plan.inflight > 0 && self.rng.chance(300) && !has_left {
            self.guest.set_region(None);
        }
    }

    /// Bytes of the pages of the region, if the session has it.
    pub(super) fn region_bytes(&self) -> u64 {
        let region = self.guest.region().filter(|_| self.has_region);
        region.map_or(0, |region| region.area.size.next_multiple_of(4096))
    }
}
