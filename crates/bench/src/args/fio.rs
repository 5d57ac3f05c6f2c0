//! Options of fio that have no effect here, or have another name.

#![forbid(unsafe_code)]

use ringhaul_options::EngineChoice;

use crate::error::BenchError;

/// Options that command lines of fio usually have.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct FioArgs {
    /// Name of the job, for `--output-format fio-json`
    #[arg(long, hide = true, value_name = "NAME")]
    pub name: Option<String>,

    /// fio's name of an engine: io_uring, libaio, and sync, psync and their like for threads
    #[arg(long, hide = true, value_name = "ENGINE")]
    pub ioengine: Option<String>,

    /// Every run ends by its time
    #[arg(long = "time_based", hide = true, num_args = 0..=1, require_equals = true,
          default_missing_value = "1")]
    pub time_based: Option<String>,

    /// Jobs are always reported together
    #[arg(long = "group_reporting", hide = true, num_args = 0..=1, require_equals = true,
          default_missing_value = "1")]
    pub group_reporting: Option<String>,

    /// Offsets are always drawn independently of each other
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true,
          default_missing_value = "1")]
    pub norandommap: Option<String>,

    /// Equal seeds always give equal offsets
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true,
          default_missing_value = "1")]
    pub randrepeat: Option<String>,

    /// Jobs are never processes
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true,
          default_missing_value = "1")]
    pub thread: Option<String>,
}

impl FioArgs {
    /// Returns the engine that `--ioengine` names.
    ///
    /// # Errors
    ///
    /// If fio's engine has no counterpart here.
    pub(crate) fn engine(&self) -> Result<Option<EngineChoice>, BenchError> {
        Ok(Some(match self.ioengine.as_deref() {
            None => return Ok(None),
            Some("io_uring") => EngineChoice::IoUring,
            Some("libaio") => EngineChoice::Aio,
            Some("sync" | "psync" | "vsync" | "pvsync" | "pvsync2") => EngineChoice::Threads,
            Some(other) => {
                return Err(BenchError::Usage(format!(
                    "--ioengine {other} is not supported; use --engine io_uring, aio or threads"
                )));
            }
        }))
    }

    /// Returns the names of given options that change nothing in any run.
    pub(crate) fn ignored_options(&self) -> impl Iterator<Item = &'static str> {
        let Self { time_based, group_reporting, norandommap, randrepeat, thread, .. } = self;
        let all = [
            ("--time_based", time_based),
            ("--group_reporting", group_reporting),
            ("--norandommap", norandommap),
            ("--randrepeat", randrepeat),
            ("--thread", thread),
        ];
        all.into_iter().filter(|(_, given)| given.is_some()).map(|(name, _)| name)
    }
}
