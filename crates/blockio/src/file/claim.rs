//! Claims on files that other programs have opened and passed to this process.
//!
//! A lock belongs to an open file. A program could pass one open file for two disks: its lock is in
//! the way of neither.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::{Arc, Weak};

use crate::executor::sync::Lock;

/// The claims of this process. Those that have ended are removed by the next claim.
static CLAIMS: Lock<Vec<Entry>> = Lock::new(Vec::new());

struct Entry {
    place: Place,
    is_written: bool,
    holder: Weak<()>,
}

/// A block device by its number, or another file by file system and inode.
#[derive(PartialEq, Eq)]
enum Place {
    Device(u64),
    File(u64, u64),
}

/// A claim, until its clones are dropped.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    _holder: Arc<()>,
}

impl Claim {
    /// Claims a file. `None`: it is claimed already, and one of both users writes to it.
    ///
    /// # Errors
    ///
    /// When the kernel does not describe the file.
    pub(crate) fn new(file: &File, is_written: bool) -> io::Result<Option<Self>> {
        let found = file.metadata()?;
        let place = match found.file_type().is_block_device() {
            true => Place::Device(found.rdev()),
            false => Place::File(found.dev(), found.ino()),
        };
        let mut claims = CLAIMS.lock();
        claims.retain(|claim| claim.holder.strong_count() > 0);
        let is_in_way = |other: &Entry| other.place == place && (other.is_written || is_written);
        if claims.iter().any(is_in_way) {
            return Ok(None);
        }
        let holder = Arc::new(());
        claims.push(Entry { place, is_written, holder: Arc::downgrade(&holder) });
        Ok(Some(Self { _holder: holder }))
    }
}
