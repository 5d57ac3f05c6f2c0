//! The layers of an image, and its state that all threads share.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};

use blockio::executor::Lock;
use blockio::{DiskSource, Error, IoThread, IoThreadConfig, Remote};

use super::consistency::refused;
use super::place_table::PlaceTable;
use super::readers::Readers;
use super::storage::Store;
use crate::qcow2::consistency::cache_limit::CacheLimit;
use crate::qcow2::consistency::header::{self, BackingFile, ImageHeader};
use crate::qcow2::consistency::write_order::WriteOrder;

/// A layer of an image: the image itself, or a disk below it.
#[derive(Debug)]
pub struct Layer {
    pub(super) source: DiskSource,
    /// `None` for a raw disk.
    pub(super) header: Option<ImageHeader>,
}

impl Layer {
    /// Makes a layer of a qcow2 image.
    ///
    /// # Errors
    ///
    /// If the source holds no qcow2 image, or one that cannot be used.
    pub fn qcow2(source: DiskSource) -> Result<Self, Error> {
        let Some(header) = image_header(&source)? else {
            return Err(refused(&source, source.not_qcow2()));
        };
        let info = source.info();
        let checked = header.check(info.read_only, info.logical_block_bytes);
        checked.map_err(|reason| refused(&source, reason))?;
        Ok(Self { source, header: Some(header) })
    }

    /// Makes the layer of a disk without a format, at the bottom.
    pub fn raw(source: DiskSource) -> Self {
        Self { source, header: None }
    }

    /// The backing file that the image names.
    pub fn backing(&self) -> Option<&BackingFile> {
        self.header.as_ref()?.backing.as_ref()
    }

    /// True for an image that was marked as corrupt.
    pub(super) fn is_corrupt(&self) -> bool {
        self.header.as_ref().is_some_and(ImageHeader::is_corrupt)
    }

    pub(super) fn has_zstd(&self) -> bool {
        self.header.as_ref().is_some_and(ImageHeader::has_zstd)
    }

    /// The disk that holds the layer.
    pub fn source(&self) -> &DiskSource {
        &self.source
    }
}

/// Reads bytes before there are requests. The end is rounded up to a logical block.
pub(super) fn read_front(source: &DiskSource, start: u64, bytes: u64) -> Result<Vec<u8>, Error> {
    let thread = IoThread::new(&IoThreadConfig::default())?;
    let disk = source.for_probe()?.attach(thread.io());
    let info = source.info();
    let (block, size) = (u64::from(info.logical_block_bytes), info.size_bytes);
    let end = start.saturating_add(bytes).checked_next_multiple_of(block);
    let end = end.unwrap_or(size).min(size);
    let read = async {
        let mut front = Vec::new();
        while start + (front.len() as u64) < end {
            let at = start + front.len() as u64;
            front.extend(disk.read_part(at, end - at).await?.to_vec());
        }
        Ok::<_, std::io::Error>(front)
    };
    let cannot = |error| refused(source, format!("its header cannot be read: {error}"));
    thread.block_on(read)?.map_err(cannot)
}

/// Returns the header of the qcow2 image at the start of this disk. `None` if there is none.
///
/// # Errors
///
/// If the header cannot be read, or is damaged.
pub(crate) fn image_header(source: &DiskSource) -> Result<Option<ImageHeader>, Error> {
    let block = u64::from(source.info().logical_block_bytes);
    let read = |end: u64| read_front(source, 0, end);
    let wrong = |reason| refused(source, reason);
    let Some(bytes) = header::header_bytes(&read(block)?) else { return Ok(None) };
    let front = read(bytes.map_err(wrong)?)?;
    header::parse(&front).map(Some).map_err(wrong)
}

/// The error if an image is to grow and its backing file is longer: the data there would show.
pub(super) const TOO_LONG_BELOW: &str = "its backing file is larger than the image; resize the \
                                         image with `qemu-img resize` when it is not in use";

/// The state of an image that all threads share.
pub(super) struct Core {
    pub(super) table: PlaceTable,
    pub(super) top: Store,
    pub(super) order: Arc<WriteOrder>,
    pub(super) cache_limit: Arc<CacheLimit>,
    pub(super) layers: Vec<Layer>,
    /// The logical block of the disk: the largest of all layers.
    pub(super) block_bytes: u32,
    pub(super) cluster_bytes: u64,
    pub(super) has_zero_clusters: bool,
    /// True if this process holds the image alone, and the image can be checked if it is not
    /// closed.
    pub(super) may_be_marked: bool,
    /// The number of clusters that were leaked when a marked image was opened. `None` if it was not
    /// checked.
    pub(super) leaked: Option<u64>,
    pub(super) size_bytes: AtomicU64,
    /// The number of the owner's writes to the tables of the image, and the number of these that a
    /// flush has covered.
    pub(super) committed: AtomicU64,
    pub(super) stable: AtomicU64,
    /// The IoThreads that use places from the table.
    pub(super) threads: Lock<Vec<(Remote, Weak<Readers>)>>,
}

impl Core {
    pub(super) fn source(&self) -> &DiskSource {
        &self.layers[0].source
    }

    pub(super) fn is_writable(&self) -> bool {
        !self.source().info().read_only
    }

    /// The size of the disk below the image. 0 without one.
    pub(super) fn bytes_below(&self) -> u64 {
        let size = |layer: &Layer| match &layer.header {
            Some(header) => header.size_bytes,
            None => layer.source.info().size_bytes,
        };
        self.layers.get(1).map_or(0, size)
    }

    pub(super) fn name(&self) -> String {
        self.source().chain_text()
    }

    pub(super) fn add_thread(&self, remote: Remote, readers: &Arc<Readers>) {
        let mut threads = self.threads.lock();
        threads.retain(|(_, readers)| readers.strong_count() > 0);
        threads.push((remote, Arc::downgrade(readers)));
    }

    pub(super) fn threads(&self) -> Vec<(Remote, Arc<Readers>)> {
        let threads = self.threads.lock();
        threads
            .iter()
            .filter_map(|(remote, readers)| Some((remote.clone(), readers.upgrade()?)))
            .collect()
    }
}
