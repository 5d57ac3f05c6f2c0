//! Notifications of a service manager.

use std::fs;

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{Running, ringhaul, run};
use ringhaul_kit::frontend::{Frontend, Setup};
use ringhaul_kit::service_manager::ServiceManager;
use rustix::process::Signal;

use super::test_folders;

const READY: &str = "READY=1\n";
const ALIVE: &str = "WATCHDOG=1\n";

#[test]
fn states_are_reported() -> Result<()> {
    let folders = test_folders()?;
    let socket = |name: &str| folders.socket(&format!("{name}.sock"));
    let export = |name: &str| {
        let path = socket(name).display().to_string();
        format!("[[export]]\nendpoint.path = \"{path}\"\ndevice.blk = \"null:1M\"\n")
    };
    let file = folders.path("ringhaul.toml");
    fs::write(&file, export("a"))?;
    let mut command = ringhaul()?;
    command.args(["serve", "--config"]).arg(&file).env("WATCHDOG_USEC", "400000");
    let manager = ServiceManager::listen(&folders.socket("manager"), &mut command)?;
    let mut daemon = Running::start(&mut command)?;
    manager.wait_for(READY)?;
    ensure!(socket("a").exists(), "it has started before its socket is there");
    for _ in 0..3 {
        manager.wait_for(ALIVE)?;
    }
    let frontend = Frontend::attach(&socket("a"), &Setup::default())?;
    manager.wait_for("STATUS=1 export served, 1 with a front-end\n")?;
    drop(frontend);
    manager.wait_for("STATUS=1 export served, 0 with a front-end\n")?;

    fs::write(&file, format!("{}{}", export("a"), export("b")))?;
    daemon.signal(Signal::HUP)?;
    let reloading = manager.wait_for("RELOADING=1\n")?.pop().unwrap_or_default();
    let since = reloading.strip_prefix("RELOADING=1\nMONOTONIC_USEC=");
    let since = since.and_then(|text| text.trim_end().parse::<u64>().ok());
    ensure!(since.is_some_and(|since| since > 0), "{reloading}");
    let messages = manager.wait_for(READY)?;
    ensure!(socket("b").exists(), "the reload was complete too early");
    let both_served = "STATUS=2 exports served, 0 with a front-end\n";
    if !messages.iter().any(|message| message == both_served) {
        manager.wait_for(both_served)?;
    }
    fs::write(&file, "log = 5")?;
    daemon.signal(Signal::HUP)?;
    manager.wait_for("STATUS=configuration not reloaded: ")?;
    manager.wait_for(READY)?;

    daemon.signal(Signal::TERM)?;
    manager.wait_for("STOPPING=1\n")?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn a_failed_start_has_its_reason_as_status() -> Result<()> {
    let folders = test_folders()?;
    let mut command = ringhaul()?;
    command.args(["serve", "--blk-file", "/missing", "--socket-path"]).arg(folders.socket("a"));
    let manager = ServiceManager::listen(&folders.socket("manager"), &mut command)?;
    run(&mut command)?.expect_code(2)?;
    let messages = manager.wait_for("STATUS=cannot open /missing")?;
    ensure!(!messages.iter().any(|message| message == READY), "{messages:?}");
    Ok(())
}
