//! The peer of a Unix socket, as the kernel reports it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The process that has connected, or its parent that made the connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct Peer {
    /// Its process id; `None` if it is not visible from here, for example in another PID namespace.
    pub pid: Option<u32>,
    /// Its user id.
    pub uid: u32,
    /// Its group id.
    pub gid: u32,
}

impl Peer {
    /// Returns the peer of `socket`.
    ///
    /// # Errors
    ///
    /// When the kernel does not report it.
    pub(crate) fn from_socket(socket: impl AsFd) -> io::Result<Self> {
        // rustix is not used: its result cannot represent the 0 that means "not visible".
        let mut credentials = [libc::ucred { pid: 0, uid: 0, gid: 0 }];
        let found = get(socket.as_fd(), libc::SO_PEERCRED, &mut credentials)?;
        let [libc::ucred { pid, uid, gid }] = credentials;
        if found != 1 {
            return Err(io::Error::other("the kernel knows no credentials"));
        }
        Ok(Self { pid: u32::try_from(pid).ok().filter(|pid| *pid > 0), uid, gid })
    }
}

/// Returns true if the peer of `socket` belonged to this group when it connected.
///
/// # Errors
///
/// When the kernel does not report the groups.
pub(crate) fn peer_is_in_group(socket: impl AsFd, gid: u32) -> io::Result<bool> {
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    let found = loop {
        match get(socket.as_fd(), libc::SO_PEERGROUPS, &mut groups) {
            Ok(found) => break found,
            Err(error) if error.raw_os_error() == Some(libc::ERANGE) && groups.len() < 1 << 16 => {
                groups.resize(2 * groups.len(), 0);
            }
            Err(error) => return Err(error),
        }
    };
    Ok(groups[..found].contains(&gid) || Peer::from_socket(socket)?.gid == gid)
}

/// A type that the kernel may fill.
///
/// # Safety
///
/// Every bit pattern must be a value of the type.
unsafe trait Plain: Copy {}
// SAFETY: the struct consists of three integers and has no padding.
unsafe impl Plain for libc::ucred {}
// SAFETY: the type is an integer.
unsafe impl Plain for libc::gid_t {}

/// Reads an option of a socket. Returns the number of values.
fn get<T: Plain>(socket: BorrowedFd<'_>, option: i32, values: &mut [T]) -> io::Result<usize> {
    let mut bytes = libc::socklen_t::try_from(size_of_val(values)).map_err(io::Error::other)?;
    // SAFETY: the pointers are to live locals of the caller and of this function, `bytes` is the
    // size of `values`, and any bytes that the kernel puts there are values of a `Plain`.
    let status = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            values.as_mut_ptr().cast(),
            &raw mut bytes,
        )
    };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(bytes as usize / size_of::<T>())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn this_process_is_its_own_peer() {
        let (one, _other) = UnixStream::pair().unwrap();
        let gid = rustix::process::getegid().as_raw();
        let uid = rustix::process::geteuid().as_raw();
        let peer = Peer { pid: Some(std::process::id()), uid, gid };
        assert_eq!(Peer::from_socket(&one).unwrap(), peer);
        assert!(peer_is_in_group(&one, gid).unwrap());
        for group in rustix::process::getgroups().unwrap() {
            assert!(peer_is_in_group(&one, group.as_raw()).unwrap());
        }
        assert!(!peer_is_in_group(&one, u32::MAX - 7).unwrap());
    }
}
