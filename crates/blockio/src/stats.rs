//! Counters and histograms with one writer each.
//!
//! The thread that owns a [`Stats`] adds to it with plain loads and stores, without atomic
//! read-modify-write. Any thread may read it at any time, and sees values that are at most a little
//! old.

mod slow;

use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::time::Duration;

use crate::clock::nanoseconds;
use crate::executor::sync::atomic::{AtomicU64, Ordering};
use iomem::fits;

#[doc(hidden)]
pub use slow::{Cause, SlowCauses};

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
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that one thread sets and any thread reads.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// Sets the number. Only the owning thread may call it.
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// The present number.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The largest of the numbers that one thread has noted since a reader last took it.
#[derive(Debug, Default)]
#[doc(hidden)]
pub struct Peak(AtomicU64);

impl Peak {
    /// Notes a number. Only the owning thread may call it. A number that comes while a reader takes
    /// the peak counts before or after it.
    #[inline]
    pub fn note(&self, value: u64) {
        if value > self.0.load(Ordering::Relaxed) {
            self.0.store(value, Ordering::Relaxed);
        }
    }

    /// Takes the peak: the next one begins at 0. Any thread may call it.
    #[must_use]
    pub fn take(&self) -> u64 {
        self.0.swap(0, Ordering::Relaxed)
    }
}

/// The number of buckets if a value keeps `bits` bits below its highest one.
const fn bucket_count(bits: u32) -> usize {
    (64 - bits as usize + 1) << bits
}

/// A distribution of whole numbers. Each is kept to within one part in `1 << BITS`, and exactly
/// below `2 << BITS`.
#[derive(Debug)]
pub struct Histogram<const BITS: u32> {
    buckets: Box<[Counter]>,
    sum: Counter,
}

/// Times of operations in nanoseconds, each to within 3%.
pub type Latencies = Histogram<5>;

/// Sizes of batches, exact below 256.
pub type Batches = Histogram<7>;

impl<const BITS: u32> Default for Histogram<BITS> {
    fn default() -> Self {
        let buckets = (0..bucket_count(BITS)).map(|_| Counter::default()).collect();
        Self { buckets, sum: Counter::default() }
    }
}

/// The bucket of `value`: exact below `1 << bits`, then that many for each power of two.
#[inline]
fn bucket_of(bits: u32, value: u64) -> usize {
    let value_log2 = 63 - (value | 1).leading_zeros();
    if value_log2 < bits {
        return fits(value, "a number of few bits");
    }
    let shift = value_log2 - bits;
    let group = u64::from(shift + 1) << bits;
    let index = group + ((value >> shift) & ((1 << bits) - 1));
    let index = fits(index, "the place of a bucket");
    debug_assert!(index < bucket_count(bits), "there is no bucket {index} for {value}");
    index
}

/// The largest value of a bucket.
fn bucket_end(bits: u32, index: usize) -> u64 {
    let index = index as u64;
    let sub_buckets = 1 << bits;
    if index < sub_buckets {
        return index;
    }
    let shift = (index >> bits) - 1;
    let start = (sub_buckets + (index & (sub_buckets - 1))) << shift;
    start + ((1 << shift) - 1)
}

impl<const BITS: u32> Histogram<BITS> {
    /// Counts `value` once. Only the owning thread may call it.
    #[inline]
    pub fn record(&self, value: u64) {
        self.buckets[bucket_of(BITS, value)].add(1);
        self.sum.add(value);
    }

    /// The number of recorded values.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(Counter::get).sum()
    }

    /// The sum of the values recorded.
    pub fn sum(&self) -> u64 {
        self.sum.get()
    }

    /// The value that `percent` (0 to 100) of the recorded values do not exceed, rounded up to the
    /// end of its bucket; 0 if nothing was recorded.
    pub fn percentile(&self, percent: f64) -> u64 {
        self.values().percentile(percent)
    }

    /// The values recorded so far.
    #[doc(hidden)]
    pub fn values(&self) -> Distribution {
        let counts = self.buckets.iter().map(Counter::get);
        let values = counts.enumerate().filter(|(_, count)| *count > 0);
        Distribution {
            counts: values.map(|(index, count)| (bucket_end(BITS, index), count)).collect(),
            sum: self.sum.get(),
        }
    }
}

/// The percentiles at which distributions of sizes of batches are shown.
#[doc(hidden)]
pub const SIZE_PERCENTILES: [f64; 11] =
    [1.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 99.99];

/// The content of a [`Histogram`] at some moment. Distributions of one type can be added and
/// subtracted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[doc(hidden)]
pub struct Distribution {
    /// The end of each bucket, and its number of hits.
    counts: BTreeMap<u64, u64>,
    sum: u64,
}

