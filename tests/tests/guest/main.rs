//! A real Linux guest uses a disk that the daemon serves.
//!
//! A boot takes seconds, so each test does as much as possible with one guest. Without KVM, guests
//! in QEMU run under TCG, which is slow. So a guest runs in User Mode Linux unless its test needs
//! QEMU: for a front-end that reconnects, resets, several queues or sizes of queues.

mod conformance;
mod data;
mod disk_kinds;
mod encrypted;
mod first_vm;
mod images;
mod kills;
mod kvm;
mod libvirt;
mod migration;
mod nbd;
mod no_space;
mod polling;
mod recipes;
mod resize;
mod scsi;
mod scsi_boot;
mod scsi_names;
mod verified;

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, serve};
use ringhaul_kit::guest::{Accelerator, Bus, Disk, Image, QemuCrashed, Vm, VmOptions};
use ringhaul_kit::server::{Cache, Engine, Export, Program, Server};
use tempfile::TempDir;

const ATTRIBUTES: &str = include_str!("../../guest/attributes.sh");
const FIO_VERIFY: &str = include_str!("../../guest/fio-verify.sh");
const WRITE_ZEROES: &str = include_str!("../../guest/write-zeroes.sh");
const FILES_WRITE: &str = include_str!("../../guest/files-write.sh");
const FILES_CHECK: &str = include_str!("../../guest/files-check.sh");
const RESETS: &str = include_str!("../../guest/resets.sh");
const LOAD: &str = include_str!("../../guest/load.sh");

/// Large enough for a file system with a few dozen files, and no power of two.
const DISK_BYTES: u64 = 128 * 1024 * 1024 + 3 * 4096;

const SECTOR_BYTES: u64 = 512;

/// The limit for one script or one boot. Only a hang takes this long, even on a busy machine under
/// TCG.
const LIMIT: Duration = Duration::from_secs(180);

/// The number of attempts at a scenario in which QEMU crashes by itself.
const SCENARIO_ATTEMPTS: u32 = 3;

/// More than a daemon needs to finish its operations in the kernel.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// Feature bits of virtio 1.3: 5.2.3 (block device) and 6 (all devices).
const F_SEG_MAX: usize = 2;
const F_RO: usize = 5;
const F_BLK_SIZE: usize = 6;
const F_FLUSH: usize = 9;
const F_TOPOLOGY: usize = 10;
const F_CONFIG_WCE: usize = 11;
const F_MQ: usize = 12;
const F_DISCARD: usize = 13;
const F_WRITE_ZEROES: usize = 14;
const F_INDIRECT_DESC: usize = 28;
const F_EVENT_IDX: usize = 29;
const F_VERSION_1: usize = 32;
const F_RING_PACKED: usize = 34;

/// Folders for one test: disks on a file system with O_DIRECT, sockets where paths are short.
struct Scene {
    program: Program,
    disks: TempDir,
    sockets: TempDir,
}

impl Scene {
    fn new() -> Result<Self> {
        let disks = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))
            .context("making a folder for disks")?;
        let sockets = tempfile::tempdir().context("making a folder for sockets")?;
        Ok(Self { program: Program::from_environment()?, disks, sockets })
    }

    /// Makes an empty disk and its export.
    fn export(&self, name: &str, engine: Engine, cache: Cache) -> Result<Export> {
        let file = self.disks.path().join(format!("{name}.img"));
        let disk = File::create(&file).with_context(|| format!("creating {}", file.display()))?;
        disk.set_len(DISK_BYTES).with_context(|| format!("making {} larger", file.display()))?;
        Ok(Export {
            socket: self.sockets.path().join(format!("{name}.sock")),
            file,
            disk: None,
            engine,
            cache,
            num_queues: 2,
            queue_size: 256,
            // The maximum length of a serial number.
            serial: format!("{name:.20}"),
            logical_block_bytes: 512,
            read_only: false,
            units: None,
            in_order: false,
            io_threads: 1,
        })
    }

    fn serve(&self, export: &Export) -> Result<Server> {
        Server::start(self.program, export)
    }
}

fn boot(exports: &[&Export]) -> Result<Vm> {
    boot_with(&Image::prepare()?, exports, VmOptions::default())
}

