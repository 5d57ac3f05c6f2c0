//! The connection to a front-end: receives messages and sends answers without waiting.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, send, sendmsg,
};

use super::examiner::Examiner;
use super::message::{HEADER_BYTES, Header};
use super::peer_fds::{ConnectionId, PeerFd, PeerSocket};

/// The most descriptors that the kernel lets through with one message (`SCM_MAX_FD`).
const MAX_FDS: usize = 253;

/// The time within which a started message must arrive, and an answer must be taken.
pub(super) const MESSAGE_LIMIT: Duration = Duration::from_secs(10);

/// A whole message.
pub(super) struct Message {
    pub(super) header: Header,
    pub(super) body: Vec<u8>,
    pub(super) fds: Vec<PeerFd>,
    /// The reason that some of its descriptors are missing.
    pub(super) lost_fds: Option<String>,
}

/// The result of a read from the connection.
pub(super) enum Received {
    /// No whole message yet.
    Nothing,
    Message(Message),
    /// The front-end has closed the connection, or it broke.
    Closed(Option<io::Error>),
    /// The bytes are not vhost-user, and nothing after them can be understood.
    Invalid(String),
}

/// A connected Unix socket. It may be non-blocking or not, and other processes that share it may
/// change that at any time.
pub(super) struct Channel {
    socket: PeerSocket,
    examiner: Arc<Examiner>,
    /// The bytes of the incoming message so far.
    pub(super) input: Vec<u8>,
    /// The bytes of `input` at the last call of [`take_new_input`](Self::take_new_input).
    known_input: usize,
    /// The header of the incoming message, once it is complete.
    header: Option<Header>,
    pub(super) fds: Vec<PeerFd>,
    pub(super) lost_fds: Option<String>,
    /// The time of the first byte of the incoming message.
    input_since: Option<Instant>,
    /// The time since which a message waits until descriptors of earlier messages are closed.
    full_since: Option<Instant>,
    /// The unsent rest of the answer. The next message is not read before the answer is sent.
    pub(super) output: Vec<u8>,
    /// The descriptor that goes with the first byte of `output`.
    pub(super) output_fd: Option<OwnedFd>,
    output_since: Option<Instant>,
    /// True if the front-end was seen to have closed the connection.
    was_hung_up: bool,
}

impl Channel {
    pub(super) fn new(socket: UnixStream, examiner: Arc<Examiner>) -> Self {
        Self {
            socket: PeerSocket::new(socket, Arc::clone(&examiner)),
            examiner,
            input: Vec::new(),
            known_input: 0,
            header: None,
            fds: Vec::new(),
            lost_fds: None,
            input_since: None,
            full_since: None,
            output: Vec::new(),
            output_fd: None,
            output_since: None,
            was_hung_up: false,
        }
    }

    /// While the socket is lent, this process must not end the connection.
    pub(super) fn lend(&mut self, is_lent: bool) {
        self.socket.is_lent = is_lent;
    }

    pub(super) fn connection_id(&self) -> ConnectionId {
        ConnectionId::from_socket(&self.socket)
    }

    /// Continues where another process has stopped: with its partly read message and its unsent
    /// answer.
    pub(super) fn restore(&mut self, input: Vec<u8>, output: Vec<u8>, now: Instant) {
        self.input_since = (!input.is_empty()).then_some(now);
        (self.input, self.output) = (input, output);
    }

    /// Returns true if the front-end has sent bytes that were not read.
    pub(super) fn has_unread(&self) -> bool {
        self.socket.has_unread()
    }

    /// Drops the unsent answer.
    pub(super) fn forget_output(&mut self) {
        self.output.clear();
        self.output_fd = None;
    }

    /// Returns true if a part of a message has come since the last call.
    pub(super) fn take_new_input(&mut self) -> bool {
        let before = std::mem::replace(&mut self.known_input, self.input.len());
        !self.input.is_empty() && self.input.len() != before
    }

    /// Reads from the socket, up to the end of one message. `rings` is the number of the
    /// front-end's open descriptors that are not in messages. `waker` is woken when the channel no
    /// longer [waits for room](Self::waits_for_room).
    pub(super) fn receive(&mut self, now: Instant, rings: usize, waker: &Waker) -> Received {
        loop {
            let whole = HEADER_BYTES + self.header.map_or(0, |header| header.size as usize);
            if self.input.len() < whole {
                // Descriptors belong to the header; the body must bring none.
                if !self.has_room(now, waker) {
                    let is_gone = self.is_hung_up();
                    return if is_gone { Received::Closed(None) } else { Received::Nothing };
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
                    return Received::Invalid("more descriptors than a header can bring".into());
                }
                continue;
            }
            if let Some(header) = self.header {
                return Received::Message(self.take_message(header));
            }
            if let Some(bytes) = self.input.first_chunk() {
                let header = Header::decode(bytes);
                if let Some(fault) = header.fault() {
                    return Received::Invalid(fault);
                }
                self.header = Some(header);
            }
        }
    }

