//! The bytes of one connection: requests are gathered and sent, replies are received and parsed.
//! Nothing here has a task or waits.

use std::io;
use std::os::fd::BorrowedFd;

use libc::iovec;

use super::answer::Action;
use super::connect::Connected;
use super::handshake::Facts;
use super::requests::{Requests, State, is_large_read};
use super::shared::SharedExport;
use super::transport::{Ranges, ReceiveRanges, SendRanges, Transferred, Transport};
use super::wire::{
    Command, Header, Parsed, REPLY_BYTES_MAX, Reply, ReplyContent, Request, Violation, parse,
};

/// Memory for received bytes without a place yet: many replies with little data.
const STAGING_BYTES: usize = 256 << 10;

/// The most requests in one send.
const SENT_AT_ONCE: usize = 128;

/// The most receives in one call, before other tasks have their turn.
const RECEIVES_MAX: usize = 16;

/// The bytes of holes after which a call zeroes no more. A reply of some bytes can stand for a hole
/// as long as its read.
const ZEROED_BYTES: usize = 1 << 20;

/// The reason why a connection can no longer be used.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Broken {
    /// The server has closed it, or is gone: it has ended its requests.
    Gone(String),
    /// The kernel here has ended it. The server may not know that, and may not have ended its
    /// requests.
    Cut(String),
    /// The machine of the server is silent. It may answer later.
    Silent(String),
    /// The connection works, but its bytes are not understood.
    Unusable(String),
    /// The server does not answer in time, though its machine does. It may do so later.
    Late(String),
}

impl Broken {
    /// Classifies an error of the socket.
    fn from_io_error(verb: &str, error: &io::Error) -> Self {
        let why = format!("cannot {verb} the server: {error}");
        match error.raw_os_error() {
            Some(libc::ECONNRESET | libc::EPIPE | libc::ENOTCONN | libc::ECONNABORTED) => {
                Self::Gone(why)
            }
            Some(
                libc::ETIMEDOUT
                | libc::EHOSTUNREACH
                | libc::ENETUNREACH
                | libc::EHOSTDOWN
                | libc::ENETDOWN,
            ) => Self::Cut(why),
            _ => Self::Unusable(why),
        }
    }
}

/// A connection, and the progress of each direction.
pub(super) struct Channel {
    index: usize,
    transport: Transport,
    facts: Facts,
    /// Bytes of the first request in the queue that were sent.
    begun: usize,
    is_writable: bool,
    is_readable: bool,
    staging: Box<[u8]>,
    /// The bounds of the received bytes that are not parsed.
    start: usize,
    end: usize,
    /// The place of the next bytes.
    data: Option<Data>,
    was_answered: bool,
    /// True if an answer came since the last `take_answered`.
    answered_since_check: bool,
    /// Bytes of holes in this call of [`receive`](Self::receive).
    zeroed: usize,
    headers: Vec<Header>,
    storage: Vec<iovec>,
}

/// Data of a read that is on its way.
#[derive(Debug, Clone, Copy)]
struct Data {
    slot: u32,
    at: usize,
    left: usize,
    /// True if the request ends after it.
    is_last: bool,
}

impl Channel {
    pub(super) fn new(index: usize, connected: Connected) -> Self {
        Self {
            index,
            transport: connected.transport,
            facts: connected.facts,
            begun: 0,
            is_writable: true,
            is_readable: true,
            staging: vec![0; STAGING_BYTES].into(),
            start: 0,
            end: 0,
            data: None,
            was_answered: false,
            answered_since_check: false,
            zeroed: 0,
            headers: Vec::new(),
            storage: Vec::new(),
        }
    }

    /// Returns true if nothing is on its way in either direction.
    pub(super) fn is_idle(&self, requests: &Requests) -> bool {
        !self.is_busy(requests)
            && !self.transport.has_unsent()
            && self.start == self.end
            && self.data.is_none()
    }

    /// Returns the connection, without bytes that are on their way.
    pub(super) fn into_connected(self) -> Connected {
        Connected { transport: self.transport, facts: self.facts }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.transport.socket()
    }

    /// The server's facts about the export on this connection.
    pub(super) fn facts(&self) -> &Facts {
        &self.facts
    }

