//! The HTTP server of `--metrics`: `GET /metrics`, `/-/healthy` and `/-/ready`.
//!
//! One thread serves all clients. Each client has one request, a time limit, and a bound on its
//! size, so that a slow client delays no other one.

use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockio::executor::start_thread;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::daemon::Daemon;
use crate::process::thread_guard::ThreadGuard;
use crate::process::wake_fd::WakeFd;
use crate::socket::Endpoint;
use crate::spec::command::ExportState;
use crate::spec::values::MetricsAddress;

/// The most clients at once. Further ones wait to be accepted.
const CLIENTS_MAX: usize = 16;
/// The time for a request and its answer.
const CLIENT_TIME: Duration = Duration::from_secs(5);
/// The most bytes of a request.
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// The time for which an address may be in use: after an upgrade, the old process listens until it
/// has ended.
const IN_USE_MAX: Duration = Duration::from_secs(5);
/// The pause before another attempt to listen or to accept.
const PAUSE: Duration = Duration::from_millis(50);

/// Listens on `address` and starts the thread of the server.
///
/// # Errors
///
/// When another program listens there, or the kernel has no thread or descriptor left.
pub(crate) fn start(address: &MetricsAddress, daemon: Weak<Daemon>) -> Result<ThreadGuard> {
    let listener = Listener::bind(address)?;
    let stop = Arc::new(WakeFd::new().context("cannot create an eventfd")?);
    let stopped = Arc::clone(&stop);
    let serve = move || {
        Server { listener, daemon, clients: Vec::new() }.run(&stopped);
    };
    let thread =
        start_thread("ringhaul-metric", serve).context("cannot start the thread of --metrics")?;
    Ok(ThreadGuard::new(thread, move || stop.wake()))
}

/// A listening socket.
enum Listener {
    Tcp(TcpListener),
    Unix(Endpoint),
}

impl Listener {
    fn bind(address: &MetricsAddress) -> Result<Self> {
        let deadline = Instant::now() + IN_USE_MAX;
        loop {
            match Self::try_bind(address) {
                Err(error) if is_in_use(&error) && Instant::now() < deadline => {
                    std::thread::sleep(PAUSE);
                }
                result => return result,
            }
        }
    }

    fn try_bind(address: &MetricsAddress) -> Result<Self> {
        match address {
            MetricsAddress::Tcp(address) => {
                let listener = TcpListener::bind(address).with_context(|| {
                    format!("cannot listen on {address}; choose another --metrics")
                })?;
                listener.set_nonblocking(true).context("cannot set up the socket of --metrics")?;
                Ok(Self::Tcp(listener))
            }
            MetricsAddress::Unix(path) => Self::bind_unix(path),
        }
    }

    fn bind_unix(path: &Path) -> Result<Self> {
        Endpoint::bind(path, "--metrics unix:").map(Self::Unix)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(endpoint) => endpoint.listener().expect("it was bound").as_fd(),
        }
    }

    fn accept(&self) -> io::Result<Box<dyn Stream>> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                Ok(Box::new(stream))
            }
            Self::Unix(endpoint) => {
                let stream = endpoint.accept().unwrap_or(Err(io::ErrorKind::WouldBlock.into()))?;
                stream.set_nonblocking(true)?;
                Ok(Box::new(stream))
            }
        }
    }
}

fn is_in_use(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<io::Error>();
    io.is_some_and(|error| error.kind() == io::ErrorKind::AddrInUse)
}

/// A connection of either kind.
trait Stream: Read + Write + AsFd + Send {}

impl<T: Read + Write + AsFd + Send> Stream for T {}

/// A client and its one request.
struct Client {
    stream: Box<dyn Stream>,
    request: Vec<u8>,
    /// Empty until the request is complete.
    answer: Vec<u8>,
    sent: usize,
    deadline: Instant,
}

/// The progress of a client.
#[derive(PartialEq, Eq)]
enum Progress {
    /// The client's socket must become ready first.
    Waits,
    /// The client has its answer, or has gone.
    Done,
}

impl Client {
    /// Receives and sends as much as the socket takes.
    fn advance(&mut self, daemon: &Weak<Daemon>) -> io::Result<Progress> {
        while self.answer.is_empty() {
            let mut bytes = [0; 1024];
            let count = match self.stream.read(&mut bytes) {
                Ok(0) => return Ok(Progress::Done),
                Ok(count) => count,
                Err(error) => return waits(error),
            };
            self.request.extend(&bytes[..count]);
            if self.request.windows(4).any(|window| window == b"\r\n\r\n") {
                self.answer = answer(&self.request, daemon);
            } else if self.request.len() > REQUEST_BYTES_MAX {
                self.answer = response("431 Request Header Fields Too Large", "", true);
            }
        }
        while self.sent < self.answer.len() {
            match self.stream.write(&self.answer[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) => return waits(error),
            }
        }
        Ok(Progress::Done)
    }

