//! A process is killed at each moment at which it keeps the state of a session. The next one
//! continues from the last state, and the front-end does not notice.

mod restarts;

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::task::Waker;

use blockio::{DiskOptions, DiskSource, EngineConfig, IoThread, IoThreadConfig, Wait};
use device::blk::config::BlkOptions;
use device::{Device, LogEvents};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use virtqueue::MappingRules;

use super::*;
use crate::details::QueueState;
use crate::message::{
    F_PROTOCOL_FEATURES, Header, Region, Request, RingAddresses, protocol_feature,
};
use crate::passed_fds::{FdIndex, FdSink};
use crate::session::SessionProgress;

const GUEST_ADDR: u64 = 0x10_0000;
const MEMORY_BYTES: u64 = 1 << 20;

/// The last state, as the next process finds it.
#[derive(Default)]
struct Kept {
    state: Option<String>,
    fds: Vec<OwnedFd>,
    is_sent: bool,
    /// How often a region of the daemon's own was stored.
    regions: usize,
    /// The number of states and notes so far.
    moments: usize,
}

/// Dies at the moment of this number: after it has kept the state, or (false) before it keeps the
/// state in which the message is carried out. The front-end may notice a death at two other
/// moments: before a message that was read is kept, and before the sending of an answer is noted.
struct Mortal {
    kept: Arc<Mutex<Kept>>,
    begun: Vec<OwnedFd>,
    death: (usize, bool),
}

impl Mortal {
    fn live(&self, is_carried_out: bool, store: impl FnOnce(&mut Kept)) {
        let mut kept = self.kept.lock().unwrap();
        let is_last = kept.moments == self.death.0 && (self.death.1 || is_carried_out);
        kept.moments += 1;
        if !is_last || self.death.1 {
            store(&mut kept);
        }
        drop(kept);
        // A panic with its message would fill the output of the test.
        if is_last {
            std::panic::resume_unwind(Box::new("killed"));
        }
    }
}

impl FdSink for Mortal {
    fn put(&mut self, _: &str, fd: BorrowedFd<'_>) -> io::Result<FdIndex> {
        self.begun.push(fd.try_clone_to_owned()?);
        Ok(FdIndex::new(self.begun.len() - 1))
    }

    fn put_new(&mut self, name: &str, fd: BorrowedFd<'_>) -> io::Result<FdIndex> {
        self.kept.lock().unwrap().regions += usize::from(name == "own region");
        self.put(name, fd)
    }
}

impl StateKeeper for Mortal {
    fn begin(&mut self) {
        self.begun.clear();
    }

    fn keep(&mut self, state: io::Result<SessionState>) {
        let state = serde_json::to_value(state.unwrap()).unwrap();
        let is_carried_out = state["channel"]["input"] == serde_json::json!([]);
        let state = state.to_string();
        let fds = std::mem::take(&mut self.begun);
        self.live(is_carried_out, |kept| {
            (kept.state, kept.fds, kept.is_sent) = (Some(state), fds, false)
        });
    }

    fn note_sent(&mut self) {
        self.live(false, |kept| kept.is_sent = true);
    }
}

/// A process with a device.
struct Process {
    io: IoThread,
    setup: SessionSetup,
}

impl Process {
    fn new() -> Self {
        let config = IoThreadConfig { engine: EngineConfig::Threads, ..IoThreadConfig::default() };
        let io = IoThread::new(&config).unwrap();
        let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
        let setup = SessionSetup {
            device: Device::blk(source, BlkOptions::default(), Arc::new(LogEvents::new("test"))),
            threads: vec![io.remote()],
            rules: MappingRules::default(),
            examiner: Arc::default(),
            run_lock: None,
            waker: Waker::noop().clone(),
        };
        Self { io, setup }
    }

