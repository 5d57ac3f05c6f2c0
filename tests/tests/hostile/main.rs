//! Drivers and front-ends that do what they must not, over a real socket.
//!
//! After every case the daemon is alive and serves a well-behaved front-end.

mod chains;
mod descriptors;
mod memory;
mod messages;
mod units;
mod vanishing;

use std::path::Path;

use anyhow::{Context, Result};
use ringhaul_kit::daemon::{Daemon, DaemonOptions};
use ringhaul_kit::frontend::{Frontend, Setup, check_service};

/// Starts a daemon with its disk where direct I/O works.
fn start(options: &DaemonOptions) -> Result<Daemon> {
    Daemon::start(Path::new(env!("CARGO_TARGET_TMPDIR")), options)
}

/// Runs one case with a front-end of its own that has attached, then makes sure that the daemon
/// serves the next. `what` names the case.
fn with_attached(
    daemon: &mut Daemon,
    setup: &Setup,
    what: &str,
    case: impl FnOnce(&mut Frontend) -> Result<()>,
) -> Result<()> {
    let mut frontend = Frontend::attach(daemon.socket(), setup).context("before the case")?;
    run(daemon, &mut frontend, what, case)?;
    drop(frontend);
    check_service(daemon).with_context(|| format!("after: {what}"))
}

/// The same with a front-end that has only negotiated features.
fn with_negotiated(
    daemon: &mut Daemon,
    what: &str,
    case: impl FnOnce(&mut Frontend) -> Result<()>,
) -> Result<()> {
    let mut frontend =
        Frontend::connect(daemon.socket(), &Setup::default()).context("before the case")?;
    frontend.negotiate().context("before the case")?;
    run(daemon, &mut frontend, what, case)?;
    drop(frontend);
    check_service(daemon).with_context(|| format!("after: {what}"))
}

fn run(
    daemon: &mut Daemon,
    frontend: &mut Frontend,
    what: &str,
    case: impl FnOnce(&mut Frontend) -> Result<()>,
) -> Result<()> {
    let result = case(frontend);
    if result.is_err() {
        // That it has ended says more than what the front-end saw of it.
        daemon.check_running().with_context(|| what.to_owned())?;
    }
    result.with_context(|| what.to_owned())
}
