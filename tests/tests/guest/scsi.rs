//! A virtio-scsi device with four units.

use std::fs::File;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::guest::Vm;
use ringhaul_kit::server::{Cache, Engine, Export, Server};
use serde_json::{Value, json};

use super::resize::wait_for_size;
use super::{
    FILES_CHECK, FILES_WRITE, FIO_VERIFY, LIMIT, RESETS, Scene, boot, check_clean_exit,
    check_file_system, check_same_bytes, scenario, verified, with,
};

const TOOLS: &str = include_str!("../../guest/scsi-tools.sh");

/// The units beside LUN 0.
fn units(scene: &Scene, engine: Engine) -> Result<Vec<String>> {
    let names = "vendor=ACME,product=Old Disk,revision=7.1";
    let rotates = format!("rotational=on,discard=off,stop=obey,{names}");
    let more = ["read-only=on", &rotates, "wwn=3000000000000abc"];
    let addresses = ["1", "2", "1:300"];
    let mut units = Vec::new();
    for (address, more) in addresses.into_iter().zip(more) {
        let name = format!("{engine}-{}", address.replace(':', "-"));
        let file = scene.export(&name, engine, Cache::None)?.file;
        units.push(format!("{address},blk-file={},{more}", file.display()));
    }
    Ok(units)
}

/// The guest's name of the unit at an address.
pub(super) fn node(vm: &mut Vm, address: &str) -> Result<String> {
    let path = vm.check(&format!("ls -d /sys/bus/scsi/devices/*:0:{address}/block/*"), LIMIT)?;
    Ok(path.rsplit('/').next().unwrap_or_default().to_owned())
}

/// Checks commands, then data on two units at a time.
fn data(engine: Engine, cache: Cache) -> Result<()> {
    let scene = Scene::new()?;
    let export = scene.export(&format!("scsi-{engine}"), engine, cache)?;
    let export = Export { units: Some(units(&scene, engine)?), ..export };
    let mut server = scene.serve(&export)?;
    let mut vm = boot(&[&export])?;

    let output = vm.check(&with(TOOLS, &[("SERIAL", &export.serial)]), LIMIT)?;
    assert!(output.ends_with("all"), "{output}");
    let sda = node(&mut vm, "0:0")?;
    let sdd = node(&mut vm, "1:16684")?;
    let one = with(FIO_VERIFY, &[("DISK", &sda), ("MIN_BYTES", "512")]);
    let other = with(FIO_VERIFY, &[("DISK", &sdd), ("MIN_BYTES", "512")]);
    let both = format!("({one}) &\npid=$!\n({other})\nwait $pid\n");
    vm.check(&both, LIMIT)?;
    check_same_bytes(&mut vm, &sda, &export.file)?;
    for how in ["", "--zeroout"] {
        vm.check(&format!("/usr/sbin/blkdiscard {how} /dev/{sda}"), LIMIT)?;
    }
    let disk = ("DISK", &*sda);
    vm.check(&with(FILES_WRITE, &[disk]), LIMIT)?;
    vm.check(&with(FILES_CHECK, &[disk]), LIMIT)?;
    check_same_bytes(&mut vm, &sda, &export.file)?;

    vm.power_off(LIMIT)?;
    check_clean_exit(&mut server)?;
    check_file_system(&export.file)
}

#[test]
fn scsi_with_io_uring() -> Result<()> {
    scenario(|| data(Engine::IoUring, Cache::None))
}

#[test]
fn scsi_with_aio() -> Result<()> {
    scenario(|| data(Engine::Aio, Cache::None))
}

#[test]
fn scsi_with_threads_in_the_page_cache() -> Result<()> {
    scenario(|| data(Engine::Threads, Cache::Writeback))
}

