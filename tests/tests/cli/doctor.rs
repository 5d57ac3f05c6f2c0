//! `ringhaul ctl doctor`: findings that a daemon, a front-end and limits of the system cause.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Finished, READY, Running, TestFolders, ringhaul, run, serve};
use ringhaul_kit::frontend::{Frontend, Setup, protocol_feature};
use ringhaul_kit::service_manager::ServiceManager;
use serde_json::Value;

use crate::{DISK_BYTES, test_folders};

fn start(folders: &TestFolders, options: &[&str]) -> Result<Running> {
    folders.disk("disk.img", DISK_BYTES)?;
    let mut command = serve(&folders.socket("vm.sock"), &folders.path("disk.img"))?;
    command.args(["--name", "vm", "--control"]).arg(folders.socket("control")).args(options);
    Running::serve(&mut command)
}

fn doctor(folders: &TestFolders, words: &[&str]) -> Result<Finished> {
    let mut command = ringhaul()?;
    command.args(["ctl", "--control"]).arg(folders.socket("control"));
    run(command.args(["doctor", "--time", "0.3"]).args(words))
}

/// The findings about the export `vm`, or with `None` about the host.
pub(super) fn findings(folders: &TestFolders, export: Option<&str>) -> Result<Vec<Value>> {
    let answer: Value = serde_json::from_str(&doctor(folders, &["--json"])?.stdout)?;
    let all = answer["findings"].as_array().context("no list")?.iter();
    Ok(all.filter(|finding| finding["export"].as_str() == export).cloned().collect())
}

/// A front-end with an inflight region, as QEMU has it.
pub(super) fn healthy() -> Setup {
    let usual = Setup::default();
    let region = protocol_feature::INFLIGHT_SHMFD;
    let protocol_features = usual.protocol_features.map(|features| features | region);
    Setup { protocol_features, ..usual }
}

#[test]
fn a_healthy_export_has_no_finding() -> Result<()> {
    let folders = test_folders()?;
    let _daemon = start(&folders, &[])?;
    let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &healthy())?;
    frontend.read(0, 0, 4096)?;
    let found = findings(&folders, Some("vm"))?;
    ensure!(found.is_empty(), "{found:#?}");
    // Other programs may use up limits of the host.
    let is_host_healthy = findings(&folders, None)?.iter().all(|it| it["level"] == "note");
    if is_host_healthy {
        doctor(&folders, &[])?.expect_code(0)?;
    }
    Ok(())
}

#[test]
fn a_guest_without_shared_memory_is_found_first() -> Result<()> {
    let folders = test_folders()?;
    let _daemon = start(&folders, &[])?;
    let mut frontend = Frontend::connect(&folders.socket("vm.sock"), &Setup::default())?;
    frontend.negotiate()?;
    frontend.start_queue(0, 0)?;
    frontend.enable_queue(0, true)?;
    let lines = doctor(&folders, &["vm"])?.expect_code(1)?.stdout;
    let first = lines.lines().next().unwrap_or_default();
    ensure!(first.starts_with("harmful  vm  memory-not-shared  "), "{lines}");
    let process = format!("process {}", std::process::id());
    ensure!(first.contains(&process) && first.contains("share=on"), "{lines}");
    Ok(())
}

#[test]
fn a_front_end_without_an_inflight_region_is_found() -> Result<()> {
    let folders = test_folders()?;
    let _daemon = start(&folders, &[])?;
    let frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    let found = findings(&folders, Some("vm"))?;
    ensure!(found.len() == 1 && found[0]["finding"] == "no-inflight-region", "{found:#?}");
    ensure!(found[0]["level"] == "warning", "{found:#?}");
    doctor(&folders, &["vm"])?.expect_code(1)?;
    drop(frontend);
    loop {
        // The daemon sees the end of the connection later.
        let found = findings(&folders, Some("vm"))?;
        if found.iter().any(|finding| finding["finding"] == "no-front-end") {
            return Ok(());
        }
    }
}

/// The daemon has a region for a connection that the service manager keeps.
#[test]
fn a_front_end_that_survives_kills_has_no_finding() -> Result<()> {
    let folders = test_folders()?;
    folders.disk("disk.img", DISK_BYTES)?;
    let mut command = serve(&folders.socket("vm.sock"), &folders.path("disk.img"))?;
    command.args(["--name", "vm", "--keep-connections", "on", "--control"]);
    let manager =
        ServiceManager::listen(&folders.socket("manager"), command.arg(folders.socket("control")))?;
    let _daemon = Running::serve(&mut command)?;
    let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    frontend.read(0, 0, 4096)?;
    manager.wait_stored(&["rh-0"])?;
    let found = findings(&folders, Some("vm"))?;
    ensure!(found.is_empty(), "{found:#?}");
    Ok(())
}

/// Everything that a bug report needs is in one file, for its owner only.
#[test]
fn a_bundle_is_complete_and_private() -> Result<()> {
    let folders = test_folders()?;
    let serial = "a://user:hidden@h";
    let _daemon = start(&folders, &["--serial", serial])?;
    let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &healthy())?;
    frontend.read(0, 0, 4096)?;
    let file = folders.path("bundle.json");
    let bundle = |words: &[&str]| {
        let path = file.to_str().context("the path is no text")?;
        doctor(&folders, &[&["--bundle", path], words].concat())
    };
    bundle(&[])?;
    ensure!(fs::metadata(&file)?.permissions().mode() & 0o777 == 0o600);
    let text = fs::read_to_string(&file)?;
    let found: Value = serde_json::from_str(&text)?;
    let options = found["process"]["options"].as_array().context("no options")?;
    let is_given = |word: &str| options.iter().any(|option| option == word);
    ensure!(is_given("--serial") && is_given("a://***@h") && !is_given(serial), "{options:?}");
    ensure!(found["process"]["kernel"].as_str() == Some(&kernel()?), "{text}");
    ensure!(!text.contains("hidden"), "{text}");
    for key in [
        "/ctl/version",
        "/ctl/features",
        "/daemon/version",
        "/daemon/features/0",
        "/stats/exports/0/name",
        "/stats/iothreads/0/name",
        "/settings/log",
    ] {
        ensure!(found.pointer(key).is_some_and(|value| !value.is_null()), "no {key}: {text}");
    }
    ensure!(found["exports"][0]["disks"][0]["engine"].is_string(), "{text}");
    ensure!(found["findings"].is_array(), "{text}");
    // The first look has the peak since the start; the second look has none.
    ensure!(found["stats"]["exports"][0]["depth-peak"] == 1, "{text}");
    let log = found["log"].as_array().context("no log")?;
    let is_logged = |line: &Value| line["text"].as_str().is_some_and(|it| it.contains(READY));
    ensure!(log.iter().any(is_logged), "{log:?}");
    // The findings are printed all the same.
    let refused = bundle(&["--json"])?.expect_code(2)?;
    ensure!(refused.stdout.contains("findings"), "{}", refused.stdout);
    ensure!(refused.stderr.contains("bundle.json; give the path of a new file"), "{text}");
    ensure!(fs::read_to_string(&file)? == text, "the file was changed");
    Ok(())
}

fn kernel() -> Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned())
}

#[test]
fn an_export_that_does_not_exist_is_named() -> Result<()> {
    let folders = test_folders()?;
    let _daemon = start(&folders, &[])?;
    doctor(&folders, &["other"])?.expect_refusal(&["there is no export other"])
}
