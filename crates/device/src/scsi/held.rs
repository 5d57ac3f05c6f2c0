//! Commands that an earlier process had taken for a logical unit that is not there yet.
//!
//! A process that was killed may have had units that the next one is yet to add. Its commands wait
//! until the unit comes, until they are aborted, or until their queue stops.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use super::address::UnitAddress;
use super::cdb::{Cdb, Op};

/// The number of commands that wait for each unit, in all queues of a device.
#[derive(Default)]
pub(crate) struct HeldCommands(Mutex<BTreeMap<UnitAddress, usize>>);

/// A command that waits, for as long as this is there.
pub(super) struct Held<'a> {
    commands: &'a HeldCommands,
    address: UnitAddress,
}

impl HeldCommands {
    /// A command begins to wait.
    pub(super) fn begin(&self, address: UnitAddress) -> Held<'_> {
        *self.lock().entry(address).or_default() += 1;
        Held { commands: self, address }
    }

    /// True: no command waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// True: commands wait for this unit.
    pub(crate) fn wait_for(&self, address: UnitAddress) -> bool {
        self.lock().contains_key(&address)
    }

    /// True: commands wait for a unit of this target.
    pub(crate) fn wait_for_target(&self, target: u8) -> bool {
        self.lock().keys().any(|unit| unit.target == target)
    }

    /// The units that commands wait for, each with their number.
    pub(crate) fn all(&self) -> Vec<(UnitAddress, usize)> {
        self.lock().iter().map(|(unit, commands)| (*unit, *commands)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<UnitAddress, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut all = self.commands.lock();
        if let Some(count) = all.get_mut(&self.address) {
            *count -= 1;
        }
        all.retain(|_, count| *count > 0);
    }
}

/// The commands of one queue that wait, on its IoThread.
#[derive(Default)]
pub(super) struct HeldHere {
    wakers: RefCell<Vec<Waker>>,
    /// Units that were reported.
    told: RefCell<BTreeSet<UnitAddress>>,
}

impl HeldHere {
    /// Has commands look again at the unit, at themselves and at their queue.
    pub(super) fn look(&self) {
        self.wakers.take().into_iter().for_each(Waker::wake);
    }

    /// Has a command look again later.
    pub(super) fn wait(&self, waker: &Waker) {
        self.wakers.borrow_mut().push(waker.clone());
    }

    /// True: the unit is to be reported.
    pub(super) fn tell(&self, address: UnitAddress) -> bool {
        self.told.borrow_mut().insert(address)
    }
}

/// True: without its unit the command would be answered with an error.
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
        assert!(held.is_empty() && !held.wait_for(unit) && !held.wait_for_target(1));
        let (first, second) = (held.begin(unit), held.begin(unit));
        let beside = UnitAddress { target: 3, lun: 2 };
        let other = held.begin(beside);
        assert_eq!(held.all(), [(unit, 2), (beside, 1)]);
        assert!(held.wait_for_target(1) && !held.wait_for_target(2));
        drop(first);
        assert_eq!(held.all(), [(unit, 1), (beside, 1)]);
        drop(other);
        assert!(held.wait_for(unit) && !held.wait_for_target(3));
        drop(second);
        assert!(held.is_empty());
    }

    /// What can be answered without the unit tells drivers that there is none.
    #[test]
    fn commands_that_ask_for_units_need_none() {
        for (opcode, needs) in
            [(0x12, false), (0xa0, false), (0x03, false), (0x00, true), (0x25, true), (0x2a, true)]
        {
            let cdb = Cdb::of([opcode, 0]);
            assert_eq!(needs_unit(&cdb), needs, "{opcode:#x}");
        }
        assert!(needs_unit(&Cdb::of([0xff, 0])), "an error would be the answer");
    }
}
