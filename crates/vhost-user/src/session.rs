//! One front-end's connection, from its first byte to its end, as a state machine that never waits.

mod keeping;
mod pause;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::channel::{Channel, MESSAGE_LIMIT, Received};
use super::connection::{Connection, SessionSetup};
use super::describe::describe;
use super::details::SessionDetails;
use super::examiner::RELAY_LIMIT;
use super::load::Load;
use super::message::{F_PROTOCOL_FEATURES, Header, code};
use super::outcome::{Outcome, Refusal, Release, Work};
use super::passed_fds::PassedFds;
use super::session_state::{RestoredSession, SessionState, StateKeeper};

/// The time that a front-end may be connected without a message, because another may wait for its
/// place.
const SILENCE_LIMIT: Duration = Duration::from_secs(60);

/// The acknowledgement of a message that was carried out.
const ACK: [u8; 8] = 0_u64.to_ne_bytes();
/// The answer to a message that was not carried out.
const NACK: [u8; 8] = 1_u64.to_ne_bytes();

/// The result of a call of [`Session::progress`].
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub enum SessionProgress {
    /// Nothing to do until the socket is ready as [`Session::interest`] says, the waker is woken or
    /// [`Session::deadline`] has come.
    Waiting,
    /// A message was answered. More may have come.
    Handled,
    /// A message was refused, for this reason, and the connection continues. More may have come.
    Refused(String),
    /// After a pause a ring cannot start again, for this reason, and the connection continues.
    RingLost(String),
    /// The session is over: all requests are answered, and the connection is closed.
    Ended(End),
}

/// The reason that a session has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// The export ended it.
    Asked,
    /// The front-end has disconnected, perhaps by an error.
    Gone(Option<String>),
    /// The front-end violated the protocol, was too slow, or cannot be served any longer.
    Dropped(String),
}

/// A connected front-end. A session has no thread and no clock: its driver calls
/// [`progress`](Self::progress) whenever work may be due.
pub struct Session {
    channel: Channel,
    connection: Connection,
    stage: Stage,
    /// The deadline of the first message. `None` once it has come.
    silence: Option<Instant>,
    /// True if the session is to pause before the next message.
    pause_requested: bool,
    /// True if the front-end is to read the configuration space again after the pause.
    config_changed: bool,
    /// Keeps the state for the case that this process is killed.
    keeper: Option<Box<dyn StateKeeper>>,
}

enum Stage {
    /// The next message may come.
    Ready,
    /// A message waits for queues to stop or start, or for its memory. The front-end waits too.
    Working {
        header: Header,
        work: Work,
        since: Instant,
    },
    /// Queues stop, between two messages.
    Pausing,
    /// No queue runs, and no message is read.
    Paused,
    /// Queues start again as they were.
    Resuming,
    /// Queues stop for good.
    Ending(End),
    /// The connection is closed. The front-end's memory is unmapped, and its lock released, before
    /// the next one is accepted.
    Releasing {
        end: End,
        release: Release,
        since: Instant,
    },
    Ended,
}

impl Session {
    /// Starts a session on a connected socket, which may be blocking.
    pub fn new(socket: UnixStream, setup: SessionSetup, now: Instant) -> Self {
        let channel = Channel::new(socket, Arc::clone(&setup.examiner));
        let mut connection = Connection::new(setup);
        connection.id = channel.connection_id();
        Self {
            channel,
            connection,
            stage: Stage::Ready,
            silence: Some(now + SILENCE_LIMIT),
            pause_requested: false,
            config_changed: false,
            keeper: None,
        }
    }

    /// Takes over a session that another process has [paused](Self::begin_pause) and [handed
    /// over](Self::hand_over). The new session is paused too.
    ///
    /// # Errors
    ///
    /// If this device or process cannot continue the session.
    pub fn take_over(
        state: SessionState,
        setup: SessionSetup,
        fds: &mut PassedFds,
        now: Instant,
    ) -> io::Result<Self> {
        let silence = (!state.is_patient).then_some(now + SILENCE_LIMIT);
        let RestoredSession { channel, connection, config_changed } =
            state.take_over(setup, fds, now)?;
        let stage = Stage::Paused;
        let (pause_requested, keeper) = (true, None);
        Ok(Self { channel, connection, stage, silence, pause_requested, config_changed, keeper })
    }

    /// Lets the front-end be silent for ever, because no other waits for its place.
    #[must_use]
    pub fn without_silence_limit(self) -> Self {
        Self { silence: None, ..self }
    }

