//! Options and properties of a disk, its state, and failed transfers.

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, io};

use super::folder::Folder;
use crate::error::Error;
use crate::file::FileTable;
use iomem::Buffers;

/// Options for opening a disk.
#[derive(Debug, Clone, Default)]
pub struct DiskOptions {
    /// Bypass the page cache (`O_DIRECT`).
    pub direct: bool,
    /// Refuse all changes of data.
    pub read_only: bool,
    /// The smallest unit of a request in bytes: a power of two, 512 to 65,536. `None`: the block
    /// that a block device requires, and 512 for a regular file.
    pub logical_block_bytes: Option<u32>,
    /// Neither lock the file, nor claim the block device, nor heed the locks of other programs. The
    /// caller must keep other writers away.
    pub no_lock: bool,
    /// The lock of the disk is taken later: see [`LateLock`](super::LateLock). Until then no byte
    /// of the disk is changed, and no content is kept. Files need [`no_lock`](Self::no_lock) too.
    pub late_lock: bool,
    /// The file holds an image with a format that defines the size of the disk. The file may have
    /// any length, and counts as rounded up to whole blocks.
    pub holds_image: bool,
    /// The user of the disk: a number of 62 bits, unique on this machine among users that may use
    /// it at the same time. Opening waits until the operations of a killed process of the same user
    /// have ended. The lock does not show these if the disk is only read, or with
    /// [`no_lock`](Self::no_lock).
    pub user: Option<u64>,
    /// Fail at once if the disk is in use, instead of retrying for two seconds.
    pub at_once: bool,
    /// The path names a regular file within this folder, relative to it. No link may lead out of
    /// the folder, even while names change there.
    pub within: Option<Folder>,
    /// Fail if any part of the path is a symbolic link.
    pub no_links: bool,
    /// Files that are open already. They take precedence over a path.
    pub files: Option<Arc<FileTable>>,
}

/// The properties of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskInfo {
    /// Size in bytes; a multiple of `logical_block_bytes`.
    pub size_bytes: u64,
    /// The unit of offsets and lengths of requests, in bytes.
    pub logical_block_bytes: u32,
    /// Smaller writes may cost the disk a read. A multiple of `logical_block_bytes`.
    pub physical_block_bytes: u32,
    /// True if writes are refused.
    pub read_only: bool,
    /// True if the page cache is bypassed.
    pub direct: bool,
}

/// The time that requests have waited, all of them together: two requests that wait for a second
/// count two seconds.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct WaitTimes {
    /// For limits.
    pub throttled: Duration,
    /// For a retry, after the disk failed them.
    pub retried: Duration,
    /// For space.
    pub held: Duration,
}

/// The state of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskState {
    /// The disk answers.
    Ready,
    /// Requests that the disk failed have waited for a retry since this time.
    Retried(Instant),
    /// The disk has had no space left since this time, and writes wait for some.
    Held(Instant),
    /// The disk has not answered an operation since this time, for 5 seconds or more.
    Late(Instant),
    /// The remote end has been unreachable since this time. It is tried again, and requests wait.
    Away(Instant),
    /// Written data may be lost: flushes fail until the disk is opened again.
    Lost,
}

/// The abilities of a disk, besides reading and writing.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Abilities {
    /// Flushed data survives a loss of power.
    pub flush: bool,
    /// Discards give space back.
    pub discard: bool,
    /// Ranges are zeroed without moving zeroes.
    pub zeroes: bool,
    /// [`set_size`](super::DiskSource::set_size) works.
    pub resize: bool,
    /// Locks keep other users away while the disk is in use.
    pub lock: bool,
    /// Snapshots of it can be opened.
    pub snapshots: bool,
}

/// A layer of a disk, or the disk at the bottom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// The kind, such as `file`.
    pub kind: &'static str,
    /// The location or the name, as text. May be empty.
    pub place: String,
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.place {
            "" => f.write_str(self.kind),
            place => write!(f, "{} {place}", self.kind),
        }
    }
}

/// Bytes of a disk that may be a disk of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The [identity](super::DiskSource::identity) of the whole disk; empty if it stores nothing.
    pub disk: String,
    /// The first byte.
    pub start: u64,
    /// The byte after the last. `None` if this ends with the disk, which may grow.
    pub end: Option<u64>,
    /// True if the bytes are not stored in order, as in an image: any part may be anywhere there.
    pub is_spread: bool,
}

