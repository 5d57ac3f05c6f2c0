//! Commands on the medium (SBC-4).

use std::io;

use blockio::Disk;
use blockio::disk::{Requests, TransferError};
use iomem::{Buffers, RepeatedBlock};

use super::cdb::{Cdb, UNMAP};
use super::outcome::{Data, Effect, Failure, Refused, TaskHandle, Transferred, refused};
use super::request_queue::LocalUnit;
use super::task_wait::{self, DiskTask};
use super::unit::Unit;
use crate::access::sense::{DiskUse, Sense};

/// The most bytes of one WRITE SAME: 32 MiB. If the disk has no operation for it, the blocks are
/// written, and one request should not take seconds.
pub(super) const WRITE_SAME_BYTES_MAX: u64 = 32 << 20;
/// Bytes per step in writing a pattern; the next constant is for zeroes.
const PATTERN_STEP_BYTES: u64 = 256 << 10;
const ZEROES_STEP_BYTES: u64 = 4 << 20;
/// Copies of a block fill a page, which disks prefer, unless one block is larger.
const PAGE_BYTES: usize = 4096;

/// A failed read is retried in about this many steps (fewer than twice as many) before the failing
/// step is read block by block. A disk may take long for each failing read, and limits count each
/// read.
const RETRY_STEPS: usize = 64;

/// Bits of START STOP UNIT (SBC-4, section 5.31).
const START: u8 = 0x01;
const LOAD_EJECT: u8 = 0x02;
const NO_FLUSH: u8 = 0x04;

/// The blocks of a command, with offset and length in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Range {
    pub(super) lba: u64,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl Range {
    pub(super) const NONE: Self = Self { lba: 0, offset: 0, bytes: 0 };

    /// Takes whole blocks of at most `bytes` from the front. `None` if nothing is left.
    pub(super) fn take(&mut self, bytes: u64, block: usize) -> Option<Self> {
        let taken = Self { bytes: self.bytes.min(bytes), ..*self };
        self.lba += taken.bytes / block as u64;
        self.offset += taken.bytes;
        self.bytes -= taken.bytes;
        (taken.bytes > 0).then_some(taken)
    }
}

/// A write to be done.
#[derive(Debug, Clone, Copy)]
pub(super) struct Write {
    pub(super) range: Range,
    pub(super) fua: bool,
}

/// Returns the range of blocks of a medium.
#[inline(always)]
pub(super) fn range(disk: &Disk, (lba, count): (u64, u32)) -> Result<Range, Failure> {
    let info = disk.info();
    // A power of two.
    let shift = info.logical_block_bytes.trailing_zeros();
    let blocks = info.size_bytes >> shift;
    if lba.checked_add(count.into()).is_none_or(|end| end > blocks) {
        return Err(Sense::LBA_OUT_OF_RANGE.into());
    }
    Ok(Range { lba, offset: lba << shift, bytes: u64::from(count) << shift })
}

/// Like [`range`], but a count of 0 covers all blocks to the end, of which there must be at least
/// one.
fn range_or_rest(disk: &Disk, (lba, count): (u64, u32)) -> Result<Range, Failure> {
    let range = range(disk, (lba, count))?;
    if count > 0 {
        return Ok(range);
    }
    let bytes = disk.info().size_bytes - range.offset;
    if bytes == 0 { Err(Sense::LBA_OUT_OF_RANGE.into()) } else { Ok(Range { bytes, ..range }) }
}

/// Checks that the medium still has the blocks: it may have shrunk while the command waited.
pub(super) fn check_still(disk: &Disk, range: Range) -> Result<(), Failure> {
    if range.offset + range.bytes > disk.info().size_bytes {
        return Err(Sense::LBA_OUT_OF_RANGE.into());
    }
    Ok(())
}

/// Translates a disk error for the initiator.
#[cold]
pub(super) fn disk_error(asked: DiskUse, source: io::Error) -> Failure {
    disk_error_after(0, asked, source)
}

