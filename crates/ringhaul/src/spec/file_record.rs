//! The identity of a file, by which it is recognised at the next start.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use blockio::DiskOptions;
use blockio::disk::open_for_other;
use blockio::file::FileTable;
use rustix::fs::{AtFlags, OFlags, StatxFlags, fcntl_getfl, major, makedev, statx};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A file that a member of the `--control-group` has named, as it was at that time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct FileRecord {
    /// Its path.
    pub path: PathBuf,
    /// True if it is written to.
    pub writable: bool,
    /// The number of its file system.
    pub device: u64,
    /// Its number in the file system.
    pub inode: u64,
    /// The time of its creation in nanoseconds since 1970, where the file system keeps it. A later
    /// file may have the same number.
    pub created_ns: Option<u64>,
    /// The sequence number of a block device, where Linux keeps it.
    pub disk_sequence: Option<u64>,
    /// The boot in which the sequence number of a block device is valid.
    #[serde(default)]
    pub boot_id: Option<String>,
    /// The identity of a block device that remains after a reboot, where it has one.
    #[serde(default)]
    pub device_id: Option<String>,
}

impl FileRecord {
    /// Describes an open file.
    ///
    /// # Errors
    ///
    /// When the kernel does not report its identity.
    pub(crate) fn new(path: &Path, file: &File) -> io::Result<Self> {
        let found =
            statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS | StatxFlags::BTIME)?;
        let born = found.stx_btime;
        let created_ns = u64::try_from(born.tv_sec).ok().map(|seconds| {
            seconds.saturating_mul(1_000_000_000).saturating_add(born.tv_nsec.into())
        });
        let has_birth = found.stx_mask & StatxFlags::BTIME.bits() != 0;
        let is_writable = fcntl_getfl(file)? & OFlags::RWMODE != OFlags::RDONLY;
        let is_device = rustix::fs::FileType::from_raw_mode(found.stx_mode.into())
            == rustix::fs::FileType::BlockDevice;
        let number = (found.stx_rdev_major, found.stx_rdev_minor);
        let folder = PathBuf::from(format!("/sys/dev/block/{}:{}", number.0, number.1));
        let folder = is_device.then_some(folder);
        let sequence = |folder: &PathBuf| line_of(&folder.join("diskseq"))?.parse().ok();
        let boot_id = folder.as_ref().and_then(|_| line_of(BOOT_ID.as_ref()));
        Ok(Self {
            path: path.to_owned(),
            writable: is_writable,
            device: makedev(found.stx_dev_major, found.stx_dev_minor),
            inode: found.stx_ino,
            created_ns: created_ns.filter(|_| has_birth),
            disk_sequence: folder.as_ref().and_then(sequence),
            boot_id,
            device_id: folder.as_deref().and_then(device_id),
        })
    }

    fn open(&self, no_lock: bool) -> Result<File> {
        let options = DiskOptions { read_only: !self.writable, no_lock, ..DiskOptions::default() };
        let file = open_for_other(&self.path, &options)?;
        let shown = self.path.display();
        let found =
            Self::new(&self.path, &file).with_context(|| format!("cannot examine {shown}"))?;
        ensure!(
            self.is_same_file(&found),
            "{shown} is another file than the one that was named when the disk was added; add the \
             disk again"
        );
        Ok(file)
    }

    /// Compares two records of open files, which may be of different boots.
    fn is_same_file(&self, found: &Self) -> bool {
        let Self { path, writable, .. } = self;
        if (path, writable) != (&found.path, &found.writable) {
            return false;
        }
        if self.boot_id.is_none() && found.boot_id.is_none() {
            // Another mount may have another number, but a kind of device has its major number.
            let same_system = match self.created_ns {
                Some(_) => major(self.device) == major(found.device),
                None => self.device == found.device,
            };
            return same_system
                && (self.inode, self.created_ns, self.disk_sequence)
                    == (found.inode, found.created_ns, found.disk_sequence);
        }
        // The numbers of a block device belong to a node in memory.
        if self.boot_id == found.boot_id {
            return *self == *found;
        }
        self.device_id.is_some() && self.device_id == found.device_id
    }
}

/// The file with the identity of this boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The identity of a block device, by its folder in `/sys`, that remains after a reboot. Device
/// mapper, NVMe and SCSI disks have one; loop devices do not.
fn device_id(folder: &Path) -> Option<String> {
    let known = ["dm/uuid", "wwid", "device/wwid"];
    known.iter().find_map(|name| Some(format!("{name} {}", line_of(&folder.join(name))?)))
}

/// The only line of a short file. `None`: it is empty or not there.
fn line_of(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned()).filter(|line| !line.is_empty())
}

