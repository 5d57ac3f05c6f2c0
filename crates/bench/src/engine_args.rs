//! The options that matter with `--filename` only.

#![forbid(unsafe_code)]

use std::num::NonZeroU32;
use std::time::Duration;

use blockio::{CompletionRing, EngineKind, IoThreadConfig};

/// Options of the engine that `--filename` is driven through, named as those of `ringhaul serve`.
///
/// All that can be on or off is the better way when it is on; off is for measuring what that is
/// worth.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Options with --filename")]
pub struct EngineArgs {
    /// How operations reach the kernel; auto is what `ringhaul serve` would choose
    #[arg(long, value_name = "ENGINE", value_enum, default_value_t = EngineChoice::Auto,
          conflicts_with = "socket_path")]
    pub engine: EngineChoice,

    /// Bypass the page cache
    #[arg(long, value_name = "ON", value_enum, default_value_t = OnOff::On,
          conflicts_with = "socket_path")]
    pub direct: OnOff,

    /// I/Os that a job queues together, once there is room for so many [default: up to 16, as
    /// soon as there is room for one]
    #[arg(long, aliases = ["iodepth_batch", "iodepth_batch_submit"], value_name = "N",
          conflicts_with = "socket_path")]
    pub iodepth_batch: Option<NonZeroU32>,

    /// The longest time in microseconds, 0 to 10000, to busy-poll before sleeping; 0 is never
    #[arg(long, value_name = "US", default_value_t = 64, conflicts_with = "socket_path",
          value_parser = clap::value_parser!(u16).range(0..=10_000))]
    pub poll_max_us: u16,

    /// With io_uring, let a kernel thread take submissions in; each job keeps one more CPU busy
    #[arg(long, conflicts_with = "socket_path")]
    pub sqpoll: bool,

    /// With io_uring and direct I/O, poll for completions, on devices whose drivers have queues for
    /// that; it needs a core for each job
    #[arg(long, conflicts_with = "socket_path")]
    pub iopoll: bool,

    /// Where engine aio finds completions: in the ring that the kernel shares with the process, or
    /// by a system call
    #[arg(long, value_name = "WHERE", value_enum, conflicts_with = "socket_path",
          default_value_t = CompletionRingChoice::Userspace)]
    pub completion_ring: CompletionRingChoice,

    /// Look for completions right after each submit; off: only when the kernel wakes the loop
    #[arg(long, value_name = "ON", value_enum, default_value_t = OnOff::On,
          conflicts_with = "socket_path")]
    pub harvest_on_submit: OnOff,

    /// Submit operations together; off: each by itself
    #[arg(long, value_name = "ON", value_enum, default_value_t = OnOff::On,
          conflicts_with = "socket_path")]
    pub submit_batch: OnOff,
}

/// Values of `--completion-ring`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum CompletionRingChoice {
    /// Read in userspace.
    Userspace,
    /// By io_getevents.
    Getevents,
}

impl From<CompletionRingChoice> for CompletionRing {
    fn from(choice: CompletionRingChoice) -> Self {
        match choice {
            CompletionRingChoice::Userspace => Self::Userspace,
            CompletionRingChoice::Getevents => Self::Getevents,
        }
    }
}

impl CompletionRingChoice {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Userspace => "userspace",
            Self::Getevents => "getevents",
        }
    }
}

/// Values of an option that is on or off; fio's 1 and 0 are taken too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum OnOff {
    /// Yes.
    #[value(alias = "1")]
    On,
    /// No.
    #[value(alias = "0")]
    Off,
}

impl OnOff {
    /// Returns whether it is on.
    pub fn is_on(self) -> bool {
        self == Self::On
    }
}

/// Values of `--engine`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum EngineChoice {
    /// The best that works for the disk.
    Auto,
    /// io_uring.
    #[value(name = "io_uring")]
    IoUring,
    /// Linux AIO.
    Aio,
    /// Blocking system calls on a pool of threads.
    Threads,
}

