//! A session and a simulated front-end, at the two ends of a pair of sockets.

use std::fs::File;
use std::io::{ErrorKind, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use blockio::{DiskOptions, DiskSource, EngineConfig, IoThread, IoThreadConfig, Wait};
use device::blk::config::BlkOptions;
use device::{Device, LogEvents};
use rustix::event::{EventfdFlags, PollFd, Timespec, eventfd, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vhost_user::message::{
    F_PROTOCOL_FEATURES, HEADER_BYTES, Header, Region, Request, RingAddresses,
};
use vhost_user::{
    End, Examiner, PROTOCOL_FEATURES, RunLock, Session, SessionProgress, SessionSetup,
};
use virtqueue::MappingRules;

pub(crate) const QUEUES: u16 = 2;
pub(crate) const QUEUE_SIZE: u16 = 16;

pub(crate) const MEMORY_BYTES: u64 = 1 << 20;
pub(crate) const GUEST_ADDR: u64 = 0x10_0000;
pub(crate) const USER_ADDR: u64 = 0x7f00_0000_0000;

pub(crate) struct Scene {
    pub(crate) io: IoThread,
    pub(crate) device: Device,
    pub(crate) now: Instant,
    /// Messages that were refused while the connection went on.
    pub(crate) refused: Vec<String>,
    /// The rules for the memory of the next session.
    pub(crate) rules: MappingRules,
    /// The lock of the next session.
    pub(crate) run_lock: Option<Arc<dyn RunLock>>,
    examiner: Arc<Examiner>,
    woken: Arc<Woken>,
}

/// A waker that notes its call.
#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

impl Scene {
    pub(crate) fn new() -> Self {
        let config = IoThreadConfig { engine: EngineConfig::Threads, ..IoThreadConfig::default() };
        let io = IoThread::new(&config).unwrap();
        let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
        let options = BlkOptions { num_queues: QUEUES, ..BlkOptions::default() };
        let device = Device::blk(source, options, Arc::new(LogEvents::new("test")));
        let (refused, examiner) = (Vec::new(), Arc::new(Examiner::default()));
        let (rules, woken) = (MappingRules::default(), Arc::default());
        let now = Instant::now();
        Self { io, device, now, refused, rules, run_lock: None, examiner, woken }
    }

    /// Makes a session and its front-end.
    pub(crate) fn attach(&self) -> (Session, Frontend) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        (self.session(ours), Frontend::new(theirs))
    }

    pub(crate) fn session(&self, socket: UnixStream) -> Session {
        Session::new(socket, self.setup(), self.now)
    }

    pub(crate) fn setup(&self) -> SessionSetup {
        SessionSetup {
            device: self.device.clone(),
            threads: vec![self.io.remote()],
            rules: self.rules.clone(),
            examiner: Arc::clone(&self.examiner),
            run_lock: self.run_lock.clone(),
            waker: Waker::from(Arc::clone(&self.woken)),
        }
    }

    /// Drives the session as far as it gets without its IoThread. Returns the reason of its end, if
    /// it has ended.
    pub(crate) fn drive(&mut self, session: &mut Session) -> Option<End> {
        loop {
            match session.progress(self.now) {
                SessionProgress::Waiting => return None,
                SessionProgress::Handled => {}
                SessionProgress::Refused(text) | SessionProgress::RingLost(text) => {
                    self.refused.push(text)
                }
                SessionProgress::Ended(end) => return Some(end),
            }
        }
    }

    /// Drives the session and its IoThread: now, and then whenever the session asks for it.
    pub(crate) fn drive_all(&mut self, session: &mut Session) -> Option<End> {
        let mut is_due = true;
        for _ in 0..100 {
            let end = if is_due { self.drive(session) } else { None };
            if end.is_some() {
                return end;
            }
            self.io.turn(Wait::Never).unwrap();
            is_due = self.is_due(session);
        }
        if is_due {
            // The wake is for the next drive.
            self.woken.0.store(true, Ordering::Release);
        }
        None
    }

    /// Waits until the session asks for progress, which another thread causes.
    pub(crate) fn await_due(&self, session: &Session) {
        wait_until(|| self.is_due(session));
    }

    /// Returns true if a wake, an event or the time asks for progress.
    fn is_due(&self, session: &Session) -> bool {
        let has_event = session.interest().is_some_and(|events| {
            let mut fds = [PollFd::new(session, events)];
            poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
        });
        let is_late = session.deadline().is_some_and(|deadline| deadline <= self.now);
        self.woken.0.swap(false, Ordering::Acquire) || has_event || is_late
    }

    /// Sends a message and takes the answer.
    pub(crate) fn exchange(
        &mut self,
        session: &mut Session,
        frontend: &mut Frontend,
        request: &Request,
        fds: &[&OwnedFd],
    ) -> Vec<u8> {
        frontend.send(request, true, fds);
        assert_eq!(self.drive_all(session), None, "after {request:?}");
        let (header, body) = frontend.receive().unwrap_or_else(|| panic!("no answer: {request:?}"));
        assert_eq!((header.code, header.flags), (request.encode().0, 5));
        body
    }

    /// Sends a message that must be carried out.
    pub(crate) fn send_checked(
        &mut self,
        session: &mut Session,
        frontend: &mut Frontend,
        request: &Request,
        fds: &[&OwnedFd],
    ) {
        let status = self.exchange(session, frontend, request, fds);
        assert_eq!(status, [0; 8], "{request:?} was refused: {:?}", self.refused);
    }

    pub(crate) fn negotiate(&mut self, session: &mut Session, frontend: &mut Frontend) {
        // The rings of these tests are split.
        let features = self.device.features() & !(1 << 34) | F_PROTOCOL_FEATURES;
        for request in [
            Request::SetProtocolFeatures(PROTOCOL_FEATURES),
            Request::SetOwner,
            Request::SetFeatures(features),
        ] {
            self.send_checked(session, frontend, &request, &[]);
        }
    }

    /// Negotiates, shares memory and starts all queues.
    pub(crate) fn set_up(&mut self, session: &mut Session, frontend: &mut Frontend) {
        self.negotiate(session, frontend);
        self.share_memory(session, frontend);
        for index in 0..u8::try_from(QUEUES).unwrap() {
            self.start(session, frontend, index);
        }
    }

    pub(crate) fn share_memory(&mut self, session: &mut Session, frontend: &mut Frontend) {
        let memory =
            File::from(rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        memory.set_len(MEMORY_BYTES).unwrap();
        self.send_checked(session, frontend, &Request::AddMemReg(region()), &[&memory.into()]);
    }

    pub(crate) fn start(&mut self, session: &mut Session, frontend: &mut Frontend, index: u8) {
        let place = USER_ADDR + 0x8000 * u64::from(index);
        let addresses = RingAddresses {
            desc_table: place,
            avail_ring: place + 0x1000,
            used_ring: place + 0x2000,
        };
        let ring = u32::from(index);
        let size = u32::from(QUEUE_SIZE);
        self.send_checked(session, frontend, &Request::SetVringNum { index: ring, size }, &[]);
        self.send_checked(
            session,
            frontend,
            &Request::SetVringAddr { index: ring, addresses, log: None },
            &[],
        );
        let kick = Request::SetVringKick { index, has_fd: true };
        self.send_checked(session, frontend, &kick, &[&new_eventfd()]);
        self.send_checked(
            session,
            frontend,
            &Request::SetVringEnable { index: ring, value: 1 },
            &[],
        );
    }
}

pub(crate) fn region() -> Region {
    Region { guest_addr: GUEST_ADDR, size: MEMORY_BYTES, user_addr: USER_ADDR, file_offset: 0 }
}

pub(crate) fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

/// The number of descriptors of this process that refer to a file.
pub(crate) fn descriptors_of(file: &Path) -> usize {
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = all.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    links.filter(|link| link == file).count()
}

/// Waits for the work of another thread; the limit ends a hopeless wait.
pub(crate) fn wait_until(mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(30), "it does not happen");
        std::thread::yield_now();
    }
}

