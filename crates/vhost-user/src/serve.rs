//! A session on the calling thread, for programs without a loop for sessions of their own.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::time::Instant;

use blockio::Remote;
use device::Device;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use virtqueue::MappingRules;

use super::connection::SessionSetup;
use super::examiner::Examiner;
use super::session::{End, Session, SessionProgress};

/// Serves `device` to the front-end at the other end of `socket`, until that disconnects. Queue `i`
/// is served by IoThread `i` modulo their number, which is not 0. Refused messages are logged.
///
/// # Errors
///
/// If the process has no descriptor for an eventfd, or the kernel refuses to poll.
pub fn serve(socket: UnixStream, device: Device, threads: Vec<Remote>) -> io::Result<End> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let wakes = Arc::new(Wakes(eventfd(0, flags)?));
    let setup = SessionSetup {
        device,
        threads,
        rules: MappingRules::default(),
        examiner: Arc::new(Examiner::default()),
        run_lock: None,
        waker: Waker::from(Arc::clone(&wakes)),
    };
    let mut session = Session::new(socket, setup, Instant::now()).without_silence_limit();
    loop {
        match session.progress(Instant::now()) {
            SessionProgress::Waiting => wakes.wait(&session)?,
            SessionProgress::Handled => {}
            SessionProgress::Refused(reason) => tracing::warn!("message refused: {reason}"),
            SessionProgress::RingLost(reason) => tracing::warn!("queue stopped: {reason}"),
            SessionProgress::Ended(end) => return Ok(end),
        }
    }
}

/// An eventfd that counts the wakes of a session.
struct Wakes(OwnedFd);

impl Wakes {
    /// Waits for a wake, for the socket, or for the deadline of the session.
    fn wait(&self, session: &Session) -> io::Result<()> {
        let mut sources = vec![PollFd::new(&self.0, PollFlags::IN)];
        sources.extend(session.interest().map(|interest| PollFd::new(session, interest)));
        let left = session.deadline().map(|at| at.saturating_duration_since(Instant::now()));
        let left = left.map(Timespec::try_from).transpose().map_err(io::Error::other)?;
        match poll(&mut sources, left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        // Without a wake there is nothing to read.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
        Ok(())
    }
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        // A full counter is readable too.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}