/// Like [`disk_error`], for a request on these blocks.
#[cold]
pub(super) fn range_error(disk: &Disk, range: Range, asked: DiskUse, source: io::Error) -> Failure {
    check_refusal(disk, range, &source).err().unwrap_or_else(|| disk_error(asked, source))
}

/// Checks if the disk refused a request because the disk has shrunk, which is no failure of the
/// disk. Any other error is the disk's own, even on blocks that the disk has lost since.
fn check_refusal(disk: &Disk, range: Range, source: &io::Error) -> Result<(), Failure> {
    if source.raw_os_error() == Some(libc::EINVAL) { check_still(disk, range) } else { Ok(()) }
}

/// Like [`disk_error`], after `moved` bytes were transferred.
fn disk_error_after(moved: usize, asked: DiskUse, source: io::Error) -> Failure {
    if source.raw_os_error() == Some(libc::EBADE) {
        // The device is reserved for another host.
        return Failure::Conflict;
    }
    if task_wait::is_queue_stop_error(&source) {
        return Failure::Busy;
    }
    Failure::Disk { asked, moved, sense: Sense::from_disk_error(&source, asked), source }
}

/// A read that failed before the `rest` of `wanted` bytes. The initiator gets the blocks before the
/// failure and may use them: the residual and the address delimit them.
#[cold]
fn failed_read(range: Range, block: u32, wanted: usize, unfinished: TransferError) -> Failure {
    let (source, rest) = unfinished.into_parts();
    let block: usize = iomem::fits(block, "a logical block");
    let blocks = (wanted - rest.bytes()) / block;
    let lba = range.lba + blocks as u64;
    disk_error_after(blocks * block, DiskUse::reads("read", lba), source)
}

/// A write that failed before the `rest` of its range. The initiator learns the first block that
/// was not written. If all were written, the lost block is unknown.
#[cold]
fn not_written(range: Range, block: u32, unfinished: TransferError) -> Failure {
    let (error, rest) = unfinished.into_parts();
    let blocks = (range.bytes - rest.bytes() as u64) / u64::from(block);
    let at = DiskUse::writes("write", range.lba + blocks);
    disk_error(if rest.is_empty() { DiskUse::FLUSH } else { at }, error)
}

/// Fails if the unit is stopped and carries out no commands on the medium.
#[inline]
pub(super) fn check_ready(unit: &Unit) -> Result<(), Failure> {
    if unit.access.is_stopped() {
        return Err(Sense::STOPPED.into());
    }
    Ok(())
}

#[inline]
pub(super) fn check_writable(local: &LocalUnit) -> Result<(), Failure> {
    check_ready(&local.unit)?;
    if local.disk.info().read_only {
        return Err(Sense::WRITE_PROTECTED.into());
    }
    Ok(())
}

/// The length of a range, if a buffer has room for it.
#[inline]
pub(super) fn length(range: Range, buffers: &Buffers) -> Result<usize, Failure> {
    match usize::try_from(range.bytes) {
        Ok(bytes) if bytes <= buffers.bytes() => Ok(bytes),
        _ => Err(Failure::Overrun),
    }
}

/// Returns the blocks that a command reads, `None` if there are none, and cuts `into` to their
/// length.
#[inline(always)]
pub(super) fn begin_read(
    local: &LocalUnit,
    cdb: &Cdb,
    into: &mut Buffers,
) -> Result<Option<Range>, Refused> {
    check_ready(&local.unit).map_err(refused)?;
    let range = range(&local.disk, cdb.blocks()).map_err(refused)?;
    let bytes = length(range, into).map_err(refused)?;
    into.truncate(bytes);
    Ok((bytes > 0).then_some(range))
}

#[inline]
pub(super) fn end_read(
    local: &LocalUnit,
    range: Range,
    result: Result<(), TransferError>,
) -> Transferred {
    let bytes: usize = iomem::fits(range.bytes, "bytes of a command");
    match result {
        Ok(()) => Ok(bytes),
        Err(unfinished) => {
            check_refusal(&local.disk, range, unfinished.error())?;
            Err(failed_read(range, local.disk.info().logical_block_bytes, bytes, unfinished))
        }
    }
}

