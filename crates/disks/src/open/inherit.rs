//! Takes over a descriptor, by number, that the parent process left open for this program.

use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};

use blockio::executor::Lock;
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

/// Serialises takeovers: no other thread may come between the check and the mark.
static TAKING: Lock<()> = Lock::new(());

/// Takes over `fd` and marks it close-on-exec. Dropping the result closes it.
///
/// # Errors
///
/// When the number is not open, is that of a standard stream, or belongs to this program already.
/// Descriptors that a Rust program opens, or that were taken over before, are close-on-exec; none
/// that came through `exec` is.
pub fn take_over(fd: RawFd) -> io::Result<OwnedFd> {
    let _guard = TAKING.lock();
    if fd < 0 {
        return Err(rustix::io::Errno::BADF.into());
    }
    let refused = |text| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    if fd <= 2 {
        return refused("it is standard input, output or error");
    }
    // SAFETY: borrowed for this call alone; a number that is not open is an error of `fcntl`.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = fcntl_getfd(borrowed)?;
    if flags.contains(FdFlags::CLOEXEC) {
        return refused("this program itself has opened it");
    }
    fcntl_setfd(borrowed, flags | FdFlags::CLOEXEC)?;
    // SAFETY: the descriptor is open, and no code in this process owns it. It was not
    // close-on-exec, so it came through `exec` and was not taken over before. The mark makes this
    // the only takeover.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, IntoRawFd};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_free_number_is_taken_over_once() {
        let (socket, _peer) = UnixStream::pair().unwrap();
        // A descriptor that this process has opened.
        assert!(take_over(socket.as_raw_fd()).is_err());
        for number in [-1, 0, 1, 2, 1 << 20] {
            assert!(take_over(number).is_err(), "{number} was taken");
        }
        // As after `exec`: open, and without an owner.
        fcntl_setfd(&socket, FdFlags::empty()).unwrap();
        let number = socket.into_raw_fd();
        let taken = take_over(number).unwrap();
        assert_eq!(taken.as_raw_fd(), number);
        assert!(fcntl_getfd(&taken).unwrap().contains(FdFlags::CLOEXEC));
        assert!(take_over(number).is_err(), "it was taken twice");
    }
}
