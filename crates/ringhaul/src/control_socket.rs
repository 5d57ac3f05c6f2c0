//! The control socket: commands to a running daemon (docs/reference/control.md).
//!
//! Each connection has a thread that waits for its own requests only: IoThreads and the control
//! thread never wait for a client. The length of a request is bounded, and a client that does not
//! read its answers is dropped.

pub(crate) mod access;
mod client;
mod client_quota;
mod connection;
pub mod descriptors;
mod message;
mod methods;
mod schema;
pub mod trusted_path;

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Weak};
use std::time::Duration;

use anyhow::{Context, Result};
use blockio::executor::{Lock, start_thread};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use serde_json::Value;

use crate::daemon::Daemon;
use crate::process::peer::Peer;
use crate::process::thread_guard::ThreadGuard;
use crate::process::wake_fd::WakeFd;
use crate::socket::Endpoint;
use crate::socket::permissions::SocketGroups;
use crate::takeover;
use access::{Access, Role};
use client::Client;
use client_quota::ClientQuota;
use connection::{Connection, Input, LIMITS, Line};
use descriptors::Descriptor;
use message::{Code, Request, RpcError, answer_line};
use methods::{DESCRIPTORS, Kind, Method, find};

pub use methods::schema;

/// The time that a handing-over process takes to send the outcome of pending requests to its
/// clients.
const LAST_ANSWERS_MAX: Duration = Duration::from_secs(1);
/// The pause before the next `accept` after the kernel ran out of descriptors or memory.
const PAUSE: Duration = Duration::from_secs(1);

/// A listening control socket. Dropping it removes the socket.
pub(crate) struct ControlSocket {
    _thread: ThreadGuard,
    in_progress: Arc<RequestsInProgress>,
    /// Removes the socket when its last owner is dropped.
    endpoint: Arc<Endpoint>,
}

/// The number of requests in progress.
struct RequestsInProgress {
    count: Lock<usize>,
    decreased: Condvar,
    /// The longest wait for the last one.
    wait_max: Duration,
}

impl Default for RequestsInProgress {
    fn default() -> Self {
        let (count, decreased) = (Lock::default(), Condvar::new());
        Self { count, decreased, wait_max: LAST_ANSWERS_MAX }
    }
}

/// A request in progress.
struct RequestGuard<'a>(&'a RequestsInProgress);

impl RequestsInProgress {
    fn begin(&self) -> RequestGuard<'_> {
        *self.count.lock() += 1;
        RequestGuard(self)
    }

    /// Waits until no request is in progress, for a bounded time.
    fn wait(&self) {
        drop(self.count.wait_timeout_while(&self.decreased, self.wait_max, |count| *count > 0));
    }
}

impl Drop for RequestGuard<'_> {
    fn drop(&mut self) {
        *self.0.count.lock() -= 1;
        self.0.decreased.notify_all();
    }
}

impl ControlSocket {
    /// Creates a socket at `path`. Only this user, root and the members of `groups` may connect.
    ///
    /// # Errors
    ///
    /// When the socket cannot be created.
    pub(crate) fn bind(path: &Path, groups: SocketGroups) -> Result<Endpoint> {
        let endpoint = Endpoint::bind_private(path, "--control", groups)?;
        Ok(endpoint)
    }

    /// Starts to listen, for clients with these rights.
    ///
    /// # Errors
    ///
    /// When the kernel has no thread or descriptor left.
    pub(crate) fn start(
        endpoint: Arc<Endpoint>,
        access: Access,
        daemon: Weak<Daemon>,
    ) -> Result<Self> {
        let stop = Arc::new(WakeFd::new().context("cannot create an eventfd")?);
        let stopped = Arc::clone(&stop);
        let in_progress = Arc::<RequestsInProgress>::default();
        let counted = Arc::clone(&in_progress);
        let listening = Arc::clone(&endpoint);
        let thread = start_thread("ringhaul-rpc", move || {
            listen(&listening, &stopped, &access.into(), &daemon, &counted)
        })
        .context("cannot start the thread of the control socket")?;
        Ok(Self { _thread: ThreadGuard::new(thread, move || stop.wake()), in_progress, endpoint })
    }

