//! `ringhaul demo`: the whole path once, from a sample disk to figures.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGINT, SIGTERM};

/// The size of a piece. Every second piece of the sample disk has data, the rest is a hole.
const PIECE_BYTES: usize = 1 << 20;

/// The time limit for the daemon to open its disk and listen.
const START_LIMIT: Duration = Duration::from_secs(30);

/// The interval of checks for the next step.
const INTERVAL: Duration = Duration::from_millis(10);

/// The most MiB of a sample disk.
const MIB_MAX: u64 = 1 << 20;

/// Options of `ringhaul demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// The size of the sample disk in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 256,
          value_parser = clap::value_parser!(u64).range(2..=MIB_MAX))]
    size: u64,
    /// The number of seconds to drive it for.
    #[arg(long, value_name = "SECONDS", default_value_t = 10,
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    runtime: u64,
}

/// Makes a sample disk, serves it with a daemon of its own, drives it, and removes everything.
pub(crate) fn run(args: &DemoArgs) -> Result<ExitCode> {
    // A terminal interrupts the daemon and the load generator too. This program stays to clean up.
    let interrupted = Arc::<AtomicBool>::default();
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted))
            .context("cannot set up the handling of signals")?;
    }
    // Dropped last: the daemon ends before its files are removed.
    let folder = Folder::new()?;
    let (disk, socket) = (folder.0.join("disk.img"), folder.0.join("socket"));
    print(format_args!("Sample disk of {} MiB, half of it holes: {}", args.size, disk.display()))?;
    make_disk(&disk, args.size, &interrupted)
        .with_context(|| format!("cannot write {}", disk.display()))?;

    let program = std::env::current_exe().context("cannot find the path of this program")?;
    let mut serve = Command::new(&program);
    serve.arg("serve").arg("--socket-path").arg(&socket).arg("--blk-file").arg(&disk);
    print(format_args!("Serving it:\n  {}", line_of(&serve)))?;
    let mut daemon = Program::start("ringhaul serve", &mut serve)?;
    let until = Instant::now() + START_LIMIT;
    daemon.wait_until(&interrupted, |daemon| {
        if let Some(status) = daemon.status()? {
            bail!("ringhaul serve ended with {status}; its message is above");
        }
        ensure!(Instant::now() < until, "ringhaul serve did not listen within 30 seconds");
        Ok(UnixStream::connect(&socket).is_ok())
    })?;

    let mut bench = Command::new(&program);
    bench.arg("bench").arg("--socket-path").arg(&socket);
    bench.args(["--rw", "randread", "--bs", "4k", "--iodepth", "32", "--eta", "always"]);
    bench.args(["--runtime", &args.runtime.to_string()]);
    let seconds = args.runtime;
    print(format_args!("Driving it for {seconds} s, as a VM would:\n  {}", line_of(&bench)))?;
    let mut bench = Program::start("ringhaul bench", &mut bench)?;
    end(&mut bench, &interrupted)?;
    daemon.terminate();
    end(&mut daemon, &interrupted)?;
    ensure!(!socket.exists(), "ringhaul serve left its socket {} behind", socket.display());
    drop(folder);
    print(format_args!("Stopped; the sample disk and the socket are removed."))?;
    Ok(ExitCode::SUCCESS)
}

/// Waits for the end of a command, which has to succeed.
fn end(program: &mut Program, interrupted: &AtomicBool) -> Result<()> {
    let mut status = None;
    program.wait_until(interrupted, |program| {
        status = program.status()?;
        Ok(status.is_some())
    })?;
    status.map_or(Ok(()), |status| program.check(status))
}

/// Prints a line at once: the next step may take long.
fn print(line: std::fmt::Arguments<'_>) -> Result<()> {
    let mut output = io::stdout().lock();
    let written = writeln!(output, "{line}").and_then(|()| output.flush());
    written.context("cannot write to standard output")
}

/// A folder that is removed with its files.
struct Folder(PathBuf);

impl Folder {
    /// Makes a folder that no other user can enter.
    fn new() -> Result<Self> {
        use std::os::unix::fs::DirBuilderExt as _;

        let name = format!("ringhaul-demo-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let made = std::fs::DirBuilder::new().mode(0o700).create(&path);
        made.with_context(|| format!("cannot create {} (TMPDIR sets its folder)", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::warn!("cannot remove {}: {error}", self.0.display());
        }
    }
}

/// A command of this program in a process that ends with this one.
struct Program {
    name: &'static str,
    child: Child,
}

impl Program {
    fn start(name: &'static str, command: &mut Command) -> Result<Self> {
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        Ok(Self { name, child })
    }

    /// Waits until `is_done`, or until a signal has come to this program.
    fn wait_until(
        &mut self,
        interrupted: &AtomicBool,
        mut is_done: impl FnMut(&mut Self) -> Result<bool>,
    ) -> Result<()> {
        while !is_done(self)? {
            ensure!(!interrupted.load(Ordering::Relaxed), "interrupted");
            std::thread::sleep(INTERVAL);
        }
        Ok(())
    }

    /// The exit status, once the process has ended.
    fn status(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| format!("cannot wait for {}", self.name))
    }

    /// Fails if the process has ended with an error.
    fn check(&self, status: ExitStatus) -> Result<()> {
        ensure!(status.success(), "{} ended with {status}; its message is above", self.name);
        Ok(())
    }

    /// Stops the process as `kill` does.
    fn terminate(&self) {
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if let Some(id) = id
            && let Err(error) = kill_process(id, Signal::TERM)
        {
            tracing::warn!("cannot stop {}: {error}", self.name);
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.terminate();
            // Both commands end within bounded time.
            let _ = self.child.wait();
        }
    }
}

/// Writes a disk of `size_mib` MiB with random data in every second piece, unless a signal comes.
fn make_disk(path: &Path, size_mib: u64, interrupted: &AtomicBool) -> Result<()> {
    let mut disk = File::create_new(path)?;
    let size = size_mib << 20;
    disk.set_len(size)?;
    let mut random = File::open("/dev/urandom")?;
    let mut piece = vec![0; PIECE_BYTES];
    for position in (0..size).step_by(2 * PIECE_BYTES) {
        ensure!(!interrupted.load(Ordering::Relaxed), "interrupted");
        random.read_exact(&mut piece)?;
        disk.seek(SeekFrom::Start(position))?;
        disk.write_all(&piece)?;
    }
    // Otherwise the kernel would write this data back during the measurement.
    Ok(disk.sync_all()?)
}

/// Formats a command line for display; its arguments have no spaces here.
fn line_of(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words = [program].into_iter().chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn the_sample_disk_is_half_holes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        make_disk(&path, 4, &AtomicBool::new(false)).unwrap();
        assert!(make_disk(&folder.path().join("other"), 4, &AtomicBool::new(true)).is_err());
        let metadata = path.metadata().unwrap();
        assert_eq!(metadata.len(), 4 << 20);
        assert!(metadata.blocks() * 512 <= 2 << 20, "{} blocks", metadata.blocks());
        let bytes = std::fs::read(&path).unwrap();
        assert!(bytes[..PIECE_BYTES].iter().any(|byte| *byte != 0));
        assert!(bytes[PIECE_BYTES..2 * PIECE_BYTES].iter().all(|byte| *byte == 0));
    }
}
