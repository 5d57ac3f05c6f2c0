//! Options that each disable one optimisation, for measurement.

use std::num::NonZeroU16;

use clap::Args;
use ringhaul_options::{CompletionRingChoice, OnOff};

/// The most chains that a queue may be told to take in one run.
pub(crate) const RUN_MAX: NonZeroU16 = NonZeroU16::new(1024).expect("it is not 0");

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
    /// Call the driver once for many requests; off: look for each whether it wants a call.
    #[arg(long, value_name = "ON|OFF", default_value = "on")]
    pub notify_batch: OnOff,
    /// Have the processor fetch what the next requests need while one is served; off: when they are
    /// looked at.
    #[arg(long, value_name = "ON|OFF", default_value = "on")]
    pub prefetch: OnOff,
    /// Take this many requests from a queue in one run, 1 to 1024, and look whether to call the
    /// driver after each run. Default: both follow from what is measured while the queue runs.
    #[arg(long, value_name = "N", value_parser = parse_run_max)]
    pub run_max: Option<NonZeroU16>,
}

fn parse_run_max(text: &str) -> Result<NonZeroU16, String> {
    // What is not a number is out of range too.
    let number = text.parse().unwrap_or(0);
    NonZeroU16::new(number)
        .filter(|number| *number <= RUN_MAX)
        .ok_or_else(|| "it must be a number from 1 to 1024".to_owned())
}
