//! The check of an image that was not closed: compares reference counts with the uses in its
//! tables, and lowers counts that are too high. See `mark.rs`. The check at the opening changes
//! nothing. The first write lowers the counts.
//!
//! The image may be malicious. Reads and memory are bounded, no matter which sizes it claims. An
//! odd image is left as it is and served with its leaked clusters, as its last user served it.

mod reader;
pub(crate) mod tables;

use std::ops::Range;
use std::rc::Rc;
use std::time::{Duration, Instant};

use blockio::{DiskSource, Error, Io, IoThread, IoThreadConfig};

use super::bitmaps::{self, LIST_BYTES_MAX};
use super::counts::{Added, Counts, NO_MEMORY, ODD_TABLE, TOO_MUCH, TooLow};
use super::header::ImageHeader;
use super::mark;
use super::write_order::{FRONT_BYTES, Roots, count_bits};
use crate::qcow2::consistency::refused;
use reader::{End, Reader};

pub(crate) use reader::READ_BYTES_MIN;

/// The bounds of a check.
#[derive(Clone, Copy)]
pub(crate) struct Bounds {
    /// The clusters that are counted at once, at two bytes each. More clusters need several passes
    /// over all tables.
    pub(crate) clusters_at_once: u64,
    /// The most bytes that are read.
    pub(crate) read_bytes: u64,
    /// The most time of a check: a disk may be slow, and its opening waits.
    pub(crate) time: Duration,
    /// The most counts that are compared.
    pub(crate) counts: u64,
}

pub(crate) const BOUNDS: Bounds = Bounds {
    clusters_at_once: 32 << 20,
    read_bytes: 2 << 30,
    time: Duration::from_secs(30),
    counts: 1 << 30,
};

/// The most entries of a table of tables that imago accepts.
const ENTRIES_MAX: u64 = 4 << 20;

const ODD_EXTENSION: &str = "its header has an unknown extension";
const ODD_WIDTH: &str = "its reference counts have an invalid width";
const ODD_PLACE: &str = "one of its tables overlaps another structure";
const ODD_ENTRY: &str = "one of its tables has an invalid entry";
const ODD_USES: &str = "one of its clusters has too many references";
const SHARED: &str = "clusters with one reference are marked as shared";

/// The most data clusters with an entry that lacks `COPIED`. All entries have it, unless there were
/// snapshots.
const SHARED_MAX: usize = 1 << 20;

/// The offset in an entry. All further bits are reserved, except the flags below. `COPIED` means
/// that nothing else points to the cluster.
const L1_OFFSET: u64 = ((1 << 56) - 1) & !511;
const COPIED: u64 = 1 << 63;
/// The flag of a cluster that reads as zeroes, in an uncompressed entry of an L2 table.
const ZEROES: u64 = 1;
const COMPRESSED: u64 = 1 << 62;

/// Counts the leaked clusters of a marked image that is not open, and changes nothing. `None` if
/// the check was not possible: the image is then used as it is, with its mark.
///
/// # Errors
///
/// If counts are too low, so that the image must not be written to, and if the disk was
/// abandoned.
pub(crate) fn find(source: &DiskSource, header: &ImageHeader) -> Result<Option<u64>, Error> {
    let thread = IoThread::new(&IoThreadConfig::default())?;
    let begun = Instant::now();
    let found = run_check(thread.io(), source, header, &Work { bounds: &BOUNDS, frees: false });
    let found = thread.block_on(found)??;
    if let Some(leaked) = found {
        tracing::info!(
            "{}: it was not closed properly; a check of its tables took {} ms and found {}, which \
             the first write frees",
            source.chain_text(),
            begun.elapsed().as_millis(),
            clusters_text(leaked)
        );
    }
    Ok(found)
}

/// Frees the leaked clusters of a marked image, and removes the mark. The caller has exclusive use
/// of the tables. Returns false if the check was not possible, and then the mark stays.
///
/// # Errors
///
/// As for [`find`].
pub(crate) async fn free(
    io: &Rc<Io>,
    source: &DiskSource,
    header: &ImageHeader,
    bounds: &Bounds,
) -> Result<bool, Error> {
    let begun = Instant::now();
    let Some(freed) = run_check(io, source, header, &Work { bounds, frees: true }).await? else {
        return Ok(false);
    };
    tracing::info!(
        "{}: its first write has freed {} in {} ms",
        source.chain_text(),
        clusters_text(freed),
        begun.elapsed().as_millis()
    );
    Ok(true)
}

fn clusters_text(leaked: u64) -> String {
    if leaked == 1 { "1 leaked cluster".to_owned() } else { format!("{leaked} leaked clusters") }
}

