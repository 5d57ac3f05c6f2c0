//! An independent client of sockets: `socat`, with lines of JSON.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

use anyhow::{Context, Result, bail, ensure};
use ringhaul_kit::cli::LIMIT;
use ringhaul_kit::system;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Returns true if socat is installed; prints a message if not.
pub(super) fn is_installed() -> bool {
    system::is_installed("socat")
}

/// A connected `socat`, until this value is dropped.
pub(super) struct Socat {
    child: Child,
    stdin: ChildStdin,
    stdout_lines: Receiver<String>,
    /// Lines of its `-v` output about the data that it passes on.
    stderr_lines: Receiver<String>,
    last_id: u64,
}

impl Socat {
    /// Connects to the socket at `path`.
    pub(super) fn connect(path: &Path) -> Result<Self> {
        let mut command = Command::new("setpriv");
        // With this, socat does not outlive the test.
        command.args(["--pdeathsig", "KILL", "socat", "-v", "-"]);
        command.arg(format!("UNIX-CONNECT:{}", path.display()));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("starting socat")?;
        let stdin = child.stdin.take().context("it has no stdin")?;
        let stdout_lines = lines(child.stdout.take().context("it has no stdout")?);
        let stderr_lines = lines(child.stderr.take().context("it has no stderr")?);
        Ok(Self { child, stdin, stdout_lines, stderr_lines, last_id: 0 })
    }

    /// Sends this text unchanged.
    pub(super) fn send_text(&mut self, text: &str) -> Result<()> {
        self.stdin.write_all(text.as_bytes()).context("writing to socat")
    }

    /// Sends this text, and waits until socat has passed it on as a separate piece.
    pub(super) fn send_piece(&mut self, text: &str) -> Result<()> {
        self.send_text(text)?;
        while let Some(line) = next(&self.stderr_lines)? {
            if line.starts_with("> ") {
                return Ok(());
            }
        }
        bail!("socat has ended")
    }

    /// The next line, or `None` if the daemon has closed the connection.
    pub(super) fn next_line(&self) -> Result<Option<Value>> {
        let Some(line) = next(&self.stdout_lines)? else { return Ok(None) };
        let answer = serde_json::from_str(&line).with_context(|| format!("no JSON: {line}"))?;
        Ok(Some(answer))
    }

    /// Sends a request without waiting for its answer. Returns its id.
    pub(super) fn send_request(&mut self, method: &str, params: &Value) -> Result<u64> {
        self.last_id += 1;
        let id = self.last_id;
        let request = json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params });
        self.send_text(&format!("{request}\n"))?;
        Ok(id)
    }

    /// The answer to request `id`, which must be the next line.
    pub(super) fn answer(&self, id: u64) -> Result<Value> {
        let answer = self.next_line()?.context("the daemon has hung up")?;
        ensure!(answer["jsonrpc"] == "2.0" && answer["id"] == id, "not the answer: {answer}");
        Ok(answer)
    }

    /// Calls a method that must succeed, and returns its result.
    pub(super) fn call(&mut self, method: &str, params: &Value) -> Result<Value> {
        let id = self.send_request(method, params)?;
        let mut answer = self.answer(id)?;
        ensure!(answer.get("error").is_none(), "{method} {params}: {answer}");
        Ok(answer["result"].take())
    }

    /// Calls a method that must be refused with this code, and returns the message.
    pub(super) fn call_refused(
        &mut self,
        method: &str,
        params: &Value,
        code: i32,
    ) -> Result<String> {
        let id = self.send_request(method, params)?;
        let answer = self.answer(id)?;
        let error = &answer["error"];
        ensure!(answer.get("result").is_none() && error["code"] == code, "{method}: {answer}");
        Ok(error["message"].as_str().context("there is no message")?.to_owned())
    }

    /// The next event, which must be of this kind.
    pub(super) fn event(&self, kind: &str) -> Result<Value> {
        let mut line = self.next_line()?.context("the subscriber was dropped")?;
        let is_event = line["method"] == "event" && line.get("id").is_none();
        ensure!(is_event && line["params"]["event"] == kind, "not {kind}: {line}");
        Ok(line["params"].take())
    }

    /// The id of its process.
    pub(super) fn process(&self) -> u32 {
        self.child.id()
    }

    /// Sends socat a signal.
    pub(super) fn signal(&self, signal: Signal) -> Result<()> {
        kill_process(Pid::from_child(&self.child), signal).context("sending socat a signal")
    }
}

impl Drop for Socat {
    fn drop(&mut self) {
        // These fail only if socat has ended and was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads lines in a thread until the end of the stream.
fn lines(from: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        // Sending fails if the receiver is dropped, and its lines are not needed then.
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    lines
}

fn next(lines: &Receiver<String>) -> Result<Option<String>> {
    match lines.recv_timeout(LIMIT) {
        Ok(line) => Ok(Some(line)),
        Err(RecvTimeoutError::Disconnected) => Ok(None),
        Err(RecvTimeoutError::Timeout) => bail!("nothing comes from socat"),
    }
}
