//! Counters of each queue, from the pop of a chain to its push. [`KindStats`] has the counters
//! of one kind of request, and [`QueueStats`] has the counters of the whole queue.
//!
//! The IoThread of a queue writes them with plain loads and stores. Any thread may read them at any
//! time, and sees values that are slightly old at most.

use std::fmt;
use std::ops::{AddAssign, Index};

use blockio::stats::Counter;

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
}

/// Counters of one kind of request on a queue.
#[derive(Debug, Default)]
pub struct KindStats {
    /// Answered requests, including failed ones.
    pub requests: Counter,
    /// Bytes of the requests that succeeded.
    pub bytes: Counter,
    /// Requests answered with an error status.
    pub errors: Counter,
}

/// Counters of one queue since its device was made, across restarts of the queue.
#[derive(Debug, Default)]
pub struct QueueStats {
    kinds: [KindStats; RequestKind::ALL.len()],
}

impl QueueStats {
    /// Counts a successful request and its bytes. Only the thread that serves the queue may call
    /// it.
    #[inline]
    pub(crate) fn count(&self, kind: RequestKind, bytes: u64) {
        let stats = &self.kinds[kind as usize];
        stats.requests.add(1);
        stats.bytes.add(bytes);
    }

    /// Counts a failed request. Only the thread that serves the queue may call it.
    pub(crate) fn count_error(&self, kind: RequestKind) {
        let stats = &self.kinds[kind as usize];
        stats.requests.add(1);
        stats.errors.add(1);
    }

    /// The present totals.
    #[must_use]
    pub fn totals(&self) -> RequestTotals {
        RequestTotals {
            kinds: self.kinds.each_ref().map(|stats| RequestCounts {
                requests: stats.requests.get(),
                bytes: stats.bytes.get(),
                errors: stats.errors.get(),
            }),
        }
    }
}

impl Index<RequestKind> for QueueStats {
    type Output = KindStats;

    fn index(&self, kind: RequestKind) -> &KindStats {
        &self.kinds[kind as usize]
    }
}

/// Counters of one kind of request at one moment.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct RequestCounts {
    /// Answered requests, including failed ones.
    pub requests: u64,
    /// Bytes of the requests that succeeded.
    pub bytes: u64,
    /// Requests answered with an error status.
    pub errors: u64,
}

/// Counters of all kinds at one moment. The totals of several queues can be added up.
#[derive(Default, Clone, Copy, PartialEq, Eq)]
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
            sum.requests += more.requests;
            sum.bytes += more.bytes;
            sum.errors += more.errors;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_are_shown_with_the_names_of_kinds() {
        let stats = QueueStats::default();
        stats.count(RequestKind::Flush, 0);
        let shown = format!("{:?}", stats.totals());
        assert!(shown.contains("Flush: RequestCounts { requests: 1, bytes: 0, errors: 0 }"));
    }

    #[test]
    fn each_kind_is_counted_by_itself_and_bytes_only_where_all_went_well() {
        let stats = QueueStats::default();
        for (number, kind) in (1..).zip(RequestKind::ALL) {
            for _ in 0..number {
                stats.count(kind, 512);
            }
            stats.count_error(kind);
        }
        let mut sum = stats.totals();
        sum += stats.totals();
        for (number, kind) in (1..).zip(RequestKind::ALL) {
            let expected = RequestCounts { requests: number + 1, bytes: number * 512, errors: 1 };
            assert_eq!(stats.totals()[kind], expected, "{kind:?}");
            assert_eq!(sum[kind].requests, 2 * (number + 1), "{kind:?}");
            assert_eq!((sum[kind].bytes, sum[kind].errors), (number * 1024, 2), "{kind:?}");
        }
    }
}
