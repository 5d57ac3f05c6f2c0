//! The files of an image as imago sees them: disks of ours, on the owner's thread.

mod compressed_reads;
mod reserve;
mod writes;

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use blockio::driver::BounceShare;
use blockio::{Disk, DiskSource, EngineKind, Error, Io};
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;
use imago::{Storage, StorageExt};
use iomem::Buffers;

use super::zstd;
use crate::qcow2::consistency::cache_limit::CacheLimit;
use crate::qcow2::consistency::header::ImageHeader;
use crate::qcow2::consistency::mark::{self, MarkState};
use crate::qcow2::consistency::metadata_map::Fault;
use crate::qcow2::consistency::write_order::{FRONT_BYTES, Roots, WriteAction, WriteOrder};

thread_local! {
    /// The disks of this thread's image, by layer, and the memory that they may use. imago wants
    /// storage that may be sent to other threads. A disk cannot be sent, so storage is its number.
    static DISKS: RefCell<Vec<(Rc<Disk>, Rc<BounceShare>)>> = const { RefCell::new(Vec::new()) };
}

/// Attaches the files of an image to this thread, from the top.
pub(super) fn attach(layers: &[DiskSource], share: &Rc<BounceShare>, io: &Rc<Io>) {
    let attach = |source: &DiskSource| {
        let engine = source.preferred_engine().or_else(|| default_engine(source, io));
        (Rc::new(source.attach_with(io, engine)), Rc::clone(share))
    };
    DISKS.set(layers.iter().map(attach).collect());
}

/// Linux AIO for block devices, if there is room for another context. io_uring gives writes to a
/// thread of the kernel if the device cannot take them without a wait, such as zram, and that
/// thread takes longer than the write.
fn default_engine(source: &DiskSource, io: &Io) -> Option<EngineKind> {
    let is_direct = source.is_block_device() && source.info().direct;
    let has_aio = is_direct && io.add_engine(EngineKind::Aio.into()).is_ok();
    has_aio.then_some(EngineKind::Aio)
}

/// Reverts [`attach`].
pub(super) fn detach() {
    drop(DISKS.take());
}

/// The least growth of a file.
const GROWTH_BYTES: u64 = 1 << 20;

/// The longest table of tables that imago accepts: 4 Mi entries, and the rest of their last
/// cluster.
const TABLE_BYTES_MAX: u64 = (32 << 20) + (2 << 20);

/// The bytes of these tables that are read at once.
const LOAD_BYTES: usize = 1 << 20;

/// The reason to refuse writes after an error at a bad time.
pub(super) const MOVED: Fault = "a write failed while its tables were moving";

/// Memory for transfers begins at a page.
const PAGE: usize = 4096;

/// The file of one layer.
pub(super) struct Store {
    pub(super) layer: usize,
    source: DiskSource,
    /// True for an image with a place for the mark in its header.
    has_mark: bool,
    /// True for an image with clusters that imago cannot read.
    has_zstd: bool,
    /// The order of the image that is written to. Lower layers have an empty one.
    order: Arc<WriteOrder>,
    cache_limit: Arc<CacheLimit>,
    helper: CommonStorageHelper,
    /// The length of the file when it last had no space. Each length is logged once: held writes
    /// are tried again and again.
    full_at: AtomicU64,
}

/// A value that is no length.
const NO_LENGTH: u64 = u64::MAX;

impl Store {
    pub(super) fn new(
        layer: usize,
        (source, header): (DiskSource, Option<&ImageHeader>),
        order: &Arc<WriteOrder>,
        cache_limit: &Arc<CacheLimit>,
    ) -> Self {
        let order = if layer == 0 { Arc::clone(order) } else { Arc::default() };
        let has_mark = header.is_some_and(ImageHeader::has_mark);
        let has_zstd = header.is_some_and(ImageHeader::has_zstd);
        let (cache_limit, helper) = (Arc::clone(cache_limit), CommonStorageHelper::default());
        let full_at = AtomicU64::new(NO_LENGTH);
        Self { layer, source, has_mark, has_zstd, order, cache_limit, helper, full_at }
    }

