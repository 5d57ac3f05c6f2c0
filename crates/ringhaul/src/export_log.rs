//! What the log contains about one export, and the limits on what guests and front-ends can cause.

use std::error::Error;
use std::io;

use device::{Events, QueueFault};
use virtqueue::Recovery;

use crate::log_limit::LogLimit;

/// An export's name and its limits, for all that write lines about it.
pub struct ExportLog {
    name: String,
    /// For lines on errors that the guest or the front-end can cause.
    errors: LogLimit,
    /// For lines on front-ends that come and go.
    sessions: LogLimit,
}

impl ExportLog {
    /// Of the export that the log calls `name`.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), errors: LogLimit::default(), sessions: LogLimit::default() }
    }

    /// What the log calls the export.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The limit on lines on errors that the guest or the front-end can cause.
    pub(crate) fn errors(&self) -> &LogLimit {
        &self.errors
    }

    /// The limit on lines about front-ends that come and go.
    pub(crate) fn sessions(&self) -> &LogLimit {
        &self.sessions
    }
}

impl Events for ExportLog {
    fn request_failed(&self, error: &dyn Error) {
        if let Some(left_out) = self.errors.permit() {
            tracing::warn!(export = self.name, left_out, "a request failed: {error}");
        }
    }

    fn queue_stopped(&self, _: u16, fault: &QueueFault) {
        let Some(left_out) = self.errors.permit() else { return };
        let export = &self.name;
        match fault {
            QueueFault::NotServed(_) => tracing::error!(export, left_out, "{fault}"),
            _ => tracing::warn!(export, left_out, "{fault}"),
        }
    }

    fn queue_recovered(&self, queue: u16, recovery: Recovery) {
        if let Some(text) = recovery.describe()
            && let Some(left_out) = self.sessions.permit()
        {
            tracing::info!(export = self.name, queue, left_out, "{text}");
        }
    }

    fn memory_not_registered(&self, error: &io::Error) {
        if let Some(left_out) = self.errors.permit() {
            tracing::warn!(
                export = self.name,
                left_out,
                "cannot register the guest's memory with io_uring: {error}; continuing without \
                 (the usual reason is the limit on locked memory, ulimit -l)"
            );
        }
    }

    fn call_cut_short(&self) {
        tracing::warn!(
            export = self.name,
            "a call did not return and was interrupted: its eventfd blocks, or this process was \
             stopped; from now on calls are made in a way that cannot block"
        );
    }
}