    /// Does the work that is due, at most one message of it. Never waits.
    pub fn progress(&mut self, now: Instant) -> SessionProgress {
        match std::mem::replace(&mut self.stage, Stage::Ended) {
            Stage::Ready if self.pause_requested => {
                self.connection.begin_pause();
                self.stage = Stage::Pausing;
                self.progress(now)
            }
            Stage::Ready => {
                self.stage = Stage::Ready;
                self.listen(now)
            }
            Stage::Working { .. } | Stage::Resuming if self.channel.is_hung_up() => {
                self.end(End::Gone(None));
                self.progress(now)
            }
            stage @ (Stage::Pausing | Stage::Paused | Stage::Resuming) => self.pause(stage, now),
            Stage::Working { header, work, since } => {
                self.conclude(header, Outcome::Later(work), since, now)
            }
            Stage::Ending(end) if self.connection.stop_for_good(self.channel.is_hung_up()) => {
                let release = self.connection.release();
                self.channel.shut_down();
                self.stage = Stage::Releasing { end, release, since: now };
                self.progress(now)
            }
            Stage::Releasing { end, release, since } => {
                if release.is_pending() && now < since + MESSAGE_LIMIT {
                    self.stage = Stage::Releasing { end, release, since };
                    return SessionProgress::Waiting;
                }
                SessionProgress::Ended(end)
            }
            Stage::Ending(end) => {
                self.stage = Stage::Ending(end);
                SessionProgress::Waiting
            }
            Stage::Ended => SessionProgress::Waiting,
        }
    }

    /// Begins to disconnect the front-end. The hang-up comes only when all its requests are
    /// answered, because the front-end then reads from the rings where to continue.
    pub fn begin_end(&mut self) {
        self.end(End::Asked);
    }

    /// Closes the connection of an ending session before its requests are answered. They are
    /// finished regardless; a front-end that reads from the rings where to continue may repeat
    /// them.
    pub fn disconnect(&self) {
        self.channel.shut_down();
    }

    /// The events to poll the socket for. If empty, only a hang-up shows; `None`: do not poll.
    pub fn interest(&self) -> Option<PollFlags> {
        match self.stage {
            Stage::Ready if self.channel.has_output() => Some(PollFlags::OUT),
            Stage::Ready if self.channel.waits_for_room() => Some(PollFlags::empty()),
            Stage::Ready => Some(PollFlags::IN),
            // Rings may run. If the front-end goes away, they must stop.
            Stage::Working { .. } | Stage::Pausing | Stage::Resuming | Stage::Ending(_) => {
                (!self.channel.was_hung_up()).then_some(PollFlags::empty())
            }
            Stage::Paused | Stage::Releasing { .. } | Stage::Ended => None,
        }
    }

