//! Clusters that are counted ahead. The file counts them as used, although imago has them free,
//! and they are zeroes. A flush has made both stable.
//!
//! An entry that points to such a cluster needs no flush before it. After a loss of power the
//! cluster has zeroes or new data, and no other data, whatever the entry says. Clusters that are
//! left when the image comes to rest are uncounted; a daemon that is killed leaves them leaked,
//! and the next one frees them (`leaks.rs`).

use std::collections::BTreeSet;
use std::ops::Range;

#[derive(Debug, Default)]
pub(super) struct Ahead {
    cluster_bytes: u64,
    /// Places of clusters that an entry may point to.
    ready: BTreeSet<u64>,
    /// Places of clusters that no flush has covered yet.
    pending: Vec<u64>,
}

impl Ahead {
    /// Adds clusters that were zeroed and counted, for the time after the next flush.
    pub(super) fn add(&mut self, cluster_bytes: u64, places: Vec<u64>) {
        self.cluster_bytes = cluster_bytes;
        self.pending.extend(places);
    }

    /// A flush has ended, or has failed, in which case the clusters stay leaked until the image
    /// comes to rest.
    pub(super) fn flushed(&mut self, is_stable: bool) {
        let pending = std::mem::take(&mut self.pending);
        if is_stable {
            self.ready.extend(pending);
        }
    }

    /// Forgets all clusters.
    pub(super) fn clear(&mut self) {
        (self.ready, self.pending) = (BTreeSet::new(), Vec::new());
    }

    pub(super) fn len(&self) -> usize {
        self.ready.len()
    }

    fn clusters(&self, range: &Range<u64>) -> Range<u64> {
        let cluster = self.cluster_bytes.max(1);
        range.start - range.start % cluster..range.end.next_multiple_of(cluster)
    }

    /// Whether all bytes of a range are in such clusters.
    pub(super) fn has(&self, range: &Range<u64>) -> bool {
        let clusters = self.clusters(range);
        let count = self.ready.range(clusters.clone()).count() as u64;
        !self.ready.is_empty() && count * self.cluster_bytes == clusters.end - clusters.start
    }

    /// Whether a cluster is counted ahead, stable or not.
    pub(super) fn is_counted(&self, place: u64) -> bool {
        self.ready.contains(&place) || self.pending.contains(&place)
    }

    /// Takes the clusters of a range for use, if all of them are ready.
    pub(super) fn take(&mut self, range: &Range<u64>) -> bool {
        let is_ready = self.has(range);
        if is_ready {
            self.spoil(range);
        }
        is_ready
    }

    /// Forgets the clusters of a range: they are about to have other bytes.
    pub(super) fn spoil(&mut self, range: &Range<u64>) {
        if self.ready.is_empty() {
            return;
        }
        let clusters = self.clusters(range);
        let spoilt: Vec<u64> = self.ready.range(clusters).copied().collect();
        for place in spoilt {
            self.ready.remove(&place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_are_ready_after_a_flush_and_are_taken_once() {
        let mut ahead = Ahead::default();
        assert!(!ahead.take(&(0..512)));
        ahead.add(4096, vec![4096, 8192, 16_384]);
        assert!(!ahead.has(&(4096..5000)) && ahead.is_counted(4096));
        ahead.flushed(true);
        assert!(ahead.has(&(5000..12_288)) && !ahead.has(&(8192..16_385)));
        assert!(!ahead.take(&(8192..20_480)), "a cluster between them is not ready");
        assert!(ahead.take(&(4600..5112)) && !ahead.take(&(4600..5112)));
        ahead.spoil(&(0..16_384));
        assert_eq!(ahead.len(), 1);
        ahead.clear();
        assert!(!ahead.is_counted(16_384));
    }

    #[test]
    fn clusters_are_not_ready_after_a_flush_that_has_failed() {
        let mut ahead = Ahead::default();
        ahead.add(512, vec![512]);
        ahead.flushed(false);
        assert!(!ahead.has(&(512..1024)) && !ahead.is_counted(512));
    }
}
