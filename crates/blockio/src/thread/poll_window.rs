//! The time for which a loop busy-polls before it sleeps.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use crate::clock;
use crate::file::ab_test::{AbTest, Step};
use crate::thread::poll_budget::PollBudget;

/// The first window, when polling for sources might pay.
const WINDOW_MIN: Duration = Duration::from_micros(4);

/// The waits until a disk that was not worth polling is tried again. The number doubles, up to the
/// maximum, with each try that fails. A try takes about half of a wait.
const WAITS_MIN: u32 = 32;
const WAITS_MAX: u32 = 64;

/// The price of a microsecond of CPU time in microseconds of latency, as a fraction. At 1 the
/// server took 1.2 times the CPU time for a file, at 2 it lost a third of the IOPS of a loop
/// device.
const PRICE: [u32; 2] = [3, 2];

/// The cost of a sleep is measured in one of this many sleeps: that takes two system calls.
const SLEEPS_BETWEEN: u32 = 32;

/// Foreign ops in each span of a trial of polling beside them.
const SPAN_OPS: usize = 256;

/// Foreign ops for which the outcome holds.
const PERIOD_OPS: usize = 64 * SPAN_OPS;

/// Sleeps without a foreign op after which no library seems to need the CPU.
const SLEEPS_UNTIL_ALONE: u32 = 256;

/// The kind of event that the loop waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Awaited {
    /// No op is in flight: the peers of the sources have the next turn.
    Source,
    /// Ops are in the kernel, foreign or remote, and a source may have work as well.
    Op,
    /// Ops of many bytes are in the kernel. The disk works on while the loop wakes up, so a sleep
    /// costs no throughput, and busy-polling would only take CPU time.
    ManyBytes,
}

impl Awaited {
    /// Makes the kind from the number of ops; `many_bytes`: they are large.
    #[inline]
    pub(crate) fn new(ops: usize, many_bytes: bool) -> Self {
        match ops {
            0 => Self::Source,
            _ if many_bytes => Self::ManyBytes,
            _ => Self::Op,
        }
    }
}

/// A wait that ends in a sleep.
pub(crate) struct Sleep {
    awaited: Awaited,
    /// The start of the wait, polling included.
    since: Instant,
    /// The thread's CPU time when the sleep began, if the sleep is measured.
    cpu: Option<Duration>,
}

/// The time of busy-polling for each kind of wait, within a budget. The peer of a source that was
/// called comes after its wake-up; a disk answers at any time.
pub(crate) struct PollWindow {
    sources: SourceWindow,
    foreign: ForeignTrial,
    disk: LatencyAccount,
    budget: PollBudget,
    /// The accounts for sources and ops while the budget is spent. No latency enters them: the loop
    /// polls only if that takes less CPU time than a sleep.
    frugal: [LatencyAccount; 2],
    /// Operations of servers in flight, without foreign ops.
    remote_ops: Cell<usize>,
    /// Foreign and remote ops that have completed.
    server_ops: Cell<u64>,
}

/// A time that grows while events come soon after the loop has run out of work, and shrinks when
/// they come late: a loop that waits for long sleeps at once.
struct SourceWindow {
    window: Cell<Duration>,
    max: Cell<Duration>,
}

/// The decision to poll for sources while threads of another library, or a server, complete ops.
/// These threads, the peers of the sources and a server on this machine may need the CPU that
/// polling takes. Nothing here can see that, so both ways are tried. A remote op counts as a
/// foreign one.
struct ForeignTrial {
    /// The comparison of sleeping (first) with polling (second). `None` without foreign ops.
    trial: RefCell<Option<AbTest>>,
    is_shut: Cell<bool>,
    /// Sleeps since the last foreign op.
    sleeps: Cell<u32>,
}

/// An account of latency. Its income is the saving of polling: the latency that a sleep adds to the
/// wait, and the price of the CPU time that the sleep would have cost. Its expense is the price of
/// the CPU time that polling takes. The loop polls while the balance is positive.
struct LatencyAccount {
    max: Cell<Duration>,
    /// A recent mean of the length of waits with a sleep, wake-up included.
    asleep: Cell<Duration>,
    /// A recent mean of the CPU time of this thread that a sleep takes.
    sleep_cost: Cell<Duration>,
    balance: Cell<Duration>,
    /// Waits until the next try, if the balance is zero.
    waits: Cell<u32>,
    /// Waits from a try that fails to the next.
    between: Cell<u32>,
    sleeps: Cell<u32>,
}

