//! The times of the vhost-user messages that QEMU has written to its trace.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

const FILE: &str = "trace";

/// The message that stops a queue: GET_VRING_BASE.
const STOP: &str = "req:11";

/// Arguments with which QEMU keeps the times in `folder`.
pub(super) fn arguments(folder: &Path) -> [String; 8] {
    let file = folder.join(FILE).display().to_string();
    ["-D", &file, "-msg", "timestamp=on", "-trace", "vhost_user_write", "-trace", "vhost_user_read"]
        .map(str::to_owned)
}

/// The time from the first stop of a queue to the answer to the last one, in the last series.
pub(super) fn stop_time(folder: &Path) -> Result<Duration> {
    let file = folder.join(FILE);
    let text = std::fs::read_to_string(&file)
        .with_context(|| format!("reading the trace of QEMU, {}", file.display()))?;
    last_series(&text).context("QEMU has stopped no queue")
}

fn last_series(trace: &str) -> Option<Duration> {
    let is_stop = |line: &&str| line.split_whitespace().any(|word| word == STOP);
    let lines: Vec<&str> = trace.lines().collect();
    let end = lines.iter().rposition(is_stop)?;
    let others = lines[..end].iter().rposition(|line| !is_stop(line));
    let begin = others.map_or(0, |at| at + 1);
    time(lines[end])?.checked_sub(time(lines[begin])?)
}

/// The time of a line such as `1234@1700000000.123456:vhost_user_write req:11 flags:0x1`.
fn time(line: &str) -> Option<Duration> {
    let (_, rest) = line.split_once('@')?;
    let (time, _) = rest.split_once(':')?;
    let (seconds, micros) = time.split_once('.')?;
    Some(Duration::from_secs(seconds.parse().ok()?) + Duration::from_micros(micros.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_series_of_stops_is_found() {
        let line = |time: &str, event: &str, code: u32| {
            format!("7@1700000000.{time}:vhost_user_{event} req:{code} flags:0x1\n")
        };
        let mut trace = line("100000", "write", 11) + &line("200000", "read", 11);
        assert_eq!(last_series(&trace), Some(Duration::from_millis(100)));
        trace += &line("300000", "write", 18);
        for (time, event) in [("400000", "write"), ("400100", "read"), ("400200", "write")] {
            trace += &line(time, event, 11);
        }
        trace += &line("400350", "read", 11);
        trace += &line("500000", "write", 110);
        assert_eq!(last_series(&trace), Some(Duration::from_micros(350)));
        assert_eq!(last_series(""), None);
    }
}
