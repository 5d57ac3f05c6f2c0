//! The old process: describes its exports, stops its queues, and leaves or resumes.

use std::io::{BufRead, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::{Value, json};
use vhost_user::PassedFds;
use virtqueue::InflightRegion;

use super::wire::{monotonic_ns, send_fds};
use crate::daemon::Daemon;
use crate::daemon::format::{
    Answer, BEGIN, Begin, Description, FORMATS, GIVE_UP, PAUSE, PausedState, Request, TAKE,
    WITHOUT_STASHES, common_format,
};
use crate::daemon::saved_state::{SavedState, WritesBlocked};
use crate::process::peer::Peer;
use crate::process::service_manager;
use crate::spec::command::CommandError;
use crate::threads::ownership::Refusal;

/// The time that the new process may take to open the exports.
pub(super) const OPEN_MAX: Duration = Duration::from_secs(300);
/// The time that the new process may take while queues are stopped: guests wait.
pub(super) const TAKE_MAX: Duration = Duration::from_secs(5);
/// The codes of a refusal, like on the control socket: try again later, or not.
const LATER: i32 = 10;
const FAILED: i32 = 1;
/// The longest request, in bytes.
const LINE_MAX: u64 = 64 << 10;

/// Returns the takeover that a client's request begins, if it is such a request.
pub(crate) fn parse_request(line: &[u8]) -> Option<TakeoverRequest> {
    let Request { id, method, params, .. } = serde_json::from_slice(line).ok()?;
    (method == BEGIN).then_some(TakeoverRequest { id, params })
}

/// A request that begins a takeover.
pub(crate) struct TakeoverRequest {
    id: Value,
    params: Value,
}

/// Hands everything over to the new process, at the far end. If a step fails before that process
/// has announced the takeover, this one resumes.
///
/// # Errors
///
/// The failure. The new process has received it, if possible.
pub(crate) fn hand_over(
    daemon: &Daemon,
    TakeoverRequest { id, params }: TakeoverRequest,
    reader: &mut dyn BufRead,
    stream: &UnixStream,
) -> Result<()> {
    let mut conversation = Conversation { reader, stream, id };
    let peer = Peer::from_socket(stream).context("cannot identify the client")?;
    let process = peer.pid.context("its PID namespace is not visible here")?;
    let ownership = daemon.ownership();
    let given = ownership.begin_hand_over(process).map_err(anyhow::Error::from);
    let given = given.and_then(|_running| {
        let described = describe(daemon, params, process, &mut conversation)?;
        stop(daemon, described, process, &mut conversation)
    });
    if let Err(error) = &given {
        tracing::warn!("process {process} does not take over: {error:#}");
        daemon.failed_takeovers.fetch_add(1, Ordering::Relaxed);
        let why = format!("{error:#}");
        let refusal = error.downcast_ref::<CommandError>();
        let is_transient = refusal.is_some_and(CommandError::is_transient);
        // The command that has started the process must know first: the process ends when it
        // receives the refusal.
        ownership.refuse(process, Refusal { why: why.clone(), is_transient });
        conversation.refuse(&why, is_transient);
    }
    given
}

/// The generation of the described exports, and the format of the description.
struct DescribedState {
    generation: u64,
    format: u32,
    /// The new process continues the stashes of front-ends.
    leaves_stashes: bool,
}

/// Describes this process and its exports.
fn describe(
    daemon: &Daemon,
    params: Value,
    process: u32,
    conversation: &mut Conversation<'_>,
) -> Result<DescribedState> {
    let Begin { formats, inflight_versions, version, takes_sockets, takes_stashes } =
        serde_json::from_value(params)?;
    let format = check_fits(&formats, &inflight_versions, &version)?;
    tracing::info!("process {process}, ringhaul {version}, wants to take over");
    let described = daemon.describe()?;
    let mut fds = described.fds;
    let (options, control) = daemon.process_options(&mut fds)?;
    let opening = daemon.hand_over_opening(described.opening, &mut fds)?;
    let sockets = if takes_sockets { daemon.hand_over_sockets(&mut fds)? } else { Vec::new() };
    let description = Description {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        process: std::process::id(),
        options,
        control,
        exports: described.exports,
        opening,
        sockets,
    };
    conversation.answer(&description.for_format(format), &fds)?;
    let leaves_stashes = takes_stashes && format > WITHOUT_STASHES;
    Ok(DescribedState { generation: described.generation, format, leaves_stashes })
}

/// Checks that a process of another version can continue here. Returns the format that both
/// understand.
fn check_fits(formats: &[u32], inflight_versions: &[u16], version: &str) -> Result<u32> {
    let own = env!("CARGO_PKG_VERSION");
    let Some(format) = common_format(formats) else {
        bail!(
            "ringhaul {own} writes the takeover formats {FORMATS:?}, and ringhaul {version} reads \
             only {formats:?}; restart the daemon instead, or upgrade through a version between \
             the two"
        );
    };
    let inflight = InflightRegion::VERSION;
    if !inflight_versions.contains(&inflight) {
        bail!(
            "ringhaul {own} keeps inflight regions of version {inflight}, and ringhaul {version} \
             reads only {inflight_versions:?}; upgrade through a version that reads both"
        );
    }
    Ok(format)
}

/// Stops the queues, and leaves when the new process takes over.
fn stop(
    daemon: &Daemon,
    described: DescribedState,
    process: u32,
    conversation: &mut Conversation<'_>,
) -> Result<()> {
    conversation.expect(PAUSE, OPEN_MAX)?;
    let (paused_queues, paused) = daemon.pause(described.generation)?;
    let (since_ns, changes) = (monotonic_ns(paused.since), daemon.changes());
    let (of_file, debts) = (daemon.config_exports(), daemon.group_debts());
    let start_time = Some(daemon.start_time());
    let mut paused_state = PausedState {
        since_ns,
        changes,
        of_file,
        exports: paused.exports,
        start_time,
        failed_takeovers: Some(daemon.failed_takeovers.load(Ordering::Relaxed)),
        iothreads: daemon.iothread_stats(),
        debts,
    };
    if !described.leaves_stashes {
        paused_state.forget_stashes();
    }
    conversation.answer(&paused_state.for_format(described.format), &paused.fds)?;
    drop(paused.fds);
    conversation.expect(TAKE, TAKE_MAX)?;
    let closed = daemon.saved_state().map(SavedState::block_writes);
    let stream = conversation.stream.try_clone()?;
    let disks = paused_queues.commit(described.leaves_stashes)?;
    // The new process may report to the service manager as soon as it receives the answer.
    service_manager::main_process(process);
    // From here on only the new process may serve, if it receives this.
    conversation
        .answer(&json!({}), &PassedFds::default())
        .inspect_err(|_| service_manager::main_process(std::process::id()))?;
    closed.into_iter().for_each(WritesBlocked::hand_over);
    paused_queues.release(process, stream, disks);
    Ok(())
}

/// The conversation with the new process.
struct Conversation<'a> {
    reader: &'a mut dyn BufRead,
    stream: &'a UnixStream,
    /// The id of the request that was not answered yet.
    id: Value,
}

impl Conversation<'_> {
    fn answer(&mut self, says: &impl Serialize, fds: &PassedFds) -> Result<()> {
        let result = Answer { says, descriptors: fds.names() };
        let line = json!({ "jsonrpc": "2.0", "id": self.id, "result": result });
        self.stream.write_all(format!("{line}\n").as_bytes())?;
        Ok(send_fds(self.stream, fds.all())?)
    }

    fn refuse(&mut self, why: &str, is_transient: bool) {
        let code = if is_transient { LATER } else { FAILED };
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
        if read.context("it does not answer")? == 0 {
            bail!("it has closed the connection");
        }
        let request: Request =
            serde_json::from_slice(&line).context("cannot understand its message")?;
        self.id = request.id;
        match &*request.method {
            this if this == method => Ok(()),
            GIVE_UP => bail!("{}", request.params["why"].as_str().unwrap_or("without a reason")),
            other => bail!("it sent {other} instead of {method}"),
        }
    }
}