    fn events(&self) -> PollFlags {
        if self.answer.is_empty() { PollFlags::IN } else { PollFlags::OUT }
    }
}

fn waits(error: io::Error) -> io::Result<Progress> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(Progress::Waits),
        _ => Err(error),
    }
}

/// The answer to a whole request.
fn answer(request: &[u8], daemon: &Weak<Daemon>) -> Vec<u8> {
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let mut words = line.split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let has_body = match method {
        "GET" => true,
        "HEAD" => false,
        _ => return response("405 Method Not Allowed", "only GET and HEAD\n", true),
    };
    let path = target.split('?').next().unwrap_or_default();
    let (status, body) = page(path, daemon);
    response(status, &body, has_body)
}

/// The status and the text of a page.
fn page(path: &str, daemon: &Weak<Daemon>) -> (&'static str, String) {
    const OK: &str = "200 OK";
    const UNAVAILABLE: &str = "503 Service Unavailable";
    let is_known = matches!(path, "/metrics" | "/-/healthy" | "/-/ready");
    if !is_known {
        let pages = "the pages are /metrics, /-/healthy and /-/ready\n";
        return ("404 Not Found", pages.to_owned());
    }
    let Some(daemon) = daemon.upgrade() else {
        return (UNAVAILABLE, "the daemon is ending\n".to_owned());
    };
    if path == "/metrics" {
        return match super::metrics(&daemon) {
            Ok(text) => (OK, text),
            Err(error) => (UNAVAILABLE, format!("{error}\n")),
        };
    }
    let exports = match daemon.exports() {
        Ok(exports) => exports,
        Err(error) => return (UNAVAILABLE, format!("{error}\n")),
    };
    let opening = exports.iter().filter(|export| export.state == ExportState::Opening).count();
    match (path, opening) {
        ("/-/healthy", _) => (OK, "healthy\n".to_owned()),
        (_, 0) => (OK, "ready\n".to_owned()),
        (_, count) => (UNAVAILABLE, format!("exports that are being opened: {count}\n")),
    }
}

fn response(status: &str, body: &str, has_body: bool) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let body = if has_body { body } else { "" };
    [head.as_bytes(), body.as_bytes()].concat()
}

/// The thread of the server.
struct Server {
    listener: Listener,
    daemon: Weak<Daemon>,
    clients: Vec<Client>,
}

