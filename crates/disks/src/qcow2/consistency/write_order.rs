//! The order in which changes of an image reach its file.
//!
//! A power cut may lose any write that no flush has covered. The remaining writes must never leave
//! a pointer to something that is missing or counts as free. So some writes wait:
//!
//! 1. Data, new tables, and reference counts that rise are written at once.
//! 2. Entries of the table that names blocks of reference counts are written when a flush has made
//!    these blocks stable.
//! 3. Pointers, which are the entries of L1 and L2 tables and the fields of the header, are written
//!    when a flush has made all of this stable. Most pointers need no flush: they lead to clusters
//!    that were counted and zeroed ahead (`ahead_clusters.rs`).
//! 4. Reference counts that fall are written when another flush has made the removal of the
//!    pointers stable.
//!
//! Waiting writes are kept here, and reads find them here. The loss of power, or of the process,
//! can then leave leaked clusters, and nothing else. `leaks.rs` frees them. An error of the file
//! cannot hit a waiting write either: imago would continue with its memory, and never write it
//! again.

pub(crate) mod count_blocks;
pub(crate) mod entries;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

use super::ahead_clusters::AheadClusters;
use super::mark::Mark;
use super::metadata_map::{Fault, MetadataMap, MetadataTable};
use super::table_cache::TableCache;

/// The largest table that is written as a whole.
const TABLE_BYTES_MAX: u64 = 2 << 20;

/// The offset in an entry of a table of tables. The bits below are reserved, as are the bits above
/// in L1.
const OFFSET: u64 = !511;
pub(crate) const L1_OFFSET: u64 = OFFSET & ((1 << 56) - 1);
/// The flag of an entry: nothing else points to the cluster.
const COPIED: u64 = 1 << 63;

/// Waiting writes, by their offset.
pub(crate) type WaitingWrites = BTreeMap<u64, Arc<[u8]>>;

/// The handling of a write.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum WriteAction {
    /// Make the write at once.
    Now,
    /// The write was kept, to be made later.
    Wait,
    /// The write is a block of reference counts. Counts that rise are written at once.
    RaiseCounts,
    /// Make the write when a flush has covered its new targets. Its old targets may be used again
    /// only after another flush.
    BetweenFlushes,
    /// Do not make the write: see [`WriteOrder::refuse`].
    Refuse,
}

/// The places of the tables of tables, by the header.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Roots {
    /// L1.
    pub(crate) l1: Range<u64>,
    /// The table of blocks of reference counts.
    pub(crate) counts: Range<u64>,
}

/// The bytes of a header that [`Roots::parse`] reads.
pub(crate) const FRONT_BYTES: usize = 104;

impl Roots {
    /// Reads the front of an image.
    pub(crate) fn parse(front: &[u8; FRONT_BYTES]) -> Self {
        let number = |range: Range<usize>| {
            front[range].iter().fold(0, |sum: u64, byte| (sum << 8) | u64::from(*byte))
        };
        let cluster = 1u64.checked_shl(u32::from(front[23])).unwrap_or(0);
        let range = |start: u64, bytes: u64| start..start.saturating_add(bytes);
        Self {
            l1: range(number(40..48), number(36..40) * 8),
            counts: range(number(48..56), number(56..60).saturating_mul(cluster)),
        }
    }
}

/// The width of a reference count, in bits.
pub(crate) fn count_bits(front: &[u8; FRONT_BYTES]) -> u32 {
    if front[7] < 3 { 16 } else { 1 << u32::from(front[99]).min(6) }
}

/// The cluster size, clamped to the sizes of the format: the front may have changed since the image
/// was opened.
fn cluster_bytes(front: &[u8; FRONT_BYTES]) -> u64 {
    1 << u32::from(front[23]).clamp(9, 21)
}

#[derive(Debug, Default)]
pub(crate) struct WriteOrder {
    state: Mutex<State>,
    pub(crate) mark: Mark,
    /// The size of the disk if imago sees whole clusters of it: see `zstd.rs`. 0 if it does not.
    disk_bytes: AtomicU64,
    /// True if clusters are counted ahead, and ready.
    has_ahead: AtomicBool,
}

