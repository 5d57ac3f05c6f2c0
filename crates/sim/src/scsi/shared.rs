//! State that all nexuses of a disk share.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use device::access::DiskAccess;

use super::attentions::{Attentions, CauseOutcome};
use super::command::{Command, Kind};
use super::reservations::{Effect, Order, Reservations};
use super::{COMMANDS_CLEARED, Code, MODE_CHANGED, Outcome};
use crate::timeline::Timeline;

/// A device, and an attention for it: the code and the number.
pub(crate) type ExpectedAttention = (usize, Code, u64);

#[derive(Debug, Clone, Copy)]
struct AbortAll {
    by: usize,
    begin: u64,
    end: u64,
}

pub(crate) struct SharedDisk {
    pub(crate) access: Arc<DiskAccess>,
    pub(crate) reservations: Reservations,
    /// Times at which daemons have died.
    deaths: Vec<u64>,
    /// Begins of the commands that stopped queues have left.
    marked: BTreeSet<u64>,
    /// Attentions by the number of the device.
    nexuses: BTreeMap<usize, Attentions>,
    /// The size in sectors.
    pub(crate) size: Timeline<u64>,
    /// Devices that have ended commands of all initiators, with the times of begin and end.
    abort_alls: Vec<AbortAll>,
    /// The begin of the order in progress, and the attentions that it may raise.
    order: Option<(u64, Vec<ExpectedAttention>)>,
    /// Commands that change modes, by their begin: the device, and the attentions that they may
    /// raise.
    selects: BTreeMap<u64, (usize, Vec<ExpectedAttention>)>,
    /// The time since which there certainly is no write cache.
    write_through_since: u64,
    /// The last begin or end of a command that may switch a cache on.
    last_on: u64,
}

impl SharedDisk {
    pub(crate) fn new(sectors: u64) -> Self {
        Self {
            access: Arc::default(),
            reservations: Reservations::default(),
            deaths: Vec::new(),
            marked: BTreeSet::new(),
            nexuses: BTreeMap::new(),
            size: Timeline::new(sectors),
            abort_alls: Vec::new(),
            order: None,
            selects: BTreeMap::new(),
            write_through_since: u64::MAX,
            last_on: 0,
        }
    }

    /// The attentions of a device's unit.
    pub(crate) fn nexus(&mut self, device: usize) -> &mut Attentions {
        self.nexuses.entry(device).or_default()
    }

    /// The time since which writes certainly are on stable storage at their answer.
    pub(crate) fn write_through_since(&self) -> u64 {
        self.write_through_since
    }

    /// Notes the begin or end of an action that may switch the write cache on.
    pub(crate) fn cache_may_change(&mut self, now: u64) {
        (self.write_through_since, self.last_on) = (u64::MAX, now);
    }

    /// Notes that a device begins to switch the write cache.
    fn begin_select(&mut self, device: usize, is_on: bool, begin: u64) {
        if is_on {
            self.cache_may_change(begin);
        }
        let attentions = self.expect_for_others(device, MODE_CHANGED, begin);
        self.selects.insert(begin, (device, attentions));
    }

    /// Notes that the switch has ended. `is_done` is `None` if it may have happened or not.
    fn end_select(
        &mut self,
        is_on: bool,
        is_done: Option<bool>,
        (begin, end): (u64, u64),
    ) -> Result<(), String> {
        if is_on {
            self.cache_may_change(end);
        } else if is_done == Some(true) && self.last_on < begin {
            self.write_through_since = self.write_through_since.min(end);
        }
        // A switch to the present state raises no attention.
        let came = if is_done == Some(false) { CauseOutcome::Not } else { CauseOutcome::Maybe };
        let (_, attentions) = self.selects.remove(&begin).unwrap_or_default();
        self.settle(&attentions, end, came)
    }

    /// Expects attentions of all other devices for an action of this device.
    pub(crate) fn expect_for_others(
        &mut self,
        device: usize,
        code: Code,
        begin: u64,
    ) -> Vec<ExpectedAttention> {
        let others = self.nexuses.iter_mut().filter(|(other, _)| **other != device);
        others.map(|(other, nexus)| (*other, code, nexus.expect(code, begin))).collect()
    }

    /// Settles attentions when their cause has ended.
    pub(crate) fn settle(
        &mut self,
        attentions: &[ExpectedAttention],
        end: u64,
        came: CauseOutcome,
    ) -> Result<(), String> {
        attentions.iter().try_for_each(|&(device, _, id)| self.nexus(device).settle(id, end, came))
    }

    /// Notes that a device begins to end commands of all initiators.
    pub(crate) fn begin_abort_all(&mut self, by: usize, begin: u64) {
        self.abort_alls.push(AbortAll { by, begin, end: u64::MAX });
    }

    /// Notes that the device has ended them.
    pub(crate) fn end_abort_all(&mut self, begin: u64, end: u64) {
        let found = self.abort_alls.iter_mut().find(|abort_all| abort_all.begin == begin);
        found.into_iter().for_each(|abort_all| abort_all.end = end);
    }

    /// True if commands of a device that were out then may have been ended by another device, or by
    /// its own order.
    pub(crate) fn may_be_aborted(
        &self,
        device: usize,
        by_itself: bool,
        begin: u64,
        end: u64,
    ) -> bool {
        let meant = |abort_all: &&AbortAll| (abort_all.by == device) == by_itself;
        let mut abort_alls = self.abort_alls.iter().filter(meant);
        abort_alls.any(|abort_all| abort_all.begin < end && begin < abort_all.end)
    }

