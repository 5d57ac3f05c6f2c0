//! All exports, on the control thread.

mod hand_over;

use std::collections::VecDeque;
use std::sync::{Arc, mpsc};
use std::task::Waker;
use std::time::{Duration, Instant};

use blockio::DiskSource;
use device::oneshot;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::closing::{Closing, refuse};
use super::disk_change::{DiskChange, DiskChangeKind};
use super::export::{ACCEPT_PAUSE, Export, Polled};
use super::hand_over::HandOver;
use super::order::{Alarm, Answered, ExportSetup, OrderKind, ResizingDisk, WatchedDisks};
use super::stages::Stages;
use crate::control::subscribers::EventDetails;
use crate::log::rate_limit::RateLimit;
use crate::process::limits;
use crate::spec::command::StatsReader;
use crate::spec::command::{CommandError, ExportState, ExportStatus};
use crate::spec::stats::ExportStats;
use crate::spec::status::ExportDetails;
use crate::spec::{UnitPlace, UnitSpec};

/// The interval of log lines about exports that have not ended.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// The time that a disk takes to close unless it hangs.
const CLOSE_MAX: Duration = Duration::from_millis(100);

/// The state of the control thread.
pub(super) struct Exports {
    /// In the order in which they were added.
    list: Vec<Export>,
    /// Ended exports with disks that are being closed. Their names are still taken.
    closing: Vec<Closing>,
    /// The names of all exports, also of the ones that are being opened.
    stages: Arc<Stages>,
    orders: mpsc::Receiver<Order>,
    /// Incremented by each change of the exports.
    generation: u64,
    hand_over: Option<HandOver>,
    /// Orders that wait for the end of the hand-over.
    deferred: VecDeque<Order>,
    alarm: Arc<Alarm>,
    /// Wakes the thread.
    waker: Waker,
    /// The time at which all exports were told to stop.
    stopping: Option<Instant>,
    reported: Option<Instant>,
    poll_error_limit: RateLimit,
    /// True if unfinished exports were abandoned, or left to another process: the thread ends.
    is_left: bool,
}

/// An order to the control thread.
pub(super) struct Order {
    pub(super) kind: OrderKind,
    pub(super) carry_out: Box<dyn FnOnce(&mut Exports) + Send>,
}

impl Exports {
    pub(super) fn new(
        stages: Arc<Stages>,
        orders: mpsc::Receiver<Order>,
        alarm: Arc<Alarm>,
        waker: Waker,
    ) -> Self {
        Self {
            list: Vec::new(),
            closing: Vec::new(),
            stages,
            orders,
            generation: 0,
            hand_over: None,
            deferred: VecDeque::new(),
            alarm,
            waker,
            stopping: None,
            reported: None,
            poll_error_limit: RateLimit::default(),
            is_left: false,
        }
    }

    /// Serves until the last export has ended.
    pub(super) fn run(&mut self) {
        loop {
            self.alarm.wakes.add(1);
            self.alarm.monitor.wake_for_work();
            let now = Instant::now();
            while let Some(order) = self.next_order() {
                let is_change = matches!(order.kind, OrderKind::Change | OrderKind::End);
                self.generation += u64::from(is_change);
                (order.carry_out)(self);
                if self.is_left {
                    return;
                }
            }
            self.list.iter_mut().filter(|export| export.is_due(now)).for_each(|e| e.run(now));
            self.continue_hand_over(now);
            if self.forget_ended(now) {
                self.log_unopened(now);
                return;
            }
            self.report(now);
            self.wait(now);
        }
    }

    /// Returns the next order that need not wait for a hand-over.
    fn next_order(&mut self) -> Option<Order> {
        let holds = |order: &Order| self.hand_over.as_ref().is_some_and(|it| it.holds(order.kind));
        if self.deferred.front().is_some_and(|order| !holds(order)) {
            return self.deferred.pop_front();
        }
        loop {
            let order = self.orders.try_recv().ok()?;
            if !holds(&order) {
                return Some(order);
            }
            self.deferred.push_back(order);
        }
    }

