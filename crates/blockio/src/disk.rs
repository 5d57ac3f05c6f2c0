//! Disks: the objects that requests address.
//!
//! A [`DiskSource`] is opened once; each IoThread attaches a [`Disk`] of its own. Above `Disk`, I/O
//! is all or error: this module finishes short reads and writes, reads zeroes at the end of a file,
//! and bounces memory that the device cannot take as it is.

mod content;
pub(crate) mod driver;
pub mod engine_trial;
pub(crate) mod file;
mod folder;
pub(crate) mod foreign;
pub mod hand_over;
mod info;
mod null;
mod properties;
mod qos;
mod raw;
mod requests;
#[cfg(ringhaul_sim)]
mod simulated;
mod slow_path;

use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use iomem::Buffers;

use crate::config::EngineKind;
use crate::error::Error;
use crate::op::OpKind;
use crate::thread::io::Io;
use driver::{AttachedDriver, DriverSource, FilePosition, Route};
use file::FileDisk;
pub use file::size_probe::SizeProbe;
use file::source::FileSource;
pub use folder::Folder;
pub use foreign::format_warning;
pub use info::{
    Abilities, DiskInfo, DiskOptions, DiskState, Extent, ExtentKind, Link, Placement,
    TransferError, WaitTimes, check_logical_block,
};
use qos::bulk_turns::BulkTurns;
pub use qos::error_policy::{ErrorAction, ErrorPolicy};
pub use qos::limits::{Burst, Direction, Limits, Rate, Rates};
pub use qos::shared::LimitGroup;
use qos::shared::Shared;
use qos::throttle::Gate;
pub use qos::throttle::{Requester, WaitMode};

/// An open disk, for any number of IoThreads. Clones are of the same disk.
#[derive(Debug, Clone)]
pub struct DiskSource {
    /// The facts at the time of opening.
    info: DiskInfo,
    /// The facts that have changed since.
    shared: Arc<Shared>,
    kind: SourceKind,
    /// The preferred engine, and the reason for it.
    engine: Option<(EngineKind, Arc<str>)>,
}

#[derive(Debug, Clone)]
enum SourceKind {
    File(FileSource),
    Null,
    /// All other kinds: see the module `driver`.
    Driver(Arc<dyn DriverSource>),
}

impl DiskSource {
    /// Opens a regular file or a block device. Locks it like QEMU's programs: a disk open for
    /// writing is open only once; one open for reading is not written to. Block devices are also
    /// claimed, so that they cannot be mounted. Retries for two seconds while the disk is in use.
    ///
    /// # Errors
    ///
    /// If it cannot be opened, is in use, is neither a file nor a block device, has no size, or has
    /// a size or an alignment that does not fit the options.
    pub fn file(path: &Path, options: &DiskOptions) -> Result<Self, Error> {
        let (file, info) = FileSource::open(path, options)?;
        Ok(Self::new(info, SourceKind::File(file)))
    }

    /// Makes the disk of a driver, with its properties at open: the end of a function that opens a
    /// disk of another kind.
    #[must_use]
    pub fn from_driver(info: DiskInfo, source: Arc<dyn DriverSource>) -> Self {
        Self::new(info, SourceKind::Driver(source))
    }

    fn new(info: DiskInfo, kind: SourceKind) -> Self {
        Self { info, shared: Arc::new(Shared::new(info.size_bytes)), kind, engine: None }
    }

    /// Returns the disk for reading its content before it has requests. The disk itself learns
    /// nothing from these reads: see `DriverSource::reopen_for_probe`.
    ///
    /// # Errors
    ///
    /// If the disk cannot be opened again.
    pub fn for_probe(&self) -> Result<Self, Error> {
        Ok(self.reopen_for_probe()?.unwrap_or_else(|| self.clone()))
    }

