//! Limits on the requests of disks, and the token buckets that enforce them.
//!
//! A bucket is one number: the time at which it will be full again. A request moves that time
//! forward by its cost, and may begin when the bucket is not emptier than it can be. So a request
//! takes its place by one atomic operation, on any thread, and later requests get later times.
//! Requests larger than a bucket begin in their turn, and empty it for longer.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::error::Error;

/// The direction of a request, for limits and the treatment of errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Reads.
    Read,
    /// Everything else. Zeroes are writes of all their bytes, and discards of none.
    Write,
}

/// The limits of one disk, or of several together.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Requests per second.
    pub requests: Rates,
    /// Bytes per second.
    pub bytes: Rates,
    /// A request with more bytes counts as several: its bytes divided by this size. `None`: as one.
    pub request_bytes: Option<NonZeroU64>,
}

/// Rates for reads, for writes, and for both together. `None`: unlimited.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Rates {
    /// For all requests.
    pub total: Option<Rate>,
    /// For reads alone.
    pub read: Option<Rate>,
    /// For everything else, flushes excepted.
    pub write: Option<Rate>,
}

/// A rate, and the burst by which it may be exceeded after a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Units per second in the long run.
    pub per_second: u64,
    /// The rate in a burst. `None`: bursts of a tenth of a second.
    pub burst: Option<Burst>,
}

/// A burst: a higher rate, and its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Burst {
    /// Units per second.
    pub per_second: u64,
    /// Length in seconds.
    pub seconds: u64,
}

/// The highest rate, and the most units of a whole burst.
const RATE_MAX: u64 = 1_000_000_000_000_000;

impl Limits {
    /// Returns true if nothing is limited.
    pub fn are_none(&self) -> bool {
        [self.requests, self.bytes].iter().all(|rates| *rates == Rates::default())
    }

    /// Checks the numbers.
    ///
    /// # Errors
    ///
    /// If a number is out of its range, or meaningless without another.
    pub fn check(&self) -> Result<(), Error> {
        for (what, rates) in [("requests", self.requests), ("bytes", self.bytes)] {
            for rate in [rates.total, rates.read, rates.write].into_iter().flatten() {
                rate.check(what).map_err(Error::Options)?;
            }
        }
        if self.request_bytes.is_some() && self.requests == Rates::default() {
            let text = "iops-size needs a limit on requests (iops-total, iops-read or iops-write)";
            return Err(Error::Options(text.to_owned()));
        }
        Ok(())
    }
}

impl Rate {
    fn check(self, what: &str) -> Result<(), String> {
        let per_second = self.per_second;
        if !(1..=RATE_MAX).contains(&per_second) {
            return Err(format!(
                "a limit of {per_second} {what} per second is out of range: it must be 1 to 1e15"
            ));
        }
        let Some(Burst { per_second: burst, seconds }) = self.burst else { return Ok(()) };
        if burst < per_second || seconds == 0 {
            return Err(format!(
                "a burst of {burst} {what} per second for {seconds} s is too small: it must be at \
                 least the limit of {per_second}, for 1 s or more"
            ));
        }
        if burst.checked_mul(seconds).is_none_or(|whole| whole > RATE_MAX) {
            return Err(format!(
                "a burst of {burst} {what} per second for {seconds} s is too large: the product \
                 exceeds 1e15; choose a lower rate or a shorter burst"
            ));
        }
        Ok(())
    }
}

/// The unit of time of buckets: fine enough for a small request of a fast disk.
const TICKS_PER_NANOSECOND: u64 = 16;
const TICKS_PER_SECOND: u64 = 1_000_000_000 * TICKS_PER_NANOSECOND;

/// The buckets that enforce limits.
#[derive(Debug)]
pub(crate) struct Buckets {
    since: Instant,
    request_bytes: Option<NonZeroU64>,
    all: Vec<Bucket>,
}

#[derive(Debug)]
struct Bucket {
    counts_bytes: bool,
    /// `None` for both.
    direction: Option<Direction>,
    per_second: u64,
    /// The ticks to fill it from empty.
    depth: u64,
    /// The tick at which it is full, if no request takes anything.
    full_at: AtomicU64,
}

