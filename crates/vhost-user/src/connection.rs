//! The device as one front-end has set it up, and the effect of its messages.

mod log;
mod negotiation;
mod own_region;
mod pause;
mod start;
mod stop;

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::task::{Poll, Waker};

use blockio::Remote;
use device::{Device, QueueRole, StopKind, oneshot};
use virtqueue::{MAX_REGIONS, MappingRules, MemoryFiles, RingLayout};

use super::call::{Call, CallRelay};
use super::channel::Message;
use super::config;
use super::examiner::Examiner;
use super::inflight::{self, Inflight};
use super::load::Load;
use super::message::{DecodeError, InflightArea, Region, Request, protocol_feature};
use super::outcome::{AtStop, Change, Outcome, Purpose, Refusal, Start, Undo, Work};
use super::peer_fds::{ConnectionId, PeerFd};
use super::ring::{RingState, invalid, is_ring_fault, ring_base, ring_size};
use super::run_lock::{RunLock, SessionLock};
use super::shared_memory::{SharedMemory, WriteLog};

/// The device, threads and rules of a session.
#[derive(Clone)]
pub struct SessionSetup {
    /// The device that is served.
    pub device: Device,
    /// Queue `i` is served by IoThread `i` modulo their number, which is not 0.
    pub threads: Vec<Remote>,
    /// The rules for memory that the front-end shares.
    pub rules: MappingRules,
    /// The threads that examine descriptors which may block. Each export has its own.
    pub examiner: Arc<Examiner>,
    /// The lock that the session holds while queues run. `None`: they may always run.
    pub run_lock: Option<Arc<dyn RunLock>>,
    /// The waker for work of [`Session::progress`](super::Session::progress) that the socket does
    /// not announce.
    pub waker: Waker,
}

/// A front-end's device.
pub(super) struct Connection {
    pub(super) setup: SessionSetup,
    pub(super) memory: SharedMemory,
    /// The region that marks requests while they are in the device, if the front-end keeps one.
    pub(super) inflight: Option<Inflight>,
    /// The region that does so for a front-end without one, while the session is kept.
    pub(super) own_region: Option<Inflight>,
    /// True until that region is in a kept state.
    pub(super) own_region_is_new: bool,
    pub(super) keeps_own_region: bool,
    /// True after a reset, until the accounts in the regions are forgotten.
    pub(super) has_stale_accounts: bool,
    /// The log of written pages, if the front-end has sent one.
    pub(super) log: Option<WriteLog>,
    /// True if the front-end asks for marks of all written pages.
    pub(super) log_all: bool,
    /// Answers of IoThreads that are about to take another log.
    new_logs: Vec<oneshot::Receiver<()>>,
    run_lock: SessionLock,
    pub(super) rings: Vec<RingState>,
    pub(super) protocol_features: u64,
    /// True if protocol features were negotiated, so that rings start disabled.
    pub(super) rings_need_enable: bool,
    /// The device status (virtio 1.3, section 2.1) that the front-end has set.
    pub(super) status: u8,
    /// The socket for messages from the back-end.
    pub(super) backend_channel: Option<OwnedFd>,
    /// The socket that messages come from.
    pub(super) id: ConnectionId,
    /// The relay for call descriptors that are not eventfds.
    pub(super) relay: CallRelay,
    /// The ring of requests that concern the requests in all rings.
    control_ring: Option<usize>,
    /// True if the control ring may have to start once the request rings have.
    control_is_due: bool,
    /// Rings that stop after the control ring, and the kind of their stop.
    to_stop: (Range<usize>, StopKind),
    /// The first failure of a ring to start or stop. A failure that is not the ring's fault has
    /// precedence.
    failure: Option<io::Error>,
}

