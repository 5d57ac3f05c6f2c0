//! The messages of a running daemon.

use std::io::{BufRead, BufReader};
use std::process::ChildStderr;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::{Result, bail};

use super::LIMIT;

/// The daemon's messages, line by line.
#[derive(Default)]
pub(super) struct Log {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    lines: Vec<String>,
    ended: bool,
}

impl State {
    fn count(&self, text: &str) -> usize {
        self.lines.iter().filter(|line| line.contains(text)).count()
    }
}

impl Log {
    /// Reads lines until the daemon closes its end of the pipe.
    pub(super) fn fill(&self, from: ChildStderr) {
        for line in BufReader::new(from).lines() {
            let Ok(line) = line else { break };
            self.state().lines.push(line);
            self.changed.notify_all();
        }
        self.state().ended = true;
        self.changed.notify_all();
    }

    /// All lines so far.
    pub(super) fn text(&self) -> String {
        self.state().lines.join("\n")
    }

    /// The number of lines that contain `text`.
    pub(super) fn count(&self, text: &str) -> usize {
        self.state().count(text)
    }

    /// Waits until at least `count` lines contain `text`.
    ///
    /// # Errors
    /// If the daemon ends before, or does not write them in time.
    pub(super) fn wait_for(&self, text: &str, count: usize) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        let mut state = self.state();
        while state.count(text) < count {
            let left = deadline.saturating_duration_since(Instant::now());
            if state.ended || left.is_zero() {
                let lines = state.lines.join("\n");
                bail!("the daemon has not written {text:?} {count} times:\n{lines}");
            }
            (state, _) =
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
