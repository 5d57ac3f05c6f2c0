//! The events and counts of a queue, and the latency of its requests.

use std::error::Error;

use super::Queue;
use crate::stats::{ErrorCause, RequestKind};

/// The time of a chain's pop, in nanoseconds of the loop's clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PopTime(u64);

impl Queue {
    /// The time of a chain that is popped now.
    #[inline]
    pub(crate) fn pop_time(&self) -> PopTime {
        PopTime(self.reports.clock.nanoseconds())
    }

    /// Nanoseconds since the pop of a chain.
    #[inline]
    fn latency_ns(&self, popped: PopTime) -> u64 {
        self.reports.clock.nanoseconds() - popped.0
    }

    /// Counts a successful request that is about to be pushed, and its bytes.
    #[inline]
    pub(crate) fn count(&self, kind: RequestKind, popped: PopTime, bytes: u64) {
        self.reports.requests.count(kind, self.latency_ns(popped), bytes);
    }

    /// Counts a request that is about to be pushed with an error status. It is not reported: the
    /// driver asked for something that a device need not support.
    #[cold]
    pub(crate) fn refuse(&self, kind: RequestKind, popped: PopTime, cause: ErrorCause) {
        self.reports.requests.count_error(kind, self.latency_ns(popped), cause);
    }

    /// Counts a request that is about to be pushed with an error status, and reports it.
    #[cold]
    pub(crate) fn fail(
        &self,
        kind: RequestKind,
        popped: PopTime,
        (cause, error): (ErrorCause, &dyn Error),
    ) {
        self.refuse(kind, popped, cause);
        self.reports.events.request_failed(error);
    }

    /// Reports that the driver's kicks are not received.
    pub(super) fn report_unwatched(&self, error: &dyn Error) {
        self.reports.events.kick_not_watched(self.reports.index, error);
    }
}
