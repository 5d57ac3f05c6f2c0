//! Options with a choice of words, as `clap` reads them.

use blockio::EngineKind;
use blockio::config::CompletionRing;

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
    /// The spelling on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Userspace => "userspace",
            Self::Getevents => "getevents",
        }
    }
}

/// Values of an option that is on or off. Accepts fio's 1 and 0, too.
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
    /// Returns true for [`On`](Self::On).
    pub fn is_on(self) -> bool {
        self == Self::On
    }
}

/// Values of `--lock`. Accepts 1 and 0, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LockChoice {
    /// From the opening of the disk on.
    #[value(alias = "1")]
    #[serde(alias = "1")]
    On,
    /// Never.
    #[value(alias = "0")]
    #[serde(alias = "0")]
    Off,
    /// While queues of the guest run.
    Late,
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
    /// The chosen engine, or `None` for [`Auto`](Self::Auto).
    pub fn kind(self) -> Option<EngineKind> {
        match self {
            Self::Auto => None,
            Self::IoUring => Some(EngineKind::IoUring),
            Self::Aio => Some(EngineKind::Aio),
            Self::Threads => Some(EngineKind::Threads),
        }
    }

    /// Checks that no option of io_uring alone is given for a different engine. `options` lists
    /// these options by name, each with true if it is given.
    ///
    /// # Errors
    ///
    /// If such an option is given and a different engine is chosen.
    pub fn check_io_uring_options(self, options: &[(&str, bool)]) -> Result<(), String> {
        let Some(engine) = self.kind() else { return Ok(()) };
        match given_for_io_uring_only(engine, options).first() {
            Some(name) => {
                Err(format!("{name} is for engine io_uring, not {engine}; leave one of them out"))
            }
            None => Ok(()),
        }
    }
}

/// Returns a warning if options of io_uring alone are given for a different engine. `options`
/// lists these options by name, each with true if it is given.
pub fn ineffective_warning(engine: EngineKind, options: &[(&str, bool)]) -> Option<String> {
    let names = given_for_io_uring_only(engine, options);
    let warning =
        || format!("{}: no effect, because only engine io_uring supports it", names.join(", "));
    (!names.is_empty()).then(warning)
}

/// The given options of io_uring alone, if `engine` is a different one.
fn given_for_io_uring_only<'a>(engine: EngineKind, options: &[(&'a str, bool)]) -> Vec<&'a str> {
    let given = options.iter().filter(|(_, is_given)| *is_given).map(|(name, _)| *name);
    given.filter(|_| engine != EngineKind::IoUring).collect()
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn the_completion_ring_is_read_in_the_named_way() {
        for (choice, way) in [
            (CompletionRingChoice::Userspace, CompletionRing::Userspace),
            (CompletionRingChoice::Getevents, CompletionRing::Getevents),
        ] {
            assert_eq!(CompletionRing::from(choice), way);
            assert_eq!(CompletionRingChoice::from_str(choice.name(), false), Ok(choice));
        }
    }

    #[test]
    fn options_of_io_uring_are_refused_for_other_engines() {
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
        assert_eq!(ineffective_warning(EngineKind::IoUring, &options), None);
        assert!(ineffective_warning(EngineKind::Aio, &options).unwrap().starts_with("--iopoll:"));
        assert_eq!(ineffective_warning(EngineKind::Aio, &[("--iopoll", false)]), None);
    }
}
