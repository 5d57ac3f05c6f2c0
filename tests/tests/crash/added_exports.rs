//! Exports that a control command has added, with limits that another command has set: a kill
//! removes neither.

use std::fs::File;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::LIMIT;
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::message::Channel;
use ringhaul_kit::server::{Engine, Program, Server};
use ringhaul_tools::process::{is_listening, retry};
use serde_json::json;

use super::driver::{BLOCK_BYTES, Driver, FEW_BLOCKS, check_file};
use super::{end, export, rounds};

for_each_engine! {
    an_added_export_survives_kills_with_its_limits,
    an_added_unit_survives_kills_with_its_limits,
}

const ROUNDS_DEFAULT: u32 = 8;

fn an_added_export_survives_kills_with_its_limits(engine: Engine) -> Result<()> {
    let folders = [tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?, tempfile::tempdir()?];
    let [first, disk] = ["first.img", "added.img"].map(|name| folders[0].path().join(name));
    for path in [&first, &disk] {
        File::create(path)?.set_len(FEW_BLOCKS * BLOCK_BYTES as u64)?;
    }
    let export = export(&first, &folders[1].path().join("socket"), engine, true);
    let mut server = Server::start(Program::Ringhaul, &export)?;
    let socket = folders[1].path().join("added.sock");
    let added = json!({
        "name": "added", "endpoint": { "path": socket }, "device": { "blk": { "file": disk } },
    });
    server.call("export.add", &added)?;
    let limits = json!({ "iops-total": 20_000, "bps-total": 1 << 30 });
    let set = json!({ "export": "added", "limits": limits, "werror": "hold" });
    server.call("disk.set", &set)?;
    let mut driver = Driver::new(&socket, FEW_BLOCKS, true)?;
    driver.attach()?;
    let mut left = 0;
    for round in 0..rounds(ROUNDS_DEFAULT)? {
        left += kill_under_load(server, &mut driver)?;
        // The same command line, which names only the first export.
        server = Server::start(Program::Ringhaul, &export)?;
        // The start opens disks side by side, and listens for each export when its disk is open.
        while !is_listening(&socket)? {
            server.check_running()?;
            std::thread::yield_now();
        }
        driver.frontend.channel = Channel::connect(&socket)?;
        driver.attach()?;
        driver.run(1, false)?;
        let holds = server.call("disk.set", &json!({ "export": "added" }))?;
        ensure!(holds["limits"] == limits && holds["werror"] == "hold", "round {round}: {holds}");
    }
    driver.run(0, true)?;
    ensure!(left > 0, "no kill left a request without an answer");
    check_file(&disk, &end(server, driver)?)
}

/// Kills a server under load. Returns the number of requests that it leaves without an answer.
fn kill_under_load(mut server: Server, driver: &mut Driver) -> Result<usize> {
    let count = 1 + driver.below(300);
    driver.run(count, false)?;
    driver.run_below(300, true)?;
    server.kill()?;
    drop(server);
    driver.take()?;
    Ok(driver.unanswered())
}

/// Commands that a killed process had taken wait for the unit, and none fails.
fn an_added_unit_survives_kills_with_its_limits(engine: Engine) -> Result<()> {
    const LUN: u8 = 5;
    let folders = [tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?, tempfile::tempdir()?];
    let [first, disk] = ["first.img", "added.img"].map(|name| folders[0].path().join(name));
    for path in [&first, &disk] {
        File::create(path)?.set_len(FEW_BLOCKS * BLOCK_BYTES as u64)?;
    }
    let mut export = export(&first, &folders[1].path().join("socket"), engine, true);
    export.units = Some(Vec::new());
    let mut server = Server::start(Program::Ringhaul, &export)?;
    let unit = json!({ "lun": LUN, "disk": { "file": disk } });
    let added = json!({ "export": export.socket, "unit": unit });
    // The start may still be opening the first disk.
    retry(LIMIT, || server.call("lun.add", &added).map(drop))?;
    let disk_of_unit = json!({ "export": export.socket, "lun": LUN });
    let limits = json!({ "iops-total": 20_000 });
    let set = json!({ "export": export.socket, "lun": LUN, "limits": limits, "rerror": "retry" });
    server.call("disk.set", &set)?;
    let mut driver = Driver::for_unit(&export.socket, FEW_BLOCKS, LUN)?;
    driver.attach()?;
    let mut left = 0;
    for round in 0..rounds(ROUNDS_DEFAULT)? {
        left += kill_under_load(server, &mut driver)?;
        // The same command line, which does not name the unit.
        server = Server::start(Program::Ringhaul, &export)?;
        driver.frontend.channel = Channel::connect(&export.socket)?;
        driver.attach()?;
        driver.run(1, false).with_context(|| format!("round {round}; {}", server.messages()))?;
        let holds = server.call("disk.set", &disk_of_unit)?;
        ensure!(holds["limits"] == limits && holds["rerror"] == "retry", "round {round}: {holds}");
    }
    driver.run(0, true)?;
    ensure!(left > 0, "no kill left a command without an answer");
    check_file(&disk, &end(server, driver)?)
}
