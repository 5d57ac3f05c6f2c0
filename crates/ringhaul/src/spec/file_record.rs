//! The identity of a file, by which it is recognised at the next start.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use blockio::DiskOptions;
use blockio::disk::open_for_other;
use blockio::file::FileTable;
use rustix::fs::{AtFlags, OFlags, StatxFlags, fcntl_getfl, statx};
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
        let number = (found.stx_rdev_major, found.stx_rdev_minor);
        let sequence = format!("/sys/dev/block/{}:{}/diskseq", number.0, number.1);
        let sequence = || std::fs::read_to_string(sequence).ok()?.trim().parse().ok();
        let is_device = rustix::fs::FileType::from_raw_mode(found.stx_mode.into())
            == rustix::fs::FileType::BlockDevice;
        Ok(Self {
            path: path.to_owned(),
            writable: is_writable,
            device: rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor),
            inode: found.stx_ino,
            created_ns: created_ns.filter(|_| has_birth),
            disk_sequence: if is_device { sequence() } else { None },
        })
    }

    fn open(&self, no_lock: bool) -> Result<File> {
        let options = DiskOptions { read_only: !self.writable, no_lock, ..DiskOptions::default() };
        let file = open_for_other(&self.path, &options)?;
        let shown = self.path.display();
        let found =
            Self::new(&self.path, &file).with_context(|| format!("cannot examine {shown}"))?;
        ensure!(
            found == *self,
            "{shown} is another file than the one that was named when the disk was added; add the \
             disk again"
        );
        Ok(file)
    }
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
}