/// Continues a failed read block by block from the point of failure. The initiator gets all blocks
/// before the unreadable one, and learns its address: a kernel that fails direct I/O reports
/// neither. If all blocks can be read now, the read fails even so.
#[cold]
pub(super) async fn retry_blocks(
    requests: Requests<'_>,
    task: TaskHandle<'_>,
    range: Range,
    unfinished: TransferError,
) -> TransferError {
    let block: usize = iomem::fits(requests.disk().info().logical_block_bytes, "a logical block");
    let is_exact = !unfinished.rest().bytes().is_multiple_of(block);
    if is_exact || !Sense::may_be_single_block(unfinished.error()) {
        return unfinished;
    }
    let (mut error, mut rest) = unfinished.into_parts();
    let failed = rest.duplicate();
    let end = range.offset + range.bytes;
    let mut step = block * (rest.bytes() / block / RETRY_STEPS).max(1);
    while !rest.is_empty() && task.check().is_ok() {
        let mut next = rest.duplicate();
        next.truncate(step);
        let bytes = next.bytes();
        match requests.read(end - rest.bytes() as u64, next).await {
            Ok(()) => rest.advance(bytes),
            Err(unfinished) => {
                // A disk that has shrunk since does not explain the failed read.
                let later = unfinished.into_parts().0;
                let is_of_blocks = Sense::may_be_single_block(&later);
                if is_of_blocks {
                    error = later;
                }
                if step == block || !is_of_blocks {
                    break;
                }
                step = block;
            }
        }
    }
    TransferError::new(error, if rest.is_empty() { failed } else { rest })
}

/// A read that may wait. With FUA, newer cached data is written to the medium first (SBC-4).
pub(super) async fn read(
    local: &LocalUnit,
    cdb: &Cdb,
    task: TaskHandle<'_>,
    mut into: Buffers,
) -> Transferred {
    let Some(range) = begin_read(local, cdb, &mut into)? else { return Ok(0) };
    if cdb.asks_fua() {
        write_back(local, task, range).await?;
    }
    let disk_task = DiskTask::new(local, task);
    let disk = local.disk.with_requester(&disk_task);
    let mut result = disk.read(range.offset, into).await;
    if let Err(unfinished) = result {
        result = Err(retry_blocks(disk, task, range, unfinished).await);
    }
    end_read(local, range, result)
}

/// Writes newer cached data to the medium before blocks are read from there.
pub(super) async fn write_back(
    local: &LocalUnit,
    task: TaskHandle<'_>,
    range: Range,
) -> Result<(), Failure> {
    flush(local).await?;
    task.check()?;
    check_still(&local.disk, range)
}

/// Returns the write of a command, `None` if it has no blocks, and cuts `out` to its length.
#[inline(always)]
pub(super) fn begin_write(
    local: &LocalUnit,
    cdb: &Cdb,
    out: &mut Buffers,
) -> Result<Option<Write>, Refused> {
    check_writable(local).map_err(refused)?;
    let range = range(&local.disk, cdb.blocks()).map_err(refused)?;
    let bytes = length(range, out).map_err(refused)?;
    out.truncate(bytes);
    let fua = cdb.asks_fua() || !local.unit.has_write_cache();
    Ok((bytes > 0).then_some(Write { range, fua }))
}

#[inline]
pub(super) fn end_write(
    local: &LocalUnit,
    range: Range,
    result: Result<(), TransferError>,
) -> Transferred {
    if let Err(unfinished) = result {
        if !unfinished.rest().is_empty() {
            check_refusal(&local.disk, range, unfinished.error())?;
        }
        return Err(not_written(range, local.disk.info().logical_block_bytes, unfinished));
    }
    Ok(iomem::fits(range.bytes, "bytes of a command"))
}

