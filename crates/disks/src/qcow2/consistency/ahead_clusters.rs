//! Clusters that are counted ahead: the file counts them as used, imago has them as free, and they
//! are zeroes. A flush has made the counts and the zeroes stable.
//!
//! An entry that points to such a cluster needs no flush before it. After a power cut the cluster
//! has zeroes or new data, and no other data, with the entry or without it. Clusters that are left
//! when the image comes to rest are uncounted. A daemon that is killed leaves them leaked, and the
//! next one frees them (`leaks.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

#[derive(Debug, Default)]
pub(crate) struct AheadClusters {
    cluster_bytes: u64,
    /// Places of clusters that an entry may point to.
    ready: BTreeSet<u64>,
    /// Places of clusters that no flush has covered yet, each with the number of the write that
    /// counted it.
    pending: BTreeMap<u64, u64>,
    /// With fewer clusters than this, more are to be counted.
    low: usize,
}

impl AheadClusters {
    /// Adds clusters that were zeroed, and counted by the write of this number. Without free
    /// clusters, `places` is empty, and none are to be counted.
    pub(crate) fn add(&mut self, cluster_bytes: u64, places: Vec<u64>, written: u64) {
        self.cluster_bytes = cluster_bytes;
        self.low = places.len() / 2;
        self.pending.extend(places.into_iter().map(|place| (place, written)));
    }

    /// Makes clusters ready that a flush has covered: each was counted by this write or an earlier
    /// one.
    pub(crate) fn note_stable(&mut self, stable: u64) {
        let is_pending = |written: u64| written > stable;
        let covered = self.pending.iter().filter(|(_, written)| !is_pending(**written));
        self.ready.extend(covered.map(|(place, _)| place));
        self.pending.retain(|_, written| is_pending(*written));
    }

    /// Drops the clusters that a failed flush should have covered. They stay leaked until the image
    /// comes to rest.
    pub(crate) fn drop_pending(&mut self) {
        self.pending.clear();
    }

    /// Forgets all clusters.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// The number of clusters that an entry may point to.
    pub(crate) fn ready(&self) -> u64 {
        self.ready.len() as u64
    }

    /// The number of clusters, stable or not.
    pub(crate) fn len(&self) -> usize {
        self.ready.len() + self.pending.len()
    }

    /// True if more clusters are to be counted.
    pub(crate) fn is_low(&self) -> bool {
        self.len() < self.low
    }

    fn clusters(&self, range: &Range<u64>) -> Range<u64> {
        let cluster = self.cluster_bytes.max(1);
        range.start - range.start % cluster..range.end.next_multiple_of(cluster)
    }

    /// Returns true if all bytes of a range are in clusters that are ready.
    pub(crate) fn has(&self, range: &Range<u64>) -> bool {
        let clusters = self.clusters(range);
        let count = self.ready.range(clusters.clone()).count() as u64;
        !self.ready.is_empty() && count * self.cluster_bytes == clusters.end - clusters.start
    }

    /// Returns true if a cluster is counted ahead, stable or not.
    pub(crate) fn is_counted(&self, place: u64) -> bool {
        self.ready.contains(&place) || self.pending.contains_key(&place)
    }

    /// Takes the clusters of a range for use, if all of them are ready.
    pub(crate) fn take(&mut self, range: &Range<u64>) -> bool {
        let is_ready = self.has(range);
        if is_ready {
            self.remove(range);
        }
        is_ready
    }

    /// Forgets the clusters of a range: they are about to have other bytes.
    pub(crate) fn remove(&mut self, range: &Range<u64>) {
        let clusters = self.clusters(range);
        while let Some(place) = self.ready.range(clusters.clone()).next().copied() {
            self.ready.remove(&place);
        }
        let first = |pending: &BTreeMap<u64, u64>| Some(*pending.range(clusters.clone()).next()?.0);
        while let Some(place) = first(&self.pending) {
            self.pending.remove(&place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_are_ready_after_a_flush_and_are_taken_once() {
        let mut ahead = AheadClusters::default();
        assert!(!ahead.take(&(0..512)));
        ahead.add(4096, vec![4096, 8192, 16_384], 7);
        ahead.note_stable(6);
        assert!(!ahead.has(&(4096..5000)) && ahead.is_counted(4096));
        ahead.note_stable(7);
        assert!(ahead.has(&(5000..12_288)) && !ahead.has(&(8192..16_385)));
        assert!(!ahead.take(&(8192..20_480)), "a cluster between them is not ready");
        assert!(ahead.take(&(4600..5112)) && !ahead.take(&(4600..5112)));
        ahead.remove(&(0..16_384));
        assert_eq!(ahead.len(), 1);
        ahead.clear();
        assert!(!ahead.is_counted(16_384));
    }

    #[test]
    fn clusters_are_not_ready_after_a_flush_that_has_failed() {
        let mut ahead = AheadClusters::default();
        ahead.add(512, vec![512], 1);
        ahead.drop_pending();
        ahead.note_stable(1);
        assert!(!ahead.has(&(512..1024)) && !ahead.is_counted(512));
    }

    #[test]
    fn a_cluster_that_gets_other_bytes_before_the_flush_is_not_ready_after_it() {
        let mut ahead = AheadClusters::default();
        ahead.add(512, vec![512, 1024], 1);
        ahead.remove(&(600..700));
        ahead.note_stable(1);
        assert!(!ahead.has(&(512..1024)) && ahead.has(&(1024..1536)));
    }

    #[test]
    fn more_clusters_are_counted_when_half_are_taken_unless_none_are_free() {
        let mut ahead = AheadClusters::default();
        assert!(!ahead.is_low());
        ahead.add(512, vec![512, 1024, 1536, 2048], 1);
        ahead.note_stable(1);
        assert!(ahead.take(&(512..1536)) && !ahead.is_low());
        assert!(ahead.take(&(1536..2048)) && ahead.is_low());
        ahead.add(512, Vec::new(), 2);
        assert!(!ahead.is_low());
    }
}
