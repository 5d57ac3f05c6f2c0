//! How long a loop busy-polls before it sleeps.

use std::cell::Cell;
use std::time::Duration;

/// The first window, when polling might pay.
const WINDOW_MIN: Duration = Duration::from_micros(4);

/// A time that grows while events come soon after the loop has run out of work, and shrinks when
/// they do not: a loop that waits for long sleeps at once.
pub(crate) struct PollWindow {
    window: Cell<Duration>,
    max: Duration,
}

impl PollWindow {
    /// A window of at most `max`; zero is no busy-polling at all.
    pub(crate) fn new(max: Duration) -> Self {
        Self { window: Cell::new(Duration::ZERO), max }
    }

    pub(crate) fn get(&self) -> Duration {
        self.window.get()
    }

    /// Learns from a wait in which polling found nothing: how long the event took to come.
    pub(crate) fn slept(&self, waited: Duration) {
        let window = self.window.get();
        let next =
            if waited > self.max { window / 2 } else { (window * 2).max(WINDOW_MIN).min(self.max) };
        self.window.set(if next < WINDOW_MIN { Duration::ZERO } else { next });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Duration = Duration::from_micros(32);

    #[test]
    fn it_grows_to_its_bound_and_shrinks_to_nothing() {
        let window = PollWindow::new(MAX);
        for micros in [4, 8, 16, 32, 32] {
            window.slept(Duration::from_micros(20));
            assert_eq!(window.get(), Duration::from_micros(micros));
        }
        for micros in [16, 8, 4, 0, 0] {
            window.slept(Duration::from_millis(5));
            assert_eq!(window.get(), Duration::from_micros(micros));
        }
    }

    #[test]
    fn a_bound_of_zero_is_no_polling() {
        let window = PollWindow::new(Duration::ZERO);
        window.slept(Duration::ZERO);
        assert_eq!(window.get(), Duration::ZERO);
    }
}
