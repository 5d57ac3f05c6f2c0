//! Watches disks for changes without a command: a new size of the file or device, no answers, lost
//! data.
//!
//! Growth is passed on to the guest. Shrinking is not: it may be a mistake, and the guest would
//! discard its data beyond the new size.
//!
//! While the daemon works, sizes are checked each second. Otherwise the thread sleeps until an
//! IoThread or the control thread wakes, or the kernel announces a change of a file. The kernel
//! announces no change of a device, nor of a file that a server has: they are checked now and then.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockio::disk;
use blockio::executor::start_thread;

use crate::control::subscribers::{EventDetails, ExportEvent};
use crate::control::{WatchedDisk, WatchedDisks};
use crate::daemon::Daemon;
use crate::daemon::size_check::{Announced, Check, Finding, Job, start_checker};
use crate::log::rate_limit::RateLimit;
use crate::process::thread_guard::ThreadGuard;
use crate::process::wake_fd::WakeFd;
use crate::spec::UnitPlace;
use crate::spec::status::DiskState;
use crate::threads::thread_watch::Watcher;

/// The interval between checks of each disk.
const INTERVAL: Duration = Duration::from_secs(1);

/// The interval while the daemon has no work, if the kernel does not announce all changes.
const IDLE_INTERVAL: Duration = Duration::from_secs(5);

/// The interval while the daemon has no work and the kernel announces changes. It may not announce
/// those of loop devices and of Linux AIO in other processes.
const ANNOUNCED_INTERVAL: Duration = Duration::from_secs(60);

/// The interval between checks of the states of such disks while the daemon has no work.
const IDLE_LOOK: Duration = Duration::from_secs(15);

/// The time that one slow check may delay checks of more disks. After it, the check continues on
/// its own.
const PATIENCE: Duration = Duration::from_millis(100);

/// Starts the thread that checks all disks in turn.
///
/// # Errors
///
/// When the kernel has no thread left.
pub(crate) fn start(daemon: &Arc<Daemon>) -> Result<ThreadGuard> {
    let wake = Arc::clone(daemon.control.monitor());
    let has_ended = Arc::<AtomicBool>::default();
    let daemon = Arc::downgrade(daemon);
    let mut checks = Checks {
        daemon,
        wake: Arc::clone(&wake),
        checker: None,
        disks: BTreeMap::new(),
        survey: None,
        was_announced: false,
    };
    let ended = Arc::clone(&has_ended);
    let watch = move || {
        while !ended.load(Ordering::Relaxed) {
            let is_idle = checks.check_all();
            checks.wait(is_idle);
        }
    };
    let thread = start_thread("ringhaul-sizes", watch);
    let thread = thread.context("cannot start the thread that watches the sizes of disks")?;
    Ok(ThreadGuard::new(thread, move || {
        has_ended.store(true, Ordering::Relaxed);
        wake.wake();
    }))
}

/// The known state of a disk.
#[derive(Default)]
struct Known {
    /// A check that has not ended.
    checking: Option<mpsc::Receiver<Option<Finding>>>,
    /// The finding of the last check, and true if it was logged.
    finding: Option<(Finding, bool)>,
    state: DiskState,
    /// The reason that failed requests wait.
    waiting: Option<DiskState>,
    /// The number of requests that have waited so far.
    waited: u64,
    /// Limits on lines about writes without space, and about other waiting requests.
    limits: [RateLimit; 2],
    /// True if requests wait and the reason was not reported.
    is_unreported: bool,
}

/// The name of an export, and the place of a disk in it.
type Key = (String, Option<UnitPlace>);

struct Checks {
    daemon: Weak<Daemon>,
    /// Ends a wait.
    wake: Arc<WakeFd>,
    /// The thread that checks sizes, which may be waiting for a file system.
    checker: Option<mpsc::Sender<Job>>,
    disks: BTreeMap<Key, Known>,
    /// The last survey of the exports.
    survey: Option<Survey>,
    /// True if the kernel has announced a change, perhaps of content alone.
    was_announced: bool,
}

/// The exports as the control thread has described them.
struct Survey {
    /// The disks whose sizes can change from outside.
    sized: Arc<Vec<WatchedDisk>>,
    /// True if the state of a disk can change while no thread of the daemon works.
    has_remote: bool,
    time: Instant,
    /// The wakes of the control thread, and the turns of IoThreads.
    activity: Option<(u64, u64)>,
}

