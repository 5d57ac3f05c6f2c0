//! The disks, made for a measurement and removed after it on every way out.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::ceph::Cluster;
use ringhaul_tools::process::{self, Interrupt, ManagedChild};
use ringhaul_tools::workspace;
use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate, statfs};
use serde::{Serialize, Serializer};
use tempfile::TempDir;

use super::{elsewhere, thin};

/// The zram device to use if it is unused.
const ZRAM: &str = "zram0";

/// The folder of the file behind the loop device, if it is a tmpfs.
const TMPFS: &str = "/dev/shm";

/// `f_type` of a tmpfs, from linux/magic.h.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// `f_type` of ext2, ext3 and ext4, from linux/magic.h.
const EXT4_MAGIC: u64 = 0xef53;

/// The most time that the kernel may take to release a device.
const RELEASE_LIMIT: Duration = Duration::from_secs(10);

/// The kind of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// No disk: the layers above are measured.
    Null,
    /// Compressed memory: a device that completes at once.
    Zram,
    /// A loop device over a file in memory.
    Loop,
    /// A file on the file system of the target directory.
    File,
    /// An image in a Ceph cluster.
    Rbd,
    /// An export of an NBD server.
    Nbd,
    /// A qcow2 image.
    Qcow2,
    /// A new qcow2 image in a file for each measurement. Writes find no space allocated.
    Thin,
    /// Like `Thin`, but on compressed memory.
    ThinZram,
}

impl Target {
    /// Local disks without an image format.
    pub(crate) const ALL: [Self; 4] = [Self::Null, Self::Zram, Self::Loop, Self::File];

    /// All disks with which Ringhaul is compared.
    pub(crate) const COMPARED: [Self; 9] = [
        Self::Null,
        Self::Zram,
        Self::Loop,
        Self::File,
        Self::Rbd,
        Self::Nbd,
        Self::Qcow2,
        Self::Thin,
        Self::ThinZram,
    ];

    /// True if programs beside the server do its work. They need a CPU too, so no program is
    /// pinned.
    pub(crate) fn is_elsewhere(self) -> bool {
        matches!(self, Self::Rbd | Self::Nbd)
    }

    /// True for a qcow2 image.
    pub(crate) fn is_image(self) -> bool {
        matches!(self, Self::Qcow2) || self.is_thin()
    }

    /// True for a new image in each measurement.
    pub(crate) fn is_thin(self) -> bool {
        matches!(self, Self::Thin | Self::ThinZram)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Null => "null",
            Self::Zram => "zram",
            Self::Loop => "loop",
            Self::File => "file",
            Self::Rbd => "rbd",
            Self::Nbd => "nbd",
            Self::Qcow2 => "qcow2",
            Self::Thin => "thin",
            Self::ThinZram => "thin-zram",
        })
    }
}

impl Serialize for Target {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A disk to measure. Dropping it removes it.
pub(crate) struct Disk {
    pub(crate) target: Target,
    /// The path of a device, a file, a socket or a configuration. `None` for null.
    pub(crate) path: Option<PathBuf>,
    /// The description in the report, without paths.
    pub(crate) description: String,
    pub(super) cleanup: Cleanup,
}

/// The cleanup of a disk.
pub(super) enum Cleanup {
    Nothing,
    Folder(TempDir),
    Zram,
    Loop(PathBuf, TempDir),
    Cluster(Box<Cluster>),
    Server(ManagedChild, TempDir),
}

/// A disk, or the reason why this machine has none.
pub(crate) enum Prepared {
    Ready(Disk),
    Skipped(String),
}

impl Disk {
    /// Removes the disk.
    pub(crate) fn restore(mut self) -> Result<()> {
        self.clean_up()
    }