    /// Drives the session until nothing is left to do. Returns false if the process died.
    fn drive(&self, session: &mut Session) -> bool {
        let run = || loop {
            match session.progress(Instant::now()) {
                SessionProgress::Handled => {}
                SessionProgress::Waiting if session.is_at_rest() => return,
                SessionProgress::Waiting => drop(self.io.turn(Wait::Never).unwrap()),
                other => panic!("{other:?}"),
            }
        };
        catch_unwind(AssertUnwindSafe(run)).is_ok()
    }
}

impl Session {
    /// Returns true if only the front-end can cause work.
    fn is_at_rest(&self) -> bool {
        self.interest() == Some(rustix::event::PollFlags::IN) && !self.channel.has_unread()
    }
}

/// The set-up of a front-end: messages, their descriptors, and true if an answer comes.
fn script(memory: &OwnedFd, events: &[OwnedFd]) -> Vec<(Request, Vec<OwnedFd>, bool)> {
    let copy = |fd: &OwnedFd| vec![fd.try_clone().unwrap()];
    let features = F_PROTOCOL_FEATURES | 1 << 32;
    let protocol = protocol_feature::REPLY_ACK | protocol_feature::CONFIGURE_MEM_SLOTS;
    let region = |place| Region {
        guest_addr: GUEST_ADDR + place,
        size: MEMORY_BYTES / 2,
        user_addr: GUEST_ADDR + place,
        file_offset: place,
    };
    let addresses = RingAddresses {
        desc_table: GUEST_ADDR,
        avail_ring: GUEST_ADDR + 0x1000,
        used_ring: GUEST_ADDR + 0x2000,
    };
    vec![
        (Request::GetFeatures, vec![], true),
        (Request::GetProtocolFeatures, vec![], true),
        (Request::SetProtocolFeatures(protocol), vec![], false),
        (Request::SetOwner, vec![], true),
        (Request::SetFeatures(features), vec![], true),
        (Request::AddMemReg(region(0)), copy(memory), true),
        (Request::AddMemReg(region(MEMORY_BYTES / 2)), copy(memory), false),
        (Request::SetVringNum { index: 0, size: 16 }, vec![], false),
        (Request::SetVringBase { index: 0, base: 0 }, vec![], true),
        (Request::SetVringAddr { index: 0, addresses, log: None }, vec![], true),
        (Request::SetVringCall { index: 0, has_fd: true }, copy(&events[0]), true),
        (Request::SetVringKick { index: 0, has_fd: true }, copy(&events[1]), false),
        (Request::SetVringEnable { index: 0, value: 1 }, vec![], true),
        (Request::RemMemReg(region(MEMORY_BYTES / 2)), vec![], true),
        (Request::GetVringBase { index: 0 }, vec![], true),
        (Request::SetVringKick { index: 0, has_fd: true }, copy(&events[1]), true),
    ]
}

fn send(socket: &UnixStream, request: &Request, fds: &[OwnedFd], wants_ack: bool) {
    let (code, body) = request.encode();
    let header = Header::new(code, body.len());
    let header = if wants_ack { header.with_need_reply() } else { header };
    let bytes = [&header.encode()[..], &body].concat();
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    }
    let sent = sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty());
    assert_eq!(sent, Ok(bytes.len()));
}

fn read_answer(socket: &mut UnixStream) -> Vec<u8> {
    let mut header = [0; 12];
    socket.read_exact(&mut header).unwrap();
    let mut body = vec![0; u32::from_ne_bytes(*header[8..].first_chunk().unwrap()) as usize];
    socket.read_exact(&mut body).unwrap();
    body
}

/// Continues the session in another process, from the last state. With `is_known`, the killed
/// process had noted that it sent its answer.
fn next_process(kept: &Mutex<Kept>, is_known: bool) -> (Process, Session) {
    let next = Process::new();
    let mut last = std::mem::take(&mut *kept.lock().unwrap());
    let mut state: SessionState = serde_json::from_str(&last.state.unwrap()).unwrap();
    if last.is_sent && is_known {
        state.forget_answer();
    }
    let fds = std::mem::take(&mut last.fds);
    let mut fds = PassedFds::new(vec![String::new(); fds.len()], fds);
    let setup = next.setup.clone();
    let session = Session::continue_killed(state, setup, &mut fds, Instant::now()).unwrap();
    (next, session)
}

