//! The number of chains in a run, and the moment of a call.
//!
//! A sleeping driver needs a while from a call to its next request. If the call comes when all
//! requests are answered, device and driver idle in turn. If it comes for each answer, the device
//! does little but call.
//!
//! The right moment is when the remaining requests take as long as the driver's wake-up: neither
//! side waits, and all answers of that time share the call. That number of remaining requests is
//! the *lead*. It is counted, not computed from times: it is the number of requests answered
//! between a call and the driver's next request.
//!
//! Answers are published as they come, so that a driver that is awake continues without a call. The
//! length of a run decides how many ops a submit carries and how long answers wait for it.
//!
//! docs/internals/loop.md describes all mechanisms of a turn.

use std::num::NonZeroU16;
use std::time::{Duration, Instant};

/// The least ops of a run that takes a part of the queue's requests. With fewer ops in a submit,
/// the system call costs more than a fifth of the work of the fastest disks.
const PART_MIN: u16 = 4;
/// Growth from run to run after a driver has begun. The first run takes one chain, so a driver that
/// posts requests one by one finds an answer before it falls asleep.
const GROWTH: u16 = 4;
/// The most chains in a run, for requests that need no op: other queues of the thread wait for it.
const CHAINS_MAX: u16 = 64;
/// The greatest lead, since no queue has more entries.
const LEAD_MAX: u16 = 1024;
/// A driver that was not called for this many answers is taken to busy-poll. Each time that this
/// soon proves wrong, the number doubles.
const PATIENCE_MIN: u32 = 256;
const PATIENCE_MAX: u32 = 1 << 16;
/// A sleep of this length ends a load. The next load may be of another kind.
const PAUSE: Duration = Duration::from_millis(100);

/// The work of a queue when a run begins.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueueState {
    /// Chains that may be popped.
    pub(crate) available: u16,
    /// Popped chains that are not answered.
    pub(crate) in_device: u16,
    /// The number of the next chain to pop.
    pub(crate) next_chain: u16,
}

impl QueueState {
    pub(crate) fn unanswered(self) -> u16 {
        self.available + self.in_device
    }

    fn avail_idx(self) -> u16 {
        self.next_chain.wrapping_add(self.available)
    }
}

/// The limits of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// The most chains to pop.
    pub(crate) chains: u16,
    /// The most popped chains that may stay unanswered because they need ops.
    pub(crate) ops: u16,
    /// True if each answer is published at once, false if all are published at the end.
    pub(crate) publishes_each: bool,
}

/// Plans the runs and calls of one queue.
pub(crate) struct Batching {
    /// For measurement: chains of each run, with a check for the driver's wish after each run.
    fixed: Option<NonZeroU16>,
    /// Requests answered from a call to the driver's next request.
    lead: u16,
    /// The last call, until the driver makes another chain available.
    call: Option<Call>,
    /// Requests answered since the last call.
    answered: u32,
    /// Answers without a call after which the driver is taken to busy-poll.
    patience: u32,
    /// The most requests at once, in units of 1/64, decaying over some hundred runs.
    depth_64: u32,
    /// Ops of the next run if the driver is awake.
    growing: u16,
    /// Runs in a row, up to two, that began with nothing in the device: the disk completes ops
    /// within the submit, or there is one request at a time.
    inline_runs: u8,
    asleep_since: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct Call {
    avail_idx: u16,
    /// The driver was back before the call had returned.
    was_quick: bool,
}

impl Batching {
    pub(crate) fn new(fixed: Option<NonZeroU16>) -> Self {
        assert!(fixed.is_none_or(|run| run.get() <= LEAD_MAX), "a run of more than a queue has");
        Self {
            fixed,
            // Calls come early until more is known.
            lead: LEAD_MAX,
            call: None,
            answered: 0,
            patience: PATIENCE_MIN,
            depth_64: 0,
            growing: 1,
            inline_runs: 0,
            asleep_since: None,
        }
    }