    fn clean_up(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.cleanup, Cleanup::Nothing) {
            Cleanup::Nothing => Ok(()),
            Cleanup::Folder(folder) => folder.close().context("removing the disk's file"),
            Cleanup::Zram => reset_zram(),
            Cleanup::Cluster(cluster) => {
                drop(cluster);
                Ok(())
            }
            Cleanup::Server(mut server, folder) => {
                server.stop()?;
                folder.close().context("removing the folder of a server's socket")
            }
            Cleanup::Loop(device, folder) => {
                let detached = process::output(losetup().arg("-d").arg(&device));
                detached.with_context(|| format!("detaching {}", device.display()))?;
                folder.close().context("removing the file behind the loop device")
            }
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Err(error) = self.clean_up() {
            eprintln!("lab: {error:#}");
        }
    }
}

/// Makes a disk of `size_mib` MiB, filled with random data.
pub(crate) fn prepare(target: Target, size_mib: u64, interrupt: &Interrupt) -> Result<Prepared> {
    let size = size_mib.checked_mul(1 << 20).context("--size is too large")?;
    match target {
        Target::Null => {
            let description = "no disk: reads and writes are done at once".to_owned();
            Ok(Prepared::Ready(Disk { target, path: None, description, cleanup: Cleanup::Nothing }))
        }
        Target::Zram => prepare_zram(size, interrupt),
        Target::Loop => prepare_loop(size, interrupt),
        Target::File => prepare_file(&workspace::target_dir()?, size, interrupt),
        Target::Rbd => elsewhere::prepare_rbd(size, interrupt),
        Target::Nbd => elsewhere::prepare_nbd(size, interrupt),
        Target::Qcow2 => elsewhere::prepare_qcow2(size, interrupt),
        Target::Thin => thin::prepare_file(),
        Target::ThinZram => thin::prepare_zram(),
    }
}

pub(super) fn prepare_zram(size: u64, interrupt: &Interrupt) -> Result<Prepared> {
    let mut prepared = prepare_empty_zram(size, size)?;
    if let Prepared::Ready(Disk { path: Some(device), description, .. }) = &mut prepared {
        description.push_str(", filled with random data");
        let file = OpenOptions::new().write(true).open(&*device);
        fill(file.with_context(|| format!("opening {}", device.display()))?, size, interrupt)?;
    }
    Ok(prepared)
}

/// Prepares zram without data. The disk will use at most `memory` bytes.
pub(super) fn prepare_empty_zram(size: u64, memory: u64) -> Result<Prepared> {
    let device = Path::new("/dev").join(ZRAM);
    let used = match zram_attribute("disksize") {
        Ok(disksize) => disksize != "0",
        Err(_) => {
            return Ok(Prepared::Skipped(format!("there is no {}", device.display())));
        }
    };
    if used {
        return Ok(Prepared::Skipped(format!("{} is in use", device.display())));
    }
    if let Some(reason) = lacks_root().or_else(|| lacks_memory(memory)) {
        return Ok(Prepared::Skipped(reason));
    }
    let attribute = Path::new("/sys/block").join(ZRAM).join("disksize");
    // From here on dropping the disk resets the device.
    let mut disk = Disk {
        target: Target::Zram,
        path: Some(device.clone()),
        description: String::new(),
        cleanup: Cleanup::Zram,
    };
    std::fs::write(&attribute, size.to_string())
        .with_context(|| format!("setting {}", attribute.display()))?;
    let algorithms = zram_attribute("comp_algorithm")?;
    let algorithm = algorithms.split(['[', ']']).nth(1).unwrap_or(algorithms.as_str()).to_owned();
    disk.description = format!("zram of {} MiB, {algorithm}", size >> 20);
    Ok(Prepared::Ready(disk))
}

fn zram_attribute(name: &str) -> Result<String> {
    let path = Path::new("/sys/block").join(ZRAM).join(name);
    let text = std::fs::read_to_string(&path);
    Ok(text.with_context(|| format!("reading {}", path.display()))?.trim().to_owned())
}

/// Gives the device's memory back. Retries, since udev may have the device open for a moment.
fn reset_zram() -> Result<()> {
    let path = Path::new("/sys/block").join(ZRAM).join("reset");
    process::retry(RELEASE_LIMIT, || {
        std::fs::write(&path, "1").with_context(|| format!("writing to {}", path.display()))
    })
}

pub(super) fn prepare_loop(size: u64, interrupt: &Interrupt) -> Result<Prepared> {
    if let Some(reason) = lacks_root().or_else(|| lacks_memory(size)) {
        return Ok(Prepared::Skipped(reason));
    }
    if file_system(Path::new(TMPFS)) != Some(TMPFS_MAGIC) {
        return Ok(Prepared::Skipped(format!("{TMPFS} is no tmpfs")));
    }
    let folder = temporary_folder(Path::new(TMPFS))?;
    let backing = folder.path().join("disk.img");
    make_file(&backing, size, interrupt)?;
    let attach = |direct: &str| {
        let mut command = losetup();
        process::output(command.args(["--find", "--show", direct]).arg(&backing))
    };
    // Old kernels have no direct I/O on tmpfs. The loop device then uses the page cache, which
    // holds the data of a tmpfs anyway.
    let (device, mode) = match attach("--direct-io=on") {
        Ok(device) => (device, "direct I/O"),
        Err(_) => (attach("--direct-io=off").context("attaching a loop device")?, "buffered I/O"),
    };
    let device = PathBuf::from(device);
    let description = format!(
        "loop device ({mode}) over a file of {} MiB on tmpfs, filled with random data",
        size >> 20
    );
    let cleanup = Cleanup::Loop(device.clone(), folder);
    Ok(Prepared::Ready(Disk { target: Target::Loop, path: Some(device), description, cleanup }))
}

/// Finds losetup even if the PATH of root lacks the sbin folders.
fn losetup() -> Command {
    Command::new(workspace::find_program("losetup").unwrap_or_else(|| "losetup".into()))
}

fn prepare_file(parent: &Path, size: u64, interrupt: &Interrupt) -> Result<Prepared> {
    let context = || format!("making {}", parent.display());
    std::fs::create_dir_all(parent).with_context(context)?;
    let folder = temporary_folder(parent)?;
    let path = folder.path().join("disk.img");
    make_file(&path, size, interrupt)?;
    let on = match file_system(&path) {
        Some(EXT4_MAGIC) => "ext4".to_owned(),
        Some(TMPFS_MAGIC) => "tmpfs (not a disk)".to_owned(),
        Some(magic) => format!("a file system with magic {magic:#x}"),
        None => "an unknown file system".to_owned(),
    };
    let description =
        format!("file of {} MiB on {on}, preallocated, filled with random data", size >> 20);
    let cleanup = Cleanup::Folder(folder);
    Ok(Prepared::Ready(Disk { target: Target::File, path: Some(path), description, cleanup }))
}

pub(super) fn temporary_folder(parent: &Path) -> Result<TempDir> {
    tempfile::Builder::new()
        .prefix("ringhaul-lab-")
        .tempdir_in(parent)
        .with_context(|| format!("making a folder in {}", parent.display()))
}

pub(super) fn make_file(path: &Path, size: u64, interrupt: &Interrupt) -> Result<()> {
    let context = || format!("making {} with {} MiB", path.display(), size >> 20);
    let file = File::create_new(path).with_context(context)?;
    fallocate(&file, FallocateFlags::empty(), 0, size).with_context(context)?;
    fill(file, size, interrupt).with_context(context)
}

/// Writes random data, so that no server reads holes, zeroes or unwritten extents.
fn fill(mut file: File, size: u64, interrupt: &Interrupt) -> Result<()> {
    let mut random = File::open("/dev/urandom").context("opening /dev/urandom")?;
    let mut piece = vec![0; 1 << 20];
    for _ in 0..size >> 20 {
        interrupt.check()?;
        random.read_exact(&mut piece).context("reading /dev/urandom")?;
        file.write_all(&piece).context("filling the disk")?;
    }
    file.sync_all().context("filling the disk")?;
    // Otherwise the first direct writes would pay for the eviction of cached pages.
    fadvise(&file, 0, None, Advice::DontNeed).context("dropping the disk from the page cache")
}

fn file_system(path: &Path) -> Option<u64> {
    let magic = statfs(path).ok()?.f_type;
    u64::try_from(magic).ok()
}

fn lacks_root() -> Option<String> {
    (!rustix::process::geteuid().is_root()).then(|| "it needs root".to_owned())
}

/// Returns the reason if memory is too short for a disk of `size` bytes.
fn lacks_memory(size: u64) -> Option<String> {
    let available = available_memory().unwrap_or(u64::MAX);
    // Half as much again is for the servers, the load generator and everything else.
    (available < size + size / 2)
        .then(|| format!("{} MiB of memory are too little for {} MiB", available >> 20, size >> 20))
}

/// MemAvailable, in bytes.
fn available_memory() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("reading /proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    let kib: u64 = kib.context("no MemAvailable in /proc/meminfo")?.parse()?;
    ensure!(kib > 0, "no memory is available");
    Ok(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_filled_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let prepared = prepare_file(folder.path(), 2 << 20, &Interrupt::unset_for_test()).unwrap();
        let Prepared::Ready(disk) = prepared else { panic!("a file is never skipped") };
        let bytes = std::fs::read(disk.path.as_ref().unwrap()).unwrap();
        assert_eq!(bytes.len(), 2 << 20);
        assert!(bytes.chunks(4096).all(|block| block.iter().any(|byte| *byte != 0)));
        disk.restore().unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn an_interrupted_preparation_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        assert!(prepare_file(folder.path(), 2 << 20, &Interrupt::set_for_test()).is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_disk_in_memory_must_fit() {
        assert_eq!(lacks_memory(1 << 20), None);
        assert!(lacks_memory(1 << 60).is_some());
    }
}
