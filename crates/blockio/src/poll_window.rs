//! How long a loop busy-polls before it sleeps.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// The first window, when polling might pay.
const WINDOW_MIN: Duration = Duration::from_micros(4);

/// A wait for ops is polled for this part of the longest window. A sleep costs the loop some 10 µs
/// of CPU time, and a disk that takes longer than that would cost more CPU time polled than it
/// gives; a driver that was called is on its way, and what polling costs is at most its wake-up.
const PART_FOR_OPS: u32 = 4;

/// How much unused budget is kept: that of this time.
const BUDGET_SPAN: Duration = Duration::from_millis(10);

/// What the loop waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Awaited {
    /// No op is in the kernel: whoever gives the sources their work has the next turn.
    Source,
    /// Ops are in the kernel, and a source may have work as well.
    Op,
}

/// Times that grow while events come soon after the loop has run out of work, and shrink when
/// they do not: a loop that waits for long sleeps at once. A budget bounds the sum.
///
/// There is one for each kind of wait, as they differ by much: a driver answers a call after
/// the time that its wake-up takes, and a disk when it likes.
pub(crate) struct PollWindow {
    windows: [Window; 2],
    budget: Option<Budget>,
}

struct Window {
    time: Cell<Duration>,
    max: Duration,
}

/// A share of the time that may go into busy-polling.
struct Budget {
    percent: u32,
    left: Cell<Duration>,
    since: Cell<Instant>,
}

impl PollWindow {
    /// Windows of at most `max` (zero is no busy-polling at all) that take no more than
    /// `budget_percent` of the time.
    pub(crate) fn new(max: Duration, budget_percent: u32, now: Instant) -> Self {
        let budget = (budget_percent < 100).then(|| Budget {
            percent: budget_percent,
            left: Cell::new(Duration::ZERO),
            since: Cell::new(now),
        });
        let window = |max| Window { time: Cell::new(Duration::ZERO), max };
        Self { windows: [window(max), window(max / PART_FOR_OPS)], budget }
    }

    fn of(&self, awaited: Awaited) -> &Window {
        match awaited {
            Awaited::Source => &self.windows[0],
            Awaited::Op => &self.windows[1],
        }
    }

    /// Whether the loop sleeps without a look.
    pub(crate) fn is_closed(&self, awaited: Awaited) -> bool {
        self.of(awaited).time.get().is_zero()
    }

    /// How long to poll from `now` on.
    pub(crate) fn at(&self, awaited: Awaited, now: Instant) -> Duration {
        let window = self.of(awaited).time.get();
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
    pub(crate) fn slept(&self, awaited: Awaited, waited: Duration) {
        let Window { time, max } = self.of(awaited);
        let window = time.get();
        let next = if waited > *max { window / 2 } else { (window * 2).max(WINDOW_MIN).min(*max) };
        time.set(if next < WINDOW_MIN { Duration::ZERO } else { next });
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
            window.slept(Awaited::Source, Duration::from_micros(20));
            assert_eq!(window.at(Awaited::Source, now), Duration::from_micros(micros));
        }
        for micros in [16, 8, 4, 0, 0] {
            window.slept(Awaited::Source, Duration::from_millis(5));
            assert_eq!(window.at(Awaited::Source, now), Duration::from_micros(micros));
        }
        assert!(window.is_closed(Awaited::Source));
    }

    #[test]
    fn waits_for_ops_have_a_shorter_window_of_their_own() {
        let now = Instant::now();
        let window = PollWindow::new(MAX, 100, now);
        for micros in [4, 8, 8] {
            window.slept(Awaited::Op, MAX / PART_FOR_OPS);
            assert_eq!(window.at(Awaited::Op, now), Duration::from_micros(micros));
            assert!(window.is_closed(Awaited::Source));
        }
        // A disk that takes longer than a sleep costs.
        window.slept(Awaited::Source, MAX);
        for micros in [4, 0] {
            window.slept(Awaited::Op, MAX);
            assert_eq!(window.at(Awaited::Op, now), Duration::from_micros(micros));
            assert!(!window.is_closed(Awaited::Source));
        }
    }

    #[test]
    fn a_bound_of_zero_is_no_polling() {
        let window = PollWindow::new(Duration::ZERO, 100, Instant::now());
        window.slept(Awaited::Source, Duration::ZERO);
        assert!(window.is_closed(Awaited::Source));
    }

    #[test]
    fn polling_takes_no_more_than_its_share_of_the_time() {
        let start = Instant::now();
        let window = PollWindow::new(MAX, 25, start);
        let (mut now, mut polled) = (start, Duration::ZERO);
        // Events come 20 us after each poll, so polling would always pay.
        for _ in 0..10_000 {
            window.slept(Awaited::Source, Duration::from_micros(20));
            let time = window.at(Awaited::Source, now);
            window.spent(time);
            polled += time;
            now += time + Duration::from_micros(20);
        }
        let share = polled.as_secs_f64() / (now - start).as_secs_f64();
        assert!((0.2..=0.251).contains(&share), "polling took {share} of the time");
        // What was not used for a long time is not kept.
        now += Duration::from_secs(60);
        assert!(window.at(Awaited::Source, now) <= MAX);
        window.spent(Duration::from_secs(1));
        assert_eq!(window.at(Awaited::Source, now), Duration::ZERO);
    }
}
