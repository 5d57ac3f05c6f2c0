//! The call descriptor of a ring, and the thread that passes calls on to sockets and pipes.
//!
//! virtio_uml, the front-end of User Mode Linux, needs a signal for each call. An eventfd sends
//! none, so virtio_uml brings one end of a socket pair. A queue must not write there itself:
//! another process can hold the lock of a pipe for ever, and a socket may close descriptors that
//! hang. So the queue writes to an eventfd of the daemon, and a thread of the connection writes to
//! the socket or pipe. A write that hangs delays only the calls of that front-end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;
use std::time::Duration;

use blockio::executor::{Lock, start_thread};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use super::examiner::{Examiner, RelaySlot};
use super::peer_fds::{Kind, PeerFd};

/// The thread's pause after its wait failed for lack of memory.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// The call descriptor of a ring.
pub(super) enum Call {
    /// The front-end's eventfd, which the queue adds to.
    Eventfd(OwnedFd),
    /// A socket or pipe of the front-end's, behind an eventfd of the daemon.
    Relayed(Relayed),
}

/// A socket or pipe that calls are passed on to until this is dropped.
pub(super) struct Relayed {
    target: Arc<Target>,
    shared: Arc<RelayState>,
}

/// Passes calls on for one front-end. Its thread exists from the first such call descriptor until
/// this is dropped.
#[derive(Default)]
pub(super) struct CallRelay {
    shared: Option<Arc<RelayState>>,
}

/// The part that the connection and the thread share.
struct RelayState {
    /// Added to when the list changes or the thread is to end.
    wake: OwnedFd,
    targets: Lock<Vec<Arc<Target>>>,
    has_ended: AtomicBool,
}

/// A socket or pipe, and the eventfd in front of it.
struct Target {
    /// The queue announces calls here.
    eventfd: OwnedFd,
    fd: PeerFd,
    is_pipe: bool,
}

impl Call {
    /// The call descriptor that a front-end has brought; `what` names it.
    pub(super) fn new(
        fd: PeerFd,
        what: &str,
        relay: &mut CallRelay,
        examiner: &Arc<Examiner>,
    ) -> io::Result<Self> {
        let is_pipe = match fd.kind()? {
            Kind::Eventfd => return Ok(Self::Eventfd(fd.into_eventfd(what)?)),
            Kind::SocketPair => false,
            Kind::Pipe => true,
            Kind::Other(kind) => {
                return Err(invalid(format!(
                    "{what} must be an eventfd, a pipe or an end of a Unix socket pair, and is {}",
                    kind.display()
                )));
            }
        };
        if is_pipe {
            let flags = fcntl_getfl(fd.as_fd())?;
            if flags & OFlags::ACCMODE == OFlags::RDONLY {
                return Err(invalid(format!(
                    "{what} is the read end of a pipe; it must be the write end"
                )));
            }
            fcntl_setfl(fd.as_fd(), flags | OFlags::NONBLOCK)?;
        }
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let target = Arc::new(Target { eventfd, fd, is_pipe });
        let shared = relay.shared(examiner)?;
        shared.targets.lock().push(Arc::clone(&target));
        shared.wake();
        Ok(Self::Relayed(Relayed { target, shared }))
    }

    /// The eventfd that the queue adds to.
    pub(super) fn eventfd(&self) -> &OwnedFd {
        match self {
            Self::Eventfd(fd) => fd,
            Self::Relayed(relayed) => &relayed.target.eventfd,
        }
    }

    /// The descriptor that the front-end has brought.
    pub(super) fn peer_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Eventfd(fd) => fd.as_fd(),
            Self::Relayed(relayed) => relayed.target.fd.as_fd(),
        }
    }
}

impl Drop for Relayed {
    fn drop(&mut self) {
        self.shared.targets.lock().retain(|target| !Arc::ptr_eq(target, &self.target));
        self.shared.wake();
    }
}

