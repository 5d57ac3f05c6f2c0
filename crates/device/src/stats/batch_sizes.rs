//! A histogram of the sizes of batches, with bounds of a factor of 2.

use blockio::stats::Counter;

/// The number of finite bounds. Another bucket holds larger batches.
pub const BATCH_BOUNDS: usize = 8;

const BUCKETS: usize = BATCH_BOUNDS + 1;

/// The buckets that the writer distinguishes. A type of 16 bits needs no check for the last one,
/// which would cost two instructions.
const RECORDED: usize = 17;

/// The bound of bucket `index`. A batch of just the bound is in that bucket.
///
/// # Panics
///
/// Panics if `index` is not below [`BATCH_BOUNDS`].
#[must_use]
pub const fn batch_bound(index: usize) -> u64 {
    assert!(index < BATCH_BOUNDS, "the last bucket has no bound");
    1 << index
}

/// The numbers of batches by size. One thread writes them and any thread reads them. The sizes
/// themselves are not added up: the counters of requests have that sum.
#[derive(Debug, Default)]
pub struct BatchStats([Counter; RECORDED]);

impl BatchStats {
    /// Counts a batch, unless it is empty. Only the owning thread may call it.
    #[inline]
    pub(crate) fn record(&self, size: u16) {
        if size > 0 {
            // Without the lowest bit, the logarithm of 0 would be a case of its own.
            let log2 = ((u32::from(size.wrapping_sub(1)) * 2) | 1).ilog2();
            self.0[log2 as usize].add(1);
        }
    }

    /// The batches so far.
    #[must_use]
    pub fn values(&self) -> BatchSizes {
        let mut sizes = BatchSizes::default();
        for (index, counter) in self.0.iter().enumerate() {
            sizes.0[index.min(BATCH_BOUNDS)] += counter.get();
        }
        sizes
    }
}

/// The content of [`BatchStats`] at one moment.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct BatchSizes([u64; BUCKETS]);

impl BatchSizes {
    /// The number of batches in each bucket. The bound of bucket `i` is [`batch_bound`] of `i`, and
    /// the last bucket has none.
    #[must_use]
    pub fn buckets(&self) -> &[u64] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_counted_by_powers_of_two() {
        let stats = BatchStats::default();
        for size in [0, 1, 1, 2, 3, 4, 5, 64, 65, 128, 129, 1024, u16::MAX] {
            stats.record(size);
        }
        assert_eq!(stats.values().buckets(), [2, 1, 2, 1, 0, 0, 1, 2, 3]);
    }

    #[test]
    fn a_batch_is_within_the_bound_of_its_bucket() {
        for size in 1..=u16::MAX {
            let stats = BatchStats::default();
            stats.record(size);
            let values = stats.values();
            let index = values.buckets().iter().position(|count| *count == 1).unwrap();
            let above = index.checked_sub(1).map_or(0, batch_bound);
            let most = if index < BATCH_BOUNDS { batch_bound(index) } else { u64::MAX };
            assert!(above < size.into() && u64::from(size) <= most, "{size} is in {index}");
        }
    }
}
