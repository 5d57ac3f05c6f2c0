//! Disks: what a request addresses.
//!
//! A [`DiskSource`] is opened once; each IoThread attaches a [`Disk`] of its own. Above `Disk`, I/O
//! is all or error: short reads and writes are finished here, the end of a file reads as zeroes,
//! and memory that the device cannot take as it is gets bounced.

mod alignment;
mod blocks;
mod file;
mod holder;
mod identity;
mod info;
mod lock;
mod outside;
mod retries;
mod shared;
#[cfg(ringhaul_sim)]
mod simulated;
mod source;
mod sysfs;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use crate::config::EngineKind;
use crate::error::Error;
use crate::io::Io;
use file::FileDisk;
use info::check_logical_block;
pub use info::{DiskInfo, DiskOptions, DiskState, Unfinished};
use iomem::{Buffers, Repeated};
pub use outside::Outside;
use shared::Shared;
use source::FileSource;

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
    /// kernel has yet to report of its write-back. `path` is what led to it. The disk has the size
    /// in bytes that it had there, whatever has become of the file: nobody has been told.
    ///
    /// # Errors
    ///
    /// When it was not opened as the options say, or as [`file`](Self::file).
    pub fn handed_over(
        file: File,
        path: &Path,
        options: &DiskOptions,
        size_bytes: u64,
    ) -> Result<Self, Error> {
        let (file, info) = FileSource::handed_over(file, path, options)?;
        let this = Self::new(info, SourceKind::File(file));
        this.shared.set_size_bytes(size_bytes);
        Ok(this)
    }

    fn new(info: DiskInfo, kind: SourceKind) -> Self {
        Self { info, shared: Arc::new(Shared::new(info.size_bytes)), kind, engine: None }
    }

    /// A disk that answers at once, keeps nothing, and leaves the buffers of reads as they are:
    /// for measuring everything else.
    ///
    /// # Errors
    ///
    /// When the size is zero or not a multiple of the logical block.
    pub fn null(size_bytes: u64, options: &DiskOptions) -> Result<Self, Error> {
        let logical_block_bytes = check_logical_block(options.logical_block_bytes.unwrap_or(512))?;
        check_size(size_bytes, logical_block_bytes)?;
        let info = DiskInfo {
            size_bytes,
            logical_block_bytes,
            physical_block_bytes: logical_block_bytes,
            read_only: options.read_only,
            direct: options.direct,
        };
        Ok(Self::new(info, SourceKind::Null))
    }

    /// What the disk is like now.
    #[must_use]
    pub fn info(&self) -> DiskInfo {
        self.shared.info(&self.info)
    }

    /// Takes over the size that the file or device has now, on all IoThreads. Requests that are in
    /// progress finish as they began. Returns the size in bytes; that of a null disk never changes
    /// by itself.
    ///
    /// # Errors
    ///
    /// When it cannot be determined, or is none that a disk can have, as when it is opened. The
    /// disk is as it was then.
    pub fn refresh(&self) -> Result<u64, Error> {
        if let SourceKind::File(source) = &self.kind {
            self.shared.set_size_bytes(source.size_bytes(&self.info)?);
        }
        Ok(self.shared.size_bytes())
    }

    /// The larger of the size that the disk has and that of its file or device, which may have
    /// changed.
    ///
    /// # Errors
    ///
    /// When it cannot be determined.
    pub fn covered_bytes(&self) -> Result<u64, Error> {
        let size_bytes = self.shared.size_bytes();
        match &self.kind {
            SourceKind::File(source) => Ok(source.any_size_bytes()?.max(size_bytes)),
            SourceKind::Null => Ok(size_bytes),
        }
    }

    /// Gives the disk another size, and its file with it, on all IoThreads. What is cut off is
    /// lost. No request begins beyond the new end from when `settle` is called, which must wait for
    /// those that have begun: one of them could make the file longer again.
    ///
    /// # Errors
    ///
    /// When it is a block device, is read-only, or can have no such size; when the file system
    /// refuses. The disk is as it was then.
    pub fn set_size(&self, size_bytes: u64, settle: impl FnOnce()) -> Result<(), Error> {
        let before = self.shared.size_bytes();
        match &self.kind {
            SourceKind::Null => check_size(size_bytes, self.info.logical_block_bytes)?,
            SourceKind::File(source) => {
                source.check_new_size(size_bytes, &self.info)?;
                if size_bytes < before {
                    self.shared.set_size_bytes(size_bytes);
                    settle();
                }
                if let Err(error) = source.truncate(size_bytes) {
                    self.shared.set_size_bytes(before);
                    return Err(error);
                }
            }
        }
        self.shared.set_size_bytes(size_bytes);
        Ok(())
    }

    /// What sees from outside how large its file or device is. `None`: it has none.
    #[must_use]
    pub fn outside(&self) -> Option<Arc<Outside>> {
        match &self.kind {
            SourceKind::File(source) => source.outside.clone(),
            SourceKind::Null => None,
        }
    }

    /// How the disk is doing, as its IoThreads have found it lately.
    #[must_use]
    pub fn state(&self) -> DiskState {
        match &self.kind {
            SourceKind::File(source) if source.file.loss().check().is_err() => DiskState::Lost,
            _ => self.late_since().map_or(DiskState::Ready, DiskState::Late),
        }
    }

    /// The errno of the loss of data, if [there was one](DiskState::Lost).
    #[must_use]
    pub fn loss(&self) -> Option<i32> {
        let lost = self.open_file()?.loss().check().err()?;
        lost.raw_os_error()
    }

    /// Data may be lost, as the process has learnt that has handed the disk over.
    pub fn inherit_loss(&self, errno: i32) {
        if let Some(file) = self.open_file() {
            file.loss().inherit(errno);
        }
    }

    /// The open file, to be [handed over](Self::handed_over) to another process. `None`: a null
    /// disk has none.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.open_file().map(AsFd::as_fd)
    }

    /// A text that is the same whenever this disk is opened, and another one for another disk: the
    /// id of the file system and the number of the file in it, or what a block device says of
    /// itself. It may name files. Empty for a null disk. Where the file system has no id of its
    /// own (XFS before Linux 6.9, NFS, FAT), it has the number of its device, which may change.
    #[must_use]
    pub fn identity(&self) -> &str {
        match &self.kind {
            SourceKind::File(source) => &source.identity,
            SourceKind::Null => "",
        }
    }

    /// Whether the kernel says that its medium rotates, so that requests cost the less the nearer
    /// they are.
    #[must_use]
    pub fn is_rotational(&self) -> bool {
        match &self.kind {
            SourceKind::File(source) => source.is_rotational,
            SourceKind::Null => false,
        }
    }

    /// The unit in which space is given back by a discard, in bytes: what is smaller, or is not
    /// aligned to it, stays. A multiple of the logical block. `None` if the kernel says that the
    /// device never gives any back.
    #[must_use]
    pub fn discard_bytes(&self) -> Option<u32> {
        match &self.kind {
            SourceKind::File(source) => source.discard_bytes,
            SourceKind::Null => Some(self.info.logical_block_bytes),
        }
    }

    /// Whether it is a null disk, which never needs an engine.
    #[must_use]
    pub fn is_null(&self) -> bool {
        matches!(self.kind, SourceKind::Null)
    }

    pub(crate) fn open_file(&self) -> Option<&crate::op::OpenFile> {
        match &self.kind {
            SourceKind::File(source) => Some(&source.file),
            SourceKind::Null => None,
        }
    }

    /// Whether it is a device, and no file on a file system.
    pub(crate) fn is_block_device(&self) -> bool {
        matches!(&self.kind, SourceKind::File(source) if source.is_block_device)
    }

    /// Since when an operation is in the kernel that it has not answered for 5 seconds or more, as
    /// the IoThreads of this disk have found it lately.
    #[must_use]
    pub fn late_since(&self) -> Option<Instant> {
        match &self.kind {
            SourceKind::File(source) => source.file.late_since(),
            SourceKind::Null => None,
        }
    }

    /// Has the disk use this engine on IoThreads that [have](Io::add_engine) it. On others it has
    /// that of [`IoThreadConfig::engine`](crate::IoThreadConfig::engine). The reason is kept for
    /// those who ask.
    #[must_use]
    pub fn prefer_engine(self, engine: EngineKind, reason: &str) -> Self {
        Self { engine: Some((engine, reason.into())), ..self }
    }

    /// The engine that it prefers, and why.
    #[must_use]
    pub fn preference(&self) -> Option<(EngineKind, &str)> {
        self.engine.as_ref().map(|(engine, reason)| (*engine, &**reason))
    }

    /// The engine that it [is to use](Self::prefer_engine).
    #[must_use]
    pub fn preferred_engine(&self) -> Option<EngineKind> {
        self.preference().map(|(engine, _)| engine)
    }

    /// The engine that the disk has on `io`. A null disk has none.
    #[must_use]
    pub fn engine_on(&self, io: &Io) -> Option<EngineKind> {
        (!self.is_null()).then(|| io.engine_for(self.preferred_engine()))
    }

    /// The disk for tasks on `io`.
    #[must_use]
    pub fn attach(&self, io: &Rc<Io>) -> Disk {
        let kind = match &self.kind {
            SourceKind::File(source) => {
                Kind::File(source.attach(Rc::clone(io), io.engine_for(self.preferred_engine())))
            }
            SourceKind::Null => Kind::Null,
        };
        let block_mask = u64::from(self.info.logical_block_bytes) - 1;
        Disk { info: self.info, shared: Arc::clone(&self.shared), block_mask, kind }
    }
}

