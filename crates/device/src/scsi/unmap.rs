//! UNMAP (SBC-4, section 5.35).

use blockio::Disk;

use super::block::{Range, check_writable, make_durable, range, range_error};
use super::cdb::Cdb;
use super::outcome::{Data, Effect, Failure, TaskHandle};
use super::request_queue::LocalUnit;
use super::task_wait::DiskTask;
use crate::access::sense::{DiskUse, Sense};

/// The most descriptors of one UNMAP.
pub(super) const DESCRIPTORS_MAX: u32 = 256;
/// The most blocks that one UNMAP deallocates. A hole of any size is one system call.
pub(super) const BLOCKS_MAX: u32 = 1 << 20;

const HEADER_BYTES: usize = 8;
const DESCRIPTOR_BYTES: usize = 16;

/// Deallocates blocks. All descriptors are checked before any is carried out.
pub(super) async fn unmap(
    local: &LocalUnit,
    cdb: &Cdb,
    task: TaskHandle<'_>,
    data: Data,
) -> Result<Effect, Failure> {
    if !local.unit.can_unmap() {
        return Err(Sense::UNKNOWN_OPCODE.into());
    }
    check_writable(local)?;
    let length = usize::from(cdb.u16(7));
    if length == 0 {
        return Ok(Effect::from(0));
    }
    let ranges = ranges(&local.disk, length, &data)?;
    let medium_bytes = ranges.iter().map(|range| range.bytes).sum();
    let disk_task = DiskTask::new(local, task);
    let disk = local.disk.with_requester(&disk_task);
    for range @ Range { lba, offset, bytes } in ranges {
        task.check()?;
        let result = disk.discard(offset, bytes).await;
        let asked = DiskUse::writes("unmap", lba);
        result.map_err(|error| range_error(&local.disk, range, asked, error))?;
    }
    make_durable(local).await?;
    Ok(Effect { moved: length, medium_bytes })
}

/// Returns the ranges of an UNMAP. Only they are kept while the disk works: the list may be far
/// longer.
fn ranges(disk: &Disk, length: usize, data: &Data) -> Result<Vec<Range>, Failure> {
    let most = DESCRIPTORS_MAX as usize;
    let list = data.front_of_list(length, HEADER_BYTES + DESCRIPTOR_BYTES * most)?;
    let Some((header, descriptors)) = list.split_first_chunk::<HEADER_BYTES>() else {
        return Err(Sense::LIST_LENGTH.into());
    };
    let [_, _, d0, d1, ..] = *header;
    // Incomplete descriptors, and bytes beyond the list, are ignored.
    let listed = usize::from(u16::from_be_bytes([d0, d1])).min(length - HEADER_BYTES);
    let descriptors = &descriptors[..listed.min(descriptors.len())];
    let block = u64::from(disk.info().logical_block_bytes);
    let mut ranges = Vec::with_capacity(descriptors.len() / DESCRIPTOR_BYTES);
    let mut blocks: u64 = 0;
    for (index, descriptor) in descriptors.chunks_exact(DESCRIPTOR_BYTES).enumerate() {
        let [l0, l1, l2, l3, l4, l5, l6, l7, c0, c1, c2, c3, ..] = *descriptor else {
            unreachable!("a descriptor has 16 bytes");
        };
        let lba = u64::from_be_bytes([l0, l1, l2, l3, l4, l5, l6, l7]);
        let range = range(disk, (lba, u32::from_be_bytes([c0, c1, c2, c3])))?;
        blocks += range.bytes / block;
        if blocks > BLOCKS_MAX.into() {
            let count_at = HEADER_BYTES + DESCRIPTOR_BYTES * index + 8;
            return Err(Sense::in_list(iomem::fits(count_at, "a place in a list"), None).into());
        }
        ranges.push(range);
    }
    if listed / DESCRIPTOR_BYTES > most {
        // The field with the length of all descriptors.
        return Err(Sense::in_list(2, None).into());
    }
    Ok(ranges)
}
