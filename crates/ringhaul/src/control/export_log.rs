//! The log of one export, with limits on the lines that guests, front-ends and disks can cause.

use std::error::Error;
use std::fmt::Display;
use std::io;
use std::time::Duration;

use device::unit_address::UnitAddress;
use device::{
    Events, KICK_NOT_WATCHED_TEXT, QUEUE_CONTINUED_TEXT, QueueFault, REQUESTS_HELD_TEXT,
    SlowRequest,
};
use virtqueue::Recovery;

use crate::control::subscribers::{EventDetails, ExportEvent, Subscribers};
use crate::log::rate_limit::RateLimit;

/// An export's name and its limits, shared by all code that logs about the export.
pub struct ExportLog {
    name: String,
    /// The limit on lines about failed requests.
    errors: RateLimit,
    /// The limit on lines about errors of queues and front-ends. It is separate, so that the reason
    /// why a queue does not run is not lost among errors of requests.
    faults: RateLimit,
    /// The limit on lines about front-ends that connect and disconnect.
    sessions: RateLimit,
    /// The limit on lines about slow requests.
    slow: RateLimit,
    /// The time from which a request is slow.
    slow_from: Option<Duration>,
    /// The clients that subscribed to events.
    subscribers: Option<Subscribers>,
}

impl ExportLog {
    /// Creates the log of an export with this name, which is also its name in commands and answers.
    pub fn new(name: impl Into<String>) -> Self {
        let limit = RateLimit::default;
        let (errors, faults, sessions, slow) = (limit(), limit(), limit(), limit());
        let (slow_from, subscribers) = (None, None);
        Self { name: name.into(), errors, faults, sessions, slow, slow_from, subscribers }
    }

    /// Logs requests that take at least this time.
    pub(crate) fn with_slow_requests(self, slow_from: Option<Duration>) -> Self {
        Self { slow_from, ..self }
    }

    /// Sends events to subscribers, too.
    pub(crate) fn with_subscribers(self, subscribers: Subscribers) -> Self {
        Self { subscribers: Some(subscribers), ..self }
    }

    /// Reports an event to the subscribers. Never waits.
    pub(crate) fn report(&self, details: impl FnOnce() -> EventDetails) {
        if let Some(subscribers) = &self.subscribers
            && !subscribers.is_empty()
        {
            subscribers.report(ExportEvent { export: self.name.clone(), details: details() });
        }
    }

    /// Logs and reports a fault of the front-end or the guest, unless there were many lately.
    pub(crate) fn warn(&self, fault: &dyn Display) {
        if let Some(left_out) = self.faults.permit() {
            tracing::warn!(export = self.name, left_out, "{fault}");
            self.report_error(fault, left_out);
        }
    }

    fn report_error(&self, error: &dyn Display, left_out: u64) {
        self.report(|| EventDetails::Error { message: error.to_string(), left_out });
    }

    /// The name of the export in the log.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The limit on lines on errors of queues and front-ends.
    pub(crate) fn faults(&self) -> &RateLimit {
        &self.faults
    }

    /// The number of lines that were left out and not reported yet, if a line may be written now.
    pub(crate) fn left_out(&self) -> Option<u64> {
        let left_out = [&self.errors, &self.faults].map(RateLimit::left_out);
        left_out.into_iter().flatten().reduce(|sum, other| sum + other)
    }

    /// The number of all errors, and of lines that were left out and not reported. Called at the
    /// end of the export.
    pub(crate) fn totals(&self) -> (u64, u64) {
        let (of_requests, others) = (self.errors.totals(), self.faults.totals());
        (of_requests.0 + others.0, of_requests.1 + others.1)
    }

    /// The limit on lines about front-ends that connect and disconnect.
    pub(crate) fn sessions(&self) -> &RateLimit {
        &self.sessions
    }
}

