//! Commands that read the medium and compare (SBC-4).

use std::io;

use blockio::disk::{Direction, Requests};
use iomem::Buffers;

use super::block::{Range, check_ready, check_still, check_writable, disk_error, end_write};
use super::block::{length, range, range_error, write_back};
use super::cdb::{Cdb, Op};
use super::outcome::{Data, Effect, Failure, TaskHandle, Transferred};
use super::request_queue::LocalUnit;
use super::reserve;
use super::task_wait::DiskTask;
use crate::access::sense::{DiskUse, Sense};

/// The most bytes of one read. After a failure they are read again, block by block.
const PIECE_BYTES: u64 = 256 << 10;
/// The most blocks of one COMPARE AND WRITE.
pub(super) const COMPARE_BLOCKS_MAX: u8 = 128;

/// Writes, then reads the medium and compares.
pub(super) async fn write_and_verify(
    local: &LocalUnit,
    cdb: &Cdb,
    task: TaskHandle<'_>,
    data: Data,
) -> Transferred {
    check_writable(local)?;
    let how = Check::from_cdb(cdb)?;
    if how == Check::OneBlock {
        return Err(Sense::in_cdb(1, Some(2)).into());
    }
    let range = range(&local.disk, cdb.blocks())?;
    let bytes = length(range, &data.out)?;
    let mut out = data.out;
    out.truncate(bytes);
    if bytes == 0 {
        return Ok(0);
    }
    let again = out.duplicate();
    let disk_task = DiskTask::new(local, task);
    let disk = local.disk.with_requester(&disk_task);
    end_write(local, range, disk.write(range.offset, out, true).await)?;
    compare(disk, range, how, (task, None), &again).await?;
    Ok(bytes)
}

/// Writes if the medium has the data that the initiator expects (SBC-4, section 5.3). No other task
/// uses the disk in between, through any unit.
pub(super) async fn compare_and_write(
    local: &LocalUnit,
    cdb: &Cdb,
    task: TaskHandle<'_>,
    data: Data,
) -> Result<Effect, Failure> {
    check_writable(local)?;
    let count = cdb.byte(13);
    if count > COMPARE_BLOCKS_MAX {
        return Err(Sense::in_cdb(13, None).into());
    }
    let range = range(&local.disk, (cdb.u64(2), count.into()))?;
    let bytes: usize = iomem::fits(range.bytes, "bytes of a command");
    let mut out = data.out;
    if 2 * bytes > out.bytes() {
        return Err(Failure::Overrun);
    }
    if bytes == 0 {
        return Ok(Effect::from(0));
    }
    out.truncate(2 * bytes);
    let mut wanted = out.duplicate();
    wanted.advance(bytes);
    out.truncate(bytes);
    let disk_task = DiskTask::new(local, task);
    // Before the medium is taken: otherwise all other tasks would wait for these limits.
    let uses = [DiskUse::reads("read", range.lba), DiskUse::writes("write", range.lba)];
    for (direction, action) in [Direction::Read, Direction::Write].into_iter().zip(uses) {
        let passed =
            local.disk.with_requester(&disk_task).pass_limits(direction, range.bytes).await;
        passed.map_err(|error| disk_error(action, error))?;
    }
    let exclusive = disk_task.take_medium().await?;
    // Checked after the wait, like the cache.
    check_ready(&local.unit)?;
    reserve::check(&local.unit, Op::CompareAndWrite, cdb)?;
    let fua = cdb.asks_fua() || !local.unit.has_write_cache();
    let disk_task = disk_task.with_medium(&exclusive);
    let disk = local.disk.with_requester(&disk_task);
    compare(disk, range, Check::Blocks, (task, None), &out).await?;
    check_still(&local.disk, range)?;
    end_write(local, range, disk.write(range.offset, wanted, fua).await)?;
    drop(exclusive);
    Ok(Effect { moved: 2 * bytes, medium_bytes: range.bytes })
}