impl Buckets {
    /// Makes full buckets.
    pub(crate) fn new(limits: &Limits, now: Instant) -> Self {
        let mut all = Vec::new();
        for (counts_bytes, rates) in [(false, limits.requests), (true, limits.bytes)] {
            for (direction, rate) in [
                (None, rates.total),
                (Some(Direction::Read), rates.read),
                (Some(Direction::Write), rates.write),
            ] {
                let depths = rate.map(depths).unwrap_or_default().into_iter().flatten();
                all.extend(depths.map(|(per_second, depth)| Bucket {
                    counts_bytes,
                    direction,
                    per_second,
                    depth,
                    full_at: AtomicU64::new(0),
                }));
            }
        }
        Self { since: now, request_bytes: limits.request_bytes, all }
    }

    /// Takes the share of a request of this many bytes. Returns the time at which it may begin.
    pub(crate) fn take(&self, direction: Direction, bytes: u64, now: Instant) -> Instant {
        let now = self.ticks_at(now);
        let meant =
            self.all.iter().filter(|bucket| bucket.direction.is_none_or(|d| d == direction));
        let begins = meant.map(|bucket| bucket.take(self.cost(bucket, bytes), now)).max();
        self.since + Duration::from_nanos(begins.unwrap_or(0).div_ceil(TICKS_PER_NANOSECOND))
    }

    /// Gives back the share of a request that does not begin.
    pub(crate) fn give_back(&self, direction: Direction, bytes: u64) {
        for bucket in &*self.all {
            if bucket.direction.is_none_or(|d| d == direction) {
                bucket.give_back(self.cost(bucket, bytes));
            }
        }
    }

    /// Nanoseconds until each bucket is full, in an order that depends on the limits alone.
    pub(crate) fn debts(&self, now: Instant) -> Vec<u64> {
        let now = self.ticks_at(now);
        let until_full =
            |bucket: &Bucket| bucket.full_at.load(Ordering::Relaxed).saturating_sub(now);
        self.all.iter().map(|bucket| until_full(bucket).div_ceil(TICKS_PER_NANOSECOND)).collect()
    }

    /// Takes over the debts of buckets in another process, which had the same limits. A different
    /// number of debts belongs to different limits, and is ignored.
    pub(crate) fn set_debts(&self, debts: &[u64], now: Instant) {
        if debts.len() != self.all.len() {
            return;
        }
        let now = self.ticks_at(now);
        for (bucket, debt) in self.all.iter().zip(debts) {
            let full_at = now.saturating_add(debt.saturating_mul(TICKS_PER_NANOSECOND));
            bucket.full_at.fetch_max(full_at, Ordering::Relaxed);
        }
    }

    fn ticks_at(&self, now: Instant) -> u64 {
        let elapsed = now.saturating_duration_since(self.since).as_nanos();
        ticks(elapsed * u128::from(TICKS_PER_NANOSECOND))
    }

    fn cost(&self, bucket: &Bucket, bytes: u64) -> u64 {
        let (amount, unit) = match (bucket.counts_bytes, self.request_bytes) {
            (true, _) => (bytes, 1),
            (false, None) => (1, 1),
            (false, Some(size)) => (bytes.max(size.get()), size.get()),
        };
        let per_second = u128::from(bucket.per_second) * u128::from(unit);
        ticks(u128::from(amount) * u128::from(TICKS_PER_SECOND) / per_second)
    }
}

impl Bucket {
    fn take(&self, cost: u64, now: u64) -> u64 {
        let later = |full_at: u64| Some(full_at.max(now).saturating_add(cost));
        let before = self.full_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later);
        let before = before.unwrap_or_else(|same| same);
        before.saturating_sub(self.depth)
    }

    fn give_back(&self, cost: u64) {
        let earlier = |full_at: u64| Some(full_at.saturating_sub(cost));
        let _same = self.full_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, earlier);
    }
}

