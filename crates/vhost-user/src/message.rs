//! Messages as plain data: numbers, flags, and bodies with their encoding.
//!
//! All numbers are in the byte order of the machine ("Message Specification").

pub use super::body::{Config, InflightArea, LogArea, Region, RingAddresses};
use super::body::{
    MAX_BODY_BYTES, NO_FD, VRING_F_LOG, number, regions, ring_addresses, ring_fd, single_region,
    size_of_body, words,
};

/// Bytes of a header.
pub const HEADER_BYTES: usize = 12;

/// Numbers of messages ("Front-end message types").
#[expect(missing_docs, reason = "the names are the specification's")]
pub mod code {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub(crate) const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub(crate) const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub(crate) const GET_INFLIGHT_FD: u32 = 31;
    pub(crate) const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub(crate) const SET_STATUS: u32 = 39;
    pub(crate) const GET_STATUS: u32 = 40;
    pub(crate) const GET_VRING_BASE_SKIP_DRAIN: u32 = 45;
    /// A message of the back-end ("Back-end message types"): the configuration has changed.
    pub(crate) const BACKEND_CONFIG_CHANGE: u32 = 2;
}

/// The feature bit that announces protocol features.
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;

/// The feature bit that asks for marks of all written pages in the log.
pub const F_LOG_ALL: u64 = 1 << 26;

/// Protocol features ("Protocol features").
#[expect(missing_docs, reason = "the names are the specification's")]
pub mod protocol_feature {
    pub const MQ: u64 = 1 << 0;
    pub(crate) const LOG_SHMFD: u64 = 1 << 1;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub(crate) const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub const STATUS: u64 = 1 << 16;
    pub(crate) const GET_VRING_BASE_INFLIGHT: u64 = 1 << 20;
    pub const GET_VRING_BASE_SKIP_DRAIN: u64 = 1 << 23;
}

/// In flags of a header: the version, which is 1.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
/// In flags of a header: the message is an answer.
const REPLY: u32 = 1 << 2;
/// In flags of a header: the sender wants an acknowledgement of the message.
const NEED_REPLY: u32 = 1 << 3;

/// The start of every message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The number of the message.
    pub code: u32,
    /// The version, and flags for an answer and for a requested acknowledgement.
    pub flags: u32,
    /// Bytes of the body.
    pub size: u32,
}

impl Header {
    /// The header of a message that asks for no answer; some messages have one anyway.
    pub fn new(code: u32, body_bytes: usize) -> Self {
        Self { code, flags: VERSION, size: size_of_body(body_bytes) }
    }

    /// The header of the answer to this message.
    #[must_use]
    pub fn reply(self, body_bytes: usize) -> Self {
        let flags = VERSION | REPLY;
        Self { code: self.code, flags, size: size_of_body(body_bytes) }
    }

    /// Adds the flag that requests an acknowledgement.
    #[must_use]
    pub fn with_need_reply(self) -> Self {
        Self { flags: self.flags | NEED_REPLY, ..self }
    }

    /// Returns true if the sender requests an acknowledgement.
    pub fn needs_reply(self) -> bool {
        self.flags & NEED_REPLY != 0
    }

    /// Returns true if the front-end waits for an answer in any case.
    pub fn has_answer(self) -> bool {
        matches!(
            self.code,
            code::GET_FEATURES
                | code::GET_PROTOCOL_FEATURES
                | code::GET_QUEUE_NUM
                | code::SET_LOG_BASE
                | code::GET_VRING_BASE
                | code::GET_VRING_BASE_SKIP_DRAIN
                | code::GET_CONFIG
                | code::GET_INFLIGHT_FD
                | code::GET_MAX_MEM_SLOTS
                | code::GET_STATUS
        )
    }

    /// The header in bytes.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Self {
        let [code, flags, size] = words(bytes);
        Self { code, flags, size }
    }

    /// The bytes of the header.
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        for (bytes, word) in bytes.chunks_exact_mut(4).zip([self.code, self.flags, self.size]) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// Returns the reason that these bytes are not the header of a request. The bytes after them
    /// cannot be understood either.
    pub(super) fn fault(self) -> Option<String> {
        let Self { code, flags, size } = self;
        if flags & VERSION_MASK != VERSION {
            return Some(format!(
                "message {code} has the unsupported version {}",
                flags & VERSION_MASK
            ));
        }
        if flags & !(VERSION_MASK | NEED_REPLY) != 0 {
            return Some(format!("message {code} has unknown flags {flags:#x}"));
        }
        if size as usize > MAX_BODY_BYTES {
            return Some(format!("message {code} announces {size} bytes, more than allowed"));
        }
        None
    }
}

