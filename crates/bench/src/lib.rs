//! `ringhaul bench`: a virtio-blk or virtio-scsi driver over vhost-user that generates load and
//! measures the server's speed.
//!
//! It is a real driver: it negotiates features, shares its memory with the server, fills
//! virtqueues, kicks only when the server asks for it and sleeps on the call eventfds. No single
//! I/O allocates memory or makes a system call; kicks and sleeps cost one per batch. [`run()`] is
//! the command, [`measure`] the same without printing. It can drive a file without a server, too:
//!
//! ```
//! use clap::{Args, Command, FromArgMatches};
//! use ringhaul_bench::{BenchArgs, measure};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let file = tempfile::NamedTempFile::new()?;
//! # file.as_file().set_len(1 << 20)?;
//! # let path = file.path().to_str().ok_or("not UTF-8")?;
//! let words = ["bench", "--filename", path, "--rw", "randread", "--number_ios", "64"];
//! let command = BenchArgs::augment_args(Command::new("bench"));
//! let report = measure(&BenchArgs::from_arg_matches(&command.get_matches_from(words))?)?;
//! assert!(!report.failed());
//! # Ok(())
//! # }
//! ```
//!
//! # Reading guide
//!
//! `run` is the command. `args` (the options) → `target` (the driven device or file) → `plan`
//! (options checked against the device) → `phases` (fill, measured run, read-back). In a phase:
//! `worker` (the loop of a driver thread) → `job` (one queue kept full) → `driver` (a virtqueue).
//! With `--filename`, `engine_worker` replaces `worker` and `driver`. `pattern` chooses the next
//! I/O, `arrivals` its time in an open loop, `verify` the contents of blocks. `server` measures the
//! server's CPU time, and `report` holds the result.
//!
//! `device` is the device behind a socket: `vhost_user` has the messages, `memory` the shared
//! memory. `requests` hides the kind of the device: `blk` and `scsi` know the form of requests and
//! responses, and the size of the disk. `probe` finds units.
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
mod engine_stats;
mod engine_worker;
mod error;
mod job;
mod memory;
mod pattern;
#[allow(unsafe_code)]
mod peer;
mod phases;
mod plan;
mod probe;
mod progress;
mod quantities;
mod report;
mod requests;
mod ring;
mod run;
mod scsi;
mod server;
mod stats;
mod supervisor;
mod target;
mod verify;
mod vhost_user;
mod worker;

pub use args::engine::EngineArgs;
pub use args::fio::FioArgs;
pub use args::{BenchArgs, DeviceKind, Eta, OutputFormat, Profile};
pub use arrivals::RateProcess;
pub use disk_bench::DiskBenchArgs;
pub use engine_stats::{EngineReport, Setup, SizeReport};
pub use error::BenchError;
pub use pattern::{BlockSplit, Rw};
pub use phases::measure;
pub use quantities::{CpuList, LunAddress, LunChoice};
pub use report::{DirectionReport, LatencyReport, PERCENTILES, Report};
pub use run::run;