/// The front-end of a session.
pub(crate) struct Frontend {
    pub(crate) socket: UnixStream,
    received: Vec<u8>,
}

impl Frontend {
    pub(crate) fn new(socket: UnixStream) -> Self {
        Self { socket, received: Vec::new() }
    }

    pub(crate) fn send(&self, request: &Request, need_reply: bool, fds: &[&OwnedFd]) {
        self.send_bytes(&bytes_of(request, need_reply), fds);
    }

    pub(crate) fn send_bytes(&self, bytes: &[u8], fds: &[&OwnedFd]) {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        let slices = [IoSlice::new(bytes)];
        let sent = sendmsg(&self.socket, &slices, &mut ancillary, SendFlags::NOSIGNAL).unwrap();
        assert_eq!(sent, bytes.len());
    }

    /// Returns the next answer, if it has come.
    pub(crate) fn receive(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut more = [0; 8192];
        match self.socket.read(&mut more) {
            Ok(count) => self.received.extend(&more[..count]),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        let header = Header::decode(self.received.first_chunk::<HEADER_BYTES>()?);
        let rest = self.received.split_off(HEADER_BYTES + header.size as usize);
        let message = std::mem::replace(&mut self.received, rest);
        Some((header, message[HEADER_BYTES..].to_vec()))
    }

    /// Returns true if the connection is closed for good.
    pub(crate) fn is_closed(&mut self) -> bool {
        matches!(self.socket.read(&mut [0; 64]), Ok(0))
    }
}

pub(crate) fn bytes_of(request: &Request, need_reply: bool) -> Vec<u8> {
    let (code, body) = request.encode();
    let header = Header::new(code, body.len());
    let header = if need_reply { header.with_need_reply() } else { header };
    [&header.encode()[..], &body].concat()
}
