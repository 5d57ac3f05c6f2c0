//! One export on the control thread: the endpoint of its front-ends, and the session of the current
//! one.

mod changes;
mod details;
mod memory_watch;
mod stored_session;

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};
use std::{io, iter};

use blockio::DiskSource;
use device::Peaks;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::AsFd;
use vhost_user::{End, Examiner, RunLock, Session, SessionProgress, SessionSetup};

use super::closing::{Closing, NOT_CLOSED};
use super::disk_change::DiskChange;
use super::disk_locks::DiskLocks;
use super::guest_turns::GuestTurns;
use super::hand_over_state::ExportCounters;
use super::order::ExportSetup;
use super::stages::{Registration, RemovalWaiter};
use crate::control::export_log::ExportLog;
use crate::control::subscribers::EventDetails;
use crate::fd_store::KeptSession;
use crate::log::rate_limit::RateLimit;
use crate::process::limits::MemoryLimits;
use crate::process::peer::Peer;
use crate::socket::Endpoint;
use crate::spec::ExportSpec;
use crate::spec::command::{DiskState, ExportState, ExportStatus, Served, StatsReader};
use crate::spec::qos::LimitGroups;
use memory_watch::MemoryWatch;

/// The pause before an export accepts a front-end again after descriptors ran out.
pub(super) const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// The most descriptors of one message that are kept: one for each region of memory.
const MESSAGE_FDS_MAX: usize = 8;

/// The owner of a descriptor in a call of `poll`.
#[derive(Clone, Copy)]
pub(super) enum Polled {
    Alarm,
    Listener(usize),
    Session(usize),
}

/// A device and its front-ends, which come one at a time.
pub(super) struct Export {
    pub(super) spec: ExportSpec,
    pub(super) disks: Vec<DiskSource>,
    pub(super) changing: Vec<DiskChange>,
    log: Arc<ExportLog>,
    pub(super) setup: SessionSetup,
    /// The turns that a session has while queues run. `None`: locks do not depend on sessions.
    pub(super) turns: Option<Arc<GuestTurns>>,
    limits: MemoryLimits,
    groups: Arc<LimitGroups>,
    pub(super) kept: KeptSession,
    /// `None` if further front-ends are refused.
    pub(super) endpoint: Option<Endpoint>,
    pub(super) session: Option<Session>,
    /// The start of the current session.
    pub(super) connected: Instant,
    /// The number of sessions so far.
    pub(super) sessions: u64,
    /// True during a hand-over: no queue starts and no front-end is accepted, because another
    /// process may continue the export.
    pub(super) is_handing_over: bool,
    /// True if its removal must not wait for a disk that does not close.
    is_forced: bool,
    /// Requests that wait for its end.
    pub(super) removal_waiters: Vec<RemovalWaiter>,
    /// True if the connection was logged, so that the disconnection is logged too.
    pub(super) is_connection_logged: bool,
    /// The rate limit of log lines about waiting front-ends.
    waiting: RateLimit,
    /// True if a waiting front-end was logged during the current session.
    waiting_is_logged: bool,
    memory_watch: MemoryWatch,
    /// The peaks since each [`StatsReader`] last read them.
    peaks: [Peaks; StatsReader::COUNT],
    /// The counters of earlier processes.
    pub(super) earlier: ExportCounters,
    /// The end of the pause after descriptors ran out.
    paused_until: Option<Instant>,
    pub(super) listener_is_ready: bool,
    pub(super) session_is_ready: bool,
    /// Dropped last, because it frees the name.
    registration: Registration,
}

impl Export {
    pub(super) fn new(setup: ExportSetup, waker: &Waker) -> Self {
        let ExportSetup { log, disks, device, endpoint, threads, limits, groups, fd_store, .. } =
            setup;
        let export = setup.export;
        let (spec, registration, removal_waiters) = export.serve();
        let examiner = Arc::new(Examiner::default());
        let (rules, waker) = (limits.front_end_rules(), waker.clone());
        let disk_locks = DiskLocks::for_export(&spec, &disks);
        let turns = disk_locks.map(|locks| Arc::new(GuestTurns::new(device.clone(), locks)));
        let run_lock = turns.clone().map(|turns| turns as Arc<dyn RunLock>);
        let setup = SessionSetup { device, threads, rules, examiner, run_lock, waker };
        Self {
            spec,
            disks,
            changing: Vec::new(),
            log,
            setup,
            turns,
            limits,
            groups,
            kept: KeptSession::new(fd_store),
            // An inherited connection is ready from the start.
            listener_is_ready: matches!(endpoint, Some(Endpoint::Connection(_))),
            endpoint,
            session: None,
            connected: Instant::now(),
            sessions: 0,
            is_handing_over: false,
            is_forced: false,
            removal_waiters,
            is_connection_logged: false,
            waiting: RateLimit::default(),
            waiting_is_logged: false,
            memory_watch: MemoryWatch::default(),
            peaks: Default::default(),
            earlier: ExportCounters::default(),
            paused_until: None,
            session_is_ready: false,
            registration,
        }
    }

    /// The number of the export, never reused by the daemon.
    pub(super) fn id(&self) -> u64 {
        self.registration.id()
    }

    /// The requested export, with the present limits of groups.
    pub(super) fn spec_now(&self) -> ExportSpec {
        let mut spec = self.spec.clone();
        spec.fill_limits(&self.groups);
        spec
    }

    /// The export's name in the log.
    pub(super) fn name(&self) -> &str {
        self.log.name()
    }

    pub(super) fn state(&self) -> ExportState {
        // An inherited connection is taken out of its endpoint when it is served.
        let is_served = self.session.as_ref().is_some_and(|session| !session.is_ending());
        if self.endpoint.is_some() || is_served {
            ExportState::Serving
        } else {
            ExportState::Stopping
        }
    }

    pub(super) fn status(&self) -> ExportStatus {
        let state = self.state();
        // The sum may overflow, because null disks have any size.
        let sizes = self.disks.iter().map(|disk| disk.info().size_bytes);
        ExportStatus {
            spec: self.spec_now().named(),
            state,
            size_bytes: sizes.fold(0, u64::saturating_add),
            disk_state: self.disk_state(),
            connected: self.session.is_some(),
            lacks_memory: self.memory_watch.is_lacking(),
            sessions: self.sessions,
            unfinished: self.session.as_ref().map_or(0, |session| session.load().requests()),
            served: self.served(),
            waits_for: (state == ExportState::Stopping).then(|| self.unfinished_work()),
        }
    }

