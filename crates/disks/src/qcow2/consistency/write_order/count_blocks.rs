//! Reference counts and clusters that only the file counts, and not imago: counts that have fallen,
//! and clusters that are counted ahead. Also tables as the file holds them.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{OverCounted, State, WaitingWrites, WriteOrder};
use crate::qcow2::consistency::ahead_clusters::AheadClusters;
use crate::qcow2::consistency::counts;

/// A block of reference counts, some of which have just risen in the file.
#[derive(Debug)]
pub(in crate::qcow2) struct RisenBlock {
    pub(in crate::qcow2) place: u64,
    /// The place of the first cluster that the block counts.
    pub(in crate::qcow2) first: u64,
    pub(in crate::qcow2) cluster_bytes: u64,
    pub(in crate::qcow2) bits: u32,
    /// The counts in imago's memory, and in the file.
    pub(in crate::qcow2) wanted: Arc<[u8]>,
    pub(in crate::qcow2) file: Arc<[u8]>,
}

impl WriteOrder {
    /// Makes a block of reference counts that may be written at once: the file's block with the
    /// counts that rise. If some have fallen, `wanted` is kept.
    pub(in crate::qcow2) fn raise(&self, offset: u64, file: &[u8], wanted: &[u8]) -> Arc<[u8]> {
        self.change(|state| {
            let bits = state.count_bits;
            let before =
                state.over_counted.get(&offset).map_or(file, |over_counted| &over_counted.wanted);
            state.has_fallen |= has_fallen(before, wanted, bits);
            let mut raised = file.to_vec();
            raise(&mut raised, wanted, bits);
            let has_risen = raised != file;
            let raised: Arc<[u8]> = raised.into();
            if has_risen {
                state.risen = Some((offset, Arc::clone(&raised)));
                state.last_risen_place = Some(offset);
            }
            state.note_counts(offset, wanted, &raised);
            raised
        })
    }

    /// Notes the counts that a block has in the file, and in imago's memory (`wanted`).
    pub(in crate::qcow2) fn note_counts(&self, place: u64, wanted: &[u8], file: &Arc<[u8]>) {
        self.change(|state| state.note_counts(place, wanted, file));
    }

    /// Takes the block in which counts have risen since the last commit.
    pub(in crate::qcow2) fn take_risen(&self) -> Option<RisenBlock> {
        self.change(|state| {
            let (place, file) = state.risen.take()?;
            state.risen_block(place, file)
        })
    }

    /// The block in which counts have risen last, if its bytes in the file are known.
    pub(in crate::qcow2) fn last_risen(&self) -> Option<RisenBlock> {
        self.change(|state| {
            let place = state.last_risen_place?;
            let file = match state.over_counted.get(&place) {
                Some(over_counted) => over_counted.file.clone()?,
                None => state.table_cache.get(place)?,
            };
            state.risen_block(place, file)
        })
    }

    /// Adds clusters that were counted in the file, and are zeroes. The next flush makes them
    /// ready.
    pub(in crate::qcow2) fn add_ahead(
        &self,
        risen: &RisenBlock,
        file: &Arc<[u8]>,
        places: Vec<u64>,
    ) {
        self.change(|state| {
            state.note_counts(risen.place, &risen.wanted, file);
            state.written += 1;
            state.ahead.add(risen.cluster_bytes, places, state.written);
        });
    }

    fn change_ahead<T>(&self, change: impl FnOnce(&mut AheadClusters) -> T) -> T {
        self.change(|state| {
            let changed = change(&mut state.ahead);
            self.has_ahead.store(!state.ahead.is_empty(), Ordering::Relaxed);
            changed
        })
    }

    /// Returns true if clusters that were counted ahead are ready.
    pub(in crate::qcow2) fn has_ahead(&self) -> bool {
        self.has_ahead.load(Ordering::Relaxed)
    }

    /// The number of clusters that were counted ahead, ready or not.
    pub(in crate::qcow2) fn ahead(&self) -> usize {
        self.change(|state| state.ahead.len())
    }

    /// The number of clusters that are ready.
    pub(in crate::qcow2) fn ready_ahead(&self) -> u64 {
        self.change(|state| state.ahead.ready())
    }

    /// True if more clusters are to be counted.
    pub(in crate::qcow2) fn is_ahead_low(&self) -> bool {
        self.change(|state| state.ahead.is_low())
    }

    /// Returns true if all bytes of a range are in clusters that were counted ahead.
    pub(in crate::qcow2) fn is_ahead(&self, range: &Range<u64>) -> bool {
        self.has_ahead() && self.change(|state| state.ahead.has(range))
    }

    /// Takes clusters for use, if all were counted ahead. A pointer to them needs no flush.
    pub(in crate::qcow2) fn take_ahead(&self, range: &Range<u64>) -> bool {
        self.has_ahead() && self.change_ahead(|ahead| ahead.take(range))
    }

