//! The options that need `--filename`.

#![forbid(unsafe_code)]

use std::num::NonZeroU32;
use std::time::Duration;

use blockio::config::EngineOptions;
use blockio::{EngineKind, IoThreadConfig};
use ringhaul_options::{CompletionRingChoice, EngineChoice, OnOff};

/// Options of the engine for `--filename`, with the names of `ringhaul serve`.
///
/// Every switch defaults to the faster way; off measures the value of that way.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Options with --filename")]
pub struct EngineArgs {
    /// Engine for disk I/O; auto is the choice of `ringhaul serve`
    #[arg(long, value_name = "ENGINE", value_enum, default_value_t = EngineChoice::Auto,
          conflicts_with = "socket_path")]
    pub engine: EngineChoice,

    /// Bypass the page cache [default: on]
    #[arg(long, value_name = "ON", value_enum)]
    pub direct: Option<OnOff>,

    /// Lock the file as `serve` does; with off, a file in use can be read, and written to if no
    /// other program writes to it
    #[arg(
        long,
        value_name = "ON",
        value_enum,
        default_value = "on",
        conflicts_with = "socket_path"
    )]
    pub lock: OnOff,

    /// I/Os that a job queues together, once there is room for all of them [default: up to 16, as
    /// soon as there is room for one]
    #[arg(long, aliases = ["iodepth_batch", "iodepth_batch_submit"], value_name = "N",
          conflicts_with = "socket_path")]
    pub iodepth_batch: Option<NonZeroU32>,

    /// The longest time in microseconds, 0 to 10000, to busy-poll before sleeping; 0 disables it
    #[arg(long, value_name = "US", default_value_t = IoThreadConfig::POLL_MAX_US,
          conflicts_with = "socket_path",
          value_parser = clap::value_parser!(u16).range(0..=10_000))]
    pub poll_max_us: u16,

    /// With io_uring, let a kernel thread pick up submissions; each job keeps one more CPU busy
    #[arg(long, conflicts_with = "socket_path")]
    pub sqpoll: bool,

    /// With io_uring and direct I/O, poll for completions, on devices whose drivers have polled
    /// queues; it needs a core for each job
    #[arg(long, conflicts_with = "socket_path")]
    pub iopoll: bool,

    /// Source of completions for engine aio: the ring that the kernel shares with the process, or a
    /// system call
    #[arg(long, value_name = "WHERE", value_enum, conflicts_with = "socket_path",
          default_value_t = CompletionRingChoice::Userspace)]
    pub completion_ring: CompletionRingChoice,

    /// Harvest completions right after each submit; off: only when the kernel wakes the loop
    #[arg(long, value_name = "ON", value_enum, default_value_t = OnOff::On,
          conflicts_with = "socket_path")]
    pub harvest_on_submit: OnOff,

    /// Submit operations together; off: one by one
    #[arg(long, value_name = "ON", value_enum, default_value_t = OnOff::On,
          conflicts_with = "socket_path")]
    pub submit_batch: OnOff,
}

impl EngineArgs {
    /// The default batch of a job: as many ops as `ringhaul serve` takes from a virtqueue before it
    /// submits.
    pub(crate) const DEFAULT_BATCH: usize = 16;

    /// Returns the names of the options that only io_uring has, each with true if it is given.
    pub(crate) fn io_uring_options(&self) -> [(&'static str, bool); 2] {
        [("--sqpoll", self.sqpoll), ("--iopoll", self.iopoll)]
    }

    /// Returns the configuration of an IoThread with `engine` for `depth` operations of one disk.
    /// Its depth is larger, since it keeps a part for other disks.
    pub(crate) fn config(&self, engine: EngineKind, depth: u32) -> IoThreadConfig {
        let options = EngineOptions {
            sqpoll: self.sqpoll,
            iopoll: self.iopoll,
            completion_ring: self.completion_ring.into(),
        };
        IoThreadConfig {
            engine: options.engine(engine),
            depth: depth.saturating_mul(4).min(65_535),
            poll_max: Duration::from_micros(self.poll_max_us.into()),
            harvest_on_submit: self.harvest_on_submit.is_on(),
            submit_max: if self.submit_batch.is_on() { u32::MAX } else { 1 },
            ..IoThreadConfig::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockio::EngineConfig;

    #[test]
    fn io_uring_options_reach_io_uring_only() {
        let args = crate::args::tests::parse_only("--filename x --sqpoll --iopoll").unwrap();
        for engine in [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads] {
            let config = args.engine.config(engine, 8);
            assert_eq!(config.engine.kind(), engine);
            if let EngineConfig::IoUring { sqpoll, iopoll } = config.engine {
                assert!(sqpoll && iopoll);
            }
        }
    }
}