impl Events for ExportLog {
    fn request_failed(&self, error: &dyn Error) {
        if let Some(left_out) = self.errors.permit() {
            tracing::warn!(export = self.name, left_out, "a request failed: {error}");
            self.report_error(&format_args!("a request failed: {error}"), left_out);
        }
    }

    fn slow_from(&self) -> Option<Duration> {
        self.slow_from
    }

    fn request_slow(&self, request: &SlowRequest) {
        if let Some(left_out) = self.slow.permit() {
            tracing::warn!(export = self.name, left_out, "{request}");
        }
    }

    fn queue_stopped(&self, _: u16, fault: &QueueFault) {
        self.warn(fault);
    }

    fn kick_not_watched(&self, queue: u16, error: &dyn Error) {
        let Some(left_out) = self.faults.permit() else { return };
        let message =
            format!("{KICK_NOT_WATCHED_TEXT}: {error}; raise fs.epoll.max_user_watches (sysctl)");
        tracing::error!(export = self.name, queue, left_out, "{message}");
        self.report_error(&message, left_out);
    }

    fn queue_recovered(&self, queue: u16, recovery: Recovery) {
        if let Some(text) = recovery.describe()
            && let Some(left_out) = self.sessions.permit()
        {
            tracing::info!(export = self.name, queue, left_out, "{text}");
        }
    }

    fn queue_continued(&self, queue: u16, next_avail: u16) {
        if let Some(left_out) = self.sessions.permit() {
            tracing::warn!(
                export = self.name,
                queue,
                next_avail,
                left_out,
                "{QUEUE_CONTINUED_TEXT}; use a front-end that keeps a region or, with virtio-blk, \
                 --in-order on"
            );
        }
    }

    fn requests_held(&self, unit: UnitAddress) {
        self.warn(&format_args!(
            "{REQUESTS_HELD_TEXT} {unit}, which does not exist; add it (`ringhaul ctl add-lun`), \
             or the guest waits until it aborts them"
        ));
    }

    fn memory_not_registered(&self, error: &io::Error) {
        if let Some(left_out) = self.faults.permit() {
            tracing::warn!(
                export = self.name,
                left_out,
                "cannot register the guest's memory with io_uring: {error}; continuing without \
                 registration (the usual reason is the limit on locked memory, ulimit -l)"
            );
        }
    }

    fn call_cut_short(&self) {
        tracing::warn!(
            export = self.name,
            "a call did not return and was interrupted: its eventfd blocks, or this process was \
             stopped; further calls of this export cannot block"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::subscribers::QUEUED_MAX;
    use super::*;

    #[test]
    fn errors_of_requests_leave_room_for_the_reason_of_a_queue() {
        let log = ExportLog::new("vm");
        let error = io::Error::other("it is a test");
        (0..1000).for_each(|_| log.request_failed(&error));
        assert_eq!(log.errors.permit(), None);
        assert_eq!(log.faults().permit(), Some(0));
        assert_eq!(log.left_out(), Some(996));
        (0..1000).for_each(|_| log.kick_not_watched(0, &error));
        assert_eq!(log.errors.permit(), None, "neither has the room of the other");
        assert_eq!(log.left_out(), Some(996));
        assert_eq!(log.totals(), (2003, 1));
    }

    /// IoThreads report errors, and never wait for a subscriber.
    #[test]
    fn a_full_subscriber_delays_no_report() {
        let subscribers = Subscribers::default();
        let log = ExportLog::new("vm").with_subscribers(subscribers.clone());
        let (_subscription, events) = subscribers.subscribe();
        let added = || ExportEvent { export: "vm".to_owned(), details: EventDetails::Added };
        (0..QUEUED_MAX).for_each(|_| subscribers.report(added()));
        assert!(!subscribers.is_empty(), "the queue has room for all of them");
        log.request_failed(&io::Error::other("a test"));
        assert!(subscribers.is_empty(), "the subscription has ended");
        assert_eq!(events.iter().count(), QUEUED_MAX, "earlier events are readable");
    }
}
