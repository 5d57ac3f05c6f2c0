//! The old process: describes its exports, stops its queues, and leaves or resumes.

use std::io::{BufRead, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use serde_json::{Value, json};
use virtqueue::InflightRegion;

use super::format::{
    Answer, BEGIN, Begin, Description, FORMATS, GIVE_UP, PAUSE, Request, Standstill, TAKE,
    common_format,
};
use super::wire::send_fds;
use crate::command::CommandError;
use crate::daemon::Daemon;
use crate::handed_fds::HandedFds;
use crate::kept::{Closed, Kept};
use crate::notify;
use crate::peer::Peer;
use crate::succession::Refusal;

/// The time that the new process may take to open the exports.
const OPEN_MAX: Duration = Duration::from_secs(300);
/// The time that the new process may take while queues are stopped: guests wait.
const TAKE_MAX: Duration = Duration::from_secs(5);
/// The codes of a refusal, like on the control socket: try again later, or not.
const LATER: i32 = 10;
const FAILED: i32 = 1;
/// The longest request, in bytes.
const LINE_MAX: u64 = 64 << 10;

/// Returns the takeover that a client's request begins, if it is such a request.
pub(crate) fn asked(line: &[u8]) -> Option<Asked> {
    let Request { id, method, params, .. } = serde_json::from_slice(line).ok()?;
    (method == BEGIN).then_some(Asked { id, params })
}

/// A request that begins a takeover.
pub(crate) struct Asked {
    id: Value,
    params: Value,
}

/// Hands everything over to the process at the other end. If a step fails before that process has
/// announced the takeover, this one resumes.
///
/// # Errors
///
/// The failure. The new process has received it, if possible.
pub(crate) fn give(
    daemon: &Daemon,
    Asked { id, params }: Asked,
    reader: &mut dyn BufRead,
    stream: &UnixStream,
) -> Result<()> {
    let mut talk = Talk { reader, stream, id };
    let peer = Peer::of(stream).context("cannot tell who it is")?;
    let process = peer.pid.context("it is in a PID namespace that is not visible from here")?;
    let succession = daemon.succession();
    let given = succession.begin_hand_over(process).map_err(anyhow::Error::from);
    let given = given.and_then(|_running| {
        let described = describe(daemon, params, process, &mut talk)?;
        stop(daemon, described, process, &mut talk)
    });
    if let Err(error) = &given {
        tracing::warn!("process {process} does not take over: {error:#}");
        let why = format!("{error:#}");
        let refusal = error.downcast_ref::<CommandError>();
        let is_of_the_moment = refusal.is_some_and(CommandError::is_of_the_moment);
        // The command that has started the process must know first: the process ends when it
        // receives the refusal.
        succession.refuse(process, Refusal { why: why.clone(), is_of_the_moment });
        talk.refuse(&why, is_of_the_moment);
    }
    given
}

/// The generation of the described exports, and the format of the description.
struct Said {
    generation: u64,
    format: u32,
}

/// Describes this process and its exports.
fn describe(daemon: &Daemon, params: Value, process: u32, talk: &mut Talk<'_>) -> Result<Said> {
    let Begin { formats, inflight_versions, version } = serde_json::from_value(params)?;
    let format = check_fits(&formats, &inflight_versions, &version)?;
    tracing::info!("process {process}, ringhaul {version}, wants to take over");
    let described = daemon.describe()?;
    let mut fds = described.fds;
    let (life, control) = daemon.life(&mut fds)?;
    let opening = daemon.hand_over_opening(described.opening, &mut fds)?;
    let description = Description {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        process: std::process::id(),
        life,
        control,
        exports: described.exports,
        opening,
    };
    talk.answer(&description, &fds)?;
    Ok(Said { generation: described.generation, format })
}

/// Checks that a process of another version can continue here. Returns the format that both
/// understand.
fn check_fits(formats: &[u32], inflight_versions: &[u16], version: &str) -> Result<u32> {
    let own = env!("CARGO_PKG_VERSION");
    let Some(format) = common_format(formats) else {
        bail!(
            "ringhaul {own} describes itself in one of the formats {FORMATS:?}, and ringhaul \
             {version} understands {formats:?} only; restart it instead, or go by way of a version \
             between the two"
        );
    };
    let inflight = InflightRegion::VERSION;
    if !inflight_versions.contains(&inflight) {
        bail!(
            "ringhaul {own} keeps inflight regions of version {inflight}, and ringhaul {version} \
             understands {inflight_versions:?} only; go by way of a version that understands both"
        );
    }
    Ok(format)
}

/// Stops the queues, and leaves when the new process takes over.
fn stop(daemon: &Daemon, said: Said, process: u32, talk: &mut Talk<'_>) -> Result<()> {
    talk.expect(PAUSE, OPEN_MAX)?;
    let (standing, paused) = daemon.pause(said.generation)?;
    let (since_ns, changes) = (monotonic_ns(paused.since), daemon.changes());
    let (of_file, debts) = (daemon.exports_of_file(), daemon.group_debts());
    let standstill = Standstill { since_ns, changes, of_file, exports: paused.exports, debts };
    talk.answer(&standstill.for_format(said.format), &paused.fds)?;
    drop(paused.fds);
    talk.expect(TAKE, TAKE_MAX)?;
    let closed = daemon.kept().map(Kept::close);
    let stream = talk.stream.try_clone()?;
    let disks = standing.commit()?;
    // From here on only the new process may serve, if it receives this.
    talk.answer(&json!({}), &HandedFds::default())?;
    closed.into_iter().for_each(Closed::leave);
    notify::main_process(process);
    standing.leave(process, stream, disks);
    Ok(())
}

/// A moment in nanoseconds of CLOCK_MONOTONIC, which processes share.
fn monotonic_ns(moment: Instant) -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let now = now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs();
    let ago = u64::try_from(moment.elapsed().as_nanos()).unwrap_or(u64::MAX);
    now.saturating_sub(ago)
}

/// The conversation with the new process.
struct Talk<'a> {
    reader: &'a mut dyn BufRead,
    stream: &'a UnixStream,
    /// The id of the request that was not answered yet.
    id: Value,
}

impl Talk<'_> {
    fn answer(&mut self, says: &impl Serialize, fds: &HandedFds) -> Result<()> {
        let result = Answer { says, descriptors: fds.names() };
        let line = json!({ "jsonrpc": "2.0", "id": self.id, "result": result });
        self.stream.write_all(format!("{line}\n").as_bytes())?;
        Ok(send_fds(self.stream, fds.all())?)
    }

    fn refuse(&mut self, why: &str, is_of_the_moment: bool) {
        let code = if is_of_the_moment { LATER } else { FAILED };
        let error = json!({ "code": code, "message": why });
        let line = json!({ "jsonrpc": "2.0", "id": self.id, "error": error });
        // The process may have gone.
        let _ = self.stream.write_all(format!("{line}\n").as_bytes());
    }

    /// Waits for a request, which must be `method`.
    fn expect(&mut self, method: &str, wait: Duration) -> Result<()> {
        self.stream.set_read_timeout(Some(wait))?;
        let mut line = Vec::new();
        let read = self.reader.take(LINE_MAX).read_until(b'\n', &mut line);
        if read.context("it says nothing")? == 0 {
            bail!("it has gone");
        }
        let request: Request = serde_json::from_slice(&line).context("it speaks otherwise")?;
        self.id = request.id;
        match &*request.method {
            this if this == method => Ok(()),
            GIVE_UP => bail!("{}", request.params["why"].as_str().unwrap_or("it does not say why")),
            other => bail!("it asks for {other} in place of {method}"),
        }
    }
}
