//! The load generator as a program of its own, for measuring any vhost-user-blk server.

use std::process::ExitCode;

use clap::Parser;
use ringhaul_bench::BenchArgs;

/// Drives a vhost-user-blk server and says how fast it is.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    bench: BenchArgs,
}

fn main() -> anyhow::Result<ExitCode> {
    ringhaul_bench::run(&Cli::parse().bench)
}
