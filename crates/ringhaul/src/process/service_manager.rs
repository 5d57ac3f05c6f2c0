//! Notifications to a service manager, if one listens: see sd_notify(3).

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::Condvar;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockio::executor::{Lock, start_thread};
use ringhaul_options::redact::printable;
use rustix::net::{
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, sendmsg_addr,
};
use rustix::time::{ClockId, clock_gettime};

/// The variable with the manager's socket; `@` stands for the zero byte that abstract names begin
/// with.
const SOCKET: &str = "NOTIFY_SOCKET";

/// The variable with the longest time in microseconds between two signs of life.
const WATCHDOG_TIME: &str = "WATCHDOG_USEC";

/// The variable with the only process that gives signs of life; without it, each process may.
pub(crate) const WATCHDOG_PROCESS: &str = "WATCHDOG_PID";

/// The time that a manager with a full queue has to take a message on which the service depends.
const PATIENCE: Duration = Duration::from_secs(5);

/// The variable with the most descriptors that the manager stores; systemd sets it since version
/// 254.
const STORE_MAX: &str = "FDSTORE";

/// The start of the names of stored descriptors.
pub(crate) const STORED_PREFIX: &str = "rh-";

/// The most descriptors that are stored with one message.
const STORED_MAX: usize = 2;

/// The most messages about stored descriptors that wait for a manager with a full queue.
const WAITING_MAX: usize = 1024;

/// The time that such messages have to be sent when the process ends.
const FINISH_MAX: Duration = Duration::from_secs(1);

/// Messages about stored descriptors that wait for the manager, in their order. The control thread
/// never waits for it.
static SEND_QUEUE: Lock<SendQueue> =
    Lock::new(SendQueue { messages: VecDeque::new(), is_sending: false });

/// Notified when no message waits.
static ALL_SENT: Condvar = Condvar::new();

struct SendQueue {
    messages: VecDeque<Message>,
    /// True while a thread sends messages.
    is_sending: bool,
}

/// A text with descriptors.
struct Message {
    text: String,
    fds: Vec<OwnedFd>,
}

/// True once the manager knows that the daemon is ready.
static IS_READY: AtomicBool = AtomicBool::new(false);

/// The last report.
static STATUS: Lock<Status> = Lock::new(Status { state: String::new(), problem: None });

/// True once a failure has been logged.
static IS_LOGGED: AtomicBool = AtomicBool::new(false);

/// Returns true if a service manager listens.
pub(crate) fn is_present() -> bool {
    socket_path().is_some()
}

/// Returns a quarter of the time after which the manager ends a daemon without a sign of life.
/// `None`: it waits for none.
pub(crate) fn watchdog_interval() -> Option<Duration> {
    let [time, process] = [WATCHDOG_TIME, WATCHDOG_PROCESS].map(|name| std::env::var(name).ok());
    interval_from(time.as_deref(), process.as_deref()).filter(|_| is_present())
}

fn interval_from(time: Option<&str>, process: Option<&str>) -> Option<Duration> {
    let is_ours = process.is_none_or(|process| process == std::process::id().to_string());
    let microseconds = time?.parse().ok().filter(|time| is_ours && *time > 0)?;
    Some(Duration::from_micros(microseconds) / 4)
}

/// Reports that front-ends can connect: a unit of `Type=notify` has started.
pub(crate) fn ready() {
    IS_READY.store(true, Ordering::Relaxed);
    notify("READY=1\n", PATIENCE, "that the daemon is ready");
}

/// Reports that the daemon reads its configuration again, until the returned value is dropped. A
/// daemon that still starts reports its readiness later.
pub(crate) fn reloading() -> Reloading {
    if IS_READY.load(Ordering::Relaxed) {
        let now = clock_gettime(ClockId::Monotonic);
        let now = now.tv_sec.unsigned_abs() * 1_000_000 + now.tv_nsec.unsigned_abs() / 1000;
        let text = format!("RELOADING=1\nMONOTONIC_USEC={now}\n");
        notify(&text, PATIENCE, "that the daemon reads its configuration");
    }
    Reloading(())
}

/// The state of the daemon as a service manager shows it.
struct Status {
    state: String,
    problem: Option<String>,
}

