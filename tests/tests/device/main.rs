//! The device against a correct front-end that uses rare features, over a real socket.

mod config;
mod durability;
mod layout;
mod memory;
mod requests;
mod rings;

use std::path::Path;

use anyhow::Result;
use ringhaul_kit::daemon::{Daemon, DaemonOptions};

/// Starts a daemon with its disk on a file system with direct I/O.
fn start(options: &DaemonOptions) -> Result<Daemon> {
    Daemon::start(Path::new(env!("CARGO_TARGET_TMPDIR")), options)
}
