//! One virtio-blk request (virtio 1.3, section 5.2.6), from its chain to its status.

use std::io;
use std::rc::Rc;

use blockio::Buffers;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use virtqueue::{Chain, QueueError, Segments};

use super::Blk;
use super::config::{
    DISCARD_SECTORS_MAX, SECTOR_BYTES, SEGMENTS_MAX, SERIAL_BYTES, WRITE_ZEROES_SECTORS_MAX,
};
use crate::queue::Queue;

const HEADER_BYTES: usize = 16;
const SEGMENT_BYTES: usize = 16;

/// Why a request fails.
#[derive(Debug, thiserror::Error)]
enum RequestError {
    #[error("the chain is malformed: {0}")]
    Chain(#[from] virtqueue::ChainFault),
    #[error("the header is {0} bytes long, not {HEADER_BYTES}")]
    Header(usize),
    #[error("{0}")]
    Malformed(&'static str),
    #[error("request type {0} is not supported")]
    Type(u32),
    #[error("flags {0:#x} are not supported")]
    Flags(u32),
    #[error("memory of the guest is gone: its file was truncated")]
    MemoryGone,
    #[error("{action} at byte {offset}: {source}")]
    Disk { action: &'static str, offset: u64, source: io::Error },
}

impl RequestError {
    /// The status byte (virtio 1.3, section 5.2.6): the one place where it is chosen.
    fn status(&self) -> u32 {
        match self {
            Self::Type(_) | Self::Flags(_) => VIRTIO_BLK_S_UNSUPP,
            _ => VIRTIO_BLK_S_IOERR,
        }
    }
}

/// What a request that fails leaves unwritten is zeroed up to this many bytes. Zeroing more would
/// hold up the other queues of the IoThread, as a guest that names gigabytes could do at will.
const ZEROED_BYTES_MAX: usize = 1 << 20;

/// How a request ended, and what it did not write of what the driver gave it for data.
type Outcome = (Result<(), RequestError>, Option<Buffers>);

/// Serves one chain: reads the header, does what it says, writes the status, pushes the chain.
pub(crate) async fn serve(blk: Rc<Blk>, queue: Rc<Queue>, mut chain: Chain) {
    let head = chain.head;
    let Some(status) = chain.writable.take_last_byte() else {
        // There is nowhere to say that the request failed.
        blk.no_status(&queue, head);
        return;
    };
    let room = chain.writable.bytes();
    let (result, written) = match chain.fault {
        None => {
            let (result, rest) = execute(&blk, &queue, chain.readable, chain.writable).await;
            (result, rest.map_or(room + 1, |rest| settle_rest(&queue, room, rest)))
        }
        Some(fault) => (Err(fault.into()), 0),
    };
    // What was read from memory that is gone were zeroes, and what was written there is lost.
    let intact = if status.memory().is_intact() { Ok(()) } else { Err(RequestError::MemoryGone) };
    match result.and(intact) {
        Ok(()) => status.write(status_byte(VIRTIO_BLK_S_OK)),
        Err(error) => {
            blk.failed(&error);
            status.write(status_byte(error.status()));
        }
    }
    queue.push(head, u32::try_from(written).unwrap_or(u32::MAX));
}

/// Zeroes the `rest` of the `room` for data, unless it is long, and returns the used length: how
/// many bytes were written, one after the other from the first, the status included if nothing
/// before it was left out (virtio 1.3, section 2.7.8.2: at least so many must have been).
///
/// Drivers go by the status, wherever the used length ends.
fn settle_rest(queue: &Queue, room: usize, rest: Buffers) -> usize {
    let left = rest.bytes();
    let is_short = left <= ZEROED_BYTES_MAX;
    if is_short {
        rest.zero_from(0);
    }
    queue.recycle(rest);
    if is_short { room + 1 } else { room - left }
}

fn status_byte(status: u32) -> u8 {
    u8::try_from(status).unwrap_or(1)
}

async fn execute(blk: &Blk, queue: &Queue, mut readable: Segments, writable: Segments) -> Outcome {
    let mut header = [0; HEADER_BYTES];
    let copied = readable.copy_to(0, &mut header);
    readable.advance(HEADER_BYTES);
    let [t0, t1, t2, t3, _, _, _, _, sector @ ..] = header;
    let sector = u64::from_le_bytes(sector);
    let result = match u32::from_le_bytes([t0, t1, t2, t3]) {
        _ if copied < HEADER_BYTES => Err(RequestError::Header(copied)),
        VIRTIO_BLK_T_IN => return read(blk, queue, sector, writable).await,
        VIRTIO_BLK_T_OUT => write(blk, queue, sector, readable).await,
        VIRTIO_BLK_T_FLUSH => flush(blk).await,
        VIRTIO_BLK_T_GET_ID => return get_id(blk, queue, writable),
        VIRTIO_BLK_T_DISCARD => Box::pin(discard(blk, &readable)).await,
        VIRTIO_BLK_T_WRITE_ZEROES => Box::pin(write_zeroes(blk, &readable)).await,
        other => Err(RequestError::Type(other)),
    };
    // None of these answers with data.
    (result, (!writable.is_empty()).then(|| queue.buffers(writable)))
}

/// The byte offset of a sector.
fn offset_of(sector: u64) -> Result<u64, RequestError> {
    sector.checked_mul(SECTOR_BYTES).ok_or(RequestError::Malformed("the sector is out of range"))
}

async fn read(blk: &Blk, queue: &Queue, sector: u64, writable: Segments) -> Outcome {
    let buffers = queue.buffers(writable);
    let offset = match offset_of(sector) {
        Ok(offset) => offset,
        Err(error) => return (Err(error), Some(buffers)),
    };
    let (result, buffers) = blk.disk.read(offset, buffers).await;
    match result {
        Ok(()) => {
            queue.recycle(buffers);
            (Ok(()), None)
        }
        // What was read is gone from the list.
        Err(source) => (Err(RequestError::Disk { action: "read", offset, source }), Some(buffers)),
    }
}

async fn write(
    blk: &Blk,
    queue: &Queue,
    sector: u64,
    readable: Segments,
) -> Result<(), RequestError> {
    let offset = offset_of(sector)?;
    let fua = blk.device.write_through();
    let (result, buffers): (_, Buffers) =
        blk.disk.write(offset, queue.buffers(readable), fua).await;
    queue.recycle(buffers);
    result.map_err(|source| RequestError::Disk { action: "write", offset, source })
}

async fn flush(blk: &Blk) -> Result<(), RequestError> {
    let result = blk.disk.flush().await;
    result.map_err(|source| RequestError::Disk { action: "flush", offset: 0, source })
}

/// Writes the serial, padded with zeroes to 20 bytes.
fn get_id(blk: &Blk, queue: &Queue, writable: Segments) -> Outcome {
    if writable.is_empty() {
        return (Err(RequestError::Malformed("there is no room for the id")), None);
    }
    let mut id = [0; SERIAL_BYTES];
    let serial = blk.device.shared.options.serial.as_bytes();
    let len = serial.len().min(SERIAL_BYTES);
    id[..len].copy_from_slice(&serial[..len]);
    let mut buffers = queue.buffers(writable);
    buffers.copy_from(0, &id);
    buffers.advance(SERIAL_BYTES);
    (Ok(()), Some(buffers))
}

/// One range of a discard or write-zeroes request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    offset: u64,
    len: u64,
    unmap: bool,
}

/// Reads the segments (virtio 1.3, section 5.2.6.2): all are checked before any is carried out, and
/// their flags before anything else, because a flag that is not supported is to be told of as such
/// whatever else is wrong.
fn ranges(
    data: &Segments,
    flags_known: u32,
    sectors_max: u32,
    size: u64,
) -> Result<Vec<Range>, RequestError> {
    let count = data.bytes() / SEGMENT_BYTES;
    let segment = |index: usize| {
        let mut segment = [0; SEGMENT_BYTES];
        data.copy_to(index * SEGMENT_BYTES, &mut segment);
        segment
    };
    // Each is read once; more than there may be are not looked at.
    let segments: Vec<_> = (0..count.min(SEGMENTS_MAX as usize)).map(segment).collect();
    let unknown = segments.iter().map(|segment| flags_of(segment) & !flags_known);
    let unknown = unknown.fold(0, |all, flags| all | flags);
    if unknown != 0 {
        return Err(RequestError::Flags(unknown));
    }
    if count == 0 || !data.bytes().is_multiple_of(SEGMENT_BYTES) || count > segments.len() {
        return Err(RequestError::Malformed("there are no segments, too many, or half ones"));
    }
    segments.iter().map(|segment| range(segment, sectors_max, size)).collect()
}

fn flags_of(segment: &[u8; SEGMENT_BYTES]) -> u32 {
    let [.., f0, f1, f2, f3] = *segment;
    u32::from_le_bytes([f0, f1, f2, f3])
}

fn range(
    segment: &[u8; SEGMENT_BYTES],
    sectors_max: u32,
    size: u64,
) -> Result<Range, RequestError> {
    let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, ..] = *segment;
    let sectors = u32::from_le_bytes([n0, n1, n2, n3]);
    if sectors > sectors_max {
        return Err(RequestError::Malformed("a segment is longer than the device announced"));
    }
    let offset = offset_of(u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]))?;
    let len = u64::from(sectors) * SECTOR_BYTES;
    if offset.checked_add(len).is_none_or(|end| end > size) {
        return Err(RequestError::Malformed("a segment is beyond the end of the disk"));
    }
    Ok(Range { offset, len, unmap: flags_of(segment) != 0 })
}

