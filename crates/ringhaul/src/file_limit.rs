//! The limit on the size of files (`RLIMIT_FSIZE`).

use std::io;

/// Makes a write beyond the limit fail with EFBIG, an error of one request. By default it also
/// raises SIGXFSZ, which ends the process and with it all exports. Holds for the whole
/// process.
///
/// # Errors
///
/// When the kernel refuses.
pub fn survive() -> io::Result<()> {
    // SAFETY: no handler is installed, and the default action of a signal that nothing else in
    // this process takes is replaced.
    let previous = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    if previous == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
}