    /// Forgets the clusters that a range touches, since their bytes are about to change.
    pub(in crate::qcow2) fn remove_ahead(&self, range: &Range<u64>) {
        self.change_ahead(|ahead| ahead.remove(range));
    }

    /// Notes the end of a write that a pointer may depend on.
    pub(in crate::qcow2) fn note_written(&self) {
        self.change(|state| state.written += 1);
    }

    /// The number of writes that have ended, to be read before a flush begins.
    pub(in crate::qcow2) fn written(&self) -> u64 {
        self.change(|state| state.written)
    }

    /// Notes the end of a flush that began after this number of writes.
    pub(in crate::qcow2) fn note_stable(&self, written: u64) {
        self.change(|state| state.stable = state.stable.max(written));
        self.change_ahead(|ahead| ahead.note_stable(written));
    }

    /// Notes the failure of a flush.
    pub(in crate::qcow2) fn note_failed_flush(&self) {
        self.change_ahead(AheadClusters::drop_pending);
    }

    /// Returns true if waiting pointers may depend on a write that no flush has covered.
    pub(in crate::qcow2) fn needs_flush(&self) -> bool {
        self.change(|state| state.stable < state.written || !state.block_entries.is_empty())
    }

    /// The bytes of a table in the file, if they are known.
    pub(in crate::qcow2) fn cached_table(&self, place: u64) -> Option<Arc<[u8]>> {
        self.change(|state| match state.over_counted.get(&place) {
            Some(over_counted) => over_counted.file.clone(),
            None => state.table_cache.get(place),
        })
    }

    /// Keeps the bytes of a table in the file.
    pub(in crate::qcow2) fn cache_table(&self, place: u64, table: Arc<[u8]>) {
        self.change(|state| {
            let is_table = state.roots.is_some() && state.metadata_map.get(place).is_some();
            if is_table && !state.over_counted.contains_key(&place) {
                state.table_cache.insert(place, table);
            }
        });
    }

    /// Keeps the bytes of a table that was read, unless entries were written during the read.
    /// `before` is the count of [writes](WriteOrder::entry_writes) at its start.
    pub(in crate::qcow2) fn cache_read(&self, place: u64, table: &[u8], before: u64) {
        if before.is_multiple_of(2) && before == self.entry_writes() {
            self.cache_table(place, table.into());
        }
    }

    /// Notes that bytes of the file are zeroes, which may be a new table.
    pub(in crate::qcow2) fn cache_zeroes(&self, place: u64, bytes: usize) {
        self.change(|state| state.table_cache.insert(place, vec![0; bytes].into()));
    }

    /// Forgets the bytes of a table, since the file gets other bytes there.
    pub(in crate::qcow2) fn forget_table(&self, place: u64) {
        self.change(|state| {
            state.table_cache.forget(place);
            if let Some(over_counted) = state.over_counted.get_mut(&place) {
                over_counted.file = None;
            }
        });
    }

    /// The blocks with counts that have fallen, if any. Clusters that were counted ahead stay
    /// counted.
    pub(in crate::qcow2) fn fallen(&self) -> WaitingWrites {
        self.change(|state| match state.has_fallen {
            true => state.lowered(true),
            false => WaitingWrites::new(),
        })
    }

    /// Notes that all fallen counts are in the file.
    pub(in crate::qcow2) fn note_fallen_written(&self) {
        self.change(|state| state.has_fallen = false);
    }

    /// All blocks of which the file has higher counts, with the counts of imago.
    pub(in crate::qcow2) fn all_over_counted(&self) -> WaitingWrites {
        self.change(|state| state.lowered(false))
    }

    /// Notes that a block is in the file with these counts.
    pub(in crate::qcow2) fn note_lowered(&self, place: u64, counts: &Arc<[u8]>) {
        self.change(|state| {
            if let Some(OverCounted { wanted, .. }) = state.over_counted.get(&place) {
                let wanted = Arc::clone(wanted);
                state.note_counts(place, &wanted, counts);
            }
        });
    }

    /// Forgets clusters that were counted ahead, and tables: another process may write to the file.
    pub(in crate::qcow2) fn forget_file(&self) {
        self.change_ahead(AheadClusters::clear);
        self.change(|state| state.table_cache.clear());
    }
}

impl State {
    fn risen_block(&self, place: u64, file: Arc<[u8]>) -> Option<RisenBlock> {
        let (cluster_bytes, bits) = (self.metadata_map.cluster_bytes(), self.count_bits);
        let first = self.metadata_map.first_counted(place)?;
        let wanted =
            self.over_counted.get(&place).map_or(&file, |over_counted| &over_counted.wanted);
        let wanted = Arc::clone(wanted);
        Some(RisenBlock { place, first, cluster_bytes, bits, wanted, file })
    }

