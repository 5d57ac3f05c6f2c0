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
//!    that were counted and zeroed ahead (`ahead.rs`).
//! 4. Reference counts that fall are written when another flush has made the removal of the
//!    pointers stable.
//!
//! Waiting writes are kept here, and reads find them here. The loss of power, or of the process,
//! can then leave leaked clusters, and nothing else. `leaks.rs` frees them. An error of the file
//! cannot hit a waiting write either: imago would continue with its memory, and never write it
//! again.

pub(super) mod counted;
pub(super) mod entries;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

use super::ahead::Ahead;
use super::known::Known;
use super::mark::Mark;
use super::places::{Places, Table, Wrong};

/// The largest table that is written as a whole.
const TABLE_BYTES_MAX: u64 = 2 << 20;

/// The offset in an entry of a table of tables. The bits below are reserved, as are the bits above
/// in L1.
const OFFSET: u64 = !511;
pub(super) const L1_OFFSET: u64 = OFFSET & ((1 << 56) - 1);
/// The flag of an entry: nothing else points to the cluster.
const COPIED: u64 = 1 << 63;

/// Waiting writes, by their offset.
pub(super) type Held = BTreeMap<u64, Arc<[u8]>>;

/// The handling of a write.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Make the write at once.
    Now,
    /// The write was kept, to be made later.
    Kept,
    /// The write is a block of reference counts. Counts that rise are written at once.
    Counts,
    /// Make the write when a flush has covered its new targets. Its old targets may be used again
    /// only after another flush.
    BetweenFlushes,
    /// Do not make the write: see [`Order::refuse`].
    Refused,
}

/// The places of the tables of tables, by the header.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Tables {
    /// L1.
    pub(super) first: Range<u64>,
    /// The table of blocks of reference counts.
    pub(super) counts: Range<u64>,
}

/// The bytes of a header that [`Tables::of`] reads.
pub(super) const FRONT_BYTES: usize = 104;

impl Tables {
    /// Reads the front of an image.
    pub(super) fn of(front: &[u8; FRONT_BYTES]) -> Self {
        let number = |range: Range<usize>| {
            front[range].iter().fold(0, |sum: u64, byte| (sum << 8) | u64::from(*byte))
        };
        let cluster = 1u64.checked_shl(u32::from(front[23])).unwrap_or(0);
        let range = |start: u64, bytes: u64| start..start.saturating_add(bytes);
        Self {
            first: range(number(40..48), number(36..40) * 8),
            counts: range(number(48..56), number(56..60).saturating_mul(cluster)),
        }
    }
}

/// The width of a reference count, in bits.
pub(super) fn count_bits(front: &[u8; FRONT_BYTES]) -> u32 {
    if front[7] < 3 { 16 } else { 1 << u32::from(front[99]).min(6) }
}

/// The cluster size, clamped to the sizes of the format: the front may have changed since the image
/// was opened.
fn cluster_bytes(front: &[u8; FRONT_BYTES]) -> u64 {
    1 << u32::from(front[23]).clamp(9, 21)
}

#[derive(Debug, Default)]
pub(super) struct Order {
    state: Mutex<State>,
    pub(super) mark: Mark,
    /// The size of the disk if imago sees whole clusters of it: see `zstd.rs`. 0 if it does not.
    disk_bytes: AtomicU64,
    /// True if clusters are counted ahead, and ready.
    has_ahead: AtomicBool,
}

/// A block of reference counts, some of which are higher in the file than in imago's memory.
#[derive(Debug)]
struct Higher {
    wanted: Arc<[u8]>,
    /// `None` if an error has left it unknown.
    file: Option<Arc<[u8]>>,
}

#[derive(Debug, Default)]
struct State {
    /// `None` if the image is not open yet, or not written to.
    tables: Option<Tables>,
    count_bits: u32,
    /// L2 tables, and blocks of reference counts.
    places: Places,
    /// True while L1 moves: the header waits too.
    moves: bool,
    refuses: Option<Wrong>,
    /// Waiting entries of the table of blocks of reference counts.
    of_blocks: Held,
    pointers: Held,
    /// Blocks with counts that have fallen, or that were counted ahead.
    higher: BTreeMap<u64, Higher>,
    /// True if some of these counts have fallen.
    has_fallen: bool,
    /// The block in which counts have risen since the last commit, as the file holds it.
    risen: Option<(u64, Arc<[u8]>)>,
    /// The block in which counts have risen last.
    risen_in: Option<u64>,
    ahead: Ahead,
    known: Known,
    /// The number of writes that a pointer may depend on, and the number of these that a flush has
    /// covered.
    written: u64,
    stable: u64,
    entry_writes: u64,
}

