//! The new process: opens the exports that the old one describes, and continues them when that has
//! stopped.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use blockio::executor::start_thread;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use vhost_user::PassedFds;
use virtqueue::InflightRegion;

use super::wire::{Receiver, monotonic_ns};
use crate::control::hand_over_state::{HandedExport, HandedOpening};
use crate::daemon::Daemon;
use crate::daemon::format::{
    Answer, BEGIN, Begin, Description, FORMATS, GIVE_UP, HandedSocket, PAUSE, PausedState,
    ProcessOptions, Request, TAKE,
};
use crate::daemon::hand_over::ExpectedExports;
use crate::process::service_manager;
use crate::process::thread_guard::ThreadGuard;
use crate::socket::Endpoint;
use crate::spec::ExportSpec;
use crate::spec::command::{Command, CommandError};
use crate::spec::settings::SettingsChange;
use crate::threads::ownership::{PASS_ON, PassedOn};

/// The time that the old process may take to answer while it serves, and to stop its queues.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// The process that this one takes over from. It resumes if this is dropped before
/// [`take`](Self::take).
pub(crate) struct Predecessor {
    receiver: Receiver,
    version: String,
    process: u32,
    /// The start of the old process.
    pub(crate) options: ProcessOptions,
    /// Its control socket.
    pub(crate) control: Option<Endpoint>,
    exports: Vec<HandedExport>,
    opening: Vec<HandedOpening>,
    sockets: Vec<HandedSocket>,
    fds: PassedFds,
}

/// A takeover that has succeeded.
pub(crate) struct Taken {
    receiver: Receiver,
    since_ns: u64,
    version: String,
    process: u32,
    exports: usize,
    /// The exports of the configuration file, if the old process had one.
    pub(crate) of_file: Option<Vec<ExportSpec>>,
    /// Exports that the old process has been opening, for this process to open.
    pub(crate) opening: Vec<ExportSpec>,
}

/// Reports to the old process the reason that this one does not take over.
pub(crate) struct RefusalSender(UnixStream);

impl RefusalSender {
    pub(crate) fn send(&self, error: &anyhow::Error) {
        // The old process may have gone.
        let _ = send(&self.0, GIVE_UP, &json!({ "why": format!("{error:#}") }));
    }
}

impl Predecessor {
    /// Keeps a way to report the reason that this process does not take over.
    ///
    /// # Errors
    ///
    /// When no descriptor is left.
    pub(crate) fn refusal_sender(&self) -> Result<RefusalSender> {
        let stream = self.receiver.stream().try_clone();
        Ok(RefusalSender(stream.context("cannot keep the connection to the old process")?))
    }

    /// The exports that this process is to serve.
    pub(crate) fn exports(&self) -> Vec<ExportSpec> {
        let opening = self.opening.iter().map(|opening| &opening.spec);
        self.exports.iter().map(|export| &export.spec).chain(opening).cloned().collect()
    }

    /// Requests the description of the daemon behind this control socket.
    ///
    /// # Errors
    ///
    /// When no daemon listens, or it refuses, or its answer is not understood.
    pub(crate) fn ask(socket: &Path) -> Result<Self> {
        let asking = || format!("cannot take over from the daemon at {}", socket.display());
        let stream = UnixStream::connect(socket).with_context(|| {
            format!(
                "{}; name the --control socket of a daemon that runs, or start without --takeover",
                asking()
            )
        })?;
        stream.set_read_timeout(Some(ANSWER_MAX))?;
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let (formats, inflight_versions) = (FORMATS.to_vec(), vec![InflightRegion::VERSION]);
        let takes_stashes = service_manager::is_present();
        let begin =
            Begin { formats, inflight_versions, version, takes_sockets: true, takes_stashes };
        let begin = serde_json::to_value(begin)?;
        let mut receiver = Receiver::new(stream);
        let asked = ask::<Description>(&mut receiver, BEGIN, &begin);
        let (description, mut fds) = asked.with_context(asking)?;
        let Description { version, process, options, control, exports, opening, sockets } =
            description;
        let control = control.map(|control| Endpoint::take_over(control, &mut fds)).transpose()?;
        let predecessor =
            Self { receiver, version, process, options, control, exports, opening, sockets, fds };
        Ok(predecessor)
    }

