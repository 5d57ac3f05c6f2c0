//! Exports that have ended, until their disks are closed.

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use blockio::DiskSource;
use blockio::executor::start_thread;
use device::{Device, oneshot};

use super::disk_change::DiskChange;
use super::order::ExportSetup;
use super::stages::{Registration, RemovalWaiter};
use crate::control::export_log::ExportLog;
use crate::control::subscribers::EventDetails;
use crate::spec::command::ExportStatus;

/// The wait of an export that has ended.
pub(super) const NOT_CLOSED: &str = "its disk is not closed";

/// The time that a forced removal waits for a disk to close. A local disk, or one with a responsive
/// server, takes less.
const FORCED_CLOSE_MAX: Duration = Duration::from_secs(1);

/// An export that has ended. Its disks are closed on a thread, because `close` may wait for a file
/// system (FUSE, NFS) or a block device.
pub(super) struct Closing {
    registration: Registration,
    /// The export's last status.
    status: ExportStatus,
    pub(super) log: Arc<ExportLog>,
    /// Changes that have a disk of the export open.
    pub(super) changing: Vec<DiskChange>,
    /// Requests that wait for its end.
    pub(super) removal_waiters: Vec<RemovalWaiter>,
    /// The time at which closing began.
    pub(super) since: Instant,
    closed: oneshot::Receiver<()>,
    /// The end of the wait in a forced removal.
    force_deadline: Option<Instant>,
    was_forced: bool,
}

impl Closing {
    pub(super) fn new(
        registration: Registration,
        status: ExportStatus,
        log: Arc<ExportLog>,
        disks: (Vec<DiskSource>, Device),
        waker: &Waker,
    ) -> Self {
        let (answer, closed) = oneshot::channel();
        closed.wake(waker);
        close(disks, answer);
        let since = Instant::now();
        let (changing, removal_waiters) = (Vec::new(), Vec::new());
        let (force_deadline, was_forced) = (None, false);
        Self {
            registration,
            status,
            log,
            changing,
            removal_waiters,
            since,
            closed,
            force_deadline,
            was_forced,
        }
    }

    /// The number of the export.
    pub(super) fn id(&self) -> u64 {
        self.registration.id()
    }

    pub(super) fn name(&self) -> String {
        self.status.name()
    }

    pub(super) fn is_called(&self, name: &str) -> bool {
        self.status.spec.is_called(name)
    }

    /// The export's last status, with the present reason of the wait.
    pub(super) fn status(&self) -> ExportStatus {
        ExportStatus { waits_for: Some(self.unfinished_work()), ..self.status.clone() }
    }

    /// Returns true if a disk of this identity changes its size.
    pub(super) fn resizes(&self, identity: &str) -> bool {
        self.changing.iter().any(|changing| changing.resizes(identity))
    }

    /// Returns true if the disks are closed and no change is in progress, or the wait has ended.
    /// The addition of a unit does not keep a daemon from ending.
    pub(super) fn has_ended(&self, daemon_ends: bool) -> bool {
        let is_over = |changing: &DiskChange| daemon_ends && changing.adds();
        let is_closed = self.closed.check().is_ready() && self.changing.iter().all(is_over);
        self.was_forced || is_closed
    }

    /// The reason of the wait.
    pub(super) fn unfinished_work(&self) -> String {
        self.changing.first().map_or(NOT_CLOSED.to_owned(), DiskChange::to_string)
    }

    /// Limits the wait for a close that hangs. All requests are answered, and the disk is closed
    /// when that is possible. A change of a local file is still waited for.
    pub(super) fn force(&mut self) {
        self.force_deadline = Some(self.since + FORCED_CLOSE_MAX);
    }

    /// The time at which the wait ends.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.force_deadline.filter(|_| !self.changing.iter().any(DiskChange::changes_file))
    }

    /// Ends the wait if that is due.
    pub(super) fn expire(&mut self, now: Instant) {
        let is_due = self.deadline().is_some_and(|when| now >= when);
        if is_due && !self.has_ended(false) {
            self.was_forced = true;
            let (left, seconds) = (self.unfinished_work(), self.since.elapsed().as_secs());
            let export = self.log.name();
            tracing::warn!(
                export,
                "removed by force, although {left} after {seconds} s; the disk may stay locked \
                 until it can be closed"
            );
        }
    }

    /// Frees the name, then reports the end and answers the requests that wait for it. Returns
    /// their number.
    pub(super) fn finish(self) -> usize {
        let waits_for = self.was_forced.then(|| self.unfinished_work());
        let Self { registration, status, log, removal_waiters, .. } = self;
        drop(registration);
        log.report(|| EventDetails::Removed);
        let (status, count) = (ExportStatus { waits_for, ..status }, removal_waiters.len());
        removal_waiters.into_iter().for_each(|answer| answer.send(Ok(status.clone())));
        count
    }
}

/// Removes the socket of an export that is not served, and closes its disk eventually.
pub(super) fn refuse(setup: ExportSetup) {
    let ExportSetup { disks, device, endpoint, .. } = setup;
    drop(endpoint);
    let (answer, _) = oneshot::channel();
    close((disks, device), answer);
}

