//! Reference counts of clusters: the counts in the blocks of an image, and the correct counts.

use std::ops::Range;

use iomem::fits;

/// Reasons for an early end of an image's check.
pub(crate) const ODD_TABLE: &str = "one of its tables is too long or outside its file";
pub(crate) const TOO_MUCH: &str = "a comparison of its reference counts would take too long";
pub(crate) const NO_MEMORY: &str = "there is not enough memory to compare its reference counts";

/// The most uses of a cluster that are counted.
const USES_MAX: u16 = u16::MAX - 1;

/// The number of a missing block.
const NONE: u32 = u32::MAX;

/// The counts in the blocks of an image. Blocks are numbered from zero in the order of the table.
/// Windows are ranges of numbers.
pub(crate) struct Counts {
    cluster_bits: u32,
    count_bits: u32,
    /// The most counts that an image may have.
    most: u64,
    /// The number of each block, by its index in the table.
    numbers: Vec<u32>,
    /// The index and the place of each block, by number.
    blocks: Vec<(u32, u64)>,
    window: Range<u64>,
    /// The uses of the clusters of the window.
    uses: Vec<u16>,
}

/// The result of counting a use.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Added {
    Counted,
    TooOften,
    /// No block counts the cluster.
    NoBlock,
}

/// No block counts a cluster.
struct NoBlock;

/// A cluster with more uses than its count.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooLow {
    pub(crate) cluster: u64,
    pub(crate) count: u64,
}

impl Counts {
    pub(crate) fn new(cluster_bits: u32, count_bits: u32, most: u64) -> Self {
        let (numbers, blocks, uses) = (Vec::new(), Vec::new(), Vec::new());
        Self { cluster_bits, count_bits, most, numbers, blocks, window: 0..0, uses }
    }

    /// The number of clusters that one block counts.
    fn clusters_per_block(&self) -> u64 {
        (8 << self.cluster_bits) / u64::from(self.count_bits)
    }

    /// The number of blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// The place of a block.
    pub(crate) fn place(&self, number: u64) -> u64 {
        self.block(number).1
    }

    fn block(&self, number: u64) -> (u32, u64) {
        self.blocks[at(number)]
    }

    /// Adds a block. Blocks come in the order of the table.
    pub(crate) fn add_block(&mut self, index: u64, place: u64) -> Result<(), &'static str> {
        let index = u32::try_from(index).map_err(|_| ODD_TABLE)?;
        if (self.blocks() + 1) * self.clusters_per_block() > self.most {
            return Err(TOO_MUCH);
        }
        let len = fits(index, "an index");
        assert!(self.numbers.len() <= len, "blocks come in order");
        self.numbers.try_reserve(len + 1 - self.numbers.len()).map_err(|_| NO_MEMORY)?;
        self.blocks.try_reserve(1).map_err(|_| NO_MEMORY)?;
        self.numbers.resize(len, NONE);
        self.numbers.push(fits(self.blocks.len(), "the number of a block"));
        self.blocks.push((index, place));
        Ok(())
    }

    /// Divides all blocks into windows of at most `clusters` clusters, but at least one block.
    /// Without blocks there is one empty window.
    pub(crate) fn windows(&self, clusters: u64) -> Vec<Range<u64>> {
        let (step, end) = ((clusters / self.clusters_per_block()).max(1), self.blocks());
        (0..end.max(1)).step_by(at(step)).map(|start| start..(start + step).min(end)).collect()
    }

    /// The number of clusters in a window.
    fn clusters(&self, window: &Range<u64>) -> u64 {
        (window.end - window.start) * self.clusters_per_block()
    }

    /// Starts to count the uses of a window.
    pub(crate) fn begin(&mut self, window: &Range<u64>) -> Result<(), &'static str> {
        let len = at(self.clusters(window));
        self.uses.clear();
        self.uses.try_reserve_exact(len).map_err(|_| NO_MEMORY)?;
        self.uses.resize(len, 0);
        self.window = window.clone();
        Ok(())
    }

    /// True if the last counted window was this one.
    pub(crate) fn is_current(&self, window: &Range<u64>) -> bool {
        self.window == *window
    }

    /// Counts one use of a cluster, if it is in the window.
    pub(crate) fn add(&mut self, cluster: u64) -> Added {
        let place = match self.place_in_window(cluster) {
            Ok(Some(place)) => place,
            Ok(None) => return Added::Counted,
            Err(NoBlock) => return Added::NoBlock,
        };
        if self.uses[place] == USES_MAX {
            return Added::TooOften;
        }
        self.uses[place] += 1;
        Added::Counted
    }

    #[inline]
    fn place_in_window(&self, cluster: u64) -> Result<Option<usize>, NoBlock> {
        // A block counts a power of two of clusters.
        let bits = self.clusters_per_block().trailing_zeros();
        let (index, within) = (cluster >> bits, cluster & (self.clusters_per_block() - 1));
        let number = usize::try_from(index).ok().and_then(|index| self.numbers.get(index));
        let number = u64::from(*number.filter(|number| **number != NONE).ok_or(NoBlock)?);
        let is_in = self.window.contains(&number);
        Ok(is_in.then(|| at(((number - self.window.start) << bits) + within)))
    }

    /// The uses of a cluster. `None` if it is not in the window.
    pub(crate) fn uses(&self, cluster: u64) -> Option<u16> {
        self.place_in_window(cluster).ok().flatten().map(|place| self.uses[place])
    }

    /// The clusters that a block counts.
    pub(crate) fn counted(&self, number: u64) -> Range<u64> {
        let first = u64::from(self.block(number).0) * self.clusters_per_block();
        first..first + self.clusters_per_block()
    }

    /// The count of a cluster of this block.
    pub(crate) fn count_of(&self, number: u64, cluster: u64, block: &[u8]) -> u64 {
        get(block, at(cluster - self.counted(number).start), self.count_bits)
    }

    /// Lowers the counts of a block of the window to their uses, and returns the number of lowered
    /// counts.
    pub(crate) fn lower(&self, number: u64, block: &mut [u8]) -> Result<u64, TooLow> {
        let first = self.counted(number).start;
        let start = at((number - self.window.start) * self.clusters_per_block());
        let uses = &self.uses[start..start + at(self.clusters_per_block())];
        let mut lowered = 0;
        for (index, uses) in uses.iter().enumerate() {
            let (count, uses) = (get(block, index, self.count_bits), u64::from(*uses));
            if count < uses {
                return Err(TooLow { cluster: first + index as u64, count });
            }
            if count > uses {
                lowered += 1;
                set(block, index, self.count_bits, uses);
            }
        }
        Ok(lowered)
    }
}

