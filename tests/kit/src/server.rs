//! A vhost-user-blk server under test, for a guest of [`guest`](crate::guest) to attach to.
//!
//! The server is Ringhaul, or qemu-storage-daemon when `RINGHAUL_TEST_SERVER` says so: what then
//! fails is a fault of the tests or of the guest, not of Ringhaul.

mod heir;

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

pub use heir::Heir;

/// Says which server is to be tested: the name of its program.
const SERVER_VARIABLE: &str = "RINGHAUL_TEST_SERVER";

/// How long a server may take until it listens.
const START_LIMIT: Duration = Duration::from_secs(30);

/// How often a wait for the socket looks at it.
const LOOK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// The program that serves the disk.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Program {
    /// `ringhaul serve`.
    Ringhaul,
    /// QEMU's own server, known to work.
    StorageDaemon,
}

impl Program {
    /// The one that `RINGHAUL_TEST_SERVER` names; Ringhaul without it.
    ///
    /// # Errors
    /// When the name is not known.
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

/// How requests reach the kernel: the value of `--engine`.
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
    /// Whether the page cache is bypassed (O_DIRECT).
    #[must_use]
    pub fn is_direct(self) -> bool {
        matches!(self, Self::None | Self::Directsync)
    }

    /// What Linux shows in `queue/write_cache` of such a disk.
    #[must_use]
    pub(crate) fn seen_by_guest(self) -> &'static str {
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

/// What is served, where and how.
#[derive(Clone, Debug)]
pub struct Export {
    /// The socket that the server makes.
    pub socket: PathBuf,
    /// The file behind the disk.
    pub file: PathBuf,
    /// How the disk is named that lies on that file, if it is not the file itself.
    pub disk: Option<String>,
    /// How requests reach the kernel.
    pub engine: Engine,
    /// The cache mode.
    pub cache: Cache,
    /// Virtqueues that QEMU asks for. Ringhaul offers as many as it can, QSD just these.
    pub num_queues: u16,
    /// The largest number of entries of a virtqueue.
    pub queue_size: u16,
    /// The serial number, at most 20 bytes.
    pub serial: String,
    /// 512 or 4096.
    pub logical_block_bytes: u32,
    /// Whether writes are refused.
    pub read_only: bool,
    /// For virtio-scsi, where the file is LUN 0: further units, as values of `--lun`.
    pub units: Option<Vec<String>>,
    /// Answers come in the order of the avail ring.
    pub in_order: bool,
    /// Threads that share its queues.
    pub io_threads: u16,
}

impl Export {
    /// The control socket of its server.
    #[must_use]
    pub fn control(&self) -> PathBuf {
        self.socket.with_extension("control")
    }
}

/// A running server. Dropping it kills it and removes its socket; its messages are shown if the
/// test is failing.
pub struct Server {
    program: Program,
    child: Child,
    export: Export,
    log: PathBuf,
}

impl Server {
    /// Starts the server for `export` and waits until it listens. Its messages go to a file
    /// beside the socket.
    ///
    /// # Errors
    /// When the program is not there, and when it ends or does not listen in time.
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

    /// What it has written so far.
    #[must_use]
    pub fn messages(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// What it serves.
    #[must_use]
    pub fn export(&self) -> &Export {
        &self.export
    }

    /// The serial number that a guest must see.
    #[must_use]
    pub fn expected_serial(&self) -> &str {
        match self.program {
            Program::Ringhaul => &self.export.serial,
            // It cannot be told one.
            Program::StorageDaemon => "vhost_user_blk",
        }
    }

    /// What Linux must show in `queue/write_cache`.
    #[must_use]
    pub fn expected_write_cache(&self) -> &'static str {
        match self.program {
            Program::Ringhaul => self.export.cache.seen_by_guest(),
            // It always announces this one.
            Program::StorageDaemon => "write through",
        }
    }

    /// Runs `ringhaul ctl` on the server's control socket: a command, the export, and what else it
    /// takes. Returns what it prints.
    pub fn ctl(&self, command: &str, arguments: &[&str]) -> Result<String> {
        let mut words = vec![OsStr::new(command), self.export.socket.as_os_str()];
        words.extend(arguments.iter().map(OsStr::new));
        self.run_ctl(&words)
    }

    /// Calls a method of the server's control socket, and returns its answer.
    pub fn call(&self, method: &str, params: &Value) -> Result<Value> {
        let params = params.to_string();
        let said = self.run_ctl(&["--json", "call", method, &params].map(OsStr::new))?;
        serde_json::from_str(&said).with_context(|| format!("{method} answers {said:?}"))
    }

    fn run_ctl(&self, words: &[&OsStr]) -> Result<String> {
        let mut ctl = bound_to_test();
        ctl.arg(ringhaul_binary()?).args(["ctl", "--control"]).arg(self.export.control());
        let output = ctl.args(words).output().context("running ringhaul ctl")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "ctl {words:?}: {said}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Fails if the server has ended on its own.
    ///
    /// # Errors
    /// When it has.
    pub fn check_running(&mut self) -> Result<()> {
        match self.child.try_wait().context("looking at the server")? {
            None => Ok(()),
            Some(status) => bail!("the server ended with {status}:\n{}", self.messages()),
        }
    }

    /// Sends SIGTERM and waits for the end.
    ///
    /// # Errors
    /// When the server had ended before, and when it does not end within `limit`.
    pub fn terminate(&mut self, limit: Duration) -> Result<ExitStatus> {
        self.check_running()?;
        kill_process(Pid::from_child(&self.child), Signal::TERM)
            .context("sending SIGTERM to the server")?;
        wait_child(&mut self.child, Instant::now() + limit)
            .with_context(|| format!("after SIGTERM; its messages:\n{}", self.messages()))
    }

    /// Kills it: it has no moment to finish anything.
    ///
    /// # Errors
    /// When the server had ended before.
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
        // A connection would tell, but would also be a front-end that comes and goes.
        while !is_listening(&self.export.socket)? {
            self.check_running()?;
            ensure!(
                Instant::now() < deadline,
                "the server does not listen on {}",
                self.export.socket.display()
            );
            poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&LOOK_INTERVAL))
                .context("waiting for the server")?;
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // These fail only if it has ended and been waited for.
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
    }
}

/// A command line to be completed; what it starts does not outlive the test, however that ends.
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

/// The daemon under test: `RINGHAUL_BIN`, or the one that cargo built beside the running test.
///
/// # Errors
/// When there is none.
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
            "there is no ringhaul binary for {}; run cargo build --package ringhaul with the \
             same profile, or set RINGHAUL_BIN",
            test.display()
        ),
    }
}

/// The bytes that `file` occupies on the disk of the host, without its holes.
///
/// # Errors
/// When the file is not there.
pub fn allocated_bytes(file: &Path) -> Result<u64> {
    /// The unit of `st_blocks`, whatever the file system uses.
    const ST_BLOCK_BYTES: u64 = 512;
    let metadata = file.metadata().with_context(|| format!("looking at {}", file.display()))?;
    Ok(metadata.blocks() * ST_BLOCK_BYTES)
}
