//! Progress on standard error while a phase runs.

#![forbid(unsafe_code)]

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use ringhaul_options::redact::printable;

use crate::args::Eta;
use crate::quantities::{show_amount, show_count};

/// Shows one phase. Messages bypass the bar through [`print`](Self::print).
pub(crate) struct Progress {
    display: Display,
    label: &'static str,
    /// Time, I/Os and bytes after which the phase ends, each `None` without such a bound.
    goal: (Option<Duration>, Option<u64>, Option<u64>),
    started: Instant,
    last: (Instant, (u64, u64)),
    /// I/Os and bytes per second in the last interval.
    rate: (f64, f64),
}

enum Display {
    None,
    Bar(ProgressBar),
    Lines,
}

/// Steps of the bar.
const STEPS: u64 = 1000;
/// The time over which a rate is taken, and between two printed lines.
const INTERVAL: Duration = Duration::from_secs(1);

impl Progress {
    pub(crate) fn new(
        eta: Eta,
        label: &'static str,
        goal: (Option<Duration>, Option<u64>, Option<u64>),
    ) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let display = match (eta, terminal) {
            (Eta::Never, _) | (Eta::Auto, false) => Display::None,
            (Eta::Always, false) => Display::Lines,
            (Eta::Auto | Eta::Always, true) => Display::Bar(make_bar(label)),
        };
        let now = Instant::now();
        Self { display, label, goal, started: now, last: (now, (0, 0)), rate: (0.0, 0.0) }
    }

    /// Prints messages, a line each, with any display.
    pub(crate) fn print(&self, messages: &[String]) {
        for message in messages.iter().map(|message| printable(message)) {
            match &self.display {
                Display::Bar(bar) => bar.suspend(|| eprintln!("ringhaul: {message}")),
                _ => eprintln!("ringhaul: {message}"),
            }
        }
    }

    /// Shows the I/Os and bytes that are `done` since the phase began.
    pub(crate) fn show(&mut self, done: (u64, u64)) {
        if matches!(self.display, Display::None) {
            return;
        }
        let now = Instant::now();
        let interval = now - self.last.0;
        let renewed = interval >= INTERVAL;
        if renewed {
            let seconds = interval.as_secs_f64();
            let (ios, bytes) = self.last.1;
            self.rate = (
                done.0.saturating_sub(ios) as f64 / seconds,
                done.1.saturating_sub(bytes) as f64 / seconds,
            );
            self.last = (now, done);
        }
        let share = self.share(now - self.started, done);
        let text = self.describe(share, now - self.started);
        match &self.display {
            Display::Bar(bar) => {
                bar.set_position(share.map_or(0, steps));
                bar.set_message(text);
            }
            Display::Lines if renewed => eprintln!("{}: {text}", self.label),
            Display::Lines | Display::None => {}
        }
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        if let Display::Bar(bar) = &self.display {
            bar.finish_and_clear();
        }
    }

    /// Returns the finished share of the phase, 0 to 1, by the nearest bound.
    fn share(&self, elapsed: Duration, done: (u64, u64)) -> Option<f64> {
        let (time, ios, bytes) = self.goal;
        let by_time = time.map(|time| elapsed.as_secs_f64() / time.as_secs_f64());
        let by_ios = ios.map(|ios| done.0 as f64 / ios as f64);
        let by_bytes = bytes.map(|bytes| done.1 as f64 / bytes as f64);
        let shares = [by_time, by_ios, by_bytes].into_iter().flatten();
        shares.reduce(f64::max).map(|share| share.clamp(0.0, 1.0))
    }

    fn describe(&self, share: Option<f64>, elapsed: Duration) -> String {
        let (ios, bytes) = self.rate;
        let rate = format!("{} IOPS, {}/s", show_count(ios), show_amount(bytes));
        match share.filter(|share| *share > 0.0) {
            Some(share) => {
                let left = elapsed.as_secs_f64() * (1.0 - share) / share;
                format!("{:.0}%, {rate}, {left:.0} s left", share * 100.0)
            }
            None => rate,
        }
    }
}

fn make_bar(label: &'static str) -> ProgressBar {
    let bar = ProgressBar::new(STEPS).with_prefix(label);
    match ProgressStyle::with_template("{prefix} [{bar:24}] {msg}") {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}

/// Returns the position of the bar for a share between 0 and 1.
fn steps(share: f64) -> u64 {
    (0..STEPS).rev().find(|step| *step as f64 <= share * STEPS as f64).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_bound_counts() {
        let goal = (Some(Duration::from_secs(10)), Some(100), None);
        let progress = Progress::new(Eta::Never, "read", goal);
        assert_eq!(progress.share(Duration::from_secs(5), (20, 0)), Some(0.5));
        assert_eq!(progress.share(Duration::from_secs(5), (80, 0)), Some(0.8));
        assert_eq!(progress.share(Duration::from_secs(50), (0, 0)), Some(1.0));
        let text = progress.describe(Some(0.8), Duration::from_secs(8));
        assert!(text.starts_with("80%") && text.ends_with("2 s left"), "{text}");
    }

    #[test]
    fn steps_follow_the_share() {
        assert_eq!([0.0, 0.25, 0.9999].map(steps), [0, 250, 999]);
    }
}
