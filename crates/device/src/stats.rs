//! Counters of each queue, from the pop of a chain to its push. [`KindStats`] has the counters
//! of one kind of request, and [`QueueStats`] has the counters of the whole queue.
//!
//! A new counter is a field of one of the two, written where its event happens in `queue.rs` or
//! `queue/`. Users see it once the daemon's `spec/stats.rs` and `monitoring/exposition.rs` have it,
//! and it survives an upgrade by `spec/earlier_counters.rs`.
//!
//! The IoThread of a queue writes them with plain loads and stores. Any thread may read them at any
//! time, and sees values that are slightly old at most.

mod batch_sizes;
mod latency;

use std::fmt;
use std::ops::{AddAssign, Index};
use std::time::Duration;

use blockio::stats::{Counter, Peak};
use serde::{Deserialize, Serialize};

pub use batch_sizes::{BATCH_BOUNDS, BatchSizes, BatchStats, batch_bound};
pub use latency::{LATENCY_BOUNDS, Latency, LatencyStats, latency_bound_ns};

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestKind {
    /// Data goes to the driver.
    Read,
    /// Data comes from the driver.
    Write,
    /// Flush: earlier writes go to stable storage.
    Flush,
    /// Discard: the content of ranges no longer matters.
    Discard,
    /// Write zeroes: ranges read as zeroes afterwards.
    WriteZeroes,
    /// Anything else, including malformed requests.
    Other,
}

impl RequestKind {
    /// All kinds.
    pub const ALL: [Self; 6] =
        [Self::Read, Self::Write, Self::Flush, Self::Discard, Self::WriteZeroes, Self::Other];

    /// The name in a sentence.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Read => "a read",
            Self::Write => "a write",
            Self::Flush => "a flush",
            Self::Discard => "a discard",
            Self::WriteZeroes => "a write of zeroes",
            Self::Other => "another request",
        }
    }
}

/// The cause of an error status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorCause {
    /// The disk failed the request.
    Disk,
    /// The disk, or the file system below it, is full.
    NoSpace,
    /// The request is malformed, out of range, or of a kind that the device lacks.
    Invalid,
    /// Another initiator has reserved the disk.
    Reserved,
    /// The driver aborted the request, or a reset did.
    Aborted,
    /// Guest memory is gone, or the device cannot serve the request now.
    Unavailable,
}

impl ErrorCause {
    /// All causes.
    pub const ALL: [Self; 6] = [
        Self::Disk,
        Self::NoSpace,
        Self::Invalid,
        Self::Reserved,
        Self::Aborted,
        Self::Unavailable,
    ];

    /// The cause of an error that a disk has returned.
    pub(crate) fn from_disk_error(error: &std::io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => Self::NoSpace,
            // The range is misaligned or beyond the end.
            Some(libc::EINVAL) => Self::Invalid,
            Some(libc::EBADE) => Self::Reserved,
            Some(libc::EBUSY) => Self::Unavailable,
            // The queue stops.
            None if error.kind() == std::io::ErrorKind::ResourceBusy => Self::Unavailable,
            _ => Self::Disk,
        }
    }
}

/// Counters of one kind of request on a queue.
#[derive(Debug, Default)]
pub struct KindStats {
    /// The times from pop to push of all answered requests, including failed ones. The clock is
    /// that of the loop, so requests of one round share their times.
    pub latency: LatencyStats,
    /// Bytes of the requests that succeeded.
    pub bytes: Counter,
    /// Requests answered with an error status, by [`ErrorCause`].
    errors: [Counter; ErrorCause::ALL.len()],
}

impl KindStats {
    fn counts(&self) -> RequestCounts {
        RequestCounts {
            latency: self.latency.values(),
            bytes: self.bytes.get(),
            errors_by_cause: self.errors.each_ref().map(Counter::get),
        }
    }
}

