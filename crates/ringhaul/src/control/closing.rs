//! Exports that have ended, until their disks are closed.

use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use blockio::DiskSource;
use device::{Answer, Device, Pending};

use super::order::{Answered, ExportSetup};
use crate::command::ExportStatus;
use crate::export_log::ExportLog;

/// What an export waits for that has ended.
pub(super) const NOT_CLOSED: &str = "its disk is not closed";

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
        Self { status, log, removed, since: Instant::now(), closed, was_given_up: false }
    }

    /// Whether nobody waits any more.
    pub(super) fn is_closed(&self) -> bool {
        self.was_given_up || self.closed.check().is_ready()
    }

    /// Nobody is to wait any longer. All requests are answered, and the disk is closed when it can
    /// be.
    pub(super) fn give_up(&mut self) {
        self.was_given_up = true;
        if self.closed.check().is_pending() {
            let seconds = self.since.elapsed().as_secs();
            let export = self.log.name();
            tracing::warn!(export, "removed, although {NOT_CLOSED} after {seconds} s");
        }
    }

    /// Answers all who wait for the end. False when nobody does.
    pub(super) fn answer(&mut self) -> bool {
        self.status.waits_for = None;
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
