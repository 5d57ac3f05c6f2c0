//! One client's connection: lines in both directions, each with a limit on its length and on the
//! time that it takes.

use std::io::{self, Cursor};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use blockio::executor::Lock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use crate::process::fd_messages::{self, FDS_MAX, Received};
use crate::takeover::wire::send_fds;

/// The limits on a client's lines.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Bytes of a line, without its end.
    pub(super) line_bytes: usize,
    /// The time from the first byte of a line to its end.
    pub(super) line_time: Duration,
    /// The time within which a client must take a line, even if it takes a little at a time.
    pub(super) taken_within: Duration,
}

/// The limits of all clients.
pub(super) const LIMITS: Limits = Limits {
    line_bytes: 1 << 20,
    line_time: Duration::from_secs(30),
    taken_within: Duration::from_secs(5),
};

/// Bytes that are read at once.
const PIECE_BYTES: usize = 16 << 10;

/// A connection. Lines may be sent from several threads.
pub(super) struct Connection {
    stream: UnixStream,
    limits: Limits,
    sending: Lock<()>,
}

/// The reading side of a connection.
#[derive(Default)]
pub(super) struct Input {
    /// Bytes that were read and not returned yet.
    bytes: Vec<u8>,
    /// The number of these bytes that were searched for the end of a line.
    searched: usize,
    /// Descriptors that came with these bytes.
    fds: Vec<OwnedFd>,
    /// True if descriptors that come are closed at once.
    refuses_fds: bool,
}

impl Input {
    /// The input of a client that may pass no descriptors.
    pub(super) fn without_fds() -> Self {
        Self { refuses_fds: true, ..Self::default() }
    }

    /// Takes the descriptors that came with the last line.
    pub(super) fn take_fds(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.fds)
    }

    /// Closes the descriptors that came with a line which is no request, unless bytes of the next
    /// line came with them too.
    pub(super) fn close_fds(&mut self) {
        if self.bytes.is_empty() {
            self.fds.clear();
        }
    }
}

/// The next input of a client.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line {
    Whole(Vec<u8>),
    TooLong,
    /// The client has left, perhaps within a line.
    End,
}

