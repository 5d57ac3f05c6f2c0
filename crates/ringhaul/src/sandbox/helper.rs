//! A process outside the sandbox, for two tasks that the daemon has no right to: it finds the
//! programs that have a file open, and opens the configuration file, which an editor may have
//! replaced.
//!
//! It is forked before the daemon opens anything, and has no descriptor but its socket. It opens
//! files for reading only, and hands over none but the configuration file. It ends with the daemon.

use std::ffi::c_int;
use std::fs::File;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result};
use blockio::disk::{find_holders, set_holder_finder};
use blockio::executor::Lock;
use blockio::file::open_regular;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recv, recvmsg, send, sendmsg,
    socketpair,
};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use rustix::thread::{CapabilitySet, set_name, set_no_new_privs};

use super::{calls, capabilities};

/// The longest message, in bytes.
const MESSAGE_BYTES: usize = 16 << 10;
/// The longest wait for an answer: the configuration file may lie on a file system that hangs.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// The tasks, by the first byte of a request. A path follows the first two.
const FIND_OPEN: u8 = b'o';
const FIND_LOCKED: u8 = b'l';
const OPEN_CONFIG: u8 = b'c';

/// The first byte of an answer.
const DONE: u8 = b'd';
const FAILED: u8 = b'f';

/// The daemon's end.
struct Helper {
    socket: OwnedFd,
    config: Option<PathBuf>,
}

static HELPER: OnceLock<Lock<Helper>> = OnceLock::new();

/// Starts the process. Must be called while this one has a single thread.
///
/// # Errors
///
/// When the kernel has no process or descriptor left.
pub(super) fn start(config: Option<&Path>) -> Result<()> {
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
                serve(&theirs, config.as_deref());
            }
            // SAFETY: ends the process at once; nothing of the daemon may run at its end.
            unsafe { libc::_exit(0) }
        }
        _ => {
            drop(theirs);
            set_socket_timeout(&ours, Timeout::Recv, Some(ANSWER_MAX))?;
            // A process is confined once.
            let _ = HELPER.set(Lock::new(Helper { socket: ours, config }));
            set_holder_finder(ask_for_holders);
            Ok(())
        }
    }
}

/// Opens the configuration file, if it is the one that the helper opens. `None`: it is not, or
/// there is no helper.
pub(crate) fn open_config(path: &Path) -> Option<io::Result<File>> {
    let helper = HELPER.get()?.lock();
    if helper.config != std::path::absolute(path).ok() {
        return None;
    }
    Some(helper.open_config())
}

/// Finds the programs that have a file open. An empty list: there are none, or the helper is gone.
fn ask_for_holders(path: &Path, is_locked: bool) -> Vec<String> {
    let Some(helper) = HELPER.get() else { return Vec::new() };
    let mut request = vec![if is_locked { FIND_LOCKED } else { FIND_OPEN }];
    request.extend(path.as_os_str().as_bytes());
    let answer = helper.lock().ask(&request).map(|(answer, _)| answer);
    let answer = answer.unwrap_or_default();
    let names = String::from_utf8_lossy(&answer);
    names.lines().map(str::to_owned).collect()
}

impl Helper {
    fn open_config(&self) -> io::Result<File> {
        let (_, file) = self.ask(&[OPEN_CONFIG])?;
        file.map(File::from).ok_or_else(|| ErrorKind::InvalidData.into())
    }

    /// Sends a request, and waits for its answer.
    fn ask(&self, request: &[u8]) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
        // An answer that came too late must not be taken for that of another request.
        while recv(&self.socket, &mut [0; 1], RecvFlags::DONTWAIT).is_ok_and(|(_, bytes)| bytes > 0)
        {
        }
        send(&self.socket, request, SendFlags::NOSIGNAL)?;
        let mut bytes = vec![0; MESSAGE_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let slices = &mut [IoSliceMut::new(&mut bytes)];
        let received = recvmsg(&self.socket, slices, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let file = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        bytes.truncate(received.bytes);
        match bytes.split_first() {
            Some((&DONE, answer)) => Ok((answer.to_vec(), file)),
            Some((&FAILED, code)) => {
                let code = code.try_into().map_or(libc::EIO, i32::from_ne_bytes);
                Err(io::Error::from_raw_os_error(code))
            }
            _ => Err(io::Error::other("the helper of the sandbox has ended")),
        }
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
fn serve(socket: &OwnedFd, config: Option<&Path>) {
    let mut request = vec![0; MESSAGE_BYTES];
    loop {
        let bytes = match recv(socket, &mut request[..], RecvFlags::empty()) {
            Ok((0, _)) => return,
            Ok((_, bytes)) => bytes.min(MESSAGE_BYTES),
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return,
        };
        let (task, path) =
            (request[0], PathBuf::from(std::ffi::OsString::from_vec(request[1..bytes].to_vec())));
        let mut file = None;
        let mut answer = vec![DONE];
        match task {
            FIND_OPEN | FIND_LOCKED => {
                let names = find_holders(&path, task == FIND_LOCKED).join("\n");
                answer.extend(names.bytes().take(MESSAGE_BYTES - 1));
            }
            OPEN_CONFIG => match open(config) {
                Ok(opened) => file = Some(opened),
                Err(error) => {
                    answer = vec![FAILED];
                    answer.extend(error.raw_os_error().unwrap_or(libc::EINVAL).to_ne_bytes());
                }
            },
            _ => answer = vec![FAILED],
        }
        if respond(socket, &answer, file.as_ref()).is_err() {
            return;
        }
    }
}

fn open(config: Option<&Path>) -> io::Result<File> {
    open_regular(config.ok_or(ErrorKind::NotFound)?)
}

fn respond(socket: &OwnedFd, answer: &[u8], file: Option<&File>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files: Vec<_> = file.into_iter().map(rustix::fd::AsFd::as_fd).collect();
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&files));
    }
    sendmsg(socket, &[IoSlice::new(answer)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}