/// A request of a front-end. Descriptors come beside it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the specification's")]
pub enum Request {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    /// With a descriptor for each region.
    SetMemTable(Vec<Region>),
    /// With a descriptor of the log.
    SetLogBase(LogArea),
    /// With an eventfd.
    SetLogFd,
    SetVringNum {
        index: u32,
        size: u32,
    },
    SetVringAddr {
        index: u32,
        addresses: RingAddresses,
        /// The address under which the log has the used ring, if writes to that are logged.
        log: Option<u64>,
    },
    SetVringBase {
        index: u32,
        base: u32,
    },
    GetVringBase {
        index: u32,
    },
    GetVringBaseSkipDrain {
        index: u32,
    },
    /// With a descriptor unless `has_fd` is false.
    SetVringKick {
        index: u8,
        has_fd: bool,
    },
    /// With a descriptor unless `has_fd` is false.
    SetVringCall {
        index: u8,
        has_fd: bool,
    },
    /// With a descriptor unless `has_fd` is false.
    SetVringErr {
        index: u8,
        has_fd: bool,
    },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable {
        index: u32,
        value: u32,
    },
    /// With a socket.
    SetBackendReqFd,
    GetConfig(Config),
    SetConfig(Config),
    /// Only the queues and their size matter. The answer brings a descriptor.
    GetInflightFd(InflightArea),
    /// With a descriptor.
    SetInflightFd(InflightArea),
    ResetDevice,
    GetMaxMemSlots,
    /// With a descriptor.
    AddMemReg(Region),
    /// A descriptor may come with it, but is not used.
    RemMemReg(Region),
    SetStatus(u64),
    GetStatus,
}

/// A message that cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecodeError {
    /// No message has this number, or it belongs to a feature that is not offered.
    UnknownCode,
    /// The body does not have the form that the specification gives it.
    BadBody,
}

impl Request {
    /// Decodes a message.
    ///
    /// # Errors
    ///
    /// If the code is unknown, or the body does not have its form.
    pub fn decode(code: u32, body: &[u8]) -> Result<Self, DecodeError> {
        if let Some((_, request)) = EMPTY.iter().find(|(number, _)| *number == code) {
            return if body.is_empty() { Ok(request.clone()) } else { Err(DecodeError::BadBody) };
        }
        let ring = || {
            let [index, value] = words(body.try_into().ok().map(|body: &[u8; 8]| body)?);
            Some((index, value))
        };
        let request = match code {
            code::SET_FEATURES => number(body).map(Self::SetFeatures),
            code::SET_PROTOCOL_FEATURES => number(body).map(Self::SetProtocolFeatures),
            code::SET_STATUS => number(body).map(Self::SetStatus),
            code::SET_MEM_TABLE => regions(body).map(Self::SetMemTable),
            code::ADD_MEM_REG => single_region(body).map(Self::AddMemReg),
            code::REM_MEM_REG => single_region(body).map(Self::RemMemReg),
            code::SET_LOG_BASE => LogArea::decode(body).map(Self::SetLogBase),
            code::SET_VRING_NUM => ring().map(|(index, size)| Self::SetVringNum { index, size }),
            code::SET_VRING_BASE => ring().map(|(index, base)| Self::SetVringBase { index, base }),
            code::GET_VRING_BASE => ring().map(|(index, _)| Self::GetVringBase { index }),
            code::GET_VRING_BASE_SKIP_DRAIN => {
                ring().map(|(index, _)| Self::GetVringBaseSkipDrain { index })
            }
            code::SET_VRING_ENABLE => {
                ring().map(|(index, value)| Self::SetVringEnable { index, value })
            }
            code::SET_VRING_ADDR => {
                let ring = ring_addresses(body);
                ring.map(|(index, addresses, log)| Self::SetVringAddr { index, addresses, log })
            }
            code::SET_VRING_KICK => {
                ring_fd(body).map(|(index, has_fd)| Self::SetVringKick { index, has_fd })
            }
            code::SET_VRING_CALL => {
                ring_fd(body).map(|(index, has_fd)| Self::SetVringCall { index, has_fd })
            }
            code::SET_VRING_ERR => {
                ring_fd(body).map(|(index, has_fd)| Self::SetVringErr { index, has_fd })
            }
            code::GET_INFLIGHT_FD => InflightArea::decode(body).map(Self::GetInflightFd),
            code::SET_INFLIGHT_FD => InflightArea::decode(body).map(Self::SetInflightFd),
            code::GET_CONFIG => Config::decode(body).map(Self::GetConfig),
            code::SET_CONFIG => Config::decode(body).map(Self::SetConfig),
            _ => return Err(DecodeError::UnknownCode),
        };
        request.ok_or(DecodeError::BadBody)
    }