impl PollWindow {
    /// Makes windows of at most `max` (zero: no busy-polling at all) that add at most
    /// `budget_percent` to the CPU time of an op.
    pub(crate) fn new(max: Duration, budget_percent: u32, now: Instant) -> Self {
        let sources = SourceWindow { window: Cell::default(), max: Cell::new(max) };
        let foreign = ForeignTrial {
            trial: RefCell::default(),
            is_shut: Cell::new(false),
            sleeps: Cell::new(0),
        };
        let [disk, for_sources, for_ops] = std::array::from_fn(|_| LatencyAccount::new(max));
        let frugal = [for_sources, for_ops];
        let budget = PollBudget::new(budget_percent, now);
        let (remote_ops, server_ops) = Default::default();
        Self { sources, foreign, disk, budget, frugal, remote_ops, server_ops }
    }

    /// Sets the longest window and the budget from now on.
    pub(crate) fn set_limits(&self, max: Duration, budget_percent: u32) {
        self.budget.set_percent(budget_percent);
        let Self { sources, disk, frugal, .. } = self;
        sources.max.set(max);
        sources.window.set(sources.window.get().min(max));
        frugal.iter().chain([disk]).for_each(|account| account.set_max(max));
    }

    /// Compares the CPU time of the ops with the budget. `ops` returns the ops that the kernel has
    /// completed so far. Called between polling and sleeping: a turn sees one state of the budget.
    #[inline]
    pub(crate) fn review_budget(&self, now: Instant, ops: impl FnOnce() -> u64) {
        if self.budget.is_due(now) {
            self.budget.review(now, ops() + self.server_ops.get(), clock::thread_cpu);
        }
    }

    /// The account that decides on polling; `None` for sources within the budget.
    fn account(&self, awaited: Awaited) -> Option<&LatencyAccount> {
        let [for_sources, for_ops] = &self.frugal;
        match (awaited, self.budget.is_spent()) {
            (Awaited::Source, false) => None,
            (Awaited::Source, true) => Some(for_sources),
            (Awaited::Op | Awaited::ManyBytes, false) => Some(&self.disk),
            (Awaited::Op | Awaited::ManyBytes, true) => Some(for_ops),
        }
    }

    /// Returns true if the loop sleeps without polling.
    pub(crate) fn is_closed(&self, awaited: Awaited) -> bool {
        self.window(awaited).is_zero()
    }

    /// The time to poll.
    pub(crate) fn window(&self, awaited: Awaited) -> Duration {
        match awaited {
            Awaited::ManyBytes => return Duration::ZERO,
            Awaited::Source if self.foreign.is_shut.get() => return Duration::ZERO,
            Awaited::Source | Awaited::Op => {}
        }
        self.account(awaited).map_or(self.sources.window.get(), LatencyAccount::window)
    }

    /// Notes the time of polling, and if it has found an event.
    pub(crate) fn record_poll(&self, awaited: Awaited, time: Duration, found: bool) {
        if let Some(account) = self.account(awaited) {
            account.record_poll(time, found);
        }
    }

    /// Notes the number of foreign ops that have completed.
    #[inline]
    pub(crate) fn record_foreign_ops(&self, ops: usize, now: Instant) {
        self.server_ops.set(self.server_ops.get() + ops as u64);
        if ops > 0 && !self.sources.max.get().is_zero() {
            self.foreign.record_foreign_ops(ops, now);
        }
    }

    /// The number of [remote ops](crate::Io::begin_remote_op) in flight.
    #[inline]
    pub(crate) fn remote_ops(&self) -> usize {
        self.remote_ops.get()
    }

    pub(crate) fn begin_remote_op(&self) {
        self.remote_ops.set(self.remote_ops.get() + 1);
    }

    pub(crate) fn end_remote_op(&self, now: Instant) {
        self.remote_ops.set(self.remote_ops.get() - 1);
        self.record_foreign_ops(1, now);
    }