    /// Begins to stop all exports.
    pub(super) fn begin_stop(&mut self) {
        if self.stopping.is_none() {
            self.cancel_hand_over();
            self.stages.close(None);
            let now = Instant::now();
            (self.stopping, self.reported) = (Some(now), Some(now));
            self.list.iter_mut().for_each(Export::begin_stop);
        }
    }

    pub(super) fn stats(&mut self, reader: StatsReader) -> Vec<ExportStats> {
        self.list.iter_mut().map(|export| export.stats(reader)).collect()
    }

    /// Lists the disks of all exports, to be watched.
    pub(super) fn watched_disks(&self) -> WatchedDisks {
        let disks = self.list.iter().flat_map(Export::watched_disks).collect();
        WatchedDisks { disks, wakes: self.alarm.wakes.get() }
    }

    /// Returns the served export with this number.
    fn served(&mut self, id: u64) -> Option<&mut Export> {
        self.list.iter_mut().find(|export| export.id() == id)
    }

    /// Reports the end of the change at this place of an export: its thread has no disk open.
    pub(super) fn end_change(&mut self, id: u64, place: Option<UnitPlace>) {
        let changing = self.changing(id).into_iter();
        changing.for_each(|all| all.retain(|other| other.place != place));
    }

    /// Begins to change the size of a disk. Until the end no other command may do so, through any
    /// export.
    pub(super) fn begin_resize(
        &mut self,
        name: &str,
        place: Option<UnitPlace>,
    ) -> Result<ResizingDisk, CommandError> {
        let disk = self.find(name)?.disk_at(place);
        let identity = disk.map_or(String::new(), |disk| disk.identity().to_owned());
        let served = self.list.iter().filter(|other| other.resizes(&identity));
        let closing = self.closing.iter().filter(|other| other.resizes(&identity));
        let names = served.map(|other| other.spec.name());
        let other = names.chain(closing.map(|other| other.name())).next();
        match other.filter(|_| !identity.is_empty()) {
            Some(other) => Err(CommandError::DiskBusy(other)),
            None => self.find(name)?.begin_resize(place),
        }
    }

    /// The changes in progress of an export that is served or has ended.
    fn changing(&mut self, id: u64) -> Option<&mut Vec<DiskChange>> {
        let served = self.list.iter_mut().find(|export| export.id() == id);
        let mut closing = self.closing.iter_mut();
        let served = served.map(|export| &mut export.changing);
        served.or_else(|| Some(&mut closing.find(|closing| closing.id() == id)?.changing))
    }

    /// Adds a unit to an export, as requested at `asked`. If the export has ended, returns the
    /// disk, for the caller to close.
    pub(super) fn add_unit(
        &mut self,
        id: u64,
        unit: UnitSpec,
        disk: DiskSource,
        asked: Instant,
    ) -> Option<DiskSource> {
        match self.served(id) {
            Some(export) => export.add_unit(unit, disk, asked),
            None => Some(disk),
        }
    }

    pub(super) fn report_removed(&mut self, id: u64, place: Option<UnitPlace>) {
        self.served(id).into_iter().for_each(|export| export.report_removed(place));
    }

    /// Blocks (true) or allows hand-overs during the change at a place of an export. Returns false
    /// if the export has ended, or the change was cancelled.
    pub(super) fn block_hand_over(
        &mut self,
        id: u64,
        place: Option<UnitPlace>,
        blocks: bool,
    ) -> bool {
        self.served(id).is_some_and(|export| export.block_hand_over(place, blocks))
    }

    /// Reports the new size of the disk at a place of an export.
    pub(super) fn report_resized(&mut self, id: u64, place: Option<UnitPlace>) {
        self.report_size_to_others(id, place);
        self.served(id).into_iter().for_each(|export| export.report_size(place));
    }