    /// The number of the message and its body.
    pub fn encode(&self) -> (u32, Vec<u8>) {
        if let Some((code, _)) = EMPTY.iter().find(|(_, request)| request == self) {
            return (*code, Vec::new());
        }
        let ring = |code, index: u32, value: u32| {
            (code, [index.to_ne_bytes(), value.to_ne_bytes()].concat())
        };
        let number = |code, value: u64| (code, value.to_ne_bytes().to_vec());
        let ring_fd = |code, index: u8, has_fd: bool| {
            number(code, u64::from(index) | if has_fd { 0 } else { NO_FD })
        };
        match self {
            Self::SetFeatures(value) => number(code::SET_FEATURES, *value),
            Self::SetProtocolFeatures(value) => number(code::SET_PROTOCOL_FEATURES, *value),
            Self::SetStatus(value) => number(code::SET_STATUS, *value),
            Self::SetMemTable(regions) => {
                let mut body = size_of_body(regions.len()).to_ne_bytes().to_vec();
                body.extend([0; 4]);
                body.extend(regions.iter().flat_map(Region::encode));
                (code::SET_MEM_TABLE, body)
            }
            Self::AddMemReg(region) => (code::ADD_MEM_REG, region.encode_single()),
            Self::RemMemReg(region) => (code::REM_MEM_REG, region.encode_single()),
            Self::SetLogBase(area) => (code::SET_LOG_BASE, area.encode()),
            Self::SetVringNum { index, size } => ring(code::SET_VRING_NUM, *index, *size),
            Self::SetVringBase { index, base } => ring(code::SET_VRING_BASE, *index, *base),
            Self::GetVringBase { index } => ring(code::GET_VRING_BASE, *index, 0),
            Self::GetVringBaseSkipDrain { index } => {
                ring(code::GET_VRING_BASE_SKIP_DRAIN, *index, 0)
            }
            Self::SetVringEnable { index, value } => ring(code::SET_VRING_ENABLE, *index, *value),
            Self::SetVringAddr { index, addresses, log } => {
                let flags = if log.is_some() { VRING_F_LOG } else { 0 };
                let mut body = [*index, flags].map(u32::to_ne_bytes).concat();
                let RingAddresses { desc_table, avail_ring, used_ring } = *addresses;
                for addr in [desc_table, used_ring, avail_ring, log.unwrap_or(0)] {
                    body.extend(addr.to_ne_bytes());
                }
                (code::SET_VRING_ADDR, body)
            }
            Self::SetVringKick { index, has_fd } => ring_fd(code::SET_VRING_KICK, *index, *has_fd),
            Self::SetVringCall { index, has_fd } => ring_fd(code::SET_VRING_CALL, *index, *has_fd),
            Self::SetVringErr { index, has_fd } => ring_fd(code::SET_VRING_ERR, *index, *has_fd),
            Self::GetInflightFd(area) => (code::GET_INFLIGHT_FD, area.encode().to_vec()),
            Self::SetInflightFd(area) => (code::SET_INFLIGHT_FD, area.encode().to_vec()),
            Self::GetConfig(config) => (code::GET_CONFIG, config.encode()),
            Self::SetConfig(config) => (code::SET_CONFIG, config.encode()),
            _ => unreachable!("the others have no body"),
        }
    }
}

