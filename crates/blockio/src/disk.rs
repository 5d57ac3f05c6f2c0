//! Disks: what a request addresses.
//!
//! A [`DiskSource`] is opened once; each IoThread attaches a [`Disk`] of its own. Above `Disk`, I/O
//! is all or error: short reads and writes are finished here, the end of a file reads as zeroes,
//! and memory that the device cannot take as it is gets bounced.

mod alignment;
mod blocks;
mod bulk;
mod content;
mod facts;
mod file;
mod folder;
mod foreign;
mod gate;
mod governed;
mod holder;
mod identity;
mod info;
mod limits;
mod lock;
#[cfg(feature = "luks")]
pub mod luks;
#[cfg(feature = "nbd")]
pub mod nbd;
mod null;
mod outside;
#[cfg(feature = "qcow2")]
pub mod qcow2;
mod raw;
#[cfg(feature = "rbd")]
mod rbd;
mod requests;
mod retries;
mod seam;
mod shared;
#[cfg(ringhaul_sim)]
mod simulated;
mod source;
mod sysfs;
mod trouble;
mod waiting;

use std::fs::File;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use iomem::Buffers;

use crate::config::EngineKind;
use crate::error::Error;
use crate::io::Io;
use crate::op::OpKind;
use bulk::Bulk;
use file::FileDisk;
pub use folder::Folder;
pub use foreign::format_warning;
use gate::Gate;
pub use gate::{Requester, Waits};
pub use info::{
    Abilities, DiskInfo, DiskOptions, DiskState, Extent, ExtentKind, Link, Place, Unfinished,
    check_logical_block,
};
pub use limits::{Burst, Direction, Limits, Rate, Rates};
pub use outside::Outside;
#[cfg(feature = "rbd")]
pub use rbd::name::RbdImage;
use seam::{AttachedOther, InFile, OtherSource, Way};
pub use shared::LimitGroup;
use shared::Shared;
use source::FileSource;
pub use trouble::{ErrorAction, ErrorPolicy};

/// A disk that is open, for any number of IoThreads. Clones are of the same disk.
#[derive(Debug, Clone)]
pub struct DiskSource {
    /// As it was opened.
    info: DiskInfo,
    /// What has changed since.
    shared: Arc<Shared>,
    kind: SourceKind,
    /// The engine that it prefers, and why.
    engine: Option<(EngineKind, Arc<str>)>,
}

#[derive(Debug, Clone)]
enum SourceKind {
    File(FileSource),
    Null,
    /// Everything else: see the module `seam`.
    Other(Arc<dyn OtherSource>),
}

impl DiskSource {
    /// Opens a regular file or a block device. It is locked as QEMU's programs lock theirs: a disk
    /// that is written to is nobody else's, one that is read is written to by nobody. Block devices
    /// are also claimed, so that they cannot be mounted. What is in use is tried again for two
    /// seconds.
    ///
    /// # Errors
    ///
    /// When it cannot be opened, is in use, is neither a file nor a block device, has no size, or
    /// has a size or an alignment that does not fit the options.
    pub fn file(path: &Path, options: &DiskOptions) -> Result<Self, Error> {
        let (file, info) = FileSource::open(path, options)?;
        Ok(Self::new(info, SourceKind::File(file)))
    }

    /// A disk whose open file another process has handed over, with the lock and with what the
    /// kernel has yet to report of its write-back. `path` is what led to it. Its size is that of
    /// the file now; [`with_size`](Self::with_size) has it be the size that it had there.
    ///
    /// # Errors
    ///
    /// When it was not opened as the options say, or as [`file`](Self::file).
    pub fn handed_over(file: File, path: &Path, options: &DiskOptions) -> Result<Self, Error> {
        let (file, info) = FileSource::handed_over(file, path, options)?;
        Ok(Self::new(info, SourceKind::File(file)))
    }

    /// The disk with the size in bytes that it had in another process, whatever has become of it:
    /// nobody has been told.
    #[must_use]
    pub fn with_size(self, size_bytes: u64) -> Self {
        self.adopt_size(size_bytes);
        self
    }

    fn adopt_size(&self, size_bytes: u64) {
        match &self.kind {
            SourceKind::Other(source) => source.adopt_size(size_bytes),
            SourceKind::File(source) => source.end.forget(),
            SourceKind::Null => {}
        }
        self.shared.set_size_bytes(size_bytes);
    }

    fn new(info: DiskInfo, kind: SourceKind) -> Self {
        Self { info, shared: Arc::new(Shared::new(info.size_bytes)), kind, engine: None }
    }

    /// The disk for whoever looks at what it has before it has requests. Of what that reads,
    /// nothing is known to the disk itself: see `OtherSource::apart`.
    fn for_a_look(&self) -> Result<Self, Error> {
        Ok(self.apart()?.unwrap_or_else(|| self.clone()))
    }

    fn apart(&self) -> Result<Option<Self>, Error> {
        match &self.kind {
            SourceKind::Other(source) => {
                let opened = source.apart()?;
                Ok(opened.map(|(info, source)| Self::new(info, SourceKind::Other(source))))
            }
            SourceKind::File(_) | SourceKind::Null => Ok(None),
        }
    }

