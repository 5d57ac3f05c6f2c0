//! `cargo xtask neighbours`: how fast an export is while another one of its IoThread misbehaves.

use anyhow::{Context, Result, bail};

use crate::workspace;

/// Options of `cargo xtask neighbours`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs the measurement that stands beside the tests of neighbours, and prints its table. The
/// machine should do nothing else: spans are short, and quiet and disturbed ones take turns.
pub(crate) fn run(_: &Args) -> Result<()> {
    let binary = workspace::ringhaul_binary()?;
    let output = workspace::cargo()
        .args(["test", "--quiet", "--package", "ringhaul-tests", "--test", "neighbours"])
        .args(["--", "--ignored", "--nocapture", "report"])
        .env("RINGHAUL_BIN", std::path::absolute(binary)?)
        .output()
        .context("running the measurement")?;
    let text = String::from_utf8_lossy(&output.stdout);
    for line in text.lines().filter(|line| line.starts_with("| ") || line.starts_with("|-")) {
        println!("{line}");
    }
    if !output.status.success() {
        eprintln!("{text}{}", String::from_utf8_lossy(&output.stderr));
        bail!("the measurement failed");
    }
    Ok(())
}
