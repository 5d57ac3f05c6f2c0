//! Claims on files that other programs have opened and passed to this process.
//!
//! A lock belongs to an open file. A program could pass one open file for two disks: its lock is in
//! the way of neither.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Weak};

use rustix::fs::{FileType, fstat};

use crate::executor::sync::Lock;

/// The claims of this process. Those that have ended are removed by the next claim.
static CLAIMS: Lock<Vec<Entry>> = Lock::new(Vec::new());

struct Entry {
    file_id: FileId,
    is_written: bool,
    holder: Weak<()>,
}

/// A block device by its number, or another file by file system and inode.
#[derive(PartialEq, Eq)]
enum FileId {
    Device(u64),
    File(u64, u64),
}

/// A claim, until its clones are dropped.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    _holder: Arc<()>,
}

impl FileId {
    fn from_file(file: impl AsFd) -> io::Result<Self> {
        let found = fstat(file)?;
        Ok(match FileType::from_raw_mode(found.st_mode) {
            FileType::BlockDevice => Self::Device(found.st_rdev),
            _ => Self::File(found.st_dev, found.st_ino),
        })
    }
}

impl Claim {
    /// Claims a file. `None`: it is claimed already, and one of both users writes to it.
    ///
    /// # Errors
    ///
    /// When the kernel does not describe the file.
    pub(crate) fn new(file: impl AsFd, is_written: bool) -> io::Result<Option<Self>> {
        let file_id = FileId::from_file(file)?;
        let mut claims = CLAIMS.lock();
        claims.retain(|claim| claim.holder.strong_count() > 0);
        let is_in_way =
            |other: &Entry| other.file_id == file_id && (other.is_written || is_written);
        if claims.iter().any(is_in_way) {
            return Ok(None);
        }
        Ok(Some(Self::add(&mut claims, file_id, is_written)))
    }

    /// Claims a file that another process has handed over, whoever else has claimed it.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    pub(crate) fn inherit(file: impl AsFd, is_written: bool) -> io::Result<Self> {
        let file_id = FileId::from_file(file)?;
        Ok(Self::add(&mut CLAIMS.lock(), file_id, is_written))
    }

    fn add(claims: &mut Vec<Entry>, file_id: FileId, is_written: bool) -> Self {
        let holder = Arc::new(());
        claims.push(Entry { file_id, is_written, holder: Arc::downgrade(&holder) });
        Self { _holder: holder }
    }
}
