//! Missing parts that show when an image is opened: tables and data behind the end of a truncated
//! file, and tables without a reference count.

use std::ops::Range;
use std::time::{Duration, Instant};

use blockio::{DiskSource, Error, IoThread, IoThreadConfig};

use super::{Bounds, End, L1_OFFSET, ODD_TABLE, Reader, used_by};
use crate::qcow2::consistency::counts::get;
use crate::qcow2::consistency::header::ImageHeader;
use crate::qcow2::consistency::refused;
use crate::qcow2::consistency::write_order::{FRONT_BYTES, Roots, count_bits};

/// The bounds of this check, which runs at each opening. Tables beyond them are not checked. An
/// image of 1 TiB has 128 MiB of L2 tables, with clusters of 64 KiB.
const BOUNDS: Bounds = Bounds {
    clusters_at_once: 0,
    read_bytes: 256 << 20,
    time: Duration::from_secs(2),
    counts: 1 << 16,
};

/// The bytes of a block that are read for one reference count.
const PIECE_BYTES: u64 = 4096;

/// Checks the tables of an image that is not open, and returns a warning about it.
///
/// # Errors
///
/// If the image is to be written to, and a table or the header has the reference count 0.
pub(in crate::qcow2) fn check(
    source: &DiskSource,
    header: &ImageHeader,
) -> Result<Option<String>, Error> {
    let thread = IoThread::new(&IoThreadConfig::default())?;
    let source = source.for_probe()?;
    let disk = source.attach(thread.io());
    let until = Instant::now() + BOUNDS.time;
    let mut reader = Reader { source: &source, disk, left_bytes: BOUNDS.read_bytes, until };
    let mut found = ImageTables { cluster: header.cluster_bytes.into(), ..ImageTables::default() };
    let is_writable = !source.info().read_only;
    // Other oddities show when the image is opened.
    let _ = thread.block_on(found.check(&mut reader, is_writable))?;
    if let Some(place) = found.uncounted {
        let reason = format!(
            "its table or header at byte {place} has the reference count 0, so writes that need \
             space would fail; repair it with `qemu-img check -r all`, or open it read-only"
        );
        return Err(refused(&source, reason));
    }
    let warn = |what, (first, count)| {
        format!(
            "its file ends before {count} of its {what} (the first is at byte {first}), as after \
             an incomplete copy: their data reads as zeroes; check it with `qemu-img check`"
        )
    };
    let tables = found.behind.map(|behind| warn("tables", behind));
    Ok(tables.or_else(|| found.data_behind.map(|behind| warn("clusters of data", behind))))
}

/// Tables of an image, and their faults.
#[derive(Default)]
struct ImageTables {
    cluster: u64,
    /// The first table behind the end of the file, and the number of such tables.
    behind: Option<(u64, u64)>,
    /// The same for data.
    data_behind: Option<(u64, u64)>,
    /// A cluster of a table or of the header with the reference count 0.
    uncounted: Option<u64>,
    /// Clusters with tables, and the header.
    tables: Vec<u64>,
    /// Places of L2 tables that lie in the file.
    l2_tables: Vec<u64>,
    /// Places of blocks of reference counts, by index.
    blocks: Vec<u64>,
}