/// The data to compare the medium with (SBC-4, section 5.37).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Check {
    /// None: the medium must be readable.
    Medium,
    /// Data of the same length.
    Blocks,
    /// A single block, for each block of the medium.
    OneBlock,
}

impl Check {
    fn from_cdb(cdb: &Cdb) -> Result<Self, Failure> {
        match (cdb.byte(1) >> 1) & 3 {
            0 => Ok(Self::Medium),
            1 => Ok(Self::Blocks),
            3 => Ok(Self::OneBlock),
            _ => Err(Sense::in_cdb(1, Some(2)).into()),
        }
    }
}

pub(super) async fn verify(
    local: &LocalUnit,
    cdb: &Cdb,
    task: TaskHandle<'_>,
    data: Data,
) -> Result<Effect, Failure> {
    check_ready(&local.unit)?;
    let how = Check::from_cdb(cdb)?;
    let range = range(&local.disk, cdb.blocks())?;
    let block: usize = iomem::fits(local.disk.info().logical_block_bytes, "a logical block");
    let moved = match how {
        Check::Medium => 0,
        Check::Blocks => length(range, &data.out)?,
        Check::OneBlock if range.bytes == 0 => 0,
        Check::OneBlock if block > data.out.bytes() => return Err(Failure::Overrun),
        Check::OneBlock => block,
    };
    if range.bytes > 0 && !local.disk.info().read_only {
        write_back(local, task, range).await?;
    }
    let disk_task = DiskTask::new_long(local, task);
    let disk = local.disk.with_requester(&disk_task);
    compare(disk, range, how, (task, Some(disk_task)), &data.out).await?;
    Ok(Effect { moved, medium_bytes: range.bytes })
}

/// Reads a range, and compares it with data of the initiator. With `disk_task` the command may be
/// long, and gives way to commands that want the medium to themselves.
async fn compare(
    requests: Requests<'_>,
    range: Range,
    how: Check,
    (task, disk_task): (TaskHandle<'_>, Option<DiskTask<'_>>),
    with: &Buffers,
) -> Result<(), Failure> {
    let disk = requests.disk();
    let block: usize = iomem::fits(disk.info().logical_block_bytes, "a logical block");
    let mut rest = with.duplicate();
    let mut done = 0;
    while done < range.bytes {
        match disk_task {
            Some(disk_task) => disk_task.yield_medium().await?,
            None => task.check()?,
        }
        check_still(disk, range)?;
        let piece = Range {
            lba: range.lba + done / block as u64,
            offset: range.offset + done,
            bytes: (range.bytes - done).min(PIECE_BYTES),
        };
        let mut part = match requests.read_part(piece.offset, piece.bytes).await {
            Ok(part) => part,
            Err(error) => return Err(Box::pin(unreadable(requests, task, piece, error)).await),
        };
        let length = part.bytes() as u64;
        while how != Check::Medium && !part.is_empty() {
            if let Some(place) = difference(&part, &rest, block) {
                let before = with.bytes() - rest.bytes();
                return Err(Sense::MISCOMPARE.with_information((before + place) as u64).into());
            }
            part.advance(block);
            if how == Check::Blocks {
                rest.advance(block);
            }
        }
        done += length;
    }
    Ok(())
}

/// The failure of a piece that could not be read because of `error`. The piece is read again block
/// by block, since the initiator is to learn the address of the bad block. If all blocks can be
/// read now, the first is named.
#[cold]
async fn unreadable(
    requests: Requests<'_>,
    task: TaskHandle<'_>,
    piece: Range,
    error: io::Error,
) -> Failure {
    let disk = requests.disk();
    let block: usize = iomem::fits(disk.info().logical_block_bytes, "a logical block");
    let failure =
        |range: Range, error| range_error(disk, range, DiskUse::reads("verify", range.lba), error);
    let mut left = piece;
    while Sense::may_be_single_block(&error)
        && let Some(one) = left.take(block as u64, block)
    {
        if let Err(aborted) = task.check() {
            return aborted;
        }
        if let Err(later) = requests.read_part(one.offset, one.bytes).await {
            // A disk that has shrunk since does not explain the failed read.
            let error = if Sense::may_be_single_block(&later) { later } else { error };
            return failure(one, error);
        }
    }
    failure(piece, error)
}

