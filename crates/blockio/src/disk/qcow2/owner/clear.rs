//! Discards, and zeroes: what takes data out of an image.

use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;

use imago::Mapping;

use super::Owner;
use crate::disk::qcow2::format::{Format, has_any};
use crate::disk::qcow2::storage::Store;

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
        let mut image = self.alone().await?;
        self.commit_what_waits(&image).await?;
        self.settle(&range).await;
        self.empty(&mut image, &range).await?;
        self.commit_to(&image).await
    }

    pub(super) async fn zero(&self, range: Range<u64>, may_unmap: bool) -> io::Result<()> {
        if !self.core.has_zero_clusters {
            return self.write_zeroes(range).await;
        }
        let whole = {
            let mut image = self.alone().await?;
            self.commit_what_waits(&image).await?;
            self.settle(&range).await;
            let whole = match may_unmap {
                true => self.empty(&mut image, &range).await?,
                false => self.cover_with_zeroes(&mut image, &range).await?,
            };
            self.commit_to(&image).await?;
            whole
        };
        for edge in [range.start..whole.start, whole.end..range.end] {
            if !self.is_zero(&edge).await? {
                self.write_zeroes(edge).await?;
            }
        }
        Ok(())
    }

    async fn is_zero(&self, range: &Range<u64>) -> io::Result<bool> {
        let _turn = self.turn().await?;
        let image = self.image().await?.read().await;
        Ok(!has_any(&image, range, is_data).await?)
    }

    /// The parts of a range of whole clusters for which there is one L2 table each. One that is
    /// not there yet is made when its part changes, and its place may be one that the part before
    /// has just left. So what leaves a place has a commit before the next one.
    fn parts(&self, whole: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        let table_covers = self.core.cluster_bytes * (self.core.cluster_bytes / 8);
        let Range { start: mut at, end } = *whole;
        std::iter::from_fn(move || {
            let start = at;
            at = (at + 1).next_multiple_of(table_covers).min(end);
            (start < end).then_some(start..at)
        })
    }

    /// Has the whole clusters of a range be zeroes that keep their space, and says which bytes
    /// these are. The caller commits what is left of that.
    async fn cover_with_zeroes(
        &self,
        image: &mut Format,
        range: &Range<u64>,
    ) -> io::Result<Range<u64>> {
        let whole = self.whole_clusters(range, image.size());
        for part in self.parts(&whole) {
            self.make_room(image).await;
            if !has_any(image, &part, is_data).await? {
                continue;
            }
            let gives_up = self.gives_up(image, &part).await?;
            let zeroed = image.write_zeroes(part.start, part.end - part.start).await;
            self.changes.add();
            if zeroed.is_err() || gives_up {
                self.commit_to(image).await?;
            }
            zeroed?;
        }
        Ok(whole)
    }

    /// Takes the whole clusters of a range out of the tables, and says which bytes these are. The
    /// caller commits what is left of that.
    async fn empty(&self, image: &mut Format, range: &Range<u64>) -> io::Result<Range<u64>> {
        let whole = self.whole_clusters(range, image.size());
        for part in self.parts(&whole) {
            self.make_room(image).await;
            // Where nothing is, not even a table is needed.
            let is_there = |mapping: &Mapping<'_, Store>| {
                !matches!(mapping, Mapping::Zero { explicit: false, .. })
            };
            if !has_any(image, &part, is_there).await? {
                continue;
            }
            let data = self.clusters(image, &part).await?;
            let emptied = match self.core.has_zero_clusters {
                true => image.discard_to_zero(part.start, part.end - part.start).await,
                false => {
                    image.discard_to_backing(part.start, part.end - part.start).await.map(drop)
                }
            };
            self.changes.add();
            if let Err(error) = self.commit_to(image).await {
                if !is_full(&error) {
                    return Err(error);
                }
                self.punch(&data).await;
                self.commit_to(image).await?;
            }
            emptied?;
            self.give_back(image, data).await?;
        }
        Ok(whole)
    }

    /// The clusters that lie in a range. Behind the end of the disk nothing is in the last one.
    fn whole_clusters(&self, range: &Range<u64>, size: u64) -> Range<u64> {
        let cluster = self.core.cluster_bytes;
        let start = range.start.next_multiple_of(cluster);
        let end = match range.end >= self.core.size_bytes.load(Ordering::Relaxed) {
            true => range.end.next_multiple_of(cluster).min(size),
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

    /// Gives back the space of data that is to go, before the tables of the image say so: a file
    /// system with copy on write needs space for them.
    pub(super) async fn make_space(&self, range: &Range<u64>) -> io::Result<()> {
        let is_last = self.core.layers.len() == 1;
        if !self.core.has_zero_clusters && !is_last || self.core.order.mark.delays_writes() {
            return Ok(());
        }
        let image = self.image().await?.write().await;
        self.settle(range).await;
        let whole = self.whole_clusters(range, image.size());
        let data = self.clusters(&image, &whole).await?;
        self.punch(&data).await;
        Ok(())
    }

    async fn punch(&self, data: &[Data]) {
        for Data { len, offset, .. } in data {
            self.core.top.give_back(*offset, *len).await;
        }
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

/// Whether the file has no space.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

fn is_data(mapping: &Mapping<'_, Store>) -> bool {
    !matches!(mapping, Mapping::Zero { .. })
}
