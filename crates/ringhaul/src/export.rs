//! One device on one socket, and the control thread that serves its front-ends one by one.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow, bail};
use blockio::Remote;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::{AddressFamily, SocketType, sockopt};
use rustix::process::{PidfdFlags, PidfdGetfdFlags};

use crate::blk::BlkDevice;
use crate::memory_limits::MemoryLimits;
use crate::vhost_user::{Closer, Session};

/// Where front-ends come from.
pub enum Endpoint {
    /// A socket in the file system, made by us and removed at the end.
    Listener(OwnSocket),
    /// A listening socket that whoever started us has made.
    InheritedListener(UnixListener),
    /// One connection, made by whoever started us. The export ends with it.
    Connection(UnixStream),
}

/// Bytes of a socket's path: the kernel has 108, and one is for the end (unix(7)).
const SOCKET_PATH_BYTES: usize = 107;

/// A listening socket and its place in the file system.
pub struct OwnSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode, so that only our own socket is removed.
    identity: (u64, u64),
}

impl Endpoint {
    /// Listens on `path`. A socket there that nobody listens on is replaced.
    ///
    /// # Errors
    ///
    /// When somebody listens there, or something else is there, or it cannot be made.
    pub fn bind(path: &Path) -> Result<Self> {
        let shown = path.display();
        let bytes = path.as_os_str().len();
        if bytes > SOCKET_PATH_BYTES {
            bail!(
                "cannot listen on {shown}: the path is too long for a socket, {bytes} bytes and \
                 not at most {SOCKET_PATH_BYTES}; choose another --socket-path"
            );
        }
        clear_socket_path(path)?;
        let listener = UnixListener::bind(path).map_err(|error| {
            anyhow!("cannot listen on {shown}: {error}; choose another --socket-path")
        })?;
        let metadata = std::fs::symlink_metadata(path)
            .with_context(|| format!("cannot look at the new socket {shown}"))?;
        let identity = (metadata.dev(), metadata.ino());
        Ok(Self::Listener(OwnSocket { listener, path: path.to_owned(), identity }))
    }

    /// Takes over descriptor `fd`, a listening or a connected Unix socket.
    ///
    /// # Errors
    ///
    /// When it is not open, or no such socket.
    pub fn inherit(fd: i32) -> Result<Self> {
        let what = || format!("cannot use --fd {fd}; it must be an open Unix stream socket");
        let socket = duplicate(fd).with_context(what)?;
        if sockopt::socket_domain(&socket).with_context(what)? != AddressFamily::UNIX
            || sockopt::socket_type(&socket).with_context(what)? != SocketType::STREAM
        {
            bail!("{}", what());
        }
        if sockopt::socket_acceptconn(&socket).with_context(what)? {
            return Ok(Self::InheritedListener(UnixListener::from(socket)));
        }
        // It says whether there is a peer.
        rustix::net::getpeername(&socket).with_context(what)?;
        Ok(Self::Connection(UnixStream::from(socket)))
    }
}

/// A descriptor of this process by its number, without a claim on the number itself.
fn duplicate(fd: i32) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(rustix::io::Errno::BADF.into());
    }
    let this = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
    Ok(rustix::process::pidfd_getfd(&this, fd, PidfdGetfdFlags::empty())?)
}

/// Makes way for a socket: removes one that is left over, refuses anything else.
fn clear_socket_path(path: &Path) -> Result<()> {
    let shown = path.display();
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("cannot look at {shown}")),
    };
    if !metadata.file_type().is_socket() {
        bail!("{shown} is there already and is no socket; choose another --socket-path");
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            tracing::info!("nobody listens on the socket {shown}; it is replaced");
            std::fs::remove_file(path)
                .with_context(|| format!("cannot remove the old socket {shown}"))
        }
        Err(error) => Err(error).with_context(|| format!("cannot find out who listens on {shown}")),
        Ok(_) => {
            bail!("another program listens on {shown}; stop it or choose another --socket-path")
        }
    }
}

impl Drop for OwnSocket {
    fn drop(&mut self) {
        let ours = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.identity);
        if ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!("cannot remove the socket {}: {error}", self.path.display());
        }
    }
}

