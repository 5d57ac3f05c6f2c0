//! `cargo xtask crash`: kills the daemon many times, under a driver that keeps its inflight region,
//! on a file and on a qcow2 image.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_tools::workspace;

/// Options of `cargo xtask crash`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of kills of the daemon, with each engine and kind of disk
    #[arg(long, default_value_t = 1000)]
    rounds: u32,
}

/// Builds the daemon and kills it.
pub(crate) fn run(args: &Args) -> Result<()> {
    let binary = workspace::ringhaul_binary()?;
    let status = Command::new("cargo")
        .args(["test", "--package", "ringhaul-tests", "--test", "crash", "--"])
        .args(["--nocapture", "--test-threads", "1"])
        .env("RINGHAUL_BIN", binary)
        .env("RINGHAUL_CRASH_ROUNDS", args.rounds.to_string())
        .status()
        .context("running cargo test")?;
    ensure!(status.success(), "the daemon has lost something, or done it twice");
    Ok(())
}
