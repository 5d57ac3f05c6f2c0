//! The interface of disks of other kinds: disks that are no local file, such as the export of a
//! server, and formats and layers, which are disks over other disks. The crate's `driver.rs`
//! explains how to add one.

use std::future::Future;
use std::io;
use std::pin::Pin;

use iomem::Buffers;

use super::file::FileDisk;
use super::info::{Extent, TransferError};
use crate::op::OpKind;

/// A request to a disk of another kind.
pub type Request<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// A file, and the byte of it at which a transfer begins.
pub struct FilePosition<'a> {
    pub(super) file: &'a FileDisk,
    pub(super) offset: u64,
}

/// The route of a transfer that needs no check of limits.
pub(super) enum Route<'a> {
    /// To this file, from this byte on.
    File(&'a FileDisk, u64),
    /// To no file: the transfer is done.
    Done,
    /// Through the methods of [`Driver`].
    SlowPath,
}

/// A disk of another kind on one IoThread. See [`Disk`](super::Disk) for the promises of its
/// methods.
pub trait Driver {
    /// The target of the transfer of `buffers`, if all of it goes to one file and nothing is left
    /// to do here. State that must last as long as the memory is in use is [kept](Buffers::keep)
    /// with it. The caller begins the transfer at once: another request may move the data.
    fn route_to_file(&self, _: OpKind, _offset: u64, _: &mut Buffers) -> Option<FilePosition<'_>> {
        None
    }

    /// Reads all of `buffers`.
    fn read(&self, offset: u64, buffers: Buffers) -> Request<'_, Result<(), TransferError>>;

    /// Writes all of `buffers`, with `fua` onto stable storage.
    fn write(
        &self,
        offset: u64,
        buffers: Buffers,
        fua: bool,
    ) -> Request<'_, Result<(), TransferError>>;

    /// Makes all answered writes stable.
    fn flush(&self) -> Request<'_, io::Result<()>>;

    /// Discards a range of at least one block.
    fn discard(&self, offset: u64, len: u64) -> Request<'_, io::Result<()>>;

    /// Zeroes a range of at least one block.
    fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> Request<'_, io::Result<()>>;

    /// The kind of the first bytes in a range of at least one block.
    fn block_status(&self, offset: u64, len: u64) -> Request<'_, io::Result<Extent>>;
}
