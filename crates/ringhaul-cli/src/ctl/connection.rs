//! The choice of a daemon, and the connection to it: questions, answers and events, a line each.
//! The names of exports, for the completion of a command line.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Error, Result, bail};
use clap_complete::CompletionCandidate;
use ringhaul::control_socket::descriptors::send_line;
use ringhaul::control_socket::trusted_path;
use ringhaul::takeover::wire::Receiver;
use rustix::net::sockopt::socket_peercred;
use serde_json::{Value, json};

/// A connection.
pub(super) struct Connection {
    path: PathBuf,
    receiver: Receiver,
    /// Events that came before an answer.
    events: VecDeque<Value>,
}

/// The exit status after a refusal or a failure of a command.
pub(super) const EXIT_REFUSED: u8 = 1;

/// The error code of an answer about an export that does not exist.
pub(super) const UNKNOWN: i64 = 2;

/// The reason that the daemon has not carried out a request.
pub(super) struct Refusal {
    pub(super) code: i64,
    pub(super) message: String,
}

impl Connection {
    pub(super) fn new(path: &Path) -> Result<Self> {
        Ok(Self::from_stream(path, connect(path)?))
    }

    pub(super) fn from_stream(path: &Path, stream: UnixStream) -> Self {
        let receiver = Receiver::new(stream);
        Self { path: path.to_owned(), receiver, events: VecDeque::new() }
    }

    pub(super) fn stream(&self) -> &UnixStream {
        self.receiver.stream()
    }

    /// The path in errors.
    pub(super) fn path(&self) -> std::path::Display<'_> {
        self.path.display()
    }

    /// The user that listens at the socket, as the kernel reports it.
    pub(super) fn user(&self) -> Option<u32> {
        self.owner().map(|(user, _)| user)
    }

    /// The user and the group that listen at the socket.
    pub(super) fn owner(&self) -> Option<(u32, u32)> {
        let peer = socket_peercred(self.stream()).ok()?;
        Some((peer.uid.as_raw(), peer.gid.as_raw()))
    }

    /// Limits each wait for the daemon to this time.
    pub(super) fn set_limit(&self, limit: Duration) -> io::Result<()> {
        self.stream().set_read_timeout(Some(limit))?;
        self.stream().set_write_timeout(Some(limit))
    }

    /// Calls a method, and waits for the answer.
    pub(super) fn call(&mut self, method: &str, params: &Value) -> Result<Result<Value, Refusal>> {
        self.call_with(method, params, &[])
    }

    /// Calls a method with open files, which `params` name.
    pub(super) fn call_with(
        &mut self,
        method: &str,
        params: &Value,
        files: &[File],
    ) -> Result<Result<Value, Refusal>> {
        // A daemon that refuses a client sends its reason and hangs up, so that sending may fail.
        let sent = self.send(method, params, files);
        loop {
            let Some(mut line) = self.line()? else {
                sent.map_err(|error| self.unanswered(error.into()))?;
                bail!("the daemon at {} closed the connection without an answer", self.path());
            };
            if line.get("method").is_some() {
                self.events.push_back(line["params"].take());
                continue;
            }
            return outcome(line);
        }
    }

    /// Sends a request.
    ///
    /// # Errors
    ///
    /// When the daemon has hung up. It may have sent a reason before.
    pub(super) fn send(&self, method: &str, params: &Value, files: &[File]) -> io::Result<()> {
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        let line = format!("{request}\n");
        let mut stream = self.stream();
        let sent = send_line(stream, line.as_bytes(), files)?;
        stream.write_all(&line.as_bytes()[sent..])
    }

    /// The descriptors that follow an answer.
    pub(super) fn descriptors(&mut self, count: usize) -> Result<Vec<OwnedFd>> {
        self.receiver.fds(count).map_err(|error| self.unanswered(error.into()))
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
                self.path()
            ),
        }
    }

    /// The next line. `None`: the daemon has hung up.
    fn line(&mut self) -> Result<Option<Value>> {
        let line = self.receiver.line().map_err(|error| self.unanswered(error.into()))?;
        line.map(|line| self.parse(&line)).transpose()
    }

    pub(super) fn parse(&self, line: &[u8]) -> Result<Value> {
        serde_json::from_slice(line)
            .with_context(|| format!("the answer of {} is not JSON", self.path()))
    }

    /// The error of a request without an answer.
    pub(super) fn unanswered(&self, error: Error) -> Error {
        let path = self.path();
        let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
        if kind == Some(ErrorKind::WouldBlock) {
            return error.context(format!(
                "the daemon at {path} has not answered in time; see its log, and restart it if it \
                 hangs"
            ));
        }
        error.context(format!("cannot send a request to the daemon at {path}"))
    }
}