pub(super) async fn write(
    local: &LocalUnit,
    cdb: &Cdb,
    task: TaskHandle<'_>,
    mut out: Buffers,
) -> Transferred {
    let Some(Write { range, fua }) = begin_write(local, cdb, &mut out)? else { return Ok(0) };
    let disk_task = DiskTask::new(local, task);
    let result = local.disk.with_requester(&disk_task).write(range.offset, out, fua).await;
    let moved = end_write(local, range, result)?;
    if needs_flush(local, fua) {
        flush(local).await?;
    }
    Ok(moved)
}

/// True if a completed write may not be answered yet. The cache was switched off while the write
/// waited for limits or for a retry.
#[inline]
pub(super) fn needs_flush(local: &LocalUnit, fua: bool) -> bool {
    !fua && !local.unit.has_write_cache()
}

/// Brings all writes to stable storage, regardless of the blocks that the initiator names.
pub(super) async fn synchronize(local: &LocalUnit, cdb: &Cdb) -> Transferred {
    check_ready(&local.unit)?;
    range_or_rest(&local.disk, cdb.blocks())?;
    flush(local).await.map(|()| 0)
}

pub(super) async fn flush(local: &LocalUnit) -> Result<(), Failure> {
    local.disk.flush().await.map_err(|error| disk_error(DiskUse::FLUSH, error))
}

/// Without a write cache, brings changes to stable storage before they are answered.
pub(super) async fn make_durable(local: &LocalUnit) -> Result<(), Failure> {
    if local.unit.has_write_cache() { Ok(()) } else { flush(local).await }
}

/// Starts or stops the unit. A stop first flushes pending writes (SBC-4, section 5.31). Commands to
/// eject or load the medium have no effect. Unless the unit obeys stops, a stop is only a flush:
/// other guests may use the disk.
pub(super) async fn start_stop(local: &LocalUnit, cdb: &Cdb) -> Transferred {
    let has = |bit: u8| cdb.byte(4) & bit != 0;
    if has(LOAD_EJECT) {
        return Ok(0);
    }
    let starts = has(START);
    if !starts && !has(NO_FLUSH) && !local.disk.info().read_only {
        flush(local).await?;
    }
    if starts || local.unit.options.obeys_stop {
        local.unit.access.set_stopped(!starts);
    }
    Ok(0)
}

/// Writes one block repeatedly (SBC-4, section 5.54).
pub(super) async fn write_same(
    local: &LocalUnit,
    cdb: &Cdb,
    task: TaskHandle<'_>,
    data: Data,
) -> Result<Effect, Failure> {
    let (unmaps, has_none) = (cdb.byte(1) & UNMAP != 0, cdb.byte(1) & 1 != 0);
    if unmaps && !local.unit.can_unmap() {
        return Err(Sense::in_cdb(1, Some(3)).into());
    }
    check_writable(local)?;
    let (lba, count) = cdb.blocks();
    let whole = range_or_rest(&local.disk, (lba, count))?;
    let bytes = whole.bytes;
    if bytes > WRITE_SAME_BYTES_MAX {
        return Err(Sense::in_cdb(cdb.blocks_at(), None).into());
    }
    let block: usize = iomem::fits(local.disk.info().logical_block_bytes, "a logical block");
    if !has_none && data.out.bytes() < block {
        return Err(Failure::Overrun);
    }
    if !has_none && data.out.bytes() > block {
        return Err(Sense::in_cdb(cdb.blocks_at(), None).into());
    }
    let disk_task = DiskTask::new_long(local, task);
    let disk = local.disk.with_requester(&disk_task);
    if has_none || is_zero(&data.out, block) {
        let mut left = whole;
        while let Some(step) = left.take(ZEROES_STEP_BYTES, block) {
            task.check()?;
            let result = disk.write_zeroes(step.offset, step.bytes, unmaps).await;
            let asked = DiskUse::writes("write zeroes", step.lba);
            result.map_err(|error| range_error(&local.disk, step, asked, error))?;
        }
    } else {
        write_pattern(local, disk, task, whole, &data.out).await?;
    }
    make_durable(local).await?;
    Ok(Effect { moved: if has_none { 0 } else { block }, medium_bytes: bytes })
}

