//! One virtio-blk request (virtio 1.3, section 5.2.6), from its chain to its status.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;

use blockio::disk::{Direction, Requester, Requests, TransferError, WaitMode};
use blockio::{Disk, Io};
use iomem::Buffers;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use virtqueue::Chain;

use super::BlkDevice;
use super::config::{
    DISCARD_SECTORS_MAX, SECTOR_BYTES, SEGMENTS_MAX, SERIAL_BYTES, WRITE_ZEROES_SECTORS_MAX,
};
use crate::access::persist::CommandClass;
use crate::device_core::byte;
use crate::queue::Queue;
use crate::queue::queue_setup::StopKind;
use crate::queue::queue_task::Handler;
use crate::stats::{ErrorCause, RequestKind};

/// Statuses of one byte each (virtio 1.3, section 5.2.6).
const S_OK: u8 = byte(VIRTIO_BLK_S_OK);
const S_IOERR: u8 = byte(VIRTIO_BLK_S_IOERR);
const S_UNSUPP: u8 = byte(VIRTIO_BLK_S_UNSUPP);

const HEADER_BYTES: usize = 16;
const SEGMENT_BYTES: usize = 16;

/// The failure of a request.
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
    #[error("guest memory is gone: its file was truncated")]
    MemoryGone,
    #[error("an initiator has reserved the disk")]
    Reserved,
    #[error(
        "a command that the disk failed waits for its retry, and no other command may use the disk"
    )]
    Held,
    #[error("{action} at byte {offset}: {source}")]
    Disk { action: &'static str, offset: u64, source: io::Error },
}

impl RequestError {
    /// The status byte (virtio 1.3, section 5.2.6). No other code chooses an error status.
    fn status(&self) -> u8 {
        match self {
            Self::Type(_) | Self::Flags(_) => S_UNSUPP,
            _ => S_IOERR,
        }
    }

    /// The cause in the statistics.
    fn cause(&self) -> ErrorCause {
        match self {
            Self::Chain(_)
            | Self::Header(_)
            | Self::Malformed(_)
            | Self::Type(_)
            | Self::Flags(_) => ErrorCause::Invalid,
            Self::MemoryGone | Self::Held => ErrorCause::Unavailable,
            Self::Reserved => ErrorCause::Reserved,
            Self::Disk { source, .. } => ErrorCause::from_disk_error(source),
        }
    }
}

/// The most unwritten bytes of a failed request that are zeroed. Zeroing more would delay all
/// queues of the IoThread, and a guest that names gigabytes could do that at will.
const ZEROED_BYTES_MAX: usize = 1 << 20;

/// The end of a request.
struct Outcome {
    kind: RequestKind,
    /// The bytes that the request was about.
    result: Result<u64, RequestError>,
    /// The unwritten part of the driver's room for data.
    rest: Option<Buffers>,
}

/// Serves the requests of one queue.
pub(crate) struct Blk {
    disk: Disk,
    device: BlkDevice,
}

impl Blk {
    /// A handler for a queue of `device` on this IoThread.
    pub(crate) fn new(device: &BlkDevice, io: &Rc<Io>) -> Self {
        Self { disk: device.source().attach(io), device: device.clone() }
    }
}

impl Handler for Blk {
    fn stop(&self, _: &Queue, kind: StopKind) {
        self.disk.set_wait_mode(kind.wait_mode());
        if kind.wait_mode() == WaitMode::Never {
            self.device.access().recheck_waiting();
        }
    }

    fn waiting_count(&self, queue: &Queue) -> usize {
        queue.barrier.waiting().into()
    }

    fn resume(&self) {
        self.disk.set_wait_mode(WaitMode::All);
    }

    /// Serves one chain: reads the header, carries out the request, writes the status, pushes the
    /// chain.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` moves its parameters once more")]
    fn serve(self: Rc<Self>, queue: Rc<Queue>, mut chain: Chain) -> impl Future<Output = ()> {
        async move {
            let (head, popped) = (chain.head, queue.pop_time(chain.head));
            let Some(status) = chain.writable.take_last_byte() else {
                // The chain has no room for a status.
                queue.push_unanswered(head, chain.fault);
                return;
            };
            let room = chain.writable.bytes();
            let (kind, result, written) = match chain.fault {
                None => {
                    let Outcome { kind, result, rest } =
                        execute(&self, &queue, head, chain.readable, chain.writable).await;
                    (kind, result, rest.map_or(room + 1, |rest| zero_unwritten(room, &rest)))
                }
                Some(fault) => (RequestKind::Other, Err(fault.into()), 0),
            };
            // Data read from memory that is gone was zeroes; data written there is lost.
            let is_slow = match result {
                Ok(_) if !chain.memory.is_intact() => {
                    let error = RequestError::MemoryGone;
                    status.write(error.status());
                    queue.fail(kind, popped, (error.cause(), &error))
                }
                Ok(bytes) => {
                    status.write(S_OK);
                    queue.count(kind, popped, bytes)
                }
                Err(error) => {
                    status.write(error.status());
                    queue.fail(kind, popped, (error.cause(), &error))
                }
            };
            if is_slow {
                queue.report_slow(kind, popped, queue.look_up_sector(kind, head));
            }
            let Ok(written) = u32::try_from(written) else {
                unreachable!("chains are below 4 GiB")
            };
            queue.push(head, written);
        }
    }
}