/// A running export.
pub struct Export {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    name: String,
    device: BlkDevice,
    threads: Vec<Remote>,
    limits: MemoryLimits,
    stopping: AtomicBool,
    wake: OwnedFd,
    /// The front-end that is being served.
    current: Mutex<Option<Closer>>,
}

impl Export {
    /// Starts serving `device` on `endpoint`, its queues on `threads` in turn, to front-ends that
    /// share memory within `limits`. `ended` is called when the export has ended.
    ///
    /// # Errors
    ///
    /// When the kernel has no thread or descriptor left.
    pub fn start(
        name: &str,
        device: BlkDevice,
        endpoint: Endpoint,
        threads: Vec<Remote>,
        limits: MemoryLimits,
        ended: impl FnOnce() + Send + 'static,
    ) -> Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .context("cannot create an eventfd")?;
        let shared = Arc::new(Shared {
            name: name.to_owned(),
            device,
            threads,
            limits,
            stopping: AtomicBool::new(false),
            wake,
            current: Mutex::new(None),
        });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("ringhaul-export".into())
            .spawn(move || {
                of_thread.run(endpoint);
                ended();
            })
            .context("cannot start the control thread of an export")?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Lets go of the front-end and ends the export. Returns when all requests that were taken
    /// have been answered.
    pub fn stop(mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        let current = self.shared.current().clone();
        if let Some(front_end) = current {
            front_end.close();
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let (total, left_out) = self.shared.device.log().totals();
        if total > 0 {
            tracing::info!(
                export = self.shared.name,
                left_out,
                "guests or front-ends caused {total} errors"
            );
        }
    }
}

impl Shared {
    fn current(&self) -> MutexGuard<'_, Option<Closer>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, endpoint: Endpoint) {
        match endpoint {
            Endpoint::Listener(socket) => self.accept_all(&socket.listener),
            Endpoint::InheritedListener(listener) => self.accept_all(&listener),
            Endpoint::Connection(socket) => self.serve(socket),
        }
    }

    fn accept_all(&self, listener: &UnixListener) {
        while self.wait_for_front_end(listener) {
            match listener.accept() {
                Ok((socket, _)) => self.serve(socket),
                Err(error) => {
                    self.failed("cannot accept a front-end", &error);
                    if self.pause() {
                        return;
                    }
                }
            }
        }
    }

    /// False when the export is to end.
    fn wait_for_front_end(&self, listener: &UnixListener) -> bool {
        while !self.stopping.load(Ordering::SeqCst) {
            let mut fds =
                [PollFd::new(listener, PollFlags::IN), PollFd::new(&self.wake, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) if !fds[0].revents().is_empty() => return true,
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(export = self.name, "cannot wait for a front-end: {error}");
                    return false;
                }
            }
        }
        false
    }

    fn failed(&self, what: &str, error: &io::Error) {
        let Some(left_out) = self.device.log().permit() else { return };
        let advice = match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => "; raise the limit on open files (ulimit -n)",
            _ => "",
        };
        tracing::warn!(export = self.name, left_out, "{what}: {error}{advice}");
    }

    /// Gives descriptors time to come back. True when the export is to end.
    fn pause(&self) -> bool {
        let mut fds = [PollFd::new(&self.wake, PollFlags::IN)];
        let second = rustix::event::Timespec { tv_sec: 1, tv_nsec: 0 };
        let _ = poll(&mut fds, Some(&second));
        self.stopping.load(Ordering::SeqCst)
    }

    fn serve(&self, socket: UnixStream) {
        let rules = self.limits.of_front_end();
        let session = match Session::new(socket, &self.name, &self.device, &self.threads, rules) {
            Ok(session) => session,
            Err(error) => {
                self.failed("cannot serve a front-end", &error);
                return;
            }
        };
        *self.current() = Some(session.closer());
        // `stop` sets the flag before it looks for a front-end to close.
        if !self.stopping.load(Ordering::SeqCst) {
            session.run();
        }
        *self.current() = None;
    }
}
