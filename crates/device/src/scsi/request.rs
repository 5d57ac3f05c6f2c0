//! One command (virtio 1.3, section 5.6.6.1), from its chain to its response.

mod earlier;

use std::rc::Rc;

use blockio::Io;
use blockio::disk::WaitMode;
use iomem::{Buffers, SharedBytes};
use virtqueue::Chain;

use super::answer::{Outcome, Request, response_bytes};
use super::cdb::{Cdb, KEPT_BYTES, Op};
use super::outcome::{Data, Effect, Failure, Refused, TaskHandle, Transferred, refused};
use super::request_queue::{LocalUnit, RequestQueue};
use super::task_wait::DiskTask;
use super::unit::Unit;
use super::units::Units;
use super::{ScsiDevice, block, inquiry, mode, report, reserve, unmap, verify};
use crate::access::sense::Sense;
use crate::access::task_set::Ended;
use crate::queue::Queue;
use crate::queue::queue_setup::StopKind;
use crate::queue::queue_task::Handler;
use crate::stats::RequestKind;
use crate::unit_address::Address;

/// Bytes before the CDB.
const FIXED_HEADER_BYTES: usize = 19;
const KEPT_HEADER_BYTES: usize = FIXED_HEADER_BYTES + KEPT_BYTES;

/// The handler of one request queue.
pub(crate) struct RequestHandler {
    device: ScsiDevice,
    queue: Rc<RequestQueue>,
}

/// The header of a request.
struct Header {
    address: Address,
    tag: u64,
    cdb: Cdb,
}

/// Offsets of the address, the tag and the two kept halves of the CDB.
const WORDS: [usize; 4] = [0, 8, FIXED_HEADER_BYTES, FIXED_HEADER_BYTES + 8];

impl Header {
    /// Creates a header from the words at [`WORDS`], in the byte order of memory.
    #[inline]
    fn from_words([address, tag, first, second]: [u64; WORDS.len()]) -> Self {
        Self {
            address: Address::parse(address.to_le_bytes()),
            tag,
            cdb: Cdb::from_words([first, second]),
        }
    }
}

impl RequestHandler {
    /// Creates the handler of queue `index` of `device` on this IoThread.
    pub(crate) fn new(device: &ScsiDevice, index: u16, io: &Rc<Io>, queue: &Rc<Queue>) -> Self {
        Self { device: device.clone(), queue: device.start_queue(index, io, queue) }
    }

    /// Takes off the bytes of the response. `None` if the chain has no room for it.
    #[inline]
    fn response(&self, chain: &mut Chain) -> Option<SharedBytes> {
        chain.writable.take_shared_bytes(response_bytes(self.device.sense_size()))
    }

