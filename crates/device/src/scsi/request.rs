//! One command (virtio 1.3, section 5.6.6.1), from its chain to its response.

use std::ops::Range;
use std::rc::Rc;

use blockio::Io;
use iomem::{Buffers, SharedBytes};
use virtio_bindings::virtio_scsi::{
    VIRTIO_SCSI_S_ABORTED, VIRTIO_SCSI_S_BAD_TARGET, VIRTIO_SCSI_S_FAILURE, VIRTIO_SCSI_S_OK,
    VIRTIO_SCSI_S_OVERRUN, VIRTIO_SCSI_S_RESET,
};
use virtqueue::{Chain, LocalMemory};

use super::address::{Address, UnitAddress};
use super::block::Write;
use super::cdb::{Cdb, KEPT_BYTES, Op};
use super::device::ScsiDevice;
use super::outcome::{Data, Done, Failure, Moved, Refused, Task, refused};
use super::request_queue::{LocalUnit, RequestQueue};
use super::sense::{Format, Sense};
use super::task_set::{Abort, Arrived};
use super::unit::Unit;
use super::units::Units;
use super::{block, inquiry, mode, report, reserve, unmap};
use crate::common::byte;
use crate::queue::Queue;
use crate::queue_task::Handler;
use crate::stats::RequestKind;

