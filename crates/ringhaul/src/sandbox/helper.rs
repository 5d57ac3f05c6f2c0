//! A process outside the sandbox, for three tasks that the daemon has no right to: it finds
//! programs that have a file open, or listen at a socket, and it opens the configuration file,
//! which an editor may have replaced.
//!
//! It is forked before the daemon has threads, and has no descriptor but its socket. It opens files
//! for reading only, and hands over none but the configuration file. It ends with the daemon.

use std::ffi::{OsStr, c_int};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use blockio::disk::{find_holders, set_holder_finder};
use blockio::executor::Lock;
use blockio::file::open_regular;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recv, send,
    socket_with, socketpair,
};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use rustix::thread::{CapabilitySet, set_name, set_no_new_privs};

use super::rules::Rules;
use super::{calls, capabilities};
use crate::process::fd_messages;
use crate::process::peer::Peer;

/// The longest message, in bytes.
const MESSAGE_BYTES: usize = 16 << 10;
/// The longest wait for an answer: the configuration file may lie on a file system that hangs. A
/// reload waits for a shorter time, and reports the hang.
const ANSWER_MAX: Duration = Duration::from_secs(11);

/// Bytes of the number that a request and its answer begin with.
const NUMBER_BYTES: usize = 4;

/// The tasks, by the byte after the number of a request. A path follows all but the last.
const FIND_OPEN: u8 = b'o';
const FIND_LOCKED: u8 = b'l';
const FIND_LISTENER: u8 = b's';
const OPEN_CONFIG: u8 = b'c';

/// The byte after the number of an answer.
const DONE: u8 = b'd';
const FAILED: u8 = b'f';

/// The answers about a listener; the id of its process may follow.
const NO_LISTENER: u8 = b'n';
const LISTENER: u8 = b'l';

/// The most threads that a configuration file may hang.
const OPENING_MAX: usize = 16;

/// The daemon's end.
struct Helper {
    socket: OwnedFd,
    config: Option<PathBuf>,
    /// The number of the last request.
    number: u32,
}

static HELPER: OnceLock<Lock<Helper>> = OnceLock::new();

/// Starts the process. Must be called while this one has a single thread.
///
/// # Errors
///
/// When the kernel has no process or descriptor left.
pub(super) fn start(config: Option<&Path>, rules: &Rules) -> Result<()> {
    let config = config.map(|path| std::path::absolute(path).unwrap_or(path.to_owned()));
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .context("cannot make a socket for the helper of the sandbox")?;
    let daemon = rustix::process::getpid();
    // SAFETY: this process has one thread, so that no lock is held that the child could wait for.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()).context("cannot start the helper of the sandbox"),
        0 => {
            drop(ours);
            let is_prepared = set_parent_process_death_signal(Some(Signal::KILL)).is_ok()
                && getppid() == Some(daemon);
            if is_prepared && prepare(theirs.as_raw_fd()).is_ok() {
                serve(&theirs, config.as_deref(), rules);
            }
            exit()
        }
        _ => {
            drop(theirs);
            set_socket_timeout(&ours, Timeout::Recv, Some(ANSWER_MAX))?;
            // A process is confined once.
            let _ = HELPER.set(Lock::new(Helper { socket: ours, config, number: 0 }));
            set_holder_finder(ask_for_holders);
            Ok(())
        }
    }
}

/// Opens the configuration file, if it is the one that the helper opens. `None`: it is not, or
/// there is no helper.
pub(crate) fn open_config(path: &Path) -> Option<io::Result<File>> {
    let mut helper = HELPER.get()?.lock();
    if helper.config != std::path::absolute(path).ok() {
        return None;
    }
    Some(helper.open_config())
}

/// Finds the programs that have a file open. An empty list: there are none, or the helper is gone.
fn ask_for_holders(path: &Path, is_locked: bool) -> Vec<String> {
    let Some(helper) = HELPER.get() else { return Vec::new() };
    let task = if is_locked { FIND_LOCKED } else { FIND_OPEN };
    let answer = helper.lock().ask(task, path).map(|(answer, _)| answer);
    let answer = answer.unwrap_or_default();
    let names = String::from_utf8_lossy(&answer);
    names.lines().map(str::to_owned).collect()
}

/// A program that listens at a socket, with the id of its process if that is known.
pub(crate) type Listener = Option<u32>;

/// Finds the program that listens at a socket. `None`: there is no helper.
pub(crate) fn find_listener(path: &Path) -> Option<io::Result<Option<Listener>>> {
    let mut helper = HELPER.get()?.lock();
    Some(helper.ask(FIND_LISTENER, path).map(|(answer, _)| match answer.split_first() {
        Some((&LISTENER, process)) => Some(process.try_into().ok().map(u32::from_ne_bytes)),
        _ => None,
    }))
}

impl Helper {
    fn open_config(&mut self) -> io::Result<File> {
        let (_, file) = self.ask(OPEN_CONFIG, Path::new(""))?;
        file.map(File::from).ok_or_else(|| ErrorKind::InvalidData.into())
    }

