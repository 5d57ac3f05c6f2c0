//! `cargo xtask loom`: runs the models of state that threads share, in loom and then in shuttle.

use std::time::Duration;

use anyhow::{Result, bail};
use ringhaul_tools::process::{Interrupt, ManagedChild, describe};
use ringhaul_tools::workspace;

/// Runs the models. Each checker has a separate build.
pub(crate) fn run() -> Result<()> {
    let interrupt = Interrupt::install()?;
    for checker in ["loom", "shuttle"] {
        println!("loom: the models in {checker}");
        let mut command = workspace::cargo();
        command
            .args(["test", "--package", "blockio", "--lib", "model_tests"])
            .env("CARGO_TARGET_DIR", workspace::target_dir()?.join(checker))
            .env("RUSTFLAGS", format!("--cfg {checker}"))
            // There are thousands of schedules: slow code costs more time than its optimisation.
            .env("CARGO_PROFILE_TEST_OPT_LEVEL", "2")
            .env("CARGO_PROFILE_DEV_OPT_LEVEL", "2");
        let status = ManagedChild::start(checker, &mut command, &interrupt)?.wait(Duration::MAX)?;
        if !status.success() {
            bail!("the models in {checker}: {}; what failed is above", describe(status));
        }
    }
    Ok(())
}
