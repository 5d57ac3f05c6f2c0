//! Shows the running measurement and the time left.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// The guess of the seconds that starting and stopping adds to each measurement, until one is done.
const OVERHEAD_S: f64 = 0.5;

/// Progress on stderr: on a terminal one line that changes, otherwise results only.
pub(crate) struct Progress {
    total: usize,
    done: usize,
    /// Measurements that were left out. They took no time.
    skipped: usize,
    start: Instant,
    guess: Duration,
    live: bool,
}

impl Progress {
    /// Expects `total` measurements of `runtime` seconds each, plus [`OVERHEAD_S`].
    pub(crate) fn new(total: usize, runtime: f64) -> Self {
        Self::expecting(total, runtime + OVERHEAD_S)
    }

    /// Expects `total` measurements of `each` seconds, overhead included.
    pub(crate) fn expecting(total: usize, each: f64) -> Self {
        let guess = Duration::try_from_secs_f64(each).unwrap_or(Duration::MAX);
        let live = std::io::stderr().is_terminal();
        let progress = Self { total, done: 0, skipped: 0, start: Instant::now(), guess, live };
        progress.print(&format!("{total} measurements, about {}", progress.left()));
        progress
    }

    /// Announces the next measurement.
    pub(crate) fn step(&mut self, what: &str) {
        if self.live {
            let left = self.left();
            eprint!("\r\x1b[K[{}/{}, {left} left] {what}", self.done + 1, self.total);
            // A failure to show progress is no reason to stop.
            let _ = std::io::stderr().flush();
        }
        self.done += 1;
    }

    /// Counts measurements that are left out.
    pub(crate) fn skip(&mut self, count: usize) {
        self.skipped += count;
        self.done += count;
    }

    /// Prints a line that stays.
    pub(crate) fn print(&self, line: &str) {
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
