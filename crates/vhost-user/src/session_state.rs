//! The state of a session that is handed over to another process. The front-end does not notice.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use device::Negotiated;
use rustix::fd::AsFd;
use serde::{Deserialize, Serialize};

use super::call::{Call, CallRelay};
use super::channel::{Channel, Message};
use super::config;
use super::connection::{Connection, SessionSetup};
use super::inflight::Inflight;
use super::message::{InflightArea, LogArea, Region, RingAddresses};
use super::passed_fds::{FdIndex, FdSink, PassedFds};
use super::peer_fds::PeerFd;
use super::ring::{RingState, halves, invalid};
use super::shared_memory::{MemoryFile, SharedMemory, WriteLog};

/// A session whose queues do not run, between two messages.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct SessionState {
    channel: ChannelState,
    /// True if the front-end may be silent.
    pub(super) is_patient: bool,
    protocol_features: u64,
    rings_need_enable: bool,
    status: u8,
    negotiated: Negotiated,
    memory: Vec<RegionState>,
    inflight: Option<InflightState>,
    /// The daemon's own inflight region, of a session that was kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    own_region: Option<InflightState>,
    /// True if the driver has reset the device, and the accounts may not be forgotten yet.
    #[serde(default, skip_serializing_if = "is_off")]
    has_stale_accounts: bool,
    backend_channel: Option<FdIndex>,
    /// The log of written pages, of a guest that migrates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    log: Option<RegionState>,
    #[serde(default, skip_serializing_if = "is_off")]
    log_all: bool,
    /// True if the session held the lock of its disks.
    #[serde(default, skip_serializing_if = "is_off")]
    has_lock: bool,
    rings: Vec<RingFields>,
}

/// The connection, with the read part of the next message and the unsent part of the last answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct ChannelState {
    socket: FdIndex,
    input: Vec<u8>,
    fds: Vec<FdIndex>,
    lost_fds: Option<String>,
    output: Vec<u8>,
    output_fd: Option<FdIndex>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct RegionState {
    guest_addr: u64,
    size: u64,
    user_addr: u64,
    file_offset: u64,
    file: FdIndex,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct InflightState {
    memory: Vec<RegionState>,
    queues: u16,
    queue_size: u16,
}

#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct RingFields {
    size: u16,
    /// Addresses of the descriptor table, the avail ring and the used ring.
    addresses: Option<[u64; 3]>,
    /// The address of the used ring in the log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    log: Option<u64>,
    started: bool,
    enabled: bool,
    /// True if requests of a disabled ring are left in the inflight region.
    #[serde(default, skip_serializing_if = "is_off")]
    has_left: bool,
    /// True if the ring has a new base, and its account may not be forgotten yet.
    #[serde(default, skip_serializing_if = "is_off")]
    has_stale_account: bool,
    next_avail: u16,
    /// The place of the next used element in a packed ring. Absent for split rings, as in earlier
    /// versions.
    #[serde(default, skip_serializing_if = "is_zero")]
    next_used: u16,
    kick: Option<FdIndex>,
    call: Option<FdIndex>,
    err: Option<FdIndex>,
}

/// The parts of a session that was taken over.
pub(super) struct RestoredSession {
    pub(super) channel: Channel,
    pub(super) connection: Connection,
    /// True if the front-end should read the configuration again.
    pub(super) config_changed: bool,
}