/// A keeper that dies at this moment.
fn mortal(kept: &Arc<Mutex<Kept>>, death: (usize, bool)) -> Box<Mortal> {
    Box::new(Mortal { kept: Arc::clone(kept), begun: Vec::new(), death })
}

/// A moment that never comes.
const NEVER: (usize, bool) = (usize::MAX - 1, true);

/// Runs the script, with a death at this moment. Returns the answers and the number of moments.
fn run(death: (usize, bool)) -> (Vec<Vec<u8>>, usize) {
    let memory = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, MEMORY_BYTES).unwrap();
    let events = [0; 2].map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap());
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let mut process = Process::new();
    let mut session = Session::new(ours, process.setup.clone(), Instant::now());
    let kept = Arc::<Mutex<Kept>>::default();
    // The first state is there before a message can come.
    session.keep_with(mortal(&kept, (death.0 + 1, death.1)));
    let mut answers = Vec::new();
    for (request, fds, is_answered) in script(&memory, &events) {
        let has_answer = matches!(
            request,
            Request::GetFeatures | Request::GetProtocolFeatures | Request::GetVringBase { .. }
        );
        send(&theirs, &request, &fds, is_answered && !has_answer && answers.len() >= 2);
        if !process.drive(&mut session) {
            let (next, going_on) = next_process(&kept, true);
            // The dead process closes nothing: its queues would stop.
            std::mem::forget(std::mem::replace(&mut session, going_on));
            std::mem::forget(std::mem::replace(&mut process, next));
            session.keep_with(mortal(&kept, (usize::MAX, true)));
            session.begin_resume();
            assert!(process.drive(&mut session), "it died again");
        }
        if has_answer || is_answered && answers.len() >= 2 {
            answers.push(read_answer(&mut theirs));
        }
        assert!(theirs.read(&mut [0]).is_err(), "an answer came twice after {request:?}");
    }
    let queues = session.describe().queues;
    assert_eq!(queues[0].state, QueueState::Running);
    assert!(session.connection.own_region.is_some());
    end(process, session);
    let Kept { moments, regions, .. } = *kept.lock().unwrap();
    assert!(death != NEVER || regions == 1, "the region was stored {regions} times");
    (answers, moments)
}

fn end(process: Process, mut session: Session) {
    session.begin_end();
    while !matches!(session.progress(Instant::now()), SessionProgress::Ended(_)) {
        let _ = process.io.turn(Wait::Never).unwrap();
    }
}

#[test]
fn a_front_end_does_not_notice_a_kill_at_any_moment() {
    let (expected, moments) = run(NEVER);
    assert!(moments > 40, "{moments}");
    for moment in 0..moments - 1 {
        for is_kept in [false, true] {
            let (answers, _) = run((moment, is_kept));
            assert_eq!(answers, expected, "killed at {moment}, {is_kept}");
        }
    }
}

/// The version of the first account in the daemon's own region; 0 if that is new.
fn account_version(session: &Session) -> [u8; 2] {
    let own = session.connection.own_region.as_ref().unwrap();
    let mut version = [0; 2];
    own.files[0].file.file().read_exact_at(&mut version, 8).unwrap();
    version
}