    /// Takes over, into a daemon that has no exports. When this returns, neither process serves,
    /// and [`Taken::resume`] must be called. `last` is called before the old process is told to
    /// leave.
    ///
    /// # Errors
    ///
    /// When that fails. The old process resumes.
    pub(crate) fn take<T>(
        mut self,
        daemon: &Daemon,
        last: impl FnOnce() -> Result<T>,
    ) -> Result<(Taken, T)> {
        let handed = std::mem::take(&mut self.exports);
        let exports = handed.len();
        // First, because they have the names that their unit gives them.
        daemon.expect_sockets(std::mem::take(&mut self.sockets), &mut self.fds)?;
        let expected: ExpectedExports =
            daemon.expect(handed, &mut self.fds).map_err(CommandError::into_error)?;
        let opening = std::mem::take(&mut self.opening);
        let opening = daemon.expect_opening(opening, &mut self.fds)?;
        tracing::info!("ready to take over {} from process {}", counted(exports), self.process);
        let paused = ask::<PausedState>(&mut self.receiver, PAUSE, &Value::Null);
        let (mut paused_state, fds) =
            paused.context("the old process does not pause its queues")?;
        if paused_state.changes != self.options.changes {
            set(daemon, &paused_state.changes)?;
        }
        daemon.take_over(expected, std::mem::take(&mut paused_state.exports), fds)?;
        daemon.add_group_debts(&paused_state.debts);
        paused_state.start_time.into_iter().for_each(|time| daemon.set_start_time(time));
        let iothreads = std::mem::take(&mut paused_state.iothreads);
        daemon.continue_counters(paused_state.failed_takeovers.unwrap_or(0), iothreads);
        let result = last()?;
        // No time-out: this process must know if the old one has received the request.
        self.receiver.stream().set_read_timeout(None)?;
        ask::<Value>(&mut self.receiver, TAKE, &Value::Null)
            .context("the old process has not confirmed the takeover")?;
        let Self { receiver, version, process, .. } = self;
        let PausedState { since_ns, of_file, .. } = paused_state;
        let taken = Taken { receiver, since_ns, version, process, exports, of_file, opening };
        Ok((taken, result))
    }
}

impl Taken {
    /// Serves. Returns the source of the requests that the old process still passes on.
    pub(crate) fn resume(self, daemon: &Daemon) -> PassedOnRequests {
        daemon.resume();
        let now = monotonic_ns(Instant::now());
        let still = Duration::from_nanos(now.saturating_sub(self.since_ns));
        let Self { receiver, version, process, exports, .. } = self;
        tracing::info!(
            "took over {} from process {process}, ringhaul {version}; queues stood \
             still for {:.1} ms",
            counted(exports),
            still.as_secs_f64() * 1e3
        );
        PassedOnRequests(receiver)
    }
}

/// A number of exports, in words.
fn counted(exports: usize) -> String {
    if exports == 1 { "1 export".to_owned() } else { format!("{exports} exports") }
}

/// Requests that the old process passes on until it has ended, because they came too late for it.
pub(crate) struct PassedOnRequests(Receiver);