/// Counters of one queue since its device was made, across restarts of the queue.
#[derive(Debug, Default)]
pub struct QueueStats {
    kinds: [KindStats; RequestKind::ALL.len()],
    /// The most unanswered requests, including requests that the device had not popped.
    pub depth_peak: Peak,
    /// Kicks that the loop has received.
    pub kicks: Counter,
    /// Calls to the driver.
    pub calls: Counter,
    /// Publications of answers for which the driver wanted no call.
    pub calls_suppressed: Counter,
    /// Requests that began in one run, for which one submit is enough.
    pub submit_batches: BatchStats,
    /// Answers that became visible to the driver at once, after a harvest or without one.
    pub harvest_batches: BatchStats,
    /// Answers that one call announced: all since the call before it.
    pub call_batches: BatchStats,
    /// The sum of the sizes in `call_batches`.
    pub called_answers: Counter,
}

impl QueueStats {
    /// Counts a successful request and its bytes. Returns true if it was slow. Only the thread that
    /// serves the queue may call it.
    #[inline]
    pub(crate) fn count(&self, kind: RequestKind, latency_ns: u64, bytes: u64) -> bool {
        let stats = &self.kinds[kind as usize];
        stats.bytes.add(bytes);
        stats.latency.record(latency_ns)
    }

    /// Counts a failed request. Returns true if it was slow. Only the thread that serves the queue
    /// may call it.
    pub(crate) fn count_error(
        &self,
        kind: RequestKind,
        latency_ns: u64,
        cause: ErrorCause,
    ) -> bool {
        let stats = &self.kinds[kind as usize];
        stats.errors[cause as usize].add(1);
        stats.latency.record(latency_ns)
    }

    /// Requests of this time and above are slow.
    pub(crate) fn set_slow(&self, slow: Duration) {
        self.kinds.iter().for_each(|stats| stats.latency.set_slow(slow));
    }

    /// The present totals.
    pub fn totals(&self) -> RequestTotals {
        RequestTotals { kinds: self.kinds.each_ref().map(KindStats::counts) }
    }

    /// Takes the greatest depth and latencies since they were last taken.
    pub(crate) fn take_peaks(&self) -> Peaks {
        let longest_ns = self.kinds.each_ref().map(|stats| stats.latency.take_longest_ns());
        Peaks { depth: self.depth_peak.take(), longest_ns }
    }
}

impl Index<RequestKind> for QueueStats {
    type Output = KindStats;

    fn index(&self, kind: RequestKind) -> &KindStats {
        &self.kinds[kind as usize]
    }
}

/// The greatest depth and latencies of some time.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Peaks {
    /// The most unanswered requests of a queue.
    pub depth: u64,
    /// The longest latency of each kind of request, in nanoseconds, in the order of
    /// [`RequestKind::ALL`].
    pub longest_ns: [u64; RequestKind::ALL.len()],
}

impl Peaks {
    /// Includes the peaks of another queue, or of a later time.
    pub fn include(&mut self, other: Self) {
        self.depth = self.depth.max(other.depth);
        for (mine, more) in self.longest_ns.iter_mut().zip(other.longest_ns) {
            *mine = (*mine).max(more);
        }
    }
}

/// Counters of one kind of request at one moment.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct RequestCounts {
    /// The latencies of all answered requests, including failed ones.
    pub latency: Latency,
    /// Bytes of the requests that succeeded.
    pub bytes: u64,
    errors_by_cause: [u64; ErrorCause::ALL.len()],
}

impl RequestCounts {
    /// Answered requests, including failed ones.
    pub fn requests(&self) -> u64 {
        self.latency.count()
    }

    /// Requests answered with an error status.
    pub fn errors(&self) -> u64 {
        self.errors_by_cause.iter().sum()
    }

    /// Requests answered with an error status for this cause.
    pub fn errors_of(&self, cause: ErrorCause) -> u64 {
        self.errors_by_cause[cause as usize]
    }
}

impl AddAssign for RequestCounts {
    fn add_assign(&mut self, other: Self) {
        self.latency += other.latency;
        self.bytes += other.bytes;
        for (sum, more) in self.errors_by_cause.iter_mut().zip(other.errors_by_cause) {
            *sum += more;
        }
    }
}

/// Counters of all kinds at one moment. The totals of several queues can be added up.
#[derive(Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestTotals {
    kinds: [RequestCounts; RequestKind::ALL.len()],
}