    /// Begins a sleep, after polling has found nothing since `since`.
    pub(crate) fn begin_sleep(&self, awaited: Awaited, since: Instant) -> Sleep {
        let is_measured = awaited != Awaited::ManyBytes
            && self.account(awaited).is_some_and(LatencyAccount::measures_sleep);
        Sleep { awaited, since, cpu: is_measured.then(clock::thread_cpu) }
    }

    /// Learns from a sleep that ends at `now`.
    pub(crate) fn end_sleep(&self, sleep: &Sleep, now: Instant) {
        let waited = now.saturating_duration_since(sleep.since);
        let cost = sleep.cpu.map(|before| clock::thread_cpu().saturating_sub(before));
        self.record_sleep(sleep.awaited, waited, cost);
        if sleep.awaited == Awaited::Source {
            self.foreign.end_sleep();
        }
    }

    /// Learns from a wait with a sleep, whose CPU time was `cost`.
    fn record_sleep(&self, awaited: Awaited, waited: Duration, cost: Option<Duration>) {
        let [for_sources, for_ops] = &self.frugal;
        match (awaited, self.budget.is_spent()) {
            (Awaited::Source, false) => self.sources.end_sleep(waited),
            (Awaited::Source, true) => for_sources.end_sleep(Duration::ZERO, cost),
            (Awaited::Op, is_spent) => {
                self.disk.end_sleep(waited, cost);
                if is_spent {
                    for_ops.end_sleep(Duration::ZERO, cost);
                }
            }
            (Awaited::ManyBytes, _) => {}
        }
    }
}

impl SourceWindow {
    fn end_sleep(&self, waited: Duration) {
        let window = self.window.get();
        let max = self.max.get();
        let next = if waited > max { window / 2 } else { (window * 2).max(WINDOW_MIN).min(max) };
        self.window.set(if next < WINDOW_MIN { Duration::ZERO } else { next });
    }
}

impl ForeignTrial {
    #[cold]
    fn record_foreign_ops(&self, ops: usize, now: Instant) {
        self.sleeps.set(0);
        let mut trial = self.trial.borrow_mut();
        let trial = trial.get_or_insert_with(|| AbTest::new(SPAN_OPS, PERIOD_OPS));
        match trial.advance(ops, now) {
            Some(Step::Over) => trial.begin(),
            Some(Step::Decided { percent }) => {
                tracing::debug!("beside polling for sources an op takes {percent}% of the time");
            }
            Some(Step::Span) | None => {}
        }
        self.is_shut.set(!trial.is_second());
    }

    fn end_sleep(&self) {
        let sleeps = self.sleeps.get() + 1;
        if sleeps >= SLEEPS_UNTIL_ALONE {
            self.trial.take();
            self.is_shut.set(false);
            return;
        }
        self.sleeps.set(sleeps);
    }
}

impl LatencyAccount {
    fn new(max: Duration) -> Self {
        Self {
            max: Cell::new(max),
            asleep: Cell::default(),
            sleep_cost: Cell::default(),
            balance: Cell::default(),
            waits: Cell::new(WAITS_MIN),
            between: Cell::new(WAITS_MIN),
            sleeps: Cell::default(),
        }
    }

    fn set_max(&self, max: Duration) {
        self.max.set(max);
        self.balance.set(self.balance.get().min(4 * max));
    }

    fn is_closed(&self) -> bool {
        let has_try = self.waits.get() == 0 && !self.max.get().is_zero();
        self.balance.get().is_zero() && !has_try
    }

    /// Polling t instead of sleeping w, with c of CPU time, saves w - t + pc and takes pt: it pays
    /// up to the (p + 1)th part of w + pc.
    fn window(&self) -> Duration {
        if self.is_closed() {
            return Duration::ZERO;
        }
        let [price, of] = PRICE;
        self.max
            .get()
            .min((self.asleep.get() + price_of(self.sleep_cost.get())) * of / (price + of))
    }

    fn record_poll(&self, time: Duration, found: bool) {
        let saved = if found {
            self.asleep.get().saturating_sub(time) + price_of(self.sleep_cost.get())
        } else {
            Duration::ZERO
        };
        let taken = price_of(time);
        if saved > taken {
            self.between.set(WAITS_MIN);
        }
        let balance = (self.balance.get() + saved).saturating_sub(taken);
        // A disk that becomes slow costs at most this until it is noticed.
        self.balance.set(balance.min(4 * self.max.get()));
        if balance.is_zero() {
            let between = self.between.get();
            self.waits.set(between);
            self.between.set((2 * between).min(WAITS_MAX));
        }
    }

