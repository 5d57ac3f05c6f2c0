//! A process that takes over from a server.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringhaul_tools::process::wait_child;

use super::{START_LIMIT, Server, bound_to_test, ringhaul_binary};
use crate::cli::check_calls;

/// The message of a process that has taken over.
const STOOD_STILL: &str = "queues stood still for ";

/// A process that is to take over from a [`Server`]. It must be waited for or killed.
pub struct Successor {
    child: Child,
    log: PathBuf,
}

impl Successor {
    /// The process's messages so far.
    #[must_use]
    pub fn messages(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Returns true once the process has ended.
    ///
    /// # Errors
    /// If the kernel does not know the process.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait().context("looking at the new process")?.is_some())
    }

    /// Kills the process in any state.
    ///
    /// # Errors
    /// If it cannot be waited for, or a thread was denied a system call.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill().context("killing the new process")?;
        self.child.wait().context("waiting for the new process")?;
        check_calls(&self.messages())
    }
}

impl Server {
    /// Makes a new process take over from the server. Returns the time in milliseconds for which
    /// the queues stood still.
    ///
    /// # Errors
    /// If it does not take over, or the old process ends with an error.
    pub fn upgrade(&mut self) -> Result<f64> {
        let successor = self.begin_upgrade()?;
        self.finish_upgrade(successor)
    }

    /// Waits until `successor` has taken over. Returns the time in milliseconds for which the
    /// queues stood still.
    ///
    /// # Errors
    /// As for [`upgrade`](Self::upgrade).
    pub fn finish_upgrade(&mut self, successor: Successor) -> Result<f64> {
        let old = wait_child(&mut self.child, Instant::now() + START_LIMIT);
        let old = old.with_context(|| format!("nothing takes over:\n{}", successor.messages()))?;
        let messages = self.messages();
        ensure!(old.success(), "the old process has ended with {old}:\n{messages}");
        ensure!(
            self.await_successor(successor)?,
            "the new process has ended:\n{}",
            self.messages()
        );
        let messages = self.messages();
        let line = messages.lines().find_map(|line| line.split_once(STOOD_STILL));
        let still = line.and_then(|(_, time)| time.trim_end_matches(" ms").parse().ok());
        still.with_context(|| format!("no time is told:\n{messages}"))
    }

    /// Starts a process that takes over from the server.
    ///
    /// # Errors
    /// If it does not start.
    pub fn begin_upgrade(&self) -> Result<Successor> {
        let mut log = self.log.clone().into_os_string();
        log.push("+");
        let log = PathBuf::from(log);
        let messages = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        let mut command = bound_to_test();
        command.arg(ringhaul_binary()?).args(["serve", "--takeover"]).arg(self.export.control());
        let child = command.stdin(Stdio::null()).stderr(messages).spawn();
        Ok(Successor { child: child.context("starting a process")?, log })
    }

    /// Kills the server while `successor` takes over. Returns true if `successor` serves now, false
    /// if it has ended.
    ///
    /// # Errors
    /// If it does neither.
    pub fn kill_during_upgrade(&mut self, successor: Successor) -> Result<bool> {
        // The server may already have ended after leaving everything to `successor`.
        self.child.kill().context("killing the server")?;
        self.child.wait().context("waiting for the server that was killed")?;
        self.await_successor(successor)
    }

    /// Waits until `successor` serves or has ended, and replaces the server with it. Returns true
    /// if it serves.
    fn await_successor(&mut self, successor: Successor) -> Result<bool> {
        check_calls(&self.messages())?;
        let Successor { child, log } = successor;
        (self.child, self.log) = (child, log);
        let deadline = Instant::now() + START_LIMIT;
        while !self.messages().contains(STOOD_STILL) {
            if self.child.try_wait().context("looking at the new process")?.is_some() {
                return Ok(false);
            }
            let messages = self.messages();
            ensure!(Instant::now() < deadline, "the new process does not serve:\n{messages}");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(true)
    }
}