    /// True if clusters are compressed with Zstandard: see `zstd.rs`.
    pub(super) fn has_zstd(&self) -> bool {
        self.has_zstd
    }

    /// The length of the file.
    pub(super) fn bytes(&self) -> u64 {
        self.source.info().size_bytes
    }

    /// Releases bytes of the file that are no longer used, if that is possible.
    pub(super) async fn release_bytes(&self, offset: u64, len: u64) {
        let len = len.min(self.bytes().saturating_sub(offset));
        let release_bytes = async {
            self.check_data(offset, len)?;
            self.disk()?.discard(offset, len).await
        };
        if let Err(error) = release_bytes.await {
            tracing::debug!("cannot release {len} bytes at {offset} of {self}: {error}");
        }
    }

    /// Fails if the range touches a table: an image with data there as well is malicious.
    pub(super) fn check_data(&self, offset: u64, len: u64) -> io::Result<()> {
        match self.order.overlaps_metadata(&(offset..offset.saturating_add(len))) {
            false => Ok(()),
            true => Err(damaged("its data overlaps one of its tables")),
        }
    }

    /// Reads where the tables of the image are. Writes to them have an order from now on.
    pub(super) async fn load_tables(&self) -> io::Result<()> {
        let mut front = [0; FRONT_BYTES];
        self.read(&mut front[..], 0).await?;
        let Roots { l1, counts } = Roots::parse(&front);
        let (l1, counts) = (self.read_table(l1).await?, self.read_table(counts).await?);
        self.order.begin(&front, &l1, &counts).map_err(damaged)
    }

    async fn read_table(&self, range: Range<u64>) -> io::Result<Vec<u8>> {
        // imago has read the table, and accepts no longer ones. But the file may have changed
        // since: data may lie over its header.
        let bytes = range.end - range.start;
        if bytes > TABLE_BYTES_MAX {
            return Err(damaged("one of its tables is too long"));
        }
        let mut table = vec![0; iomem::fits(bytes, "bytes in memory")];
        let pieces = (range.start..).step_by(LOAD_BYTES).zip(table.chunks_mut(LOAD_BYTES));
        for (offset, piece) in pieces {
            self.read(piece, offset).await?;
        }
        Ok(table)
    }

    /// Reads the mark when the image is opened for the first time. Another process may have written
    /// to the image until then.
    pub(super) async fn load_mark(&self, may_be_marked: bool, was_checked: bool) -> io::Result<()> {
        if self.order.mark.state() != MarkState::Unknown {
            return Ok(());
        }
        let front = if self.has_mark { self.read_front().await? } else { Vec::new() };
        let is_set = mark::is_set(&front);
        self.order.mark.set_autoclear(mark::has_autoclear(&front));
        if self.order.is_rounded() {
            self.order.set_disk_bytes(zstd::disk_bytes(&front));
        }
        self.order.mark.set_state(match (may_be_marked, is_set) {
            (true, false) => MarkState::Clear,
            (true, true) if was_checked => MarkState::LeaksToFree,
            // Pointers to its clusters are right.
            (_, true) => MarkState::Inherited,
            (false, false) => MarkState::NotAllowed,
        });
        Ok(())
    }

    /// Sets or clears the mark in the file.
    pub(super) async fn write_mark(&self, is_set: bool) -> io::Result<()> {
        self.change_front(|front| mark::set(front, is_set)).await
    }

    /// Changes the header in the file, and clears autoclear features, since this is a change of the
    /// image.
    pub(super) async fn change_front(&self, change: impl FnOnce(&mut [u8])) -> io::Result<()> {
        let mut front = self.read_front().await?;
        change(&mut front);
        mark::clear_autoclear(&mut front);
        self.write_at(&front, 0).await
    }

    /// Reads the blocks of the file with the mark.
    async fn read_front(&self) -> io::Result<Vec<u8>> {
        let mut front = vec![0; FRONT_BYTES.next_multiple_of(self.req_align())];
        self.read_at(&mut front, 0).await?;
        Ok(front)
    }

    /// Fails if writes are refused.
    fn check_not_refused(&self) -> io::Result<()> {
        self.order.refusal().map_or(Ok(()), |why| {
            Err(io::Error::other(format!(
                "{why}; its tables accept no changes until the image is opened again"
            )))
        })
    }

