//! What all threads know about an image, and what it is made of.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::header::{self, BackingFile, ImageHeader};
use super::order::Order;
use super::room::Room;
use super::storage::Store;
use super::table::Table;
use super::uses::Uses;
use crate::config::IoThreadConfig;
use crate::disk::{DiskSource, foreign};
use crate::error::Error;
use crate::io_thread::IoThread;
use crate::remote::Remote;

/// What an image lies on: itself, or a disk that it has below it.
#[derive(Debug)]
pub struct Layer {
    pub(super) source: DiskSource,
    /// `None`: it is no image, and its bytes are those of the disk.
    pub(super) header: Option<ImageHeader>,
}

impl Layer {
    /// A qcow2 image.
    ///
    /// # Errors
    ///
    /// When it is none, or one that cannot be used.
    pub fn qcow2(source: DiskSource) -> Result<Self, Error> {
        let Some(header) = source.image_header()? else {
            return Err(refused(&source, foreign::not_qcow2(source.foreign_format())));
        };
        let info = source.info();
        let checked = header.check(info.read_only, info.logical_block_bytes);
        checked.map_err(|reason| refused(&source, reason))?;
        Ok(Self { source, header: Some(header) })
    }

    /// A disk without a format, at the bottom.
    #[must_use]
    pub fn raw(source: DiskSource) -> Self {
        Self { source, header: None }
    }

    /// What the image names as its backing file.
    #[must_use]
    pub fn backing(&self) -> Option<&BackingFile> {
        self.header.as_ref()?.backing.as_ref()
    }

    /// It is an image that was marked as corrupt.
    pub(super) fn is_corrupt(&self) -> bool {
        self.header.as_ref().is_some_and(ImageHeader::is_corrupt)
    }

    pub(super) fn has_zstd(&self) -> bool {
        self.header.as_ref().is_some_and(ImageHeader::has_zstd)
    }

    /// What it is.
    #[must_use]
    pub fn source(&self) -> &DiskSource {
        &self.source
    }
}

pub(super) fn refused(source: &DiskSource, reason: String) -> Error {
    source.refused("", &reason)
}

impl DiskSource {
    /// Reads some bytes before there are requests, and more where the disk has larger blocks.
    pub(super) fn read_front(&self, start: u64, bytes: u64) -> Result<Vec<u8>, Error> {
        let thread = IoThread::new(&IoThreadConfig::default())?;
        let source = self.for_a_look()?;
        let disk = source.attach(thread.io());
        let (block, size) = (u64::from(self.info().logical_block_bytes), self.info().size_bytes);
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
        let cannot = |error| refused(self, format!("its header cannot be read: {error}"));
        thread.block_on(read)?.map_err(cannot)
    }

    /// The header of the qcow2 image that begins where this disk does. `None`: there is none.
    ///
    /// # Errors
    ///
    /// When it cannot be read, or is damaged.
    pub fn image_header(&self) -> Result<Option<ImageHeader>, Error> {
        let block = u64::from(self.info().logical_block_bytes);
        let read = |end: u64| self.read_front(0, end);
        let wrong = |reason| refused(self, reason);
        let Some(bytes) = header::header_bytes(&read(block)?) else { return Ok(None) };
        let front = read(bytes.map_err(wrong)?)?;
        header::parse(&front).map(Some).map_err(wrong)
    }
}

/// Why an image cannot grow over what is longer than it: what is there would be seen.
pub(super) const TOO_LONG_BELOW: &str = "its backing file is longer than the disk; resize it with \
                                         `qemu-img resize` when it is not in use";

/// What all threads know about an image.
pub(super) struct Core {
    pub(super) table: Table,
    pub(super) top: Store,
    pub(super) order: Arc<Order>,
    pub(super) room: Arc<Room>,
    pub(super) layers: Vec<Layer>,
    /// The logical block of the disk: the largest of all layers.
    pub(super) block_bytes: u32,
    pub(super) cluster_bytes: u64,
    pub(super) has_zero_clusters: bool,
    /// Whether we hold it alone, and it can be looked at when we have not closed it.
    pub(super) may_be_marked: bool,
    /// How many clusters were leaked when it was opened marked, if it was looked at.
    pub(super) leaked: Option<u64>,
    pub(super) size_bytes: AtomicU64,
    /// How often the owner has written to the tables of the image, and how much of that a flush
    /// has covered.
    pub(super) committed: AtomicU64,
    pub(super) stable: AtomicU64,
    /// The IoThreads that use what the table says.
    pub(super) users: Mutex<Vec<(Remote, Weak<Uses>)>>,
}

impl Core {
    pub(super) fn source(&self) -> &DiskSource {
        &self.layers[0].source
    }

    pub(super) fn is_writable(&self) -> bool {
        !self.source().info().read_only
    }

    /// How long the disk is that lies below the image.
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

    pub(super) fn add_user(&self, remote: Remote, uses: &Arc<Uses>) {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        users.retain(|(_, uses)| uses.strong_count() > 0);
        users.push((remote, Arc::downgrade(uses)));
    }

    pub(super) fn users(&self) -> Vec<(Remote, Arc<Uses>)> {
        let users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        users.iter().filter_map(|(remote, uses)| Some((remote.clone(), uses.upgrade()?))).collect()
    }
}
