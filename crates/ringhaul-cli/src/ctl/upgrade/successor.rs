//! The process that is to take over. This program starts itself once more; that process moves to
//! the place of the daemon and becomes the new program. So no step runs between `fork` and `exec`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, bail, ensure};
use ringhaul::options::SandboxMode;
use ringhaul::spec::process::SuccessorStart;
use ringhaul::takeover::wire::{Receiver, send_fds};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, chdir, getegid, geteuid, pidfd_open, pidfd_send_signal, setsid,
};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};
use serde::{Deserialize, Serialize};

use super::daemon_process::DaemonProcess;
use super::place::ProcessPlace;

/// The hidden command.
pub(crate) const COMMAND: &str = "become-successor";
/// Its option for a process without a parent.
const ORPHAN: &str = "--orphan";

/// The descriptors that a daemon passes on: standard output and standard error.
pub(super) const STREAMS: usize = 2;

/// The variable of a service manager that identifies the daemon by its control group.
const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";

/// The start of the variables that libraries of Ceph read.
const CEPH: &str = "CEPH_";

/// The variable with the configuration files of Ceph.
const CEPH_CONF: &str = "CEPH_CONF";

/// The variables of the daemon that the new program keeps.
const VARIABLES: [&str; 14] = [
    "PATH",
    "HOME",
    "LANG",
    "TZ",
    "RUST_LOG",
    "RUST_BACKTRACE",
    "NO_COLOR",
    NOTIFY_SOCKET,
    "WATCHDOG_USEC",
    "JOURNAL_STREAM",
    "INVOCATION_ID",
    "STATE_DIRECTORY",
    "RUNTIME_DIRECTORY",
    "FDSTORE",
];

/// The time that a process with a refusal has to end by itself.
const END_MAX: Duration = Duration::from_secs(5);

/// The instructions to the process.
#[derive(Serialize, Deserialize)]
struct Instructions {
    daemon: i32,
    /// The user and the group that the kernel reported for the daemon.
    user: u32,
    group: u32,
    program: PathBuf,
    /// The process stays in its place, which is that of the daemon's unit.
    in_unit: bool,
    start: SuccessorStart,
    caller: CallerWord,
    /// The mode of its sandbox that the daemon states.
    sandbox: Option<SandboxMode>,
}

/// The part of the start that the caller decides, and not the daemon.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct CallerWord {
    /// The mode of the sandbox. `None`: that of the daemon, if this confines the new process.
    pub(super) sandbox: Option<SandboxMode>,
    /// Variables of Ceph.
    variables: BTreeMap<String, String>,
}

impl CallerWord {
    pub(super) fn new(sandbox: Option<SandboxMode>) -> Self {
        let of_ceph = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        });
        let variables = of_ceph.filter(|(name, _)| name.starts_with(CEPH)).collect();
        Self { sandbox, variables }
    }
}

/// A program that is to take over.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub(crate) path: PathBuf,
    /// Its place is that of this command, a command of the daemon's unit. Nothing happens if the
    /// daemon runs the program already.
    pub(crate) in_unit: bool,
}

/// A process that is to take over. Dropping this kills it.
pub(super) struct Successor {
    id: u32,
    /// `None`: it runs on.
    handle: Option<Handle>,
}

/// A process as this one refers to it.
enum Handle {
    Child(Child),
    /// A child of the first process of the system. systemd waits for the end of its own children,
    /// and in a container with cgroups of version 1 for the end of no other process.
    Orphan(OwnedFd),
}

impl Handle {
    /// Starts this program once more, with a socket as its standard input.
    fn start(socket: UnixStream, is_orphan: bool) -> Result<(u32, Self)> {
        let mut command = Command::new("/proc/self/exe");
        // Nothing of this environment reaches the new program.
        command.arg0("ringhaul").arg(COMMAND).env_clear().stdin(OwnedFd::from(socket));
        if !is_orphan {
            let child = command.stdout(Stdio::null()).spawn().context("cannot start a process")?;
            return Ok((child.id(), Self::Child(child)));
        }
        let output = command.arg(ORPHAN).stderr(Stdio::inherit()).output();
        let output = output.context("cannot start a process")?.stdout;
        let id = String::from_utf8_lossy(&output).trim().parse().ok().and_then(Pid::from_raw);
        let id = id.context("no process was started")?;
        // It waits for instructions, so that no other process can have its id.
        let process = pidfd_open(id, PidfdFlags::empty()).context("cannot refer to a process")?;
        Ok((id.as_raw_pid().unsigned_abs(), Self::Orphan(process)))
    }

