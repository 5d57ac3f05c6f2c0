//! The control socket of a daemon, as its users reach it.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::cli::{Running, TestFolders, ringhaul, run};

/// The counters of a daemon's only export.
///
/// # Errors
/// If the daemon does not answer.
pub fn read_counters(control: &Path) -> Result<Value> {
    let mut command = ringhaul()?;
    command.arg("ctl").arg("--control").arg(control).args(["--json", "stats"]);
    let output = run(&mut command)?.expect_code(0)?.stdout;
    let mut stats: Value = serde_json::from_str(&output).context("the counters")?;
    Ok(stats["exports"][0].take())
}

/// The command of a process that takes over from the daemon whose control socket is `control` in
/// `folders`.
///
/// # Errors
/// If there is no program.
pub fn taking_over(folders: &TestFolders) -> Result<Command> {
    let mut command = ringhaul()?;
    command.args(["serve", "--takeover"]).arg(folders.socket("control"));
    Ok(command)
}

/// Starts a process that takes over the only export of `daemon`, and waits for the daemon's end.
///
/// # Errors
/// If either process fails.
pub fn take_over(folders: &TestFolders, daemon: Running) -> Result<Running> {
    let mut next = Running::start(&mut taking_over(folders)?)?;
    next.wait_for("took over 1 export")?;
    daemon.finish()?.expect_code(0)?;
    Ok(next)
}
