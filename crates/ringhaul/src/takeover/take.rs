//! The new process: it opens what the old one describes, and goes on with it when that has stopped.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rustix::time::{ClockId, clock_gettime};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::format::{
    Answer, BEGIN, Begin, Description, FORMATS, GIVE_UP, Life, PAUSE, Standstill, TAKE,
};
use super::wire::Receiver;
use crate::command::CommandError;
use crate::control::handed::HandedExport;
use crate::daemon::Daemon;
use crate::daemon::hand_over::Expected;
use crate::export::Endpoint;
use crate::handed_fds::HandedFds;

/// How long the old process may take to answer while it serves, and to stop its queues.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// Another process, which this one takes over from. It goes on when this is dropped before
/// [`take`](Self::take).
pub(crate) struct Predecessor {
    stream: UnixStream,
    version: String,
    process: u32,
    /// How it was started.
    pub(crate) life: Life,
    /// Its control socket.
    pub(crate) control: Option<Endpoint>,
    exports: Vec<HandedExport>,
    fds: HandedFds,
}

/// How it went.
pub(crate) struct Taken {
    stream: UnixStream,
    since_ns: u64,
    version: String,
    process: u32,
    exports: usize,
}

impl Predecessor {
    /// Asks the daemon behind this control socket what it has.
    ///
    /// # Errors
    ///
    /// When nobody listens, or it refuses, or cannot be understood.
    pub(crate) fn ask(socket: &Path) -> Result<Self> {
        let asking = || format!("cannot take over from the daemon at {}", socket.display());
        let stream = UnixStream::connect(socket).with_context(asking)?;
        stream.set_read_timeout(Some(ANSWER_MAX))?;
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let begin = serde_json::to_value(Begin { formats: FORMATS.to_vec(), version })?;
        let asked = ask::<Description>(&stream, BEGIN, &begin);
        let (description, mut fds) = asked.with_context(asking)?;
        let Description { version, process, life, control, exports } = description;
        let control = control.map(|control| Endpoint::take_over(control, &mut fds)).transpose()?;
        Ok(Self { stream, version, process, life, control, exports, fds })
    }

    /// Takes over, into a daemon that has no exports. Nothing is served when this returns, and
    /// nobody else will: [`Taken::go_on`] is next. `last` is called before the old process hears
    /// that.
    ///
    /// # Errors
    ///
    /// When that fails. The old process goes on.
    pub(crate) fn take<T>(
        mut self,
        daemon: &Daemon,
        last: impl FnOnce() -> Result<T>,
    ) -> Result<(Taken, T)> {
        let taken = self.try_take(daemon, last);
        if let Err(error) = &taken {
            let why = json!({ "why": format!("{error:#}") });
            // It may have gone.
            let _ = send(&self.stream, GIVE_UP, &why);
        }
        taken
    }

    fn try_take<T>(
        &mut self,
        daemon: &Daemon,
        last: impl FnOnce() -> Result<T>,
    ) -> Result<(Taken, T)> {
        let handed = std::mem::take(&mut self.exports);
        let exports = handed.len();
        let expected: Expected =
            daemon.expect(handed, &mut self.fds).map_err(CommandError::into_error)?;
        tracing::info!("ready to take over {exports} exports from process {}", self.process);
        let paused = ask::<Standstill>(&self.stream, PAUSE, &Value::Null);
        let (standstill, fds) = paused.context("the old process does not stop")?;
        daemon.take_over(expected, standstill.exports, fds)?;
        let result = last()?;
        // Without a limit: whether it has heard must be known.
        self.stream.set_read_timeout(None)?;
        ask::<Value>(&self.stream, TAKE, &Value::Null)
            .context("the old process has not said that it leaves")?;
        let taken = Taken {
            stream: self.stream.try_clone()?,
            since_ns: standstill.since_ns,
            version: self.version.clone(),
            process: self.process,
            exports,
        };
        Ok((taken, result))
    }
}

impl Taken {
    /// Serves.
    pub(crate) fn go_on(self, daemon: &Daemon) {
        daemon.go_on();
        let now = clock_gettime(ClockId::Monotonic);
        let now = now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs();
        let still = Duration::from_nanos(now.saturating_sub(self.since_ns));
        let Self { version, process, exports, .. } = self;
        tracing::info!(
            "took over {exports} exports from process {process}, ringhaul {version}; queues stood \
             still for {:.1} ms",
            still.as_secs_f64() * 1e3
        );
        drop(self.stream);
    }
}

fn send(mut stream: &UnixStream, method: &str, params: &Value) -> Result<()> {
    let line = json!({ "jsonrpc": "2.0", "id": method, "method": method, "params": params });
    Ok(stream.write_all(format!("{line}\n").as_bytes())?)
}

/// Asks for something, and waits for the answer with its descriptors.
fn ask<T: DeserializeOwned>(
    stream: &UnixStream,
    method: &str,
    params: &Value,
) -> Result<(T, HandedFds)> {
    send(stream, method, params)?;
    let mut receiver = Receiver::new(stream);
    let Some(line) = receiver.line().context("it says nothing")? else { bail!("it has hung up") };
    let mut answer: Value = serde_json::from_slice(&line)?;
    if let Some(why) = answer["error"]["message"].as_str() {
        return Err(anyhow!("it refuses: {why}"));
    }
    let answer: Answer<T> = serde_json::from_value(answer["result"].take())
        .context("its answer is not understood, although the formats fit")?;
    let fds = receiver.fds(answer.descriptors.len())?;
    Ok((answer.says, HandedFds::new(answer.descriptors, fds)))
}
