//! A disk as its guests know it: their requests and the answers.

use std::cell::{Ref, RefCell, RefMut};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use blockio::disk::{DiskInfo, Limits, Rate, Rates};
use blockio::{DiskSource, EngineKind};
use iomem::fits;

use crate::attribution::{self, FailedRequest};
use crate::content::{Value, describe, initial, value_of};
use crate::converted_disk;
use crate::failure::Failure;
use crate::history::{History, NEVER, WriteRef};
use crate::plan::Plan;
use crate::request::DiskEffect;
use crate::scsi::shared::SharedDisk;
use crate::world::World;

/// The end of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestOutcome {
    Done,
    /// Failed with an error that has a cause.
    Failed,
    /// Any part of it was carried out.
    Aborted,
    /// Not carried out.
    Refused,
    /// Not carried out, because its blocks went away while it was out.
    Gone,
}

/// A request that is out.
struct Open {
    effect: DiskEffect,
    writes: Vec<WriteRef>,
}

struct State {
    history: History,
    /// Requests that are out, by the time of their begin.
    open: BTreeMap<u64, Open>,
    failed: Vec<FailedRequest>,
    /// The time since which each write is on stable storage at its answer.
    write_through_since: u64,
    /// The time of the last answer to a request that began before data was lost.
    loss_told: u64,
}

pub(crate) struct Disk {
    pub(crate) plan: Plan,
    pub(crate) index: usize,
    world: Rc<World>,
    pub(crate) source: DiskSource,
    /// The file at the bottom of the source.
    file: DiskSource,
    state: RefCell<State>,
    /// State that the nexuses of virtio-scsi share.
    shared: RefCell<SharedDisk>,
}

/// An engine by its number in a plan.
fn engine(number: u64) -> EngineKind {
    match number {
        0 => EngineKind::Aio,
        1 => EngineKind::Threads,
        _ => EngineKind::IoUring,
    }
}

impl Disk {
    /// Disk number `index` with its plan. `file` stands for it.
    pub(crate) fn new(plan: &Plan, world: &Rc<World>, index: usize, file: OwnedFd) -> Self {
        let block = fits(plan.block_bytes(), "the size of a block");
        let info = DiskInfo {
            size_bytes: plan.sectors() * 512,
            logical_block_bytes: block,
            physical_block_bytes: block,
            read_only: plan.read_only > 0,
            direct: plan.direct > 0,
        };
        let (memory_align, request_align) =
            if plan.direct > 0 { (plan.memory_align(), block) } else { (1, 1) };
        let is_block = plan.block_device > 0;
        let file = DiskSource::simulated(file, info, is_block, memory_align, request_align);
        let source =
            if plan.converts > 0 { converted_disk::new(file.clone(), world) } else { file.clone() };
        let source = source.prefer_engine(engine(plan.engine_of(index)), "the plan says so");
        if plan.limits > 0 {
            let total = Some(Rate { per_second: plan.limits, burst: None });
            let requests = Rates { total, ..Rates::default() };
            source.set_limits(&Limits { requests, ..Limits::default() }).expect("it is a rate");
        }
        let content = (0..plan.sectors()).map(|sector| {
            match value_of(&world.content(index, sector), sector) {
                Some(value) if value == initial(index) => value,
                _ => Value::Zero,
            }
        });
        let state = State {
            history: History::new(content),
            open: BTreeMap::new(),
            failed: Vec::new(),
            write_through_since: NEVER,
            loss_told: 0,
        };
        let (plan, world) = (plan.clone(), Rc::clone(world));
        let shared = RefCell::new(SharedDisk::new(plan.sectors()));
        Self { plan, index, world, source, file, state: RefCell::new(state), shared }
    }