impl Survey {
    /// Returns true if nothing has happened in the daemon since the survey. The control thread then
    /// sleeps on, whatever the number of exports is.
    fn is_current(&self, daemon: &Daemon) -> bool {
        let turns = daemon.thread_watch.lock().turns_if_idle();
        let now = turns.map(|turns| (daemon.control.wakes(), turns));
        self.activity.is_some() && self.activity == now && self.time.elapsed() < IDLE_LOOK
    }
}

impl Checks {
    /// Checks all disks. Returns true if nothing has happened since the last check.
    fn check_all(&mut self) -> bool {
        let Some(daemon) = self.daemon.upgrade() else { return false };
        let is_idle = self.survey.as_ref().is_some_and(|survey| survey.is_current(&daemon));
        if !is_idle {
            self.survey = self.survey(&daemon);
        }
        drop(daemon);
        let Some(survey) = &self.survey else { return false };
        let sized = Arc::clone(&survey.sized);
        let has_news = self.disks.values().any(Known::has_news);
        if sized.is_empty() || (!has_news && self.are_unchanged(&sized)) {
            return is_idle;
        }
        self.check_sizes(&sized);
        false
    }

    /// Returns true if all disks have the sizes that their drivers know. One answer for all costs
    /// far less than one for each.
    fn are_unchanged(&mut self, disks: &Arc<Vec<WatchedDisk>>) -> bool {
        let (found, finding) = mpsc::channel();
        let is_sent = self.send(Job::All(Arc::clone(disks), found)).is_ok();
        let answer = is_sent.then(|| finding.recv_timeout(PATIENCE).ok()).flatten();
        if answer.is_none() {
            // Checks of single disks find the one that does not answer.
            self.checker = None;
        }
        answer == Some(true)
    }

    /// Waits until the next check of all disks.
    fn wait(&mut self, is_idle: bool) {
        // Announcements may come with each write of another process, so a pause follows each.
        let may_rest = is_idle && !std::mem::take(&mut self.was_announced);
        let Some(announced) = may_rest.then(|| self.begin_rest()).flatten() else {
            self.wake.wait(None, Some(INTERVAL));
            return;
        };
        self.wake.await_work();
        let is_current =
            |survey: &Survey| self.daemon.upgrade().is_some_and(|it| survey.is_current(&it));
        let limit = match &self.survey {
            Some(survey) if !is_current(survey) => Some(Duration::ZERO),
            Some(survey) if announced.is_complete && !survey.has_remote => Some(ANNOUNCED_INTERVAL),
            _ => Some(IDLE_INTERVAL),
        };
        let changes = announced.changes.as_ref().map(AsFd::as_fd);
        self.was_announced = self.wake.wait(changes, limit);
    }

    /// Returns the means to wait for a change if there is no reason to check again in a second.
    fn begin_rest(&mut self) -> Option<Announced> {
        let survey = self.survey.as_ref()?;
        let daemon = self.daemon.upgrade()?;
        let wake = Arc::clone(&self.wake);
        let mut threads = daemon.thread_watch.lock();
        let may_rest = threads.may_rest(Watcher::Disks, move || wake.wake());
        drop(threads);
        drop(daemon);
        if !may_rest {
            return None;
        }
        let (announce, announced) = mpsc::channel();
        let sized = Arc::clone(&survey.sized);
        self.send(Job::Watch(sized, announce)).ok()?;
        let answer = announced.recv_timeout(PATIENCE).ok();
        if answer.is_none() {
            self.checker = None;
        }
        answer.flatten()
    }

    /// Reports states that are worse than before. `None`: all exports have ended.
    fn survey(&mut self, daemon: &Daemon) -> Option<Survey> {
        // Before the survey: a later turn may have changed a state that it has not seen.
        let turns = daemon.thread_watch.lock().turns_if_idle();
        let WatchedDisks { disks: mut watched, wakes } = daemon.control.watched_disks().ok()?;
        let keys: BTreeSet<Key> = watched.iter().map(key_of).collect();
        self.disks.retain(|key, _| keys.contains(key));
        for disk in &watched {
            let known = self.disks.entry(key_of(disk)).or_default();
            let worse = known.record_state(disk).map(|message| (message, 0));
            for (message, left_out) in worse.into_iter().chain(known.record_waiting(disk)) {
                let details = EventDetails::Error { message, left_out };
                let event = ExportEvent { export: disk.export.clone(), details };
                daemon.subscribers().report(event);
            }
        }
        let has_remote = watched.iter().any(|disk| disk.is_remote);
        watched.retain(|disk| disk.size_probe.is_some());
        let activity = turns.map(|turns| (wakes, turns));
        Some(Survey { sized: Arc::new(watched), has_remote, time: Instant::now(), activity })
    }