/// A block of reference counts, some of which are higher in the file than in imago's memory.
#[derive(Debug)]
struct OverCounted {
    wanted: Arc<[u8]>,
    /// `None` if an error has left it unknown.
    file: Option<Arc<[u8]>>,
}

#[derive(Debug, Default)]
struct State {
    /// `None` if the image is not open yet, or not written to.
    roots: Option<Roots>,
    count_bits: u32,
    /// L2 tables, and blocks of reference counts.
    metadata_map: MetadataMap,
    /// True while L1 moves: the header waits too.
    is_l1_moving: bool,
    refusal: Option<Fault>,
    /// Waiting entries of the table of blocks of reference counts.
    block_entries: WaitingWrites,
    pointers: WaitingWrites,
    /// Blocks with counts that have fallen, or that were counted ahead.
    over_counted: BTreeMap<u64, OverCounted>,
    /// True if some of these counts have fallen.
    has_fallen: bool,
    /// The block in which counts have risen since the last commit, as the file holds it.
    risen: Option<(u64, Arc<[u8]>)>,
    /// The block in which counts have risen last.
    last_risen_place: Option<u64>,
    ahead: AheadClusters,
    table_cache: TableCache,
    /// The number of writes that a pointer may depend on, and the number of these that a flush has
    /// covered.
    written: u64,
    stable: u64,
    entry_writes: u64,
}

impl State {
    fn has_waiting(&self) -> bool {
        !self.block_entries.is_empty() || !self.pointers.is_empty() || self.has_fallen
    }

    fn classify(&mut self, offset: u64, data: &[u8]) -> Result<WriteAction, Fault> {
        let Some(roots) = &mut self.roots else { return Ok(WriteAction::Now) };
        if self.refusal.is_some() {
            return Ok(WriteAction::Refuse);
        }
        let (l1, counts) = (roots.l1.clone(), roots.counts.clone());
        let known = |end: u64| iomem::fits((end - offset).min(data.len() as u64), "bytes");
        if offset == 0 {
            if let Some(front) = data.first_chunk() {
                *roots = Roots::parse(front);
                // A moved table was written with its waiting entries, and data may soon take its
                // old place.
                self.block_entries.retain(|place, _| roots.counts.contains(place));
                let (cluster, bits) = (cluster_bytes(front), self.count_bits);
                self.metadata_map.set_roots(cluster, bits, &roots.l1, &roots.counts)?;
            }
            if !self.is_l1_moving {
                return Ok(WriteAction::BetweenFlushes);
            }
        } else if l1.contains(&offset) {
            let new: usize = known(l1.end);
            self.add_entries((offset - l1.start) / 8, &data[..new], L1_OFFSET, MetadataTable::L2)?;
        } else if counts.contains(&offset) {
            let new: usize = known(counts.end);
            self.add_entries(
                (offset - counts.start) / 8,
                &data[..new],
                OFFSET,
                MetadataTable::Block,
            )?;
            self.block_entries.insert(offset, data.into());
            return Ok(WriteAction::Wait);
        } else {
            match self.metadata_map.get(offset) {
                Some(MetadataTable::L2(_)) => {}
                Some(MetadataTable::Block(index)) => {
                    self.metadata_map.check_block(index, data)?;
                    return Ok(WriteAction::RaiseCounts);
                }
                None => return Ok(WriteAction::Now),
            }
        }
        self.pointers.insert(offset, data.into());
        Ok(WriteAction::Wait)
    }

    /// Records the tables that a part of a table of tables names, from this index on.
    fn add_entries(
        &mut self,
        index: u64,
        table: &[u8],
        offset: u64,
        kind: fn(u64) -> MetadataTable,
    ) -> Result<(), Fault> {
        for (index, entry) in (index..).zip(entries(table)) {
            if entry & offset != 0 {
                self.metadata_map.add(entry & offset, kind(index))?;
            }
        }
        Ok(())
    }
}

