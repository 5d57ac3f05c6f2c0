//! The limit on the size of files (`RLIMIT_FSIZE`).

use std::io;

/// Makes a write beyond the limit fail with EFBIG, an error of one request. By default the write
/// also raises SIGXFSZ, which ends the process and all its exports. Applies to the whole process.
///
/// # Errors
///
/// When the kernel refuses.
pub fn survive() -> io::Result<()> {
    // SAFETY: no handler is installed. Only the default action of a signal is replaced, which
    // nothing else in this process handles.
    let previous = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    if previous == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
}