impl PassedOnRequests {
    /// Calls `carry_out` for each request, on a thread.
    ///
    /// # Errors
    ///
    /// When the kernel has no thread or descriptor left.
    pub(crate) fn listen(
        mut self,
        carry_out: impl Fn(PassedOn) + Send + 'static,
    ) -> Result<ThreadGuard> {
        let stream = self.0.stream().try_clone().context("cannot copy a socket")?;
        let listen = move || {
            while let Ok(Some(line)) = self.0.line() {
                match serde_json::from_slice::<Request>(&line) {
                    Ok(Request { method, params, .. }) if method == PASS_ON => {
                        match serde_json::from_value(params) {
                            Ok(what) => carry_out(what),
                            Err(error) => tracing::warn!(
                                "the old process passed on an unknown request: {error}"
                            ),
                        }
                    }
                    _ => tracing::warn!("cannot understand a message of the old process"),
                }
            }
        };
        let thread = start_thread("ringhaul-heir", listen);
        let thread = thread.context("cannot start the thread that reads from the old process")?;
        Ok(ThreadGuard::new(thread, move || {
            // The old process may have ended, and the thread with its connection.
            let _ = stream.shutdown(Shutdown::Both);
        }))
    }
}

/// Applies the settings that were changed in the old process.
///
/// # Errors
///
/// When one is out of its range here.
pub(crate) fn set(daemon: &Daemon, changes: &SettingsChange) -> Result<()> {
    let changed = daemon.handle(Command::Set(changes.clone()));
    changed
        .map_err(CommandError::into_error)
        .context("cannot apply the settings of the old process")
        .map(drop)
}

fn send(mut stream: &UnixStream, method: &str, params: &Value) -> Result<()> {
    let line = json!({ "jsonrpc": "2.0", "id": method, "method": method, "params": params });
    Ok(stream.write_all(format!("{line}\n").as_bytes())?)
}

