//! Options of fio that have no effect here, or have another name.

#![forbid(unsafe_code)]

use ringhaul_options::EngineChoice;

use crate::args::BenchArgs;
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

impl BenchArgs {
    /// Returns the options with `--ioengine` translated to `--engine`.
    ///
    /// # Errors
    ///
    /// If fio's engine has no counterpart here.
    pub(crate) fn with_fio_names(&self) -> Result<Self, BenchError> {
        let mut args = self.clone();
        let engine = match self.fio.ioengine.as_deref() {
            Some("io_uring") => EngineChoice::IoUring,
            Some("libaio") => EngineChoice::Aio,
            Some("sync" | "psync" | "vsync" | "pvsync" | "pvsync2") => EngineChoice::Threads,
            Some(other) if self.filename.is_some() => {
                return Err(BenchError::Usage(format!(
                    "--ioengine {other} is not supported; use --engine io_uring, aio or threads"
                )));
            }
            _ => return Ok(args),
        };
        if self.filename.is_some() && self.engine.engine == EngineChoice::Auto {
            args.engine.engine = engine;
        }
        Ok(args)
    }

    /// Returns the names of given options that change nothing.
    pub(crate) fn ignored_options(&self) -> Vec<&'static str> {
        let FioArgs {
            ioengine, time_based, group_reporting, norandommap, randrepeat, thread, ..
        } = &self.fio;
        let is_served = self.socket_path.is_some();
        let all = [
            ("--ioengine", ioengine.is_some() && is_served),
            ("--direct", self.engine.direct.is_some() && is_served),
            ("--time_based", time_based.is_some()),
            ("--group_reporting", group_reporting.is_some()),
            ("--norandommap", norandommap.is_some()),
            ("--randrepeat", randrepeat.is_some()),
            ("--thread", thread.is_some()),
        ];
        all.into_iter().filter(|(_, is_given)| *is_given).map(|(name, _)| name).collect()
    }
}

#[cfg(test)]
mod tests {
    use ringhaul_options::EngineChoice;

    use crate::args::tests::{parse, parse_only};

    #[test]
    fn usual_command_lines_of_fio_are_accepted() {
        let usual = "--name=x --time_based --group_reporting=1 --norandommap --randrepeat=0";
        let args = parse(&format!("{usual} --ioengine=io_uring --direct=1 --runtime=1")).unwrap();
        let expected = [
            "--ioengine",
            "--direct",
            "--time_based",
            "--group_reporting",
            "--norandommap",
            "--randrepeat",
        ];
        assert_eq!(args.ignored_options(), expected);
        assert!(parse("").unwrap().ignored_options().is_empty());
        let args = parse_only(&format!("--filename f {usual} --thread --direct=1")).unwrap();
        assert_eq!(args.ignored_options(), [&expected[2..], &["--thread"]].concat());
    }

    #[test]
    fn engines_have_fio_names_too() {
        let engine = |words: &str| {
            let args = parse_only(&format!("--filename f {words}")).unwrap().with_fio_names();
            args.map(|args| args.engine.engine).map_err(|error| error.to_string())
        };
        assert_eq!(engine("--ioengine=libaio"), Ok(EngineChoice::Aio));
        assert_eq!(engine("--ioengine=psync"), Ok(EngineChoice::Threads));
        assert_eq!(engine("--ioengine=libaio --engine=io_uring"), Ok(EngineChoice::IoUring));
        assert!(engine("--ioengine=rbd").unwrap_err().contains("--engine io_uring"));
    }
}