impl Connection {
    pub(super) fn new(setup: SessionSetup) -> Self {
        let roles = (0..setup.device.num_queues()).map(|index| setup.device.queue_role(index));
        let control_ring = roles.clone().position(|role| role == Some(QueueRole::Control));
        let rings = roles.map(|_| RingState::default()).collect();
        Self {
            setup,
            memory: SharedMemory::empty(),
            inflight: None,
            own_region: None,
            own_region_is_new: false,
            has_stale_accounts: false,
            keeps_own_region: false,
            log: None,
            log_all: false,
            new_logs: Vec::new(),
            run_lock: SessionLock::default(),
            rings,
            protocol_features: 0,
            rings_need_enable: false,
            status: 0,
            backend_channel: None,
            id: ConnectionId::default(),
            relay: CallRelay::default(),
            control_ring,
            control_is_due: false,
            to_stop: (0..0, StopKind::Final),
            failure: None,
        }
    }

    /// Returns true if the front-end receives the acknowledgements that it requests.
    pub(super) fn has_reply_ack(&self) -> bool {
        self.protocol_features & protocol_feature::REPLY_ACK != 0
    }

    /// Requests that were taken and are not answered.
    pub(super) fn load(&self) -> Load {
        Load::from_rings(self.rings.iter().map(RingState::load))
    }

    /// Returns a ring that the front-end has started without sharing any memory.
    pub(super) fn ring_without_memory(&self) -> Option<usize> {
        let has_none = self.memory.map.num_regions() == 0;
        self.rings.iter().position(RingState::is_up).filter(|_| has_none)
    }

    /// The number of open descriptors of the front-end's rings, memory and inflight region.
    pub(super) fn descriptors(&self) -> usize {
        let of_rings: usize = self.rings.iter().map(RingState::descriptors).sum();
        let regions = self.inflight.iter().chain(&self.own_region);
        let of_log = self.log.as_ref().map_or(0, |log| log.files.len());
        let of_regions = regions.map(|all| all.files.len()).sum::<usize>();
        of_rings + self.memory.files.len() + of_regions + of_log
    }

    /// Notifies the front-end that the configuration has changed. Returns false if it has not
    /// negotiated that, or does not read such messages.
    pub(super) fn send_config_change(&self) -> bool {
        let channel = self.backend_channel.as_ref();
        channel.is_some_and(|channel| config::send_change(channel, self.protocol_features))
    }

    /// Carries out a message.
    pub(super) fn handle(&mut self, message: Message) -> Outcome {
        let Message { header, body, fds, lost_fds } = message;
        if let Some(why) = lost_fds {
            let text = format!("descriptors of message {} are lost; {why}", header.code);
            return Outcome::Refuse(Refusal::needing_ack(text));
        }
        let request = match Request::decode(header.code, &body) {
            Ok(request) => request,
            Err(DecodeError::UnknownCode) => return Outcome::not_offered(header.code),
            Err(DecodeError::BadBody) => {
                let text = format!("message {} cannot have {} bytes", header.code, body.len());
                return Outcome::Refuse(Refusal::needing_ack(text));
            }
        };
        if request.needed_features() & !self.protocol_features != 0 {
            return Outcome::not_offered(header.code);
        }
        let expected = request.expected_fds();
        if !expected.contains(&fds.len()) {
            let text = format!("message {} cannot have {} descriptors", header.code, fds.len());
            return Outcome::Refuse(Refusal::needing_ack(text));
        }
        self.carry_out(request, fds).unwrap_or_else(Outcome::Refuse)
    }

