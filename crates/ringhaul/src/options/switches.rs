//! Options that switch one optimisation off, to measure what it is worth.

use clap::Args;
use ringhaul_bench::{CompletionRingChoice, OnOff};

/// Each step by itself. The defaults are the better side.
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
    /// Submit operations together; off: each by itself.
    #[arg(long, value_name = "ON|OFF", default_value = "on")]
    pub submit_batch: OnOff,
    /// Notify the driver of completed requests together; off: of each by itself.
    #[arg(long, value_name = "ON|OFF", default_value = "on")]
    pub notify_batch: OnOff,
}