/// A ring that ran in the kept state would start at an old place without its account.
#[test]
fn a_reset_is_kept_before_the_accounts_are_forgotten() {
    for is_kept in [false, true] {
        let memory = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, MEMORY_BYTES).unwrap();
        let events = [0; 2].map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let mut process = Process::new();
        let mut session = Session::new(ours, process.setup.clone(), Instant::now());
        let kept = Arc::<Mutex<Kept>>::default();
        session.keep_with(mortal(&kept, NEVER));
        for (request, fds, _) in script(&memory, &events) {
            send(&theirs, &request, &fds, false);
            assert!(process.drive(&mut session));
        }
        while theirs.read(&mut [0; 64]).is_ok() {}
        session.connection.protocol_features |= protocol_feature::RESET_DEVICE;
        let moments = kept.lock().unwrap().moments;
        // The present state, the message that was read, and the device that was reset.
        session.keep_with(mortal(&kept, (moments + 2, is_kept)));
        send(&theirs, &Request::ResetDevice, &[], true);
        assert!(!process.drive(&mut session), "it lives");
        assert_ne!(account_version(&session), [0; 2], "the reset may not be kept");
        let (next, going_on) = next_process(&kept, true);
        std::mem::forget(std::mem::replace(&mut session, going_on));
        std::mem::forget(std::mem::replace(&mut process, next));
        assert_eq!(session.connection.rings[0].is_up(), !is_kept);
        assert_eq!(account_version(&session) == [0; 2], is_kept);
        session.begin_resume();
        assert!(process.drive(&mut session));
        assert_eq!(account_version(&session), [0; 2]);
        assert_eq!(read_answer(&mut theirs), [0; 8]);
        end(process, session);
    }
}

/// The process sends the rest of its answers when the socket has room, and dies then.
#[test]
fn an_answer_that_was_sent_in_parts_is_not_sent_again() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&ours, 1).unwrap();
    let process = Process::new();
    let mut session = Session::new(ours, process.setup.clone(), Instant::now());
    let kept = Arc::<Mutex<Kept>>::default();
    session.keep_with(mortal(&kept, NEVER));
    let mut unread = 0;
    while !session.channel.has_output() {
        send(&theirs, &Request::GetFeatures, &[], false);
        assert_eq!(session.progress(Instant::now()), SessionProgress::Handled);
        unread += 1;
    }
    while unread > 0 {
        let _ = read_answer(&mut theirs);
        assert_eq!(session.progress(Instant::now()), SessionProgress::Waiting);
        unread -= 1;
    }
    assert!(!session.channel.has_output());
    let (next, going_on) = next_process(&kept, true);
    std::mem::forget((process, std::mem::replace(&mut session, going_on)));
    session.begin_resume();
    assert!(next.drive(&mut session));
    assert!(theirs.read(&mut [0]).is_err(), "an answer came twice");
    end(next, session);
}

/// The process dies between the sending of an answer and the note about it.
#[test]
fn a_front_end_that_has_sent_its_next_message_has_its_answer() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let process = Process::new();
    let mut session = Session::new(ours, process.setup.clone(), Instant::now());
    let kept = Arc::<Mutex<Kept>>::default();
    session.keep_with(mortal(&kept, NEVER));
    send(&theirs, &Request::GetFeatures, &[], false);
    assert!(process.drive(&mut session));
    let features = read_answer(&mut theirs);
    send(&theirs, &Request::GetProtocolFeatures, &[], false);
    let (next, going_on) = next_process(&kept, false);
    std::mem::forget((process, std::mem::replace(&mut session, going_on)));
    session.begin_resume();
    assert!(next.drive(&mut session));
    assert_ne!(read_answer(&mut theirs), features);
    assert!(theirs.read(&mut [0]).is_err(), "an answer came twice");
    end(next, session);
}

/// The next process answers them before it gives the base of their ring, as this one would. A ring
/// that is enabled goes on with them.
#[test]
fn left_requests_of_a_disabled_ring_are_known_to_the_next_process() {
    for enabled in [false, true] {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let process = Process::new();
        let mut session = Session::new(ours, process.setup.clone(), Instant::now());
        let ring = &mut session.connection.rings[0];
        (ring.settings.started, ring.settings.enabled, ring.has_left) = (true, enabled, true);
        let kept = Arc::<Mutex<Kept>>::default();
        session.keep_with(mortal(&kept, NEVER));
        let (next, going_on) = next_process(&kept, true);
        std::mem::forget((process, session));
        assert_eq!(going_on.connection.rings[0].has_left, !enabled);
        end(next, going_on);
    }
}