    /// True if runs adapt.
    #[inline]
    pub(crate) fn adapt(&self) -> bool {
        self.fixed.is_none()
    }

    /// True if the driver was called and has not made another chain available, as far as is known.
    #[inline]
    pub(crate) fn awaits_driver(&self) -> bool {
        self.call.is_some()
    }

    /// True if the disk seems to complete ops within the submit. Then answers are published before
    /// the next submit, which would delay them. Otherwise they are published after the next pop,
    /// because the disk has other requests to work on.
    #[inline]
    pub(crate) fn completes_inline(&self) -> bool {
        self.inline_runs == 2
    }

    /// Plans a run. `driver_sleeps` returns true if the driver sleeps until it is called.
    #[inline]
    pub(crate) fn begin(&mut self, state: QueueState, driver_sleeps: impl FnOnce() -> bool) -> Run {
        if let Some(fixed) = self.fixed {
            return Run { chains: fixed.get(), ops: u16::MAX, publishes_each: false };
        }
        self.inline_runs = if state.in_device > 0 { 0 } else { (self.inline_runs + 1).min(2) };
        let mut run = Run { chains: CHAINS_MAX, ops: 1, publishes_each: true };
        if state.available == 0 {
            self.growing = 1;
            return run;
        }
        self.observe(state);
        let unanswered = state.unanswered();
        let depth = self.follow_depth(unanswered);
        if self.answered >= self.patience {
            run.ops = PART_MIN;
            if depth / 2 >= PART_MIN {
                // Aligned parts of the ring: their cache lines change hands once.
                let whole = 1 << (depth / 2).min(CHAINS_MAX).ilog2();
                run.chains = whole - state.next_chain % whole;
                run.ops = run.chains;
                run.publishes_each = false;
            }
        } else if !self.completes_inline() {
            // More ops at once delay the disk's answers, fewer starve it.
            run.ops = (depth / 4).max(PART_MIN);
        } else if depth <= self.lead {
            // Even an early call brings the driver back only when all is answered.
            run.ops = 1;
        } else if driver_sleeps() {
            self.growing = 1;
            run.ops = unanswered.saturating_sub(self.lead).max(1);
        } else {
            run.ops = self.growing.min((unanswered / 2).max(PART_MIN));
            self.growing = run.ops * GROWTH;
        }
        run
    }

    /// The most requests at once, in recent runs.
    #[inline]
    fn follow_depth(&mut self, unanswered: u16) -> u16 {
        let faded = self.depth_64 - self.depth_64 / 64;
        self.depth_64 = faded.max(u32::from(unanswered) * 64);
        iomem::fits(self.depth_64 / 64, "a number of requests")
    }

    /// Learns from the first chain after a call.
    #[inline]
    fn observe(&mut self, state: QueueState) {
        let Some(call) = self.call else { return };
        let new = state.avail_idx().wrapping_sub(call.avail_idx);
        if new > 0 {
            self.call = None;
            self.update_lead(state.unanswered() <= new && !call.was_quick);
        }
    }

    /// Adapts the lead when the driver is back. `late`: all requests had been answered before.
    fn update_lead(&mut self, late: bool) {
        let lead = u32::from(self.lead);
        let next = if late {
            // The delay is unknown, so the lead grows by a fixed share.
            lead + lead / 8 + 1
        } else {
            // With a small margin, because too early costs less than too late.
            let wanted = (self.answered + self.answered / 8).min(LEAD_MAX.into());
            if wanted < lead {
                lead - (lead - wanted).div_ceil(8)
            } else {
                lead + (wanted - lead).div_ceil(8)
            }
        };
        self.lead = iomem::fits(next.min(LEAD_MAX.into()), "a number of requests");
    }

    /// Counts published answers.
    #[inline]
    pub(crate) fn answered(&mut self, count: u16) {
        self.answered = self.answered.saturating_add(count.into());
    }

    /// The answers since the last call.
    #[inline]
    pub(crate) fn since_call(&self) -> u32 {
        self.answered
    }

