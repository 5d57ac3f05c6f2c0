//! The files of an image as imago sees them: disks of ours, on the owner's thread.

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use imago::Storage;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;
use iomem::Buffers;

use super::pointers::Pointers;
use crate::disk::{Disk, DiskSource};
use crate::error::Error;
use crate::io::Io;

thread_local! {
    /// The disks of this thread's image, by layer. imago wants storage that may be sent to other
    /// threads; a disk cannot be, so storage is its number.
    static DISKS: RefCell<Vec<Rc<Disk>>> = const { RefCell::new(Vec::new()) };
}

/// Makes the files of an image known to this thread, from the top.
pub(super) fn attach(layers: &[DiskSource], io: &Rc<Io>) {
    let disks = layers.iter().map(|source| Rc::new(source.attach(io))).collect();
    DISKS.set(disks);
}

/// Ends what [`attach`] has begun.
pub(super) fn detach() {
    drop(DISKS.take());
}

/// By how much a file grows at least.
const GROWTH_BYTES: u64 = 1 << 20;

/// Memory for transfers begins at a page.
const PAGE: usize = 4096;

/// The file of one layer.
pub(super) struct Store {
    pub(super) layer: usize,
    source: DiskSource,
    /// Those of the image that is written to.
    pointers: Arc<Pointers>,
    helper: CommonStorageHelper,
}

impl Store {
    pub(super) fn new(layer: usize, source: DiskSource, pointers: &Arc<Pointers>) -> Self {
        let pointers = if layer == 0 { Arc::clone(pointers) } else { Arc::default() };
        Self { layer, source, pointers, helper: CommonStorageHelper::default() }
    }

    /// How long the file is.
    pub(super) fn bytes(&self) -> u64 {
        self.source.info().size_bytes
    }

    /// Gives bytes of the file back that nothing is in any more, where that is possible.
    pub(super) async fn give_back(&self, offset: u64, len: u64) {
        let len = len.min(self.bytes().saturating_sub(offset));
        if let Ok(disk) = self.disk()
            && let Err(error) = disk.discard(offset, len).await
        {
            tracing::debug!("{len} bytes at {offset} of {self} stay: {error}");
        }
    }

    /// Writes the pointers that have waited until now.
    pub(super) async fn release(&self) -> io::Result<()> {
        for (offset, block) in self.pointers.held() {
            self.write_at(block, offset).await?;
        }
        self.pointers.written();
        Ok(())
    }

    fn disk(&self) -> io::Result<Rc<Disk>> {
        let disk = DISKS.with_borrow(|disks| disks.get(self.layer).cloned());
        disk.ok_or_else(|| io::Error::from_raw_os_error(libc::ECANCELED))
    }

    /// Learns how long the file is, which another process may have made longer before it handed
    /// the file over.
    pub(super) fn look(&self) -> Result<u64, Error> {
        let size = self.source.covered_bytes()?;
        if size > self.bytes() {
            let block = self.source.info().physical_block_bytes;
            self.source.adopt_size(size.next_multiple_of(block.into()));
        }
        Ok(self.bytes())
    }

    /// Makes the file long enough to be written up to here, and never shorter.
    fn reach(&self, end: u64) -> io::Result<()> {
        if end <= self.bytes() {
            return Ok(());
        }
        let grow = || match self.look()? {
            size if end <= size => Ok(()),
            size => self.source.set_size(end.next_multiple_of(GROWTH_BYTES).max(size), || ()),
        };
        grow().map_err(|error| {
            tracing::warn!("an image needs more space: {error}");
            io::Error::from_raw_os_error(libc::ENOSPC)
        })
    }

    async fn write_at(&self, data: Vec<u8>, offset: u64) -> io::Result<()> {
        self.reach(offset + data.len() as u64)?;
        let buffers = Buffers::aligned(data.len(), PAGE);
        buffers.copy_from(0, &data);
        drop(data);
        Ok(self.disk()?.write(offset, buffers, false).await?)
    }

    async fn zero_at(&self, offset: u64, len: u64, may_unmap: bool) -> io::Result<()> {
        self.reach(offset + len)?;
        self.disk()?.write_zeroes(offset, len, may_unmap).await
    }
}

impl Storage for Store {
    fn req_align(&self) -> usize {
        iomem::fits(self.source.info().logical_block_bytes, "a block")
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.bytes())
    }

    // SAFETY: what imago has not aligned is refused by the disk; memory is not shared.
    async unsafe fn pure_readv(&self, mut bufv: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        let mut data = vec![0; iomem::fits(bufv.len(), "bytes in memory")];
        // Behind its end a file is zeroes.
        let there = self.bytes().saturating_sub(offset).min(bufv.len());
        if there > 0 {
            let buffers = Buffers::aligned(iomem::fits(there, "bytes in memory"), PAGE);
            let read = buffers.again();
            self.disk()?.read(offset, buffers).await?;
            read.copy_to(0, &mut data);
        }
        self.pointers.cover(offset, &mut data);
        bufv.copy_from_slice(&data);
        Ok(())
    }

    // SAFETY: as `pure_readv`.
    async unsafe fn pure_writev(&self, bufv: IoVector<'_>, offset: u64) -> io::Result<()> {
        let mut data = vec![0; iomem::fits(bufv.len(), "bytes in memory")];
        bufv.copy_into_slice(&mut data);
        if self.pointers.hold(offset, &data, self.source.info().logical_block_bytes.into()) {
            return Ok(());
        }
        self.write_at(data, offset).await
    }

    // SAFETY: as `pure_readv`.
    async unsafe fn pure_write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.zero_at(offset, length, true).await
    }

    // SAFETY: as `pure_readv`.
    async unsafe fn pure_write_allocated_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.zero_at(offset, length, false).await
    }

    async fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    async fn sync(&self) -> io::Result<()> {
        self.disk()?.flush().await
    }

    /// Futures of the owner are never dropped before they have ended.
    async fn settle_writes(&self) -> io::Result<()> {
        Ok(())
    }

    // SAFETY: nothing is kept in memory.
    async unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        &self.helper
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({self})")
    }
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.source.chain().first() {
            Some(link) => write!(f, "{link}"),
            None => Ok(()),
        }
    }
}
