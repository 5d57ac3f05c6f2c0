//! NBD servers of other projects, with disks for tests.

use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ringhaul_tools::process::{is_listening, retry, wait_child};
use rustix::process::{Pid, Signal, kill_process};

use crate::cli::{LIMIT, TestFolders};
use crate::system::Stopped;

/// An NBD server. Dropping it kills it.
pub struct NbdServer {
    child: Child,
    socket: PathBuf,
}

impl NbdServer {
    /// Starts a server that listens on `socket`.
    ///
    /// # Errors
    /// If its program cannot be started, or does not listen in time.
    pub fn start(socket: &Path, command: &mut Command) -> Result<Self> {
        let _ = std::fs::remove_file(socket);
        let server = Self { child: spawn(command)?, socket: socket.to_owned() };
        retry(LIMIT, || {
            ensure!(socket.exists() && is_listening(socket)?, "the server does not listen");
            Ok(())
        })?;
        Ok(server)
    }

    /// Starts a server that has no socket but listens on a port of this machine.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_tcp(port: u16, command: &mut Command) -> Result<Self> {
        let server = Self { child: spawn(command)?, socket: PathBuf::new() };
        retry(LIMIT, || {
            TcpStream::connect(("127.0.0.1", port)).context("the server does not listen")?;
            Ok(())
        })?;
        Ok(server)
    }

    /// `qemu-nbd` that exports a file as `disk`.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_qemu_nbd(folders: &TestFolders, file: &Path) -> Result<Self> {
        let socket = folders.socket("nbd");
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--shared", "8", "--format", "raw", "--discard", "unmap"]);
        command.args(["--export-name", "disk", "--socket"]).arg(&socket).arg(file);
        Self::start(&socket, &mut command)
    }

    /// `nbdkit` with filters, a plugin and their parameters.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_nbdkit(folders: &TestFolders, options: &[&str]) -> Result<Self> {
        let socket = folders.socket("nbd");
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&socket).args(options);
        Self::start(&socket, &mut command)
    }

    /// Stops the server until the result is dropped.
    ///
    /// # Errors
    /// If the server has ended.
    pub fn stop(&self) -> Result<Stopped> {
        Stopped::new(Pid::from_child(&self.child))
    }

    /// Kills the server.
    ///
    /// # Errors
    /// If it had ended before.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill().context("killing the server")?;
        self.child.wait().context("waiting for the server")?;
        std::fs::remove_file(&self.socket).context("removing its socket")
    }

    /// Sends SIGTERM, on which the server cleans up after itself, and waits for its end.
    ///
    /// # Errors
    /// If it does not end in time.
    pub fn terminate(self) -> Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::TERM).context("ending the server")?;
        self.wait_end()
    }

    /// Waits until the server has ended by itself.
    ///
    /// # Errors
    /// If it does not end in time.
    pub fn wait_end(mut self) -> Result<()> {
        wait_child(&mut self.child, Instant::now() + LIMIT).context("waiting for the server")?;
        let _ = std::fs::remove_file(&self.socket);
        Ok(())
    }

    /// The name of the disk behind an export of this server.
    #[must_use]
    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        // Both fail only for a server that was already waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An unused port.
///
/// # Errors
/// If there is none.
pub fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("looking for a port")?;
    Ok(listener.local_addr().context("looking for a port")?.port())
}

/// Starts a program that ends with the test, however the test ends.
fn spawn(command: &mut Command) -> Result<Child> {
    let name = command.get_program().to_owned();
    let mut bound = Command::new("setpriv");
    bound.args(["--pdeathsig", "KILL"]).arg(&name).args(command.get_args());
    bound.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    bound.spawn().with_context(|| format!("starting {}", name.display()))
}