    /// Checks sizes. All checks wait in one queue, so that the thread that carries them out wakes
    /// once.
    fn check_sizes(&mut self, disks: &[WatchedDisk]) {
        let mut from = 0;
        while from < disks.len() {
            match self.check_until_late(&disks[from..]) {
                Ok(answered) => from += answered,
                Err(error) => {
                    tracing::warn!("cannot watch the sizes of disks now: {error}");
                    return;
                }
            }
        }
    }

    /// Checks the sizes of the first of these disks, up to one that takes too long. Returns their
    /// number.
    fn check_until_late(&mut self, disks: &[WatchedDisk]) -> io::Result<usize> {
        let mut begun = Vec::new();
        for disk in disks {
            let earlier = self.disks.entry(key_of(disk)).or_default().checking.take();
            begun.push(match earlier {
                Some(found) => (found, Duration::ZERO),
                None => (self.begin(disk.clone())?, PATIENCE),
            });
        }
        let mut begun = disks.iter().zip(begun).enumerate();
        while let Some((number, (disk, (found, patience)))) = begun.next() {
            let key = key_of(disk);
            let state = self.disks.entry(key.clone()).or_default();
            match found.recv_timeout(patience) {
                Ok(finding) => state.record(&key, disk.size_bytes, finding),
                Err(RecvTimeoutError::Timeout) => {
                    state.checking = Some(found);
                    if !patience.is_zero() {
                        // The thread ends when the file system has answered. The rest gets a new
                        // one.
                        self.checker = None;
                        let earlier = begun.filter(|(_, (_, (_, patience)))| patience.is_zero());
                        for (_, (disk, (found, _))) in earlier {
                            self.disks.entry(key_of(disk)).or_default().checking = Some(found);
                        }
                        return Ok(number + 1);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => self.checker = None,
            }
        }
        Ok(disks.len())
    }

    fn begin(&mut self, disk: WatchedDisk) -> io::Result<mpsc::Receiver<Option<Finding>>> {
        let (found, finding) = mpsc::channel();
        self.send(Job::One(Check { disk, daemon: Weak::clone(&self.daemon), found }))?;
        Ok(finding)
    }

    fn send(&mut self, job: Job) -> io::Result<()> {
        let checker = match &self.checker {
            Some(checker) => checker,
            None => self.checker.insert(start_checker()?),
        };
        // If the thread has ended, receiving the result fails.
        let _ = checker.send(job);
        Ok(())
    }
}

fn key_of(disk: &WatchedDisk) -> Key {
    (disk.export.clone(), disk.place)
}

/// The name of a disk in messages about its export.
fn name_of(place: Option<UnitPlace>) -> String {
    place.map_or("its disk".to_owned(), |place| format!("logical unit {place}"))
}

impl Known {
    /// Returns true if the disk is to be checked by itself.
    fn has_news(&self) -> bool {
        self.checking.is_some() || self.finding.is_some()
    }

    /// Returns the message and the number of suppressed ones, if failed requests of the disk wait
    /// or have waited since the last check. Logs the message. A disk that fails repeatedly is
    /// reported a few times a minute.
    fn record_waiting(&mut self, disk: &WatchedDisk) -> Option<(String, u64)> {
        let waiting = disk.waiting.map(DiskState::from);
        let has_waited = std::mem::replace(&mut self.waited, disk.waited) < disk.waited;
        let is_worse = std::mem::replace(&mut self.waiting, waiting) < waiting;
        let limit = &self.limits[usize::from(waiting != Some(DiskState::Held))];
        let is_news = match waiting {
            Some(_) => is_worse || (self.is_unreported && limit.has_room()),
            None => has_waited,
        };
        if !is_news {
            return None;
        }
        let left_out = limit.permit();
        self.is_unreported = left_out.is_none();
        Some((report_waiting(disk, left_out?), left_out?))
    }

    /// Returns the message for subscribers if the state of the disk is worse than before. The log
    /// has a line from the code that detected it.
    fn record_state(&mut self, disk: &WatchedDisk) -> Option<String> {
        let state = DiskState::from(disk.state);
        if std::mem::replace(&mut self.state, state) >= state {
            return None;
        }
        let what = name_of(disk.place);
        match disk.state {
            disk::DiskState::Ready | disk::DiskState::Retried(_) | disk::DiskState::Held(_) => None,
            disk::DiskState::Away(since) => Some(format!(
                "the server of {what} has been unreachable for {} s; requests wait for it",
                since.elapsed().as_secs()
            )),
            disk::DiskState::Late(since) => {
                Some(format!("{what} has not answered for {} s", since.elapsed().as_secs()))
            }
            disk::DiskState::Lost => {
                let why = disk.loss.map(|errno| io::Error::from_raw_os_error(errno).to_string());
                let why = why.unwrap_or_default();
                Some(format!(
                    "{what} may have lost written data, and all further flushes fail; check it, \
                     then restart the export ({why})"
                ))
            }
        }
    }

    /// Records the result of a check, and logs once that the disk has shrunk or cannot be checked.
    /// A file that other programs write passes through many sizes: a further size, or a failure,
    /// counts when two checks in a row have found it.
    fn record(&mut self, (export, place): &Key, known: u64, finding: Option<Finding>) {
        let Some(finding) = finding else {
            self.finding = None;
            return;
        };
        let is_first = !matches!(self.finding, Some((Finding::Shrunk(_), _)))
            && matches!(finding, Finding::Shrunk(_));
        let before = match &self.finding {
            Some((last, is_logged)) if *last == finding => Some(*is_logged),
            _ => None,
        };
        let is_due = is_first || before == Some(false);
        self.finding = Some((finding.clone(), is_due || before == Some(true)));
        if !is_due {
            return;
        }
        let what = name_of(*place);
        match finding {
            Finding::Shrunk(size) => tracing::warn!(
                export,
                "{what} has shrunk to {size} bytes, and the guest sees {known}; requests beyond \
                 its end fail; restore its size, or report the new size to the guest with \
                 `ringhaul ctl resize`"
            ),
            Finding::Failed(error) => {
                tracing::warn!(export, "cannot check the size of {what}: {error}");
            }
        }
    }
}

/// Logs and returns the message about a disk whose failed requests wait.
fn report_waiting(disk: &WatchedDisk, left_out: u64) -> String {
    let (what, export) = (name_of(disk.place), &disk.export);
    let why = disk.trouble.map(|errno| io::Error::from_raw_os_error(errno).to_string());
    let why = why.unwrap_or_default();
    let message = match disk.waiting {
        None => format!("{what} failed requests, and their retries succeeded ({why})"),
        Some(disk::DiskState::Held(_)) => format!(
            "{what} has no space left, and writes wait for space; free space, or extend the \
             storage under it ({why})"
        ),
        _ => format!("{what} fails requests; they are retried while the guest waits ({why})"),
    };
    tracing::warn!(export, left_out, "{message}");
    message
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use clap::{Args, FromArgMatches};

    use super::*;
    use crate::options::ServeArgs;
    use crate::socket::inherited::InheritedSockets;
    use crate::testing::LogCapture;

    /// A disk may change while no thread of the daemon works, and another disk may get its name.
    #[test]
    fn exports_are_looked_at_now_and_then_and_forgotten_when_they_have_gone() {
        let serve = ServeArgs::augment_args(clap::Command::new("serve"));
        let args = ServeArgs::from_arg_matches(&serve.get_matches_from(["serve"])).unwrap();
        let (daemon, _ending) = Daemon::start(args, InheritedSockets::default()).unwrap();
        let known = Known { state: DiskState::Lost, ..Known::default() };
        let disks = BTreeMap::from([(("gone".to_owned(), None), known)]);
        let (wake, known) = (Arc::clone(daemon.control.monitor()), Weak::new());
        let mut checks = Checks {
            daemon: known,
            wake,
            checker: None,
            disks,
            survey: None,
            was_announced: false,
        };
        let mut survey = checks.survey(&daemon).unwrap();
        assert!(checks.disks.is_empty());
        // The thread of exports may have woken for the look itself.
        let activity = |daemon: &Daemon| Some((daemon.control.wakes(), 0));
        while !survey.is_current(&daemon) {
            survey.activity = activity(&daemon);
        }
        survey.time = Instant::now().checked_sub(IDLE_LOOK).unwrap();
        assert!(!survey.is_current(&daemon));
        (survey.time, survey.activity) = (Instant::now(), None);
        assert!(!survey.is_current(&daemon), "a thread works");
    }

    #[test]
    fn subscribers_are_told_when_a_disk_does_worse() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(512).unwrap();
        let mut watched = WatchedDisk::for_file(file.path(), 512);
        let (late, held) = (disk::DiskState::Late, disk::DiskState::Held);
        let (now, ready) = (Instant::now(), disk::DiskState::Ready);
        let mut known = Known::default();
        let mut told = |state, waiting, loss| {
            (watched.state, watched.waiting, watched.loss) = (state, waiting, loss);
            watched.trouble = loss;
            watched.waited += u64::from(loss == Some(libc::ENOSPC));
            let waits = known.record_waiting(&watched).map(|(message, _)| message);
            (known.record_state(&watched), waits)
        };
        let nothing = (None, None);
        assert_eq!(told(ready, None, None), nothing);
        let (is_late, waits) = told(late(now), None, None);
        assert!(is_late.unwrap().starts_with("its disk has not answered for") && waits.is_none());
        assert_eq!(told(late(now), None, None), nothing);
        assert_eq!(told(ready, None, None), nothing);
        // The requests waited between two checks, or wait at one.
        for waiting in [None, Some(held(now))] {
            let (state, waits) = told(waiting.unwrap_or(ready), waiting, Some(libc::ENOSPC));
            assert!(state.is_none() && waits.unwrap().contains("os error 28"));
        }
        assert_eq!(told(held(now), Some(held(now)), None), nothing);
        assert!(told(late(now), Some(held(now)), None).0.is_some());
        assert_eq!(told(held(now), Some(held(now)), None), nothing);
        assert_eq!(told(late(now), None, None).1, None);
        // A disk that is late, or has lost data, can lack space besides.
        let (state, waits) = told(late(now), Some(held(now)), None);
        assert!(state.is_none() && waits.unwrap().contains("has no space left"));
        let (lost, _) = told(disk::DiskState::Lost, None, Some(libc::EIO));
        let lost = lost.unwrap();
        assert!(lost.contains("lost") && lost.contains("os error 5"), "{lost}");
        let (state, waits) = told(disk::DiskState::Lost, Some(held(now)), Some(libc::EIO));
        assert!(state.is_none() && waits.unwrap().contains("has no space left"));
        assert_eq!(told(late(now), None, None), nothing);
    }

    #[test]
    fn the_log_says_at_once_that_a_disk_has_shrunk() {
        let key: Key = ("vm".into(), None);
        let mut known = Known::default();
        let mut is_logged = |finding| {
            known.record(&key, 1024, finding);
            known.finding.as_ref().is_some_and(|(_, is_logged)| *is_logged)
        };
        let shrunk = |size| Some(Finding::Shrunk(size));
        assert!(is_logged(shrunk(512)));
        // Another program writes the file: intermediate sizes are not logged.
        assert!(!is_logged(shrunk(600)) && !is_logged(shrunk(700)) && is_logged(shrunk(700)));
        assert!(!is_logged(None) && is_logged(shrunk(512)));
        let failed = || Some(Finding::Failed("no".into()));
        assert!(!is_logged(failed()) && is_logged(failed()));
    }

    #[test]
    fn a_disk_that_fails_again_and_again_is_reported_a_few_times() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(512).unwrap();
        let watched = WatchedDisk::for_file(file.path(), 512);
        let mut watched = WatchedDisk { trouble: Some(libc::EIO), ..watched };
        let mut known = Known::default();
        let mut told = |waiting| {
            watched.waited += 1;
            watched.waiting = waiting;
            known.record_waiting(&watched)
        };
        let retried = disk::DiskState::Retried(Instant::now());
        let mut times = 0;
        let lines = LogCapture::lines_of(|| {
            let check = |check| told((check % 2 == 0).then_some(retried));
            times = (0..1000).filter_map(check).count();
        });
        assert_eq!((times, lines.len()), (5, 5));
        // The lack of space is still reported, since it has its own limit.
        let held = disk::DiskState::Held(Instant::now());
        assert!(told(Some(held)).unwrap().0.contains("has no space left"));
        assert_eq!(told(Some(held)), None);
    }

    /// Such a disk is checked by itself until it has its size.
    #[test]
    fn a_disk_is_looked_at_while_it_has_news_and_logged_once() {
        assert!(!Known::default().has_news());
        let (_sender, receiver) = mpsc::channel();
        assert!(Known { checking: Some(receiver), ..Known::default() }.has_news());
        let failed = || Finding::Failed("a reason".to_owned());
        for (finding, text) in
            [(Finding::Shrunk(512), "has shrunk to 512"), (failed(), "its disk: a reason")]
        {
            let (mut known, key) = (Known::default(), ("vm".to_owned(), None));
            let lines = LogCapture::lines_of(|| {
                (0..6).for_each(|_| known.record(&key, 1024, Some(finding.clone())));
            });
            assert!(known.has_news());
            assert!(lines.len() == 1 && lines[0].contains(text), "{lines:?}");
            known.record(&key, 1024, None);
            assert!(!known.has_news());
        }
    }
}
