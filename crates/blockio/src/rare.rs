//! Lines in the log about what may happen again and again.

use std::time::{Duration, Instant};

/// The least time between two lines about one thing.
const INTERVAL: Duration = Duration::from_secs(10);

/// Lets a line through now and then.
#[derive(Debug, Default)]
pub(crate) struct Rare {
    last: Option<Instant>,
    left_out: u64,
}

impl Rare {
    /// How many lines were left out since the last one, if one may be written now.
    pub(crate) fn permit(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < INTERVAL) {
            self.left_out += 1;
            return None;
        }
        self.last = Some(now);
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
    }
}
