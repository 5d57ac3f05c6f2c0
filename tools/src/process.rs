//! Child processes that do not outlive the task, and Ctrl-C that cleans up.
//!
//! A signal only raises a flag. Every wait here checks the flag and returns an error, so that the
//! ordinary way out (`?` and `Drop`) stops children and restores devices.

use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// The interval at which a wait checks its condition.
const WAIT_STEP: Duration = Duration::from_millis(5);

/// The time for a child to end after SIGTERM before it is killed.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// A flag that the user sets by asking this task to end.
#[derive(Clone)]
pub struct Interrupt {
    signal: Arc<AtomicUsize>,
}

impl Interrupt {
    /// Turns SIGINT, SIGTERM and SIGHUP into a flag, for the rest of this process.
    pub fn install() -> Result<Self> {
        let signal = Arc::new(AtomicUsize::new(0));
        for number in [SIGINT, SIGTERM, SIGHUP] {
            let value = usize::try_from(number).context("a signal number is negative")?;
            signal_hook::flag::register_usize(number, Arc::clone(&signal), value)
                .with_context(|| format!("installing a handler for signal {number}"))?;
        }
        Ok(Self { signal })
    }

    /// Makes a flag that no signal sets. For tests, which share their process with other tests.
    pub fn unset_for_test() -> Self {
        Self { signal: Arc::new(AtomicUsize::new(0)) }
    }

    /// Makes a flag that is already set. For tests.
    pub fn set_for_test() -> Self {
        Self { signal: Arc::new(AtomicUsize::new(2)) }
    }

    /// Returns an error once a signal has come.
    pub fn check(&self) -> Result<()> {
        match self.signal.load(Ordering::Relaxed) {
            0 => Ok(()),
            signal => bail!("stopped by signal {signal}; cleaned up"),
        }
    }

    /// Waits until `condition` holds.
    ///
    /// # Errors
    /// If `limit` is over, a signal comes, or `condition` fails.
    pub fn wait_until(
        &self,
        limit: Duration,
        what: &str,
        mut condition: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        let start = Instant::now();
        loop {
            if condition()? {
                return Ok(());
            }
            self.check()?;
            if start.elapsed() > limit {
                bail!("waited {} s for {what}", limit.as_secs());
            }
            std::thread::sleep(WAIT_STEP);
        }
    }
}

/// A child process. Dropping it ends it.
pub struct ManagedChild {
    child: Child,
    name: String,
    interrupt: Interrupt,
    /// True if the child only watches a child of its own, and ends with it.
    is_tracer: bool,
}

impl ManagedChild {
    /// Starts `command`, which errors call `name`.
    pub fn start(name: &str, command: &mut Command, interrupt: &Interrupt) -> Result<Self> {
        interrupt.check()?;
        let child = command
            .spawn()
            .with_context(|| format!("starting {name} ({})", command.get_program().display()))?;
        let interrupt = interrupt.clone();
        Ok(Self { child, name: name.to_owned(), interrupt, is_tracer: false })
    }

    /// Runs `command` to its end, however long that takes.
    pub fn run(name: &str, command: &mut Command, interrupt: &Interrupt) -> Result<()> {
        let status = Self::start(name, command, interrupt)?.wait(Duration::MAX)?;
        ensure!(status.success(), "{name}: {}; its messages are above", describe(status));
        Ok(())
    }

    /// Starts a tracer. Its command line ends with the program to trace.
    ///
    /// Tracers keep signals to themselves, so signals go to the traced program.
    pub fn start_traced(name: &str, command: &mut Command, interrupt: &Interrupt) -> Result<Self> {
        let mut running = Self::start(name, command, interrupt)?;
        running.is_tracer = true;
        Ok(running)
    }

