//! A Linux guest with a file system moves while fio verifies a file in it, and a program compares a
//! tree of files with a model.

use anyhow::{Context, Result, ensure};
use ringhaul_kit::guest::{Accelerator, Bus, Disk, Image, Vm, VmOptions};

use super::scene::{Device, DiskKind, SLOW, Scene, Switch, moves, print_row};
use crate::{LIMIT, check_file_system, scenario, with};

const START: &str = include_str!("../../../guest/moved-start.sh");
const ROUNDS: &str = include_str!("../../../guest/moved-rounds.sh");
const STOP: &str = include_str!("../../../guest/moved-stop.sh");

/// Room for the file of fio, the tree and a journal.
const DISK_BYTES: u64 = 192 << 20;

/// A limit that the loads do not reach.
const SPEED: u64 = 192 << 20;

/// The QEMUs of a guest.
struct Linux {
    scene: Scene,
    image: Image,
    accelerator: Accelerator,
    device: Device,
}

impl Linux {
    fn new(device: Device, kind: DiskKind) -> Result<Option<Self>> {
        let image = Image::prepare()?;
        let accelerator = Accelerator::choose(&image)?;
        let scene = Scene::with_disk(device, kind, &[], DISK_BYTES)?;
        Ok(scene.map(|scene| Self { scene, image, accelerator, device }))
    }

    fn options(&self, daemon: &str) -> VmOptions {
        let bus = if self.device.is_scsi() { Bus::Scsi } else { Bus::Blk };
        let socket = self.scene.socket(daemon);
        let disk = Disk { bus, socket, num_queues: 2, queue_size: 256 };
        let (disks, packed) = (vec![disk], self.device.is_packed());
        // An initramfs of 100 MiB, whose archive needs as much for a moment.
        VmOptions { disks, packed, memory_mib: 512, traces_messages: true, ..VmOptions::default() }
    }

    fn disk(&self) -> &'static str {
        if self.device.is_scsi() { "sda" } else { "vda" }
    }

    fn boot(&self, daemon: &str) -> Result<Vm> {
        let mut vm = Vm::boot(&self.image, self.accelerator, &self.options(daemon))?;
        vm.check(&with(START, &[("DISK", self.disk())]), LIMIT)?;
        wait_rounds(&mut vm, 0)?;
        Ok(vm)
    }

    /// Starts a QEMU that waits for the guest.
    fn target(&self, daemon: &str) -> Result<Vm> {
        let socket = self.scene.socket("move");
        let _ = std::fs::remove_file(&socket);
        let mut target = Vm::start_target(&self.image, self.accelerator, &self.options(daemon))?;
        target.mover()?.accept(&socket)?;
        Ok(target)
    }

    /// Moves the guest, and waits until its loads have made progress at the target.
    fn move_to(&self, daemon: &str, mut source: Vm) -> Result<(Vm, Switch)> {
        let mut target = self.target(daemon)?;
        source.mover()?.begin(&self.scene.socket("move"), SPEED)?;
        let switch = Switch::of(source.mover()?)?;
        wait_rounds(&mut target, 0)?;
        Ok((target, switch))
    }

    /// Ends the loads, and checks the disk in the guest and on the host.
    fn finish(mut self, mut vm: Vm) -> Result<()> {
        vm.check(&with(STOP, &[("DISK", self.disk())]), LIMIT)?;
        let errors = "i/o error|blocked for more|abort|offline|ext4-fs error|ext4-fs warning";
        vm.check(&format!("! dmesg | grep -iE '{errors}'"), LIMIT)?;
        vm.power_off(LIMIT)?;
        self.scene.check_image()?;
        self.scene.stop_daemons()?;
        match self.scene.is_image() {
            true => Ok(()),
            false => check_file_system(&self.scene.disk()),
        }
    }
}

/// Waits until both loads have finished a round that began after the call, and `more`.
fn wait_rounds(vm: &mut Vm, more: u32) -> Result<()> {
    vm.check(&with(ROUNDS, &[("ROUNDS", &more.to_string())]), LIMIT).map(drop)
}

