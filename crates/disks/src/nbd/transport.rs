//! The socket of a connection: sends and receives bytes without waiting.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use iomem::{Buffers, copy_in, copy_out, fits};
use libc::iovec;

use super::tls::Tls;

/// The most ranges of one system call.
pub(super) const RANGES_MAX: usize = 1024;

/// The most bytes that are encrypted at once.
const CLEAR_BYTES: usize = 256 << 10;

/// Ranges of memory that are valid as long as their memory is borrowed.
pub(super) struct Ranges<'a> {
    iovecs: Vec<iovec>,
    bytes: usize,
    of: PhantomData<&'a ()>,
}

impl<'a> Ranges<'a> {
    /// Makes an empty list, in storage that may have been used before.
    pub(super) fn new(mut storage: Vec<iovec>) -> Self {
        storage.clear();
        Self { iovecs: storage, bytes: 0, of: PhantomData }
    }

    pub(super) fn into_storage(self) -> Vec<iovec> {
        self.iovecs
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn is_full(&self) -> bool {
        self.iovecs.len() >= RANGES_MAX
    }

    fn push(&mut self, start: *mut libc::c_void, bytes: usize) {
        if bytes > 0 && !self.is_full() {
            self.iovecs.push(iovec { iov_base: start, iov_len: bytes });
            self.bytes += bytes;
        }
    }
}

/// The ranges of a send.
pub(super) struct SendRanges<'a>(pub(super) Ranges<'a>);

impl<'a> SendRanges<'a> {
    pub(super) fn push_bytes(&mut self, bytes: &'a [u8]) {
        self.0.push(bytes.as_ptr().cast_mut().cast(), bytes.len());
    }

    /// Adds a list from byte `from` on, as far as one system call has room for its ranges.
    pub(super) fn push_memory(&mut self, memory: &'a Buffers, from: usize) {
        push_parts(&mut self.0, memory, from, memory.bytes().saturating_sub(from));
    }
}

/// The ranges of a receive.
pub(super) struct ReceiveRanges<'a>(pub(super) Ranges<'a>);

impl<'a> ReceiveRanges<'a> {
    pub(super) fn push_bytes(&mut self, bytes: &'a mut [u8]) {
        self.0.push(bytes.as_mut_ptr().cast(), bytes.len());
    }

    /// Adds a part of a list.
    pub(super) fn push_memory(&mut self, memory: &'a Buffers, from: usize, bytes: usize) {
        push_parts(&mut self.0, memory, from, bytes);
    }
}

fn push_parts(ranges: &mut Ranges<'_>, memory: &Buffers, mut from: usize, mut bytes: usize) {
    for range in memory.iovecs() {
        if bytes == 0 || ranges.is_full() {
            return;
        }
        if from >= range.iov_len {
            from -= range.iov_len;
            continue;
        }
        let part = (range.iov_len - from).min(bytes);
        ranges.push(range.iov_base.wrapping_byte_add(from), part);
        (from, bytes) = (0, bytes - part);
    }
}

/// A connected socket that does not wait.
pub(super) struct Transport {
    socket: OwnedFd,
    tls: Option<Box<Tls>>,
    /// Bytes on their way from memory to TLS.
    clear: Vec<u8>,
}

/// The number of bytes that were moved, and true if more could be at once.
pub(super) type Transferred = (usize, bool);

