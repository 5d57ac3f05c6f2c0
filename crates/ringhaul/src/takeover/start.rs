//! The old process starts the new one, on request.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::command::{CommandError, check_is_path};
use crate::daemon::Daemon;

/// How long the new process may take until it serves.
const START_MAX: Duration = Duration::from_secs(600);
/// How often it is looked at whether the new process has ended.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Starts `binary`, which takes over from this process. Returns the id of its process when it has.
///
/// # Errors
///
/// When it does not. This process goes on then.
pub(crate) fn upgrade(daemon: &Daemon, binary: &Path) -> Result<u32> {
    check_is_path(binary)?;
    let (life, control) = daemon.started()?;
    let mut command = Command::new(binary);
    command.args(life.log_options()?).args(["serve", "--takeover"]).arg(control);
    let child = command.stdin(Stdio::null()).spawn();
    let child = child.with_context(|| format!("cannot start {}", binary.display()))?;
    let mut child = Started(Some(child));
    let end = Instant::now() + START_MAX;
    while Instant::now() < end {
        if let Some(process) = daemon.succession().wait_left(LOOK_INTERVAL) {
            if child.id() == Some(process) {
                child.0 = None;
            }
            return Ok(process);
        }
        if let Some(status) = child.try_wait()? {
            bail!("{} has not taken over: {status}; the log says why", binary.display());
        }
    }
    match daemon.succession().goes_on() {
        Ok(_this_process) => drop(child),
        Err(CommandError::HandedOver(process)) => {
            if child.id() == Some(process) {
                child.0 = None;
            }
            return Ok(process);
        }
        Err(error) => return Err(error.into_error()),
    }
    bail!("{} has not taken over in {} s", binary.display(), START_MAX.as_secs())
}

/// A process that is ended if it does not take over.
struct Started(Option<Child>);

impl Started {
    fn id(&self) -> Option<u32> {
        self.0.as_ref().map(Child::id)
    }

    fn try_wait(&mut self) -> Result<Option<std::process::ExitStatus>> {
        let status = self.0.as_mut().map(Child::try_wait).transpose()?.flatten();
        if status.is_some() {
            self.0 = None;
        }
        Ok(status)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            // They fail only for a process that has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