    pub(super) fn may_receive(&mut self) {
        self.is_readable = true;
    }

    pub(super) fn may_send(&mut self) {
        self.is_writable = true;
    }

    /// Returns true if requests wait for room in the socket.
    pub(super) fn is_full(&self) -> bool {
        !self.is_writable
    }

    /// Returns true if any request was answered.
    pub(super) fn was_answered(&self) -> bool {
        self.was_answered
    }

    /// Returns true if an answer came since the last call.
    pub(super) fn take_answered(&mut self) -> bool {
        std::mem::take(&mut self.answered_since_check)
    }

    /// Returns true if there are requests without an answer.
    pub(super) fn is_busy(&self, requests: &Requests) -> bool {
        let link = &requests.links[self.index];
        link.sent + link.sending.len() > 0
    }

    /// Announces the end of the requests.
    pub(super) fn send_disconnect(&mut self) {
        let request = Request { command: Command::Disconnect, flags: 0, offset: 0, len: 0 };
        let header = request.encode(0, self.facts.framing);
        let mut gathered = SendRanges(Ranges::new(Vec::new()));
        gathered.push_bytes(header.as_bytes());
        // Without it, the server sees the socket close.
        let _ = self.transport.send(&gathered);
    }

    /// Sends requests, as far as the socket has room.
    ///
    /// # Errors
    ///
    /// The reason why the connection can no longer be used.
    pub(super) fn send(&mut self, requests: &mut Requests) -> Result<(), Broken> {
        while self.is_writable
            && (self.transport.has_unsent() || !requests.links[self.index].sending.is_empty())
        {
            let (sent, has_room) = match self.send_some(requests) {
                Ok(sent) => sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.is_writable = false;
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Broken::from_io_error("send to", &error)),
            };
            self.is_writable = has_room;
            self.record_sent(requests, sent);
        }
        Ok(())
    }

    /// Sends by one system call.
    fn send_some(&mut self, requests: &Requests) -> io::Result<Transferred> {
        let sending = &requests.links[self.index].sending;
        let framing = self.facts.framing;
        self.headers.clear();
        self.headers.extend(sending.iter().take(SENT_AT_ONCE).map(|&number| {
            let slot = &requests.slots[number as usize];
            slot.request().encode(cookie(number, slot.serial), framing)
        }));
        let storage = std::mem::take(&mut self.storage);
        let mut gathered = SendRanges(Ranges::new(storage));
        let mut skip = self.begun;
        for (&number, header) in sending.iter().zip(&self.headers) {
            let header = header.as_bytes();
            gathered.push_bytes(header.get(skip..).unwrap_or_default());
            let slot = &requests.slots[number as usize];
            if slot.request().command == Command::Write {
                gathered.push_memory(&slot.buffers, skip.saturating_sub(header.len()));
            }
            skip = 0;
            if gathered.0.is_full() {
                break;
            }
        }
        let sent = self.transport.send(&gathered);
        self.storage = gathered.0.into_storage();
        sent
    }

    /// Records the bytes that were sent.
    fn record_sent(&mut self, requests: &mut Requests, sent: usize) {
        let mut left = self.begun + sent;
        let Requests { slots, links, .. } = requests;
        let link = &mut links[self.index];
        for header in &self.headers {
            let Some(&number) = link.sending.front() else { break };
            let slot = &mut slots[number as usize];
            let request = slot.request();
            let is_write = request.command == Command::Write;
            let data = if is_write { slot.buffers.bytes() } else { 0 };
            let whole = header.as_bytes().len() + data;
            if left < whole {
                break;
            }
            left -= whole;
            slot.state = State::Sent(self.index);
            link.sending.pop_front();
            link.sent += 1;
            link.large_reads += usize::from(is_large_read(&request));
        }
        self.begun = left;
    }

    /// Receives replies, and handles them. Returns true if there may be more.
    ///
    /// # Errors
    ///
    /// The reason why the connection can no longer be used.
    pub(super) fn receive(
        &mut self,
        requests: &mut Requests,
        shared: &SharedExport,
    ) -> Result<bool, Broken> {
        // The last call may have left replies.
        self.zeroed = 0;
        self.parse_received(requests, shared)?;
        for _ in 0..RECEIVES_MAX {
            if self.zeroed >= ZEROED_BYTES {
                return Ok(true);
            }
            if !self.is_readable {
                return Ok(false);
            }
            match self.receive_some(requests) {
                Ok((0, _)) => return Err(Broken::Gone(CLOSED.to_owned())),
                Ok((bytes, direct)) => self.account_received(bytes, direct),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.is_readable = false;
                    return Ok(false);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Broken::from_io_error("receive from", &error)),
            }
            self.parse_received(requests, shared)?;
        }
        Ok(true)
    }

    fn parse_received(
        &mut self,
        requests: &mut Requests,
        shared: &SharedExport,
    ) -> Result<(), Broken> {
        self.parse_staged(requests, shared).map_err(|violation| match violation {
            SHUTS_DOWN => Broken::Unusable("the server is shutting down".to_owned()),
            Violation(what) => {
                Broken::Unusable(format!("the server violates the NBD protocol: {what}"))
            }
        })
    }

    /// Closes the sending direction: the server ends its requests, and then the connection.
    pub(super) fn half_close(&mut self) {
        // A failure means that the connection has gone, which the next receive reports.
        let _ = rustix::net::shutdown(self.transport.socket(), rustix::net::Shutdown::Write);
    }

    /// Receives bytes that are not understood, so that the server is not held up. Returns true if
    /// there may be more.
    ///
    /// # Errors
    ///
    /// If the connection has gone.
    pub(super) fn discard(&mut self) -> Result<bool, Broken> {
        for _ in 0..RECEIVES_MAX {
            let flags = rustix::net::RecvFlags::DONTWAIT;
            match rustix::net::recv(self.transport.socket(), &mut self.staging[..], flags) {
                Ok((_, 0)) => return Err(Broken::Gone(CLOSED.to_owned())),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                Err(errno) => return Err(Broken::from_io_error("receive from", &errno.into())),
            }
        }
        Ok(true)
    }

    /// Receives by one system call: data to its place, the rest into the staging memory. Returns
    /// the number of bytes that came, and the room in the place of the data, which is filled first.
    fn receive_some(&mut self, requests: &Requests) -> io::Result<(usize, usize)> {
        self.staging.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let storage = std::mem::take(&mut self.storage);
        let mut scattered = ReceiveRanges(Ranges::new(storage));
        if let Some(data) = &self.data {
            let buffers = &requests.slots[data.slot as usize].buffers;
            scattered.push_memory(buffers, data.at, data.left);
        }
        let direct = scattered.0.bytes();
        let (is_whole, is_unwanted) = match self.data {
            Some(data) => (data.left == direct, direct == 0),
            None => (true, false),
        };
        // The header of the next reply comes alone if its data is worth a call of its own.
        let much = requests.links[self.index].large_reads > 0;
        let room = match (is_unwanted, is_whole, much) {
            // The request's memory is gone, and its data ends in the staging memory.
            (true, ..) | (_, true, false) => STAGING_BYTES,
            (_, true, true) => self.end + HEADER_BYTES,
            (_, false, _) => self.end,
        };
        scattered.push_bytes(self.staging.get_mut(self.end..room).unwrap_or_default());
        let received = self.transport.receive(&mut scattered);
        self.storage = scattered.0.into_storage();
        let (received, has_more) = received?;
        self.is_readable = has_more;
        Ok((received, direct))
    }

    /// Accounts for received bytes, which fill the place of the data first.
    fn account_received(&mut self, bytes: usize, direct: usize) {
        let direct = direct.min(bytes);
        if let Some(data) = &mut self.data {
            data.at += direct;
            data.left -= direct;
        }
        self.end += bytes - direct;
    }

    fn parse_staged(
        &mut self,
        requests: &mut Requests,
        shared: &SharedExport,
    ) -> Result<(), Violation> {
        loop {
            if let Some(data) = &mut self.data {
                let here = self.staging.get(self.start..self.end).unwrap_or_default();
                let part = here.get(..data.left).unwrap_or(here);
                let buffers = &requests.slots[data.slot as usize].buffers;
                buffers.copy_from(data.at, part);
                self.start += part.len();
                data.at += part.len();
                data.left -= part.len();
                if data.left > 0 {
                    return Ok(());
                }
                let (slot, is_last) = (data.slot, data.is_last);
                self.data = None;
                if is_last {
                    self.finish(requests, slot, shared)?;
                }
            }
            if self.zeroed >= ZEROED_BYTES {
                return Ok(());
            }
            let here = self.staging.get(self.start..self.end).unwrap_or_default();
            match parse(here, self.facts.framing)? {
                Parsed::Needs(bytes) => {
                    assert!(bytes <= REPLY_BYTES_MAX, "a reply of bounded length");
                    return Ok(());
                }
                Parsed::Reply(reply, used) => {
                    self.start += used;
                    self.handle_part(requests, &reply, shared)?;
                }
            }
        }
    }

    /// Handles a part of a reply.
    fn handle_part(
        &mut self,
        requests: &mut Requests,
        reply: &Reply,
        shared: &SharedExport,
    ) -> Result<(), Violation> {
        let number = u32::try_from(reply.cookie & u64::from(u32::MAX)).unwrap_or(u32::MAX);
        let slot = requests.slots.get_mut(number as usize).filter(|slot| {
            slot.state == State::Sent(self.index) && cookie(number, slot.serial) == reply.cookie
        });
        let Some(slot) = slot else {
            return Err(Violation("it answered a request that was not sent"));
        };
        if reply.content == ReplyContent::Error(SHUTDOWN) {
            return Err(SHUTS_DOWN);
        }
        let (framing, context) = (self.facts.framing, self.facts.context);
        let len = |len: u64| usize::try_from(len).unwrap_or(usize::MAX);
        match slot.progress.record(&slot.request(), reply, framing, context)? {
            Action::Receive { at, len: bytes } => {
                let is_last = reply.is_last;
                self.data = Some(Data { slot: number, at: len(at), left: len(bytes), is_last });
                return Ok(());
            }
            Action::Zero { at, len: bytes } => {
                let mut part = slot.buffers.duplicate();
                part.truncate(len(at + bytes));
                part.zero_from(len(at));
                self.zeroed += len(bytes);
            }
            Action::Nothing => {}
        }
        if reply.is_last { self.finish(requests, number, shared) } else { Ok(()) }
    }

    fn finish(
        &mut self,
        requests: &mut Requests,
        number: u32,
        shared: &SharedExport,
    ) -> Result<(), Violation> {
        let slot = &requests.slots[number as usize];
        let result = slot.progress.finish(&slot.request())?;
        (self.was_answered, self.answered_since_check) = (true, true);
        requests.handle_answer(number, result, shared);
        Ok(())
    }
}