    /// The worst state of its disks.
    pub(super) fn disk_state(&self) -> DiskState {
        let states = self.disks.iter().map(|disk| DiskState::from(disk.state()));
        states.max().unwrap_or(DiskState::Ready)
    }

    fn served(&self) -> Served {
        Served::from(&self.setup.device.totals())
    }

    /// The number of open descriptors that its front-ends have brought.
    pub(super) fn descriptors(&self) -> usize {
        let of_rings = self.session.as_ref().map_or(0, Session::descriptors);
        of_rings + self.setup.examiner.open()
    }

    /// Sets the limit on open descriptors. The limit always leaves room for the present ones and
    /// one more message.
    pub(super) fn set_descriptors_max(&self, share: usize) {
        self.setup.examiner.set_open_max(share.max(self.descriptors() + MESSAGE_FDS_MAX));
    }

    pub(super) fn begin_stop(&mut self) {
        if self.has_ended() {
            // Its totals are logged already.
            return;
        }
        if let Some(Endpoint::Connection(_)) = self.endpoint {
            // The inherited front-end sees the end like one that is served.
            self.take_front_end(Instant::now());
        }
        // Removes the socket. A front-end that waits, or connects now, sees the end at once.
        self.endpoint = None;
        // Units that are still being opened are cancelled.
        self.changing.iter().for_each(DiskChange::cancel_addition);
        if let Some(session) = &mut self.session {
            session.begin_end();
            self.session_is_ready = true;
        } else {
            self.log_totals();
        }
    }

    /// Disconnects the front-end of a stopping export at once, even with unanswered requests.
    /// Requests that wait for the server of a disk fail.
    pub(super) fn disconnect(&mut self) {
        self.is_forced = true;
        self.disks.iter().for_each(DiskSource::abandon);
        self.session.iter().for_each(Session::disconnect);
    }

    /// Removes the socket and abandons the session.
    pub(super) fn abandon(&mut self) {
        self.endpoint = None;
        tracing::info!(export = self.log.name(), "{}", self.served());
        // The queues still run. The front-end must not see the end before its requests are
        // finished, because it then reads from the rings where to continue. The end of the process
        // closes the connection after the kernel has finished them.
        std::mem::forget(self.session.take());
    }

    pub(super) fn has_ended(&self) -> bool {
        self.endpoint.is_none() && self.session.is_none()
    }

    /// Begins to close the disks of an export that has ended.
    pub(super) fn close(self, waker: &Waker) -> Closing {
        let status = self.status();
        self.changing.iter().for_each(DiskChange::cancel_addition);
        let Self { changing, disks, log, mut setup, turns, removal_waiters, .. } = self;
        let (is_forced, registration) = (self.is_forced, self.registration);
        // The closing thread closes the disks when it drops their last users.
        drop((turns, setup.run_lock.take()));
        let mut closing = Closing::new(registration, status, log, (disks, setup.device), waker);
        (closing.changing, closing.removal_waiters) = (changing, removal_waiters);
        if is_forced {
            closing.force();
        }
        closing
    }

    /// Marks a session that waits for an answer: it may have come.
    pub(super) fn mark_woken(&mut self) {
        let waits =
            |session: &Session| session.interest().is_none_or(|interest| interest.is_empty());
        self.session_is_ready |= self.session.as_ref().is_some_and(waits);
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.listener_is_ready && !self.is_handing_over
            || self.session_is_ready
            || self.deadline().is_some_and(|deadline| now >= deadline)
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let session = self.session.as_ref().and_then(Session::deadline);
        let checks = self.paused_until.into_iter().chain(self.memory_watch.deadline());
        session.into_iter().chain(checks).min()
    }