impl Status {
    fn text(&self) -> String {
        match &self.problem {
            Some(problem) => format!("{problem}; {}", self.state),
            None => self.state.clone(),
        }
    }
}

/// A reload in progress.
pub(crate) struct Reloading(());

impl Drop for Reloading {
    fn drop(&mut self) {
        if IS_READY.load(Ordering::Relaxed) {
            ready();
        }
    }
}

/// Reports that the daemon ends as requested.
pub(crate) fn stopping() {
    notify("STOPPING=1\n", Duration::ZERO, "that the daemon ends");
}

/// Reports the state of the daemon in words.
pub(crate) fn status(text: &str) {
    report(|status| text.clone_into(&mut status.state));
}

/// Reports a problem of the daemon, before its state, until the next problem or `None`.
pub(crate) fn problem(text: Option<String>) {
    report(|status| status.problem = text);
}

fn report(change: impl FnOnce(&mut Status)) {
    let mut status = STATUS.lock();
    let before = status.text();
    change(&mut status);
    let text = status.text();
    if text != before {
        notify(&format!("STATUS={}\n", printable(&text)), Duration::ZERO, "of its state");
    }
}

/// Reports that the daemon lives.
pub(crate) fn alive() {
    notify("WATCHDOG=1\n", PATIENCE, "that the daemon lives");
}

/// Reports that the service continues in another process. Otherwise the manager takes the end of
/// this process for the end of the service, and ends the new process.
pub(crate) fn main_process(process: u32) {
    // The manager refuses messages of an earlier main process, and the new one uses their names.
    finish();
    notify(
        &format!("MAINPID={process}\n"),
        PATIENCE,
        &format!("that the service continues in process {process}"),
    );
}

/// Returns true if the manager states that it stores descriptors.
pub(crate) fn stores_descriptors() -> bool {
    std::env::var(STORE_MAX).is_ok_and(|max| max.parse::<u64>().is_ok_and(|max| max > 0))
}

/// Has the manager store descriptors, which it passes to the next process under this name, until it
/// is told to [forget] them. It does not poll them (`FDPOLL`).
pub(crate) fn store(name: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_in_order(&format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0\n"), fds)
}

/// Asks the manager to forget all descriptors of this name.
pub(crate) fn forget(name: &str) {
    if cancel_store(name) {
        return;
    }
    let text = format!("FDSTOREREMOVE=1\nFDNAME={name}\n");
    if let Err(error) = send_in_order(&text, &[]) {
        log_once("that a front-end has gone", &error);
    }
}

/// Drops descriptors that still wait to be stored under this name. Returns false if none do.
fn cancel_store(name: &str) -> bool {
    let line = format!("\nFDNAME={name}\n");
    let mut waiting = SEND_QUEUE.lock();
    let stores = |message: &Message| !message.fds.is_empty() && message.text.contains(&line);
    let at = waiting.messages.iter().position(stores);
    at.is_some_and(|at| waiting.messages.remove(at).is_some())
}

/// Waits until all messages about stored descriptors are sent, for one second at most.
pub(crate) fn finish() {
    drop(SEND_QUEUE.wait_timeout_while(&ALL_SENT, FINISH_MAX, |waiting| waiting.is_sending));
}

/// Sends a message at once, or has a thread send it after the messages that wait.
fn send_in_order(text: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let path = socket_path().ok_or(io::ErrorKind::NotFound)?;
    let mut waiting = SEND_QUEUE.lock();
    if !waiting.is_sending {
        match send_with(&path, text, Duration::ZERO, fds) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            sent => return sent,
        }
    }
    if waiting.messages.len() >= WAITING_MAX {
        return Err(io::Error::other("too many messages wait for it"));
    }
    let fds = fds.iter().map(|fd| fd.try_clone_to_owned()).collect::<io::Result<_>>()?;
    if !waiting.is_sending {
        start_thread("ringhaul-store", move || send_waiting(&path))?;
        waiting.is_sending = true;
    }
    waiting.messages.push_back(Message { text: text.to_owned(), fds });
    Ok(())
}