    /// Notes the counts that a block has in the file, and in imago's memory (`wanted`).
    fn note_counts(&mut self, place: u64, wanted: &[u8], file: &Arc<[u8]>) {
        if **file == *wanted {
            self.over_counted.remove(&place);
            self.table_cache.insert(place, Arc::clone(file));
        } else {
            self.table_cache.forget(place);
            let over_counted = OverCounted { wanted: wanted.into(), file: Some(Arc::clone(file)) };
            self.over_counted.insert(place, over_counted);
        }
    }

    /// The blocks that the file should have, without the ones that it has already.
    fn lowered(&self, keeps_ahead: bool) -> WaitingWrites {
        let mut lowered = WaitingWrites::new();
        for (place, OverCounted { wanted, file }) in &self.over_counted {
            // After an error the mark stays, so that the next opening checks all counts.
            let Some(file) = file else { continue };
            let mut counts = wanted.to_vec();
            if keeps_ahead && let Some(first) = self.metadata_map.first_counted(*place) {
                let cluster = self.metadata_map.cluster_bytes();
                let is_ahead = |index: usize| self.ahead.is_counted(first + index as u64 * cluster);
                keep_file_counts(&mut counts, file, self.count_bits, is_ahead);
            }
            if counts != **file {
                lowered.insert(*place, counts.into());
            }
        }
        lowered
    }
}

/// Raises each count to at least that of `wanted`. Counts of less than a byte start with its lowest
/// bits.
fn raise(counts: &mut [u8], wanted: &[u8], bits: u32) {
    assert_eq!(counts.len(), wanted.len(), "blocks of counts have one size");
    if bits >= 8 {
        let bytes: usize = iomem::fits(u64::from(bits / 8), "bytes of a count");
        for (count, wanted) in counts.chunks_mut(bytes).zip(wanted.chunks(bytes)) {
            if *count < *wanted {
                count.copy_from_slice(wanted);
            }
        }
        return;
    }
    let mask = (1u8 << bits) - 1;
    for (byte, wanted) in counts.iter_mut().zip(wanted) {
        let parts = (0..8).step_by(iomem::fits(u64::from(bits), "bits of a count"));
        let part = |byte: u8, at: u32| byte & (mask << at);
        *byte =
            parts.map(|at| part(*byte, at).max(part(*wanted, at))).fold(0, |sum, part| sum | part);
    }
}

/// The indices of counts in the pieces of two blocks that differ.
fn differing(one: &[u8], other: &[u8], bits: u32) -> impl Iterator<Item = usize> {
    const PIECE: usize = 64;
    let per_piece = PIECE * 8 / usize::try_from(bits.max(1)).unwrap_or(1);
    let pieces = one.chunks(PIECE).zip(other.chunks(PIECE)).enumerate();
    let pieces = pieces.filter(|(_, (one, other))| one != other);
    pieces.flat_map(move |(piece, _)| piece * per_piece..(piece + 1) * per_piece)
}

/// Returns true if any count is smaller than before.
fn has_fallen(before: &[u8], after: &[u8], bits: u32) -> bool {
    differing(before, after, bits)
        .any(|index| counts::get(after, index, bits) < counts::get(before, index, bits))
}

/// Replaces counts with the file's if `test` accepts their index.
fn keep_file_counts(counts: &mut [u8], file: &[u8], bits: u32, test: impl Fn(usize) -> bool) {
    let wanted = counts.to_vec();
    for index in differing(&wanted, file, bits).filter(|index| test(*index)) {
        counts::set(counts, index, bits, counts::get(file, index, bits));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_covers_the_writes_that_ended_before_it_began() {
        let order = WriteOrder::default();
        assert!(!order.needs_flush());
        order.note_written();
        let before = order.written();
        order.note_written();
        order.note_stable(before);
        assert!(order.needs_flush(), "one has ended after the flush had begun");
        let all = order.written();
        order.note_stable(all);
        assert!(!order.needs_flush());
        // A flush that began earlier may end later.
        order.note_stable(before);
        assert!(!order.needs_flush());
    }

    #[test]
    fn counts_of_all_widths_rise() {
        for (bits, old, wanted, expected) in [
            (1, [0b0101_0000, 0], [0b0011_0000, 1], [0b0111_0000, 1]),
            (2, [0b0110_0011, 0], [0b1001_0001, 1], [0b1010_0011, 1]),
            (4, [0x1f, 0x20], [0x21, 0x03], [0x2f, 0x23]),
            (8, [3, 7], [5, 6], [5, 7]),
            (16, [1, 0], [0, 255], [1, 0]),
        ] {
            let mut counts = old;
            raise(&mut counts, &wanted, bits);
            assert_eq!(counts, expected, "{bits}");
        }
    }
}