impl WriteOrder {
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// Starts to classify the writes to an image. `l1` and `counts` are the contents of its tables
    /// of tables.
    pub(crate) fn begin(
        &self,
        front: &[u8; FRONT_BYTES],
        l1: &[u8],
        counts: &[u8],
    ) -> Result<(), Fault> {
        if entries(l1).any(|entry| entry & L1_OFFSET != 0 && entry & COPIED == 0) {
            return Err("its tables are used in several places");
        }
        self.change(|state| {
            let roots = Roots::parse(front);
            state.count_bits = count_bits(front);
            let (cluster, bits) = (cluster_bytes(front), state.count_bits);
            state.metadata_map.set_roots(cluster, bits, &roots.l1, &roots.counts)?;
            // Tables may have been created while these were read.
            state.add_entries(0, l1, L1_OFFSET, MetadataTable::L2)?;
            state.add_entries(0, counts, OFFSET, MetadataTable::Block)?;
            let has_block = |index: u64| {
                let at = usize::try_from(index).ok().and_then(|index| index.checked_mul(8));
                let entry = at.and_then(|at| counts.get(at..)?.first_chunk());
                entry.is_some_and(|entry| u64::from_be_bytes(*entry) & OFFSET != 0)
            };
            state.metadata_map.check_counted(has_block)?;
            state.roots = Some(roots);
            Ok(())
        })
    }

    /// The size of the disk if imago sees whole clusters of it.
    pub(crate) fn disk_bytes(&self) -> Option<u64> {
        Some(self.disk_bytes.load(Relaxed)).filter(|bytes| *bytes > 0)
    }

    pub(crate) fn is_rounded(&self) -> bool {
        self.disk_bytes().is_some()
    }

    /// Lets imago see whole clusters of a disk of this size.
    pub(crate) fn set_disk_bytes(&self, bytes: u64) {
        self.disk_bytes.store(bytes, Relaxed);
    }

    /// Marks the start (true) or the end (false) of a move of L1.
    pub(crate) fn set_l1_moving(&self, is_moving: bool) {
        self.change(|state| state.is_l1_moving = is_moving);
    }

    /// Refuses all writes from now on. imago does not know the content of the file, and would use
    /// clusters twice.
    pub(crate) fn refuse(&self, why: Fault) {
        self.change(|state| {
            state.refusal.get_or_insert(why);
        });
    }

    /// The reason to refuse writes.
    pub(crate) fn refusal(&self) -> Option<Fault> {
        self.change(|state| state.refusal)
    }

    /// Checks data that was read, if it is a block of reference counts.
    pub(crate) fn check_read(&self, offset: u64, data: &[u8]) -> Result<(), Fault> {
        self.change(|state| match state.metadata_map.get(offset) {
            Some(MetadataTable::Block(index)) => state.metadata_map.check_block(index, data),
            _ => Ok(()),
        })
    }

    /// Returns true if bytes of the file belong to a table or to the header. No data can be there.
    pub(crate) fn overlaps_metadata(&self, range: &Range<u64>) -> bool {
        self.change(|state| state.roots.is_some() && state.metadata_map.overlaps(range))
    }

    /// Decides the handling of a write, and keeps it if it has to wait.
    pub(crate) fn classify(&self, offset: u64, data: &[u8]) -> WriteAction {
        self.change(|state| {
            state.classify(offset, data).unwrap_or_else(|fault| {
                state.refusal.get_or_insert(fault);
                WriteAction::Refuse
            })
        })
    }

