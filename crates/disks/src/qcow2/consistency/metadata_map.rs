//! The places of an image's tables. imago trusts that no two tables share a place, and that no
//! place of a table counts as free. With such an image it would search for space forever, allocate
//! a place twice, or end the daemon with a failed assertion. So images and changes that violate
//! this are refused.

use std::collections::BTreeMap;
use std::ops::Range;

/// A fault of an image. The error that reports it adds the remedy.
pub(crate) type Fault = &'static str;

pub(crate) const ONE_PLACE: Fault = "two of its tables overlap";
const UNALIGNED: Fault = "one of its tables does not begin at a cluster boundary";
const IS_FREE: Fault = "one of its tables is in a cluster that counts as free";

/// A table, by the index of its entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MetadataTable {
    /// An L2 table, by its index in L1.
    L2(u64),
    /// A block of reference counts, by its index in the table of blocks.
    Block(u64),
}

/// The tables of an image that is written to, by place.
#[derive(Debug, Default)]
pub(crate) struct MetadataMap {
    cluster_bytes: u64,
    count_bits: u32,
    /// L1 and the table of blocks, in whole clusters.
    l1: Range<u64>,
    blocks: Range<u64>,
    tables: BTreeMap<u64, MetadataTable>,
    /// Places of L2 tables, by their index in L1.
    l2_places: BTreeMap<u64, u64>,
}

impl MetadataMap {
    /// Sets the places of L1 and of the table of blocks. Fails if they are unaligned, or overlap
    /// each other, the header or a known table.
    pub(crate) fn set_roots(
        &mut self,
        cluster_bytes: u64,
        count_bits: u32,
        l1: &Range<u64>,
        blocks: &Range<u64>,
    ) -> Result<(), Fault> {
        self.cluster_bytes = cluster_bytes;
        self.count_bits = count_bits;
        let whole = |range: &Range<u64>| {
            let end = range.end.checked_next_multiple_of(cluster_bytes).unwrap_or(u64::MAX);
            range.start..end
        };
        (self.l1, self.blocks) = (whole(l1), whole(blocks));
        let all = [&(0..cluster_bytes), &self.l1, &self.blocks];
        if all.iter().any(|range| !range.start.is_multiple_of(cluster_bytes)) {
            return Err(UNALIGNED);
        }
        let pairs = [(0, 1), (0, 2), (1, 2)];
        let one = pairs.iter().any(|(one, other)| overlap(all[*one], all[*other]));
        let roots = [&self.l1, &self.blocks];
        let with_others = roots.iter().any(|root| self.tables.range((*root).clone()).count() > 0);
        if one || with_others { Err(ONE_PLACE) } else { Ok(()) }
    }

    /// Adds a table, or confirms its place.
    pub(crate) fn add(&mut self, place: u64, table: MetadataTable) -> Result<(), Fault> {
        if !place.is_multiple_of(self.cluster_bytes) {
            return Err(UNALIGNED);
        }
        let in_root = [&self.l1, &self.blocks].iter().any(|range| range.contains(&place));
        let other = *self.tables.entry(place).or_insert(table);
        if let MetadataTable::L2(index) = table {
            self.l2_places.insert(index, place);
        }
        if place == 0 || in_root || other != table { Err(ONE_PLACE) } else { Ok(()) }
    }

    pub(crate) fn cluster_bytes(&self) -> u64 {
        self.cluster_bytes
    }

    /// The first byte that a block counts, by the place of the block.
    pub(crate) fn first_counted(&self, place: u64) -> Option<u64> {
        match self.get(place)? {
            MetadataTable::Block(index) => index.checked_mul(self.covered()),
            MetadataTable::L2(_) => None,
        }
    }

    /// The place of the L2 table with an index in L1.
    pub(crate) fn l2_place(&self, index: u64) -> Option<u64> {
        self.l2_places.get(&index).copied()
    }

    pub(crate) fn get(&self, place: u64) -> Option<MetadataTable> {
        self.tables.get(&place).copied()
    }

    /// Returns true if bytes of the file belong to a table or to the header.
    pub(crate) fn overlaps(&self, range: &Range<u64>) -> bool {
        let cluster = self.cluster_bytes.max(1);
        let start = range.start - range.start % cluster;
        [&(0..cluster), &self.l1, &self.blocks].iter().any(|root| overlap(root, range))
            || self.tables.range(start..range.end.max(start)).next().is_some()
    }

    /// The number of bytes of the file that one block counts.
    fn covered(&self) -> u64 {
        (self.cluster_bytes * 8 / u64::from(self.count_bits.max(1)))
            .saturating_mul(self.cluster_bytes)
    }

    /// Checks that each table has a block that counts it. `has_block` returns true for indices of
    /// blocks that exist.
    pub(crate) fn check_counted(&self, has_block: impl Fn(u64) -> bool) -> Result<(), Fault> {
        let covered = self.covered().max(1);
        let all = |range: &Range<u64>| {
            let end = range.end.div_ceil(covered);
            (range.start / covered..end.max(range.start / covered)).all(&has_block)
        };
        let roots = all(&(0..1)) && all(&self.l1) && all(&self.blocks);
        match roots && self.tables.keys().all(|place| has_block(place / covered)) {
            true => Ok(()),
            false => Err(IS_FREE),
        }
    }

