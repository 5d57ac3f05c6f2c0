//! The events and counts of a queue, and the latency of its requests.

use std::error::Error;
use std::time::{Duration, Instant};

use blockio::stats::Cause;

use super::Queue;
use crate::events::SlowRequest;
use crate::stats::{ErrorCause, RequestKind};

/// The time of a chain's pop, in nanoseconds of the loop's clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PopTime(u64);

impl Queue {
    /// The time of a chain that is popped now.
    #[inline]
    pub(crate) fn pop_time(&self, head: u16) -> PopTime {
        probe::probe!(ringhaul, pop, self.number(), head);
        PopTime(self.reports.clock.nanoseconds())
    }

    /// Counts the requests that have begun in a run.
    #[inline]
    pub(crate) fn count_run(&self, popped: u16) {
        self.reports.requests.submit_batches.record(popped.into());
    }

    /// Counts a call that announces this many answers. A call for none is forced.
    #[inline]
    pub(super) fn count_call(&self, answers: u32) {
        let stats = &*self.reports.requests;
        stats.calls.add(1);
        stats.call_batches.record(answers);
        stats.called_answers.add(answers.into());
    }

    /// The number of the queue in probes: no other queue of the process has it.
    #[inline]
    pub(super) fn number(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Nanoseconds since the pop of a chain.
    #[inline]
    fn latency_ns(&self, popped: PopTime) -> u64 {
        self.reports.clock.nanoseconds() - popped.0
    }

    /// Counts a successful request that is about to be pushed, and its bytes. Returns true if it
    /// was [slow](Self::report_slow).
    #[inline]
    pub(crate) fn count(&self, kind: RequestKind, popped: PopTime, bytes: u64) -> bool {
        self.reports.requests.count(kind, self.latency_ns(popped), bytes)
    }

    /// Counts a request that is about to be pushed with an error status. It is not reported: the
    /// driver asked for something that a device need not support. Returns true if it was slow.
    #[cold]
    pub(crate) fn refuse(&self, kind: RequestKind, popped: PopTime, cause: ErrorCause) -> bool {
        self.reports.requests.count_error(kind, self.latency_ns(popped), cause)
    }

    /// Counts a request that is about to be pushed with an error status, and reports it. Returns
    /// true if it was slow.
    #[cold]
    pub(crate) fn fail(
        &self,
        kind: RequestKind,
        popped: PopTime,
        (cause, error): (ErrorCause, &dyn Error),
    ) -> bool {
        let is_slow = self.refuse(kind, popped, cause);
        self.reports.events.request_failed(error);
        is_slow
    }

    /// Reports a slow request, with the sector that it begins at.
    #[cold]
    pub(crate) fn report_slow(&self, kind: RequestKind, popped: PopTime, sector: Option<u64>) {
        let took = Duration::from_nanos(self.latency_ns(popped));
        let now = self.reports.clock.recently();
        let of = |cause| share_of(cause, now, took);
        let slow = &self.reports.stats.slow;
        self.reports.events.request_slow(&SlowRequest {
            kind,
            sector,
            took,
            waited: of(slow.wait()),
            in_kernel: of(slow.operation()),
        });
    }

    /// The sector in the header of a virtio-blk request that was popped and is not answered. `None`
    /// if the request has none there, or the driver has taken the header away.
    #[cold]
    pub(crate) fn look_up_sector(&self, kind: RequestKind, head: u16) -> Option<u64> {
        if !matches!(kind, RequestKind::Read | RequestKind::Write) {
            return None;
        }
        let [.., s0, s1, s2, s3, s4, s5, s6, s7] = self.ring.borrow().header::<16>(head)?;
        Some(u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]))
    }

    /// Makes requests of this time and above slow.
    pub(super) fn set_slow(&self, slow: Duration) {
        self.reports.requests.set_slow(slow);
        // A cause of less than half the time is not worth a word.
        self.reports.stats.slow.set_least(slow / 2);
    }

    /// Reports that the driver's kicks are not received.
    pub(super) fn report_unwatched(&self, error: &dyn Error) {
        self.reports.events.kick_not_watched(self.reports.index, error);
    }
}

/// The share of a cause in a request that took this long up to now. A cause that ended before the
/// request began has none.
fn share_of(cause: Option<Cause>, now: Instant, took: Duration) -> Duration {
    let is_within = |cause: &Cause| now.saturating_duration_since(cause.ended) <= took;
    cause.filter(is_within).map_or(Duration::ZERO, |cause| cause.took.min(took))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_has_a_share_in_requests_that_it_has_delayed() {
        let seconds = Duration::from_secs;
        let now = Instant::now() + seconds(100);
        let cause = |ago, took| Some(Cause { ended: now - seconds(ago), took: seconds(took) });
        for (cause, expected) in [
            (None, 0),
            (cause(0, 3), 3),
            (cause(5, 3), 3),
            (cause(6, 3), 0),
            // It began before the request.
            (cause(2, 9), 5),
        ] {
            assert_eq!(share_of(cause, now, seconds(5)), seconds(expected), "{cause:?}");
        }
    }
}
