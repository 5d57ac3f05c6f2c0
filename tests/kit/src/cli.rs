//! `ringhaul` as its users run it: command line, output, exit status.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufRead, BufReader, PipeReader, PipeWriter, Read, pipe};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ringhaul_tools::process::wait_child;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};
use tempfile::TempDir;

use crate::server::ringhaul_binary;

/// The time limit of a test for any single step. Only a hang takes this long.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Exit status of a command that cannot start, or whose options make no sense.
pub const EXIT_USAGE: i32 = 2;

/// Exit status of a load generator whose run failed after it had begun.
pub const EXIT_RUN: i32 = 1;

/// The daemon's message that front-ends can connect.
pub const READY: &str = "serving on";

/// `ringhaul`, without arguments.
///
/// # Errors
/// If the program is missing.
pub fn ringhaul() -> Result<Command> {
    ringhaul_under(&[] as &[&str])
}

/// `ringhaul` as the last words of another command line, such as `unshare --mount`.
///
/// # Errors
/// If the program is missing.
pub fn ringhaul_under<S: AsRef<OsStr>>(words: &[S]) -> Result<Command> {
    let words = words.iter().map(AsRef::as_ref);
    // The program ends with the test, however the test ends.
    let mut words = words.chain(["setpriv", "--pdeathsig", "KILL"].map(OsStr::new));
    let mut command = Command::new(words.next().context("a command line has a word")?);
    command.args(words).arg(ringhaul_binary()?).stdin(Stdio::null()).env_remove("RUST_LOG");
    Ok(command)
}

/// `ringhaul serve` of `file` on `socket`, to be completed.
///
/// # Errors
/// If the program is missing.
pub fn serve(socket: &Path, file: &Path) -> Result<Command> {
    let mut command = ringhaul()?;
    command.arg("serve").arg("--socket-path").arg(socket).arg("--blk-file").arg(file);
    Ok(command)
}

/// `ringhaul bench` of the server on `socket`, to be completed.
///
/// # Errors
/// If the program is missing.
pub fn bench(socket: &Path, options: &str) -> Result<Command> {
    let mut command = ringhaul()?;
    command.arg("bench").arg("--socket-path").arg(socket).args(options.split_whitespace());
    Ok(command)
}

/// Folders for one test: disks on a file system with direct I/O, sockets at short paths.
pub struct TestFolders {
    disks: TempDir,
    sockets: TempDir,
}

impl TestFolders {
    /// Makes the folders, with disks in `disks`.
    ///
    /// # Errors
    /// If they cannot be made.
    pub fn new(disks: &str) -> Result<Self> {
        DISKS.get_or_init(|| disks.into());
        let disks = tempfile::tempdir_in(disks).context("making a folder for disks")?;
        let sockets = tempfile::tempdir().context("making a folder for sockets")?;
        Ok(Self { disks, sockets })
    }

    /// The path of the disk `name`.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.disks.path().join(name)
    }

    /// Makes a disk that is one hole.
    ///
    /// # Errors
    /// If the file cannot be made.
    pub fn disk(&self, name: &str, bytes: u64) -> Result<PathBuf> {
        let path = self.path(name);
        File::create(&path)
            .and_then(|file| file.set_len(bytes))
            .with_context(|| format!("making {}", path.display()))?;
        Ok(path)
    }

    /// The path for the socket `name`.
    #[must_use]
    pub fn socket(&self, name: &str) -> PathBuf {
        self.sockets.path().join(name)
    }
}

impl Drop for TestFolders {
    /// Ends daemons that serve at these folders. The successor in an upgrade is no child of a test,
    /// and would outlive one that fails.
    fn drop(&mut self) {
        for folder in [&self.disks, &self.sockets] {
            for (process, command) in daemons_of(folder.path()) {
                eprintln!("--- the test has left a daemon, which is ended: {command} ---");
                // It may have ended.
                let _ = pidfd_send_signal(&process, Signal::KILL);
                let limit = LIMIT.try_into().expect("a minute is a short time");
                let _ = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit));
            }
        }
    }
}

/// The processes of Ringhaul that have a path below `folder` in their command lines.
fn daemons_of(folder: &Path) -> Vec<(OwnedFd, String)> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let found = numbers.filter_map(|number: i32| {
        // The number is that of the same process as long as this is open.
        let process = pidfd_open(Pid::from_raw(number)?, PidfdFlags::empty()).ok()?;
        let command = std::fs::read_to_string(format!("/proc/{number}/cmdline")).ok()?;
        let command = command.replace('\0', " ");
        let program = std::fs::read_link(format!("/proc/{number}/exe")).ok()?;
        let is_ours = program.file_name()? == "ringhaul" && command.contains(folder.to_str()?);
        is_ours.then_some((process, command))
    });
    found.collect()
}

/// The folder of all disks of tests that have [`TestFolders`].
static DISKS: OnceLock<PathBuf> = OnceLock::new();

/// Options that choose the places of later disks and sockets themselves.
const OWN_PLACES: [&str; 4] =
    ["--allow-disk-dir", "--allow-socket-dir", "--control-group", "--takeover"];

