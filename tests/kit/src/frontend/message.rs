//! vhost-user messages as bytes, good and bad ones, and their socket.
//!
//! Nothing here checks a message before it is sent: that is the daemon's part.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::memory::{Region, wait_readable};
use crate::daemon::LIMIT;

/// Request numbers ("Front-end message types" of the vhost-user specification).
#[expect(missing_docs, reason = "the names are the specification's")]
pub mod code {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
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
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const GET_VRING_BASE_SKIP_DRAIN: u32 = 45;
    /// Larger than any number that the specification has assigned.
    pub const MAX: u32 = 64;
}

/// Flags of a message: version 1.
pub const VERSION: u32 = 1;
/// The message is a reply.
pub const REPLY: u32 = 1 << 2;
/// The sender requests a reply about the result.
pub const NEED_REPLY: u32 = 1 << 3;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 12;

/// In the index of a ring: the message has no descriptor.
pub const NO_FD: u64 = 1 << 8;

/// A message to send.
#[derive(Clone, Debug)]
pub struct Message {
    /// The request number, see [`code`].
    pub request: u32,
    /// Version, [`REPLY`], [`NEED_REPLY`].
    pub flags: u32,
    /// The size of the body according to the header, right or wrong.
    pub size: u32,
    /// The body.
    pub body: Vec<u8>,
    /// The descriptors to send with it.
    pub fds: Vec<Arc<OwnedFd>>,
}

impl Message {
    /// A message with a correct header.
    #[must_use]
    pub fn new(request: u32, body: Vec<u8>) -> Self {
        let size = u32::try_from(body.len()).expect("a length in memory of a test fits");
        Self { request, flags: VERSION, size, body, fds: Vec::new() }
    }

    /// A message with a number as its body.
    #[must_use]
    pub fn number(request: u32, value: u64) -> Self {
        Self::new(request, value.to_ne_bytes().to_vec())
    }

    /// A message on the state of a ring.
    #[must_use]
    pub fn ring_state(request: u32, index: u32, value: u32) -> Self {
        Self::new(request, [index.to_ne_bytes(), value.to_ne_bytes()].concat())
    }

    /// A message with a ring's descriptor, or without one.
    #[must_use]
    pub fn ring_fd(request: u32, index: u8, fd: Option<&Arc<OwnedFd>>) -> Self {
        let flag = if fd.is_some() { 0 } else { NO_FD };
        let mut message = Self::number(request, u64::from(index) | flag);
        message.fds.extend(fd.cloned());
        message
    }

    /// The message with a ring's place, in addresses of the front-end.
    #[must_use]
    pub fn ring_addresses(index: u32, desc_table: u64, used_ring: u64, avail_ring: u64) -> Self {
        let mut body = [index.to_ne_bytes(), 0_u32.to_ne_bytes()].concat();
        for addr in [desc_table, used_ring, avail_ring, 0] {
            body.extend_from_slice(&addr.to_ne_bytes());
        }
        Self::new(code::SET_VRING_ADDR, body)
    }

    /// The message that shares all regions at once.
    #[must_use]
    pub fn memory_table(regions: &[&Region]) -> Self {
        let count = u32::try_from(regions.len()).expect("a length in memory of a test fits");
        let mut body = [count.to_ne_bytes(), 0_u32.to_ne_bytes()].concat();
        body.extend(regions.iter().flat_map(|region| region.description()));
        let mut message = Self::new(code::SET_MEM_TABLE, body);
        message.fds = regions.iter().map(|region| Arc::clone(&region.file)).collect();
        message
    }

    /// The message that adds a region.
    #[must_use]
    pub fn add_region(region: &Region) -> Self {
        let body = [0_u64.to_ne_bytes().to_vec(), region.description()].concat();
        let mut message = Self::new(code::ADD_MEM_REG, body);
        message.fds.push(Arc::clone(&region.file));
        message
    }

    /// The message that removes a region.
    #[must_use]
    pub fn remove_region(region: &Region) -> Self {
        let body = [0_u64.to_ne_bytes().to_vec(), region.description()].concat();
        Self::new(code::REM_MEM_REG, body)
    }

    /// The message with an inflight region of `bytes` bytes, for `queues` queues of `queue_size`
    /// entries.
    #[must_use]
    pub fn inflight_region(
        region: &Arc<OwnedFd>,
        bytes: u64,
        queues: u16,
        queue_size: u16,
    ) -> Self {
        let mut area = [bytes, 0].map(u64::to_ne_bytes).concat();
        area.extend([queues, queue_size, 0, 0].map(u16::to_ne_bytes).concat());
        Self::new(code::SET_INFLIGHT_FD, area).with_fd(region)
    }

    /// A read of the configuration space, or a write of `data`.
    #[must_use]
    pub fn config(request: u32, offset: u32, data: &[u8]) -> Self {
        let size = u32::try_from(data.len()).expect("a length in memory of a test fits");
        let head = [offset.to_ne_bytes(), size.to_ne_bytes(), 0_u32.to_ne_bytes()].concat();
        Self::new(request, [head, data.to_vec()].concat())
    }

    /// Requests a reply about the result.
    #[must_use]
    pub fn needs_reply(mut self) -> Self {
        self.flags |= NEED_REPLY;
        self
    }

