//! The connection to a front-end: messages in, answers out, and never a wait.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, send, sendmsg,
};

use super::examiner::Examiner;
use super::foreign::{ForeignFd, OwnSocket, PeerSocket};
use super::message::{HEADER_BYTES, Header};

/// The most descriptors that the kernel lets through with one message (`SCM_MAX_FD`).
const MAX_FDS: usize = 253;

/// How long a message that has begun may take to arrive, and an answer to be taken.
pub(super) const MESSAGE_LIMIT: Duration = Duration::from_secs(10);

/// A whole message.
pub(super) struct Message {
    pub(super) header: Header,
    pub(super) body: Vec<u8>,
    pub(super) fds: Vec<ForeignFd>,
    /// Why some of its descriptors are missing.
    pub(super) lost_fds: Option<String>,
}

/// What has come.
pub(super) enum Received {
    /// No whole message yet.
    Nothing,
    Message(Message),
    /// The front-end has closed the connection, or it broke.
    Closed(Option<io::Error>),
    /// This is no vhost-user. Nothing after it can be understood.
    Nonsense(String),
}

/// A connected Unix socket. Whether it is non-blocking, which who shares it may change at any time,
/// does not matter.
pub(super) struct Channel {
    socket: PeerSocket,
    examiner: Arc<Examiner>,
    /// The message that comes: its bytes so far.
    pub(super) input: Vec<u8>,
    /// As soon as it is there.
    header: Option<Header>,
    pub(super) fds: Vec<ForeignFd>,
    pub(super) lost_fds: Option<String>,
    /// When the first byte came.
    input_since: Option<Instant>,
    /// What is left of the answer. The next message is not read before it is taken.
    pub(super) output: Vec<u8>,
    /// Goes with the first byte of it.
    pub(super) output_fd: Option<OwnedFd>,
    output_since: Option<Instant>,
    /// The front-end was seen to have closed the connection.
    was_hung_up: bool,
}

impl Channel {
    pub(super) fn new(socket: UnixStream, examiner: Arc<Examiner>) -> Self {
        Self {
            socket: PeerSocket::new(socket, Arc::clone(&examiner)),
            examiner,
            input: Vec::new(),
            header: None,
            fds: Vec::new(),
            lost_fds: None,
            input_since: None,
            output: Vec::new(),
            output_fd: None,
            output_since: None,
            was_hung_up: false,
        }
    }

    /// While it is lent, the connection is another process's to end.
    pub(super) fn lend(&mut self, is_lent: bool) {
        self.socket.is_lent = is_lent;
    }

    pub(super) fn own(&self) -> OwnSocket {
        OwnSocket::of(&self.socket)
    }

    /// Goes on where another process has left off: with what it had read, and not written.
    pub(super) fn go_on(&mut self, input: Vec<u8>, output: Vec<u8>, now: Instant) {
        self.input_since = (!input.is_empty()).then_some(now);
        (self.input, self.output) = (input, output);
    }

    /// Reads what has come, up to the end of one message. The front-end has `rings` descriptors
    /// open here that are not in messages.
    pub(super) fn receive(&mut self, now: Instant, rings: usize) -> Received {
        loop {
            let whole = HEADER_BYTES + self.header.map_or(0, |header| header.size as usize);
            if self.input.len() < whole {
                // They belong to the header; what comes with the body belongs to nothing.
                if self.examiner.is_full() && self.socket.has_unread() {
                    let text = "descriptors of earlier messages cannot be closed, because what \
                                they lead to hangs";
                    return Received::Closed(Some(io::Error::other(text)));
                }
                let expected_fds = self.header.map_or(MAX_FDS, |_| self.fds.len());
                match self.read_up_to(whole) {
                    Ok(0) => return Received::Closed(None),
                    Ok(_) => self.input_since = self.input_since.or(Some(now)),
                    Err(Errno::AGAIN) => return Received::Nothing,
                    Err(Errno::INTR) => {}
                    Err(error) => return Received::Closed(Some(error.into())),
                }
                if !self.fds.is_empty()
                    && let Some(why) = self.examiner.lacks_room(rings)
                {
                    self.fds.clear();
                    self.lost_fds = Some(why);
                }
                if self.fds.len() > expected_fds {
                    return Received::Nonsense("more descriptors than a header can bring".into());
                }
                continue;
            }
            if let Some(header) = self.header {
                return Received::Message(self.take_message(header));
            }
            if let Some(bytes) = self.input.first_chunk() {
                let header = Header::decode(bytes);
                if let Some(fault) = header.fault() {
                    return Received::Nonsense(fault);
                }
                self.header = Some(header);
            }
        }
    }

