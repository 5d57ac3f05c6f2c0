//! Descriptors that come from a front-end, which may lead anywhere.
//!
//! Asking what such a descriptor is, mapping or closing it may wait for ever: a file of a FUSE file
//! system answers when its server likes. A few questions never ask a file system: its link below
//! `/proc/self/fd`, `F_GET_SEALS`, and options of sockets. What they do not show to be harmless is
//! examined and closed on a thread of the export's own, which nobody waits for.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::net::Shutdown;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{OFlags, fcntl_get_seals, fcntl_getfl, fcntl_setfl};
use rustix::net::{AddressFamily, SocketType, sockopt};

use crate::pending::Pending;

/// The most jobs that wait for a thread which hangs. No more descriptors are taken then.
const JOBS_MAX: usize = 512;

type Job = Box<dyn FnOnce() + Send>;

/// Runs what may wait for ever, on at most one thread, which exists only while there is something
/// to do. Every export has its own, so that none fills that of another.
#[derive(Default)]
pub struct Examiner {
    state: Mutex<Jobs>,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    has_thread: bool,
}

impl Examiner {
    /// Whether as many jobs wait as there may be.
    pub(super) fn is_full(&self) -> bool {
        self.state().waiting.len() >= JOBS_MAX
    }

    /// What `job` returns, some day.
    pub(super) fn examine<T: Send + 'static>(
        self: &Arc<Self>,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Pending<T> {
        let (answer, pending) = Pending::new();
        self.run(Box::new(move || answer.send(job())));
        pending
    }

    fn run(self: &Arc<Self>, job: Job) {
        let mut state = self.state();
        state.waiting.push_back(job);
        if state.has_thread {
            return;
        }
        let this = Arc::clone(self);
        let thread = std::thread::Builder::new().name("ringhaul-close".into());
        // Without a thread the jobs wait for the next one that tries.
        state.has_thread = thread.spawn(move || while this.run_next() {}).is_ok();
    }

    /// False when there is nothing more to do.
    fn run_next(&self) -> bool {
        let mut state = self.state();
        let Some(job) = state.waiting.pop_front() else {
            state.has_thread = false;
            return false;
        };
        drop(state);
        job();
        true
    }

    fn state(&self) -> MutexGuard<'_, Jobs> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A descriptor of the front-end's. Dropping it does not wait.
pub(super) struct ForeignFd {
    fd: Option<OwnedFd>,
    examiner: Arc<Examiner>,
}

impl ForeignFd {
    pub(super) fn new(fd: OwnedFd, examiner: Arc<Examiner>) -> Self {
        Self { fd: Some(fd), examiner }
    }