/// Bytes before the CDB.
const FIXED_HEADER_BYTES: usize = 19;
const KEPT_HEADER_BYTES: usize = FIXED_HEADER_BYTES + KEPT_BYTES;
/// Bytes of a response before the sense data.
const FIXED_RESPONSE_BYTES: usize = 12;
/// Sense data of the default size.
const SENSE_BYTES: usize = 96;
/// Where a response has the bytes that were not transferred.
const RESIDUAL: Range<usize> = 4..8;

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
        let whole = FIXED_HEADER_BYTES + cdb_size;
        if cdb_size >= KEPT_BYTES {
            return readable.take_front_of::<KEPT_HEADER_BYTES>(whole).map(|bytes| split(&bytes));
        }
        if readable.bytes() < whole {
            return None;
        }
        let mut bytes = [0; KEPT_HEADER_BYTES];
        readable.copy_to(0, &mut bytes[..whole]);
        readable.advance(whole);
        Some(split(&bytes))
    }

    /// How a command goes on that has come; `None` if it is no unit that has the answer.
    #[inline]
    fn way(
        &self,
        local: Option<Rc<LocalUnit>>,
        cdb: &Cdb,
        room: [usize; 2],
        (arrived, head): (&mut Arrived, u16),
    ) -> Result<(Rc<LocalUnit>, Way), Option<Refused>> {
        arrived.check().map_err(|abort| refused(Failure::Aborted(abort)))?;
        let is_both_ways = !room.contains(&0);
        let Some(local) = local.filter(|_| !is_both_ways) else {
            return Err(None);
        };
        let way = self.admit(&local, cdb, (arrived, head))?;
        Ok((local, way))
    }

    /// How a command goes on, if the unit carries it out now.
    #[inline]
    fn admit(
        &self,
        local: &LocalUnit,
        cdb: &Cdb,
        (arrived, head): (&mut Arrived, u16),
    ) -> Result<Way, Refused> {
        let unit = &local.unit;
        let command = cdb.command().map_err(refused)?;
        let op = command.op;
        let hears_first = !matches!(op, Op::Inquiry | Op::ReportLuns | Op::RequestSense);
        if hears_first && let Some(sense) = unit.attentions.take() {
            return Err(self.attention(unit, op, head, sense));
        }
        reserve::check(unit, op, cdb).map_err(refused)?;
        cdb.check(command).map_err(refused)?;
        if op.uses_medium() {
            if unit.access.is_exclusive() {
                return Ok(Way::Waits(op));
            }
            // It is found by whoever excludes others from now on, and looks for this no more.
            self.queue.tasks.takes_medium_at_once(arrived);
        }
        Ok(match op {
            Op::Read if !cdb.asks_fua() => Way::Read,
            Op::Write => Way::Write,
            _ => Way::Other(op),
        })
    }

    /// A unit attention says that the command was not carried out, which nobody knows of those that
    /// an earlier process had taken. Where it matters, the next command hears it.
    #[cold]
    fn attention(&self, unit: &Unit, op: Op, head: u16, sense: Sense) -> Refused {
        let is_doubtful = matches!(op, Op::CompareAndWrite | Op::ReserveOut);
        if is_doubtful && self.queue.is_done_again(head) {
            unit.attentions.put_back(sense);
            return refused(Sense::PERHAPS_DONE);
        }
        refused(sense)
    }

    /// Waits for the medium, which another command has to itself. What may have changed until then
    /// is looked at again.
    #[cold]
    async fn wait_for_medium(
        &self,
        local: &LocalUnit,
        op: Op,
        cdb: &Cdb,
        task: Task<'_>,
    ) -> Result<(), Failure> {
        local.unit.access.pass().await;
        task.check()?;
        reserve::check(&local.unit, op, cdb)?;
        self.queue.tasks.takes_medium(task.number);
        Ok(())
    }

    /// Carries out a command that is no plain transfer, or is one that has to wait for others.
    async fn execute(
        &self,
        local: Rc<LocalUnit>,
        (op, waits): (Op, bool),
        header: Header,
        number: usize,
        data: Data,
    ) -> Served {
        let (local, cdb) = (&*local, &header.cdb);
        let task = Task { tasks: &self.queue.tasks, number };
        if waits && let Err(failure) = self.wait_for_medium(local, op, cdb, task).await {
            return (RequestKind::Other, Err(refused(failure)));
        }
        let plain = |moved: Moved| moved.map(Done::from);
        let (kind, done) = match op {
            Op::Read => (RequestKind::Read, plain(block::read(local, cdb, task, data.into).await)),
            Op::Write => (RequestKind::Write, plain(block::write(local, cdb, data.out).await)),
            Op::SynchronizeCache => {
                (RequestKind::Flush, plain(block::synchronize(local, cdb).await))
            }
            Op::Unmap => (RequestKind::Discard, unmap::unmap(local, cdb, task, data).await),
            Op::WriteSame => {
                (RequestKind::WriteZeroes, block::write_same(local, cdb, task, data).await)
            }
            Op::WriteAndVerify => {
                let moved = block::write_and_verify(local, cdb, task, data).await;
                (RequestKind::Write, plain(moved))
            }
            Op::CompareAndWrite => {
                let done = block::compare_and_write(local, cdb, task, data).await;
                (RequestKind::Write, done)
            }
            Op::Verify => (RequestKind::Read, block::verify(local, cdb, task, data).await),
            Op::StartStopUnit => (RequestKind::Other, plain(block::start_stop(local, cdb).await)),
            Op::ModeSelect => {
                let moved = mode::select(local, cdb, task, data).await;
                (RequestKind::Other, plain(moved))
            }
            Op::ReserveOut => {
                let out = reserve::reserve_out(&self.queue.io, local, cdb, task, data);
                (RequestKind::Other, plain(out.await))
            }
            _ => {
                let moved = answer(self.device.units(), &local.unit, op, cdb, &data);
                (RequestKind::Other, plain(moved))
            }
        };
        (kind, done.map_err(refused))
    }

    /// The chain cannot be answered: what the driver finds in its response must not be a success.
    #[cold]
    fn give_up(&self, queue: &Queue, head: u16) {
        self.queue.tasks.skip(queue.next_avail());
        queue.push_unanswered(head);
    }

    /// Answers what no unit carries out.
    #[cold]
    fn answer_alone(&self, header: Option<&Header>, data: &Data) -> Result<Done, Refused> {
        let Some(header) = header else {
            return Err(refused(Failure::Malformed("the header is incomplete")));
        };
        if data.is_both_ways() {
            return Err(refused(Failure::BOTH_WAYS));
        }
        let units = self.device.units();
        let moved = match header.address {
            Address::ReportLuns => report::well_known(units, &header.cdb, data),
            Address::Invalid => Err(Failure::BadTarget),
            Address::Unit(address) => report::no_unit(units, address, &header.cdb, data),
        };
        moved.map(Done::from).map_err(refused)
    }
}