/// Sends messages until none waits.
fn send_waiting(path: &str) {
    let next = || {
        let mut waiting = SEND_QUEUE.lock();
        let next = waiting.messages.pop_front();
        waiting.is_sending = next.is_some();
        next
    };
    while let Some(Message { text, fds }) = next() {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        if let Err(error) = send_with(path, &text, PATIENCE, &fds) {
            tracing::warn!(
                "the service manager at {path} has not taken a message about a front-end that is \
                 to survive a kill of the daemon: {error}"
            );
        }
    }
    ALL_SENT.notify_all();
}

fn socket_path() -> Option<String> {
    std::env::var(SOCKET).ok().filter(|path| !path.is_empty())
}

fn notify(text: &str, patience: Duration, what: &str) {
    let Some(path) = socket_path() else { return };
    if let Err(error) = send(&path, text, patience) {
        log_once(what, &error);
    }
}

fn log_once(what: &str, error: &io::Error) {
    if !IS_LOGGED.swap(true, Ordering::Relaxed) {
        let path = socket_path().unwrap_or_default();
        tracing::warn!("cannot notify the service manager at {path} {what}: {error}");
    }
}

/// Sends a message. A manager that does not read delays this for at most `patience`.
fn send(path: &str, text: &str, patience: Duration) -> io::Result<()> {
    send_with(path, text, patience, &[])
}