    pub(crate) fn shared(&self) -> Ref<'_, SharedDisk> {
        self.shared.borrow()
    }

    pub(crate) fn shared_mut(&self) -> RefMut<'_, SharedDisk> {
        self.shared.borrow_mut()
    }

    /// Changes the number of sectors.
    pub(crate) fn resize(&self, sectors: u64) {
        let now = self.world.tick();
        self.world.trace(|| format!("control: disk {} has {sectors} sectors", self.index));
        self.shared.borrow_mut().size.set(now, sectors);
        self.source.adopt_size(sectors * 512);
        self.world.tick();
    }

    /// Sets if a write is on stable storage at its answer from now on.
    pub(crate) fn set_write_through(&self, write_through: bool) {
        let since = &mut self.state.borrow_mut().write_through_since;
        match (write_through, *since) {
            (true, NEVER) => *since = self.world.tick(),
            (true, _) => {}
            (false, _) => *since = NEVER,
        }
    }

    /// True if no request to these sectors is out.
    pub(crate) fn is_free(&self, first: u64, count: u64) -> bool {
        let state = self.state.borrow();
        let mut taken = state.open.values().flat_map(|open| &open.effect.ranges);
        !taken.any(|&(f, c)| first < f + c && f < first + count)
    }

    /// Records a request that goes out.
    pub(crate) fn begin(&self, effect: &DiskEffect, begin: u64) {
        let State { history, open, .. } = &mut *self.state.borrow_mut();
        let sectors = effect.ranges.iter().flat_map(|&(first, count)| first..first + count);
        let value = effect.leaves;
        let writes =
            sectors.filter_map(|sector| Some(history.begin_write(sector, value?, begin))).collect();
        open.insert(begin, Open { effect: effect.clone(), writes });
    }

    /// Records the answer to the request that began at `begin`. `through`: it was sent without a
    /// write cache.
    pub(crate) fn end(
        &self,
        begin: u64,
        end: u64,
        outcome: RequestOutcome,
        through: bool,
    ) -> Result<(), String> {
        let state = &mut *self.state.borrow_mut();
        let Some(mut open) = state.open.remove(&begin) else { return Ok(()) };
        open.effect.fua |= through;
        let done = outcome == RequestOutcome::Done;
        self.check_promise(state, &open.effect, begin, end, done)?;
        let Open { effect, writes } = open;
        let is_stable = effect.fua || state.write_through_since < begin;
        for write in writes {
            // A daemon that has died since may have carried out a refused request.
            if matches!(outcome, RequestOutcome::Refused | RequestOutcome::Gone)
                && !state.history.has_died(write)
            {
                state.history.remove_refused(write);
                continue;
            }
            // A discard may leave the old content.
            state.history.end_write(write, end, done && !effect.is_optional, done && is_stable);
            if outcome == RequestOutcome::Failed {
                state.history.note_failed(write);
            }
        }
        if done && effect.flushes {
            state.history.flushed(begin);
        }
        if matches!(
            outcome,
            RequestOutcome::Failed | RequestOutcome::Aborted | RequestOutcome::Gone
        ) {
            let DiskEffect { classes, ranges, .. } = effect;
            let (answered, is_gone) =
                (outcome == RequestOutcome::Failed, outcome == RequestOutcome::Gone);
            state.failed.push(FailedRequest { classes, begin, end, ranges, answered, is_gone });
        }
        Ok(())
    }

    /// Checks promises of stable storage. Once a request has reported that data was lost, a request
    /// that begins later may not succeed with such a promise, because it cannot be known to hold.
    fn check_promise(
        &self,
        state: &mut State,
        effect: &DiskEffect,
        begin: u64,
        end: u64,
        done: bool,
    ) -> Result<(), String> {
        let Some(lost_at) = self.world.lost_at(self.index) else { return Ok(()) };
        if begin < lost_at {
            state.loss_told = end;
            return Ok(());
        }
        let writes = effect.leaves.is_some() && !effect.is_optional;
        let is_through = effect.fua || state.write_through_since < begin;
        let is_stable = effect.flushes || (writes && is_through);
        let has_older = state.open.first_key_value().is_some_and(|(other, _)| *other < lost_at);
        if done && is_stable && state.loss_told < begin && !has_older {
            return Err(format!("data was lost at {lost_at}, and this is said to be stable"));
        }
        Ok(())
    }

    /// Records the bytes that a request has read from a sector.
    pub(crate) fn read(
        &self,
        sector: u64,
        bytes: &[u8],
        begin: u64,
        end: u64,
    ) -> Result<(), String> {
        let value = value_of(bytes, sector)
            .ok_or_else(|| format!("sector {sector} {}", describe(bytes)))?;
        self.state.borrow_mut().history.read(sector, value, begin, end);
        Ok(())
    }

    /// The last value written to a sector, as far as it is known.
    pub(crate) fn last_value(&self, sector: u64) -> Value {
        self.state.borrow().history.last_value(sector)
    }

    /// Records that COMPARE AND WRITE has found `was` in a sector and written value `id`.
    pub(crate) fn record_swap(&self, sector: u64, was: Value, id: u64, begin: u64, end: u64) {
        self.state.borrow_mut().history.record_swap(sector, was, Value::Id(id), begin, end);
    }

    /// True if a request that was out from `begin` to `end` must have found this value in a sector.
    pub(crate) fn must_have(&self, sector: u64, value: Value, begin: u64, end: u64) -> bool {
        self.state.borrow().history.must_have(sector, value, begin, end)
    }

    /// Checks that the answers so far, including errors, can be explained.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let State { history, open, failed, .. } = &mut *self.state.borrow_mut();
        history.check()?;
        let end = self.world.tick();
        failed.extend(std::mem::take(open).into_iter().map(|(begin, open)| {
            let DiskEffect { classes, ranges, .. } = open.effect;
            FailedRequest { classes, begin, end, ranges, answered: false, is_gone: false }
        }));
        attribution::check(&self.world.injected(self.index), failed)
    }

    /// Notes that the waiting command that began at `begin` was left in the region. All of it is
    /// carried out later, even if parts were done before. A read may have failed so that its blocks
    /// were to be read one by one, and blocks may have been given back.
    pub(crate) fn note_marked(&self, begin: u64, now: u64) {
        self.shared.borrow_mut().note_marked(begin);
        let State { history, open, failed, .. } = &mut *self.state.borrow_mut();
        let Some(Open { effect, writes }) = open.get(&begin) else { return };
        if effect.is_optional {
            writes.iter().for_each(|write| history.died(*write, now));
        }
        let DiskEffect { classes, ranges, .. } = effect.clone();
        let (end, answered, is_gone) = (now, false, false);
        failed.push(FailedRequest { classes, begin, end, ranges, answered, is_gone });
    }

    /// Notes that the daemon died at `now`. Another daemon carries out the requests that began at
    /// `unanswered`, again if they were, independent of the fate of their ops.
    pub(crate) fn died(&self, unanswered: &[u64], now: u64) -> Result<(), Failure> {
        let State { history, open, failed, .. } = &mut *self.state.borrow_mut();
        for (begin, Open { effect, writes }) in open {
            if unanswered.contains(begin) {
                writes.iter().for_each(|write| history.died(*write, now));
                let DiskEffect { classes, ranges, .. } = effect.clone();
                let (begin, end, answered, is_gone) = (*begin, now, false, false);
                failed.push(FailedRequest { classes, begin, end, ranges, answered, is_gone });
            }
        }
        let told = self.shared.borrow_mut().died(now);
        told.map_err(|text| Failure::new("bad answer", format!("disk {}: {text}", self.index)))
    }

    /// Opens the disk again, for another daemon.
    pub(crate) fn reopen(&self) {
        self.file.open_again();
        self.world.reopen(self.index);
    }

    /// Checks at the end that guests have received every attention that they must.
    pub(crate) fn check_end(&self) -> Result<(), Failure> {
        let heard = self.shared.borrow().check_end();
        heard.map_err(|text| Failure::new("lost attention", format!("disk {}: {text}", self.index)))
    }

    /// Checks the content after the IoThreads have gone, and continues from it, as after a
    /// new open. With `power_lost`, only data on stable storage must be there.
    pub(crate) fn restart(&self, power_lost: bool) -> Result<(), Failure> {
        let mut state = self.state.borrow_mut();
        let mut left = Vec::new();
        for sector in 0..self.plan.sectors() {
            let bytes = self.world.content(self.index, sector);
            let value = value_of(&bytes, sector).ok_or_else(|| {
                Failure::new("lost data", format!("sector {sector} {}", describe(&bytes)))
            })?;
            state.history.check_left(left.len(), value, power_lost)?;
            left.push(value);
        }
        state.history = History::new(left.into_iter());
        self.file.open_again();
        self.world.forget_loss(self.index);
        let size = self.source.info().size_bytes / 512;
        *self.shared.borrow_mut() = SharedDisk::new(size);
        Ok(())
    }
}
