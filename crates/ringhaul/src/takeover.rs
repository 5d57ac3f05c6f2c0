//! Takeover: exports, sockets, disks and connected guests move to another process while the guests
//! run (docs/guide/crash-and-upgrade.md#upgrade-while-guests-run).
//!
//! The new process sends requests to the old one's control socket, in three steps. First the old
//! process describes its exports, and continues to serve while the new one opens all of them. Then
//! the old process stops its queues and reports their positions; the new one prepares everything
//! but starts nothing. Finally the new process announces that it takes over. Once the old process
//! has read that, only the new one may serve, and does so after its confirmation. Before that point
//! any failure lets the old process resume with everything that it had.

pub(crate) mod new_process;
pub(crate) mod old_process;
#[cfg(test)]
mod tests;
pub(crate) mod wire;

use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::daemon::Daemon;
use crate::process::service_manager;
use crate::socket::inherited;
use crate::spec::command::{CommandError, check_is_path};
use crate::threads::ownership::Refusal;

/// The time that the new process may take until it serves.
const START_MAX: Duration = Duration::from_secs(600);
/// The interval of checks for the end of the new process.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Starts `binary`, which takes over from this process. Returns the id of its process when it has.
///
/// # Errors
///
/// When it does not, with the reason. This process resumes in that case.
pub(crate) fn upgrade(daemon: &Daemon, binary: &Path) -> Result<u32, CommandError> {
    let never = |error: anyhow::Error| CommandError::UpgradeRefused(format!("{error:#}"));
    check_is_path(binary).map_err(CommandError::Invalid)?;
    let mut child = start(daemon, binary).map_err(never)?;
    let end = Instant::now() + START_MAX;
    while Instant::now() < end {
        if let Some(process) = daemon.ownership().wait_transferred(CHECK_INTERVAL) {
            child.leave(process);
            return Ok(process);
        }
        let Some((process, status)) = child.try_wait().map_err(|error| never(error.into()))? else {
            continue;
        };
        // It may have taken over, and ended because it has nothing left to do.
        if let Some(process) = daemon.ownership().wait_transferred(Duration::ZERO) {
            return Ok(process);
        }
        return Err(not_taken(binary, status, daemon.ownership().reason(process)));
    }
    match daemon.ownership().await_ours() {
        Ok(_this_process) => drop(child),
        Err(CommandError::HandedOver(process)) => {
            child.leave(process);
            return Ok(process);
        }
        Err(error) => return Err(error),
    }
    let (shown, seconds) = (binary.display(), START_MAX.as_secs());
    Err(CommandError::UpgradeLater(format!("{shown} has not taken over in {seconds} s")))
}

fn start(daemon: &Daemon, binary: &Path) -> Result<Started> {
    let (options, control) = daemon.started()?;
    let mut command = Command::new(binary);
    // Both are about this process alone.
    let variables = [&inherited::VARIABLES[..], &[service_manager::WATCHDOG_PROCESS]].concat();
    for variable in variables {
        command.env_remove(variable);
    }
    command.args(options.log_options()?).args(["serve", "--takeover"]).arg(control);
    let mut started = Ok(());
    let (_, child) = daemon.ownership().start(|| match command.stdin(Stdio::null()).spawn() {
        Ok(child) => (child.id(), Some(child)),
        Err(error) => {
            started = Err(error);
            (0, None)
        }
    });
    started.with_context(|| format!("cannot start {}", binary.display()))?;
    Ok(Started(child))
}

/// The error about a process that has ended without taking over.
fn not_taken(binary: &Path, status: ExitStatus, reason: Option<Refusal>) -> CommandError {
    let shown = binary.display();
    match reason {
        Some(Refusal { why, is_transient: true }) => {
            CommandError::UpgradeLater(format!("{shown} has not taken over: {why}"))
        }
        Some(Refusal { why, is_transient: false }) => {
            CommandError::UpgradeRefused(format!("{shown} has not taken over: {why}"))
        }
        None => CommandError::UpgradeRefused(format!(
            "{shown} has not taken over: it ended ({status}) before it asked for the exports; if \
             it is a ringhaul, see its error in the log of this daemon, otherwise name one"
        )),
    }
}

/// A process that is killed if it does not take over.
struct Started(Option<Child>);

impl Started {
    /// Lets the process run on if it is the one that has taken over.
    fn leave(&mut self, process: u32) {
        self.0.take_if(|child| child.id() == process);
    }

    /// The id and the status of the process, if it has ended.
    fn try_wait(&mut self) -> std::io::Result<Option<(u32, ExitStatus)>> {
        let Some(child) = &mut self.0 else { return Ok(None) };
        let Some(status) = child.try_wait()? else { return Ok(None) };
        let process = child.id();
        self.0 = None;
        Ok(Some((process, status)))
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            // Fails only for a process that has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