impl Transport {
    /// Makes a transport with TLS, or without.
    pub(super) fn new(socket: OwnedFd, tls: Option<Tls>) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        let tls = tls.map(Box::new);
        Ok(Self { socket, tls, clear: Vec::new() })
    }

    /// Returns true if bytes that [`send`](Self::send) has taken wait for room: then it is called
    /// again, with more or with nothing.
    pub(super) fn has_unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_unsent())
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends the gathered bytes. Returns the number of bytes taken.
    ///
    /// # Errors
    ///
    /// Errors of the socket; `WouldBlock` if it has no room.
    pub(super) fn send(&mut self, gathered: &SendRanges<'_>) -> io::Result<Transferred> {
        if self.tls.is_some() {
            return self.send_encrypted(gathered);
        }
        let iovecs = &gathered.0.iovecs;
        // SAFETY: a message header of zeroes is valid, and empty.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = iovecs.as_ptr().cast_mut();
        message.msg_iovlen = iovecs.len() as _;
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: the ranges are of slices or lists that are borrowed as long as `gathered` is, so
        // they are mapped; the kernel only reads them, and keeps no pointer to them.
        let sent = unsafe { libc::sendmsg(self.socket.as_raw_fd(), &raw const message, flags) };
        bytes_of(sent).map(|sent| (sent, sent == gathered.0.bytes))
    }

    fn send_encrypted(&mut self, gathered: &SendRanges<'_>) -> io::Result<Transferred> {
        let Self { socket, tls: Some(tls), clear } = self else { return Ok((0, true)) };
        tls.push(socket.as_fd())?;
        clear.clear();
        for range in &gathered.0.iovecs {
            let (start, room) = (clear.len(), CLEAR_BYTES - clear.len());
            let part = range.iov_len.min(room);
            clear.resize(start + part, 0);
            let (from, to) = (range.iov_base.cast::<u8>(), &mut clear[start..]);
            // SAFETY: the range is valid as long as `gathered` is, as in `send`, and `to` has as
            // many bytes, which are ours.
            unsafe { copy_out(from, to.as_mut_ptr(), part) };
        }
        tls.encrypt(clear)?;
        match tls.push(socket.as_fd()) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok((clear.len(), true)),
        }
    }

    /// Receives into the scattered ranges. Returns the number of bytes that came, 0 at the end.
    ///
    /// # Errors
    ///
    /// As for [`send`](Self::send).
    pub(super) fn receive(&mut self, scattered: &mut ReceiveRanges<'_>) -> io::Result<Transferred> {
        if let Some(tls) = &mut self.tls {
            let mut filled = IovecWriter { iovecs: &scattered.0.iovecs, at: 0 };
            let taken = tls.pull(self.socket.as_fd(), |bytes| filled.take(bytes))?;
            return Ok((taken, true));
        }
        let iovecs = &mut scattered.0.iovecs;
        // SAFETY: as in `send`.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = iovecs.as_mut_ptr();
        message.msg_iovlen = iovecs.len() as _;
        let socket = self.socket.as_raw_fd();
        // SAFETY: the ranges are of slices that are borrowed mutably, or of lists with memory that
        // anyone may write to, as long as `scattered` is, and the kernel keeps no pointer.
        let received = unsafe { libc::recvmsg(socket, &raw mut message, libc::MSG_DONTWAIT) };
        bytes_of(received).map(|received| (received, received == scattered.0.bytes))
    }
}

/// The state of the machine behind a TCP connection, as far as the kernel knows it.
#[derive(Debug, Clone, Copy)]
pub(super) struct TcpHealth {
    /// The time since its last acknowledgement.
    pub(super) quiet_for: Duration,
    /// The kernel's present wait until it sends unacknowledged bytes again.
    patience: Duration,
    /// The number of resends or probes without an answer.
    tries: u8,
}

/// Unanswered tries from this number on are no accident.
const TRIES: u8 = 3;

impl TcpHealth {
    /// Reads the kernel's state; `None` if this is no TCP connection.
    pub(super) fn read(socket: BorrowedFd<'_>) -> Option<Self> {
        // SAFETY: the structure has numbers only, all of which may be zero.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        let mut len = fits(size_of::<libc::tcp_info>(), "the size of a structure");
        let (level, name) = (libc::IPPROTO_TCP, libc::TCP_INFO);
        let out = (&raw mut info).cast();
        // SAFETY: the kernel writes at most `len` bytes to `info`, which has as many.
        let result =
            unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, out, &raw mut len) };
        let resent = if info.tcpi_unacked > 0 { info.tcpi_retransmits } else { 0 };
        (result == 0).then(|| Self {
            quiet_for: Duration::from_millis(info.tcpi_last_ack_recv.into()),
            patience: Duration::from_micros(info.tcpi_rto.into()),
            tries: info.tcpi_probes.max(resent),
        })
    }

    /// Returns true if the machine was silent for longer than `limit`, and through enough tries. A
    /// machine without room for more bytes answers each try.
    pub(super) fn is_silent(&self, limit: Duration) -> bool {
        self.tries >= TRIES && self.quiet_for > limit.max(self.patience)
    }
}

/// Ranges that are filled from the front.
struct IovecWriter<'a> {
    iovecs: &'a [iovec],
    /// The number of bytes of the first range that are filled.
    at: usize,
}

impl IovecWriter<'_> {
    /// Takes as many bytes as there is room for.
    fn take(&mut self, bytes: &[u8]) -> usize {
        let mut taken = 0;
        while let Some((range, others)) = self.iovecs.split_first()
            && taken < bytes.len()
        {
            let part = (range.iov_len - self.at).min(bytes.len() - taken);
            let to = range.iov_base.cast::<u8>().wrapping_add(self.at);
            // SAFETY: the range is valid as long as the scattered memory is borrowed, and has room
            // for `part` more bytes behind `at`; `bytes` is a slice of its own.
            unsafe { copy_in(bytes[taken..].as_ptr(), to, part) };
            (taken, self.at) = (taken + part, self.at + part);
            if self.at == range.iov_len {
                (self.iovecs, self.at) = (others, 0);
            }
        }
        taken
    }
}