impl Placement {
    /// The place of a part that begins at this offset; `size_bytes` as in
    /// [`DiskSource::raw`](super::DiskSource::raw).
    pub(super) fn part(self, offset_bytes: u64, size_bytes: Option<u64>) -> Self {
        if self.is_spread {
            return self;
        }
        let start = self.start + offset_bytes;
        Self { start, end: size_bytes.map(|size| start + size).or(self.end), ..self }
    }

    /// Returns true if the places share bytes, so that writes to one are read from both.
    pub fn overlaps(&self, other: &Self) -> bool {
        let ends_after = |end: Option<u64>, start| end.is_none_or(|end| end > start);
        let is_kept = !self.disk.is_empty() && self.disk == other.disk;
        is_kept && ends_after(self.end, other.start) && ends_after(other.end, self.start)
    }
}

/// Neighbouring bytes of a disk, of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The number of bytes.
    pub bytes: u64,
    /// The kind of the bytes.
    pub kind: ExtentKind,
}

/// Knowledge about bytes that were not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentKind {
    /// Any content.
    Data,
    /// Zeroes that have their space.
    Zero,
    /// Zeroes that are not stored, although space may be reserved.
    Hole,
}

impl Extent {
    /// Bytes of unknown content.
    pub fn data(bytes: u64) -> Self {
        Self { bytes, kind: ExtentKind::Data }
    }

    /// Rounds to whole blocks, of at most `len` bytes. A block that is only partly a hole is data.
    pub(super) fn in_blocks(self, len: u64, block: u32) -> Self {
        let block = u64::from(block);
        match self.kind {
            ExtentKind::Data => Self { bytes: self.bytes.next_multiple_of(block).min(len), ..self },
            _ if self.bytes >= block => Self { bytes: self.bytes / block * block, ..self },
            _ => Self::data(block),
        }
    }
}

/// A failed transfer. As small as a pointer, so that the result of a transfer is returned in
/// registers.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.error())]
pub struct TransferError(Box<(io::Error, Buffers)>);

impl TransferError {
    /// A transfer that ended with `error` before `rest` was transferred. An empty `rest`: all of a
    /// write was transferred, and may be lost. Releases everything [kept](Buffers::keep) for the
    /// transfer, since a retry of the rest may be far off.
    #[cold]
    pub fn new(error: io::Error, mut rest: Buffers) -> Self {
        rest.drop_kept();
        Self(Box::new((error, rest)))
    }

    /// The failure of a flush after a write: all of the write may be lost.
    #[doc(hidden)]
    pub fn lost(error: io::Error) -> Self {
        Self::new(error, Buffers::empty())
    }

    /// The failure of the first `bytes` of `all`, as one of all.
    #[doc(hidden)]
    #[must_use]
    pub fn within(self, mut all: Buffers, bytes: usize) -> Self {
        let (error, rest) = self.into_parts();
        all.advance(bytes - rest.bytes());
        Self::new(error, all)
    }

    /// The reason of the failure.
    pub fn error(&self) -> &io::Error {
        &self.0.0
    }

    /// The part that was not transferred. Empty: all of a write was transferred, and may be lost.
    pub fn rest(&self) -> &Buffers {
        &self.0.1
    }

    /// The reason of the failure, and the part that was not transferred.
    pub fn into_parts(self) -> (io::Error, Buffers) {
        *self.0
    }
}

impl From<TransferError> for io::Error {
    fn from(unfinished: TransferError) -> Self {
        unfinished.into_parts().0
    }
}

impl DiskOptions {
    /// Checks the size of a logical block in bytes, and returns it.
    ///
    /// # Errors
    ///
    /// If it is no power of two from 512 to 65,536.
    pub fn check_logical_block(bytes: u32) -> Result<u32, Error> {
        if bytes.is_power_of_two() && (512..=65_536).contains(&bytes) {
            return Ok(bytes);
        }
        Err(Error::Options(format!(
            "a logical block of {bytes} bytes is not possible: it must be a power of two from 512 \
             to 65536"
        )))
    }
}
