//! A histogram of the sizes of batches, with bounds of a factor of 2.

use std::array;

use blockio::stats::Counter;

/// The number of finite bounds. Another bucket holds larger batches.
pub const BATCH_BOUNDS: usize = 8;

const BUCKETS: usize = BATCH_BOUNDS + 1;

/// The buckets that the writer distinguishes: one for each result of [`bucket_of`], so that no
/// check of the index is needed.
const RECORDED: usize = u64::BITS as usize;

/// The bucket of batches without a request.
const EMPTY: usize = RECORDED - 1;

/// The logarithm of a size, rounded up, in few instructions: the logarithm of an odd number is no
/// special case, and size 0 wraps to the largest number, whose logarithm is [`EMPTY`].
#[inline]
fn bucket_of(size: u32) -> usize {
    ((u64::from(size) * 2).wrapping_sub(1) | 1).ilog2() as usize
}

/// The bound of bucket `index`. A batch of just the bound is in that bucket.
///
/// # Panics
///
/// Panics if `index` is not below [`BATCH_BOUNDS`].
pub const fn batch_bound(index: usize) -> u64 {
    assert!(index < BATCH_BOUNDS, "the last bucket has no bound");
    1 << index
}

/// The numbers of batches by size. One thread writes them and any thread reads them. The sizes
/// themselves are not added up: the counters of requests have that sum.
#[derive(Debug)]
pub struct BatchStats([Counter; RECORDED]);

impl Default for BatchStats {
    fn default() -> Self {
        Self(array::from_fn(|_| Counter::default()))
    }
}

impl BatchStats {
    /// Counts a batch. Only the owning thread may call it.
    #[inline]
    pub(crate) fn record(&self, size: u32) {
        self.0[bucket_of(size)].add(1);
    }

    /// The batches so far, without empty ones.
    pub fn values(&self) -> BatchSizes {
        let mut sizes = BatchSizes::default();
        for (index, counter) in self.0[..EMPTY].iter().enumerate() {
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
        for size in [0, 1, 1, 2, 3, 4, 5, 64, 65, 128, 129, 1024, 65_535] {
            stats.record(size);
        }
        assert_eq!(stats.values().buckets(), [2, 1, 2, 1, 0, 0, 1, 2, 3]);
        for size in [0, 1, 128, 129, 1 << 30, 1 << 31, (1 << 31) + 1, u32::MAX] {
            stats.record(size);
        }
        assert_eq!(stats.values().buckets(), [3, 1, 2, 1, 0, 0, 1, 3, 8]);
    }

    #[test]
    fn a_batch_is_within_the_bound_of_its_bucket() {
        for size in 1..=65_535 {
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