fn bytes_of(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A list of memory in three ranges, which lie apart.
    fn scattered(memory: &Buffers) -> Buffers {
        let start = memory.iovecs()[0].iov_base;
        let range = |at: usize, len| iovec { iov_base: start.wrapping_byte_add(at), iov_len: len };
        let ranges = vec![range(0, 10), range(20, 5), range(40, 7)];
        // SAFETY: the ranges are parts of `memory`, which the list keeps.
        unsafe { Buffers::from_raw_parts(ranges.into(), memory.memory().clone()) }
    }

    /// A send or a receive may end within a range, and the next one continues there.
    #[test]
    fn parts_of_a_list_are_those_of_its_ranges() {
        let list = scattered(&Buffers::from_vec(vec![0; 64]));
        let start = list.iovecs()[0].iov_base.addr();
        for (from, bytes, expected) in [
            (0, 22, &[(0, 10), (20, 5), (40, 7)][..]),
            (3, 19, &[(3, 7), (20, 5), (40, 7)]),
            (3, 10, &[(3, 7), (20, 3)]),
            (10, 6, &[(20, 5), (40, 1)]),
            (12, 3, &[(22, 3)]),
            (21, 1, &[(46, 1)]),
            (22, 0, &[]),
        ] {
            let mut ranges = Ranges::new(Vec::new());
            push_parts(&mut ranges, &list, from, bytes);
            let found: Vec<_> = ranges
                .iovecs
                .iter()
                .map(|range| (range.iov_base.addr() - start, range.iov_len))
                .collect();
            assert_eq!((&found[..], ranges.bytes), (expected, bytes), "{from} {bytes}");
            let mut gathered = SendRanges(Ranges::new(Vec::new()));
            gathered.push_memory(&list, from);
            assert_eq!(gathered.0.bytes(), 22 - from);
        }
    }

    /// TLS yields the bytes of a record in pieces of any length.
    #[test]
    fn ranges_are_filled_from_the_front_in_pieces_of_any_length() {
        let bytes: Vec<u8> = (1..=30).collect();
        for piece in [1, 3, 10, 11, 22, 30] {
            let memory = Buffers::from_vec(vec![0; 64]);
            let list = scattered(&memory);
            let mut filled = IovecWriter { iovecs: list.iovecs(), at: 0 };
            let taken: usize = bytes.chunks(piece).map(|piece| filled.take(piece)).sum();
            assert_eq!((taken, list.to_vec()), (22, bytes[..22].to_vec()), "{piece}");
            assert_eq!(memory.to_vec().iter().filter(|byte| **byte != 0).count(), 22, "{piece}");
        }
    }

    /// More than a filled list may be there, but nothing is behind a short receive.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn more_may_come_or_go_exactly_when_a_list_was_filled_or_taken_whole() {
        let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut ends = [here, there].map(|end| Transport::new(end.into(), None).unwrap());
        let data = vec![7; 4 << 20];
        let send = |ends: &mut [Transport; 2], bytes: usize| {
            let mut gathered = SendRanges(Ranges::new(Vec::new()));
            gathered.push_bytes(&data[..bytes]);
            ends[0].send(&gathered).unwrap()
        };
        let receive = |ends: &mut [Transport; 2], bytes: usize| {
            let mut memory = vec![0; bytes];
            let mut scattered = ReceiveRanges(Ranges::new(Vec::new()));
            scattered.push_bytes(&mut memory);
            ends[1].receive(&mut scattered).unwrap()
        };
        assert_eq!(send(&mut ends, 10), (10, true));
        assert_eq!(receive(&mut ends, 4), (4, true));
        assert_eq!(receive(&mut ends, 6), (6, true));
        assert_eq!(send(&mut ends, 3), (3, true));
        assert_eq!(receive(&mut ends, 16), (3, false));
        let (sent, has_room) = send(&mut ends, data.len());
        assert!(sent < data.len() && !has_room, "{sent} bytes found room");
    }

    #[test]
    fn a_machine_is_silent_if_it_answers_no_probe() {
        let limit = Duration::from_secs(20);
        let is_silent = |quiet, patience, tries| {
            let seconds = Duration::from_secs;
            let (quiet_for, patience) = (seconds(quiet), seconds(patience));
            TcpHealth { quiet_for, patience, tries }.is_silent(limit)
        };
        assert!(is_silent(21, 13, 6) && is_silent(21, 13, 3));
        assert!(!is_silent(20, 13, 6), "no longer than the limit");
        assert!(!is_silent(21, 13, 2), "nobody has asked it");
        assert!(!is_silent(19, 13, 6), "it was a short while ago");
        assert!(!is_silent(60, 64, 9), "it may answer each time");
    }
}