/// Closes the disks of an export on a thread, so that a hang delays no other export.
fn close(disks: (Vec<DiskSource>, Device), closed: oneshot::Sender<()>) {
    let close = move || {
        drop(disks);
        closed.send(());
    };
    // If no thread can be started, dropping the closure closes the disks here.
    let _ = start_thread("ringhaul-close", close);
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Poll, Wake};

    use blockio::DiskOptions;
    use disks::open::CancelToken;

    use super::super::disk_change::DiskChangeKind;
    use super::*;
    use crate::control::export::tests::Scene;
    use crate::control::subscribers::Subscribers;
    use crate::socket::Endpoint;
    use crate::spec::UnitPlace;
    use crate::testing::{LogCapture, wait_until};

    fn scene(disk: DiskSource) -> Scene {
        Scene::on(disk, Endpoint::Connection(UnixStream::pair().unwrap().0))
    }

    /// A file that is cut while its export ends would be cut under its next user.
    #[test]
    fn force_ends_the_wait_for_all_but_a_change_of_a_local_file() {
        let place = Some(UnitPlace { target: 0, lun: 7 });
        let resizing =
            |is_local| DiskChangeKind::Resizing { identity: "disk".to_owned(), is_local };
        let adding = DiskChangeKind::Adding(CancelToken::default());
        for (place, kind, text) in [
            (place, adding, "unit 0:7 is being added"),
            (place, DiskChangeKind::Removing, "unit 0:7 is being removed"),
            (place, resizing(false), "unit 0:7 is being resized"),
            (None, resizing(true), "its disk is being resized"),
        ] {
            let disk = DiskSource::null(512, &DiskOptions::default()).unwrap();
            let mut scene = scene(disk);
            let subscribers = Subscribers::default();
            let (_subscription, queue) = subscribers.subscribe();
            let log = ExportLog::new("test").with_subscribers(subscribers);
            scene.setup.as_mut().unwrap().log = Arc::new(log);
            let mut closing = scene.export().close(Waker::noop());
            assert_eq!(closing.status().waits_for.as_deref(), Some(NOT_CLOSED));
            wait_until(|| closing.has_ended(false));
            let adds = matches!(kind, DiskChangeKind::Adding(_));
            closing.changing.push(DiskChange { place, kind, blocks_hand_over: false });
            assert_eq!(closing.status().waits_for.as_deref(), Some(text));
            assert_eq!(
                (closing.has_ended(false), closing.has_ended(true)),
                (false, adds),
                "{text}"
            );
            let earlier = Instant::now().checked_sub(Duration::from_secs(1000)).unwrap();
            closing.since = earlier;
            assert_eq!(closing.deadline(), None);
            closing.force();
            let due = earlier + FORCED_CLOSE_MAX;
            let is_forced = text != "its disk is being resized";
            assert_eq!(closing.deadline(), is_forced.then_some(due), "{text}");
            let lines = LogCapture::lines_of(|| closing.expire(due));
            let is_said = |line: &String| line.contains("WARN") && line.contains(text);
            assert_eq!(lines.iter().filter(|line| is_said(line)).count(), usize::from(is_forced));
            assert_eq!(closing.has_ended(false), is_forced, "{text}");
            let (waiter, answer) = oneshot::channel();
            closing.removal_waiters.push(waiter);
            assert_eq!(closing.finish(), 1);
            let Poll::Ready(Some(Ok(ended))) = answer.check() else { panic!("no answer") };
            assert_eq!(ended.waits_for.as_deref(), is_forced.then_some(text));
            assert_eq!(queue.events.try_recv().unwrap().details, EventDetails::Removed);
        }
        let disk = DiskSource::null(512, &DiskOptions::default()).unwrap();
        let mut closed = scene(disk).export().close(Waker::noop());
        wait_until(|| closed.has_ended(false));
        closed.force();
        let late = closed.deadline().unwrap();
        assert!(LogCapture::lines_of(|| closed.expire(late)).is_empty(), "the close is over");
    }

    /// Checks a disk when its export has ended.
    struct Look {
        disk: PathBuf,
        has_come: AtomicBool,
        is_free: AtomicBool,
    }

    impl Wake for Look {
        fn wake(self: Arc<Self>) {
            let options = DiskOptions { at_once: true, ..DiskOptions::default() };
            let is_free = DiskSource::file(&self.disk, &options).is_ok();
            self.is_free.store(is_free, Ordering::Relaxed);
            self.has_come.store(true, Ordering::Release);
        }
    }

    /// The caller of a removal uses the disk as soon as it has the answer.
    #[test]
    fn the_disk_is_free_when_its_export_has_ended() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let disk = DiskSource::file(file.path(), &DiskOptions::default()).unwrap();
        let mut scene = scene(disk);
        let export = scene.export();
        drop(scene);
        let (has_come, is_free) = (AtomicBool::new(false), AtomicBool::new(false));
        let look = Arc::new(Look { disk: file.path().to_owned(), has_come, is_free });
        let closing = export.close(&Waker::from(Arc::clone(&look)));
        wait_until(|| look.has_come.load(Ordering::Acquire));
        assert!(look.is_free.load(Ordering::Relaxed) && closing.has_ended(false));
    }
}
