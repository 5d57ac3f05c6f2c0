//! A descriptor that the parent of this program has left open for it, by its number.

use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};

use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

/// One at a time: nothing may come between the check and the mark.
static TAKING: Mutex<()> = Mutex::new(());

/// Takes over `fd`, which is closed with the result. It is marked close-on-exec.
///
/// # Errors
///
/// When the number is not open, is that of a standard stream, or belongs to this program already:
/// what a Rust program opens, and what was taken over before, is close-on-exec, and nothing that
/// came through `exec` is.
pub(crate) fn take_over(fd: RawFd) -> io::Result<OwnedFd> {
    let _guard = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
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
        return refused("this program has opened it for itself");
    }
    fcntl_setfd(borrowed, flags | FdFlags::CLOEXEC)?;
    // SAFETY: the descriptor is open, and nobody in this process owns it: it came through `exec`,
    // because it was not close-on-exec, and it was not taken over before, because then it would
    // be. The mark makes this the only time.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, IntoRawFd};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_number_is_taken_over_once_and_only_if_nobody_has_it() {
        let (socket, _peer) = UnixStream::pair().unwrap();
        // What this process has opened.
        assert!(take_over(socket.as_raw_fd()).is_err());
        for number in [-1, 0, 1, 2, 1 << 20] {
            assert!(take_over(number).is_err(), "{number} was taken");
        }
        // As after `exec`: open, and nobody's.
        fcntl_setfd(&socket, FdFlags::empty()).unwrap();
        let number = socket.into_raw_fd();
        let taken = take_over(number).unwrap();
        assert_eq!(taken.as_raw_fd(), number);
        assert!(fcntl_getfd(&taken).unwrap().contains(FdFlags::CLOEXEC));
        assert!(take_over(number).is_err(), "it was taken twice");
    }
}