    /// Sends a request, and waits for its answer.
    fn ask(&mut self, task: u8, path: &Path) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
        self.number = self.number.wrapping_add(1);
        let number = self.number.to_ne_bytes();
        let request = [&number, &[task][..], path.as_os_str().as_bytes()].concat();
        send(&self.socket, &request, SendFlags::NOSIGNAL)?;
        loop {
            let (answer, file) = self.receive()?;
            // An answer to an earlier request may come late.
            let Some(answer) = answer.strip_prefix(&number) else { continue };
            return match answer.split_first() {
                Some((&DONE, answer)) => Ok((answer.to_vec(), file)),
                Some((&FAILED, code)) => {
                    let code = code.try_into().map_or(libc::EIO, i32::from_ne_bytes);
                    Err(io::Error::from_raw_os_error(code))
                }
                _ => Err(ErrorKind::InvalidData.into()),
            };
        }
    }

    fn receive(&self) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
        let mut bytes = vec![0; MESSAGE_BYTES];
        let received = fd_messages::receive(&self.socket, &mut bytes, RecvFlags::empty())?;
        bytes.truncate(received.bytes);
        if bytes.is_empty() {
            return Err(io::Error::other("the helper of the sandbox has ended"));
        }
        Ok((bytes, received.fds.into_iter().next()))
    }
}

/// Leaves the rights and the descriptors of the daemon.
fn prepare(socket: RawFd) -> Result<()> {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: ignores the signal. It goes to the daemon, which ends this process.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    let socket = u32::try_from(socket)?;
    for (first, last) in [(0, socket.wrapping_sub(1)), (socket + 1, u32::MAX)] {
        if first <= last {
            let flags: c_int = 0;
            // SAFETY: closes descriptors of this process, none of which its further code uses.
            unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) };
        }
    }
    // Fails only for names with a zero byte.
    let _ = set_name(c"ringhaul-helper");
    set_no_new_privs(true)?;
    // Descriptors of processes of other users, and of processes with more capabilities.
    capabilities::keep(CapabilitySet::SYS_PTRACE | CapabilitySet::DAC_READ_SEARCH)?;
    calls::confine_helper()
}

/// Answers requests until the daemon ends.
fn serve(socket: &OwnedFd, config: Option<&Path>, rules: &Rules) {
    let opening = AtomicUsize::new(0);
    let mut bytes = vec![0; MESSAGE_BYTES];
    // A thread that hangs must not keep the process: the caller ends it.
    std::thread::scope(|scope| {
        loop {
            let request = match recv(socket, &mut bytes[..], RecvFlags::empty()) {
                Ok((0, _)) => exit(),
                Ok((count, _)) => &bytes[..count.min(MESSAGE_BYTES)],
                Err(Errno::INTR) => continue,
                Err(_) => exit(),
            };
            let Some((number, [task, path @ ..])) = request.split_first_chunk::<NUMBER_BYTES>()
            else {
                continue;
            };
            let (number, path) = (*number, Path::new(OsStr::from_bytes(path)));
            let answer = match *task {
                FIND_OPEN | FIND_LOCKED => {
                    let names = find_holders(path, *task == FIND_LOCKED).join("\n");
                    Ok(names.into_bytes())
                }
                FIND_LISTENER if rules.permits_socket(path) => find_listener_here(path),
                FIND_LISTENER => Err(Errno::ACCESS.into()),
                // The file may hang.
                OPEN_CONFIG if opening.fetch_add(1, Ordering::Relaxed) < OPENING_MAX => {
                    let opening = &opening;
                    let open = move || {
                        let file = open(config);
                        opening.fetch_sub(1, Ordering::Relaxed);
                        let (file, answer) = match file {
                            Ok(file) => (Some(file), Ok(Vec::new())),
                            Err(error) => (None, Err(error)),
                        };
                        respond(socket, number, answer, file.as_ref());
                    };
                    if std::thread::Builder::new().spawn_scoped(scope, open).is_ok() {
                        continue;
                    }
                    Err(ErrorKind::OutOfMemory.into())
                }
                _ => Err(ErrorKind::InvalidInput.into()),
            };
            respond(socket, number, answer, None);
        }
    });
}

/// Ends the process at once; nothing of the daemon may run at its end.
fn exit() -> ! {
    // SAFETY: ends all threads, whatever they do.
    unsafe { libc::_exit(0) }
}

fn open(config: Option<&Path>) -> io::Result<File> {
    open_regular(config.ok_or(ErrorKind::NotFound)?)
}

/// Connects to a socket and hangs up.
fn find_listener_here(path: &Path) -> io::Result<Vec<u8>> {
    let Some(connected) = connect(path)? else { return Ok(vec![NO_LISTENER]) };
    let process = connected.and_then(|socket| Peer::from_socket(socket).ok()?.pid);
    let process = process.map(|process| process.to_ne_bytes().to_vec());
    Ok([vec![LISTENER], process.unwrap_or_default()].concat())
}

/// Connects to a socket. `None`: no program listens there. `Some(None)`: the backlog of the
/// listener is full.
pub(crate) fn connect(path: &Path) -> io::Result<Option<Option<OwnedFd>>> {
    let (flags, address) =
        (SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, SocketAddrUnix::new(path)?);
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => Ok(Some(Some(socket))),
        Err(Errno::AGAIN) => Ok(Some(None)),
        Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Sends an answer. If the daemon is gone, the next request is not received either.
fn respond(socket: &OwnedFd, number: [u8; 4], answer: io::Result<Vec<u8>>, file: Option<&File>) {
    let answer = match answer {
        Ok(answer) => [vec![DONE], answer].concat(),
        Err(error) => {
            let code = error.raw_os_error().unwrap_or(libc::EINVAL);
            [vec![FAILED], code.to_ne_bytes().to_vec()].concat()
        }
    };
    let mut answer = [&number, &answer[..]].concat();
    answer.truncate(MESSAGE_BYTES);
    let files: Vec<_> = file.into_iter().map(rustix::fd::AsFd::as_fd).collect();
    let _ = fd_messages::send(socket, &answer, &files, SendFlags::empty());
}
