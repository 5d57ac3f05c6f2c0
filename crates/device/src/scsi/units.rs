//! The logical units of a device, which may be added and removed at any time.

use std::collections::BTreeMap;
use std::collections::btree_map::Values;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::unit::Unit;
use crate::access::DiskAccess;
use crate::access::persist::Nexus;
use crate::access::sense::Sense;
use crate::access::task_set::{WaitGroup, WaitToken};
use crate::unit_address::UnitAddress;

/// The logical units of a device, for any thread.
#[derive(Default)]
pub(crate) struct Units {
    all: RwLock<BTreeMap<UnitAddress, UnitSlot>>,
    /// Changes with `all`.
    generation: AtomicU64,
}

/// An existing unit, and its borrowers.
struct UnitSlot {
    unit: Arc<Unit>,
    borrowed: WaitGroup,
    token: WaitToken,
}

/// A borrowed unit, which may be removed in the meantime. The remover waits for its return, and
/// closes the disk.
pub(crate) struct Borrowed {
    unit: Arc<Unit>,
    /// Dropped last.
    _token: WaitToken,
}

/// All existing units.
pub(crate) struct All<'a>(Values<'a, UnitAddress, UnitSlot>);

impl<'a> Iterator for All<'a> {
    type Item = &'a Arc<Unit>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next().map(|slot| &slot.unit)
    }
}

impl Deref for Borrowed {
    type Target = Unit;

    fn deref(&self) -> &Unit {
        &self.unit
    }
}

/// A unit that cannot be added.
pub(crate) enum AddUnitError {
    /// Its address is taken.
    Taken,
    /// The unit at this address has the same name and another disk.
    SameName(UnitAddress),
}

/// The logical unit at an address, and the nexus through which it is reached there.
pub(crate) struct UnitNexus {
    pub(crate) access: Arc<DiskAccess>,
    pub(crate) nexus: Nexus,
}

impl Units {
    /// Adds a unit, which all other units of its target report: REPORT LUNS is per target. Returns
    /// false if there are none.
    pub(crate) fn add(&self, unit: Arc<Unit>) -> Result<bool, AddUnitError> {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        if all.contains_key(&unit.address) {
            return Err(AddUnitError::Taken);
        }
        if let Some(other) = all.values().find(|other| unit.has_identity_conflict(&other.unit)) {
            return Err(AddUnitError::SameName(other.unit.address));
        }
        let target = unit.address.target;
        let has_others = all.keys().any(|other| other.target == target);
        add_attentions(&all, target, Sense::UNITS_CHANGED);
        let (borrowed, token) = WaitGroup::new();
        all.insert(unit.address, UnitSlot { unit, borrowed, token });
        self.generation.fetch_add(1, Ordering::Release);
        Ok(has_others)
    }

    /// Removes a unit, which the remaining units of its target report. The second result is ready
    /// when the unit is no longer [borrowed](Self::borrow).
    pub(crate) fn remove(&self, address: UnitAddress) -> Option<(Arc<Unit>, WaitGroup)> {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        let UnitSlot { unit, borrowed, .. } = all.remove(&address)?;
        add_attentions(&all, address.target, Sense::UNITS_CHANGED);
        self.generation.fetch_add(1, Ordering::Release);
        Some((unit, borrowed))
    }

    /// Borrows the unit at an address, for uses that take longer than a call of
    /// [`with_all`](Self::with_all).
    pub(crate) fn borrow(&self, address: UnitAddress) -> Option<Borrowed> {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        let UnitSlot { unit, token, .. } = all.get(&address)?;
        Some(Borrowed { unit: Arc::clone(unit), _token: token.clone() })
    }

    /// Adds an attention to each unit of a target.
    pub(crate) fn add_attention_at_target(&self, target: u8, sense: Sense) {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        add_attentions(&all, target, sense);
    }

    /// Runs `visit` on all existing units, in order of address. They stay while `visit` runs, so it
    /// must not wait. It must keep none of them, or their remover does not close the disk.
    pub(crate) fn with_all<T>(&self, visit: impl FnOnce(All<'_>) -> T) -> T {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        visit(All(all.values()))
    }

    /// Runs `visit` on the unit at an address, if there is one, with the rules of
    /// [`with_all`](Self::with_all).
    pub(crate) fn with_unit<T>(
        &self,
        address: UnitAddress,
        visit: impl FnOnce(&Arc<Unit>) -> T,
    ) -> Option<T> {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        all.get(&address).map(|slot| visit(&slot.unit))
    }

    /// True if the target has a unit.
    pub(crate) fn has_target(&self, target: u8) -> bool {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        all.keys().any(|unit| unit.target == target)
    }

    /// The driver's nexus to the unit at an address. Does not keep the disk open.
    pub(crate) fn nexus(&self, address: UnitAddress) -> Option<UnitNexus> {
        let nexus = |unit: &Arc<Unit>| (Arc::clone(&unit.access), unit.attached.nexus());
        let (access, nexus) = self.with_unit(address, nexus)?;
        Some(UnitNexus { access, nexus })
    }

    /// Changes whenever a unit is added or removed.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }
}

/// Adds an attention to each unit of a target.
fn add_attentions(all: &BTreeMap<UnitAddress, UnitSlot>, target: u8, sense: Sense) {
    let units = all.values().map(|slot| &slot.unit);
    let meant = units.filter(|unit| unit.address.target == target);
    meant.for_each(|unit| unit.attentions.add(sense));
}
