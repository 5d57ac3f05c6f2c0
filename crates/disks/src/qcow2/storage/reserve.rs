//! Counts clusters ahead, and zeroes them: see `ahead_clusters.rs`.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use blockio::disk::{Extent, ExtentKind};

use super::{GROWTH_BYTES, Store};
use crate::qcow2::consistency::counts;
use crate::qcow2::consistency::mark::MarkState;
use crate::qcow2::consistency::write_order::count_blocks::RisenBlock;

/// The fewest and the most bytes that are counted ahead at once, and the part of the image: one in
/// `SHARE`. Tests have fewer, so that all of them count several times.
const BYTES_MIN: u64 = if cfg!(test) { 1 << 20 } else { 16 << 20 };
const BYTES_MAX: u64 = 64 << 20;
const SHARE: u64 = 8;

/// The most ranges of free clusters that are tried.
const RANGES_MAX: usize = 32;

impl Store {
    /// Counts clusters ahead in the block in which counts have just risen, so that a flush is due
    /// anyway. Without a mark, no process would free them after a power cut. After an error the
    /// image stays as it is, and its writes wait for flushes.
    pub(super) async fn count_ahead(&self) {
        if let Some(risen) = self.order.take_risen() {
            self.count_ahead_in(&risen).await;
        }
    }

    /// Counts more clusters ahead, in a block of which imago has written all changes. The next
    /// flush makes the clusters ready.
    pub(in crate::qcow2) async fn count_more_ahead(&self) {
        if let Some(risen) = self.order.last_risen() {
            self.count_ahead_in(&risen).await;
        }
    }

    async fn count_ahead_in(&self, risen: &RisenBlock) {
        if self.order.mark.state() != MarkState::Set {
            return;
        }
        if let Err(error) = self.try_to_count_ahead(risen).await {
            tracing::debug!("cannot count clusters of {self} in advance: {error}");
        }
    }

    async fn try_to_count_ahead(&self, risen: &RisenBlock) -> io::Result<()> {
        let wanted = wanted(risen);
        let enough = wanted / 2;
        if self.order.ahead() > enough {
            return Ok(());
        }
        let mut places = Vec::new();
        for free in free_ranges(risen, wanted).into_iter().take(RANGES_MAX) {
            for range in self.zero_ahead(risen, &free).await? {
                places.extend(range.step_by(iomem::fits(risen.cluster_bytes, "a cluster")));
            }
        }
        if places.is_empty() {
            self.order.add_ahead(risen, &risen.file, places);
            return Ok(());
        }
        let mut file = risen.file.to_vec();
        for place in &places {
            let index = (place - risen.first) / risen.cluster_bytes;
            counts::set(&mut file, iomem::fits(index, "an index"), risen.bits, 1);
        }
        let file: Arc<[u8]> = file.into();
        let written = self.write_changes(&risen.file, &file, risen.place).await;
        written.inspect_err(|_| self.order.mark.keep_set())?;
        self.order.add_ahead(risen, &file, places);
        Ok(())
    }

    /// Turns free clusters into zeroes, if that is cheap and harms no image: with wrong counts a
    /// free cluster may hold data. Takes only holes, and clusters behind all used ones. Returns
    /// whole clusters.
    async fn zero_ahead(
        &self,
        risen: &RisenBlock,
        free: &Range<u64>,
    ) -> io::Result<Vec<Range<u64>>> {
        let cluster = risen.cluster_bytes;
        let (old_end, last) = (self.bytes(), last_used(risen));
        let free = free.start..self.grow_to(free.end, cluster);
        let (disk, mut at) = (self.disk()?, free.start);
        let mut zeroes = Vec::new();
        while at < free.end {
            let is_new = self.grows_with_zeroes() && at >= old_end;
            let end = match self.grows_with_zeroes() && !is_new {
                true => old_end.next_multiple_of(cluster).min(free.end),
                false => free.end,
            };
            let Extent { bytes, kind } = match is_new {
                true => Extent { bytes: end - at, kind: ExtentKind::Hole },
                false => disk.block_status(at, end - at).await?,
            };
            let extent_end = (at + bytes).min(end);
            let hole_end = if extent_end == end { end } else { extent_end - extent_end % cluster };
            let is_hole = kind == ExtentKind::Hole && hole_end > at;
            let whole = match (kind, is_hole) {
                (_, true) => at..hole_end,
                // A hole in a part of a cluster.
                (ExtentKind::Hole, false) => at..at + cluster,
                _ => at..extent_end.next_multiple_of(cluster).min(end),
            };
            at = whole.end;
            if is_hole {
                zeroes.push(whole);
            } else if whole.start > last && self.source.abilities().zeroes {
                disk.write_zeroes(whole.start, whole.end - whole.start, true).await?;
                zeroes.push(whole);
            }
        }
        Ok(zeroes)
    }