/// Checks the size of a null disk.
fn check_size(size_bytes: u64, logical_block_bytes: u32) -> Result<(), Error> {
    if size_bytes == 0 || !size_bytes.is_multiple_of(u64::from(logical_block_bytes)) {
        return Err(Error::Options(format!(
            "a disk of {size_bytes} bytes is not possible: the size must be a multiple of its \
             logical block of {logical_block_bytes} bytes, and not zero"
        )));
    }
    Ok(())
}

/// Bytes that a null disk gives at once, where it chooses: whole logical blocks.
const NULL_PART_BYTES: usize = 64 << 10;

/// A disk on one IoThread.
pub struct Disk {
    /// As it was opened.
    info: DiskInfo,
    /// What has changed since.
    shared: Arc<Shared>,
    /// The bits of an offset within a logical block.
    block_mask: u64,
    kind: Kind,
}

enum Kind {
    File(FileDisk),
    Null,
}

impl Disk {
    /// What the disk is like now.
    #[must_use]
    pub fn info(&self) -> DiskInfo {
        self.shared.info(&self.info)
    }

    /// Fills all of `buffers` from byte `offset` on.
    ///
    /// # Errors
    ///
    /// What the kernel says, or `EINVAL` for a range that is misaligned or beyond the disk, with
    /// the part of `buffers` that was not filled. Its content is undefined then.
    pub async fn read(&self, offset: u64, buffers: Buffers) -> Result<(), Unfinished> {
        if let Err(error) = self.check(offset, buffers.bytes() as u64) {
            return Err(Unfinished { error, rest: buffers });
        }
        match &self.kind {
            Kind::File(disk) => disk.read(offset, buffers).await,
            Kind::Null => {
                buffers.wrote(buffers.bytes());
                Ok(())
            }
        }
    }