    /// Checks that a block counts no table as free.
    pub(crate) fn check_block(&self, index: u64, counts: &[u8]) -> Result<(), Fault> {
        let covered = self.covered();
        let start = index.saturating_mul(covered);
        let range = start..start.saturating_add(covered);
        let is_used = |place: u64| self.is_used(place - start, counts);
        let root = |root: &Range<u64>| {
            let from = root.start.max(range.start);
            let end = root.end.min(range.end);
            (from..end.max(from)).step_by(iomem::fits(self.cluster_bytes, "a cluster")).all(is_used)
        };
        let roots = root(&(0..self.cluster_bytes)) && root(&self.l1) && root(&self.blocks);
        match roots && self.tables.range(range.clone()).all(|(place, _)| is_used(*place)) {
            true => Ok(()),
            false => Err(IS_FREE),
        }
    }

    /// Returns true if a count is above zero. `behind` is the distance in bytes from the first
    /// cluster of the block. Counts of less than a byte start with its lowest bits.
    fn is_used(&self, behind: u64, counts: &[u8]) -> bool {
        let bits = u64::from(self.count_bits);
        let bit = behind / self.cluster_bytes * bits;
        let at: usize = iomem::fits(bit / 8, "a place in a block");
        if bits >= 8 {
            let bytes: usize = iomem::fits(bits / 8, "bytes of a count");
            return counts.get(at..at + bytes).is_some_and(|count| count.iter().any(|b| *b != 0));
        }
        let mask = ((1u16 << bits) - 1) << (bit % 8);
        counts.get(at).is_some_and(|byte| u16::from(*byte) & mask != 0)
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: u64 = 512;

    fn places(bits: u32) -> MetadataMap {
        let mut places = MetadataMap::default();
        let (l1, blocks) = (2 * CLUSTER..2 * CLUSTER + 80, CLUSTER..2 * CLUSTER);
        places.set_roots(CLUSTER, bits, &l1, &blocks).unwrap();
        places.add(3 * CLUSTER, MetadataTable::Block(0)).unwrap();
        places.add(4 * CLUSTER, MetadataTable::L2(0)).unwrap();
        places
    }

    #[test]
    fn no_two_tables_are_in_one_place() {
        let mut known = places(16);
        known.add(4 * CLUSTER, MetadataTable::L2(0)).unwrap();
        for (place, table) in [
            (4 * CLUSTER, MetadataTable::L2(1)),
            (4 * CLUSTER, MetadataTable::Block(0)),
            (3 * CLUSTER, MetadataTable::Block(1)),
            (0, MetadataTable::L2(5)),
            (CLUSTER, MetadataTable::L2(6)),
            (2 * CLUSTER, MetadataTable::Block(7)),
        ] {
            assert_eq!(known.add(place, table), Err(ONE_PLACE), "{place} {table:?}");
        }
        assert_eq!(known.add(CLUSTER * 9 + 8, MetadataTable::L2(9)), Err(UNALIGNED));
        for (l1, blocks) in [
            (CLUSTER..CLUSTER + 8, CLUSTER..2 * CLUSTER),
            (0..8, CLUSTER..2 * CLUSTER),
            (4 * CLUSTER..5 * CLUSTER, CLUSTER..2 * CLUSTER),
            (CLUSTER * 20..CLUSTER * 21, 0..u64::MAX),
        ] {
            let mut known = places(16);
            assert_eq!(known.set_roots(CLUSTER, 16, &l1, &blocks), Err(ONE_PLACE));
        }
    }

    #[test]
    fn only_ranges_in_clusters_of_metadata_overlap_it() {
        let known = places(16);
        for cluster in 0..5 {
            let at = cluster * CLUSTER;
            assert!(known.overlaps(&(at + 100..at + 101)), "{cluster}");
            assert!(known.overlaps(&(at.saturating_sub(1)..at + 1)), "{cluster}");
        }
        assert!(!known.overlaps(&(5 * CLUSTER..100 * CLUSTER)));
    }

    #[test]
    fn no_table_counts_as_free_at_any_width_of_counts() {
        for bits in [1, 2, 4, 8, 16, 32, 64] {
            let known = places(bits);
            let bits: usize = iomem::fits(bits, "bits");
            let mut counts = vec![0; 512];
            for cluster in 0..5 {
                assert_eq!(known.check_block(0, &counts), Err(IS_FREE), "{bits} {cluster}");
                // The lowest bit of a count is in its last byte.
                let bit = cluster * bits;
                let at = if bits < 8 { bit / 8 } else { (bit + bits) / 8 - 1 };
                counts[at] |= 1 << (bit % 8);
            }
            known.check_block(0, &counts).unwrap();
            known.check_block(1, &[0; 512]).unwrap();
        }
    }

    #[test]
    fn each_table_is_counted_by_a_block() {
        let mut known = places(64);
        known.check_counted(|index| index == 0).unwrap();
        assert_eq!(known.check_counted(|_| false), Err(IS_FREE));
        known.add(64 * CLUSTER, MetadataTable::L2(1)).unwrap();
        assert_eq!(known.check_counted(|index| index == 0), Err(IS_FREE));
        known.check_counted(|index| index < 2).unwrap();
    }

    /// The header and both root tables, each in the range of another block.
    #[test]
    fn each_root_is_counted_by_a_block() {
        let mut known = MetadataMap::default();
        let covered = 64 * CLUSTER;
        let [l1, blocks] = [1, 3].map(|block| block * covered..(block + 1) * covered + CLUSTER);
        known.set_roots(CLUSTER, 64, &l1, &blocks).unwrap();
        known.check_counted(|_| true).unwrap();
        for missing in 0..6 {
            let expected = if missing < 5 { Err(IS_FREE) } else { Ok(()) };
            assert_eq!(known.check_counted(|index| index != missing), expected, "{missing}");
        }
    }
}