    /// Puts waiting writes over data that was read from the file.
    pub(crate) fn overlay_waiting(&self, offset: u64, data: &mut [u8]) {
        let end = offset + data.len() as u64;
        let from = offset.saturating_sub(TABLE_BYTES_MAX);
        self.change(|state| {
            let waiting = [&state.block_entries, &state.pointers];
            let waiting = waiting.into_iter().flat_map(|held| held.range(from..end));
            let over_counted =
                state.over_counted.range(from..end).map(|(place, block)| (place, &block.wanted));
            for (place, kept) in waiting.chain(over_counted) {
                let start = offset.max(*place);
                let stop = end.min(place + kept.len() as u64);
                if start < stop {
                    let within = |base: u64| -> Range<usize> {
                        iomem::fits(start - base, "a place")..iomem::fits(stop - base, "a place")
                    };
                    data[within(offset)].copy_from_slice(&kept[within(*place)]);
                }
            }
        });
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.change(|state| !state.has_waiting())
    }

    /// The waiting entries of the table of blocks of reference counts. Reads find them here until
    /// [`drop_block_entries`](Self::drop_block_entries).
    pub(crate) fn block_entries(&self) -> WaitingWrites {
        self.change(|state| state.block_entries.clone())
    }

    /// Drops the waiting entries: all of them are in the file.
    pub(crate) fn drop_block_entries(&self) {
        self.change(|state| state.block_entries.clear());
    }

    /// The waiting pointers. Reads find them here until [`drop_pointers`](Self::drop_pointers).
    pub(crate) fn pointers(&self) -> WaitingWrites {
        self.change(|state| state.pointers.clone())
    }

    /// Drops the waiting pointers: all of them are in the file.
    pub(crate) fn drop_pointers(&self) {
        self.change(|state| state.pointers.clear());
    }
}