    /// Reports the new size of the disk at a place to all other places with the same disk.
    fn report_size_to_others(&mut self, id: u64, place: Option<UnitPlace>) {
        let changing = self.changing(id).into_iter().flatten();
        let identity = changing.filter(|it| it.place == place).find_map(|it| match &it.kind {
            DiskChangeKind::Resizing { identity, .. } => Some(identity.clone()),
            DiskChangeKind::Adding(_) | DiskChangeKind::Removing => None,
        });
        if let Some(identity) = identity.filter(|identity| !identity.is_empty()) {
            self.list.iter().for_each(|other| other.report_size_of(&identity, (id, place)));
        }
    }

    pub(super) fn serve(&mut self, setups: Vec<ExportSetup>) -> Result<(), CommandError> {
        if self.stopping.is_some() {
            for setup in setups {
                tracing::warn!(export = setup.log.name(), "ended before it was served");
                refuse(setup);
            }
            return Err(CommandError::Ending);
        }
        for setup in setups {
            setup.log.report(|| EventDetails::Added);
            tracing::info!(export = setup.log.name(), "{}", setup.line);
            setup.export.spec().apply_group_limits(&setup.groups, setup.export.since());
            let mut export = Export::new(setup, &self.waker);
            export.continue_killed(Instant::now());
            if !export.removal_waiters.is_empty() {
                export.begin_stop();
            }
            self.list.push(export);
        }
        self.share_descriptors();
        Ok(())
    }

    pub(super) fn remove(
        &mut self,
        name: &str,
        force: bool,
        answer: oneshot::Sender<Answered<ExportStatus>>,
    ) {
        let answer = match self.stages.remove(name, answer) {
            Ok(export) if force => {
                let text = "the removal by force waits until the opening of its disk ends";
                return tracing::info!(export, "{text}");
            }
            Ok(_) => return,
            Err(answer) => answer,
        };
        let mut closing = self.closing.iter_mut();
        if let Some(closing) = closing.find(|closing| closing.is_called(name)) {
            closing.removal_waiters.push(answer);
            if force {
                closing.force();
            }
            return;
        }
        match self.find(name) {
            Ok(export) => {
                export.begin_stop();
                if force {
                    export.disconnect();
                }
                export.removal_waiters.push(answer);
            }
            Err(error) => answer.send(Err(error)),
        }
    }

    /// Gives each export its share of the descriptors that this process may have open.
    fn share_descriptors(&self) {
        let of_front_ends = self.list.iter().map(Export::descriptors).sum();
        let share = limits::descriptor_share(self.list.len(), of_front_ends);
        self.list.iter().for_each(|export| export.set_descriptors_max(share));
    }

    pub(super) fn find(&mut self, name: &str) -> Result<&mut Export, CommandError> {
        let pending = self.stages.statuses();
        if let Some(pending) = pending.iter().find(|status| status.spec.is_called(name)) {
            return Err(CommandError::Busy(name.to_owned(), pending.state));
        }
        if self.closing.iter().any(|closing| closing.is_called(name)) {
            return Err(CommandError::Busy(name.to_owned(), ExportState::Stopping));
        }
        let found = self.list.iter_mut().find(|export| export.spec.is_called(name));
        found.ok_or_else(|| CommandError::Unknown(name.to_owned()))
    }

    pub(super) fn show(&self) -> Vec<ExportStatus> {
        let closing = self.closing.iter().map(Closing::status);
        let served = self.list.iter().map(Export::status).chain(closing);
        served.chain(self.stages.statuses()).collect()
    }

    /// Describes an export in detail. If it is not served, only its status is known.
    pub(super) fn details(&mut self, name: &str) -> Answered<ExportDetails> {
        if let Ok(export) = self.find(name) {
            return Ok(export.details(Instant::now()));
        }
        let mut others = self.show().into_iter();
        let status = others.find(|status| status.spec.is_called(name));
        let status = status.ok_or_else(|| CommandError::Unknown(name.to_owned()))?;
        let (disks, missing_units) = (Vec::new(), Vec::new());
        Ok(ExportDetails { status, front_end: None, disks, missing_units })
    }