impl EngineChoice {
    /// Returns the engine that was asked for; `None` is the best one.
    pub fn kind(self) -> Option<EngineKind> {
        match self {
            Self::Auto => None,
            Self::IoUring => Some(EngineKind::IoUring),
            Self::Aio => Some(EngineKind::Aio),
            Self::Threads => Some(EngineKind::Threads),
        }
    }

    /// Checks options (with whether they are given) that only io_uring has.
    ///
    /// # Errors
    ///
    /// When one is given and another engine is asked for.
    pub fn check_io_uring_options(self, options: &[(&str, bool)]) -> Result<(), String> {
        match (self.kind(), given(options).next()) {
            (Some(engine), Some(name)) if engine != EngineKind::IoUring => {
                Err(format!("{name} is for engine io_uring, not {engine}; leave one of them out"))
            }
            _ => Ok(()),
        }
    }
}

/// Names what only io_uring has, is given, and has no effect with the engine that was chosen.
pub fn without_effect(engine: EngineKind, options: &[(&str, bool)]) -> Option<String> {
    let names: Vec<&str> = given(options).collect();
    let in_vain = engine != EngineKind::IoUring && !names.is_empty();
    in_vain.then(|| format!("{}: without effect, only io_uring has that", names.join(", ")))
}

fn given<'a>(options: &[(&'a str, bool)]) -> impl Iterator<Item = &'a str> {
    options.iter().filter(|(_, is_given)| *is_given).map(|(name, _)| *name)
}

impl EngineArgs {
    /// Most operations that a job queues together when that is left open: as many as `ringhaul
    /// serve` takes from a virtqueue before it submits.
    pub(crate) const DEFAULT_BATCH: usize = 16;

    /// Returns the options that only io_uring has, and whether they are given.
    pub(crate) fn io_uring_options(&self) -> [(&'static str, bool); 2] {
        [("--sqpoll", self.sqpoll), ("--iopoll", self.iopoll)]
    }

    /// Returns how an IoThread with `engine` is set up for `depth` operations of one disk. It has
    /// room for more: a part of it is kept for other disks.
    pub(crate) fn config(&self, engine: EngineKind, depth: u32) -> IoThreadConfig {
        IoThreadConfig {
            engine,
            depth: depth.saturating_mul(4).min(65_535),
            poll_max: Duration::from_micros(self.poll_max_us.into()),
            sqpoll: self.sqpoll && engine == EngineKind::IoUring,
            iopoll: self.iopoll && engine == EngineKind::IoUring,
            harvest_on_submit: self.harvest_on_submit.is_on(),
            submit_max: if self.submit_batch.is_on() { u32::MAX } else { 1 },
            completion_ring: self.completion_ring.into(),
            ..IoThreadConfig::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_only_io_uring_has_is_refused_with_others() {
        let options = [("--sqpoll", false), ("--iopoll", true)];
        for (choice, is_good) in [
            (EngineChoice::Auto, true),
            (EngineChoice::IoUring, true),
            (EngineChoice::Aio, false),
            (EngineChoice::Threads, false),
        ] {
            let result = choice.check_io_uring_options(&options);
            assert_eq!(result.is_ok(), is_good, "{choice:?}: {result:?}");
            assert!(result.is_ok() || result.unwrap_err().contains("--iopoll is for"));
            assert!(choice.check_io_uring_options(&[("--iopoll", false)]).is_ok());
        }
        assert_eq!(without_effect(EngineKind::IoUring, &options), None);
        assert!(without_effect(EngineKind::Aio, &options).unwrap().starts_with("--iopoll:"));
        assert_eq!(without_effect(EngineKind::Aio, &[("--iopoll", false)]), None);
    }

    #[test]
    fn what_only_io_uring_has_reaches_it_and_nobody_else() {
        let args = crate::args::tests::parse_only("--filename x --sqpoll --iopoll").unwrap();
        for engine in [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads] {
            let config = args.engine.config(engine, 8);
            let wanted = engine == EngineKind::IoUring;
            assert_eq!((config.sqpoll, config.iopoll), (wanted, wanted), "{engine}");
        }
    }
}