impl Connection {
    pub(super) fn new(stream: UnixStream, limits: Limits) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream, limits, sending: Lock::default() })
    }

    /// Waits for the next line, without its end.
    ///
    /// # Errors
    ///
    /// When the connection fails, or a line that was begun is not ended in time.
    pub(super) fn receive(&self, input: &mut Input) -> io::Result<Line> {
        let mut until = (!input.bytes.is_empty()).then(|| Instant::now() + self.limits.line_time);
        loop {
            let end = input.bytes[input.searched..].iter().position(|byte| *byte == b'\n');
            if let Some(end) = end.map(|end| input.searched + end) {
                let rest = input.bytes.split_off(end + 1);
                let mut line = std::mem::replace(&mut input.bytes, rest);
                line.truncate(end);
                input.searched = 0;
                // No request takes the descriptors of an empty line. Behind it, the ones of a line
                // that was begun may have come already.
                if line.trim_ascii().is_empty() && input.bytes.is_empty() {
                    input.fds.clear();
                }
                let fits = line.len() <= self.limits.line_bytes;
                return Ok(if fits { Line::Whole(line) } else { Line::TooLong });
            }
            input.searched = input.bytes.len();
            if input.searched > self.limits.line_bytes {
                return Ok(Line::TooLong);
            }
            self.wait(PollFlags::IN, until)?;
            match self.receive_piece(input) {
                Ok(0) => return Ok(Line::End),
                Ok(_) => {
                    until.get_or_insert_with(|| Instant::now() + self.limits.line_time);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Receives some bytes with their descriptors. Returns the number of bytes.
    fn receive_piece(&self, input: &mut Input) -> io::Result<usize> {
        let mut piece = [0; PIECE_BYTES];
        let received = if input.refuses_fds {
            // Without room for them, the kernel closes descriptors.
            recv(&self.stream, &mut piece[..], RecvFlags::DONTWAIT).map(|(bytes, _)| Received {
                bytes,
                fds: Vec::new(),
                lacks_fds: false,
            })
        } else {
            fd_messages::receive(&self.stream, &mut piece, RecvFlags::DONTWAIT)
        };
        let received = match received {
            Err(Errno::INTR) => return Err(io::ErrorKind::WouldBlock.into()),
            received => received?,
        };
        input.fds.extend(received.fds);
        if input.fds.len() > FDS_MAX {
            return Err(io::Error::other("a request has more descriptors than are allowed"));
        }
        if received.lacks_fds {
            let text = "the limit on open files is reached; raise it (ulimit -n)";
            return Err(io::Error::other(text));
        }
        input.bytes.extend_from_slice(&piece[..received.bytes]);
        Ok(received.bytes)
    }

    /// Sends a line with its end. Closes the connection if the client does not take the line in
    /// time.
    ///
    /// # Errors
    ///
    /// When the client does not take it in time, or has gone.
    pub(super) fn send(&self, line: &str) -> io::Result<()> {
        let _sending = self.sending.lock();
        let until = Instant::now() + self.limits.taken_within;
        let mut left = line.as_bytes();
        while !left.is_empty() {
            match send(&self.stream, left, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(bytes) => left = &left[bytes..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    // Nothing can follow half a line.
                    self.wait(PollFlags::OUT, Some(until)).inspect_err(|_| self.close())?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends descriptors, with an empty line.
    ///
    /// # Errors
    ///
    /// When the client does not take them in time, or has gone.
    pub(super) fn send_fds(&self, fds: &[OwnedFd]) -> io::Result<()> {
        let _sending = self.sending.lock();
        let until = Instant::now() + self.limits.taken_within;
        loop {
            match send_fds(&self.stream, fds.iter()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(PollFlags::OUT, Some(until))?;
                }
                sent => return sent,
            }
        }
    }

    /// Leaves the connection to a reader that waits without a limit. Returns the bytes that were
    /// read and not returned yet, and the socket.
    ///
    /// # Errors
    ///
    /// When the socket cannot be made blocking.
    pub(super) fn make_blocking(&self, input: Input) -> io::Result<(Cursor<Vec<u8>>, &UnixStream)> {
        self.stream.set_nonblocking(false)?;
        self.stream.set_write_timeout(Some(self.limits.taken_within))?;
        Ok((Cursor::new(input.bytes), &self.stream))
    }

    /// Closes the connection in both directions. A wait for a line finds the end.
    pub(super) fn close(&self) {
        // Fails if the client has left.
        let _ = shutdown(&self.stream, Shutdown::Both);
    }

    fn wait(&self, what: PollFlags, until: Option<Instant>) -> io::Result<()> {
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let left = left.map(Timespec::try_from).transpose().map_err(io::Error::other)?;
            match poll(&mut [PollFd::new(&self.stream, what)], left.as_ref()) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;
    use crate::control_socket::descriptors::send_line;
    use crate::testing::wait_until;

    /// Makes a connection with limits that only end a hopeless wait, except the ones that `change`
    /// shortens.
    fn pair(change: impl FnOnce(&mut Limits)) -> (Connection, UnixStream) {
        let long = Duration::from_secs(60);
        let mut limits = Limits { line_bytes: 8, line_time: long, taken_within: long };
        change(&mut limits);
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Connection::new(ours, limits).unwrap(), theirs)
    }

    fn lines(connection: &Connection, input: &mut Input, count: usize) -> Vec<Line> {
        (0..count).map(|_| connection.receive(input).unwrap()).collect()
    }

    fn whole(text: &str) -> Line {
        Line::Whole(text.as_bytes().to_vec())
    }

    #[test]
    fn lines_are_told_apart_however_they_come() {
        let (connection, mut client) = pair(|_| {});
        let mut input = Input::default();
        client.write_all(b"one\n\n12345678\nth").unwrap();
        let expected = [whole("one"), whole(""), whole("12345678")];
        assert_eq!(lines(&connection, &mut input, 3), expected);
        client.write_all(b"ree\n123456789\n").unwrap();
        assert_eq!(lines(&connection, &mut input, 2), [whole("three"), Line::TooLong]);
        client.write_all(b"half").unwrap();
        drop(client);
        assert_eq!(connection.receive(&mut input).unwrap(), Line::End);
    }

    #[test]
    fn descriptors_wait_for_their_request_alone() {
        let (connection, client) = pair(|_| {});
        let (end, passed) = UnixStream::pair().unwrap();
        end.set_nonblocking(true).unwrap();
        let send = |line: &[u8]| {
            let fds = vec![passed.as_fd(); FDS_MAX];
            assert_eq!(send_line(&client, line, &fds).unwrap(), line.len());
        };
        let mut input = Input::default();
        for line in ["\n", "  \n"] {
            send(line.as_bytes());
            connection.receive(&mut input).unwrap();
            assert_eq!(input.take_fds().len(), 0, "{line:?}");
        }
        // The end of the empty line comes with the request.
        (&client).write_all(b"\n").unwrap();
        send(b"one\n");
        assert_eq!(lines(&connection, &mut input, 2), [whole(""), whole("one")]);
        assert_eq!(input.take_fds().len(), FDS_MAX);
        let mut input = Input::without_fds();
        send(b"one\n");
        assert_eq!(connection.receive(&mut input).unwrap(), whole("one"));
        assert_eq!(input.take_fds().len(), 0);
        // Nothing has kept a copy, except a child of another test until it executes its program.
        drop(passed);
        wait_until(|| matches!((&end).read(&mut [0]), Ok(0)));
    }

    #[test]
    fn a_line_without_an_end_is_too_long_some_day() {
        let (connection, mut client) = pair(|_| {});
        client.write_all(b"123456789").unwrap();
        assert_eq!(connection.receive(&mut Input::default()).unwrap(), Line::TooLong);
    }

    /// The start of the line comes by itself, or behind a whole one.
    #[test]
    fn a_client_that_trickles_is_dropped() {
        for starts in [&["one\n", "tw"][..], &["one\ntw", ""], &["one\nt", "w"]] {
            let (connection, mut client) = pair(|limits| limits.line_time = Duration::ZERO);
            let mut input = Input::default();
            client.write_all(starts[0].as_bytes()).unwrap();
            assert_eq!(connection.receive(&mut input).unwrap(), whole("one"));
            client.write_all(starts[1].as_bytes()).unwrap();
            // A wait without a limit finds the end.
            drop(client);
            let error = connection.receive(&mut input).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{starts:?}");
        }
    }

    #[test]
    fn a_client_that_takes_too_little_is_dropped() {
        let (connection, mut client) = pair(|limits| limits.taken_within = Duration::ZERO);
        connection.send("short\n").unwrap();
        let error = connection.send(&"x".repeat(16 << 20)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        // The end comes after the bytes that were sent.
        let mut seen = Vec::new();
        client.read_to_end(&mut seen).unwrap();
        assert!(seen.starts_with(b"short\nxx"));
        assert_eq!(connection.receive(&mut Input::default()).unwrap(), Line::End);
    }

    /// A little at a time, for as long as the connection exists, or for longer than any test.
    fn trickle(mut step: impl FnMut() -> bool) {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(30) && step() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The limits are for the whole line: progress does not renew them.
    #[test]
    fn a_client_that_makes_little_progress_is_dropped_too() {
        let short = Duration::from_millis(50);
        let (connection, mut client) = pair(|limits| {
            (limits.line_time, limits.line_bytes) = (short, 1 << 20);
        });
        std::thread::scope(|scope| {
            let writes = scope.spawn(move || trickle(|| client.write_all(b"x").is_ok()));
            let received = connection.receive(&mut Input::default());
            assert_eq!(received.unwrap_err().kind(), io::ErrorKind::TimedOut);
            connection.close();
            writes.join().unwrap();
        });
        let (connection, mut client) = pair(|limits| limits.taken_within = short);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                trickle(|| client.read(&mut [0; 4096]).is_ok_and(|bytes| bytes > 0))
            });
            let sent = connection.send(&"x".repeat(64 << 20));
            assert_eq!(sent.unwrap_err().kind(), io::ErrorKind::TimedOut);
        });
    }

    #[test]
    fn a_reader_without_limits_waits_and_a_writer_does_not() {
        let (connection, mut client) = pair(|_| {});
        client.write_all(b"one\ntwo\n").unwrap();
        let mut input = Input::default();
        assert_eq!(connection.receive(&mut input).unwrap(), whole("one"));
        let (rest, stream) = connection.make_blocking(input).unwrap();
        assert_eq!(rest.into_inner(), b"two\n");
        let flags = rustix::fs::fcntl_getfl(stream).unwrap();
        assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK));
        assert_eq!(stream.write_timeout().unwrap(), Some(connection.limits.taken_within));
    }

    #[test]
    fn a_long_line_is_sent_in_pieces() {
        let (connection, mut client) = pair(|_| {});
        let line = "y".repeat(4 << 20);
        let reader = std::thread::spawn(move || {
            let mut seen = Vec::new();
            client.read_to_end(&mut seen).unwrap();
            seen.len()
        });
        connection.send(&line).unwrap();
        connection.close();
        assert_eq!(reader.join().unwrap(), line.len());
    }
}
