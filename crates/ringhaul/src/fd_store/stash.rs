//! A socket pair in which the descriptors of one front-end wait for the next process.
//!
//! The service manager stores both ends, and nothing else of the front-end: its work does not grow
//! with the number of queues, and files that two front-ends share need no account. Descriptors are
//! in messages, with numbers. A process reads such a message only after it has sent the descriptors
//! again, so that a kill leaves each at least once.
//!
//! Closing a file may wait for ever if a file system is behind it whose server does not answer. So
//! only files of the kernel's own are put here: memory, eventfds, pipes and sockets. A socket may
//! hold other files in unread messages, and stays until the service manager closes the pair, which
//! it does on a thread of its own.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Instant;

use rustix::fs::fcntl_get_seals;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, socketpair, sockopt,
};
use serde::{Deserialize, Serialize};
use vhost_user::{FdIndex, PassedFds};

use crate::process::fd_messages::{self, FDS_MAX};
use crate::process::service_manager;

/// Messages after which descriptors are put together into few.
const MESSAGES_MAX: usize = 128;

/// The bytes for messages that are asked for. The kernel reduces them to its limit, which has room
/// for twice as many messages.
const SEND_BYTES: usize = 1 << 20;

/// The bytes of a number.
const NUMBER_BYTES: usize = size_of::<u64>();

/// The number of a descriptor: odd for a socket.
pub(super) type Number = u64;

/// Descriptors outside of this process, until this is dropped.
pub(super) struct Stash {
    /// Its name in the store.
    name: String,
    inlet: OwnedFd,
    outlet: OwnedFd,
    /// The number of messages.
    messages: usize,
    next: Number,
    /// The calls until the process dies.
    #[cfg(test)]
    calls_left: std::cell::Cell<usize>,
}

/// The stash of a session that is handed over.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct StashState {
    pub(super) name: String,
    pub(super) ends: [FdIndex; 2],
}

/// A message: numbers and their descriptors, or a mark without any.
type Message = (Vec<Number>, Vec<OwnedFd>);

impl Stash {
    /// Makes a pair and has the service manager store it under this name.
    ///
    /// # Errors
    ///
    /// When no descriptor is left, or the manager does not take it.
    pub(super) fn new(name: String) -> io::Result<Self> {
        let stash = Self::new_unstored(name)?;
        service_manager::store(&stash.name, &[stash.inlet.as_fd(), stash.outlet.as_fd()])?;
        Ok(stash)
    }

    /// Makes a pair that nothing keeps.
    pub(super) fn new_unstored(name: String) -> io::Result<Self> {
        let kind = SocketType::SEQPACKET;
        let (inlet, outlet) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        sockopt::set_socket_send_buffer_size(&inlet, SEND_BYTES)?;
        Ok(Self::from_ends(name, inlet, outlet))
    }

    fn from_ends(name: String, inlet: OwnedFd, outlet: OwnedFd) -> Self {
        Self {
            name,
            inlet,
            outlet,
            messages: 0,
            next: 0,
            #[cfg(test)]
            calls_left: usize::MAX.into(),
        }
    }

    /// Describes it for another process.
    ///
    /// # Errors
    ///
    /// When no descriptor is left.
    pub(super) fn hand_over(&self, fds: &mut PassedFds) -> io::Result<StashState> {
        let ends = [fds.put("stash", &self.inlet)?, fds.put("stash", &self.outlet)?];
        Ok(StashState { name: self.name.clone(), ends })
    }

    /// Copies of both ends, as the next process gets them.
    #[cfg(test)]
    pub(super) fn copies(&self) -> [OwnedFd; 2] {
        [&self.outlet, &self.inlet].map(|end| end.try_clone().unwrap())
    }

    #[cfg(test)]
    fn live(&self) -> io::Result<()> {
        let left = self.calls_left.get().checked_sub(1);
        self.calls_left.set(left.ok_or(io::ErrorKind::Interrupted)?);
        Ok(())
    }

    /// Compacts, with a death after this number of calls. Returns true if there was none.
    #[cfg(test)]
    pub(super) fn compact_until_killed(&mut self, calls: usize) -> bool {
        self.calls_left.set(calls);
        self.compact(|_| true).is_ok()
    }

    /// Opens the pair of another process, with all descriptors.
    ///
    /// # Errors
    ///
    /// When it is no such pair.
    pub(super) fn open(
        name: String,
        ends: Vec<OwnedFd>,
    ) -> io::Result<(Self, BTreeMap<Number, OwnedFd>)> {
        let invalid = || {
            io::Error::other(
                "the service manager has not kept both of its sockets; raise \
                 FileDescriptorStoreMax= in the unit",
            )
        };
        let [one, other]: [OwnedFd; 2] = ends.try_into().map_err(|_| invalid())?;
        let has_unread = |end: &OwnedFd| rustix::io::ioctl_fionread(end).map(|bytes| bytes > 0);
        // Messages go in one direction only.
        let (inlet, outlet) = if has_unread(&one)? { (other, one) } else { (one, other) };
        let mut stash = Self::from_ends(name, inlet, outlet);
        let fds = stash.compact(|_| true)?;
        // The next state drops the descriptors of the earlier process.
        stash.messages = MESSAGES_MAX + 1;
        Ok((stash, fds))
    }

