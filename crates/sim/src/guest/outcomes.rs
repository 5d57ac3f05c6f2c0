//! Checks of a virtio-scsi device's answers.

use std::cell::Ref;
use std::rc::{Rc, Weak};

use device::unit_address::UnitAddress;

use super::scsi::{CommandRecord, Scsi};
use super::{Guest, Outstanding, State};
use crate::chain_request::ChainRequest;
use crate::content::SECTOR;
use crate::disk::RequestOutcome;
use crate::plan::FIRST_REQUEST_QUEUE;
use crate::scsi::attentions::CauseOutcome;
use crate::scsi::command::{Command, Kind};
use crate::scsi::function::{self, Function};
use crate::scsi::reservations::Needs;
use crate::scsi::{
    ABORTED, BAD_TARGET, EVENT_QUEUE, FAILURE, Outcome, RESET, RESPONSE, SENSE, UNIT_ATTENTION,
};
use crate::timeline::Timeline;

/// Responses to functions.
const COMPLETE: u8 = 0;
const SUCCEEDED: u8 = 10;
const INCORRECT_LUN: u8 = 12;

const NO_UNIT: Outcome = Outcome::Check(5, [0x25, 0]);
const NO_TARGET: Outcome = Outcome::Response(BAD_TARGET);
/// The command was taken before, by a queue that has left it or a daemon that has died.
const PERHAPS_DONE: Outcome = Outcome::Check(11, [0, 6]);

/// Begin and end of an action.
type Span = (u64, u64);

impl Guest {
    /// Checks the answer to a command, of which the device has written `len` bytes.
    pub(super) fn check_command(
        &self,
        state: &mut State,
        command: &Command,
        (begin, end): Span,
        len: usize,
        answer: &[u8],
    ) -> Result<(), String> {
        let Some((response, data)) = answer.split_at_checked(RESPONSE + SENSE) else {
            return Err("the response is incomplete".into());
        };
        let outcome = Outcome::decode(response)?;
        self.trace(|| format!("command {} is answered: {outcome:?}", command.id));
        let ending = self.judge(state, command, outcome, (begin, end))?;
        let address = state.scsi.units[command.unit].address;
        state.scsi.done.push(CommandRecord { address, tag: command.tag, begin, end });
        let moved = if outcome == Outcome::Good { command.moved } else { 0 };
        let residual = u32::from_le_bytes([response[4], response[5], response[6], response[7]]);
        let out = command.message.readable.len() - command.message.header;
        // The device knows no data of a chain with a flaw.
        let has_flaw = command.message.flaw.is_some();
        let expected = if has_flaw { 0 } else { out + data.len() - moved };
        if ending != RequestOutcome::Failed && usize::try_from(residual) != Ok(expected) {
            return Err(format!("the residual is {residual}, not {expected}"));
        }
        let written = response.len() + if data.is_empty() { 0 } else { moved };
        if ending != RequestOutcome::Failed && len != written {
            return Err(format!("the used length is {len}, not {written}"));
        }
        let disk = &self.disks[command.unit];
        let through = disk.shared().write_through_since() < begin;
        disk.end(begin, end, ending, through)?;
        match command.kind {
            _ if ending != RequestOutcome::Done => {}
            Kind::Read => {
                for (sector, bytes) in command.sectors().zip(data.chunks(SECTOR)) {
                    disk.read(sector, bytes, begin, end)?;
                }
            }
            Kind::CompareAndWrite => {
                let pairs = command.sectors().zip(&command.expects);
                pairs.for_each(|(sector, was)| {
                    disk.record_swap(sector, *was, command.id, begin, end)
                });
            }
            _ => {}
        }
        Ok(())
    }

