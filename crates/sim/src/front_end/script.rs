//! The messages that carry out a VMM's commands.

use std::os::fd::OwnedFd;

use device::blk::config::WRITEBACK_OFFSET;
use iomem::fits;
use vhost_user::PROTOCOL_FEATURES;
use vhost_user::message::{
    Config, F_LOG_ALL, F_PROTOCOL_FEATURES, Region, Request, RingAddresses, protocol_feature,
};

use super::{Disconnect, FrontEnd, OnReply, QueuedMessage};
use crate::guest::new_eventfd;

/// Possible addresses of the memory in the front-end's address space.
const USER_BASES: [u64; 2] = [0x5555_0000_0000, 0x7f00_0000_0000];
/// The most regions that a table message can carry.
const TABLE_MAX: usize = 120;
/// Offset of the device's registers in the configuration space of some front-ends.
const REGISTERS_OFFSET: usize = 0x100;

impl FrontEnd {
    /// True if rings have to be enabled, and messages may need protocol features.
    pub(crate) fn has_protocol(&self) -> bool {
        self.plan.session < 3 || self.guest.layout().regions().len() > TABLE_MAX
    }

    /// True if messages may ask for an answer.
    fn has_reply_ack(&self) -> bool {
        self.plan.session == 1
    }

    /// True if one message leaves waiting requests in the region, and GET_VRING_BASE leaves none.
    fn can_skip_drain(&self) -> bool {
        (self.plan.session + self.index as u64).is_multiple_of(2)
    }

    pub(super) fn push(&mut self, request: Request, then: OnReply) {
        self.push_with(request, Vec::new(), then);
    }

    pub(super) fn push_with(&mut self, request: Request, fds: Vec<OwnedFd>, then: OnReply) {
        let is_answered = super::has_answer(&request)
            || then == OnReply::Nothing
            || (self.has_reply_ack() && self.rng.chance(700));
        if is_answered {
            self.to_send.push_back(QueuedMessage { request, fds, then });
        } else {
            // Messages are carried out in order, so a later answer confirms this message.
            self.to_send.push_back(QueuedMessage { request, fds, then: OnReply::Nothing });
            let request = Request::GetFeatures;
            self.to_send.push_back(QueuedMessage { request, fds: Vec::new(), then });
        }
    }

    /// Sends the first messages of a connection.
    pub(super) fn set_up(&mut self) {
        self.user_base = self.rng.pick(&USER_BASES);
        let offered = OnReply::Number(self.device.features() | F_PROTOCOL_FEATURES | F_LOG_ALL);
        self.push(Request::GetFeatures, offered);
        if self.has_protocol() {
            let has = [
                (protocol_feature::REPLY_ACK, self.has_reply_ack()),
                (protocol_feature::GET_VRING_BASE_SKIP_DRAIN, self.can_skip_drain()),
            ];
            let left_out =
                has.iter().filter(|(_, has)| !has).map(|(feature, _)| feature).sum::<u64>();
            self.push(Request::GetProtocolFeatures, OnReply::Number(PROTOCOL_FEATURES));
            let features = Request::SetProtocolFeatures(PROTOCOL_FEATURES & !left_out);
            self.push(features, OnReply::Nothing);
            self.push(Request::GetQueueNum, OnReply::Number(self.vrings.len() as u64));
        }
        self.push(Request::SetOwner, OnReply::Nothing);
        if self.plan.packed > 0 {
            // The size of the region depends on the layout.
            self.negotiate();
        }
        self.send_region();
        let when = self.rng.below(3);
        if when == 0 {
            self.share_memory();
        }
        self.negotiate();
        if when == 1 {
            self.share_memory();
        }
        self.continue_log();
    }

    fn negotiate(&mut self) {
        self.push(Request::SetFeatures(self.all_features()), OnReply::Negotiated);
    }

    pub(super) fn all_features(&self) -> u64 {
        let logs = self.guest.with_log(|_| F_LOG_ALL).unwrap_or(0);
        self.features | logs | if self.has_protocol() { F_PROTOCOL_FEATURES } else { 0 }
    }

    fn regions(&self) -> Vec<Region> {
        let regions = self.guest.layout().regions().into_iter();
        let region = |(guest_addr, size, file_offset)| Region {
            guest_addr,
            size,
            user_addr: self.user_base + guest_addr,
            file_offset,
        };
        regions.map(region).collect()
    }

    fn add(&mut self, region: Region) {
        let fds = vec![self.guest.layout().descriptor()];
        self.push_with(Request::AddMemReg(region), fds, OnReply::Nothing);
    }

