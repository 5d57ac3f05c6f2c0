//! Firmware (SeaBIOS) and a boot loader read a guest's kernel from a unit of a virtio-scsi device.

use anyhow::Result;
use ringhaul_kit::guest::{BOOTED_FROM_DISK, Image, VmOptions};
use ringhaul_kit::server::{Cache, Engine, Export};

use super::{FILES_CHECK, FILES_WRITE, LIMIT, Scene, boot_with, check_clean_exit, scenario, with};

/// QEMU lets the firmware boot from LUN 0 of one chosen target.
const TARGET: u8 = 7;

#[test]
fn a_guest_boots_from_a_unit() -> Result<()> {
    scenario(boot_from_unit)
}

fn boot_from_unit() -> Result<()> {
    let scene = Scene::new()?;
    let image = Image::prepare()?;
    // LUN 0 of target 0 is not bootable.
    let export = scene.export("boot", Engine::IoUring, Cache::None)?;
    let file = scene.disks.path().join("loader.img");
    image.make_boot_disk(&file)?;
    let units = Some(vec![format!("{TARGET}:0,blk-file={}", file.display())]);
    let export = Export { units, ..export };
    let mut server = scene.serve(&export)?;
    let options = VmOptions { boot_target: Some(TARGET), ..VmOptions::default() };
    let mut vm = boot_with(&image, &[&export], options)?;
    let booted = format!("grep -q {BOOTED_FROM_DISK} /proc/cmdline");
    let find = format!("ls /sys/bus/scsi/devices/*:0:{TARGET}:0/block");

    vm.check(&booted, LIMIT)?;
    let disk = vm.check("ls /sys/bus/scsi/devices/*:0:0:0/block", LIMIT)?;
    vm.check(&with(FILES_WRITE, &[("DISK", &disk)]), LIMIT)?;
    // The firmware takes the device over from a driver.
    vm.reboot()?;
    vm.check(&booted, LIMIT)?;
    let disk = vm.check("ls /sys/bus/scsi/devices/*:0:0:0/block", LIMIT)?;
    vm.check(&with(FILES_CHECK, &[("DISK", &disk)]), LIMIT)?;
    let loader = vm.check(&find, LIMIT)?;
    vm.check(&format!("head -c 512 /dev/{loader} | grep -q SYSLINUX"), LIMIT)?;

    vm.power_off(LIMIT)?;
    check_clean_exit(&mut server)
}