const CLOSED: &str = "the server has closed the connection";

/// The head of any reply, with the offset of its data.
const HEADER_BYTES: usize = 40;

/// The requests are to be made again, on another connection.
const SHUTS_DOWN: Violation = Violation("it is shutting down");

/// The protocol's ESHUTDOWN.
const SHUTDOWN: u32 = 108;

fn cookie(number: u32, serial: u32) -> u64 {
    u64::from(serial) << 32 | u64::from(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_close_by_the_server_ends_its_requests() {
        let by = |errno| Broken::from_io_error("send to", &io::Error::from_raw_os_error(errno));
        for errno in [libc::ECONNRESET, libc::EPIPE, libc::ENOTCONN, libc::ECONNABORTED] {
            assert!(matches!(by(errno), Broken::Gone(_)), "{errno}");
        }
        let cut = [libc::ETIMEDOUT, libc::EHOSTUNREACH, libc::ENETUNREACH];
        for errno in cut.into_iter().chain([libc::EHOSTDOWN, libc::ENETDOWN]) {
            assert!(matches!(by(errno), Broken::Cut(_)), "{errno}");
        }
        let garbage = io::Error::new(io::ErrorKind::InvalidData, "no TLS");
        assert!(matches!(Broken::from_io_error("receive from", &garbage), Broken::Unusable(_)));
        assert!(matches!(by(libc::ENOBUFS), Broken::Unusable(_)));
    }
}
