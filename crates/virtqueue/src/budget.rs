//! Limits on the memory of front-ends that is mapped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::panicking;

/// A limit on mapped bytes, for one front-end or for a whole process. Clones share one count.
///
/// The limit protects address space. A sparse file costs its owner nothing, and a few of them fill
/// the 47 bits of a process, after which every allocation fails. A region counts from before it is
/// mapped until the last map that has it is dropped. It counts once, however many maps share it.
#[derive(Debug, Clone)]
pub struct MappingBudget(Arc<Budget>);

#[derive(Debug)]
struct Budget {
    what: &'static str,
    limit_bytes: u64,
    mapped_bytes: AtomicU64,
    parent: Option<MappingBudget>,
}

impl MappingBudget {
    /// Makes a budget of `limit_bytes`. `what` is its name in refusals, such as "the memory of all
    /// front-ends (--max-mapped-memory)".
    pub fn new(what: &'static str, limit_bytes: u64) -> Self {
        Self::with_parent(what, limit_bytes, None)
    }

    /// Makes a budget within this one. Its bytes count in both.
    pub fn child(&self, what: &'static str, limit_bytes: u64) -> Self {
        Self::with_parent(what, limit_bytes, Some(self.clone()))
    }

    /// Makes a budget that is never used up.
    pub fn unlimited() -> Self {
        Self::new("memory", u64::MAX)
    }

    /// The number of bytes mapped now, in whole pages.
    pub fn mapped_bytes(&self) -> u64 {
        self.0.mapped_bytes.load(Ordering::Relaxed)
    }

    /// The largest number of bytes that may be mapped at once.
    pub fn limit_bytes(&self) -> u64 {
        self.0.limit_bytes
    }

    fn with_parent(what: &'static str, limit_bytes: u64, parent: Option<Self>) -> Self {
        let mapped_bytes = AtomicU64::new(0);
        Self(Arc::new(Budget { what, limit_bytes, mapped_bytes, parent }))
    }

    /// Takes `bytes` from this budget and all budgets that it is within, or from none of them.
    pub(crate) fn take(&self, bytes: u64) -> Result<Share, OverBudget> {
        self.add(bytes)?;
        Ok(Share { budget: self.clone(), bytes })
    }

    fn add(&self, bytes: u64) -> Result<(), OverBudget> {
        let Budget { what, limit_bytes, mapped_bytes, parent } = &*self.0;
        let add = |mapped: u64| mapped.checked_add(bytes).filter(|sum| sum <= limit_bytes);
        mapped_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).map_err(|mapped| {
            OverBudget { what, mapped_bytes: mapped, limit_bytes: *limit_bytes }
        })?;
        let Some(parent) = parent else { return Ok(()) };
        parent.add(bytes).inspect_err(|_| {
            mapped_bytes.fetch_sub(bytes, Ordering::Relaxed);
        })
    }

    fn give_back(&self, bytes: u64) {
        self.0.mapped_bytes.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(parent) = &self.0.parent {
            parent.give_back(bytes);
        }
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        let mapped_bytes = *self.mapped_bytes.get_mut();
        debug_assert!(mapped_bytes == 0 || panicking(), "{mapped_bytes} bytes have no share");
    }
}

/// Bytes taken from a budget, given back on drop.
#[derive(Debug)]
pub(crate) struct Share {
    budget: MappingBudget,
    bytes: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.give_back(self.bytes);
    }
}

/// The budget that is used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OverBudget {
    pub(crate) what: &'static str,
    pub(crate) mapped_bytes: u64,
    pub(crate) limit_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_bytes_count_in_all_budgets_and_come_back() {
        let process = MappingBudget::new("process", 100);
        let (first, second) = (process.child("first", 80), process.child("second", 80));
        let all = first.take(80).unwrap();
        assert_eq!((first.mapped_bytes(), process.mapped_bytes()), (80, 80));
        let refused =
            |what, mapped_bytes, limit_bytes| Some(OverBudget { what, mapped_bytes, limit_bytes });
        assert_eq!(first.take(1).err(), refused("first", 80, 80));
        assert_eq!(first.take(u64::MAX).err(), refused("first", 80, 80), "the sum does not wrap");
        assert_eq!(second.take(21).err(), refused("process", 80, 100));
        assert_eq!(second.mapped_bytes(), 0, "what the parent refused was given back");
        let rest = second.take(20).unwrap();
        drop(all);
        assert_eq!((first.mapped_bytes(), process.mapped_bytes()), (0, 20));
        drop(rest);
        assert_eq!((second.mapped_bytes(), process.mapped_bytes()), (0, 0));
    }
}
