//! Descriptors that come from a front-end, which may lead anywhere.
//!
//! Asking what such a descriptor is, mapping or closing it may wait for ever: a file of a FUSE file
//! system answers when its server likes. A few questions never ask a file system: its link below
//! `/proc/self/fd`, `F_GET_SEALS`, and options of sockets. What they do not show to be harmless is
//! examined and closed on threads of the export's own, which nobody waits for.

use std::fs::File;
use std::io;
use std::net::Shutdown;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_get_seals, fcntl_getfl, fcntl_setfl};
use rustix::net::{AddressFamily, SocketType, sockopt};

use super::examiner::{Counted, Examiner};

/// The kinds of descriptor through which a front-end can be called.
pub(super) enum Kind {
    Eventfd,
    Pipe,
    /// A Unix stream socket whose other end has no name. The front-end's end of its own connection
    /// is none: the connection would never hang up while the daemon has it.
    SocketPair,
    /// Anything else, and the kernel's name for it.
    Other(PathBuf),
}

/// A descriptor of the front-end's. Dropping it does not wait.
pub(super) struct ForeignFd {
    fd: Option<OwnedFd>,
    /// None: it was taken out.
    counted: Option<Counted>,
}

impl ForeignFd {
    pub(super) fn new(fd: OwnedFd, examiner: Arc<Examiner>) -> Self {
        Self { fd: Some(fd), counted: Some(Counted::new(examiner)) }
    }

    /// The eventfd that it must be, made non-blocking; `what` names it. Nothing else can be watched
    /// or written to without waiting for it.
    pub(super) fn into_eventfd(mut self, what: &str) -> io::Result<OwnedFd> {
        let kind = kind_of(self.as_fd())?;
        if kind.as_os_str() != EVENTFD {
            let text = format!("{what} that is not an eventfd but {}", kind.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let flags = fcntl_getfl(self.as_fd())? | OFlags::NONBLOCK;
        fcntl_setfl(self.as_fd(), flags)?;
        self.fd.take().ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// The Unix stream socket that it must be, and no end of the front-end's own connection.
    pub(super) fn into_unix_socket(mut self, own: &OwnSocket) -> io::Result<OwnedFd> {
        let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text);
        if !is_unix_stream(self.as_fd()) {
            return Err(invalid("a channel for our messages that is not a Unix stream socket"));
        }
        if own.has_end(self.as_fd()) {
            return Err(invalid("a channel for our messages that is the front-end's connection"));
        }
        self.fd.take().ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// Whether it is memory in every respect: no operation on it asks anybody.
    pub(super) fn is_sealable(&self) -> bool {
        fcntl_get_seals(self.as_fd()).is_ok()
    }

    /// The file, to be kept open. It does not count as one that is to be closed meanwhile.
    pub(super) fn into_held(mut self) -> Option<HeldFile> {
        let examiner = Arc::clone(self.counted.take()?.examiner());
        Some(HeldFile { file: Some(Arc::new(self.fd.take()?.into())), examiner })
    }

    /// The kind of a descriptor for calls, without a question to a file system.
    pub(super) fn kind(&self) -> io::Result<Kind> {
        let kind = kind_of(self.as_fd())?;
        let name = kind.as_os_str().as_encoded_bytes();
        Ok(match name {
            _ if name == EVENTFD.as_bytes() => Kind::Eventfd,
            // A pipe with a name, which a file system keeps, has a path here.
            _ if name.starts_with(b"pipe:[") => Kind::Pipe,
            _ if is_unix_stream(self.as_fd()) && is_peer_unnamed(self.as_fd()) => Kind::SocketPair,
            _ => Kind::Other(kind),
        })
    }
}

impl AsFd for ForeignFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.fd {
            Some(fd) => fd.as_fd(),
            None => unreachable!("what is taken out of it is taken by value"),
        }
    }
}

impl Drop for ForeignFd {
    fn drop(&mut self) {
        let (Some(fd), Some(counted)) = (self.fd.take(), self.counted.take()) else { return };
        if !closes_at_once(fd.as_fd()) {
            let examiner = Arc::clone(counted.examiner());
            examiner.close((fd, counted));
        }
    }
}

/// The identity of the socket of a connection. While the daemon has the front-end's end of
/// it open, the connection does not hang up.
#[derive(Default)]
pub(super) struct OwnSocket {
    /// Device and inode.
    file: Option<(u64, u64)>,
    /// The name that a front-end has connected to. None: it came as an open descriptor.
    name: Option<PathBuf>,
}

impl OwnSocket {
    pub(super) fn of(socket: &UnixStream) -> Self {
        let name = socket.local_addr().ok();
        let name = name.and_then(|name| name.as_pathname().map(Path::to_owned));
        Self { file: file_of(socket.as_fd()), name }
    }

