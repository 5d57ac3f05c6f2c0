//! Entries of L2 tables that are written without imago, which would write whole tables. Each leads
//! to a cluster that was counted ahead, so its write waits for nothing.
//!
//! imago has the entries in memory too, and writes the same bytes with its next commit.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::{COPIED, State, WriteOrder};

/// The new place of a cluster of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::qcow2) struct Entry {
    pub(in crate::qcow2) at: u64,
    pub(in crate::qcow2) offset: u64,
}

/// A table with new entries.
#[derive(Debug)]
pub(in crate::qcow2) struct Changing {
    pub(in crate::qcow2) place: u64,
    /// The bytes in the file after the write of the changed blocks.
    pub(in crate::qcow2) table: Arc<[u8]>,
    /// The changed blocks, as ranges of the table.
    pub(in crate::qcow2) blocks: Vec<Range<usize>>,
}

impl WriteOrder {
    /// Puts entries into tables. `None` if a table is new or unknown, or older writes wait. Then
    /// nothing has changed, and a commit of all tables must write the entries.
    ///
    /// Until [`end_entries`](Self::end_entries) the file's bytes of these tables are unknown. Only
    /// one caller may do this at a time.
    pub(in crate::qcow2) fn begin_entries(
        &self,
        entries: &[Entry],
        block_bytes: usize,
    ) -> Option<Vec<Changing>> {
        self.change(|state| {
            let tables = state.by_table(entries)?;
            state.entry_writes += 1;
            let change = |(place, new): (u64, Vec<(usize, u64)>)| {
                let mut table = state.table_cache.remove(place)?;
                let bytes = Arc::make_mut(&mut table);
                let mut blocks: Vec<Range<usize>> = Vec::new();
                for (at, entry) in new {
                    bytes[at..at + 8].copy_from_slice(&entry.to_be_bytes());
                    let start = at - at % block_bytes;
                    let end = (start + block_bytes).min(bytes.len());
                    match blocks.last_mut() {
                        Some(last) if last.end >= start => last.end = last.end.max(end),
                        _ => blocks.push(start..end),
                    }
                }
                Some(Changing { place, table, blocks })
            };
            Some(tables.into_iter().filter_map(change).collect())
        })
    }

    /// Ends a write of entries. The file now holds `tables`. After an error `tables` is empty, and
    /// the bytes stay unknown.
    pub(in crate::qcow2) fn end_entries(&self, tables: Vec<Changing>) {
        self.change(|state| {
            state.entry_writes += 1;
            for Changing { place, table, .. } in tables {
                state.table_cache.insert(place, table);
            }
        });
    }

    /// Counts the beginnings and ends of writes of entries. The count is odd during a write.
    pub(in crate::qcow2) fn entry_writes(&self) -> u64 {
        self.change(|state| state.entry_writes)
    }
}

impl State {
    /// Groups entries by the place of their table, and sorts them by their place in it. `None` as
    /// for [`WriteOrder::begin_entries`].
    fn by_table(&self, entries: &[Entry]) -> Option<BTreeMap<u64, Vec<(usize, u64)>>> {
        if self.has_waiting() {
            return None;
        }
        let cluster = self.metadata_map.cluster_bytes().max(512);
        let per_table = cluster / 8;
        let mut tables: BTreeMap<u64, Vec<(usize, u64)>> = BTreeMap::new();
        for Entry { at, offset } in entries {
            let (table, index) = (at / cluster / per_table, at / cluster % per_table);
            let place = self.metadata_map.l2_place(table)?;
            let at: usize = iomem::fits(index * 8, "a place in a table");
            tables.entry(place).or_default().push((at, offset | COPIED));
        }
        let is_known =
            |place| self.table_cache.table_len(place).map(|bytes| bytes as u64) == Some(cluster);
        tables.keys().all(|place| is_known(*place)).then(|| {
            tables.values_mut().for_each(|entries| entries.sort_unstable());
            tables
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{BLOCK, L1, L2, begun};
    use super::super::{OFFSET, WriteAction};
    use super::*;

    const CLUSTER: u64 = 4096;

    fn entries() -> [Entry; 3] {
        [(0, 20), (511, 21), (1, 22)]
            .map(|(index, place)| Entry { at: index * CLUSTER, offset: place * CLUSTER })
    }

    #[test]
    fn entries_change_only_their_own_blocks_of_a_table() {
        let order = begun();
        assert!(order.begin_entries(&entries(), 512).is_none(), "its table is not known");
        order.cache_table(L2, vec![0; 4096].into());
        let changing = order.begin_entries(&entries(), 512).unwrap();
        let [Changing { place: L2, table, blocks }] = &changing[..] else { panic!("{changing:?}") };
        assert_eq!(blocks, &[0..512, 3584..4096]);
        let entry = |index: usize| {
            u64::from_be_bytes(*table[index * 8..].first_chunk().unwrap()) & OFFSET & !COPIED
        };
        assert_eq!([0, 1, 2, 511].map(entry), [20, 22, 0, 21].map(|place| place * CLUSTER));
        assert!(order.cached_table(L2).is_none(), "nobody knows what the file has");
        order.end_entries(changing);
        assert_eq!(order.cached_table(L2).unwrap()[8..16], (COPIED | (22 * CLUSTER)).to_be_bytes());
        let changing = order.begin_entries(&entries(), 512).unwrap();
        drop(changing);
        order.end_entries(Vec::new());
        assert!(order.cached_table(L2).is_none(), "after an error nobody knows either");
    }

    #[test]
    fn entries_need_a_commit_when_a_table_is_missing_or_writes_wait() {
        let order = begun();
        order.cache_table(L2, vec![0; 4096].into());
        let far = Entry { at: 512 * CLUSTER, offset: 20 * CLUSTER };
        assert!(order.begin_entries(&[entries()[0], far], 512).is_none());
        assert!(order.cached_table(L2).is_some());
        assert_eq!(order.classify(L1, &(L2 | COPIED).to_be_bytes()), WriteAction::Wait);
        assert!(order.begin_entries(&entries(), 512).is_none());
        order.drop_pointers();
        let block = [1u16; 2048].map(u16::to_be_bytes).concat();
        order.raise(BLOCK, &block, &[0; 4096]);
        assert!(order.begin_entries(&entries(), 512).is_none(), "counts have fallen");
    }

    /// imago may read a table while entries are written to it.
    #[test]
    fn a_table_that_was_read_during_a_write_of_entries_is_not_cached() {
        let order = begun();
        let old = [0; 4096];
        let read = |before| order.cache_read(L2, &old, before);
        read(order.entry_writes());
        let before = order.entry_writes();
        let changing = order.begin_entries(&entries(), 512).unwrap();
        let beside = order.entry_writes();
        read(before);
        read(beside);
        assert!(order.cached_table(L2).is_none());
        order.end_entries(changing);
        for before in [before, beside] {
            read(before);
            assert_ne!(order.cached_table(L2).unwrap()[..], old);
        }
        read(order.entry_writes());
        assert_eq!(order.cached_table(L2).unwrap()[..], old);
    }
}
