//! What each queue has served, from the pop of a chain to its push.
//!
//! The IoThread of a queue writes with plain loads and stores; any thread may read at any time, and
//! sees values that are at most a little old.

use std::ops::{AddAssign, Index};

use blockio::stats::Counter;

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestKind {
    /// Data goes to the driver.
    Read,
    /// Data comes from the driver.
    Write,
    /// Flush: earlier writes go to stable storage.
    Flush,
    /// Discard: the content of ranges does not matter any more.
    Discard,
    /// Write zeroes: ranges read as zeroes afterwards.
    WriteZeroes,
    /// Anything else, malformed requests included.
    Other,
}

impl RequestKind {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Read, Self::Write, Self::Flush, Self::Discard, Self::WriteZeroes, Self::Other];
}

/// What a queue has served of one kind.
#[derive(Debug, Default)]
pub struct KindStats {
    /// Requests that were answered, those that failed included.
    pub requests: Counter,
    /// Bytes of the requests that succeeded.
    pub bytes: Counter,
    /// Requests that were answered with an error status.
    pub errors: Counter,
}

/// What one queue has served since its device was made, however often it was started.
#[derive(Debug, Default)]
pub struct QueueStats {
    kinds: [KindStats; RequestKind::ALL.len()],
}

impl QueueStats {
    /// Counts a request that succeeded, and its bytes. Only the thread that serves the
    /// queue may call it.
    #[inline]
    pub(crate) fn count(&self, kind: RequestKind, bytes: u64) {
        let stats = &self.kinds[kind as usize];
        stats.requests.add(1);
        stats.bytes.add(bytes);
    }

    /// Counts a request that failed. Only the thread that serves the queue may call it.
    pub(crate) fn count_error(&self, kind: RequestKind) {
        let stats = &self.kinds[kind as usize];
        stats.requests.add(1);
        stats.errors.add(1);
    }

    /// What was served so far.
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

/// What was served of one kind, at some moment.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct RequestCounts {
    /// Requests that were answered, those that failed included.
    pub requests: u64,
    /// Bytes of the requests that succeeded.
    pub bytes: u64,
    /// Requests that were answered with an error status.
    pub errors: u64,
}

/// What was served of all kinds, at some moment. Those of several queues can be added up.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct RequestTotals {
    kinds: [RequestCounts; RequestKind::ALL.len()],
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