/// Begins a move that does not end.
fn begin_slowly(linux: &Linux, vm: &mut Vm, daemon: &str) -> Result<Vm> {
    let target = linux.target(daemon)?;
    vm.mover()?.begin(&linux.scene.socket("move"), SLOW)?;
    wait_rounds(vm, 0)?;
    Ok(target)
}

fn cancel(vm: &mut Vm) -> Result<()> {
    vm.mover()?.cancel()?;
    vm.mover()?.wait_for("cancelled")?;
    wait_rounds(vm, 0)
}

fn moves_there_and_back(device: Device, kind: DiskKind) -> Result<()> {
    let Some(linux) = Linux::new(device, kind)? else { return Ok(()) };
    let mut vm = linux.boot("a")?;
    let target = begin_slowly(&linux, &mut vm, "b")?;
    cancel(&mut vm)?;
    drop(target);
    let mut switches = Vec::new();
    for turn in 0..moves(2)? {
        let to = if turn % 2 == 0 { "b" } else { "a" };
        let switch;
        (vm, switch) = linux.move_to(to, vm)?;
        ensure!(linux.scene.is_locked()? == kind.has_locks(), "the guest runs");
        switches.push(switch);
    }
    print_row("Linux", device, kind, &switches);
    linux.finish(vm)
}

/// The daemon of the target is killed before the switch, and the daemon of the source after it.
fn survives_kills(device: Device, kind: DiskKind) -> Result<()> {
    let Some(mut linux) = Linux::new(device, kind)? else { return Ok(()) };
    let mut vm = linux.boot("a")?;
    let target = begin_slowly(&linux, &mut vm, "b")?;
    linux.scene.kill("b")?;
    cancel(&mut vm)?;
    drop(target);
    linux.scene.serve("b")?;
    let mut target = linux.target("b")?;
    vm.mover()?.begin(&linux.scene.socket("move"), SPEED)?;
    vm.mover()?.wait_for("completed")?;
    linux.scene.kill("a")?;
    wait_rounds(&mut target, 0)?;
    drop(vm);
    linux.scene.serve("a")?;
    let (vm, _) = linux.move_to("a", target).context("moving back")?;
    linux.finish(vm)
}

#[test]
fn linux_moves() -> Result<()> {
    scenario(|| moves_there_and_back(Device::Blk, DiskKind::Raw))
}

#[test]
fn linux_moves_on_a_unit_with_an_image() -> Result<()> {
    scenario(|| moves_there_and_back(Device::Scsi, DiskKind::Qcow2))
}

#[test]
fn linux_moves_on_an_nbd_server() -> Result<()> {
    scenario(|| moves_there_and_back(Device::Blk, DiskKind::Nbd))
}

/// Linux uses indirect tables and the events of packed rings, which the small guest does not.
#[test]
fn linux_survives_kills_around_its_moves_with_packed_rings() -> Result<()> {
    scenario(|| survives_kills(Device::PackedBlk, DiskKind::Qcow2))
}

#[test]
#[ignore = "kills in tests that always run"]
fn linux_survives_kills_around_its_moves() -> Result<()> {
    scenario(|| survives_kills(Device::Blk, DiskKind::Qcow2))
}

#[test]
#[ignore = "the same devices and disks as in tests that always run"]
fn linux_moves_on_a_unit() -> Result<()> {
    scenario(|| moves_there_and_back(Device::Scsi, DiskKind::Raw))
}

#[test]
#[ignore = "the same devices and disks as in tests that always run"]
fn linux_moves_on_a_unit_with_an_nbd_server() -> Result<()> {
    scenario(|| moves_there_and_back(Device::Scsi, DiskKind::Nbd))
}

#[test]
#[ignore = "the same devices and disks as in tests that always run"]
fn linux_moves_on_an_image() -> Result<()> {
    scenario(|| moves_there_and_back(Device::Blk, DiskKind::Qcow2))
}

#[test]
#[ignore = "packed rings in tests that always run"]
fn linux_moves_with_packed_rings() -> Result<()> {
    scenario(|| moves_there_and_back(Device::PackedBlk, DiskKind::Raw))
}

#[test]
#[ignore = "packed rings in tests that always run"]
fn linux_moves_on_a_unit_with_packed_rings() -> Result<()> {
    scenario(|| moves_there_and_back(Device::PackedScsi, DiskKind::Nbd))
}
