//! Discards and zeroes, which remove data from an image.

use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;

use imago::Mapping;

use super::{Owner, check_end};
use crate::qcow2::format::{Format, has_any};
use crate::qcow2::storage::Store;

/// The most zeroes that are written at once without zero clusters.
const ZEROES_BYTES: u64 = 256 << 10;

/// Data of the disk in the file of the image.
struct Data {
    at: u64,
    len: u64,
    offset: u64,
}

impl Owner {
    pub(super) async fn discard(&self, range: Range<u64>) -> io::Result<()> {
        let (has_zeroes, is_only_layer) =
            (self.core.has_zero_clusters, self.core.layers.len() == 1);
        if !has_zeroes && !is_only_layer {
            // The data below would show instead.
            return Ok(());
        }
        let mut image = self.lock_exclusively().await?;
        self.commit_waiting(&image).await?;
        self.revoke_places(&range).await;
        self.unmap(&mut image, &range).await?;
        self.commit_to(&image).await
    }

    pub(super) async fn zero(&self, range: Range<u64>, may_unmap: bool) -> io::Result<()> {
        if !self.core.has_zero_clusters {
            return self.write_zeroes(range).await;
        }
        let whole = {
            let mut image = self.lock_exclusively().await?;
            self.commit_waiting(&image).await?;
            self.revoke_places(&range).await;
            let whole = match may_unmap {
                true => self.unmap(&mut image, &range).await?,
                false => self.zero_in_place(&mut image, &range).await?,
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
        let _permit = self.acquire_permit().await?;
        let image = self.image().await?.read().await;
        check_end(&image, range)?;
        Ok(!has_any(&image, range, is_data).await?)
    }

    /// Splits a range of whole clusters so that one L2 table covers each part. A missing table is
    /// made when its part changes, and may take a cluster that the part before has just released.
    /// So a part that releases clusters is committed before the next part.
    fn parts(&self, whole: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        let table_covers = self.core.cluster_bytes * (self.core.cluster_bytes / 8);
        let Range { start: mut at, end } = *whole;
        std::iter::from_fn(move || {
            let start = at;
            at = (at + 1).next_multiple_of(table_covers).min(end);
            (start < end).then_some(start..at)
        })
    }

    /// Turns the whole clusters of a range into zeroes that keep their space, and returns their
    /// range. The caller commits the rest.
    async fn zero_in_place(
        &self,
        image: &mut Format,
        range: &Range<u64>,
    ) -> io::Result<Range<u64>> {
        let whole = self.whole_clusters(range, image.size());
        for part in self.parts(&whole) {
            self.reopen_at_limit(image).await;
            if !has_any(image, &part, is_data).await? {
                continue;
            }
            let releases_space = self.releases_space(image, &part).await?;
            let zeroed = image.write_zeroes(part.start, part.end - part.start).await;
            self.changes.add();
            if zeroed.is_err() || releases_space {
                self.commit_to(image).await?;
            }
            zeroed?;
        }
        Ok(whole)
    }

    /// Removes the whole clusters of a range from the tables, and returns their range. The caller
    /// commits the rest.
    async fn unmap(&self, image: &mut Format, range: &Range<u64>) -> io::Result<Range<u64>> {
        let whole = self.whole_clusters(range, image.size());
        for part in self.parts(&whole) {
            self.reopen_at_limit(image).await;
            // A range without any clusters does not even need a table.
            let is_there = |mapping: &Mapping<'_, Store>| {
                !matches!(mapping, Mapping::Zero { explicit: false, .. })
            };
            if !has_any(image, &part, is_there).await? {
                continue;
            }
            let data = self.clusters(image, &part).await?;
            let unmapped = match self.core.has_zero_clusters {
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
            unmapped?;
            self.release_removed(image, data).await?;
        }
        Ok(whole)
    }

    /// The whole clusters in a range. A last cluster that reaches over the end of the disk counts
    /// as whole, since no data lies behind the end.
    fn whole_clusters(&self, range: &Range<u64>, size: u64) -> Range<u64> {
        let cluster = self.core.cluster_bytes;
        let start = range.start.next_multiple_of(cluster);
        let end = match range.end >= self.core.size_bytes.load(Ordering::Relaxed) {
            true => range.end.next_multiple_of(cluster).min(size),
            false => range.end - range.end % cluster,
        };
        // Without any, the range counts as before them.
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

    /// Finds the data of whole clusters of a range, as ranges of the disk and of the file.
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

    /// Releases the space of data before the tables record its removal: a file system with copy on
    /// write needs space for the tables.
    pub(super) async fn release_early(&self, range: &Range<u64>) -> io::Result<()> {
        let is_only_layer = self.core.layers.len() == 1;
        if !self.core.has_zero_clusters && !is_only_layer || self.core.order.mark.delays_writes() {
            return Ok(());
        }
        let image = self.image().await?.write().await;
        self.revoke_places(range).await;
        let whole = self.whole_clusters(range, image.size());
        let data = self.clusters(&image, &whole).await?;
        self.punch(&data).await;
        Ok(())
    }

    async fn punch(&self, data: &[Data]) {
        for Data { len, offset, .. } in data {
            self.core.top.release_bytes(*offset, *len).await;
        }
    }

    /// Releases the space of data that the disk no longer has.
    async fn release_removed(&self, image: &Format, data: Vec<Data>) -> io::Result<()> {
        for Data { at, len, offset } in data {
            let (mapping, gone) = image.get_mapping(at, len).await?;
            if !matches!(mapping, Mapping::Raw { .. }) && gone >= len {
                self.core.top.release_bytes(offset, len).await;
            }
        }
        Ok(())
    }
}

/// Returns true if the file has no space.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

fn is_data(mapping: &Mapping<'_, Store>) -> bool {
    !matches!(mapping, Mapping::Zero { .. })
}
