//! A limit on lines that a guest can cause.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const WINDOW: Duration = Duration::from_secs(60);
const LINES: u32 = 5;

/// Lets a few lines a minute through and counts the rest. One for each device: what its guest
/// starts again does not start it again.
#[derive(Default)]
pub(crate) struct LogLimit {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    since: Option<Instant>,
    lines: u32,
}

impl LogLimit {
    /// Whether a line may be written now, and how many were left out before it.
    pub(crate) fn permit(&self) -> Option<u32> {
        self.permit_at(Instant::now())
    }

    fn permit_at(&self, now: Instant) -> Option<u32> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut left_out = 0;
        if state.since.is_none_or(|since| now - since >= WINDOW) {
            left_out = state.lines.saturating_sub(LINES);
            *state = State { since: Some(now), lines: 0 };
        }
        state.lines = state.lines.saturating_add(1);
        (state.lines <= LINES).then_some(left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_becomes_a_few_lines_and_a_count() {
        let limit = LogLimit::default();
        let start = Instant::now();
        let written = (0..1000).filter_map(|_| limit.permit_at(start)).count();
        assert_eq!(written, LINES as usize);
        assert_eq!(limit.permit_at(start + WINDOW), Some(1000 - LINES));
        assert_eq!(limit.permit_at(start + WINDOW), Some(0));
    }
}
