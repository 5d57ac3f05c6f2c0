//! A virtio-scsi device with units of several kinds: an export of an NBD server, a qcow2 image, and
//! encrypted data.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::guest::Vm;
use ringhaul_kit::server::{Cache, Engine, Export};
use ringhaul_kit::system::{is_installed, run};

use super::nbd::start_server;
use super::scsi::node;
use super::{
    DISK_BYTES, FILES_CHECK, FILES_WRITE, FIO_VERIFY, LIMIT, Scene, WRITE_ZEROES, boot_fast,
    check_clean_exit, check_file_system, check_same_bytes, scenario, with,
};

/// Bytes of a disk that `cryptsetup` takes for its header.
const HEADER_BYTES: u64 = 32 << 20;

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path with an odd name")
}

/// A LUKS2 disk with blocks of 4096 bytes, and its key.
struct Encrypted<'a> {
    image: &'a str,
    key: &'a str,
}

impl Encrypted<'_> {
    fn make(&self) -> Result<()> {
        fs::write(self.key, "no secret")?;
        let file = OpenOptions::new().write(true).open(self.image)?;
        file.set_len((DISK_BYTES + HEADER_BYTES).next_multiple_of(4096))?;
        let encrypt = ["reencrypt", "--encrypt", "--type", "luks2", "--reduce-device-size", "32M"];
        let how =
            ["--sector-size", "4096", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];
        self.cryptsetup(&[&encrypt[..], &how].concat())
    }

    /// Decrypts the data in place.
    fn decrypt(&self) -> Result<()> {
        let header = format!("{}.header", self.image);
        let decrypt = ["reencrypt", "--decrypt", "--force-offline-reencrypt"];
        self.cryptsetup(&[&decrypt[..], &["--header", &header]].concat())
    }

    fn cryptsetup(&self, words: &[&str]) -> Result<()> {
        let with_key = ["--batch-mode", "--key-file", self.key];
        run("cryptsetup", &[&with_key[..], words, &[self.image]].concat()).map(drop)
    }
}

/// Runs a load with checksums on all disks at the same time, then uses a file system on each.
fn use_disks(vm: &mut Vm, disks: &[(&str, u32)]) -> Result<()> {
    let verify = |(disk, block_bytes): &(&str, u32)| {
        let min_bytes = block_bytes.to_string();
        with(FIO_VERIFY, &[("DISK", disk), ("MIN_BYTES", &min_bytes)])
    };
    let all: String =
        disks.iter().map(|disk| format!("({}) & pids=\"$pids $!\"\n", verify(disk))).collect();
    vm.check(&format!("pids=\n{all}for pid in $pids; do wait $pid || exit 1; done"), LIMIT)?;
    for (disk, block_bytes) in disks {
        let path = format!("/sys/block/{disk}/queue/logical_block_size");
        let seen = vm.check(&format!("cat {path}"), LIMIT)?;
        ensure!(seen.trim() == block_bytes.to_string(), "{disk} has blocks of {seen} bytes");
        let disk = ("DISK", *disk);
        vm.check(&with(FILES_WRITE, &[disk]), LIMIT)?;
        vm.check(&with(FILES_CHECK, &[disk]), LIMIT)?;
        vm.check(&format!("e2fsck -f -n /dev/{}", disk.1), LIMIT)?;
    }
    Ok(())
}

/// The unit reports the holes that the server reports.
fn check_holes(vm: &mut Vm, disk: &str) -> Result<()> {
    let status = format!("sg_get_lba_status --lba=2048 /dev/{disk}");
    let written = format!("dd if=/dev/urandom of=/dev/{disk} bs=1M seek=1 count=1 oflag=direct");
    for (before, expected) in [
        (written, " mapped"),
        (
            format!("/usr/sbin/blkdiscard --offset 1048576 --length 1048576 /dev/{disk}"),
            "deallocated",
        ),
    ] {
        vm.check(&before, LIMIT)?;
        let output = vm.check(&status, LIMIT)?;
        ensure!(output.contains(expected), "not {expected}: {output}");
    }
    Ok(())
}

fn units() -> Result<()> {
    let scene = Scene::new()?;
    let file = |name: &str| -> Result<PathBuf> {
        Ok(scene.export(name, Engine::IoUring, Cache::None)?.file)
    };
    let (remote, image, encrypted) = (file("remote")?, file("image")?, file("encrypted")?);
    let server = start_server(&scene, &remote)?;
    let (image, encrypted) = (text(&image)?, text(&encrypted)?);
    let (raw, key) = (format!("{image}.raw"), format!("{encrypted}.key"));
    run("qemu-img", &["create", "-q", "-f", "qcow2", image, &DISK_BYTES.to_string()])?;
    let luks = Encrypted { image: encrypted, key: &key };
    luks.make()?;

    let units = vec![
        format!("1,serial=remote,disk={}", server.uri("")),
        format!("2,serial=image,disk=qcow2:{image}"),
        format!("3,serial=secret,disk=luks,key-file={key},over={encrypted}"),
    ];
    let export = scene.export("kinds", Engine::IoUring, Cache::None)?;
    let export = Export { units: Some(units), ..export };
    let mut daemon = scene.serve(&export)?;
    let mut vm = boot_fast(&[&export])?;
    let [remote_disk, image_disk, secret_disk] =
        ["0:1", "0:2", "0:3"].map(|address| node(&mut vm, address));
    let (remote_disk, image_disk, secret_disk) = (remote_disk?, image_disk?, secret_disk?);
    check_holes(&mut vm, &remote_disk)?;
    for disk in [&remote_disk, &image_disk] {
        vm.check(&with(WRITE_ZEROES, &[("DISK", disk)]), LIMIT)?;
    }
    use_disks(&mut vm, &[(&remote_disk, 512), (&image_disk, 512), (&secret_disk, 4096)])?;
    check_same_bytes(&mut vm, &remote_disk, &remote)?;
    run("qemu-img", &["convert", "-U", "-f", "qcow2", "-O", "raw", image, &raw])?;
    check_same_bytes(&mut vm, &image_disk, Path::new(&raw))?;
    vm.check("! dmesg | grep -iE 'i/o error|critical'", LIMIT)?;
    vm.power_off(LIMIT)?;
    check_clean_exit(&mut daemon)?;

    run("qemu-img", &["check", "-q", image])?;
    luks.decrypt()?;
    for file in [&remote, Path::new(&raw), Path::new(encrypted)] {
        check_file_system(file)?;
    }
    Ok(())
}

#[test]
fn units_are_disks_of_all_kinds() -> Result<()> {
    let programs = ["qemu-nbd", "qemu-img", "cryptsetup"];
    if !programs.iter().all(|program| is_installed(program)) {
        return Ok(());
    }
    scenario(units)
}
