//! `ringhaul disk bench`: the options of `ringhaul bench` that apply to a disk.

#![forbid(unsafe_code)]

use std::num::NonZeroU32;
use std::process::ExitCode;
use std::time::Duration;

use blockio::DiskSource;
use clap::Parser;
use ringhaul_options::{EngineChoice, parse_duration};

use crate::args::{BenchArgs, OutputFormat};
use crate::error::BenchError;
use crate::pattern::{BlockSplit, Rw};
use crate::run::run_on;

/// The workload for a disk.
#[derive(Clone, Debug, clap::Args)]
pub struct DiskBenchArgs {
    /// Pattern: read, write, randread, randwrite, rw (mixed), randrw
    #[arg(long, value_name = "PATTERN", default_value = "randread", value_parser = Rw::parse)]
    rw: Rw,

    /// Block size in bytes, or two of them as READ,WRITE
    #[arg(long, value_name = "BYTES", default_value = "4k", value_parser = BlockSplit::parse_sizes)]
    bs: BlockSplit,

    /// Requests kept in flight by each job
    #[arg(long, value_name = "N", default_value = "32")]
    iodepth: NonZeroU32,

    /// Number of jobs; each has an IoThread
    #[arg(long, value_name = "N", default_value = "1")]
    numjobs: NonZeroU32,

    /// Measured time
    #[arg(long, value_name = "TIME", default_value = "10", value_parser = parse_duration)]
    runtime: Duration,

    /// Engine for disk I/O; auto is the choice of `ringhaul serve`
    #[arg(long, value_name = "ENGINE", value_enum, default_value_t = EngineChoice::Auto)]
    engine: EngineChoice,

    /// Write, with patterns that do: the contents of the disk are lost
    #[arg(long)]
    destroy_contents: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Parses the options of `ringhaul bench` from words.
#[derive(Parser)]
struct BenchCommand {
    #[command(flatten)]
    args: BenchArgs,
}

impl DiskBenchArgs {
    /// Returns true if the pattern writes to the disk.
    ///
    /// # Errors
    ///
    /// If the pattern writes and `--destroy-contents` is missing.
    pub fn check_writes(&self) -> Result<bool, BenchError> {
        if self.rw.writes() && !self.destroy_contents {
            return Err(BenchError::Usage(
                "this pattern overwrites the data on the disk; allow it with --destroy-contents, \
                 or use --rw randread or --rw read"
                    .into(),
            ));
        }
        Ok(self.rw.writes())
    }

    /// Drives `disk`, shows it as `name`, and prints the result.
    ///
    /// # Errors
    ///
    /// As for [`run`](crate::run()) and [`check_writes`](Self::check_writes).
    pub fn run(&self, name: &str, disk: DiskSource) -> anyhow::Result<ExitCode> {
        self.check_writes()?;
        let command = BenchCommand::try_parse_from(["bench", "--filename", name])?;
        let mut args = BenchArgs {
            rw: Some(self.rw),
            bs: Some(self.bs.clone()),
            iodepth: Some(self.iodepth),
            numjobs: self.numjobs,
            runtime: Some(self.runtime),
            ..command.args
        };
        args.engine.engine = self.engine;
        if self.json {
            args.output_format = OutputFormat::Json;
        }
        run_on(&args, Some(disk))
    }
}

#[cfg(test)]
mod tests {
    use blockio::DiskOptions;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: DiskBenchArgs,
    }

    fn parse(words: &str) -> DiskBenchArgs {
        Program::parse_from(["bench"].into_iter().chain(words.split_whitespace())).args
    }

    #[test]
    fn writes_are_refused_unless_contents_may_be_lost() {
        for pattern in ["write", "randwrite", "rw", "randrw"] {
            let args = parse(&format!("--rw {pattern}"));
            let disk = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
            let error = args.run("null:1M", disk).unwrap_err().to_string();
            assert!(error.contains("--destroy-contents"), "{error}");
            let args = parse(&format!("--rw {pattern} --destroy-contents"));
            assert!(args.check_writes().unwrap());
        }
        assert!(!parse("--destroy-contents").check_writes().unwrap());
    }

    #[test]
    fn a_layered_disk_is_driven() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4 << 20).unwrap();
        let below = DiskSource::file(file.path(), &DiskOptions::default()).unwrap();
        let disk = DiskSource::raw(below, 1 << 20, None).unwrap();
        let args = parse("--rw randwrite --destroy-contents --runtime 50ms --json");
        assert!(args.run("a part", disk).unwrap() == ExitCode::SUCCESS);
        let content = std::fs::read(file.path()).unwrap();
        assert!(content[..1 << 20].iter().all(|byte| *byte == 0), "it wrote beside the part");
    }
}