    #[inline]
    fn header(&self, readable: &mut Buffers) -> Option<Header> {
        let cdb_size: usize = iomem::fits(self.device.cdb_size(), "a size of CDBs");
        let whole = FIXED_HEADER_BYTES + cdb_size;
        if cdb_size >= KEPT_BYTES {
            return readable.take_words(WORDS, whole).map(Header::from_words);
        }
        if readable.bytes() < whole {
            return None;
        }
        let mut bytes = [0; KEPT_HEADER_BYTES];
        readable.copy_to(0, &mut bytes[..whole]);
        readable.advance(whole);
        let word = |at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().expect("in there"));
        let header = Header::from_words(WORDS.map(word));
        Some(Header { cdb: header.cdb.cut_to(cdb_size), ..header })
    }

    /// Begins a command, up to its first wait.
    #[inline(always)]
    fn begin(
        &self,
        queue: &Queue,
        header: Option<Header>,
        chain: &mut Chain,
        request: &mut Request,
    ) -> Begun {
        let (tasks, head) = (&self.queue.tasks, request.head);
        let next_chain = queue.next_chain();
        let Some(header @ Header { address: Address::Unit(address), tag, cdb }) = header else {
            let header = header.ok_or_else(|| no_header(chain));
            return slow(Slow::WithoutUnit(header, tasks.skip(next_chain)));
        };
        request.local = self.queue.unit(address);
        let local = request.local.as_deref();
        let unit = local.map(|local| local.unit.number);
        let task =
            match tasks.begin(head, (address, unit), tag, next_chain, || queue.publish_early()) {
                Ok(task) => task,
                // The ended task carries the abort.
                Err((task, _)) => return ends(tasks.end(task), RequestKind::Other, None),
            };
        let is_both_ways = !request.room.contains(&0);
        let Some(local) = local.filter(|_| !is_both_ways) else {
            if unit.is_none() && !is_both_ways && self.is_held(head, &cdb) {
                return slow(Slow::Held(header, task));
            }
            return slow(Slow::WithoutUnit(Ok(header), tasks.end(task)));
        };
        let (kind, refused) = match self.admit(local, &cdb, (task, head)) {
            Ok(Route::Read) => match block::begin_read(local, &cdb, &mut chain.writable) {
                Ok(Some(range)) => {
                    request.range = range;
                    return Begun::Read { task };
                }
                nothing => (RequestKind::Read, nothing.err()),
            },
            Ok(Route::Write) => match block::begin_write(local, &cdb, &mut chain.readable) {
                Ok(Some(write)) => {
                    request.range = write.range;
                    return Begun::Write { task, fua: write.fua };
                }
                nothing => (RequestKind::Write, nothing.err()),
            },
            Ok(route @ (Route::Other(op) | Route::Waits(op))) => {
                let how = (op, matches!(route, Route::Waits(_)));
                return slow(Slow::Other { how, cdb, task });
            }
            Err(refused) => (RequestKind::Other, Some(refused)),
        };
        ends(tasks.end(task), kind, refused)
    }

    /// Chooses the route of a command, if the unit carries it out now.
    #[inline]
    fn admit(
        &self,
        local: &LocalUnit,
        cdb: &Cdb,
        (task, head): (u16, u16),
    ) -> Result<Route, Refused> {
        let unit = &local.unit;
        let refusal = |sense| refused(unit.attentions.take().unwrap_or(sense));
        let command = cdb.command().map_err(refusal)?;
        let op = command.op;
        if unit.attentions.has_any()
            && !matches!(op, Op::Inquiry | Op::ReportLuns | Op::RequestSense)
            && let Some(sense) = unit.attentions.take()
        {
            return Err(self.attention(unit, op, head, sense));
        }
        reserve::check(unit, op, cdb).map_err(refused)?;
        cdb.check(command).map_err(refused)?;
        if !op.uses_medium() {
            self.queue.tasks.clear_medium_use(task);
            return Ok(Route::Other(op));
        }
        // A command that takes the medium after this check finds the task.
        if unit.access.is_exclusive() {
            self.queue.tasks.clear_medium_use(task);
            return Ok(Route::Waits(op));
        }
        Ok(match op {
            Op::Read if !cdb.asks_fua() => Route::Read,
            Op::Write => Route::Write,
            _ => Route::Other(op),
        })
    }

    /// Delivers a unit attention, which implies that the command was not carried out. For commands
    /// that an earlier process took, that is unknown: if it matters, the attention stays for the
    /// next command.
    #[cold]
    fn attention(&self, unit: &Unit, op: Op, head: u16, sense: Sense) -> Refused {
        let is_doubtful = matches!(op, Op::CompareAndWrite | Op::ReserveOut);
        if is_doubtful && self.queue.is_recovered(head) {
            unit.attentions.put_back(sense);
            return refused(Sense::PERHAPS_DONE);
        }
        refused(sense)
    }

    /// Waits for the medium, which another command has to itself, and checks the reservations
    /// again.
    #[cold]
    async fn wait_for_medium(
        &self,
        local: &LocalUnit,
        op: Op,
        cdb: &Cdb,
        task: TaskHandle<'_>,
    ) -> Result<(), Failure> {
        DiskTask::new(local, task).pass_medium().await?;
        reserve::check(&local.unit, op, cdb)?;
        self.queue.tasks.mark_medium_use(task.number);
        Ok(())
    }

    /// Carries out a command that is no plain transfer, or that must wait for other commands.
    async fn execute(
        &self,
        local: &LocalUnit,
        (op, waits): (Op, bool),
        cdb: &Cdb,
        number: u16,
        data: Data,
    ) -> Outcome {
        let task = TaskHandle { tasks: &self.queue.tasks, number };
        if waits && let Err(failure) = self.wait_for_medium(local, op, cdb, task).await {
            return (RequestKind::Other, Err(refused(failure)));
        }
        let plain = |moved: Transferred| moved.map(Effect::from);
        let (kind, done) = match op {
            Op::Read => (RequestKind::Read, plain(block::read(local, cdb, task, data.into).await)),
            Op::Write => {
                (RequestKind::Write, plain(block::write(local, cdb, task, data.out).await))
            }
            Op::SynchronizeCache => {
                (RequestKind::Flush, plain(block::synchronize(local, cdb).await))
            }
            Op::Unmap => (RequestKind::Discard, unmap::unmap(local, cdb, task, data).await),
            Op::WriteSame => {
                (RequestKind::WriteZeroes, block::write_same(local, cdb, task, data).await)
            }
            Op::WriteAndVerify => {
                let moved = verify::write_and_verify(local, cdb, task, data).await;
                (RequestKind::Write, plain(moved))
            }
            Op::CompareAndWrite => {
                let done = verify::compare_and_write(local, cdb, task, data).await;
                (RequestKind::Write, done)
            }
            Op::Verify => (RequestKind::Read, verify::verify(local, cdb, task, data).await),
            Op::StartStopUnit => (RequestKind::Other, plain(block::start_stop(local, cdb).await)),
            Op::GetLbaStatus => {
                (RequestKind::Other, plain(report::lba_status(local, cdb, &data).await))
            }
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

    /// Serves a command that is no plain transfer.
    async fn serve_slowly(
        &self,
        queue: &Queue,
        request: &Request,
        slow: Box<Slow>,
        data: Data,
    ) -> (Ended, Outcome) {
        match *slow {
            Slow::Other { how, cdb, task } => {
                let served = self.execute(request.local(), how, &cdb, task, data).await;
                let again = queue.is_recovered(request.head);
                let served = if again { judge_recovered(how.0, served) } else { served };
                (self.queue.tasks.end(task), served)
            }
            Slow::Ended(ended, served) => (ended, served),
            Slow::Held(header, task) => {
                self.serve_held(queue, request.head, &header, task, data).await
            }
            Slow::WithoutUnit(header, ended) => {
                (ended, (RequestKind::Other, self.answer_without_unit(header, &data)))
            }
        }
    }

    /// Pushes a chain without room for an answer: the driver must find no success in its response.
    #[cold]
    fn push_unanswered(&self, queue: &Queue, chain: &Chain) {
        let ended = self.queue.tasks.skip(queue.next_chain());
        queue.push_unanswered(chain.head, chain.fault);
        ended.end_waits_after(|| queue.publish_early());
    }

    /// Answers a command that no unit carries out.
    #[cold]
    fn answer_without_unit(
        &self,
        header: Result<Header, Refused>,
        data: &Data,
    ) -> Result<Effect, Refused> {
        let header = header?;
        if data.is_both_ways() {
            return Err(refused(Failure::BOTH_WAYS));
        }
        let units = self.device.units();
        let moved = match header.address {
            Address::ReportLuns => report::well_known(units, &header.cdb, data),
            Address::Invalid => Err(Failure::BadTarget),
            Address::Unit(address) => report::no_unit(units, address, &header.cdb, data),
        };
        moved.map(Effect::from).map_err(refused)
    }
}

/// The route of an admitted command.
#[derive(Clone, Copy)]
enum Route {
    Read,
    Write,
    Other(Op),
    /// The medium belongs to another command.
    Waits(Op),
}

/// Adjusts the result of a command that an earlier process may have carried out before it could
/// answer. A command that fails after its own success has perhaps succeeded.
#[cold]
fn judge_recovered(op: Op, (kind, done): Outcome) -> Outcome {
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
fn answer(units: &Units, unit: &Unit, op: Op, cdb: &Cdb, data: &Data) -> Transferred {
    match op {
        Op::TestUnitReady => block::check_ready(unit).map(|()| 0),
        Op::RequestSense => report::request_sense(unit, cdb, data),
        Op::Inquiry => inquiry::inquiry(unit, cdb, data),
        Op::ModeSense => mode::sense(unit, cdb, data),
        Op::LogSense => report::log_sense(cdb, data),
        // The medium is not removable.
        Op::PreventAllow => Ok(0),
        Op::ReadCapacity10 => report::read_capacity10(unit, data),
        Op::ReadCapacity16 => report::read_capacity16(unit, cdb, data),
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
        | Op::GetLbaStatus
        | Op::ModeSelect
        | Op::ReserveOut => unreachable!("they may wait"),
    }
}

impl Handler for RequestHandler {
    fn ring_broken(&self) {
        self.queue.tasks.drop_covers();
    }

    fn stop(&self, _: &Queue, kind: StopKind) {
        self.queue.set_wait_mode(kind.wait_mode());
    }

    fn waiting_count(&self, _: &Queue) -> usize {
        self.queue.tasks.suspended()
    }

    fn resume(&self) {
        self.queue.set_wait_mode(WaitMode::All);
    }

    /// Serves one chain: reads the header, executes the CDB, writes the response, pushes the chain.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` moves its parameters once more")]
    fn serve(self: Rc<Self>, queue: Rc<Queue>, mut chain: Chain) -> impl Future<Output = ()> {
        async move {
            let Some(response) = self.response(&mut chain) else {
                return self.push_unanswered(&queue, &chain);
            };
            let header = self.header(&mut chain.readable);
            let room = [chain.readable.bytes(), chain.writable.bytes()];
            let mut request =
                Request::new((chain.head, queue.pop_time(chain.head)), response, room);
            let begun = self.begin(&queue, header, &mut chain, &mut request);
            let tasks = &self.queue.tasks;
            let (ended, served) = match begun {
                Begun::Read { task } => {
                    let local = request.local();
                    let task = TaskHandle { tasks, number: task };
                    let disk_task = DiskTask::new(local, task);
                    let disk = local.disk.with_requester(&disk_task);
                    let mut result = disk.read(request.range.offset, chain.writable).await;
                    if let Err(failed) = result {
                        let retried = block::retry_blocks(disk, task, request.range, failed);
                        result = Err(Box::pin(retried).await);
                    }
                    let moved = block::end_read(local, request.range, result).map_err(refused);
                    (tasks.end(task.number), (RequestKind::Read, moved.map(Effect::from)))
                }
                Begun::Write { task, fua } => {
                    let local = request.local();
                    let disk_task = DiskTask::new(local, TaskHandle { tasks, number: task });
                    let disk = local.disk.with_requester(&disk_task);
                    let result = disk.write(request.range.offset, chain.readable, fua).await;
                    let mut moved = block::end_write(local, request.range, result).map_err(refused);
                    if moved.is_ok()
                        && block::needs_flush(local, fua)
                        && let Err(failure) = Box::pin(block::flush(local)).await
                    {
                        moved = Err(refused(failure));
                    }
                    (tasks.end(task), (RequestKind::Write, moved.map(Effect::from)))
                }
                Begun::Slow(slow) => {
                    let data = Data { out: chain.readable, into: chain.writable };
                    Box::pin(self.serve_slowly(&queue, &request, slow, data)).await
                }
            };
            request.answer(&queue, &chain.memory, ended.abort, served);
            // A removal of the unit waits for the task, and then relies on the disk being unused.
            request.local = None;
            // Waits for the task are answered on another queue, and this answer comes first.
            ended.end_waits_after(|| queue.publish_early());
        }
    }
}

/// A command that has begun.
enum Begun {
    Read {
        task: u16,
    },
    Write {
        task: u16,
        fua: bool,
    },
    /// No plain transfer: a pointer, since every plain transfer moves this enum too.
    Slow(Box<Slow>),
}

/// A command that is no plain transfer.
enum Slow {
    /// The arguments of [`RequestHandler::execute`].
    Other {
        how: (Op, bool),
        cdb: Cdb,
        task: u16,
    },
    Ended(Ended, Outcome),
    /// A command that an earlier process took, for a unit that is not there yet.
    Held(Header, u16),
    /// A command that is answered without a unit.
    WithoutUnit(Result<Header, Refused>, Ended),
}

/// The failure of a request without a header.
#[cold]
fn no_header(chain: &Chain) -> Refused {
    let incomplete = Failure::Malformed("the header is incomplete");
    refused(chain.fault.map_or(incomplete, Failure::from))
}

#[cold]
fn slow(slow: Slow) -> Begun {
    Begun::Slow(Box::new(slow))
}

/// Ends a command at once: a transfer of no blocks, or a refused or aborted command.
#[cold]
fn ends(ended: Ended, kind: RequestKind, refused: Option<Refused>) -> Begun {
    slow(Slow::Ended(ended, (kind, refused.map_or(Ok(Effect::from(0)), Err))))
}