    /// Reads from byte `offset` on into memory of the disk's own: whole logical blocks, at least
    /// one of them, at most `len` bytes. The memory is of the
    /// [budget for misaligned requests](crate::config::BounceConfig) until the list is dropped, and
    /// this waits for its turn there: so do not wait for the disk while you have such a list.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read), and `ENOMEM`.
    pub async fn read_part(&self, offset: u64, len: u64) -> io::Result<Buffers> {
        self.check(offset, len)?;
        match &self.kind {
            _ if len == 0 => Ok(Buffers::empty()),
            Kind::File(disk) => disk.read_part(offset, len, self.info.logical_block_bytes).await,
            Kind::Null => {
                let block = self.info.logical_block_bytes as usize;
                let bytes = usize::try_from(len).unwrap_or(usize::MAX).min(NULL_PART_BYTES);
                Repeated::zeroes(block, block)?.buffers(bytes.max(block), ())
            }
        }
    }

    /// Writes all of `buffers` from byte `offset` on. With `fua`, the data is on stable storage
    /// when this returns.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read), `EROFS` on a read-only disk, `ENOSPC` when a write cannot go on,
    /// with the part of `buffers` that was not written, or not wholly. With `fua` also the error of
    /// an earlier [`flush`](Self::flush), and of one after the write: then nothing is left of
    /// `buffers`, and any of it may be lost.
    pub async fn write(&self, offset: u64, buffers: Buffers, fua: bool) -> Result<(), Unfinished> {
        if let Err(error) = self.check_write(offset, buffers.bytes() as u64) {
            return Err(Unfinished { error, rest: buffers });
        }
        match &self.kind {
            Kind::File(disk) => disk.write(offset, buffers, fua).await,
            Kind::Null => Ok(()),
        }
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
        }
    }

    /// Says that `len` bytes are not needed any more. A hint: a disk that cannot use it does
    /// nothing. What the range reads as afterwards is undefined.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check_write(offset, len)?;
        match &self.kind {
            Kind::File(disk) if len > 0 => disk.discard(offset, len).await,
            _ => Ok(()),
        }
    }

    /// Makes `len` bytes read as zeroes. With `may_unmap` the space may be given back.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub async fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> io::Result<()> {
        self.check_write(offset, len)?;
        match &self.kind {
            Kind::File(disk) if len > 0 => disk.write_zeroes(offset, len, may_unmap).await,
            _ => Ok(()),
        }
    }

    #[cfg(test)]
    pub(crate) fn is_known_to_block(&self) -> bool {
        matches!(&self.kind, Kind::File(disk) if disk.is_known_to_block())
    }

    #[inline(always)]
    fn check(&self, offset: u64, len: u64) -> io::Result<()> {
        let in_range = offset.checked_add(len).is_some_and(|end| end <= self.shared.size_bytes());
        if in_range && (offset | len) & self.block_mask == 0 {
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

#[cfg(test)]
mod flush_tests;
#[cfg(test)]
mod size_tests;
#[cfg(test)]
mod tests;
