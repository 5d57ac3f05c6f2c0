//! The memory of an image's tables. imago keeps up to 160 tables for each layer, each as long as a
//! cluster, and has no option for that: 10 MiB with clusters of 64 KiB, 320 MiB with clusters of 2
//! MiB. If that can be too much, reads and writes of tables are counted here, and the owner opens
//! the image again when the memory is used up.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The most bytes of tables, without the need of running jobs: as much again, or the need of one
/// job. Tests have less, so that images are opened again in all of them.
pub(crate) const BYTES_MAX: u64 = if cfg!(test) { 1 << 20 } else { 64 << 20 };

/// The most tables of a layer that imago keeps: L2 tables and blocks of reference counts.
const TABLES_MAX: u64 = 128 + 32;

/// The most jobs that use tables at once. imago keeps 128 L2 tables and fails if none of them is
/// unused. A job may need a second one while it uses one.
const JOBS_MAX: u64 = 64;

#[derive(Debug)]
pub(crate) struct CacheLimit {
    /// Cluster sizes by layer.
    cluster_bytes: Vec<u64>,
    loaded: Mutex<Loaded>,
}

#[derive(Debug, Default)]
struct Loaded {
    /// Layers and places of tables. Data of a whole cluster counts as well.
    places: HashSet<(usize, u64)>,
    bytes: u64,
    #[cfg(test)]
    most_bytes: u64,
}

impl CacheLimit {
    /// Takes the cluster size of each layer. 0 for a layer without clusters.
    pub(crate) fn new(cluster_bytes: Vec<u64>) -> Self {
        Self { cluster_bytes, loaded: Mutex::default() }
    }

    fn is_bounded_by_imago(&self) -> bool {
        self.cluster_bytes.iter().sum::<u64>() * TABLES_MAX <= BYTES_MAX
    }

    /// The number of jobs that may use tables at once.
    pub(crate) fn jobs(&self) -> usize {
        let per_job = 2 * self.cluster_bytes.iter().sum::<u64>().max(1);
        iomem::fits((BYTES_MAX / per_job).clamp(1, JOBS_MAX), "a number of jobs")
    }

    /// Counts a read from a layer or a write to it, if it can be of a table.
    pub(crate) fn count_access(&self, layer: usize, offset: u64, bytes: usize) {
        let bytes = bytes as u64;
        if self.cluster_bytes.get(layer) != Some(&bytes) || self.is_bounded_by_imago() {
            return;
        }
        let mut loaded = self.loaded();
        if loaded.places.insert((layer, offset)) {
            loaded.bytes += bytes;
            #[cfg(test)]
            (loaded.most_bytes = loaded.most_bytes.max(loaded.bytes));
        }
    }

    pub(crate) fn is_reached(&self) -> bool {
        self.loaded().bytes >= BYTES_MAX
    }

    /// Starts again with no tables.
    pub(crate) fn clear(&self) {
        let mut loaded = self.loaded();
        loaded.places.clear();
        loaded.bytes = 0;
    }

    /// Acts as if tables had used up the memory.
    #[cfg(test)]
    pub(crate) fn reach(&self) {
        self.loaded().bytes = BYTES_MAX;
    }

    /// The most bytes of tables so far.
    #[cfg(test)]
    pub(crate) fn most_bytes(&self) -> u64 {
        self.loaded().most_bytes
    }

    fn loaded(&self) -> MutexGuard<'_, Loaded> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_jobs_use_large_tables_at_once() {
        for (layers, jobs) in [(&[512][..], 64), (&[64 << 10], 8), (&[2 << 20; 32], 1)] {
            assert_eq!(CacheLimit::new(layers.to_vec()).jobs(), jobs);
        }
    }

    #[test]
    fn the_same_tables_reach_the_limit_again_after_it_was_cleared() {
        const CLUSTER: u64 = 64 << 10;
        let limit = CacheLimit::new(vec![CLUSTER]);
        let table = usize::try_from(CLUSTER).unwrap();
        for _ in 0..3 {
            for place in 0..BYTES_MAX / CLUSTER {
                assert!(!limit.is_reached(), "{place}");
                // A table counts once, and no access of another length is one to a table.
                (0..2).for_each(|_| limit.count_access(0, place * CLUSTER, table));
                limit.count_access(0, place * CLUSTER, table / 2);
            }
            assert!(limit.is_reached());
            limit.clear();
        }
    }
}
