//! The control thread: one for all exports. It takes front-ends in and drives their sessions.
//!
//! It sleeps in `poll` and never waits for anything else, so that a slow disk behind one export
//! holds up the front-ends of no other.

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockio::Remote;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;

use crate::blk::BlkDevice;
use crate::export::Endpoint;
use crate::log_limit::LogLimit;
use crate::memory_limits::MemoryLimits;
use crate::vhost_user::{End, Examiner, Progress, Session, SessionSetup};

/// How often it is said what keeps exports from ending.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// How long an export waits for descriptors to come back before it takes a front-end in again.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// One device and where its front-ends come from.
pub struct ExportSetup {
    /// What the log calls it.
    pub name: String,
    /// The device.
    pub device: BlkDevice,
    /// Where front-ends come from.
    pub endpoint: Endpoint,
    /// Queue `i` is served by IoThread `i` modulo their number, which is not 0.
    pub threads: Vec<Remote>,
    /// What front-ends may have mapped.
    pub limits: MemoryLimits,
}

/// All exports and the thread that controls them.
pub struct Control {
    orders: Arc<Orders>,
    thread: Option<JoinHandle<()>>,
}

/// What the control thread is told.
struct Orders {
    wake: OwnedFd,
    stop: AtomicBool,
    abandon: AtomicBool,
}

impl Orders {
    fn wake_thread(&self) {
        // By `writev`, so that a trace of system calls tells it from a call to a driver. A full
        // counter means that the thread is awake already.
        let _ = rustix::io::writev(&self.wake, &[IoSlice::new(&1_u64.to_ne_bytes())]);
    }
}

impl Wake for Orders {
    fn wake(self: Arc<Self>) {
        self.wake_thread();
    }
}

impl Control {
    /// Starts serving. `ended` is called when the last export has ended.
    ///
    /// # Errors
    ///
    /// When the kernel has no thread or descriptor left.
    pub fn start(exports: Vec<ExportSetup>, ended: impl FnOnce() + Send + 'static) -> Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .context("cannot create an eventfd")?;
        let (stop, abandon) = (AtomicBool::new(false), AtomicBool::new(false));
        let orders = Arc::new(Orders { wake, stop, abandon });
        let waker = Waker::from(Arc::clone(&orders));
        let exports = exports.into_iter().map(|setup| Export::new(setup, &waker)).collect();
        let mut exports =
            Exports { list: exports, orders: Arc::clone(&orders), stopping: None, reported: None };
        let ended = OnDrop(Some(ended));
        let thread = std::thread::Builder::new()
            .name("ringhaul-control".into())
            .spawn(move || {
                // However the thread ends.
                let _ended = ended;
                exports.run();
                drop(exports);
            })
            .context("cannot start the control thread")?;
        Ok(Self { orders, thread: Some(thread) })
    }

    /// Begins to let go of all front-ends, each of which sees the end when its requests are
    /// answered, and takes no more in.
    pub fn begin_stop(&self) {
        self.orders.stop.store(true, Ordering::SeqCst);
        self.orders.wake_thread();
    }

    /// Gives up what has not ended: says what that is, removes the sockets and lets the thread end
    /// while queues run. The process must end then.
    pub fn abandon(&self) {
        self.orders.abandon.store(true, Ordering::SeqCst);
        self.orders.wake_thread();
    }

    /// Waits until the last export has ended.
    pub fn join(mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Calls what it holds when it is dropped.
struct OnDrop<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        if let Some(call) = self.0.take() {
            call();
        }
    }
}

/// The exports, on the control thread.
struct Exports {
    list: Vec<Export>,
    orders: Arc<Orders>,
    /// Since when all of them are to end.
    stopping: Option<Instant>,
    reported: Option<Instant>,
}

/// What a descriptor in a call of `poll` belongs to.
#[derive(Clone, Copy)]
enum Polled {
    Orders,
    Listener(usize),
    Session(usize),
}

impl Exports {
    fn run(&mut self) {
        loop {
            let now = Instant::now();
            if self.orders.abandon.load(Ordering::SeqCst) {
                self.tell_what_is_left();
                return;
            }
            if self.orders.stop.load(Ordering::SeqCst) && self.stopping.is_none() {
                (self.stopping, self.reported) = (Some(now), Some(now));
                self.list.iter_mut().for_each(Export::begin_stop);
            }
            self.list.iter_mut().filter(|export| export.is_due(now)).for_each(|e| e.run(now));
            if self.list.iter().all(Export::has_ended) {
                return;
            }
            self.report(now);
            self.wait(now);
        }
    }