impl State {
    fn has_waiting(&self) -> bool {
        !self.of_blocks.is_empty() || !self.pointers.is_empty() || self.has_fallen
    }

    fn sort(&mut self, offset: u64, data: &[u8]) -> Result<Way, Wrong> {
        let Some(tables) = &mut self.tables else { return Ok(Way::Now) };
        if self.refuses.is_some() {
            return Ok(Way::Refused);
        }
        let (first, counts) = (tables.first.clone(), tables.counts.clone());
        let known = |end: u64| iomem::fits((end - offset).min(data.len() as u64), "bytes");
        if offset == 0 {
            if let Some(front) = data.first_chunk() {
                *tables = Tables::of(front);
                // A moved table was written with its waiting entries, and data may soon take its
                // old place.
                self.of_blocks.retain(|place, _| tables.counts.contains(place));
                let (cluster, bits) = (cluster_bytes(front), self.count_bits);
                self.places.set_roots(cluster, bits, &tables.first, &tables.counts)?;
            }
            if !self.moves {
                return Ok(Way::BetweenFlushes);
            }
        } else if first.contains(&offset) {
            let new: usize = known(first.end);
            self.learn((offset - first.start) / 8, &data[..new], L1_OFFSET, Table::Second)?;
        } else if counts.contains(&offset) {
            let new: usize = known(counts.end);
            self.learn((offset - counts.start) / 8, &data[..new], OFFSET, Table::Block)?;
            self.of_blocks.insert(offset, data.into());
            return Ok(Way::Kept);
        } else {
            match self.places.get(offset) {
                Some(Table::Second(_)) => {}
                Some(Table::Block(index)) => {
                    self.places.check_block(index, data)?;
                    return Ok(Way::Counts);
                }
                None => return Ok(Way::Now),
            }
        }
        self.pointers.insert(offset, data.into());
        Ok(Way::Kept)
    }

    /// Records the tables that a part of a table of tables names, from this index on.
    fn learn(
        &mut self,
        index: u64,
        table: &[u8],
        offset: u64,
        kind: fn(u64) -> Table,
    ) -> Result<(), Wrong> {
        for (index, entry) in (index..).zip(entries(table)) {
            if entry & offset != 0 {
                self.places.learn(entry & offset, kind(index))?;
            }
        }
        Ok(())
    }
}

impl Order {
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// Starts to sort the writes to an image. `first` and `counts` are the contents of its tables
    /// of tables.
    pub(super) fn begin(
        &self,
        front: &[u8; FRONT_BYTES],
        first: &[u8],
        counts: &[u8],
    ) -> Result<(), Wrong> {
        if entries(first).any(|entry| entry & L1_OFFSET != 0 && entry & COPIED == 0) {
            return Err("tables of it are used in several places");
        }
        self.change(|state| {
            let tables = Tables::of(front);
            state.count_bits = count_bits(front);
            let (cluster, bits) = (cluster_bytes(front), state.count_bits);
            state.places.set_roots(cluster, bits, &tables.first, &tables.counts)?;
            // Tables may have been created while these were read.
            state.learn(0, first, L1_OFFSET, Table::Second)?;
            state.learn(0, counts, OFFSET, Table::Block)?;
            let has_block = |index: u64| {
                let at = usize::try_from(index).ok().and_then(|index| index.checked_mul(8));
                let entry = at.and_then(|at| counts.get(at..)?.first_chunk());
                entry.is_some_and(|entry| u64::from_be_bytes(*entry) & OFFSET != 0)
            };
            state.places.check_counted(has_block)?;
            state.tables = Some(tables);
            Ok(())
        })
    }

    /// The size of the disk if imago sees whole clusters of it.
    pub(super) fn disk_bytes(&self) -> Option<u64> {
        Some(self.disk_bytes.load(Relaxed)).filter(|bytes| *bytes > 0)
    }

    pub(super) fn is_rounded(&self) -> bool {
        self.disk_bytes().is_some()
    }

