//! Exports that are being opened, until they are served.

use std::time::Instant;

use device::Answer;

use crate::command::{CommandError, ExportState, ExportStatus};
use crate::spec::ExportSpec;
use crate::wanted::Wanted;

/// The wait of an export that is removed while its disk is being opened.
const NOT_OPEN: &str = "its disk is being opened";

/// An export that is being opened. Its name is taken.
pub(super) struct Opening {
    pub(super) spec: ExportSpec,
    pub(super) since: Instant,
    /// True if a process that takes over opens the export too. Otherwise the request for it fails.
    pub(super) goes_along: bool,
    /// True if the export is about to be served.
    pub(super) is_claimed: bool,
    wanted: Wanted,
    /// Requests that wait for its end.
    removed: Vec<Answer<Result<ExportStatus, CommandError>>>,
}

impl Opening {
    pub(super) fn new(spec: ExportSpec, goes_along: bool, now: Instant) -> Self {
        Self {
            spec,
            since: now,
            goes_along,
            is_claimed: false,
            wanted: Wanted::default(),
            removed: Vec::new(),
        }
    }

    pub(super) fn wanted(&self) -> Wanted {
        self.wanted.clone()
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.wanted.is_wanted()
    }

    /// Cancels the opening.
    pub(super) fn give_up(&self) {
        self.wanted.give_up();
    }

    /// Cancels the opening. Answers when it has ended or, if it is too late for that, when the
    /// export has ended.
    pub(super) fn remove(&mut self, answer: Answer<Result<ExportStatus, CommandError>>) {
        self.give_up();
        self.removed.push(answer);
    }

    /// Marks the export as about to be served, unless the opening was cancelled.
    pub(super) fn claim(&mut self) -> Result<(), CommandError> {
        if !self.is_wanted() {
            return Err(CommandError::Unwanted(self.spec.name()));
        }
        self.is_claimed = true;
        Ok(())
    }

    pub(super) fn status(&self) -> ExportStatus {
        let status = ExportStatus::opening(self.spec.clone());
        if self.is_wanted() {
            return status;
        }
        let waits_for = Some(NOT_OPEN.to_owned());
        ExportStatus { state: ExportState::Stopping, waits_for, ..status }
    }

    /// Answers the requests that wait for the end of the export: it is no longer being opened.
    pub(super) fn released(self) {
        let ended = ExportStatus { waits_for: None, ..self.status() };
        self.removed.into_iter().for_each(|answer| answer.send(Ok(ended.clone())));
    }

    /// Returns the requests that wait for the end of an export that is served after all.
    pub(super) fn into_removed(self) -> Vec<Answer<Result<ExportStatus, CommandError>>> {
        self.removed
    }
}
