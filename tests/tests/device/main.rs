//! The device against a well-behaved front-end that does what few do, over a real socket.

mod config;
mod durability;
mod layout;
mod memory;
mod requests;
mod rings;

use std::path::Path;

use anyhow::Result;
use ringhaul_kit::daemon::{Daemon, DaemonOptions};

/// Starts a daemon with its disk where direct I/O works.
fn start(options: &DaemonOptions) -> Result<Daemon> {
    Daemon::start(Path::new(env!("CARGO_TARGET_TMPDIR")), options)
}
