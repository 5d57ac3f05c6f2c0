//! Discards, and zeroes: what takes data out of an image.

use std::io;
use std::ops::Range;

use imago::Mapping;

use super::{Format, Owner};

/// The most zeroes that are written at once where there are no zero clusters.
const ZEROES_BYTES: u64 = 256 << 10;

/// Data of the disk in the file of the image.
struct Data {
    at: u64,
    len: u64,
    offset: u64,
}

impl Owner {
    pub(super) async fn discard(&self, range: Range<u64>) -> io::Result<()> {
        let (has_zeroes, is_alone) = (self.core.has_zero_clusters, self.core.layers.len() == 1);
        if !has_zeroes && !is_alone {
            // What lies below would be seen instead.
            return Ok(());
        }
        let mut image = self.image().await?.write().await;
        self.settle(&range).await;
        self.empty(&mut image, &range).await?;
        self.commit_to(&image).await
    }

    pub(super) async fn zero(&self, range: Range<u64>, may_unmap: bool) -> io::Result<()> {
        if !self.core.has_zero_clusters {
            return self.write_zeroes(range).await;
        }
        let mut image = self.image().await?.write().await;
        self.settle(&range).await;
        let emptied = match may_unmap {
            true => self.empty(&mut image, &range).await?,
            false => range.start..range.start,
        };
        // Space that was given back may be found again for these, so nothing is given back now.
        let mut zeroed = Ok(());
        for edge in [range.start..emptied.start, emptied.end..range.end] {
            if zeroed.is_ok() && !edge.is_empty() {
                zeroed = image.write_zeroes(edge.start, edge.end - edge.start).await;
            }
        }
        self.changed.set(self.changed.get() + 1);
        self.commit_to(&image).await?;
        zeroed
    }

    /// Takes the whole clusters of a range out of the tables, and says which bytes these are. The
    /// caller commits what is left of that.
    ///
    /// An L2 table that is not there yet is made for it, and its place may be one that a data
    /// cluster has just left. So the tables have their turns, each with a commit: what it has left
    /// goes back to the file before the next one is made.
    async fn empty(&self, image: &mut Format, range: &Range<u64>) -> io::Result<Range<u64>> {
        let whole = self.whole_clusters(range, image.size());
        let table_covers = self.core.cluster_bytes * (self.core.cluster_bytes / 8);
        let mut at = whole.start;
        while at < whole.end {
            let end = (at + 1).next_multiple_of(table_covers).min(whole.end);
            let data = self.clusters(image, &(at..end)).await?;
            let emptied = match self.core.has_zero_clusters {
                true => image.discard_to_zero(at, end - at).await,
                false => image.discard_to_backing(at, end - at).await.map(drop),
            };
            self.changed.set(self.changed.get() + 1);
            if emptied.is_err() || !data.is_empty() {
                self.commit_to(image).await?;
                emptied?;
                self.give_back(image, data).await?;
            }
            at = end;
        }
        Ok(whole)
    }

    /// The clusters that lie in a range. Behind the end of the disk nothing is in the last one.
    fn whole_clusters(&self, range: &Range<u64>, size: u64) -> Range<u64> {
        let cluster = self.core.cluster_bytes;
        let start = range.start.next_multiple_of(cluster);
        let end = match range.end == size {
            true => size,
            false => range.end - range.end % cluster,
        };
        // With none, all of it is before them.
        if start < end { start..end } else { range.end..range.end }
    }

    /// Writes zeroes as data.
    async fn write_zeroes(&self, range: Range<u64>) -> io::Result<()> {
        let zeroes = vec![0; iomem::fits(ZEROES_BYTES, "bytes in memory")];
        let mut at = range.start;
        while at < range.end {
            let len = ZEROES_BYTES.min(range.end - at);
            self.write(at, &zeroes[..iomem::fits(len, "bytes in memory")]).await?;
            at += len;
        }
        Ok(())
    }

    /// The data of whole clusters of a range, as ranges of the disk and of the file.
    async fn clusters(&self, image: &Format, range: &Range<u64>) -> io::Result<Vec<Data>> {
        let cluster = self.core.cluster_bytes;
        let mut at = range.start.next_multiple_of(cluster);
        let end = range.end - range.end % cluster;
        let mut found = Vec::new();
        while at < end {
            let (mapping, len) = image.get_mapping(at, end - at).await?;
            if let Mapping::Raw { storage, offset, writable: true, .. } = mapping
                && storage.layer == 0
            {
                found.push(Data { at, len, offset });
            }
            if len == 0 {
                break;
            }
            at += len;
        }
        Ok(found)
    }

    /// Gives the space of data back to the file that the disk has no more.
    async fn give_back(&self, image: &Format, data: Vec<Data>) -> io::Result<()> {
        for Data { at, len, offset } in data {
            let (mapping, gone) = image.get_mapping(at, len).await?;
            if !matches!(mapping, Mapping::Raw { .. }) && gone >= len {
                self.core.top.give_back(offset, len).await;
            }
        }
        Ok(())
    }
}