fn send_with(path: &str, text: &str, patience: Duration, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let address = match path.strip_prefix('@') {
        Some(name) => SocketAddrUnix::new_abstract_name(name.as_bytes())?,
        None => SocketAddrUnix::new(path)?,
    };
    let socket = UnixDatagram::unbound()?;
    match patience.is_zero() {
        true => socket.set_nonblocking(true)?,
        false => socket.set_write_timeout(Some(patience))?,
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(STORED_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        let has_room = control.push(SendAncillaryMessage::ScmRights(fds));
        assert!(has_room, "there is room for {STORED_MAX} descriptors");
    }
    let text = [IoSlice::new(text.as_bytes())];
    sendmsg_addr(&socket, &address, &text, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::IoSliceMut;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::SocketAddr;

    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

    use super::*;

    #[test]
    fn both_kinds_of_names_are_reached() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify").display().to_string();
        let name = format!("ringhaul-notify-test-{}", std::process::id());
        let by_name = SocketAddr::from_abstract_name(&name).unwrap();
        let sockets = [UnixDatagram::bind(&path), UnixDatagram::bind_addr(&by_name)];
        for (socket, path) in sockets.into_iter().zip([path, format!("@{name}")]) {
            for patience in [Duration::ZERO, PATIENCE] {
                send(&path, "MAINPID=7\n", patience).unwrap();
                let mut buffer = [0; 64];
                let bytes = socket.as_ref().unwrap().recv(&mut buffer).unwrap();
                assert_eq!(buffer[..bytes], *b"MAINPID=7\n");
            }
        }
        assert!(send(&folder.path().display().to_string(), "", Duration::ZERO).is_err());
    }

    #[test]
    fn a_manager_that_does_not_read_delays_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify").display().to_string();
        let manager = UnixDatagram::bind(&path).unwrap();
        let full = loop {
            if let Err(error) = send(&path, "STATUS=x\n", Duration::ZERO) {
                break error.kind();
            }
        };
        assert_eq!(full, io::ErrorKind::WouldBlock);
        // The message on which a start waits is sent when there is room again.
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| send(&path, "READY=1\n", Duration::from_secs(60)));
            let mut buffer = [0; 64];
            loop {
                let bytes = manager.recv(&mut buffer).unwrap();
                if buffer[..bytes] == *b"READY=1\n" {
                    break;
                }
            }
            waits.join().unwrap().unwrap();
        });
    }

    /// Messages with their descriptors, until the last one.
    fn receive(manager: &UnixDatagram, last: &str) -> Vec<(String, usize)> {
        let mut all = Vec::new();
        loop {
            let mut buffer = [0; 256];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(STORED_MAX))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let slices = &mut [IoSliceMut::new(&mut buffer)];
            let got = recvmsg(manager, slices, &mut control, RecvFlags::empty()).unwrap();
            let fds = control.drain().map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => fds.count(),
                _ => 0,
            });
            let fds = fds.sum();
            let text = String::from_utf8_lossy(&buffer[..got.bytes]).into_owned();
            let is_last = text.contains(last);
            all.push((text, fds));
            if is_last {
                return all;
            }
        }
    }

    /// The thread that stores descriptors is the one that reads in this test. Runs in a process of
    /// its own, which reports to the socket of its environment.
    #[test]
    fn descriptors_are_stored_in_order_without_a_wait_for_the_manager() {
        const CHILD: &str = "RINGHAUL_TEST_STORES";
        let name = "process::service_manager::tests::\
                    descriptors_are_stored_in_order_without_a_wait_for_the_manager";
        let Some(path) = std::env::var_os(CHILD) else {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("notify");
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", name]).env(CHILD, &path).env(SOCKET, &path);
            let output = child.output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
            return;
        };
        let manager = UnixDatagram::bind(&path).unwrap();
        let path = path.to_str().unwrap();
        while send(path, "STATUS=x\n", Duration::ZERO).is_ok() {}
        let ends = UnixDatagram::pair().unwrap();
        store("rh-1", &[ends.0.as_fd(), ends.1.as_fd()]).unwrap();
        // The thread sends this one.
        while !SEND_QUEUE.lock().messages.is_empty() {
            std::thread::yield_now();
        }
        store("rh-3", &[ends.0.as_fd()]).unwrap();
        forget("rh-1");
        forget("rh-3");
        store("rh-2", &[ends.0.as_fd()]).unwrap();
        let main = std::thread::spawn(|| main_process(7));
        let received = receive(&manager, "MAINPID");
        main.join().unwrap();
        let received = received.iter().map(|(text, fds)| (text.as_str(), *fds));
        let stored: Vec<_> = received.filter(|(text, _)| !text.contains("STATUS")).collect();
        let expected = [
            ("FDSTORE=1\nFDNAME=rh-1\nFDPOLL=0\n", 2),
            ("FDSTOREREMOVE=1\nFDNAME=rh-1\n", 0),
            ("FDSTORE=1\nFDNAME=rh-2\nFDPOLL=0\n", 1),
            ("MAINPID=7\n", 0),
        ];
        assert_eq!(stored, expected);
        finish();
        assert!(!SEND_QUEUE.lock().is_sending);
        // The next one is sent by this thread.
        forget("rh-2");
        assert!(!SEND_QUEUE.lock().is_sending);
        receive(&manager, "FDSTOREREMOVE=1\nFDNAME=rh-2");
    }

    /// Runs in a process of its own, which reports to the socket of its environment.
    #[test]
    fn the_manager_is_told_of_each_change_once() {
        const CHILD: &str = "RINGHAUL_TEST_REPORTS";
        if std::env::var_os(CHILD).is_some() {
            drop(reloading());
            ready();
            ["a", "a", "b"].into_iter().for_each(status);
            problem(Some("no\nspace".to_owned()));
            status("c");
            problem(None);
            problem(None);
            drop(reloading());
            stopping();
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let name = "process::service_manager::tests::the_manager_is_told_of_each_change_once";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", name]).env(CHILD, "1").env(SOCKET, &path);
        let output = child.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        manager.set_nonblocking(true).unwrap();
        let mut buffer = [0; 256];
        let messages = std::iter::from_fn(|| {
            let bytes = manager.recv(&mut buffer).ok()?;
            let text = String::from_utf8_lossy(&buffer[..bytes]);
            text.lines().next().map(str::to_owned)
        });
        let expected = [
            "READY=1",
            "STATUS=a",
            "STATUS=b",
            "STATUS=no\\nspace; b",
            "STATUS=no\\nspace; c",
            "STATUS=c",
            "RELOADING=1",
            "READY=1",
            "STOPPING=1",
        ];
        assert_eq!(messages.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn signs_of_life_are_given_four_times_in_their_time() {
        let own = std::process::id().to_string();
        let quarter = Some(Duration::from_millis(750));
        for (time, process, expected) in [
            (Some("3000000"), Some(&*own), quarter),
            (Some("3000000"), None, quarter),
            (Some("3000000"), Some("1"), None),
            (Some("0"), None, None),
            (Some("soon"), None, None),
            (None, Some(&own), None),
        ] {
            assert_eq!(interval_from(time, process), expected, "{time:?} {process:?}");
        }
    }
}
