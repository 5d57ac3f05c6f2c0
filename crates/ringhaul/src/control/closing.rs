//! Exports that have ended, until their disks are closed.

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use blockio::DiskSource;
use device::{Answer, Device, Pending};

use super::order::{Answered, ExportSetup};
use crate::command::ExportStatus;
use crate::export_log::ExportLog;

/// What an export waits for that has ended.
pub(super) const NOT_CLOSED: &str = "its disk is not closed";

/// How long a disk takes to close before it is given up by force: one that is local, or whose other
/// end answers, takes less.
const FORCED_CLOSE_MAX: Duration = Duration::from_secs(1);

/// An export that has ended. `close` waits for as long as a file system does (FUSE, NFS) or a
/// block device, so it has a thread.
pub(super) struct Closing {
    /// As the export was at its end.
    pub(super) status: ExportStatus,
    pub(super) log: Arc<ExportLog>,
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
        status: ExportStatus,
        log: Arc<ExportLog>,
        removed: Vec<Answer<Answered<ExportStatus>>>,
        disks: (Vec<DiskSource>, Device),
        waker: &Waker,
    ) -> Self {
        let (answer, closed) = Pending::new();
        closed.wake(waker);
        close(disks, answer);
        let status = ExportStatus { waits_for: Some(NOT_CLOSED.to_owned()), ..status };
        let (since, give_up_at) = (Instant::now(), None);
        Self { status, log, removed, since, closed, give_up_at, was_given_up: false }
    }

    /// Whether nobody waits any more.
    pub(super) fn is_closed(&self) -> bool {
        self.was_given_up || self.closed.check().is_ready()
    }

    /// Nobody is to wait for a close that hangs. All requests are answered, and the disk is closed
    /// when it can be.
    pub(super) fn force(&mut self) {
        self.give_up_at = Some(self.since + FORCED_CLOSE_MAX);
    }

    /// When it is given up, unless it is closed by then.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.give_up_at
    }

    /// Gives it up if that is due.
    pub(super) fn look(&mut self, now: Instant) {
        let is_due = self.give_up_at.is_some_and(|when| now >= when);
        if is_due && !self.was_given_up && self.closed.check().is_pending() {
            self.was_given_up = true;
            let seconds = self.since.elapsed().as_secs();
            let export = self.log.name();
            tracing::warn!(
                export,
                "removed by force, although {NOT_CLOSED} after {seconds} s; it is closed when that \
                 is possible, and may be locked until then"
            );
        }
    }

    /// Answers all who wait for the end. False when nobody does.
    pub(super) fn answer(&mut self) -> bool {
        if !self.was_given_up {
            self.status.waits_for = None;
        }
        let removed = std::mem::take(&mut self.removed);
        let is_awaited = !removed.is_empty();
        removed.into_iter().for_each(|answer| answer.send(Ok(self.status.clone())));
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