    /// The status of a process that has ended.
    fn try_wait(&mut self) -> std::io::Result<Option<String>> {
        match self {
            Self::Child(child) => Ok(child.try_wait()?.map(|status| status.to_string())),
            Self::Orphan(process) => {
                let status = || "its status is in the log of the service manager".to_owned();
                Ok(has_ended(process, Duration::ZERO)?.then(status))
            }
        }
    }

    /// Kills the process. That fails only if it has ended.
    fn kill(&mut self) {
        match self {
            Self::Child(child) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            Self::Orphan(process) => {
                let _ = pidfd_send_signal(&*process, Signal::KILL);
                let _ = has_ended(process, END_MAX);
            }
        }
    }
}

/// Returns true if a process ends within this time.
fn has_ended(process: &OwnedFd, time: Duration) -> std::io::Result<bool> {
    let time = Timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: 0 };
    Ok(poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&time))? > 0)
}

impl Successor {
    /// Starts `program` in the place of `daemon`.
    ///
    /// # Errors
    ///
    /// When this process may not enter that place, or the program cannot be started there.
    pub(super) fn start(
        program: &Program,
        (start, sandbox): (SuccessorStart, Option<SandboxMode>),
        caller: CallerWord,
        daemon: DaemonProcess,
        streams: &[OwnedFd],
    ) -> Result<Self> {
        let Program { path: program, in_unit } = program.clone();
        let (mut ours, theirs) = UnixStream::pair().context("cannot create a socket")?;
        let (id, handle) = Handle::start(theirs, in_unit)?;
        let successor = Self { id, handle: Some(handle) };
        let DaemonProcess { id, fd, user, group } = daemon;
        let daemon = id.as_raw_pid();
        let instructions =
            Instructions { daemon, user, group, program, in_unit, start, caller, sandbox };
        let mut line = serde_json::to_vec(&instructions)?;
        line.push(b'\n');
        let sent = ours.write_all(&line);
        let sent = sent.and_then(|()| send_fds(&ours, [&fd].into_iter().chain(streams)));
        let mut error = String::new();
        // The end comes when the program has started.
        let read = ours.read_to_string(&mut error);
        ensure!(error.is_empty(), "{error}");
        sent.and(read.map(drop)).context("cannot instruct the new process")?;
        Ok(successor)
    }

    pub(super) fn process(&self) -> u32 {
        self.id
    }

    /// The status of the process, if it has ended.
    pub(super) fn try_wait(&mut self) -> std::io::Result<Option<String>> {
        self.handle.as_mut().map_or(Ok(None), Handle::try_wait)
    }

    /// Lets the process run on.
    pub(super) fn detach(&mut self) {
        self.handle = None;
    }

    /// Ends a process that was refused: it writes its error to the log before it ends by itself.
    pub(super) fn end(&mut self) {
        let until = Instant::now() + END_MAX;
        while Instant::now() < until && matches!(self.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        self.handle.iter_mut().for_each(Handle::kill);
    }
}

/// Becomes the program that a socket at standard input names. Its end without a message is the
/// success. With `orphan`, starts itself without that, prints the id of the process, and ends
/// before it.
pub(crate) fn become_successor(orphan: bool) -> ExitCode {
    if orphan {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("ringhaul").arg(COMMAND).stdout(Stdio::null());
        return match command.spawn() {
            Ok(child) => match writeln!(std::io::stdout(), "{}", child.id()) {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ExitCode::FAILURE,
            },
            Err(_) => ExitCode::FAILURE,
        };
    }
    let socket = std::io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from);
    let Ok(mut socket) = socket else { return ExitCode::FAILURE };
    let Err(error) = try_become(&socket);
    // The starter may have gone.
    let _ = socket.write_all(format!("{error:#}").as_bytes());
    ExitCode::FAILURE
}

fn try_become(socket: &UnixStream) -> Result<std::convert::Infallible> {
    let mut receiver = Receiver::new(socket.try_clone()?);
    let line = receiver.line()?.context("no instructions have come")?;
    let Instructions { daemon, user, group, program, in_unit, start, caller, sandbox } =
        serde_json::from_slice(&line)?;
    let fds: [OwnedFd; 1 + STREAMS] = receiver
        .fds(1 + STREAMS)?
        .try_into()
        .map_err(|_| Error::msg("the descriptors are not complete"))?;
    let [process, output, errors] = fds;
    let null = File::open("/dev/null").context("cannot open /dev/null")?;
    let daemon = Pid::from_raw(daemon).context("the daemon has no id")?;
    let place = if in_unit {
        check_unit(daemon, user, group)?;
        None
    } else {
        let place = ProcessPlace::read(daemon)?;
        place.check_owner(user, group)?;
        Some(place)
    };
    // After the last look into /proc: the id belonged to this process until then.
    check_runs(&process)?;
    check_log_options(&start.log_options)?;
    // The units forbid new privileges, so that their processes count as confined.
    let is_confined = place.as_ref().is_none_or(ProcessPlace::is_confined);
    let sandbox = chosen_sandbox(caller.sandbox, sandbox, is_confined);
    match place {
        Some(place) => {
            place.enter(start.environment.contains_key(NOTIFY_SOCKET))?;
            place.adopt_rights()?;
        }
        None => drop(setsid().context("cannot begin a session")?),
    }
    chdir(&start.directory).with_context(|| {
        let folder = start.directory.display();
        format!("cannot work in {folder}, the daemon's working directory, with its rights")
    })?;
    // With the rights of the daemon, in its folders.
    check_ceph(&start.environment, &caller.variables)?;
    dup2_stdin(null)?;
    dup2_stdout(output)?;
    dup2_stderr(errors)?;
    Err(execute(&program, &start, sandbox))
}