    /// The time at which [`progress`](Self::progress) must be called even without an event.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.stage {
            Stage::Ready => self.next_deadline().map(|(deadline, _)| deadline),
            Stage::Working { work: Work::Call(..), since, .. } => Some(*since + RELAY_LIMIT),
            Stage::Working { work: Work::Map(..) | Work::Unmap(_), since, .. }
            | Stage::Releasing { since, .. } => Some(*since + MESSAGE_LIMIT),
            Stage::Pausing | Stage::Paused | Stage::Resuming => None,
            Stage::Working { .. } | Stage::Ending(_) | Stage::Ended => None,
        }
    }

    /// Returns true if the session has begun to end.
    pub fn is_ending(&self) -> bool {
        matches!(self.stage, Stage::Ending(_) | Stage::Releasing { .. } | Stage::Ended)
    }

    /// The number of open descriptors of the front-end's rings, memory and inflight region.
    pub fn descriptors(&self) -> usize {
        self.connection.descriptors()
    }

    /// Describes the front-end's set-up.
    pub fn describe(&self) -> SessionDetails {
        let Connection { protocol_features, rings, memory, .. } = &self.connection;
        let device = &self.connection.setup.device;
        let features = self.connection.features() & !F_PROTOCOL_FEATURES;
        describe(device, [features, *protocol_features], rings, &memory.map)
    }

    /// Returns a ring that the front-end has started without sharing any memory.
    pub fn ring_without_memory(&self) -> Option<usize> {
        self.connection.ring_without_memory()
    }

    /// The requests that the session has to finish.
    pub fn load(&self) -> Load {
        self.connection.load()
    }

    /// Notifies the front-end that the configuration space has changed. Returns false if it has not
    /// negotiated that (`BACKEND_REQ`, `CONFIG`), or does not read such messages.
    pub fn send_config_change(&self) -> bool {
        self.connection.send_config_change()
    }

    /// The avail entry that a queue pops next. `None` while the queue is started or stopped, or has
    /// no room for chains.
    pub fn next_avail(&self, queue: usize) -> Option<u16> {
        self.connection.rings.get(queue)?.next_avail_now()
    }

    fn end(&mut self, end: End) {
        if !matches!(self.stage, Stage::Ending(_) | Stage::Releasing { .. }) {
            self.stage = Stage::Ending(end);
        }
    }

    fn next_deadline(&self) -> Option<(Instant, &'static str)> {
        let silence = self.silence.map(|deadline| (deadline, "it has sent no message"));
        self.channel.deadline().or(silence)
    }

    fn listen(&mut self, now: Instant) -> SessionProgress {
        let had_output = self.channel.has_output();
        let flushed = self.channel.flush(now);
        if had_output {
            self.keep_sent();
        }
        let (rings, waker) = (self.connection.descriptors(), &self.connection.setup.waker);
        let received = match flushed {
            Ok(true) => self.channel.receive(now, rings, waker),
            Ok(false) => Received::Nothing,
            Err(error) => Received::Closed(Some(error)),
        };
        let end = match received {
            Received::Message(message) => {
                self.silence = None;
                self.keep(Some(&message));
                let header = message.header;
                let outcome = self.connection.handle(message);
                return self.conclude(header, outcome, now, now);
            }
            Received::Nothing => match self.next_deadline() {
                Some((deadline, what)) if now >= deadline => End::Dropped(what.to_owned()),
                _ => {
                    self.keep_input();
                    return SessionProgress::Waiting;
                }
            },
            Received::Closed(error) => End::Gone(error.map(|error| error.to_string())),
            Received::Invalid(what) => End::Dropped(what),
        };
        self.end(end);
        self.progress(now)
    }

    /// Continues with a message until it is answered or has to wait.
    fn conclude(
        &mut self,
        header: Header,
        mut outcome: Outcome,
        since: Instant,
        now: Instant,
    ) -> SessionProgress {
        let refusal = loop {
            if !matches!(outcome, Outcome::Later(_))
                && let Some(inflight) = &self.connection.inflight
            {
                inflight.store_writeback(&self.connection.setup.device);
            }
            match outcome {
                Outcome::Later(work) => match self.step(header, work, since, now) {
                    Ok(next) => outcome = next,
                    Err(work) => {
                        self.stage = Stage::Working { header, work, since };
                        return SessionProgress::Waiting;
                    }
                },
                Outcome::Answer(body) => return self.answer(header, (&body, None), None, now),
                Outcome::AnswerWith(body, fd) => {
                    return self.answer(header, (&body, Some(fd)), None, now);
                }
                Outcome::Done if self.wants_ack(header) => {
                    return self.answer(header, (&ACK, None), None, now);
                }
                Outcome::Done => {
                    self.keep(None);
                    self.stage = Stage::Ready;
                    return SessionProgress::Handled;
                }
                Outcome::Refuse(refusal) => break refusal,
                Outcome::End(why) => {
                    self.end(End::Dropped(why));
                    return self.progress(now);
                }
            }
        };
        let Refusal { text, needs_ack } = refusal;
        if header.code == code::GET_CONFIG {
            // An answer without data refuses a read.
            return self.answer(header, (&[], None), Some(text), now);
        }
        if self.wants_ack(header) && !header.has_answer() {
            return self.answer(header, (&NACK, None), Some(text), now);
        }
        if needs_ack || header.has_answer() {
            self.end(End::Dropped(text));
            return self.progress(now);
        }
        self.keep(None);
        self.stage = Stage::Ready;
        SessionProgress::Refused(text)
    }

    /// Takes the next step of the work. Returns it as an error while it still has to wait.
    fn step(
        &mut self,
        header: Header,
        work: Work,
        since: Instant,
        now: Instant,
    ) -> Result<Outcome, Work> {
        match work {
            Work::Map(map, purpose) => match map.check() {
                Poll::Pending if now < since + MESSAGE_LIMIT => Err(Work::Map(map, purpose)),
                Poll::Ready(Some(Ok(memory))) => Ok(self.connection.mapped(memory, purpose)),
                Poll::Ready(Some(Err(error))) => Ok(Outcome::Refuse(error.into())),
                Poll::Pending | Poll::Ready(None) => {
                    let text = "its memory cannot be mapped: the file system behind it hangs";
                    Ok(Outcome::Refuse(Refusal::needing_ack(text)))
                }
            },
            Work::Unmap(unmapped) => match unmapped.check() {
                Poll::Pending if now < since + MESSAGE_LIMIT => Err(Work::Unmap(unmapped)),
                _ => Ok(Outcome::Done),
            },
            Work::Stop(change) => match self.connection.settle() {
                Poll::Pending => Err(Work::Stop(change)),
                Poll::Ready(Ok(())) => Ok(self.connection.apply(change)),
                Poll::Ready(Err(error)) => Ok(Outcome::Refuse(error.into())),
            },
            Work::Restart(rings, start) => {
                self.keep_change(header, &rings, &start);
                Ok(self.connection.start(rings, start))
            }
            Work::Start(start) => match self.connection.settle() {
                Poll::Pending => Err(Work::Start(start)),
                Poll::Ready(result) => Ok(self.connection.started(start, result)),
            },
            Work::Call(ring, fd) => self.connection.set_call(ring, fd, now < since + RELAY_LIMIT),
        }
    }

    fn wants_ack(&self, header: Header) -> bool {
        header.needs_reply() && self.connection.has_reply_ack()
    }

    fn answer(
        &mut self,
        header: Header,
        (body, fd): (&[u8], Option<OwnedFd>),
        refused: Option<String>,
        now: Instant,
    ) -> SessionProgress {
        self.stage = Stage::Ready;
        self.channel.put_answer(header.reply(body.len()), body, fd);
        self.keep(None);
        let flushed = self.channel.flush(now);
        self.keep_sent();
        if let Err(error) = flushed {
            self.end(End::Gone(Some(error.to_string())));
            return self.progress(now);
        }
        refused.map_or(SessionProgress::Handled, SessionProgress::Refused)
    }
}

