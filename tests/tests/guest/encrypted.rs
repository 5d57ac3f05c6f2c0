//! A guest on an encrypted disk; QEMU reads the image in the end.

use std::fs;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{self, Running, ringhaul};
use ringhaul_kit::guest::{Bus, Disk, Vm};
use ringhaul_kit::system::{is_installed, run};
use rustix::process::Signal;

use super::{
    FILES_CHECK, FILES_WRITE, FIO_VERIFY, LIMIT, check_file_system, check_same_bytes, scenario,
    with,
};

#[test]
fn an_encrypted_disk_keeps_the_data_of_a_guest() -> Result<()> {
    if !is_installed("qemu-img") {
        return Ok(());
    }
    scenario(encrypted)
}

fn encrypted() -> Result<()> {
    let folders = cli::TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let name = |name| folders.path(name).into_os_string().into_string().ok().context("an odd name");
    let (key, image, plain) = (name("key")?, name("image")?, name("plain")?);
    fs::write(&key, "no secret")?;
    let secret = format!("secret,id=key,file={key}");
    let how = "key-secret=key,iter-time=10";
    run(
        "qemu-img",
        &["create", "-q", "-f", "luks", "--object", &secret, "-o", how, &image, "128M"],
    )?;

    let socket = folders.socket("disk.sock");
    let mut command = ringhaul()?;
    command.arg("serve").arg("--socket-path").arg(&socket);
    command.args(["--disk", &format!("luks,key-file={key},over={image}")]);
    let mut daemon = Running::serve(&mut command)?;
    let disk = Disk { bus: Bus::Blk, socket, num_queues: 2, queue_size: 256 };
    let mut vm = Vm::boot_fast(vec![disk])?;
    let disk = ("DISK", "vda");
    vm.check(&with(FIO_VERIFY, &[disk, ("MIN_BYTES", "512")]), LIMIT)?;
    let zeroes = "/usr/sbin/blkdiscard --zeroout --offset 1048576 --length 4194304 /dev/vda\n\
                  dd if=/dev/vda bs=1048576 skip=1 count=4 iflag=direct status=none \
                  | tr -d '\\0' | wc -c";
    let left = vm.check(zeroes, LIMIT)?;
    ensure!(left.trim() == "0", "bytes that are not zero: {left}");
    vm.check(&with(FILES_WRITE, &[disk]), LIMIT)?;
    vm.check(&with(FILES_CHECK, &[disk]), LIMIT)?;
    vm.check("e2fsck -f -n /dev/vda", LIMIT)?;

    let source = format!("driver=luks,key-secret=key,file.filename={image}");
    let convert = ["convert", "-U", "--object", &secret, "--image-opts", "-O", "raw"];
    run("qemu-img", &[&convert[..], &[&source, &plain]].concat())?;
    check_same_bytes(&mut vm, "vda", plain.as_ref())?;
    vm.power_off(LIMIT)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    check_file_system(plain.as_ref())
}