    fn carry_out(&mut self, request: Request, fds: Vec<PeerFd>) -> Result<Outcome, Refusal> {
        let number = |value: u64| Ok(Outcome::Answer(value.to_ne_bytes().to_vec()));
        match request {
            Request::SetOwner => Ok(Outcome::Done),
            Request::GetFeatures => number(self.offered_features()),
            Request::GetProtocolFeatures => number(config::protocol_features(&self.setup.device)),
            Request::GetQueueNum => number(self.rings.len() as u64),
            Request::GetMaxMemSlots => number(MAX_REGIONS as u64),
            Request::GetStatus => number(u64::from(self.status)),
            Request::GetConfig(config) => {
                Ok(Outcome::Answer(config::read(&self.setup.device, &config)?))
            }
            Request::SetConfig(config) => {
                config::write(&self.setup.device, &config).map(|()| Outcome::Done)
            }
            Request::SetProtocolFeatures(features) => self.set_protocol_features(features),
            Request::SetBackendReqFd => {
                let channel = fds.into_iter().next().map(|fd| fd.into_unix_socket(&self.id));
                let channel = channel.transpose()?;
                if let Some(before) = std::mem::replace(&mut self.backend_channel, channel) {
                    drop(PeerFd::new(before, Arc::clone(&self.setup.examiner)));
                }
                Ok(Outcome::Done)
            }
            Request::SetStatus(status) => self.set_status(status),
            Request::ResetDevice => Ok(self.begin(Change::Reset { keep_writeback: false })),
            Request::ResetOwner => Ok(self.begin(Change::ResetOwner)),
            Request::SetFeatures(features) => self.set_features(features),
            Request::SetMemTable(regions) => Ok(self.map(false, regions, fds, Purpose::Guest)),
            Request::AddMemReg(region) => Ok(self.map(true, vec![region], fds, Purpose::Guest)),
            Request::GetInflightFd(area) => {
                let (area, file) = inflight::make(area, &self.setup.device)?;
                Ok(Outcome::AnswerWith(area.encode().to_vec(), file))
            }
            Request::SetInflightFd(area) => {
                let InflightArea { size, file_offset, .. } = area;
                let region = Region::at_start(size, file_offset);
                Ok(self.map(false, vec![region], fds, Purpose::Inflight(area)))
            }
            Request::SetLogBase(area) => {
                let region = Region::at_start(area.size, area.file_offset);
                Ok(self.map(false, vec![region], fds, Purpose::Log(area)))
            }
            Request::SetLogFd => {
                let event = fds.into_iter().next().map(|fd| fd.into_eventfd("the log descriptor"));
                Ok(event.transpose().map(|_unused| Outcome::Done)?)
            }
            Request::RemMemReg(region) => {
                let memory = self.memory.without(&region).map_err(Refusal::needing_ack)?;
                Ok(self.begin(Change::Memory(memory)))
            }
            ring => self.change_ring(ring, fds.into_iter().next()),
        }
    }

    fn change_ring(&mut self, request: Request, fd: Option<PeerFd>) -> Result<Outcome, Refusal> {
        let eventfd = |fd: Option<PeerFd>, what: &str, index: u8| {
            fd.map(|fd| fd.into_eventfd(&format!("the {what} descriptor of queue {index}")))
                .transpose()
        };
        let change = match request {
            Request::SetVringNum { index, size } => {
                Change::Size(self.ring(index)?, ring_size(size, self.layout())?)
            }
            Request::SetVringAddr { index, addresses, log } => {
                let index = self.ring(index)?;
                if self.rings[index].settings.addresses == Some(addresses) {
                    if self.rings[index].settings.log != log {
                        return self.set_ring_log(index, log);
                    }
                    let undo = self.undo(index..index + 1);
                    return Ok(self.start(index..index + 1, Start::without_answer(undo)));
                }
                Change::Addresses(index, addresses, log)
            }
            Request::SetVringBase { index, base } => {
                let index = self.ring(index)?;
                Change::Base(index, ring_base(base, self.layout())?)
            }
            Request::GetVringBase { index } => return Ok(self.get_base(self.ring(index)?)),
            Request::GetVringBaseSkipDrain { index } => {
                Change::GetBase(self.ring(index)?, AtStop::Leave)
            }
            Request::SetVringKick { index, .. } => {
                let ring = self.ring(index.into())?;
                Change::Kick(ring, eventfd(fd, "kick", index)?.map(Arc::new))
            }
            Request::SetVringCall { index, .. } => {
                return Ok(Outcome::Later(Work::Call(self.ring(index.into())?, fd)));
            }
            Request::SetVringErr { index, .. } => {
                let ring = self.ring(index.into())?;
                self.rings[ring].set_err(eventfd(fd, "err", index)?)?;
                return Ok(Outcome::Done);
            }
            Request::SetVringEnable { index, value } => {
                let index = self.ring(index)?;
                match value {
                    _ if !self.rings_need_enable => {
                        let text = "a ring cannot be enabled or disabled before protocol features \
                                    are negotiated";
                        return Err(Refusal::needing_ack(text));
                    }
                    0 => Change::Disable(index),
                    1 => {
                        let undo = self.undo(index..index + 1);
                        self.rings[index].settings.enabled = true;
                        return Ok(self.start(index..index + 1, Start::without_answer(undo)));
                    }
                    _ => return Err(Refusal::needing_ack(format!("ring enable {value}"))),
                }
            }
            _ => unreachable!("it is about a ring"),
        };
        Ok(self.begin(change))
    }

