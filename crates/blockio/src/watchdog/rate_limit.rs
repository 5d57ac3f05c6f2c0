//! A limit on log lines about repeated events.

use std::time::{Duration, Instant};

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
