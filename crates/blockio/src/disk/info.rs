//! What a disk is asked to be, what it is, and how its transfers fail.

use std::time::Instant;
use std::{fmt, io};

use super::folder::Folder;
use crate::error::Error;
use iomem::Buffers;

/// How a disk is opened.
#[derive(Debug, Clone, Default)]
pub struct DiskOptions {
    /// Bypass the page cache (`O_DIRECT`).
    pub direct: bool,
    /// Refuse everything that changes data.
    pub read_only: bool,
    /// The smallest unit of a request in bytes: a power of two, 512 to 65,536. `None`: what a block
    /// device asks for, and 512 for a regular file.
    pub logical_block_bytes: Option<u32>,
    /// Neither lock the file nor claim the block device, nor heed the locks of others: whoever says
    /// so keeps other writers away by himself.
    pub no_lock: bool,
    /// There is an image in the file, whose format says how large the disk is: the file may have
    /// any length, and is taken for as long as whole blocks of it are.
    pub holds_image: bool,
    /// Who uses the disk: a number of 62 bits that nobody else on this machine has who may use it
    /// at the same time. Whoever opens it as the same user next waits until the operations of a
    /// process that was killed have ended, which the lock does not tell where the disk is only
    /// read, or with [`no_lock`](Self::no_lock).
    pub user: Option<u64>,
    /// Fail at once where somebody else has the disk in use, rather than try for two seconds.
    pub at_once: bool,
    /// The path is that of a regular file within this folder, and relative to it: no link may lead
    /// out of it, also while names change there.
    pub within: Option<Folder>,
}

/// What a disk is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskInfo {
    /// Bytes; a multiple of `logical_block_bytes`.
    pub size_bytes: u64,
    /// Offsets and lengths of requests are multiples of it.
    pub logical_block_bytes: u32,
    /// Writes of less than this may cost the disk a read. A multiple of `logical_block_bytes`.
    pub physical_block_bytes: u32,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether the page cache is bypassed.
    pub direct: bool,
}

/// How a disk is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskState {
    /// It answers.
    Ready,
    /// Requests that it has failed since then are tried again, and wait.
    Retried(Instant),
    /// It has no space left since then, and writes wait for some.
    Held(Instant),
    /// It has not answered an operation since then, for 5 seconds or more.
    Late(Instant),
    /// Its other end has not been reached since then: it is tried again, and requests wait.
    Away(Instant),
    /// Data that was written may be lost: flushes fail until it is opened anew.
    Lost,
}

/// What a disk can do, beside reading and writing.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Abilities {
    /// What was flushed survives a loss of power.
    pub flush: bool,
    /// Space that is not needed any more is given back.
    pub discard: bool,
    /// Ranges are zeroed without zeroes being moved.
    pub zeroes: bool,
    /// [`set_size`](super::DiskSource::set_size) works.
    pub resize: bool,
    /// Others are kept away while it is in use.
    pub lock: bool,
    /// Earlier states of it can be opened.
    pub snapshots: bool,
}

/// One of the things that a disk is made of: a layer, or what is at the bottom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Its kind, such as `file`.
    pub kind: &'static str,
    /// Where or which it is, in words. Empty: there is nothing to say.
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
pub struct Place {
    /// The [identity](super::DiskSource::identity) of the whole disk; empty if it keeps nothing.
    pub disk: String,
    /// The first byte.
    pub start: u64,
    /// The byte behind the last. `None`: it ends with the disk, which may grow.
    pub end: Option<u64>,
    /// Something else than its place in a disk decides where each of its bytes is, as in an image:
    /// any part of it may be anywhere there.
    pub is_spread: bool,
}

impl Place {
    /// That of a part of it, which begins at this offset; `size_bytes` as in
    /// [`DiskSource::raw`](super::DiskSource::raw).
    pub(super) fn part(self, offset_bytes: u64, size_bytes: Option<u64>) -> Self {
        if self.is_spread {
            return self;
        }
        let start = self.start + offset_bytes;
        Self { start, end: size_bytes.map(|size| start + size).or(self.end), ..self }
    }

    /// Whether what is written to one is read from the other.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let ends_after = |end: Option<u64>, start| end.is_none_or(|end| end > start);
        let is_kept = !self.disk.is_empty() && self.disk == other.disk;
        is_kept && ends_after(self.end, other.start) && ends_after(other.end, self.start)
    }
}

/// Neighbouring bytes of a disk that are alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// How many.
    pub bytes: u64,
    /// What is known of them.
    pub kind: ExtentKind,
}

/// What is known of bytes that were not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentKind {
    /// They may be anything.
    Data,
    /// They are zeroes, and have their space.
    Zero,
    /// They are zeroes, and nothing is stored for them, although space may be set aside.
    Hole,
}

impl Extent {
    /// Bytes of which nothing is known.
    pub(super) fn data(bytes: u64) -> Self {
        Self { bytes, kind: ExtentKind::Data }
    }

    /// As whole blocks, of at most `len` bytes: what is only in part a hole is none.
    pub(super) fn in_blocks(self, len: u64, block: u32) -> Self {
        let block = u64::from(block);
        match self.kind {
            ExtentKind::Data => Self { bytes: self.bytes.next_multiple_of(block).min(len), ..self },
            _ if self.bytes >= block => Self { bytes: self.bytes / block * block, ..self },
            _ => Self::data(block),
        }
    }
}

/// A transfer that has failed. It is as small as a pointer, so that the result of a transfer is
/// returned in registers.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.error())]
pub struct Unfinished(Box<(io::Error, Buffers)>);

impl Unfinished {
    /// A transfer has ended with `error` before `rest` was transferred. An empty `rest`: all of a
    /// write was, and may be lost. Whatever was [kept](Buffers::keep) for the transfer goes, since
    /// whoever has the rest may wait for long before another one.
    #[cold]
    #[must_use]
    pub fn new(error: io::Error, mut rest: Buffers) -> Self {
        rest.let_go();
        Self(Box::new((error, rest)))
    }

    /// Why.
    #[must_use]
    pub fn error(&self) -> &io::Error {
        &self.0.0
    }

    /// What was not transferred. Empty: all of a write was, and may be lost.
    #[must_use]
    pub fn rest(&self) -> &Buffers {
        &self.0.1
    }

    /// Why, and what was not transferred.
    #[must_use]
    pub fn into_parts(self) -> (io::Error, Buffers) {
        *self.0
    }
}

impl From<Unfinished> for io::Error {
    fn from(unfinished: Unfinished) -> Self {
        unfinished.into_parts().0
    }
}

/// Checks the bytes of a logical block, which it returns.
///
/// # Errors
///
/// When disks here have no such blocks: they are powers of two from 512 to 65,536.
pub fn check_logical_block(bytes: u32) -> Result<u32, Error> {
    if bytes.is_power_of_two() && (512..=65_536).contains(&bytes) {
        return Ok(bytes);
    }
    Err(Error::Options(format!(
        "a logical block of {bytes} bytes is not possible: it must be a power of two from 512 to \
         65536"
    )))
}
