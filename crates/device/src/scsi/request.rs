//! One command (virtio 1.3, section 5.6.6.1), from its chain to its response.

use std::rc::Rc;

use blockio::Io;
use iomem::Buffers;
use virtio_bindings::virtio_scsi::{
    VIRTIO_SCSI_S_ABORTED, VIRTIO_SCSI_S_BAD_TARGET, VIRTIO_SCSI_S_FAILURE, VIRTIO_SCSI_S_OK,
    VIRTIO_SCSI_S_OVERRUN, VIRTIO_SCSI_S_RESET,
};
use virtqueue::Chain;

use super::address::{Address, UnitAddress};
use super::cdb::{CDB_BYTES, Cdb, Op};
use super::device::ScsiDevice;
use super::outcome::{Data, Done, Failure, Moved, Task};
use super::request_queue::{LocalUnit, RequestQueue};
use super::sense::{Format, Sense};
use super::task_set::{Abort, Ended};
use super::unit::Unit;
use super::units::Units;
use super::{block, inquiry, mode, report, reserve};
use crate::common::byte;
use crate::queue::Queue;
use crate::queue_task::Handler;
use crate::stats::RequestKind;

/// Bytes before the CDB.
const FIXED_HEADER_BYTES: usize = 19;
const HEADER_BYTES: usize = FIXED_HEADER_BYTES + CDB_BYTES;
/// Bytes of a response before the sense data.
const FIXED_RESPONSE_BYTES: usize = 12;
/// Sense data of the default size.
const SENSE_BYTES: usize = 96;

/// Responses, which are a byte each.
const S_OK: u8 = byte(VIRTIO_SCSI_S_OK);
const S_OVERRUN: u8 = byte(VIRTIO_SCSI_S_OVERRUN);
const S_ABORTED: u8 = byte(VIRTIO_SCSI_S_ABORTED);
const S_BAD_TARGET: u8 = byte(VIRTIO_SCSI_S_BAD_TARGET);
const S_RESET: u8 = byte(VIRTIO_SCSI_S_RESET);
const S_FAILURE: u8 = byte(VIRTIO_SCSI_S_FAILURE);

/// Status codes (SAM-6, table 33); that of GOOD is 0.
const CHECK_CONDITION: u8 = 0x02;
const BUSY: u8 = 0x08;
const RESERVATION_CONFLICT: u8 = 0x18;

/// What serves the requests of one queue.
pub(crate) struct Scsi {
    device: ScsiDevice,
    queue: Rc<RequestQueue>,
}

/// What has come of a request, and how it counts.
type Served = (RequestKind, Result<Done, Failure>);

/// What a request says besides its CDB.
struct Header {
    address: Address,
    tag: u64,
    cdb: Cdb,
}

impl Scsi {
    /// For queue `index` of `device` on this IoThread.
    pub(crate) fn new(device: &ScsiDevice, index: u16, io: &Rc<Io>, queue: &Rc<Queue>) -> Self {
        Self { device: device.clone(), queue: device.start_queue(index, io, queue) }
    }

    #[inline]
    fn header(&self, readable: &mut Buffers) -> Option<Header> {
        let cdb_size: usize = iomem::fits(self.device.cdb_size(), "a size of CDBs");
        if cdb_size == CDB_BYTES {
            return readable.take_front::<HEADER_BYTES>().map(|bytes| split(&bytes));
        }
        if readable.bytes() < FIXED_HEADER_BYTES + cdb_size {
            return None;
        }
        let mut bytes = [0; HEADER_BYTES];
        let used = FIXED_HEADER_BYTES + cdb_size.min(CDB_BYTES);
        readable.copy_to(0, &mut bytes[..used]);
        readable.advance(FIXED_HEADER_BYTES + cdb_size);
        Some(split(&bytes))
    }