    fn remove(&mut self, region: Region) {
        self.push(Request::RemMemReg(region), OnReply::Nothing);
    }

    /// Shares the memory for the first time.
    pub(super) fn share_memory(&mut self) {
        self.is_memory_due = false;
        let regions = self.regions();
        if self.has_protocol() && (regions.len() > TABLE_MAX || self.rng.chance(400)) {
            // The first region has the rings, so queues may run once it is there.
            regions.into_iter().rev().for_each(|region| self.add(region));
        } else {
            self.push_table(regions);
        }
    }

    fn push_table(&mut self, regions: Vec<Region>) {
        let fds = regions.iter().map(|_| self.guest.layout().descriptor()).collect();
        self.push_with(Request::SetMemTable(regions), fds, OnReply::Nothing);
    }

    /// Replaces the map of the memory while queues run.
    pub(crate) fn remap(&mut self) {
        if self.is_memory_due {
            self.share_memory();
        }
        let regions = self.regions();
        let has_table = regions.len() <= TABLE_MAX;
        if !has_table || self.has_protocol() && self.rng.chance(400) {
            // The first region has the rings, so no queue runs without it.
            let others = self.rng.index(regions.len());
            regions.iter().take(1 + others).for_each(|region| self.remove(*region));
            regions.iter().take(1 + others).rev().for_each(|region| self.add(*region));
        } else {
            self.user_base = self.rng.pick(&USER_BASES);
            let regions = self.regions();
            self.push_table(regions);
            // The ring addresses stay the same if the base does.
            (0..self.vrings.len()).for_each(|queue| self.send_addresses(queue));
        }
        self.push(Request::GetFeatures, OnReply::Mapped);
    }

    fn send_addresses(&mut self, queue: usize) {
        let request = self.addresses(queue);
        self.push(request, OnReply::Nothing);
    }

    pub(super) fn addresses(&self, queue: usize) -> Request {
        let ring = self.guest.ring(queue, 0);
        let addresses = RingAddresses {
            desc_table: self.user_base + ring.desc_table,
            avail_ring: self.user_base + ring.avail_ring,
            used_ring: self.user_base + ring.used_ring,
        };
        let log = self.guest.with_log(|_| ring.used_ring);
        Request::SetVringAddr { index: number(queue), addresses, log }
    }

    /// Starts a queue that has stopped at this base.
    pub(crate) fn start(&mut self, queue: usize, base: u32) {
        self.send_no_ops();
        self.vrings[queue].runs = true;
        let index = number(queue);
        let enable = Request::SetVringEnable { index, value: 1 };
        if std::mem::take(&mut self.vrings[queue].is_paused) {
            self.push(enable, OnReply::Started(queue));
            return;
        }
        let is_moved = self.rng.chance(250);
        if is_moved {
            self.guest.move_rings(queue);
        }
        let ring = self.guest.ring(queue, base);
        let (kick, call) = self.guest.eventfds(queue);
        let ring_fds = fits(queue, "the number of a queue");
        let mut messages: Vec<(Request, Option<OwnedFd>)> = vec![
            (Request::SetVringNum { index, size: ring.size.into() }, None),
            (Request::SetVringCall { index: ring_fds, has_fd: call.is_some() }, call),
        ];
        if self.has_protocol() {
            messages.push((enable, None));
        }
        if self.rng.chance(500) {
            messages.push(self.new_err(queue));
        }
        // The place of the ring and the next avail entry must be known before the queue may run.
        // Until then the session has the old place.
        let mut first = vec![(Request::SetVringBase { index, base }, None)];
        let places = if is_moved { &mut first } else { &mut messages };
        places.push((self.addresses(queue), None));
        self.shuffle(&mut messages);
        // From its kick on a queue may run. A later message makes it stop and start once more.
        let kick = (Request::SetVringKick { index: ring_fds, has_fd: kick.is_some() }, kick);
        let at = self.rng.index(messages.len() + 1);
        messages.insert(at, kick);
        for message in first {
            let at = self.rng.index(at + 1);
            messages.insert(at, message);
        }
        for (request, fd) in messages {
            self.push_with(request, fd.into_iter().collect(), OnReply::Nothing);
        }
        if self.is_memory_due {
            self.share_memory();
        }
        self.push(Request::GetFeatures, OnReply::Started(queue));
    }

    fn shuffle<T>(&mut self, list: &mut [T]) {
        for at in 1..list.len() {
            let other = self.rng.index(at + 1);
            list.swap(at, other);
        }
    }

