//! A vhost-user-blk server under test, for a guest of [`guest`](crate::guest).
//!
//! The server is Ringhaul, or qemu-storage-daemon if `RINGHAUL_TEST_SERVER` names it. Failures with
//! qemu-storage-daemon are faults of the tests or of the guest, not of Ringhaul.

mod successor;

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ringhaul_tools::process::{is_listening, wait_child};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;

use crate::cli::assert_calls;

pub use successor::Successor;

/// The variable with the program name of the server to test.
const SERVER_VARIABLE: &str = "RINGHAUL_TEST_SERVER";

/// The time limit for a server to listen.
const START_LIMIT: Duration = Duration::from_secs(30);

/// The interval at which a wait checks the socket.
const POLL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// The program that serves the disk.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Program {
    /// `ringhaul serve`.
    Ringhaul,
    /// QEMU's own server, known to work.
    StorageDaemon,
}

impl Program {
    /// The program that `RINGHAUL_TEST_SERVER` names; Ringhaul without it.
    ///
    /// # Errors
    /// If the name is unknown.
    pub fn from_environment() -> Result<Self> {
        match std::env::var(SERVER_VARIABLE).as_deref() {
            Err(_) | Ok("ringhaul") => Ok(Self::Ringhaul),
            Ok("qemu-storage-daemon") => Ok(Self::StorageDaemon),
            Ok(other) => {
                bail!("{SERVER_VARIABLE}={other} is not known; use ringhaul or qemu-storage-daemon")
            }
        }
    }
}

/// The engine: the value of `--engine`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Engine {
    /// io_uring.
    IoUring,
    /// Linux AIO.
    Aio,
    /// A pool of threads.
    Threads,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::IoUring => "io_uring",
            Self::Aio => "aio",
            Self::Threads => "threads",
        })
    }
}

/// The cache mode, in QEMU's words: the value of `--cache`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Cache {
    /// No page cache; the guest sees a write cache.
    None,
    /// No page cache, and no write cache either.
    Directsync,
    /// The page cache is the guest's write cache.
    Writeback,
    /// The page cache for reads; every write is on the disk when it is done.
    Writethrough,
}

impl Cache {
    /// Returns true if the page cache is bypassed (O_DIRECT).
    #[must_use]
    pub fn is_direct(self) -> bool {
        matches!(self, Self::None | Self::Directsync)
    }

    /// The value of `queue/write_cache` of such a disk in Linux.
    #[must_use]
    pub(crate) fn guest_write_cache(self) -> &'static str {
        match self {
            Self::None | Self::Writeback => "write back",
            Self::Directsync | Self::Writethrough => "write through",
        }
    }
}

impl fmt::Display for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Directsync => "directsync",
            Self::Writeback => "writeback",
            Self::Writethrough => "writethrough",
        })
    }
}

/// The configuration of an export.
#[derive(Clone, Debug)]
pub struct Export {
    /// The socket that the server makes.
    pub socket: PathBuf,
    /// The file behind the disk.
    pub file: PathBuf,
    /// The name of a disk on that file, if the disk is not the file itself.
    pub disk: Option<String>,
    /// The engine.
    pub engine: Engine,
    /// The cache mode.
    pub cache: Cache,
    /// Virtqueues that QEMU asks for. Ringhaul offers as many as it can, qemu-storage-daemon
    /// exactly this many.
    pub num_queues: u16,
    /// The largest number of entries of a virtqueue.
    pub queue_size: u16,
    /// The serial number, at most 20 bytes.
    pub serial: String,
    /// 512 or 4096.
    pub logical_block_bytes: u32,
    /// True to refuse writes.
    pub read_only: bool,
    /// For virtio-scsi, where the file is LUN 0: further units, as values of `--lun`.
    pub units: Option<Vec<String>>,
    /// True to answer in the order of the avail ring.
    pub in_order: bool,
    /// Number of threads that share its queues.
    pub io_threads: u16,
}

impl Export {
    /// The control socket of its server.
    #[must_use]
    pub fn control(&self) -> PathBuf {
        self.socket.with_extension("control")
    }
}

/// A running server. Dropping it kills it, removes its socket and, if the test is failing, shows
/// its messages. The test fails if a thread was denied a system call.
pub struct Server {
    program: Program,
    child: Child,
    export: Export,
    log: PathBuf,
}