/// The offset of the first difference in the first `bytes` of both lists.
fn difference(found: &Buffers, expected: &Buffers, bytes: usize) -> Option<usize> {
    const AT_ONCE: usize = 512;
    (0..bytes).step_by(AT_ONCE).find_map(|at| {
        let (mut one, mut other) = ([0; AT_ONCE], [0; AT_ONCE]);
        found.copy_to(at, &mut one);
        expected.copy_to(at, &mut other);
        let place = one.iter().zip(&other).position(|(one, other)| one != other)?;
        Some(at + place)
    })
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::task::Poll;

    use blockio::{DiskOptions, DiskSource, IoThread, IoThreadConfig};

    use super::*;
    use crate::access::task_set::{Abort, TaskSelector, Tasks, Treatment, WaitGroup};
    use crate::unit_address::UnitAddress;

    #[test]
    fn a_long_verify_ends_soon_when_its_task_is_aborted() {
        // The file system of the sources has direct I/O, which does not complete at once.
        let file = tempfile::NamedTempFile::new_in(blockio::testing::disk_folder()).unwrap();
        let bytes = 16 << 20;
        file.as_file().set_len(bytes).unwrap();
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let options = DiskOptions { direct: true, ..DiskOptions::default() };
        let disk = DiskSource::file(file.path(), &options).unwrap().attach(thread.io());
        let tasks = Tasks::new(0);
        let unit = UnitAddress { target: 0, lun: 0 };
        tasks.begin(0, (unit, None), 7, 1, || ()).unwrap();
        let task = TaskHandle { tasks: &tasks, number: 0 };
        let range = Range { lba: 0, offset: 0, bytes };
        let data = Buffers::empty();
        let ended = thread.block_on(async {
            let mut compare =
                pin!(compare(disk.without_requester(), range, Check::Medium, (task, None), &data));
            let first = poll_fn(|cx| Poll::Ready(compare.as_mut().poll(cx))).await;
            assert!(first.is_pending());
            let (_waiting, token) = WaitGroup::new();
            tasks.cover(TaskSelector::At(unit), Treatment::Abort(Abort::Aborted), 0, token);
            compare.await
        });
        assert!(matches!(ended.unwrap(), Err(Failure::Aborted(Abort::Aborted))));
        assert_eq!(thread.io().stats().read.ops.get(), 1, "no further piece is read");
    }

    #[test]
    fn other_tasks_run_between_the_pieces_of_a_verify() {
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let bytes = (12 << 20) + 512;
        let source = DiskSource::null(bytes, &DiskOptions::default()).unwrap();
        let disk = source.attach(thread.io());
        let tasks = Tasks::new(0);
        let unit = UnitAddress { target: 0, lun: 0 };
        tasks.begin(0, (unit, None), 7, 1, || ()).unwrap();
        let task = TaskHandle { tasks: &tasks, number: 0 };
        let range = Range { lba: 0, offset: 0, bytes };
        for (how, data) in [
            (Check::Medium, Buffers::empty()),
            (Check::Blocks, Buffers::aligned(usize::try_from(bytes).unwrap(), 1)),
            (Check::OneBlock, Buffers::aligned(512, 1)),
        ] {
            let mut polls = 0;
            let compared = thread.block_on(async {
                let mut compare =
                    pin!(compare(disk.without_requester(), range, how, (task, None), &data));
                poll_fn(|cx| {
                    polls += 1;
                    compare.as_mut().poll(cx)
                })
                .await
            });
            assert!(matches!(compared, Ok(Ok(()))) && polls > 12, "{how:?}: {polls}");
        }
    }
}