/// Lets the sandbox of a daemon that changes as it runs reach the folders of tests, if this is the
/// command of one that does not choose folders itself.
pub(crate) fn allow_test_folders(command: &mut Command) {
    let has = |names: &[&str]| {
        let words = command.get_args().map(|word| word.to_string_lossy().into_owned());
        words
            .map(|word| word.split('=').next().unwrap_or_default().to_owned())
            .any(|word| names.contains(&&*word))
    };
    if !has(&["serve"]) || !has(&["--control", "--config"]) || has(&OWN_PLACES) {
        return;
    }
    let sockets = std::env::temp_dir();
    for disks in DISKS.get().into_iter().chain([&sockets]) {
        command.arg("--allow-disk-dir").arg(disks);
    }
    command.arg("--allow-socket-dir").arg(sockets);
}

/// A command that has ended.
#[derive(Debug)]
pub struct Finished {
    /// Its exit status.
    pub status: ExitStatus,
    /// Its whole standard output.
    pub stdout: String,
    /// Its whole standard error.
    pub stderr: String,
}

impl Finished {
    /// Fails unless the exit status is `code`.
    ///
    /// # Errors
    /// If the exit status differs.
    pub fn expect_code(self, code: i32) -> Result<Self> {
        ensure!(
            self.status.code() == Some(code),
            "{}, not status {code}; on stdout:\n{}on stderr:\n{}",
            self.status,
            self.stdout,
            self.stderr
        );
        Ok(self)
    }

    /// Fails unless the command has refused to start. A refusal has status 2, nothing on standard
    /// output, and one line on standard error that has all `words` and names no error twice.
    ///
    /// # Errors
    /// If the command has not refused.
    pub fn expect_refusal(&self, words: &[&str]) -> Result<()> {
        let seen = format!("{}; on stderr:\n{}", self.status, self.stderr);
        ensure!(self.status.code() == Some(EXIT_USAGE), "not status {EXIT_USAGE}, but {seen}");
        ensure!(self.stdout.is_empty(), "on stdout:\n{}", self.stdout);
        ensure!(self.stderr.lines().count() == 1, "not one line, {seen}");
        ensure!(self.stderr.matches("(os error").count() <= 1, "an error is there twice, {seen}");
        for word in words {
            ensure!(self.stderr.contains(word), "no {word:?}, {seen}");
        }
        Ok(())
    }
}

/// A running command. Dropping it kills it and, if the test fails, shows its output. The test fails
/// if a thread of a daemon was denied a system call.
pub struct Running {
    child: Child,
    lines: Receiver<String>,
    /// Dropped when the command has ended, although its successor may have the same standard error.
    end: Option<PipeWriter>,
    stderr: String,
    stdout: Option<JoinHandle<String>>,
}

impl Running {
    /// Starts `command`.
    ///
    /// # Errors
    /// If its program cannot be started.
    pub fn start(command: &mut Command) -> Result<Self> {
        allow_test_folders(command);
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {:?}", command.get_program()))?;
        let (sender, lines) = channel();
        let stderr = child.stderr.take().context("the command has no stderr")?;
        let (at_end, end) = pipe().context("making a pipe")?;
        std::thread::spawn(move || read_lines(stderr, &at_end, sender));
        let mut stdout = child.stdout.take().context("the command has no stdout")?;
        let stdout = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = stdout.read_to_string(&mut text);
            text
        });
        let (end, stderr, stdout) = (Some(end), String::new(), Some(stdout));
        Ok(Self { child, lines, end, stderr, stdout })
    }

    /// Starts a daemon and waits until a front-end can connect.
    ///
    /// # Errors
    /// If the daemon does not get that far.
    pub fn serve(command: &mut Command) -> Result<Self> {
        let mut running = Self::start(command)?;
        running.wait_for(READY)?;
        Ok(running)
    }

    /// Waits for a line with `text` on standard error, after the lines that earlier waits consumed,
    /// and returns it.
    ///
    /// # Errors
    /// If the command ends without such a line, or writes none in time.
    pub fn wait_for(&mut self, text: &str) -> Result<String> {
        let deadline = Instant::now() + LIMIT;
        while let Some(line) = self.next_line(deadline)? {
            if line.contains(text) {
                return Ok(line);
            }
        }
        bail!("the command has ended without writing {text:?}:\n{}", self.stderr)
    }

    /// Waits for one line with each of `texts`, in any order: for lines of several threads.
    ///
    /// # Errors
    /// If the command ends without one of them, or writes none in time.
    pub fn wait_for_each(&mut self, texts: &[&str]) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        let mut missing = texts.to_vec();
        while !missing.is_empty() {
            let Some(line) = self.next_line(deadline)? else {
                bail!("the command has ended without writing {missing:?}:\n{}", self.stderr);
            };
            if let Some(found) = missing.iter().position(|text| line.contains(text)) {
                missing.swap_remove(found);
            }
        }
        Ok(())
    }

    /// Its standard error, up to the last line that was waited for.
    #[must_use]
    pub fn stderr(&self) -> &str {
        &self.stderr
    }

    /// All of its standard error so far.
    pub fn log(&mut self) -> &str {
        self.stderr.extend(self.lines.try_iter().map(|line| line + "\n"));
        &self.stderr
    }

    /// The process of the command.
    #[must_use]
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// The helper of its sandbox.
    ///
    /// # Errors
    /// If the command has no child.
    pub fn helper(&self) -> Result<Pid> {
        let pid = self.pid().as_raw_nonzero();
        let path = format!("/proc/{pid}/task/{pid}/children");
        let children = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        let child = children.trim().parse().ok().and_then(Pid::from_raw);
        child.with_context(|| format!("process {pid} has no single child but {children:?}"))
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// If the command has ended.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        if let Some(status) = self.child.try_wait().context("looking at the command")? {
            bail!("the command had ended with {status}:\n{}", self.stderr);
        }
        kill_process(self.pid(), signal).with_context(|| format!("sending {signal:?}"))
    }

    /// Waits for the end of the command.
    ///
    /// # Errors
    /// If it does not end in time.
    pub fn finish(mut self) -> Result<Finished> {
        let deadline = Instant::now() + LIMIT;
        while self.next_line(deadline)?.is_some() {}
        let status = wait_child(&mut self.child, deadline)
            .with_context(|| format!("waiting for the end; so far:\n{}", self.stderr))?;
        let stdout = self.stdout.take().map(JoinHandle::join);
        let stdout = stdout.and_then(Result::ok).context("the reader of stdout has failed")?;
        check_calls(&self.stderr)?;
        Ok(Finished { status, stdout, stderr: std::mem::take(&mut self.stderr) })
    }

    /// The next line of standard error; `None` at its end.
    fn next_line(&mut self, deadline: Instant) -> Result<Option<String>> {
        match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                self.stderr.push_str(&line);
                self.stderr.push('\n');
                Ok(Some(line))
            }
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => {
                bail!("the command has neither written more nor ended:\n{}", self.stderr)
            }
        }
    }
}