    /// Carries out a command at an address where no tasks are.
    fn answer_at_once(&self, header: &Header, data: &Data) -> Moved {
        check_direction(data)?;
        match header.address {
            Address::ReportLuns => report::well_known(self.device.units(), &header.cdb, data),
            Address::Invalid => Err(Failure::BadTarget),
            Address::Unit(_) => unreachable!("what is for a unit is a task"),
        }
    }

    /// Carries out a command that is a task of a unit.
    async fn execute_task(
        &self,
        queue: &Queue,
        address: UnitAddress,
        header: &Header,
        data: Data,
    ) -> (Served, Ended) {
        let tasks = &self.queue.tasks;
        let number = tasks.begin(address, header.tag, queue.next_avail());
        let task = Task { tasks, number };
        // It may have been aborted before it has begun.
        let (kind, done) = match task.check().and_then(|()| check_direction(&data)) {
            Err(failure) => (RequestKind::Other, Err(failure)),
            Ok(()) => match self.queue.unit(address) {
                Some(local) => self.serve_unit(&local, header, task, data).await,
                None => other(report::no_unit(self.device.units(), address, &header.cdb, &data)),
            },
        };
        let ended = tasks.end(number);
        let done = ended.abort.map_or(done, |abort| Err(Failure::Aborted(abort)));
        ((kind, done), ended)
    }

    /// The format in which the sender of a command wants sense data.
    #[cold]
    fn sense_format(&self, header: Option<&Header>) -> Format {
        match header {
            Some(Header { address: Address::Unit(address), .. }) => {
                self.queue.unit(*address).map_or(Format::Fixed, |local| local.unit.sense_format())
            }
            _ => Format::Fixed,
        }
    }

    /// Waits for the medium, if another command has it to itself.
    #[cold]
    async fn wait_for_medium(&self, local: &LocalUnit, task: Task<'_>) -> Result<(), Failure> {
        while local.unit.access.is_exclusive() {
            local.unit.access.pass().await;
        }
        task.check()
    }

    /// Carries out a command for a logical unit.
    async fn serve_unit(
        &self,
        local: &LocalUnit,
        header: &Header,
        task: Task<'_>,
        data: Data,
    ) -> Served {
        let (unit, cdb) = (&local.unit, &header.cdb);
        let refused = |failure: Failure| (RequestKind::Other, Err(failure));
        let command = match cdb.command() {
            Ok(command) => command,
            Err(sense) => return refused(sense.into()),
        };
        let op = command.op;
        let hears_first = !matches!(op, Op::Inquiry | Op::ReportLuns | Op::RequestSense);
        if hears_first && let Some(sense) = unit.attentions.take() {
            return refused(sense.into());
        }
        if let Err(failure) = reserve::check(unit, op, cdb) {
            return refused(failure);
        }
        if let Err(sense) = cdb.check(command) {
            return refused(sense.into());
        }
        if op.uses_medium() {
            if unit.access.is_exclusive()
                && let Err(failure) = Box::pin(self.wait_for_medium(local, task)).await
            {
                return refused(failure);
            }
            self.queue.tasks.takes_medium(task.number);
        }
        match op {
            Op::Read => (RequestKind::Read, block::read(local, cdb, data).await.map(Done::from)),
            Op::Write => (RequestKind::Write, block::write(local, cdb, data).await.map(Done::from)),
            Op::SynchronizeCache => {
                (RequestKind::Flush, block::synchronize(local, cdb).await.map(Done::from))
            }
            Op::Unmap => {
                (RequestKind::Discard, Box::pin(block::unmap(local, cdb, task, data)).await)
            }
            Op::WriteSame => (
                RequestKind::WriteZeroes,
                Box::pin(block::write_same(local, cdb, task, data)).await,
            ),
            Op::WriteAndVerify => {
                let write = block::write_and_verify(local, cdb, task, data);
                (RequestKind::Write, Box::pin(write).await.map(Done::from))
            }
            Op::CompareAndWrite => {
                let write = block::compare_and_write(local, cdb, header.tag, task, data);
                (RequestKind::Write, Box::pin(write).await)
            }
            Op::Verify => {
                (RequestKind::Read, Box::pin(block::verify(local, cdb, task, data)).await)
            }
            Op::StartStopUnit => other(Box::pin(block::start_stop(local, cdb)).await),
            Op::ModeSelect => other(Box::pin(mode::select(local, cdb, header.tag, data)).await),
            Op::ReserveOut => {
                let out = reserve::reserve_out(&self.queue.io, local, cdb, header.tag, data);
                other(Box::pin(out).await)
            }
            _ => other(answer(self.device.units(), unit, op, cdb, &data)),
        }
    }
}