    /// Opens the disk again if a read for a probe would change it. `None`: the disk itself can be
    /// probed.
    ///
    /// # Errors
    ///
    /// If the disk cannot be opened again.
    pub fn reopen_for_probe(&self) -> Result<Option<Self>, Error> {
        let Some(source) = self.driver() else { return Ok(None) };
        let opened = source.reopen_for_probe()?;
        Ok(opened.map(|(info, source)| Self::from_driver(info, source)))
    }

    /// Returns the same disk, read-only.
    #[must_use]
    pub fn for_reading(self) -> Self {
        Self { info: DiskInfo { read_only: true, ..self.info }, ..self }
    }

    /// Makes a disk that answers at once, stores nothing, and leaves the buffers of reads as they
    /// are: for measuring everything else.
    ///
    /// # Errors
    ///
    /// If the size is zero or not a multiple of the logical block.
    pub fn null(size_bytes: u64, options: &DiskOptions) -> Result<Self, Error> {
        Ok(Self::new(null::info(size_bytes, options)?, SourceKind::Null))
    }

    /// Takes over the present size of the file, device or remote disk, on all IoThreads. Requests
    /// in progress finish as they began. Returns the size in bytes; the size of a null disk never
    /// changes by itself.
    ///
    /// # Errors
    ///
    /// If the size cannot be determined, or is invalid for a disk, as on opening. Then the disk is
    /// unchanged.
    pub fn refresh(&self) -> Result<u64, Error> {
        let probe = self.shared.begin_probe();
        self.shared.finish_probe(probe, self.probe_size()?);
        Ok(self.shared.size_bytes())
    }

    /// Finds the size that [`refresh`](Self::refresh) takes over.
    ///
    /// # Errors
    ///
    /// Like [`refresh`](Self::refresh).
    pub fn probe_size(&self) -> Result<u64, Error> {
        match &self.kind {
            SourceKind::File(source) => source.size_bytes(&self.info),
            SourceKind::Driver(source) => source.probe_size(),
            SourceKind::Null => Ok(self.shared.size_bytes()),
        }
    }

    /// Asks a server or a cluster for the space that it has for an image. The disk in the image
    /// keeps its size; requests that waited for space continue. Blocks until the answer.
    ///
    /// # Errors
    ///
    /// If there is no answer.
    pub fn probe_space(&self) -> Result<(), Error> {
        self.driver().map_or(Ok(()), |source| source.probe_space())
    }

    /// The larger of two sizes in bytes: the disk's, and that of its file or device, which may have
    /// changed, or the last one that its server has reported.
    ///
    /// # Errors
    ///
    /// If it cannot be determined.
    pub fn covered_bytes(&self) -> Result<u64, Error> {
        let size_bytes = self.shared.size_bytes();
        match &self.kind {
            SourceKind::File(source) => Ok(source.any_size_bytes()?.max(size_bytes)),
            SourceKind::Driver(source) => Ok(source.known_size()?.max(size_bytes)),
            SourceKind::Null => Ok(size_bytes),
        }
    }

    /// Resizes the disk and its file, on all IoThreads. Data beyond the new end is lost. From the
    /// call of `settle` on, no request begins beyond the new end. `settle` must wait for requests
    /// that have begun: one of them could extend the file again.
    ///
    /// # Errors
    ///
    /// If it is a block device, is read-only, or cannot have this size, or if the file system or
    /// server refuses. Then the disk is unchanged.
    pub fn set_size(&self, size_bytes: u64, settle: impl FnOnce()) -> Result<(), Error> {
        self.check_new_size(size_bytes)?;
        let before = self.shared.size_bytes();
        if size_bytes < before {
            self.shared.set_size_bytes(size_bytes);
            settle();
        }
        let resized = match &self.kind {
            SourceKind::Null => Ok(()),
            SourceKind::File(source) => source.truncate(size_bytes),
            SourceKind::Driver(source) => source.set_size(size_bytes),
        };
        self.shared.set_size_bytes(if resized.is_ok() { size_bytes } else { before });
        resized
    }

