//! The process of a daemon, as the kernel identifies it.

use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, UnixCredentials, recvmsg};
use rustix::net::sockopt::{set_socket_passcred, socket_peercred};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::json;

use crate::ctl::connection::Connection;

/// The process of a daemon.
pub(super) struct DaemonProcess {
    pub(super) id: Pid,
    /// Refers to the process even if a new process gets its id.
    pub(super) fd: OwnedFd,
    /// The user and the group that the kernel reports.
    pub(super) user: u32,
    pub(super) group: u32,
}

impl DaemonProcess {
    /// Finds the process at the far end. The kernel vouches for its id: with a forged id, root
    /// would take the rights of a foreign process. Its user and group must equal the owner of the
    /// listening socket: a program that the daemon starts may answer with more rights.
    pub(super) fn find(daemon: &Connection) -> Result<Self> {
        let stream = daemon.stream();
        set_socket_passcred(stream, true)?;
        // The daemon may have refused this client; its reason is the answer.
        let _ = daemon.send("ping", &json!({}), &[]);
        let received = receive_line(stream);
        let (answer, sender) = received.map_err(|error| daemon.unanswered(error))?;
        set_socket_passcred(stream, false)?;
        daemon.parse(&answer)?;
        let Some(id) = Pid::from_raw(sender.pid()) else {
            bail!(
                "the daemon at {} runs in another PID namespace; run this command there",
                daemon.path()
            );
        };
        let (user, group) = (sender.uid(), sender.gid());
        let owner = socket_peercred(stream)?;
        let owner = (owner.uid.as_raw(), owner.gid.as_raw());
        check_owner(owner, (user, group)).with_context(|| daemon.path().to_string())?;
        let fd = pidfd_open(id, PidfdFlags::empty()).context("cannot refer to the daemon")?;
        Ok(Self { id, fd, user, group })
    }
}

/// Checks that an answer comes from the user and the group that listen at the socket.
fn check_owner(owner: (u32, u32), sender: (u32, u32)) -> Result<()> {
    ensure!(
        owner == sender,
        "user {}, group {} listens at the control socket, but a process of user {}, group {} \
         answers; restart the daemon to replace it",
        owner.0,
        owner.1,
        sender.0,
        sender.1
    );
    Ok(())
}

/// Reads a line and its sender as the kernel reports it.
fn receive_line(stream: &UnixStream) -> Result<(Vec<u8>, UnixCredentials)> {
    let (mut line, mut sender) = (Vec::new(), None);
    while line.last() != Some(&b'\n') {
        let mut bytes = [0; 4096];
        let mut space = nix::cmsg_space!(UnixCredentials);
        let mut slices = [IoSliceMut::new(&mut bytes)];
        let message = recvmsg::<()>(
            stream.as_raw_fd(),
            &mut slices,
            Some(&mut space),
            MsgFlags::MSG_CMSG_CLOEXEC,
        )
        .map_err(std::io::Error::from)?;
        ensure!(message.bytes > 0, "the daemon has closed the connection");
        for part in message.cmsgs()? {
            if let ControlMessageOwned::ScmCredentials(credentials) = part {
                sender = Some(credentials);
            }
        }
        let count = message.bytes;
        line.extend_from_slice(&bytes[..count]);
    }
    Ok((line, sender.context("the kernel does not report the process of the daemon")?))
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Write};
    use std::path::Path;
    use std::time::Duration;

    use nix::sys::socket::{ControlMessage, sendmsg};
    use rustix::process::{getegid, getpid};

    use super::*;

    #[test]
    fn the_kernel_reports_the_sender_of_a_line() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        set_socket_passcred(&ours, true).unwrap();
        theirs.write_all(b"{}\n").unwrap();
        let (line, sender) = receive_line(&ours).unwrap();
        assert_eq!(line, b"{}\n");
        assert_eq!(u32::try_from(sender.pid()).unwrap(), std::process::id());
        assert_eq!(sender.uid(), rustix::process::geteuid().as_raw());
        drop(theirs);
        assert!(receive_line(&ours).is_err());
    }

    /// A program that the daemon has started may have answered with other rights.
    #[test]
    fn the_daemon_is_a_process_of_the_owner_of_the_socket() {
        let (user, group) = (rustix::process::geteuid().as_raw(), getegid().as_raw());
        let senders = [(user, group), (user + 1, group), (user, group + 1)];
        // Only root may name another sender.
        for (uid, gid) in senders.into_iter().take(if user == 0 { 3 } else { 1 }) {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let process = getpid();
            let sender = nix::libc::ucred { pid: process.as_raw_pid(), uid, gid };
            let sender = UnixCredentials::from(sender);
            let text = [IoSlice::new(b"{\"result\":{}}\n")];
            let parts = [ControlMessage::ScmCredentials(&sender)];
            set_socket_passcred(&ours, true).unwrap();
            sendmsg::<()>(theirs.as_raw_fd(), &text, &parts, MsgFlags::empty(), None).unwrap();
            let connection = Connection::from_stream(Path::new("/control"), ours);
            match DaemonProcess::find(&connection) {
                Ok(daemon) => {
                    assert_eq!((uid, gid, daemon.id), (user, group, process));
                    assert_eq!((daemon.user, daemon.group), (user, group));
                }
                Err(error) => {
                    assert!((uid, gid) != (user, group), "{error:#}");
                    assert!(format!("{error:#}").contains("restart the daemon"), "{error:#}");
                }
            }
        }
    }

    #[test]
    fn a_daemon_that_hangs_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let mut connection = Connection::new(&path).unwrap();
        connection.set_limit(Duration::from_millis(1)).unwrap();
        let error = DaemonProcess::find(&connection).err().unwrap();
        assert!(format!("{error:#}").contains("has not answered in time"), "{error:#}");
        let error = connection.descriptors(1).unwrap_err();
        assert!(format!("{error:#}").contains("has not answered in time"), "{error:#}");
    }
}