/// The buckets of a rate: the rate and the ticks to fill each. A burst of more than a second has
/// one bucket for its whole, and one for its rate.
fn depths(rate: Rate) -> [Option<(u64, u64)>; 2] {
    let tenth = TICKS_PER_SECOND / 10;
    let Some(Burst { per_second, seconds }) = rate.burst else {
        return [Some((rate.per_second, tenth)), None];
    };
    let whole = u128::from(per_second) * u128::from(seconds) * u128::from(TICKS_PER_SECOND);
    let depth = ticks(whole / u128::from(rate.per_second));
    [Some((rate.per_second, depth)), (seconds > 1).then_some((per_second, tenth))]
}

/// Saturates, far beyond the life of a process.
fn ticks(number: u128) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::Direction::{Read, Write};
    use super::*;

    const MILLISECOND: Duration = Duration::from_millis(1);

    #[test]
    fn requests_that_do_not_begin_take_nothing() {
        let start = Instant::now();
        let buckets = Buckets::new(&limit_requests(rate(10)), start);
        for _ in 0..100 {
            buckets.take(Read, 512, start);
            buckets.give_back(Read, 512);
        }
        let begins = [(); 3].map(|()| buckets.take(Read, 512, start) - start);
        assert_eq!(begins, [0, 0, 100].map(|count| count * MILLISECOND));
    }

    #[test]
    fn debts_continue_where_the_limits_are_the_same() {
        let start = Instant::now();
        let later = start + Duration::from_secs(3600);
        let bytes = Rates { read: Some(rate(1000)), ..Rates::default() };
        let limits = Limits { bytes, ..limit_requests(burst(10, 20, 5)) };
        let before = Buckets::new(&limits, start);
        for _ in 0..120 {
            before.take(Read, 1, later);
        }
        // A whole burst, 20 requests beyond it, and 120 bytes.
        let debts = before.debts(later);
        assert_eq!(debts, [12_000_000_000, 6_000_000_000, 120_000_000]);
        let after = Buckets::new(&limits, later);
        after.set_debts(&debts, later);
        assert_eq!(after.debts(later), debts);
        let next = |buckets: &Buckets| buckets.take(Read, 1, later) - later;
        assert_eq!(next(&after), next(&before));
        assert_eq!(before.debts(later + Duration::from_secs(60)), [0; 3]);
        let other = Buckets::new(&limit_requests(rate(10)), later);
        other.set_debts(&debts, later);
        assert_eq!(other.debts(later), [0]);
        // An absurd debt does not overflow, and a smaller one forgives nothing.
        after.set_debts(&[u64::MAX; 3], later);
        after.set_debts(&[0; 3], later);
        assert_eq!(after.debts(later)[0], u64::MAX.div_ceil(TICKS_PER_NANOSECOND));
    }

    fn rate(per_second: u64) -> Rate {
        Rate { per_second, burst: None }
    }

    fn burst(per_second: u64, most: u64, seconds: u64) -> Rate {
        Rate { per_second, burst: Some(Burst { per_second: most, seconds }) }
    }

    fn limit_requests(rate: Rate) -> Limits {
        let requests = Rates { total: Some(rate), ..Rates::default() };
        Limits { requests, ..Limits::default() }
    }

    /// The number of requests that begin until `end`, if each comes when the one before has begun,
    /// but is noticed only at full milliseconds.
    fn begun(buckets: &Buckets, start: Instant, end: Instant, bytes: u64) -> u64 {
        let (mut now, mut begun) = (start, 0);
        while now < end {
            let begins = buckets.take(Read, bytes, now);
            while now < begins {
                now += MILLISECOND;
            }
            begun += u64::from(now < end);
        }
        begun
    }

    #[test]
    fn a_rate_is_kept_to_two_in_a_hundred_over_ten_seconds() {
        let start = Instant::now();
        let seconds = |seconds| start + Duration::from_secs(seconds);
        for per_second in [7, 100, 3333, 50_000] {
            let buckets = Buckets::new(&limit_requests(rate(per_second)), start);
            let seen = begun(&buckets, start, seconds(10), 4096);
            let expected = 10 * per_second;
            assert!(seen.abs_diff(expected) * 50 <= expected.max(50), "{seen} of {expected}");
        }
        let bytes = Rates { total: Some(rate(10_000_000)), ..Rates::default() };
        let buckets = Buckets::new(&Limits { bytes, ..Limits::default() }, start);
        let seen = 4096 * begun(&buckets, start, seconds(10), 4096);
        assert!(seen.abs_diff(100_000_000) <= 2_000_000, "{seen}");
    }

    #[test]
    fn a_burst_is_as_fast_and_as_long_as_it_may_be() {
        let start = Instant::now();
        let second = |number| start + Duration::from_secs(number);
        let buckets = Buckets::new(&limit_requests(burst(100, 1000, 3)), start);
        let seen: Vec<u64> =
            (0..6).map(|at| begun(&buckets, second(at), second(at + 1), 512)).collect();
        // A tenth of a second comes at once in the first second, and 3000 are the whole burst.
        assert!(seen[0].abs_diff(1100) < 20 && seen[1].abs_diff(1000) < 20, "{seen:?}");
        assert!(seen[..4].iter().sum::<u64>().abs_diff(3400) < 40, "{seen:?}");
        assert!(seen[4..].iter().all(|number| number.abs_diff(100) < 3), "{seen:?}");
        // The burst may come again after a pause.
        let again = begun(&buckets, second(100), second(101), 512);
        assert!(again.abs_diff(1100) < 20, "{again}");
    }

    #[test]
    fn each_request_counts_where_it_is_meant() {
        let start = Instant::now();
        let only = |rates: Rates| Limits { requests: rates, ..Limits::default() };
        let reads = Buckets::new(&only(Rates { read: Some(rate(10)), ..Rates::default() }), start);
        let both = Buckets::new(&only(Rates { total: Some(rate(10)), ..Rates::default() }), start);
        for (buckets, other_waits) in [(&reads, false), (&both, true)] {
            while buckets.take(Read, 512, start) <= start {}
            assert_eq!(buckets.take(Write, 512, start) > start, other_waits);
        }
        let size = NonZeroU64::new(4096);
        let limits = Limits { request_bytes: size, ..limit_requests(rate(10)) };
        let large = Buckets::new(&limits, start);
        large.take(Read, 20 * 4096, start);
        let next = large.take(Read, 512, start) - start;
        assert_eq!(next, Duration::from_millis(1900), "20 requests, of which one is a burst");
    }

    /// A small request costs as much as one; a larger one costs more.
    #[test]
    fn a_request_costs_at_least_one() {
        let start = Instant::now();
        let limits = Limits { request_bytes: NonZeroU64::new(1 << 16), ..limit_requests(rate(10)) };
        for (bytes, expected) in [
            (0, [0, 0, 100]),
            (512, [0, 0, 100]),
            ((1 << 16) - 1, [0, 0, 100]),
            (1 << 16, [0, 0, 100]),
            (3 << 15, [0, 50, 200]),
            (1 << 17, [0, 100, 300]),
        ] {
            let buckets = Buckets::new(&limits, start);
            let begins = [(); 3].map(|()| buckets.take(Read, bytes, start) - start);
            assert_eq!(begins, expected.map(|count| count * MILLISECOND), "{bytes}");
        }
    }

    /// A place is reached at its time, even if more requests come later.
    #[test]
    fn places_are_in_the_order_in_which_they_were_taken() {
        let start = Instant::now();
        let buckets = Buckets::new(&limit_requests(rate(1000)), start);
        let places: Vec<Instant> = (0..300).map(|_| buckets.take(Write, 1, start)).collect();
        assert!(places.is_sorted());
        assert_eq!(places[299] - start, Duration::from_millis(199));
    }

    #[test]
    fn limits_that_mean_nothing_are_refused() {
        for (limits, is_good) in [
            (limit_requests(rate(1)), true),
            (limit_requests(rate(0)), false),
            (limit_requests(rate(RATE_MAX + 1)), false),
            (limit_requests(burst(100, 100, 1)), true),
            (limit_requests(burst(100, 99, 1)), false),
            (limit_requests(burst(100, 200, 0)), false),
            (limit_requests(burst(100, RATE_MAX, 2)), false),
            (Limits { request_bytes: NonZeroU64::new(1), ..Limits::default() }, false),
        ] {
            assert_eq!(limits.check().is_ok(), is_good, "{limits:?}");
        }
    }
}
