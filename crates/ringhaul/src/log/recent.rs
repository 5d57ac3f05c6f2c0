//! The last lines of the log, which stay in memory for a bug report. They include lines that were
//! dropped because standard error was not read.

use std::collections::VecDeque;
use std::time::{SystemTime, UNIX_EPOCH};

use blockio::executor::Lock;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The number of lines that are kept.
const LINES: usize = 200;

/// The bytes of a line that are kept.
const LINE_BYTES: usize = 4096;

static RECENT: RecentLines = RecentLines(Lock::new(VecDeque::new()));

/// A line of the log.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct LogLine {
    /// Its time in seconds since 1970.
    pub time_seconds: u64,
    /// The line as it was written, without colours.
    pub text: String,
}

/// The last lines, the oldest first.
pub(crate) fn recent_lines() -> Vec<LogLine> {
    RECENT.0.lock().iter().cloned().collect()
}

/// Keeps a line.
pub(super) fn keep(line: &[u8]) {
    RECENT.keep(line);
}

struct RecentLines(Lock<VecDeque<LogLine>>);

impl RecentLines {
    fn keep(&self, line: &[u8]) {
        let text = without_colours(&String::from_utf8_lossy(&line[..line.len().min(LINE_BYTES)]));
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let time_seconds = since.map_or(0, |since| since.as_secs());
        let mut lines = self.0.lock();
        if lines.len() == LINES {
            lines.pop_front();
        }
        lines.push_back(LogLine { time_seconds, text });
    }
}

/// The text without the escape sequences of a terminal and without the end of the line.
fn without_colours(text: &str) -> String {
    let mut parts = text.trim_end_matches('\n').split("\x1b[");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |done, part| done + part.split_once('m').map_or(part, |(_, rest)| rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_kept() {
        let recent = RecentLines(Lock::default());
        for number in 0..LINES + 3 {
            recent.keep(format!("line {number}\n").as_bytes());
        }
        let lines = recent.0.lock();
        assert_eq!(lines.len(), LINES);
        assert_eq!(lines[0].text, "line 3");
        assert!(lines[LINES - 1].text == format!("line {}", LINES + 2));
        assert!(lines[0].time_seconds > 0);
    }

    #[test]
    fn lines_are_short_and_have_no_colours() {
        let recent = RecentLines(Lock::default());
        recent.keep("\x1b[2mnow\x1b[0m \x1b[33m WARN\x1b[0m a[0m é\n".as_bytes());
        recent.keep("é".repeat(LINE_BYTES).as_bytes());
        let lines = recent.0.lock();
        assert_eq!(lines[0].text, "now  WARN a[0m é");
        assert_eq!(lines[1].text, "é".repeat(LINE_BYTES / 2));
    }
}
