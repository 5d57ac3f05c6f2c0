//! Options that switch one optimisation off, to measure what it is worth.

use blockio::CompletionRing;
use clap::{Args, ValueEnum};

/// Each step by itself. The defaults are the better side.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Options for measurement")]
pub struct Switches {
    /// Where engine aio finds completions: in the ring that the kernel shares with the process, or
    /// by a system call.
    #[arg(long, value_name = "WHERE", default_value = "userspace")]
    pub completion_ring: CompletionRingOption,
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

/// A switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnOff {
    /// Used.
    On,
    /// Not used.
    Off,
}

impl From<OnOff> for bool {
    fn from(value: OnOff) -> Self {
        value == OnOff::On
    }
}

/// Values of `--completion-ring`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CompletionRingOption {
    /// Read in userspace.
    Userspace,
    /// By io_getevents.
    Getevents,
}

impl From<CompletionRingOption> for CompletionRing {
    fn from(value: CompletionRingOption) -> Self {
        match value {
            CompletionRingOption::Userspace => Self::Userspace,
            CompletionRingOption::Getevents => Self::Getevents,
        }
    }
}
