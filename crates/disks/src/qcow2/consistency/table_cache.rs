//! Tables as the file holds them, so that only changed sectors are written.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// The most bytes of tables that are kept in memory.
const BYTES_MAX: usize = 16 << 20;
/// Tables up to this length are written as a whole. Tests have shorter ones.
const TABLE_BYTES_MIN: usize = if cfg!(test) { 256 } else { 4096 };

#[derive(Debug, Default)]
pub(crate) struct TableCache {
    /// Tables by place, each with the time of its last use.
    tables: HashMap<u64, (Arc<[u8]>, u64)>,
    bytes: usize,
    time: u64,
}

impl TableCache {
    /// The bytes of a table, if they are known.
    pub(crate) fn get(&mut self, place: u64) -> Option<Arc<[u8]>> {
        self.time += 1;
        let time = self.time;
        let (table, used) = self.tables.get_mut(&place)?;
        *used = time;
        Some(Arc::clone(table))
    }

    /// The length of a table, if its bytes are known.
    pub(crate) fn table_len(&self, place: u64) -> Option<usize> {
        self.tables.get(&place).map(|(table, _)| table.len())
    }

    /// Forgets a table and returns its bytes.
    pub(crate) fn remove(&mut self, place: u64) -> Option<Arc<[u8]>> {
        let (table, _) = self.tables.remove(&place)?;
        self.bytes -= table.len();
        Some(table)
    }

    /// Keeps a table as the file holds it.
    pub(crate) fn insert(&mut self, place: u64, table: Arc<[u8]>) {
        self.forget(place);
        if table.len() <= TABLE_BYTES_MIN {
            return;
        }
        self.time += 1;
        self.bytes += table.len();
        self.tables.insert(place, (table, self.time));
        while self.bytes > BYTES_MAX {
            let oldest = self.tables.iter().min_by_key(|(_, (_, used))| *used);
            let Some(oldest) = oldest.map(|(place, _)| *place) else { return };
            self.forget(oldest);
        }
        let bytes: usize = self.tables.values().map(|(table, _)| table.len()).sum();
        debug_assert_eq!(self.bytes, bytes, "the bytes are those of the tables");
    }

    pub(crate) fn forget(&mut self, place: u64) {
        drop(self.remove(place));
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// The ranges of `new` that differ from `old`, in whole pieces of `align` bytes. All of `new` if
/// the lengths differ.
pub(crate) fn changes(old: &[u8], new: &[u8], align: usize) -> Vec<Range<usize>> {
    let mut changes: Vec<Range<usize>> = Vec::new();
    if old.len() != new.len() {
        return vec![0..new.len(); 1];
    }
    let pieces = old.chunks(align).zip(new.chunks(align));
    for (index, (_, piece)) in pieces.enumerate().filter(|(_, (old, new))| old != new) {
        let (start, end) = (index * align, index * align + piece.len());
        match changes.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => changes.push(start..end),
        }
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changed_sectors_are_written() {
        let old = vec![0; 8192];
        let mut new = old.clone();
        assert!(changes(&old, &new, 512).is_empty());
        for at in [511, 512, 8191] {
            new[at] = 1;
        }
        assert_eq!(changes(&old, &new, 512), [0..1024, 7680..8192]);
        assert_eq!(changes(&old, &new, 4096), vec![0..8192; 1]);
        assert_eq!(changes(&[], &new, 512), vec![0..8192; 1]);
    }

    #[test]
    fn the_least_recently_used_tables_are_forgotten() {
        let table: Arc<[u8]> = vec![0; 2 << 20].into();
        let mut cache = TableCache::default();
        for place in 0..8 {
            cache.insert(place, Arc::clone(&table));
        }
        assert!(cache.get(0).is_some());
        cache.insert(8, Arc::clone(&table));
        assert!(cache.get(0).is_some() && cache.get(1).is_none() && cache.get(8).is_some());
        cache.insert(9, vec![0; TABLE_BYTES_MIN].into());
        assert!(cache.get(9).is_none());
        cache.forget(0);
        assert!(cache.get(0).is_none() && cache.bytes == 14 << 20);
    }
}
