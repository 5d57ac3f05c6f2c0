//! Failing storage and exhausted limits, with real devices, file systems and servers.

mod devices;
mod encrypted_space;
mod failing_thread;
mod full_btrfs;
mod hung_open;
mod image_space;
mod interrupted;
mod limits;
mod log_reader;
mod nbd;
mod nbd_ends;
mod nbd_errors;
mod nbd_holes;
mod nbd_hung_open;
mod nbd_images;
mod nbd_limited_servers;
mod nbd_tls;
mod neighbours;
mod shutdown;
mod stalled_disks;
mod storage;

use std::path::Path;

use anyhow::Result;
use ringhaul_kit::daemon::{Daemon, DaemonOptions};

/// Starts a daemon with its disk on a file system with direct I/O.
fn start(options: &DaemonOptions) -> Result<Daemon> {
    Daemon::start(Path::new(env!("CARGO_TARGET_TMPDIR")), options)
}