impl SessionState {
    /// Describes a session whose queues do not run.
    pub(super) fn new(
        channel: &Channel,
        connection: &Connection,
        is_patient: bool,
        fds: &mut dyn FdSink,
    ) -> io::Result<Self> {
        let memory = RegionState::all(&connection.memory.files, fds)?;
        let inflight =
            connection.inflight.as_ref().map(|inflight| InflightState::from_region(inflight, fds));
        let inflight = inflight.transpose()?;
        let log = connection.log.as_ref().and_then(|log| log.files.first());
        let log = log.map(|file| RegionState::from_file(file, fds)).transpose()?;
        let rings = connection.rings.iter().map(|ring| RingFields::from_ring(ring, fds));
        let rings = rings.collect::<io::Result<_>>()?;
        Ok(Self {
            channel: ChannelState::from_channel(channel, fds)?,
            is_patient,
            protocol_features: connection.protocol_features,
            rings_need_enable: connection.rings_need_enable,
            status: connection.status,
            negotiated: connection.setup.device.negotiated(),
            memory,
            inflight,
            own_region: None,
            has_stale_accounts: connection.has_stale_accounts,
            log,
            log_all: connection.log_all,
            has_lock: connection.passes_lock(),
            backend_channel: put_some(
                fds,
                "back-end channel",
                connection.backend_channel.as_ref(),
            )?,
            rings,
        })
    }

    /// Describes a session whose queues may run, with its own inflight region, and with a message
    /// that it has read and is to carry out.
    pub(super) fn for_keeper(
        channel: &Channel,
        connection: &Connection,
        is_patient: bool,
        message: Option<&Message>,
        fds: &mut dyn FdSink,
    ) -> io::Result<Self> {
        let mut state = Self::new(channel, connection, is_patient, fds)?;
        if let Some(message) = message {
            state.channel.put_back(message, fds)?;
        }
        let own_region = connection.own_region.as_ref();
        let is_new = connection.own_region_is_new;
        let own_region = own_region.map(|region| match is_new {
            true => InflightState::from_new_region(region, fds),
            false => InflightState::from_region(region, fds),
        });
        state.own_region = own_region.transpose()?;
        // Devices offer many queues, and front-ends use few.
        let used = state.rings.iter().rposition(|ring| *ring != RingFields::default());
        state.rings.truncate(used.map_or(0, |last| last + 1));
        Ok(state)
    }

    /// Adds the unused rings of a device with this many to the state of a keeper.
    pub(super) fn add_unused_rings(&mut self, count: usize) {
        let used = self.rings.len();
        self.rings.resize_with(count.max(used), RingFields::default);
    }

    /// Drops the unsent answer: the front-end has it.
    pub fn forget_answer(&mut self) {
        self.channel.output.clear();
        self.channel.output_fd = None;
    }

    /// Takes the session over, as far as that has no effect: no queue runs yet.
    ///
    /// # Errors
    ///
    /// If this device or process cannot continue the session.
    pub(super) fn take_over(
        self,
        setup: SessionSetup,
        fds: &mut PassedFds,
        now: Instant,
    ) -> io::Result<RestoredSession> {
        let offered = config::protocol_features(&setup.device);
        if self.protocol_features & !offered != 0 {
            let unknown = self.protocol_features & !offered;
            return Err(invalid(format!(
                "this version does not offer the protocol features {unknown:#x}"
            )));
        }
        let mut connection = Connection::new(setup);
        if self.rings.len() != connection.rings.len() {
            let (theirs, ours) = (self.rings.len(), connection.rings.len());
            return Err(invalid(format!("the device has {ours} queues, not {theirs}")));
        }
        let config_changed = connection.setup.device.take_over(&self.negotiated)?;
        connection.protocol_features = self.protocol_features;
        connection.rings_need_enable = self.rings_need_enable;
        connection.status = self.status;
        connection.backend_channel = fds.take_some(self.backend_channel)?;
        connection.memory = RegionState::map(self.memory, &connection.setup, fds)?;
        if let Some(inflight) = self.inflight {
            connection.inflight = Some(inflight.map(&connection.setup, fds)?);
        }
        if let Some(region) = self.own_region {
            connection.own_region = Some(region.map(&connection.setup, fds)?);
        }
        connection.has_stale_accounts = self.has_stale_accounts;
        if let Some(log) = self.log {
            let area = LogArea { size: log.size, file_offset: log.file_offset };
            let memory = RegionState::map(vec![log], &connection.setup, fds)?;
            connection.log = Some(WriteLog::new(area, memory).map_err(io::Error::other)?);
        }
        connection.log_all = self.log_all;
        if self.has_lock {
            connection.inherit_lock();
        }
        let Connection { rings, relay, setup, .. } = &mut connection;
        for (ring, fields) in rings.iter_mut().zip(self.rings) {
            // A ring that does not fit into the memory did not run in the old process either.
            fields.take_over(ring, relay, setup, fds)?;
            ring.set_paused();
        }
        let channel = self.channel.take_over(&connection.setup, fds, now)?;
        connection.id = channel.connection_id();
        Ok(RestoredSession { channel, connection, config_changed })
    }
}