/// How a task goes on.
enum Way {
    Read,
    Write,
    Other(Op),
    /// Another command has the medium to itself.
    Waits(Op),
}

/// What has come of a command, and what it counts as.
type Served = (RequestKind, Result<Done, Refused>);

/// What has come of a command that an earlier process may have carried out before it could answer.
/// One whose success makes it fail the second time has perhaps succeeded.
#[cold]
fn done_again(op: Op, (kind, done): Served) -> Served {
    let failure = done.as_ref().err().map(|refused| &**refused);
    let is_doubtful = match (op, failure) {
        (Op::CompareAndWrite, Some(Failure::Check(sense))) => sense.is_miscompare(),
        (Op::ReserveOut, Some(Failure::Conflict)) => true,
        _ => false,
    };
    let doubt = || Err(refused(Sense::PERHAPS_DONE));
    (kind, if is_doubtful { doubt() } else { done })
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

    fn stop(&self, _: &Queue) {
        self.queue.set_ending(true);
    }

    fn go_on(&self) {
        self.queue.set_ending(false);
    }

    /// Serves one chain: reads the header, does what the CDB says, writes the response, pushes the
    /// chain.
    async fn serve(self: Rc<Self>, queue: Rc<Queue>, mut chain: Chain) {
        let head = chain.head;
        let sense_bytes: usize = iomem::fits(self.device.sense_size(), "a size of sense data");
        let response = chain.writable.take_shared_bytes(FIXED_RESPONSE_BYTES + sense_bytes);
        let (Some(response), None) = (response, &chain.fault) else {
            return self.give_up(&queue, head);
        };
        let header = self.header(&mut chain.readable);
        let room = [chain.readable.bytes(), chain.writable.bytes()];
        let answer =
            Answer { scsi: &self, queue: &queue, head, response, room, memory: chain.memory };
        let tasks = &self.queue.tasks;
        let Some(header @ Header { address: Address::Unit(address), tag, .. }) = header else {
            tasks.skip(queue.next_avail());
            let data = Data { out: chain.readable, into: chain.writable };
            answer.give(None, (RequestKind::Other, self.answer_alone(header.as_ref(), &data)));
            return;
        };
        let local = self.queue.unit(address);
        let unit = local.as_ref().map(|local| local.unit.number);
        let mut arrived = tasks.arrive(address, unit, tag, queue.next_avail());
        let (ended, (kind, done)) = match self.way(local, &header.cdb, room, (&mut arrived, head)) {
            Ok((local, way)) => {
                let task = tasks.begin(arrived);
                let served = match way {
                    Way::Read => {
                        let range = block::begin_read(&local, &header.cdb, &mut chain.writable);
                        let moved = match range {
                            Ok(Some(range)) => {
                                let result = local.disk.read(range.offset, chain.writable).await;
                                block::end_read(&local, range, result).map_err(refused)
                            }
                            Ok(None) => Ok(0),
                            Err(refused) => Err(refused),
                        };
                        (RequestKind::Read, moved.map(Done::from))
                    }
                    Way::Write => {
                        let write = block::begin_write(&local, &header.cdb, &mut chain.readable);
                        let moved = match write {
                            Ok(Some(Write { range, fua })) => {
                                let out = chain.readable;
                                let result = local.disk.write(range.offset, out, fua).await;
                                block::end_write(&local, range, result).map_err(refused)
                            }
                            Ok(None) => Ok(0),
                            Err(refused) => Err(refused),
                        };
                        (RequestKind::Write, moved.map(Done::from))
                    }
                    Way::Other(op) | Way::Waits(op) => {
                        let data = Data { out: chain.readable, into: chain.writable };
                        let how = (op, matches!(way, Way::Waits(_)));
                        let served = Box::pin(self.execute(local, how, header, task, data)).await;
                        if queue.is_done_again(head) { done_again(op, served) } else { served }
                    }
                };
                (tasks.end(task), served)
            }
            Err(refused) => {
                let data = Data { out: chain.readable, into: chain.writable };
                let alone = || self.answer_alone(Some(&header), &data);
                (tasks.end_at_once(&arrived), (RequestKind::Other, refused.map_or_else(alone, Err)))
            }
        };
        let done = ended.abort.map_or(done, |abort| Err(refused(Failure::Aborted(abort))));
        answer.give(Some(address), (kind, done));
        // Whoever waits for the task answers on another queue, and this answer comes first.
        ended.tell(|| queue.publish_early());
    }
}

