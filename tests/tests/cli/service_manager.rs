//! The daemon under a service manager: notifications, and sockets that the manager passes.

use std::fs;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{Refusals, Running, TestFolders, bench, ringhaul, ringhaul_under, run};
use ringhaul_kit::frontend::{Frontend, Setup};
use ringhaul_kit::server::ringhaul_binary;
use ringhaul_kit::service_manager::ServiceManager;
use rustix::process::Signal;
use serde_json::json;

use super::control::Client;
use super::{DISK_BYTES, test_folders};

const READY: &str = "READY=1\n";
const ALIVE: &str = "WATCHDOG=1\n";

const SOME_IO: &str = "--rw randrw --number_ios 200 --iodepth 8 --size 4m --verify";

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
    let messages = manager.wait_for(READY)?;
    let state = messages.iter().rfind(|message| message.starts_with("STATUS="));
    let served = "STATUS=1 export served, 0 with a front-end\n";
    ensure!(state.is_some_and(|state| state == served), "its state is late: {messages:?}");
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
    fs::write(&file, format!("{}{}", export("a"), export("b")))?;
    daemon.signal(Signal::HUP)?;
    manager.wait_for(both_served)?;

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

/// `ringhaul serve` with a socket that a service manager passes once under each of these names.
fn serve_passed(listener: &UnixListener, names: &[&str]) -> Result<Command> {
    let passed = ["", "3<&0", "3<&0 4<&0"][names.len()];
    let shell = format!("export LISTEN_PID=$$; exec \"$@\" {passed} </dev/null");
    let mut command = ringhaul_under(&["sh", "-c", &shell, "sh"])?;
    command.env("LISTEN_FDS", names.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
    command.arg("serve").stdin(Stdio::from(std::os::fd::OwnedFd::from(listener.try_clone()?)));
    Ok(command)
}

fn with_export<'a>(command: &'a mut Command, folders: &TestFolders) -> Result<&'a mut Command> {
    let disk = folders.disk("disk.img", DISK_BYTES)?;
    command.args(["--name", "vm1", "--socket-path"]).arg(folders.socket("vm.sock"));
    Ok(command.arg("--blk-file").arg(disk))
}

#[test]
fn a_passed_socket_serves_an_export() -> Result<()> {
    let binary = ringhaul_binary()?.display().to_string();
    for name in ["vm1", "ringhaul-vm1.socket"] {
        let folders = test_folders()?;
        let (vm, control) = (folders.socket("vm.sock"), folders.socket("control"));
        let listener = UnixListener::bind(&vm)?;
        let mut command = serve_passed(&listener, &[name])?;
        let daemon =
            Running::serve(with_export(&mut command, &folders)?.arg("--control").arg(&control))?;
        run(&mut bench(&vm, SOME_IO)?)?.expect_code(0)?;
        let ctl = |words: &[&str]| {
            run(ringhaul()?.args(["ctl", "--control"]).arg(&control).args(words))?.expect_code(0)
        };
        // It is there for the next export with this path, also in the process after an upgrade.
        let again = json!({
            "name": "vm1",
            "endpoint": { "path": vm },
            "device": { "blk": { "file": folders.path("disk.img") } },
        });
        for _ in 0..2 {
            ctl(&["remove", "vm1"])?;
            let added = Client::new(&control)?.call("export.add", &again)?;
            ensure!(added["error"].is_null(), "{added}");
            run(&mut bench(&vm, SOME_IO)?)?.expect_code(0)?;
            ctl(&["upgrade", &binary])?;
        }
        run(&mut bench(&vm, SOME_IO)?)?.expect_code(0)?;
        ctl(&["shutdown", "--wait"])?;
        daemon.finish()?.expect_code(0)?;
        ensure!(UnixStream::connect(&vm).is_ok(), "the manager's socket is gone");
    }
    Ok(())
}

/// `--fd` names a socket that the manager passes, too.
#[test]
fn a_passed_socket_may_have_a_number_in_place_of_a_name() -> Result<()> {
    let folders = test_folders()?;
    let vm = folders.socket("vm.sock");
    let listener = UnixListener::bind(&vm)?;
    let mut command = serve_passed(&listener, &["unknown"])?;
    command.args(["--name", "vm1", "--fd", "3", "--blk-file"]);
    let mut daemon = Running::serve(command.arg(folders.disk("disk.img", DISK_BYTES)?))?;
    run(&mut bench(&vm, SOME_IO)?)?.expect_code(0)?;
    daemon.signal(Signal::TERM)?;
    let log = daemon.finish()?.expect_code(0)?.stderr;
    ensure!(!log.contains("the service manager passes the socket"), "{log}");
    Ok(())
}

#[test]
fn a_passed_control_socket_is_used() -> Result<()> {
    let folders = test_folders()?;
    let control = folders.socket("control");
    let listener = UnixListener::bind(&control)?;
    let mut command = serve_passed(&listener, &["control"])?;
    let daemon =
        Running::serve(with_export(&mut command, &folders)?.arg("--control").arg(&control))?;
    let binary = ringhaul_binary()?.display().to_string();
    for words in [&["upgrade", &binary][..], &["shutdown"][..]] {
        let mut ctl = ringhaul()?;
        run(ctl.args(["ctl", "--control"]).arg(&control).args(words))?.expect_code(0)?;
    }
    let log = daemon.finish()?.expect_code(0)?.stderr;
    ensure!(!log.contains("the service manager passes the socket"), "{log}");
    ensure!(control.exists(), "the manager's socket is gone");
    Ok(())
}

#[test]
fn passed_sockets_that_do_not_fit_are_refused() -> Result<()> {
    let folders = test_folders()?;
    let mut refusals = Refusals::default();
    let other = UnixListener::bind(folders.socket("other.sock"))?;
    let begin = |names: &[&str]| -> Result<Command> {
        let mut command = serve_passed(&other, names)?;
        with_export(&mut command, &folders)?;
        Ok(command)
    };
    refusals.check("path", begin(&["vm1"]), &["other.sock", "'vm1'", "ListenStream="]);
    refusals.check("control", begin(&["control"]), &["other.sock", "add --control"]);
    // Either could be that of the export.
    refusals.check("names", begin(&["a", "a"]), &["under the name 'a'", "FileDescriptorName="]);
    let twice = begin(&["a:a"]).map(|mut command| {
        command.env("LISTEN_FDS", "2");
        command
    });
    refusals.check("closed", twice, &["descriptor 4 ('a')", "Accept=no"]);
    refusals.finish()?;

    // It belongs to another export, which may be added later.
    let mut daemon = Running::serve(&mut begin(&["vm2"])?)?;
    daemon.signal(Signal::TERM)?;
    let log = daemon.finish()?.expect_code(0)?.stderr;
    ensure!(log.contains("WARN the service manager passes the socket"), "{log}");
    // The variables are for another process.
    let mut command = ringhaul()?;
    command.arg("serve").env("LISTEN_PID", "1").env("LISTEN_FDS", "1");
    let mut daemon = Running::serve(with_export(&mut command, &folders)?)?;
    daemon.signal(Signal::TERM)?;
    let log = daemon.finish()?.expect_code(0)?.stderr;
    ensure!(!log.contains("service manager"), "{log}");
    Ok(())
}
