//! Exports that have ended, until their disks are closed.

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use blockio::DiskSource;
use device::{Answer, Device, Pending};

use super::changing::Changing;
use super::order::{Answered, ExportSetup};
use crate::command::ExportStatus;
use crate::export_log::ExportLog;
use crate::spec::ExportSpec;

/// What an export waits for that has ended.
pub(super) const NOT_CLOSED: &str = "its disk is not closed";

/// How long a disk takes to close before it is given up by force: one that is local, or whose other
/// end answers, takes less.
const FORCED_CLOSE_MAX: Duration = Duration::from_secs(1);

/// An export that has ended. `close` waits for as long as a file system does (FUSE, NFS) or a
/// block device, so it has a thread.
pub(super) struct Closing {
    /// That of the export.
    pub(super) id: u64,
    /// As the export was at its end.
    status: ExportStatus,
    pub(super) log: Arc<ExportLog>,
    /// Who has a disk of it open, and is not done.
    pub(super) changing: Vec<Changing>,
    /// Who waits for its end.
    pub(super) removed: Vec<Answer<Answered<ExportStatus>>>,
    /// Since when its disk is being closed.
    pub(super) since: Instant,
    closed: Pending<()>,
    /// By force: when nobody is to wait any longer.
    give_up_at: Option<Instant>,
    was_given_up: bool,
}

impl Closing {
    pub(super) fn new(
        id: u64,
        status: ExportStatus,
        log: Arc<ExportLog>,
        disks: (Vec<DiskSource>, Device),
        waker: &Waker,
    ) -> Self {
        let (answer, closed) = Pending::new();
        closed.wake(waker);
        close(disks, answer);
        let since = Instant::now();
        let (changing, removed) = (Vec::new(), Vec::new());
        let (give_up_at, was_given_up) = (None, false);
        Self { id, status, log, changing, removed, since, closed, give_up_at, was_given_up }
    }

    /// What it was asked to be.
    pub(super) fn spec(&self) -> &ExportSpec {
        &self.status.spec
    }

    pub(super) fn name(&self) -> String {
        self.status.name()
    }

    pub(super) fn is_called(&self, name: &str) -> bool {
        self.spec().is_called(name)
    }

    /// As the export was at its end, and what it waits for.
    pub(super) fn status(&self) -> ExportStatus {
        ExportStatus { waits_for: Some(self.what_is_left()), ..self.status.clone() }
    }

    /// Whether somebody is giving a disk of this identity another size.
    pub(super) fn resizes(&self, identity: &str) -> bool {
        self.changing.iter().any(|changing| changing.resizes(identity))
    }

    /// Whether nobody waits any more. A disk that is being opened keeps no daemon from ending.
    pub(super) fn has_ended(&self, daemon_ends: bool) -> bool {
        let is_over = |changing: &Changing| daemon_ends && changing.adds();
        let is_closed = self.closed.check().is_ready() && self.changing.iter().all(is_over);
        self.was_given_up || is_closed
    }

    /// What is waited for.
    pub(super) fn what_is_left(&self) -> String {
        self.changing.first().map_or(NOT_CLOSED.to_owned(), Changing::to_string)
    }

    /// Nobody is to wait for a close that hangs. All requests are answered, and the disk is closed
    /// when it can be. A change of its file is waited for even so.
    pub(super) fn force(&mut self) {
        self.give_up_at = Some(self.since + FORCED_CLOSE_MAX);
    }

    /// When it is given up, unless it is closed by then.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.give_up_at.filter(|_| !self.changing.iter().any(Changing::changes_file))
    }

    /// Gives it up if that is due.
    pub(super) fn look(&mut self, now: Instant) {
        let is_due = self.deadline().is_some_and(|when| now >= when);
        if is_due && !self.has_ended(false) {
            self.was_given_up = true;
            let (left, seconds) = (self.what_is_left(), self.since.elapsed().as_secs());
            let export = self.log.name();
            tracing::warn!(
                export,
                "removed by force, although {left} after {seconds} s; the disk is closed when that \
                 is possible, and may be locked until then"
            );
        }
    }

    /// Answers all who wait for the end. False when nobody does.
    pub(super) fn answer(&mut self) -> bool {
        let waits_for = self.was_given_up.then(|| self.what_is_left());
        let status = ExportStatus { waits_for, ..self.status.clone() };
        let removed = std::mem::take(&mut self.removed);
        let is_awaited = !removed.is_empty();
        removed.into_iter().for_each(|answer| answer.send(Ok(status.clone())));
        is_awaited
    }
}

/// Removes the socket of an export that is not served, and closes its disk eventually.
pub(super) fn refuse(setup: ExportSetup) {
    let ExportSetup { disks, device, endpoint, .. } = setup;
    drop(endpoint);
    let (answer, _) = Pending::new();
    close((disks, device), answer);
}

/// Closes the disks of an export on a thread of its own, which no other export can make wait.
fn close(disks: (Vec<DiskSource>, Device), closed: Answer<()>) {
    let close = move || {
        drop(disks);
        closed.send(());
    };
    // Where there can be no thread, that which could not start closes it: this one.
    let _ = std::thread::Builder::new().name("ringhaul-close".into()).spawn(close);
}