    /// Leaves the socket to the next process; this one must end. Clients receive the outcome of
    /// their pending requests first.
    pub(crate) fn hand_over(self) {
        self.in_progress.wait();
        // Dropping its last owner would remove the socket.
        std::mem::forget(self.endpoint);
    }
}

/// Accepts clients until a wake by `stop`.
fn listen(
    endpoint: &Endpoint,
    stop: &WakeFd,
    access: &Arc<Access>,
    daemon: &Weak<Daemon>,
    in_progress: &Arc<RequestsInProgress>,
) {
    let Some(listener) = endpoint.listener() else { unreachable!("it was bound") };
    let quota = ClientQuota::default();
    while !wait(Some(listener), stop) {
        let Some(daemon) = daemon.upgrade() else { return };
        let accepted = {
            let Ok(_this_process) = daemon.ownership().await_ours() else { return };
            endpoint.accept()
        };
        let daemon = Arc::downgrade(&daemon);
        let stream = match accepted {
            Some(Ok(stream)) => stream,
            Some(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Some(Err(error)) => {
                tracing::warn!("cannot accept a client on the control socket: {error}");
                if wait(None, stop) {
                    return;
                }
                continue;
            }
            None => continue,
        };
        let (quota, access) = (quota.clone(), Arc::clone(access));
        let in_progress = Arc::clone(in_progress);
        let serve = move || {
            if let Err(error) = serve_client(stream, access, &daemon, &in_progress, &quota) {
                tracing::debug!("disconnected a client of the control socket: {error:#}");
            }
        };
        // Without a thread the client sees its connection closed.
        if let Err(error) = start_thread("ringhaul-client", serve) {
            tracing::warn!(
                "cannot serve a client of the control socket: its thread cannot start: {error}; \
                 raise the limit on processes (ulimit -u)"
            );
        }
    }
}

/// Waits for a client or, without a listener, for [`PAUSE`]. Returns true if the socket is to stop.
fn wait(listener: Option<&UnixListener>, stop: &WakeFd) -> bool {
    let pause = Timespec::try_from(PAUSE).ok().filter(|_| listener.is_none());
    let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
    fds.extend(listener.map(|listener| PollFd::new(listener, PollFlags::IN)));
    match poll(&mut fds, pause.as_ref()) {
        Ok(_) => !fds[0].revents().is_empty(),
        Err(Errno::INTR) => false,
        Err(error) => {
            tracing::error!("cannot wait for clients of the control socket: {error}");
            std::thread::sleep(PAUSE);
            // The failed poll has no result; this read does not block.
            stop.clear()
        }
    }
}

/// Answers the requests of one client until it disconnects.
fn serve_client(
    stream: UnixStream,
    access: Arc<Access>,
    daemon: &Weak<Daemon>,
    in_progress: &RequestsInProgress,
    quota: &ClientQuota,
) -> Result<()> {
    let connection = Arc::new(Connection::new(stream, LIMITS)?);
    let refuse =
        |code, text: &str| connection.send(&answer_line(None, Err(RpcError::new(code, text))));
    let peer = Peer::from_socket(&connection).context("cannot identify the client")?;
    let Some(role) = access.role_of(&*connection, peer.uid)? else {
        let text = "only root, the user of this daemon, its --control-group and its \
                    --control-read-group may send it requests";
        refuse(Code::Refused, text)?;
        return Ok(());
    };
    let slot = match quota.take(role) {
        Ok(slot) => slot,
        Err(problem) => {
            connection.send(&answer_line(None, Err(problem)))?;
            return Ok(());
        }
    };
    let mut client = Client::new(Weak::clone(daemon), access, peer, slot, Arc::clone(&connection));
    let mut input = if role == Role::Reader { Input::without_fds() } else { Input::default() };
    loop {
        match connection.receive(&mut input)? {
            Line::Whole(line) if line.trim_ascii().is_empty() => {}
            Line::Whole(line) => match takeover::old_process::parse_request(&line) {
                // A taker receives every descriptor of the daemon, so it must be the owner.
                Some(_) if role < Role::Owner => {
                    let text = "only root and the user of this daemon may take over from it";
                    input.close_fds();
                    refuse(Code::Refused, text)?;
                }
                Some(request) => {
                    let daemon = daemon.upgrade().context("the daemon is ending")?;
                    let (read, stream) = connection.make_blocking(input)?;
                    let mut reader = read.chain(BufReader::new(stream));
                    return takeover::old_process::hand_over(&daemon, request, &mut reader, stream);
                }
                None => {
                    let _answering = in_progress.begin();
                    let served = serve(&line, input.take_fds(), &mut client);
                    client.descriptors.clear();
                    served?;
                }
            },
            Line::TooLong => {
                let most = LIMITS.line_bytes;
                refuse(Code::NoRequest, &format!("a request has at most {most} bytes"))?;
                return Ok(());
            }
            Line::End => return Ok(()),
        }
    }
}

/// Carries out one request and answers it unless it is a notification.
fn serve(line: &[u8], fds: Vec<OwnedFd>, client: &mut Client) -> Result<()> {
    let request = match Request::parse(line.trim_ascii_end()) {
        Ok(request) => request,
        Err((id, problem)) => {
            client.connection.send(&answer_line(id.as_deref(), Err(problem)))?;
            return Ok(());
        }
    };
    let Request { id, method, mut params } = request;
    let subject = subject(&params);
    let is_listing = is_listing(&method, &params);
    let call = find(&method).and_then(|method| {
        client.check_role(method.name(), method.role())?;
        client.descriptors = take_descriptors(method, &mut params, fds)?;
        Ok((method.kind(), method.with(params)?))
    });
    let ends = matches!(call, Ok((Kind::Ends, _)));
    let connection = Arc::clone(&client.connection);
    let answer = |result| match &id {
        Some(id) => connection.send(&answer_line(Some(id), result)),
        None => Ok(()),
    };
    if ends {
        log_change(&method, None, &client.peer);
        answer(Ok(serde_json::json!({})))?;
    }
    let result = call.and_then(|(kind, call)| {
        let may_wait = matches!(kind, Kind::MayWait | Kind::Wait);
        let _waiting = may_wait.then(|| client.slot.begin_slow_request()).transpose()?;
        let done = call(client)?;
        if matches!(kind, Kind::Change | Kind::MayWait) && !is_listing {
            log_change(&method, subject.as_deref(), &client.peer);
        }
        Ok(done)
    });
    if !ends {
        answer(result)?;
        client.send_streams()?;
    }
    client.begin_events()
}

/// Takes the names of descriptors out of the parameters of a request, and gives them to the
/// descriptors that came with it.
fn take_descriptors(
    method: &dyn Method,
    params: &mut Value,
    fds: Vec<OwnedFd>,
) -> Result<Vec<(Descriptor, File)>, RpcError> {
    let refused = |error: String| RpcError::new(Code::Params, error);
    let names = params.as_object_mut().filter(|_| method.takes_descriptors());
    let names = match names.and_then(|params| params.remove(DESCRIPTORS)) {
        Some(names) => serde_json::from_value(names)
            .map_err(|error| refused(format!("{DESCRIPTORS}: {error}")))?,
        None => Vec::new(),
    };
    descriptors::named(names, fds).map_err(|error| refused(format!("{error:#}")))
}

/// The name of the export that a request is about.
fn subject(params: &Value) -> Option<String> {
    let name = [&params["export"], &params["name"], &params["endpoint"]["path"]];
    name.into_iter().find_map(Value::as_str).map(str::to_owned)
}

/// True if a request lists the settings that its method could change.
fn is_listing(method: &str, params: &Value) -> bool {
    let subjects: &[&str] = match method {
        "set" => &[],
        "disk.set" => &["export", "target", "lun"],
        _ => return false,
    };
    match params {
        Value::Null => true,
        Value::Object(params) => params.keys().all(|key| subjects.contains(&&**key)),
        _ => false,
    }
}

/// Logs a change with its author, for an audit.
fn log_change(method: &str, export: Option<&str>, Peer { pid, uid, .. }: &Peer) {
    let process =
        pid.map_or_else(|| "a process outside".to_owned(), |pid| format!("process {pid}"));
    tracing::info!(export, "{method} by user {uid}, {process}");
}

#[cfg(test)]
mod tests {
    use std::io::BufRead;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;
    use std::time::Instant;

    use clap::{Args, FromArgMatches};
    use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat, open};
    use rustix::process::{Gid, Uid, geteuid};
    use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
    use serde_json::json;

    use super::descriptors::send_line;
    use super::*;
    use crate::daemon::format::{BEGIN, FORMATS, GIVE_UP, ProcessOptions};
    use crate::options::ServeArgs;
    use crate::socket::inherited::InheritedSockets;
    use crate::spec::settings::SettingsChange;
    use crate::testing::{LogCapture, spawn_asleep};
    use crate::threads::ownership::Refusal;

    /// Clients could otherwise use up the open files of the daemon.
    #[test]
    fn descriptors_are_closed_if_no_disk_has_taken_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let served = std::thread::spawn(move || {
            let (in_progress, quota) = (RequestsInProgress::default(), ClientQuota::default());
            let access = Arc::new(Access::default());
            serve_client(ours, access, &Weak::new(), &in_progress, &quota)
        });
        let named = json!({ DESCRIPTORS: [{ "path": path }], "nonsense": 1 });
        let call = |method: &str, params: &Value| {
            json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params }).to_string()
        };
        for line in [
            String::new(),
            "nonsense".to_owned(),
            call("ping", &json!({})),
            call("export.add", &named),
        ] {
            let end = |flags| open(&path, flags | OFlags::CLOEXEC, Mode::empty()).unwrap();
            let reader = end(OFlags::RDONLY | OFlags::NONBLOCK);
            let writer = end(OFlags::WRONLY);
            send_line(&theirs, format!("{line}\n").as_bytes(), &[writer]).unwrap();
            // Ends when the last writer is closed.
            let (mut hang_up, limit) =
                ([PollFd::new(&reader, PollFlags::IN)], Timespec { tv_sec: 60, tv_nsec: 0 });
            assert_eq!(poll(&mut hang_up, Some(&limit)), Ok(1), "it stays open: {line}");
        }
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        served.join().unwrap().unwrap();
    }

    #[test]
    fn the_log_names_the_author_and_the_export_of_a_change() {
        for (pid, export, expected) in [
            (Some(71), Some("vm"), r#"disk.set by user 12, process 71 export="vm""#),
            (None, Some("vm"), r#"disk.set by user 12, a process outside export="vm""#),
            (Some(71), None, "disk.set by user 12, process 71"),
        ] {
            let peer = Peer { pid, uid: 12, gid: 13 };
            let lines = LogCapture::lines_of(|| log_change("disk.set", export, &peer));
            assert!(lines[0].ends_with(expected) && lines[0].contains(" INFO "), "{lines:?}");
        }
    }

    /// The log has a line for each change, for an audit.
    #[test]
    fn requests_that_name_no_setting_list_the_settings() {
        let disk = |more: &str| serde_json::from_str(&format!(r#"{{"export": "vm"{more}}}"#));
        let [whole, unit, limits] =
            ["", r#", "target": 0, "lun": 1"#, r#", "lun": 1, "limits": {}"#]
                .map(|more| disk(more).unwrap());
        for (method, params, expected) in [
            ("set", &Value::Null, true),
            ("set", &json!({}), true),
            ("set", &json!({ "log": "debug" }), false),
            ("set", &json!([]), false),
            ("disk.set", &whole, true),
            ("disk.set", &unit, true),
            ("disk.set", &limits, false),
            ("export.remove", &whole, false),
        ] {
            assert_eq!(is_listing(method, params), expected, "{method} {params}");
        }
    }

    #[test]
    fn the_socket_is_left_after_the_last_answers() {
        let (start, wait_max) = (Instant::now(), Duration::from_secs(60));
        let in_progress =
            Arc::new(RequestsInProgress { wait_max, ..RequestsInProgress::default() });
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let endpoint = Arc::new(Endpoint::bind(&path, "--control").unwrap());
        let ended = ThreadGuard::new(std::thread::spawn(|| {}), || {});
        let in_use = Arc::clone(&in_progress);
        let socket = ControlSocket { _thread: ended, in_progress: in_use, endpoint };
        std::thread::scope(|scope| {
            let requests = [in_progress.begin(), in_progress.begin()];
            let leaves = spawn_asleep(scope, || socket.hand_over());
            for request in requests {
                assert!(!leaves.is_finished(), "a request is in progress");
                drop(request);
            }
        });
        assert!(start.elapsed() < wait_max, "a wake was lost");
        assert!(path.exists(), "it belongs to the next process");
    }

    /// A daemon without exports, and a client of its control socket.
    struct Scene {
        daemon: Arc<Daemon>,
        _ending: crate::daemon::Shutdown,
        _socket: (tempfile::TempDir, Arc<Endpoint>),
        access: Access,
        quota: ClientQuota,
        served: Option<UnixStream>,
        client: BufReader<UnixStream>,
    }

    const MEMBERS: u32 = 4711;
    const READERS: u32 = 4712;

    impl Scene {
        fn new() -> Self {
            Self::from_pair(UnixStream::pair().unwrap(), Access::default())
        }

        /// The client is another user in this group, and may name files and sockets in `folder`.
        /// `None`: only root can become another user.
        fn with_group(group: u32, folder: &Path) -> Option<Self> {
            if !geteuid().is_root() {
                eprintln!("skipped: only root can become another user");
                return None;
            }
            // The user of this thread alone changes, and it ends.
            let connect = move || {
                let (uid, gid) = (Uid::from_raw(65534), Gid::from_raw(65534));
                set_thread_groups(&[Gid::from_raw(group)]).unwrap();
                set_thread_res_gid(gid, gid, gid).unwrap();
                set_thread_res_uid(uid, uid, uid).unwrap();
                UnixStream::pair().unwrap()
            };
            let pair = std::thread::spawn(connect).join().unwrap();
            let groups = SocketGroups { owner: Some(MEMBERS), further: Some(READERS) };
            let folders = vec![folder.to_owned()];
            let (disk_folders, socket_folders) = (folders.clone(), folders);
            let access = Access { groups, disk_folders, socket_folders, control: None };
            Some(Self::from_pair(pair, access))
        }

        fn from_pair((served, client): (UnixStream, UnixStream), access: Access) -> Self {
            let serve = ServeArgs::augment_args(clap::Command::new("serve"));
            let args = ServeArgs::from_arg_matches(&serve.get_matches_from(["serve"])).unwrap();
            let (daemon, ending) = Daemon::start(args, InheritedSockets::default()).unwrap();
            let changes = SettingsChange::default();
            let options = ProcessOptions { directory: "/".into(), arguments: vec![], changes };
            let folder = tempfile::tempdir().unwrap();
            let endpoint = Endpoint::bind(&folder.path().join("control"), "--control").unwrap();
            let endpoint = Arc::new(endpoint);
            daemon.set_process_options(options, Some(Arc::downgrade(&endpoint)));
            let (daemon, quota) = (Arc::new(daemon), ClientQuota::default());
            // Ends a hopeless wait.
            client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let (served, client) = (Some(served), BufReader::new(client));
            Self {
                daemon,
                _ending: ending,
                _socket: (folder, endpoint),
                access,
                quota,
                served,
                client,
            }
        }

        /// Serves the client until it leaves.
        fn serve(&mut self) -> impl FnOnce() -> Result<()> + Send + use<> {
            let (daemon, quota) = (Arc::downgrade(&self.daemon), self.quota.clone());
            let (stream, access) = (self.served.take().unwrap(), self.access.clone());
            move || {
                let in_progress = RequestsInProgress::default();
                serve_client(stream, access.into(), &daemon, &in_progress, &quota)
            }
        }

        fn send(&mut self, method: &str, params: &Value) {
            self.send_with(method, params, &[]);
        }

        fn send_with(&mut self, method: &str, params: &Value, files: &[File]) {
            let line = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
            send_line(self.client.get_ref(), format!("{line}\n").as_bytes(), files).unwrap();
        }

        /// Serves the client while it sends these requests, and hangs up.
        fn ask(&mut self, requests: impl FnOnce(&mut Self)) {
            let serve = self.serve();
            let serving = std::thread::spawn(serve);
            requests(self);
            self.client.get_ref().shutdown(std::net::Shutdown::Write).unwrap();
            serving.join().unwrap().unwrap();
        }

        fn answer(&mut self) -> Value {
            let mut line = String::new();
            self.client.read_line(&mut line).unwrap();
            serde_json::from_str(&line).unwrap()
        }

        /// The numbers of clients and of requests that wait.
        fn taken(&self) -> (usize, usize) {
            self.quota.taken(Role::Owner)
        }
    }

    /// Processes that ask to take over could otherwise be any number.
    #[test]
    fn a_process_that_takes_over_has_the_place_of_a_client() {
        let mut scene = Scene::new();
        let inflight = [virtqueue::InflightRegion::VERSION];
        let begin = json!({ "formats": FORMATS, "inflight-versions": inflight, "version": "" });
        scene.send(BEGIN, &begin);
        let serving = std::thread::spawn(scene.serve());
        assert!(scene.answer()["result"].is_object());
        assert_eq!(scene.taken(), (1, 0));
        scene.send(GIVE_UP, &Value::Null);
        assert!(serving.join().unwrap().is_err());
        assert_eq!(scene.taken(), (0, 0));
    }

    /// Clients could otherwise use up all threads with requests that hang.
    #[test]
    fn a_request_has_its_place_for_as_long_as_it_waits() {
        let mut scene = Scene::new();
        scene.send("upgrade.wait", &json!({ "process": 7, "deadline-ms": 60_000 }));
        let (waiting, answer) = std::thread::scope(|scope| {
            let serving = spawn_asleep(scope, scene.serve());
            let waiting = scene.taken();
            drop(scene.daemon.ownership().begin_hand_over(7).unwrap());
            let refusal = Refusal { why: "it is late".to_owned(), is_transient: true };
            scene.daemon.ownership().refuse(7, refusal);
            let answer = (scene.answer(), scene.taken());
            scene.client.get_ref().shutdown(std::net::Shutdown::Write).unwrap();
            serving.join().unwrap().unwrap();
            (waiting, answer)
        });
        assert_eq!((waiting, answer.1), ((1, 1), (1, 0)));
        assert_eq!(answer.0["error"]["message"], "it is late");
    }

    /// The name of a file at this place, as a request has it.
    fn named(path: &Path, lun: Option<u16>) -> Value {
        json!([{ "path": path, "lun": lun }])
    }

    /// A reader could otherwise use up the open files of the daemon.
    #[test]
    fn readers_pass_no_descriptors() {
        let folder = tempfile::tempdir().unwrap();
        let file = || File::open(folder.path()).unwrap();
        for (group, is_refused) in [(READERS, false), (MEMBERS, true)] {
            let Some(mut scene) = Scene::with_group(group, folder.path()) else { return };
            scene.ask(|scene| {
                scene.send_with("ping", &json!({}), &[file()]);
                let answer = scene.answer();
                let says = answer["error"]["message"].as_str().unwrap_or_default();
                assert_eq!(says.contains("1 descriptors came"), is_refused, "{answer}");
                assert_eq!(answer["error"].is_null(), !is_refused, "{answer}");
            });
        }
    }

    /// The next request has its own descriptors alone.
    #[test]
    fn descriptors_of_a_refused_takeover_are_closed() {
        let folder = tempfile::tempdir().unwrap();
        let Some(mut scene) = Scene::with_group(MEMBERS, folder.path()) else { return };
        scene.ask(|scene| {
            let begin = json!({ "formats": FORMATS, "inflight-versions": [], "version": "" });
            scene.send_with(BEGIN, &begin, &[File::open(folder.path()).unwrap()]);
            assert_eq!(scene.answer()["error"]["code"], 7);
            scene.send("ping", &json!({}));
            let answer = scene.answer();
            assert!(answer["result"].is_object(), "{answer}");
        });
    }

    /// A file at a wrong place would be closed in silence, and the daemon would open another one.
    #[test]
    fn each_file_of_a_request_is_at_the_place_of_a_disk() {
        const MISPLACED: &str = "no disk of the request is at the place of";
        for is_member in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("disk");
            std::fs::write(&path, [0; 4096]).unwrap();
            let scene = match is_member {
                true => Scene::with_group(MEMBERS, folder.path()),
                false => Some(Scene::new()),
            };
            let Some(mut scene) = scene else { continue };
            scene.ask(|scene| {
                let mut call = |method: &str, mut params: Value, lun: Option<u16>| {
                    params[DESCRIPTORS] = named(&path, lun);
                    scene.send_with(method, &params, &[File::open(&path).unwrap()]);
                    scene.answer()["error"]["message"].as_str().unwrap_or_default().to_owned()
                };
                let disk = json!({ "file": path });
                let export = |name: &str, device: Value| {
                    let endpoint = json!({ "path": folder.path().join(name) });
                    json!({ "name": name, "endpoint": endpoint, "device": device,
                        "read-only": true })
                };
                let blk = json!({ "blk": disk });
                let scsi = json!({ "scsi": [{ "lun": 0, "disk": disk }] });
                let unit = json!({ "export": "scsi", "unit": { "lun": 3, "disk": disk } });
                for (method, params, wrong, right) in [
                    ("export.add", export("blk", blk), Some(0), None),
                    ("export.add", export("scsi", scsi), None, Some(0)),
                    ("lun.add", unit, Some(2), Some(3)),
                ] {
                    let says = call(method, params.clone(), wrong);
                    assert!(says.contains(MISPLACED), "{method}: {says}");
                    assert_eq!(call(method, params, right), "", "{method}");
                }
            });
        }
    }

    /// The modes in which this process has a file open.
    fn modes_of(path: &Path) -> Vec<OFlags> {
        let numbers = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let of_path = numbers.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to == path));
        let flags = of_path.map(|fd| {
            let info = Path::new("/proc/self/fdinfo").join(fd.file_name());
            let info = std::fs::read_to_string(info).unwrap_or_default();
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
            let flags = flags.map_or(0, |flags| u32::from_str_radix(flags.trim(), 8).unwrap());
            OFlags::from_bits_retain(flags) & OFlags::RWMODE
        });
        flags.collect()
    }

    /// The daemon opens the file of a member for the guest, which may only read it.
    #[test]
    fn the_unit_of_a_member_has_the_settings_of_its_export() {
        for (read_only, mode) in [(true, OFlags::RDONLY), (false, OFlags::RDWR)] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().canonicalize().unwrap().join("disk");
            std::fs::write(&path, [0; 4096]).unwrap();
            let Some(mut scene) = Scene::with_group(MEMBERS, folder.path()) else { return };
            scene.ask(|scene| {
                let endpoint = json!({ "path": folder.path().join("vm") });
                let vm = json!({ "name": "vm", "endpoint": endpoint, "read-only": read_only,
                    "device": { "scsi": [{ "lun": 0, "disk": "null:1M" }] } });
                let unit = json!({ "lun": 1, "disk": { "file": path } });
                for (method, params) in
                    [("export.add", vm), ("lun.add", json!({ "export": "vm", "unit": unit }))]
                {
                    scene.send(method, &params);
                    let answer = scene.answer();
                    assert!(answer["error"].is_null(), "{method}: {answer}");
                }
                let modes = modes_of(&path);
                assert!(!modes.is_empty() && modes.iter().all(|it| *it == mode), "{modes:?}");
            });
        }
    }

    /// A client in another language reads the answer first, and then as many descriptors as it
    /// names.
    #[test]
    fn descriptors_follow_the_answer_of_an_upgrade() {
        let mut scene = Scene::new();
        scene.ask(|scene| {
            scene.send("upgrade.begin", &json!({}));
            let mut stream = scene.client.get_ref();
            // One byte at a time, so that no descriptor is lost.
            let (mut line, mut byte) = (Vec::new(), [0]);
            while line.last() != Some(&b'\n') {
                stream.read_exact(&mut byte).unwrap();
                line.extend(byte);
            }
            let answer: Value = serde_json::from_slice(&line).unwrap();
            assert_eq!(answer["result"]["process"], std::process::id(), "{answer}");
            let mut receiver = takeover::wire::Receiver::new(stream.try_clone().unwrap());
            let own = [std::io::stdout().as_raw_fd(), std::io::stderr().as_raw_fd()];
            let id = |fd: i32| {
                let found = std::fs::metadata(format!("/proc/self/fd/{fd}")).unwrap();
                (found.dev(), found.ino())
            };
            let streams = receiver.fds(2).unwrap();
            assert!(streams.iter().map(|fd| id(fd.as_raw_fd())).eq(own.map(id)));
            // No later answer has them again.
            scene.send("ping", &json!({}));
            let answer = receiver.line().unwrap().unwrap();
            assert!(answer.starts_with(b"{"), "{answer:?}");
            scene.client.get_ref().shutdown(std::net::Shutdown::Write).unwrap();
            assert!(receiver.fds(1).is_err());
        });
    }

    /// Programs decide by the code.
    #[test]
    fn each_refusal_has_its_code() {
        let folder = tempfile::tempdir().unwrap();
        let export = |name: &str, disk: Value, queues: u16| {
            let endpoint = json!({ "path": folder.path().join(name) });
            json!({ "name": name, "endpoint": endpoint, "device": { "blk": disk },
                "num-queues": queues })
        };
        let null = || json!("null:1M");
        let absent = json!({ "file": folder.path().join("absent") });
        let unit = json!({ "export": "vm", "unit": { "lun": 0, "disk": "null:1M" } });
        let mut scene = Scene::new();
        scene.ask(|scene| {
            for (method, params, code) in [
                ("export.add", export("vm", null(), 1), None),
                ("export.add", export("vm", null(), 1), Some(3)),
                ("export.add", export("other", absent, 1), Some(1)),
                ("export.add", export("other", null(), 0), Some(-32602)),
                ("export.remove", json!({ "export": "other" }), Some(2)),
                ("lun.add", unit, Some(5)),
                ("disk.resume", json!({ "export": "vm", "lun": 3 }), Some(5)),
                ("export.show", json!({ "exports": "vm" }), Some(-32602)),
                ("export.shows", json!({}), Some(-32601)),
            ] {
                scene.send(method, &params);
                let answer = scene.answer();
                assert_eq!(answer["error"]["code"].as_i64(), code, "{method} {params}: {answer}");
            }
        });
    }

    /// A caller that asks for a long wait must not ask a thousand times.
    #[test]
    fn an_upgrade_is_awaited_for_the_time_that_the_caller_states() {
        let mut scene = Scene::new();
        scene.ask(|scene| {
            let start = Instant::now();
            scene.send("upgrade.wait", &json!({ "process": 7, "deadline-ms": 50 }));
            let answer = scene.answer();
            assert_eq!(answer["result"]["has-asked"], false, "{answer}");
            assert!(start.elapsed() >= Duration::from_millis(50), "it has not waited");
        });
    }

    #[test]
    fn a_socket_that_pauses_can_be_stopped() {
        let stop = WakeFd::new().unwrap();
        stop.wake();
        assert!(wait(None, &stop));
    }
}
