//! The host's ends of a machine's streams: its output, the guest's second serial port and QMP.
//!
//! Each stream has a thread that reads it. So a machine never blocks on a full stream, and every
//! wait can have a limit.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// The interval at which a wait checks for a stop by the user.
pub(crate) const STOP_INTERVAL: Duration = Duration::from_millis(100);

/// The number of last console lines in an error.
const SHOWN_LINES: usize = 200;

/// The time limit for QEMU's answer to a monitor command.
const MONITOR_LIMIT: Duration = Duration::from_secs(30);

/// True once the user asked to stop; set by a signal handler or a different thread.
pub type StopFlag = Arc<AtomicBool>;

/// The whole output of the guest's kernel and of its machine.
#[derive(Clone, Default)]
pub(crate) struct Console {
    lines: Arc<Mutex<Vec<Line>>>,
    echo: bool,
}

struct Line {
    text: String,
    is_error: bool,
}

impl Console {
    /// Makes an empty console. With `echo`, each line goes to stderr at once.
    pub(crate) fn new(echo: bool) -> Self {
        Self { lines: Arc::default(), echo }
    }

    /// Starts a thread that stores `stream` until its end. `is_error` is true for QEMU's own
    /// stderr.
    pub(crate) fn follow(
        &self,
        stream: impl Read + Send + 'static,
        is_error: bool,
    ) -> JoinHandle<()> {
        let console = self.clone();
        std::thread::spawn(move || {
            each_line(stream, |text| {
                if console.echo {
                    eprintln!("{text}");
                }
                let mut lines = console.lines.lock().unwrap_or_else(PoisonError::into_inner);
                lines.push(Line { text, is_error });
                true
            });
        })
    }

    /// The number of lines that contain `wanted`.
    pub(crate) fn count(&self, wanted: &str) -> usize {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().filter(|line| line.text.contains(wanted)).count()
    }

    /// The last lines, for an error.
    pub(crate) fn tail(&self) -> String {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let hidden = lines.len().saturating_sub(SHOWN_LINES);
        let texts: Vec<&str> = lines[hidden..].iter().map(|line| line.text.as_str()).collect();
        texts.join("\n")
    }

    /// The first line of QEMU's own stderr for which `wanted` is true.
    pub(crate) fn find_error(&self, wanted: impl Fn(&str) -> bool) -> Option<String> {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let line = lines.iter().find(|line| line.is_error && wanted(&line.text))?;
        Some(line.text.clone())
    }
}

/// Calls `take` for each line of `stream`, until it returns false or the stream ends.
fn each_line(stream: impl Read, mut take: impl FnMut(String) -> bool) {
    let mut reader = BufReader::new(stream);
    let mut bytes = Vec::new();
    // An error counts as the end: the peer has gone.
    while reader.read_until(b'\n', &mut bytes).is_ok_and(|read| read > 0) {
        let line = String::from_utf8_lossy(&bytes).trim_end_matches(['\r', '\n']).to_owned();
        bytes.clear();
        if !take(line) {
            return;
        }
    }
}

/// A socket to the machine, read line by line.
pub(crate) struct LineChannel {
    name: &'static str,
    stream: UnixStream,
    lines: Receiver<String>,
    stop: StopFlag,
}

impl LineChannel {
    /// Takes over `stream`, which errors call `name`. The reading thread ends with the stream.
    pub(crate) fn new(name: &'static str, stream: UnixStream, stop: StopFlag) -> Result<Self> {
        let reader =
            stream.try_clone().with_context(|| format!("duplicating the socket of {name}"))?;
        let (sender, lines) = channel();
        std::thread::spawn(move || each_line(reader, |line| sender.send(line).is_ok()));
        Ok(Self { name, stream, lines, stop })
    }

    /// Writes all of `text`.
    pub(crate) fn send(&mut self, text: &str) -> Result<()> {
        self.stream.write_all(text.as_bytes()).with_context(|| format!("writing to {}", self.name))
    }

    /// The next line; `None` without one by `deadline`.
    ///
    /// # Errors
    /// If the user asked to stop, or the machine has closed the socket.
    pub(crate) fn poll_line(&self, deadline: Instant) -> Result<Option<String>> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left.min(STOP_INTERVAL)) {
                Ok(line) => return Ok(Some(line)),
                Err(RecvTimeoutError::Disconnected) => bail!("the machine closed {}", self.name),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if self.stop.load(Ordering::Relaxed) {
                bail!("stopped by a signal");
            }
            if left.is_zero() {
                return Ok(None);
            }
        }
    }

    /// The next line.
    ///
    /// # Errors
    /// As for [`Self::poll_line`], and at `deadline`.
    pub(crate) fn next_line(&self, deadline: Instant) -> Result<String> {
        let line = self.poll_line(deadline)?;
        line.with_context(|| format!("{} said nothing more in time", self.name))
    }
}

/// QEMU's monitor, in its machine protocol (QMP).
pub(crate) struct QmpMonitor {
    channel: LineChannel,
}

impl QmpMonitor {
    /// Takes over the socket and leaves QMP's negotiation mode.
    pub(crate) fn new(stream: UnixStream, stop: StopFlag) -> Result<Self> {
        let channel = LineChannel::new("the QEMU monitor", stream, stop)?;
        let mut monitor = Self { channel };
        monitor.execute("qmp_capabilities")?;
        Ok(monitor)
    }

    /// Runs a command without arguments and waits for its answer.
    ///
    /// # Errors
    /// If QEMU refuses it, or does not answer.
    pub(crate) fn execute(&mut self, command: &str) -> Result<Value> {
        self.execute_with(command, &json!({}))
    }

    /// Runs a command and waits for its answer.
    ///
    /// # Errors
    /// If QEMU refuses it, or does not answer.
    pub(crate) fn execute_with(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let deadline = Instant::now() + MONITOR_LIMIT;
        let message = json!({ "execute": command, "arguments": arguments });
        self.channel.send(&format!("{message}\n"))?;
        loop {
            let line = self.channel.next_line(deadline)?;
            // The greeting and events may come first; only answers have these keys.
            let mut answer: Value = serde_json::from_str(&line)
                .with_context(|| format!("reading what QEMU answered: {line}"))?;
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = answer.get("error") {
                bail!("QEMU refused {command}: {error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_guest_is_an_error_at_the_deadline() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let channel = LineChannel::new("the guest", ours, StopFlag::default()).unwrap();
        let error = channel.next_line(Instant::now()).unwrap_err();
        assert!(error.to_string().contains("nothing more in time"), "{error}");
    }

    #[test]
    fn a_closed_socket_and_a_stop_end_the_wait() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let stop = StopFlag::default();
        let channel = LineChannel::new("the guest", ours, Arc::clone(&stop)).unwrap();
        let far = Instant::now() + Duration::from_secs(3600);
        stop.store(true, Ordering::Relaxed);
        assert!(channel.next_line(far).unwrap_err().to_string().contains("signal"));
        drop(theirs);
        assert!(channel.next_line(far).unwrap_err().to_string().contains("closed"));
    }

    #[test]
    fn a_monitor_skips_greeting_and_events() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs
            .write_all(
                b"{\"QMP\": {}}\n{\"return\": {}}\n{\"event\": \"RESET\"}\n\
                  {\"return\": {\"status\": \"running\"}}\n{\"error\": {\"desc\": \"no\"}}\n",
            )
            .unwrap();
        let mut monitor = QmpMonitor::new(ours, StopFlag::default()).unwrap();
        let status = monitor.execute("query-status").unwrap();
        assert_eq!(status["status"], "running");
        assert!(monitor.execute("nonsense").is_err());
    }
}
