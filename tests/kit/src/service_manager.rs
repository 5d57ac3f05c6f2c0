//! The socket of a service manager, which a daemon notifies: see sd_notify(3).

use std::collections::BTreeMap;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ringhaul_tools::process::retry;
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::cli::{LIMIT, Running, ringhaul_under};

/// The interval in which the reader looks for its end.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The lowest number of a descriptor on its way to a process: none that its shell uses.
const PASSED_MIN: i32 = 100;

/// Descriptors that a daemon has stored, by their names.
type Stored = BTreeMap<String, Vec<OwnedFd>>;

/// A service manager that reads all messages, and stores descriptors. Dropping it ends its reader.
pub struct ServiceManager {
    messages: Receiver<String>,
    reader: Arc<Mutex<Stored>>,
}

impl ServiceManager {
    /// Listens on `socket`, and makes `command` notify it.
    ///
    /// # Errors
    /// If the socket cannot be made.
    pub fn listen(socket: &Path, command: &mut Command) -> Result<Self> {
        command.env("NOTIFY_SOCKET", socket);
        let socket = UnixDatagram::bind(socket).context("making the socket for notifications")?;
        socket.set_read_timeout(Some(CHECK_INTERVAL))?;
        let (sender, messages) = channel();
        let reader = Arc::new(Mutex::new(Stored::new()));
        let is_wanted: Weak<Mutex<Stored>> = Arc::downgrade(&reader);
        std::thread::spawn(move || {
            while is_wanted.strong_count() > 0 {
                let Some((text, fds)) = receive(&socket) else { continue };
                let Some(stored) = is_wanted.upgrade() else { return };
                store(&mut stored.lock().unwrap_or_else(PoisonError::into_inner), &text, fds);
                // Sending fails only after the test has dropped the receiver.
                let _ = sender.send(text);
            }
        });
        Ok(Self { messages, reader })
    }

    /// Waits until descriptors are stored under these names alone, two under each.
    ///
    /// # Errors
    /// If that takes too long.
    pub fn wait_stored(&self, names: &[&str]) -> Result<()> {
        retry(LIMIT, || {
            let stored = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
            let is_right = stored.keys().eq(names) && stored.values().all(|fds| fds.len() == 2);
            ensure!(is_right, "{stored:?} is stored, and not {names:?}");
            Ok(())
        })
    }

    /// Starts a daemon with all descriptors that are stored, which stay in the store. `complete`
    /// adds options.
    ///
    /// # Errors
    /// If the daemon does not get that far.
    pub fn start_with_stored(
        &self,
        socket: &Path,
        complete: impl FnOnce(&mut Command) -> Result<()>,
    ) -> Result<Running> {
        let (mut names, mut copies, mut redirections) = (Vec::new(), Vec::new(), String::new());
        let stored = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, fds) in &*stored {
            for fd in fds {
                let copy = fcntl_dupfd_cloexec(fd, PASSED_MIN).context("copying a descriptor")?;
                fcntl_setfd(&copy, FdFlags::empty()).context("passing a descriptor")?;
                // A copy that the process kept would hold the front-end when the stash is gone.
                redirections += &format!(" {}<&{}-", 3 + names.len(), copy.as_raw_fd());
                names.push(name.as_str());
                copies.push(copy);
            }
        }
        let shell = format!("export LISTEN_PID=$$; exec \"$@\"{redirections}");
        let mut command = ringhaul_under(&["bash", "-c", &shell, "bash"])?;
        command.env("LISTEN_FDS", names.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
        command.env("NOTIFY_SOCKET", socket).arg("serve");
        complete(&mut command)?;
        Running::start(&mut command)
    }

    /// Waits for a message that contains `text`, and returns it with the messages before it.
    ///
    /// # Errors
    /// If it does not arrive in time.
    pub fn wait_for(&self, text: &str) -> Result<Vec<String>> {
        let deadline = Instant::now() + LIMIT;
        let mut seen = Vec::new();
        while !seen.last().is_some_and(|last: &String| last.contains(text)) {
            let left = deadline.saturating_duration_since(Instant::now());
            let next = self.messages.recv_timeout(left);
            let Ok(next) = next else {
                seen.dedup();
                bail!("no {text:?} after {seen:?}");
            };
            seen.push(next);
        }
        Ok(seen)
    }

    /// The messages that have arrived since the last call.
    #[must_use]
    pub fn arrived(&self) -> Vec<String> {
        self.messages.try_iter().collect()
    }
}

/// The next message with its descriptors, if one comes in time.
fn receive(socket: &UnixDatagram) -> Option<(String, Vec<OwnedFd>)> {
    let mut buffer = [0; 1024];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let slices = &mut [IoSliceMut::new(&mut buffer)];
    let bytes = recvmsg(socket, slices, &mut control, RecvFlags::CMSG_CLOEXEC).ok()?.bytes;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            fds.extend(some);
        }
    }
    Some((String::from_utf8_lossy(&buffer[..bytes]).into_owned(), fds))
}

/// Carries out a message about stored descriptors.
fn store(stored: &mut Stored, text: &str, fds: Vec<OwnedFd>) {
    let Some(name) = text.lines().find_map(|line| line.strip_prefix("FDNAME=")) else { return };
    let mut lines = text.lines();
    if lines.any(|line| line == "FDSTOREREMOVE=1") {
        stored.remove(name);
    } else {
        stored.entry(name.to_owned()).or_default().extend(fds);
    }
}