    /// The index of a ring, if the ring exists.
    fn ring(&self, index: u32) -> io::Result<usize> {
        let count = self.rings.len();
        let ring = index as usize;
        if ring < count {
            Ok(ring)
        } else {
            Err(invalid(format!("there is no queue {index}: the device has {count}")))
        }
    }

    /// Maps regions: alone, or beside the present ones.
    fn map(
        &mut self,
        beside: bool,
        regions: Vec<Region>,
        fds: Vec<PeerFd>,
        purpose: Purpose,
    ) -> Outcome {
        // With all other rules no file system is asked before the file is known to be memory.
        let waits =
            self.setup.rules.files == MemoryFiles::Any && !fds.iter().all(PeerFd::is_sealable);
        let rules = self.setup.rules.clone();
        let SharedMemory { map, files } = &self.memory;
        let before = beside.then(|| (Arc::clone(map), files.clone()));
        let map = move || SharedMemory::map(before, &regions, fds, &rules);
        if waits {
            let map = self.setup.examiner.map(map);
            map.wake(&self.setup.waker);
            return Outcome::Later(Work::Map(map, purpose));
        }
        match map() {
            Ok(memory) => self.mapped(memory, purpose),
            Err(error) => Outcome::Refuse(error.into()),
        }
    }

    /// Continues with memory that was mapped.
    pub(super) fn mapped(&mut self, memory: SharedMemory, purpose: Purpose) -> Outcome {
        match purpose {
            Purpose::Guest => match self.check_log_of(&memory.map) {
                Ok(()) => self.begin(Change::Memory(memory)),
                Err(refusal) => Outcome::Refuse(refusal),
            },
            Purpose::Inflight(area) => match Inflight::new(area, memory) {
                Ok(inflight) => self.begin(Change::Inflight(inflight)),
                Err(error) => Outcome::Refuse(Refusal::needing_ack(error)),
            },
            Purpose::Log(area) => match WriteLog::new(area, memory) {
                Ok(log) => self.set_log(log).unwrap_or_else(Outcome::Refuse),
                Err(error) => Outcome::Refuse(Refusal::needing_ack(error)),
            },
        }
    }

    /// The layout of the rings that the driver negotiated.
    pub(super) fn layout(&self) -> RingLayout {
        self.setup.device.layout()
    }

    /// Begins a change: the rings that it concerns stop first.
    pub(super) fn begin(&mut self, change: Change) -> Outcome {
        self.begin_stop(change.rings(self.rings.len()), self.stop_kind(&change));
        Outcome::Later(Work::Stop(change))
    }

