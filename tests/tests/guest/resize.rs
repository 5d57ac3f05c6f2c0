//! A guest sees a new size of its disk while it uses it.

use std::fs::File;

use anyhow::{Result, ensure};
use ringhaul_kit::guest::Vm;
use ringhaul_kit::server::{Cache, Engine, Export};
use serde_json::json;

use super::{Boot, LIMIT, Scene, boot, boot_fast, scenario, verified};

/// Waits until the guest sees this size of a disk, in MiB.
pub(super) fn wait_for_size(vm: &mut Vm, disk: &str, size: u64) -> Result<()> {
    let sectors = size << 11;
    let has = format!("[ $(cat /sys/block/{disk}/size) = {sectors} ]");
    vm.check(&format!("until {has}; do sleep 0.1; done"), LIMIT).map(drop)
}

/// Grows and shrinks a disk under verified load: by request, and by changes of the file.
fn resize(boot: Boot, engine: Engine, is_scsi: bool) -> Result<()> {
    let scene = Scene::new()?;
    let export = scene.export(&format!("resize-{engine}"), engine, Cache::None)?;
    let export = Export { units: is_scsi.then(Vec::new), ..export };
    let server = scene.serve(&export)?;
    let mut vm = boot(&[&export])?;
    let (disk, lun) = if is_scsi { ("sda", Some(0)) } else { ("vda", None) };
    verified::start(&mut vm, disk)?;

    for (mebibytes, by_request) in
        [(144, true), (160, false), (176, true), (192, false), (136, true), (256, true)]
    {
        let bytes = mebibytes << 20;
        if by_request {
            let params = json!({
                "export": export.socket, "lun": lun, "size-bytes": bytes,
                "shrink": mebibytes == 136,
            });
            let answer = server.call("disk.resize", &params)?;
            ensure!(answer["size-bytes"] == bytes, "{answer}");
        } else {
            File::options().write(true).open(&export.file)?.set_len(bytes)?;
        }
        wait_for_size(&mut vm, disk, mebibytes)?;
        let last = format!("bs=1M seek={} count=1 oflag=direct conv=fsync", mebibytes - 1);
        vm.check(&format!("dd if=/dev/urandom of=/dev/{disk} {last} 2> /dev/null"), LIMIT)?;
        ensure!(export.file.metadata()?.len() == bytes, "the file has another size");
    }

    verified::finish(vm, disk, server)
}

#[test]
fn blk_with_io_uring_is_resized_under_load() -> Result<()> {
    scenario(|| resize(boot, Engine::IoUring, false))
}

#[test]
fn blk_with_aio_is_resized_under_load() -> Result<()> {
    scenario(|| resize(boot_fast, Engine::Aio, false))
}

#[test]
fn scsi_is_resized_under_load() -> Result<()> {
    scenario(|| resize(boot_fast, Engine::Threads, true))
}
