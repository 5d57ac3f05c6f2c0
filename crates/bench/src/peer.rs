//! The process at the far end of a socket. The daemon has a copy of this call
//! (`ringhaul/src/socket/peer.rs`): no crate below both knows sockets, and one for this call alone
//! would cost more upkeep.

use std::os::fd::{AsRawFd, BorrowedFd};

/// Returns the process that listened at the far end of a Unix socket; `None` if it is not visible
/// from here, as in another PID namespace.
pub(crate) fn peer_pid(socket: BorrowedFd<'_>) -> Option<u32> {
    // Not through rustix, whose result has no room for the 0 that means "not visible".
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let size = size_of::<libc::ucred>();
    let mut len = libc::socklen_t::try_from(size).ok()?;
    // SAFETY: the pointers are to live locals, and `len` is the size of `credentials`.
    let status = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut len,
        )
    };
    let pid = u32::try_from(credentials.pid).ok()?;
    (status == 0 && pid > 0).then_some(pid)
}