/// The work of a check.
struct Work<'a> {
    bounds: &'a Bounds,
    /// True to free leaked clusters and remove the mark.
    frees: bool,
}

async fn run_check(
    io: &Rc<Io>,
    source: &DiskSource,
    header: &ImageHeader,
    work: &Work<'_>,
) -> Result<Option<u64>, Error> {
    let disk = source.attach(io);
    let until = Instant::now() + work.bounds.time;
    let reader = Reader { source, disk, left_bytes: work.bounds.read_bytes, until };
    match check(reader, header, work).await {
        Ok(lowered) => Ok(Some(lowered)),
        Err(End::Skipped(why)) => {
            tracing::warn!(
                "{}: it was not closed properly and may have leaked clusters, which stay because \
                 {why}; free them with `qemu-img check -r leaks` when the image is not in use",
                source.chain_text()
            );
            Ok(None)
        }
        Err(End::TooLow { offset, count }) => {
            let reason = format!(
                "it was not closed properly, and its cluster at byte {offset} has more references \
                 than its reference count of {count}; repair it with `qemu-img check -r all`"
            );
            Err(refused(source, reason))
        }
        Err(End::Abandoned) => Err(refused(source, "its opening was cancelled".to_owned())),
    }
}

impl Reader<'_> {
    /// Fails early if a check of all these tables would exceed the bounds at its end.
    fn check_cost(&self, tables: &Tables, passes: u64) -> Result<(), End> {
        let each = (1 << tables.cluster_bits).max(READ_BYTES_MIN);
        let reads = passes * tables.l2_tables.len() as u64 + tables.counts.blocks();
        if each * reads > self.left_bytes { Err(TOO_MUCH.into()) } else { Ok(()) }
    }
}

/// Returns the number of counts that were too high.
async fn check(mut reader: Reader<'_>, header: &ImageHeader, work: &Work<'_>) -> Result<u64, End> {
    let bounds = work.bounds;
    if header.has_unknown_extensions() {
        return Err(ODD_EXTENSION.into());
    }
    let front = reader.read(0, FRONT_BYTES as u64).await?;
    let front = front.first_chunk().ok_or(ODD_TABLE)?;
    let cluster_bits = header.cluster_bytes.trailing_zeros();
    let mut tables = Tables::read(&mut reader, front, cluster_bits, bounds).await?;
    if let Some(list) = header.bitmaps() {
        tables.bitmaps = reader.bitmap_ranges(list, header.cluster_bytes.into()).await?;
    }
    let windows = tables.counts.windows(bounds.clusters_at_once);
    reader.check_cost(&tables, windows.len() as u64)?;
    let (mut differing, mut all_lowered) = (Vec::new(), 0);
    for window in windows {
        tables.count(&mut reader, &window).await?;
        let lowered = tables.compare(&mut reader, &window, false).await?;
        all_lowered += lowered;
        if lowered > 0 {
            differing.push(window);
        }
    }
    if !work.frees {
        return Ok(all_lowered);
    }
    if !differing.is_empty() {
        // The last user may have removed the last pointer to a cluster without a flush.
        reader.flush().await?;
    }
    // The work below has bounds of its own, or the work above could be in vain.
    reader.left_bytes = bounds.read_bytes;
    reader.until += bounds.time;
    // The uses of the last window are counted already.
    for window in differing.into_iter().rev() {
        if !tables.counts.is_current(&window) {
            tables.count(&mut reader, &window).await?;
        }
        tables.compare(&mut reader, &window, true).await?;
    }
    reader.flush().await?;
    let block = u64::from(reader.disk.info().logical_block_bytes);
    let mut front = reader.read(0, (FRONT_BYTES as u64).next_multiple_of(block)).await?;
    mark::set(&mut front, false);
    reader.write(0, &front).await?;
    Ok(all_lowered)
}

/// The tables of an image.
struct Tables {
    cluster_bits: u32,
    /// L1 and the table of blocks of reference counts, in whole clusters.
    roots: [Range<u64>; 2],
    /// Bytes of bitmaps and their tables.
    bitmaps: Vec<Range<u64>>,
    /// The places of L2 tables.
    l2_tables: Vec<u64>,
    /// Data clusters of the window with an entry that lacks `COPIED`, in order.
    shared: Vec<u64>,
    counts: Counts,
}