    /// Checks that a command may have this outcome, and returns the effect on the disk.
    fn judge(
        &self,
        state: &State,
        command: &Command,
        outcome: Outcome,
        (begin, end): Span,
    ) -> Result<RequestOutcome, String> {
        let disk = &self.disks[command.unit];
        let unit = &state.scsi.units[command.unit];
        let wrong = || Err(format!("it ends with {outcome:?}"));
        if let Outcome::Response(response @ (ABORTED | RESET)) = outcome {
            disk.shared_mut().end(command, None, (begin, end))?;
            let is_right = self.is_aborted(state, command, response, (begin, end));
            return if is_right { Ok(RequestOutcome::Aborted) } else { wrong() };
        }
        if outcome == PERHAPS_DONE {
            let mut shared = disk.shared_mut();
            shared.end(command, None, (begin, end))?;
            let is_one = matches!(command.kind, Kind::CompareAndWrite | Kind::Reserve(_));
            let is_again = shared.was_marked(begin) || shared.has_died((begin, end));
            let is_right = is_one && is_again;
            return if is_right { Ok(RequestOutcome::Aborted) } else { wrong() };
        }
        if matches!(outcome, Outcome::Response(_)) && command.kind == Kind::Bad(outcome) {
            // The command is wrong with or without a unit.
            return Ok(RequestOutcome::Refused);
        }
        let during = || unit.present.during(begin, end);
        if matches!(outcome, NO_UNIT | NO_TARGET) {
            disk.shared_mut().refuse(command, (begin, end))?;
            let is_meant = command.kind == Kind::Bad(outcome);
            let is_right = is_meant || during().any(|is_there| !is_there);
            return if is_right { Ok(RequestOutcome::Refused) } else { wrong() };
        }
        if !during().any(|is_there| *is_there)
            || matches!(command.kind, Kind::Bad(NO_UNIT | NO_TARGET))
        {
            return wrong();
        }
        let mut shared = disk.shared_mut();
        if let Outcome::Check(UNIT_ATTENTION, code) = outcome {
            shared.nexus(self.device).record_report(code, begin, end)?;
            shared.refuse(command, (begin, end))?;
            return Ok(RequestOutcome::Refused);
        }
        shared.nexus(self.device).record_skip(begin, end);
        let is_conflict = outcome == Outcome::Conflict;
        if let Kind::Reserve(_) = command.kind {
            shared.end(command, Some(outcome), (begin, end))?;
            let is_done = outcome == Outcome::Good;
            return Ok(if is_done { RequestOutcome::Done } else { RequestOutcome::Refused });
        }
        let needs = command.needs();
        let [may_pass, may_conflict] = shared.reservations.allows(self.device, needs, begin, end);
        if is_conflict {
            shared.refuse(command, (begin, end))?;
            return if may_conflict { Ok(RequestOutcome::Refused) } else { wrong() };
        }
        if !may_pass && needs != Needs::Nothing {
            return Err(format!("it conflicts with a reservation, and ends with {outcome:?}"));
        }
        shared.end(command, Some(outcome), (begin, end))?;
        let sizes: Vec<u64> = shared.size.during(begin, end).copied().collect();
        drop(shared);
        self.judge_medium(command, outcome, &sizes, (begin, end))
    }

    /// Like [`judge`](Self::judge), for a command that was carried out while the disk had these
    /// sizes.
    fn judge_medium(
        &self,
        command: &Command,
        outcome: Outcome,
        sizes: &[u64],
        (begin, end): Span,
    ) -> Result<RequestOutcome, String> {
        let disk = &self.disks[command.unit];
        let is_read_only = disk.plan.read_only > 0;
        let reads = matches!(command.kind, Kind::Read | Kind::CompareAndWrite);
        let flushes = matches!(command.kind, Kind::Synchronize | Kind::Select(_));
        let writes = command.writes();
        let has_medium = reads || flushes || writes;
        let last = command.sectors().end;
        let fits = |size: &u64| last <= *size;
        let is_right = match (command.kind, outcome) {
            (Kind::Bad(expected), _) => outcome == expected,
            (Kind::Select(true), Outcome::Good) => self.has_cache(command.unit),
            (Kind::Select(true), Outcome::Check(5, [0x26, 0])) => !self.has_cache(command.unit),
            (_, Outcome::Good) => !(writes && is_read_only) && sizes.iter().any(fits),
            (_, Outcome::Check(5, [0x21, 0])) => !sizes.iter().all(fits),
            (_, Outcome::Check(7, [0x27, 0])) => writes && is_read_only,
            (Kind::CompareAndWrite, Outcome::Check(0xe, [0x1d, 0])) => {
                let mut pairs = command.sectors().zip(&command.expects);
                pairs.any(|(sector, value)| !disk.must_have(sector, *value, begin, end))
            }
            // The queue stopped, and any part of the command was done.
            (Kind::WriteSame, Outcome::Busy) => return Ok(RequestOutcome::Aborted),
            (_, Outcome::Check(3, [0x11, 0])) => return failed(reads, outcome),
            (_, Outcome::Check(3, [0x0c, 0])) => return failed(writes || flushes, outcome),
            (_, Outcome::Check(7, [0x27, 7])) => return failed(writes || flushes, outcome),
            (_, Outcome::Check(0xb, [0, 0])) => return failed(has_medium, outcome),
            _ => false,
        };
        // UNMAP gives blocks back in several steps.
        let is_partial = command.kind == Kind::Unmap && sizes.len() > 1;
        match is_right {
            true if is_partial && outcome != Outcome::Good => Ok(RequestOutcome::Aborted),
            true if outcome == Outcome::Good => Ok(RequestOutcome::Done),
            true if sizes.iter().any(fits) && outcome == Outcome::Check(5, [0x21, 0]) => {
                Ok(RequestOutcome::Gone)
            }
            true => Ok(RequestOutcome::Refused),
            false => Err(format!("it ends with {outcome:?}; sizes: {sizes:?}")),
        }
    }