    /// Lets imago see whole clusters of a disk of this size.
    pub(super) fn set_disk_bytes(&self, bytes: u64) {
        self.disk_bytes.store(bytes, Relaxed);
    }

    /// Marks the start (true) or the end (false) of a move of L1.
    pub(super) fn set_moves(&self, moves: bool) {
        self.change(|state| state.moves = moves);
    }

    /// Refuses all writes from now on. imago does not know the content of the file, and would use
    /// clusters twice.
    pub(super) fn refuse(&self, why: Wrong) {
        self.change(|state| {
            state.refuses.get_or_insert(why);
        });
    }

    /// The reason to refuse writes.
    pub(super) fn refuses(&self) -> Option<Wrong> {
        self.change(|state| state.refuses)
    }

    /// Checks data that was read, if it is a block of reference counts.
    pub(super) fn check_read(&self, offset: u64, data: &[u8]) -> Result<(), Wrong> {
        self.change(|state| match state.places.get(offset) {
            Some(Table::Block(index)) => state.places.check_block(index, data),
            _ => Ok(()),
        })
    }

    /// Returns true if bytes of the file belong to a table or to the header. No data can be there.
    pub(super) fn has_table(&self, range: &Range<u64>) -> bool {
        self.change(|state| state.tables.is_some() && state.places.has(range))
    }

    /// Decides the handling of a write, and keeps it if it has to wait.
    pub(super) fn sort(&self, offset: u64, data: &[u8]) -> Way {
        self.change(|state| {
            state.sort(offset, data).unwrap_or_else(|wrong| {
                state.refuses.get_or_insert(wrong);
                Way::Refused
            })
        })
    }