    /// The eventfd that it must be, made non-blocking; `what` names it. Nothing else can be watched
    /// or written to without waiting for it.
    pub(super) fn into_eventfd(mut self, what: &str) -> io::Result<OwnedFd> {
        let kind = self.kind()?;
        if kind.as_os_str() != EVENTFD {
            let text = format!("{what} that is no eventfd but {}", kind.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let flags = fcntl_getfl(self.as_fd())? | OFlags::NONBLOCK;
        fcntl_setfl(self.as_fd(), flags)?;
        self.fd.take().ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// The Unix stream socket that it must be.
    pub(super) fn into_unix_socket(mut self) -> io::Result<OwnedFd> {
        if !is_unix_stream(self.as_fd()) {
            let text = "a channel for our messages that is no Unix stream socket";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        self.fd.take().ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// Whether it is memory in every respect: no operation on it asks anybody.
    pub(super) fn is_sealable(&self) -> bool {
        fcntl_get_seals(self.as_fd()).is_ok()
    }

    fn into_file(mut self) -> Option<File> {
        self.fd.take().map(File::from)
    }

    /// What the kernel calls it: a path, or the kind of what has none.
    fn kind(&self) -> io::Result<PathBuf> {
        kind_of(self.as_fd())
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.fd {
            Some(fd) => fd.as_fd(),
            None => unreachable!("what is taken out of it is taken by value"),
        }
    }
}

impl Drop for ForeignFd {
    fn drop(&mut self) {
        let Some(fd) = self.fd.take() else { return };
        if !closes_at_once(fd.as_fd()) {
            self.examiner.run(Box::new(move || drop(fd)));
        }
    }
}

/// The socket of a connection. Closing it lets go of descriptors in messages that nobody has read,
/// which may wait for ever; dropping it does not wait.
pub(super) struct PeerSocket {
    socket: Option<UnixStream>,
    examiner: Arc<Examiner>,
}

impl PeerSocket {
    pub(super) fn new(socket: UnixStream, examiner: Arc<Examiner>) -> Self {
        Self { socket: Some(socket), examiner }
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
        // Nothing more comes from now on. It fails when the front-end has gone by itself.
        let _ = self.shutdown(Shutdown::Both);
        let has_unread = self.has_unread();
        if let Some(socket) = self.socket.take()
            && has_unread
        {
            self.examiner.run(Box::new(move || drop(socket)));
        }
    }
}

/// Files of one message, for as long as they are needed. Dropping it does not wait.
pub(super) struct Files {
    pub(super) list: Vec<Arc<File>>,
    examiner: Option<Arc<Examiner>>,
}

impl Files {
    pub(super) fn new(fds: Vec<ForeignFd>) -> Self {
        let examiner = fds.first().map(|fd| Arc::clone(&fd.examiner));
        Self {
            list: fds.into_iter().filter_map(ForeignFd::into_file).map(Arc::new).collect(),
            examiner,
        }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let Some(examiner) = &self.examiner else { return };
        for file in self.list.drain(..).filter_map(Arc::into_inner) {
            drop(ForeignFd::new(file.into(), Arc::clone(examiner)));
        }
    }
}

const EVENTFD: &str = "anon_inode:[eventfd]";

/// Names of what the kernel makes itself, which a path never looks like: it begins with a slash.
fn kind_of(fd: BorrowedFd<'_>) -> io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).map_err(|error| {
        let text = format!("cannot find out what descriptors are: {error}; /proc must be mounted");
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

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::path::Path;
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    /// How many descriptors of this process lead to a file.
    fn descriptors_of(file: &Path) -> usize {
        let all = std::fs::read_dir("/proc/self/fd").unwrap();
        let links = all.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        links.filter(|link| link == file).count()
    }

    fn wait_until(mut is_so: impl FnMut() -> bool) {
        let start = Instant::now();
        while !is_so() {
            assert!(start.elapsed() < Duration::from_secs(30), "it does not happen");
            std::thread::yield_now();
        }
    }

    /// An examiner whose thread hangs until the sender is dropped.
    fn hung() -> (Arc<Examiner>, mpsc::Sender<()>) {
        let examiner = Arc::new(Examiner::default());
        let (sender, receiver) = mpsc::channel::<()>();
        examiner.run(Box::new(move || receiver.recv().unwrap_or_default()));
        wait_until(|| examiner.state().waiting.is_empty());
        (examiner, sender)
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
        assert!(foreign().into_unix_socket().is_err());
        drop(Files::new(vec![foreign(), foreign()]));
        // Nobody waited for it, and it is open still.
        assert_eq!(descriptors_of(&path), 6);
        drop(hang);
        wait_until(|| descriptors_of(&path) == 1 && !examiner.state().has_thread);
    }

    #[test]
    fn what_is_known_to_be_harmless_is_closed_at_once() {
        let (examiner, _hang) = hung();
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let memory = memfd_create("harmless", MemfdFlags::CLOEXEC).unwrap();
        for fd in [event, memory] {
            drop(ForeignFd::new(fd, Arc::clone(&examiner)));
            assert!(examiner.state().waiting.is_empty(), "it waits for the thread that hangs");
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
            assert_eq!(examiner.state().waiting.len(), jobs, "read: {is_read}");
            // The other side hears of the end all the same.
            assert!(matches!(theirs.read(&mut [0]), Ok(0) | Err(_)));
        }
        let (examiner, _hang) = hung();
        let (socket, _peer) = UnixStream::pair().unwrap();
        drop(ForeignFd::new(socket.into(), Arc::clone(&examiner)));
        assert_eq!(examiner.state().waiting.len(), 1, "what it has was not read");
    }

    #[test]
    fn a_thread_that_hangs_is_given_only_so_much() {
        let (examiner, hang) = hung();
        for _ in 0..JOBS_MAX {
            assert!(!examiner.is_full());
            let pipe = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap().0;
            drop(ForeignFd::new(pipe, Arc::clone(&examiner)));
        }
        assert!(examiner.is_full());
        drop(hang);
        wait_until(|| !examiner.is_full());
    }
}
