//! The command line of `ringhaul ctl`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use clap_complete::ArgValueCandidates;
use ringhaul::options::ExportArgs;
use ringhaul::options::SandboxMode;

use super::connection::export_names;
use super::doctor::DoctorArgs;
use super::top::TopArgs;
use crate::examples;

/// The events that a daemon reports.
const EVENTS: [&str; 8] =
    ["added", "removed", "attached", "gone", "error", "resized", "lun-added", "lun-removed"];

/// Options of `ringhaul ctl`.
#[derive(Debug, Clone, Args)]
#[command(after_help = examples::CTL)]
pub(crate) struct CtlArgs {
    /// The control socket of the daemon: the value of its own option --control. Default: the
    /// environment variable RINGHAUL_CONTROL, or else the only one of /run/ringhaul/control and
    /// /run/ringhaul-*/control.
    #[arg(long, value_name = "PATH", global = true)]
    pub control: Option<PathBuf>,
    /// Print the daemon's answer as JSON. The default is tables on a terminal, and lines for
    /// scripts elsewhere.
    #[arg(long, global = true)]
    pub json: bool,
    /// The request.
    #[command(subcommand)]
    pub what: CtlCommand,
}

/// A request to a daemon. EXPORT is the name of an export, or the path of its socket.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum CtlCommand {
    /// Check that the daemon is there.
    #[command(after_help = examples::CTL_PING)]
    Ping,
    /// List the exports.
    #[command(after_help = examples::CTL_LIST)]
    List,
    /// Describe an export: its front-end, queues, memory, disks and engines.
    #[command(after_help = examples::CTL_SHOW)]
    Show {
        /// The name of the export, or the path of its socket.
        #[arg(add = ArgValueCandidates::new(export_names))]
        export: String,
    },
    /// Export a disk, or several, with the options of `serve`. Relative paths begin in the
    /// working directory of this command, not of the daemon.
    #[command(after_help = examples::CTL_ADD)]
    Add(Box<ExportArgs>),
    /// End an export, and wait until its requests are finished.
    #[command(after_help = examples::CTL_REMOVE)]
    Remove {
        /// The name of the export, or the path of its socket.
        #[arg(add = ArgValueCandidates::new(export_names))]
        export: String,
        /// Disconnect the front-end at once. Requests that were taken are still finished.
        #[arg(long)]
        force: bool,
        /// Wait for at most this time, then print the reason of the wait. The removal continues.
        #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
        deadline: Option<u64>,
    },
    /// Add a logical unit to a virtio-scsi device.
    #[command(after_help = examples::CTL_ADD_LUN)]
    AddLun {
        /// The name of the export, or the path of its socket.
        #[arg(add = ArgValueCandidates::new(export_names))]
        export: String,
        /// The unit, as in `serve --lun`.
        #[arg(value_name = "[T:]LUN,KEY=VALUE,...")]
        unit: String,
    },
    /// Remove a logical unit.
    #[command(after_help = examples::CTL_REMOVE_LUN)]
    RemoveLun {
        /// The name of the export, or the path of its socket.
        #[arg(add = ArgValueCandidates::new(export_names))]
        export: String,
        /// The address of the unit.
        #[arg(value_name = "[T:]LUN")]
        unit: String,
    },
    /// Change the size of a disk, or adopt the present size of its file or device.
    #[command(after_help = examples::CTL_RESIZE)]
    Resize {
        /// The name of the export, or the path of its socket.
        #[arg(add = ArgValueCandidates::new(export_names))]
        export: String,
        /// The logical unit, of virtio-scsi, and the size: `10G`, or `+10G` to add that. A size
        /// without a unit has a suffix (K, M, G, T, P) or a plus sign.
        #[arg(value_name = "[[T:]LUN] [SIZE|+SIZE]", num_args = 0..=2)]
        words: Vec<String>,
        /// Allow a smaller size. Data beyond it is lost.
        #[arg(long)]
        shrink: bool,
    },
    /// Change or list the limits of a disk and the handling of requests that it fails:
    /// iops-total=500, bps-write=10M, group=NAME, rerror=retry, werror=hold and so on, as in the
    /// options --limits, --rerror and --werror of `serve`. 0 is no limit.
    #[command(after_help = examples::CTL_SET_DISK)]
    SetDisk {
        /// The name of the export, or the path of its socket.
        #[arg(add = ArgValueCandidates::new(export_names))]
        export: String,
        /// The logical unit, of virtio-scsi, and the changes.
        #[arg(value_name = "[[T:]LUN] KEY=VALUE")]
        words: Vec<String>,
    },
    /// Retry at once the requests that wait because a disk has failed them.
    #[command(after_help = examples::CTL_RESUME)]
    Resume {
        /// The name of the export, or the path of its socket.
        #[arg(add = ArgValueCandidates::new(export_names))]
        export: String,
        /// The logical unit, of virtio-scsi; all of them if it is left out.
        #[arg(value_name = "[T:]LUN")]
        unit: Option<String>,
    },
    /// Move the state of logical units to another host, with a guest that migrates.
    #[command(after_help = examples::CTL_STATE)]
    State {
        /// `save` prints the state that the units had when the guest stopped. `load` reads it from
        /// standard input, for the next guest.
        #[arg(value_name = "save|load")]
        direction: Direction,
        /// The name of the export, or the path of its socket.
        #[arg(add = ArgValueCandidates::new(export_names))]
        export: String,
    },
    /// Change settings, or list them: log=FILTER, poll-max-us=US, poll-budget=PERCENT.
    #[command(after_help = examples::CTL_SET)]
    Set {
        /// The changes.
        #[arg(value_name = "KEY=VALUE")]
        changes: Vec<String>,
    },
    /// Print the counters of exports and IoThreads.
    #[command(after_help = examples::CTL_STATS)]
    Stats,
    /// Show rates and latencies of all exports until a key is pressed.
    #[command(after_help = examples::CTL_TOP)]
    Top(TopArgs),
    /// Look for faults and for causes of slow requests, and print each with its remedy.
    #[command(after_help = examples::CTL_DOCTOR)]
    Doctor(DoctorArgs),
    /// Print the metrics of all exports in the text format of Prometheus.
    #[command(after_help = examples::CTL_METRICS)]
    Metrics,
    /// Print events as they happen, until the daemon ends.
    #[command(after_help = examples::CTL_EVENTS)]
    Events {
        /// Print only these events: added, removed, attached, gone, error, resized, lun-added,
        /// lun-removed.
        #[arg(value_name = "EVENT", value_parser = EVENTS)]
        kinds: Vec<String>,
    },
    /// Let another program take over from the daemon, which ends. Its guests continue.
    #[command(after_help = examples::CTL_UPGRADE)]
    Upgrade {
        /// The program: a `ringhaul` of any version that understands this one.
        #[arg(required_unless_present = "option", conflicts_with = "option")]
        binary: Option<PathBuf>,
        /// The program, as an option.
        #[arg(id = "option", long = "binary", value_name = "PATH")]
        option: Option<PathBuf>,
        /// Retry for this many seconds while the daemon reports that the upgrade may succeed in a
        /// moment.
        #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
        retry: Option<u64>,
        /// The mode of the sandbox of the new process. Without this option it is that of the
        /// daemon; `off` and `log` only if the kernel shows that the daemon is not confined.
        #[arg(long, value_name = "MODE")]
        sandbox: Option<SandboxMode>,
        /// For `ExecReload=` of the daemon's unit: do nothing if the daemon runs this program
        /// already. The new process gets its place from this command, so that the system call
        /// filters of the unit hold for it.
        #[arg(long)]
        in_unit: bool,
    },
    /// Print all methods of the control socket, with their parameters and answers, as JSON Schema.
    /// No daemon is needed.
    #[command(after_help = examples::CTL_SCHEMA)]
    Schema,
    /// End the daemon, as SIGTERM does.
    #[command(after_help = examples::CTL_SHUTDOWN)]
    Shutdown {
        /// Wait until its process has ended.
        #[arg(long)]
        wait: bool,
    },
    /// Call a method with parameters, a JSON object.
    #[command(after_help = examples::CTL_CALL)]
    Call {
        /// The name of the method.
        method: String,
        /// The parameters.
        #[arg(default_value = "{}")]
        params: String,
    },
}

/// The direction in which a state moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Direction {
    /// From the daemon to standard output.
    Save,
    /// From standard input to the daemon.
    Load,
}

/// Reads seconds, and returns milliseconds.
fn parse_seconds(text: &str) -> Result<u64, String> {
    let wrong = || "it must be a number of seconds, as in 5 or 0.5".to_owned();
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(part) || part.len() > 3 {
        return Err(wrong());
    }
    let whole: u64 = whole.parse().map_err(|_| wrong())?;
    let part: u64 = format!("{part:0<3}").parse().map_err(|_| wrong())?;
    whole.checked_mul(1000).and_then(|ms| ms.checked_add(part)).ok_or_else(wrong)
}
