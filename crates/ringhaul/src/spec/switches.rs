//! Options that each disable one optimisation, for measurement.

use std::num::NonZeroU16;

use blockio::IoThreadConfig;
use blockio::config::PacingConfig;
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
    /// Keep some operations back from a disk that completes all of them at the same moment, if
    /// tries show that it is faster that way; off: give it all of them.
    #[arg(long, value_name = "ON|OFF", default_value = "on")]
    pub pacing: OnOff,
    /// With engine aio, let the kernel write to no eventfd if the device completes operations while
    /// they are submitted; off: one write for each operation.
    #[arg(long, value_name = "ON|OFF", default_value = "on")]
    pub omit_announcements: OnOff,
    /// While busy-polling with engine io_uring, wait up to 16 microseconds for more completions, so
    /// that one system call fetches them all; off: do not wait.
    #[arg(long, value_name = "ON|OFF", default_value = "on")]
    pub grace: OnOff,
    /// With --iopoll, sleep between two checks for completions; off: check all the time.
    #[arg(long, value_name = "ON|OFF", default_value = "on")]
    pub poll_pause: OnOff,
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

impl Switches {
    /// The configuration of an IoThread: defaults, without the optimisations that are off.
    pub(crate) fn io_thread_config(&self) -> IoThreadConfig {
        let default = IoThreadConfig::default();
        IoThreadConfig {
            pacing: if self.pacing.is_on() { default.pacing } else { PacingConfig::OFF },
            harvest_on_submit: self.harvest_on_submit.is_on(),
            omits_announcements: self.omit_announcements.is_on(),
            gathers_completions: self.grace.is_on(),
            pauses: self.poll_pause.is_on(),
            submit_max: if self.submit_batch.is_on() { u32::MAX } else { 1 },
            ..default
        }
    }
}

fn parse_run_max(text: &str) -> Result<NonZeroU16, String> {
    // A text that is no number is out of range too.
    let number = text.parse().unwrap_or(0);
    NonZeroU16::new(number)
        .filter(|number| *number <= RUN_MAX)
        .ok_or_else(|| format!("it must be a number from 1 to {RUN_MAX}"))
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches as _;

    use super::*;

    /// The configuration with one switch off.
    fn without(option: &str) -> IoThreadConfig {
        let command = Switches::augment_args(clap::Command::new("serve"));
        let matches = command.try_get_matches_from(["serve", option, "off"]).unwrap();
        Switches::from_arg_matches(&matches).unwrap().io_thread_config()
    }

    #[test]
    fn each_switch_disables_its_optimisation_alone() {
        let facts = |config: IoThreadConfig| {
            [
                config.pacing != PacingConfig::OFF,
                config.harvest_on_submit,
                config.omits_announcements,
                config.gathers_completions,
                config.pauses,
                config.submit_max > 1,
            ]
        };
        let options = [
            "--pacing",
            "--harvest-on-submit",
            "--omit-announcements",
            "--grace",
            "--poll-pause",
            "--submit-batch",
        ];
        for (at, option) in options.into_iter().enumerate() {
            let mut expected = [true; 6];
            expected[at] = false;
            assert_eq!(facts(without(option)), expected, "{option}");
        }
    }
}
