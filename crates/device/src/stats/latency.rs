//! A histogram of latencies with bounds of a factor of 2, from 4.1 µs to 17 s.

use std::array;
use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use blockio::stats::Counter;
use serde::{Deserialize, Serialize};

/// The number of finite bounds. Another bucket holds longer latencies.
pub const LATENCY_BOUNDS: usize = 23;

const BUCKETS: usize = LATENCY_BOUNDS + 1;

/// The logarithm of the first bound in nanoseconds: a power of two costs three instructions less
/// than 4 µs.
const FIRST_BOUND_LOG2: usize = 12;

/// The buckets that the writer distinguishes: one for each logarithm, so that it neither limits the
/// index nor checks it.
const RECORDED: usize = u64::BITS as usize;

/// The bound of bucket `index` in nanoseconds. A latency of just the bound is in the next bucket.
///
/// # Panics
///
/// Panics if `index` is not below [`LATENCY_BOUNDS`].
pub const fn latency_bound_ns(index: usize) -> u64 {
    assert!(index < LATENCY_BOUNDS, "the last bucket has no bound");
    1 << (FIRST_BOUND_LOG2 + index)
}

#[inline]
fn log2_of(ns: u64) -> usize {
    // Without the lowest bit, the logarithm of 0 would be a case of its own.
    (ns | 1).ilog2() as usize
}

/// The bucket of readers for latencies with this logarithm.
fn bucket_of_log2(log2: usize) -> usize {
    (log2 + 1).saturating_sub(FIRST_BOUND_LOG2).min(BUCKETS - 1)
}

/// A histogram of latencies. One thread writes it and any thread reads it.
#[derive(Debug)]
pub struct LatencyStats {
    by_log2: [Counter; RECORDED],
    sum_ns: Counter,
    /// A latency above this is the longest so far, or slow. One comparison serves both.
    notable_ns: AtomicU64,
    longest_ns: AtomicU64,
    /// The least slow latency; the largest number if none is slow.
    slow_ns: AtomicU64,
}

impl Default for LatencyStats {
    fn default() -> Self {
        Self {
            by_log2: array::from_fn(|_| Counter::default()),
            sum_ns: Counter::default(),
            notable_ns: AtomicU64::new(0),
            longest_ns: AtomicU64::new(0),
            slow_ns: AtomicU64::new(u64::MAX),
        }
    }
}

impl LatencyStats {
    /// Counts a latency. Returns true if it is slow. Only the owning thread may call it.
    #[inline]
    pub fn record(&self, ns: u64) -> bool {
        self.by_log2[log2_of(ns)].add(1);
        self.sum_ns.add(ns);
        ns > self.notable_ns.load(Ordering::Relaxed) && self.note(ns)
    }

    #[cold]
    fn note(&self, ns: u64) -> bool {
        let slow_ns = self.slow_ns.load(Ordering::Relaxed);
        let longest_ns = self.longest_ns.load(Ordering::SeqCst).max(ns);
        self.longest_ns.store(longest_ns, Ordering::SeqCst);
        self.notable_ns.store(longest_ns.min(slow_ns - 1), Ordering::SeqCst);
        // A reader may have taken the longest one in between.
        if self.longest_ns.load(Ordering::SeqCst) != longest_ns {
            self.notable_ns.store(0, Ordering::SeqCst);
        }
        ns >= slow_ns
    }

    /// Takes the longest latency in nanoseconds: the next one begins at 0. Any thread may call it.
    /// A latency that comes at the same time counts before or after it.
    #[must_use]
    pub(super) fn take_longest_ns(&self) -> u64 {
        let longest_ns = self.longest_ns.swap(0, Ordering::SeqCst);
        self.notable_ns.store(0, Ordering::SeqCst);
        longest_ns
    }

    /// Latencies from this one on are slow.
    pub(super) fn set_slow(&self, slow: Duration) {
        let slow_ns = u64::try_from(slow.as_nanos()).unwrap_or(u64::MAX).max(1);
        self.slow_ns.store(slow_ns, Ordering::Relaxed);
        self.notable_ns.store(0, Ordering::SeqCst);
    }

    /// The latencies so far.
    pub fn values(&self) -> Latency {
        let mut buckets = [0; BUCKETS];
        for (log2, counter) in self.by_log2.iter().enumerate() {
            buckets[bucket_of_log2(log2)] += counter.get();
        }
        Latency { buckets, sum_ns: self.sum_ns.get() }
    }
}

/// The content of [`LatencyStats`] at one moment.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Latency {
    buckets: [u64; BUCKETS],
    sum_ns: u64,
}

impl Latency {
    /// The number of latencies.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The sum of all latencies in nanoseconds.
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// The number of latencies in each bucket. The last bucket has no [bound](latency_bound_ns).
    pub fn buckets(&self) -> &[u64; LATENCY_BOUNDS + 1] {
        &self.buckets
    }
}

impl AddAssign for Latency {
    fn add_assign(&mut self, other: Self) {
        for (sum, more) in self.buckets.iter_mut().zip(other.buckets) {
            *sum += more;
        }
        self.sum_ns = self.sum_ns.wrapping_add(other.sum_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_ends_before_its_bound() {
        let bucket_of = |ns: u64| {
            let stats = LatencyStats::default();
            stats.record(ns);
            stats.values().buckets().iter().position(|count| *count == 1).unwrap()
        };
        assert_eq!((bucket_of(0), bucket_of(1)), (0, 0));
        for index in 0..LATENCY_BOUNDS {
            let bound = latency_bound_ns(index);
            assert_eq!((bucket_of(bound - 1), bucket_of(bound)), (index, index + 1), "{bound}");
        }
        assert_eq!([0, 22].map(latency_bound_ns), [4_096, 17_179_869_184]);
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn latencies_have_their_sum_their_count_and_the_longest_since_the_last_reading() {
        let stats = LatencyStats::default();
        let is_slow = [3_000, 5_000, 20_000_000_000, 0].map(|ns| stats.record(ns));
        assert_eq!(is_slow, [false; 4]);
        let mut latency = stats.values();
        assert_eq!((latency.count(), latency.sum_ns()), (4, 20_000_008_000));
        assert_eq!(latency.buckets()[..2], [2, 1]);
        assert_eq!(latency.buckets()[LATENCY_BOUNDS], 1);
        assert_eq!(stats.take_longest_ns(), 20_000_000_000);
        stats.record(9);
        assert_eq!(stats.take_longest_ns(), 9);
        latency += stats.values();
        assert_eq!((latency.count(), latency.sum_ns()), (9, 40_000_016_009));
    }

    #[test]
    fn every_slow_latency_is_told_and_the_longest_is_kept() {
        let stats = LatencyStats::default();
        stats.record(50);
        stats.set_slow(Duration::from_nanos(100));
        for (ns, is_slow) in [(99, false), (100, true), (100, true), (7, false), (300, true)] {
            assert_eq!(stats.record(ns), is_slow, "{ns}");
        }
        assert!(stats.record(200), "also below the longest one");
        assert_eq!(stats.take_longest_ns(), 300);
        assert!(!stats.record(99) && stats.record(150));
        assert_eq!(stats.take_longest_ns(), 150);
    }
}