    pub(super) fn add_polls<'fd>(
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
        let is_logged = self.session.is_some() && self.waiting_is_logged;
        if let Some(listener) = self.endpoint.as_ref().and_then(Endpoint::listener)
            && !is_paused
            && !self.is_handing_over
            && !is_logged
        {
            fds.push(PollFd::new(listener, PollFlags::IN));
            whose.push(Polled::Listener(index));
        }
    }

    pub(super) fn run(&mut self, now: Instant) {
        if self.paused_until.is_some_and(|until| now >= until) {
            self.paused_until = None;
        }
        self.session_is_ready = false;
        // The session comes first: if it ends, a front-end that waits can be taken.
        let is_at_rest = self.progress(now);
        self.check_memory(now);
        if let Some(message) = self.limits.check() {
            tracing::warn!("{message}");
        }
        if self.listener_is_ready && is_at_rest && !self.is_handing_over {
            self.listener_is_ready = false;
            if self.session.is_some() {
                self.log_waiting();
            } else {
                self.take_front_end(now);
            }
        }
    }

    /// Drives the session. Returns false if it has more work at once.
    fn progress(&mut self, now: Instant) -> bool {
        let Some(session) = &mut self.session else { return true };
        match session.progress(now) {
            SessionProgress::Waiting => return true,
            SessionProgress::Handled => {}
            SessionProgress::Refused(text) => {
                self.log.warn(&format_args!("refused a message of the front-end: {text}"));
            }
            SessionProgress::RingLost(why) => {
                self.log.warn(&format_args!("a ring cannot restart after a pause: {why}"));
            }
            SessionProgress::Ended(end) => self.session_has_ended(&end),
        }
        self.session_is_ready = true;
        false
    }

    /// Logs that a queue waits for memory.
    fn check_memory(&mut self, now: Instant) {
        let queue = self.session.as_ref().and_then(Session::ring_without_memory);
        if let Some(message) = self.memory_watch.update(queue, now) {
            self.log.warn(&message);
        }
    }

    /// Writes a log line that a front-end can cause, as far as the rate limit permits.
    fn limited(&self, write: impl FnOnce(&Self, u64)) {
        if let Some(left_out) = self.log.faults().permit() {
            write(self, left_out);
        }
    }

    fn log_waiting(&mut self) {
        self.waiting_is_logged = true;
        if let Some(left_out) = self.waiting.permit() {
            let export = self.log.name();
            tracing::info!(
                export,
                left_out,
                "another front-end has connected and waits until the current one disconnects"
            );
        }
    }

    fn take_front_end(&mut self, now: Instant) {
        let (socket, may_be_silent) = match self.endpoint.take() {
            Some(Endpoint::Connection(socket)) => (socket, true),
            Some(endpoint) => {
                let accepted = endpoint.accept();
                self.endpoint = Some(endpoint);
                match accepted {
                    Some(Ok(socket)) => (socket, false),
                    Some(Err(error)) => {
                        self.accept_failed(&error, now);
                        return;
                    }
                    None => return,
                }
            }
            None => return,
        };
        self.log.report(|| EventDetails::Attached { peer: Peer::from_socket(&socket).ok() });
        self.setup.rules = self.limits.front_end_rules();
        let mut session = Session::new(socket, self.setup.clone(), now);
        if may_be_silent {
            session = session.without_silence_limit();
        }
        // A front-end that connects and leaves repeatedly is logged as rarely as errors are.
        let shown = self.log.sessions().permit();
        if let Some(left_out) = shown {
            tracing::info!(export = self.log.name(), left_out, "a front-end has connected");
        }
        (self.is_connection_logged, self.waiting_is_logged) = (shown.is_some(), false);
        self.memory_watch = MemoryWatch::default();
        (self.session, self.connected) = (Some(session), now);
        self.sessions += 1;
        self.keep_session(None);
    }

    fn accept_failed(&mut self, error: &io::Error, now: Instant) {
        // The front-end has gone, or another process has accepted it.
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
            let export = export.name();
            tracing::warn!(export, left_out, "cannot accept a front-end: {error}{advice}");
        });
    }

    fn session_has_ended(&mut self, end: &End) {
        self.session = None;
        self.log.report(|| EventDetails::Gone { reason: reason_of(end) });
        let export = self.log.name();
        match end {
            End::Gone(None) if self.is_connection_logged => {
                tracing::info!(export, "the front-end has disconnected");
            }
            End::Gone(Some(error)) if self.is_connection_logged => {
                tracing::info!(export, "the front-end has disconnected: {error}");
            }
            End::Gone(_) | End::Asked => {}
            End::Dropped(why) => self.limited(|export, left_out| {
                let export = export.name();
                tracing::warn!(export, left_out, "disconnected the front-end: {why}");
            }),
        }
        if let Some(left_out) = self.log.left_out() {
            tracing::warn!(export, left_out, "errors of requests, queues or front-ends continue");
        }
        if self.has_ended() {
            self.log_totals();
        }
    }

    fn log_totals(&self) {
        tracing::info!(export = self.log.name(), "{}", self.served());
        let (total, left_out) = self.log.totals();
        if total > 0 {
            let export = self.log.name();
            // Errors of any cause: guest, front-end or disk.
            tracing::info!(export, left_out, "requests, queues or front-ends had {total} errors");
        }
    }

    pub(super) fn unfinished_work(&self) -> String {
        let Some(load) = self.session.as_ref().map(Session::load) else {
            return NOT_CLOSED.to_owned();
        };
        if !load.has_taken_commands {
            return format!("its IoThread does not answer ({load})");
        }
        let awaited = (load.requests() > 0).then(|| self.awaited_event());
        let changing = self.changing.iter().map(DiskChange::to_string);
        let left = iter::once(load.to_string()).chain(awaited).chain(changing);
        left.collect::<Vec<_>>().join("; ")
    }

    /// The event that requests wait for.
    fn awaited_event(&self) -> String {
        if let Some(since) = self.setup.device.stalled_since() {
            return format!("its disk has not answered for {} s", since.elapsed().as_secs());
        }
        let has_failed = self.disks.iter().any(|disk| disk.retry_state().is_some());
        let awaited = match has_failed {
            true => "failed requests wait for their retry",
            false => "its disk has not answered yet",
        };
        awaited.to_owned()
    }
}