/// Checks that this process has the user, the group and the control groups of the daemon, as a
/// command of its unit has them. Other settings of the unit hold for both.
fn check_unit(daemon: Pid, user: u32, group: u32) -> Result<()> {
    let own = (geteuid().as_raw(), getegid().as_raw());
    let remedy = "--in-unit belongs into ExecReload= of the daemon's unit";
    ensure!(
        own == (user, group),
        "this command runs as user {}, group {}, and the daemon as user {user}, group {group}; \
         {remedy}",
        own.0,
        own.1
    );
    let cgroups = |process: &str| {
        let path = format!("/proc/{process}/cgroup");
        std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))
    };
    let is_in_unit = cgroups("self")? == cgroups(&daemon.as_raw_pid().to_string())?;
    ensure!(is_in_unit, "this command is in another control group than the daemon; {remedy}");
    Ok(())
}

/// Checks that the process has not ended: a new process might have its id.
fn check_runs(process: &OwnedFd) -> Result<()> {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    match poll(&mut fds, Some(&Timespec::default()))? {
        0 => Ok(()),
        _ => bail!("the daemon has ended"),
    }
}

/// Becomes the program. Returns if that fails.
fn execute(program: &Path, start: &SuccessorStart, sandbox: Option<SandboxMode>) -> Error {
    let SuccessorStart { control, log_options, environment, .. } = start;
    let environment: &BTreeMap<String, String> = environment;
    let mut command = Command::new(program);
    command.args(log_options).args(["serve", "--takeover"]).arg(control);
    command.args(sandbox.map(|mode| format!("--sandbox={mode}")));
    let environment = environment.iter().filter(|(name, _)| is_kept(name));
    let error = command.env_clear().envs(environment).exec();
    Error::new(error).context(format!("cannot start {}", program.display()))
}

/// Checks that all options are about the log: a daemon chooses nothing else for its successor.
fn check_log_options(options: &[String]) -> Result<()> {
    let is_known =
        |option: &&String| option.starts_with("--log=") || option.starts_with("--log-format=");
    match options.iter().find(|option| !is_known(option)) {
        None => Ok(()),
        Some(other) => bail!("the daemon passes the option {other:?}, which is not about the log"),
    }
}

/// The mode of the sandbox that the new program is told: that of the caller, or else one that
/// confines nothing if the daemon states it, and the kernel shows that the daemon is not confined.
/// `None`: the new program refuses a mode that confines nothing.
fn chosen_sandbox(
    caller: Option<SandboxMode>,
    daemon: Option<SandboxMode>,
    is_confined: bool,
) -> Option<SandboxMode> {
    caller.or(daemon.filter(|mode| !mode.confines() && !is_confined))
}

/// Checks the variables of Ceph, which choose configuration and libraries. Code inside the sandbox
/// of the old process could set them. Each has the same value in the caller's environment, or names
/// files to which root alone writes.
fn check_ceph(
    environment: &BTreeMap<String, String>,
    caller: &BTreeMap<String, String>,
) -> Result<()> {
    for (name, value) in environment.iter().filter(|(name, _)| name.starts_with(CEPH)) {
        let is_of_root = |path: &str| {
            let found = std::fs::metadata(path.trim());
            found.is_ok_and(|found| found.uid() == 0 && found.mode() & 0o022 == 0)
        };
        let is_known = caller.get(name) == Some(value)
            || name == CEPH_CONF && value.split(',').all(is_of_root);
        ensure!(
            is_known,
            "the daemon runs with {name}={value:?}, which code in its place could have chosen for \
             the new process; if it is right, set it for this command too: {name}={value:?} \
             ringhaul ctl upgrade ..."
        );
    }
    Ok(())
}

