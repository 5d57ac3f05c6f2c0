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
    /// Rings the alarm.
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
            self.alarm.monitor.note_work();
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

    /// Sleeps until an event or a deadline, and marks the exports with events.
    fn wait(&mut self, now: Instant) {
        let closing = self.closing.iter().filter_map(Closing::deadline);
        let deadlines = self.list.iter().filter_map(Export::deadline).chain(closing);
        let report = self.reported.map(|reported| reported + REPORT_INTERVAL);
        let at_once = self.list.iter().any(|export| export.session_is_ready).then_some(now);
        let hand_over = self.hand_over.as_ref().and_then(HandOver::deadline);
        let next = deadlines.chain(report).chain(hand_over).chain(at_once).min();
        let left = next.map(|deadline| deadline.saturating_duration_since(now));
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
                    let _ = rustix::io::read(&self.alarm.wake, &mut [0; 8]);
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

    use super::*;
    use crate::control::export::tests::Scene;
    use crate::socket::Endpoint;

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
}