    /// Returns true if the sleep that begins is to be measured.
    fn measures_sleep(&self) -> bool {
        let sleeps = self.sleeps.get();
        self.sleeps.set((sleeps + 1) % SLEEPS_BETWEEN);
        sleeps == 0 && !self.max.get().is_zero()
    }

    fn end_sleep(&self, waited: Duration, cost: Option<Duration>) {
        // Longer waits are all alike: polling does not pay.
        follow(&self.asleep, waited.min(4 * self.max.get()));
        if let Some(cost) = cost {
            follow(&self.sleep_cost, cost.min(self.max.get()));
        }
        self.waits.set(self.waits.get().saturating_sub(1));
    }
}

/// The price of CPU time as latency.
fn price_of(cpu: Duration) -> Duration {
    let [price, of] = PRICE;
    cpu * price / of
}

/// Moves a mean towards a new value.
fn follow(mean: &Cell<Duration>, value: Duration) {
    let old = mean.get();
    mean.set(if old.is_zero() { value } else { (7 * old + value) / 8 });
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Duration = Duration::from_micros(32);

    const fn us(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    #[test]
    fn it_grows_to_its_bound_and_shrinks_to_nothing() {
        let now = Instant::now();
        let window = PollWindow::new(MAX, 100, now);
        for micros in [4, 8, 16, 32, 32] {
            window.sources.end_sleep(us(20));
            assert_eq!(window.window(Awaited::Source), us(micros));
        }
        for micros in [16, 8, 4, 0, 0] {
            window.sources.end_sleep(Duration::from_millis(5));
            assert_eq!(window.window(Awaited::Source), us(micros));
        }
        assert!(window.is_closed(Awaited::Source));
    }

    /// Simulates waits for a disk, in microseconds: the disk's time, the time of a wake-up, and the
    /// cost of a sleep. Returns the time spent polling and the number of waits with polling.
    fn wait(window: &PollWindow, disk: [u64; 3], waits: u32) -> (Duration, u32) {
        let [takes, wake, cost] = disk.map(us);
        let (mut spent, mut polled) = (Duration::ZERO, 0);
        for _ in 0..waits {
            let time = window.window(Awaited::Op);
            assert_eq!(time.is_zero(), window.is_closed(Awaited::Op));
            let found = time >= takes;
            if !time.is_zero() {
                polled += 1;
                let time = time.min(takes);
                window.record_poll(Awaited::Op, time, found);
                spent += time;
            }
            if !found {
                let account = window.account(Awaited::Op).expect("ops have an account");
                let cost = account.measures_sleep().then_some(cost);
                window.record_sleep(Awaited::Op, takes + wake, cost);
            }
        }
        (spent, polled)
    }

    #[test]
    fn a_disk_is_polled_while_that_saves_more_than_it_takes() {
        for (disk, pays) in [
            ([8, 29, 9], true),
            ([20, 29, 9], true),
            ([25, 20, 12], true),
            ([25, 20, 5], false),
            // Longer than the bound.
            ([33, 100, 9], false),
            ([8, 2, 1], false),
            ([1, 2, 1], true),
            ([2, 1, 2], true),
        ] {
            let window = PollWindow::new(MAX, 100, Instant::now());
            wait(&window, disk, 2 * WAITS_MIN);
            let (spent, polled) = wait(&window, disk, 1000);
            if pays {
                assert_eq!(polled, 1000, "{disk:?}");
            } else {
                let tries = us(disk.iter().sum()) * 1000 / WAITS_MIN;
                assert!(spent <= tries / 2, "{disk:?}: {spent:?}");
            }
        }
    }

    #[test]
    fn a_disk_that_becomes_slow_or_fast_is_noticed() {
        let window = PollWindow::new(MAX, 100, Instant::now());
        let (fast, slow) = ([8, 29, 9], [500, 29, 9]);
        assert_eq!(wait(&window, fast, 1000).1, 1000 - WAITS_MIN);
        let (spent, polled) = wait(&window, slow, 16);
        assert!(spent <= 5 * MAX && polled < 16, "{spent:?} in {polled} waits");
        assert!(wait(&window, slow, 10_000).1 <= 10_000 / WAITS_MAX + 5);
        let (_, polled) = wait(&window, fast, 2 * WAITS_MAX);
        assert!(polled >= WAITS_MAX, "{polled}");
    }

    #[test]
    fn waits_for_sources_and_for_ops_are_apart() {
        let now = Instant::now();
        let window = PollWindow::new(MAX, 100, now);
        wait(&window, [8, 29, 9], 2 * WAITS_MIN);
        assert!(window.is_closed(Awaited::Source) && !window.is_closed(Awaited::Op));
        let window = PollWindow::new(MAX, 100, now);
        window.sources.end_sleep(MAX);
        assert!(!window.is_closed(Awaited::Source) && window.is_closed(Awaited::Op));
    }

    /// Completes foreign ops in sequence. Each takes the first number of microseconds if the window
    /// for sources is shut, and the second if it is open. Returns the number of ops that found it
    /// open.
    fn complete(window: &PollWindow, micros: [u64; 2], ops: usize, now: &mut Instant) -> usize {
        let mut open = 0;
        for _ in 0..ops {
            let is_open = !window.is_closed(Awaited::Source);
            assert_eq!(is_open, !window.window(Awaited::Source).is_zero());
            open += usize::from(is_open);
            *now += us(micros[usize::from(is_open)]);
            window.record_foreign_ops(1, *now);
        }
        open
    }

    #[test]
    fn it_polls_beside_others_only_while_their_ops_are_faster_for_it() {
        const TRIAL: usize = 6 * SPAN_OPS;
        for (micros, pays) in [([60, 40], true), ([60, 59], false), ([60, 90], false)] {
            let (window, mut now) = (PollWindow::new(MAX, 100, Instant::now()), Instant::now());
            window.sources.end_sleep(us(20));
            complete(&window, micros, TRIAL, &mut now);
            let open = complete(&window, micros, PERIOD_OPS - 1, &mut now);
            assert_eq!(open, if pays { PERIOD_OPS - 1 } else { 0 }, "{micros:?}");
            // The outcome is tried again later.
            let micros = [micros[1], micros[0]];
            complete(&window, micros, TRIAL + 1, &mut now);
            let open = complete(&window, micros, PERIOD_OPS - 1, &mut now);
            let pays = micros == [90, 60];
            assert_eq!(open > PERIOD_OPS / 2, pays, "{micros:?}");
        }
    }

    #[test]
    fn the_end_of_a_remote_op_begins_a_trial_that_sleeps_first() {
        let (window, now) = (PollWindow::new(MAX, 100, Instant::now()), Instant::now());
        window.sources.end_sleep(us(20));
        window.begin_remote_op();
        assert!(!window.is_closed(Awaited::Source));
        window.end_remote_op(now);
        assert!(window.is_closed(Awaited::Source));
    }

    #[test]
    fn when_others_have_no_more_ops_it_polls_again() {
        let (window, mut now) = (PollWindow::new(MAX, 100, Instant::now()), Instant::now());
        window.sources.end_sleep(us(20));
        complete(&window, [60, 90], 8 * SPAN_OPS, &mut now);
        for _ in 1..SLEEPS_UNTIL_ALONE {
            window.foreign.end_sleep();
            assert!(window.is_closed(Awaited::Source));
        }
        window.foreign.end_sleep();
        assert!(!window.is_closed(Awaited::Source));
    }

    #[test]
    fn a_bound_of_zero_is_no_polling() {
        let window = PollWindow::new(Duration::ZERO, 100, Instant::now());
        window.sources.end_sleep(Duration::ZERO);
        assert!(window.is_closed(Awaited::Source));
        assert_eq!(wait(&window, [8, 29, 9], 10 * WAITS_MIN).1, 0);
    }

    #[test]
    fn limits_may_change() {
        let now = Instant::now();
        let window = PollWindow::new(MAX, 100, now);
        let disk = [8, 29, 9];
        let polled = |window: &PollWindow| wait(window, disk, 1000).1;
        assert!(polled(&window) > 900);
        (0..4).for_each(|_| window.sources.end_sleep(us(20)));
        assert!(!window.is_closed(Awaited::Source));
        window.set_limits(Duration::ZERO, 100);
        assert!(window.is_closed(Awaited::Source) && window.is_closed(Awaited::Op));
        assert_eq!(polled(&window), 0);
        window.set_limits(MAX, 100);
        assert!(polled(&window) > 900);
    }

    #[test]
    fn waits_that_pay_make_up_for_waits_that_do_not() {
        for (good, pays) in [(3, false), (15, true)] {
            let window = PollWindow::new(MAX, 100, Instant::now());
            let mut polled = 0;
            for _ in 0..100 {
                polled += wait(&window, [15, 25, 0], good).1;
                polled += wait(&window, [30, 10, 0], 1).1;
            }
            let share = 100 * polled / (100 * (good + 1));
            assert_eq!(share > 50, pays, "{share}% were polled for, {good} good ones in a row");
        }
    }

    #[test]
    fn a_sleep_costs_cpu_time() {
        let window = PollWindow::new(Duration::from_secs(10), 100, Instant::now());
        let before = Duration::from_millis(5);
        while clock::thread_cpu() < before {
            std::hint::spin_loop();
        }
        let since = clock::now();
        let sleep = window.begin_sleep(Awaited::Op, since);
        std::thread::sleep(us(100));
        window.end_sleep(&sleep, clock::now());
        let LatencyAccount { asleep, sleep_cost, .. } = &window.disk;
        assert!(asleep.get() >= us(100));
        assert!(!sleep_cost.get().is_zero() && sleep_cost.get() < before);
    }

    /// Makes a window whose budget is spent: an op took the second number of microseconds with
    /// frugal polling, and the first with polling for latency.
    fn spent(max: Duration, micros: [u64; 2]) -> PollWindow {
        let mut now = Instant::now();
        let window = PollWindow::new(max, 15, now);
        let (mut ops, mut cpu) = (0, Duration::ZERO);
        for span in 0..3 {
            now += Duration::from_millis(2);
            ops += 100;
            cpu += 100 * us(micros[span % 2]);
            assert!(window.budget.is_due(now));
            window.budget.review(now, ops, || cpu);
        }
        assert!(window.budget.is_spent());
        window
    }

    #[test]
    fn ops_of_servers_and_of_the_kernel_have_one_budget() {
        let now = Instant::now();
        let window = PollWindow::new(MAX, 10, now);
        window.record_foreign_ops(16, now);
        (0..8).for_each(|_| window.begin_remote_op());
        (0..8).for_each(|_| window.end_remote_op(now));
        let later = now + Duration::from_millis(2);
        window.review_budget(later, || 7);
        assert!(window.budget.is_due(later), "31 ops are few");
        window.review_budget(later, || 8);
        assert!(!window.budget.is_due(later));
    }

    #[test]
    fn a_spent_budget_leaves_polling_that_is_cheaper_than_a_sleep() {
        // The disk is slower than a sleep costs, but the latency would pay.
        let slow = [20, 29, 9];
        let window = PollWindow::new(MAX, 15, Instant::now());
        wait(&window, slow, 2 * WAITS_MIN);
        assert_eq!(wait(&window, slow, 1000).1, 1000);
        let window = spent(MAX, [60, 20]);
        wait(&window, slow, 2 * WAITS_MIN);
        let (spent_us, polled) = wait(&window, slow, 1000);
        assert!(polled < 100 && spent_us < us(1000), "{polled} waits, {spent_us:?}");
        let fast = [2, 29, 9];
        wait(&window, fast, 2 * WAITS_MAX);
        assert_eq!(wait(&window, fast, 1000).1, 1000);
        // Waits for sources have an account of their own.
        assert!(window.is_closed(Awaited::Source));
        for _ in 0..2 * WAITS_MIN {
            let account = &window.frugal[0];
            account.end_sleep(Duration::ZERO, Some(us(9)));
        }
        assert!(!window.is_closed(Awaited::Source));
        assert!(window.window(Awaited::Source) < us(9));
        (0..8).for_each(|_| window.record_poll(Awaited::Source, us(9), false));
        assert!(window.is_closed(Awaited::Source));
        assert!(spent(Duration::ZERO, [60, 20]).is_closed(Awaited::Op));
    }
}
