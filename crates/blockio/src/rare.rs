//! A limit on log lines about repeated events.

use std::time::{Duration, Instant};

/// The length of an interval, which has a limited number of lines.
const INTERVAL: Duration = Duration::from_secs(10);

/// Permits one line, or a few, in each interval.
#[derive(Debug)]
pub(crate) struct Rare {
    /// The most lines in an interval.
    most: u32,
    /// The start of the interval, and the lines in it.
    begun: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl Default for Rare {
    fn default() -> Self {
        Self::few(1)
    }
}

impl Rare {
    /// Permits `most` lines in each interval.
    pub(crate) fn few(most: u32) -> Self {
        Self { most, begun: None, lines: 0, left_out: 0 }
    }

    /// Returns the number of lines that were left out since the last one; `None` if no line is
    /// permitted now.
    pub(crate) fn permit(&mut self, now: Instant) -> Option<u64> {
        if self.begun.is_none_or(|begun| now.saturating_duration_since(begun) >= INTERVAL) {
            (self.begun, self.lines) = (Some(now), 0);
        }
        if self.lines == self.most {
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
        let (mut rare, now) = (Rare::default(), Instant::now());
        assert_eq!(rare.permit(now), Some(0));
        for _ in 0..100 {
            assert_eq!(rare.permit(now), None);
        }
        assert_eq!(rare.permit(now + INTERVAL), Some(100));
        let mut few = Rare::few(2);
        let permitted = [now, now, now, now + INTERVAL].map(|when| few.permit(when));
        assert_eq!(permitted, [Some(0), Some(0), None, Some(1)]);
    }
}