impl AsFd for Session {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Read, Write};
    use std::mem::MaybeUninit;
    use std::sync::atomic::Ordering;
    use std::task::Waker;

    use blockio::{DiskOptions, DiskSource};
    use device::blk::config::BlkOptions;
    use device::{Device, LogEvents, oneshot};
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use virtqueue::MappingRules;

    use super::super::connection::tests::Woken;
    use super::super::examiner::RelaySlot;
    use super::super::message::{Region, Request, protocol_feature};
    use super::super::outcome::Purpose;
    use super::super::peer_fds::PeerFd;
    use super::*;

    fn session(now: Instant) -> (Session, UnixStream) {
        let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let setup = SessionSetup {
            device: Device::blk(source, BlkOptions::default(), Arc::new(LogEvents::new("test"))),
            threads: Vec::new(),
            rules: MappingRules::default(),
            examiner: Arc::default(),
            run_lock: None,
            waker: Waker::noop().clone(),
        };
        (Session::new(ours, setup, now), theirs)
    }

    /// The thread that serves all exports does not wait itself.
    #[test]
    fn a_call_descriptor_waits_for_the_end_of_an_earlier_thread() {
        let since = Instant::now();
        for ends in [true, false] {
            let (mut session, _front_end) = session(since);
            let woken = Arc::<Woken>::default();
            session.connection.setup.waker = Waker::from(Arc::clone(&woken));
            let examiner = Arc::clone(&session.connection.setup.examiner);
            let mut earlier: Vec<_> = std::iter::from_fn(|| RelaySlot::take(&examiner)).collect();
            let fd = PeerFd::new(UnixStream::pair().unwrap().0.into(), Arc::clone(&examiner));
            let work = Work::Call(0, Some(fd));
            let header = Header::new(code::SET_VRING_CALL, 8);
            session.stage = Stage::Working { header, work, since };
            let end = since + RELAY_LIMIT;
            assert_eq!(session.deadline(), Some(end));
            let before = end - Duration::from_millis(1);
            assert_eq!(session.progress(before), SessionProgress::Waiting);
            assert!(!woken.0.load(Ordering::Relaxed));
            if ends {
                earlier.pop();
                assert!(woken.0.load(Ordering::Relaxed));
                assert_eq!(session.progress(before), SessionProgress::Handled);
            } else {
                let after = format!("{:?}", session.progress(end));
                assert!(after.contains("still hang"), "{after}");
            }
        }
    }

    /// The closing thread may only need a CPU, or a file may hang.
    #[test]
    fn a_message_waits_until_earlier_descriptors_are_closed() {
        let (code, body) = Request::GetFeatures.encode();
        let message = [&Header::new(code, body.len()).encode()[..], &body].concat();
        for (closes, leaves) in [(true, false), (false, false), (false, true)] {
            let now = Instant::now();
            let (mut session, mut front_end) = session(now);
            let woken = Arc::<Woken>::default();
            session.connection.setup.waker = Waker::from(Arc::clone(&woken));
            let examiner = Arc::clone(&session.connection.setup.examiner);
            let mut open: Vec<_> = (0..512).map(|_| examiner.hold()).collect();
            assert_eq!(session.progress(now), SessionProgress::Waiting);
            assert_eq!(session.interest(), Some(PollFlags::IN), "there is no message");
            front_end.write_all(&message).unwrap();
            assert_eq!(session.progress(now), SessionProgress::Waiting);
            assert_eq!(session.interest(), Some(PollFlags::empty()), "it would be woken at once");
            let end = now + MESSAGE_LIMIT;
            assert_eq!(session.deadline(), Some(end));
            let before = end - Duration::from_secs(1);
            assert_eq!(session.progress(before), SessionProgress::Waiting);
            assert!(!woken.0.load(Ordering::Relaxed));
            if closes {
                open.pop();
                assert!(woken.0.load(Ordering::Relaxed));
                assert_eq!(session.progress(before), SessionProgress::Handled);
                assert_eq!(session.interest(), Some(PollFlags::IN));
            } else if leaves {
                drop(front_end);
                let gone = SessionProgress::Ended(End::Gone(None));
                assert_eq!(session.progress(before), gone);
            } else {
                let after = format!("{:?}", session.progress(end));
                assert!(after.contains("cannot be closed"), "{after}");
            }
        }
    }

    fn message(request: &Request, needs_reply: bool) -> Vec<u8> {
        let (code, body) = request.encode();
        let header = Header::new(code, body.len());
        let header = if needs_reply { header.with_need_reply() } else { header };
        [&header.encode()[..], &body].concat()
    }

    /// A later message has its own descriptors, or none.
    #[test]
    fn lost_descriptors_refuse_only_their_own_message() {
        let now = Instant::now();
        let (mut session, mut front_end) = session(now);
        session.connection.protocol_features = protocol_feature::REPLY_ACK;
        let examiner = Arc::clone(&session.connection.setup.examiner);
        examiner.set_open_max(1);
        let region =
            |place| Region { guest_addr: place, size: 4096, user_addr: place, file_offset: 0 };
        let table = message(&Request::SetMemTable(vec![region(0), region(4096)]), true);
        // It is closed at once.
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        for _ in 0..2 {
            let fds = [fd.as_fd(), fd.as_fd()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            let flags = SendFlags::empty();
            let sent = sendmsg(&front_end, &[IoSlice::new(&table)], &mut control, flags).unwrap();
            assert_eq!(sent, table.len());
            let refused = format!("{:?}", session.progress(now));
            assert!(refused.contains("Refused") && refused.contains("are lost"), "{refused}");
            front_end.write_all(&message(&Request::SetOwner, true)).unwrap();
            assert_eq!(session.progress(now), SessionProgress::Handled);
            assert_eq!(examiner.open(), 0);
            let mut answers = [0; 2 * 20];
            front_end.read_exact(&mut answers).unwrap();
            let results = [answers[12], answers[32]];
            assert_eq!(results, [1, 0], "NACK, then ACK");
        }
    }

    /// No event announces that a file system hangs.
    #[test]
    fn a_session_continues_if_memory_is_not_mapped_or_unmapped_in_time() {
        let since = Instant::now();
        let (_map, mapped) = oneshot::channel();
        let (_unmap, unmapped) = oneshot::channel();
        let (_unmap_last, unmapped_last) = oneshot::channel();
        let release = Release { unmapped: Some(unmapped_last), unlocked: None };
        let header = Header::new(code::SET_MEM_TABLE, 0);
        let working = |work| Stage::Working { header, work, since };
        for (stage, expected) in [
            (working(Work::Map(mapped, Purpose::Guest)), "Dropped"),
            (working(Work::Unmap(unmapped)), "Handled"),
            (Stage::Releasing { end: End::Asked, release, since }, "Asked"),
        ] {
            let (mut session, _front_end) = session(since);
            session.stage = stage;
            let end = since + MESSAGE_LIMIT;
            assert_eq!(session.deadline(), Some(end), "{expected}");
            let before = session.progress(end - Duration::from_secs(1));
            assert_eq!(before, SessionProgress::Waiting, "{expected}");
            let after = format!("{:?}", session.progress(end));
            assert!(after.contains(expected), "{after}");
        }
    }
}
