//! State that all nexuses of a disk share.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use device::scsi::access::DiskAccess;

use super::attentions::{Attentions, Came};
use super::command::{Command, Kind};
use super::reservations::{Effect, Order, Reservations};
use super::{COMMANDS_CLEARED, Code, MODE_CHANGED, Outcome};
use crate::timeline::Timeline;

/// A device, and an attention for it: the code and the number.
pub(crate) type Told = (usize, Code, u64);

#[derive(Debug, Clone, Copy)]
struct Sweep {
    by: usize,
    begin: u64,
    end: u64,
}

pub(crate) struct Shared {
    pub(crate) access: Arc<DiskAccess>,
    pub(crate) reservations: Reservations,
    /// Times at which daemons have died.
    deaths: Vec<u64>,
    /// Begins of the commands that stopped queues have left.
    left: BTreeSet<u64>,
    /// Attentions by the number of the device.
    nexuses: BTreeMap<usize, Attentions>,
    /// The size in sectors.
    pub(crate) size: Timeline<u64>,
    /// Devices that have ended commands of all initiators, with the times of begin and end.
    sweeps: Vec<Sweep>,
    /// The begin of the order in progress, and the attentions that it may raise.
    order: Option<(u64, Vec<Told>)>,
    /// Commands that change modes, by their begin: the device, and the attentions that they may
    /// raise.
    selects: BTreeMap<u64, (usize, Vec<Told>)>,
    /// The time since which there certainly is no write cache.
    through_since: u64,
    /// The last begin or end of a command that may switch a cache on.
    last_on: u64,
}

impl Shared {
    pub(crate) fn new(sectors: u64) -> Self {
        Self {
            access: Arc::default(),
            reservations: Reservations::default(),
            deaths: Vec::new(),
            left: BTreeSet::new(),
            nexuses: BTreeMap::new(),
            size: Timeline::new(sectors),
            sweeps: Vec::new(),
            order: None,
            selects: BTreeMap::new(),
            through_since: u64::MAX,
            last_on: 0,
        }
    }

    /// The attentions of a device's unit.
    pub(crate) fn nexus(&mut self, device: usize) -> &mut Attentions {
        self.nexuses.entry(device).or_default()
    }

    /// The time since which writes certainly are on stable storage at their answer.
    pub(crate) fn through_since(&self) -> u64 {
        self.through_since
    }

    /// Notes the begin or end of an action that may switch the write cache on.
    pub(crate) fn may_cache(&mut self, now: u64) {
        (self.through_since, self.last_on) = (u64::MAX, now);
    }

    /// Notes that a device begins to switch the write cache.
    fn begin_select(&mut self, device: usize, is_on: bool, begin: u64) {
        if is_on {
            self.may_cache(begin);
        }
        let told = self.expect_of_others(device, MODE_CHANGED, begin);
        self.selects.insert(begin, (device, told));
    }

    /// Notes that the switch has ended. `is_done` is `None` if it may have happened or not.
    fn end_select(
        &mut self,
        is_on: bool,
        is_done: Option<bool>,
        (begin, end): (u64, u64),
    ) -> Result<(), String> {
        if is_on {
            self.may_cache(end);
        } else if is_done == Some(true) && self.last_on < begin {
            self.through_since = self.through_since.min(end);
        }
        // A switch to the present state raises no attention.
        let came = if is_done == Some(false) { Came::Not } else { Came::Maybe };
        let (_, told) = self.selects.remove(&begin).unwrap_or_default();
        self.settle(&told, end, came)
    }

    /// Expects attentions of all other devices for an action of this device.
    pub(crate) fn expect_of_others(&mut self, device: usize, code: Code, begin: u64) -> Vec<Told> {
        let others = self.nexuses.iter_mut().filter(|(other, _)| **other != device);
        others.map(|(other, nexus)| (*other, code, nexus.expect(code, begin))).collect()
    }

    /// Settles attentions when their cause has ended.
    pub(crate) fn settle(&mut self, told: &[Told], end: u64, came: Came) -> Result<(), String> {
        told.iter().try_for_each(|&(device, _, id)| self.nexus(device).settle(id, end, came))
    }

    /// Notes that a device begins to end commands of all initiators.
    pub(crate) fn begin_sweep(&mut self, by: usize, begin: u64) {
        self.sweeps.push(Sweep { by, begin, end: u64::MAX });
    }

