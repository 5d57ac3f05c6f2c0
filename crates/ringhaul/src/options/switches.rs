//! Options that each disable one optimisation, for measurement.

use clap::Args;
use ringhaul_options::{CompletionRingChoice, OnOff};

/// One for each step. The defaults are the faster side.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Options for measurement")]
pub struct Switches {
    /// Where engine aio finds completions: in the ring that the kernel shares with the process, or
    /// by a system call.
    #[arg(long, value_name = "WHERE", default_value = "userspace")]
    pub completion_ring: CompletionRingChoice,
    /// Look for completions right after each submit; off: only when the kernel wakes the loop.
    #[arg(long, value_name = "ON|OFF", default_value = "on")]
    pub harvest_on_submit: OnOff,
    /// Submit operations together; off: one by one.
    #[arg(long, value_name = "ON|OFF", default_value = "on")]
    pub submit_batch: OnOff,
    /// Call the driver once for the requests completed in a run; off: once for each.
    #[arg(long, value_name = "ON|OFF", default_value = "on")]
    pub notify_batch: OnOff,
}