    /// The same disk for those who change nothing.
    #[cfg(feature = "qcow2")]
    fn for_reading(self) -> Self {
        Self { info: DiskInfo { read_only: true, ..self.info }, ..self }
    }

    /// A disk that answers at once, keeps nothing, and leaves the buffers of reads as they are:
    /// for measuring everything else.
    ///
    /// # Errors
    ///
    /// When the size is zero or not a multiple of the logical block.
    pub fn null(size_bytes: u64, options: &DiskOptions) -> Result<Self, Error> {
        Ok(Self::new(null::info(size_bytes, options)?, SourceKind::Null))
    }

    /// Takes over the size that the file, the device or the other end has now, on all IoThreads.
    /// Requests that are in progress finish as they began. Returns the size in bytes; that of a
    /// null disk never changes by itself.
    ///
    /// # Errors
    ///
    /// When it cannot be determined, or is none that a disk can have, as when it is opened. The
    /// disk is as it was then.
    pub fn refresh(&self) -> Result<u64, Error> {
        let look = self.shared.begin_look();
        self.shared.has_found(look, self.find_size()?);
        Ok(self.shared.size_bytes())
    }

    /// The size that [`refresh`](Self::refresh) takes over.
    fn find_size(&self) -> Result<u64, Error> {
        match &self.kind {
            SourceKind::File(source) => source.size_bytes(&self.info),
            SourceKind::Other(source) => source.find_size(),
            SourceKind::Null => Ok(self.shared.size_bytes()),
        }
    }

    /// Has a server or a cluster say how much space it has for an image on it. The disk in the
    /// image keeps its size, and what has waited for space goes on. Waits for the other end.
    ///
    /// # Errors
    ///
    /// When the other end does not say.
    pub fn find_space(&self) -> Result<(), Error> {
        match &self.kind {
            SourceKind::File(_) | SourceKind::Null => Ok(()),
            SourceKind::Other(source) => source.find_space(),
        }
    }

    /// The larger of the size that the disk has and that of its file or device, which may have
    /// changed, or that its other end has told last.
    ///
    /// # Errors
    ///
    /// When it cannot be determined.
    pub fn covered_bytes(&self) -> Result<u64, Error> {
        let size_bytes = self.shared.size_bytes();
        match &self.kind {
            SourceKind::File(source) => Ok(source.any_size_bytes()?.max(size_bytes)),
            SourceKind::Other(source) => Ok(source.known_size()?.max(size_bytes)),
            SourceKind::Null => Ok(size_bytes),
        }
    }

    /// Gives the disk another size, and its file with it, on all IoThreads. What is cut off is
    /// lost. No request begins beyond the new end from when `settle` is called, which must wait for
    /// those that have begun: one of them could make the file longer again.
    ///
    /// # Errors
    ///
    /// When it is a block device, is read-only, or can have no such size; when the file system or
    /// the other end refuses. The disk is as it was then.
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
            SourceKind::Other(source) => source.set_size(size_bytes),
        };
        self.shared.set_size_bytes(if resized.is_ok() { size_bytes } else { before });
        resized
    }

    /// Uses no more than so many bytes from now on, in whole blocks, on all IoThreads: somebody
    /// else is about to cut its file off there, and waits for requests that have begun.
    pub fn cut_off(&self, size_bytes: u64) {
        let whole = size_bytes - size_bytes % u64::from(self.info.physical_block_bytes);
        if whole < self.shared.size_bytes() {
            self.adopt_size(whole);
        }
    }

    fn check_new_size(&self, size_bytes: u64) -> Result<(), Error> {
        match &self.kind {
            SourceKind::Null => null::check_size(size_bytes, self.info.logical_block_bytes),
            SourceKind::File(source) => source.check_new_size(size_bytes, &self.info),
            SourceKind::Other(source) => source.check_new_size(size_bytes),
        }
    }

    /// Has the disk use this engine on IoThreads that [have](Io::add_engine) it. On others it has
    /// that of [`IoThreadConfig::engine`](crate::IoThreadConfig::engine). The reason is kept for
    /// those who ask.
    #[must_use]
    pub fn prefer_engine(self, engine: EngineKind, reason: &str) -> Self {
        Self { engine: Some((engine, reason.into())), ..self }
    }

    /// The disk for tasks on `io`.
    #[must_use]
    pub fn attach(&self, io: &Rc<Io>) -> Disk {
        self.attach_with(io, self.preferred_engine())
    }

    /// The same, where a disk that lies over this one knows which engine is preferred.
    fn attach_with(&self, io: &Rc<Io>, engine: Option<EngineKind>) -> Disk {
        let kind = match &self.kind {
            SourceKind::File(source) => {
                Kind::File(source.attach(Rc::clone(io), io.engine_for(engine)))
            }
            SourceKind::Null => Kind::Null,
            SourceKind::Other(source) => Kind::Other(AttachedOther::new(source, io, engine)),
        };
        let block_mask = u64::from(self.info.logical_block_bytes) - 1;
        let gate = Gate::new(io, &self.shared);
        let bulk = Bulk::of(io, &self.shared);
        Disk { info: self.info, shared: Arc::clone(&self.shared), block_mask, kind, gate, bulk }
    }
}

