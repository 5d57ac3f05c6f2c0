//! Numbers that follow from a seed.

use iomem::fits;

/// A generator (splitmix64): small, fast, and the same on every machine.
#[derive(Debug, Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    /// A stream, independent of all other streams of the same seed.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        Self(mix(seed ^ mix(stream)))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `end`; 0 if `end` is 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        fits((u128::from(self.next()) * u128::from(end)) >> 64, "a number below its end")
    }

    /// A number from `first` to `last`.
    pub(crate) fn between(&mut self, first: u64, last: u64) -> u64 {
        first + self.below(last.saturating_sub(first) + 1)
    }

    /// An index into a list of length `len`.
    pub(crate) fn index(&mut self, len: usize) -> usize {
        fits(self.below(len as u64), "an index")
    }

    /// True `per_mille` times of a thousand.
    pub(crate) fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }

    pub(crate) fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.index(list.len())]
    }
}

/// Spreads the bits of a number.
pub(crate) fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// 1, `per_mille` times of a thousand.
pub(crate) fn flag(rng: &mut Rng, per_mille: u64) -> u64 {
    some(rng, per_mille, &[1])
}

/// An element of `values`, `per_mille` times of a thousand; otherwise 0.
pub(crate) fn some(rng: &mut Rng, per_mille: u64, values: &[u64]) -> u64 {
    if rng.chance(per_mille) { rng.pick(values) } else { 0 }
}
