//! The commands of `ringhaul`, tested as a user runs them: options, messages and exit statuses.

mod back_end;
mod backing;
mod bench;
mod bench_file;
mod bench_scsi;
mod config;
mod control;
mod ctl;
mod demo;
mod disks;
mod documented;
mod ends;
mod foreign;
mod independent;
mod independent_limits;
mod kinds;
mod left;
mod locks;
mod log;
mod manners;
mod members;
mod options;
mod resize;
mod restart;
mod schema;
mod secrets;
mod silence;
mod socat;
mod sockets;
mod takeover;
mod takeover_busy;
mod takeover_commands;
mod takeover_debts;
mod takeover_options;
mod takeover_state;
mod takeover_waits;
mod throttling;
mod units;
mod untouched;

use std::path::PathBuf;

use anyhow::Result;
use ringhaul_kit::cli::{Running, Scene};
use ringhaul_kit::system::thread_id;

/// A disk size that suffices for these tests.
const DISK_BYTES: u64 = 16 << 20;

fn scene() -> Result<Scene> {
    Scene::new(env!("CARGO_TARGET_TMPDIR"))
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The path of a file in /proc about a thread of the daemon.
fn thread_file(daemon: &Running, thread: &str, file: &str) -> Result<PathBuf> {
    let (process, thread) = (daemon.pid(), thread_id(daemon.pid(), thread)?);
    let (process, thread) = (process.as_raw_nonzero(), thread.as_raw_nonzero());
    Ok(format!("/proc/{process}/task/{thread}/{file}").into())
}
