//! Storage and limits that fail the daemon, on real parts.

mod devices;
mod encrypted_space;
mod ending;
mod failing_thread;
mod full_btrfs;
mod image_space;
mod interrupted;
mod late;
mod limits;
mod log_reader;
mod nbd;
mod nbd_alone;
mod nbd_ends;
mod nbd_errors;
mod nbd_holes;
mod nbd_images;
mod nbd_mute;
mod nbd_tls;
mod neighbours;
mod opening;
mod storage;

use std::path::Path;

use anyhow::Result;
use ringhaul_kit::daemon::{Daemon, DaemonOptions};

/// Starts a daemon with its disk where direct I/O works.
fn start(options: &DaemonOptions) -> Result<Daemon> {
    Daemon::start(Path::new(env!("CARGO_TARGET_TMPDIR")), options)
}