    /// Uses at most `size_bytes` from now on, in whole blocks, on all IoThreads. Another process is
    /// about to cut the file off there, and waits for requests that have begun.
    pub fn cut_off(&self, size_bytes: u64) {
        let whole = size_bytes - size_bytes % u64::from(self.info.physical_block_bytes);
        if whole < self.shared.size_bytes() {
            self.adopt_size(whole);
        }
    }

    /// Sets the size in bytes that users of the disk know, on all IoThreads, even if the file has
    /// another size. Another process has changed the size, or has handed the disk over.
    pub fn adopt_size(&self, size_bytes: u64) {
        match &self.kind {
            SourceKind::Driver(source) => source.adopt_size(size_bytes),
            SourceKind::File(source) => source.end.invalidate(),
            SourceKind::Null => {}
        }
        self.shared.set_size_bytes(size_bytes);
    }

    /// Checks that users can change the disk to this size.
    ///
    /// # Errors
    ///
    /// If they cannot, with the reason.
    pub fn check_new_size(&self, size_bytes: u64) -> Result<(), Error> {
        match &self.kind {
            SourceKind::Null => null::check_size(size_bytes, self.info.logical_block_bytes),
            SourceKind::File(source) => source.check_new_size(size_bytes, &self.info),
            SourceKind::Driver(source) => source.check_new_size(size_bytes),
        }
    }

    /// Makes the disk use this engine on IoThreads that [have](Io::add_engine) it. On all other
    /// IoThreads it uses [`IoThreadConfig::engine`](crate::IoThreadConfig::engine). The reason is
    /// kept for reports.
    #[must_use]
    pub fn prefer_engine(self, engine: EngineKind, reason: &str) -> Self {
        Self { engine: Some((engine, reason.into())), ..self }
    }

    /// Attaches the disk for tasks on `io`.
    #[must_use]
    pub fn attach(&self, io: &Rc<Io>) -> Disk {
        self.attach_with(io, self.preferred_engine())
    }

    /// Attaches the disk below another one, which chooses the preferred engine.
    pub fn attach_with(&self, io: &Rc<Io>, engine: Option<EngineKind>) -> Disk {
        let kind = match &self.kind {
            SourceKind::File(source) => {
                Kind::File(source.attach(Rc::clone(io), io.engine_for(engine)))
            }
            SourceKind::Null => Kind::Null,
            SourceKind::Driver(source) => Kind::Driver(AttachedDriver::new(source, io, engine)),
        };
        let block_mask = u64::from(self.info.logical_block_bytes) - 1;
        let gate = Gate::new(io, &self.shared);
        let bulk = BulkTurns::for_disk(io, &self.shared);
        Disk { info: self.info, shared: Arc::clone(&self.shared), block_mask, kind, gate, bulk }
    }
}

/// A disk on one IoThread.
pub struct Disk {
    /// The facts at the time of opening.
    info: DiskInfo,
    /// The facts that have changed since.
    shared: Arc<Shared>,
    /// The bits of an offset within a logical block.
    block_mask: u64,
    kind: Kind,
    /// The place where requests wait for limits, and after errors.
    gate: Gate,
    /// The queue for pieces of commands that move much data.
    bulk: Rc<BulkTurns>,
}

/// A disk for a requester that is consulted while a request waits for limits, or for another try.
#[derive(Clone, Copy)]
pub struct Requests<'a> {
    disk: &'a Disk,
    requester: &'a dyn Requester,
}

enum Kind {
    File(FileDisk),
    Null,
    Driver(AttachedDriver),
}

impl Disk {
    /// The present facts about the disk.
    #[must_use]
    pub fn info(&self) -> DiskInfo {
        self.shared.info(&self.info)
    }

