//! A command with all processes that it starts: they share a group of their own, and end together.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

/// The interval between two checks of a group that is to end.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The time that processes have to end after SIGTERM before they are killed.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// A running command and its processes. Dropping it ends all of them.
pub struct Group {
    child: Child,
    name: String,
    id: Pid,
    was_waited_for: bool,
}

impl Group {
    /// Starts `command` in a group of its own; `name` is for errors.
    ///
    /// # Errors
    /// If the program is missing or the kernel has no process left.
    pub fn start(name: &str, command: &mut Command) -> Result<Self> {
        let child = command
            .process_group(0)
            .spawn()
            .with_context(|| format!("starting {name} ({})", command.get_program().display()))?;
        let id = Pid::from_child(&child);
        Ok(Self { child, name: name.to_owned(), id, was_waited_for: false })
    }

    /// The running command.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Returns true once the command has ended. Its process stays until [`wait`](Self::wait), which
    /// keeps the number of the group from being reused.
    ///
    /// # Errors
    /// If the kernel does not know the process.
    pub fn has_ended(&self) -> Result<bool> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::Pid(self.id), options);
        Ok(status.with_context(|| format!("looking for the end of {}", self.name))?.is_some())
    }

    /// Waits for the end of the command alone: processes that it has left are not ended.
    ///
    /// # Errors
    /// If the kernel does not know the process.
    pub fn wait(mut self) -> Result<ExitStatus> {
        let status = self.child.wait();
        self.was_waited_for = true;
        status.with_context(|| format!("waiting for {}", self.name))
    }

    /// The programs and numbers of the group's processes that have not ended.
    pub fn processes(&self) -> Vec<String> {
        processes_of(self.id)
    }

    /// Ends all processes: SIGTERM first, and SIGKILL after `limit`.
    pub fn stop(&mut self, limit: Duration) {
        // The command was not waited for, so its number cannot name a different group. Signals fail
        // only if no process is left.
        let _ = kill_process_group(self.id, Signal::TERM);
        self.wait_until_empty(limit);
        let _ = kill_process_group(self.id, Signal::KILL);
        self.wait_until_empty(STOP_LIMIT);
        if let Err(error) = self.child.wait() {
            eprintln!("waiting for {}: {error}", self.name);
        }
        self.was_waited_for = true;
    }
}

impl Group {
    /// Waits until no process of the group runs, or `limit` is over.
    fn wait_until_empty(&self, limit: Duration) {
        let start = Instant::now();
        while start.elapsed() < limit && !self.processes().is_empty() {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.was_waited_for {
            self.stop(STOP_LIMIT);
        }
    }
}

fn processes_of(group: Pid) -> Vec<String> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let stats = entries.filter_map(|entry| {
        entry.file_name().to_str()?.parse::<u32>().ok()?;
        std::fs::read_to_string(entry.path().join("stat")).ok()
    });
    stats.filter_map(|stat| process_of(&stat, group.as_raw_nonzero().get())).collect()
}

/// The program and number of a process from its line in /proc, if it runs and is in `group`.
fn process_of(stat: &str, group: i32) -> Option<String> {
    // PID (PROGRAM) STATE PARENT GROUP; the program may have spaces and parentheses.
    let (pid, rest) = stat.split_once(" (")?;
    let (program, rest) = rest.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let (state, its_group) = (fields.next()?, fields.nth(1)?);
    let runs = state != "Z" && state != "X";
    (runs && its_group.parse() == Ok(group)).then(|| format!("{program} ({pid})"))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::Stdio;

    use super::*;

    /// Starts a shell with a child, and returns after both have begun.
    fn start(script: &str) -> Group {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdout(Stdio::piped());
        let mut group = Group::start("sh", &mut command).unwrap();
        group.child().stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
        group
    }

    #[test]
    fn processes_that_a_command_has_started_end_with_it() {
        let group = start("sleep 1000 & echo begun; wait");
        // The shell forks its child first, and the child runs `sleep` some time later.
        while !group.processes().iter().any(|name| name.starts_with("sleep (")) {
            assert!(!group.has_ended().unwrap(), "the command ended without its child");
            std::thread::yield_now();
        }
        assert!(!group.has_ended().unwrap());
        let id = group.id;
        drop(group);
        assert!(processes_of(id).is_empty(), "{:?}", processes_of(id));
    }

    #[test]
    fn processes_that_ignore_the_request_are_killed() {
        let mut group = start("trap '' TERM; sleep 1000 & echo begun; while :; do wait; done");
        group.stop(Duration::ZERO);
        assert!(group.processes().is_empty(), "{:?}", group.processes());
    }

    #[test]
    fn the_end_of_a_command_is_seen_and_its_status_kept() {
        let group = start("echo begun; exit 3");
        while !group.has_ended().unwrap() {
            std::thread::yield_now();
        }
        assert_eq!(group.wait().unwrap().code(), Some(3));
    }

    #[test]
    fn processes_of_other_groups_and_ended_ones_are_skipped() {
        let line = "12 (a (b) c) S 1 77 5 0";
        assert_eq!(process_of(line, 77).as_deref(), Some("a (b) c (12)"));
        assert_eq!(process_of(line, 1), None);
        assert_eq!(process_of("12 (a) Z 1 77 5 0", 77), None);
        assert_eq!(process_of("nonsense", 77), None);
    }
}
