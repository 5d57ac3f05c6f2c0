//! Drivers and front-ends that violate the specifications, over a real socket.
//!
//! After every case the daemon is alive and serves a correct front-end.

mod chains;
mod descriptors;
mod disconnects;
mod memory;
mod messages;
mod units;

use std::path::Path;

use anyhow::{Context, Result};
use ringhaul_kit::daemon::{Daemon, DaemonOptions};
use ringhaul_kit::frontend::{Frontend, Setup, check_service};

/// Starts a daemon with its disk on a file system with direct I/O.
fn start(options: &DaemonOptions) -> Result<Daemon> {
    Daemon::start(Path::new(env!("CARGO_TARGET_TMPDIR")), options)
}

/// Runs one case with an attached front-end, then checks that the daemon serves the next one.
/// `what` names the case.
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

/// Like [`with_attached`], with a front-end that has only negotiated features.
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
        // The end of the daemon explains more than the front-end's error.
        daemon.check_running().with_context(|| what.to_owned())?;
    }
    result.with_context(|| what.to_owned())
}