/// True if the first `bytes` exist and are zero.
fn is_zero(buffers: &Buffers, bytes: usize) -> bool {
    const AT_ONCE: usize = 512;
    (0..bytes).step_by(AT_ONCE).all(|at| {
        let mut some = [0xff; AT_ONCE];
        buffers.copy_to(at, &mut some);
        some == [0; AT_ONCE]
    })
}

/// Writes a block repeatedly. A block larger than a page is written from its own memory: copies
/// would cost each command as much memory again.
async fn write_pattern(
    local: &LocalUnit,
    disk: Requests<'_>,
    task: TaskHandle<'_>,
    mut left: Range,
    pattern: &Buffers,
) -> Result<(), Failure> {
    let lba = left.lba;
    let failed = |error| disk_error(DiskUse::writes("write", lba), error);
    let block = pattern.bytes();
    let is_large = block > PAGE_BYTES;
    let copies = if is_large {
        None
    } else {
        let mut bytes = [0; PAGE_BYTES];
        pattern.copy_to(0, &mut bytes[..block]);
        Some(RepeatedBlock::pattern(&bytes[..block], PAGE_BYTES, PAGE_BYTES).map_err(failed)?)
    };
    let step_bytes = if is_large { block as u64 } else { PATTERN_STEP_BYTES };
    while let Some(step) = left.take(step_bytes, block) {
        task.check()?;
        check_still(&local.disk, step)?;
        let length = iomem::fits(step.bytes, "bytes of a step");
        let piece = match &copies {
            Some(copies) => copies.buffers(length, ()).map_err(failed)?,
            None => pattern.duplicate(),
        };
        end_write(local, step, disk.write_piece(step.offset, piece).await)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_others_have_reserved_is_a_conflict() {
        let error = io::Error::from_raw_os_error(libc::EBADE);
        assert!(matches!(disk_error(DiskUse::FLUSH, error), Failure::Conflict));
    }

    #[test]
    fn a_read_that_fails_halfway_keeps_the_blocks_before() {
        let range = Range { lba: 100, offset: 51_200, bytes: 2048 };
        let cut = |rest: usize| {
            let error = io::Error::from_raw_os_error(libc::EIO);
            failed_read(range, 512, 2048, TransferError::new(error, Buffers::aligned(rest, 1)))
        };
        for (rest, blocks) in [(2048, 0), (1024, 2), (1000, 2), (1, 3)] {
            let failure = cut(rest);
            assert_eq!(failure.moved(), blocks * 512, "{rest}");
            let Failure::Disk { asked, sense, .. } = failure else { unreachable!() };
            let error = io::Error::from_raw_os_error(libc::EIO);
            assert_eq!(asked, DiskUse::reads("read", 100 + blocks as u64));
            assert_eq!(sense, Sense::from_disk_error(&error, asked));
        }
    }

    #[test]
    fn a_write_that_fails_halfway_names_the_first_block_that_was_not_written() {
        let range = Range { lba: 100, offset: 51_200, bytes: 2048 };
        for (rest, lba) in
            [(2048, Some(100)), (1024, Some(102)), (1000, Some(102)), (1, Some(103)), (0, None)]
        {
            let error = io::Error::from_raw_os_error(libc::EIO);
            let unfinished = TransferError::new(error, Buffers::aligned(rest, 1));
            let failure = not_written(range, 512, unfinished);
            assert_eq!(failure.moved(), 0, "{rest}");
            let Failure::Disk { asked, .. } = failure else { unreachable!() };
            assert_eq!(asked, lba.map_or(DiskUse::FLUSH, |lba| DiskUse::writes("write", lba)));
        }
    }
}