impl Tables {
    async fn read(
        reader: &mut Reader<'_>,
        front: &[u8; FRONT_BYTES],
        cluster_bits: u32,
        bounds: &Bounds,
    ) -> Result<Self, End> {
        if front[96..99] != [0; 3] || front[99] > 6 {
            return Err(ODD_WIDTH.into());
        }
        let cluster = 1u64 << cluster_bits;
        let Roots { l1, counts: blocks } = Roots::parse(front);
        for table in [&l1, &blocks] {
            reader.check(table, cluster)?;
            if table.end - table.start > (ENTRIES_MAX * 8).next_multiple_of(cluster) {
                return Err(ODD_TABLE.into());
            }
        }
        let mut l2_tables = Vec::new();
        reader
            .entries(&l1, |reader, _, entry| {
                if entry & !(L1_OFFSET | COPIED) != 0 {
                    return Err(ODD_ENTRY.into());
                }
                let offset = entry & L1_OFFSET;
                if offset == 0 {
                    return Ok(());
                }
                reader.check(&(offset..offset + cluster), cluster)?;
                // Each of the tables will be read.
                let cost = cluster.max(READ_BYTES_MIN) * l2_tables.len() as u64;
                if cost > bounds.read_bytes {
                    return Err(TOO_MUCH.into());
                }
                l2_tables.try_reserve(1).map_err(|_| NO_MEMORY)?;
                l2_tables.push(offset);
                Ok(())
            })
            .await?;
        l2_tables.sort_unstable();
        let mut counts = Counts::new(cluster_bits, count_bits(front), bounds.counts);
        reader
            .entries(&blocks, |reader, index, entry| {
                if entry & 511 != 0 {
                    return Err(ODD_ENTRY.into());
                }
                if entry == 0 {
                    return Ok(());
                }
                let end = entry.checked_add(cluster).ok_or(ODD_TABLE)?;
                reader.check(&(entry..end), cluster)?;
                let cost = cluster.max(READ_BYTES_MIN) * counts.blocks();
                if cost > bounds.read_bytes {
                    return Err(TOO_MUCH.into());
                }
                counts.add_block(index, entry).map_err(End::from)
            })
            .await?;
        let whole = |table: &Range<u64>| table.start..table.end.next_multiple_of(cluster);
        let (roots, shared) = ([whole(&l1), whole(&blocks)], Vec::new());
        Ok(Self { cluster_bits, roots, bitmaps: Vec::new(), l2_tables, shared, counts })
    }

    /// Counts the uses of the clusters of a window.
    async fn count(&mut self, reader: &mut Reader<'_>, window: &Range<u64>) -> Result<(), End> {
        let cluster = 1u64 << self.cluster_bits;
        self.counts.begin(window)?;
        self.shared.clear();
        self.add(&(0..cluster))?;
        for root in self.roots.clone() {
            self.add(&root)?;
        }
        for index in 0..self.bitmaps.len() {
            self.add(&self.bitmaps[index].clone())?;
        }
        for number in 0..self.counts.blocks() {
            let place = self.counts.place(number);
            self.add(&(place..place + cluster))?;
        }
        for number in 0..self.l2_tables.len() {
            let place = self.l2_tables[number];
            self.add(&(place..place + cluster))?;
            for entry in reader.read(place, cluster).await?.as_chunks().0 {
                let entry = u64::from_be_bytes(*entry);
                if let Some(used) = used_by(entry, self.cluster_bits)? {
                    self.add(&used)?;
                    if entry & (COPIED | COMPRESSED) == 0 {
                        self.add_shared(used.start >> self.cluster_bits)?;
                    }
                }
            }
        }
        self.shared.sort_unstable();
        self.check_places()
    }

    /// Records a data cluster that may have other uses.
    fn add_shared(&mut self, cluster: u64) -> Result<(), End> {
        if self.counts.uses(cluster).is_none() {
            return Ok(());
        }
        if self.shared.len() == SHARED_MAX {
            return Err(SHARED.into());
        }
        self.shared.try_reserve(1).map_err(|_| NO_MEMORY)?;
        self.shared.push(cluster);
        Ok(())
    }

    /// Fails if a count would fall to one for data with an entry that lacks `COPIED`: QEMU treats
    /// that as damage.
    fn check_shared(&self, number: u64, counts: &[u8]) -> Result<(), End> {
        let counted = self.counts.counted(number);
        let start = self.shared.partition_point(|cluster| *cluster < counted.start);
        let is_odd = |cluster: u64| {
            self.counts.uses(cluster) == Some(1)
                && self.counts.count_of(number, cluster, counts) > 1
        };
        let shared = self.shared[start..].iter().take_while(|cluster| **cluster < counted.end);
        if shared.copied().any(is_odd) { Err(SHARED.into()) } else { Ok(()) }
    }

