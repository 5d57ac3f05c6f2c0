//! `cargo xtask sim`: the data path against a simulated kernel and a model guest.

use std::ffi::OsString;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};
use ringhaul_tools::process::{Interrupt, ManagedChild, describe};
use ringhaul_tools::workspace;

/// Options of `cargo xtask sim`.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Args {
    /// Options of the simulation; `--help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    options: Vec<OsString>,
}

/// The flags of rustc that build the product with a simulated kernel.
pub(crate) const RUSTFLAGS: &str = "--cfg ringhaul_sim";

/// [`RUSTFLAGS`] for `cargo --config`.
pub(crate) const CONFIG: &str = "build.rustflags='--cfg ringhaul_sim'";

/// The cargo arguments that build the simulation: optimised, and with all assertions. The
/// simulation has its own profile, which separates builds with its flags from builds without.
pub(crate) const PACKAGE: &[&str] =
    &["--quiet", "--config", CONFIG, "--profile", "sim", "--package", "ringhaul-sim"];

pub(crate) fn run(args: &Args) -> Result<()> {
    let interrupt = Interrupt::install()?;
    let mut command: Command = workspace::cargo();
    command.arg("run").args(PACKAGE).arg("--").args(&args.options);
    let status =
        ManagedChild::start("the simulation", &mut command, &interrupt)?.wait(Duration::MAX)?;
    if !status.success() {
        bail!("the simulation ended with {}", describe(status));
    }
    Ok(())
}