/// A disk on one IoThread.
pub struct Disk {
    /// As it was opened.
    info: DiskInfo,
    /// What has changed since.
    shared: Arc<Shared>,
    /// The bits of an offset within a logical block.
    block_mask: u64,
    kind: Kind,
    /// Where requests wait for limits, and after errors.
    gate: Gate,
    /// Where the pieces of commands that move much data wait for their turn.
    bulk: Rc<Bulk>,
}

/// A disk for somebody who is asked about a request while it waits for limits, or for another try.
#[derive(Clone, Copy)]
pub struct Requests<'a> {
    disk: &'a Disk,
    requester: &'a dyn Requester,
}

enum Kind {
    File(FileDisk),
    Null,
    Other(AttachedOther),
}

impl Disk {
    /// What the disk is like now.
    #[must_use]
    pub fn info(&self) -> DiskInfo {
        self.shared.info(&self.info)
    }

    /// Brings all writes that have completed to stable storage.
    ///
    /// # Errors
    ///
    /// What the kernel says. Data may be lost then, so every later flush, and every write with
    /// `fua`, fails with that error until the disk is opened anew, on all IoThreads. Errors of ops
    /// that never got as far as the file (`EINTR`, `EAGAIN`, `EINVAL`, no support for it) do not
    /// count. A write with `fua` that fails counts only if its error may be that of something else:
    /// of a write without `fua` that no flush has covered, or, but for direct I/O on a block
    /// device, of another op that was in the kernel with it.
    ///
    /// It also waits for the flushes of this disk that are in the kernel when it has succeeded, on
    /// any IoThread: one of them may receive the report of a loss that this one does not.
    pub async fn flush(&self) -> io::Result<()> {
        match &self.kind {
            Kind::File(disk) => disk.flush().await,
            Kind::Null => Ok(()),
            Kind::Other(other) => other.disk.flush().await,
        }
    }

    /// What is known of the `len` bytes, at least one block, from `offset` on, without reading
    /// them: how the first of them are, and how many are like them, at most `len`. No more than
    /// 1 GiB is looked at.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read), and `EINVAL` for no bytes.
    pub async fn block_status(&self, offset: u64, len: u64) -> io::Result<Extent> {
        self.check(offset, len)?;
        if len == 0 {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let len = len.min(LOOK_BYTES);
        let extent = match &self.kind {
            Kind::Null => Extent::data(len),
            Kind::File(disk) => disk.block_status(offset, len).await?,
            Kind::Other(other) => other.disk.block_status(offset, len).await?,
        };
        Ok(extent.in_blocks(len, self.info.logical_block_bytes))
    }

    #[cfg(test)]
    pub(crate) fn is_known_to_block(&self) -> bool {
        matches!(&self.kind, Kind::File(disk) if disk.is_known_to_block())
    }

    /// Whether a request may go to a file as it is: it lies on the disk, in whole blocks, and no
    /// limits are to be looked at.
    #[inline(always)]
    fn is_direct(&self, offset: u64, end: u64) -> bool {
        offset <= end && end <= self.shared.direct_bytes() && (offset | end) & self.block_mask == 0
    }

    /// Where a transfer that is direct goes: the bytes of `buffers` from `offset` on.
    #[inline(always)]
    fn way(&self, kind: OpKind, offset: u64, buffers: &mut Buffers) -> Way<'_> {
        match &self.kind {
            Kind::File(file) => Way::File(file, offset),
            Kind::Null => Way::Nowhere,
            Kind::Other(other) => other.way(kind, offset, buffers),
        }
    }

    /// As [`OtherDisk::straight`](seam::OtherDisk::straight), for a layer over this disk.
    fn straight(&self, kind: OpKind, offset: u64, buffers: &mut Buffers) -> Option<InFile<'_>> {
        let end = offset.wrapping_add(buffers.bytes() as u64);
        match self.is_direct(offset, end).then(|| self.way(kind, offset, buffers)) {
            Some(Way::File(file, offset)) => Some((file, offset)),
            _ => None,
        }
    }

    /// Whether data that was written may be lost, so that no flush succeeds any more.
    fn may_have_lost(&self) -> bool {
        match &self.kind {
            Kind::File(file) => file.may_have_lost(),
            Kind::Null => false,
            Kind::Other(other) => other.may_have_lost(),
        }
    }

    fn has(&self, (offset, len): (u64, u64)) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.shared.size_bytes())
    }

    fn check(&self, offset: u64, len: u64) -> io::Result<()> {
        if self.has((offset, len)) && (offset | len) & self.block_mask == 0 {
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

/// The most that one look for holes covers. The answer of an image takes a time that grows with it.
const LOOK_BYTES: u64 = 1 << 30;

#[cfg(test)]
pub(crate) mod elsewhere;
#[cfg(test)]
mod flush_tests;
#[cfg(test)]
mod kinds_tests;
#[cfg(test)]
mod size_tests;
#[cfg(test)]
mod stable_tests;
#[cfg(test)]
mod tests;