/// Connects to a daemon. Its user could replace the socket by a link to that of another daemon,
/// which this user may command too: links of other users are refused.
pub(super) fn connect(path: &Path) -> Result<UnixStream> {
    let connect = || -> Result<UnixStream> {
        let socket = trusted_path::open_socket(path)?;
        Ok(UnixStream::connect(format!("/proc/self/fd/{}", socket.as_raw_fd()))?)
    };
    connect().with_context(|| {
        format!("cannot connect to {}; is it a daemon's --control?", path.display())
    })
}

/// The result in an answer, or the refusal.
pub(super) fn outcome(mut answer: Value) -> Result<Result<Value, Refusal>> {
    if let Some(error) = answer.get("error") {
        let message = error["message"].as_str().unwrap_or("the daemon refused the request");
        let (code, message) = (error["code"].as_i64().unwrap_or(0), message.to_owned());
        return Ok(Err(Refusal { code, message }));
    }
    let result = answer.get_mut("result").map(Value::take);
    Ok(Ok(result.context("the answer has neither result nor error")?))
}

/// The environment variable with the path of a control socket.
const VARIABLE: &str = "RINGHAUL_CONTROL";

/// The control socket of the chosen daemon: by the option, by the environment, or the only one at
/// the usual places.
pub(super) fn find_control_socket(control: Option<PathBuf>) -> Result<PathBuf> {
    let named = || std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    if let Some(path) = control.or_else(named) {
        return Ok(path);
    }
    let Places { sockets, hidden } = default_places(Path::new("/run"));
    match (&sockets[..], &hidden[..]) {
        ([only], _) => Ok(only.clone()),
        ([], [folder, ..]) => bail!(
            "cannot look for a control socket in {}: permission denied; run this as root, as the \
             user of the daemon, or as a member of its --control-group",
            folder.display()
        ),
        ([], []) => bail!(
            "which daemon is meant? use --control PATH or set {VARIABLE}; there is no socket \
             /run/ringhaul/control or /run/ringhaul-*/control"
        ),
        (several, _) => {
            let several = several.iter().map(|path| path.display().to_string());
            bail!(
                "which daemon is meant? use --control PATH or set {VARIABLE}; found {}",
                several.collect::<Vec<_>>().join(", ")
            )
        }
    }
}

/// The paths that docs/guide/service.md gives to control sockets.
#[derive(Debug, Default, PartialEq)]
struct Places {
    sockets: Vec<PathBuf>,
    /// Folders into which this user may not look.
    hidden: Vec<PathBuf>,
}

fn default_places(run: &Path) -> Places {
    let entries = std::fs::read_dir(run).into_iter().flatten().flatten();
    let is_ours = |name: &OsString| {
        let name = name.to_string_lossy();
        name == "ringhaul" || name.starts_with("ringhaul-")
    };
    let mut names: Vec<OsString> = entries.map(|entry| entry.file_name()).filter(is_ours).collect();
    names.sort();
    let mut places = Places::default();
    for folder in names.into_iter().map(|name| run.join(name)) {
        let socket = folder.join("control");
        match socket.try_exists() {
            Ok(true) => places.sockets.push(socket),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => places.hidden.push(folder),
            Ok(false) | Err(_) => {}
        }
    }
    places
}

/// The limit on the wait for the names, because the shell waits.
const NAMES_LIMIT: Duration = Duration::from_secs(1);

/// Names of the daemon's exports. Empty if the daemon does not answer.
pub(super) fn export_names() -> Vec<CompletionCandidate> {
    let words: Vec<OsString> = std::env::args_os().collect();
    let exports = find_control_socket(control_of(&words)).ok().and_then(|control| {
        let mut daemon = Connection::new(&control).ok()?;
        daemon.set_limit(NAMES_LIMIT).ok()?;
        daemon.call("export.list", &json!({})).ok()?.ok()
    });
    let exports = exports.as_ref().and_then(|exports| exports.as_array());
    let names = exports.into_iter().flatten().filter_map(|export| export["name"].as_str());
    names.map(CompletionCandidate::new).collect()
}