/// Converts a number to an index into memory.
fn at(number: u64) -> usize {
    fits(number, "an index")
}

/// Reads a count of a block. Counts of less than a byte start with its lowest bits.
pub(crate) fn get(block: &[u8], index: usize, bits: u32) -> u64 {
    let bits: usize = fits(bits, "bits of a count");
    if bits < 8 {
        let at = index * bits;
        return u64::from(block[at / 8] >> (at % 8)) & ((1 << bits) - 1);
    }
    let bytes = bits / 8;
    let count = &block[index * bytes..(index + 1) * bytes];
    count.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

pub(crate) fn set(block: &mut [u8], index: usize, bits: u32, count: u64) {
    let bits: usize = fits(bits, "bits of a count");
    if bits < 8 {
        let (at, mask) = (index * bits, (1u8 << bits) - 1);
        let count: u8 = fits(count, "a count");
        assert!(count <= mask, "a count is lowered");
        let byte = &mut block[at / 8];
        *byte = *byte & !(mask << (at % 8)) | count << (at % 8);
        return;
    }
    let bytes = bits / 8;
    block[index * bytes..(index + 1) * bytes].copy_from_slice(&count.to_be_bytes()[8 - bytes..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three blocks of clusters of 512 bytes. The second entry of their table is empty.
    fn counts(bits: u32) -> Counts {
        let mut counts = Counts::new(9, bits, 1 << 30);
        for (index, place) in [(0, 512), (2, 1024), (3, 4096)] {
            counts.add_block(index, place).unwrap();
        }
        counts
    }

    #[test]
    fn counts_of_all_widths_are_lowered_to_their_uses() {
        for bits in [1, 2, 4, 8, 16, 32, 64] {
            let mut counts = counts(bits);
            let per_block = counts.clusters_per_block();
            assert_eq!(per_block, 4096 / u64::from(bits));
            counts.begin(&(1..3)).unwrap();
            for cluster in [2 * per_block + 5, 3 * per_block, 0, 4 * per_block - 1] {
                assert_eq!(counts.add(cluster), Added::Counted, "{bits}");
            }
            let uses = [5, 6].map(|within| counts.uses(2 * per_block + within));
            assert_eq!((uses, counts.uses(0)), ([Some(1), Some(0)], None));
            for cluster in [per_block, 2 * per_block - 1, 4 * per_block, u64::MAX] {
                assert_eq!(counts.add(cluster), Added::NoBlock, "{bits}");
            }
            let mut block = vec![0xff; 512];
            assert_eq!(counts.lower(1, &mut block), Ok(per_block - u64::from(bits == 1)));
            let used: Vec<u64> = (0..at(per_block)).map(|index| get(&block, index, bits)).collect();
            let expected = |cluster: u64| u64::from(cluster == 5);
            assert_eq!(used, (0..per_block).map(expected).collect::<Vec<_>>(), "{bits}");
            assert_eq!(counts.lower(1, &mut block), Ok(0));
            let mut free = vec![0; 512];
            let too_low = TooLow { cluster: 3 * per_block, count: 0 };
            assert_eq!(counts.lower(2, &mut free), Err(too_low), "{bits}");
        }
    }

    #[test]
    fn windows_have_whole_blocks() {
        let counts = counts(16);
        assert_eq!(counts.windows(256), [0..1, 1..2, 2..3]);
        assert_eq!(counts.windows(1), [0..1, 1..2, 2..3]);
        assert_eq!(counts.windows(767), [0..2, 2..3]);
        assert_eq!(counts.windows(1 << 20), vec![0..3; 1]);
        assert_eq!(Counts::new(9, 16, 1 << 30).windows(256), vec![0..0; 1]);
        assert_eq!(counts.clusters(&(0..2)), 512);
    }

    #[test]
    fn clusters_with_too_many_uses_are_not_counted() {
        let mut counts = counts(16);
        counts.begin(&(0..3)).unwrap();
        for _ in 0..USES_MAX {
            assert_eq!(counts.add(7), Added::Counted);
        }
        assert_eq!(counts.add(7), Added::TooOften);
        let mut few = Counts::new(9, 16, 511);
        few.add_block(0, 512).unwrap();
        assert_eq!(few.add_block(1, 1024), Err(TOO_MUCH));
    }
}
