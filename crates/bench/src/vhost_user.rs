//! The vhost-user front-end: messages to the server over its Unix socket.
//!
//! It requires of a back-end only the specification's minimum. A back-end without protocol
//! features, or without a configuration space, is driven as far as possible.

#![forbid(unsafe_code)]

use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use iomem::fits;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use virtqueue::QueueConfig;

use crate::memory::SharedMemory;

/// Feature bits of virtio and of vhost-user that concern queues.
pub(crate) mod feature {
    pub(crate) const INDIRECT_DESC: u64 = 1 << 28;
    pub(crate) const EVENT_IDX: u64 = 1 << 29;
    pub(super) const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub(crate) const VERSION_1: u64 = 1 << 32;
    pub(crate) const RING_PACKED: u64 = 1 << 34;
}

/// Protocol features.
mod protocol {
    pub(super) const MQ: u64 = 1 << 0;
    pub(super) const REPLY_ACK: u64 = 1 << 3;
    pub(super) const CONFIG: u64 = 1 << 9;
    pub(super) const INFLIGHT_SHMFD: u64 = 1 << 12;
}

/// A kind of message: its number and its name in the specification.
#[derive(Clone, Copy)]
struct Kind(u32, &'static str);

const GET_FEATURES: Kind = Kind(1, "GET_FEATURES");
const SET_FEATURES: Kind = Kind(2, "SET_FEATURES");
const SET_OWNER: Kind = Kind(3, "SET_OWNER");
const SET_MEM_TABLE: Kind = Kind(5, "SET_MEM_TABLE");
const SET_VRING_NUM: Kind = Kind(8, "SET_VRING_NUM");
const SET_VRING_ADDR: Kind = Kind(9, "SET_VRING_ADDR");
const SET_VRING_BASE: Kind = Kind(10, "SET_VRING_BASE");
const GET_VRING_BASE: Kind = Kind(11, "GET_VRING_BASE");
const SET_VRING_KICK: Kind = Kind(12, "SET_VRING_KICK");
const SET_VRING_CALL: Kind = Kind(13, "SET_VRING_CALL");
const GET_PROTOCOL_FEATURES: Kind = Kind(15, "GET_PROTOCOL_FEATURES");
const SET_PROTOCOL_FEATURES: Kind = Kind(16, "SET_PROTOCOL_FEATURES");
const GET_QUEUE_NUM: Kind = Kind(17, "GET_QUEUE_NUM");
const SET_VRING_ENABLE: Kind = Kind(18, "SET_VRING_ENABLE");
const GET_CONFIG: Kind = Kind(24, "GET_CONFIG");
const SET_INFLIGHT_FD: Kind = Kind(32, "SET_INFLIGHT_FD");

/// Flags of a message.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// The longest reply to any of these messages.
const REPLY_BYTES_MAX: usize = 4096;

/// The user's wishes that concern the protocol.
#[derive(Clone, Copy, Default)]
pub(crate) struct Options {
    /// Keep an inflight region.
    pub(crate) inflight: bool,
    /// Use packed rings.
    pub(crate) packed: bool,
    /// Use indirect tables.
    pub(crate) indirect: bool,
}

/// A connection to a server, with negotiated features.
pub(crate) struct Connection {
    stream: UnixStream,
    features: u64,
    protocol_features: u64,
    max_queues: Option<usize>,
}

impl Connection {
    /// The most queues that messages can name.
    const QUEUES_MAX: usize = 256;

    /// Connects and negotiates features: the offered ones of `wanted` are accepted. Like all
    /// methods, blocks while the server does not answer.
    pub(crate) fn open(path: &Path, wanted: u64, options: Options) -> io::Result<Self> {
        let Options { inflight, packed, indirect } = options;
        let stream = UnixStream::connect(path)?;
        let mut this = Self { stream, features: 0, protocol_features: 0, max_queues: None };
        this.send_checked(SET_OWNER, &[], &[])?;
        this.features = this.exchange_number(GET_FEATURES)? & (wanted | feature::PROTOCOL_FEATURES);
        if packed && !this.is_packed() {
            return Err(io::Error::other("it does not offer packed rings (--packed)"));
        }
        if indirect && this.features & feature::INDIRECT_DESC == 0 {
            return Err(io::Error::other("it does not offer indirect tables (--indirect)"));
        }
        this.send_checked(SET_FEATURES, &this.features.to_ne_bytes(), &[])?;
        if this.has_protocol_features() {
            let usual = protocol::MQ | protocol::REPLY_ACK | protocol::CONFIG;
            let known = if inflight { usual | protocol::INFLIGHT_SHMFD } else { usual };
            let agreed = this.exchange_number(GET_PROTOCOL_FEATURES)? & known;
            this.send_checked(SET_PROTOCOL_FEATURES, &agreed.to_ne_bytes(), &[])?;
            this.protocol_features = agreed;
        }
        if inflight && this.protocol_features & protocol::INFLIGHT_SHMFD == 0 {
            return Err(io::Error::other("it does not know inflight regions (--inflight)"));
        }
        if this.protocol_features & protocol::MQ != 0 {
            let limit = usize::try_from(this.exchange_number(GET_QUEUE_NUM)?).unwrap_or(usize::MAX);
            this.max_queues = Some(limit.min(Self::QUEUES_MAX));
        }
        Ok(this)
    }

    /// The negotiated virtio features.
    pub(crate) fn features(&self) -> u64 {
        self.features
    }

    /// True if rings are packed.
    pub(crate) fn is_packed(&self) -> bool {
        self.features & feature::RING_PACKED != 0
    }

    /// The server's limit on queues; `None` if it reports none.
    pub(crate) fn max_queues(&self) -> Option<usize> {
        self.max_queues
    }

    /// The socket, by which a disconnect of the server is noticed.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Returns true if the server has closed its end.
    pub(crate) fn is_closed(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        Ok(poll(&mut fds, Some(&now))? > 0)
    }

    fn has_protocol_features(&self) -> bool {
        self.features & feature::PROTOCOL_FEATURES != 0
    }

    /// Reads the first `bytes` of the configuration space; `None` if the server keeps none.
    pub(crate) fn config(&self, bytes: usize) -> io::Result<Option<Vec<u8>>> {
        if self.protocol_features & protocol::CONFIG == 0 {
            return Ok(None);
        }
        let size = fits::<_, u32>(bytes, "the size of a configuration space");
        let mut body = words(&[0, size, 0]);
        let head = body.len();
        body.resize(head + bytes, 0);
        let mut reply = self.exchange(GET_CONFIG, &body)?;
        if reply.len() != body.len() {
            let found = reply.len().saturating_sub(head);
            return Err(io::Error::other(format!(
                "it answered GET_CONFIG with {found} bytes instead of {bytes}; it may be a device \
                 of another kind (--device)"
            )));
        }
        Ok(Some(reply.split_off(head)))
    }

    /// Shares `memory` in place of all memory shared before.
    pub(crate) fn share(&self, memory: &SharedMemory) -> io::Result<()> {
        let mut body = words(&[1, 0]);
        for field in [memory.guest_addr(0), memory.size_bytes(), memory.user_addr(0), 0] {
            body.extend(field.to_ne_bytes());
        }
        self.send_checked(SET_MEM_TABLE, &body, &[memory.fd()])
    }

    /// Makes the server mark requests in a fresh inflight region, if that was negotiated. The
    /// region is lost with the server, since the load generator never reconnects.
    pub(crate) fn share_inflight(&self, queues: usize, queue_size: u16) -> io::Result<()> {
        if self.protocol_features & protocol::INFLIGHT_SHMFD == 0 {
            return Ok(());
        }
        // "Inflight I/O tracking": a header, and the same size for each descriptor.
        let unit = if self.is_packed() { 32 } else { 16 };
        let account = (unit + unit * usize::from(queue_size)).next_multiple_of(64);
        let region = SharedMemory::new(queues * account)?;
        let mut body = [region.size_bytes(), 0].map(u64::to_ne_bytes).concat();
        let queues = fits::<_, u16>(queues, "the number of queues");
        body.extend([queues, queue_size, 0, 0].map(u16::to_ne_bytes).concat());
        self.send_checked(SET_INFLIGHT_FD, &body, &[region.fd()])
    }

    /// Starts queue `index` from its first entry.
    pub(crate) fn start_queue(
        &self,
        index: u32,
        config: &QueueConfig,
        memory: &SharedMemory,
        (kick, call): (BorrowedFd<'_>, BorrowedFd<'_>),
    ) -> io::Result<()> {
        self.send_checked(SET_VRING_NUM, &words(&[index, config.size.into()]), &[])?;
        let next = u32::from(config.next_avail);
        // The used elements of a packed ring begin where its chains do.
        let base = if self.is_packed() { next | next << 16 } else { next };
        self.send_checked(SET_VRING_BASE, &words(&[index, base]), &[])?;
        let mut body = words(&[index, 0]);
        for addr in [config.desc_table, config.used_ring, config.avail_ring] {
            body.extend(memory.user_addr(memory.offset(addr)).to_ne_bytes());
        }
        body.extend(0_u64.to_ne_bytes());
        self.send_checked(SET_VRING_ADDR, &body, &[])?;
        let index_alone = u64::from(index).to_ne_bytes();
        self.send_checked(SET_VRING_KICK, &index_alone, &[kick])?;
        self.send_checked(SET_VRING_CALL, &index_alone, &[call])?;
        // Without protocol features a queue is enabled from its start.
        if self.has_protocol_features() {
            self.send_checked(SET_VRING_ENABLE, &words(&[index, 1]), &[])?;
        }
        Ok(())
    }

    /// Stops queue `index`. On return the server has finished with it.
    pub(crate) fn stop_queue(&self, index: u32) -> io::Result<()> {
        self.exchange(GET_VRING_BASE, &words(&[index, 0])).map(drop)
    }

    /// Sends a message that asks for a number, and receives that number.
    fn exchange_number(&self, kind: Kind) -> io::Result<u64> {
        let reply = self.exchange(kind, &[])?;
        let bytes = reply.as_slice().try_into().map_err(|_| {
            let Kind(_, name) = kind;
            io::Error::other(format!("it answered {name} with {} bytes, not 8", reply.len()))
        })?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Sends a message without a reply of its own, and checks that it was carried out if the server
    /// can acknowledge that.
    fn send_checked(&self, kind: Kind, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        if self.protocol_features & protocol::REPLY_ACK == 0 {
            return self.send(kind, VERSION, body, fds);
        }
        self.send(kind, VERSION | NEED_REPLY, body, fds)?;
        if self.receive(kind)?.iter().any(|byte| *byte != 0) {
            let Kind(_, name) = kind;
            return Err(io::Error::other(format!("it refused {name}; its log may say why")));
        }
        Ok(())
    }

    /// Sends a message with a reply, and receives the reply.
    fn exchange(&self, kind: Kind, body: &[u8]) -> io::Result<Vec<u8>> {
        self.send(kind, VERSION, body, &[])?;
        self.receive(kind)
    }

    fn send(&self, kind: Kind, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let Kind(number, _) = kind;
        let size = fits::<_, u32>(body.len(), "the size of a message");
        let bytes = [&*words(&[number, flags, size]), body].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let send =
            || sendmsg(&self.stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
        let sent = rustix::io::retry_on_intr(send)
            .map_err(|error| connection_error(kind, &error.into()))?;
        (&self.stream).write_all(&bytes[sent..]).map_err(|error| connection_error(kind, &error))
    }

    /// Receives the reply to a message of this kind.
    fn receive(&self, kind: Kind) -> io::Result<Vec<u8>> {
        let Kind(number, name) = kind;
        let mut head = [[0; 4]; 3];
        (&self.stream)
            .read_exact(head.as_flattened_mut())
            .map_err(|error| connection_error(kind, &error))?;
        let [request, flags, size] = head.map(u32::from_ne_bytes);
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        let is_reply = flags & (REPLY | VERSION_MASK) == (REPLY | VERSION);
        if request != number || !is_reply || size > REPLY_BYTES_MAX {
            return Err(io::Error::other(format!(
                "it answered {name}, which is message {number}, with message {request}, flags \
                 {flags:#x}, {size} bytes: it violates the vhost-user protocol"
            )));
        }
        let mut body = vec![0; size];
        (&self.stream).read_exact(&mut body).map_err(|error| connection_error(kind, &error))?;
        Ok(body)
    }
}

fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

/// Describes a failure to send a message or to receive its reply.
fn connection_error(Kind(_, name): Kind, error: &io::Error) -> io::Error {
    let closed =
        [io::ErrorKind::UnexpectedEof, io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset];
    if closed.contains(&error.kind()) {
        return io::Error::other(format!("it closed the connection at {name}"));
    }
    io::Error::other(format!("{name}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::thread;

    /// Connects to a server that answers each message with the next of `replies`.
    fn open_against(replies: Vec<Vec<u8>>) -> io::Result<Connection> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            for reply in replies {
                let mut head = [[0; 4]; 3];
                stream.read_exact(head.as_flattened_mut()).unwrap();
                let [_, _, size] = head.map(u32::from_ne_bytes);
                stream.read_exact(&mut vec![0; usize::try_from(size).unwrap()]).unwrap();
                stream.write_all(&reply).unwrap();
            }
        });
        let connection = Connection::open(&path, feature::VERSION_1, Options::default());
        server.join().unwrap();
        connection
    }

    fn answer(number: u32, value: u64) -> Vec<u8> {
        [words(&[number, REPLY | VERSION, 8]), value.to_ne_bytes().to_vec()].concat()
    }

    #[test]
    fn a_server_without_protocol_features_is_accepted() {
        let offered = feature::VERSION_1 | feature::EVENT_IDX;
        let connection = open_against(vec![vec![], answer(1, offered), vec![]]).unwrap();
        assert_eq!(connection.features(), feature::VERSION_1);
        assert_eq!(connection.max_queues(), None);
        assert_eq!(connection.config(60).unwrap(), None);
    }

    #[test]
    fn a_server_without_a_configuration_space_is_accepted() {
        let replies = vec![
            vec![],
            answer(1, feature::VERSION_1 | feature::PROTOCOL_FEATURES),
            vec![],
            answer(15, protocol::MQ),
            vec![],
            answer(17, 5),
        ];
        let connection = open_against(replies).unwrap();
        assert_eq!(connection.max_queues(), Some(5));
        assert_eq!(connection.config(36).unwrap(), None);
    }

    #[test]
    fn closed_connections_and_invalid_replies_are_described() {
        for (replies, words) in [
            (vec![vec![]], "closed the connection at GET_FEATURES"),
            (vec![vec![], answer(15, 0)], "with message 15"),
            (vec![vec![], b"HTTP/1.1 400 Bad request".to_vec()], "vhost-user protocol"),
            (
                vec![
                    vec![],
                    answer(1, feature::PROTOCOL_FEATURES),
                    vec![],
                    answer(15, protocol::MQ | protocol::REPLY_ACK),
                    vec![],
                    vec![],
                ],
                "closed the connection at GET_QUEUE_NUM",
            ),
        ] {
            let error = open_against(replies).map(drop).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
