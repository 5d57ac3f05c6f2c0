//! The connection to a daemon: questions, answers and events, a line each.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// A connection.
pub(super) struct Connection {
    path: PathBuf,
    stream: BufReader<UnixStream>,
    /// Events that came before an answer.
    events: VecDeque<Value>,
}

/// The reason that the daemon has not carried out a request.
pub(super) struct Refusal {
    pub(super) code: i64,
    pub(super) message: String,
}

impl Connection {
    pub(super) fn new(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path).with_context(|| {
            format!("cannot connect to {}; is it a daemon's --control?", path.display())
        })?;
        let (path, stream) = (path.to_owned(), BufReader::new(stream));
        Ok(Self { path, stream, events: VecDeque::new() })
    }

    /// Limits each wait for the daemon to this time.
    pub(super) fn set_limit(&mut self, limit: Duration) -> std::io::Result<()> {
        let stream = self.stream.get_ref();
        stream.set_read_timeout(Some(limit))?;
        stream.set_write_timeout(Some(limit))
    }

    /// Calls a method, and waits for the answer.
    pub(super) fn call(&mut self, method: &str, params: &Value) -> Result<Result<Value, Refusal>> {
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        // A daemon that refuses a client sends its reason and hangs up, so that sending may fail.
        let sent = self.stream.get_mut().write_all(format!("{request}\n").as_bytes());
        loop {
            let Some(mut line) = self.line()? else {
                sent.with_context(|| self.asking())?;
                bail!(
                    "the daemon at {} closed the connection without an answer",
                    self.path.display()
                );
            };
            if line.get("method").is_some() {
                self.events.push_back(line["params"].take());
                continue;
            }
            if let Some(error) = line.get("error") {
                let message = error["message"].as_str().unwrap_or("the daemon refused the request");
                let (code, message) = (error["code"].as_i64().unwrap_or(0), message.to_owned());
                return Ok(Err(Refusal { code, message }));
            }
            let result = line.get_mut("result").map(Value::take);
            return Ok(Ok(result.context("the answer has neither result nor error")?));
        }
    }

    /// Waits until the daemon has ended, which closes the connection.
    pub(super) fn wait_for_end(&mut self) -> Result<()> {
        while self.line()?.is_some() {}
        Ok(())
    }

    /// Waits for the next event.
    pub(super) fn event(&mut self) -> Result<Value> {
        if let Some(event) = self.events.pop_front() {
            return Ok(event);
        }
        match self.line()? {
            Some(mut line) => Ok(line["params"].take()),
            None => bail!(
                "the daemon at {} has ended, was replaced in a takeover, or dropped this \
                 subscriber because it was too slow; to continue, run the command again",
                self.path.display()
            ),
        }
    }

    /// The next line. `None`: the daemon has hung up.
    fn line(&mut self) -> Result<Option<Value>> {
        let mut line = String::new();
        if self.stream.read_line(&mut line).with_context(|| self.asking())? == 0 {
            return Ok(None);
        }
        let parsed = serde_json::from_str(&line);
        parsed
            .with_context(|| format!("the answer of {} is not JSON", self.path.display()))
            .map(Some)
    }

    fn asking(&self) -> String {
        format!("cannot send a request to the daemon at {}", self.path.display())
    }
}
