//! Descriptors beside answers of the control socket. An answer is an ordinary line. Its descriptors
//! come with empty lines after it, because the kernel limits the descriptors of one message.

use std::collections::VecDeque;
use std::io;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::{RecvFlags, SendFlags};
use rustix::time::{ClockId, clock_gettime};

use crate::process::fd_messages::{self, FDS_MAX};

/// The longest answer, in bytes.
const LINE_MAX: usize = 64 << 20;

/// A moment in nanoseconds of CLOCK_MONOTONIC, which processes share.
pub(super) fn monotonic_ns(moment: Instant) -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let now = now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs();
    let ago = u64::try_from(moment.elapsed().as_nanos()).unwrap_or(u64::MAX);
    now.saturating_sub(ago)
}

/// Sends descriptors.
///
/// # Errors
///
/// When the peer has gone.
pub fn send_fds<'fd>(
    stream: &UnixStream,
    fds: impl Iterator<Item = &'fd OwnedFd>,
) -> io::Result<()> {
    let fds: Vec<BorrowedFd<'_>> = fds.map(AsFd::as_fd).collect();
    for some in fds.chunks(FDS_MAX) {
        fd_messages::send(stream, b"\n", some, SendFlags::empty())?;
    }
    Ok(())
}

/// Answers, and the descriptors that come with them.
pub struct Receiver {
    stream: UnixStream,
    bytes: Vec<u8>,
    /// The length of the first bytes, in which no line ends.
    searched: usize,
    fds: VecDeque<OwnedFd>,
}

impl Receiver {
    /// Reads from `stream`.
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, bytes: Vec::new(), searched: 0, fds: VecDeque::new() }
    }

    /// The connection.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// The next line that is not empty. `None`: the peer has hung up.
    ///
    /// # Errors
    ///
    /// When the connection fails, or the line is too long.
    pub fn line(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            let new = &self.bytes[self.searched..];
            if let Some(end) = new.iter().position(|byte| *byte == b'\n') {
                let rest = self.bytes.split_off(std::mem::take(&mut self.searched) + end + 1);
                let line = std::mem::replace(&mut self.bytes, rest);
                if line.len() > 1 {
                    return Ok(Some(line));
                }
                continue;
            }
            self.searched = self.bytes.len();
            if self.searched > LINE_MAX {
                return Err(io::Error::other("an answer has no end"));
            }
            if !self.receive()? {
                return Ok(None);
            }
        }
    }

    /// Returns this many descriptors.
    ///
    /// # Errors
    ///
    /// When the peer hangs up before it has sent them.
    pub fn fds(&mut self, count: usize) -> io::Result<Vec<OwnedFd>> {
        while self.fds.len() < count {
            if !self.receive()? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(self.fds.drain(..count).collect())
    }

    fn receive(&mut self) -> io::Result<bool> {
        let mut buffer = vec![0; 64 << 10];
        let received = loop {
            match fd_messages::receive(&self.stream, &mut buffer, RecvFlags::empty()) {
                Err(rustix::io::Errno::INTR) => {}
                received => break received?,
            }
        };
        self.fds.extend(received.fds);
        if received.lacks_fds {
            let text = "the limit on open files is reached; raise it (ulimit -n)";
            return Err(io::Error::other(text));
        }
        self.bytes.extend(&buffer[..received.bytes]);
        Ok(received.bytes > 0)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::FdFlags;

    use super::*;

    #[test]
    fn descriptors_come_in_their_order_beside_lines() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let events: Vec<OwnedFd> =
            (1..=600).map(|count| eventfd(count, EventfdFlags::NONBLOCK).unwrap()).collect();
        let sender = std::thread::spawn(move || {
            (&ours).write_all(b"one\n").unwrap();
            send_fds(&ours, events[..500].iter()).unwrap();
            (&ours).write_all(b"two\n").unwrap();
            send_fds(&ours, events[500..].iter()).unwrap();
        });
        let mut receiver = Receiver::new(theirs);
        let mut next = 1_u64;
        for (line, count) in [("one\n", 500), ("two\n", 100)] {
            assert_eq!(receiver.line().unwrap().unwrap(), line.as_bytes());
            for fd in receiver.fds(count).unwrap() {
                let flags = rustix::io::fcntl_getfd(&fd).unwrap();
                assert!(flags.contains(FdFlags::CLOEXEC), "a child inherits it");
                let mut value = [0; 8];
                rustix::io::read(fd, &mut value).unwrap();
                assert_eq!(u64::from_ne_bytes(value), next);
                next += 1;
            }
        }
        sender.join().unwrap();
        assert!(receiver.line().unwrap().is_none() && receiver.fds(1).is_err());
    }

    #[test]
    fn a_line_that_comes_in_parts_is_whole() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let mut receiver = Receiver::new(theirs);
        for (part, lines) in [
            ("on", &[][..]),
            ("e\ntwo\nthr", &["one\n", "two\n"]),
            ("ee\n", &["three\n"]),
            ("four\n", &["four\n"]),
        ] {
            (&ours).write_all(part.as_bytes()).unwrap();
            for line in lines {
                assert_eq!(receiver.line().unwrap().unwrap(), line.as_bytes());
            }
            assert_eq!(receiver.line().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        }
    }
}
