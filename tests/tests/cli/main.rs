//! The commands of `ringhaul`, tested as a user runs them: options, messages and exit statuses.

mod back_end;
mod backing;
mod bench;
mod bench_file;
mod bench_scsi;
mod colours;
mod config;
mod control;
mod control_socat;
mod control_socat_limits;
mod conventions;
mod ctl;
mod demo;
mod disk_kinds;
mod disks;
mod doctor;
mod doctor_findings;
mod doctor_missing_unit;
mod documented;
mod format_warnings;
mod held_writes;
mod idle;
mod install;
mod kept_sessions;
mod left_requests;
mod locks;
mod log;
mod members;
mod metrics;
mod migration_log;
mod operator_mistakes;
mod options;
mod passed_files;
mod probes;
mod prometheus;
mod recipes;
mod resize;
mod restart;
mod sandbox;
mod sandbox_options;
mod schema;
mod secrets;
mod service_manager;
mod service_units;
mod shutdown;
mod slow_requests;
mod socat;
mod sockets;
mod takeover;
mod takeover_blocked;
mod takeover_commands;
mod takeover_debts;
mod takeover_long_requests;
mod takeover_options;
mod takeover_state;
mod throttling;
mod top;
mod unchanged_disks;
mod units;
mod upgrade_place;

use std::path::PathBuf;

use anyhow::Result;
use ringhaul_kit::cli::{Running, TestFolders};
use ringhaul_kit::system::thread_id;

/// A disk size that suffices for these tests.
const DISK_BYTES: u64 = 16 << 20;

fn test_folders() -> Result<TestFolders> {
    TestFolders::new(env!("CARGO_TARGET_TMPDIR"))
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