    /// Begins to close the disks of ended exports, and forgets exports with closed disks. Returns
    /// true if none is left, unless a removal has ended the last one: more may be added then.
    fn forget_ended(&mut self, now: Instant) -> bool {
        if self.list.iter().any(Export::has_ended) {
            self.generation += 1;
            let (ended, others) =
                std::mem::take(&mut self.list).into_iter().partition(Export::has_ended);
            self.list = others;
            let ended: Vec<Export> = ended;
            self.closing.extend(ended.into_iter().map(|export| export.close(&self.waker)));
            self.share_descriptors();
        }
        let is_stopping = self.stopping.is_some();
        self.closing.iter_mut().for_each(|closing| closing.expire(now));
        let ended = self.closing.extract_if(.., |closing| closing.has_ended(is_stopping));
        let answered: Vec<usize> = ended.map(Closing::finish).collect();
        let is_empty = self.list.is_empty() && self.closing.is_empty();
        is_empty && (is_stopping || answered.contains(&0))
    }

    /// The time at which the thread has work without an event.
    fn deadline(&self, now: Instant) -> Option<Instant> {
        let closing = self.closing.iter().filter_map(Closing::deadline);
        let deadlines = self.list.iter().filter_map(Export::deadline).chain(closing);
        let report = self.reported.map(|reported| reported + REPORT_INTERVAL);
        let at_once = self.list.iter().any(|export| export.session_is_ready).then_some(now);
        let hand_over = self.hand_over.as_ref().and_then(HandOver::deadline);
        deadlines.chain(report).chain(hand_over).chain(at_once).min()
    }

