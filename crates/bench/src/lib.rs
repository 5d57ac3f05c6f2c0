//! `ringhaul bench`: a virtio-blk or virtio-scsi driver over vhost-user that generates load and
//! measures the server's speed.
//!
//! It is a real driver: it negotiates features, shares its memory with the server, fills
//! virtqueues, kicks only when the server asks for it and sleeps on the call eventfds. No single
//! I/O allocates memory or makes a system call; kicks and sleeps cost one per batch. [`run`] is the
//! command, [`measure`] the same without printing.
//!
//! # Reading guide
//!
//! `args` (the options) → `target` (the driven device or file) → `plan` (options checked against
//! the device) → `phases` (fill, measured run, read-back). In a phase: `worker` (the loop of a
//! driver thread) → `job` (one queue kept full) → `driver` (a virtqueue). With `--filename`,
//! `engine_worker` replaces `worker` and `driver`. `pattern` chooses the next I/O, `arrivals` its
//! time in an open loop, `verify` the contents of blocks. `server` measures the server's CPU time,
//! and `report` holds the result.
//!
//! `device` is the device behind a socket: `vhost_user` has the messages, `memory` the shared
//! memory. `requests` hides the kind of the device: `blk` and `scsi` know the form of requests and
//! responses, and the size of the disk. `scsi::probe` finds units.
//!
//! # How the numbers are taken
//!
//! * Latency is per request, from the refill that queued it to the pass that found it completed.
//!   The clock is read once for each pass over the virtqueues, so all requests of one batch share
//!   that reading.
//! * With `--rate_iops` the latency begins when the request was due, even without room for it then:
//!   the wait that a slow server causes is included.
//! * The measured window opens after `--ramp_time` and closes when the run time is over. Requests
//!   then in flight are awaited and checked, but not counted. A run bounded by `--io_size` or
//!   `--number_ios` ends with its last completion and counts everything.
//! * Calls are the sum of the call eventfds' counters, which includes calls that the kernel merged
//!   before the driver read them.
//! * With `--filename` there is a second latency, that of the ops: from their submit to the harvest
//!   that found them complete.

#![deny(unsafe_code)]

mod args;
mod arrivals;
mod blk;
mod device;
mod disk_bench;
mod driver;
mod engine_args;
mod engine_stats;
mod engine_worker;
mod error;
mod fio_args;
mod fio_json;
mod job;
mod memory;
mod pattern;
#[allow(unsafe_code)]
mod peer;
mod phases;
mod plan;
mod progress;
mod quantities;
mod report;
mod report_text;
mod requests;
mod ring;
mod scsi;
mod server;
mod stats;
mod supervisor;
mod target;
mod verify;
mod vhost_user;
mod worker;

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use blockio::DiskSource;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown};

pub use args::{BenchArgs, DeviceKind, Eta, OutputFormat, Profile};
pub use arrivals::RateProcess;
pub use disk_bench::DiskBenchArgs;
pub use engine_args::EngineArgs;
pub use engine_stats::{EngineReport, Setup, SizeReport};
pub use error::BenchError;
pub use fio_args::FioArgs;
pub use pattern::{BlockSplit, Rw};
pub use phases::measure;
pub use quantities::CpuList;
pub use report::{DirectionReport, LatencyReport, PERCENTILES, Report};
pub use scsi::lun::{LunAddress, LunChoice};

/// Runs the command: drives the server according to `args` and prints the result.
///
/// The result goes to standard output or to `--output`, progress and errors to standard error. The
/// exit code is 0 after success, 1 if blocks did not verify, I/O failed or the server went away,
/// and 2 if the options cannot work or the server cannot be reached.
///
/// SIGINT and SIGTERM end the run early. The result until then is printed, marked as interrupted,
/// and decides the exit code. A second signal ends the process at once.
///
/// # Errors
///
/// A [`BenchError`], whose [`exit_code`](BenchError::exit_code) is the exit status, or a failure to
/// write the result.
pub fn run(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    run_on(args, None)
}

/// Like [`run`], but drives `disk`, if there is one.
fn run_on(args: &BenchArgs, disk: Option<DiskSource>) -> anyhow::Result<ExitCode> {
    let args = &args.with_fio_names()?;
    let unneeded = args.ignored_options();
    if !unneeded.is_empty() {
        eprintln!("ringhaul: not needed here: {}", unneeded.join(", "));
    }
    let mut output = args.output.as_deref().map(create_output).transpose()?;
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order, so that the first signal ends the run and the second the process.
        register_conditional_shutdown(signal, BenchError::RUN_EXIT.into(), interrupted.clone())
            .and_then(|_| register(signal, interrupted.clone()))
            .context("cannot set up a signal handler")?;
    }
    let report = phases::measure_until(args, disk, &interrupted)?;
    let text = match args.output_format {
        OutputFormat::Json => {
            serde_json::to_string_pretty(&report).context("cannot encode the result as JSON")?
                + "\n"
        }
        OutputFormat::FioJson => fio_json::render(&report, args.fio.name.as_deref())
            .context("cannot encode the result as JSON")?,
        OutputFormat::Normal => report_text::render(&report),
    };
    match (&mut output, &args.output) {
        (Some(file), Some(path)) => file
            .write_all(text.as_bytes())
            .with_context(|| format!("cannot write the result to {}", path.display()))?,
        _ => std::io::stdout()
            .write_all(text.as_bytes())
            .context("cannot write the result to standard output")?,
    }
    Ok(if report.failed() { ExitCode::from(BenchError::RUN_EXIT) } else { ExitCode::SUCCESS })
}

fn create_output(path: &Path) -> Result<File, BenchError> {
    File::create(path).map_err(|error| {
        let path = path.display();
        BenchError::Usage(format!("cannot create the --output file {path}: {error}"))
    })
}
