//! Disks that change their size while they are served.

use std::fs::File;
use std::path::Path;

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, ringhaul};
use ringhaul_kit::frontend::{Frontend, Setup};
use ringhaul_kit::fuse::{Fuse, opcode};
use ringhaul_kit::system::{self, LoopDevice, can_change_system};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::control::Client;
use super::test_folders;

const MIB: u64 = 1 << 20;

/// Starts a daemon with these exports, and connects a client.
fn serve(folders: &TestFolders, exports: &[String]) -> Result<(Running, Client)> {
    let control = folders.socket("control");
    let mut command = ringhaul()?;
    command.arg("serve").arg("--control").arg(&control);
    for export in exports {
        command.args(["--export", export]);
    }
    let daemon = Running::serve(&mut command)?;
    Ok((daemon, Client::new(&control)?))
}

fn export(socket: &Path, file: &Path, more: &str) -> String {
    format!("socket-path={},blk-file={}{more}", socket.display(), file.display())
}

fn set_len(file: &Path, bytes: u64) -> Result<()> {
    Ok(File::options().write(true).open(file)?.set_len(bytes)?)
}

#[test]
fn a_disk_is_resized_by_request() -> Result<()> {
    let folders = test_folders()?;
    let (file, read_only) = (folders.disk("disk.img", MIB)?, folders.disk("read-only.img", MIB)?);
    let [blk, other, scsi] = ["blk", "read-only", "scsi"].map(|name| folders.socket(name));
    let units = format!("socket-path={},device=scsi,lun=3,null=1M", scsi.display());
    let all = [export(&blk, &file, ""), export(&other, &read_only, ",read-only=on"), units];
    let (mut daemon, mut client) = serve(&folders, &all)?;
    let mut resize = |params: Value| client.call("disk.resize", &params);
    for (params, size) in [
        (json!({ "export": blk, "size-bytes": 4 * MIB }), 4 * MIB),
        (json!({ "export": blk, "size-bytes": 4 * MIB }), 4 * MIB),
        (json!({ "export": blk, "size-bytes": 2 * MIB, "shrink": true }), 2 * MIB),
        (json!({ "export": blk }), 2 * MIB),
        (json!({ "export": scsi, "lun": 3, "size-bytes": 3 * MIB }), 3 * MIB),
    ] {
        let answer = resize(params.clone())?;
        ensure!(answer["result"] == json!({ "size-bytes": size }), "{params}: {answer}");
    }
    ensure!(std::fs::metadata(&file)?.len() == 2 * MIB, "the file has another size");
    for (params, code, words) in [
        (json!({ "export": blk, "size-bytes": MIB }), 1, "would be lost"),
        (json!({ "export": scsi, "lun": 3, "size-bytes": MIB }), 1, "would be lost"),
        (json!({ "export": blk, "size-bytes": 4 * MIB + 100 }), 1, "not a multiple"),
        (json!({ "export": blk, "size-bytes": 0, "shrink": true }), 1, "a size of zero"),
        (json!({ "export": other, "size-bytes": 2 * MIB }), 1, "it is open read-only"),
        (json!({ "export": blk, "lun": 0 }), 5, "has no logical units"),
        (json!({ "export": scsi }), 5, "name one of its logical units"),
        (json!({ "export": scsi, "target": 1 }), -32602, "names no disk"),
        (json!({ "export": scsi, "lun": 4 }), 2, "has no unit 0:4"),
    ] {
        let answer = resize(params.clone())?;
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        let is_expected = answer["error"]["code"] == code && message.contains(words);
        ensure!(is_expected, "{params}: {answer}");
    }
    ensure!(std::fs::metadata(&file)?.len() == 2 * MIB, "the file has another size");
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// A client that is notified of the end may use the disk, so the disk must not change afterwards.
#[test]
fn an_export_has_not_ended_while_its_file_is_resized() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = test_folders()?;
    let vm = folders.socket("vm");
    let options = ",lock=off,cache=writeback,name=vm";
    let (mut daemon, mut client) = serve(&folders, &[export(&vm, &fuse.file(), options)])?;
    let mut events = Client::new(&folders.socket("control"))?;
    events.call("subscribe", &json!({ "events": ["removed"] }))?;
    // Dropped first: a process with a call that is stuck cannot be killed.
    let fuse = fuse;
    fuse.withhold(daemon.pid(), &[opcode::SETATTR]);
    let resize = std::thread::spawn({
        let control = folders.socket("control");
        move || {
            let size = json!({ "export": "vm", "size-bytes": 2 * MIB });
            Client::new(&control)?.call("disk.resize", &size)
        }
    });
    fuse.wait_for(opcode::SETATTR)?;
    for force in [false, true] {
        let remove = json!({ "export": "vm", "force": force, "deadline-ms": 50 });
        let removed = client.call("export.remove", &remove)?;
        let message = removed["error"]["message"].as_str().unwrap_or_default();
        ensure!(removed["error"]["code"] == 8, "{removed}");
        ensure!(message.contains("its disk is being resized"), "{removed}");
    }
    let shown = client.call("export.show", &json!({ "export": "vm" }))?;
    ensure!(shown["result"]["waits-for"] == "its disk is being resized", "{shown}");
    let early = events.call("ping", &json!({}))?;
    ensure!(early["result"].is_object(), "it has ended: {early}");
    fuse.release();
    let resized = resize.join().expect("it has not panicked")?;
    ensure!(resized["error"]["code"] == 1, "{resized}");
    // The export may already be gone.
    client.call("export.remove", &json!({ "export": "vm" }))?;
    ensure!(super::control::event(&mut events)?["event"] == "removed", "it has not ended");
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// Each export has opened the file by itself.
#[test]
fn all_exports_of_a_disk_take_its_new_size() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", 4 * MIB)?;
    let [one, two, scsi] = ["one", "two", "scsi"].map(|name| folders.socket(name));
    let blk = |socket| export(socket, &file, ",lock=off");
    let unit = |lun| format!("lun={lun},blk-file={},lock=off", file.display());
    let units = format!("socket-path={},device=scsi,{},{}", scsi.display(), unit(0), unit(1));
    let (mut daemon, mut client) = serve(&folders, &[blk(&one), blk(&two), units])?;
    for (params, size) in [
        (json!({ "export": one, "size-bytes": 2 * MIB, "shrink": true }), 2 * MIB),
        (json!({ "export": scsi, "lun": 1, "size-bytes": MIB, "shrink": true }), MIB),
        (json!({ "export": scsi, "lun": 0, "size-bytes": 3 * MIB }), 3 * MIB),
    ] {
        let answer = client.call("disk.resize", &params)?;
        ensure!(answer["result"] == json!({ "size-bytes": size }), "{params}: {answer}");
        for (export, disks) in [(&one, 1), (&two, 1), (&scsi, 2)] {
            let shown = client.call("export.show", &json!({ "export": export }))?;
            ensure!(shown["result"]["size-bytes"] == disks * size, "{params}: {shown}");
        }
    }
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// Growth is passed on. A size below the guest's is passed on only by request.
#[test]
fn a_size_that_another_program_changes_is_noticed() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", 2 * MIB)?;
    let socket = folders.socket("disk.sock");
    let (mut daemon, mut client) = serve(&folders, &[export(&socket, &file, "")])?;
    let mut size = |method: &str| -> Result<Value> {
        let answer = client.call(method, &json!({ "export": socket }))?;
        Ok(answer["result"]["size-bytes"].clone())
    };
    set_len(&file, 3 * MIB)?;
    daemon.wait_for(&format!("the disk has {} bytes, not {}", 3 * MIB, 2 * MIB))?;
    ensure!(size("export.show")? == 3 * MIB, "it is not passed on");
    set_len(&file, 4 * MIB + 1)?;
    daemon.wait_for("not a multiple of the logical block")?;
    set_len(&file, MIB)?;
    daemon.wait_for(&format!("has shrunk to {MIB} bytes, and the guest sees {}", 3 * MIB))?;
    ensure!(size("export.show")? == 3 * MIB, "it is passed on");
    ensure!(size("disk.resize")? == MIB && size("export.show")? == MIB, "it is not passed on");
    daemon.signal(Signal::TERM)?;
    let finished = daemon.finish()?.expect_code(0)?;
    ensure!(finished.stderr.matches("shrunk").count() == 1, "{}", finished.stderr);
    Ok(())
}