    /// Writes a header that moves the table of reference counts.
    async fn write_header(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.sync().await?;
        self.write_at(data, offset).await?;
        self.sync().await?;
        // The new table may have been written before it was known as one.
        self.load_tables().await
    }

    fn disk(&self) -> io::Result<Rc<Disk>> {
        self.disk_and_share().map(|(disk, _)| disk)
    }

    fn disk_and_share(&self) -> io::Result<(Rc<Disk>, Rc<BounceShare>)> {
        let disk = DISKS.with_borrow(|disks| disks.get(self.layer).cloned());
        disk.ok_or_else(|| io::Error::from_raw_os_error(libc::ECANCELED))
    }

    /// Takes memory for a transfer from the budget.
    async fn take_memory(&self, bytes: usize) -> io::Result<(Rc<Disk>, Buffers)> {
        let (disk, share) = self.disk_and_share()?;
        let permit = share.take(bytes).await;
        Ok((disk, Buffers::uninitialized(bytes, PAGE, permit)?))
    }

    /// Like [`adopt_file_size`], and returns the length of the file.
    pub(super) fn adopt_file_size(&self) -> Result<u64, Error> {
        adopt_file_size(&self.source)?;
        Ok(self.bytes())
    }

    /// Extends the file to `end` if it is shorter.
    fn extend_to(&self, end: u64) -> io::Result<()> {
        if end <= self.bytes() {
            return Ok(());
        }
        let grow = || match self.adopt_file_size()? {
            size if end <= size => Ok(()),
            // A server or a cluster may take long to answer, and the loop would wait for it.
            _ if !self.source.sets_size_at_once() => Err(self.full_error()),
            size => {
                let larger = end.next_multiple_of(GROWTH_BYTES).max(size);
                // If this process cannot extend the file, another process may have done so.
                let has_room = |_| self.source.refresh().is_ok_and(|size| end <= size);
                let made = self.source.set_size(larger, || ());
                made.or_else(|error| if has_room(()) { Ok(()) } else { Err(error) })
            }
        };
        grow().map_err(|error| {
            if self.full_at.swap(self.bytes(), Relaxed) != self.bytes() {
                tracing::warn!("cannot extend the file of an image: {error}");
            }
            io::Error::from_raw_os_error(errno_of_growth(&error))
        })
    }

    fn full_error(&self) -> Error {
        let reason = "it is full; extend it, then use `ringhaul ctl resize` (an RBD image \
                      continues by itself)";
        self.source.refused("", reason)
    }

    async fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.extend_to(offset + data.len() as u64)?;
        let (disk, buffers) = self.take_memory(data.len()).await?;
        buffers.copy_from(0, data);
        Ok(disk.write(offset, buffers, false).await?)
    }

    /// Reads from the file. Bytes behind its end are zeroes.
    async fn read_at(&self, data: &mut [u8], offset: u64) -> io::Result<()> {
        let there = self.bytes().saturating_sub(offset).min(data.len() as u64);
        let (there, rest) = data.split_at_mut(iomem::fits(there, "bytes in memory"));
        rest.fill(0);
        if !there.is_empty() {
            let (disk, buffers) = self.take_memory(there.len()).await?;
            let read = buffers.duplicate();
            disk.read(offset, buffers).await?;
            read.copy_to(0, there);
        }
        Ok(())
    }

    /// Zeroes data, and no tables: imago does that to the rest of a partly written cluster.
    async fn zero_at(&self, offset: u64, len: u64, may_unmap: bool) -> io::Result<()> {
        self.check_not_refused()?;
        self.check_data(offset, len)?;
        if self.order.is_ahead(&(offset..offset + len)) {
            return Ok(());
        }
        let zeroed = async {
            self.extend_to(offset + len)?;
            self.order.remove_ahead(&(offset..offset + len));
            let zeroed = self.disk()?.write_zeroes(offset, len, may_unmap).await;
            self.order.note_written();
            zeroed
        };
        zeroed.await.inspect_err(|_| self.order.mark.keep_set())
    }
}