impl Request {
    /// The protocol features that a message belongs to.
    pub(super) fn needed_features(&self) -> u64 {
        match self {
            Self::GetQueueNum => protocol_feature::MQ,
            Self::GetConfig(_) | Self::SetConfig(_) => protocol_feature::CONFIG,
            Self::SetLogBase(_) => protocol_feature::LOG_SHMFD,
            Self::SetBackendReqFd => protocol_feature::BACKEND_REQ,
            Self::GetInflightFd(_) | Self::SetInflightFd(_) => protocol_feature::INFLIGHT_SHMFD,
            Self::ResetDevice => protocol_feature::RESET_DEVICE,
            Self::GetVringBaseSkipDrain { .. } => protocol_feature::GET_VRING_BASE_SKIP_DRAIN,
            Self::SetStatus(_) | Self::GetStatus => protocol_feature::STATUS,
            Self::GetMaxMemSlots | Self::AddMemReg(_) | Self::RemMemReg(_) => {
                protocol_feature::CONFIGURE_MEM_SLOTS
            }
            _ => 0,
        }
    }

    /// The number of descriptors that come with a message. Some front-ends send one to remove a
    /// region.
    pub(super) fn expected_fds(&self) -> std::ops::RangeInclusive<usize> {
        let exactly = |count: usize| count..=count;
        match self {
            Self::SetMemTable(regions) => exactly(regions.len()),
            Self::AddMemReg(_)
            | Self::SetBackendReqFd
            | Self::SetInflightFd(_)
            | Self::SetLogBase(_)
            | Self::SetLogFd => exactly(1),
            Self::RemMemReg(_) => 0..=1,
            Self::SetVringKick { has_fd, .. }
            | Self::SetVringCall { has_fd, .. }
            | Self::SetVringErr { has_fd, .. } => exactly(usize::from(*has_fd)),
            _ => exactly(0),
        }
    }
}

