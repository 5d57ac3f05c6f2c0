//! The connection of an upgrade: answers with descriptors, and a daemon that the kernel identifies.

use std::io::{IoSliceMut, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, UnixCredentials, recvmsg};
use ringhaul::takeover::wire::Receiver;
use rustix::net::sockopt::set_socket_passcred;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::{Value, json};

use super::super::connection::{Refusal, connect, outcome};
use super::status::Status;

/// A connection.
pub(super) struct Link {
    path: PathBuf,
    receiver: Receiver,
}

/// The process of a daemon.
pub(super) struct DaemonProcess {
    pub(super) id: Pid,
    /// Refers to the process even if another one gets its id.
    pub(super) fd: OwnedFd,
}

impl Link {
    pub(super) fn new(path: &Path) -> Result<Self> {
        Ok(Self { path: path.to_owned(), receiver: Receiver::new(connect(path)?) })
    }

    /// Calls a method, and waits for the answer.
    pub(super) fn call(&mut self, method: &str, params: &Value) -> Result<Result<Value, Refusal>> {
        self.send(method, params)?;
        let line = self.receiver.line().with_context(|| self.asking())?;
        outcome(self.parse(line.as_deref().unwrap_or_default())?)
    }

    /// The descriptors that follow an answer.
    pub(super) fn descriptors(&mut self, count: usize) -> Result<Vec<OwnedFd>> {
        self.receiver.fds(count).with_context(|| self.asking())
    }

    /// Returns the process at the other end. The kernel vouches for its id: a process that sends
    /// another one would make root take its rights, and listening sockets may come from a service
    /// manager.
    pub(super) fn daemon(&mut self) -> Result<DaemonProcess> {
        set_socket_passcred(self.receiver.stream(), true)?;
        self.send("ping", &json!({}))?;
        let (answer, sender) =
            receive_line(self.receiver.stream()).with_context(|| self.asking())?;
        set_socket_passcred(self.receiver.stream(), false)?;
        self.parse(&answer)?;
        let Some(id) = Pid::from_raw(sender.pid()) else {
            bail!(
                "the daemon at {} runs in another PID namespace; run this command there",
                self.path.display()
            );
        };
        let fd = pidfd_open(id, PidfdFlags::empty()).context("cannot refer to the daemon")?;
        let daemon = DaemonProcess { id, fd };
        let [user, ..] = Status::read(id)?.users;
        ensure!(user == sender.uid(), "process {} is not the daemon", sender.pid());
        Ok(daemon)
    }

    fn send(&mut self, method: &str, params: &Value) -> Result<()> {
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        let mut stream = self.receiver.stream();
        // A daemon that refuses a client sends its reason and hangs up, so that sending may fail.
        let _ = stream.write_all(format!("{request}\n").as_bytes());
        Ok(())
    }

    fn parse(&self, line: &[u8]) -> Result<Value> {
        let path = self.path.display();
        ensure!(!line.is_empty(), "the daemon at {path} closed the connection without an answer");
        serde_json::from_slice(line).with_context(|| format!("the answer of {path} is not JSON"))
    }

    fn asking(&self) -> String {
        format!("cannot send a request to the daemon at {}", self.path.display())
    }
}

/// Reads a line whose sender the kernel reports.
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
        )?;
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
    use std::io::IoSlice;

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

    /// A process of another user may have got the id of a daemon that has ended.
    #[test]
    fn the_daemon_is_a_process_of_the_sender() {
        let user = rustix::process::geteuid().as_raw();
        // Only root may name another sender.
        for uid in [Some(user), Some(user + 1).filter(|_| user == 0)].into_iter().flatten() {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let process = getpid();
            let sender =
                nix::libc::ucred { pid: process.as_raw_pid(), uid, gid: getegid().as_raw() };
            let sender = UnixCredentials::from(sender);
            let text = [IoSlice::new(b"{\"result\":{}}\n")];
            let parts = [ControlMessage::ScmCredentials(&sender)];
            set_socket_passcred(&ours, true).unwrap();
            sendmsg::<()>(theirs.as_raw_fd(), &text, &parts, MsgFlags::empty(), None).unwrap();
            let mut link = Link { path: "/control".into(), receiver: Receiver::new(ours) };
            match link.daemon() {
                Ok(daemon) => assert_eq!((uid, daemon.id), (user, process)),
                Err(error) => {
                    assert!(uid != user && error.to_string().ends_with("is not the daemon"));
                }
            }
        }
    }
}