    /// True if a unit was set up with a write cache.
    fn has_cache(&self, disk: usize) -> bool {
        self.disks[disk].plan.no_write_cache == 0
    }

    /// True if a function or another initiator may have aborted a command with this response.
    fn is_aborted(
        &self,
        state: &State,
        command: &Command,
        response: u8,
        (begin, end): Span,
    ) -> bool {
        let address = state.scsi.units[command.unit].address;
        let mut managed = state.scsi.managed.iter();
        let by_function = managed.any(|managed| {
            managed.function.response() == Some(response)
                && managed.function.covers(address, command.tag)
                && managed.begin < end
                && begin < managed.taken.min(managed.end)
        });
        let shared = self.disks[command.unit].shared();
        by_function || shared.may_be_aborted(self.device, response == ABORTED, begin, end)
    }

    /// Checks the response to a function.
    pub(super) fn check_function(
        &self,
        state: &mut State,
        function: &Function,
        (begin, end): Span,
        answer: &[u8],
    ) -> Result<(), String> {
        let [response] = *answer else { return Err("the response is incomplete".into()) };
        self.trace(|| format!("{:?} is answered: {response}", function.kind));
        let units = &state.scsi.units;
        let is_queried =
            matches!(function.kind, function::Kind::QueryTask | function::Kind::QueryTaskSet);
        let mut there = units.iter().filter(|unit| unit.address == function.address);
        let is_absent = there.any(|unit| unit.present.during(begin, end).any(|is_there| !is_there));
        let [may_be_left, is_left] = is_left(&state.scsi, (begin, end));
        let is_right = match response {
            COMPLETE if is_left => false,
            COMPLETE => {
                let covers = |_: &Outstanding, unit, tag| function.covers(unit, tag);
                match self.left_behind(state, covers, (begin, end)) {
                    Some(text) if is_queried => return Err(format!("it does not find {text}")),
                    Some(text) => return Err(format!("it is answered before {text}")),
                    None => true,
                }
            }
            SUCCEEDED => is_queried && is_found(state, function, (begin, end)),
            FAILURE => may_be_left,
            BAD_TARGET | INCORRECT_LUN => is_absent,
            _ => false,
        };
        if !is_right {
            return Err(format!("its response is {response}"));
        }
        if response == COMPLETE && function.is_of_all() {
            self.check_others(state, function, (begin, end))?;
        }
        self.end_function(state, response, (begin, end))
    }

