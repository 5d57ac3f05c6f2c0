//! A limit on lines that a guest or a front-end can cause.

use std::time::{Duration, Instant};

use blockio::executor::Lock;

const WINDOW: Duration = Duration::from_secs(60);
const LINES: u32 = 5;

/// Lets a few lines a minute through and counts the rest. Each device has one, so that a guest
/// cannot reset the limit by restarting its driver.
#[derive(Default)]
pub(crate) struct RateLimit {
    state: Lock<State>,
}

#[derive(Default)]
struct State {
    /// The time of the first line of the minute.
    since: Option<Instant>,
    /// Lines written since then.
    lines: u32,
    /// Lines left out and not reported yet.
    left_out: u64,
    /// True if a count without its own line was reported in this minute.
    is_reported: bool,
    /// All events, logged or not.
    total: u64,
}

impl State {
    fn start_window(&mut self, now: Instant) {
        if self.since.is_none_or(|since| now - since >= WINDOW) {
            (self.since, self.lines, self.is_reported) = (Some(now), 0, false);
        }
    }
}

impl RateLimit {
    /// Counts an event. Returns the number of lines left out before it, or `None` if its line is
    /// left out, too.
    pub(crate) fn permit(&self) -> Option<u64> {
        self.permit_at(Instant::now())
    }

    /// Returns true if a line may be written now.
    pub(crate) fn has_room(&self) -> bool {
        let mut state = self.state.lock();
        state.start_window(Instant::now());
        state.lines < LINES
    }

    /// Returns the number of lines that were left out and not reported yet, if it may be logged
    /// now. Called at the end of a connection, after which the next line may be long in coming.
    pub(crate) fn left_out(&self) -> Option<u64> {
        self.left_out_at(Instant::now())
    }

    /// Returns the number of all events and the lines that were left out and not reported. Called
    /// at the end of the export.
    pub(crate) fn totals(&self) -> (u64, u64) {
        let mut state = self.state.lock();
        (state.total, std::mem::take(&mut state.left_out))
    }

    fn permit_at(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock();
        state.start_window(now);
        state.total += 1;
        if state.lines >= LINES {
            state.left_out += 1;
            return None;
        }
        state.lines += 1;
        Some(std::mem::take(&mut state.left_out))
    }

    fn left_out_at(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock();
        state.start_window(now);
        if state.is_reported || state.left_out == 0 {
            return None;
        }
        state.is_reported = true;
        Some(std::mem::take(&mut state.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: u64 = LINES as u64;

    fn flood(limit: &RateLimit, now: Instant) -> u64 {
        (0..1000).filter_map(|_| limit.permit_at(now)).map(|_| 1).sum()
    }

    #[test]
    fn a_flood_becomes_a_few_lines_and_a_count() {
        let limit = RateLimit::default();
        let start = Instant::now();
        assert_eq!(flood(&limit, start), MOST);
        assert_eq!(limit.permit_at(start + WINDOW), Some(1000 - MOST));
        assert_eq!(limit.permit_at(start + WINDOW), Some(0));
        assert_eq!(limit.totals(), (1002, 0));
    }

    #[test]
    fn omitted_lines_are_reported_once_a_minute() {
        let limit = RateLimit::default();
        let start = Instant::now();
        assert_eq!(limit.left_out_at(start), None);
        flood(&limit, start);
        assert_eq!(limit.left_out_at(start), Some(1000 - MOST));
        flood(&limit, start);
        assert_eq!(limit.left_out_at(start), None);
        assert_eq!(limit.left_out_at(start + WINDOW), Some(1000));
        flood(&limit, start);
        assert_eq!(limit.totals().0, 3000);
        assert!(limit.totals().1 == 0 && limit.left_out_at(start + WINDOW + WINDOW).is_none());
    }
}