    /// Sleeps until an event or a deadline, and marks the exports with events.
    fn wait(&mut self, now: Instant) {
        let left = self.deadline(now).map(|deadline| deadline.saturating_duration_since(now));
        // A time that the kernel cannot represent is as good as none.
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        let mut whose = vec![Polled::Alarm];
        let mut fds = vec![PollFd::new(&self.alarm.wake, PollFlags::IN)];
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
                if let Some(left_out) = self.poll_error_limit.permit() {
                    tracing::error!(left_out, "cannot wait for front-ends: {error}");
                }
                std::thread::sleep(ACCEPT_PAUSE);
                return;
            }
        }
        for (whose, _) in ready.into_iter().filter(|(_, is_ready)| *is_ready) {
            match whose {
                Polled::Alarm => {
                    self.alarm.wake.clear();
                    self.list.iter_mut().for_each(Export::mark_woken);
                }
                Polled::Listener(index) => self.list[index].listener_is_ready = true,
                Polled::Session(index) => self.list[index].session_is_ready = true,
            }
        }
    }

    /// Logs every few seconds the exports that have not ended, with the reasons.
    fn report(&mut self, now: Instant) {
        let (Some(since), Some(reported)) = (self.stopping, self.reported) else { return };
        if now < reported + REPORT_INTERVAL {
            return;
        }
        self.reported = Some(now);
        let seconds = (now - since).as_secs();
        for (export, left) in self.unfinished(now) {
            tracing::warn!(
                export,
                "still stopping after {seconds} s: {left}; a second signal ends the daemon at once"
            );
        }
    }

    /// The exports that have not ended, by their names in the log, with the reasons.
    fn unfinished(&self, now: Instant) -> impl Iterator<Item = (&str, String)> {
        let serving = self.list.iter().filter(|export| !export.has_ended());
        let is_stopping = self.stopping.is_some();
        let closing = self.closing.iter().filter(move |closing| !closing.has_ended(is_stopping));
        let serving = serving.map(|export| (export.name(), export.unfinished_work()));
        let closing = closing.map(move |closing| {
            let seconds = now.saturating_duration_since(closing.since).as_secs();
            (closing.log.name(), format!("{} after {seconds} s", closing.unfinished_work()))
        });
        serving.chain(closing)
    }

    /// The exports that are still being opened. They do not keep the daemon from ending.
    fn unopened(&self, now: Instant) -> impl Iterator<Item = (String, String)> {
        self.stages.unserved().into_iter().map(move |(export, since)| {
            let seconds = now.saturating_duration_since(since).as_secs();
            (export, format!("its disk is not open after {seconds} s"))
        })
    }

    /// Logs the exports that were never served.
    fn log_unopened(&self, now: Instant) {
        for (export, why) in self.unopened(now) {
            tracing::warn!(export, "ended before it was served: {why}");
        }
    }

    /// Returns true if all exports end within [`CLOSE_MAX`]: both signals may have come at once, or
    /// the second one between the last request and the close of a disk.
    fn have_ended(&mut self) -> bool {
        let until = Instant::now() + CLOSE_MAX;
        loop {
            let now = Instant::now();
            self.list.iter_mut().for_each(Export::mark_woken);
            self.list.iter_mut().filter(|export| export.is_due(now)).for_each(|e| e.run(now));
            if self.forget_ended(now) {
                self.log_unopened(now);
                return true;
            }
            if now >= until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Abandons the exports that have not ended, and logs them. Returns false if all have ended.
    pub(super) fn abandon(&mut self) -> bool {
        self.is_left = true;
        if self.have_ended() {
            return false;
        }
        let now = Instant::now();
        let unfinished = self.unfinished(now).map(|(export, left)| (export.to_owned(), left));
        let left = unfinished.chain(self.unopened(now));
        let left: Vec<String> = left.map(|(export, left)| format!("{export}: {left}")).collect();
        let asked = self.stopping.map_or(String::new(), |since| {
            format!(", {} s after the stop began", (now - since).as_secs())
        });
        tracing::error!(
            "ended without waiting for requests{asked}; unfinished: {}",
            left.join(", ")
        );
        self.list.iter_mut().for_each(Export::abandon);
        // The end of the process closes their disks, however long that takes.
        std::mem::forget(std::mem::take(&mut self.list));
        true
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use blockio::DiskOptions;
    use blockio::testing::{Call, RemoteStub};
    use disks::open::CancelToken;

    use super::*;
    use crate::control::export::tests::Scene;
    use crate::control::export_log::ExportLog;
    use crate::control::stages::OpeningExport;
    use crate::control::subscribers::Subscribers;
    use crate::socket::Endpoint;
    use crate::spec::ExportSettings;
    use crate::spec::qos::{QosChange, QosSpec};
    use crate::testing::{LogCapture, wait_until};

    fn exports() -> Exports {
        let (alarm, (_, received)) = (Alarm::new().unwrap(), mpsc::channel());
        Exports::new(Arc::default(), received, Arc::new(alarm), Waker::noop().clone())
    }

    /// Two exports on one file. Each front-end is the far end of its socket.
    fn beside(file: &tempfile::NamedTempFile) -> [(Scene, UnixStream); 2] {
        let disk = || {
            let options = DiskOptions { no_lock: true, late_lock: true, ..DiskOptions::default() };
            DiskSource::file(file.path(), &options).unwrap()
        };
        let [(ours, theirs), (other, far)] = [(); 2].map(|()| UnixStream::pair().unwrap());
        let first = Scene::on(disk(), Endpoint::Connection(ours));
        let second = first.beside(disk(), Endpoint::Connection(other));
        [(first, theirs), (second, far)]
    }

    fn disk() -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        file
    }

    /// The second change would undo the first.
    #[test]
    fn a_disk_is_resized_through_one_export_at_a_time() {
        let file = disk();
        let mut all = exports();
        let mut scenes = beside(&file);
        all.list.extend(scenes.iter_mut().map(|(scene, _)| scene.export()));
        let names = [0, 1].map(|index: usize| all.list[index].spec.name());
        let resize =
            |all: &mut Exports, index: usize| all.begin_resize(&names[index], None).map(drop);
        let is_busy =
            |resized| matches!(resized, Err(CommandError::DiskBusy(name)) if name == names[0]);
        resize(&mut all, 0).unwrap();
        assert!(is_busy(resize(&mut all, 1)));
        // The export ends, and its disk still changes.
        let ended = all.list.remove(0).close(Waker::noop());
        all.closing.push(ended);
        assert!(is_busy(resize(&mut all, 1)));
        all.closing[0].changing.clear();
        resize(&mut all, 1).unwrap();
    }

    /// Each guest sees the size of its own device.
    #[test]
    fn a_new_size_is_reported_through_each_export_of_the_disk() {
        let file = disk();
        let [(mut resized, _one), (mut other, _other)] = beside(&file);
        let mut all = exports();
        all.list.extend([resized.export(), other.export()]);
        let id = all.list[0].id();
        let lock = all.list[1].disks[0].late_lock().unwrap();
        let known = |all: &Exports| all.list[1].disks[0].announced_bytes();
        file.as_file().set_len(1 << 21).unwrap();
        lock.take(1).unwrap();
        all.report_resized(id, None);
        assert_eq!(known(&all), 1 << 20, "the size of that disk has not changed");
        all.list[0].begin_resize(None).map(drop).unwrap();
        all.report_resized(id, None);
        assert_eq!(known(&all), 1 << 21);
    }

    /// The first removal waits, and the second one is by force.
    #[test]
    fn a_removal_by_force_limits_the_wait_of_an_export_that_has_ended() {
        let mut scene = Scene::new(Endpoint::Connection(UnixStream::pair().unwrap().0));
        let (mut all, ended) = (exports(), scene.export());
        let name = ended.spec.name();
        all.closing.push(ended.close(Waker::noop()));
        for force in [false, true] {
            all.remove(&name, force, oneshot::channel().0);
            assert_eq!(all.closing[0].deadline().is_some(), force);
        }
        assert_eq!(all.closing[0].removal_waiters.len(), 2);
    }

    fn socket() -> Endpoint {
        Endpoint::Connection(UnixStream::pair().unwrap().0)
    }

    fn null() -> DiskSource {
        DiskSource::null(512, &DiskOptions::default()).unwrap()
    }

    /// An export that has ended and waits for a change of its disk.
    fn changing(kind: DiskChangeKind) -> Closing {
        let mut closing = Scene::new(socket()).export().close(Waker::noop());
        let place = Some(UnitPlace { target: 0, lun: 0 });
        closing.changing.push(DiskChange { place, kind, blocks_hand_over: false });
        closing
    }

    fn opening(all: &Exports) -> OpeningExport {
        let spec = r#"{"name": "new", "endpoint": {"path": "/new"},
            "device": {"blk": {"null": {"size-bytes": 512}}}}"#;
        all.stages.begin(vec![serde_json::from_str(spec).unwrap()], false).unwrap().remove(0)
    }

    /// Each is a disk of its own.
    #[test]
    fn null_disks_are_resized_side_by_side() {
        let subscribers = Subscribers::default();
        let (_subscription, queue) = subscribers.subscribe();
        let mut all = exports();
        let mut first = Scene::on(null(), socket());
        let mut second = first.beside(null(), socket());
        let log = ExportLog::new("test").with_subscribers(subscribers);
        second.setup.as_mut().unwrap().log = Arc::new(log);
        all.list.extend([first.export(), second.export()]);
        for index in 0..2 {
            let name = all.list[index].spec.name();
            all.begin_resize(&name, None).map(drop).unwrap();
        }
        let id = all.list[0].id();
        all.report_resized(id, None);
        assert!(queue.events.try_recv().is_err(), "the second one has its size");
        all.end_change(id, Some(UnitPlace { target: 0, lun: 7 }));
        assert_eq!(all.list[0].changing.len(), 1, "another change has ended");
        all.end_change(id, None);
        assert!(all.list[0].changing.is_empty());
    }

    #[test]
    fn a_name_is_found_in_each_stage() {
        let mut all = exports();
        let mut served = Scene::new(socket());
        all.list.push(served.export());
        let name = all.list[0].spec.name();
        assert!(all.find(&name).is_ok());
        let opening = opening(&all);
        let state = |all: &mut Exports, name: &str| match all.find(name) {
            Err(CommandError::Busy(_, state)) => Some(state),
            _ => None,
        };
        assert_eq!(state(&mut all, "new"), Some(ExportState::Opening));
        let logs = |all: &mut Exports, force| {
            LogCapture::lines_of(|| all.remove("new", force, oneshot::channel().0)).len()
        };
        assert_eq!((logs(&mut all, false), logs(&mut all, true)), (0, 1));
        assert_eq!(state(&mut all, "new"), Some(ExportState::Stopping));
        drop(opening);
        assert!(matches!(all.find("new"), Err(CommandError::Unknown(_))));
        let ended = all.list.remove(0).close(Waker::noop());
        all.closing.push(ended);
        assert_eq!(state(&mut all, &name), Some(ExportState::Stopping));
    }

    #[test]
    fn a_removal_disconnects_by_force_alone() {
        for force in [false, true] {
            let disk = RemoteStub::new(&[0; 512]);
            let mut all = exports();
            all.list.push(Scene::on(disk.clone().source(), socket()).export());
            let name = all.list[0].spec.name();
            all.remove(&name, force, oneshot::channel().0);
            assert_eq!(disk.take_calls(), [Call::Abandon][..usize::from(force)]);
        }
    }

    /// A command may have changed the limits while the disk was opened.
    #[test]
    fn an_export_brings_the_limits_of_its_group_unless_they_have_changed_since() {
        for is_changed in [false, true] {
            let rules = |iops: u32| -> QosSpec {
                let limits = serde_json::json!({ "group": "a", "iops-total": iops });
                serde_json::from_value(serde_json::json!({ "limits": limits })).unwrap()
            };
            let member = null();
            let settings = ExportSettings { rules: rules(5), ..ExportSettings::default() };
            let mut scene = Scene::with(null(), socket(), settings);
            let setup = scene.setup.take().unwrap();
            let groups = Arc::clone(&setup.groups);
            groups.join(&member, &rules(7)).unwrap();
            if is_changed {
                let change = QosChange { limits: Some(rules(9).limits), ..QosChange::default() };
                groups.apply_change(&member, &rules(9), &change).unwrap();
            }
            exports().serve(vec![setup]).unwrap();
            let now = member.group().unwrap().limits().requests.total.unwrap().per_second;
            assert_eq!(now, if is_changed { 9 } else { 5 });
        }
    }

    /// A daemon whose last export was removed may get a new one.
    #[test]
    fn the_last_export_ends_the_daemon_unless_a_command_has_removed_it() {
        for (is_removed, is_stopping) in [(false, false), (true, false), (true, true)] {
            let mut all = exports();
            let mut ended = Scene::new(socket()).export().close(Waker::noop());
            if is_removed {
                ended.removal_waiters.push(oneshot::channel().0);
            }
            wait_until(|| ended.has_ended(false));
            all.closing.push(ended);
            if is_stopping {
                all.begin_stop();
            }
            assert_eq!(all.forget_ended(Instant::now()), !is_removed || is_stopping);
        }
    }

    #[test]
    fn a_stop_waits_for_no_unit_that_is_being_added_and_takes_no_more_exports() {
        let mut all = exports();
        all.closing.push(changing(DiskChangeKind::Adding(CancelToken::default())));
        let waiting = opening(&all);
        all.begin_stop();
        let since = all.stopping;
        all.begin_stop();
        assert_eq!(all.stopping, since);
        assert!(waiting.claim().is_err(), "it comes too late");
        let mut late = Scene::new(socket());
        let lines = LogCapture::lines_of(|| {
            let refused = all.serve(vec![late.setup.take().unwrap()]);
            assert!(matches!(refused, Err(CommandError::Ending)) && all.list.is_empty());
        });
        assert!(lines.iter().any(|line| line.contains("ended before it was served")), "{lines:?}");
        wait_until(|| all.forget_ended(Instant::now()));
    }

    #[test]
    fn exports_that_were_never_served_are_logged_at_the_end() {
        for end in [Exports::run, |all: &mut Exports| assert!(all.have_ended())] {
            let mut all = exports();
            let _opening = opening(&all);
            all.begin_stop();
            let lines = LogCapture::lines_of(|| end(&mut all));
            let said = "ended before it was served: its disk is not open after 0 s";
            assert!(lines.iter().any(|line| line.contains(said)), "{lines:?}");
        }
    }

    #[test]
    fn the_log_says_every_few_seconds_what_a_stop_waits_for() {
        let mut all = exports();
        all.closing.push(changing(DiskChangeKind::Removing));
        let now = Instant::now();
        let ago = |seconds| now.checked_sub(Duration::from_secs(seconds));
        all.stopping = ago(12);
        let mut logs = |reported| {
            all.reported = reported;
            let lines = LogCapture::lines_of(|| (0..2).for_each(|_| all.report(now)));
            let text = "still stopping after 12 s: unit 0:0 is being removed";
            assert!(lines.iter().all(|line| line.contains(text)), "{lines:?}");
            lines.len()
        };
        assert_eq!((logs(ago(4)), logs(ago(5))), (0, 1));
    }

    #[test]
    fn an_end_without_a_wait_names_what_is_left() {
        let mut all = exports();
        all.closing.push(changing(DiskChangeKind::Removing));
        let _opening = opening(&all);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        all.list.push(Scene::new(Endpoint::bind(&path, "").unwrap()).export());
        all.stopping = Instant::now().checked_sub(Duration::from_secs(12));
        let lines = LogCapture::lines_of(|| assert!(all.abandon()));
        let said = lines.iter().find(|line| line.contains("ERROR")).expect("it is an error");
        for part in ["12 s after the stop", "unit 0:0 is being removed", "new: its disk is not"] {
            assert!(said.contains(part), "{said}");
        }
        assert!(!path.exists());
    }

    /// The thread would sleep too long otherwise, or not at all.
    #[test]
    fn the_thread_wakes_for_the_next_deadline() {
        let mut all = exports();
        let now = Instant::now();
        assert_eq!(all.deadline(now), None);
        all.reported = Some(now);
        assert_eq!(all.deadline(now), Some(now + REPORT_INTERVAL));
        let mut closing = changing(DiskChangeKind::Removing);
        closing.force();
        let due = closing.deadline().unwrap();
        all.closing.push(closing);
        assert_eq!(all.deadline(now), Some(due));
        let mut scene = Scene::new(socket());
        all.list.push(scene.export());
        all.list[0].session_is_ready = true;
        assert_eq!(all.deadline(now), Some(now));
    }

    /// A hand-over of the exports as they were would continue an export that has ended.
    #[test]
    fn the_end_of_an_export_outdates_a_description_and_frees_descriptors() {
        let mut all = exports();
        let mut first = Scene::new(socket());
        let mut second = first.beside(null(), socket());
        let setups = [&mut first, &mut second].map(|scene| scene.setup.take().unwrap());
        all.serve(setups.into()).unwrap();
        let share = |all: &Exports| all.list[0].setup.examiner.open_max();
        assert!(share(&all) < usize::MAX);
        all.list[0].setup.examiner.set_open_max(1);
        all.list[1].begin_stop();
        wait_until(|| {
            all.list.iter_mut().skip(1).for_each(|export| export.run(Instant::now()));
            all.list.iter().any(Export::has_ended)
        });
        let generation = all.generation;
        all.forget_ended(Instant::now());
        assert!(all.generation > generation && all.list.len() == 1);
        assert!(share(&all) > 1);
    }
}
