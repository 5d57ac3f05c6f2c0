//! A front-end that controls its device like a VMM: by messages over a socket, to the daemon's
//! session. It never waits. A step is a message or a part of one, an answer to read, or the
//! session's work.

mod answers;
mod inflight;
mod link;
mod migration;
mod script;

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use blockio::Remote;
use blockio::engine::kernel::sim::{World as _, is_readable};
use device::Device;
use vhost_user::message::{Header, LogArea, Request, code};
use vhost_user::{End, SessionProgress};
use virtqueue::MappingBudget;

use crate::failure::Failure;
use crate::guest::Guest;
use crate::log::LOG_BYTES;
use crate::plan::Plan;
use crate::rng::Rng;
use crate::world::World;
use link::{Answer, Link, bytes_of};

/// The most messages that a front-end sends before it waits for an answer.
const AHEAD_MAX: usize = 4;

/// A change that the front-end has completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    Started(usize),
    /// The queue has stopped at this base.
    Stopped(usize, u32),
    /// All queues have stopped: the device was reset, or the session is over.
    AllStopped,
    /// True if the driver's writes are cached from now on.
    Cached(bool),
}

/// The meaning of the answer to a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OnReply {
    Nothing,
    /// The answer is this number.
    Number(u64),
    Started(usize),
    /// The answer is the base at which a queue has stopped.
    Base(usize),
    Disabled(usize),
    /// Only the last map of the memory is left.
    Mapped,
    Negotiated,
    /// The answer is an inflight region.
    Region,
    /// The session has received the inflight region.
    HasRegion,
    /// The answer to a log.
    Log(LogArea),
    /// All writes are logged from now on.
    Logging,
    /// No write is logged any more.
    Unlogged,
    /// The answer is this `writeback` byte.
    Writeback(u8),
    Reset {
        keeps_cache: bool,
    },
}

/// A message to send.
struct QueuedMessage {
    request: Request,
    fds: Vec<OwnedFd>,
    then: OnReply,
}

/// State of a queue in the front-end.
#[derive(Default)]
struct Vring {
    /// The front-end has asked the queue to run.
    runs: bool,
    /// Eventfds that would show a bad ring.
    errs: Vec<OwnedFd>,
    /// The queue is disabled, and has everything that it needs to continue.
    is_paused: bool,
}

/// The end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Disconnect {
    /// The front-end stops all queues, and then closes the connection.
    Politely,
    /// The front-end closes the connection at an arbitrary point.
    AtOnce,
    /// The daemon ends the session.
    ByDaemon,
}

type Step = fn(&mut FrontEnd) -> Result<(), Failure>;

pub(crate) struct FrontEnd {
    plan: Plan,
    index: usize,
    world: Rc<World>,
    guest: Rc<Guest>,
    rng: Rng,
    device: Device,
    /// The features that the driver negotiates.
    features: u64,
    /// Counts the bytes that the session has mapped.
    budget: MappingBudget,
    link: Option<Link>,
    vrings: Vec<Vring>,
    to_send: VecDeque<QueuedMessage>,
    /// Messages that were sent and will be answered, and the meanings of the answers.
    expected: VecDeque<(u32, OnReply)>,
    /// The session has the inflight region.
    has_region: bool,
    /// The session has a log.
    has_log: bool,
    /// The memory is not yet shared.
    is_memory_due: bool,
    /// Address of the guest's memory in the front-end's address space.
    user_base: u64,
    /// The number of the first queue's IoThread, and the number of IoThreads.
    threads: (usize, usize),
    /// The write cache that the driver has chosen.
    is_cached: bool,
    /// The protocol features were sent, so messages may ask for answers.
    may_ask: bool,
    disconnect: Option<Disconnect>,
    /// The connection is the last one.
    is_closing: bool,
    events: Vec<Event>,
}

impl FrontEnd {
    /// The front-end of device number `index` with its plan.
    pub(crate) fn new(
        plan: &Plan,
        world: &Rc<World>,
        guest: &Rc<Guest>,
        index: usize,
        device: &Device,
        features: u64,
    ) -> Self {
        let mut front_end = Self {
            plan: plan.clone(),
            index,
            world: Rc::clone(world),
            guest: Rc::clone(guest),
            rng: Rng::new(plan.seed ^ plan.schedule << 40, 300 + index as u64),
            device: device.clone(),
            features,
            budget: MappingBudget::unlimited(),
            link: None,
            vrings: Vec::new(),
            to_send: VecDeque::new(),
            expected: VecDeque::new(),
            has_region: false,
            has_log: false,
            is_memory_due: true,
            user_base: 0,
            threads: (0, 1),
            is_cached: false,
            may_ask: false,
            disconnect: None,
            is_closing: false,
            events: Vec::new(),
        };
        front_end.disconnect();
        front_end
    }

