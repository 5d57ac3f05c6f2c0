//! Clusters of bitmaps, to which no table of the disk points.

use std::ops::Range;

use super::{End, L1_OFFSET, NO_MEMORY, ODD_ENTRY, ODD_TABLE, Reader, TOO_MUCH};
use crate::qcow2::consistency::bitmaps::{self, LIST_BYTES_MAX};

/// The most clusters of bitmaps: a bit usually stands for 64 KiB of the disk.
const CLUSTERS_MAX: usize = 1 << 20;

/// The flag of an entry without a place: all bits of that part of the bitmap are set.
const ALL_SET: u64 = 1;

impl Reader<'_> {
    /// The ranges of the list, the tables and the clusters of all bitmaps.
    pub(super) async fn bitmap_ranges(
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
