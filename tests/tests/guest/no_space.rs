//! A guest that writes to a disk without space: it waits, and continues when there is space.

use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ringhaul_kit::guest::Vm;
use ringhaul_kit::server::{Cache, Engine, Export, Server};
use ringhaul_kit::system::{Tmpfs, can_change_system, run};
use ringhaul_tools::process::retry;
use serde_json::json;

use super::{LIMIT, Scene, boot, boot_fast, check_clean_exit, check_same_bytes, scenario};

const MIB: u64 = 1 << 20;

/// Makes writes wait for space without limit, not only briefly.
fn hold(server: &Server, lun: Option<u16>) -> Result<()> {
    let params = json!({ "export": server.export().socket, "lun": lun, "werror": "hold" });
    let now = server.call("disk.set", &params)?;
    ensure!(now["werror"] == "hold" && now["rerror"] == "report", "{now}");
    Ok(())
}

/// Waits until the disk is in this state.
fn wait_state(server: &Server, state: &str) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let shown = server.call("export.show", &json!({ "export": server.export().socket }))?;
        let disk = &shown["disks"][0];
        if disk["state"] == state {
            ensure!(disk["waited"].as_u64() > Some(0), "{disk}");
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the disk is not {state}: {disk}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn has_written(vm: &mut Vm) -> Result<bool> {
    let output = vm.check("[ -e /tmp/written ] && cat /tmp/written || echo no", LIMIT)?;
    ensure!(output.trim() != "1", "a write has failed");
    Ok(output.trim() == "0")
}

/// Fills a disk on a file system with half of the space. If `kills`, the daemon is killed while
/// writes are held.
fn fill_disk(engine: Engine, is_scsi: bool, kills: bool) -> Result<()> {
    if !can_change_system("mounts") {
        return Ok(());
    }
    let scene = Scene::new()?;
    let space = Tmpfs::mount(24 * MIB)?;
    let export = scene.export(&format!("held-{engine}"), engine, Cache::Writeback)?;
    let file = space.path().join("disk.img");
    File::create(&file)?.set_len(48 * MIB)?;
    let export = Export { file, units: is_scsi.then(Vec::new), ..export };
    let (disk, lun) = if is_scsi { ("sda", Some(0)) } else { ("vda", None) };
    let mut server = scene.serve(&export)?;
    hold(&server, lun)?;
    // Only QEMU connects to the next daemon.
    let mut vm = if kills { boot(&[&export])? } else { boot_fast(&[&export])? };
    let write = format!("dd if=/dev/urandom of=/dev/{disk} bs=1M oflag=direct count=48");
    vm.check(&format!("({write} 2> /tmp/dd; echo $? > /tmp/written) & echo begun"), LIMIT)?;
    wait_state(&server, "held")?;
    if kills {
        server.kill()?;
        drop(server);
        server = scene.serve(&export)?;
        hold(&server, lun)?;
        wait_state(&server, "held")?;
        let again = server.messages().matches("of an earlier process are repeated").count();
        ensure!(again > 0, "nothing was done again:\n{}", server.messages());
    }
    ensure!(!has_written(&mut vm)?, "there was no space to write all");
    // Another thread writes the line, and none for a disk that has space again.
    retry(LIMIT, || {
        let log = server.messages();
        ensure!(log.contains("No space left on device"), "no line about the lack of space:\n{log}");
        Ok(())
    })?;
    run("mount", &["-o", "remount,size=64M", &space.path().to_string_lossy()])?;
    server.call("disk.resume", &json!({ "export": export.socket }))?;
    while !has_written(&mut vm)? {
        std::thread::sleep(Duration::from_millis(100));
    }
    wait_state(&server, "ready")?;
    vm.check("! dmesg | grep -iE 'i/o error|critical|space alloc'", LIMIT)?;
    check_same_bytes(&mut vm, disk, &export.file)?;
    vm.power_off(LIMIT)?;
    ensure!(!server.messages().contains("failed: write"), "{}", server.messages());
    check_clean_exit(&mut server)
}

#[test]
fn blk_waits_for_space_also_when_the_daemon_is_killed() -> Result<()> {
    scenario(|| fill_disk(Engine::IoUring, false, true))
}

#[test]
fn scsi_waits_for_space() -> Result<()> {
    scenario(|| fill_disk(Engine::Threads, true, false))
}