    fn take_message(&mut self, header: Header) -> Message {
        (self.header, self.input_since) = (None, None);
        let body = self.input.split_off(HEADER_BYTES);
        self.input.clear();
        let fds = std::mem::take(&mut self.fds);
        Message { header, body, fds, lost_fds: self.lost_fds.take() }
    }

    /// Reads into `input` until it has `whole` bytes, as much as one call gives. Descriptors come
    /// with the bytes that they were sent with, so none of the next message's can come.
    fn read_up_to(&mut self, whole: usize) -> Result<usize, Errno> {
        let start = self.input.len();
        self.input.resize(whole, 0);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let slices = &mut [IoSliceMut::new(&mut self.input[start..])];
        let received = recvmsg(&self.socket, slices, &mut control, flags);
        let count = received.as_ref().map_or(0, |received| received.bytes);
        self.input.truncate(start + count);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                let examiner = &self.examiner;
                self.fds.extend(fds.map(|fd| ForeignFd::new(fd, Arc::clone(examiner))));
            }
        }
        if received.as_ref().is_ok_and(|received| received.flags.contains(ReturnFlags::CTRUNC)) {
            self.lost_fds =
                Some("no descriptors are left; raise the limit on open files (ulimit -n)".into());
        }
        Ok(received?.bytes)
    }

    /// Sends an answer, as far as the socket has room. One at a time.
    pub(super) fn send(
        &mut self,
        header: Header,
        body: &[u8],
        fd: Option<OwnedFd>,
        now: Instant,
    ) -> io::Result<()> {
        self.output.extend(header.encode());
        self.output.extend(body);
        self.output_fd = fd;
        self.flush(now).map(|_| ())
    }

    /// Continues to write the answer. True when nothing is left of it.
    pub(super) fn flush(&mut self, now: Instant) -> io::Result<bool> {
        while !self.output.is_empty() {
            match self.send_some() {
                Ok(count) => {
                    self.output.drain(..count);
                    self.output_fd = None;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.output_since = self.output_since.or(Some(now));
                    return Ok(false);
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.output_since = None;
        Ok(true)
    }

    fn send_some(&self) -> Result<usize, Errno> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let Some(fd) = &self.output_fd else { return send(&self.socket, &self.output, flags) };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [fd.as_fd()];
        let has_room = control.push(SendAncillaryMessage::ScmRights(&fds));
        assert!(has_room, "there is room for one descriptor");
        sendmsg(&self.socket, &[IoSlice::new(&self.output)], &mut control, flags)
    }

    /// Whether there is an answer that the front-end has not taken.
    pub(super) fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    /// When the time limit of a message or an answer ends, and the error then.
    pub(super) fn deadline(&self) -> Option<(Instant, &'static str)> {
        let of = |since: Option<Instant>, what| since.map(|since| (since + MESSAGE_LIMIT, what));
        of(self.output_since, "it does not read an answer")
            .or_else(|| of(self.input_since, "it has not sent the rest of a message"))
    }

    /// Whether the front-end has closed the connection, whatever is left to read of it.
    pub(super) fn is_hung_up(&mut self) -> bool {
        if !self.was_hung_up {
            let mut fds = [PollFd::new(&self.socket, PollFlags::empty())];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            let polled = poll(&mut fds, Some(&now));
            let ends = PollFlags::HUP | PollFlags::ERR;
            self.was_hung_up = polled.is_ok() && fds[0].revents().intersects(ends);
        }
        self.was_hung_up
    }

    /// Whether that was seen, so that nobody need poll for it any more.
    pub(super) fn was_hung_up(&self) -> bool {
        self.was_hung_up
    }

    /// Ends the connection for all users of the socket, unless another process goes on with it.
    pub(super) fn shut_down(&self) {
        if self.socket.is_lent {
            return;
        }
        // It fails when the front-end has left on its own.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