impl ChannelState {
    fn from_channel(channel: &Channel, fds: &mut dyn FdSink) -> io::Result<Self> {
        let socket = fds.put("connection", channel.as_fd())?;
        let of_message = channel.fds.iter().map(|fd| fds.put_new("of a message", fd.as_fd()));
        Ok(Self {
            socket,
            input: channel.input.clone(),
            fds: of_message.collect::<io::Result<_>>()?,
            lost_fds: channel.lost_fds.clone(),
            output: channel.output.clone(),
            output_fd: channel
                .output_fd
                .as_ref()
                .map(|fd| fds.put_new("of an answer", fd.as_fd()))
                .transpose()?,
        })
    }

    /// Puts a message back that was taken from the channel.
    fn put_back(&mut self, message: &Message, fds: &mut dyn FdSink) -> io::Result<()> {
        let Message { header, body, fds: of_message, lost_fds } = message;
        self.input = [&header.encode()[..], body].concat();
        let of_message = of_message.iter().map(|fd| fds.put_new("of a message", fd.as_fd()));
        self.fds = of_message.collect::<io::Result<_>>()?;
        self.lost_fds.clone_from(lost_fds);
        Ok(())
    }

    fn take_over(
        self,
        setup: &SessionSetup,
        fds: &mut PassedFds,
        now: Instant,
    ) -> io::Result<Channel> {
        let examiner = &setup.examiner;
        let socket = UnixStream::from(fds.take(self.socket)?);
        let mut channel = Channel::new(socket, Arc::clone(examiner));
        channel.lend(true);
        for place in self.fds {
            channel.fds.push(PeerFd::new(fds.take(place)?, Arc::clone(examiner)));
        }
        channel.lost_fds = self.lost_fds;
        channel.output_fd = fds.take_some(self.output_fd)?;
        channel.restore(self.input, self.output, now);
        Ok(channel)
    }
}

impl InflightState {
    fn from_region(inflight: &Inflight, fds: &mut dyn FdSink) -> io::Result<Self> {
        let InflightArea { queues, queue_size, .. } = inflight.area;
        Ok(Self { memory: RegionState::all(&inflight.files, fds)?, queues, queue_size })
    }

    fn from_new_region(inflight: &Inflight, fds: &mut dyn FdSink) -> io::Result<Self> {
        let InflightArea { queues, queue_size, .. } = inflight.area;
        let memory = inflight.files.iter().map(|memory| {
            let file = fds.put_new("own region", memory.file.file().as_fd())?;
            Ok(RegionState::new(memory.region, file))
        });
        Ok(Self { memory: memory.collect::<io::Result<_>>()?, queues, queue_size })
    }

    fn map(self, setup: &SessionSetup, fds: &mut PassedFds) -> io::Result<Inflight> {
        let Self { memory, queues, queue_size } = self;
        let memory = RegionState::map(memory, setup, fds)?;
        let [file] = &memory.files[..] else {
            return Err(invalid("an inflight region is one".to_owned()));
        };
        let Region { size, file_offset, .. } = file.region;
        let area = InflightArea { size, file_offset, queues, queue_size };
        Inflight::new(area, memory).map_err(|error| invalid(error.to_string()))
    }
}

impl RegionState {
    fn all(files: &[MemoryFile], fds: &mut dyn FdSink) -> io::Result<Vec<Self>> {
        files.iter().map(|file| Self::from_file(file, fds)).collect()
    }

    fn from_file(memory: &MemoryFile, fds: &mut dyn FdSink) -> io::Result<Self> {
        Ok(Self::new(memory.region, fds.put("memory", memory.file.file().as_fd())?))
    }