/// What is needed to answer a chain.
struct Answer<'a> {
    scsi: &'a Scsi,
    queue: &'a Queue,
    head: u16,
    response: SharedBytes,
    /// Bytes of data in both directions.
    room: [usize; 2],
    memory: LocalMemory,
}

impl Answer<'_> {
    /// Answers a command for a unit or for none: counts it, writes its response, pushes its chain.
    #[inline]
    fn give(&self, unit: Option<UnitAddress>, (kind, done): Served) {
        let [out, into] = self.room;
        let all = out + into;
        let response_bytes = self.response.bytes();
        let moved = match done {
            Ok(done) if self.memory.is_intact() => {
                self.queue.count(kind, done.medium_bytes);
                if done.moved == all {
                    self.response.zero();
                } else {
                    let mut bytes = [0; RESIDUAL.end];
                    bytes[RESIDUAL].copy_from_slice(&residual(all - done.moved));
                    self.response.write(&bytes);
                }
                done.moved
            }
            // What was read from memory that is gone were zeroes, and what was written is lost.
            Ok(_) => self.fail(unit, kind, &Failure::MemoryGone),
            Err(failure) => self.fail(unit, kind, &failure),
        };
        let data = if into > 0 { moved } else { 0 };
        self.queue.push(self.head, iomem::fits(response_bytes + data, "bytes of a chain"));
    }

    /// Writes the response of a command that has failed. Returns what it has transferred even so.
    #[cold]
    fn fail(&self, unit: Option<UnitAddress>, kind: RequestKind, failure: &Failure) -> usize {
        let moved = failure.moved();
        let local = unit.and_then(|unit| self.scsi.queue.unit(unit));
        let format = local.map_or(Format::Fixed, |local| local.unit.sense_format());
        let mut bytes = [0; FIXED_RESPONSE_BYTES + SENSE_BYTES];
        put(failure, format, self.response.bytes() - FIXED_RESPONSE_BYTES, &mut bytes);
        let [out, into] = self.room;
        bytes[RESIDUAL].copy_from_slice(&residual(out + into - moved));
        self.response.write(&bytes);
        if failure.is_usual() {
            self.queue.refuse(kind);
        } else {
            self.queue.fail(kind, failure);
        }
        moved
    }
}

#[inline]
fn residual(bytes: usize) -> [u8; 4] {
    u32::try_from(bytes).unwrap_or(u32::MAX).to_le_bytes()
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
fn split(bytes: &[u8; KEPT_HEADER_BYTES]) -> Header {
    Header {
        address: Address::parse(part(bytes, 0)),
        tag: u64::from_le_bytes(part(bytes, 8)),
        cdb: Cdb(part(bytes, FIXED_HEADER_BYTES)),
    }
}

#[inline]
fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    *bytes[at..].first_chunk().expect("it is in there")
}
