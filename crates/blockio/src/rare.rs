//! Lines in the log about what may happen again and again.

use std::time::{Duration, Instant};

/// The least time between two lines about one thing.
const INTERVAL: Duration = Duration::from_secs(10);

/// Lets a line through now and then, or a few of them.
#[derive(Debug)]
pub(crate) struct Rare {
    /// Lines in each interval, at most.
    most: u32,
    /// When the interval has begun, and the lines in it.
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
    /// Lets `most` lines through in each interval.
    pub(crate) fn few(most: u32) -> Self {
        Self { most, begun: None, lines: 0, left_out: 0 }
    }

    /// How many lines were left out since the last one, if one may be written now.
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