    /// True if a sleeping driver must be called when `unanswered` requests are left.
    #[inline]
    pub(crate) fn is_call_due(&self, unanswered: u16) -> bool {
        unanswered <= self.lead
    }

    /// Notes that the driver is called when `unanswered` requests are left. The driver has made
    /// chains available up to `avail_idx`.
    #[inline]
    pub(crate) fn call_begins(&mut self, unanswered: u16, avail_idx: u16) {
        if self.answered >= self.patience {
            let was_wrong = self.answered / 8 < self.patience;
            self.patience =
                if was_wrong { (2 * self.patience).min(PATIENCE_MAX) } else { PATIENCE_MIN };
        }
        // With one request at a time there is nothing to decide.
        let decides = self.adapt() && (self.answered > 1 || unanswered > 0);
        self.call = decides.then_some(Call { avail_idx, was_quick: false });
        self.answered = 0;
    }

    /// Notes that the call has returned. During the call the driver has made chains available up to
    /// `avail_idx`.
    #[inline]
    pub(crate) fn call_ends(&mut self, avail_idx: u16) {
        if let Some(call) = &mut self.call {
            call.was_quick = avail_idx != call.avail_idx;
        }
    }

    /// Notes that the thread may sleep until the driver kicks.
    pub(crate) fn note_sleep(&mut self, now: Instant) {
        self.asleep_since = Some(now);
    }