/// Boots a guest with these disks, and `options` for the rest.
fn boot_with(image: &Image, exports: &[&Export], options: VmOptions) -> Result<Vm> {
    let accelerator = Accelerator::choose(image)?;
    Vm::boot(image, accelerator, &VmOptions { disks: disks(exports), ..options })
}

/// Boots a guest whose drivers use packed virtqueues.
fn boot_packed(exports: &[&Export]) -> Result<Vm> {
    let options = VmOptions { packed: true, ..VmOptions::default() };
    let mut vm = boot_with(&Image::prepare()?, exports, options)?;
    let blk = exports.iter().any(|export| export.units.is_none());
    ensure!(
        !blk || Attributes::read(&mut vm, "vda")?.has_feature(F_RING_PACKED),
        "the driver does not use packed virtqueues"
    );
    Ok(vm)
}

/// Boots a guest with these disks in User Mode Linux, or in QEMU where that is not installed.
fn boot_fast(exports: &[&Export]) -> Result<Vm> {
    Vm::boot_fast(disks(exports))
}

/// The way in which a test boots its guest: [`boot`] or [`boot_fast`].
type Boot = fn(&[&Export]) -> Result<Vm>;

fn disks(exports: &[&Export]) -> Vec<Disk> {
    let disks = exports.iter().map(|export| Disk {
        bus: if export.units.is_some() { Bus::Scsi } else { Bus::Blk },
        socket: export.socket.clone(),
        num_queues: export.num_queues,
        queue_size: export.queue_size,
    });
    disks.collect()
}

/// Runs a scenario. Repeats it with a fresh server and fresh files if QEMU died of an assertion in
/// its own emulation. That happens under TCG, and no server has a part in it.
fn scenario(run: impl Fn() -> Result<()>) -> Result<()> {
    for _ in 1..SCENARIO_ATTEMPTS {
        match run() {
            Err(error) if error.is::<QemuCrashed>() => {
                eprintln!("guest: the whole scenario is run again: {error}");
            }
            result => return result,
        }
    }
    run()
}

/// Puts assignments of shell variables in front of `script`.
fn with(script: &str, variables: &[(&str, &str)]) -> String {
    let mut text = String::new();
    for (name, value) in variables {
        text.push_str(&format!("{name}='{value}'\n"));
    }
    text + script
}

/// The guest's view of a disk.
struct Attributes(HashMap<String, String>);

impl Attributes {
    fn read(vm: &mut Vm, disk: &str) -> Result<Self> {
        let text = vm.check(&with(ATTRIBUTES, &[("DISK", disk)]), LIMIT)?;
        let pairs = text.lines().filter_map(|line| line.split_once('='));
        Ok(Self(pairs.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect()))
    }

    fn get(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    fn number(&self, name: &str) -> Result<u64> {
        let value = self.get(name);
        value.parse().with_context(|| format!("the guest says that {name} is {value:?}"))
    }

    fn has_feature(&self, bit: usize) -> bool {
        self.get("features").as_bytes().get(bit) == Some(&b'1')
    }
}

fn check_attributes(vm: &mut Vm, disk: &str, server: &Server) -> Result<()> {
    let seen = Attributes::read(vm, disk)?;
    let export = server.export();
    assert_eq!(seen.number("sectors")?, DISK_BYTES / SECTOR_BYTES);
    assert_eq!(seen.get("serial"), server.expected_serial());
    assert_eq!(seen.number("logical_block_size")?, u64::from(export.logical_block_bytes));
    let queues = u32::from(export.num_queues).min(vm.vcpus());
    assert_eq!(seen.number("queues")?, u64::from(queues));
    assert_eq!(seen.get("write_cache"), server.expected_write_cache());
    assert_eq!(seen.number("read_only")?, u64::from(export.read_only));

    let features = seen.get("features");
    assert_eq!(seen.has_feature(F_RO), export.read_only, "{features}");
    for bit in [
        F_SEG_MAX,
        F_BLK_SIZE,
        F_FLUSH,
        F_TOPOLOGY,
        F_CONFIG_WCE,
        F_MQ,
        F_INDIRECT_DESC,
        F_EVENT_IDX,
        F_VERSION_1,
    ] {
        assert!(seen.has_feature(bit), "feature {bit} is missing: {features}");
    }
    if !export.read_only {
        assert!(seen.has_feature(F_DISCARD), "{features}");
        assert!(seen.has_feature(F_WRITE_ZEROES), "{features}");
        assert!(seen.number("discard_max_bytes")? > 0);
        assert!(seen.number("write_zeroes_max_bytes")? > 0);
    }
    Ok(())
}

/// Compares the MD5 of the whole disk in the guest with that of the file on the host.
fn check_same_bytes(vm: &mut Vm, disk: &str, file: &Path) -> Result<()> {
    // The md5sum of busybox reads 4 KiB at a time.
    let script = format!("echo 3 >/proc/sys/vm/drop_caches\n/usr/sbin/md5sum </dev/{disk}\n");
    let seen = vm.check(&script, LIMIT)?;
    let input = File::open(file).with_context(|| format!("opening {}", file.display()))?;
    let output = Command::new("md5sum").stdin(input).output().context("running md5sum")?;
    let stored = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "md5sum failed");
    assert_eq!(seen.trim(), stored.trim(), "guest and host see different bytes");
    Ok(())
}

