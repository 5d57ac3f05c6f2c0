//! Front-ends of a killed daemon, whose descriptors a service manager passes to the next process.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{READY, Running, TestFolders, ringhaul, run};
use ringhaul_kit::frontend::{Frontend, Setup};
use ringhaul_kit::server::ringhaul_binary;
use ringhaul_kit::service_manager::ServiceManager;
use rustix::process::Signal;
use serde_json::json;

use super::control::Client;
use super::{DISK_BYTES, test_folders};

/// A daemon under a manager, with the export `vm`. A command adds `late`, so that the next process
/// goes on without it.
fn complete(folders: &TestFolders, command: &mut Command) -> Result<()> {
    command.args(["--keep-connections", "on", "--engine", "threads", "--name", "vm"]);
    command.arg("--socket-path").arg(folders.socket("vm.sock"));
    command.arg("--blk-file").arg(folders.path("vm.img"));
    command.arg("--control").arg(folders.socket("control"));
    Ok(())
}

fn forgets(messages: &[String], name: &str) -> bool {
    messages.iter().any(|text| *text == format!("FDSTOREREMOVE=1\nFDNAME={name}\n"))
}

/// Two front-ends whose daemon was killed, and the next process, which serves the first one and
/// cannot open the disk of the second one.
struct Killed {
    manager: ServiceManager,
    next: Running,
    served: Frontend,
    left: Frontend,
}

impl Killed {
    fn new(folders: &TestFolders) -> Result<Self> {
        folders.disk("vm.img", DISK_BYTES)?;
        let late = folders.disk("late.img", DISK_BYTES)?;
        let (control, manager) = (folders.socket("control"), folders.socket("manager"));
        let mut command = ringhaul()?;
        let path = manager;
        let manager = ServiceManager::listen(&path, &mut command)?;
        complete(folders, command.arg("serve"))?;
        let mut daemon = Running::serve(&mut command)?;
        let mut served = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
        served.write(0, 8, &[5; 4096])?;
        manager.wait_stored(&["rh-0"])?;
        let socket = folders.socket("late.sock");
        let spec = json!({ "name": "late", "endpoint": { "path": socket },
            "device": { "blk": { "file": late } } });
        let added = Client::new(&control)?.call("export.add", &spec)?;
        ensure!(added["error"].is_null(), "{added}");
        let left = Frontend::attach(&socket, &Setup::default())?;
        manager.wait_stored(&["rh-0", "rh-1"])?;
        daemon.signal(Signal::KILL)?;
        daemon.finish()?;
        std::fs::remove_file(late)?;
        let mut next = manager.start_with_stored(&path, |command| complete(folders, command))?;
        next.wait_for("late: cannot be restored")?;
        next.wait_for(READY)?;
        // The names of stored descriptors are not used again.
        manager.wait_stored(&["rh-1", "rh-2"])?;
        let _ = manager.arrived();
        ensure!(served.read(0, 8, 4096)? == [5; 4096], "its queues have not resumed");
        Ok(Self { manager, next, served, left })
    }
}

fn ctl(control: &Path, words: &[&str]) -> Result<()> {
    run(ringhaul()?.args(["ctl", "--control"]).arg(control).args(words))?.expect_code(0)?;
    Ok(())
}

/// The manager refuses messages of the old process once it knows the new one, which stores under
/// the same names.
#[test]
fn an_upgrade_forgets_stored_descriptors_before_the_manager_knows_the_new_process() -> Result<()> {
    let folders = test_folders()?;
    let Killed { manager, next, mut served, mut left } = Killed::new(&folders)?;
    let control = folders.socket("control");
    ctl(&control, &["upgrade", &ringhaul_binary()?.display().to_string()])?;
    let messages = manager.wait_for("MAINPID=")?;
    for name in ["rh-1", "rh-2"] {
        ensure!(forgets(&messages, name), "{name} is stored for ever: {messages:?}");
    }
    manager.wait_stored(&["rh-0"])?;
    ensure!(served.read(0, 8, 4096)? == [5; 4096], "its queues have not resumed");
    ensure!(left.channel.receive()?.is_none(), "no process serves this front-end");
    ctl(&control, &["shutdown", "--wait"])?;
    manager.wait_stored(&[])?;
    next.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn the_end_of_the_service_forgets_all_stored_descriptors() -> Result<()> {
    let folders = test_folders()?;
    let Killed { manager, mut next, served, left } = Killed::new(&folders)?;
    next.signal(Signal::TERM)?;
    next.finish()?.expect_code(0)?;
    manager.wait_stored(&[])?;
    for mut frontend in [served, left] {
        ensure!(frontend.channel.receive()?.is_none(), "no process serves this front-end");
    }
    Ok(())
}
