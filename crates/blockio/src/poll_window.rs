//! How long a loop busy-polls before it sleeps.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// The first window, when polling might pay.
const WINDOW_MIN: Duration = Duration::from_micros(4);

/// How much unused budget is kept: that of this time.
const BUDGET_SPAN: Duration = Duration::from_millis(10);

/// A time that grows while events come soon after the loop has run out of work, and shrinks when
/// they do not: a loop that waits for long sleeps at once. A budget bounds the sum.
pub(crate) struct PollWindow {
    window: Cell<Duration>,
    max: Duration,
    budget: Option<Budget>,
}

/// A share of the time that may go into busy-polling.
struct Budget {
    percent: u32,
    left: Cell<Duration>,
    since: Cell<Instant>,
}

impl PollWindow {
    /// A window of at most `max` (zero is no busy-polling at all) that takes no more than
    /// `budget_percent` of the time.
    pub(crate) fn new(max: Duration, budget_percent: u32, now: Instant) -> Self {
        let budget = (budget_percent < 100).then(|| Budget {
            percent: budget_percent,
            left: Cell::new(Duration::ZERO),
            since: Cell::new(now),
        });
        Self { window: Cell::new(Duration::ZERO), max, budget }
    }

    /// Whether the loop sleeps without a look.
    pub(crate) fn is_closed(&self) -> bool {
        self.window.get().is_zero()
    }

    /// How long to poll from `now` on.
    pub(crate) fn at(&self, now: Instant) -> Duration {
        let window = self.window.get();
        match &self.budget {
            Some(budget) if !window.is_zero() => window.min(budget.at(now)),
            _ => window,
        }
    }

    /// Says for how long the loop has polled.
    pub(crate) fn spent(&self, time: Duration) {
        if let Some(budget) = &self.budget {
            budget.left.set(budget.left.get().saturating_sub(time));
        }
    }

    /// Learns from a wait in which polling found nothing: how long the event took to come.
    pub(crate) fn slept(&self, waited: Duration) {
        let window = self.window.get();
        let next =
            if waited > self.max { window / 2 } else { (window * 2).max(WINDOW_MIN).min(self.max) };
        self.window.set(if next < WINDOW_MIN { Duration::ZERO } else { next });
    }
}

impl Budget {
    fn at(&self, now: Instant) -> Duration {
        let earned = now.saturating_duration_since(self.since.replace(now)) * self.percent / 100;
        let left = (self.left.get() + earned).min(BUDGET_SPAN * self.percent / 100);
        self.left.set(left);
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Duration = Duration::from_micros(32);

    #[test]
    fn it_grows_to_its_bound_and_shrinks_to_nothing() {
        let now = Instant::now();
        let window = PollWindow::new(MAX, 100, now);
        for micros in [4, 8, 16, 32, 32] {
            window.slept(Duration::from_micros(20));
            assert_eq!(window.at(now), Duration::from_micros(micros));
        }
        for micros in [16, 8, 4, 0, 0] {
            window.slept(Duration::from_millis(5));
            assert_eq!(window.at(now), Duration::from_micros(micros));
        }
        assert!(window.is_closed());
    }

    #[test]
    fn a_bound_of_zero_is_no_polling() {
        let window = PollWindow::new(Duration::ZERO, 100, Instant::now());
        window.slept(Duration::ZERO);
        assert!(window.is_closed());
    }

    #[test]
    fn polling_takes_no_more_than_its_share_of_the_time() {
        let start = Instant::now();
        let window = PollWindow::new(MAX, 25, start);
        let (mut now, mut polled) = (start, Duration::ZERO);
        // Events come 20 us after each poll, so polling would always pay.
        for _ in 0..10_000 {
            window.slept(Duration::from_micros(20));
            let time = window.at(now);
            window.spent(time);
            polled += time;
            now += time + Duration::from_micros(20);
        }
        let share = polled.as_secs_f64() / (now - start).as_secs_f64();
        assert!((0.2..=0.251).contains(&share), "polling took {share} of the time");
        // What was not used for a long time is not kept.
        now += Duration::from_secs(60);
        assert!(window.at(now) <= MAX);
        window.spent(Duration::from_secs(1));
        assert_eq!(window.at(now), Duration::ZERO);
    }
}