/// Checks `export.show` of a running guest: the peer is QEMU, and features, queues and memory are
/// shown.
fn check_shown(server: &Server, export: &Export) -> Result<()> {
    let shown = server.call("export.show", &json!({ "export": export.socket }))?;
    let front_end = &shown["front-end"];
    let pid = front_end["peer"]["pid"].as_u64().context("no process is shown")?;
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm"))?;
    ensure!(name.starts_with("qemu-system"), "process {pid} is {name}");
    let has = |key: &str, name: &str| {
        front_end[key].as_array().is_some_and(|names| names.contains(&json!(name)))
    };
    ensure!(has("features", "version-1") && has("features", "hotplug"), "{front_end}");
    ensure!(has("protocol-features", "mq"), "{front_end}");
    let queues = front_end["queues"].as_array().context("no queues are shown")?;
    let runs = |role: &str| {
        queues.iter().any(|queue| queue["role"] == role && queue["state"] == "running")
    };
    ensure!(["control", "event", "request"].into_iter().all(runs), "{front_end}");
    ensure!(front_end["memory"]["bytes"].as_u64() >= Some(64 << 20), "{front_end}");
    Ok(())
}

/// Two request queues, each on its own thread. A reset ends the tasks of both.
#[test]
fn a_unit_on_two_threads_is_reset_under_load() -> Result<()> {
    scenario(|| {
        let scene = Scene::new()?;
        let export = scene.export("scsi-resets", Engine::IoUring, Cache::None)?;
        let export = Export { units: Some(Vec::new()), io_threads: 2, ..export };
        let server = scene.serve(&export)?;
        let mut vm = boot(&[&export])?;
        verified::start(&mut vm, "sda")?;
        vm.check(&with(RESETS, &[("DISK", "sda")]), LIMIT)?;
        let stats = server.call("stats", &json!({}))?;
        let threads = stats["iothreads"].as_array().context("no threads are shown")?;
        let write = |thread: &Value| thread["writes"]["count"].as_u64() > Some(0);
        ensure!(threads.len() == 2 && threads.iter().all(write), "{threads:?}");
        verified::finish_after(vm, "sda", server, "device reset$")
    })
}

/// Units are added, resized and removed while the guest runs.
#[test]
fn scsi_units_are_added_and_removed() -> Result<()> {
    scenario(|| {
        let scene = Scene::new()?;
        let export = scene.export("scsi-hotplug", Engine::IoUring, Cache::None)?;
        let export = Export { units: Some(Vec::new()), ..export };
        let mut server = scene.serve(&export)?;
        let mut vm = boot(&[&export])?;
        check_shown(&server, &export)?;
        let file = scene.export("scsi-hotplug-more", Engine::IoUring, Cache::None)?.file;
        // Linux shows the address of LUN 300 as 16384 more.
        let units = [("7", "0:7"), ("300", "0:16684"), ("255:0", "255:0"), ("3:300", "3:16684")];
        for (address, shown) in units {
            File::options().write(true).open(&file)?.set_len(64 << 20)?;
            let unit = format!("{address},blk-file={},discard=on", file.display());
            server.ctl("add-lun", &[&unit])?;
            let disk = wait_for_disk(&mut vm, shown)?;
            wait_for_size(&mut vm, &disk, 64)?;
            File::options().write(true).open(&file)?.set_len(96 << 20)?;
            server.ctl("resize", &[address])?;
            wait_for_size(&mut vm, &disk, 96)?;
            let data = "dd if=/dev/urandom of=/tmp/data bs=1M count=1 2> /dev/null";
            let end = "bs=1M seek=95 count=1 oflag=direct conv=fsync";
            vm.check(&format!("{data} && dd if=/tmp/data of=/dev/{disk} {end}"), LIMIT)?;
            check_same_bytes(&mut vm, &disk, &file)?;
            // A unit in use finishes the requests that it has taken.
            let read = format!("cat /dev/{disk} > /dev/null");
            vm.check(&format!("({read}; true) & echo"), LIMIT)?;
            server.ctl("remove-lun", &[address])?;
            vm.check(&format!("while [ -e /sys/block/{disk} ]; do sleep 0.1; done"), LIMIT)?;
        }
        assert!(server.ctl("remove-lun", &["7"]).is_err(), "it was removed twice");
        vm.power_off(LIMIT)?;
        check_clean_exit(&mut server)
    })
}

/// Waits until the guest has a disk at an address, and returns its name.
fn wait_for_disk(vm: &mut Vm, address: &str) -> Result<String> {
    let nodes = format!("/sys/bus/scsi/devices/*:0:{address}/block/sd*");
    vm.check(&format!("until ls -d {nodes} > /dev/null 2>&1; do sleep 0.1; done"), LIMIT)?;
    node(vm, address)
}