/// Checks an unused file system with e2fsck on the host.
fn check_file_system(file: &Path) -> Result<()> {
    let output = Command::new("/sbin/e2fsck")
        .args(["-f", "-n"])
        .arg(file)
        .output()
        .context("running e2fsck; apt-get install e2fsprogs")?;
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "e2fsck on the host:\n{text}");
    Ok(())
}

fn check_clean_exit(server: &mut Server) -> Result<()> {
    let status = server.terminate(STOP_LIMIT)?;
    let messages = server.messages();
    assert_eq!(status.code(), Some(0), "after SIGTERM: {status}\n{messages}");
    // A front-end that connects again hides it from the guest.
    assert!(!messages.contains("disconnected the front-end"), "{messages}");
    let socket = &server.export().socket;
    assert!(!socket.exists(), "{} is still there", socket.display());
    Ok(())
}

/// The guest reads a file system that the host made, and cannot write to it.
#[test]
fn a_read_only_disk_refuses_writes() -> Result<()> {
    scenario(read_only)
}

fn read_only() -> Result<()> {
    let scene = Scene::new()?;
    let export = Export {
        read_only: true,
        logical_block_bytes: 4096,
        ..scene.export("read-only", Engine::Aio, Cache::None)?
    };
    let contents = make_file_system(&scene, &export.file)?;
    let before = std::fs::read(&export.file).context("reading the disk")?;
    let mut server = scene.serve(&export)?;
    let mut vm = boot_fast(&[&export])?;

    check_attributes(&mut vm, "vda", &server)?;
    let mount = "mount -t ext4 -o ro,noload /dev/vda /mnt\nmd5sum </mnt/data\numount /mnt";
    assert_eq!(vm.check(mount, LIMIT)?.trim(), contents.trim());
    for write in [
        "dd if=/dev/zero of=/dev/vda bs=4096 count=1 conv=fsync",
        "dd if=/dev/zero of=/dev/vda bs=4096 count=1 oflag=direct",
        "/usr/sbin/blkdiscard /dev/vda",
        "/usr/sbin/blkdiscard --zeroout /dev/vda",
        // busybox mounts a read-only disk too, but read-only.
        "mount -t ext4 -o rw,noload /dev/vda /mnt\ntouch /mnt/new",
    ] {
        let output = vm.run(write, LIMIT)?;
        assert_ne!(output.status, 0, "{write} was successful:\n{}", output.text);
    }

    vm.power_off(LIMIT)?;
    check_clean_exit(&mut server)?;
    let after = std::fs::read(&export.file).context("reading the disk again")?;
    assert!(before == after, "the disk has changed");
    Ok(())
}

