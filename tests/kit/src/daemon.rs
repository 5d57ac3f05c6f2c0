//! The daemon under test: started with any options, watched from outside, ended with the test.

mod log;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use log::Log;
use ringhaul_tools::process::wait_child;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::cli::{READY, allow_test_folders, assert_calls, check_calls, ringhaul_under};
use crate::server::{Cache, Engine};
use crate::system::thread_id;

/// The time limit of a test for any single step. Only a hang takes this long.
pub const LIMIT: Duration = Duration::from_secs(30);

/// Bytes of a sector.
pub const SECTOR_BYTES: usize = 512;

/// Bytes at the start of a disk that [`sector_content`] fills.
pub const FILLED_BYTES: usize = 2 << 20;

/// The name of the front-ends' memfds in /proc.
pub const GUEST_MEMORY: &str = "ringhaul-test-guest";

/// Threads that come and go with load, and threads that start after the daemon listens.
const PASSING_THREADS: [&str; 3] = ["ringhaul-pool", "ringhaul-signal", "ringhaul-size"];

/// The prefix of the names of threads that the kernel starts and ends for io_uring.
const KERNEL_THREADS: &str = "iou-wrk-";

/// Makes a test for each engine out of each function that takes one.
#[macro_export]
macro_rules! for_each_engine {
    ($($(#[$attribute:meta])* $name:ident),* $(,)?) => {
        mod io_uring {
            $(#[test]
            $(#[$attribute])*
            fn $name() -> anyhow::Result<()> {
                super::$name($crate::server::Engine::IoUring)
            })*
        }
        $crate::for_each_engine_with_system_calls! { $($(#[$attribute])* $name),* }
    };
}

/// Like [`for_each_engine`], but only for engines whose operations a trace of system calls shows.
#[macro_export]
macro_rules! for_each_engine_with_system_calls {
    ($($(#[$attribute:meta])* $name:ident),* $(,)?) => {
        mod aio {
            $(#[test]
            $(#[$attribute])*
            fn $name() -> anyhow::Result<()> {
                super::$name($crate::server::Engine::Aio)
            })*
        }
        mod threads {
            $(#[test]
            $(#[$attribute])*
            fn $name() -> anyhow::Result<()> {
                super::$name($crate::server::Engine::Threads)
            })*
        }
    };
}

/// The options of a daemon. The disk is a new file, filled in part.
#[derive(Clone, Debug)]
pub struct DaemonOptions {
    /// The engine.
    pub engine: Engine,
    /// The cache mode.
    pub cache: Cache,
    /// Size of the disk in bytes.
    pub disk_bytes: u64,
    /// The most queues; for virtio-scsi, the most request queues.
    pub num_queues: u16,
    /// True for virtio-scsi with the disk as LUN 0, false for virtio-blk.
    pub is_scsi: bool,
    /// Further options of the command line.
    pub extra: Vec<String>,
    /// System calls to trace, as a list for strace. The trace names threads too.
    pub trace: Option<&'static str>,
    /// A command that executes the daemon, such as one that lowers a limit.
    pub wrapper: &'static [&'static str],
}

impl DaemonOptions {
    /// Two queues on a disk of 16 MiB. Linux AIO goes with direct I/O, the threads with the page
    /// cache.
    #[must_use]
    pub fn new(engine: Engine) -> Self {
        let cache = match engine {
            Engine::IoUring | Engine::Aio => Cache::None,
            Engine::Threads => Cache::Writeback,
        };
        Self {
            engine,
            cache,
            disk_bytes: 16 << 20,
            num_queues: 2,
            is_scsi: false,
            extra: Vec::new(),
            trace: None,
            wrapper: &[],
        }
    }

    /// Adds an option, with `value` unless that is empty.
    #[must_use]
    pub fn with(mut self, option: &str, value: &str) -> Self {
        self.extra.push(option.to_owned());
        if !value.is_empty() {
            self.extra.push(value.to_owned());
        }
        self
    }
}

/// The initial content of a sector.
#[must_use]
pub fn sector_content(sector: u64) -> Vec<u8> {
    pattern(sector.wrapping_add(0x5eed), SECTOR_BYTES)
}

/// Bytes that depend on `seed` and on their position.
#[must_use]
pub fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut content = Vec::with_capacity(bytes + size_of::<u64>());
    while content.len() < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        content.extend_from_slice(&(state ^ (state >> 29)).to_le_bytes());
    }
    content.truncate(bytes);
    content
}

/// A running daemon. Dropping it kills it, removes its socket and its disk and, if the test fails,
/// shows its messages. The test fails if a thread was denied a system call.
pub struct Daemon {
    child: Child,
    pid: Pid,
    log: Arc<Log>,
    log_reader: Option<JoinHandle<()>>,
    socket: PathBuf,
    disk: PathBuf,
    trace: Option<PathBuf>,
    _folders: [TempDir; 2],
}

impl Daemon {
    /// Starts the daemon and waits until it listens. The disk is made in a new folder in `disks`,
    /// where direct I/O should work.
    ///
    /// # Errors
    /// If the program is missing, ends, or does not listen in time.
    pub fn start(disks: &Path, options: &DaemonOptions) -> Result<Self> {
        let disk_folder = tempfile::tempdir_in(disks).context("making a folder for a disk")?;
        let socket_folder = tempfile::tempdir().context("making a folder for a socket")?;
        let socket = socket_folder.path().join("socket");
        let disk = disk_folder.path().join("disk.img");
        make_disk(&disk, options.disk_bytes)?;
        let trace = options.trace.map(|_| disk_folder.path().join("trace"));
        let mut command = command(options, &socket, &disk, trace.as_deref())?;
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {:?}", command.get_program()))?;
        let log = Arc::new(Log::default());
        let stderr = child.stderr.take().context("the daemon has no stderr")?;
        let log_reader = std::thread::spawn({
            let log = Arc::clone(&log);
            move || log.fill(stderr)
        });
        let mut daemon = Self {
            pid: Pid::from_child(&child),
            child,
            log,
            log_reader: Some(log_reader),
            socket,
            disk,
            trace,
            _folders: [disk_folder, socket_folder],
        };
        daemon.wait_for_message(READY, 1)?;
        if daemon.trace.is_some() {
            daemon.pid = only_child(daemon.pid)?;
        }
        Ok(daemon)
    }

    /// The socket for front-ends.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The file behind the disk.
    #[must_use]
    pub fn disk(&self) -> &Path {
        &self.disk
    }

    /// The daemon's process.
    #[must_use]
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// The id of the daemon's thread with this name.
    ///
    /// # Errors
    /// If there is none.
    pub fn thread_id(&self, name: &str) -> Result<Pid> {
        thread_id(self.pid, name)
    }

    /// Reads the disk on the host.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read_disk(&self, sector: u64, bytes: usize) -> Result<Vec<u8>> {
        let mut content = vec![0; bytes];
        File::open(&self.disk)
            .and_then(|file| file.read_exact_at(&mut content, sector * SECTOR_BYTES as u64))
            .with_context(|| format!("reading {}", self.disk.display()))?;
        Ok(content)
    }

    /// The daemon's messages so far.
    #[must_use]
    pub fn messages(&self) -> String {
        self.log.text()
    }

    /// Waits until `count` lines that contain `text` have been written, and checks that no further
    /// one has. The log may lag behind answers to the front-end.
    ///
    /// # Errors
    /// As for [`wait_for_message`](Self::wait_for_message), or if there are more lines.
    pub fn wait_for_exactly(&self, text: &str, count: usize) -> Result<()> {
        self.wait_for_message(text, count)?;
        let written = self.log.count(text);
        ensure!(written == count, "the daemon has written {text:?} {written} times, not {count}");
        Ok(())
    }

    /// Waits until `count` lines that contain `text` have been written.
    ///
    /// # Errors
    /// If the daemon ends before, or does not write them in time.
    pub fn wait_for_message(&self, text: &str, count: usize) -> Result<()> {
        self.log.wait_for(text, count)
    }

    /// Fails if the daemon has ended.
    ///
    /// # Errors
    /// If the daemon has ended.
    pub fn check_running(&mut self) -> Result<()> {
        match self.child.try_wait().context("looking at the daemon")? {
            None => Ok(()),
            Some(status) => bail!("the daemon ended with {status}:\n{}", self.messages()),
        }
    }

    /// The targets of its open descriptors, sorted, without the folder of these descriptors: the
    /// daemon counts its open files after exports have changed.
    ///
    /// # Errors
    /// If /proc cannot be read.
    pub fn descriptors(&self) -> Result<Vec<String>> {
        // A descriptor that was closed since the listing does not count.
        let targets = self.proc_entries("fd")?.into_iter().flat_map(fs::read_link);
        let others = targets.filter(|target| *target != self.proc().join("fd"));
        let mut others: Vec<_> = others.map(|path| path.to_string_lossy().into()).collect();
        others.sort_unstable();
        Ok(others)
    }

    /// The names of its threads, sorted, without threads that come and go with load.
    ///
    /// # Errors
    /// If /proc cannot be read.
    pub fn threads(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in self.proc_entries("task")? {
            if let Ok(name) = fs::read_to_string(entry.join("comm"))
                && !PASSING_THREADS.contains(&name.trim_end())
                && !name.starts_with(KERNEL_THREADS)
            {
                names.push(name.trim_end().to_owned());
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Waits until [`threads`](Self::threads) returns exactly `names`.
    ///
    /// # Errors
    /// If that takes too long.
    pub fn wait_threads(&self, names: &[String]) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let now = self.threads()?;
            if now == names {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "threads were {names:?} and are {now:?}");
            std::thread::yield_now();
        }
    }

    /// The number of lines of its memory map that contain `text`.
    ///
    /// # Errors
    /// If /proc cannot be read.
    pub fn mappings(&self, text: &str) -> Result<usize> {
        let path = self.proc().join("maps");
        let maps = fs::read_to_string(&path).with_context(|| format!("reading {path:?}"))?;
        Ok(maps.lines().filter(|line| line.contains(text)).count())
    }

    /// Resident bytes of its own memory, without files and front-ends' memory.
    ///
    /// # Errors
    /// If /proc cannot be read.
    pub fn own_memory(&self) -> Result<usize> {
        let path = self.proc().join("status");
        let status = fs::read_to_string(&path).with_context(|| format!("reading {path:?}"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<usize>().ok());
        Ok(kib.with_context(|| format!("no RssAnon in {path:?}"))? << 10)
    }

    /// Waits until the daemon has released its last front-end: exactly `descriptors` are open, and
    /// no guest memory is mapped.
    ///
    /// # Errors
    /// If that takes too long, as with a leak.
    pub fn wait_released(&self, descriptors: &[String]) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let (open, mapped) = (self.descriptors()?, self.mappings(GUEST_MEMORY)?);
            if open == descriptors && mapped == 0 {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "the daemon keeps {mapped} mappings of guest memory and {open:#?} instead of \
                 {descriptors:#?}"
            );
            std::thread::yield_now();
        }
    }

    /// Sends SIGTERM and waits for the end. Returns the trace of strace, empty without one.
    ///
    /// # Errors
    /// If the daemon had ended before, does not end in time, or ends with an error.
    pub fn terminate(mut self) -> Result<String> {
        self.check_running()?;
        kill_process(self.pid, Signal::TERM).context("sending SIGTERM to the daemon")?;
        self.wait_end()
    }

    /// Waits for the end of a daemon that was asked to stop.
    ///
    /// # Errors
    /// As for [`terminate`](Self::terminate).
    pub fn wait_end(mut self) -> Result<String> {
        let status: ExitStatus = wait_child(&mut self.child, Instant::now() + LIMIT)
            .with_context(|| format!("after SIGTERM; its messages:\n{}", self.messages()))?;
        ensure!(status.success(), "the daemon ended with {status}:\n{}", self.messages());
        ensure!(!self.socket.exists(), "the daemon has left its socket behind");
        check_calls(&self.messages())?;
        self.trace.as_ref().map_or(Ok(String::new()), |path| {
            fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
        })
    }

    fn proc(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}", self.pid.as_raw_nonzero()))
    }

    fn proc_entries(&self, folder: &str) -> Result<Vec<PathBuf>> {
        let path = self.proc().join(folder);
        let entries = fs::read_dir(&path).with_context(|| format!("reading {path:?}"))?;
        Ok(entries.filter_map(|entry| Some(entry.ok()?.path())).collect())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Both fail only after the daemon's end. Under strace the child is strace, whose end ends
        // the daemon.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(reader) = self.log_reader.take() {
            let _ = reader.join();
        }
        // The test harness shows this only if the test fails.
        eprintln!("--- messages of the daemon ---\n{}", self.messages());
        assert_calls(&self.messages());
    }
}

/// Makes a disk whose start is filled; the rest is a hole.
fn make_disk(path: &Path, bytes: u64) -> Result<()> {
    let file = File::create(path).with_context(|| format!("creating {}", path.display()))?;
    let sectors = bytes.min(FILLED_BYTES as u64) / SECTOR_BYTES as u64;
    let content: Vec<u8> = (0..sectors).flat_map(sector_content).collect();
    file.write_all_at(&content, 0)
        .and_then(|()| file.set_len(bytes))
        .with_context(|| format!("filling {}", path.display()))
}

fn command(
    options: &DaemonOptions,
    socket: &Path,
    disk: &Path,
    trace: Option<&Path>,
) -> Result<Command> {
    let trace = trace.map(|path| path.to_string_lossy().into_owned());
    let calls = options.trace.map(|calls| format!("trace={calls}"));
    // Strace ends with the test, and the program under strace ends with strace.
    let words = match (&calls, &trace) {
        (Some(calls), Some(path)) => &[
            &["setpriv", "--pdeathsig", "KILL", "strace"][..],
            &["-f", "-Y", "-v", "-s", "0", "-e", calls, "-o", path],
        ]
        .concat()[..],
        _ => options.wrapper,
    };
    let mut command = ringhaul_under(words)?;
    command.arg("serve").arg("--socket-path").arg(socket);
    if options.is_scsi {
        let unit = format!("0,blk-file={}", disk.display());
        command.args(["--device", "scsi", "--lun", &unit]);
    } else if !options.extra.iter().any(|option| option == "--disk") {
        command.arg("--blk-file").arg(disk);
    }
    command
        .args(["--engine", &options.engine.to_string()])
        .args(["--cache", &options.cache.to_string()])
        .args(["--num-queues", &options.num_queues.to_string()])
        .args(&options.extra);
    allow_test_folders(&mut command);
    Ok(command)
}

/// The only child of `parent`.
fn only_child(parent: Pid) -> Result<Pid> {
    let pid = parent.as_raw_nonzero();
    let path = format!("/proc/{pid}/task/{pid}/children");
    let children = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let child = children.trim().parse().ok().and_then(Pid::from_raw);
    child.with_context(|| format!("process {pid} has not one child but {children:?}"))
}
