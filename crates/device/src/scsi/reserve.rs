//! PERSISTENT RESERVE IN and OUT as commands, and the effect of a reservation on other commands
//! (SPC-5, sections 6.16 and 6.17).

use std::rc::Rc;
use std::sync::Arc;

use blockio::executor::Lock;
use blockio::{Buffers, Io};

use super::cdb::{Cdb, Op};
use super::outcome::{Data, Failure, TaskHandle, Transferred};
use super::request_queue::LocalUnit;
use super::unit::Unit;
use crate::access;
use crate::access::persist::{CDB_BYTES, CommandClass, Refusal, ReserveEffects, list_bytes};
use crate::access::sense::Sense;
use crate::access::task_set::TaskId;

/// The START bit of START STOP UNIT.
const START: u8 = 0x01;
const POWER_CONDITION: u8 = 0xf0;

/// Fails if a reservation excludes this command of the initiator.
#[inline]
pub(super) fn check(unit: &Unit, op: Op, cdb: &Cdb) -> Result<(), Failure> {
    if !unit.attached.is_restricted() { Ok(()) } else { check_class(unit, op, cdb) }
}

#[cold]
fn check_class(unit: &Unit, op: Op, cdb: &Cdb) -> Result<(), Failure> {
    let class = match op {
        Op::Read
        | Op::Verify
        | Op::GetLbaStatus
        | Op::ModeSense
        | Op::ReportOpcodes
        | Op::ReportTaskManagement => CommandClass::Reads,
        Op::Write
        | Op::WriteAndVerify
        | Op::WriteSame
        | Op::CompareAndWrite
        | Op::Unmap
        | Op::SynchronizeCache
        | Op::ModeSelect => CommandClass::Writes,
        Op::StartStopUnit if cdb.byte(4) & (START | POWER_CONDITION) != START => {
            CommandClass::Writes
        }
        Op::PreventAllow if cdb.byte(4) != 0 => CommandClass::Writes,
        Op::StartStopUnit
        | Op::PreventAllow
        | Op::TestUnitReady
        | Op::RequestSense
        | Op::Inquiry
        | Op::ReadCapacity10
        | Op::ReadCapacity16
        | Op::ReportLuns
        | Op::LogSense
        | Op::ReserveIn
        | Op::ReserveOut => CommandClass::Unrestricted,
    };
    if unit.attached.conflicts(class) { Err(Failure::Conflict) } else { Ok(()) }
}

fn short(cdb: &Cdb) -> [u8; CDB_BYTES] {
    std::array::from_fn(|at| cdb.byte(at))
}

pub(super) fn reserve_in(unit: &Unit, cdb: &Cdb, data: &Data) -> Transferred {
    let answer = unit.attached.reservations().reserve_in(&short(cdb))?;
    data.answer(&answer, cdb.u16(7).into())
}

/// Runs on a thread of its own: a change that persists is written to a file first.
pub(super) async fn reserve_out(
    io: &Rc<Io>,
    local: &LocalUnit,
    cdb: &Cdb,
    task: TaskHandle<'_>,
    data: Data,
) -> Transferred {
    let cdb = short(cdb);
    let list = data.list(list_bytes(&cdb)?)?;
    let moved = list.len();
    let change = local.unit.access.begin_reserve_out().ok_or(Failure::Busy)?;
    let unit = Arc::clone(&local.unit);
    let result: Arc<Lock<Option<Result<ReserveEffects, Refusal>>>> = Arc::default();
    let (op, completer) = io.foreign_op(Buffers::empty());
    let there = Arc::clone(&result);
    let carry_out = move || {
        let done = unit.attached.reserve_out(&cdb, &list);
        if let Ok(done) = &done {
            // Other commands meet the new state already, even if this one still waits.
            done.attentions
                .iter()
                .for_each(|(nexus, sense)| unit.access.add_attention(*nexus, *sense));
        }
        *there.lock() = Some(done);
        drop(unit);
        completer.complete(Ok(0));
    };
    if Io::start_thread("ringhaul-reserve", carry_out).is_err() {
        // The completer was dropped with the closure, which was never called.
        return Err(Failure::Busy);
    }
    op.await;
    let done = result.lock().take();
    match done {
        Some(Ok(done)) => {
            end_aborted(&local.unit, &done, task.id()).await;
            drop(change);
            Ok(moved)
        }
        Some(Err(Refusal::Conflict)) => Err(Failure::Conflict),
        Some(Err(Refusal::Check(sense))) => Err(sense.into()),
        Some(Err(Refusal::NotSaved(error))) => Err(error.into()),
        None => Err(Sense::NOT_SAVED.into()),
    }
}

/// Returns when no use of the disk violates the new state and the tasks of preempted initiators
/// have ended. These initiators are notified.
async fn end_aborted(unit: &Unit, done: &ReserveEffects, task: TaskId) {
    let (shared, own) = (&unit.access, unit.attached.nexus());
    shared.reservation_changed().await;
    let is_meant = |nexus| done.aborted.contains(&nexus);
    let ended = shared.end_tasks((own, task), is_meant).await;
    access::notify_cleared(&ended, own);
}