/// Makes an ext4 file system with one file, `data`. Returns the file's MD5 as md5sum prints it.
fn make_file_system(scene: &Scene, file: &Path) -> Result<String> {
    let folder = scene.disks.path().join("content");
    std::fs::create_dir(&folder).context("making a folder")?;
    let data = folder.join("data");
    let test = std::env::current_exe().context("finding the running test")?;
    // Any few megabytes without repetition suffice; the test itself is at hand.
    std::fs::copy(test, &data).context("copying the test")?;
    let status = Command::new("/sbin/mke2fs")
        .args(["-q", "-t", "ext4", "-b", "4096", "-d"])
        .args([&folder, file])
        .status()
        .context("running mke2fs; apt-get install e2fsprogs")?;
    ensure!(status.success(), "mke2fs on the host ended with {status}");
    let output = Command::new("md5sum")
        .stdin(File::open(&data).context("opening the copy")?)
        .output()
        .context("running md5sum")?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The cache modes without a write cache, and the guest's switch for the cache.
#[test]
fn a_guest_can_switch_the_write_cache() -> Result<()> {
    scenario(write_cache)
}

fn write_cache() -> Result<()> {
    let scene = Scene::new()?;
    let exports = [
        scene.export("directsync", Engine::Aio, Cache::Directsync)?,
        scene.export("writethrough", Engine::Threads, Cache::Writethrough)?,
    ];
    let mut servers =
        exports.iter().map(|export| scene.serve(export)).collect::<Result<Vec<_>>>()?;
    // QEMU shows the guest its choice also where the device has no cache.
    let mut vm = boot(&[&exports[0], &exports[1]])?;
    for (disk, server) in ["vda", "vdb"].into_iter().zip(&servers) {
        check_attributes(&mut vm, disk, server)?;
        vm.check(&with(FIO_VERIFY, &[("DISK", disk), ("MIN_BYTES", "4096")]), LIMIT)?;
        for mode in ["write back", "write through"] {
            let script = format!(
                "cd /sys/block/{disk}\necho '{mode}' >cache_type\ncat cache_type\n\
                 dd if=/dev/urandom of=/dev/{disk} bs=64k count=4 oflag=direct conv=fsync 2>&1\n"
            );
            let seen = vm.check(&script, LIMIT)?;
            assert!(seen.starts_with(mode), "asked for {mode}:\n{seen}");
        }
        check_same_bytes(&mut vm, disk, &server.export().file)?;
    }
    vm.power_off(LIMIT)?;
    servers.iter_mut().try_for_each(check_clean_exit)
}

/// A guest reboots, is reset while it writes, and is replaced by another. The daemon serves all of
/// them, and written data stays.
#[test]
fn guests_reboot_and_are_replaced() -> Result<()> {
    scenario(|| reboot_and_replace(boot))
}

#[test]
fn guests_with_packed_rings_reboot_and_are_replaced() -> Result<()> {
    scenario(|| reboot_and_replace(boot_packed))
}

fn reboot_and_replace(boot: Boot) -> Result<()> {
    let scene = Scene::new()?;
    let export = scene.export("reboot", Engine::Aio, Cache::None)?;
    let mut server = scene.serve(&export)?;
    let disk = ("DISK", "vda");
    let recover = "e2fsck -p /dev/vda || [ $? = 1 ]\ne2fsck -f -n /dev/vda";

    let mut vm = boot(&[&export])?;
    vm.check(&with(FILES_WRITE, &[disk]), LIMIT)?;
    vm.reboot()?;
    vm.check(recover, LIMIT)?;
    vm.check(&with(FILES_CHECK, &[disk]), LIMIT)?;

    vm.check("mount -t ext4 /dev/vda /mnt", LIMIT)?;
    let load = [disk, ("TARGET", "/mnt/load")];
    vm.check(&with(LOAD, &load), LIMIT)?;
    vm.reset()?;
    check_attributes(&mut vm, "vda", &server)?;
    vm.check(recover, LIMIT)?;
    vm.check(&with(FILES_CHECK, &[disk]), LIMIT)?;

    vm.check("mount -t ext4 /dev/vda /mnt", LIMIT)?;
    vm.check(&with(LOAD, &load), LIMIT)?;
    drop(vm); // Kills QEMU, as a crash does.

    server.check_running()?;
    let mut vm = boot(&[&export])?;
    check_attributes(&mut vm, "vda", &server)?;
    vm.check(recover, LIMIT)?;
    vm.check(&with(FILES_CHECK, &[disk]), LIMIT)?;
    vm.power_off(LIMIT)?;
    check_clean_exit(&mut server)?;
    check_file_system(&export.file)
}

/// Serves the disk of the recipes, with a control socket.
fn serve_vm1(folders: &TestFolders) -> Result<Running> {
    let mut command = serve(&folders.socket("disk.sock"), &folders.path("vm1.img"))?;
    command.args(["--name", "vm1", "--control"]).arg(folders.socket("control"));
    Running::serve(&mut command)
}
