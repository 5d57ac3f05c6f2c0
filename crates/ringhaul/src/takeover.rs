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
pub mod wire;

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::daemon::Daemon;
use crate::process::service_manager;
use crate::socket::inherited;
use crate::spec::command::CommandError;
use crate::spec::process::{SuccessorProgress, SuccessorStart};
use crate::threads::ownership::Refusal;

/// The interval between checks of the refusals.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Describes the start of a process that is to take over.
///
/// # Errors
///
/// When the start of this process is not complete, or it has no control socket.
pub(crate) fn successor_start(daemon: &Daemon) -> Result<SuccessorStart, CommandError> {
    let refused = |error: anyhow::Error| CommandError::UpgradeRefused(format!("{error:#}"));
    let (options, control) = daemon.started().map_err(refused)?;
    // These are about this process alone.
    let own = [&inherited::VARIABLES[..], &[service_manager::WATCHDOG_PROCESS]].concat();
    let variables = std::env::vars_os().filter_map(|(name, value)| {
        let (name, value) = (name.into_string().ok()?, value.into_string().ok()?);
        (!own.contains(&&*name)).then_some((name, value))
    });
    Ok(SuccessorStart {
        process: std::process::id(),
        control,
        log_options: options.log_options().map_err(refused)?,
        directory: options.directory,
        environment: variables.collect(),
    })
}

/// Waits at most `limit` for `process` to take over.
///
/// # Errors
///
/// When it is refused, or another process takes over.
pub(crate) fn wait(
    daemon: &Daemon,
    process: u32,
    limit: Duration,
) -> Result<SuccessorProgress, CommandError> {
    let (ownership, end) = (daemon.ownership(), Instant::now() + limit);
    loop {
        let left = end.saturating_duration_since(Instant::now());
        match ownership.wait_transferred(left.min(CHECK_INTERVAL)) {
            Some(owner) if owner == process => {
                return Ok(SuccessorProgress { has_asked: true, has_taken_over: true });
            }
            Some(owner) => return Err(CommandError::HandedOver(owner)),
            None => {}
        }
        let asked = ownership.asked(process);
        match asked.as_ref().and_then(Option::as_ref) {
            Some(Refusal { why, is_transient: true }) => {
                return Err(CommandError::UpgradeLater(why.clone()));
            }
            Some(Refusal { why, is_transient: false }) => {
                return Err(CommandError::UpgradeRefused(why.clone()));
            }
            None if left.is_zero() => {
                let has_asked = asked.is_some();
                return Ok(SuccessorProgress { has_asked, has_taken_over: false });
            }
            None => {}
        }
    }
}