    /// Settles the unit attentions of a function that has ended.
    fn end_function(
        &self,
        state: &mut State,
        response: u8,
        (begin, end): Span,
    ) -> Result<(), String> {
        let Some(managed) = state.scsi.managed.iter_mut().find(|one| one.begin == begin) else {
            return Ok(());
        };
        managed.end = end;
        let resets = managed.function.kind == function::Kind::UnitReset;
        for (disk, attention) in std::mem::take(&mut managed.attentions) {
            let is_due = match attention.0 == self.device {
                true => state.scsi.units[disk].is_there((begin, end)),
                // CLEAR TASK SET raises attentions only for initiators that had tasks.
                false => {
                    resets
                        && self.peers().any(|guest| {
                            let state = guest.state.try_borrow();
                            let is_there = |state: Ref<'_, State>| {
                                state.scsi.units[disk].is_there((begin, end))
                            };
                            guest.device == attention.0 && state.is_ok_and(is_there)
                        })
                }
            };
            let mut shared = self.disks[disk].shared_mut();
            shared.end_abort_all(begin, end);
            shared.cache_may_change(end);
            let came = match response {
                BAD_TARGET | INCORRECT_LUN => CauseOutcome::Not,
                COMPLETE if is_due => CauseOutcome::Surely,
                _ => CauseOutcome::Maybe,
            };
            shared.settle(&[attention], end, came)?;
        }
        Ok(())
    }

    /// The guests that use the same disks.
    fn peers(&self) -> impl Iterator<Item = Rc<Self>> {
        self.peers.get().into_iter().flatten().filter_map(Weak::upgrade)
    }

    /// Checks that the tasks of other initiators are answered, too.
    fn check_others(&self, state: &State, function: &Function, span: Span) -> Result<(), String> {
        let units = state.scsi.units.iter();
        let Some(disk) = units.into_iter().position(|unit| unit.address == function.address) else {
            return Ok(());
        };
        for guest in self.peers().filter(|guest| guest.device != self.device) {
            let Ok(state) = guest.state.try_borrow() else { continue };
            if !state.scsi.units[disk].is_there(span) {
                continue;
            }
            let address = state.scsi.units[disk].address;
            // A chain that the device has not yet popped is no task.
            let is_meant = |outstanding: &Outstanding, unit, _| {
                let popped = outstanding.popped.is_some_and(|popped| popped < span.0);
                popped && unit == address
            };
            if let Some(text) = guest.left_behind(&state, is_meant, span) {
                return Err(format!("it is answered before {text} of device {}", guest.device));
            }
        }
        Ok(())
    }

    /// A task that a function covers and that is unanswered after the function's answer.
    fn left_behind(
        &self,
        state: &State,
        covers: impl Fn(&Outstanding, UnitAddress, u64) -> bool,
        (begin, end): Span,
    ) -> Option<String> {
        let scsi = &state.scsi;
        let queues = state.queues.iter().zip(&scsi.runs).skip(FIRST_REQUEST_QUEUE);
        for (queue, _) in queues.filter(|(_, runs)| runs.during(begin, end).all(|runs| *runs)) {
            for (head, outstanding) in queue.outstanding.iter().enumerate() {
                let Some(outstanding) = outstanding else { continue };
                let Outstanding { request, begin: since, .. } = outstanding;
                let ChainRequest::Command(command) = request else { continue };
                let address = scsi.units[command.unit].address;
                // A command that names no unit is no task of one.
                let is_task = !matches!(command.kind, Kind::Bad(NO_UNIT | NO_TARGET));
                if is_task
                    && *since < begin
                    && covers(outstanding, address, command.tag)
                    && !queue.is_answered(head)
                {
                    return Some(request.to_string());
                }
            }
        }
        None
    }

    /// Checks an event, or a buffer that was returned empty.
    pub(super) fn check_event(
        &self,
        state: &mut State,
        (begin, end): Span,
        answer: &[u8],
    ) -> Result<(), String> {
        self.trace(|| format!("an event: {answer:x?}"));
        let stopped = state.scsi.runs[EVENT_QUEUE].during(begin, end).any(|runs| !runs);
        state.scsi.events.take(answer, stopped)
    }
}

/// Returns two flags. The first is true if a request queue may have been stopped at some time with
/// chains that the device does not know; a queue that has never run has none. The second is true if
/// a queue certainly was so all the time.
fn is_left(scsi: &Scsi, (begin, end): Span) -> [bool; 2] {
    let may_be_left = |line: &Timeline<bool>| {
        line.during(begin, end).any(|runs| !runs) && line.during(scsi.died, end).any(|runs| *runs)
    };
    let runs = &scsi.runs[FIRST_REQUEST_QUEUE..];
    let mut left = scsi.known_stopped[FIRST_REQUEST_QUEUE..].iter();
    let is_left = left.any(|line| line.during(begin, end).all(|left| *left));
    [runs.iter().any(may_be_left), is_left]
}

/// Accepts an error that the disk must explain, if the command may have it.
fn failed(is_right: bool, outcome: Outcome) -> Result<RequestOutcome, String> {
    if is_right { Ok(RequestOutcome::Failed) } else { Err(format!("it ends with {outcome:?}")) }
}

/// True if a task that a function covers was out at some time.
fn is_found(state: &State, function: &Function, (begin, end): Span) -> bool {
    let scsi = &state.scsi;
    let outstanding = state.queues.iter().flat_map(|queue| queue.outstanding.iter().flatten());
    let mut out = outstanding.filter_map(|outstanding| match &outstanding.request {
        ChainRequest::Command(command) => {
            Some((scsi.units[command.unit].address, command.tag, outstanding.begin))
        }
        _ => None,
    });
    let mut done = scsi.done.iter();
    out.any(|(address, tag, since)| function.covers(address, tag) && since < end)
        || done.any(|done| {
            function.covers(done.address, done.tag) && done.begin < end && begin < done.end
        })
}
