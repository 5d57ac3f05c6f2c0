//! What a disk is asked to be, what it is, and how its transfers fail.

use std::io;
use std::time::Instant;

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
    /// Who uses the disk: a number of 62 bits that nobody else on this machine has who may use it
    /// at the same time. Whoever opens it as the same user next waits until the operations of a
    /// process that was killed have ended, which the lock does not tell where the disk is only
    /// read, or with [`no_lock`](Self::no_lock).
    pub user: Option<u64>,
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
    /// It has not answered an operation since then, for 5 seconds or more.
    Late(Instant),
    /// Data that was written may be lost: flushes fail until it is opened anew.
    Lost,
}

/// A transfer that has failed.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Unfinished {
    /// Why.
    pub error: io::Error,
    /// What was not transferred. Empty: all of a write was, and may be lost.
    pub rest: Buffers,
}

impl From<Unfinished> for io::Error {
    fn from(unfinished: Unfinished) -> Self {
        unfinished.error
    }
}

/// Checks a logical block size.
pub(super) fn check_logical_block(bytes: u32) -> Result<u32, Error> {
    if bytes.is_power_of_two() && (512..=65_536).contains(&bytes) {
        return Ok(bytes);
    }
    Err(Error::Options(format!(
        "a logical block of {bytes} bytes is not possible: it must be a power of two from 512 to \
         65536"
    )))
}