fn entries(table: &[u8]) -> impl Iterator<Item = u64> {
    table.as_chunks().0.iter().map(|entry| u64::from_be_bytes(*entry))
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) const L1: u64 = 4096;
    pub(super) const L2: u64 = 8192;
    pub(super) const BLOCK: u64 = 12_288;

    fn front() -> [u8; FRONT_BYTES] {
        let mut front = [0; FRONT_BYTES];
        front[7] = 3;
        front[23] = 12;
        front[39] = 100;
        front[40..48].copy_from_slice(&L1.to_be_bytes());
        front[48..56].copy_from_slice(&(L1 * 5).to_be_bytes());
        front[59] = 1;
        front[99] = 4;
        front
    }

    pub(super) fn begun() -> WriteOrder {
        let order = WriteOrder::default();
        assert_eq!(order.classify(L1, &[0; 512]), WriteAction::Now);
        let (l1, counts) = ((L2 | COPIED).to_be_bytes(), BLOCK.to_be_bytes());
        order.begin(&front(), &l1, &counts).unwrap();
        order
    }

    #[test]
    fn waiting_pointers_are_visible_to_reads() {
        let order = begun();
        assert_eq!(order.classify(L2 * 8, &[1; 4096]), WriteAction::Now);
        let new = [L2, L2 * 8].map(|place| (place | COPIED).to_be_bytes()).concat();
        for (offset, data) in [(L2, &[2; 4096][..]), (L1, &new), (L2 * 8, &[3; 4096])] {
            assert_eq!(order.classify(offset, data), WriteAction::Wait, "{offset}");
        }
        let mut read = [0; 1024];
        order.overlay_waiting(L2 + 3584, &mut read);
        assert!(read[..512] == [2; 512] && read[512..] == [0; 512]);
        assert_eq!(order.pointers().len(), 3);
        order.drop_pointers();
        assert!(order.is_empty());
        assert_eq!(order.classify(0, &front()), WriteAction::BetweenFlushes);
        order.set_l1_moving(true);
        assert_eq!(order.classify(0, &front()), WriteAction::Wait);
    }

    #[test]
    fn blocks_of_counts_wait_before_pointers_unless_their_table_moves() {
        let order = begun();
        let entries = [BLOCK, BLOCK * 2].map(u64::to_be_bytes).concat();
        assert_eq!(order.classify(L1 * 5, &entries), WriteAction::Wait);
        assert!(order.pointers().is_empty() && order.block_entries().len() == 1);
        assert_eq!(order.classify(BLOCK * 2, &[0; 512]), WriteAction::RaiseCounts);
        let mut read = [0; 16];
        order.overlay_waiting(L1 * 5, &mut read);
        assert_eq!(read[..], entries[..]);
        assert!(!order.is_empty());
        let mut moved = front();
        moved[48..56].copy_from_slice(&(L1 * 9).to_be_bytes());
        assert_eq!(order.classify(0, &moved), WriteAction::BetweenFlushes);
        assert!(order.is_empty());
        assert_eq!(order.classify(L1 * 9, &entries), WriteAction::Wait);
        order.drop_block_entries();
        assert!(order.is_empty());
    }

    #[test]
    fn a_table_that_was_made_during_the_load_is_known() {
        let order = begun();
        let l1 = (L2 | COPIED).to_be_bytes();
        let with_another = [l1, ((L2 * 8) | COPIED).to_be_bytes()].concat();
        assert_eq!(order.classify(L1, &with_another), WriteAction::Wait);
        order.begin(&front(), &l1, &BLOCK.to_be_bytes()).unwrap();
        assert_eq!(order.classify(L2 * 8, &[1; 4096]), WriteAction::Wait);
    }

    #[test]
    fn nothing_is_written_once_writes_are_refused() {
        let order = begun();
        order.refuse("broken");
        for offset in [0, L1, L2, BLOCK, L1 * 5, L2 * 8] {
            assert_eq!(order.classify(offset, &front()), WriteAction::Refuse, "{offset}");
        }
    }

    #[test]
    fn counts_rise_at_once_and_fall_later() {
        let order = begun();
        let wanted = [1u16, 1, 2, 1, 0, 1, 2, 0].map(u16::to_be_bytes).concat();
        assert_eq!(order.classify(BLOCK, &wanted), WriteAction::RaiseCounts);
        let file = [0u16, 1, 2, 1, 1, 1, 300, 0].map(u16::to_be_bytes).concat();
        let raised = order.raise(BLOCK, &file, &wanted);
        assert_eq!(*raised, [1u16, 1, 2, 1, 1, 1, 300, 0].map(u16::to_be_bytes).concat());
        let mut read = raised.to_vec();
        order.overlay_waiting(BLOCK, &mut read);
        assert_eq!(read, wanted);
        assert_eq!(*order.fallen()[&BLOCK], wanted);
        order.note_lowered(BLOCK, &wanted.into());
        order.note_fallen_written();
        assert!(order.is_empty() && order.all_over_counted().is_empty());
    }

    #[test]
    fn a_table_that_would_count_as_free_makes_all_writes_fail() {
        let order = begun();
        let used = [1u16, 1, 1, 1, 0, 1, 0, 0];
        for cluster in [0, 1, 2, 3, 5] {
            let mut counts = used;
            counts[cluster] = 0;
            let counts = counts.map(u16::to_be_bytes).concat();
            assert!(order.check_read(BLOCK, &counts).is_err(), "{cluster}");
        }
        order.check_read(BLOCK, &used.map(u16::to_be_bytes).concat()).unwrap();
        assert_eq!(order.classify(BLOCK, &[0; 4096]), WriteAction::Refuse);
        assert_eq!(order.classify(BLOCK * 9, &[0; 4096]), WriteAction::Refuse);
        assert!(order.refusal().is_some());
    }

    #[test]
    fn a_new_table_in_the_place_of_a_table_makes_all_writes_fail() {
        for (table, place) in [(L1 + 8, L2 | COPIED), (L1 + 8, BLOCK | COPIED), (L1 * 5 + 8, L2)] {
            let order = begun();
            assert_eq!(order.classify(table, &place.to_be_bytes()), WriteAction::Refuse, "{table}");
            assert!(order.pointers().is_empty() && order.block_entries().is_empty());
        }
    }

    #[test]
    fn an_image_whose_tables_are_shared_is_not_written_to() {
        let error = WriteOrder::default().begin(&front(), &L2.to_be_bytes(), &[]).unwrap_err();
        assert!(error.contains("several places"), "{error}");
    }
}
