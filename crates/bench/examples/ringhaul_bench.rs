//! The load generator as a program of its own, for measuring any vhost-user-blk
//! or vhost-user-scsi server.

use std::process::ExitCode;

use clap::Parser;
use ringhaul_bench::{BenchArgs, BenchError};

/// Drives a vhost-user-blk or vhost-user-scsi server and reports how fast it is.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    bench: BenchArgs,
}

fn main() -> ExitCode {
    ringhaul_bench::run(&Cli::parse().bench).unwrap_or_else(|error| {
        eprintln!("ringhaul_bench: {error:#}");
        error
            .downcast_ref()
            .map_or(ExitCode::FAILURE, |error: &BenchError| ExitCode::from(error.exit_code()))
    })
}
