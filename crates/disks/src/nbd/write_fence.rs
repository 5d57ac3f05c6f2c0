//! Changes that a server may still make for abandoned requests. No other change of the same place
//! is sent before they have ended, so that no old write lands after a newer one.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use blockio::executor::Lock;

/// Ranges of an export that are held, with their holders.
#[derive(Debug, Default)]
pub(super) struct HeldRanges {
    /// The number of ranges: requests check the list only if there are any.
    count: AtomicUsize,
    ranges: Lock<Ranges>,
}

#[derive(Debug, Default)]
struct Ranges {
    next_holder: u64,
    all: Vec<(u64, Range<u64>)>,
}

impl HeldRanges {
    /// Holds these ranges. Returns the number of their holder.
    pub(super) fn add(&self, ranges: Vec<Range<u64>>) -> u64 {
        let holder = {
            let mut known = self.ranges.lock();
            known.next_holder += 1;
            known.next_holder
        };
        self.replace(holder, ranges);
        holder
    }

    /// Replaces the ranges of a holder.
    pub(super) fn replace(&self, holder: u64, ranges: Vec<Range<u64>>) {
        let mut known = self.ranges.lock();
        known.all.retain(|(other, _)| *other != holder);
        known.all.extend(ranges.into_iter().map(|range| (holder, range)));
        self.count.store(known.all.len(), Ordering::Release);
    }

    /// Returns true if anything is held.
    pub(super) fn has_any(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    /// Returns true if any byte of `range` is held.
    pub(super) fn has(&self, range: &Range<u64>) -> bool {
        if !self.has_any() {
            return false;
        }
        let overlaps = |held: &Range<u64>| held.start < range.end && range.start < held.end;
        self.ranges.lock().all.iter().any(|(_, held)| overlaps(held))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_held_until_its_last_holder_releases_it() {
        let held = HeldRanges::default();
        assert!(!held.has(&(0..u64::MAX)) && !held.has_any());
        let first = held.add(vec![0..10, 20..30]);
        let second = held.add(vec![25..30, 30..40]);
        assert!(held.has_any());
        assert!(held.has(&(9..10)) && held.has(&(0..100)) && held.has(&(39..41)));
        assert!(!held.has(&(10..20)) && !held.has(&(40..50)));
        // Ranges around a held one, and one within it.
        assert!(held.has(&(15..21)) && held.has(&(15..50)) && held.has(&(22..23)));
        held.replace(first, vec![0..5, 5..10]);
        assert!(held.has(&(25..26)) && !held.has(&(20..25)));
        held.replace(second, Vec::new());
        assert!(held.has(&(5..6)) && !held.has(&(25..26)));
        held.replace(first, Vec::new());
        assert!(!held.has(&(0..u64::MAX)));
    }
}
