//! The logical units of a device, which come and go.

use std::collections::BTreeMap;
use std::collections::btree_map::Values;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::access::DiskAccess;
use super::address::UnitAddress;
use super::persist::Nexus;
use super::sense::Sense;
use super::task_set::{Left, Waiting};
use super::unit::Unit;

/// The logical units of a device, for any thread.
#[derive(Default)]
pub(crate) struct Units {
    all: RwLock<BTreeMap<UnitAddress, Place>>,
    /// Changes with `all`.
    generation: AtomicU64,
}

/// A unit that is there, and those who have it for a while.
struct Place {
    unit: Arc<Unit>,
    borrowed: Waiting,
    left: Left,
}

/// A unit that somebody has for a while, though it may be removed meanwhile. Whoever removes it
/// waits for that, and closes the disk.
pub(crate) struct Borrowed {
    unit: Arc<Unit>,
    /// Dropped last.
    _left: Left,
}

/// All units that are there.
pub(crate) struct All<'a>(Values<'a, UnitAddress, Place>);

impl<'a> Iterator for All<'a> {
    type Item = &'a Arc<Unit>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next().map(|place| &place.unit)
    }
}

impl Deref for Borrowed {
    type Target = Unit;

    fn deref(&self) -> &Unit {
        &self.unit
    }
}

/// Why a unit cannot be added.
pub(crate) enum NoPlace {
    /// There is one at its address.
    Taken,
    /// The one at this address has its name and another disk.
    SameName(UnitAddress),
}

/// The logical unit at an address, and the nexus through which it is reached there.
pub(crate) struct UnitNexus {
    pub(crate) access: Arc<DiskAccess>,
    pub(crate) nexus: Nexus,
}

impl Units {
    /// Adds a unit, of which the others of its target tell: REPORT LUNS is for each target. False:
    /// there are no others.
    pub(crate) fn add(&self, unit: Arc<Unit>) -> Result<bool, NoPlace> {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        if all.contains_key(&unit.address) {
            return Err(NoPlace::Taken);
        }
        if let Some(other) = all.values().find(|other| unit.is_taken_for(&other.unit)) {
            return Err(NoPlace::SameName(other.unit.address));
        }
        let target = unit.address.target;
        let has_others = all.keys().any(|other| other.target == target);
        tell(&all, target, Sense::UNITS_CHANGED);
        let (borrowed, left) = Waiting::new();
        all.insert(unit.address, Place { unit, borrowed, left });
        self.generation.fetch_add(1, Ordering::Release);
        Ok(has_others)
    }

    /// Takes a unit away, of which the others of its target tell. The second is ready when nobody
    /// has [borrowed](Self::borrow) it any more.
    pub(crate) fn remove(&self, address: UnitAddress) -> Option<(Arc<Unit>, Waiting)> {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        let Place { unit, borrowed, .. } = all.remove(&address)?;
        tell(&all, address.target, Sense::UNITS_CHANGED);
        self.generation.fetch_add(1, Ordering::Release);
        Some((unit, borrowed))
    }

    /// The unit at an address, for what takes longer than a [look](Self::look).
    pub(crate) fn borrow(&self, address: UnitAddress) -> Option<Borrowed> {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        let Place { unit, left, .. } = all.get(&address)?;
        Some(Borrowed { unit: Arc::clone(unit), _left: left.clone() })
    }

    /// The initiator learns of something with its next command to each unit of a target.
    pub(crate) fn tell_target(&self, target: u8, sense: Sense) {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        tell(&all, target, sense);
    }

    /// Looks at the units there are now, in the order of their addresses. They stay while `look`
    /// runs, which waits for nothing. It keeps none of them, or who removes it does not close its
    /// disk.
    pub(crate) fn look<T>(&self, look: impl FnOnce(All<'_>) -> T) -> T {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        look(All(all.values()))
    }

    /// What `look` says of the unit at an address, as for [`look`](Self::look).
    pub(crate) fn at<T>(
        &self,
        address: UnitAddress,
        look: impl FnOnce(&Arc<Unit>) -> T,
    ) -> Option<T> {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        all.get(&address).map(|place| look(&place.unit))
    }

    /// Whether there is a unit of this target.
    pub(crate) fn has_target(&self, target: u8) -> bool {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        all.keys().any(|unit| unit.target == target)
    }

    /// How the driver reaches the unit at an address. This does not keep its disk open.
    pub(crate) fn nexus(&self, address: UnitAddress) -> Option<UnitNexus> {
        let nexus = |unit: &Arc<Unit>| (Arc::clone(&unit.access), unit.attached.nexus());
        let (access, nexus) = self.at(address, nexus)?;
        Some(UnitNexus { access, nexus })
    }

    /// Changes whenever a unit is added or removed.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }
}

/// Has all units of a target tell their initiator of something.
fn tell(all: &BTreeMap<UnitAddress, Place>, target: u8, sense: Sense) {
    let units = all.values().map(|place| &place.unit);
    let meant = units.filter(|unit| unit.address.target == target);
    meant.for_each(|unit| unit.attentions.add(sense));
}