    /// Notes that the device has ended them.
    pub(crate) fn end_sweep(&mut self, begin: u64, end: u64) {
        let found = self.sweeps.iter_mut().find(|sweep| sweep.begin == begin);
        found.into_iter().for_each(|sweep| sweep.end = end);
    }

    /// True if commands of a device that were out then may have been ended by another device, or by
    /// its own order.
    pub(crate) fn may_be_swept(
        &self,
        device: usize,
        by_itself: bool,
        begin: u64,
        end: u64,
    ) -> bool {
        let meant = |sweep: &&Sweep| (sweep.by == device) == by_itself;
        let mut sweeps = self.sweeps.iter().filter(meant);
        sweeps.any(|sweep| sweep.begin < end && begin < sweep.end)
    }

    /// True if a daemon has died in this time.
    pub(crate) fn has_died(&self, (begin, end): (u64, u64)) -> bool {
        self.deaths.iter().any(|death| (begin..=end).contains(death))
    }

    /// Notes that a stopped queue has left the command that began at `begin`.
    pub(crate) fn leave(&mut self, begin: u64) {
        self.left.insert(begin);
    }

    /// True if a stopped queue has left the command that began at `begin`.
    pub(crate) fn was_left(&self, begin: u64) -> bool {
        self.left.contains(&begin)
    }

    /// Notes that the daemon is dead, with all its state in memory. Commands in progress begin once
    /// more.
    pub(crate) fn died(&mut self, now: u64) -> Result<(), String> {
        self.deaths.push(now);
        self.nexuses.values_mut().for_each(|nexus| nexus.forget(now));
        self.may_cache(now);
        for (begin, (device, told)) in std::mem::take(&mut self.selects) {
            self.settle(&told, now, Came::Maybe)?;
            let told = self.expect_of_others(device, MODE_CHANGED, now);
            self.selects.insert(begin, (device, told));
        }
        let order = self.reservations.died(now);
        if let (Some(order), Some((begin, told))) = (order, self.order.take()) {
            self.settle(&told, now, Came::Maybe)?;
            let told = self.expect_of_order(order, now);
            self.order = Some((begin, told));
        }
        self.access = Arc::default();
        Ok(())
    }

    /// Begins a PERSISTENT RESERVE OUT.
    fn begin_order(&mut self, order: Order, begin: u64) {
        if order.aborts() {
            self.begin_sweep(order.from, begin);
        }
        let told = self.expect_of_order(order, begin);
        self.order = Some((begin, told));
    }

    fn expect_of_order(&mut self, order: Order, begin: u64) -> Vec<Told> {
        let mut told: Vec<(usize, Code)> = Vec::new();
        for effect in self.reservations.begin(order, begin) {
            told.extend(&effect.told);
        }
        told.sort_unstable();
        told.dedup();
        let told = told.into_iter().map(|(device, code)| {
            (device, code, self.nexuses.entry(device).or_default().expect(code, begin))
        });
        let mut told: Vec<Told> = told.collect();
        if order.aborts() {
            told.extend(self.expect_of_others(order.from, COMMANDS_CLEARED, begin));
        }
        told
    }

    /// Ends the order with this outcome; `None` if it may have taken effect or not.
    fn end_order(&mut self, outcome: Option<Outcome>, end: u64) -> Result<(), String> {
        let effects = self.reservations.end(outcome, end)?;
        let Some((begin, told)) = self.order.take() else { return Ok(()) };
        self.end_sweep(begin, end);
        for (device, code, id) in told {
            let tells = |effect: &Effect| match code {
                // Depends on the commands of the device.
                COMMANDS_CLEARED => effect.aborted.contains(&device),
                _ => effect.told.contains(&(device, code)),
            };
            let came = match effects.iter().filter(|effect| tells(effect)).count() {
                0 => Came::Not,
                count
                    if count == effects.len() && outcome.is_some() && code != COMMANDS_CLEARED =>
                {
                    Came::Surely
                }
                _ => Came::Maybe,
            };
            self.nexus(device).settle(id, end, came)?;
        }
        Ok(())
    }

    /// Ends an order that was not carried out.
    fn refuse_order(&mut self, end: u64) -> Result<(), String> {
        self.reservations.refuse(end);
        let Some((begin, told)) = self.order.take() else { return Ok(()) };
        self.end_sweep(begin, end);
        self.settle(&told, end, Came::Not)
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