    /// Brings all writes that have completed to stable storage.
    ///
    /// # Errors
    ///
    /// The kernel's error. Data may be lost then, so every later flush, and every write with `fua`,
    /// fails with that error until the disk is opened again, on all IoThreads. Errors of ops that
    /// never reached the file (`EINTR`, `EAGAIN`, `EINVAL`, not supported) do not count. A failed
    /// write with `fua` counts only if its error may belong to other data: to a write without `fua`
    /// that no flush has covered, or, except for direct I/O on a block device, to another op that
    /// was in the kernel with it.
    ///
    /// A flush that succeeds also waits for the flushes of this disk that are in the kernel then,
    /// on any IoThread: one of them may receive the report of a loss that this one does not.
    pub async fn flush(&self) -> io::Result<()> {
        match &self.kind {
            Kind::File(disk) => disk.flush().await,
            Kind::Null => Ok(()),
            Kind::Driver(driver) => driver.disk.flush().await,
        }
    }

    /// Finds the state of the `len` bytes from `offset` on, without reading them: the state of the
    /// first bytes, and the number of bytes with the same state, at most `len`. Inspects at most 1
    /// GiB.
    ///
    /// # Errors
    ///
    /// Like [`read`](Self::read), and `EINVAL` if `len` is 0.
    pub async fn block_status(&self, offset: u64, len: u64) -> io::Result<Extent> {
        self.check(offset, len)?;
        if len == 0 {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let len = len.min(EXTENT_BYTES_MAX);
        let extent = match &self.kind {
            Kind::Null => Extent::data(len),
            Kind::File(disk) => disk.block_status(offset, len).await?,
            Kind::Driver(driver) => driver.disk.block_status(offset, len).await?,
        };
        Ok(extent.in_blocks(len, self.info.logical_block_bytes))
    }

    #[cfg(test)]
    pub(crate) fn is_known_to_block(&self) -> bool {
        matches!(&self.kind, Kind::File(disk) if disk.is_known_to_block())
    }

    /// Returns true if a request may go to a file as it is: it lies on the disk, in whole blocks,
    /// and no limits need checking.
    #[inline(always)]
    fn is_direct(&self, offset: u64, end: u64) -> bool {
        offset <= end && end <= self.shared.direct_bytes() && (offset | end) & self.block_mask == 0
    }

    /// The target of a direct transfer of the bytes of `buffers` from `offset` on.
    #[inline(always)]
    fn route(&self, kind: OpKind, offset: u64, buffers: &mut Buffers) -> Route<'_> {
        match &self.kind {
            Kind::File(file) => Route::File(file, offset),
            Kind::Null => Route::Done,
            Kind::Driver(driver) => driver.route(kind, offset, buffers),
        }
    }

    /// Like [`Driver::route_to_file`](driver::Driver::route_to_file), for a layer over this disk.
    pub fn route_to_file(
        &self,
        kind: OpKind,
        offset: u64,
        buffers: &mut Buffers,
    ) -> Option<FilePosition<'_>> {
        let end = offset.wrapping_add(buffers.bytes() as u64);
        match self.is_direct(offset, end).then(|| self.route(kind, offset, buffers)) {
            Some(Route::File(file, offset)) => Some(FilePosition { file, offset }),
            _ => None,
        }
    }

    /// Returns true if written data may be lost, so that every flush fails.
    fn may_have_lost(&self) -> bool {
        match &self.kind {
            Kind::File(file) => file.may_have_lost(),
            Kind::Null => false,
            Kind::Driver(driver) => driver.may_have_lost(),
        }
    }

    fn contains(&self, (offset, len): (u64, u64)) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.shared.size_bytes())
    }

    fn check(&self, offset: u64, len: u64) -> io::Result<()> {
        if self.contains((offset, len)) && (offset | len) & self.block_mask == 0 {
            Ok(())
        } else {
            Err(io::Error::from_raw_os_error(libc::EINVAL))
        }
    }

    #[inline]
    fn check_write(&self, offset: u64, len: u64) -> io::Result<()> {
        if self.info.read_only {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        self.check(offset, len)
    }
}

/// The most bytes that one check for holes covers. An image needs a time for the answer that grows
/// with them.
const EXTENT_BYTES_MAX: u64 = 1 << 30;

#[cfg(test)]
mod flush_tests;
#[cfg(test)]
mod size_tests;
#[cfg(test)]
mod tests;
