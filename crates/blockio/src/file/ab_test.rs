//! A comparison of two ways to do the same work. Both are tried in turn, and the faster one is kept
//! for a while.

use std::time::{Duration, Instant};

/// Spans of a trial: the first and the second way in turn.
const SPANS: u32 = 6;
/// The most time between two completions that counts: an idle client makes neither way slow.
const PAUSE_MAX: Duration = Duration::from_millis(5);
/// The percentage by which the second way must be faster.
const ADVANTAGE_PERCENT: u32 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Span number `span` of a trial; odd spans have the second way.
    Trying { span: u32 },
    /// The outcome of a trial, for a while.
    Decided { second: bool },
}

/// The next step of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// The next span begins, with the alternate way.
    Span,
    /// The faster way is chosen. The second way took `percent` of the first way's time for an op.
    Decided { percent: u128 },
    /// The outcome has held for its period. It still holds until the trial begins again.
    Over,
}

/// Compares two ways by the time that they take for each op.
#[derive(Debug)]
pub(crate) struct AbTest {
    span_ops: usize,
    period_ops: usize,
    phase: Phase,
    /// Ops completed in this span or period, and the time that they took.
    ops: usize,
    time: Duration,
    last: Option<Instant>,
    /// The sums of the spans' times for each op, in units of 2^-16 ns: first, second way.
    sums: [u128; 2],
}

impl AbTest {
    /// Makes a trial that begins with spans of `span_ops`. Its outcome holds for `period_ops`.
    pub(crate) fn new(span_ops: usize, period_ops: usize) -> Self {
        let phase = Phase::Trying { span: 0 };
        let (time, last) = (Duration::ZERO, None);
        Self { span_ops, period_ops, phase, ops: 0, time, last, sums: [0; 2] }
    }

    /// Begins again. The time since the last op does not count: there may have been a pause.
    pub(crate) fn begin(&mut self) {
        self.last = None;
        self.sums = [0; 2];
        self.enter(Phase::Trying { span: 0 });
    }

    /// Makes a trial that has decided for the second way.
    #[cfg(test)]
    pub(crate) fn decided(self) -> Self {
        Self { phase: Phase::Decided { second: true }, ..self }
    }

    /// Returns true if the second way has its turn or has been chosen.
    #[inline]
    pub(crate) fn is_second(&self) -> bool {
        match self.phase {
            Phase::Trying { span } => span % 2 == 1,
            Phase::Decided { second } => second,
        }
    }

    /// Returns true if a trial has chosen the second way.
    pub(crate) fn has_chosen_second(&self) -> bool {
        self.phase == Phase::Decided { second: true }
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.ops = 0;
        self.time = Duration::ZERO;
    }

    /// Counts completed ops.
    pub(crate) fn advance(&mut self, completed: usize, now: Instant) -> Option<Step> {
        let since = self.last.replace(now).map_or(Duration::ZERO, |last| now - last);
        self.time += since.min(PAUSE_MAX);
        self.ops += completed;
        match self.phase {
            Phase::Trying { span } if self.ops >= self.span_ops => {
                self.sums[usize::from(span % 2 == 1)] +=
                    (self.time.as_nanos() << 16) / self.ops as u128;
                if span + 1 < SPANS {
                    self.enter(Phase::Trying { span: span + 1 });
                    return Some(Step::Span);
                }
                let [first, second] = self.sums;
                let is_faster = second * u128::from(100 + ADVANTAGE_PERCENT) < first * 100;
                self.enter(Phase::Decided { second: is_faster });
                Some(Step::Decided { percent: second * 100 / first.max(1) })
            }
            Phase::Decided { .. } if self.ops >= self.period_ops => Some(Step::Over),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first op after a pause begins the trial, and is an op of the first way.
    #[test]
    fn a_pause_before_a_trial_is_held_against_neither_way() {
        let mut trial = AbTest::new(512, 1 << 20);
        let (mut now, each) = (Instant::now(), Duration::from_micros(20));
        for pause in [Duration::ZERO, Duration::from_secs(1)] {
            now += pause;
            trial.begin();
            loop {
                now += each;
                match trial.advance(1, now) {
                    Some(Step::Decided { percent }) => {
                        assert_eq!(percent, 100, "after {pause:?}");
                        break;
                    }
                    Some(Step::Over) => unreachable!("it has not decided"),
                    Some(Step::Span) | None => {}
                }
            }
            assert!(!trial.has_chosen_second());
        }
    }
}