impl ImageTables {
    async fn check(&mut self, reader: &mut Reader<'_>, is_writable: bool) -> Result<(), End> {
        let front = reader.read(0, FRONT_BYTES as u64).await?;
        let front = front.first_chunk().ok_or(ODD_TABLE)?;
        let Roots { l1, counts } = Roots::parse(front);
        self.tables.push(0);
        for root in [&l1, &counts] {
            let clusters = root.clone().step_by(usize::try_from(self.cluster).unwrap_or(1));
            self.tables.extend(clusters.take(usize::try_from(BOUNDS.counts).unwrap_or(0)));
        }
        for (root, is_l1) in [(&l1, true), (&counts, false)] {
            let size = reader.disk.info().size_bytes;
            self.check_end(root, size);
            let there = root.start..root.end.min(size).max(root.start);
            let each = |_: &mut Reader<'_>, _, entry: u64| {
                let place = if is_l1 { entry & L1_OFFSET } else { entry & !511 };
                let table = place..place.saturating_add(self.cluster);
                if !is_l1 && (self.blocks.len() as u64) < BOUNDS.counts {
                    self.blocks.push(place);
                }
                if place != 0 && (self.tables.len() as u64) < BOUNDS.counts {
                    self.check_end(&table, size);
                    self.tables.push(place);
                    if is_l1 && table.end <= size {
                        self.l2_tables.push(place);
                    }
                }
                Ok(())
            };
            reader.entries(&there, each).await?;
        }
        if is_writable {
            self.check_counts(reader, count_bits(front)).await?;
        }
        if self.behind.is_none() && self.has_counts_behind(reader, count_bits(front)).await? {
            self.check_data(reader).await?;
        }
        Ok(())
    }

    /// True if clusters behind the end of the file have reference counts. Leaked ones may, too.
    async fn has_counts_behind(&self, reader: &mut Reader<'_>, bits: u32) -> Result<bool, End> {
        let size = reader.disk.info().size_bytes;
        let per_block = self.cluster * 8 / u64::from(bits);
        let mut next = size.div_ceil(self.cluster);
        while let Ok(index) = usize::try_from(next / per_block)
            && let Some(place) = self.blocks.get(index)
        {
            if *place != 0 && place.saturating_add(self.cluster) <= size {
                let block = reader.read(*place, self.cluster).await?;
                let mut counts = next % per_block..per_block;
                if counts.any(|at| get(&block, iomem::fits(at, "an index"), bits) != 0) {
                    return Ok(true);
                }
            }
            next = (next / per_block + 1) * per_block;
        }
        Ok(false)
    }

    /// Finds data behind the end of the file. The last cluster may be there in part.
    async fn check_data(&mut self, reader: &mut Reader<'_>) -> Result<(), End> {
        let (size, cluster_bits) = (reader.disk.info().size_bytes, self.cluster.trailing_zeros());
        for table in &self.l2_tables {
            for entry in reader.read(*table, self.cluster).await?.as_chunks().0 {
                // Odd entries show when the image is used.
                if let Ok(Some(used)) = used_by(u64::from_be_bytes(*entry), cluster_bits)
                    && used.start >= size
                {
                    let (first, count) = self.data_behind.unwrap_or((used.start, 0));
                    self.data_behind = Some((first.min(used.start), count + 1));
                }
            }
        }
        Ok(())
    }

    fn check_end(&mut self, table: &Range<u64>, size: u64) {
        if table.end > size {
            let (first, count) = self.behind.unwrap_or((table.start, 0));
            self.behind = Some((first.min(table.start), count + 1));
        }
    }

    async fn check_counts(&mut self, reader: &mut Reader<'_>, bits: u32) -> Result<(), End> {
        self.tables.sort_unstable();
        let size = reader.disk.info().size_bytes;
        let bytes = PIECE_BYTES.min(self.cluster);
        let (per_block, per_piece) =
            (self.cluster * 8 / u64::from(bits), bytes * 8 / u64::from(bits));
        let mut last = (0, Vec::new());
        for table in &self.tables {
            let (index, within) =
                (table / self.cluster / per_block, table / self.cluster % per_block);
            let block = usize::try_from(index).ok().and_then(|index| self.blocks.get(index));
            let piece = block.copied().unwrap_or(0) + within / per_piece * bytes;
            let is_there = block.is_some_and(|block| *block != 0) && piece + bytes <= size;
            if is_there && last.0 != piece {
                last = (piece, reader.read(piece, bytes).await?);
            }
            let at = iomem::fits(within % per_piece, "an index");
            if !is_there || get(&last.1, at, bits) == 0 {
                self.uncounted = Some(*table);
                return Ok(());
            }
        }
        Ok(())
    }
}