    /// Makes a change, now that its rings have stopped. The rings that should run are to start.
    pub(super) fn apply(&mut self, change: Change) -> Outcome {
        let rings = change.rings(self.rings.len());
        let mut undo = Some(self.undo(rings.clone()));
        let (mut answer, mut unmapped) = (Ok(None), None);
        match change {
            Change::Features(features) => {
                let device = &self.setup.device;
                match device.set_features(features & !negotiation::VHOST_FEATURES) {
                    Ok(()) => self.keep_flags(features),
                    Err(error) => (undo, answer) = (None, Err(error.into())),
                }
            }
            Change::Memory(memory) => {
                let before = std::mem::replace(&mut self.memory, memory);
                unmapped = self.unmap(before);
                // Rings may not fit: a region that grows is removed and added again.
                undo = None;
            }
            Change::Inflight(region) => {
                self.inflight = Some(region.restore_writeback(&self.setup.device));
                self.own_region = None;
                self.rings.iter_mut().for_each(|ring| ring.has_left = false);
            }
            Change::Size(index, size) => self.rings[index].settings.size = size,
            Change::Addresses(index, addresses, log) => {
                let settings = &mut self.rings[index].settings;
                (settings.addresses, settings.log) = (Some(addresses), log);
            }
            Change::Base(index, base) => {
                let before = std::mem::replace(&mut self.rings[index].base, base);
                self.note_stale_account(index);
                undo = undo.map(|undo| undo.with_base(before));
            }
            Change::Kick(index, kick) => {
                let ring = &mut self.rings[index].settings;
                ring.kick = kick;
                ring.started = true;
                ring.enabled |= !self.rings_need_enable;
            }
            Change::GetBase(index, _) => answer = self.take_base(index).map(Some),
            Change::Disable(index) => self.rings[index].settings.enabled = false,
            Change::ResetOwner => self.rings.iter_mut().for_each(RingState::set_stopped),
            Change::Reset { keep_writeback } => {
                self.rings.iter_mut().for_each(RingState::reset);
                self.status = 0;
                if !keep_writeback {
                    (self.log, self.log_all) = (None, false);
                    self.has_stale_accounts = true;
                    self.setup.device.reset();
                }
            }
            Change::Restore(before, refusal) => {
                self.inflight = (*before.inflight).clone();
                self.log_all = before.log_all;
                self.rings_need_enable = before.restore(&mut self.rings, &self.setup.device);
                (undo, answer) = (None, Err(refusal));
            }
        }
        let undo = undo.map(Box::new);
        Outcome::Later(Work::Restart(rings, Start { answer, undo, unmapped, next: None }))
    }

    /// Gives a ring its call descriptor. If that has to wait for a thread, and `may_wait` permits
    /// it, returns the work as an error.
    pub(super) fn set_call(
        &mut self,
        ring: usize,
        fd: Option<PeerFd>,
        may_wait: bool,
    ) -> Result<Outcome, Work> {
        let (relay, SessionSetup { examiner, waker, .. }) = (&mut self.relay, &self.setup);
        if may_wait && fd.iter().any(|fd| !relay.has_thread_for(fd, examiner, waker)) {
            return Err(Work::Call(ring, fd));
        }
        let what = format!("the call descriptor of queue {ring}");
        let call = fd.map(|fd| Call::new(fd, &what, relay, examiner)).transpose();
        let set = call.and_then(|call| self.rings[ring].set_call(call));
        Ok(set.map_or_else(|error| Outcome::Refuse(error.into()), |()| Outcome::Done))
    }

    fn undo(&self, rings: Range<usize>) -> Undo {
        let Self { inflight, setup, rings_need_enable, .. } = self;
        let flags = [*rings_need_enable, self.log_all];
        Undo::new(&self.rings, rings, &setup.device, inflight.as_ref(), flags)
    }

    /// Ready once all rings have started or stopped, as requested. An error: one has not.
    pub(super) fn settle(&mut self) -> Poll<io::Result<()>> {
        if self.progress() {
            return Poll::Pending;
        }
        if std::mem::take(&mut self.control_is_due) {
            self.start_control();
            if self.progress() {
                return Poll::Pending;
            }
        }
        Poll::Ready(self.failure.take().map_or(Ok(()), Err))
    }

    /// The outcome for the front-end when rings have started.
    pub(super) fn started(&mut self, start: Start, result: io::Result<()>) -> Outcome {
        match (result, start) {
            // The front-end comes again, and finds the lock free or not.
            (Err(error), _) if self.run_lock.take_failure() => Outcome::End(error.to_string()),
            (Err(error), Start { undo: Some(undo), .. }) => {
                self.begin(Change::Restore(*undo, error.into()))
            }
            // Without the queue the guest would hang. If the ring itself does not fit, the memory
            // may still change.
            (Err(error), Start { undo: None, .. }) if !is_ring_fault(&error) => {
                Outcome::End(error.to_string())
            }
            (_, Start { next: Some(next), .. }) => self.begin(*next),
            (_, Start { unmapped: Some(unmapped), .. }) => Outcome::Later(Work::Unmap(unmapped)),
            (_, Start { answer: Ok(Some(answer)), .. }) => Outcome::Answer(answer),
            (_, Start { answer: Ok(None), .. }) => Outcome::Done,
            (_, Start { answer: Err(refusal), .. }) => Outcome::Refuse(refusal),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
