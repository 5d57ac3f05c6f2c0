//! The CPU time that busy-polling may add to an op.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// The least time of a span: reading the thread's CPU time is a system call.
const SPAN_MIN: Duration = Duration::from_millis(2);

/// The fewest ops of a span that is not long.
const SPAN_OPS: u64 = 32;

/// A long span ends with any op. Without one it does not count.
const SPAN_MAX: Duration = Duration::from_millis(200);

/// One of this many spans has frugal polling, to measure the CPU time of its ops.
const SPANS_BETWEEN: u32 = 32;

/// The most CPU time in nanoseconds that later spans receive from earlier ones: a new load is to be
/// noticed soon.
const BALANCE_MAX: i64 = 4_000_000;

/// The unit of a sum of ops is this fraction of an op: the sum is halved many times.
const FRACTION: i64 = 1024;

/// The percentage that sets no bound.
const PERCENT_MAX: u32 = 100;

/// Keeps the CPU time of an op within a percentage of the CPU time that it takes with frugal
/// polling. Both are measured on this machine under the present load, in spans of time: a span may
/// poll for latency, or has spent the budget.
pub(super) struct PollBudget {
    percent: Cell<u32>,
    is_spent: Cell<bool>,
    spans: Cell<u32>,
    /// The time at which the span may end.
    due: Cell<Instant>,
    /// The ops completed before this span.
    ops: Cell<u64>,
    /// The thread's CPU time before this span.
    cpu: Cell<Duration>,
    /// The CPU time in nanoseconds and the fractions of ops of recent spans with frugal polling.
    /// Each span halves the weight of the earlier ones.
    frugal: Cell<[i64; 2]>,
    /// The nanoseconds that are left of the budget.
    balance_ns: Cell<i64>,
}

impl PollBudget {
    /// Makes a budget of `percent`, 0 to 100, that is not spent yet.
    pub(super) fn new(percent: u32, now: Instant) -> Self {
        Self {
            percent: Cell::new(percent),
            is_spent: Cell::new(false),
            spans: Cell::new(0),
            due: Cell::new(now + SPAN_MIN),
            ops: Cell::new(0),
            cpu: Cell::new(Duration::ZERO),
            frugal: Cell::new([0; 2]),
            balance_ns: Cell::new(0),
        }
    }

    pub(super) fn set_percent(&self, percent: u32) {
        self.percent.set(percent);
        self.is_spent.set(false);
        self.balance_ns.set(0);
        // The present span never has enough ops, so the next one begins.
        self.ops.set(u64::MAX);
    }

    /// Returns true if only frugal polling is allowed.
    #[inline]
    pub(super) fn is_spent(&self) -> bool {
        self.is_spent.get()
    }

    /// Returns true if the span may end.
    #[inline]
    pub(super) fn is_due(&self, now: Instant) -> bool {
        now >= self.due.get() && self.percent.get() < PERCENT_MAX
    }

    /// Ends the span if it had enough ops, and chooses the kind of the next one. `ops` have
    /// completed so far, and `cpu` returns the CPU time that the thread has taken.
    #[cold]
    pub(super) fn review(&self, now: Instant, ops: u64, cpu: impl FnOnce() -> Duration) {
        let done = ops.saturating_sub(self.ops.get());
        let is_long = now.saturating_duration_since(self.due.get()) > SPAN_MAX;
        if done < SPAN_OPS && !is_long {
            return;
        }
        self.due.set(now + SPAN_MIN);
        self.ops.set(ops);
        let cpu = cpu();
        let taken = nanoseconds(cpu.saturating_sub(self.cpu.replace(cpu)));
        if done == 0 {
            self.is_spent.set(false);
            return;
        }
        let done = i64::from(u32::try_from(done).unwrap_or(u32::MAX));
        if self.is_spent.get() {
            let [frugal_ns, frugal_ops] = self.frugal.get();
            self.frugal.set([frugal_ns / 2 + taken, frugal_ops / 2 + done * FRACTION]);
        }
        let [frugal_ns, frugal_ops] = self.frugal.get();
        if frugal_ops > 0 {
            let frugal =
                i128::from(frugal_ns) * i128::from(done * FRACTION) / i128::from(frugal_ops);
            let allowed = frugal * i128::from(100 + self.percent.get()) / 100;
            let allowed = i64::try_from(allowed).unwrap_or(i64::MAX);
            let balance = self.balance_ns.get().saturating_add(allowed).saturating_sub(taken);
            // A span with polling begins with a balance that is not negative.
            self.balance_ns.set(balance.min(BALANCE_MAX));
        }
        let spans = self.spans.get().wrapping_add(1);
        self.spans.set(spans);
        self.is_spent.set(self.balance_ns.get() < 0 || spans % SPANS_BETWEEN == 1);
    }
}

