//! The two ends of a connection: the front-end's socket and the daemon's session.

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};
use std::time::Instant;

use blockio::Remote;
use blockio::engine::kernel::sim::is_readable;
use device::Device;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use vhost_user::message::{HEADER_BYTES, Header, Request};
use vhost_user::{Examiner, Session, SessionProgress, SessionSetup};
use virtqueue::{MappingBudget, MappingRules};

/// Set if the session has work that its socket does not show.
#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The answer to a message.
pub(super) struct Answer {
    pub(super) header: Header,
    pub(super) body: Vec<u8>,
}

pub(super) struct Link {
    pub(super) session: Session,
    woken: Arc<Woken>,
    /// `None` if the front-end has closed it.
    socket: Option<UnixStream>,
    /// The unsent part of a message that has begun.
    rest: Vec<u8>,
    received: Vec<u8>,
    /// Descriptors that came with answers.
    pub(super) fds: Vec<OwnedFd>,
    /// The daemon was asked to end the session.
    is_ending: bool,
}

impl Link {
    pub(super) fn new(
        device: &Device,
        threads: Vec<Remote>,
        budget: &MappingBudget,
        now: Instant,
    ) -> Self {
        let (ours, theirs) = UnixStream::pair().expect("the simulation needs sockets");
        theirs.set_nonblocking(true).expect("a socket can be non-blocking");
        let woken = Arc::new(Woken::default());
        let setup = SessionSetup {
            device: device.clone(),
            threads,
            rules: MappingRules { budget: budget.clone(), ..MappingRules::default() },
            examiner: Arc::new(Examiner::default()),
            run_lock: None,
            waker: Waker::from(Arc::clone(&woken)),
        };
        let session = Session::new(ours, setup, now);
        let (rest, received, fds) = (Vec::new(), Vec::new(), Vec::new());
        Self { session, woken, socket: Some(theirs), rest, received, fds, is_ending: false }
    }

    /// True if the session would run now, in a daemon that waits for its socket, its waker and its
    /// deadline.
    pub(super) fn is_ready(&self, now: Instant) -> bool {
        let is_due = || self.session.deadline().is_some_and(|deadline| deadline <= now);
        let has_come = || {
            let none = Timespec { tv_sec: 0, tv_nsec: 0 };
            self.session.interest().is_some_and(|interest| {
                poll(&mut [PollFd::new(&self.session, interest)], Some(&none)) == Ok(1)
            })
        };
        self.woken.0.load(Ordering::Relaxed) || is_due() || has_come()
    }

    pub(super) fn progress(&mut self, now: Instant) -> SessionProgress {
        self.woken.0.store(false, Ordering::Relaxed);
        let progress = self.session.progress(now);
        if progress != SessionProgress::Waiting {
            self.woken.0.store(true, Ordering::Relaxed);
        }
        progress
    }

    /// Ends the session on behalf of the daemon.
    pub(super) fn begin_end(&mut self) {
        self.session.begin_end();
        self.is_ending = true;
        self.woken.0.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_ending(&self) -> bool {
        self.is_ending
    }

    pub(super) fn close(&mut self) {
        if let Some(socket) = self.socket.take() {
            // While another thread starts a process, that process has the socket for a moment, too.
            // The shutdown fails after the session has ended.
            let _ = socket.shutdown(Shutdown::Both);
        }
        self.rest.clear();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.socket.is_none()
    }

    /// True if the socket takes another message. While the daemon waits for queues it reads none.
    pub(super) fn has_room(&self) -> bool {
        let Some(socket) = &self.socket else { return false };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(socket, PollFlags::OUT)], Some(&now)) == Ok(1)
    }

    /// True if a message has begun, and its end is not sent.
    pub(super) fn has_rest(&self) -> bool {
        !self.rest.is_empty()
    }

    /// Sends the first `count` bytes of a message, together with its descriptors.
    pub(super) fn begin(&mut self, bytes: Vec<u8>, count: usize, fds: &[OwnedFd]) {
        self.rest = bytes;
        self.send(count, fds);
    }

    /// Sends up to `count` more bytes.
    pub(super) fn send(&mut self, count: usize, fds: &[OwnedFd]) {
        let Some(socket) = &self.socket else { return };
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)), "they have room");
        }
        let rest = self.rest.split_off(count.min(self.rest.len()));
        let sent = sendmsg(socket, &[IoSlice::new(&self.rest)], &mut control, SendFlags::NOSIGNAL);
        assert_eq!(sent, Ok(self.rest.len()), "it has room for a message");
        self.rest = rest;
    }

    pub(super) fn has_answer(&self) -> bool {
        let is_readable = |socket: &UnixStream| is_readable(socket.as_fd());
        !self.received.is_empty() || self.socket.as_ref().is_some_and(is_readable)
    }

    /// The next answer, if it is there.
    pub(super) fn receive(&mut self) -> Option<Answer> {
        let mut more = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let (socket, mut bytes) = (self.socket.as_ref()?, [IoSliceMut::new(&mut more)]);
        let come = recvmsg(socket, &mut bytes, &mut control, RecvFlags::CMSG_CLOEXEC);
        // The hang-up of an ended session brings no bytes.
        let count = come.map_or(0, |come| come.bytes);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        self.received.extend(&more[..count]);
        let header = Header::decode(self.received.first_chunk::<HEADER_BYTES>()?);
        let end = HEADER_BYTES + header.size as usize;
        let body = self.received.get(HEADER_BYTES..end)?.to_vec();
        self.received.drain(..end);
        Some(Answer { header, body })
    }

    /// True if the front-end sees that the connection is closed.
    pub(super) fn is_hung_up(&mut self) -> bool {
        let Some(socket) = &mut self.socket else { return true };
        let mut bytes = [0; 4096];
        loop {
            match socket.read(&mut bytes) {
                Ok(0) => return true,
                // Answers at this point are ignored.
                Ok(_) => {}
                Err(error) => return error.kind() == ErrorKind::ConnectionReset,
            }
        }
    }
}

/// The bytes of a message.
pub(super) fn bytes_of(request: &Request, needs_reply: bool) -> Vec<u8> {
    let (code, body) = request.encode();
    let header = Header::new(code, body.len());
    let header = if needs_reply { header.with_need_reply() } else { header };
    [&header.encode()[..], &body].concat()
}
