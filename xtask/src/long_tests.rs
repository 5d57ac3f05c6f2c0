//! Tests that run until they are long enough: the simulation, kills of the daemon, and models.

use std::ffi::OsString;

use anyhow::Result;
use ringhaul_tools::process::{Interrupt, ManagedChild};
use ringhaul_tools::workspace;

/// Options of `cargo xtask sim`.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct SimArgs {
    /// Options of the simulation; `--help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    options: Vec<OsString>,
}

/// Options of `cargo xtask crash`.
#[derive(clap::Args)]
pub(crate) struct CrashArgs {
    /// Number of kills of the daemon, with each engine and kind of disk
    #[arg(long, default_value_t = 1000)]
    rounds: u32,
}

/// The flags of rustc that build the product with a simulated kernel.
pub(crate) const SIM_RUSTFLAGS: &str = "--cfg ringhaul_sim";

/// [`SIM_RUSTFLAGS`] for `cargo --config`.
pub(crate) const SIM_CONFIG: &str = "build.rustflags='--cfg ringhaul_sim'";

/// The cargo arguments that build the simulation: optimised, and with all assertions. The
/// simulation has its own profile, which separates builds with its flags from builds without.
pub(crate) const SIM_PACKAGE: &[&str] =
    &["--quiet", "--config", SIM_CONFIG, "--profile", "sim", "--package", "ringhaul-sim"];

/// Runs the data path against a simulated kernel and a model guest.
pub(crate) fn sim(args: &SimArgs) -> Result<()> {
    let interrupt = Interrupt::install()?;
    let mut command = workspace::cargo();
    command.arg("run").args(SIM_PACKAGE).arg("--").args(&args.options);
    ManagedChild::run("the simulation", &mut command, &interrupt)
}

/// Builds the daemon and kills it many times, under a driver that keeps its inflight region, on a
/// file and on a qcow2 image.
pub(crate) fn crash(args: &CrashArgs) -> Result<()> {
    let interrupt = Interrupt::install()?;
    let mut command = workspace::cargo();
    command
        .args(["test", "--package", "ringhaul-tests", "--test", "crash", "--"])
        .args(["--nocapture", "--test-threads", "1"])
        .env("RINGHAUL_BIN", workspace::ringhaul_binary()?)
        .env("RINGHAUL_CRASH_ROUNDS", args.rounds.to_string());
    ManagedChild::run("kills of the daemon", &mut command, &interrupt)
}

/// Runs the models of state that threads share. Each checker has a separate build.
pub(crate) fn models() -> Result<()> {
    let interrupt = Interrupt::install()?;
    for checker in ["loom", "shuttle"] {
        println!("loom: the models in {checker}");
        let mut command = workspace::cargo();
        command
            .args(["test", "--package", "blockio", "--lib", "model_tests"])
            .env("CARGO_TARGET_DIR", workspace::target_dir()?.join(checker))
            .env("RUSTFLAGS", format!("--cfg {checker}"))
            // There are thousands of schedules: slow code costs more time than some optimisation.
            .env("CARGO_PROFILE_TEST_OPT_LEVEL", "1")
            .env("CARGO_PROFILE_DEV_OPT_LEVEL", "1");
        ManagedChild::run(&format!("the models in {checker}"), &mut command, &interrupt)?;
    }
    Ok(())
}