    fn new(region: Region, file: FdIndex) -> Self {
        let Region { guest_addr, size, user_addr, file_offset } = region;
        Self { guest_addr, size, user_addr, file_offset, file }
    }

    fn map(list: Vec<Self>, setup: &SessionSetup, fds: &mut PassedFds) -> io::Result<SharedMemory> {
        let mut files = Vec::new();
        for region in &list {
            files.push(PeerFd::new(fds.take(region.file)?, Arc::clone(&setup.examiner)));
        }
        let regions = list.into_iter().map(|region| {
            let Self { guest_addr, size, user_addr, file_offset, .. } = region;
            Region { guest_addr, size, user_addr, file_offset }
        });
        SharedMemory::map(None, &regions.collect::<Vec<_>>(), files, &setup.rules)
    }
}

impl RingFields {
    fn from_ring(ring: &RingState, fds: &mut dyn FdSink) -> io::Result<Self> {
        let settings = &ring.settings;
        let addresses = settings.addresses.map(|addresses| {
            let RingAddresses { desc_table, avail_ring, used_ring } = addresses;
            [desc_table, avail_ring, used_ring]
        });
        Ok(Self {
            size: settings.size,
            addresses,
            log: settings.log,
            started: settings.started,
            enabled: settings.enabled,
            has_left: ring.has_left && settings.started && !settings.enabled,
            has_stale_account: ring.has_stale_account,
            next_avail: halves(ring.base).0,
            next_used: halves(ring.base).1,
            kick: put_some(fds, "kick", settings.kick.as_deref())?,
            call: put_some(fds, "call", ring.call.as_ref().map(Call::peer_fd))?,
            err: put_some(fds, "err", ring.err.as_ref())?,
        })
    }

    fn take_over(
        self,
        ring: &mut RingState,
        relay: &mut CallRelay,
        setup: &SessionSetup,
        fds: &mut PassedFds,
    ) -> io::Result<()> {
        let call = |fd| {
            let fd = PeerFd::new(fd, Arc::clone(&setup.examiner));
            Call::new(fd, "a call", relay, &setup.examiner)
        };
        let addresses = self.addresses.map(|[desc_table, avail_ring, used_ring]| RingAddresses {
            desc_table,
            avail_ring,
            used_ring,
        });
        ring.settings.size = self.size;
        ring.settings.addresses = addresses;
        ring.settings.log = self.log;
        ring.settings.started = self.started;
        ring.settings.enabled = self.enabled;
        ring.has_left = self.has_left;
        ring.has_stale_account = self.has_stale_account;
        ring.settings.kick = fds.take_some(self.kick)?.map(Arc::new);
        ring.base = u32::from(self.next_avail) | u32::from(self.next_used) << 16;
        ring.call = fds.take_some(self.call)?.map(call).transpose()?;
        ring.err = fds.take_some(self.err)?;
        Ok(())
    }
}

/// Keeps the state of a session, and the descriptors in it, outside of this process.
///
/// A session keeps its state before it carries out a message, before it sends the answer, and when
/// it has sent it. A process that is killed in between leaves a state with which the next one
/// repeats the message, or sends the answer.
pub trait StateKeeper: FdSink + Send {
    /// Begins a state: its descriptors follow.
    fn begin(&mut self);

    /// Keeps the state, or an error: one of its descriptors was not kept. Descriptors that were not
    /// put since [`begin`](Self::begin) belong to no state any longer.
    fn keep(&mut self, state: io::Result<SessionState>);

    /// Notes that the front-end has the answer in the last state.
    fn note_sent(&mut self);
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_off(flag: &bool) -> bool {
    !flag
}

/// True for a field that split rings do not have.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(value: &u16) -> bool {
    *value == 0
}

fn put_some(
    fds: &mut dyn FdSink,
    name: &str,
    fd: Option<impl AsFd>,
) -> io::Result<Option<FdIndex>> {
    fd.map(|fd| fds.put(name, fd.as_fd())).transpose()
}