/// What does not count as a use of the medium.
fn other(moved: Moved) -> Served {
    (RequestKind::Other, moved.map(Done::from))
}

#[inline]
fn check_direction(data: &Data) -> Result<(), Failure> {
    if !data.out.is_empty() && !data.into.is_empty() {
        return Err(Failure::Malformed("it has data in both directions"));
    }
    Ok(())
}

/// Carries out a command that waits for nothing.
fn answer(units: &Units, unit: &Unit, op: Op, cdb: &Cdb, data: &Data) -> Moved {
    match op {
        Op::TestUnitReady => block::check_ready(unit).map(|()| 0),
        Op::RequestSense => report::request_sense(unit, cdb, data),
        Op::Inquiry => inquiry::inquiry(unit, cdb, data),
        Op::ModeSense => mode::sense(unit, cdb, data),
        Op::LogSense => report::log_sense(cdb, data),
        // No medium can be taken out.
        Op::PreventAllow => Ok(0),
        Op::ReadCapacity10 => report::read_capacity10(unit, data),
        Op::ReadCapacity16 => report::read_capacity16(unit, cdb, data),
        Op::GetLbaStatus => report::lba_status(unit, cdb, data),
        Op::ReportLuns => report::luns(units, unit, cdb, data),
        Op::ReportOpcodes => report::opcodes(unit, cdb, data),
        Op::ReportTaskManagement => report::task_management(cdb, data),
        Op::ReserveIn => reserve::reserve_in(unit, cdb, data),
        Op::Read
        | Op::Write
        | Op::SynchronizeCache
        | Op::Unmap
        | Op::WriteSame
        | Op::WriteAndVerify
        | Op::CompareAndWrite
        | Op::Verify
        | Op::StartStopUnit
        | Op::ModeSelect
        | Op::ReserveOut => unreachable!("they may wait"),
    }
}

impl Handler for Scsi {
    fn broken(&self) {
        self.queue.tasks.forget_covers();
    }

    /// Serves one chain: reads the header, does what the CDB says, writes the response, pushes the
    /// chain.
    async fn serve(self: Rc<Self>, queue: Rc<Queue>, mut chain: Chain) {
        let head = chain.head;
        let sense_bytes: usize = iomem::fits(self.device.sense_size(), "a size of sense data");
        let response = chain.writable.split_front(FIXED_RESPONSE_BYTES + sense_bytes);
        let (Some(response), None) = (response, &chain.fault) else {
            // It cannot be answered: what the driver finds in its response must not be a success.
            self.queue.tasks.skip(queue.next_avail());
            queue.push_unanswered(head);
            return;
        };
        let header = self.header(&mut chain.readable);
        let data = Data { out: chain.readable, into: chain.writable };
        let room = [data.out.bytes(), data.into.bytes()];
        let ((kind, done), ended) = match &header {
            Some(header @ Header { address: Address::Unit(address), .. }) => {
                let (served, ended) = self.execute_task(&queue, *address, header, data).await;
                (served, Some(ended))
            }
            Some(header) => {
                self.queue.tasks.skip(queue.next_avail());
                (other(self.answer_at_once(header, &data)), None)
            }
            None => {
                self.queue.tasks.skip(queue.next_avail());
                (other(Err(Failure::Malformed("the header is incomplete"))), None)
            }
        };
        // What was read from memory that is gone were zeroes, and what was written there is lost.
        let done = match done {
            Ok(_) if !chain.memory.is_intact() => Err(Failure::MemoryGone),
            done => done,
        };
        let format = match done {
            Ok(_) => Format::Fixed,
            Err(_) => self.sense_format(header.as_ref()),
        };
        let written = respond(&response, kind, &done, format, room, &queue);
        queue.push(head, written);
        if ended.as_ref().is_some_and(Ended::is_awaited) {
            // Whoever waits answers on another queue, and this answer comes first.
            queue.publish_early();
        }
        drop(ended);
    }
}