    /// Returns false if a message waits until descriptors of earlier messages are closed: their
    /// files hang, or the closing thread only needs a CPU.
    fn has_room(&mut self, now: Instant, waker: &Waker) -> bool {
        let has_room = self.examiner.has_room(waker) || !self.socket.has_unread();
        self.full_since = if has_room { None } else { self.full_since.or(Some(now)) };
        has_room
    }

    /// Returns true if no message is read until descriptors of earlier messages are closed.
    pub(super) fn waits_for_room(&self) -> bool {
        self.full_since.is_some()
    }

    fn take_message(&mut self, header: Header) -> Message {
        (self.header, self.input_since) = (None, None);
        let body = self.input.split_off(HEADER_BYTES);
        self.input.clear();
        let fds = std::mem::take(&mut self.fds);
        Message { header, body, fds, lost_fds: self.lost_fds.take() }
    }

    /// Reads into `input`, up to `whole` bytes and as many as one call gives. Descriptors come with
    /// the bytes that they were sent with, so none of the next message's can come.
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
                self.fds.extend(fds.map(|fd| PeerFd::new(fd, Arc::clone(examiner))));
            }
        }
        if received.as_ref().is_ok_and(|received| received.flags.contains(ReturnFlags::CTRUNC)) {
            self.lost_fds = Some("the limit on open files is reached; raise it (ulimit -n)".into());
        }
        Ok(received?.bytes)
    }

    /// Adds an answer, to be [sent](Self::flush). The previous answer must be sent completely.
    pub(super) fn put_answer(&mut self, header: Header, body: &[u8], fd: Option<OwnedFd>) {
        self.output.extend(header.encode());
        self.output.extend(body);
        self.output_fd = fd;
    }

    /// Continues to send the answer. Returns true if nothing of it is left.
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

    /// Returns true if the front-end has not taken all of the answer.
    pub(super) fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    /// The end of the time limit of a message or an answer, and the error at that time.
    pub(super) fn deadline(&self) -> Option<(Instant, &'static str)> {
        let of = |since: Option<Instant>, what| since.map(|since| (since + MESSAGE_LIMIT, what));
        let full = "descriptors of earlier messages cannot be closed, because their files hang";
        of(self.output_since, "it does not read its answer")
            .or_else(|| of(self.full_since, full))
            .or_else(|| of(self.input_since, "it has not sent the rest of a message"))
    }

    /// Returns true if the front-end has closed the connection, even with unread messages left.
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

    /// Returns true if the hang-up was seen, and need not be polled for again.
    pub(super) fn was_hung_up(&self) -> bool {
        self.was_hung_up
    }

    /// Ends the connection for all users of the socket, unless it is lent to another process.
    pub(super) fn shut_down(&self) {
        if self.socket.is_lent {
            return;
        }
        // Fails if the front-end has already closed the connection.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fd::AsRawFd;
    use rustix::io::{FdFlags, fcntl_getfd};
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::super::message::Request;
    use super::*;

    fn channel() -> (Channel, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Channel::new(ours, Arc::default()), theirs)
    }

    fn receive(channel: &mut Channel, now: Instant) -> Received {
        channel.receive(now, 0, Waker::noop())
    }

    fn event() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC).unwrap()
    }

    /// Sends bytes with a descriptor.
    fn send_with(socket: &UnixStream, bytes: &[u8], fd: &OwnedFd) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [fd.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::empty());
        assert_eq!(sent, Ok(bytes.len()));
    }

    fn kick() -> Vec<u8> {
        let (code, body) = Request::SetVringKick { index: 0, has_fd: true }.encode();
        [&Header::new(code, body.len()).encode()[..], &body].concat()
    }

    /// A program that this process starts must not get descriptors of a guest.
    #[test]
    fn descriptors_come_with_a_header_and_are_closed_at_exec() {
        let (mut channel, theirs) = channel();
        send_with(&theirs, &kick(), &event());
        let Received::Message(message) = receive(&mut channel, Instant::now()) else {
            panic!("the message is whole");
        };
        let [fd] = &message.fds[..] else { panic!("{} descriptors", message.fds.len()) };
        assert!(fcntl_getfd(fd).unwrap().contains(FdFlags::CLOEXEC));
        assert!(message.lost_fds.is_none() && channel.fds.is_empty());
    }

    #[test]
    fn descriptors_with_a_body_are_refused() {
        let (mut channel, mut theirs) = channel();
        let message = kick();
        let (head, body) = message.split_at(HEADER_BYTES);
        theirs.write_all(head).unwrap();
        assert!(matches!(receive(&mut channel, Instant::now()), Received::Nothing));
        send_with(&theirs, body, &event());
        assert!(matches!(receive(&mut channel, Instant::now()), Received::Invalid(_)));
    }

    /// A front-end that sends a byte now and then would hold its place for ever.
    #[test]
    fn a_message_has_its_time_from_its_first_byte() {
        let (mut channel, mut theirs) = channel();
        let start = Instant::now();
        let at = |number: u32| start + number * Duration::from_secs(1);
        assert!(matches!(receive(&mut channel, at(0)), Received::Nothing));
        assert_eq!(channel.deadline(), None);
        for (number, byte) in (1..).zip(kick()) {
            theirs.write_all(&[byte]).unwrap();
            let received = receive(&mut channel, at(number));
            let limit = Some(at(1) + MESSAGE_LIMIT);
            match received {
                Received::Nothing => assert_eq!(channel.deadline().map(|(end, _)| end), limit),
                Received::Message(_) => assert_eq!(channel.deadline(), None),
                _ => panic!("byte {number}"),
            }
        }
        theirs.write_all(&[1]).unwrap();
        assert!(matches!(receive(&mut channel, at(100)), Received::Nothing));
        let end = channel.deadline().map(|(end, _)| end);
        assert_eq!(end, Some(at(100) + MESSAGE_LIMIT), "the next one has its own time");
    }

    /// An answer that was read late leaves no deadline, and a sent descriptor does not stay open.
    #[test]
    fn nothing_is_left_of_an_answer_that_is_sent() {
        let (mut channel, mut theirs) = channel();
        let start = Instant::now();
        let header = Header::new(1, 8).reply(8);
        for round in 0..2 {
            let now = start + round * Duration::from_secs(60);
            let mut sent = 0;
            while !channel.has_output() {
                channel.put_answer(header, &[7; 8], Some(event()));
                channel.flush(now).unwrap();
                sent += 1;
            }
            assert!(channel.output_fd.is_some(), "it waits with its answer");
            assert_eq!(channel.deadline().map(|(end, _)| end), Some(now + MESSAGE_LIMIT));
            let mut answers = vec![0; (sent - 1) * (HEADER_BYTES + 8)];
            theirs.read_exact(&mut answers).unwrap();
            assert_eq!(channel.flush(now + Duration::from_secs(1)).ok(), Some(true));
            assert!(!channel.has_output() && channel.output_fd.is_none());
            assert_eq!(channel.deadline(), None);
            let mut last = [0; HEADER_BYTES + 8];
            theirs.read_exact(&mut last).unwrap();
            assert_eq!(last[HEADER_BYTES..], [7; 8]);
        }
    }

    /// The new process has the socket, too.
    #[test]
    fn a_lent_socket_is_not_shut_down() {
        for is_lent in [true, false] {
            let (mut channel, mut theirs) = channel();
            channel.lend(is_lent);
            channel.shut_down();
            theirs.set_nonblocking(true).unwrap();
            let is_closed = matches!(theirs.read(&mut [0]), Ok(0));
            assert_eq!(is_closed, !is_lent);
        }
    }

    /// Set in the process that has no descriptor left.
    const ALONE: &str = "RINGHAUL_TEST_WITHOUT_DESCRIPTORS";

    /// Runs in a process of its own, because the limit is that of a whole process.
    #[test]
    fn descriptors_beyond_the_limit_are_reported_as_lost() {
        if std::env::var_os(ALONE).is_none() {
            let name = "channel::tests::descriptors_beyond_the_limit_are_reported_as_lost";
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            let output = child.args(["--exact", name]).env(ALONE, "1").output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
            return;
        }
        let ((mut channel, front_end), fd) = (channel(), event());
        let message = Header::new(Request::SetOwner.encode().0, 0).encode();
        let all = getrlimit(Resource::Nofile);
        // All lower numbers are in use.
        let first_free = u64::try_from(event().as_raw_fd()).unwrap();
        for (current, is_lost) in [(Some(first_free), true), (all.current, false)] {
            send_with(&front_end, &message, &fd);
            setrlimit(Resource::Nofile, Rlimit { current, ..all }).unwrap();
            let received = receive(&mut channel, Instant::now());
            setrlimit(Resource::Nofile, all).unwrap();
            let Received::Message(message) = received else { panic!("no message") };
            assert_eq!(message.fds.is_empty(), is_lost);
            let told = message.lost_fds.is_some_and(|why| why.contains("ulimit -n"));
            assert_eq!(told, is_lost);
        }
    }
}