/// Zeroes the `rest` of the `room` for data, unless it is long. Returns the used length: the bytes
/// written without a gap from the first, including the status if nothing before it was skipped. At
/// least this many must have been written (virtio 1.3, section 2.7.8.2).
///
/// Drivers rely on the status, wherever the used length ends.
fn zero_unwritten(room: usize, rest: &Buffers) -> usize {
    let left = rest.bytes();
    let is_short = left <= ZEROED_BYTES_MAX;
    if is_short {
        rest.zero_from(0);
    }
    if is_short { room + 1 } else { room - left }
}

async fn execute(
    blk: &Blk,
    queue: &Queue,
    head: u16,
    mut readable: Buffers,
    writable: Buffers,
) -> Outcome {
    let Some(header) = readable.take_front::<HEADER_BYTES>() else {
        let result = Err(RequestError::Header(readable.bytes()));
        let rest = (!writable.is_empty()).then_some(writable);
        return Outcome { kind: RequestKind::Other, result, rest };
    };
    let [t0, t1, t2, t3, _, _, _, _, sector @ ..] = header;
    let sector = u64::from_le_bytes(sector);
    let request = u32::from_le_bytes([t0, t1, t2, t3]);
    if queue.barrier.checks_access.get()
        && let Err(refused) = Box::pin(admit(blk, queue, head, request)).await
    {
        return Outcome { rest: (!writable.is_empty()).then_some(writable), ..refused };
    }
    let disk_request = DiskRequest { blk, queue, head };
    let (kind, result) = match request {
        VIRTIO_BLK_T_IN => return read(&disk_request, sector, writable).await,
        VIRTIO_BLK_T_OUT => {
            let result = write(&disk_request, sector, readable).await;
            (RequestKind::Write, result)
        }
        VIRTIO_BLK_T_FLUSH => {
            let result = flush(blk).await;
            (RequestKind::Flush, result.map(|()| 0))
        }
        VIRTIO_BLK_T_GET_ID => return get_id(blk, writable),
        VIRTIO_BLK_T_DISCARD => {
            let result = Box::pin(discard(&disk_request, &readable)).await;
            (RequestKind::Discard, result)
        }
        VIRTIO_BLK_T_WRITE_ZEROES => {
            let result = Box::pin(write_zeroes(&disk_request, &readable)).await;
            (RequestKind::WriteZeroes, result)
        }
        other => (RequestKind::Other, Err(RequestError::Type(other))),
    };
    // These requests return no data.
    Outcome { kind, result, rest: (!writable.is_empty()).then_some(writable) }
}

/// Waits while an initiator has the disk alone, and fails if one has reserved it. Flushes pass:
/// they change nothing, and they were promised for earlier writes.
#[cold]
async fn admit(blk: &Blk, queue: &Queue, head: u16, request: u32) -> Result<(), Outcome> {
    let asks = match request {
        VIRTIO_BLK_T_IN => Some((RequestKind::Read, CommandClass::Reads)),
        VIRTIO_BLK_T_OUT => Some((RequestKind::Write, CommandClass::Writes)),
        VIRTIO_BLK_T_DISCARD => Some((RequestKind::Discard, CommandClass::Writes)),
        VIRTIO_BLK_T_WRITE_ZEROES => Some((RequestKind::WriteZeroes, CommandClass::Writes)),
        _ => None,
    };
    let begun = admit_class(blk, queue, head, asks.map(|(_, class)| class)).await;
    begun.map_err(|error| {
        let kind = asks.map_or(RequestKind::Other, |(kind, _)| kind);
        Outcome { kind, result: Err(error), rest: None }
    })
}

/// Like [`admit`], for a known class of request. A queue that stops cannot wait for an initiator
/// that has the disk alone and waits itself.
async fn admit_class(
    blk: &Blk,
    queue: &Queue,
    head: u16,
    class: Option<CommandClass>,
) -> Result<(), RequestError> {
    let access = blk.device.access();
    if let Some(class) = class {
        if access.is_exclusive() {
            queue.barrier.add_waiting(queue.not_done());
            let check =
                || if blk.disk.is_stopping_for_good() { Err(RequestError::Held) } else { Ok(()) };
            let passed = access.pass(check).await;
            queue.barrier.resume();
            passed?;
        }
        if !access.admits(class) {
            return Err(RequestError::Reserved);
        }
    }
    queue.barrier.begin(head);
    // The next user of a barrier raises it again.
    queue.barrier.checks_access.set(access.has_barrier() || queue.barrier.has_tokens());
    Ok(())
}

/// A request at its disk. While it waits, for limits or for another try, it holds nothing and no
/// barrier waits for it. Then it begins again.
struct DiskRequest<'a> {
    blk: &'a Blk,
    queue: &'a Queue,
    head: u16,
}

impl DiskRequest<'_> {
    /// The disk, for this request. Call it at the place of use, because a kept value is copied.
    #[inline]
    fn disk(&self) -> Requests<'_> {
        self.blk.disk.with_requester(self)
    }
}

impl Requester for DiskRequest<'_> {
    fn on_wait(&self) {
        self.queue.barrier.suspend(self.head, self.queue.not_done());
    }

    fn check(&self) -> io::Result<()> {
        Ok(())
    }

    fn on_resume(
        &self,
        direction: Direction,
    ) -> Pin<Box<dyn Future<Output = io::Result<()>> + '_>> {
        Box::pin(async move {
            let class = match direction {
                Direction::Read => CommandClass::Reads,
                Direction::Write => CommandClass::Writes,
            };
            self.queue.barrier.resume();
            if !self.queue.barrier.checks_access.get() {
                return Ok(());
            }
            let begun = admit_class(self.blk, self.queue, self.head, Some(class)).await;
            begun.map_err(|error| {
                let is_held = matches!(error, RequestError::Held);
                io::Error::from_raw_os_error(if is_held { libc::EBUSY } else { libc::EBADE })
            })
        })
    }

    fn on_cancel(&self) {
        self.queue.barrier.resume();
    }

    fn check_rest(&self) -> io::Result<()> {
        if self.queue.stop_kind() != StopKind::DriverGone {
            return Ok(());
        }
        let text = "the export ends, and the rest of the request is too large to wait for";
        Err(io::Error::new(io::ErrorKind::ResourceBusy, text))
    }
}