    /// Puts waiting writes over data that was read from the file.
    pub(super) fn cover(&self, offset: u64, data: &mut [u8]) {
        let end = offset + data.len() as u64;
        let from = offset.saturating_sub(TABLE_BYTES_MAX);
        self.change(|state| {
            let waiting = [&state.of_blocks, &state.pointers];
            let waiting = waiting.into_iter().flat_map(|held| held.range(from..end));
            let higher = state.higher.range(from..end).map(|(place, block)| (place, &block.wanted));
            for (place, kept) in waiting.chain(higher) {
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

    pub(super) fn is_empty(&self) -> bool {
        self.change(|state| !state.has_waiting())
    }

    /// The waiting entries of the table of blocks of reference counts. Reads find them here until
    /// [`drop_of_blocks`](Self::drop_of_blocks).
    pub(super) fn of_blocks(&self) -> Held {
        self.change(|state| state.of_blocks.clone())
    }

    /// Drops the waiting entries: all of them are in the file.
    pub(super) fn drop_of_blocks(&self) {
        self.change(|state| state.of_blocks.clear());
    }

    /// The waiting pointers. Reads find them here until [`drop_pointers`](Self::drop_pointers).
    pub(super) fn pointers(&self) -> Held {
        self.change(|state| state.pointers.clone())
    }

    /// Drops the waiting pointers: all of them are in the file.
    pub(super) fn drop_pointers(&self) {
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

    pub(super) fn begun() -> Order {
        let order = Order::default();
        assert_eq!(order.sort(L1, &[0; 512]), Way::Now);
        let (l1, counts) = ((L2 | COPIED).to_be_bytes(), BLOCK.to_be_bytes());
        order.begin(&front(), &l1, &counts).unwrap();
        order
    }

    #[test]
    fn pointers_wait_and_are_read_meanwhile() {
        let order = begun();
        assert_eq!(order.sort(L2 * 8, &[1; 4096]), Way::Now);
        let new = [L2, L2 * 8].map(|place| (place | COPIED).to_be_bytes()).concat();
        for (offset, data) in [(L2, &[2; 4096][..]), (L1, &new), (L2 * 8, &[3; 4096])] {
            assert_eq!(order.sort(offset, data), Way::Kept, "{offset}");
        }
        let mut read = [0; 1024];
        order.cover(L2 + 3584, &mut read);
        assert!(read[..512] == [2; 512] && read[512..] == [0; 512]);
        assert_eq!(order.pointers().len(), 3);
        order.drop_pointers();
        assert!(order.is_empty());
        assert_eq!(order.sort(0, &front()), Way::BetweenFlushes);
        order.set_moves(true);
        assert_eq!(order.sort(0, &front()), Way::Kept);
    }

    #[test]
    fn blocks_of_counts_wait_before_pointers_unless_their_table_moves() {
        let order = begun();
        let entries = [BLOCK, BLOCK * 2].map(u64::to_be_bytes).concat();
        assert_eq!(order.sort(L1 * 5, &entries), Way::Kept);
        assert!(order.pointers().is_empty() && order.of_blocks().len() == 1);
        assert_eq!(order.sort(BLOCK * 2, &[0; 512]), Way::Counts);
        let mut read = [0; 16];
        order.cover(L1 * 5, &mut read);
        assert_eq!(read[..], entries[..]);
        assert!(!order.is_empty());
        let mut moved = front();
        moved[48..56].copy_from_slice(&(L1 * 9).to_be_bytes());
        assert_eq!(order.sort(0, &moved), Way::BetweenFlushes);
        assert!(order.is_empty());
        assert_eq!(order.sort(L1 * 9, &entries), Way::Kept);
        order.drop_of_blocks();
        assert!(order.is_empty());
    }

    #[test]
    fn a_table_is_known_that_was_made_while_the_others_were_read() {
        let order = begun();
        let first = (L2 | COPIED).to_be_bytes();
        let with_another = [first, ((L2 * 8) | COPIED).to_be_bytes()].concat();
        assert_eq!(order.sort(L1, &with_another), Way::Kept);
        order.begin(&front(), &first, &BLOCK.to_be_bytes()).unwrap();
        assert_eq!(order.sort(L2 * 8, &[1; 4096]), Way::Kept);
    }

    #[test]
    fn nothing_is_written_once_writes_are_refused() {
        let order = begun();
        order.refuse("broken");
        for offset in [0, L1, L2, BLOCK, L1 * 5, L2 * 8] {
            assert_eq!(order.sort(offset, &front()), Way::Refused, "{offset}");
        }
    }

    #[test]
    fn counts_rise_at_once_and_fall_later() {
        let order = begun();
        let wanted = [1u16, 1, 2, 1, 0, 1, 2, 0].map(u16::to_be_bytes).concat();
        assert_eq!(order.sort(BLOCK, &wanted), Way::Counts);
        let file = [0u16, 1, 2, 1, 1, 1, 300, 0].map(u16::to_be_bytes).concat();
        let raised = order.raise(BLOCK, &file, &wanted);
        assert_eq!(*raised, [1u16, 1, 2, 1, 1, 1, 300, 0].map(u16::to_be_bytes).concat());
        let mut read = raised.to_vec();
        order.cover(BLOCK, &mut read);
        assert_eq!(read, wanted);
        assert_eq!(*order.fallen()[&BLOCK], wanted);
        order.note_lowered(BLOCK, &wanted.into());
        order.drop_fallen();
        assert!(order.is_empty() && order.all_higher().is_empty());
    }

    #[test]
    fn a_table_that_would_count_as_free_has_all_writes_refused() {
        let order = begun();
        let used = [1u16, 1, 1, 1, 0, 1, 0, 0];
        for cluster in [0, 1, 2, 3, 5] {
            let mut counts = used;
            counts[cluster] = 0;
            let counts = counts.map(u16::to_be_bytes).concat();
            assert!(order.check_read(BLOCK, &counts).is_err(), "{cluster}");
        }
        order.check_read(BLOCK, &used.map(u16::to_be_bytes).concat()).unwrap();
        assert_eq!(order.sort(BLOCK, &[0; 4096]), Way::Refused);
        assert_eq!(order.sort(BLOCK * 9, &[0; 4096]), Way::Refused);
        assert!(order.refuses().is_some());
    }

    #[test]
    fn a_new_table_in_the_place_of_another_has_all_writes_refused() {
        for (table, place) in [(L1 + 8, L2 | COPIED), (L1 + 8, BLOCK | COPIED), (L1 * 5 + 8, L2)] {
            let order = begun();
            assert_eq!(order.sort(table, &place.to_be_bytes()), Way::Refused, "{table}");
            assert!(order.pointers().is_empty() && order.of_blocks().is_empty());
        }
    }

    #[test]
    fn an_image_whose_tables_are_shared_is_not_written_to() {
        let error = Order::default().begin(&front(), &L2.to_be_bytes(), &[]).unwrap_err();
        assert!(error.contains("several places"), "{error}");
    }
}