/// Messages without a body.
const EMPTY: [(u32, Request); 10] = [
    (code::GET_FEATURES, Request::GetFeatures),
    (code::SET_OWNER, Request::SetOwner),
    (code::RESET_OWNER, Request::ResetOwner),
    (code::SET_LOG_FD, Request::SetLogFd),
    (code::GET_PROTOCOL_FEATURES, Request::GetProtocolFeatures),
    (code::GET_QUEUE_NUM, Request::GetQueueNum),
    (code::SET_BACKEND_REQ_FD, Request::SetBackendReqFd),
    (code::RESET_DEVICE, Request::ResetDevice),
    (code::GET_MAX_MEM_SLOTS, Request::GetMaxMemSlots),
    (code::GET_STATUS, Request::GetStatus),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// A request of each kind, the protocol feature that it needs, and its descriptors.
    fn all() -> Vec<(Request, u64, std::ops::RangeInclusive<usize>)> {
        use Request::*;
        use protocol_feature as feature;
        let region = Region { guest_addr: 1, size: 2, user_addr: 3, file_offset: 4 };
        let addresses = RingAddresses { desc_table: 1, avail_ring: 2, used_ring: 3 };
        let area = InflightArea { size: 1, file_offset: 2, queues: 3, queue_size: 4 };
        let config = Config { offset: 1, flags: 2, data: vec![3, 4] };
        let slots = feature::CONFIGURE_MEM_SLOTS;
        vec![
            (GetFeatures, 0, 0..=0),
            (SetFeatures(1), 0, 0..=0),
            (SetOwner, 0, 0..=0),
            (ResetOwner, 0, 0..=0),
            (SetMemTable(vec![region]), 0, 1..=1),
            (SetMemTable(vec![region; 8]), 0, 8..=8),
            (SetVringNum { index: 1, size: 2 }, 0, 0..=0),
            (SetVringAddr { index: 1, addresses, log: None }, 0, 0..=0),
            (SetVringAddr { index: 1, addresses, log: Some(0x5000) }, 0, 0..=0),
            (SetLogBase(LogArea { size: 1, file_offset: 2 }), feature::LOG_SHMFD, 1..=1),
            (SetLogFd, 0, 1..=1),
            (SetVringBase { index: 1, base: 2 }, 0, 0..=0),
            (GetVringBase { index: 1 }, 0, 0..=0),
            (GetVringBaseSkipDrain { index: 1 }, feature::GET_VRING_BASE_SKIP_DRAIN, 0..=0),
            (SetVringKick { index: 1, has_fd: true }, 0, 1..=1),
            (SetVringKick { index: 1, has_fd: false }, 0, 0..=0),
            (SetVringCall { index: 1, has_fd: true }, 0, 1..=1),
            (SetVringCall { index: 1, has_fd: false }, 0, 0..=0),
            (SetVringErr { index: 1, has_fd: true }, 0, 1..=1),
            (SetVringErr { index: 1, has_fd: false }, 0, 0..=0),
            (GetProtocolFeatures, 0, 0..=0),
            (SetProtocolFeatures(1), 0, 0..=0),
            (GetQueueNum, feature::MQ, 0..=0),
            (SetVringEnable { index: 1, value: 1 }, 0, 0..=0),
            (SetBackendReqFd, feature::BACKEND_REQ, 1..=1),
            (GetConfig(config.clone()), feature::CONFIG, 0..=0),
            (SetConfig(config), feature::CONFIG, 0..=0),
            (GetInflightFd(area), feature::INFLIGHT_SHMFD, 0..=0),
            (SetInflightFd(area), feature::INFLIGHT_SHMFD, 1..=1),
            (ResetDevice, feature::RESET_DEVICE, 0..=0),
            (GetMaxMemSlots, slots, 0..=0),
            (AddMemReg(region), slots, 1..=1),
            // The specification wants a descriptor here; front-ends do not send one.
            (RemMemReg(region), slots, 0..=1),
            (SetStatus(1), feature::STATUS, 0..=0),
            (GetStatus, feature::STATUS, 0..=0),
        ]
    }

    #[test]
    fn each_request_has_its_code_feature_and_descriptors() {
        let mut codes = std::collections::BTreeSet::new();
        for (request, feature, fds) in all() {
            let (code, body) = request.encode();
            codes.insert(code);
            assert_eq!(Request::decode(code, &body), Ok(request.clone()));
            assert_eq!((request.needed_features(), request.expected_fds()), (feature, fds));
        }
        assert_eq!(codes.len(), 30, "one code for each kind");
        for unknown in (0..64).filter(|code| !codes.contains(code)) {
            assert_eq!(Request::decode(unknown, &[]), Err(DecodeError::UnknownCode), "{unknown}");
        }
    }

    /// A body with another length belongs to another version of the message.
    #[test]
    fn a_body_has_exactly_its_bytes() {
        for (request, ..) in all() {
            let (code, body) = request.encode();
            let longer = [&body[..], &[0]].concat();
            let decoded = Request::decode(code, &longer);
            // virtio_uml sends room for more regions.
            let may_be_longer = matches!(request, Request::SetMemTable(_));
            assert_eq!(decoded.is_ok(), may_be_longer, "{request:?}");
            if let Some((_, shorter)) = body.split_last() {
                let decoded = Request::decode(code, shorter);
                assert_eq!(decoded, Err(DecodeError::BadBody), "{request:?}");
            }
        }
    }

    #[test]
    fn headers_that_are_not_understood_are_faults() {
        const MOST: u32 = 4096;
        for (flags, size, expected) in [
            (1, 0, None),
            (1, MOST, None),
            (1 | 8, MOST, None),
            (0, 0, Some("the unsupported version 0")),
            (2, 0, Some("the unsupported version 2")),
            (3 | 8, 0, Some("the unsupported version 3")),
            (1 | 4, 0, Some("unknown flags 0x5")),
            (1 | 16, 0, Some("unknown flags 0x11")),
            (1 | 1 << 31, 0, Some("unknown flags 0x80000001")),
            (1, MOST + 1, Some("announces 4097 bytes")),
            (1, u32::MAX, Some("announces 4294967295 bytes")),
        ] {
            let header = Header { code: code::SET_OWNER, flags, size };
            assert_eq!(Header::decode(&header.encode()), header);
            match (header.fault(), expected) {
                (None, None) => {}
                (Some(fault), Some(expected)) => assert!(fault.contains(expected), "{fault}"),
                other => panic!("{other:?}"),
            }
        }
        let header = Header::new(code::GET_FEATURES, 8);
        assert!(!header.needs_reply() && header.with_need_reply().needs_reply());
        let reply = header.with_need_reply().reply(4);
        assert_eq!((reply.code, reply.flags, reply.size), (code::GET_FEATURES, 5, 4));
    }
}