/// Sends each line of `from`. When `end` hangs up, it has sent all lines that were written by then,
/// and ignores the following ones.
fn read_lines(from: ChildStderr, end: &PipeReader, to: Sender<String>) {
    let mut from = BufReader::new(from);
    loop {
        // Lines in the buffer are not in the pipe.
        if from.buffer().is_empty() {
            let stderr = from.get_ref();
            let mut waits = [PollFd::new(stderr, PollFlags::IN), PollFd::new(end, PollFlags::IN)];
            match poll(&mut waits, None) {
                Ok(_) if waits[0].revents().is_empty() => break,
                Ok(_) => {}
                Err(_) => continue,
            }
        }
        let mut line = String::new();
        if !from.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
            return;
        }
        // Sending fails only after the test has dropped the receiver.
        let _ = to.send(line.trim_end_matches('\n').to_owned());
    }
    drop(to);
    let _ = io::copy(&mut from, &mut io::sink());
}

/// Checks that the tables of system calls in the sandbox list all calls that the daemon has made.
///
/// # Errors
/// If its log reports another.
pub(crate) fn check_calls(log: &str) -> Result<()> {
    let denied = log.lines().find(|line| line.contains("denied the thread"));
    ensure!(denied.is_none(), "{}", denied.unwrap_or_default());
    Ok(())
}

/// Does the same when a test drops a daemon, unless the test fails already.
///
/// # Panics
/// If its log reports another.
pub(crate) fn assert_calls(log: &str) {
    if !std::thread::panicking() {
        check_calls(log).expect("the sandbox of a daemon lists all of its system calls");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only for a command that was already waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
        drop(self.end.take());
        self.stderr.extend(self.lines.iter().map(|line| line + "\n"));
        if !self.stderr.is_empty() {
            // The test harness shows this only if the test fails.
            eprintln!("--- standard error of a command that was ended ---\n{}", self.stderr);
        }
        assert_calls(&self.stderr);
    }
}

/// Runs `command` to its end.
///
/// # Errors
/// If it cannot be started or does not end in time.
pub fn run(command: &mut Command) -> Result<Finished> {
    Running::start(command)?.finish()
}

/// Command lines that must be refused, with the words of each refusal. All are tried, so that one
/// failure hides no other.
#[derive(Default)]
pub struct Refusals {
    failures: Vec<String>,
    tried: usize,
}

impl Refusals {
    /// Runs `command`, which is wrong in the way that `what` names.
    pub fn check(&mut self, what: &str, command: Result<Command>, words: &[&str]) {
        self.tried += 1;
        let result = command.and_then(|mut command| run(&mut command)?.expect_refusal(words));
        if let Err(error) = result {
            self.failures.push(format!("{what}: {error:#}"));
        }
    }

    /// Fails if any command was not refused in the required way.
    ///
    /// # Errors
    /// If there was such a command.
    pub fn finish(self) -> Result<()> {
        ensure!(
            self.failures.is_empty(),
            "{} of {}:\n{}",
            self.failures.len(),
            self.tried,
            self.failures.join("\n")
        );
        Ok(())
    }
}