impl Server {
    /// Starts the server for `export` and waits until it listens. Its messages go to a file beside
    /// the socket.
    ///
    /// # Errors
    /// If the program is missing, ends, or does not listen in time.
    pub fn start(program: Program, export: &Export) -> Result<Self> {
        let log = export.socket.with_extension("log");
        let messages = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        let mut command = match program {
            Program::Ringhaul => ringhaul_command(export)?,
            Program::StorageDaemon => storage_daemon_command(export),
        };
        let child = command
            .stdin(Stdio::null())
            .stdout(messages.try_clone().context("duplicating a file descriptor")?)
            .stderr(messages)
            .spawn()
            .with_context(|| format!("starting {:?}", command.get_program()))?;
        let mut server = Self { program, child, export: export.clone(), log };
        server
            .wait_until_listening()
            .with_context(|| format!("the messages of the server:\n{}", server.messages()))?;
        Ok(server)
    }

    /// The server's messages so far.
    #[must_use]
    pub fn messages(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The export of this server.
    #[must_use]
    pub fn export(&self) -> &Export {
        &self.export
    }

    /// The serial number that a guest must see.
    #[must_use]
    pub fn expected_serial(&self) -> &str {
        match self.program {
            Program::Ringhaul => &self.export.serial,
            // It has no option for the serial number.
            Program::StorageDaemon => "vhost_user_blk",
        }
    }

    /// The value that Linux must show in `queue/write_cache`.
    #[must_use]
    pub fn expected_write_cache(&self) -> &'static str {
        match self.program {
            Program::Ringhaul => self.export.cache.guest_write_cache(),
            // It always announces this value.
            Program::StorageDaemon => "write through",
        }
    }

    /// Runs `ringhaul ctl` on the server's control socket: a command, the export, and further
    /// arguments. Returns its output.
    pub fn ctl(&self, command: &str, arguments: &[&str]) -> Result<String> {
        let mut words = vec![OsStr::new(command), self.export.socket.as_os_str()];
        words.extend(arguments.iter().map(OsStr::new));
        self.run_ctl(&words)
    }

    /// Calls a method of the server's control socket, and returns its answer.
    pub fn call(&self, method: &str, params: &Value) -> Result<Value> {
        let params = params.to_string();
        let output = self.run_ctl(&["--json", "call", method, &params].map(OsStr::new))?;
        serde_json::from_str(&output).with_context(|| format!("{method} answers {output:?}"))
    }

    fn run_ctl(&self, words: &[&OsStr]) -> Result<String> {
        let mut ctl = bound_to_test();
        ctl.arg(ringhaul_binary()?).args(["ctl", "--control"]).arg(self.export.control());
        let output = ctl.args(words).output().context("running ringhaul ctl")?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "ctl {words:?}: {error}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Fails if the server has ended on its own.
    ///
    /// # Errors
    /// If the server has ended.
    pub fn check_running(&mut self) -> Result<()> {
        match self.child.try_wait().context("looking at the server")? {
            None => Ok(()),
            Some(status) => bail!("the server ended with {status}:\n{}", self.messages()),
        }
    }

    /// Sends SIGTERM and waits for the end.
    ///
    /// # Errors
    /// If the server had ended before, or does not end within `limit`.
    pub fn terminate(&mut self, limit: Duration) -> Result<ExitStatus> {
        self.check_running()?;
        kill_process(Pid::from_child(&self.child), Signal::TERM)
            .context("sending SIGTERM to the server")?;
        wait_child(&mut self.child, Instant::now() + limit)
            .with_context(|| format!("after SIGTERM; its messages:\n{}", self.messages()))
    }

    /// Kills the server, which gets no chance to finish anything.
    ///
    /// # Errors
    /// If it had ended before.
    pub fn kill(&mut self) -> Result<()> {
        self.check_running()?;
        self.child.kill().context("killing the server")?;
        self.child.wait().context("waiting for the server that was killed")?;
        Ok(())
    }

    fn wait_until_listening(&mut self) -> Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        let process = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty())
            .context("opening the pidfd of the server")?;
        // A connection attempt would answer this too, but would act as a front-end that comes and
        // goes.
        while !is_listening(&self.export.socket)? {
            self.check_running()?;
            ensure!(
                Instant::now() < deadline,
                "the server does not listen on {}",
                self.export.socket.display()
            );
            poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&POLL_INTERVAL))
                .context("waiting for the server")?;
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only for a server that was already waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- messages of the server ---\n{}", self.messages());
        }
        match std::fs::remove_file(&self.export.socket) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                eprintln!("removing {}: {error}", self.export.socket.display());
            }
            _ => {}
        }
        assert_calls(&self.messages());
    }
}

