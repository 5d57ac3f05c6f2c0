//! A log that is no longer read.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use ringhaul_kit::cli::{LIMIT, READY, TestFolders, ringhaul};
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::{Frontend, Setup, blk};
use ringhaul_kit::server::Engine;
use ringhaul_tools::process::wait_child;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};

for_each_engine! {
    guests_continue_and_the_daemon_ends,
}

/// A daemon with two exports and a pipe as its standard error. Dropping it kills the daemon.
struct Logging {
    child: Child,
    lines: BufReader<PipeReader>,
    /// A second write end, with which the test fills the pipe.
    filler: File,
    fill_bytes: usize,
}

impl Logging {
    fn start(folders: &TestFolders, options: &[&str]) -> Result<Self> {
        let (reader, writer) = std::io::pipe()?;
        let filler = filler_of(&writer)?;
        let mut command = ringhaul()?;
        command.arg("serve").args(options).stderr(writer);
        for name in ["bad", "good"] {
            let (file, socket) = (folders.disk(name, 16 << 20)?, folders.socket(name));
            let export = format!("socket-path={},blk-file={}", socket.display(), file.display());
            command.arg("--export").arg(export);
        }
        let child = command.spawn().context("starting the daemon")?;
        // The command holds a copy of the pipe, too.
        drop(command);
        let mut this = Self { child, lines: BufReader::new(reader), filler, fill_bytes: 0 };
        this.wait_for(READY)?;
        this.wait_for(READY)?;
        Ok(this)
    }

    fn wait_for(&mut self, text: &str) -> Result<String> {
        let mut line = String::new();
        while self.lines.read_line(&mut line)? > 0 {
            if line.contains(text) {
                return Ok(line);
            }
            line.clear();
        }
        bail!("the daemon has not written {text:?}")
    }

    /// Fills the pipe completely.
    fn fill(&mut self) -> Result<()> {
        for piece in [&[b'.'; 4096][..], b"."] {
            loop {
                match self.filler.write(piece) {
                    Ok(count) => self.fill_bytes += count,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error).context("filling a pipe"),
                }
            }
        }
        ensure!(self.fill_bytes > 0, "the pipe was full before");
        Ok(())
    }

    /// Reads the bytes that [`Logging::fill`] has written.
    fn drain(&mut self) -> Result<()> {
        let mut bytes = vec![0; std::mem::take(&mut self.fill_bytes)];
        self.lines.read_exact(&mut bytes).context("emptying a pipe")
    }

    fn terminate(&mut self) -> Result<ExitStatus> {
        kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        wait_child(&mut self.child, Instant::now() + LIMIT).context("after SIGTERM")
    }
}

impl Drop for Logging {
    fn drop(&mut self) {
        // These fail only if the daemon has ended and was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Opens the same pipe again: writes that block for the daemon must not block for the test.
fn filler_of(writer: &PipeWriter) -> Result<File> {
    let name = format!("/proc/self/fd/{}", writer.as_raw_fd());
    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(&name, flags, Mode::empty()).context("opening a pipe by name")?;
    Ok(File::from(file))
}

/// Makes a request that causes a line in the log.
fn misbehave(frontend: &mut Frontend) -> Result<()> {
    let answer = frontend.request(0, 77, 0, &[], 512)?;
    ensure!(answer.status == blk::UNSUPP, "{answer:?}");
    Ok(())
}

fn attach(socket: &Path) -> Result<Frontend> {
    Frontend::attach(socket, &Setup::default())
}

fn check(engine: Engine, options: &[&str]) -> Result<()> {
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let engine = engine.to_string();
    let options = [&["--engine", &engine, "--num-queues", "2"], options].concat();
    let mut daemon = Logging::start(&folders, &options)?;
    daemon.fill()?;
    let mut bad = attach(&folders.socket("bad"))?;
    let mut good = attach(&folders.socket("good"))?;
    for round in 0..20 {
        misbehave(&mut bad)?;
        let data = [round; 4096];
        good.write(0, 8, &data).context("the other export")?;
        ensure!(good.read(1, 8, 4096)? == data, "the other export");
    }
    // Lines that were held back are written when the log is read again.
    daemon.drain()?;
    daemon.wait_for("request type 77")?;
    drop((bad, good));
    daemon.fill()?;
    let status = daemon.terminate()?;
    ensure!(status.code() == Some(0), "SIGTERM ended it with {status}");
    Ok(())
}

fn guests_continue_and_the_daemon_ends(engine: Engine) -> Result<()> {
    check(engine, &[])
}

#[test]
fn a_log_in_json() -> Result<()> {
    check(Engine::Threads, &["--log-format", "json"])
}

/// A failing start does not wait for a reader of its message.
#[test]
fn an_end_by_an_error() -> Result<()> {
    let (reader, writer) = std::io::pipe()?;
    let mut filler = filler_of(&writer)?;
    while filler.write(&[b'.'; 4096]).is_ok() {}
    let mut command = ringhaul()?;
    command.args(["serve", "--socket-path", "/nonexistent/socket", "--blk-file", "/dev/null"]);
    let mut child = command.stderr(writer).spawn().context("starting the daemon")?;
    let status = wait_child(&mut child, Instant::now() + LIMIT)?;
    ensure!(status.code() == Some(2), "it ended with {status}");
    drop(reader);
    Ok(())
}

/// More lines at once than the pipe and the daemon's queue can hold.
#[test]
fn dropped_lines_are_counted() -> Result<()> {
    const EXPORTS: usize = 150;
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    // Lines begin with the path of the disk, so a long path fills the pipe.
    let folder = (0..15).fold(folders.path("long"), |path, _| path.join("x".repeat(200)));
    std::fs::create_dir_all(&folder)?;
    let file = folder.join("disk.img");
    File::create(&file)?.set_len(1 << 20)?;
    let (reader, writer) = std::io::pipe()?;
    let mut command = ringhaul()?;
    let filler = filler_of(&writer)?;
    command.args(["serve", "--engine", "threads", "--read-only"]).stderr(writer);
    let socket = |number: usize| folders.socket(&number.to_string());
    for number in 0..EXPORTS {
        let (socket, file) = (socket(number), file.display());
        command.arg("--export").arg(format!("socket-path={},blk-file={file}", socket.display()));
    }
    let child = command.spawn().context("starting the daemon")?;
    drop(command);
    let lines = BufReader::new(reader);
    let mut daemon = Logging { child, lines, filler, fill_bytes: 0 };
    // The daemon serves although it cannot log that.
    let deadline = Instant::now() + LIMIT;
    let mut frontend = loop {
        match attach(&socket(EXPORTS - 1)) {
            Ok(frontend) => break frontend,
            Err(error) => ensure!(Instant::now() < deadline, "it does not serve: {error:#}"),
        }
        std::thread::yield_now();
    };
    frontend.read(0, 0, 512)?;
    let line = daemon.wait_for("lines were dropped: the log was not read in time")?;
    let count = line.split_whitespace().rev().find_map(|word| word.parse::<u64>().ok());
    ensure!(count.is_some_and(|count| count > 0), "{line}");
    drop(frontend);
    let status = daemon.terminate()?;
    ensure!(status.code() == Some(0), "SIGTERM ended it with {status}");
    Ok(())
}