/// Opens recorded files, for a disk that may open no other file.
///
/// # Errors
///
/// When one cannot be opened, or another file has its path.
pub(crate) fn open_recorded(records: &[FileRecord], no_lock: bool) -> Result<FileTable> {
    let open = |record: &FileRecord| Ok((record.path.clone(), record.open(no_lock)?));
    Ok(FileTable::new(records.iter().map(open).collect::<Result<_>>()?, true))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorded_file_is_no_later_file_of_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, [0; 512]).unwrap();
        let record = FileRecord::new(&path, &File::open(&path).unwrap()).unwrap();
        assert!(!record.writable && record.disk_sequence.is_none());
        let records = [record.clone()];
        let table = open_recorded(&records, false).unwrap();
        assert!(table.get(&path).unwrap().is_ok());
        assert!(table.get(folder.path()).unwrap().is_err(), "another file");
        let other = folder.path().join("other");
        std::fs::write(&other, [0; 512]).unwrap();
        // The number of a file may be given to a later one.
        let later = FileRecord { created_ns: Some(1), ..record };
        assert!(open_recorded(&[later], false).is_err());
        std::fs::rename(&other, &path).unwrap();
        let error = open_recorded(&records, false).unwrap_err().to_string();
        assert!(error.contains("is another file than the one"), "{error}");
    }

    /// Mounts of btrfs, NFS and overlayfs have other numbers after a reboot.
    #[test]
    fn a_file_is_recognised_after_a_reboot() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, [0; 512]).unwrap();
        let file = File::open(&path).unwrap();
        let found = FileRecord { created_ns: Some(7), ..FileRecord::new(&path, &file).unwrap() };
        assert_eq!((&found.boot_id, &found.device_id), (&None, &None));
        let number =
            |change: u32| makedev(major(found.device), rustix::fs::minor(found.device) + change);
        let mount = FileRecord { device: number(1), ..found.clone() };
        assert!(mount.is_same_file(&found));
        let kind = makedev(major(found.device) + 1, rustix::fs::minor(found.device));
        for other in [
            FileRecord { device: kind, ..found.clone() },
            FileRecord { inode: found.inode + 1, ..mount.clone() },
            FileRecord { created_ns: Some(8), ..mount.clone() },
            FileRecord { created_ns: None, ..mount.clone() },
            FileRecord { writable: true, ..mount.clone() },
        ] {
            assert!(!other.is_same_file(&found), "{other:?}");
        }
        let unknown = FileRecord { created_ns: None, ..found.clone() };
        assert!(unknown.is_same_file(&unknown));
        assert!(!FileRecord { device: number(1), ..unknown.clone() }.is_same_file(&unknown));
    }

    #[test]
    fn a_block_device_is_recognised_after_a_reboot_by_a_lasting_identity() {
        let text = |text: &str| Some(text.to_owned());
        let before = FileRecord {
            path: "/dev/sda".into(),
            writable: true,
            device: 5,
            inode: 300,
            created_ns: Some(1),
            disk_sequence: Some(9),
            boot_id: text("first"),
            device_id: text("device/wwid naa.5000"),
        };
        assert!(before.is_same_file(&before));
        let exchanged = FileRecord { disk_sequence: Some(10), ..before.clone() };
        assert!(!before.is_same_file(&exchanged), "in the same boot");
        let numbers = FileRecord { inode: 301, created_ns: Some(2), ..exchanged };
        let after = FileRecord { boot_id: text("second"), ..numbers };
        assert!(before.is_same_file(&after));
        let other = FileRecord { device_id: text("device/wwid naa.5001"), ..after.clone() };
        let file = FileRecord { boot_id: None, device_id: None, ..before.clone() };
        assert!(!before.is_same_file(&other) && !before.is_same_file(&file));
        // All numbers may be the same by chance.
        let [no_id, no_id_later] =
            [&before, &FileRecord { boot_id: text("second"), ..before.clone() }]
                .map(|record| FileRecord { device_id: None, ..record.clone() });
        assert!(no_id.is_same_file(&no_id) && !no_id.is_same_file(&no_id_later));
    }

    #[test]
    fn device_mapper_nvme_and_scsi_name_their_devices() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(device_id(folder.path()), None);
        for (part, file, text, expected) in [
            ("device", "device/wwid", "naa.5000\n", "device/wwid naa.5000"),
            ("", "wwid", "eui.01\n", "wwid eui.01"),
            ("dm", "dm/uuid", "\n", "wwid eui.01"),
            ("dm", "dm/uuid", "LVM-x\n", "dm/uuid LVM-x"),
        ] {
            std::fs::create_dir_all(folder.path().join(part)).unwrap();
            std::fs::write(folder.path().join(file), text).unwrap();
            assert_eq!(device_id(folder.path()).as_deref(), Some(expected));
        }
    }
}