/// Names each kind.
impl fmt::Debug for RequestTotals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(RequestKind::ALL.iter().zip(&self.kinds)).finish()
    }
}

impl Index<RequestKind> for RequestTotals {
    type Output = RequestCounts;

    fn index(&self, kind: RequestKind) -> &RequestCounts {
        &self.kinds[kind as usize]
    }
}

impl AddAssign for RequestTotals {
    fn add_assign(&mut self, other: Self) {
        for (sum, more) in self.kinds.iter_mut().zip(other.kinds) {
            *sum += more;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_are_shown_with_the_names_of_kinds() {
        let stats = QueueStats::default();
        stats.count(RequestKind::Flush, 0, 7);
        let shown = format!("{:?}", stats.totals());
        assert!(shown.contains("Flush: RequestCounts { "), "{shown}");
        assert!(shown.contains("bytes: 7"), "{shown}");
    }

    #[test]
    fn errors_of_disks_have_their_cause() {
        for (errno, expected) in [
            (libc::ENOSPC, ErrorCause::NoSpace),
            (libc::EDQUOT, ErrorCause::NoSpace),
            (libc::EINVAL, ErrorCause::Invalid),
            (libc::EBADE, ErrorCause::Reserved),
            (libc::EBUSY, ErrorCause::Unavailable),
            (libc::EIO, ErrorCause::Disk),
            (libc::ETIMEDOUT, ErrorCause::Disk),
        ] {
            let error = std::io::Error::from_raw_os_error(errno);
            assert_eq!(ErrorCause::from_disk_error(&error), expected, "{error}");
        }
        assert_eq!(ErrorCause::from_disk_error(&std::io::Error::other("text")), ErrorCause::Disk);
        let stops = std::io::Error::new(std::io::ErrorKind::ResourceBusy, "text");
        assert_eq!(ErrorCause::from_disk_error(&stops), ErrorCause::Unavailable);
    }

    #[test]
    fn peaks_begin_anew_when_they_are_taken() {
        let stats = QueueStats::default();
        stats.count(RequestKind::Write, 9_000, 1);
        stats.count_error(RequestKind::Write, 7_000, ErrorCause::Disk);
        stats.count(RequestKind::Other, 5, 0);
        stats.depth_peak.note(12);
        let mut peaks = stats.take_peaks();
        assert_eq!(peaks, Peaks { depth: 12, longest_ns: [0, 9_000, 0, 0, 0, 5] });
        stats.count(RequestKind::Read, 6, 0);
        let later = stats.take_peaks();
        assert_eq!(later, Peaks { depth: 0, longest_ns: [6, 0, 0, 0, 0, 0] });
        peaks.include(later);
        assert_eq!(peaks, Peaks { depth: 12, longest_ns: [6, 9_000, 0, 0, 0, 5] });
    }

    #[test]
    fn each_kind_is_counted_by_itself_and_bytes_only_for_successful_requests() {
        let stats = QueueStats::default();
        for (number, kind) in (1..).zip(RequestKind::ALL) {
            for _ in 0..number {
                stats.count(kind, 1_000 * number, 512);
            }
            for (cause, count) in ErrorCause::ALL.into_iter().zip(1..) {
                for _ in 0..count {
                    stats.count_error(kind, 0, cause);
                }
            }
        }
        let mut sum = stats.totals();
        sum += stats.totals();
        for (number, kind) in (1..).zip(RequestKind::ALL) {
            let counts = stats.totals()[kind];
            assert_eq!((counts.requests(), counts.errors()), (number + 21, 21), "{kind:?}");
            assert_eq!(
                (counts.bytes, counts.latency.sum_ns()),
                (number * 512, number * number * 1_000)
            );
            for (cause, count) in ErrorCause::ALL.into_iter().zip(1..) {
                assert_eq!(counts.errors_of(cause), count, "{kind:?} {cause:?}");
                assert_eq!(sum[kind].errors_of(cause), 2 * count, "{kind:?} {cause:?}");
            }
            assert_eq!(sum[kind].requests(), 2 * (number + 21), "{kind:?}");
            assert_eq!((sum[kind].bytes, sum[kind].errors()), (number * 1024, 42), "{kind:?}");
        }
    }
}
