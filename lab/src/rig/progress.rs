//! Which measurement is running and how long the rest will take.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Seconds that starting and stopping takes for each measurement, before there is experience.
const OVERHEAD_S: f64 = 0.5;

/// Progress on stderr: one line that changes on a terminal, else results only.
pub(crate) struct Progress {
    total: usize,
    done: usize,
    /// Measurements that were left out cost no time.
    skipped: usize,
    start: Instant,
    guess: Duration,
    live: bool,
}

impl Progress {
    /// `runtime` is in seconds for each of the `total` measurements.
    pub(crate) fn new(total: usize, runtime: f64) -> Self {
        Self::expecting(total, runtime + OVERHEAD_S)
    }

    /// `each` is how many seconds one of the `total` measurements should take with everything.
    pub(crate) fn expecting(total: usize, each: f64) -> Self {
        let guess = Duration::try_from_secs_f64(each).unwrap_or(Duration::MAX);
        let live = std::io::stderr().is_terminal();
        let progress = Self { total, done: 0, skipped: 0, start: Instant::now(), guess, live };
        progress.say(&format!("{total} measurements, about {}", progress.left()));
        progress
    }

    /// The next measurement begins.
    pub(crate) fn step(&mut self, what: &str) {
        if self.live {
            let left = self.left();
            eprint!("\r\x1b[K[{}/{}, {left} left] {what}", self.done + 1, self.total);
            // A failure to show progress is not a reason to stop.
            let _ = std::io::stderr().flush();
        }
        self.done += 1;
    }

    /// Some measurements are left out.
    pub(crate) fn skip(&mut self, count: usize) {
        self.skipped += count;
        self.done += count;
    }

    /// Prints a line that stays.
    pub(crate) fn say(&self, line: &str) {
        let clear = if self.live { "\r\x1b[K" } else { "" };
        eprintln!("{clear}{line}");
    }

    /// Removes the line that changes.
    pub(crate) fn finish(&self) {
        if self.live {
            eprint!("\r\x1b[K");
        }
    }

    fn left(&self) -> String {
        let measured =
            u32::try_from(self.done - self.skipped).expect("a count of measurements fits");
        let each = match measured {
            0 => self.guess,
            count => self.start.elapsed() / count,
        };
        let count = u32::try_from(self.total - self.done).expect("a count of measurements fits");
        let seconds = each.saturating_mul(count).as_secs();
        match seconds {
            0..60 => format!("{seconds} s"),
            _ => format!("{} min", seconds.div_ceil(60)),
        }
    }
}