impl CallRelay {
    /// Returns true if calls need no further thread to reach `fd`, or one can be started. If none
    /// can, `waker` is woken when that may have changed.
    pub(super) fn has_thread_for(&self, fd: &PeerFd, examiner: &Examiner, waker: &Waker) -> bool {
        let is_relayed = matches!(fd.kind(), Ok(Kind::SocketPair | Kind::Pipe));
        !is_relayed || self.shared.is_some() || examiner.has_relay_slot(waker)
    }

    /// Returns the part that is shared with the thread. Starts the thread on the first call.
    fn shared(&mut self, examiner: &Arc<Examiner>) -> io::Result<Arc<RelayState>> {
        if let Some(shared) = &self.shared {
            return Ok(Arc::clone(shared));
        }
        let place = RelaySlot::take(examiner).ok_or_else(|| {
            let text = "writes to call descriptors of earlier front-ends still hang; use an \
                        eventfd";
            io::Error::new(io::ErrorKind::ResourceBusy, text)
        })?;
        let shared = Arc::new(RelayState {
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            targets: Lock::default(),
            has_ended: AtomicBool::new(false),
        });
        let of_thread = Arc::clone(&shared);
        start_thread("ringhaul-call", move || {
            of_thread.relay_calls();
            drop(place);
        })?;
        self.shared = Some(Arc::clone(&shared));
        Ok(shared)
    }
}

impl Drop for CallRelay {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            shared.has_ended.store(true, Ordering::Release);
            shared.wake();
        }
    }
}