/// Writes the response, counts the request, and returns how many bytes were written from the first
/// on.
fn respond(
    response: &Buffers,
    kind: RequestKind,
    done: &Result<Done, Failure>,
    format: Format,
    room: [usize; 2],
    queue: &Queue,
) -> u32 {
    let [out, into] = room;
    let mut bytes = [0; FIXED_RESPONSE_BYTES + SENSE_BYTES];
    let moved = match done {
        Ok(done) => {
            queue.count(kind, done.medium_bytes);
            done.moved
        }
        Err(failure) => {
            put(failure, format, response.bytes() - FIXED_RESPONSE_BYTES, &mut bytes);
            if failure.is_usual() {
                queue.refuse(kind);
            } else {
                queue.fail(kind, failure);
            }
            failure.moved()
        }
    };
    let residual = u32::try_from(out + into - moved).unwrap_or(u32::MAX);
    bytes[4..8].copy_from_slice(&residual.to_le_bytes());
    response.copy_from(0, &bytes);
    response.zero_from(bytes.len());
    let data = if into > 0 { moved } else { 0 };
    iomem::fits(response.bytes() + data, "bytes of a chain")
}

/// Writes what the driver learns about a failure: the one place where it is chosen.
fn put(
    failure: &Failure,
    format: Format,
    room: usize,
    bytes: &mut [u8; FIXED_RESPONSE_BYTES + SENSE_BYTES],
) {
    let (response, status, sense) = match failure {
        Failure::Check(sense) | Failure::Disk { sense, .. } => {
            (S_OK, CHECK_CONDITION, Some(*sense))
        }
        Failure::NotSaved(_) => (S_OK, CHECK_CONDITION, Some(Sense::NOT_SAVED)),
        Failure::MemoryGone => (S_OK, CHECK_CONDITION, Some(Sense::MEMORY_GONE)),
        Failure::Conflict => (S_OK, RESERVATION_CONFLICT, None),
        Failure::Busy => (S_OK, BUSY, None),
        Failure::Overrun => (S_OVERRUN, 0, None),
        Failure::BadTarget => (S_BAD_TARGET, 0, None),
        Failure::Malformed(_) => (S_FAILURE, 0, None),
        Failure::Aborted(Abort::Aborted) => (S_ABORTED, 0, None),
        Failure::Aborted(Abort::Reset) => (S_RESET, 0, None),
    };
    (bytes[10], bytes[11]) = (status, response);
    if let Some(sense) = sense {
        let data = sense.data(format);
        let length = data.len().min(room);
        bytes[..4].copy_from_slice(&u32::to_le_bytes(iomem::fits(length, "sense data")));
        bytes[FIXED_RESPONSE_BYTES..][..data.len()].copy_from_slice(&data);
    }
}

#[inline]
fn split(bytes: &[u8; HEADER_BYTES]) -> Header {
    Header {
        address: Address::parse(part(bytes, 0)),
        tag: u64::from_le_bytes(part(bytes, 8)),
        cdb: Cdb(part(bytes, FIXED_HEADER_BYTES)),
    }
}

#[inline]
fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[at + index])
}