impl Distribution {
    /// The number of values.
    pub fn count(&self) -> u64 {
        self.counts.values().sum()
    }

    /// The exact sum of the values.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// The smallest and the largest value, each at the end of its bucket.
    pub fn bounds(&self) -> Option<(u64, u64)> {
        Some((*self.counts.first_key_value()?.0, *self.counts.last_key_value()?.0))
    }

    /// The ends of buckets in ascending order, each with its number of hits.
    pub fn counts(&self) -> impl Iterator<Item = (u64, u64)> {
        self.counts.iter().map(|(value, count)| (*value, *count))
    }

    /// The value that `percent` (0 to 100) of the values do not exceed, rounded up to the end of
    /// its bucket; 0 if there are none.
    pub fn percentile(&self, percent: f64) -> u64 {
        let total = self.count();
        let mut seen = 0u64;
        for (value, count) in &self.counts {
            seen += count;
            #[expect(clippy::cast_precision_loss, reason = "a percentile is approximate anyway")]
            let reached = seen as f64 * 100.0 >= total as f64 * percent;
            if reached {
                return *value;
            }
        }
        0
    }

    /// Adds the content of another histogram.
    pub fn add(&mut self, other: &Self) {
        for (value, count) in &other.counts {
            *self.counts.entry(*value).or_default() += count;
        }
        self.sum = self.sum.wrapping_add(other.sum);
    }

    /// The values that the same histogram has recorded since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut counts = self.counts.clone();
        for (value, count) in &earlier.counts {
            if let Some(mine) = counts.get_mut(value) {
                *mine = mine.saturating_sub(*count);
            }
        }
        counts.retain(|_, count| *count > 0);
        Self { counts, sum: self.sum.wrapping_sub(earlier.sum) }
    }
}

/// System calls that an IoThread makes, by kind.
#[derive(Debug, Default)]
pub struct Syscalls {
    /// `io_submit`.
    pub io_submit: Counter,
    /// `io_getevents`, made only if the completion ring cannot be read in userspace.
    pub io_getevents: Counter,
    /// `io_uring_enter`: submits, waits, or both.
    pub io_uring_enter: Counter,
    /// `epoll_wait`.
    pub epoll_wait: Counter,
    /// Additions to eventfds of peers (calls to the driver): writes, or an `io_submit` each that
    /// `io_submit` does not count.
    pub eventfd_write: Counter,
}

/// The counters of one kind of operation.
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
    pub latency_ns: Latencies,
}

/// The use of a budget of memory.
#[derive(Debug, Default)]
pub struct BudgetStats {
    /// Bytes that are in use.
    pub bytes: Gauge,
    /// The most bytes that were in use at once.
    pub bytes_most: Gauge,
    /// Times that work had to wait for a part of it.
    pub waits: Counter,
    /// Times that the system had no memory for a part of it: requests failed with `ENOMEM`.
    pub failed: Counter,
}

/// The counters of one IoThread.
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
    pub harvested_at_once: Batches,
    /// Foreign operations found complete by one harvest that found any.
    pub foreign_at_once: Batches,
    /// Times that another thread had to wake the loop, for the result of an operation or another
    /// post.
    pub woken: Counter,
    /// Operations given to the kernel by one submit.
    pub submitted_at_once: Batches,
    /// Requests whose memory had to be bounced.
    pub bounced: Counter,
    /// The memory for data that devices cannot take as it is (see
    /// [`BounceConfig`](crate::config::BounceConfig)). Pieces wait for it.
    pub bounce: BudgetStats,
    /// Long lists of buffers, of unanswered requests. Sources count them, and leave work in their
    /// rings at the limit of the IoThread.
    pub lists: BudgetStats,
    /// Reads and writes whose completions were polled for.
    pub polled: Counter,
    /// Nanoseconds of busy-polling that ended with an event.
    pub poll_useful_ns: Counter,
    /// Nanoseconds of busy-polling that ended with a sleep.
    pub poll_useless_ns: Counter,
    /// The id of the thread; 0 before its first turn.
    pub(crate) thread_id: Gauge,
    /// Submits that the kernel refused for lack of resources (EAGAIN).
    pub submit_again: Counter,
    /// Operations that the kernel did not answer for 5 seconds. The loop checks for them each
    /// second while it turns.
    pub late: Counter,
    /// 1 while the loop sleeps and waits for no operation. If it is 0 and [`turns`](Self::turns)
    /// does not change, wake the loop now and then: it reports disks that do not answer.
    pub is_idle: Gauge,
    /// Turns of the loop.
    pub turns: Counter,
    /// Rounds of the loop: each runs all tasks that are ready.
    pub rounds: Counter,
    /// System calls.
    pub syscalls: Syscalls,
    /// The causes of slow requests.
    pub slow: SlowCauses,
    /// The descriptor of the present submit plus one; 0 if there is none.
    submit: Gauge,
}