    /// Whether a socket is either end of the connection.
    fn has_end(&self, fd: BorrowedFd<'_>) -> bool {
        let peer = || fd.try_clone_to_owned().map(UnixStream::from)?.peer_addr();
        let is_peer = self.name.is_some()
            && peer().is_ok_and(|peer| peer.as_pathname() == self.name.as_deref());
        is_peer || self.file.is_some() && file_of(fd) == self.file
    }
}

/// Device and inode of a socket.
fn file_of(fd: BorrowedFd<'_>) -> Option<(u64, u64)> {
    rustix::fs::fstat(fd).ok().map(|file| (file.st_dev, file.st_ino))
}

/// The socket of a connection. Closing it closes descriptors in messages that nobody has read,
/// which may wait for ever; dropping it does not wait.
pub(super) struct PeerSocket {
    socket: Option<UnixStream>,
    examiner: Arc<Examiner>,
    /// Another process has it too, and goes on with it.
    pub(super) is_lent: bool,
}

impl PeerSocket {
    pub(super) fn new(socket: UnixStream, examiner: Arc<Examiner>) -> Self {
        Self { socket: Some(socket), examiner, is_lent: false }
    }

    /// Whether there are bytes to be read, with which descriptors may come.
    pub(super) fn has_unread(&self) -> bool {
        // It fails for no socket.
        rustix::io::ioctl_fionread(self).map_or(true, |bytes| bytes > 0)
    }
}

impl Deref for PeerSocket {
    type Target = UnixStream;

    fn deref(&self) -> &UnixStream {
        match &self.socket {
            Some(socket) => socket,
            None => unreachable!("only its drop takes the socket"),
        }
    }
}

impl AsFd for PeerSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        UnixStream::as_fd(self)
    }
}

impl Drop for PeerSocket {
    fn drop(&mut self) {
        if self.is_lent {
            return;
        }
        // Nothing more comes from now on. It fails when the front-end has left on its own.
        let _ = self.shutdown(Shutdown::Both);
        let has_unread = self.has_unread();
        if let Some(socket) = self.socket.take()
            && has_unread
        {
            self.examiner.close((socket, Counted::new(Arc::clone(&self.examiner))));
        }
    }
}

/// A file of the front-end's that stays open. Dropping it does not wait.
pub(super) struct HeldFile {
    file: Option<Arc<File>>,
    examiner: Arc<Examiner>,
}

impl HeldFile {
    /// The file, for no longer than this is kept.
    pub(super) fn file(&self) -> Arc<File> {
        match &self.file {
            Some(file) => Arc::clone(file),
            None => unreachable!("only its drop takes the file"),
        }
    }
}

impl Drop for HeldFile {
    fn drop(&mut self) {
        if let Some(file) = self.file.take().and_then(Arc::into_inner) {
            drop(ForeignFd::new(file.into(), Arc::clone(&self.examiner)));
        }
    }
}

const EVENTFD: &str = "anon_inode:[eventfd]";

