//! Options of the sandbox, for a daemon and for the process that takes over from it.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, ringhaul, ringhaul_under, run};
use ringhaul_kit::server::ringhaul_binary;
use ringhaul_kit::system::print_skipped;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::control::Client;
use super::{is_root, test_folders};

/// Bits of capabilities.
const CHOWN: u32 = 0;
const SYS_ADMIN: u32 = 21;

/// Starts a daemon with these words, under a program.
fn serve(folders: &TestFolders, under: &[&str], words: &[&str]) -> Result<Running> {
    let mut command = if under.is_empty() { ringhaul()? } else { ringhaul_under(under)? };
    command.args(["serve", "--device", "scsi", "--lun", "0,null=1M", "--socket-path"]);
    command.arg(folders.socket("vm.sock")).arg("--control").arg(folders.socket("control"));
    Running::serve(command.args(words))
}

/// The process that serves, as it describes itself.
fn process(control: &Path) -> Result<Value> {
    let answer = Client::new(control)?.call("process", &json!({}))?;
    Ok(answer["result"].clone())
}

fn capabilities(process: &Value) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process["process"]))?;
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    Ok(u64::from_str_radix(line.context("no CapEff")?.trim(), 16)?)
}

#[test]
fn named_capabilities_are_kept() -> Result<()> {
    if !is_root() {
        print_skipped("only root has capabilities");
        return Ok(());
    }
    for (words, is_kept) in [(&[][..], false), (&["--keep-capability", "CAP_SYS_ADMIN"], true)] {
        let folders = test_folders()?;
        let mut daemon = serve(&folders, &[], words)?;
        let has = capabilities(&process(&folders.socket("control"))?)?;
        ensure!((has >> SYS_ADMIN & 1 == 1) == is_kept, "{words:?}: {has:#x}");
        ensure!(has >> CHOWN & 1 == 0, "{words:?}: {has:#x}");
        daemon.signal(Signal::TERM)?;
        daemon.finish()?.expect_code(0)?;
    }
    Ok(())
}

/// The permissions of the socket and the firewall, which the error names, are not the reason.
#[test]
fn a_place_that_the_sandbox_denies_is_named_with_its_option() -> Result<()> {
    let folders = test_folders()?;
    let daemon = serve(&folders, &[], &[])?;
    let new = folders.socket("new.sock").display().to_string();
    for (socket, disk, option) in [
        (&*new, "nbd://127.0.0.1:1/disk", "restart the daemon with --allow-network"),
        (&new, "nbd,socket=/nowhere", "restart the daemon with --allow-network"),
        ("/etc/new.sock", "null:1M", "start the daemon with --allow-socket-dir /etc"),
    ] {
        let mut add = ringhaul()?;
        add.args(["ctl", "--control"]).arg(folders.socket("control")).arg("add");
        add.args(["--socket-path", socket, "--disk", disk]);
        let refused = run(&mut add)?.expect_code(1)?.stderr;
        ensure!(refused.contains(option), "{disk} on {socket}: {refused}");
    }
    drop(daemon);
    Ok(())
}

/// The old process may be under the control of a guest: it states the options of the new one.
#[test]
fn a_confined_process_switches_the_sandbox_of_its_successor_off_by_no_option() -> Result<()> {
    let folders = test_folders()?;
    let control = folders.socket("control");
    let daemon = serve(&folders, &["setpriv", "--no-new-privs"], &["--sandbox", "off"])?;
    let upgrade = |words: &[&str]| -> Result<_> {
        let mut ctl = ringhaul()?;
        ctl.args(["ctl", "--control"]).arg(&control).arg("upgrade").args(words);
        run(ctl.arg(ringhaul_binary()?))
    };
    let refused = upgrade(&[])?.expect_code(5)?.stderr;
    ensure!(refused.contains("ctl upgrade --sandbox off"), "{refused}");
    let before = process(&control)?;
    ensure!(before["sandbox"] == "off", "{before}");
    upgrade(&["--sandbox", "on"])?.expect_code(0)?;
    let confined = process(&control)?;
    ensure!(confined["sandbox"] == "on" && confined["process"] != before["process"], "{confined}");
    upgrade(&["--sandbox", "off"])?.expect_code(0)?;
    ensure!(process(&control)?["sandbox"] == "off", "the caller decides");
    Client::new(&control)?.call("shutdown", &json!({}))?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn a_process_that_was_never_confined_is_replaced_as_it_is() -> Result<()> {
    if std::fs::read_to_string("/proc/self/status")?.contains("NoNewPrivs:\t1") {
        print_skipped("the test itself has no new privileges");
        return Ok(());
    }
    let folders = test_folders()?;
    let control = folders.socket("control");
    let daemon = serve(&folders, &[], &["--sandbox", "off"])?;
    let mut ctl = ringhaul()?;
    ctl.args(["ctl", "--control"]).arg(&control).arg("upgrade");
    run(ctl.arg(ringhaul_binary()?))?.expect_code(0)?;
    ensure!(process(&control)?["sandbox"] == "off", "it has another sandbox");
    Client::new(&control)?.call("shutdown", &json!({}))?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}
