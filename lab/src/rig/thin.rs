//! New qcow2 images, in which first writes allocate space.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use ringhaul_tools::process;
use ringhaul_tools::workspace;

use super::targets::{Cleanup, Disk, Prepared, Target, prepare_empty_zram, temporary_folder};

/// The virtual size of the image: more than a measurement writes.
const DISK_BYTES: u64 = 20 << 30;
/// The size of the device below, with room for tables.
const DEVICE_BYTES: u64 = DISK_BYTES + (1 << 30);
/// The memory that a measurement on zram may use.
const MEMORY_BYTES: u64 = 4 << 30;

pub(super) fn prepare_file() -> Result<Prepared> {
    if let Some(reason) = lacks_program() {
        return Ok(Prepared::Skipped(reason));
    }
    let parent = workspace::target_dir()?;
    std::fs::create_dir_all(&parent).with_context(|| format!("making {}", parent.display()))?;
    let folder = temporary_folder(&parent)?;
    let path = folder.path().join("thin.qcow2");
    let description = describe("in a file of the target directory");
    let (target, cleanup) = (Target::Thin, Cleanup::Folder(folder));
    Ok(Prepared::Ready(Disk { target, path: Some(path), description, cleanup }))
}

pub(super) fn prepare_zram() -> Result<Prepared> {
    if let Some(reason) = lacks_program() {
        return Ok(Prepared::Skipped(reason));
    }
    let mut prepared = prepare_empty_zram(DEVICE_BYTES, MEMORY_BYTES)?;
    if let Prepared::Ready(disk) = &mut prepared {
        disk.target = Target::ThinZram;
        disk.description = describe(&format!("on {}", disk.description));
    }
    Ok(prepared)
}

fn lacks_program() -> Option<String> {
    let lacks = |name: &&str| workspace::find_program(name).is_none();
    let lacking = ["qemu-img", "blkdiscard"].into_iter().find(lacks)?;
    Some(format!("{lacking} is missing (`make setup`)"))
}

fn describe(place: &str) -> String {
    format!("a new image of {} MiB for each measurement, {place}", DISK_BYTES >> 20)
}

/// Creates the image again, without the data of the last measurement.
pub(crate) fn renew(path: &Path) -> Result<()> {
    let program = |name: &str| workspace::find_program(name).unwrap_or_else(|| name.into());
    if path.starts_with("/dev") {
        process::output(Command::new(program("blkdiscard")).arg("--force").arg(path))?;
    } else if path.exists() {
        std::fs::remove_file(path).with_context(|| format!("removing {}", path.display()))?;
    }
    let mut create = Command::new(program("qemu-img"));
    create.args(["create", "-q", "-f", "qcow2"]).arg(path).arg(DISK_BYTES.to_string());
    process::output(&mut create).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_measurement_has_a_new_image() {
        let Prepared::Ready(disk) = prepare_file().unwrap() else { return };
        let path = disk.path.clone().unwrap();
        for _ in 0..2 {
            renew(&path).unwrap();
            assert!(std::fs::read(&path).unwrap().starts_with(b"QFI\xfb"));
            std::fs::write(&path, "used").unwrap();
        }
        disk.restore().unwrap();
        assert!(!path.exists());
    }
}