    /// True if a daemon has died in this time.
    pub(crate) fn has_died(&self, (begin, end): (u64, u64)) -> bool {
        self.deaths.iter().any(|death| (begin..=end).contains(death))
    }

    /// Notes that a stopped queue has left the command that began at `begin`.
    pub(crate) fn note_marked(&mut self, begin: u64) {
        self.marked.insert(begin);
    }

    /// True if a stopped queue has left the command that began at `begin`.
    pub(crate) fn was_marked(&self, begin: u64) -> bool {
        self.marked.contains(&begin)
    }

    /// Notes that the daemon is dead, with all its state in memory. Commands in progress begin once
    /// more.
    pub(crate) fn died(&mut self, now: u64) -> Result<(), String> {
        self.deaths.push(now);
        self.nexuses.values_mut().for_each(|nexus| nexus.forget(now));
        self.cache_may_change(now);
        for (begin, (device, attentions)) in std::mem::take(&mut self.selects) {
            self.settle(&attentions, now, CauseOutcome::Maybe)?;
            let attentions = self.expect_for_others(device, MODE_CHANGED, now);
            self.selects.insert(begin, (device, attentions));
        }
        let order = self.reservations.died(now);
        if let (Some(order), Some((begin, attentions))) = (order, self.order.take()) {
            self.settle(&attentions, now, CauseOutcome::Maybe)?;
            let attentions = self.expect_of_order(order, now);
            self.order = Some((begin, attentions));
        }
        self.access = Arc::default();
        Ok(())
    }

    /// Begins a PERSISTENT RESERVE OUT.
    fn begin_order(&mut self, order: Order, begin: u64) {
        if order.aborts() {
            self.begin_abort_all(order.from, begin);
        }
        let attentions = self.expect_of_order(order, begin);
        self.order = Some((begin, attentions));
    }

    fn expect_of_order(&mut self, order: Order, begin: u64) -> Vec<ExpectedAttention> {
        let mut attentions: Vec<(usize, Code)> = Vec::new();
        for effect in self.reservations.begin(order, begin) {
            attentions.extend(&effect.attentions);
        }
        attentions.sort_unstable();
        attentions.dedup();
        let attentions = attentions.into_iter().map(|(device, code)| {
            (device, code, self.nexuses.entry(device).or_default().expect(code, begin))
        });
        let mut attentions: Vec<ExpectedAttention> = attentions.collect();
        if order.aborts() {
            attentions.extend(self.expect_for_others(order.from, COMMANDS_CLEARED, begin));
        }
        attentions
    }

    /// Ends the order with this outcome; `None` if it may have taken effect or not.
    fn end_order(&mut self, outcome: Option<Outcome>, end: u64) -> Result<(), String> {
        let effects = self.reservations.end(outcome, end)?;
        let Some((begin, attentions)) = self.order.take() else { return Ok(()) };
        self.end_abort_all(begin, end);
        for (device, code, id) in attentions {
            let concerns = |effect: &Effect| match code {
                // Depends on the commands of the device.
                COMMANDS_CLEARED => effect.aborted.contains(&device),
                _ => effect.attentions.contains(&(device, code)),
            };
            let came = match effects.iter().filter(|effect| concerns(effect)).count() {
                0 => CauseOutcome::Not,
                count
                    if count == effects.len() && outcome.is_some() && code != COMMANDS_CLEARED =>
                {
                    CauseOutcome::Surely
                }
                _ => CauseOutcome::Maybe,
            };
            self.nexus(device).settle(id, end, came)?;
        }
        Ok(())
    }

    /// Ends an order that was not carried out.
    fn refuse_order(&mut self, end: u64) -> Result<(), String> {
        self.reservations.refuse(end);
        let Some((begin, attentions)) = self.order.take() else { return Ok(()) };
        self.end_abort_all(begin, end);
        self.settle(&attentions, end, CauseOutcome::Not)
    }

    /// Notes that a command begins.
    pub(crate) fn begin(&mut self, device: usize, command: &Command, begin: u64) {
        match command.kind {
            Kind::Reserve(order) => self.begin_order(order, begin),
            Kind::Select(is_on) => self.begin_select(device, is_on, begin),
            _ => {}
        }
    }

    /// Notes the outcome of a command; `None` if it was aborted, in the middle or not.
    pub(crate) fn end(
        &mut self,
        command: &Command,
        outcome: Option<Outcome>,
        span: (u64, u64),
    ) -> Result<(), String> {
        match command.kind {
            Kind::Reserve(_) => self.end_order(outcome, span.1),
            Kind::Select(is_on) => {
                self.end_select(is_on, outcome.map(|outcome| outcome == Outcome::Good), span)
            }
            _ => Ok(()),
        }
    }

    /// Notes that a command was not carried out.
    pub(crate) fn refuse(&mut self, command: &Command, span: (u64, u64)) -> Result<(), String> {
        match command.kind {
            Kind::Reserve(_) => self.refuse_order(span.1),
            Kind::Select(is_on) => self.end_select(is_on, Some(false), span),
            _ => Ok(()),
        }
    }

    /// Checks at the end that no attention was lost.
    pub(crate) fn check_end(&self) -> Result<(), String> {
        self.nexuses.values().try_for_each(Attentions::check_end)
    }
}
