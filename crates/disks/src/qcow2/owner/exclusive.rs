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

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::process::Command;
    use std::rc::Rc;
    use std::sync::Arc;

    use blockio::testing::RemoteStub;
    use blockio::{Activity, Disk, DiskSource, IoThread, IoThreadConfig, Wait};
    use iomem::Buffers;

    use crate::qcow2::owner::{Job, run_job_blocking};
    use crate::qcow2::readers::{ReaderGuard, Readers};
    use crate::qcow2::{Layer, open_image};

    const BYTES: u64 = 128 << 10;

    /// The file of an image with two compressed clusters. `None` without qemu-img.
    fn compressed_image() -> Option<Vec<u8>> {
        let folder = tempfile::tempdir().unwrap();
        let [raw, image] = ["raw", "image"].map(|name| folder.path().join(name));
        std::fs::write(&raw, vec![7; iomem::fits(BYTES, "bytes")]).unwrap();
        let mut convert = Command::new("qemu-img");
        convert.args(["convert", "-c", "-f", "raw", "-O", "qcow2"]).args([&raw, &image]);
        if convert.status().is_err() {
            eprintln!("skipped: qemu-img is not installed");
            return None;
        }
        let mut content = std::fs::read(&image).unwrap();
        content.resize(content.len().next_multiple_of(4096), 0);
        Some(content)
    }

    async fn change(disk: &Disk, kind: &str) -> std::io::Result<()> {
        match kind {
            "write" => Ok(disk.write(512, Buffers::from_vec(vec![1; 512]), false).await?),
            "discard" => disk.discard(0, BYTES).await,
            "unmap" => disk.write_zeroes(0, BYTES, true).await,
            _ => disk.write_zeroes(0, BYTES, false).await,
        }
    }

    /// Otherwise a request could read or write a place that another part of the disk has got.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_change_that_releases_space_waits_for_requests_in_progress() {
        let Some(content) = compressed_image() else { return };
        for kind in ["write", "discard", "unmap", "zero"] {
            let end = RemoteStub::exclusive(&content);
            let layers = vec![Layer::qcow2(end.source()).unwrap()];
            let (info, source) = open_image(layers, false).unwrap();
            let image = Arc::clone(&source.image);
            let source = DiskSource::from_driver(info, Arc::new(source));
            let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
            let readers = Arc::new(Readers::default());
            image.core.add_thread(thread.io().remote(), &readers);
            let guard = ReaderGuard::new(&readers);
            let (disk, ended) = (source.attach(thread.io()), Rc::new(Cell::new(false)));
            let end_of_change = Rc::clone(&ended);
            thread.io().spawn(async move {
                change(&disk, kind).await.unwrap();
                end_of_change.set(true);
            });
            let turn = || while thread.turn(Wait::Never).unwrap() == Activity::Ready {};
            while guard.is_current_round() && !ended.get() {
                turn();
            }
            // The owner has time for the whole change.
            for _ in 0..100 {
                run_job_blocking(&image.owner, Job::Open).unwrap();
                turn();
            }
            assert!(!ended.get(), "{kind} has not waited");
            drop(guard);
            while !ended.get() {
                turn();
            }
        }
    }
}