/// Names of what the kernel makes itself, which a path never looks like: it begins with a slash.
fn kind_of(fd: BorrowedFd<'_>) -> io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).map_err(|error| {
        let text = format!("cannot identify descriptors: {error}; /proc must be mounted");
        io::Error::new(error.kind(), text)
    })
}

/// Whether closing is known to ask nobody.
fn closes_at_once(fd: BorrowedFd<'_>) -> bool {
    // A socket is not: messages that nobody has read may bring descriptors that wait.
    fcntl_get_seals(fd).is_ok() || kind_of(fd).is_ok_and(|kind| kind.as_os_str() == EVENTFD)
}

fn is_unix_stream(fd: BorrowedFd<'_>) -> bool {
    sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX)
        && sockopt::socket_type(fd) == Ok(SocketType::STREAM)
}

fn is_peer_unnamed(fd: BorrowedFd<'_>) -> bool {
    let socket = fd.try_clone_to_owned().map(UnixStream::from);
    socket.and_then(|socket| socket.peer_addr()).is_ok_and(|peer| peer.is_unnamed())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::super::examiner::tests::{hung, wait_until};
    use super::*;

    /// How many descriptors of this process lead to a file.
    fn descriptors_of(file: &Path) -> usize {
        let all = std::fs::read_dir("/proc/self/fd").unwrap();
        let links = all.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        links.filter(|link| link == file).count()
    }

    #[test]
    fn what_may_wait_is_closed_elsewhere_and_later() {
        let (examiner, hang) = hung();
        // No test opens this but here, and it is on no file system of memory.
        let path = std::env::current_exe().unwrap();
        let file = File::open(&path).unwrap();
        let foreign = || {
            let fd = file.try_clone().unwrap().into();
            ForeignFd::new(fd, Arc::clone(&examiner))
        };
        drop(foreign());
        assert!(foreign().into_eventfd("a kick").is_err());
        assert!(foreign().into_unix_socket(&OwnSocket::default()).is_err());
        drop([foreign(), foreign()].map(ForeignFd::into_held));
        // Nobody waited for it, and it is open still.
        assert_eq!(descriptors_of(&path), 6);
        drop(hang);
        wait_until(|| descriptors_of(&path) == 1 && examiner.is_idle());
    }

    #[test]
    fn what_is_known_to_be_harmless_is_closed_at_once() {
        let (examiner, _hang) = hung();
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let memory = memfd_create("harmless", MemfdFlags::CLOEXEC).unwrap();
        for fd in [event, memory] {
            drop(ForeignFd::new(fd, Arc::clone(&examiner)));
            assert!(examiner.closes() == 0, "it waits for the thread that hangs");
        }
    }

    #[test]
    fn a_socket_with_unread_messages_is_closed_elsewhere() {
        for (is_read, jobs) in [(true, 0), (false, 1)] {
            let (examiner, _hang) = hung();
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let ours = PeerSocket::new(ours, Arc::clone(&examiner));
            theirs.write_all(b"x").unwrap();
            if is_read {
                (&*ours).read_exact(&mut [0]).unwrap();
            }
            drop(ours);
            assert_eq!(examiner.closes(), jobs, "read: {is_read}");
            // The other side sees the end anyway.
            assert!(matches!(theirs.read(&mut [0]), Ok(0) | Err(_)));
        }
        let (examiner, _hang) = hung();
        let (socket, _peer) = UnixStream::pair().unwrap();
        drop(ForeignFd::new(socket.into(), Arc::clone(&examiner)));
        assert_eq!(examiner.closes(), 1, "what it has was not read");
    }

    #[test]
    fn a_thread_that_hangs_is_given_only_so_much() {
        let (examiner, hang) = hung();
        for _ in 0..512 {
            assert!(!examiner.is_full());
            let pipe = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap().0;
            drop(ForeignFd::new(pipe, Arc::clone(&examiner)));
        }
        assert!(examiner.is_full());
        drop(hang);
        wait_until(|| !examiner.is_full());
    }
}