    /// Notes that there is work. A long sleep before it erases the learnt values.
    #[inline]
    pub(crate) fn note_work(&mut self, now: impl FnOnce() -> Instant) {
        if let Some(since) = self.asleep_since.take()
            && now().saturating_duration_since(since) >= PAUSE
        {
            *self = Self::new(self.fixed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A driver, a device, and a disk that completes ops within the submit. Times in ns.
    struct Scene {
        batching: Batching,
        /// Requests that the driver has in use at once.
        depth: u16,
        /// Time from a call until the driver checks the ring.
        wake: u64,
        /// Costs of one op, a submit and a call.
        costs: [u64; 3],
        now: u64,
        next_chain: u16,
        available: u16,
        /// Answers that the driver has not seen.
        unseen: u16,
        /// The time at which the driver wakes, if it was called.
        wakes_at: Option<u64>,
        answered: u64,
        calls: u64,
    }

    impl Scene {
        fn new(depth: u16, wake: u64, fixed: u16) -> Self {
            Self {
                batching: Batching::new(NonZeroU16::new(fixed)),
                depth,
                wake,
                costs: [2_500, 1_000, 8_000],
                now: 0,
                next_chain: 0xfff0,
                available: depth,
                unseen: 0,
                wakes_at: None,
                answered: 0,
                calls: 0,
            }
        }

        fn state(&self) -> QueueState {
            QueueState { available: self.available, in_device: 0, next_chain: self.next_chain }
        }

        /// Plays the driver: takes answers and makes as many new requests.
        fn drive(&mut self) {
            if self.wakes_at.is_some_and(|at| at <= self.now) {
                self.wakes_at = None;
                self.unseen = 0;
                self.available = self.available.max(self.depth);
            }
        }

        fn call(&mut self) {
            self.calls += 1;
            self.batching.call_begins(self.available, self.state().avail_idx());
            self.wakes_at = Some(self.now + self.wake);
            self.now += self.costs[2];
            self.drive();
            self.batching.call_ends(self.state().avail_idx());
        }

        /// Publishes `count` answers.
        fn answer(&mut self, count: u16) {
            (self.unseen, self.answered) = (self.unseen + count, self.answered + u64::from(count));
            self.drive();
            self.batching.answered(count);
            let is_due = !self.batching.adapt() || self.batching.is_call_due(self.available);
            if is_due && self.unseen > 0 && self.wakes_at.is_none() {
                self.call();
            }
        }

        /// Performs a run and the submit behind it.
        fn run(&mut self) {
            self.drive();
            let sleeps = self.wakes_at.is_none();
            let run = self.batching.begin(self.state(), || sleeps);
            let count = run.ops.min(run.chains).min(self.available);
            if count > 0 {
                self.available -= count;
                self.next_chain = self.next_chain.wrapping_add(count);
                let [op, submit, _] = self.costs;
                self.now += submit + u64::from(count) * op;
                self.answer(count);
                return;
            }
            // The turn ends, and the loop busy-polls until the driver is back.
            if self.unseen > 0 && self.wakes_at.is_none() {
                self.call();
            }
            let wakes_at = self.wakes_at.expect("nobody ever wakes the driver");
            self.now = self.now.max(wakes_at);
        }

        /// Requests answered in each second of the next `micros`.
        fn rate(&mut self, micros: u64) -> f64 {
            let (since, before) = (self.now, self.answered);
            while self.now < since + micros * 1000 {
                self.run();
            }
            (self.answered - before) as f64 * 1e9 / (self.now - since) as f64
        }
    }

    /// The rate of the best fixed setting.
    fn best(depth: u16, wake: u64, costs: [u64; 3]) -> f64 {
        let rate = |fixed| Scene { costs, ..Scene::new(depth, wake, fixed) }.rate(200_000);
        [1, 4, 16, 64].into_iter().map(rate).fold(0.0, f64::max)
    }

    /// Holds for each cost of a wake-up, after 10 ms.
    #[test]
    fn calls_and_runs_are_as_good_as_the_best_fixed_setting() {
        for costs in [[2_500, 1_000, 8_000], [2_500, 1_000, 1_000], [10_000, 1_000, 8_000]] {
            for wake in [1_000, 10_000, 30_000, 80_000, 200_000] {
                for depth in [1, 2, 4, 8, 16, 32, 64, 128, 256] {
                    let mut scene = Scene { costs, ..Scene::new(depth, wake, 0) };
                    scene.rate(10_000);
                    let ratio = scene.rate(50_000) / best(depth, wake, costs);
                    let lead = scene.batching.lead;
                    assert!(ratio > 0.9, "{costs:?} {wake} {depth}: {ratio}, lead {lead}");
                }
            }
        }
    }

    #[test]
    fn a_load_that_changes_is_followed_within_10_ms() {
        let mut scene = Scene::new(64, 30_000, 0);
        for (depth, wake, op) in [
            (64, 200_000, 2_500),
            (64, 1_000, 2_500),
            (8, 30_000, 2_500),
            (128, 80_000, 2_500),
            (128, 80_000, 20_000),
            (16, 80_000, 1_000),
        ] {
            (scene.depth, scene.wake, scene.costs[0]) = (depth, wake, op);
            scene.rate(10_000);
            let ratio = scene.rate(50_000) / best(depth, wake, scene.costs);
            assert!(ratio > 0.9, "{depth} {wake} {op}: {ratio}, lead {}", scene.batching.lead);
        }
    }

    #[test]
    fn many_answers_share_a_call() {
        for (depth, wake) in [(64, 30_000), (128, 80_000)] {
            let mut scene = Scene::new(depth, wake, 0);
            scene.rate(100_000);
            let per_call = scene.answered / scene.calls;
            assert!(per_call > u64::from(depth) / 2, "{per_call} answers for each call");
        }
    }

    fn state(available: u16, in_device: u16, next_chain: u16) -> QueueState {
        QueueState { available, in_device, next_chain }
    }

    #[test]
    fn a_driver_that_polls_gets_whole_lines_at_once() {
        let mut batching = Batching::new(None);
        batching.begin(state(32, 0, 0), || false);
        assert!(batching.begin(state(32, 0, 0), || false).publishes_each);
        batching.answered(u16::try_from(PATIENCE_MIN).unwrap());
        let run = batching.begin(state(32, 0, 0), || false);
        assert_eq!(run, Run { chains: 16, ops: 16, publishes_each: false });
        // A run that begins inside of a line ends with it.
        assert_eq!(batching.begin(state(32, 0, 0xfff5), || false).chains, 11);
        // The driver slept after all: more patience next time.
        batching.call_begins(0, 0);
        assert!(batching.begin(state(32, 0, 0), || false).publishes_each);
        batching.answered(u16::try_from(2 * PATIENCE_MIN - 1).unwrap());
        assert!(batching.begin(state(32, 0, 0), || false).publishes_each);
        batching.answered(1);
        assert!(!batching.begin(state(32, 0, 0), || false).publishes_each);
        // The driver busy-polled for long: the guess was right.
        (0..16).for_each(|_| batching.answered(u16::try_from(PATIENCE_MIN).unwrap()));
        batching.call_begins(0, 0);
        batching.answered(u16::try_from(PATIENCE_MIN).unwrap());
        assert!(!batching.begin(state(32, 0, 0), || false).publishes_each);
    }

    #[test]
    fn a_disk_that_works_on_many_ops_gets_a_quarter_at_once() {
        let mut batching = Batching::new(None);
        for (available, in_device, ops) in [(64, 0, 16), (10, 54, 16), (48, 16, 16), (3, 1, 15)] {
            let run = batching.begin(state(available, in_device, 0), || true);
            assert_eq!(run.ops, ops);
            // The disk still has the chains of this run.
            batching.begin(state(0, in_device + 1, 0), || true);
        }
        let mut batching = Batching::new(None);
        batching.begin(state(1, 3, 0), || true);
        assert_eq!(batching.begin(state(1, 3, 0), || true).ops, PART_MIN);
        assert!(!batching.completes_inline());
        batching.begin(state(1, 0, 0), || true);
        batching.begin(state(1, 0, 0), || true);
        assert!(batching.completes_inline());
    }

    #[test]
    fn a_pause_resets_the_measurements() {
        let mut scene = Scene::new(64, 30_000, 0);
        scene.rate(10_000);
        let learnt = scene.batching.lead;
        assert!(learnt < 32, "the lead is {learnt}");
        let start = Instant::now();
        scene.batching.note_sleep(start);
        scene.batching.note_work(|| start + PAUSE / 2);
        assert_eq!(scene.batching.lead, learnt);
        // That sleep is over.
        scene.batching.note_work(|| start + 2 * PAUSE);
        assert_eq!(scene.batching.lead, learnt);
        scene.batching.note_sleep(start);
        scene.batching.note_work(|| start + PAUSE);
        assert_eq!((scene.batching.lead, scene.batching.depth_64), (LEAD_MAX, 0));
    }

    #[test]
    fn a_fixed_run_learns_nothing() {
        let mut scene = Scene::new(64, 30_000, 16);
        scene.rate(10_000);
        assert_eq!(scene.batching.lead, LEAD_MAX);
        let run = scene.batching.begin(state(64, 0, 0), || true);
        assert_eq!(run, Run { chains: 16, ops: u16::MAX, publishes_each: false });
    }

    #[test]
    fn every_run_takes_chains_and_stays_bounded_for_any_input() {
        let mut random = 1_u64;
        let mut below = |bound: u16| -> u16 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            iomem::fits((random >> 33) % u64::from(bound), "less than a bound")
        };
        let mut batching = Batching::new(None);
        for _ in 0..200_000 {
            let in_device = below(1024);
            let state = state(below(1025 - in_device), in_device, below(u16::MAX));
            let sleeps = below(2) == 0;
            let run = batching.begin(state, || sleeps);
            assert!((1..=CHAINS_MAX).contains(&run.chains) && run.ops >= 1, "{run:?}");
            batching.answered(below(1024));
            if below(3) == 0 {
                batching.call_begins(below(1024), below(u16::MAX));
                batching.call_ends(below(u16::MAX));
            }
            assert!(
                batching.lead <= LEAD_MAX && batching.depth_64 <= 64 * 1024,
                "{}",
                batching.lead
            );
            assert!((PATIENCE_MIN..=PATIENCE_MAX).contains(&batching.patience));
        }
    }
}