    /// Continues with another device after the machine has restarted.
    pub(crate) fn restart(&mut self, device: &Device) {
        self.device = device.clone();
        self.disconnect();
        self.events.clear();
    }

    /// Forgets the connection and its messages.
    pub(crate) fn disconnect(&mut self) {
        self.link = None;
        self.to_send.clear();
        self.expected.clear();
        self.vrings = (0..self.device.num_queues()).map(|_| Vring::default()).collect();
        (self.is_memory_due, self.may_ask, self.disconnect) = (true, false, None);
        (self.has_region, self.has_log) = (false, false);
        self.is_cached = self.can_cache();
    }

    fn trace(&self, what: impl FnOnce() -> String) {
        self.world.trace(|| format!("front-end {}: {}", self.index, what()));
    }

    /// True if the driver can have a write cache.
    fn can_cache(&self) -> bool {
        self.plan.no_flush == 0 && self.plan.no_write_cache == 0
    }

    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// The number of a queue's IoThread.
    pub(crate) fn place(&self, queue: usize) -> usize {
        (self.threads.0 + queue) % self.threads.1
    }

    pub(crate) fn is_disconnected(&self) -> bool {
        self.link.is_none()
    }

    /// True if the front-end accepts a command for its queues.
    pub(crate) fn is_open(&self) -> bool {
        let has_all = self.has_region || self.plan.inflight == 0;
        self.link.is_some() && has_all && self.disconnect.is_none() && self.events.is_empty()
    }

    /// True if the front-end has carried out all commands.
    pub(crate) fn is_idle(&self) -> bool {
        let Some(link) = &self.link else { return self.events.is_empty() };
        let is_going = self.disconnect.is_some() || self.is_closing;
        let is_silent = self.to_send.is_empty() && self.expected.is_empty() && !link.has_rest();
        is_silent && !is_going && self.events.is_empty()
    }

    /// Ends the connection, since no queue must run again.
    pub(crate) fn close(&mut self) {
        if self.is_closing {
            return;
        }
        self.is_closing = true;
        if self.link.is_some() && self.disconnect.is_none() {
            let how = [Disconnect::Politely, Disconnect::AtOnce, Disconnect::ByDaemon];
            let how = self.rng.pick(&how);
            self.begin_disconnect(how);
        }
    }

    /// The place of the next chain that a running queue pops.
    pub(crate) fn next_avail(&self, queue: usize) -> Option<u16> {
        self.link.as_ref().filter(|_| self.is_idle())?.session.next_avail(queue)
    }

    /// True if the session has something to do.
    pub(crate) fn session_can_step(&self) -> bool {
        self.link.as_ref().is_some_and(|link| link.is_ready(self.world.now()))
    }

    /// Lets the session work, for one message at most.
    pub(crate) fn step_session(&mut self) -> Result<(), Failure> {
        let now = self.world.now();
        let Some(link) = &mut self.link else { return Ok(()) };
        match link.progress(now) {
            SessionProgress::Waiting => Ok(()),
            SessionProgress::Handled => {
                self.trace(|| "a message was answered".to_owned());
                Ok(())
            }
            SessionProgress::Refused(text) => Err(self.fail("a message is refused", &text)),
            SessionProgress::RingLost(text) => Err(self.fail("a ring cannot restart", &text)),
            SessionProgress::Ended(end) => self.ended(&end),
        }
    }

    fn ended(&mut self, end: &End) -> Result<(), Failure> {
        self.trace(|| format!("the session has ended: {end:?}"));
        let Some(link) = &mut self.link else { return Ok(()) };
        let is_right = match end {
            End::Asked => self.disconnect == Some(Disconnect::ByDaemon),
            End::Gone(_) => link.is_closed(),
            // The patience of a session ends.
            End::Dropped(_) => link.has_rest(),
        };
        if !is_right {
            return Err(self.fail("the session has ended", &format!("{end:?}")));
        }
        if !link.is_hung_up() {
            return Err(self.fail("the session has ended", "the front-end is not told"));
        }
        self.check_errs()?;
        self.disconnect();
        self.may_drop_region();
        if self.budget.mapped_bytes() != 0 {
            return Err(self.fail("a session has left a map of the memory", "it has ended"));
        }
        self.events.push(Event::AllStopped);
        Ok(())
    }

    fn fail(&self, what: &str, how: &str) -> Failure {
        Failure::new("session", format!("device {}: {what}: {how}", self.index))
    }

    fn check_errs(&self) -> Result<(), Failure> {
        let mut errs = self.vrings.iter().flat_map(|vring| &vring.errs);
        match errs.any(|err| is_readable(err.as_fd())) {
            true => Err(self.fail("an err eventfd was written", "its rings were good")),
            false => Ok(()),
        }
    }

