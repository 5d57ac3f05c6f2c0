//! Disk `null`: it answers at once and keeps nothing.

use std::io;

use iomem::{Buffers, RepeatedBlock};

use super::info::{DiskInfo, DiskOptions, check_logical_block};
use crate::error::Error;

/// The most bytes of one [`read_part`] of a null disk, unless a logical block is larger.
const PART_BYTES: usize = 64 << 10;

/// The properties of a null disk of this size.
pub(super) fn info(size_bytes: u64, options: &DiskOptions) -> Result<DiskInfo, Error> {
    let logical_block_bytes = check_logical_block(options.logical_block_bytes.unwrap_or(512))?;
    check_size(size_bytes, logical_block_bytes)?;
    Ok(DiskInfo {
        size_bytes,
        logical_block_bytes,
        physical_block_bytes: logical_block_bytes,
        read_only: options.read_only,
        direct: options.direct,
    })
}

/// Checks the size of a null disk.
pub(super) fn check_size(size_bytes: u64, logical_block_bytes: u32) -> Result<(), Error> {
    if size_bytes == 0 || !size_bytes.is_multiple_of(u64::from(logical_block_bytes)) {
        return Err(Error::Options(format!(
            "a disk of {size_bytes} bytes is not possible: the size must be a multiple of its \
             logical block of {logical_block_bytes} bytes, and not zero"
        )));
    }
    Ok(())
}

/// Like [`Disk::read_part`](super::Disk::read_part), in units of `block` bytes.
pub(super) fn read_part(len: u64, block: u32) -> io::Result<Buffers> {
    let block = block as usize;
    let bytes = usize::try_from(len).unwrap_or(usize::MAX).min(PART_BYTES);
    RepeatedBlock::zeroes(block, block)?.buffers(bytes.max(block), ())
}