/// The start of a command line for a program that ends with the test, however the test ends.
fn bound_to_test() -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]);
    command
}

fn ringhaul_command(export: &Export) -> Result<Command> {
    let mut command = bound_to_test();
    command
        .arg(ringhaul_binary()?)
        .arg("serve")
        .arg("--socket-path")
        .arg(&export.socket)
        .args(["--engine", &export.engine.to_string()])
        .args(["--cache", &export.cache.to_string()])
        .args(["--queue-size", &export.queue_size.to_string()])
        .args(["--iothreads", &export.io_threads.to_string()])
        .args(["--logical-block-size", &export.logical_block_bytes.to_string()])
        .arg("--control")
        .arg(export.control());
    // Disks that a test adds later lie beside the first.
    if let Some(folder) = export.file.parent().filter(|folder| folder.is_dir()) {
        command.arg("--allow-disk-dir").arg(folder);
    }
    if export.read_only {
        command.arg("--read-only");
    }
    if export.in_order {
        command.args(["--in-order", "on"]);
    }
    if let Some(units) = &export.units {
        let (file, serial) = (export.file.display(), &export.serial);
        let first = format!("0,blk-file={file},serial={serial},rotational=off");
        command.args(["--device", "scsi", "--lun", &first]);
        for unit in units {
            command.args(["--lun", unit]);
        }
    } else {
        match &export.disk {
            Some(disk) => command.args(["--disk", disk]),
            None => command.arg("--blk-file").arg(&export.file),
        };
        command.args(["--serial", &export.serial]);
    }
    Ok(command)
}

fn storage_daemon_command(export: &Export) -> Command {
    let aio = match export.engine {
        Engine::IoUring => "io_uring",
        Engine::Aio if export.cache.is_direct() => "native",
        Engine::Aio | Engine::Threads => "threads",
    };
    let on_off = |on| if on { "on" } else { "off" };
    let mut blockdev = OsString::from("driver=file,node-name=file,discard=unmap,filename=");
    blockdev.push(&export.file);
    blockdev.push(format!(
        ",aio={aio},cache.direct={},read-only={}",
        on_off(export.cache.is_direct()),
        on_off(export.read_only)
    ));
    let mut exporting = OsString::from("vhost-user-blk,id=export,node-name=file,addr.path=");
    exporting.push(&export.socket);
    exporting.push(format!(
        ",addr.type=unix,writable={},num-queues={},logical-block-size={}",
        on_off(!export.read_only),
        export.num_queues,
        export.logical_block_bytes
    ));
    let mut command = bound_to_test();
    command
        .arg("qemu-storage-daemon")
        .arg("--blockdev")
        .arg(blockdev)
        .arg("--export")
        .arg(exporting);
    command
}

/// The daemon under test: `RINGHAUL_BIN`, or the binary that cargo built beside the running test.
///
/// # Errors
/// If there is none.
pub fn ringhaul_binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("RINGHAUL_BIN") {
        let path = PathBuf::from(path);
        ensure!(path.is_file(), "RINGHAUL_BIN={} is not a file", path.display());
        return Ok(path);
    }
    let test = std::env::current_exe().context("finding the running test")?;
    // target/debug/deps/guest-1234 is the test, target/debug/ringhaul the daemon.
    let folder = test.parent().and_then(Path::parent);
    let path = folder.map(|folder| folder.join("ringhaul"));
    match path {
        Some(path) if path.is_file() => Ok(path),
        _ => bail!(
            "there is no ringhaul binary for {}; run cargo build --package ringhaul-cli with the \
             same profile, or set RINGHAUL_BIN",
            test.display()
        ),
    }
}

/// The bytes that `file` occupies on the disk of the host, without its holes.
///
/// # Errors
/// If the file is missing.
pub fn allocated_bytes(file: &Path) -> Result<u64> {
    /// The unit of `st_blocks` on any file system.
    const ST_BLOCK_BYTES: u64 = 512;
    let metadata = file.metadata().with_context(|| format!("looking at {}", file.display()))?;
    Ok(metadata.blocks() * ST_BLOCK_BYTES)
}
