//! Space for first writes, from the clusters that were counted ahead: see `ahead_clusters.rs`.
//!
//! Such a write needs no data here. Its IoThread writes the data to the place in the table when the
//! entry is in the file. A power cut leaves at worst zeroes in place of the data, which the disk
//! had before.

use std::io;
use std::ops::Range;

use imago::{Mapping, Storage as _};

use super::{OWNER, Owner, check_end};
use crate::qcow2::format::{Format, has_any};
use crate::qcow2::place_table::Place;
use crate::qcow2::storage::Store;

/// The part of the ready clusters that may get places ahead of one write: one in `READY_SHARE`.
const READY_SHARE: u64 = 4;

/// The result of a search for space, with the number of bytes.
enum Placed {
    /// The bytes had space before.
    Existing(u64),
    New(u64),
    /// No space was found that an entry may point to.
    NoSpace,
}

impl Owner {
    /// Finds space for ranges of zeroes that have none, and returns a byte for each. 0 if the data
    /// must be written before an entry may point to it.
    pub(super) async fn place_ahead(&self, ranges: &[Range<u64>]) -> io::Result<Vec<u8>> {
        let mut placed = Vec::with_capacity(ranges.len());
        for range in ranges {
            // The request finds the error by itself. The ranges of other requests have no error.
            placed.push(self.place_concurrently(range).await.unwrap_or(false));
        }
        if !self.changes.are_committed() {
            self.count_more_if_low();
            self.commit().await?;
        }
        let mut answers = Vec::with_capacity(ranges.len());
        for (range, is_placed) in ranges.iter().zip(placed) {
            let is_known = || {
                let place = self.core.table.run(range.start, 1).place;
                matches!(place, Place::Data { writable: true, .. })
            };
            let is_placed =
                is_placed && (is_known() || self.try_look_up(range).await? && is_known());
            answers.push(u8::from(is_placed));
        }
        Ok(answers)
    }

    pub(super) async fn place_concurrently(&self, range: &Range<u64>) -> io::Result<bool> {
        let _permit = self.acquire_permit().await?;
        let image = self.image().await?.read().await;
        check_end(&image, range)?;
        if self.changes.has_failed() || self.releases_space(&image, range).await? {
            return Ok(false);
        }
        let mut is_new = false;
        let mut at = range.start;
        while at < range.end {
            match self.place_some(&image, at..range.end).await? {
                Placed::NoSpace => return Ok(false),
                Placed::Existing(bytes) => at += bytes,
                Placed::New(bytes) => {
                    is_new = true;
                    at += bytes;
                }
            }
        }
        if is_new {
            self.place_ahead_of_writer(&image, range).await;
        }
        Ok(true)
    }

    /// Finds space for the clusters behind a range that its writer is likely to fill next, without
    /// new tables.
    async fn place_ahead_of_writer(&self, image: &Format, range: &Range<u64>) {
        let cluster = self.core.cluster_bytes;
        let start = range.start - range.start % cluster;
        let mut at = range.end.next_multiple_of(cluster);
        let wanted = self.changes.streams.next(&(start..at));
        let table_covers = cluster * (cluster / 8);
        let ready = self.core.order.ready_ahead() / READY_SHARE * cluster;
        let bounds = [image.size(), at.next_multiple_of(table_covers), at.saturating_add(ready)];
        let end = bounds.into_iter().fold(wanted, u64::min);
        while at < end {
            // The write itself has its place. Its writer asks for the rest when it comes there.
            match self.place_some(image, at..end).await {
                Ok(Placed::New(bytes)) => at += bytes,
                Ok(Placed::Existing(_) | Placed::NoSpace) | Err(_) => break,
            }
        }
        self.changes.streams.cut(wanted, at);
    }

    /// Finds space for some of the first bytes of a range.
    async fn place_some(&self, image: &Format, range: Range<u64>) -> io::Result<Placed> {
        let (cluster, at) = (self.core.cluster_bytes, range.start);
        let (found, same) = image.get_mapping(at, range.end - at).await?;
        let is_there = matches!(&found, Mapping::Raw { storage, writable: true, .. }
            if storage.layer == 0);
        if is_there {
            return Ok(Placed::Existing(same));
        }
        let len = same.min(cluster_end(&found, at, cluster) - at);
        if !self.reads_as_zeroes(image, &found, at..at + len).await? {
            return Ok(Placed::NoSpace);
        }
        let mapping = image.prepare_data_mapping(at, len, true).await?;
        let len = mapping.length().min(len);
        assert!(len > 0, "space for no bytes");
        let is_there = mapping.is_nonblocking();
        if !is_there {
            let host = mapping.offset()..mapping.offset() + len;
            mapping.storage().check_data(host.start, len)?;
            if !self.core.order.take_ahead(&host) {
                return Ok(Placed::NoSpace);
            }
            let end = (at + len).next_multiple_of(cluster);
            let start = at - at % cluster;
            self.changes.add_entries(start..end, host.start - at % cluster, cluster);
        }
        image.commit_data_mapping(mapping).await?;
        Ok(if is_there { Placed::Existing(len) } else { Placed::New(len) })
    }

    /// Starts to count more clusters before all are taken. Requests continue beside that.
    fn count_more_if_low(&self) {
        if !self.core.order.is_ahead_low() || self.counting.try_lock().is_err() {
            return;
        }
        let Some(owner) = OWNER.with_borrow(Clone::clone) else { return };
        self.io.spawn(async move {
            if let Err(error) = owner.count_more().await {
                tracing::debug!("{}: cannot prepare more clusters: {error}", owner.core.name());
            }
        });
    }

    async fn count_more(&self) -> io::Result<()> {
        let _counting = self.counting.lock().await;
        {
            // No space is taken while free clusters are chosen and zeroed.
            let _image = self.image().await?.write().await;
            let order = &self.core.order;
            // A new table has space that the file may not count yet.
            if !order.is_ahead_low() || !order.is_empty() || !self.changes.has_only_entries() {
                return Ok(());
            }
            self.core.top.count_more_ahead().await;
        }
        self.core.top.sync().await
    }

    /// Returns true if all clusters that a range touches read as zeroes. `found` is the place of
    /// the range.
    pub(super) async fn reads_as_zeroes(
        &self,
        image: &Format,
        found: &Mapping<'_, Store>,
        range: Range<u64>,
    ) -> io::Result<bool> {
        if !matches!(found, Mapping::Zero { .. }) {
            return Ok(false);
        }
        if self.core.layers.len() == 1 {
            return Ok(true);
        }
        let cluster = self.core.cluster_bytes;
        let start = range.start - range.start % cluster;
        let whole = start..range.end.next_multiple_of(cluster).min(image.size());
        Ok(!has_any(image, &whole, |mapping| !matches!(mapping, Mapping::Zero { .. })).await?)
    }
}

/// The end of the clusters that may get space at once. imago releases the space of a cluster of
/// zeroes that does not follow the one before.
fn cluster_end(found: &Mapping<'_, Store>, at: u64, cluster: u64) -> u64 {
    match found {
        Mapping::Zero { explicit: true, .. } => at - at % cluster + cluster,
        _ => u64::MAX,
    }
}