    /// Sleeps until something happens, and notes for whom.
    fn wait(&mut self, now: Instant) {
        let deadlines = self.list.iter().filter_map(Export::deadline);
        let report = self.reported.map(|reported| reported + REPORT_INTERVAL);
        let at_once = self.list.iter().any(|export| export.session_is_ready).then_some(now);
        let timeout = deadlines.chain(report).chain(at_once).min().map(|deadline| {
            let left = deadline.saturating_duration_since(now);
            Timespec::try_from(left).unwrap_or_default()
        });
        let mut whose = vec![Polled::Orders];
        let mut fds = vec![PollFd::new(&self.orders.wake, PollFlags::IN)];
        for (index, export) in self.list.iter().enumerate() {
            export.add_polls(index, now, &mut fds, &mut whose);
        }
        let polled = poll(&mut fds, timeout.as_ref());
        let ready: Vec<(Polled, bool)> =
            whose.into_iter().zip(fds.iter().map(|fd| !fd.revents().is_empty())).collect();
        match polled {
            Ok(_) => {}
            Err(Errno::INTR) => return,
            Err(error) => {
                tracing::error!("cannot wait for front-ends: {error}");
                std::thread::sleep(ACCEPT_PAUSE);
                return;
            }
        }
        for (whose, _) in ready.into_iter().filter(|(_, is_ready)| *is_ready) {
            match whose {
                Polled::Orders => {
                    let _ = rustix::io::read(&self.orders.wake, &mut [0; 8]);
                    self.list.iter_mut().for_each(Export::woken);
                }
                Polled::Listener(index) => self.list[index].listener_is_ready = true,
                Polled::Session(index) => self.list[index].session_is_ready = true,
            }
        }
    }

    /// Says every few seconds what keeps exports from ending.
    fn report(&mut self, now: Instant) {
        let (Some(since), Some(reported)) = (self.stopping, self.reported) else { return };
        if now < reported + REPORT_INTERVAL {
            return;
        }
        self.reported = Some(now);
        let seconds = (now - since).as_secs();
        for export in self.list.iter().filter(|export| !export.has_ended()) {
            tracing::warn!(
                export = export.name,
                "still ending after {seconds} s: {}; a second signal does not wait",
                export.what_is_left()
            );
        }
    }

    fn tell_what_is_left(&self) {
        let left: Vec<String> = self
            .list
            .iter()
            .filter(|export| !export.has_ended())
            .map(|export| format!("{}: {}", export.name, export.what_is_left()))
            .collect();
        tracing::error!("ended without waiting any longer; left behind: {}", left.join(", "));
    }
}

/// One export, as the control thread sees it.
struct Export {
    name: String,
    setup: SessionSetup,
    limits: MemoryLimits,
    /// None: no more front-ends are taken in.
    endpoint: Option<Endpoint>,
    session: Option<Session>,
    /// The line on the front-end's coming was written, so there is one on its going.
    is_shown: bool,
    /// For lines on front-ends that wait for others.
    waiting: LogLimit,
    /// It was said that another front-end waits for the present one to go.
    waiting_is_told: bool,
    /// Descriptors have run out, and no front-end is taken in before this.
    paused_until: Option<Instant>,
    listener_is_ready: bool,
    session_is_ready: bool,
}

impl Export {
    fn new(setup: ExportSetup, waker: &Waker) -> Self {
        let ExportSetup { name, device, endpoint, threads, limits } = setup;
        let examiner = Arc::new(Examiner::default());
        let (rules, waker) = (limits.of_front_end(), waker.clone());
        let setup = SessionSetup { device, threads, rules, examiner, waker };
        Self {
            name,
            setup,
            limits,
            // A connection that was inherited is there from the start.
            listener_is_ready: endpoint.listener().is_none(),
            endpoint: Some(endpoint),
            session: None,
            is_shown: false,
            waiting: LogLimit::default(),
            waiting_is_told: false,
            paused_until: None,
            session_is_ready: false,
        }
    }

    fn begin_stop(&mut self) {
        // Who waits is not kept waiting, and who comes is told at once. This removes the socket.
        self.endpoint = None;
        if let Some(session) = &mut self.session {
            session.begin_end();
            self.session_is_ready = true;
        } else {
            self.tell_totals();
        }
    }

    fn has_ended(&self) -> bool {
        self.endpoint.is_none() && self.session.is_none()
    }

    /// Somebody may have answered what a session waits for.
    fn woken(&mut self) {
        let waits =
            |session: &Session| session.interest().is_none_or(|interest| interest.is_empty());
        self.session_is_ready |= self.session.as_ref().is_some_and(waits);
    }

    fn is_due(&self, now: Instant) -> bool {
        self.listener_is_ready
            || self.session_is_ready
            || self.deadline().is_some_and(|deadline| now >= deadline)
    }

    fn deadline(&self) -> Option<Instant> {
        let session = self.session.as_ref().and_then(Session::deadline);
        session.into_iter().chain(self.paused_until).min()
    }

