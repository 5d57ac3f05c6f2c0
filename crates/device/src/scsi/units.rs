//! The logical units of a device, which come and go.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::address::UnitAddress;
use super::sense::Sense;
use super::unit::Unit;

/// The logical units of a device, for any thread.
#[derive(Default)]
pub(crate) struct Units {
    all: RwLock<BTreeMap<UnitAddress, Arc<Unit>>>,
    /// Changes with `all`.
    generation: AtomicU64,
}

impl Units {
    /// Adds a unit, of which the others tell. False: there is one at its address.
    pub(crate) fn add(&self, unit: Arc<Unit>) -> bool {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        if all.contains_key(&unit.address) {
            return false;
        }
        all.values().for_each(|other| other.add_attention(Sense::UNITS_CHANGED));
        all.insert(unit.address, unit);
        self.generation.fetch_add(1, Ordering::Release);
        true
    }

    /// Takes a unit away, of which the others tell. False: there is none.
    pub(crate) fn remove(&self, address: UnitAddress) -> bool {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        if all.remove(&address).is_none() {
            return false;
        }
        all.values().for_each(|other| other.add_attention(Sense::UNITS_CHANGED));
        self.generation.fetch_add(1, Ordering::Release);
        true
    }

    /// The units there are now, by address.
    pub(crate) fn all(&self) -> BTreeMap<UnitAddress, Arc<Unit>> {
        self.all.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes whenever a unit is added or removed.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }
}