    /// Puts a descriptor in. Returns its number.
    ///
    /// # Errors
    ///
    /// When the kernel has no room, or the file may wait for another program.
    pub(super) fn put(&mut self, fd: BorrowedFd<'_>) -> io::Result<Number> {
        let number = self.next | u64::from(is_socket(fd)?);
        self.send(&[number], &[fd])?;
        self.next += 2;
        self.messages += 1;
        Ok(number)
    }

    /// Drops the descriptors that are not in use, if there are many messages.
    ///
    /// # Errors
    ///
    /// When the kernel has no room.
    pub(super) fn tidy(&mut self, is_in_use: impl Fn(Number) -> bool) -> io::Result<()> {
        if self.messages > MESSAGES_MAX {
            self.compact(|number| is_in_use(number) || number % 2 == 1)?;
        }
        Ok(())
    }

    /// Puts descriptors together into few messages, and returns them.
    fn compact(
        &mut self,
        is_in_use: impl Fn(Number) -> bool,
    ) -> io::Result<BTreeMap<Number, OwnedFd>> {
        let (mut found, mut sent_again) = (BTreeMap::new(), 0);
        let mark = Instant::now();
        let mark = format!("{} {mark:?}", std::process::id()).into_bytes();
        self.send_bytes(&mark, &[])?;
        loop {
            let (bytes, fds) = self.peek()?;
            let (numbers, fds) =
                if fds.is_empty() { Message::default() } else { message(&bytes, fds) };
            let live = numbers.into_iter().zip(fds).filter(|(number, _)| is_in_use(*number));
            let (numbers, fds): Message = live.unzip();
            if !fds.is_empty() {
                self.send(&numbers, &fds.iter().map(AsFd::as_fd).collect::<Vec<_>>())?;
                sent_again += 1;
            }
            self.drop_first()?;
            found.extend(numbers.into_iter().zip(fds));
            if bytes == mark {
                break;
            }
        }
        let (numbers, fds): (Vec<Number>, Vec<_>) =
            found.iter().map(|(number, fd)| (*number, fd.as_fd())).unzip();
        self.messages = 0;
        for (numbers, fds) in numbers.chunks(FDS_MAX).zip(fds.chunks(FDS_MAX)) {
            self.send(numbers, fds)?;
            self.messages += 1;
        }
        (0..sent_again).try_for_each(|_| self.drop_first())?;
        let last = found.last_key_value().map_or(0, |(number, _)| *number);
        self.next = self.next.max((last | 1) + 1);
        Ok(found)
    }

    fn send(&self, numbers: &[Number], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        self.send_bytes(&bytes, fds)
    }

    fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        #[cfg(test)]
        self.live()?;
        fd_messages::send(&self.inlet, bytes, fds, SendFlags::DONTWAIT).map(drop)
    }

    /// The first message, which stays.
    fn peek(&self) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let mut bytes = vec![0; FDS_MAX * NUMBER_BYTES];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let received = fd_messages::receive(&self.outlet, &mut bytes, flags)?;
        bytes.truncate(received.bytes);
        let fds = received.fds;
        if fds.len() != bytes.len() / NUMBER_BYTES && !fds.is_empty() {
            return Err(io::Error::other("the limit on open files is reached (ulimit -n)"));
        }
        Ok((bytes, fds))
    }

    /// Drops the first message and its descriptors.
    fn drop_first(&self) -> io::Result<()> {
        #[cfg(test)]
        self.live()?;
        recv(&self.outlet, &mut [0; NUMBER_BYTES], RecvFlags::DONTWAIT)?;
        Ok(())
    }
}

impl Drop for Stash {
    fn drop(&mut self) {
        service_manager::forget(&self.name);
    }
}

fn message(bytes: &[u8], fds: Vec<OwnedFd>) -> Message {
    let (numbers, _) = bytes.as_chunks();
    (numbers.iter().map(|number| Number::from_ne_bytes(*number)).collect(), fds)
}

/// Returns true for a socket, and false for other files that close without a wait.
fn is_socket(fd: BorrowedFd<'_>) -> io::Result<bool> {
    if sockopt::socket_type(fd).is_ok() {
        return Ok(true);
    }
    if fcntl_get_seals(fd).is_ok() {
        return Ok(false);
    }
    let kind = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    let is_pipe = kind.as_os_str().as_encoded_bytes().starts_with(b"pipe:[");
    if is_pipe || kind == Path::new("anon_inode:[eventfd]") {
        return Ok(false);
    }
    Err(io::Error::other(format!(
        "only sealable memory, eventfds, pipes and sockets can be kept, not {}",
        kind.display()
    )))
}