    /// The number of the child process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the child's status if it has ended.
    pub fn status(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| format!("waiting for {}", self.name))
    }

    /// Waits for the child to end on its own.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let interrupt = self.interrupt.clone();
        let what = format!("{} to end", self.name);
        let mut status = None;
        interrupt.wait_until(limit, &what, || {
            status = self.status()?;
            Ok(status.is_some())
        })?;
        // Ctrl-C reaches the child as well, but its status is not the reason then.
        interrupt.check()?;
        status.with_context(|| format!("{} has no exit status", self.name))
    }

    /// Waits until the child listens on `socket`, without connecting to it.
    ///
    /// A connection would be a front-end that comes and goes, which must not be measured.
    pub fn wait_for_socket(&mut self, socket: &Path, limit: Duration) -> Result<()> {
        let interrupt = self.interrupt.clone();
        let what = format!("{} to listen on {}", self.name, socket.display());
        interrupt.wait_until(limit, &what, || {
            if let Some(status) = self.status()? {
                bail!("{} ended with {status} before it listened", self.name);
            }
            is_listening(socket)
        })
    }

    /// Sends SIGTERM and waits for the end, also while the task itself is being stopped.
    ///
    /// # Errors
    /// If the child does not end in time. It is killed then.
    pub fn stop(&mut self) -> Result<ExitStatus> {
        let start = Instant::now();
        let mut sent = false;
        while start.elapsed() < STOP_LIMIT {
            if let Some(status) = self.status()? {
                return Ok(status);
            }
            // A tracer that has just started has no child for the signal yet.
            sent = sent || self.send(Signal::TERM);
            std::thread::sleep(WAIT_STEP);
        }
        self.send(Signal::KILL);
        self.child.kill().with_context(|| format!("killing {}", self.name))?;
        self.child.wait().with_context(|| format!("waiting for {}", self.name))?;
        bail!("{} did not end within {} s of SIGTERM", self.name, STOP_LIMIT.as_secs())
    }

    /// Sends `signal` to the child, or to the processes that it watches. Returns true if there was
    /// any.
    fn send(&self, signal: Signal) -> bool {
        // The child was not waited for, so its pid cannot belong to a different process.
        let child = self.child.id();
        let pids = if self.is_tracer { children(child) } else { vec![child] };
        let pids = pids.into_iter().filter_map(|pid| i32::try_from(pid).ok());
        // A failure means that the process has just ended, which the caller notices anyway.
        pids.filter_map(Pid::from_raw).filter(|pid| kill_process(*pid, signal).is_ok()).count() > 0
    }
}

impl Drop for ManagedChild {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            eprintln!("{error:#}");
        }
    }
}

/// Runs `command` to its end and returns its standard output, without surrounding white space.
///
/// # Errors
/// If it is missing or fails.
pub fn output(command: &mut Command) -> Result<String> {
    Ok(String::from_utf8_lossy(&output_bytes(command)?).trim().to_owned())
}

/// Runs `command` to its end and returns its standard output.
///
/// # Errors
/// If it is missing or fails.
pub fn output_bytes(command: &mut Command) -> Result<Vec<u8>> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output =
        command.output().with_context(|| format!("running {program}; is it installed?"))?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        bail!("{program} ended with {}: {}", describe(output.status), message.trim());
    }
    Ok(output.stdout)
}

/// Repeats `action` until it succeeds, for at most `limit`. Returns its last result.
pub fn retry(limit: Duration, mut action: impl FnMut() -> Result<()>) -> Result<()> {
    let start = Instant::now();
    loop {
        match action() {
            Err(_) if start.elapsed() < limit => std::thread::sleep(WAIT_STEP),
            result => return result,
        }
    }
}

/// Waits for `child` to end on its own.
///
/// # Errors
/// If it still runs at `deadline`.
pub fn wait_child(child: &mut Child, deadline: Instant) -> Result<ExitStatus> {
    if let Some(status) = child.try_wait().context("looking for the end of a process")? {
        return Ok(status);
    }
    // The child was not waited for, so its pid cannot belong to a different process.
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty())
        .context("opening the pidfd of a process")?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if wait_readable(&process, left)? {
            return child.wait().context("waiting for a process");
        }
        ensure!(!left.is_zero(), "process {} has not ended in time", child.id());
    }
}

/// Waits until `file` is readable. Returns false if `limit` was over first, or a signal came.
///
/// # Errors
/// If the kernel refuses to wait.
pub fn wait_readable(file: &impl AsFd, limit: Duration) -> Result<bool> {
    let limit = Timespec::try_from(limit).context("a time limit is out of range")?;
    match poll(&mut [PollFd::new(file, PollFlags::IN)], Some(&limit)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error).context("waiting in poll"),
    }
}