/// The byte offset of a sector.
fn offset_of(sector: u64) -> Result<u64, RequestError> {
    sector.checked_mul(SECTOR_BYTES).ok_or(RequestError::Malformed("the sector is out of range"))
}

async fn read(disk_request: &DiskRequest<'_>, sector: u64, writable: Buffers) -> Outcome {
    let kind = RequestKind::Read;
    let offset = match offset_of(sector) {
        Ok(offset) => offset,
        Err(error) => return Outcome { kind, result: Err(error), rest: Some(writable) },
    };
    let bytes = writable.bytes() as u64;
    match disk_request.disk().read(offset, writable).await {
        Ok(()) => Outcome { kind, result: Ok(bytes), rest: None },
        Err(unfinished) => {
            let (source, rest) = unfinished.into_parts();
            let error = RequestError::Disk { action: "read", offset, source };
            Outcome { kind, result: Err(error), rest: Some(rest) }
        }
    }
}

async fn write(
    disk_request: &DiskRequest<'_>,
    sector: u64,
    readable: Buffers,
) -> Result<u64, RequestError> {
    let offset = offset_of(sector)?;
    let bytes = readable.bytes() as u64;
    let fua = disk_request.blk.device.write_through();
    let result = disk_request.disk().write(offset, readable, fua).await;
    let failed = |unfinished: TransferError| RequestError::Disk {
        action: "write",
        offset,
        source: unfinished.into(),
    };
    result.map_err(failed)?;
    Ok(bytes)
}

async fn flush(blk: &Blk) -> Result<(), RequestError> {
    let result = blk.disk.flush().await;
    result.map_err(|source| RequestError::Disk { action: "flush", offset: 0, source })
}

/// Writes the serial, padded with zeroes to 20 bytes.
fn get_id(blk: &Blk, mut writable: Buffers) -> Outcome {
    let kind = RequestKind::Other;
    if writable.is_empty() {
        let error = RequestError::Malformed("no room for the id");
        return Outcome { kind, result: Err(error), rest: None };
    }
    let mut id = [0; SERIAL_BYTES];
    let serial = blk.device.serial().as_bytes();
    let len = serial.len().min(SERIAL_BYTES);
    id[..len].copy_from_slice(&serial[..len]);
    writable.copy_from(0, &id);
    writable.advance(SERIAL_BYTES);
    Outcome { kind, result: Ok(0), rest: Some(writable) }
}

/// A range of a discard or write-zeroes request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    offset: u64,
    len: u64,
    unmap: bool,
}

/// Reads the segments (virtio 1.3, section 5.2.6.2). All are checked before any is carried out.
/// Flags come first, because an unsupported flag must be reported as such despite other faults.
fn ranges(
    data: &Buffers,
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
    // Each segment is read once; segments beyond the limit are not read.
    let segments: Vec<_> = (0..count.min(SEGMENTS_MAX as usize)).map(segment).collect();
    let unknown = segments.iter().map(|segment| flags_of(segment) & !flags_known);
    let unknown = unknown.fold(0, |all, flags| all | flags);
    if unknown != 0 {
        return Err(RequestError::Flags(unknown));
    }
    if count == 0 || !data.bytes().is_multiple_of(SEGMENT_BYTES) || count > segments.len() {
        return Err(RequestError::Malformed("no segments, too many, or incomplete ones"));
    }
    segments.iter().map(|segment| range(segment, sectors_max, size)).collect()
}

