//! Commands that an earlier process took for a logical unit that is not there yet.
//!
//! A killed process may have had units that its successor is yet to add. Their commands wait until
//! the unit is added, until they are aborted, or until their queue stops.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use blockio::executor::{Lock, Notify};

use super::cdb::{Cdb, Op};
use crate::unit_address::UnitAddress;

/// The number of waiting commands per unit, in all queues of a device.
#[derive(Default)]
pub(crate) struct HeldCommands(Lock<BTreeMap<UnitAddress, usize>>);

/// A waiting command, for as long as this exists.
pub(super) struct HeldGuard<'a> {
    commands: &'a HeldCommands,
    address: UnitAddress,
}

impl HeldCommands {
    /// Counts a command that begins to wait.
    pub(super) fn begin(&self, address: UnitAddress) -> HeldGuard<'_> {
        *self.0.lock().entry(address).or_default() += 1;
        HeldGuard { commands: self, address }
    }

    /// True if no command waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// True if commands wait for this unit.
    pub(crate) fn has_waiters(&self, address: UnitAddress) -> bool {
        self.0.lock().contains_key(&address)
    }

    /// True if commands wait for a unit of this target.
    pub(crate) fn has_waiters_at_target(&self, target: u8) -> bool {
        self.0.lock().keys().any(|unit| unit.target == target)
    }

    /// The awaited units, each with its number of waiting commands.
    pub(crate) fn all(&self) -> Vec<(UnitAddress, usize)> {
        self.0.lock().iter().map(|(unit, commands)| (*unit, *commands)).collect()
    }
}

impl Drop for HeldGuard<'_> {
    fn drop(&mut self) {
        let mut all = self.commands.0.lock();
        if let Some(count) = all.get_mut(&self.address) {
            *count -= 1;
        }
        all.retain(|_, count| *count > 0);
    }
}

/// The waiting commands of one queue, on its IoThread.
#[derive(Default)]
pub(super) struct LocalHeldCommands {
    /// Wakes all commands, to check again for the unit, for aborts and for a stop of the queue.
    pub(super) changed: Notify,
    /// Units that were reported.
    reported: RefCell<BTreeSet<UnitAddress>>,
}

impl LocalHeldCommands {
    /// Returns true on the first call for a unit, which is then to be reported.
    pub(super) fn first_report(&self, address: UnitAddress) -> bool {
        self.reported.borrow_mut().insert(address)
    }
}

/// True if the command would fail without its unit.
pub(super) fn needs_unit(cdb: &Cdb) -> bool {
    let op = cdb.command().map(|command| command.op);
    !matches!(op, Ok(Op::Inquiry | Op::ReportLuns | Op::RequestSense))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_counted_by_unit_until_each_has_gone() {
        let (held, unit) = (HeldCommands::default(), UnitAddress { target: 1, lun: 2 });
        assert!(held.is_empty() && !held.has_waiters(unit) && !held.has_waiters_at_target(1));
        let (first, second) = (held.begin(unit), held.begin(unit));
        let beside = UnitAddress { target: 3, lun: 2 };
        let other = held.begin(beside);
        assert_eq!(held.all(), [(unit, 2), (beside, 1)]);
        assert!(held.has_waiters_at_target(1) && !held.has_waiters_at_target(2));
        drop(first);
        assert_eq!(held.all(), [(unit, 1), (beside, 1)]);
        drop(other);
        assert!(held.has_waiters(unit) && !held.has_waiters_at_target(3));
        drop(second);
        assert!(held.is_empty());
    }

    /// Commands that work without the unit show drivers that there is none.
    #[test]
    fn commands_that_ask_for_units_need_none() {
        for (opcode, needs) in
            [(0x12, false), (0xa0, false), (0x03, false), (0x00, true), (0x25, true), (0x2a, true)]
        {
            let cdb = Cdb::from_words([opcode, 0]);
            assert_eq!(needs_unit(&cdb), needs, "{opcode:#x}");
        }
        assert!(needs_unit(&Cdb::from_words([0xff, 0])), "an error would be the answer");
    }
}