fn nanoseconds(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread whose ops take these microseconds of CPU time: with polling for latency, and with
    /// frugal polling.
    struct Load {
        budget: PollBudget,
        now: Instant,
        ops: u64,
        cpu: Duration,
    }

    impl Load {
        fn new(percent: u32) -> Self {
            let now = Instant::now();
            Self { budget: PollBudget::new(percent, now), now, ops: 0, cpu: Duration::ZERO }
        }

        /// Runs ops of 50 microseconds each. Returns the mean CPU time in microseconds, and the
        /// percentage of ops with polling for latency.
        fn run(&mut self, micros: [u64; 2], ops: u64) -> (f64, f64) {
            self.run_each(Duration::from_micros(50), micros, ops)
        }

        fn run_each(&mut self, time: Duration, micros: [u64; 2], ops: u64) -> (f64, f64) {
            let (mut polled, before) = (0, self.cpu);
            for _ in 0..ops {
                let is_spent = self.budget.is_spent();
                polled += u64::from(!is_spent);
                self.cpu += Duration::from_micros(micros[usize::from(is_spent)]);
                self.now += time;
                self.ops += 1;
                self.review();
            }
            let cpu = (self.cpu - before).as_secs_f64() * 1e6 / ops as f64;
            (cpu, polled as f64 * 100.0 / ops as f64)
        }

        fn review(&self) {
            if self.budget.is_due(self.now) {
                self.budget.review(self.now, self.ops, || self.cpu);
            }
        }
    }

    #[test]
    fn polling_adds_at_most_its_percentage() {
        for (percent, micros, polled) in [
            (15, [30, 20], 25.0..=33.0),
            (50, [30, 20], 94.0..=98.0),
            (15, [22, 20], 94.0..=98.0),
            (15, [10, 20], 94.0..=98.0),
            (1, [40, 20], 0.5..=3.0),
            (0, [40, 20], 0.0..=0.5),
        ] {
            let mut load = Load::new(percent);
            load.run(micros, 20_000);
            let (cpu, share) = load.run(micros, 200_000);
            let most = micros[1] as f64 * f64::from(100 + percent) / 100.0;
            assert!(cpu <= most + 0.1, "{percent}% {micros:?}: {cpu} us");
            assert!(polled.contains(&share), "{percent}% {micros:?}: {share}% polled");
        }
    }

    #[test]
    fn a_new_load_is_noticed() {
        let mut load = Load::new(15);
        let (cheap, costly) = ([10, 20], [60, 20]);
        load.run(cheap, 100_000);
        // The polling that was saved pays for four milliseconds.
        let (_, polled) = load.run(costly, 2000);
        assert!((5.0..15.0).contains(&polled), "{polled}%");
        let (_, polled) = load.run(cheap, 20_000);
        assert!(polled > 90.0, "{polled}%");
        // Cheaper ops: the mean of the earlier ones lasts for a few frugal spans.
        load.run([6, 2], 20_000);
        let (cpu, _) = load.run([6, 2], 100_000);
        assert!(cpu < 2.35, "{cpu} us");
    }

    #[test]
    fn an_idle_time_counts_for_no_op() {
        let mut load = Load::new(15);
        load.run([30, 20], 20_000);
        let frugal = load.budget.frugal.get();
        for _ in 0..100 {
            load.budget.is_spent.set(true);
            load.cpu += Duration::from_millis(50);
            load.now += SPAN_MIN + SPAN_MAX + Duration::from_millis(1);
            let balance = load.budget.balance_ns.get();
            load.review();
            assert_eq!(load.budget.balance_ns.get(), balance);
            assert!(!load.budget.is_spent(), "the next op may be polled for");
        }
        assert_eq!(load.budget.frugal.get(), frugal);
        // A span with few ops continues while it is not too long.
        let due = load.budget.due.get();
        load.now = due + SPAN_MAX;
        load.ops += SPAN_OPS - 1;
        load.budget.review(load.now, load.ops, || unreachable!("a system call for each wait"));
        assert_eq!(load.budget.due.get(), due);
    }

    /// Spans with many cheap ops alternate with spans with few costly ones.
    #[test]
    fn an_op_counts_alike_in_each_span() {
        let mut load = Load::new(10);
        let mut taken = [Duration::ZERO; 2];
        for round in 0..4000 {
            let before = load.cpu;
            load.run([5, 5], 1000);
            load.run([114, 50], 40);
            if round >= 100 {
                taken[0] += load.cpu - before;
                taken[1] += Duration::from_micros(5 * 1000 + 50 * 40);
            }
        }
        let [taken, frugal] = taken.map(|time| time.as_secs_f64());
        assert!(taken < 1.15 * frugal, "{taken} s instead of {frugal} s");
    }

    /// A thread with much work does not poll, and its ops may be larger ones.
    #[test]
    fn work_without_polling_spends_little_of_the_budget() {
        let mut load = Load::new(10);
        load.run([30, 20], 20_000);
        load.run([50, 50], 200_000);
        load.run([30, 20], 4_000);
        let (_, polled) = load.run([30, 20], 20_000);
        assert!(polled > 15.0, "{polled}%");
    }

    /// A long wait is polled for in each op of a span.
    #[test]
    fn no_excess_of_a_span_is_forgiven() {
        let mut load = Load::new(10);
        load.run([10_000, 20], 10_000);
        let (cpu, _) = load.run([10_000, 20], 100_000);
        assert!(cpu < 25.0, "{cpu} us");
    }

    /// Long polling for few ops would take a whole CPU.
    #[test]
    fn a_slow_load_has_a_budget_too() {
        let mut load = Load::new(10);
        let slow = Duration::from_millis(20);
        load.run_each(slow, [10_000, 20], 100_000);
        let (cpu, _) = load.run_each(slow, [10_000, 20], 100_000);
        assert!(cpu < 25.0, "{cpu} us");
    }

    #[test]
    fn a_hundred_percent_is_no_bound() {
        let mut load = Load::new(100);
        assert_eq!(load.run([1000, 1], 10_000).1, 100.0);
        load.budget.set_percent(15);
        load.run([1000, 1], 10_000);
        assert!(load.budget.is_spent());
        load.budget.set_percent(100);
        assert_eq!(load.run([1000, 1], 100_000).1, 100.0);
        // The time without a bound is forgotten.
        load.budget.set_percent(15);
        load.run([30, 20], 20_000);
        let (_, polled) = load.run([30, 20], 20_000);
        assert!(polled > 20.0, "{polled}%");
    }
}