/// Returns true for a variable that this program or a library of it reads. Code inside the sandbox
/// of the old process could set variables of the loader, for example, and so leave the sandbox.
fn is_kept(name: &str) -> bool {
    const PREFIXES: [&str; 3] = ["LC_", "RINGHAUL_", CEPH];
    PREFIXES.iter().any(|prefix| name.starts_with(prefix)) || VARIABLES.contains(&name)
}

#[cfg(test)]
mod tests {
    use rustix::process::{WaitOptions, kill_process, waitpid};

    use super::*;

    #[test]
    fn the_old_process_chooses_no_libraries() {
        for name in ["LD_PRELOAD", "LD_LIBRARY_PATH", "GLIBC_TUNABLES", "GCONV_PATH", "OLD_NAME"] {
            assert!(!is_kept(name), "{name}");
        }
        for name in ["PATH", "NOTIFY_SOCKET", "RUST_LOG", "LC_ALL", "CEPH_CONF", "RINGHAUL_X"] {
            assert!(is_kept(name), "{name}");
        }
    }

    #[test]
    fn the_old_process_chooses_options_on_the_log_alone() {
        let check = |options: &[&str]| {
            let options: Vec<String> = options.iter().map(ToString::to_string).collect();
            check_log_options(&options)
        };
        check(&[]).unwrap();
        check(&["--log=debug", "--log-format=json"]).unwrap();
        for other in ["--log", "debug", "--logs=x", "serve", "-c"] {
            let error = check(&["--log=debug", other]).unwrap_err().to_string();
            assert!(error.contains(other), "{error}");
        }
    }

    #[test]
    fn the_old_process_switches_no_sandbox_off() {
        use SandboxMode::{Log, Off, On, Strict};
        for (caller, daemon, is_confined, expected) in [
            (None, Some(Off), true, None),
            (None, Some(Log), true, None),
            (None, Some(Off), false, Some(Off)),
            (None, Some(Log), false, Some(Log)),
            (None, Some(Strict), false, None),
            (None, None, false, None),
            (Some(Off), Some(On), true, Some(Off)),
            (Some(On), Some(Off), false, Some(On)),
        ] {
            let chosen = chosen_sandbox(caller, daemon, is_confined);
            assert_eq!(chosen, expected, "{caller:?} {daemon:?} {is_confined}");
        }
    }

    #[test]
    fn the_old_process_chooses_no_configuration_of_ceph() {
        let map = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
        };
        let args = [("CEPH_ARGS", "--plugin-dir=/x"), ("PATH", "/bin")];
        let error = check_ceph(&map(&args), &map(&[])).unwrap_err().to_string();
        assert!(error.contains("CEPH_ARGS=\"--plugin-dir=/x\""), "{error}");
        check_ceph(&map(&args), &map(&args)).unwrap();
        check_ceph(&map(&args), &map(&[("CEPH_ARGS", "--id=a")])).unwrap_err();
        check_ceph(&map(&[]), &map(&args)).unwrap();
        // `/etc/passwd` is writable by root alone, `/dev/null` by all.
        let conf = |files| check_ceph(&map(&[(CEPH_CONF, files)]), &map(&[]));
        conf("/etc/passwd").unwrap();
        conf("/etc/passwd, /etc/hostname").unwrap();
        for files in ["/dev/null", "/etc/passwd,/dev/null", "/absent", ""] {
            assert!(conf(files).is_err(), "{files}");
        }
    }

    fn sleeper() -> (Successor, Pid) {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = Pid::from_child(&child);
        (Successor { id: child.id(), handle: Some(Handle::Child(child)) }, process)
    }

    #[test]
    fn a_process_is_killed_unless_it_has_taken_over() {
        let runs = |process: Pid| Path::new(&format!("/proc/{}", process.as_raw_pid())).exists();
        let (mut successor, process) = sleeper();
        assert!(successor.try_wait().unwrap().is_none());
        drop(successor);
        assert!(!runs(process), "it stays");
        let (mut successor, process) = sleeper();
        successor.detach();
        drop(successor);
        assert!(runs(process), "it was killed");
        kill_process(process, rustix::process::Signal::KILL).unwrap();
        waitpid(Some(process), WaitOptions::empty()).unwrap();
    }

    /// Another process may have got the id of a daemon that has ended.
    #[test]
    fn the_place_of_a_daemon_that_has_ended_is_not_taken() {
        let (mut successor, process) = sleeper();
        let daemon = pidfd_open(process, PidfdFlags::empty()).unwrap();
        check_runs(&daemon).unwrap();
        successor.handle.as_mut().unwrap().kill();
        assert_eq!(check_runs(&daemon).unwrap_err().to_string(), "the daemon has ended");
    }
}
