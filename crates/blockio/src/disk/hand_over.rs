//! The hand-over of a disk to another process, while its users stay.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use super::file::source::FileSource;
use super::info::{DiskOptions, DiskState};
use super::{DiskSource, SourceKind};
use crate::error::Error;

/// A disk that goes to another process, or comes from one. Only programs that replace themselves
/// while their disks are in use need this view.
#[derive(Clone, Copy)]
pub struct DiskHandOver<'a>(&'a DiskSource);

impl DiskSource {
    /// The view of the disk for a hand-over between processes.
    pub fn hand_over(&self) -> DiskHandOver<'_> {
        DiskHandOver(self)
    }
}

/// The process that has the disk.
impl<'a> DiskHandOver<'a> {
    /// The open file under the disk, which [`open`](Self::open) takes in the other process. `None`
    /// if it has none: that process opens the disk by itself.
    pub fn descriptor(self) -> Option<BorrowedFd<'a>> {
        self.0.open_file().map(AsFd::as_fd)
    }

    /// The files that another program has opened for the disk, with their paths.
    pub fn files(self) -> &'a [(PathBuf, File)] {
        self.0.files.as_ref().map_or(&[], |files| files.files())
    }

    /// The errno of the loss of data, if [there was one](DiskState::Lost).
    pub fn loss(self) -> Option<i32> {
        match self.0.open_file() {
            Some(file) => file.loss().check().err()?.raw_os_error(),
            // A remote end reports no errno.
            None => (self.0.state() == DiskState::Lost).then_some(libc::EIO),
        }
    }

    /// Returns true if all answered changes are known to be on stable storage, while no request
    /// runs. False for a file, which need not know: pending reports of the kernel come with it.
    pub fn is_flushed(self) -> bool {
        self.0.driver().is_some_and(|source| source.is_flushed())
    }

    /// Returns true if abandoned changes may still be made, by a server that was abandoned.
    /// Another process would not know that its own changes have to wait for them.
    pub fn may_still_change(self) -> bool {
        self.0.driver().is_some_and(|source| source.may_still_change())
    }

    /// Like [`LimitGroup::debts`](super::LimitGroup::debts), for the limits of the disk itself.
    pub fn debts(self) -> Vec<u64> {
        self.0.shared.debts()
    }

    /// Returns true if [`write_back`](Self::write_back) has anything to do. An open file is passed
    /// to another process as it is.
    pub fn is_written_back(self) -> bool {
        self.0.driver().is_some_and(|source| source.is_written_back())
    }

    /// Writes data of answered requests from caches of this process, and leaves images as if
    /// closed, for another process that has opened the disk and takes over. No request may be in
    /// progress. May wait for the remote end of a disk that is not local.
    ///
    /// # Errors
    ///
    /// If the data cannot be written.
    pub fn write_back(self) -> Result<(), Error> {
        self.0.driver().map_or(Ok(()), |source| source.write_back())
    }

    /// Releases the lock on a disk that is not local, for another process that has opened it and
    /// takes over. No request may be in progress. May wait for the remote end. Later requests
    /// acquire the lock again.
    pub fn release_lock(self) {
        if let Some(source) = self.0.driver() {
            source.release_lock();
        }
    }
}

/// The processes between which a disk goes back and forth. Each has opened it for good: see
/// [`LateLock`](super::LateLock).
impl DiskHandOver<'_> {
    /// Begins a use: layers read their content, which another process may have changed. Called
    /// before the first request, when the file of the disk is locked.
    ///
    /// # Errors
    ///
    /// If the disk cannot be used.
    pub fn begin_use(self) -> Result<(), Error> {
        self.0.driver().map_or(Ok(()), |source| source.begin_use())
    }

    /// Ends a use: layers write their tables and answered data, and touch nothing until the next
    /// use. Called when the last request has ended, before the file is unlocked.
    ///
    /// # Errors
    ///
    /// If data may be lost.
    pub fn end_use(self) -> Result<(), Error> {
        self.0.driver().map_or(Ok(()), |source| source.end_use())
    }
}

/// The process that takes the disk over.
impl DiskHandOver<'_> {
    /// Takes over an open file that another process has handed over, with its lock and with
    /// write-back errors that the kernel has yet to report. `path` is the path by which it was
    /// opened. The disk has the file's present size; [`adopt_size`](DiskSource::adopt_size) sets
    /// the size that it had in that process.
    ///
    /// # Errors
    ///
    /// Like [`DiskSource::file`], and if it was not opened as the options require.
    pub fn open(file: File, path: &Path, options: &DiskOptions) -> Result<DiskSource, Error> {
        let (file, info) = FileSource::handed_over(file, path, options)?;
        Ok(DiskSource::new(info, SourceKind::File(file)))
    }

    /// Notes the state of the disk in the other process. Its writes may not be flushed, unless it
    /// [knew](Self::is_flushed) that they are. Data may be lost if it knew of a `loss`, an errno.
    pub fn inherit(self, loss: Option<i32>, is_flushed: bool) {
        match (self.0.open_file(), self.0.driver()) {
            // Pending reports of the kernel come with the file.
            (Some(file), _) => loss.into_iter().for_each(|errno| file.loss().inherit(errno)),
            (None, Some(source)) => source.inherit(loss, is_flushed),
            (None, None) => {}
        }
    }

    /// Like [`LimitGroup::set_debts`](super::LimitGroup::set_debts), for the limits of the disk
    /// itself.
    pub fn set_debts(self, debts: &[u64]) {
        self.0.shared.set_debts(debts);
    }
}