impl Stats {
    /// Notes the begin of a submit for this file alone, which may wait for it.
    #[inline]
    pub(crate) fn submit_begins(&self, fd: RawFd) {
        self.submit.set(u64::from((fd + 1).unsigned_abs()));
    }

    /// Notes the end of the submit.
    #[inline]
    pub(crate) fn submit_ends(&self) {
        self.submit.set(0);
    }

    /// The ops of all kinds that were answered.
    pub(crate) fn ops(&self) -> u64 {
        [&self.read, &self.write, &self.flush, &self.deallocate]
            .map(|kind| kind.ops.get())
            .iter()
            .sum()
    }

    /// Counts a time of busy-polling that has `found` an event or nothing.
    #[inline]
    pub(crate) fn record_poll(&self, time: Duration, found: bool) {
        let counter = if found { &self.poll_useful_ns } else { &self.poll_useless_ns };
        counter.add(nanoseconds(time));
    }

    /// The CPU time of the thread in nanoseconds, and the time for which it was ready and waited
    /// for a CPU. `None` if the thread has ended, or the kernel does not count them.
    pub fn cpu_times(&self) -> Option<(u64, u64)> {
        let path = format!("/proc/self/task/{}/schedstat", self.thread_id.get());
        let text = std::fs::read_to_string(path).ok()?;
        let mut numbers = text.split_ascii_whitespace().map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    }

    /// Counts a submit with its operations.
    #[inline]
    pub(crate) fn count_submit(&self, count: u64) {
        probe::probe!(ringhaul, submit, count);
        self.submitted_at_once.record(count);
    }

    /// Counts a harvest with the completions that it has found.
    #[inline]
    pub(crate) fn count_harvest(&self, found: u64) {
        probe::probe!(ringhaul, harvest, found);
        self.harvested_at_once.record(found);
    }

    /// The CPUs that the thread may run on, such as `0-3,8`. `None` if the thread has ended.
    pub fn allowed_cpus(&self) -> Option<String> {
        let path = format!("/proc/self/task/{}/status", self.thread_id.get());
        let text = std::fs::read_to_string(path).ok()?;
        let cpus = text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        Some(cpus.trim().to_owned())
    }

    /// The file of the present submit: if the loop no longer turns, it waits for this file. `None`
    /// if there is no submit, or its engine has one for all files.
    pub fn submits_to(&self) -> Option<PathBuf> {
        let descriptor = self.submit.get();
        let path = format!("/proc/self/fd/{}", descriptor.checked_sub(1)?);
        let file = std::fs::read_link(path).ok()?;
        // During the submit, the descriptor stays that of the file.
        (self.submit.get() == descriptor).then_some(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_contiguous_and_as_narrow_as_said() {
        for bits in [3, 5, 7] {
            let mut last = 0;
            for value in (0..5000).chain([1 << 20, (1 << 40) + 12345, u64::MAX - 1, u64::MAX]) {
                let index = bucket_of(bits, value);
                assert!(index >= last, "bucket of {value} went back");
                last = index;
                let end = bucket_end(bits, index);
                assert!(end >= value, "{value} lies beyond its bucket's end {end}");
                assert!(end - value <= value >> bits, "{value} is put at {end}");
                assert!(value >= 2 << bits || end == value, "{value} is not exact but {end}");
            }
            assert_eq!(bucket_of(bits, u64::MAX), bucket_count(bits) - 1);
        }
    }

    #[test]
    fn polling_counts_by_its_outcome() {
        let stats = Stats::default();
        for (time, found) in [(3, true), (5, false), (7, true)] {
            stats.record_poll(Duration::from_nanos(time), found);
        }
        assert_eq!([&stats.poll_useful_ns, &stats.poll_useless_ns].map(Counter::get), [10, 5]);
    }

    #[test]
    fn percentiles_of_a_known_distribution() {
        let histogram = Batches::default();
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

    #[test]
    fn distributions_are_added_and_taken_from_each_other() {
        let histogram = Batches::default();
        [128, 1].iter().for_each(|value| histogram.record(*value));
        let earlier = histogram.values();
        [128, 16, 16].iter().for_each(|value| histogram.record(*value));
        let mut since = histogram.values().since(&earlier);
        assert_eq!(since.counts().collect::<Vec<_>>(), [(16, 2), (128, 1)]);
        assert_eq!((since.count(), since.sum(), since.bounds()), (3, 160, Some((16, 128))));
        since.add(&earlier);
        assert_eq!(since, histogram.values());
        assert_eq!(Distribution::default().bounds(), None);
    }
}
