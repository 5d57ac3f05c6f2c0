//! The peer of a Unix socket, as the kernel reports it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
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
        let peer = getsockopt(&socket.as_fd(), PeerCredentials)?;
        let pid = u32::try_from(peer.pid()).ok().filter(|pid| *pid > 0);
        Ok(Self { pid, uid: peer.uid(), gid: peer.gid() })
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
        match peer_groups(socket.as_fd(), &mut groups) {
            Ok(found) => break found,
            Err(error) if error.raw_os_error() == Some(libc::ERANGE) && groups.len() < 1 << 16 => {
                groups.resize(2 * groups.len(), 0);
            }
            Err(error) => return Err(error),
        }
    };
    Ok(groups[..found].contains(&gid) || Peer::from_socket(socket)?.gid == gid)
}

/// Reads the groups of the peer. Returns their number.
fn peer_groups(socket: BorrowedFd<'_>, groups: &mut [libc::gid_t]) -> io::Result<usize> {
    let mut bytes = libc::socklen_t::try_from(size_of_val(groups)).map_err(io::Error::other)?;
    // SAFETY: the pointers are to live locals of the caller and of this function, `bytes` is the
    // size of `groups`, and any bytes that the kernel puts there are numbers.
    let status = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERGROUPS,
            groups.as_mut_ptr().cast(),
            &raw mut bytes,
        )
    };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(bytes as usize / size_of::<libc::gid_t>())
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
