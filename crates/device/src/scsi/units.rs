//! The logical units of a device, which come and go.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::access::DiskAccess;
use super::address::UnitAddress;
use super::persist::Nexus;
use super::sense::Sense;
use super::unit::Unit;

/// The logical units of a device, for any thread.
#[derive(Default)]
pub(crate) struct Units {
    all: RwLock<BTreeMap<UnitAddress, Arc<Unit>>>,
    /// Changes with `all`.
    generation: AtomicU64,
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
    /// Adds a unit, of which the others tell.
    pub(crate) fn add(&self, unit: Arc<Unit>) -> Result<(), NoPlace> {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        if all.contains_key(&unit.address) {
            return Err(NoPlace::Taken);
        }
        if let Some(other) = all.values().find(|other| unit.is_taken_for(other)) {
            return Err(NoPlace::SameName(other.address));
        }
        all.values().for_each(|other| other.attentions.add(Sense::UNITS_CHANGED));
        all.insert(unit.address, unit);
        self.generation.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Takes a unit away, of which the others tell.
    pub(crate) fn remove(&self, address: UnitAddress) -> Option<Arc<Unit>> {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        let removed = all.remove(&address)?;
        all.values().for_each(|other| other.attentions.add(Sense::UNITS_CHANGED));
        self.generation.fetch_add(1, Ordering::Release);
        Some(removed)
    }

    /// The initiator learns of something with its next command to each unit of a target.
    pub(crate) fn tell_target(&self, target: u8, sense: Sense) {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        let meant = all.values().filter(|unit| unit.address.target == target);
        meant.for_each(|unit| unit.attentions.add(sense));
    }

    /// The units there are now, by address.
    pub(crate) fn all(&self) -> BTreeMap<UnitAddress, Arc<Unit>> {
        self.all.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether there is a unit of this target.
    pub(crate) fn has_target(&self, target: u8) -> bool {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        all.keys().any(|unit| unit.target == target)
    }

    /// How the driver reaches the unit at an address. This does not keep its disk open.
    pub(crate) fn nexus(&self, address: UnitAddress) -> Option<UnitNexus> {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        let unit = all.get(&address)?;
        Some(UnitNexus { access: Arc::clone(&unit.access), nexus: unit.attached.nexus() })
    }

    /// Changes whenever a unit is added or removed.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }
}