/// Returns the children of a process; none if it has ended.
fn children(pid: u32) -> Vec<u32> {
    let list = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let list = list.unwrap_or_default();
    list.split_ascii_whitespace().filter_map(|child| child.parse().ok()).collect()
}

/// Describes an exit status.
pub fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

/// Returns true if the kernel lists `socket` as a listening socket.
///
/// # Errors
/// If /proc cannot be read.
pub fn is_listening(socket: &Path) -> Result<bool> {
    let table = std::fs::read_to_string("/proc/net/unix").context("reading /proc/net/unix")?;
    Ok(table.lines().any(|line| is_listening_line(line, socket)))
}

/// Returns true if a line of /proc/net/unix describes a listener on `socket`.
fn is_listening_line(line: &str, socket: &Path) -> bool {
    // Num RefCount Protocol Flags Type St Inode Path; __SO_ACCEPTCON is flag 1 << 16.
    let mut fields = line.split_ascii_whitespace();
    let flags = fields.nth(3).and_then(|flags| u32::from_str_radix(flags, 16).ok());
    let path = fields.nth(3);
    flags.is_some_and(|flags| flags & (1 << 16) != 0) && path == socket.to_str()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_listener_is_seen_and_its_absence_too() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        assert!(!is_listening(&socket).unwrap());
        let listener = UnixListener::bind(&socket).unwrap();
        assert!(is_listening(&socket).unwrap());
        drop(listener);
        // A child that a parallel test starts keeps the listener open until its exec.
        let is_gone = || {
            ensure!(!is_listening(&socket)?, "the listener is still there");
            Ok(())
        };
        retry(Duration::from_secs(30), is_gone).unwrap();
    }

    #[test]
    fn a_connected_socket_is_no_listener() {
        let line = "0000000000000000: 00000003 00000000 00000000 0001 03 4242 /tmp/s";
        assert!(!is_listening_line(line, Path::new("/tmp/s")));
        let line = "0000000000000000: 00000002 00000000 00010000 0001 01 4242 /tmp/s";
        assert!(is_listening_line(line, Path::new("/tmp/s")));
        assert!(!is_listening_line(line, Path::new("/tmp/other")));
    }

    #[test]
    fn dropping_a_child_ends_it() {
        let mut command = Command::new("sleep");
        let running =
            ManagedChild::start("sleep", command.arg("1000"), &Interrupt::unset_for_test())
                .unwrap();
        let process = format!("/proc/{}", running.child.id());
        assert!(Path::new(&process).exists());
        drop(running);
        assert!(!Path::new(&process).exists());
    }

    #[test]
    fn stopping_a_tracer_stops_the_traced_process() {
        // The shell plays the tracer. It ends with its child, or by the signal if that goes to the
        // shell.
        let script = "sleep 1000 & wait; exit 7";
        let mut command = Command::new("sh");
        let command = command.args(["-c", script]);
        let mut running =
            ManagedChild::start_traced("sh", command, &Interrupt::unset_for_test()).unwrap();
        let status = running.stop().unwrap();
        assert_eq!(status.code(), Some(7));
    }

    #[test]
    fn a_child_that_ends_early_is_reported() {
        let mut command = Command::new("false");
        let mut running =
            ManagedChild::start("false", &mut command, &Interrupt::unset_for_test()).unwrap();
        let error =
            running.wait_for_socket(Path::new("/nowhere/s"), Duration::from_secs(60)).unwrap_err();
        assert!(error.to_string().contains("ended with exit status: 1"), "{error}");
    }

    #[test]
    fn a_signal_ends_a_wait() {
        let error =
            Interrupt::set_for_test().wait_until(Duration::MAX, "ever", || Ok(false)).unwrap_err();
        assert!(error.to_string().contains("signal 2"), "{error}");
    }

    #[test]
    fn the_end_of_a_process_is_seen_and_its_absence_too() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let error = wait_child(&mut child, Instant::now()).unwrap_err();
        assert!(error.to_string().contains("has not ended"), "{error}");
        child.kill().unwrap();
        let status = wait_child(&mut child, Instant::now() + Duration::from_secs(30)).unwrap();
        assert!(!status.success());
    }
}