/// The reason that a front-end has gone, unless it just left.
fn reason_of(end: &End) -> Option<String> {
    match end {
        End::Asked => Some("the export ends".to_owned()),
        End::Gone(reason) => reason.clone(),
        End::Dropped(why) => Some(format!("disconnected: {why}")),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::{Read, Write};
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;

    use blockio::testing::{Call, RemoteStub};
    use blockio::{DiskOptions, DiskSource, EngineConfig, IoThread, IoThreadConfig};
    use device::blk::config::BlkOptions;
    use device::scsi::config::ScsiOptions;
    use device::{Device, QueueStats};
    use rustix::event::{Timespec, poll};
    use serde_json::json;
    use vhost_user::PassedFds;
    use virtqueue::MemoryFiles;

    use super::*;
    use crate::control::disk_change::DiskChangeKind;
    use crate::control::order::UnitChange;
    use crate::control::stages::tests::Removal;
    use crate::control::stages::{FailedExport, Stages};
    use crate::control::subscribers::Subscribers;
    use crate::spec::command::CommandError;
    use crate::spec::qos::{LimitSpec, OnError, QosChange, QosSpec};
    use crate::spec::stats::QueueServed;
    use crate::spec::{DeviceSpec, DiskSpec, EndpointSpec, ExportSettings, UnitPlace, UnitSpec};
    use crate::testing::{LogCapture, wait_until};

    pub(crate) struct Scene {
        _io: IoThread,
        disk: DiskSource,
        stages: Arc<Stages>,
        pub(crate) setup: Option<ExportSetup>,
    }

    impl Scene {
        pub(in crate::control) fn new(endpoint: Endpoint) -> Self {
            Self::on(DiskSource::null(1 << 20, &DiskOptions::default()).unwrap(), endpoint)
        }

        pub(crate) fn on(disk: DiskSource, endpoint: Endpoint) -> Self {
            Self::with(disk, endpoint, ExportSettings::default())
        }

        pub(in crate::control) fn with(
            disk: DiskSource,
            endpoint: Endpoint,
            settings: ExportSettings,
        ) -> Self {
            Self::at((Arc::default(), 3), disk, endpoint, settings)
        }

        /// A second export of the same daemon.
        pub(in crate::control) fn beside(&self, disk: DiskSource, endpoint: Endpoint) -> Self {
            Self::at((Arc::clone(&self.stages), 4), disk, endpoint, ExportSettings::default())
        }

        fn at(
            (stages, fd): (Arc<Stages>, i32),
            disk: DiskSource,
            endpoint: Endpoint,
            settings: ExportSettings,
        ) -> Self {
            let config =
                IoThreadConfig { engine: EngineConfig::Threads, ..IoThreadConfig::default() };
            let io = IoThread::new(&config).unwrap();
            let log = Arc::new(ExportLog::new("test"));
            let events = Arc::<ExportLog>::clone(&log);
            let device = Device::blk(disk.clone(), BlkOptions::default(), events);
            let spec = ExportSpec {
                name: None,
                endpoint: EndpointSpec::Fd(fd),
                device: DeviceSpec::Blk(DiskSpec::Null { size_bytes: 1 << 20 }),
                settings,
            };
            let mut opening = stages.begin(vec![spec], false).unwrap();
            let export = opening.remove(0).claim().map_err(FailedExport::release).unwrap();
            let setup = ExportSetup {
                log,
                disks: vec![disk.clone()],
                device,
                endpoint: Some(endpoint),
                threads: vec![io.remote()],
                limits: MemoryLimits::new(1 << 30, 1 << 30, MemoryFiles::default()),
                groups: Arc::default(),
                fd_store: None,
                line: String::new(),
                export,
            };
            Self { _io: io, disk, stages, setup: Some(setup) }
        }

        pub(in crate::control) fn export(&mut self) -> Export {
            Export::new(self.setup.take().unwrap(), Waker::noop())
        }
    }

    #[test]
    fn the_name_is_free_when_the_end_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let mut scene = Scene::new(Endpoint::bind(&folder.path().join("socket"), "").unwrap());
        let mut export = scene.export();
        let removal = Removal::new(&scene.stages, &export.spec);
        export.removal_waiters.push(removal.waiter());
        export.begin_stop();
        let closing = export.close(Waker::noop());
        assert!(!removal.is_added_again());
        assert_eq!(closing.finish(), 1);
        assert!(removal.is_added_again());
    }

    /// A removal cancels a unit whose disk is being opened, but not one that is about to be added.
    #[test]
    fn a_unit_that_is_being_added_is_given_up_until_its_disk_is_open() {
        let folder = tempfile::tempdir().unwrap();
        let mut scene = Scene::new(Endpoint::bind(&folder.path().join("socket"), "").unwrap());
        let setup = scene.setup.as_mut().unwrap();
        let events = Arc::<ExportLog>::clone(&setup.log);
        setup.device = Device::scsi(ScsiOptions::default(), events);
        setup.disks = Vec::new();
        let mut export = scene.export();
        export.spec.device = DeviceSpec::Scsi(Vec::new());
        let place = UnitPlace { target: 0, lun: 1 };
        let remove = |export: &mut Export| export.begin_unit(place, UnitChange::Remove).err();
        let is_given_up = |error| matches!(error, Some(CommandError::UnitBeingCancelled(..)));

        let adding = export.begin_unit(place, UnitChange::Add).unwrap();
        assert!(export.block_hand_over(Some(place), true), "its disk is open");
        assert!(matches!(remove(&mut export), Some(CommandError::UnitBusy(..))));
        assert!(adding.cancel_token.is_active());
        export.changing.clear();

        let adding = export.begin_unit(place, UnitChange::Add).unwrap();
        assert!(is_given_up(remove(&mut export)) && !adding.cancel_token.is_active());
        assert!(!export.block_hand_over(Some(place), true), "it is not to be served");
        export.changing.clear();

        let adding = export.begin_unit(place, UnitChange::Add).unwrap();
        export.begin_stop();
        assert!(!adding.cancel_token.is_active(), "its export ends");

        let mut scene = Scene::new(Endpoint::Connection(UnixStream::pair().unwrap().0));
        let mut export = scsi_export(&mut scene);
        let adding = export.begin_unit(UnitPlace { lun: 7, ..place }, UnitChange::Add).unwrap();
        let _closing = export.close(Waker::noop());
        assert!(!adding.cancel_token.is_active(), "its front-end has left");
    }

    /// An export of two units, 0 and 1.
    pub(in crate::control) fn scsi_export(scene: &mut Scene) -> Export {
        let setup = scene.setup.as_mut().unwrap();
        let events = Arc::<ExportLog>::clone(&setup.log);
        setup.device = Device::scsi(ScsiOptions::default(), events);
        setup.disks.push(scene.disk.clone());
        let mut export = scene.export();
        let disk = json!({ "null": { "size-bytes": 1 << 20 } });
        let units = [0, 1].map(|lun| json!({ "lun": lun, "disk": disk }));
        let units = units.map(|unit| serde_json::from_value(unit).unwrap());
        export.spec.device = DeviceSpec::Scsi(units.into());
        export
    }

    /// Two changes of one disk at a time would undo each other.
    #[test]
    fn a_disk_has_one_change_at_a_time() {
        use CommandError as E;
        let socket = || Endpoint::Connection(UnixStream::pair().unwrap().0);
        let mut scene = Scene::new(socket());
        let mut export = scene.export();
        let place = |lun| UnitPlace { target: 0, lun };
        let resize = |export: &mut Export, place| export.begin_resize(place).map(drop);
        assert!(matches!(resize(&mut export, Some(place(0))), Err(E::NoUnits(_))));
        assert!(matches!(resize(&mut export, None), Ok(())));
        assert!(matches!(resize(&mut export, None), Err(E::DiskBusy(_))));
        export.changing.clear();
        assert!(matches!(resize(&mut export, None), Ok(())));

        let mut scene = Scene::new(socket());
        let mut export = scsi_export(&mut scene);
        let change = |export: &mut Export, lun, change| export.begin_unit(place(lun), change);
        let remove = |export: &mut Export, lun| change(export, lun, UnitChange::Remove).map(drop);
        let add = |export: &mut Export, lun| change(export, lun, UnitChange::Add).map(drop);
        assert!(matches!(resize(&mut export, None), Err(E::NoDisk(_))));
        assert!(matches!(resize(&mut export, Some(place(7))), Err(E::UnknownUnit(..))));
        assert!(matches!(remove(&mut export, 7), Err(E::UnknownUnit(..))));
        assert!(matches!(add(&mut export, 1), Err(E::UnitExists(..))));
        assert!(matches!(resize(&mut export, Some(place(0))), Ok(())));
        for _ in 0..2 {
            assert!(matches!(resize(&mut export, Some(place(0))), Err(E::UnitBusy(..))));
            assert!(matches!(remove(&mut export, 0), Err(E::UnitBusy(..))));
            assert!(matches!(add(&mut export, 0), Err(E::UnitBusy(..))));
        }
        assert!(matches!(remove(&mut export, 1), Ok(())), "it is another disk");
        assert!(matches!(add(&mut export, 1), Err(E::UnitBusy(..))), "it is being removed");
        assert!(matches!(remove(&mut export, 1), Err(E::UnitBusy(..))));
        assert!(matches!(resize(&mut export, Some(place(1))), Err(E::UnknownUnit(..))));
        assert!(matches!(add(&mut export, 2), Ok(())));
        assert!(matches!(add(&mut export, 2), Err(E::UnitBusy(..))));
        assert_eq!(export.changing.len(), 3);
        export.begin_stop();
        assert!(matches!(resize(&mut export, Some(place(0))), Err(E::Busy(..))));
        assert!(matches!(remove(&mut export, 0), Err(E::Busy(..))));
        assert!(matches!(add(&mut export, 3), Err(E::Busy(..))));
        // The disk of unit 2 is open only now.
        run(&mut export);
        assert!(export.has_ended());
        let unit =
            serde_json::from_value(json!({ "lun": 2, "disk": { "null": { "size-bytes": 512 } } }))
                .unwrap();
        let disk = DiskSource::null(512, &DiskOptions::default()).unwrap();
        assert!(export.add_unit(unit, disk, Instant::now()).is_some(), "it is to be closed");
    }

    /// Programs see by the code of the error that the parameters were wrong.
    #[test]
    fn impossible_rules_are_refused_as_parameters_and_change_nothing() {
        let socket = || Endpoint::Connection(UnixStream::pair().unwrap().0);
        let (mut of_blk, mut of_scsi) = (Scene::new(socket()), Scene::new(socket()));
        let exports = [of_blk.export(), scsi_export(&mut of_scsi)];
        let places = [(None, 0), (Some(UnitPlace { target: 0, lun: 1 }), 1)];
        for (mut export, (place, index)) in exports.into_iter().zip(places) {
            let mut set = |change: &QosChange| {
                let set = export.set_rules(place, change).map(drop);
                (set, export.rules(index), export.disks[index].limits())
            };
            let limits = |limits| QosChange {
                limits: Some(serde_json::from_value(limits).unwrap()),
                ..QosChange::default()
            };
            let (first, rules, before) = set(&limits(json!({ "iops-total": 100 })));
            assert!(first.is_ok() && before.requests.total.is_some_and(|it| it.per_second == 100));
            for change in [
                limits(json!({ "iops-total-max": 10 })),
                limits(json!({ "iops-total": 0, "iops-size": 4096 })),
                limits(json!({ "bps-read-max": 1 })),
                QosChange { rerror: Some(OnError::Hold), ..QosChange::default() },
                QosChange { rerror: Some(OnError::HoldBriefly), ..QosChange::default() },
            ] {
                let (refused, after, limits_after) = set(&change);
                assert!(
                    matches!(refused, Err(CommandError::Invalid(_))),
                    "{change:?}: {refused:?}"
                );
                assert_eq!((&after, limits_after), (&rules, before), "{change:?}");
            }
        }
    }

    /// Runs the export for as long as its descriptors are ready.
    pub(in crate::control) fn run(export: &mut Export) {
        loop {
            let now = Instant::now();
            let (mut fds, mut whose) = (Vec::new(), Vec::new());
            export.add_polls(0, now, &mut fds, &mut whose);
            poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
            let is_ready = fds.iter().map(|fd| !fd.revents().is_empty());
            let ready: Vec<Polled> =
                whose.into_iter().zip(is_ready).filter_map(|(w, is)| is.then_some(w)).collect();
            for whose in ready {
                match whose {
                    Polled::Listener(_) => export.listener_is_ready = true,
                    Polled::Session(_) => export.session_is_ready = true,
                    Polled::Alarm => unreachable!("an export has none"),
                }
            }
            if !export.is_due(now) {
                return;
            }
            export.run(now);
        }
    }

    /// Disconnects a front-end. To close its socket is not enough: a child of another test has it
    /// open until it executes its program.
    fn leave(front_end: &UnixStream) {
        front_end.shutdown(Shutdown::Both).unwrap();
    }

    #[test]
    fn front_ends_are_served_one_after_the_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mut scene = Scene::new(Endpoint::bind(&path, "").unwrap());
        let mut export = scene.export();
        run(&mut export);
        let seen = |export: &Export| {
            let status = export.status();
            (status.state, status.connected, status.sessions)
        };
        assert_eq!(seen(&export), (ExportState::Serving, false, 0));
        let first = UnixStream::connect(&path).unwrap();
        let mut second = UnixStream::connect(&path).unwrap();
        run(&mut export);
        assert_eq!(seen(&export), (ExportState::Serving, true, 1));
        assert!(export.waiting_is_logged, "another one waits");
        let (now, later) = (Instant::now(), Instant::now() + Duration::from_secs(3600));
        let is_warned = |export: &mut Export| {
            let watch = &mut export.memory_watch;
            watch.update(Some(0), now).or_else(|| watch.update(Some(0), later)).is_some()
        };
        assert!(is_warned(&mut export) && !is_warned(&mut export), "once for a front-end");
        leave(&first);
        run(&mut export);
        assert!(is_warned(&mut export), "the next one is another one");
        assert_eq!(seen(&export), (ExportState::Serving, true, 2));
        assert!(!export.waiting_is_logged);
        scene.disk.set_size(1 << 21, || ()).unwrap();
        assert_eq!(export.status().size_bytes, 1 << 21);
        export.begin_stop();
        assert_eq!(seen(&export), (ExportState::Stopping, true, 2));
        assert!(!path.exists(), "nobody can connect any more");
        run(&mut export);
        assert!(export.has_ended() && !seen(&export).1);
        assert_eq!(export.status().waits_for.as_deref(), Some(NOT_CLOSED));
        assert_eq!(second.read(&mut [0]).unwrap(), 0);
    }

    /// The next process would not know of a change that is half done.
    #[test]
    fn an_export_is_described_only_between_its_changes() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut scene = Scene::new(Endpoint::Connection(ours));
        let mut export = scene.export();
        let describe = |export: &Export| export.describe(&mut PassedFds::default()).map(drop);
        let place = Some(UnitPlace { target: 0, lun: 3 });
        for (place, blocks_hand_over) in [(None, false), (None, true), (place, true)] {
            let kind = DiskChangeKind::Removing;
            export.changing.push(DiskChange { place, kind, blocks_hand_over });
            match describe(&export) {
                Ok(()) => assert!(!blocks_hand_over),
                Err(CommandError::DiskBusy(_)) => assert!(place.is_none() && blocks_hand_over),
                Err(CommandError::UnitBusy(_, at)) => assert_eq!(Some(at), place),
                Err(error) => panic!("{error:?}"),
            }
            export.changing.clear();
        }
        export.begin_stop();
        let refused = describe(&export).unwrap_err();
        assert!(matches!(refused, CommandError::Busy(_, ExportState::Stopping)), "{refused:?}");
    }

    /// The next process would serve a resized disk with its old size, or a removed unit.
    #[test]
    fn an_export_whose_disks_change_is_not_handed_over() {
        let socket = || Endpoint::Connection(UnixStream::pair().unwrap().0);
        let (mut of_blk, mut of_scsi) = (Scene::new(socket()), Scene::new(socket()));
        let (mut blk, mut scsi) = (of_blk.export(), scsi_export(&mut of_scsi));
        let describe = |export: &Export| export.describe(&mut PassedFds::default()).map(drop);
        let place = |lun| UnitPlace { target: 0, lun };
        blk.begin_resize(None).map(drop).unwrap();
        assert!(matches!(describe(&blk), Err(CommandError::DiskBusy(_))));
        scsi.begin_resize(Some(place(1))).map(drop).unwrap();
        assert!(matches!(describe(&scsi), Err(CommandError::UnitBusy(_, at)) if at == place(1)));
        scsi.changing.clear();
        scsi.begin_unit(place(0), UnitChange::Remove).map(drop).unwrap();
        assert!(matches!(describe(&scsi), Err(CommandError::UnitBusy(_, at)) if at == place(0)));
        scsi.changing.clear();
        scsi.begin_unit(place(2), UnitChange::Add).map(drop).unwrap();
        assert!(matches!(describe(&scsi), Ok(())), "its disk may take long to open");
        assert!(scsi.block_hand_over(Some(place(2)), true));
        assert!(matches!(describe(&scsi), Err(CommandError::UnitBusy(_, at)) if at == place(2)));
    }

    /// A command may have changed them since the start.
    #[test]
    fn a_new_unit_has_the_present_limits_of_its_group() {
        let mut scene = Scene::new(Endpoint::Connection(UnixStream::pair().unwrap().0));
        let mut export = scsi_export(&mut scene);
        let limits = |iops: u64| -> LimitSpec {
            serde_json::from_value(json!({ "group": "a", "iops-total": iops })).unwrap()
        };
        export.spec.settings.rules.limits = limits(5);
        export.groups.join(&export.disks[0], &export.spec.settings.rules).unwrap();
        let change = QosChange { limits: Some(limits(9)), ..QosChange::default() };
        let place = |lun| UnitPlace { target: 0, lun };
        export.set_rules(Some(place(0)), &change).unwrap();
        let adding = export.begin_unit(place(2), UnitChange::Add).unwrap();
        assert_eq!(adding.settings.rules.limits, limits(9));
        // Its own limits are beside these, and hold for the whole group.
        let unit = json!({ "lun": 2, "disk": { "null": { "size-bytes": 512 } },
            "settings": { "limits": { "bps-total": 1 << 20 } } });
        let disk = DiskSource::null(512, &DiskOptions::default()).unwrap();
        let unit: UnitSpec = serde_json::from_value(unit).unwrap();
        export.groups.join(&disk, &unit.settings.rules(&adding.settings.rules)).unwrap();
        assert!(export.add_unit(unit, disk, Instant::now()).is_none());
        let all = LimitSpec { bps_total: Some(1 << 20), ..limits(9) };
        assert_eq!(export.rules(0).limits, all);
    }

    /// Requests may wait for a server that does not come back.
    #[test]
    fn a_removal_by_force_gives_up_on_the_servers_of_disks() {
        let disk = RemoteStub::new(&[0; 4096]);
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut export = Scene::on(disk.clone().source(), Endpoint::Connection(ours)).export();
        run(&mut export);
        export.begin_stop();
        assert_eq!(disk.take_calls(), []);
        export.disconnect();
        assert_eq!(disk.take_calls(), [Call::Abandon]);
        assert_eq!(theirs.read(&mut [0]).unwrap(), 0, "the front-end stays connected");
        assert!(export.close(Waker::noop()).deadline().is_some(), "the close may hang");
    }

    /// Otherwise its watch reports the size without end.
    #[test]
    fn a_size_that_was_reported_counts_as_known() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let options = DiskOptions { no_lock: true, late_lock: true, ..DiskOptions::default() };
        let disk = DiskSource::file(file.path(), &options).unwrap();
        let lock = disk.late_lock().unwrap();
        let endpoint = Endpoint::Connection(UnixStream::pair().unwrap().0);
        let export = Scene::on(disk, endpoint).export();
        let known = || export.watched_disks()[0].size_bytes;
        // Another host has enlarged it.
        file.as_file().set_len(1 << 21).unwrap();
        lock.take(1).unwrap();
        assert_eq!((known(), export.status().size_bytes), (1 << 20, 1 << 21));
        export.report_size(None);
        assert_eq!(known(), 1 << 21);
    }

    /// State that is not handed over is lost.
    #[test]
    fn no_part_of_the_progress_of_an_export_is_lost_on_its_way() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let connection = || {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let options = DiskOptions { no_lock: true, ..DiskOptions::default() };
            let disk = DiskSource::file(file.path(), &options).unwrap();
            let settings = ExportSettings { late_lock: true, ..ExportSettings::default() };
            (Scene::with(disk, Endpoint::Connection(ours), settings), theirs)
        };
        let ((mut old, _front_end), (mut new, _other)) = (connection(), connection());
        let mut export = old.export();
        run(&mut export);
        let long = Duration::from_secs(1000);
        export.connected = Instant::now().checked_sub(long).unwrap();
        export.sessions = 7;
        old.disk.hand_over().inherit(Some(libc::EIO), false);
        let totals = serde_json::to_string(&export.setup.device.totals()).unwrap();
        let totals = serde_json::from_str(&totals.replacen(":0", ":7", 1)).unwrap();
        export.setup.device.add_totals(totals);
        export.earlier = serde_json::from_value(json!({
            "throttled-ns": 1, "retried-ns": 2, "held-ns": 3,
            "queues": [QueueServed::new(0, &QueueStats::default())],
        }))
        .unwrap();
        export.earlier.queues[0].kicks = 8;
        let state = json!({
            "format": "ringhaul device state", "version": 1,
            "units": [], "events": [], "missed-events": false,
        });
        let states = json!({ "left": state, "next": state });
        let turns = export.turns.as_ref().expect("the disk is locked late");
        turns.take_over(serde_json::from_value(states.clone()).unwrap());
        export.begin_pause();
        run(&mut export);
        assert!(export.has_paused());
        let progress = |export: &Export, fds: &mut PassedFds| {
            let progress = export.progress_so_far(fds).unwrap();
            (serde_json::to_value(&progress).unwrap(), progress)
        };
        let mut fds = PassedFds::default();
        let (mut first, handed) = progress(&export, &mut fds);
        assert_eq!((&first["losses"], &first["flushed"]), (&json!([libc::EIO]), &json!([false])));
        assert!(first["totals"].to_string().contains(":7"), "{first}");
        assert_eq!(first["counters"]["queues"][0]["kicks"], 8);
        assert_eq!(first["counters"]["held-ns"], 3);
        assert_eq!(first["turns"], states);
        let (setup, now) = (new.setup.take().unwrap(), Instant::now());
        let taken = Export::take_over((setup, handed), Waker::noop(), &mut fds, now).unwrap();
        assert!(taken.has_paused() && taken.is_connection_logged && taken.sessions == 7);
        let (mut second, _) = progress(&taken, &mut PassedFds::default());
        for progress in [&mut first, &mut second] {
            let connected = progress["connected"].take();
            assert!(connected["secs"].as_u64() >= Some(long.as_secs()), "{connected}");
        }
        assert_eq!(second, first);
    }

    #[test]
    fn a_status_has_the_name_the_present_limits_and_the_sum_of_sizes() {
        let mut scene = Scene::new(Endpoint::Connection(UnixStream::pair().unwrap().0));
        let mut export = scene.export();
        let rules = |iops: u64| -> QosSpec {
            let limits = json!({ "limits": { "group": "a", "iops-total": iops } });
            serde_json::from_value(limits).unwrap()
        };
        export.groups.join(&scene.disk, &rules(7)).unwrap();
        export.spec.settings.rules = rules(5);
        let huge = DiskSource::null((1 << 63) - 512, &DiskOptions::default()).unwrap();
        export.disks = vec![huge.clone(), huge.clone(), huge];
        export.memory_watch.update(Some(0), Instant::now());
        let status = export.status();
        assert_eq!(status.spec.name.as_deref(), Some("descriptor 3"));
        assert_eq!(status.spec.settings.rules, rules(7));
        assert_eq!(status.size_bytes, u64::MAX);
        assert!(status.lacks_memory && status.waits_for.is_none());
    }

    /// A full log would hide other lines, and a line about an end needs one about its begin.
    #[test]
    fn front_ends_are_reported_each_and_logged_now_and_then() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mut scene = Scene::new(Endpoint::bind(&path, "").unwrap());
        let subscribers = Subscribers::default();
        let (_subscription, queue) = subscribers.subscribe();
        let log = ExportLog::new("test").with_subscribers(subscribers);
        scene.setup.as_mut().unwrap().log = Arc::new(log);
        let mut export = scene.export();
        let peer = Peer::from_socket(UnixStream::pair().unwrap().0).unwrap();
        let mut visit = |sent: &[u8]| {
            let mut front_end = UnixStream::connect(&path).unwrap();
            run(&mut export);
            let waiting = UnixStream::connect(&path).unwrap();
            run(&mut export);
            front_end.write_all(sent).unwrap();
            run(&mut export);
            drop((front_end, waiting));
            let (mut attached, mut gone) = (Vec::new(), Vec::new());
            // A child of another test has both sockets open until it executes its program.
            wait_until(|| {
                run(&mut export);
                for event in queue.events.try_iter() {
                    match event.details.clone() {
                        EventDetails::Attached { peer } => attached.push(peer),
                        EventDetails::Gone { reason } => gone.push(reason.unwrap_or_default()),
                        other => panic!("{other:?}"),
                    }
                }
                gone.len() >= 2
            });
            assert_eq!(attached, [Some(peer.clone()), Some(peer.clone())]);
            gone
        };
        let lines = LogCapture::lines_of(|| {
            assert_eq!(visit(b""), ["", ""]);
            let reasons = visit(&[0xff; 64]);
            assert!(reasons[0].starts_with("disconnected: "), "{reasons:?}");
            // An answer that is not read: GET_FEATURES of version 1, without a body.
            let reasons = visit(&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
            assert!(!reasons[0].is_empty(), "{reasons:?}");
        });
        let count =
            |lines: &[String], text: &str| lines.iter().filter(|line| line.contains(text)).count();
        let (come, left) = ("a front-end has connected", "the front-end has disconnected");
        let (waits, thrown_out) = ("another front-end has connected", "disconnected the front-end");
        for (text, expected) in [(come, 5), (left, 4), (waits, 3), (thrown_out, 1)] {
            assert_eq!(count(&lines, text), expected, "{text}: {lines:#?}");
        }
        let lines = LogCapture::lines_of(|| (0..50).for_each(|_| drop(visit(&[0xff; 64]))));
        for text in [come, waits, thrown_out] {
            assert!(count(&lines, text) < 10, "{text}");
        }
        assert!(count(&lines, left) <= count(&lines, come));
        let lines = LogCapture::lines_of(|| (0..50).for_each(|_| drop(visit(b""))));
        assert_eq!((count(&lines, come), count(&lines, left)), (0, 0));
        let _front_end = UnixStream::connect(&path).unwrap();
        run(&mut export);
        assert!(export.deadline().is_some(), "a silent stranger must leave");
        queue.events.try_iter().for_each(drop);
        export.begin_stop();
        run(&mut export);
        let gone = EventDetails::Gone { reason: Some("the export ends".to_owned()) };
        assert_eq!(queue.events.try_recv().unwrap().details, gone);
    }

    #[test]
    fn the_totals_are_logged_once_at_the_end() {
        for (is_connected, leaves) in [(false, false), (true, false), (true, true)] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("socket");
            let mut export = Scene::new(Endpoint::bind(&path, "").unwrap()).export();
            let mut front_end = is_connected.then(|| UnixStream::connect(&path).unwrap());
            run(&mut export);
            let lines = LogCapture::lines_of(|| {
                export.log.warn(&"a test");
                front_end.take_if(|_| leaves).iter().for_each(leave);
                run(&mut export);
                for _ in 0..2 {
                    export.begin_stop();
                    run(&mut export);
                }
            });
            for text in ["requests: 0 reads", "had 1 errors"] {
                let found = lines.iter().filter(|line| line.contains(text)).count();
                assert_eq!(found, 1, "{text}: {lines:#?}");
            }
        }
    }

    /// A user repairs each reason of a wait.
    #[test]
    fn an_export_names_all_that_it_waits_for() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let disk = RemoteStub::new(&[0; 4096]);
        let mut export = Scene::on(disk.clone().source(), Endpoint::Connection(ours)).export();
        run(&mut export);
        assert_eq!(export.deadline(), None, "an inherited front-end may be silent");
        export.begin_resize(None).map(drop).unwrap();
        let left = export.unfinished_work();
        assert!(left.ends_with("; its disk is being resized"), "{left}");
        assert_eq!(export.awaited_event(), "its disk has not answered yet");
        disk.set_away(true);
        assert_eq!(export.awaited_event(), "its disk has not answered for 0 s");
    }

    /// The end of the process closes its connection, after the kernel has finished its requests.
    #[test]
    fn an_abandoned_front_end_sees_no_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mut export = Scene::new(Endpoint::bind(&path, "").unwrap()).export();
        let mut front_end = UnixStream::connect(&path).unwrap();
        run(&mut export);
        let lines = LogCapture::lines_of(|| export.abandon());
        assert!(lines.iter().any(|line| line.contains("requests: 0 reads")), "{lines:?}");
        assert!(!path.exists());
        front_end.set_nonblocking(true).unwrap();
        assert_eq!(front_end.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn an_export_keeps_the_descriptors_of_its_front_end() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let export = Scene::new(Endpoint::Connection(ours)).export();
        let held: Vec<_> = (0..100).map(|_| export.setup.examiner.hold()).collect();
        export.set_descriptors_max(32);
        assert_eq!(export.setup.examiner.open_max(), held.len() + MESSAGE_FDS_MAX);
        drop(held);
        export.set_descriptors_max(32);
        assert_eq!(export.setup.examiner.open_max(), 32);
    }

    /// Without a pause, a lack of descriptors would wake the thread without end.
    #[test]
    fn an_export_pauses_when_no_front_end_can_be_accepted() {
        let folder = tempfile::tempdir().unwrap();
        let mut scene = Scene::new(Endpoint::bind(&folder.path().join("socket"), "").unwrap());
        let mut export = scene.export();
        let now = Instant::now();
        let polls = |export: &Export, now: Instant| {
            let (mut fds, mut whose) = (Vec::new(), Vec::new());
            export.add_polls(0, now, &mut fds, &mut whose);
            fds.len()
        };
        for (errno, pauses) in [
            (libc::EAGAIN, false),
            (libc::ECONNABORTED, false),
            (libc::EINTR, false),
            (libc::EMFILE, true),
        ] {
            export.accept_failed(&io::Error::from_raw_os_error(errno), now);
            assert_eq!(export.deadline(), pauses.then_some(now + ACCEPT_PAUSE), "{errno}");
            assert_eq!(polls(&export, now), usize::from(!pauses), "{errno}");
        }
        assert!(!export.is_due(now));
        (export.listener_is_ready, export.is_handing_over) = (true, true);
        assert!(!export.is_due(now), "the thread would not sleep during a hand-over");
        (export.listener_is_ready, export.is_handing_over) = (false, false);
        let later = now + ACCEPT_PAUSE;
        assert!(export.is_due(later));
        export.run(later);
        assert_eq!((export.deadline(), polls(&export, later)), (None, 1));
        export.memory_watch.update(Some(0), later);
        assert!(export.deadline().is_some(), "a guest without memory is looked at again");
    }

    #[test]
    fn a_connection_that_was_not_taken_is_shut_down() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        // The daemon's parent has the connection too.
        let _also_ours = ours.try_clone().unwrap();
        let mut export = Scene::new(Endpoint::Connection(ours)).export();
        export.begin_stop();
        while !export.has_ended() {
            export.run(Instant::now());
        }
        assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
    }
    /// The file system of a disk may hang after its guest has left.
    #[test]
    fn an_export_is_handed_over_with_the_state_of_the_guest_that_has_left() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut export = Scene::new(Endpoint::Connection(ours)).export();
        let turns = Arc::new(GuestTurns::new(export.setup.device.clone(), Arc::default()));
        export.turns = Some(Arc::clone(&turns));
        let describe = |export: &Export| export.describe(&mut PassedFds::default()).map(drop);
        turns.take(1).unwrap();
        let refused = describe(&export).unwrap_err();
        assert!(matches!(refused, CommandError::NotNow(_)), "{refused:?}");
        assert!(refused.to_string().contains("the state of the guest that has left"), "{refused}");
        export.begin_pause();
        assert!(!export.has_paused());
        turns.release(1).unwrap();
        assert!(export.has_paused());
        export.begin_resume();
        describe(&export).unwrap();
    }

    /// The guest may be about to continue on another host, without the lost data.
    #[test]
    fn a_lock_that_a_loss_keeps_is_not_released_for_another_process() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        for (is_late, is_held, loss, is_released) in [
            (true, false, Some(libc::EIO), false),
            (true, false, None, true),
            (true, true, Some(libc::EIO), true),
            (false, false, Some(libc::EIO), true),
        ] {
            let options = DiskOptions { no_lock: true, ..DiskOptions::default() };
            let disk = DiskSource::file(file.path(), &options).unwrap();
            disk.hand_over().inherit(loss, false);
            let (ours, _theirs) = UnixStream::pair().unwrap();
            let mut export = Scene::on(disk, Endpoint::Connection(ours)).export();
            let locks = Arc::<DiskLocks>::default();
            if is_held {
                locks.take(1).unwrap();
            }
            let turns = GuestTurns::new(export.setup.device.clone(), locks);
            export.turns = is_late.then(|| Arc::new(turns));
            assert_eq!(export.disks_to_release().len(), usize::from(is_released), "{loss:?}");
        }
    }
}
