//! Exports that are being opened, until they are served.

use std::time::Instant;

use device::Answer;

use crate::command::{CommandError, ExportState, ExportStatus};
use crate::spec::ExportSpec;
use crate::wanted::Wanted;

/// What the end of an export waits for that is being opened.
const NOT_OPEN: &str = "its disk is being opened";

/// An export that is being opened. Its name is taken.
pub(super) struct Opening {
    pub(super) spec: ExportSpec,
    pub(super) since: Instant,
    /// A process that takes over opens it too. Otherwise whoever has asked for it hears that it was
    /// not served.
    pub(super) goes_along: bool,
    /// It is about to be served.
    pub(super) is_claimed: bool,
    wanted: Wanted,
    /// Who waits for its end.
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

    /// Has whoever opens it give it up.
    pub(super) fn give_up(&self) {
        self.wanted.give_up();
    }

    /// As [`give_up`](Self::give_up), and answers when that is done, or, where it is too late for
    /// that, when the export has ended.
    pub(super) fn remove(&mut self, answer: Answer<Result<ExportStatus, CommandError>>) {
        self.give_up();
        self.removed.push(answer);
    }

    /// It is about to be served, unless it is not wanted any more.
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

    /// It is not opened any more: those who wait for its end hear that.
    pub(super) fn released(self) {
        let ended = ExportStatus { waits_for: None, ..self.status() };
        self.removed.into_iter().for_each(|answer| answer.send(Ok(ended.clone())));
    }

    /// Those who wait for the end of an export that is served after all.
    pub(super) fn into_removed(self) -> Vec<Answer<Result<ExportStatus, CommandError>>> {
        self.removed
    }
}
