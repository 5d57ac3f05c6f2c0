//! A guest in User Mode Linux: a real kernel that runs as a process, without KVM, with its own
//! vhost-user front-end (virtio_uml).

use std::fs::File;
use std::io::BufWriter;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringhaul_tools::process::wait_child;
use rustix::process::{Pid, Signal, kill_process_group};

use super::cpio::Archive;
use super::image::{add_file, find_program, shared_libraries};

/// The first process of the guest.
const INIT: &str = include_str!("uml-init");

/// The kernel of the Debian package, and the folder of its modules.
const KERNEL: &str = "/usr/bin/linux.uml";
const MODULES: &str = "/usr/lib/uml/modules";
const DRIVER: &str = "kernel/drivers/block/virtio_blk.ko";

/// A file system in memory: the kernel keeps the guest's memory in a file, which back-ends map.
const MEMORY_FOLDER: &str = "/dev/shm";

/// The device id of a block device.
const BLOCK_DEVICE: u32 = 2;

/// Runs a shell script in a guest with a disk that is served on `socket`, and returns the console.
///
/// # Errors
/// If User Mode Linux or a tool is not installed, the script fails, or the guest does not end in
/// time.
pub fn run_uml(socket: &Path, script: &str, limit: Duration) -> Result<String> {
    ensure!(Path::new(KERNEL).exists(), "{KERNEL} is missing; apt-get install user-mode-linux");
    let folder = tempfile::tempdir().context("making a folder for User Mode Linux")?;
    let initramfs = folder.path().join("initramfs");
    write_initramfs(&initramfs, script)?;
    let console = folder.path().join("console");
    let output = File::create(&console).context("creating the console's file")?;
    let errors = output.try_clone().context("duplicating a descriptor")?;
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", KERNEL, "mem=256M", "rdinit=/init", "root=/dev/ram0"])
        .args(["con=null", "con0=null,fd:1", "ssl=null"])
        .arg(format!("initrd={}", initramfs.display()))
        .arg(format!("uml_dir={}", folder.path().display()))
        .arg(format!("virtio_uml.device={}:{BLOCK_DEVICE}", socket.display()))
        .env("TMPDIR", MEMORY_FOLDER)
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(errors)
        .process_group(0);
    let mut uml = Uml(command.spawn().context("starting User Mode Linux")?);
    let ended = wait_child(&mut uml.0, Instant::now() + limit);
    drop(uml);
    let console = std::fs::read(&console).context("reading the console")?;
    let console = String::from_utf8_lossy(&console).replace('\r', "");
    let describe = || format!("User Mode Linux; its console:\n{console}");
    ended.with_context(describe)?;
    ensure!(console.lines().any(|line| line == "script-status=0"), describe());
    Ok(console)
}

fn write_initramfs(path: &Path, script: &str) -> Result<()> {
    let writing = || format!("writing {}", path.display());
    let file = File::create(path).with_context(writing)?;
    let mut archive = Archive::new(BufWriter::new(file));
    archive.file("init", 0o755, INIT.as_bytes()).with_context(writing)?;
    archive.file("script", 0o644, script.as_bytes()).with_context(writing)?;
    archive.character_device("dev/console", (5, 1)).with_context(writing)?;
    add_file(&mut archive, &find_program("busybox", "busybox-static")?, "bin/busybox")?;
    add_file(&mut archive, &driver()?, "virtio_blk.ko")?;
    add_file(&mut archive, Path::new("/etc/mke2fs.conf"), "/etc/mke2fs.conf")?;
    let mut libraries = Vec::new();
    for name in ["mke2fs", "e2fsck"] {
        let tool = find_program(name, "e2fsprogs")?;
        libraries.extend(shared_libraries(&tool)?);
        add_file(&mut archive, &tool, &format!("usr/sbin/{name}"))?;
    }
    libraries.sort_unstable();
    libraries.dedup();
    for library in &libraries {
        add_file(&mut archive, library, &library.to_string_lossy())?;
    }
    archive.finish().with_context(writing)?;
    Ok(())
}

/// The driver of the guest's disk, for the installed kernel.
fn driver() -> Result<PathBuf> {
    let trees = std::fs::read_dir(MODULES).with_context(|| format!("reading {MODULES}"))?;
    let drivers = trees.filter_map(|tree| Some(tree.ok()?.path().join(DRIVER)));
    let driver = drivers.filter(|driver| driver.exists()).max();
    driver.with_context(|| format!("{MODULES} has no {DRIVER}"))
}

/// The processes of the guest: each has a process on this machine, all in the same group.
struct Uml(Child);

impl Drop for Uml {
    fn drop(&mut self) {
        // Fails if all have ended.
        let _ = kill_process_group(Pid::from_child(&self.0), Signal::KILL);
        let _ = self.0.wait();
    }
}