    fn add_polls<'fd>(
        &'fd self,
        index: usize,
        now: Instant,
        fds: &mut Vec<PollFd<'fd>>,
        whose: &mut Vec<Polled>,
    ) {
        if let Some(session) = &self.session
            && let Some(interest) = session.interest()
        {
            fds.push(PollFd::from_borrowed_fd(session.as_fd(), interest));
            whose.push(Polled::Session(index));
        }
        let is_paused = self.paused_until.is_some_and(|until| now < until);
        let is_told = self.session.is_some() && self.waiting_is_told;
        if let Some(listener) = self.endpoint.as_ref().and_then(Endpoint::listener)
            && !is_paused
            && !is_told
        {
            fds.push(PollFd::new(listener, PollFlags::IN));
            whose.push(Polled::Listener(index));
        }
    }

    fn run(&mut self, now: Instant) {
        if self.paused_until.is_some_and(|until| now >= until) {
            self.paused_until = None;
        }
        self.session_is_ready = false;
        // First, because it may end: then nobody waits.
        let is_at_rest = self.progress(now);
        if self.listener_is_ready && is_at_rest {
            self.listener_is_ready = false;
            if self.session.is_some() {
                self.tell_of_waiting();
            } else {
                self.take_front_end(now);
            }
        }
    }

    /// Drives the session. False when it has more to do at once.
    fn progress(&mut self, now: Instant) -> bool {
        let Some(session) = &mut self.session else { return true };
        match session.progress(now) {
            Progress::Waiting => return true,
            Progress::Handled => {}
            Progress::Refused(text) => {
                self.limited(|export, left_out| {
                    let export = &export.name;
                    tracing::warn!(
                        export,
                        left_out,
                        "a message of the front-end is refused: {text}"
                    );
                });
            }
            Progress::Ended(end) => self.session_has_ended(&end),
        }
        self.session_is_ready = true;
        false
    }

    /// Writes a line that a front-end can cause, if there may be one now.
    fn limited(&self, write: impl FnOnce(&Self, u64)) {
        if let Some(left_out) = self.setup.device.log().permit() {
            write(self, left_out);
        }
    }

    fn tell_of_waiting(&mut self) {
        self.waiting_is_told = true;
        if let Some(left_out) = self.waiting.permit() {
            let export = &self.name;
            tracing::info!(
                export,
                left_out,
                "another front-end has connected, and waits until the present one has gone"
            );
        }
    }

    fn take_front_end(&mut self, now: Instant) {
        let (socket, may_be_silent) = match self.endpoint.take() {
            Some(Endpoint::Connection(socket)) => (socket, true),
            Some(endpoint) => {
                let accepted = endpoint.listener().map(|listener| listener.accept());
                self.endpoint = Some(endpoint);
                match accepted {
                    Some(Ok((socket, _))) => (socket, false),
                    Some(Err(error)) => {
                        self.accept_failed(&error, now);
                        return;
                    }
                    None => return,
                }
            }
            None => return,
        };
        self.setup.rules = self.limits.of_front_end();
        let mut session = Session::new(socket, self.setup.clone(), now);
        if may_be_silent {
            session = session.with_patience();
        }
        // A front-end that comes and goes without an end is told of as seldom as errors are.
        let shown = self.setup.device.sessions().permit();
        if let Some(left_out) = shown {
            tracing::info!(export = self.name, left_out, "a front-end has attached");
        }
        (self.is_shown, self.waiting_is_told) = (shown.is_some(), false);
        self.session = Some(session);
    }

    fn accept_failed(&mut self, error: &io::Error, now: Instant) {
        // It has gone, or another process has taken it.
        let passes = [io::ErrorKind::WouldBlock, io::ErrorKind::ConnectionAborted];
        if passes.contains(&error.kind()) || error.kind() == io::ErrorKind::Interrupted {
            return;
        }
        self.paused_until = Some(now + ACCEPT_PAUSE);
        let advice = match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => "; raise the limit on open files (ulimit -n)",
            _ => "",
        };
        self.limited(|export, left_out| {
            let export = &export.name;
            tracing::warn!(export, left_out, "cannot accept a front-end: {error}{advice}");
        });
    }

    fn session_has_ended(&mut self, end: &End) {
        self.session = None;
        let export = &self.name;
        match end {
            End::Gone(None) if self.is_shown => tracing::info!(export, "the front-end has gone"),
            End::Gone(Some(error)) if self.is_shown => {
                tracing::info!(export, "the front-end has gone: {error}");
            }
            End::Gone(_) | End::Asked => {}
            End::Dropped(why) => self.limited(|export, left_out| {
                let export = &export.name;
                tracing::warn!(export, left_out, "the front-end is dropped: {why}");
            }),
        }
        if let Some(left_out) = self.setup.device.log().left_out() {
            tracing::warn!(export, left_out, "errors that the guest or the front-end caused go on");
        }
        if self.has_ended() {
            self.tell_totals();
        }
    }

    fn tell_totals(&self) {
        let (total, left_out) = self.setup.device.log().totals();
        if total > 0 {
            let export = &self.name;
            tracing::info!(export, left_out, "guests or front-ends caused {total} errors");
        }
    }

    fn what_is_left(&self) -> String {
        let requests = |count: u32| match count {
            1 => "1 request is not finished".to_owned(),
            _ => format!("{count} requests are not finished"),
        };
        let Some(load) = self.session.as_ref().map(Session::load) else {
            return "nothing".to_owned();
        };
        if !load.has_heard {
            return format!("its IoThread does not answer ({} requests)", load.requests);
        }
        let left = requests(load.requests);
        match self.setup.device.late_since() {
            Some(since) => {
                let seconds = since.elapsed().as_secs();
                format!("{left}; its disk has not answered for {seconds} s")
            }
            None => left,
        }
    }
}
