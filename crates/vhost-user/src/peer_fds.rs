//! Descriptors that come from a front-end, which may refer to any kind of file.
//!
//! Examining, mapping or closing such a descriptor may wait for ever: a file of a FUSE file system
//! answers when its server likes. A few questions never reach a file system: the link below
//! `/proc/self/fd`, `F_GET_SEALS`, and options of sockets. A descriptor that these do not show to
//! be harmless is examined and closed on threads of its export, for which no queue waits.

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
    /// A Unix stream socket whose peer has no name. This excludes the front-end's end of its own
    /// connection: the connection would never hang up while the daemon has that open.
    SocketPair,
    /// Anything else, and the kernel's name for it.
    Other(PathBuf),
}

/// A descriptor of the front-end's. Dropping it does not wait.
pub(super) struct PeerFd {
    fd: Option<OwnedFd>,
    /// `None` after the file was taken out.
    counted: Option<Counted>,
}

impl PeerFd {
    pub(super) fn new(fd: OwnedFd, examiner: Arc<Examiner>) -> Self {
        Self { fd: Some(fd), counted: Some(Counted::new(examiner)) }
    }

    /// Returns the eventfd, made non-blocking; any other file is an error. `what` names the
    /// descriptor in errors. Only an eventfd can be watched and written to without a wait.
    pub(super) fn into_eventfd(mut self, what: &str) -> io::Result<OwnedFd> {
        let kind = link_target(self.as_fd())?;
        if kind.as_os_str() != EVENTFD {
            let text = format!("{what} must be an eventfd, and is {}", kind.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let flags = fcntl_getfl(self.as_fd())? | OFlags::NONBLOCK;
        fcntl_setfl(self.as_fd(), flags)?;
        self.fd.take().ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// Returns the Unix stream socket. Any other file, and an end of the front-end's own
    /// connection, is an error.
    pub(super) fn into_unix_socket(mut self, connection: &ConnectionId) -> io::Result<OwnedFd> {
        let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text);
        if !is_unix_stream(self.as_fd()) {
            return Err(invalid("the back-end channel must be a Unix stream socket"));
        }
        if connection.has_end(self.as_fd()) {
            return Err(invalid("the back-end channel must not be the front-end's own connection"));
        }
        self.fd.take().ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// Returns true if the file is plain memory: no operation on it waits for another process.
    pub(super) fn is_sealable(&self) -> bool {
        fcntl_get_seals(self.as_fd()).is_ok()
    }

    /// Returns the file, to be kept open. It no longer counts as a descriptor that is to be closed.
    pub(super) fn into_held(mut self) -> Option<HeldFile> {
        let examiner = Arc::clone(self.counted.take()?.examiner());
        Some(HeldFile { file: Some(Arc::new(self.fd.take()?.into())), examiner })
    }

    /// Classifies a descriptor for calls, without a question to a file system.
    pub(super) fn kind(&self) -> io::Result<Kind> {
        let kind = link_target(self.as_fd())?;
        let name = kind.as_os_str().as_encoded_bytes();
        Ok(match name {
            _ if name == EVENTFD.as_bytes() => Kind::Eventfd,
            // A named pipe is kept by a file system and has a path here.
            _ if name.starts_with(b"pipe:[") => Kind::Pipe,
            _ if is_unix_stream(self.as_fd()) && is_peer_unnamed(self.as_fd()) => Kind::SocketPair,
            _ => Kind::Other(kind),
        })
    }
}

impl AsFd for PeerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.fd {
            Some(fd) => fd.as_fd(),
            None => unreachable!("what is taken out of it is taken by value"),
        }
    }
}

impl Drop for PeerFd {
    fn drop(&mut self) {
        let (Some(fd), Some(counted)) = (self.fd.take(), self.counted.take()) else { return };
        if !closes_without_wait(fd.as_fd()) {
            let examiner = Arc::clone(counted.examiner());
            examiner.close((fd, counted));
        }
    }
}

/// The identity of the socket of a connection. While the daemon has the front-end's end of it open,
/// the connection does not hang up.
#[derive(Default)]
pub(super) struct ConnectionId {
    /// Device and inode.
    file: Option<(u64, u64)>,
    /// The path that a front-end has connected to. `None` for a socket that came as an open
    /// descriptor.
    name: Option<PathBuf>,
}

impl ConnectionId {
    pub(super) fn from_socket(socket: &UnixStream) -> Self {
        let name = socket.local_addr().ok();
        let name = name.and_then(|name| name.as_pathname().map(Path::to_owned));
        Self { file: file_of(socket.as_fd()), name }
    }

