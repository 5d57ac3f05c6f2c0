//! A Linux guest with a disk of each kind moves while fio verifies a file on each disk, and a
//! program compares a tree of files on each with a model. One guest has all disks, because a boot
//! takes longer than a move.

use anyhow::{Result, ensure};
use ringhaul_kit::guest::{Accelerator, Bus, Disk, FAST, Image, SLOW, Vm, VmOptions};

use super::scene::{Device, DiskKind, MOVES, Scene, targets};
use crate::{LIMIT, check_file_system, scenario, with};

const START: &str = include_str!("../../../guest/moved-start.sh");
const ROUNDS: &str = include_str!("../../../guest/moved-rounds.sh");
const STOP: &str = include_str!("../../../guest/moved-stop.sh");

/// The disks as the guest names them, in the order of their devices.
const DISKS: &str = "vda vdb vdc sda sdb sdc";

/// Room for the file of fio, the tree and a journal.
const DISK_BYTES: u64 = 128 << 20;

/// The disks, which share the time of the guest's processors.
const LOADS: u32 = 6;

/// The kinds of the disks of each device.
const KINDS: [DiskKind; 3] = [DiskKind::Raw, DiskKind::Qcow2, DiskKind::Nbd];

/// A guest's QEMUs, and the two daemons of each of its disks.
struct Linux {
    scenes: Vec<Scene>,
    image: Image,
    accelerator: Accelerator,
    is_packed: bool,
}

impl Linux {
    fn new(is_packed: bool) -> Result<Option<Self>> {
        let image = Image::prepare()?;
        let accelerator = Accelerator::choose(&image)?;
        let devices = match is_packed {
            false => [Device::Blk, Device::Scsi],
            true => [Device::PackedBlk, Device::PackedScsi],
        };
        let disks = devices.into_iter().flat_map(|device| KINDS.map(|kind| (device, kind)));
        let scenes = disks.map(|(device, kind)| Scene::with_disk(device, kind, &[], DISK_BYTES));
        let scenes = scenes.collect::<Result<Option<Vec<_>>>>()?;
        Ok(scenes.map(|scenes| Self { scenes, image, accelerator, is_packed }))
    }

    fn options(&self, daemon: &str) -> VmOptions {
        let disks = self.scenes.iter().map(|scene| {
            let bus = if scene.is_scsi() { Bus::Scsi } else { Bus::Blk };
            Disk { bus, socket: scene.socket(daemon), num_queues: 2, queue_size: 256 }
        });
        // An initramfs of 100 MiB, whose archive needs as much for a moment.
        let (disks, memory_mib) = (disks.collect(), 512);
        VmOptions { disks, packed: self.is_packed, memory_mib, ..VmOptions::default() }
    }

    fn boot(&self) -> Result<Vm> {
        let mut vm = Vm::boot(&self.image, self.accelerator, &self.options("a"))?;
        run(&mut vm, START)?;
        run(&mut vm, ROUNDS)?;
        Ok(vm)
    }

    /// Starts a QEMU that waits for the guest, and begins to move it.
    fn begin(&self, source: &mut Vm, daemon: &str, bytes_per_second: u64) -> Result<Vm> {
        let socket = self.scenes[0].socket("move");
        let _ = std::fs::remove_file(&socket);
        let mut target = Vm::start_target(&self.image, self.accelerator, &self.options(daemon))?;
        target.mover()?.accept(&socket)?;
        source.mover()?.begin(&socket, bytes_per_second)?;
        Ok(target)
    }

    /// Moves the guest, and waits until its loads have made progress at the target.
    fn move_to(&self, daemon: &str, mut source: Vm) -> Result<Vm> {
        let mut target = self.begin(&mut source, daemon, FAST)?;
        source.mover()?.wait_for("completed")?;
        run(&mut target, ROUNDS)?;
        for scene in &self.scenes {
            ensure!(scene.is_locked()? == scene.has_locks(), "the guest runs");
        }
        Ok(target)
    }

    fn kill(&mut self, daemon: &str) -> Result<()> {
        self.scenes.iter_mut().try_for_each(|scene| scene.kill(daemon))
    }

    fn serve(&mut self, daemon: &'static str) -> Result<()> {
        self.scenes.iter_mut().try_for_each(|scene| scene.serve(daemon))
    }

    /// Ends the loads, and checks the disks in the guest and on the host.
    fn finish(self, mut vm: Vm) -> Result<()> {
        run(&mut vm, STOP)?;
        let errors = "i/o error|blocked for more|abort|offline|ext4-fs error|ext4-fs warning";
        vm.check(&format!("! dmesg | grep -iE '{errors}'"), LIMIT)?;
        vm.power_off(LIMIT)?;
        for mut scene in self.scenes {
            scene.check_image()?;
            scene.stop_daemons()?;
            if !scene.is_image() {
                check_file_system(&scene.disk())?;
            }
        }
        Ok(())
    }
}

/// Runs a script about the disks.
fn run(vm: &mut Vm, script: &str) -> Result<()> {
    vm.check(&with(script, &[("DISKS", DISKS)]), LIMIT * LOADS).map(drop)
}

/// Moves the guest there and back, after a move that is cancelled because the daemons of the target
/// were killed, and one after which the daemons of the source are killed.
fn moves_there_and_back(is_packed: bool, moves: usize) -> Result<()> {
    let Some(mut linux) = Linux::new(is_packed)? else { return Ok(()) };
    let mut vm = linux.boot()?;
    let target = linux.begin(&mut vm, "b", SLOW)?;
    run(&mut vm, ROUNDS)?;
    linux.kill("b")?;
    run(&mut vm, ROUNDS)?;
    vm.mover()?.cancel()?;
    vm.mover()?.wait_for("cancelled")?;
    drop(target);
    run(&mut vm, ROUNDS)?;
    linux.serve("b")?;

    let mut target = linux.begin(&mut vm, "b", FAST)?;
    vm.mover()?.wait_for("completed")?;
    linux.kill("a")?;
    run(&mut target, ROUNDS)?;
    linux.serve("a")?;
    vm = linux.move_to("a", target)?;

    for daemon in targets(moves) {
        vm = linux.move_to(daemon, vm)?;
    }
    linux.finish(vm)
}

#[test]
fn linux_moves_there_and_back() -> Result<()> {
    scenario(|| moves_there_and_back(false, MOVES))
}

/// Linux uses indirect tables and the events of packed rings, which the small guest does not.
#[test]
fn linux_moves_there_and_back_with_packed_rings() -> Result<()> {
    scenario(|| moves_there_and_back(true, 4))
}