async fn discard(blk: &Blk, readable: &Segments) -> Result<(), RequestError> {
    let ranges = ranges(readable, 0, DISCARD_SECTORS_MAX, blk.disk.info().size_bytes)?;
    for Range { offset, len, .. } in ranges {
        let result = blk.disk.discard(offset, len).await;
        result.map_err(|source| RequestError::Disk { action: "discard", offset, source })?;
    }
    settle(blk).await
}

async fn write_zeroes(blk: &Blk, readable: &Segments) -> Result<(), RequestError> {
    let (known, size) = (VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP, blk.disk.info().size_bytes);
    let ranges = ranges(readable, known, WRITE_ZEROES_SECTORS_MAX, size)?;
    for Range { offset, len, unmap } in ranges {
        let result = blk.disk.write_zeroes(offset, len, unmap).await;
        result.map_err(|source| RequestError::Disk { action: "write zeroes", offset, source })?;
    }
    settle(blk).await
}

/// Without a write cache, what was done is on stable storage before it is answered.
async fn settle(blk: &Blk) -> Result<(), RequestError> {
    if blk.device.write_through() { flush(blk).await } else { Ok(()) }
}

impl Blk {
    fn failed(&self, error: &RequestError) {
        if let Some(left_out) = self.log().permit() {
            tracing::warn!(export = self.name(), left_out, "a request failed: {error}");
        }
    }

    /// A chain without a status byte cannot be answered, so its ring is stopped.
    fn no_status(&self, queue: &Queue, head: u16) {
        if let Some(left_out) = self.log().permit() {
            let export = self.name();
            tracing::warn!(export, left_out, "chain {head} has no status byte; its queue stops");
        }
        queue.push(head, 0);
        queue.set_broken();
    }

    /// The kick of a queue cannot be watched: it is no eventfd, or there are too many.
    pub(crate) fn cannot_serve(&self, queue: &Queue, error: &blockio::Error) {
        if let Some(left_out) = self.log().permit() {
            tracing::error!(export = self.name(), left_out, "a queue is not served: {error}");
        }
        queue.set_broken();
    }

    /// A ring that makes no sense is left alone; the other queues go on.
    pub(crate) fn ring_is_bad(&self, queue: &Queue, error: &QueueError) {
        if let Some(left_out) = self.log().permit() {
            let export = self.name();
            tracing::warn!(export, left_out, "a queue stops, its ring is bad: {error}");
        }
        queue.set_broken();
    }
}