/// The control socket that a command line names.
fn control_of(words: &[OsString]) -> Option<PathBuf> {
    let of = |pair: &[OsString]| match pair {
        [option, path] if option == "--control" => Some(PathBuf::from(path)),
        _ => None,
    };
    let joined = words.iter().find_map(|word| word.to_str()?.strip_prefix("--control="));
    joined.map(PathBuf::from).or_else(|| words.windows(2).find_map(of))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::io::{BufRead, BufReader};
    use std::os::unix::fs::PermissionsExt;

    use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

    use super::*;

    #[test]
    fn an_event_that_comes_before_an_answer_is_not_lost() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let daemon = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            BufReader::new(&stream).read_line(&mut String::new()).unwrap();
            let event = |number| json!({ "method": "event", "params": { "number": number } });
            for line in [event(1), event(2), json!({ "result": {} }), event(3)] {
                writeln!(&stream, "{line}").unwrap();
            }
        });
        let mut connection = Connection::new(&path).unwrap();
        assert!(connection.call("subscribe", &json!({})).unwrap().is_ok());
        for number in 1..4 {
            assert_eq!(connection.event().unwrap()["number"], number);
        }
        daemon.join().unwrap();
    }

    /// A daemon with too many clients answers before it reads anything, and hangs up.
    #[test]
    fn the_answer_is_read_although_the_request_could_not_be_sent() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        // More than a socket takes, so that the request is never sent as a whole.
        let params = json!({ "text": "x".repeat(16 << 20) });
        for answer in ["{\"error\": { \"code\": 5, \"message\": \"it is full\" }}\n", ""] {
            let daemon = listener.try_clone().unwrap();
            let daemon = std::thread::spawn(move || {
                let (mut stream, _) = daemon.accept().unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
            });
            let called = Connection::new(&path).unwrap().call("ping", &params);
            daemon.join().unwrap();
            match called {
                Ok(refused) => {
                    let Err(Refusal { code, message }) = refused else { panic!("not a refusal") };
                    assert!(!answer.is_empty() && (code, &*message) == (5, "it is full"));
                }
                Err(error) => {
                    let error = format!("{error:#}");
                    assert!(
                        answer.is_empty() && error.contains("cannot send a request"),
                        "{error}"
                    );
                }
            }
        }
    }

    #[test]
    fn control_sockets_are_found_at_their_usual_places() {
        let run = tempfile::tempdir().unwrap();
        let path = |name: &str| run.path().join(name).join("control");
        assert_eq!(default_places(run.path()), Places::default());
        for name in ["ringhaul-b", "ringhaul", "other", "ringhaulx"] {
            std::fs::create_dir(run.path().join(name)).unwrap();
            std::fs::write(path(name), "").unwrap();
        }
        std::fs::create_dir(run.path().join("ringhaul-empty")).unwrap();
        let sockets = vec![path("ringhaul"), path("ringhaul-b")];
        assert_eq!(default_places(run.path()), Places { sockets, hidden: Vec::new() });
    }

    #[test]
    fn folders_that_this_user_may_not_enter_are_reported() {
        let run = tempfile::tempdir().unwrap();
        let folder = run.path().join("ringhaul-vm1");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("control"), "").unwrap();
        std::fs::set_permissions(&folder, Permissions::from_mode(0o000)).unwrap();
        let none = CapabilitySet::empty();
        // Of this thread alone, which ends with the test: root may enter every folder.
        set_capabilities(
            None,
            CapabilitySets { effective: none, permitted: none, inheritable: none },
        )
        .unwrap();
        let hidden = vec![folder.clone()];
        assert_eq!(default_places(run.path()), Places { sockets: Vec::new(), hidden });
        std::fs::set_permissions(&folder, Permissions::from_mode(0o700)).unwrap();
    }

    #[test]
    fn a_command_line_names_a_daemon() {
        let of = |words: &str| {
            let words: Vec<OsString> = words.split(' ').map(OsString::from).collect();
            control_of(&words)
        };
        assert_eq!(of("ringhaul ctl --control /c show"), Some("/c".into()));
        assert_eq!(of("ringhaul ctl --control=/c show"), Some("/c".into()));
        assert_eq!(of("ringhaul ctl show --control"), None);
    }
}
