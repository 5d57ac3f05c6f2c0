//! New processes take over from the daemon under verified load. The guest sees no error.

use anyhow::{Result, ensure};
use ringhaul_kit::server::{Cache, Engine, Export};

use super::kills::wait_served;
use super::{LIMIT, Scene, boot, scenario, verified};

const UPGRADES: u64 = 10;

fn upgrade_under_load(engine: Engine, cache: Cache, is_scsi: bool) -> Result<()> {
    let scene = Scene::new()?;
    let export = scene.export(&format!("upgrades-{engine}"), engine, cache)?;
    let export = Export { units: is_scsi.then(Vec::new), ..export };
    let mut server = scene.serve(&export)?;
    let mut vm = boot(&[&export])?;
    let disk = if is_scsi { "sda" } else { "vda" };
    // The message about a device that was reset.
    let power_on = "dmesg | grep -c 'Power-on or device reset occurred' || true";
    let before = vm.check(power_on, LIMIT)?;
    verified::start(&mut vm, disk)?;
    let mut still = Vec::new();
    for upgrade in 0..UPGRADES {
        // The first takeover comes at once, and each later one after more requests.
        wait_served(&server, upgrade * 20)?;
        still.push(server.upgrade()?);
        let messages = server.messages();
        ensure!(
            !messages.contains("has connected") && !messages.contains("has disconnected"),
            "{messages}"
        );
    }
    eprintln!("queues stood still for {still:?} ms");
    assert_eq!(vm.check(power_on, LIMIT)?, before, "a device began anew");
    // The last process has marked its requests in the front-end's inflight region, like the first
    // one.
    server.kill()?;
    drop(server);
    let server = scene.serve(&export)?;
    wait_served(&server, 20)?;
    verified::finish(vm, disk, server)
}

#[test]
fn blk_with_io_uring_is_upgraded_under_load() -> Result<()> {
    scenario(|| upgrade_under_load(Engine::IoUring, Cache::None, false))
}

#[test]
fn blk_with_threads_is_upgraded_under_load() -> Result<()> {
    scenario(|| upgrade_under_load(Engine::Threads, Cache::Writeback, false))
}

#[test]
fn scsi_is_upgraded_under_load() -> Result<()> {
    scenario(|| upgrade_under_load(Engine::IoUring, Cache::None, true))
}