    fn new_err(&mut self, queue: usize) -> (Request, Option<OwnedFd>) {
        let err = new_eventfd();
        let index = fits(queue, "the number of a queue");
        let message =
            (Request::SetVringErr { index, has_fd: true }, crate::guest::duplicate(Some(&err)));
        self.vrings[queue].errs.push(err);
        message
    }

    /// Stops a running queue, so that it can continue.
    pub(crate) fn stop(&mut self, queue: usize) {
        self.send_no_ops();
        self.vrings[queue].runs = false;
        let index = number(queue);
        if self.has_protocol() && self.rng.chance(400) {
            let disable = Request::SetVringEnable { index, value: 0 };
            if self.rng.chance(500) {
                self.push(disable, OnReply::Disabled(queue));
                return;
            }
            // Like QEMU, which then asks for the entry at which the queue has stopped.
            self.push(disable, OnReply::Nothing);
        }
        let skips = self.has_protocol() && self.can_skip_drain() && self.rng.chance(500);
        let request = match skips {
            true => Request::GetVringBaseSkipDrain { index },
            false => Request::GetVringBase { index },
        };
        self.push(request, OnReply::Base(queue));
    }

    /// Replaces an eventfd of a running queue.
    pub(crate) fn replace_eventfd(&mut self, queue: usize) {
        let index = fits(queue, "the number of a queue");
        let (request, fd) = match self.rng.below(3) {
            0 => {
                let kick = self.guest.replace_kick(queue);
                (Request::SetVringKick { index, has_fd: kick.is_some() }, kick)
            }
            1 => self.new_err(queue),
            _ => {
                let call = self.guest.replace_call(queue);
                (Request::SetVringCall { index, has_fd: call.is_some() }, call)
            }
        };
        self.push_with(request, fd.into_iter().collect(), OnReply::Nothing);
    }

    /// The driver switches its write cache.
    pub(crate) fn write_cache(&mut self, value: u8) {
        let offset = if self.rng.chance(300) { REGISTERS_OFFSET } else { 0 } + WRITEBACK_OFFSET;
        let config = |data| Config { offset: number(offset), flags: 0, data };
        self.push(Request::SetConfig(config(vec![value])), OnReply::Nothing);
        let is_on = value != 0 && self.can_cache();
        self.push(Request::GetConfig(config(vec![0])), OnReply::Writeback(is_on.into()));
    }

    /// Makes the device forget its driver. A new driver follows, or the same. The front-end may go,
    /// too.
    pub(crate) fn reset(&mut self) {
        let how = self.rng.below(if self.has_protocol() { 6 } else { 3 });
        let request = match how {
            0 => return self.begin_disconnect(Disconnect::Politely),
            1 => return self.begin_disconnect(Disconnect::AtOnce),
            2 => return self.begin_disconnect(Disconnect::ByDaemon),
            3 => Request::SetStatus(0),
            _ => Request::ResetDevice,
        };
        let keeps_cache = matches!(request, Request::SetStatus(_));
        self.push(request, OnReply::Reset { keeps_cache });
        self.negotiate();
        self.continue_log();
    }

    pub(super) fn begin_disconnect(&mut self, how: Disconnect) {
        if how == Disconnect::Politely {
            let queues = (0..self.vrings.len()).filter(|queue| self.vrings[*queue].runs);
            for queue in queues.collect::<Vec<_>>() {
                let index = number(queue);
                self.push(Request::GetVringBase { index }, OnReply::Base(queue));
            }
        }
        self.disconnect = Some(how);
    }

    /// Sends messages that change nothing.
    fn send_no_ops(&mut self) {
        if !self.rng.chance(300) {
            return;
        }
        match self.rng.below(if self.has_protocol() { 5 } else { 2 }) {
            0 => self.push(Request::SetOwner, OnReply::Nothing),
            // Queues stop for this message, and continue.
            1 => self.push(Request::SetFeatures(self.all_features()), OnReply::Nothing),
            2 => {
                let status = 1 + self.rng.below(15);
                self.push(Request::SetStatus(status), OnReply::Nothing);
                self.push(Request::GetStatus, OnReply::Number(status));
            }
            3 => {
                let config = Config { offset: 0, flags: 0, data: vec![0; 60] };
                self.push(Request::GetConfig(config), OnReply::Nothing);
            }
            _ => {
                let size = u32::from(self.plan.queue_size());
                let index = number(self.rng.index(self.vrings.len()));
                self.push(Request::SetVringNum { index, size }, OnReply::Nothing);
            }
        }
    }
}

fn number(index: usize) -> u32 {
    fits(index, "the number of a queue")
}