    /// Adds a descriptor.
    #[must_use]
    pub fn with_fd(mut self, fd: &Arc<OwnedFd>) -> Self {
        self.fds.push(Arc::clone(fd));
        self
    }

    /// Header and body.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let head = [self.request, self.flags, self.size].map(u32::to_ne_bytes).concat();
        [head, self.body.clone()].concat()
    }
}

/// An answer of the daemon.
#[derive(Clone, Debug)]
pub struct Reply {
    /// The number of the request that it answers.
    pub request: u32,
    /// Version and [`REPLY`].
    pub flags: u32,
    /// The body.
    pub body: Vec<u8>,
}

impl Reply {
    /// The number in the body.
    ///
    /// # Errors
    /// If the body is no number.
    pub fn number(&self) -> Result<u64> {
        let bytes = self.body.as_slice().try_into();
        Ok(u64::from_ne_bytes(bytes.with_context(|| format!("{self:?} is not a number"))?))
    }
}

/// A connection to the daemon.
#[derive(Debug)]
pub struct Channel {
    stream: UnixStream,
    /// All messages sent so far, in order.
    pub sent: Vec<Message>,
}

impl Channel {
    /// Connects. On return the daemon may not have accepted the connection.
    ///
    /// # Errors
    /// If no daemon listens.
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("connecting to {}", socket.display()))?;
        stream.set_write_timeout(Some(LIMIT)).context("setting a time limit")?;
        Ok(Self { stream, sent: Vec::new() })
    }

    /// Sends bytes, with descriptors beside the first of them.
    ///
    /// # Errors
    /// If the daemon has closed the connection, or does not receive them in time.
    pub fn send_bytes(&mut self, bytes: &[u8], fds: &[Arc<OwnedFd>]) -> Result<()> {
        let raw: Vec<_> = fds.iter().map(|fd| fd.as_fd().as_raw_fd()).collect();
        let sent = self.stream.send_with_fds(&[bytes], &raw).map_err(std::io::Error::from);
        let sent = sent.context("sending to the daemon")?;
        self.stream.write_all(&bytes[sent..]).context("sending to the daemon")
    }

    /// Sends a message.
    ///
    /// # Errors
    /// As for [`send_bytes`](Self::send_bytes).
    pub fn send(&mut self, message: &Message) -> Result<()> {
        self.sent.push(message.clone());
        self.send_bytes(&message.bytes(), &message.fds)
    }

    /// Receives the next reply; `None` if the daemon has closed the connection.
    ///
    /// # Errors
    /// If none arrives in time, or it is malformed.
    pub fn receive(&mut self) -> Result<Option<Reply>> {
        let mut head = [0; HEADER_BYTES];
        if !self.fill(&mut head)? {
            return Ok(None);
        }
        let word = |at: usize| {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(&head[at..at + 4]);
            u32::from_ne_bytes(bytes)
        };
        let (request, flags, size) = (word(0), word(4), word(8));
        ensure!(flags & (REPLY | 3) == (REPLY | VERSION), "an answer has flags {flags:#x}");
        ensure!(size <= 4096, "an answer has {size} bytes");
        let mut body = vec![0; usize::try_from(size)?];
        ensure!(self.fill(&mut body)?, "an answer was cut short");
        Ok(Some(Reply { request, flags, body }))
    }

    /// Sends a message and receives the reply; `None` if the daemon has closed the connection
    /// instead.
    ///
    /// # Errors
    /// As for [`receive`](Self::receive).
    pub fn exchange(&mut self, message: &Message) -> Result<Option<Reply>> {
        if self.send(message).is_err() {
            return Ok(None);
        }
        let reply = self.receive()?;
        if let Some(reply) = &reply
            && reply.request != message.request
        {
            bail!("request {} was answered by {reply:?}", message.request);
        }
        Ok(reply)
    }

    /// Waits until the daemon closes the connection, and discards replies until then.
    ///
    /// # Errors
    /// If it does not in time.
    pub fn wait_closed(&mut self) -> Result<()> {
        while self.receive().context("waiting for the daemon to close the connection")?.is_some() {}
        Ok(())
    }

    /// Returns true if the daemon has closed the connection, even with replies still to be read.
    ///
    /// # Errors
    /// If the kernel cannot poll the socket.
    pub fn is_closed(&self) -> Result<bool> {
        let mut fds = [PollFd::new(&self.stream, PollFlags::empty())];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).context("looking at a socket")?;
        Ok(fds[0].revents().contains(PollFlags::HUP))
    }

    /// Duplicates the descriptor of this end.
    ///
    /// # Errors
    /// If the kernel has no descriptor left.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        Ok(self.stream.try_clone().context("duplicating a socket")?.into())
    }

    /// Fills `bytes`; false if the connection is reset, or closed before the first byte.
    fn fill(&mut self, bytes: &mut [u8]) -> Result<bool> {
        let mut filled = 0;
        while filled < bytes.len() {
            // The socket's own time limit does not help: the daemon may have made the socket
            // non-blocking.
            wait_readable(&self.stream, "answer of the daemon")?;
            match self.stream.read(&mut bytes[filled..]) {
                Ok(0) if filled == 0 => return Ok(false),
                Ok(0) => bail!("an answer was cut short after {filled} bytes"),
                Ok(count) => filled += count,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("waiting for an answer of the daemon"),
            }
        }
        Ok(true)
    }
}
