//! The options and limits of a process that takes over.

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{Running, ringhaul_under};
use ringhaul_kit::control::taking_over;
use serde_json::{Value, json};

use crate::takeover::{Client, TAKEN, begin};
use crate::{DISK_BYTES, test_folders};

/// A takeover keeps the level and form of the log, even if they come from a file.
#[test]
fn a_takeover_keeps_the_settings_of_the_log() -> Result<()> {
    let folders = test_folders()?;
    let config = folders.path("config.toml");
    std::fs::write(&config, "log-format = \"json\"\nlog = \"debug\"\n")?;
    let mut command = begin(&folders)?;
    let mut daemon = Running::serve(command.arg("--config").arg(&config))?;
    let mut set = Vec::new();
    set.push(Client::new(&folders)?.call("set", &json!({}))?["result"].take());
    for _ in 0..2 {
        let mut next = Running::start(&mut taking_over(&folders)?)?;
        let line: Value = serde_json::from_str(&next.wait_for(TAKEN)?)?;
        ensure!(line["level"] == "INFO", "{line}");
        daemon.finish()?.expect_code(0)?;
        daemon = next;
        set.push(Client::new(&folders)?.call("set", &json!({}))?["result"].take());
    }
    ensure!(set.iter().all(|set| set["log"] == "debug"), "{set:?}");
    // A process that takes over may override them.
    let mut next = taking_over(&folders)?;
    let next = Running::start(next.args(["--log", "warn", "--log-format", "text"]))?;
    daemon.finish()?.expect_code(0)?;
    let set = Client::new(&folders)?.call("set", &json!({}))?;
    ensure!(set["result"]["log"] == "warn", "{set}");
    Client::new(&folders)?.call("shutdown", &json!({}))?;
    next.finish()?.expect_code(0)?;
    Ok(())
}

/// The usual limit is too low for the descriptors of many exports, and is raised before they
/// arrive.
#[test]
fn a_low_limit_on_open_files_is_raised_in_time() -> Result<()> {
    let folders = test_folders()?;
    let mut command = begin(&folders)?;
    for number in 0..12 {
        let disk = folders.disk(&format!("{number}.img"), DISK_BYTES)?;
        let socket = folders.socket(&format!("{number}.sock"));
        let export = format!("socket-path={},blk-file={}", socket.display(), disk.display());
        command.args(["--export", &export]);
    }
    let daemon = Running::serve(&mut command)?;
    let mut next = ringhaul_under(&["sh", "-c", "ulimit -Sn 16; exec \"$@\"", "sh"])?;
    next.args(["serve", "--takeover"]).arg(folders.socket("control"));
    let mut next = Running::start(&mut next)?;
    next.wait_for("took over 13 exports")?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}