impl RelayState {
    fn wake(&self) {
        // Fails if the counter is full: then the thread has not read it yet.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Passes calls on until the relay has been dropped.
    fn relay_calls(&self) {
        while !self.has_ended.load(Ordering::Acquire) {
            let targets = self.targets.lock().clone();
            let eventfds = targets.iter().map(|target| &target.eventfd).chain([&self.wake]);
            let eventfds: Vec<&OwnedFd> = eventfds.collect();
            let mut polled: Vec<PollFd<'_>> =
                eventfds.iter().map(|fd| PollFd::new(*fd, PollFlags::IN)).collect();
            match poll(&mut polled, None) {
                Ok(_) | Err(Errno::INTR) => {}
                // The kernel has no memory for the wait. No call is lost: the eventfds keep their
                // counts.
                Err(_) => std::thread::sleep(RETRY_INTERVAL),
            }
            let ready: Vec<bool> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();
            for ((fd, target), ready) in
                eventfds.iter().zip(targets.iter().map(Some).chain([None])).zip(ready)
            {
                // The counter is cleared first, so that a call in the meantime is passed on in the
                // next round.
                if ready
                    && rustix::io::read(fd, &mut [0; 8]).is_ok()
                    && let Some(target) = target
                {
                    target.call();
                }
            }
        }
    }
}

impl Target {
    /// Writes 8 bytes, as to an eventfd. If the socket or pipe is full, unread data already signals
    /// a call. The front-end causes every other failure, and suffers from it alone.
    fn call(&self) {
        let bytes = 1_u64.to_ne_bytes();
        let _ = match self.is_pipe {
            true => rustix::io::write(&self.fd, &bytes),
            false => send(&self.fd, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, pipe};
    use std::os::unix::net::UnixStream;

    use rustix::event::Timespec;

    use super::super::examiner::tests::wait_until;
    use super::*;

    struct Scene {
        examiner: Arc<Examiner>,
        relay: CallRelay,
    }

    impl Scene {
        fn new() -> Self {
            Self { examiner: Arc::default(), relay: CallRelay::default() }
        }

        fn call(&mut self, fd: impl Into<OwnedFd>) -> io::Result<Call> {
            let fd = PeerFd::new(fd.into(), Arc::clone(&self.examiner));
            Call::new(fd, "the call descriptor of queue 0", &mut self.relay, &self.examiner)
        }

        fn refusal(&mut self, fd: impl Into<OwnedFd>) -> String {
            self.call(fd).err().map(|error| error.to_string()).unwrap_or_default()
        }

        fn end(self) {
            drop(self.relay);
            wait_until(|| self.examiner.is_idle() && self.examiner.open() == 0);
        }
    }

    /// Makes a call as a queue does.
    fn announce(call: &Call) {
        rustix::io::write(call.eventfd(), &1_u64.to_ne_bytes()).unwrap();
    }

    fn next(from: &mut (impl Read + AsFd)) -> u64 {
        wait_until(|| is_readable(from.as_fd()));
        let mut bytes = [0; 8];
        from.read_exact(&mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    /// Returns true if the thread has received the call: it is in its write, or past it.
    fn is_taken(call: &Call) -> bool {
        !is_readable(call.eventfd().as_fd())
    }

    fn is_readable(fd: BorrowedFd<'_>) -> bool {
        let mut polled = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec::default())).unwrap() > 0
    }

    #[test]
    fn calls_reach_sockets_and_pipes() {
        let mut scene = Scene::new();
        let (mut socket, theirs) = UnixStream::pair().unwrap();
        let (mut reader, writer) = pipe().unwrap();
        let calls = [scene.call(theirs).unwrap(), scene.call(writer).unwrap()];
        for _ in 0..3 {
            announce(&calls[0]);
            assert_eq!(next(&mut socket), 1);
            announce(&calls[1]);
            assert_eq!(next(&mut reader), 1);
        }
        drop(calls);
        // The reader sees that nothing more comes.
        assert_eq!((socket.read(&mut [0]).unwrap(), reader.read(&mut [0]).unwrap()), (0, 0));
        scene.end();
    }

    /// A full descriptor still signals a call; a closed one harms only its own front-end.
    #[test]
    fn a_call_that_cannot_be_written_stops_no_other() {
        let mut scene = Scene::new();
        let (full, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        while rustix::io::write(&theirs, &[0; 4096]).is_ok() {}
        // Clears the flag, which belongs to the front-end's file: the daemon does not rely on it.
        theirs.set_nonblocking(false).unwrap();
        let (full_pipe, writer) = pipe().unwrap();
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
        let calls = [
            scene.call(theirs).unwrap(),
            scene.call(writer).unwrap(),
            scene.call(UnixStream::pair().unwrap().0).unwrap(),
            scene.call(pipe().unwrap().1).unwrap(),
        ];
        let (mut good, theirs) = UnixStream::pair().unwrap();
        let good_call = scene.call(theirs).unwrap();
        for _ in 0..3 {
            calls.iter().for_each(announce);
            wait_until(|| calls.iter().all(is_taken));
            announce(&good_call);
            assert_eq!(next(&mut good), 1);
        }
        drop((calls, good_call, full, full_pipe));
        scene.end();
    }

    #[test]
    fn other_descriptors_are_refused() {
        let mut scene = Scene::new();
        let null = std::fs::File::options().write(true).open("/dev/null").unwrap();
        assert!(scene.refusal(null).contains("pair, and is /dev/null"));
        assert!(scene.refusal(pipe().unwrap().0).contains("is the read end of a pipe"));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("named");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(scene.refusal(UnixStream::connect(&path).unwrap()).contains("socket:["));
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(scene.refusal(tcp).contains("socket:["));
        scene.end();
    }

    /// A front-end may clear the flag that makes its pipe non-blocking.
    #[test]
    fn writes_that_hang_are_so_many_and_no_more() {
        let examiner: Arc<Examiner> = Arc::default();
        let mut pipes = Vec::new();
        let fresh = || Scene { examiner: Arc::clone(&examiner), relay: CallRelay::default() };
        for _ in 0..4 {
            let mut scene = fresh();
            let (reader, writer) = pipe().unwrap();
            let call = scene.call(writer.try_clone().unwrap()).unwrap();
            while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
            rustix::io::ioctl_fionbio(&writer, false).unwrap();
            announce(&call);
            wait_until(|| is_taken(&call));
            pipes.push((reader, writer));
        }
        assert!(fresh().refusal(UnixStream::pair().unwrap().0).contains("still hang"));
        drop(pipes);
        wait_until(|| examiner.is_idle() && examiner.open() == 0);
        assert!(fresh().call(UnixStream::pair().unwrap().0).is_ok());
        wait_until(|| examiner.is_idle());
    }
}