    /// Extends the file to `end` if possible, and returns the end of its whole clusters.
    fn grow_to(&self, end: u64, cluster: u64) -> u64 {
        if end > self.bytes() && self.source.sets_size_at_once() {
            let larger = end.next_multiple_of(GROWTH_BYTES);
            let _ =
                self.adopt_file_size().map(|size| self.source.set_size(larger.max(size), || ()));
        }
        let there = self.bytes();
        end.min(there - there % cluster)
    }

    /// Returns true if the file grows with zeroes.
    fn grows_with_zeroes(&self) -> bool {
        self.source.chain().first().is_some_and(|link| link.kind == "file")
    }
}

/// The place of the last used cluster of a block.
fn last_used(risen: &RisenBlock) -> u64 {
    let used = (0..count(risen)).rev().find(|index| !is_free(risen, *index));
    used.map_or(0, |index| risen.first + index as u64 * risen.cluster_bytes)
}

/// The number of clusters that are counted ahead at once.
fn wanted(risen: &RisenBlock) -> usize {
    let bytes = (last_used(risen) / SHARE).clamp(BYTES_MIN, BYTES_MAX);
    iomem::fits(bytes.div_ceil(risen.cluster_bytes), "a number of clusters")
}

fn count(risen: &RisenBlock) -> usize {
    let bits = usize::try_from(risen.bits).unwrap_or(1);
    risen.file.len() * 8 / bits
}

fn is_free(risen: &RisenBlock, index: usize) -> bool {
    let is_zero = |counts| counts::get(counts, index, risen.bits) == 0;
    is_zero(&risen.file) && is_zero(&risen.wanted)
}

/// The first free clusters of a block, as ranges of the file.
fn free_ranges(risen: &RisenBlock, most: usize) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for index in (0..count(risen)).filter(|index| is_free(risen, *index)).take(most) {
        let place = risen.first + index as u64 * risen.cluster_bytes;
        let end = place + risen.cluster_bytes;
        match ranges.last_mut() {
            Some(last) if last.end == place => last.end = end,
            _ => ranges.push(place..end),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::process::{Command, Stdio};

    use blockio::disk::DiskOptions;
    use blockio::{DiskSource, IoThread, IoThreadConfig};
    use iomem::Buffers;

    use super::*;
    use crate::qcow2::core::Layer;

    #[test]
    fn free_clusters_have_no_count_in_memory_or_in_the_file() {
        for bits in [1, 2, 4, 8, 16, 32, 64] {
            let mut block = vec![0; 512];
            for index in [0, 1, 4] {
                counts::set(&mut block, index, bits, 1);
            }
            let file: Arc<[u8]> = block.clone().into();
            counts::set(&mut block, 5, bits, 1);
            let (wanted, first) = (block.into(), 1 << 20);
            let place = 512;
            let risen = RisenBlock { place, first, cluster_bytes: 512, bits, wanted, file };
            let free: Vec<_> = free_ranges(&risen, 5);
            let at = |index: u64| (1 << 20) + index * 512;
            assert_eq!(free, [at(2)..at(4), at(6)..at(9)], "{bits}");
            assert_eq!(last_used(&risen), at(5));
        }
    }

    /// A program that died may have left data in clusters without a count.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn data_in_free_clusters_does_not_show_in_new_ones() {
        const CLUSTER: usize = 64 << 10;
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut create = Command::new("qemu-img");
        let create = create.args(["create", "-q", "-f", "qcow2"]).arg(file.path()).arg("16M");
        if create.stderr(Stdio::null()).status().is_err() {
            eprintln!("skipped: qemu-img is not installed");
            return;
        }
        let used = usize::try_from(file.as_file().metadata().unwrap().len()).unwrap();
        // The front or the back of a cluster is a hole, so holes end and begin within clusters.
        for cluster in used.div_ceil(CLUSTER)..32 {
            let at = cluster * CLUSTER + (cluster % 3) * (CLUSTER / 2 - 2048);
            file.as_file().write_all_at(&[0xaa; 4096], at as u64).unwrap();
        }
        file.as_file().set_len(32 * CLUSTER as u64).unwrap();
        let below = DiskSource::file(file.path(), &DiskOptions::default()).unwrap();
        let source = crate::qcow2::open(vec![Layer::qcow2(below).unwrap()], false).unwrap();
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let disk = source.attach(thread.io());
        for cluster in 0..20 {
            let at = (cluster * CLUSTER) as u64;
            let data = Buffers::from_vec(vec![7; 512]);
            thread.block_on(disk.write(at, data, false)).unwrap().unwrap();
            let (buffers, mut content) = (Buffers::aligned(CLUSTER, 512), vec![0; CLUSTER]);
            let read = buffers.duplicate();
            thread.block_on(disk.read(at, buffers)).unwrap().unwrap();
            read.copy_to(0, &mut content);
            assert!(content[..512].iter().all(|byte| *byte == 7), "cluster {cluster}");
            assert!(content[512..].iter().all(|byte| *byte == 0), "cluster {cluster}");
        }
    }
}