    /// Returns true if the socket is either end of the connection.
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

/// The socket of a connection. Dropping it does not wait: closing a socket also closes the
/// descriptors in unread messages, which may wait for ever.
pub(super) struct PeerSocket {
    socket: Option<UnixStream>,
    examiner: Arc<Examiner>,
    /// True if another process has the connection too and continues it.
    pub(super) is_lent: bool,
}

impl PeerSocket {
    pub(super) fn new(socket: UnixStream, examiner: Arc<Examiner>) -> Self {
        Self { socket: Some(socket), examiner, is_lent: false }
    }

    /// Returns true if the socket has unread bytes, with which descriptors may come.
    pub(super) fn has_unread(&self) -> bool {
        // Fails for no socket.
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
        // Stops further messages. Fails if the front-end has already closed the connection.
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
    /// The file. The caller must not keep it longer than this.
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
            drop(PeerFd::new(file.into(), Arc::clone(&self.examiner)));
        }
    }
}

const EVENTFD: &str = "anon_inode:[eventfd]";

/// The target of the link below `/proc/self/fd`. For files of the kernel's own it is a name that
/// does not begin with a slash, unlike every path.
fn link_target(fd: BorrowedFd<'_>) -> io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).map_err(|error| {
        let text = format!("cannot identify descriptors: {error}; /proc must be mounted");
        io::Error::new(error.kind(), text)
    })
}

/// Returns true if closing is known to wait for no other process.
fn closes_without_wait(fd: BorrowedFd<'_>) -> bool {
    // Sockets are not harmless: unread messages may hold descriptors whose closing waits.
    fcntl_get_seals(fd).is_ok() || link_target(fd).is_ok_and(|kind| kind.as_os_str() == EVENTFD)
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
    use std::task::Waker;

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::super::examiner::tests::{hung, wait_until};
    use super::*;

    /// The number of descriptors of this process that refer to a file.
    fn descriptors_of(file: &Path) -> usize {
        let all = std::fs::read_dir("/proc/self/fd").unwrap();
        let links = all.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        links.filter(|link| link == file).count()
    }

    #[test]
    fn descriptors_that_may_block_are_closed_later_on_another_thread() {
        let (examiner, hang) = hung();
        // No other test opens this file, and it is not on a memory file system.
        let path = std::env::current_exe().unwrap();
        let file = File::open(&path).unwrap();
        let foreign = || {
            let fd = file.try_clone().unwrap().into();
            PeerFd::new(fd, Arc::clone(&examiner))
        };
        drop(foreign());
        assert!(foreign().into_eventfd("a kick").is_err());
        assert!(foreign().into_unix_socket(&ConnectionId::default()).is_err());
        drop([foreign(), foreign()].map(PeerFd::into_held));
        // Dropping did not wait, and the file is still open.
        assert_eq!(descriptors_of(&path), 6);
        drop(hang);
        wait_until(|| descriptors_of(&path) == 1 && examiner.is_idle());
    }

    #[test]
    fn harmless_descriptors_are_closed_at_once() {
        let (examiner, _hang) = hung();
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let memory = memfd_create("harmless", MemfdFlags::CLOEXEC).unwrap();
        for fd in [event, memory] {
            drop(PeerFd::new(fd, Arc::clone(&examiner)));
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
            // The peer sees the end regardless.
            assert!(matches!(theirs.read(&mut [0]), Ok(0) | Err(_)));
        }
        let (examiner, _hang) = hung();
        let (socket, _peer) = UnixStream::pair().unwrap();
        drop(PeerFd::new(socket.into(), Arc::clone(&examiner)));
        assert_eq!(examiner.closes(), 1, "what it has was not read");
    }

    /// A write to an eventfd with the highest count would stop an IoThread.
    #[test]
    fn an_eventfd_never_blocks() {
        for flags in [EventfdFlags::CLOEXEC, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK] {
            let event = eventfd(0, flags).unwrap();
            let peer_fd = PeerFd::new(event, Arc::default());
            let event = peer_fd.into_eventfd("a call").unwrap();
            assert!(fcntl_getfl(&event).unwrap().contains(OFlags::NONBLOCK));
        }
    }

    #[test]
    fn a_thread_that_hangs_is_given_only_so_much() {
        let (examiner, hang) = hung();
        for _ in 0..512 {
            assert!(examiner.has_room(Waker::noop()));
            let pipe = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap().0;
            drop(PeerFd::new(pipe, Arc::clone(&examiner)));
        }
        assert!(!examiner.has_room(Waker::noop()));
        drop(hang);
        wait_until(|| examiner.has_room(Waker::noop()));
    }
}