impl Server {
    /// Serves clients until a wake by `stop`.
    fn run(mut self, stop: &WakeFd) {
        loop {
            match self.wait(stop) {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!("cannot wait for clients of --metrics: {error}");
                    std::thread::sleep(PAUSE);
                }
            }
            let now = Instant::now();
            let daemon = &self.daemon;
            self.clients.retain_mut(|client| {
                client.deadline > now
                    && client.advance(daemon).is_ok_and(|progress| progress == Progress::Waits)
            });
            self.accept(now);
        }
    }

    /// Waits for an event or the end of a client's time. Returns true if the server is to stop.
    fn wait(&self, stop: &WakeFd) -> Result<bool, Errno> {
        let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
        let clients = self.clients.iter();
        fds.extend(clients.map(|client| PollFd::new(&client.stream, client.events())));
        let listener = self.listener.fd();
        if self.clients.len() < CLIENTS_MAX {
            fds.push(PollFd::new(&listener, PollFlags::IN));
        }
        let next = self.clients.iter().map(|client| client.deadline).min();
        let timeout = next.map(|when| when.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => Ok(!fds[0].revents().is_empty()),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn accept(&mut self, now: Instant) {
        while self.clients.len() < CLIENTS_MAX {
            match self.listener.accept() {
                Ok(stream) => self.clients.push(Client {
                    stream,
                    request: Vec::new(),
                    answer: Vec::new(),
                    sent: 0,
                    deadline: now + CLIENT_TIME,
                }),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    tracing::debug!("cannot accept a client of --metrics: {error}");
                    // Without the pause, a lack of descriptors would make this loop busy.
                    std::thread::sleep(PAUSE);
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args, FromArgMatches};

    use super::*;
    use crate::options::ServeArgs;
    use crate::socket::inherited::InheritedSockets;
    use crate::testing::spawn_asleep;

    fn status(request: &str) -> String {
        let answer = String::from_utf8(answer(request.as_bytes(), &Weak::new())).unwrap();
        answer.lines().next().unwrap().to_owned()
    }

    #[test]
    fn requests_that_name_no_page_are_refused() {
        for (request, expected) in [
            ("GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
            ("\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
            ("GET /metrics?x HTTP/1.1\r\n\r\n", "HTTP/1.1 503 Service Unavailable"),
        ] {
            assert_eq!(status(request), expected, "{request:?}");
        }
    }

    #[test]
    fn an_answer_to_head_has_the_length_and_no_body() {
        let text = String::from_utf8(response("200 OK", "healthy\n", false)).unwrap();
        assert!(text.contains("Content-Length: 8\r\n") && text.ends_with("\r\n\r\n"), "{text}");
    }

    #[test]
    fn head_has_the_head_of_get() {
        let text = |method: &str| {
            let request = format!("{method} /nowhere HTTP/1.1\r\n\r\n");
            String::from_utf8(answer(request.as_bytes(), &Weak::new())).unwrap()
        };
        let (get, head) = (text("GET"), text("HEAD"));
        assert!(get.starts_with(&head) && get.len() > head.len(), "{get}{head}");
        assert!(head.ends_with("\r\n\r\n"), "{head}");
    }

    /// After an upgrade the old process listens for a moment.
    #[test]
    fn an_address_in_use_is_waited_for() {
        let before = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = MetricsAddress::Tcp(before.local_addr().unwrap());
        std::thread::scope(|scope| {
            let waits = spawn_asleep(scope, || Listener::bind(&address).map(drop));
            drop(before);
            waits.join().unwrap().unwrap();
        });
    }

    /// Its disk does not answer.
    #[test]
    fn a_daemon_with_an_export_that_is_being_opened_is_healthy_and_not_ready() {
        let folder = tempfile::tempdir().unwrap();
        let [server, socket] = ["nbd", "vm"].map(|name| folder.path().join(name));
        let nbd = std::os::unix::net::UnixListener::bind(&server).unwrap();
        let serve = ServeArgs::augment_args(clap::Command::new("serve"));
        let args = ServeArgs::from_arg_matches(&serve.get_matches_from(["serve"])).unwrap();
        let (daemon, _ending) = Daemon::start(args, InheritedSockets::default()).unwrap();
        let daemon = Arc::new(daemon);
        let weak = Arc::downgrade(&daemon);
        assert_eq!(page("/-/ready", &weak), ("200 OK", "ready\n".to_owned()));
        let export = serde_json::json!({
            "name": "vm", "endpoint": { "path": socket },
            "device": { "blk": { "nbd": { "socket": server, "export": "" } } },
        });
        daemon.begin_add(vec![serde_json::from_value(export).unwrap()]).unwrap();
        let _asked = nbd.accept().unwrap();
        let (status, text) = page("/-/ready", &weak);
        assert!(status.starts_with("503 ") && text.ends_with("opened: 1\n"), "{status}: {text}");
        assert_eq!(page("/-/healthy", &weak).0, "200 OK");
        drop(nbd);
    }

    #[test]
    fn a_further_client_is_accepted_when_one_of_the_most_has_gone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics");
        let listener = Listener::bind(&MetricsAddress::Unix(path.clone())).unwrap();
        let mut server = Server { listener, daemon: Weak::new(), clients: Vec::new() };
        let connect = || std::os::unix::net::UnixStream::connect(&path).unwrap();
        let _all: Vec<_> = (0..=CLIENTS_MAX).map(|_| connect()).collect();
        let now = Instant::now();
        server.accept(now);
        assert_eq!(server.clients.len(), CLIENTS_MAX);
        server.clients.pop();
        server.accept(now);
        assert_eq!(server.clients.len(), CLIENTS_MAX, "it still waits");
        server.clients.pop();
        server.accept(now);
        assert_eq!(server.clients.len(), CLIENTS_MAX - 1);
    }

    /// A client that sends nothing, one that sends too much, and one that reads nothing.
    #[test]
    fn a_client_that_does_not_finish_delays_no_other_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics");
        let address = MetricsAddress::Unix(path.clone());
        let server = start(&address, Weak::new()).unwrap();
        let connect = || std::os::unix::net::UnixStream::connect(&path).unwrap();
        let silent: Vec<_> = (0..CLIENTS_MAX - 2).map(|_| connect()).collect();
        let mut large = connect();
        large.write_all(&[b'a'; REQUEST_BYTES_MAX + 1]).unwrap();
        let mut text = String::new();
        large.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 431 "), "{text}");
        let mut good = connect();
        good.write_all(b"GET /-/healthy HTTP/1.1\r\n\r\n").unwrap();
        text.clear();
        good.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 503 "), "{text}");
        // Each of them has its time.
        for mut stream in silent {
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            assert_eq!(stream.read(&mut [0]).unwrap(), 0, "it keeps its place");
        }
        drop(server);
        assert!(!path.exists(), "the socket is left");
    }
}
