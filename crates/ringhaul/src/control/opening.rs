//! Exports that are being opened, until they are served.

use std::time::Instant;

use device::oneshot;

use crate::open::cancellation::CancelToken;
use crate::spec::ExportSpec;
use crate::spec::command::{CommandError, ExportState, ExportStatus};

/// The wait of an export that is removed while its disk is being opened.
const NOT_OPEN: &str = "its disk is being opened";

/// An export that is being opened. Its name is taken.
pub(super) struct PendingExport {
    pub(super) spec: ExportSpec,
    pub(super) since: Instant,
    /// True if a process that takes over opens the export too. Otherwise the request for it fails.
    pub(super) follows_hand_over: bool,
    /// True if the export is about to be served.
    pub(super) is_claimed: bool,
    cancel_token: CancelToken,
    /// Requests that wait for its end.
    removal_waiters: Vec<oneshot::Sender<Result<ExportStatus, CommandError>>>,
}

impl PendingExport {
    pub(super) fn new(spec: ExportSpec, follows_hand_over: bool, now: Instant) -> Self {
        Self {
            spec,
            since: now,
            follows_hand_over,
            is_claimed: false,
            cancel_token: CancelToken::default(),
            removal_waiters: Vec::new(),
        }
    }

    pub(super) fn cancel_token(&self) -> CancelToken {
        self.cancel_token.clone()
    }

    pub(super) fn is_active(&self) -> bool {
        self.cancel_token.is_active()
    }

    /// Cancels the opening.
    pub(super) fn cancel(&self) {
        self.cancel_token.cancel();
    }

    /// Cancels the opening. Answers when it has ended or, if it is too late for that, when the
    /// export has ended.
    pub(super) fn remove(&mut self, answer: oneshot::Sender<Result<ExportStatus, CommandError>>) {
        self.cancel();
        self.removal_waiters.push(answer);
    }

    /// Marks the export as about to be served, unless the opening was cancelled.
    pub(super) fn claim(&mut self) -> Result<(), CommandError> {
        if !self.is_active() {
            return Err(CommandError::Cancelled(self.spec.name()));
        }
        self.is_claimed = true;
        Ok(())
    }

    pub(super) fn status(&self) -> ExportStatus {
        let status = ExportStatus::opening(self.spec.clone());
        if self.is_active() {
            return status;
        }
        let waits_for = Some(NOT_OPEN.to_owned());
        ExportStatus { state: ExportState::Stopping, waits_for, ..status }
    }

    /// Answers the requests that wait for the end of the export: it is no longer being opened.
    pub(super) fn released(self) {
        let ended = ExportStatus { waits_for: None, ..self.status() };
        self.removal_waiters.into_iter().for_each(|answer| answer.send(Ok(ended.clone())));
    }

    /// Returns the requests that wait for the end of an export that is served after all.
    pub(super) fn into_removal_waiters(
        self,
    ) -> Vec<oneshot::Sender<Result<ExportStatus, CommandError>>> {
        self.removal_waiters
    }
}