/// Sends a request, and waits for the answer with its descriptors.
fn ask<T: DeserializeOwned>(
    receiver: &mut Receiver,
    method: &str,
    params: &Value,
) -> Result<(T, PassedFds)> {
    // A process that refuses sends its reason and hangs up, so that sending may fail.
    let sent = send(receiver.stream(), method, params);
    let line = match receiver.line() {
        Ok(Some(line)) => line,
        nothing => {
            sent?;
            nothing.context("it does not answer")?;
            bail!("it has closed the connection");
        }
    };
    let mut answer: Value = serde_json::from_slice(&line)?;
    if let Some(why) = answer["error"]["message"].as_str() {
        return Err(anyhow!("it refused: {why}"));
    }
    let answer: Answer<T> = serde_json::from_value(answer["result"].take())
        .context("cannot understand its answer, although the formats match")?;
    let fds = receiver.fds(answer.descriptors.len())?;
    Ok((answer.says, PassedFds::new(answer.descriptors, fds)))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;
    use std::sync::{Arc, mpsc};

    use clap::{Args, FromArgMatches};

    use super::*;
    use crate::options::ServeArgs;
    use crate::socket::EndpointState;
    use crate::socket::inherited::InheritedSockets;
    use crate::spec::command::Reply;
    use crate::threads::ownership::Ownership;

    #[test]
    fn a_refusal_is_heard_of_a_process_that_has_hung_up() {
        let (new, mut old) = UnixStream::pair().unwrap();
        let refusal = json!({ "error": { "code": 7, "message": "only root may" } });
        old.write_all(format!("{refusal}\n").as_bytes()).unwrap();
        drop(old);
        let mut receiver = Receiver::new(new);
        let ask = |receiver: &mut _| ask::<Value>(receiver, BEGIN, &Value::Null);
        let refused = ask(&mut receiver).map(drop).unwrap_err().to_string();
        assert_eq!(refused, "it refused: only root may");
        let gone = format!("{:#}", ask(&mut receiver).map(drop).unwrap_err());
        assert!(gone.contains("Broken pipe"), "{gone}");
    }

    #[test]
    fn requests_that_the_old_process_passes_on_are_heeded() {
        let (new, old) = UnixStream::pair().unwrap();
        let (heeds, heeded) = mpsc::channel();
        let heed = move |what| heeds.send(what).unwrap();
        let thread = PassedOnRequests(Receiver::new(new)).listen(heed).unwrap();
        let ownership = Ownership::default();
        send(&old, "more", &Value::Null).unwrap();
        send(&old, PASS_ON, &json!("dance")).unwrap();
        ownership.transfer(7, old, |_| {});
        for what in [PassedOn::Reload, PassedOn::End] {
            ownership.run_or_pass_on(what, || panic!("it is passed on"));
        }
        drop(ownership);
        assert_eq!(heeded.iter().collect::<Vec<_>>(), [PassedOn::Reload, PassedOn::End]);
        drop(thread);
    }

    /// Otherwise the thread may be the last owner of the daemon, and close files that it must not.
    #[test]
    fn the_thread_that_hears_the_old_process_ends_before_its_daemon() {
        let (new, _old) = UnixStream::pair().unwrap();
        let owned = Arc::new(());
        let of_thread = Arc::clone(&owned);
        let heed = move |_| drop(Arc::clone(&of_thread));
        drop(PassedOnRequests(Receiver::new(new)).listen(heed).unwrap());
        assert_eq!(Arc::strong_count(&owned), 1, "the thread still runs");
    }

    /// An old process without exports, with its settings as it described itself.
    fn predecessor(stream: UnixStream, changes: &SettingsChange) -> Predecessor {
        let options =
            ProcessOptions { directory: "/".into(), arguments: vec![], changes: changes.clone() };
        Predecessor {
            receiver: Receiver::new(stream),
            version: String::new(),
            process: 1,
            options,
            control: None,
            exports: Vec::new(),
            opening: Vec::new(),
            sockets: Vec::new(),
            fds: PassedFds::default(),
        }
    }

    /// Answers as an old process without exports that has these settings when it stops.
    fn stop_and_hand_over(mut stream: &UnixStream, changes: &SettingsChange) {
        let mut lines = BufReader::new(stream).lines();
        let (of_file, exports, debts) = (None, Vec::new(), Default::default());
        let stands = PausedState {
            since_ns: 0,
            changes: changes.clone(),
            of_file,
            exports,
            start_time: None,
            failed_takeovers: None,
            iothreads: Vec::new(),
            debts,
        };
        for (method, says) in [(PAUSE, json!(stands)), (TAKE, json!({}))] {
            let request: Request = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
            assert_eq!(request.method, method);
            let answer = Answer { says, descriptors: Vec::new() };
            let answer = json!({ "jsonrpc": "2.0", "id": request.id, "result": answer });
            writeln!(stream, "{answer}").unwrap();
        }
    }

    /// Commands that set something do not wait for a takeover.
    #[test]
    fn settings_hold_that_the_old_process_got_after_it_described_itself() {
        let set = |poll_max_us, poll_budget| SettingsChange { log: None, poll_max_us, poll_budget };
        let before = set(Some(7), None);
        for late in [before.clone(), set(Some(9), None), set(Some(7), Some(3))] {
            let serve = ServeArgs::augment_args(clap::Command::new("serve"));
            let args = ServeArgs::from_arg_matches(&serve.get_matches_from(["serve"])).unwrap();
            let (daemon, _ending) = Daemon::start(args, InheritedSockets::default()).unwrap();
            super::set(&daemon, &before).unwrap();
            let (ours, theirs) = UnixStream::pair().unwrap();
            ours.set_read_timeout(Some(ANSWER_MAX)).unwrap();
            let (taken, ()) = std::thread::scope(|scope| {
                scope.spawn(|| stop_and_hand_over(&theirs, &late));
                predecessor(ours, &before).take(&daemon, || Ok(())).unwrap()
            });
            let limit = taken.receiver.stream().read_timeout().unwrap();
            assert_eq!(limit, None, "the confirmation may take any time");
            let _last_words = taken.resume(&daemon);
            let reply = daemon.handle(Command::Set(SettingsChange::default())).unwrap();
            let Reply::Settings(now) = reply else { panic!("{reply:?}") };
            assert_eq!(Some(now.poll_max_us.into()), late.poll_max_us);
            assert_eq!(now.poll_budget == 3, late.poll_budget.is_some());
            assert_eq!(daemon.changes(), late, "a further process hears of them");
        }
    }

    /// The new process would serve with other settings than its users have made.
    #[test]
    fn a_setting_that_is_out_of_range_here_refuses_the_takeover() {
        let serve = ServeArgs::augment_args(clap::Command::new("serve"));
        let args = ServeArgs::from_arg_matches(&serve.get_matches_from(["serve"])).unwrap();
        let (daemon, _ending) = Daemon::start(args, InheritedSockets::default()).unwrap();
        let before = daemon.changes();
        let change = SettingsChange { log: Some("loud".to_owned()), ..SettingsChange::default() };
        let error = format!("{:#}", super::set(&daemon, &change).unwrap_err());
        assert!(error.starts_with("cannot apply the settings of the old process"), "{error}");
        assert!(error.contains("loud"), "{error}");
        assert_eq!(daemon.changes(), before);
    }

    /// The caller of an upgrade reads the whole reason.
    #[test]
    fn a_refusal_has_all_its_causes() {
        let (new, old) = UnixStream::pair().unwrap();
        RefusalSender(new).send(&anyhow!("the disk is gone").context("cannot take over"));
        let line = BufReader::new(old).lines().next().unwrap().unwrap();
        let sent: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(sent["method"], GIVE_UP);
        assert_eq!(sent["params"]["why"], "cannot take over: the disk is gone");
    }

    /// An export for it may be added later.
    #[test]
    fn a_passed_socket_without_an_export_is_taken_over() {
        let serve = ServeArgs::augment_args(clap::Command::new("serve"));
        let args = ServeArgs::from_arg_matches(&serve.get_matches_from(["serve"])).unwrap();
        let (daemon, _ending) = Daemon::start(args, InheritedSockets::default()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut old = predecessor(ours, &SettingsChange::default());
        let listener = UnixListener::bind(folder.path().join("later")).unwrap();
        let socket = old.fds.put("socket", listener).unwrap();
        let socket = EndpointState::Inherited { socket, was_blocking: false };
        old.sockets = vec![HandedSocket { name: "later".to_owned(), socket }];
        std::thread::scope(|scope| {
            scope.spawn(|| stop_and_hand_over(&theirs, &SettingsChange::default()));
            old.take(&daemon, || Ok(())).map(drop).unwrap();
        });
        let handed = daemon.hand_over_sockets(&mut PassedFds::default()).unwrap();
        assert_eq!(handed.iter().map(|socket| &*socket.name).collect::<Vec<_>>(), ["later"]);
    }

    /// A process that hangs must not delay the start for ever.
    #[test]
    fn an_old_process_has_limited_time_to_describe_itself() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control");
        let listener = UnixListener::bind(&socket).unwrap();
        let changes = SettingsChange::default();
        let options = ProcessOptions { directory: "/".into(), arguments: vec![], changes };
        let (version, process) = ("1".to_owned(), 7);
        let (control, exports, opening, sockets) = (None, Vec::new(), Vec::new(), Vec::new());
        let says = Description { version, process, options, control, exports, opening, sockets };
        let answer = Answer { says, descriptors: Vec::new() };
        let asked = std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut stream = listener.accept().unwrap().0;
                let line = BufReader::new(&stream).lines().next().unwrap().unwrap();
                let request: Request = serde_json::from_str(&line).unwrap();
                assert_eq!(request.method, BEGIN);
                let answer = json!({ "jsonrpc": "2.0", "id": request.id, "result": answer });
                stream.write_all(format!("{answer}\n").as_bytes()).unwrap();
            });
            Predecessor::ask(&socket).unwrap()
        });
        assert_eq!(asked.receiver.stream().read_timeout().unwrap(), Some(ANSWER_MAX));
        assert_eq!((asked.process, &*asked.version), (7, "1"));
    }
}
