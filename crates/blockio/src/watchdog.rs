//! The watch over ops that take long, its log lines, and a limit on log lines.

pub(crate) mod stalled_ops;

use std::time::{Duration, Instant};

/// The time between two reports that there is still no answer.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// The reports about one file, server or cluster.
#[derive(Debug, Default)]
pub struct StallLog(Option<LastReport>);

#[derive(Debug)]
struct LastReport {
    /// The start of the oldest late operation at the first report.
    since: Instant,
    last: Instant,
}

/// A line for the log.
#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    /// The oldest operation has not been answered for this time.
    Waits(Duration),
    /// No late operation is left. The time counts from the start of the oldest at the first report.
    Answers(Duration),
}

impl StallLog {
    /// The age from which an unanswered operation is late.
    pub const LATE: Duration = Duration::from_secs(5);

    /// Returns true if an operation that began at `since` and has not ended is late.
    pub fn is_late(since: Instant, now: Instant) -> bool {
        now.saturating_duration_since(since) >= Self::LATE
    }

    /// Returns the line that is due now: one at first, then one a minute, and one at the end.
    /// `late`: the start of the oldest operation that [is late](Self::is_late).
    pub fn next_line(&mut self, now: Instant, late: Option<Instant>) -> Option<Line> {
        let age = |since| now.saturating_duration_since(since);
        let Some(oldest) = late else {
            return self.0.take().map(|last_report| Line::Answers(age(last_report.since)));
        };
        if self.0.as_ref().is_some_and(|last_report| age(last_report.last) < REPORT_INTERVAL) {
            return None;
        }
        let since = self.0.as_ref().map_or(oldest, |last_report| last_report.since);
        self.0 = Some(LastReport { since, last: now });
        Some(Line::Waits(age(oldest)))
    }
}

/// The length of an interval, which has a limited number of lines.
const INTERVAL: Duration = Duration::from_secs(10);

/// Permits one line, or a few, in each interval.
#[derive(Debug)]
pub struct RateLimit {
    /// The most lines in an interval.
    lines_max: u32,
    /// The start of the interval, and the lines in it.
    begun: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl Default for RateLimit {
    fn default() -> Self {
        Self::new(1)
    }
}

impl RateLimit {
    /// Permits `lines_max` lines in each interval.
    pub fn new(lines_max: u32) -> Self {
        Self { lines_max, begun: None, lines: 0, left_out: 0 }
    }

    /// Returns the number of lines that were left out since the last one; `None` if no line is
    /// permitted now.
    pub fn permit(&mut self, now: Instant) -> Option<u64> {
        if self.begun.is_none_or(|begun| now.saturating_duration_since(begun) >= INTERVAL) {
            (self.begun, self.lines) = (Some(now), 0);
        }
        if self.lines == self.lines_max {
            self.left_out += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_due_at_first_then_each_minute_and_at_the_end() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let next = |log: &mut StallLog, second, since: u64| {
            let late = Some(at(since)).filter(|since| StallLog::is_late(*since, at(second)));
            log.next_line(at(second), late)
        };
        let (waits, answers) = (
            |seconds| Some(Line::Waits(Duration::from_secs(seconds))),
            |seconds| Some(Line::Answers(Duration::from_secs(seconds))),
        );
        let mut log = StallLog::default();
        assert_eq!(next(&mut log, 4, 0), None, "it is not late");
        assert_eq!(next(&mut log, 5, 0), waits(5));
        for second in 6..65 {
            assert_eq!(next(&mut log, second, 0), None, "{second}");
        }
        assert_eq!(next(&mut log, 65, 60), waits(5), "a later one, a minute after the line");
        assert_eq!(next(&mut log, 124, 60), None);
        assert_eq!(next(&mut log, 125, 60), waits(65));
        assert_eq!(next(&mut log, 126, 125), answers(126), "since the first");
        assert_eq!(next(&mut log, 127, 125), None);
        assert_eq!(next(&mut log, 130, 125), waits(5), "it is another time");
    }
}

#[cfg(test)]
mod rate_limit_tests {
    use super::*;

    #[test]
    fn a_line_comes_through_now_and_then() {
        let (mut limit, now) = (RateLimit::default(), Instant::now());
        assert_eq!(limit.permit(now), Some(0));
        for _ in 0..100 {
            assert_eq!(limit.permit(now), None);
        }
        assert_eq!(limit.permit(now + INTERVAL), Some(100));
        let mut limit = RateLimit::new(2);
        let permitted = [now, now, now, now + INTERVAL].map(|when| limit.permit(when));
        assert_eq!(permitted, [Some(0), Some(0), None, Some(1)]);
    }
}
