//! Counters and histograms with one writer each.
//!
//! The thread that owns a [`Stats`] adds to it with plain loads and stores (no atomic
//! read-modify-write); any thread may read it at any time and sees values that are at most a
//! little old.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A count that one thread writes and any thread reads.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Only the owning thread may call it: two writers would lose counts.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// The count so far.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Sub-buckets for each power of two: values are kept to one part in eight.
const SUB_BUCKETS_LOG2: u32 = 3;
const SUB_BUCKETS: u64 = 1 << SUB_BUCKETS_LOG2;
const BUCKETS: usize = (64 - SUB_BUCKETS_LOG2 as usize + 1) << SUB_BUCKETS_LOG2;

/// A distribution of whole numbers, each kept to within one eighth.
#[derive(Debug)]
pub struct Histogram {
    buckets: Box<[Counter]>,
    sum: Counter,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            buckets: (0..BUCKETS).map(|_| Counter::default()).collect(),
            sum: Counter::default(),
        }
    }
}

/// The bucket of `value`: exact below [`SUB_BUCKETS`], then eight for each power of two.
#[inline]
fn bucket_of(value: u64) -> usize {
    let value_log2 = 63 - (value | 1).leading_zeros();
    if value_log2 < SUB_BUCKETS_LOG2 {
        return usize::try_from(value).unwrap_or(0);
    }
    let shift = value_log2 - SUB_BUCKETS_LOG2;
    let group = u64::from(shift + 1) << SUB_BUCKETS_LOG2;
    let index = group + ((value >> shift) & (SUB_BUCKETS - 1));
    usize::try_from(index).unwrap_or(BUCKETS - 1).min(BUCKETS - 1)
}

/// The largest value of a bucket.
fn bucket_end(index: usize) -> u64 {
    let index = index as u64;
    if index < SUB_BUCKETS {
        return index;
    }
    let shift = (index >> SUB_BUCKETS_LOG2) - 1;
    let start = (SUB_BUCKETS + (index & (SUB_BUCKETS - 1))) << shift;
    start + ((1 << shift) - 1)
}

impl Histogram {
    /// Counts `value` once. Only the owning thread may call it.
    #[inline]
    pub fn record(&self, value: u64) {
        self.buckets[bucket_of(value)].add(1);
        self.sum.add(value);
    }

    /// How many values were recorded.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(Counter::get).sum()
    }

    /// The sum of the values recorded.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.sum.get()
    }

    /// The value that `percent` (0 to 100) of the recorded values do not exceed, rounded up to
    /// the end of its bucket; 0 when nothing was recorded.
    #[must_use]
    pub fn percentile(&self, percent: f64) -> u64 {
        let counts: Vec<u64> = self.buckets.iter().map(Counter::get).collect();
        let total: u64 = counts.iter().sum();
        let mut seen = 0u64;
        for (index, count) in counts.iter().enumerate() {
            seen += count;
            #[expect(clippy::cast_precision_loss, reason = "a percentile is approximate anyway")]
            let reached = seen as f64 * 100.0 >= total as f64 * percent;
            if seen > 0 && reached {
                return bucket_end(index);
            }
        }
        0
    }
}

/// System calls that an IoThread makes, by kind.
#[derive(Debug, Default)]
pub struct Syscalls {
    /// `io_submit`.
    pub io_submit: Counter,
    /// `io_getevents`, made only where the completion ring cannot be read in userspace.
    pub io_getevents: Counter,
    /// `io_uring_enter`: submits, waits, or both.
    pub io_uring_enter: Counter,
    /// `epoll_wait`.
    pub epoll_wait: Counter,
    /// What adds to eventfds of others (calls to the driver): writes, or an `io_submit` each that
    /// `io_submit` does not count.
    pub eventfd_write: Counter,
}

/// What one kind of operation did.
#[derive(Debug, Default)]
pub struct OpStats {
    /// Operations that the kernel answered, errors included.
    pub ops: Counter,
    /// Bytes moved.
    pub bytes: Counter,
    /// Operations that failed.
    pub errors: Counter,
    /// Nanoseconds from submit to harvest. The clock is read once for each submit and harvest, so
    /// operations of one batch share their times.
    pub latency_ns: Histogram,
}

/// Everything that one IoThread counts.
#[derive(Debug, Default)]
pub struct Stats {
    /// Reads.
    pub read: OpStats,
    /// Writes.
    pub write: OpStats,
    /// Flushes.
    pub flush: OpStats,
    /// Discards and zeroing.
    pub deallocate: OpStats,
    /// Completions found by one harvest that found any.
    pub harvested_at_once: Histogram,
    /// Operations given to the kernel by one submit.
    pub submitted_at_once: Histogram,
    /// Requests whose memory had to be bounced.
    pub bounced: Counter,
    /// Submits that the kernel refused for lack of resources (EAGAIN).
    pub submit_again: Counter,
    /// Turns of the loop.
    pub turns: Counter,
    /// System calls.
    pub syscalls: Syscalls,
}

/// Nanoseconds of `duration`, saturating.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_contiguous_and_within_an_eighth() {
        let mut last = 0;
        for value in (0..5000).chain([1 << 20, (1 << 40) + 12345, u64::MAX - 1, u64::MAX]) {
            let index = bucket_of(value);
            assert!(index >= last, "bucket of {value} went back");
            last = index;
            let end = bucket_end(index);
            assert!(end >= value, "{value} lies beyond its bucket's end {end}");
            assert!(end - value <= value / 8, "{value} is put at {end}");
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_of_a_known_distribution() {
        let histogram = Histogram::default();
        assert_eq!(histogram.percentile(50.0), 0);
        for value in 1..=7 {
            histogram.record(value);
        }
        assert_eq!(histogram.count(), 7);
        assert_eq!(histogram.sum(), 28);
        assert_eq!(histogram.percentile(50.0), 4);
        assert_eq!(histogram.percentile(100.0), 7);
        assert_eq!(histogram.percentile(1.0), 1);
    }
}