#[test]
fn a_device_that_grows_is_noticed_while_a_file_system_hangs() -> Result<()> {
    if !can_change_system("a loop device") {
        return Ok(());
    }
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = test_folders()?;
    let file = folders.disk("device.img", 2 * MIB)?;
    let device = LoopDevice::attach(&file)?;
    let [hung, healthy] = ["hung", "healthy"].map(|name| folders.socket(name));
    let hangs = export(&hung, &fuse.file(), ",read-only=on,lock=off,cache=writeback");
    let (mut daemon, mut client) = serve(&folders, &[hangs, export(&healthy, device.path(), "")])?;
    // Dropped first: a process with a call that is stuck cannot be killed.
    let fuse = fuse;
    fuse.withhold(daemon.pid(), &[opcode::GETATTR]);
    fuse.invalidate_attributes()?;
    fuse.wait_for(opcode::GETATTR)?;
    for times in 2..4 {
        set_len(&file, 2 * times * MIB)?;
        system::run("losetup", &["--set-capacity", &device.path().display().to_string()])?;
        daemon.wait_for(&format!("the disk has {} bytes", 2 * times * MIB))?;
    }
    let shown = client.call("export.show", &json!({ "export": healthy }))?;
    ensure!(shown["result"]["size-bytes"] == 6 * MIB, "{shown}");
    let size = json!({ "export": healthy, "size-bytes": MIB, "shrink": true });
    let refused = client.call("disk.resize", &size)?;
    let words = refused["error"]["message"].as_str().unwrap_or_default();
    ensure!(words.contains("with its own tool"), "{refused}");
    daemon.signal(Signal::TERM)?;
    daemon.wait_for("finishing requests")?;
    fuse.release();
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// Another host has extended the disk, and its guest comes with the new size.
#[test]
fn a_disk_that_grew_before_its_lock_is_used_at_once_and_announced() -> Result<()> {
    let folders = test_folders()?;
    let (file, vm) = (folders.disk("disk.img", MIB)?, folders.socket("vm"));
    let (mut daemon, _client) = serve(&folders, &[export(&vm, &file, ",lock=late")])?;
    set_len(&file, 4 * MIB)?;
    let mut front_end = Frontend::attach(&vm, &Setup::default())?;
    front_end.write(0, 3 * MIB / 512, &[7; 4096])?;
    daemon.wait_for("the disk has 4194304 bytes, not 1048576")?;
    Ok(())
}