    /// Fails if a table shares a cluster: its content could be mistaken for a block of counts.
    fn check_places(&self) -> Result<(), End> {
        let root_clusters = self
            .roots
            .iter()
            .flat_map(|root| root.start >> self.cluster_bits..root.end >> self.cluster_bits);
        let blocks = (0..self.counts.blocks()).map(|number| self.counts.place(number));
        let others = blocks.chain(self.l2_tables.iter().copied());
        let mut all =
            root_clusters.chain(others.map(|place| place >> self.cluster_bits)).chain([0]);
        match all.all(|cluster| self.counts.uses(cluster).is_none_or(|uses| uses == 1)) {
            true => Ok(()),
            false => Err(ODD_PLACE.into()),
        }
    }

    /// Counts one use of each cluster in a range of bytes.
    fn add(&mut self, used: &Range<u64>) -> Result<(), End> {
        for cluster in used.start >> self.cluster_bits..=(used.end - 1) >> self.cluster_bits {
            match self.counts.add(cluster) {
                Added::Counted => {}
                Added::TooOften => return Err(ODD_USES.into()),
                Added::NoBlock => {
                    return Err(End::TooLow { offset: cluster << self.cluster_bits, count: 0 });
                }
            }
        }
        Ok(())
    }

    /// Compares the counts of a window with the uses, and returns the number of counts that are too
    /// high. Lowers them if `lowers` is true.
    async fn compare(
        &mut self,
        reader: &mut Reader<'_>,
        window: &Range<u64>,
        lowers: bool,
    ) -> Result<u64, End> {
        let mut lowered = 0;
        for number in window.clone() {
            let place = self.counts.place(number);
            let mut block = reader.read(place, 1 << self.cluster_bits).await?;
            self.check_shared(number, &block)?;
            let in_block = self.counts.lower(number, &mut block);
            let in_block = in_block.map_err(|TooLow { cluster, count }| End::TooLow {
                offset: cluster << self.cluster_bits,
                count,
            })?;
            lowered += in_block;
            if lowers && in_block > 0 {
                reader.write(place, &block).await?;
            }
        }
        Ok(lowered)
    }
}

/// The bytes of the file that an entry of an L2 table refers to.
fn used_by(entry: u64, cluster_bits: u32) -> Result<Option<Range<u64>>, End> {
    if entry & COMPRESSED != 0 {
        let offset_bits = 62 - (cluster_bits - 8);
        let descriptor = entry & (COMPRESSED - 1);
        let offset = descriptor & ((1 << offset_bits) - 1);
        if entry & COPIED != 0 || offset >> 56 != 0 {
            return Err(ODD_ENTRY.into());
        }
        // The number of sectors after the first one.
        let sectors = descriptor >> offset_bits;
        return Ok(Some(offset..(offset & !511) + (sectors + 1) * 512));
    }
    let offset = entry & L1_OFFSET;
    let is_aligned = offset.is_multiple_of(1 << cluster_bits);
    if entry & !(L1_OFFSET | COPIED | ZEROES) != 0 || !is_aligned {
        return Err(ODD_ENTRY.into());
    }
    Ok((offset != 0).then(|| offset..offset + (1 << cluster_bits)))
}

/// The most clusters of bitmaps: a bit usually stands for 64 KiB of the disk.
const CLUSTERS_MAX: usize = 1 << 20;

/// The flag of an entry without a place: all bits of that part of the bitmap are set.
const ALL_SET: u64 = 1;

impl Reader<'_> {
    /// The ranges of the list, the tables and the clusters of all bitmaps.
    async fn bitmap_ranges(
        &mut self,
        list: &Range<u64>,
        cluster: u64,
    ) -> Result<Vec<Range<u64>>, End> {
        self.check(list, cluster)?;
        if list.end - list.start > LIST_BYTES_MAX {
            return Err(ODD_TABLE.into());
        }
        let content = self.read(list.start, list.end - list.start).await?;
        let mut used = vec![list.clone()];
        for bitmap in bitmaps::parse(&content).ok_or(ODD_ENTRY)? {
            self.check(&bitmap.table, cluster)?;
            used.push(bitmap.table.clone());
            let each = |reader: &mut Self, _, entry: u64| {
                let place = entry & L1_OFFSET;
                if entry & !(L1_OFFSET | ALL_SET) != 0 || place != 0 && entry & ALL_SET != 0 {
                    return Err(ODD_ENTRY.into());
                }
                if place == 0 {
                    return Ok(());
                }
                let end = place.checked_add(cluster).ok_or(ODD_TABLE)?;
                reader.check(&(place..end), cluster)?;
                if used.len() >= CLUSTERS_MAX {
                    return Err(TOO_MUCH.into());
                }
                used.try_reserve(1).map_err(|_| NO_MEMORY)?;
                used.push(place..end);
                Ok(())
            };
            self.entries(&bitmap.table, each).await?;
        }
        Ok(used)
    }
}