/// Adopts the whole blocks of a file. Another process may have extended the file before it was
/// handed over. Not every disk has bytes behind its whole blocks.
pub(super) fn adopt_file_size(file: &DiskSource) -> Result<(), Error> {
    let size = file.covered_bytes()?;
    let whole = size - size % u64::from(file.info().physical_block_bytes);
    if whole > file.info().size_bytes {
        file.adopt_size(whole);
    }
    Ok(())
}

/// The errno of a write for which the file cannot grow. A damaged image may ask for a length that
/// no file can have: that is no lack of space, for which a write would wait.
fn errno_of_growth(error: &Error) -> i32 {
    match error.system_error().and_then(io::Error::raw_os_error) {
        Some(libc::EFBIG) => libc::EFBIG,
        _ => libc::ENOSPC,
    }
}

/// The error of an image that is damaged, or was made to look so.
fn damaged(fault: Fault) -> io::Error {
    io::Error::other(format!(
        "{fault}; repair it with `qemu-img check -r all`, or open it read-only"
    ))
}

impl Storage for Store {
    fn req_align(&self) -> usize {
        iomem::fits(self.source.info().logical_block_bytes, "a block")
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.bytes())
    }

    // SAFETY: the disk refuses requests that imago has not aligned, and memory is not shared.
    async unsafe fn pure_readv(&self, mut bufv: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        let mut data = vec![0; iomem::fits(bufv.len(), "bytes in memory")];
        self.cache_limit.count_access(self.layer, offset, data.len());
        let before = self.order.entry_writes();
        let read = self.read_at(&mut data, offset).await;
        if read.is_ok() && self.layer == 0 {
            self.order.cache_read(offset, &data, before);
        }
        self.order.overlay_waiting(offset, &mut data);
        let checked = read.and_then(|()| self.order.check_read(offset, &data).map_err(damaged));
        checked.inspect_err(|_| self.order.mark.keep_set())?;
        if offset == 0 && self.has_mark {
            mark::mask(&mut data);
        }
        if offset == 0 {
            zstd::mask(&mut data, self.has_zstd, self.order.is_rounded());
        }
        bufv.copy_from_slice(&data);
        Ok(())
    }

    // SAFETY: as for `pure_readv`.
    async unsafe fn pure_writev(&self, bufv: IoVector<'_>, offset: u64) -> io::Result<()> {
        let mut data = vec![0; iomem::fits(bufv.len(), "bytes in memory")];
        self.cache_limit.count_access(self.layer, offset, data.len());
        bufv.copy_into_slice(&mut data);
        if offset == 0 && self.has_mark {
            self.order.mark.restore(&mut data);
        }
        if offset == 0 {
            zstd::restore(&mut data, self.has_zstd, self.order.disk_bytes());
        }
        let written = match self.order.classify(offset, &data) {
            WriteAction::Now => self.write_now(&data, offset).await,
            WriteAction::Wait => Ok(()),
            WriteAction::RaiseCounts => self.write_counts(&data, offset).await,
            // After an error imago would continue with the old table, even if the file names the
            // new one.
            WriteAction::BetweenFlushes => {
                self.write_header(&data, offset).await.inspect_err(|_| self.order.refuse(MOVED))
            }
            WriteAction::Refuse => self.check_not_refused(),
        };
        written.inspect_err(|_| self.order.mark.keep_set())
    }

    // SAFETY: as for `pure_readv`.
    async unsafe fn pure_write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.zero_at(offset, length, true).await
    }

    // SAFETY: as for `pure_readv`.
    async unsafe fn pure_write_allocated_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.zero_at(offset, length, false).await
    }

    async fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    async fn sync(&self) -> io::Result<()> {
        let written = self.order.written();
        self.disk()?.flush().await.inspect_err(|_| self.order.note_failed_flush())?;
        self.order.note_stable(written);
        Ok(())
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

#[cfg(test)]
mod tests {
    use blockio::testing::{Event, RemoteStub};
    use blockio::{IoThread, IoThreadConfig};

    use super::*;
    use crate::qcow2::consistency::write_order::count_blocks::RisenBlock;

    /// The file of an image with clusters of 512 bytes, and a block of counts.
    fn scene() -> (IoThread, RemoteStub, Store, RisenBlock) {
        let (end, order) = (RemoteStub::new(&[0; 8192]), Arc::<WriteOrder>::default());
        let cache_limit = Arc::new(CacheLimit::new(vec![512]));
        let store = Store::new(0, (end.clone().source(), None), &order, &cache_limit);
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let share = thread.io().bounce_share(&order);
        attach(&[end.clone().source()], &share, thread.io());
        let (wanted, file) = (vec![0; 512].into(), vec![1; 512].into());
        let risen = RisenBlock { place: 512, first: 0, cluster_bytes: 512, bits: 8, wanted, file };
        (thread, end, store, risen)
    }

    /// imago zeroes the rest of a cluster before a part of it gets data.
    #[test]
    fn clusters_that_are_zeroed_before_the_flush_are_not_ready_after_it() {
        let (thread, end, store, risen) = scene();
        let order = &store.order;
        order.add_ahead(&risen, &risen.file, vec![1024, 1536, 2048]);
        let zero = |at| thread.block_on(store.zero_at(at, 512, true)).unwrap().unwrap();
        zero(1024);
        assert_eq!((order.ahead(), end.events()), (2, 1));
        thread.block_on(store.sync()).unwrap().unwrap();
        assert!(!order.take_ahead(&(1024..1536)), "its use has begun");
        assert!(order.take_ahead(&(1536..2048)));
        // Zeroes are there already, and stable.
        zero(2048);
        assert_eq!(end.events(), 2);
        assert!(order.take_ahead(&(2048..2560)));
        detach();
    }

    /// A pointer to it must wait for a flush, for its data is not stable.
    #[test]
    fn clusters_with_other_bytes_are_not_ready() {
        let (thread, end, store, risen) = scene();
        let order = &store.order;
        for is_flushed in [false, true] {
            order.add_ahead(&risen, &risen.file, vec![1024, 1536, 2048]);
            if is_flushed {
                thread.block_on(store.sync()).unwrap().unwrap();
            }
            let before = end.events();
            let write = |data: &[u8], at| thread.block_on(store.write_now(data, at)).unwrap();
            // A table has been there, and may be there again.
            order.cache_zeroes(1024, 512);
            write(&[1; 512], 1024).unwrap();
            assert!(order.cached_table(1024).is_none(), "it would count as zeroes in the file");
            write(&[0; 512], 1536).unwrap();
            // Stable zeroes are not written again.
            assert_eq!(end.events() - before, if is_flushed { 1 } else { 2 });
            assert!(order.needs_flush());
            thread.block_on(store.sync()).unwrap().unwrap();
            assert!(!order.take_ahead(&(1024..1536)) && !order.take_ahead(&(1536..2048)));
            assert!(order.take_ahead(&(2048..2560)));
        }
        detach();
    }

    /// Pointers to new clusters wait for a flush after each of these writes.
    #[test]
    fn a_pointer_waits_for_data_zeroes_and_counts_before_it() {
        type Write = fn(&IoThread, &Store) -> io::Result<()>;
        let writes: [(&str, Write); 3] = [
            ("data", |thread, store| thread.block_on(store.write_now(&[1; 512], 4096)).unwrap()),
            ("zeroes", |thread, store| thread.block_on(store.zero_at(4096, 512, true)).unwrap()),
            ("counts", |thread, store| {
                let counts = [1u16; 256].map(u16::to_be_bytes).concat();
                thread.block_on(store.write_counts(&counts, 512)).unwrap()
            }),
        ];
        for (name, write) in writes {
            let (thread, end, store, _) = scene();
            let order = &store.order;
            let mut front = [0; FRONT_BYTES];
            (front[7], front[23], front[99]) = (3, 9, 4);
            // The table of blocks, with a block at 512, and an empty L1.
            front[40..48].copy_from_slice(&2048u64.to_be_bytes());
            front[48..56].copy_from_slice(&1024u64.to_be_bytes());
            front[59] = 1;
            order.begin(&front, &[], &512u64.to_be_bytes()).unwrap();
            assert!(!order.needs_flush());
            write(&thread, &store).unwrap();
            assert!(order.needs_flush() && end.events() == 1, "{name}");
            thread.block_on(store.sync()).unwrap().unwrap();
            assert!(!order.needs_flush(), "{name}");
            detach();
        }
    }

    /// Old places of the tables may get other data once the header is stable.
    #[test]
    fn a_header_that_moves_tables_is_written_between_two_flushes() {
        let (thread, end, store, _) = scene();
        // The header names no tables, which is an error after its write.
        let _ = thread.block_on(store.write_header(&[1; 512], 0)).unwrap();
        let journal = end.journal();
        let is_right = matches!(&journal[..], [Event::Flush, Event::Write(0, _), Event::Flush]);
        assert!(is_right, "{} events", journal.len());
        detach();
        // The first flush fails, and in the next try the second one.
        let (thread, end, store, _) = scene();
        let fail = || thread.block_on(store.write_header(&[1; 512], 0)).unwrap().unwrap_err();
        end.have_some_fail(4);
        assert!(fail().raw_os_error() == Some(libc::EIO) && end.journal().is_empty());
        thread.block_on(store.sync()).unwrap().unwrap();
        assert_eq!(fail().raw_os_error(), Some(libc::EIO));
        let journal = end.journal();
        let is_right = matches!(&journal[1..], [Event::Flush, Event::Write(0, _)]);
        assert!(is_right, "{} events", journal.len());
        detach();
    }

    /// The use of the clusters is unknown.
    #[test]
    fn an_image_stays_marked_after_an_error_of_data_or_zeroes() {
        type Write = fn(&IoThread, &Store) -> io::Result<()>;
        let writes: [Write; 2] = [
            |thread, store| thread.block_on(store.write_data(&[1; 512], 1024)).unwrap(),
            |thread, store| thread.block_on(store.zero_at(1024, 512, true)).unwrap(),
        ];
        for (index, write) in writes.into_iter().enumerate() {
            let (thread, end, store, _) = scene();
            write(&thread, &store).unwrap();
            assert!(!store.order.mark.must_stay_set(), "{index}");
            end.have_some_fail(1);
            write(&thread, &store).unwrap_err();
            assert!(store.order.mark.must_stay_set(), "{index}");
            detach();
        }
    }

    /// Their counts and their zeroes may be lost, and no later flush says so.
    #[test]
    fn clusters_of_a_failed_flush_are_not_ready_after_the_next_flush() {
        let (thread, end, store, risen) = scene();
        let order = &store.order;
        for fails in [false, true] {
            order.add_ahead(&risen, &risen.file, vec![1024, 1536]);
            end.have_some_fail(u64::from(fails));
            assert_eq!(thread.block_on(store.sync()).unwrap().is_err(), fails);
            end.have_some_fail(0);
            thread.block_on(store.sync()).unwrap().unwrap();
            assert_eq!((order.has_ahead(), order.ahead()), (!fails, if fails { 0 } else { 2 }));
            assert_eq!(order.take_ahead(&(1024..2048)), !fails);
        }
        detach();
    }

    /// Another program writes to the file, and its last block is not whole yet.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn whole_blocks_of_a_larger_file_are_adopted() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let options = blockio::DiskOptions { holds_image: true, ..Default::default() };
        let source = DiskSource::file(file.path(), &options).unwrap();
        for (bytes, whole) in [(8192 + 100, 8192), (8192 + 512, 8192 + 512), (4096, 8192 + 512)] {
            file.as_file().set_len(bytes).unwrap();
            adopt_file_size(&source).unwrap();
            assert_eq!(source.info().size_bytes, whole, "{bytes}");
        }
    }

    #[test]
    fn a_file_that_would_be_too_long_is_no_lack_of_space() {
        let error = |errno| Error::Length {
            path: "image".into(),
            size_bytes: 1 << 62,
            error: io::Error::from_raw_os_error(errno),
        };
        for (errno, expected) in
            [(libc::EFBIG, libc::EFBIG), (libc::EDQUOT, libc::ENOSPC), (libc::EIO, libc::ENOSPC)]
        {
            assert_eq!(errno_of_growth(&error(errno)), expected);
        }
        assert_eq!(errno_of_growth(&Error::Options(String::new())), libc::ENOSPC);
    }
}