fn bytes_of(ranges: &[Range]) -> u64 {
    ranges.iter().map(|range| range.len).sum()
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

async fn discard(disk_request: &DiskRequest<'_>, readable: &Buffers) -> Result<u64, RequestError> {
    let blk = disk_request.blk;
    let ranges = ranges(readable, 0, DISCARD_SECTORS_MAX, blk.disk.info().size_bytes)?;
    let bytes = bytes_of(&ranges);
    for Range { offset, len, .. } in ranges {
        let result = disk_request.disk().discard(offset, len).await;
        result.map_err(|source| RequestError::Disk { action: "discard", offset, source })?;
    }
    make_durable(blk).await?;
    Ok(bytes)
}

async fn write_zeroes(
    disk_request: &DiskRequest<'_>,
    readable: &Buffers,
) -> Result<u64, RequestError> {
    let DiskRequest { blk, queue, .. } = *disk_request;
    let (known, size) = (VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP, blk.disk.info().size_bytes);
    let ranges = ranges(readable, known, WRITE_ZEROES_SECTORS_MAX, size)?;
    let bytes = bytes_of(&ranges);
    let _counted = queue.count_zeroes(bytes);
    for Range { offset, len, unmap } in ranges {
        let result = disk_request.disk().write_zeroes(offset, len, unmap).await;
        result.map_err(|source| RequestError::Disk { action: "write zeroes", offset, source })?;
    }
    make_durable(blk).await?;
    Ok(bytes)
}

/// Makes a finished change durable before it is answered, unless there is a write cache.
async fn make_durable(blk: &Blk) -> Result<(), RequestError> {
    if blk.device.write_through() { flush(blk).await } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::future::poll_fn;
    use std::task::{Poll, Waker};

    use blockio::disk::{Limits, Rate, Rates};
    use blockio::{DiskOptions, DiskSource};
    use iomem::BufferMemory;
    use proptest::prelude::*;
    use virtqueue::driver::Desc;

    use super::super::config::{BlkOptions, F_FLUSH, F_VERSION_1};
    use super::*;
    use crate::device::Device;
    use crate::queue::QueueHandle;
    use crate::stats::RequestCounts;
    use crate::testing::{DATA, Scene};

    const SECTORS: u64 = 2048;

    fn header(kind: u32, sector: u64) -> Vec<u8> {
        [&u64::from(kind).to_le_bytes()[..], &sector.to_le_bytes()].concat()
    }

    fn segment_of(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
        let numbers = [sectors, flags].map(u32::to_le_bytes).concat();
        [&sector.to_le_bytes()[..], &numbers].concat()
    }

    /// The driver's bytes, its room for an answer, the status, the used length, and the request's
    /// kind and bytes as counted (`None` for an error).
    type Row = (Vec<u8>, u32, u8, u32, RequestKind, Option<u64>);

    fn rows() -> Vec<Row> {
        use RequestKind::{Discard, Flush, Other, Read, Write, WriteZeroes};
        let with = |kind, sector, data: &[u8]| [&header(kind, sector)[..], data].concat();
        let (discard, zeroes) = (VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES);
        let too_many = segment_of(0, 1, 0).repeat(SEGMENTS_MAX as usize + 1);
        vec![
            (header(VIRTIO_BLK_T_IN, 0), 1024, S_OK, 1025, Read, Some(1024)),
            (header(VIRTIO_BLK_T_IN, SECTORS), 512, S_IOERR, 513, Read, None),
            (header(VIRTIO_BLK_T_IN, u64::MAX), 512, S_IOERR, 513, Read, None),
            (with(VIRTIO_BLK_T_OUT, 8, &[7; 512]), 0, S_OK, 1, Write, Some(512)),
            (with(VIRTIO_BLK_T_OUT, SECTORS, &[7; 512]), 0, S_IOERR, 1, Write, None),
            (header(VIRTIO_BLK_T_FLUSH, 0), 0, S_OK, 1, Flush, Some(0)),
            (header(VIRTIO_BLK_T_FLUSH, 0), 16, S_OK, 17, Flush, Some(0)),
            (header(VIRTIO_BLK_T_GET_ID, 0), 20, S_OK, 21, Other, Some(0)),
            (header(VIRTIO_BLK_T_GET_ID, 0), 0, S_IOERR, 1, Other, None),
            (with(discard, 0, &segment_of(8, 8, 0)), 0, S_OK, 1, Discard, Some(4096)),
            (with(discard, 0, &segment_of(8, 8, 1)), 0, S_UNSUPP, 1, Discard, None),
            (with(discard, 0, &segment_of(8, 8, 1).repeat(2)), 0, S_UNSUPP, 1, Discard, None),
            (with(discard, 0, &segment_of(SECTORS, 1, 0)), 0, S_IOERR, 1, Discard, None),
            (with(discard, 0, &too_many), 0, S_IOERR, 1, Discard, None),
            (with(discard, 0, &[0; 15]), 0, S_IOERR, 1, Discard, None),
            (with(zeroes, 0, &segment_of(0, 16, 1)), 0, S_OK, 1, WriteZeroes, Some(8192)),
            (with(zeroes, 0, &segment_of(0, 16, 2)), 0, S_UNSUPP, 1, WriteZeroes, None),
            (header(99, 0), 0, S_UNSUPP, 1, Other, None),
            (vec![0; 15], 16, S_IOERR, 17, Other, None),
        ]
    }

    #[test]
    fn each_request_has_its_status_its_used_length_and_its_count() {
        let mut scene = Scene::new();
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(SECTORS * SECTOR_BYTES).unwrap();
        let source = DiskSource::file(file.path(), &DiskOptions::default()).unwrap();
        let device = Device::blk(source, BlkOptions::default(), scene.events.clone());
        device.set_features(1 << F_VERSION_1 | 1 << F_FLUSH).unwrap();
        let handle = scene.start_queue_of(&device, 0);
        for (sent, room, status, used, kind, bytes) in rows() {
            let before = device.totals()[kind];
            scene.memory.write(DATA, &sent).unwrap();
            let (answer, status_at) = (DATA + 0x1000, DATA + 0x1000 + u64::from(room));
            scene.memory.write(answer, &[0xee; 2048]).unwrap();
            let mut chain = vec![Desc::readable(DATA, u32::try_from(sent.len()).unwrap())];
            if room > 0 {
                chain.push(Desc::writable(answer, room));
            }
            chain.push(Desc::writable(status_at, 1));
            let head = scene.offer(&chain);
            let element = scene.answer();
            let mut seen = [0];
            scene.memory.read(status_at, &mut seen).unwrap();
            let what = format!("{sent:?} with room for {room}");
            assert_eq!((element.head, element.bytes), (head.into(), used), "{what}");
            assert_eq!(seen[0], status, "{what}");
            let mut data = vec![0; room as usize];
            scene.memory.read(answer, &mut data).unwrap();
            assert!(data.iter().all(|byte| *byte == 0), "{what}: old bytes are left");
            let is_good = bytes.is_some();
            let counts = |counts: &RequestCounts| {
                [
                    counts.requests(),
                    counts.bytes,
                    counts.errors(),
                    counts.errors_of(ErrorCause::Invalid),
                ]
            };
            let bad = u64::from(!is_good);
            let expected = [1, bytes.unwrap_or(0), bad, bad];
            let after = counts(&device.totals()[kind]);
            let added: Vec<u64> = after.iter().zip(counts(&before)).map(|(a, b)| a - b).collect();
            assert_eq!(added, expected, "{what}");
            assert_eq!(scene.events.take().len(), usize::from(!is_good), "{what}");
        }
        // A chain without room for a status.
        scene.offer(&[Desc::readable(DATA, 16)]);
        assert_eq!(scene.answer().bytes, 0);
        assert!(scene.events.take()[0].contains("has no room for a status"));
        let count = u32::try_from(rows().len()).unwrap() + 1;
        assert_eq!(scene.wait(&handle.begin_final_stop()), count);
    }

    /// Its header reads as zeroes, which are a good read of the first sector.
    #[test]
    fn a_request_in_memory_that_was_truncated_fails() {
        virtqueue::install_sigbus_handler().unwrap();
        let mut scene = Scene::new();
        let source = DiskSource::null(SECTORS * SECTOR_BYTES, &DiskOptions::default()).unwrap();
        let device = Device::blk(source, BlkOptions::default(), scene.events.clone());
        let handle = scene.start_queue_of(&device, 0);
        let bytes = scene.memory_file.metadata().unwrap().len();
        scene.memory_file.set_len(bytes - 4096).unwrap();
        let status_at = DATA + 0x1000;
        scene.offer(&[
            Desc::readable(bytes - 4096, 16),
            Desc::writable(DATA, 512),
            Desc::writable(status_at, 1),
        ]);
        scene.turn(10);
        let mut status = [0xee];
        scene.memory.read(status_at, &mut status).unwrap();
        assert_eq!(status, [S_IOERR]);
        assert_eq!(device.totals()[RequestKind::Read].errors_of(ErrorCause::Unavailable), 1);
        let failed = RequestError::MemoryGone.to_string();
        assert!(scene.events.take().contains(&failed), "the failure is not reported");
        scene.wait(&handle.begin_final_stop());
    }

    /// Zeroes and discards change data as writes do.
    #[test]
    fn each_change_is_flushed_before_its_answer_where_there_is_no_cache() {
        let (discard, zeroes) = (VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES);
        for write_cache in [false, true] {
            let mut scene = Scene::new();
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len(SECTORS * SECTOR_BYTES).unwrap();
            let source = DiskSource::file(file.path(), &DiskOptions::default()).unwrap();
            let options = BlkOptions { write_cache, ..BlkOptions::default() };
            let device = Device::blk(source, options, scene.events.clone());
            device.set_features(1 << F_VERSION_1 | 1 << F_FLUSH).unwrap();
            let handle = scene.start_queue_of(&device, 0);
            let flushes = |scene: &Scene| scene.thread.io().stats().flush.ops.get();
            for (request, flags) in [(discard, 0), (zeroes, 0), (zeroes, 1)] {
                let before = flushes(&scene);
                let sent = [header(request, 0), segment_of(8, 8, flags)].concat();
                scene.memory.write(DATA, &sent).unwrap();
                let length = u32::try_from(sent.len()).unwrap();
                scene.offer(&[Desc::readable(DATA, length), Desc::writable(DATA + 0x1000, 1)]);
                scene.answer();
                let expected = before + u64::from(!write_cache);
                assert_eq!(flushes(&scene), expected, "request {request} with {write_cache}");
            }
            assert_eq!(scene.wait(&handle.begin_final_stop()), 3);
        }
    }

    /// The IoThread and the driver see a new size at once, and no queue stops for it.
    #[test]
    fn a_disk_may_grow_and_shrink_while_it_is_served() {
        let mut scene = Scene::new();
        let file = tempfile::NamedTempFile::new().unwrap();
        let resize = |sectors: u64| file.as_file().set_len(sectors * SECTOR_BYTES).unwrap();
        resize(SECTORS);
        let source = DiskSource::file(file.path(), &DiskOptions::default()).unwrap();
        let device = Device::blk(source.clone(), BlkOptions::default(), scene.events.clone());
        device.set_features(1 << F_VERSION_1 | 1 << F_FLUSH).unwrap();
        let _handle = scene.start_queue_of(&device, 0);
        let mut status_of = |kind: u32, sector: u64, data: &[u8]| {
            let sent = [&header(kind, sector)[..], data].concat();
            scene.memory.write(DATA, &sent).unwrap();
            let length = u32::try_from(sent.len()).unwrap();
            scene.offer(&[Desc::readable(DATA, length), Desc::writable(DATA + 0x1000, 1)]);
            scene.answer();
            let mut status = [0];
            scene.memory.read(DATA + 0x1000, &mut status).unwrap();
            status[0]
        };
        let zeroes = segment_of(SECTORS, 8, 0);
        for (sectors, status) in [(SECTORS, S_IOERR), (2 * SECTORS, S_OK), (SECTORS, S_IOERR)] {
            resize(sectors);
            assert_eq!(source.refresh().unwrap(), sectors * SECTOR_BYTES);
            assert_eq!(device.read_config(0, 8), sectors.to_le_bytes());
            assert_eq!(status_of(VIRTIO_BLK_T_OUT, SECTORS, &[7; 512]), status, "{sectors}");
            assert_eq!(status_of(VIRTIO_BLK_T_OUT, sectors - 1, &[7; 512]), S_OK, "{sectors}");
            assert_eq!(status_of(VIRTIO_BLK_T_WRITE_ZEROES, 0, &zeroes), status, "{sectors}");
            assert_eq!(file.as_file().metadata().unwrap().len(), sectors * SECTOR_BYTES);
        }
    }

    /// A disk of one byte in a second, so that each write but the first two waits for long.
    fn slow_null() -> DiskSource {
        let source = DiskSource::null(SECTORS * SECTOR_BYTES, &DiskOptions::default()).unwrap();
        let total = Some(Rate { per_second: 1, burst: None });
        let bytes = Rates { total, ..Rates::default() };
        source.set_limits(&Limits { bytes, ..Limits::default() }).unwrap();
        source
    }

    /// Makes a queue take ten writes, most of which wait.
    fn begin_ten(scene: &mut Scene, device: &Device) -> QueueHandle {
        let handle = scene.start_queue_of(device, 0);
        scene.memory.write(DATA, &header(VIRTIO_BLK_T_OUT, 0)).unwrap();
        for _ in 0..10 {
            scene.offer(&[Desc::readable(DATA, 528), Desc::writable(DATA + 0x1000, 1)]);
        }
        scene.turn(20);
        assert_eq!(handle.next_avail(), 10);
        handle
    }

    fn answered(scene: &mut Scene) -> usize {
        std::iter::from_fn(|| scene.driver.take_used()).count()
    }

    #[test]
    fn waiting_requests_stay_in_the_inflight_region_for_the_next_process() {
        let mut scene = Scene::new();
        scene.mark_requests();
        let source = slow_null();
        let device = Device::blk(source.clone(), BlkOptions::default(), scene.events.clone());
        let mut handle = begin_ten(&mut scene, &device);
        assert_eq!(scene.events.take(), ["queue 0: New"]);
        let mut done = answered(&mut scene);
        assert!((1..4).contains(&done), "{done}");
        for _ in 0..3 {
            assert_eq!(scene.wait(&handle.begin_stop(StopKind::KeepInflight)), 10);
            assert_eq!((scene.thread.io().tasks(), scene.thread.io().ops()), (0, 0));
            handle = scene.start_queue_of(&device, 0);
            scene.turn(20);
            let known = format!("queue 0: Known {{ requests: {} }}", 10 - done);
            assert_eq!(scene.events.take(), [known]);
            done += answered(&mut scene);
            assert!(done < 8, "what was left has taken nothing of the limits, nor was it done");
        }
        source.set_limits(&Limits::default()).unwrap();
        while done < 10 {
            scene.answer();
            done += 1;
        }
        assert_eq!(scene.wait(&handle.begin_stop(StopKind::KeepInflight)), 10);
        assert_eq!(answered(&mut scene), 0);
        let _handle = scene.start_queue_of(&device, 0);
        assert_eq!(scene.events.take(), ["queue 0: Known { requests: 0 }"], "marks are left");
    }

    #[test]
    fn a_queue_that_leaves_waiting_requests_waits_for_ops_in_the_kernel() {
        let mut scene = Scene::new();
        scene.mark_requests();
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(SECTORS * SECTOR_BYTES).unwrap();
        let source = DiskSource::file(file.path(), &DiskOptions::default()).unwrap();
        let device = Device::blk(source, BlkOptions::default(), scene.events.clone());
        let handle = scene.start_queue_of(&device, 0);
        scene.memory.write(DATA, &header(VIRTIO_BLK_T_OUT, 0)).unwrap();
        for _ in 0..10 {
            scene.offer(&[Desc::readable(DATA, 528), Desc::writable(DATA + 0x1000, 1)]);
        }
        while handle.next_avail() < 10 {
            scene.turn(1);
        }
        assert_eq!(scene.wait(&handle.begin_stop(StopKind::KeepInflight)), 10);
        assert_eq!(answered(&mut scene), 10);
    }

    /// Address of the header of a long request; its status is 16 bytes behind it.
    const LONG_ANSWER: u64 = DATA + LONG_BUFFER_BYTES as u64;
    const LONG_BUFFER_BYTES: u32 = 2 << 20;

    /// Begins a request of `buffers` buffers on a disk of the same size. Returns the device and its
    /// queue.
    fn begin_long(scene: &mut Scene, request: u32, buffers: u64) -> (Device, QueueHandle) {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(buffers * u64::from(LONG_BUFFER_BYTES)).unwrap();
        let source = DiskSource::file(file.path(), &DiskOptions::default()).unwrap();
        let device = Device::blk(source, BlkOptions::default(), scene.events.clone());
        let handle = scene.start_queue_of(&device, 0);
        scene.memory.write(LONG_ANSWER, &header(request, 0)).unwrap();
        let buffer = match request {
            VIRTIO_BLK_T_IN => Desc::writable(DATA, LONG_BUFFER_BYTES),
            _ => Desc::readable(DATA, LONG_BUFFER_BYTES),
        };
        let mut chain = vec![Desc::readable(LONG_ANSWER, 16)];
        chain.extend((0..buffers).map(|_| buffer));
        chain.push(Desc::writable(LONG_ANSWER + 16, 1));
        scene.memory.write(LONG_ANSWER + 16, &[0xee]).unwrap();
        scene.offer(&chain);
        while moved(scene) == 0 {
            scene.turn(1);
        }
        (device, handle)
    }

    fn moved(scene: &Scene) -> u64 {
        let stats = scene.thread.io().stats();
        stats.read.bytes.get() + stats.write.bytes.get()
    }

    fn long_status(scene: &Scene) -> u8 {
        let mut status = [0];
        scene.memory.read(LONG_ANSWER + 16, &mut status).unwrap();
        status[0]
    }

    /// A write and a read of 28 MiB succeed in the end, at this start of the queue or the next.
    #[test]
    fn a_queue_that_may_leave_requests_waits_for_one_step_of_a_long_one() {
        const BUFFERS: u64 = 14;
        let stops = [
            (StopKind::KeepInflight, Some(false)),
            (StopKind::DriverGone, Some(false)),
            (StopKind::KeepInflight, Some(true)),
            (StopKind::DriverGone, Some(true)),
            (StopKind::Pause, None),
            (StopKind::DriverGone, None),
        ];
        let all = stops.into_iter().flat_map(|(kind, is_own)| {
            [VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT].map(|request| (request, kind, is_own))
        });
        for (request, kind, region_is_own) in all {
            let mut scene = Scene::new();
            if let Some(is_own) = region_is_own {
                scene.mark_requests();
                scene.region_is_own = is_own;
            }
            let is_marked = region_is_own == Some(false);
            let (device, handle) = begin_long(&mut scene, request, BUFFERS);
            let whole = BUFFERS * u64::from(LONG_BUFFER_BYTES);
            assert_eq!(scene.wait(&handle.begin_stop(kind)), 1);
            assert_eq!(moved(&scene) < whole, is_marked, "{request}: {}", moved(&scene));
            assert_eq!(answered(&mut scene), usize::from(!is_marked));
            if is_marked {
                let handle = scene.start_queue_of(&device, 0);
                scene.answer();
                assert_eq!(scene.wait(&handle.begin_final_stop()), 1);
            }
            assert_eq!(long_status(&scene), S_OK);
        }
    }

    /// A guest sees no error if the process continues or leaves its queues to another process.
    #[test]
    fn a_device_that_ends_drops_the_rest_of_a_giant_request() {
        const BUFFERS: u64 = 50;
        for (request, kind, is_given_up) in [
            (VIRTIO_BLK_T_IN, StopKind::DriverGone, true),
            (VIRTIO_BLK_T_OUT, StopKind::DriverGone, true),
            (VIRTIO_BLK_T_IN, StopKind::Final, false),
            (VIRTIO_BLK_T_IN, StopKind::Pause, false),
        ] {
            let mut scene = Scene::new();
            let (_device, handle) = begin_long(&mut scene, request, BUFFERS);
            assert_eq!(scene.wait(&handle.begin_stop(kind)), 1);
            let whole = BUFFERS * u64::from(LONG_BUFFER_BYTES);
            assert_eq!(moved(&scene) < whole, is_given_up, "{kind:?}: {}", moved(&scene));
            let left = whole.saturating_sub(moved(&scene));
            assert!(!is_given_up || left > 64 << 20, "{left} would have been waited for");
            assert_eq!(answered(&mut scene), 1);
            let expected = if is_given_up { S_IOERR } else { S_OK };
            assert_eq!(long_status(&scene), expected, "{kind:?}");
        }
    }

    #[test]
    fn limited_requests_begin_if_they_cannot_be_left() {
        for kind in [StopKind::Final, StopKind::Pause, StopKind::KeepInflight] {
            let mut scene = Scene::new();
            let device = Device::blk(slow_null(), BlkOptions::default(), scene.events.clone());
            let handle = begin_ten(&mut scene, &device);
            assert_eq!(scene.wait(&handle.begin_stop(kind)), 10);
            assert_eq!(answered(&mut scene), 10, "{kind:?}");
        }
    }

    #[test]
    fn a_queue_that_was_to_leave_waiting_requests_can_resume() {
        for is_marked in [false, true] {
            let mut scene = Scene::new();
            if is_marked {
                scene.mark_requests();
            }
            let source = slow_null();
            let device = Device::blk(source.clone(), BlkOptions::default(), scene.events.clone());
            let handle = begin_ten(&mut scene, &device);
            let kind = if is_marked { StopKind::KeepInflight } else { StopKind::Pause };
            let _stopped = handle.begin_stop(kind);
            let _goes_on = handle.begin_resume();
            source.set_limits(&Limits::default()).unwrap();
            for _ in 0..10 {
                scene.answer();
            }
            assert_eq!(scene.wait(&handle.begin_final_stop()), 10);
        }
    }

    /// Lets each chain pass the barrier, and answers it when its turn comes.
    struct Paused {
        blk: Blk,
        request: u32,
        begun: Cell<u32>,
        answered: Cell<u32>,
        queue: RefCell<Option<Rc<Queue>>>,
        waiting: RefCell<Vec<Waker>>,
    }

    struct Served(Rc<Paused>);

    impl Handler for Served {
        async fn serve(self: Rc<Self>, queue: Rc<Queue>, chain: Chain) {
            let paused = &self.0;
            *paused.queue.borrow_mut() = Some(Rc::clone(&queue));
            if queue.barrier.checks_access.get() {
                let passed = admit(&paused.blk, &queue, chain.head, paused.request).await;
                assert!(passed.is_ok(), "nobody has reserved the disk");
            }
            let turn = paused.begun.replace(paused.begun.get() + 1);
            poll_fn(|cx| {
                if turn < paused.answered.get() {
                    return Poll::Ready(());
                }
                paused.waiting.borrow_mut().push(cx.waker().clone());
                Poll::Pending
            })
            .await;
            queue.push(chain.head, 0);
        }
    }

    impl Paused {
        fn new(blk: &BlkDevice, scene: &Scene, request: u32) -> Rc<Self> {
            Rc::new(Self {
                blk: Blk::new(blk, scene.thread.io()),
                request,
                begun: Cell::new(0),
                answered: Cell::new(0),
                queue: RefCell::default(),
                waiting: RefCell::default(),
            })
        }

        fn begin(&self, scene: &mut Scene) {
            let expected = self.begun.get() + 1;
            scene.offer(&[Desc::readable(DATA, 16), Desc::writable(DATA + 0x1000, 1)]);
            scene.turn(10);
            assert_eq!(self.begun.get(), expected);
        }

        fn answer(&self, scene: &mut Scene) {
            self.answered.set(self.answered.get() + 1);
            self.waiting.take().into_iter().for_each(Waker::wake);
            scene.answer();
        }
    }

    #[test]
    fn a_cut_waits_only_for_requests_that_have_begun() {
        let mut scene = Scene::new();
        let source = DiskSource::null(SECTORS * SECTOR_BYTES, &DiskOptions::default()).unwrap();
        let device = Device::blk(source, BlkOptions::default(), scene.events.clone());
        let Device::Blk(blk) = &device else { unreachable!() };
        let paused = Paused::new(blk, &scene, VIRTIO_BLK_T_OUT);
        let handle = scene.start(Served(Rc::clone(&paused)));
        paused.begin(&mut scene);
        let queue = paused.queue.borrow().clone().unwrap();
        blk.start_queue(0, scene.thread.io(), &queue);
        let waits = std::thread::spawn({
            let blk = blk.clone();
            move || blk.access().cut_off(SECTORS * SECTOR_BYTES)
        });
        while !queue.barrier.has_tokens() && !waits.is_finished() {
            scene.turn(1);
        }
        paused.begin(&mut scene);
        assert!(!waits.is_finished());
        paused.answer(&mut scene);
        waits.join().unwrap();
        paused.answer(&mut scene);
        drop((paused.queue.take(), queue));
        assert_eq!(scene.wait(&handle.begin_final_stop()), 2);
    }

    #[test]
    fn a_fence_does_not_wait_for_requests_that_pass_it_later() {
        for request in [VIRTIO_BLK_T_IN, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, 99] {
            let mut scene = Scene::new();
            let source = DiskSource::null(SECTORS * SECTOR_BYTES, &DiskOptions::default()).unwrap();
            let device = Device::blk(source, BlkOptions::default(), scene.events.clone());
            let Device::Blk(blk) = &device else { unreachable!() };
            let paused = Paused::new(blk, &scene, request);
            let answer = |scene: &mut Scene| paused.answer(scene);
            let begin = |scene: &mut Scene| paused.begin(scene);
            let handle = scene.start(Served(Rc::clone(&paused)));
            begin(&mut scene);
            let queue = paused.queue.borrow().clone().unwrap();
            let tokens = [(); 2].map(|()| Rc::new(()));
            let are_kept = || tokens.each_ref().map(|token| Rc::strong_count(token) > 1);
            queue.raise_barrier(Box::new(Rc::clone(&tokens[0])));
            // Each of these must be noted: the token counts them.
            begin(&mut scene);
            begin(&mut scene);
            queue.raise_barrier(Box::new(Rc::clone(&tokens[1])));
            begin(&mut scene);
            assert_eq!(are_kept(), [true; 2]);
            for expected in [[false, true], [false, true], [false; 2]] {
                answer(&mut scene);
                assert_eq!(are_kept(), expected, "request {request}");
            }
            answer(&mut scene);
            drop((paused.queue.take(), queue));
            assert_eq!(scene.wait(&handle.begin_final_stop()), 4);
        }
    }

    #[test]
    fn a_segment_may_be_as_long_as_announced_and_end_where_the_disk_does() {
        let size = 48 * SECTOR_BYTES;
        for (sector, sectors, is_good) in [
            (0, 32, true),
            (0, 33, false),
            (16, 32, true),
            (17, 32, false),
            (47, 1, true),
            (48, 0, true),
            (48, 1, false),
            (49, 0, false),
            (u64::MAX / SECTOR_BYTES, 1, false),
            (u64::MAX, 0, false),
        ] {
            let segment = segment_of(sector, sectors, 0);
            let read = range(segment.first_chunk().unwrap(), 32, size);
            assert_eq!(read.is_ok(), is_good, "{sectors} from {sector} on");
        }
    }

    proptest! {
        /// For any bytes from the driver, segments that are carried out lie on the disk, are at
        /// most as long as announced, and have no unknown flag.
        #[test]
        fn only_segments_that_are_in_order_are_carried_out(
            segments in prop::collection::vec((0..64_u64, 0..40_u32, 0..3_u32), 0..20),
            tail in 0..16_usize,
            known in 0..2_u32,
        ) {
            let (sectors_max, size) = (32, 48 * SECTOR_BYTES);
            let mut bytes: Vec<u8> =
                segments.iter().flat_map(|s| segment_of(s.0, s.1, s.2)).collect();
            bytes.resize(bytes.len() + tail, 0xff);
            let memory = BufferMemory::new(bytes.len().max(1), 1);
            let data = memory.buffers(bytes.len());
            data.copy_from(0, &bytes);
            let is_good = |&(sector, sectors, flags): &(u64, u32, u32)| {
                flags & !known == 0
                    && sectors <= sectors_max
                    && (sector + u64::from(sectors)) * SECTOR_BYTES <= size
            };
            let may_pass = (1..=SEGMENTS_MAX as usize).contains(&segments.len())
                && tail == 0
                && segments.iter().all(is_good);
            let expected: Vec<Range> = segments
                .iter()
                .map(|&(sector, sectors, flags)| Range {
                    offset: sector * SECTOR_BYTES,
                    len: u64::from(sectors) * SECTOR_BYTES,
                    unmap: flags != 0,
                })
                .collect();
            let seen = ranges(&data, known, sectors_max, size).ok();
            prop_assert_eq!(seen, may_pass.then_some(expected));
        }
    }
}
