//! Jobs with exclusive use of the image.

use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;

use imago::format::PreallocateMode;
use tokio::sync::RwLockWriteGuard;

use super::Owner;
use crate::qcow2::core::TOO_LONG_BELOW;
use crate::qcow2::format::{Format, open};
use crate::qcow2::{storage, zstd};

impl Owner {
    /// Locks the image for one job.
    pub(super) async fn lock_exclusively(&self) -> io::Result<RwLockWriteGuard<'_, Format>> {
        let mut image = self.image().await?.write().await;
        self.reopen_at_limit(&mut image).await;
        Ok(image)
    }

    /// Opens the image again if its tables take too much memory. If that fails, the image stays
    /// open, and imago keeps more tables until the next time.
    pub(super) async fn reopen_at_limit(&self, image: &mut Format) {
        if !self.core.cache_limit.is_reached() {
            return;
        }
        let opened = async {
            if self.changes.imago_must_write() {
                self.commit_to(image).await?;
            }
            open(&self.core).await
        };
        match opened.await {
            Ok(opened) => *image = opened,
            Err(error) => self.log_error(&error),
        }
        self.core.cache_limit.clear();
    }

    pub(super) async fn write_exclusively(
        &self,
        range: &Range<u64>,
        data: &[u8],
    ) -> io::Result<()> {
        let image = self.lock_exclusively().await?;
        self.commit_waiting(&image).await?;
        self.revoke_places(range).await;
        let mut done = 0;
        while done < data.len() {
            let at = range.start + done as u64;
            let written = self.write_some(&image, at, &data[done..]).await;
            self.commit_to(&image).await?;
            done += written?;
        }
        Ok(())
    }

    pub(super) async fn grow(&self, size: u64) -> io::Result<()> {
        let image = self.image().await?.write().await;
        let before = self.core.size_bytes.load(Ordering::Relaxed);
        if self.core.bytes_below() > before {
            return Err(io::Error::other(TOO_LONG_BELOW));
        }
        self.core.table.forget(&(before.saturating_sub(1)..size));
        self.commit_to(&image).await?;
        self.core.order.set_l1_moving(true);
        // The first table moves, and the header still names its old place until the commit below.
        // So no space is searched for before: a table of zeroes could take that place.
        let grown = self.grow_in(&image, before..size).await;
        self.changes.add();
        let committed = self.commit_to(&image).await;
        self.core.order.set_l1_moving(false);
        self.core
            .top
            .load_tables()
            .await
            .inspect_err(|_| self.core.order.refuse(storage::MOVED))?;
        grown.and(committed)
    }

    async fn grow_in(&self, image: &Format, sizes: Range<u64>) -> io::Result<()> {
        let order = &self.core.order;
        if !order.is_rounded() {
            return image.resize_grow(sizes.end, PreallocateMode::None).await;
        }
        order.set_disk_bytes(sizes.end);
        let grown = async {
            let seen = sizes.end.next_multiple_of(self.core.cluster_bytes);
            image.resize_grow(seen, PreallocateMode::None).await?;
            // imago writes no header if the size that it sees stays the same.
            let has_zstd = self.core.top.has_zstd();
            let restore = |front: &mut [u8]| zstd::restore(front, has_zstd, Some(sizes.end));
            self.core.top.change_front(restore).await
        };
        grown.await.inspect_err(|_| order.set_disk_bytes(sizes.start))
    }
}
