//! A log without a reader.

use std::fs::File;
use std::io::{BufRead, BufReader, PipeReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{READY, TestFolders, ringhaul};
use ringhaul_kit::daemon::{LIMIT, pattern};
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::{Frontend, Setup, blk};
use ringhaul_kit::server::Engine;
use ringhaul_tools::process::wait_child;
use rustix::process::{Pid, Signal, kill_process};

use crate::scene::make_written;

for_each_engine! { a_log_without_a_reader }

/// A daemon with two exports on separate files and a pipe as its standard error. Dropping it kills
/// the daemon.
pub(crate) struct Unread {
    child: Child,
    lines: BufReader<PipeReader>,
    pub(crate) sockets: [PathBuf; 2],
    folders: TestFolders,
}

impl Unread {
    pub(crate) fn start(engine: Engine) -> Result<Self> {
        let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
        for name in NAMES {
            make_written(&folders.path(&format!("{name}.img")))?;
        }
        let sockets = NAMES.map(|name| folders.socket(name));
        let (child, lines) = serve(engine, &folders, &sockets)?;
        let mut this = Self { child, lines, sockets, folders };
        this.wait_for(READY)?;
        this.wait_for(READY)?;
        Ok(this)
    }

    /// Replaces the daemon by a new one, because a daemon logs only a few lines per minute about
    /// front-ends.
    pub(crate) fn start_again(&mut self, engine: Engine) -> Result<()> {
        self.terminate()?;
        (self.child, self.lines) = serve(engine, &self.folders, &self.sockets)?;
        self.wait_for(READY)?;
        self.wait_for(READY)
    }

    /// Reads lines up to one that contains `text`.
    fn wait_for(&mut self, text: &str) -> Result<()> {
        let mut line = String::new();
        while !line.contains(text) {
            line.clear();
            ensure!(self.lines.read_line(&mut line)? > 0, "the daemon has ended");
        }
        Ok(())
    }

    /// Fills the pipe to its last byte, through a separate open file that does not block.
    pub(crate) fn fill(&self) -> Result<()> {
        let path = format!("/proc/self/fd/{}", self.lines.get_ref().as_raw_fd());
        let flags = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits())?;
        let mut writer = File::options().write(true).custom_flags(flags).open(&path)?;
        writer.write_all(FILLING.as_bytes()).context("the pipe was full before")?;
        for bytes in [4096, 1] {
            while writer.write(&vec![b'x'; bytes]).is_ok() {}
        }
        Ok(())
    }

    /// Reads lines up to one behind the filling that contains `text`.
    pub(crate) fn wait_behind_filling(&mut self, text: &str) -> Result<()> {
        self.wait_for(FILLING)?;
        self.wait_for(text)
    }

    /// Ends the daemon by SIGTERM, without reading its last lines.
    pub(crate) fn terminate(&mut self) -> Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::TERM).context("sending SIGTERM")?;
        let status = wait_child(&mut self.child, Instant::now() + LIMIT)?;
        ensure!(status.success(), "the daemon ended with {status}");
        Ok(())
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        // These fail only if the daemon has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a daemon with an export for each name, and takes its standard error.
fn serve(
    engine: Engine,
    folders: &TestFolders,
    sockets: &[PathBuf],
) -> Result<(Child, BufReader<PipeReader>)> {
    let (reader, writer) = std::io::pipe().context("making a pipe")?;
    let mut command = ringhaul()?;
    command.args(["serve", "--engine", &engine.to_string()]).stderr(writer);
    for (name, socket) in NAMES.iter().zip(sockets) {
        let (socket, file) = (socket.display(), folders.path(&format!("{name}.img")));
        command.args(["--export", &format!("socket-path={socket},blk-file={}", file.display())]);
    }
    let child = command.spawn().context("starting the daemon")?;
    // Dropping the command closes its copy of the pipe.
    Ok((child, BufReader::new(reader)))
}

const NAMES: [&str; 2] = ["bad", "good"];

/// The first line of the filling of a pipe.
const FILLING: &str = "---filling---\n";

/// Guests cause lines that no reader takes, and no request waits for that.
fn a_log_without_a_reader(engine: Engine) -> Result<()> {
    let mut daemon = Unread::start(engine)?;
    daemon.fill()?;
    drive(&daemon.sockets[0], &daemon.sockets[1])?;
    daemon.terminate()
}

/// Sends invalid requests from one guest, while the good guest is served.
fn drive(bad: &Path, good: &Path) -> Result<()> {
    let mut bad = Frontend::attach(bad, &Setup::default())?;
    let mut good = Frontend::attach(good, &Setup::default())?;
    for number in 0..100 {
        let answer = bad.request(0, 0xdead, 0, &[], 512)?;
        ensure!(answer.status == blk::UNSUPP, "an unknown request ended with {answer:?}");
        let answer = bad.request(1, blk::IN, 1 << 40, &[], 512)?;
        ensure!(answer.status == blk::IOERR, "a read beyond the end ended with {answer:?}");
        let data = pattern(number, 4096);
        good.write(0, 8 * number, &data).context("the other export")?;
        ensure!(good.read(1, 8 * number, 4096)? == data, "other data than was written");
    }
    Ok(())
}