    /// Checks the mapped bytes while no queue is starting or stopping.
    pub(crate) fn check_memory(&self) -> Result<(), Failure> {
        let is_shared = self.link.is_some() && !self.is_memory_due;
        let expected = if is_shared { self.guest.layout().bytes() } else { 0 };
        let of_log = if self.has_log { LOG_BYTES } else { 0 };
        let expected = expected + self.region_bytes() + of_log;
        let mapped = self.budget.mapped_bytes();
        if mapped != expected {
            let text = format!("{mapped} bytes and not {expected}");
            return Err(self.fail("the session has mapped of the memory", &text));
        }
        Ok(())
    }

    /// True if the front-end has a message to send or an answer to read.
    pub(crate) fn can_step(&self) -> bool {
        let Some(link) = &self.link else { return !self.is_closing };
        if link.is_closed() || link.is_ending() {
            return false;
        }
        self.can_send(link) || self.can_go(link) || link.has_answer()
    }

    fn can_send(&self, link: &Link) -> bool {
        let has_more = !self.to_send.is_empty() && self.expected.len() < AHEAD_MAX;
        (link.has_rest() || has_more) && link.has_room()
    }

    fn can_go(&self, link: &Link) -> bool {
        match self.disconnect {
            Some(Disconnect::Politely) => {
                self.to_send.is_empty() && self.expected.is_empty() && !link.has_rest()
            }
            Some(Disconnect::AtOnce | Disconnect::ByDaemon) => true,
            None => false,
        }
    }

    /// Takes one of the possible steps.
    pub(crate) fn step(&mut self, threads: &[Remote]) -> Result<(), Failure> {
        let Some(link) = &self.link else {
            self.connect(threads);
            return Ok(());
        };
        let mut steps: Vec<Step> = Vec::new();
        if link.has_answer() {
            steps.push(Self::read);
        }
        if self.can_send(link) {
            steps.push(Self::send);
        }
        if self.can_go(link) {
            steps.push(Self::go);
        }
        if steps.is_empty() { Ok(()) } else { self.rng.pick(&steps)(self) }
    }

    fn connect(&mut self, threads: &[Remote]) {
        if threads.is_empty() || self.is_closing {
            return;
        }
        let mut threads = threads.to_vec();
        let first = self.rng.index(threads.len());
        threads.rotate_left(first);
        self.threads = (first, threads.len());
        self.trace(|| format!("connects; the first IoThread is {first}"));
        self.link = Some(Link::new(&self.device, threads, &self.budget, self.world.now()));
        self.set_up();
    }

    fn go(&mut self) -> Result<(), Failure> {
        self.trace(|| format!("goes: {:?}", self.disconnect));
        let Some(link) = &mut self.link else { return Ok(()) };
        match self.disconnect {
            Some(Disconnect::ByDaemon) => link.begin_end(),
            // All queues have stopped. Later writes would be missing in a copy of the memory.
            Some(Disconnect::Politely) => {
                self.guest.complete_copy();
                link.close();
            }
            _ => link.close(),
        }
        self.to_send.clear();
        self.expected.clear();
        Ok(())
    }

    fn send(&mut self) -> Result<(), Failure> {
        let Some(link) = &mut self.link else { return Ok(()) };
        if link.has_rest() {
            link.send(usize::MAX, &[]);
            return Ok(());
        }
        let Some(QueuedMessage { request, fds, then }) = self.to_send.pop_front() else {
            return Ok(());
        };
        let (number, _) = request.encode();
        let wants_reply = then != OnReply::Nothing || (self.may_ask && self.rng.chance(500));
        let needs_reply = wants_reply && !has_answer(&request);
        self.may_ask |= self.plan.session == 1 && number == code::SET_PROTOCOL_FEATURES;
        if needs_reply || has_answer(&request) {
            self.expected.push_back((number, then));
        }
        self.world.trace(|| {
            let text = format!("front-end {}: {request:?}", self.index);
            text.chars().take(120).collect()
        });
        let bytes = bytes_of(&request, needs_reply);
        let count =
            if self.rng.chance(200) { 1 + self.rng.index(bytes.len()) } else { bytes.len() };
        link.begin(bytes, count, &fds);
        Ok(())
    }

    fn read(&mut self) -> Result<(), Failure> {
        let Some(answer) = self.link.as_mut().and_then(Link::receive) else { return Ok(()) };
        let Answer { header, body } = answer;
        let Some((number, then)) = self.expected.pop_front().filter(|(n, _)| *n == header.code)
        else {
            return Err(self.fail("an answer that nobody waits for", &format!("{header:?}")));
        };
        self.trace(|| format!("message {number} is answered: {then:?}"));
        self.conclude(header, &body, then)
    }
}

/// True if a message has an answer without asking for one.
fn has_answer(request: &Request) -> bool {
    Header::new(request.encode().0, 0).has_answer()
}
