//! Metrics for monitoring systems: the text format of Prometheus, and a small HTTP server for it.

pub(crate) mod exposition;
pub(crate) mod server;

use crate::daemon::Daemon;
use crate::spec::command::{CommandError, StatsReader};
use exposition::exposition;

/// All metrics of a daemon in the text format of Prometheus, version 0.0.4.
///
/// # Errors
///
/// When the daemon is ending.
pub(crate) fn metrics(daemon: &Daemon) -> Result<String, CommandError> {
    let exports = daemon.exports()?;
    Ok(exposition(&daemon.stats(StatsReader::Monitoring)?, &exports))
}
