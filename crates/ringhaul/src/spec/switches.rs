//! Options that each disable one optimisation, for measurement.

use std::num::NonZeroU16;

use clap::Args;
use ringhaul_options::{CompletionRingChoice, OnOff};

/// The most chains that a queue may be told to take in one run.
pub(crate) const RUN_MAX: NonZeroU16 = NonZeroU16::new(1024).expect("it is not 0");

/// Switches, one for each optimisation. The defaults are the faster side.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Options for measurement")]
pub struct Switches {
    /// The place where engine aio finds completions: the ring that the kernel shares with the
    /// process, or a system call.
    #[arg(long, value_name = "WHERE", default_value = "userspace")]
    pub completion_ring: CompletionRingChoice,
    /// Check for completions right after each submit; off: only when the kernel wakes the loop.
    #[arg(long, value_name = "ON|OFF", default_value = "on")]
    pub harvest_on_submit: OnOff,
    /// Submit operations together; off: one by one.
    #[arg(long, value_name = "ON|OFF", default_value = "on")]
    pub submit_batch: OnOff,
    /// Call the driver once for many requests; off: check for each request if the driver wants a
    /// call.
    #[arg(long, value_name = "ON|OFF", default_value = "on")]
    pub notify_batch: OnOff,
    /// Prefetch memory of the next requests while one is served; off: read it when it is needed.
    #[arg(long, value_name = "ON|OFF", default_value = "on")]
    pub prefetch: OnOff,
    /// Take this many requests from a queue in one run, 1 to 1024, and check after each run if the
    /// driver wants a call. Default: both follow from measurements while the queue runs.
    #[arg(long, value_name = "N", value_parser = parse_run_max)]
    pub run_max: Option<NonZeroU16>,
}

fn parse_run_max(text: &str) -> Result<NonZeroU16, String> {
    // A text that is no number is out of range too.
    let number = text.parse().unwrap_or(0);
    NonZeroU16::new(number)
        .filter(|number| *number <= RUN_MAX)
        .ok_or_else(|| "it must be a number from 1 to 1024".to_owned())
}
