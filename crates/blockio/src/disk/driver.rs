//! The interface of disks of other kinds: disks that are no local file, such as the export of a
//! server, and formats and layers, which are disks over other disks. The crate's `driver.rs`
//! explains how to add one.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::{fmt, io};

use iomem::Buffers;

use super::file::FileDisk;
use super::file::size_probe::SizeProbe;
use super::file::source::FileSource;
use super::info::{Abilities, DiskInfo, DiskState, Extent, Link, Placement, TransferError};
use crate::config::EngineKind;
use crate::error::Error;
use crate::op::OpKind;
use crate::op::bounce::BounceShare;
use crate::thread::io::Io;

/// A request to a disk of another kind.
pub type Request<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// The properties of a disk of another kind at open, and its source.
pub type Opened = (DiskInfo, Arc<dyn DriverSource>);

/// An open disk of another kind, for all threads. Its methods are called by threads that may wait,
/// except for methods that only report known facts.
pub trait DriverSource: fmt::Debug + Send + Sync {
    /// Attaches the disk for tasks on `io`. Does not wait: a task makes connections, and requests
    /// wait for that. A layer passes `engine` on to the disk below.
    fn attach(&self, io: &Rc<Io>, engine: Option<EngineKind>) -> Box<dyn Driver>;

    /// Opens the disk again for a probe, if this one reads the disk below only at its first
    /// request: the content below may change between the probe and that request.
    fn reopen_for_probe(&self) -> Result<Option<Opened>, Error> {
        Ok(None)
    }

    /// See [`DiskSource::chain`](super::DiskSource::chain).
    fn chain(&self) -> Vec<Link>;

    /// See [`DiskSource::identity`](super::DiskSource::identity). It decides which exports share
    /// reservations, so a disk that is reached in two ways has one identity.
    fn identity(&self) -> &str;

    /// See [`DiskSource::place`](super::DiskSource::place); for a layer that of the disk below.
    /// `None`: all of a disk.
    fn place(&self) -> Option<Placement> {
        None
    }

    /// See [`DiskSource::abilities`](super::DiskSource::abilities).
    fn abilities(&self) -> Abilities;

    /// See [`DiskSource::discard_bytes`](super::DiskSource::discard_bytes).
    fn discard_bytes(&self) -> Option<u32>;

    /// See [`DiskSource::optimal_bytes`](super::DiskSource::optimal_bytes).
    fn optimal_bytes(&self) -> Option<u32> {
        None
    }

    /// The file or block device at the bottom, if there is one in this process.
    fn local(&self) -> Option<&FileSource>;

    /// See [`DiskSource::is_exclusive`](super::DiskSource::is_exclusive).
    fn is_exclusive(&self) -> bool {
        self.local().is_some_and(|file| file.is_exclusive)
    }

    /// The state of the disk.
    fn state(&self) -> DiskState;

    /// See [`DiskSource::remark`](super::DiskSource::remark).
    fn remark(&self) -> Option<String>;

    /// See [`DiskSource::warning`](super::DiskSource::warning). A layer passes it on.
    fn warning(&self) -> Option<String> {
        None
    }

    /// See [`DiskHandOver::inherit`](super::hand_over::DiskHandOver::inherit).
    fn inherit(&self, loss: Option<i32>, is_flushed: bool);

    /// See [`DiskHandOver::is_flushed`](super::hand_over::DiskHandOver::is_flushed).
    fn is_flushed(&self) -> bool {
        false
    }

    /// See [`DiskHandOver::may_still_change`](super::hand_over::DiskHandOver::may_still_change).
    fn may_still_change(&self) -> bool {
        false
    }

    /// See [`DiskSource::abandon`](super::DiskSource::abandon).
    fn abandon(&self);

    /// See [`DiskHandOver::is_written_back`](super::hand_over::DiskHandOver::is_written_back). A
    /// layer passes it on.
    fn is_written_back(&self) -> bool {
        true
    }

    /// See [`DiskHandOver::write_back`](super::hand_over::DiskHandOver::write_back).
    fn write_back(&self) -> Result<(), Error> {
        Ok(())
    }

    /// See [`DiskHandOver::release_lock`](super::hand_over::DiskHandOver::release_lock).
    fn release_lock(&self) {}

    /// A probe that notices another size.
    fn size_probe(&self) -> Option<Arc<SizeProbe>>;

    /// Finds the present size: one that a disk can have. It is the known size from then on.
    fn probe_size(&self) -> Result<u64, Error>;

    /// See [`DiskSource::probe_space`](super::DiskSource::probe_space). A layer passes it on.
    fn probe_space(&self) -> Result<(), Error> {
        Ok(())
    }

    /// The last known size, without waiting for a remote end: IoThreads call this.
    fn known_size(&self) -> Result<u64, Error>;

    /// Checks that the disk can be given this size.
    fn check_new_size(&self, size_bytes: u64) -> Result<(), Error>;

    /// Gives the disk this size, which was checked. No request lies beyond it.
    fn set_size(&self, size_bytes: u64) -> Result<(), Error>;

    /// Returns true if [`set_size`](Self::set_size) ends at once, so that an IoThread may call it:
    /// it waits for no server and for no cluster.
    fn sets_size_at_once(&self) -> bool {
        self.local().is_some()
    }

    /// See [`DiskSource::adopt_size`](super::DiskSource::adopt_size).
    fn adopt_size(&self, size_bytes: u64);
}

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

/// A disk of another kind on one IoThread, with its share of the memory there.
pub(super) struct AttachedDriver {
    pub(super) disk: Box<dyn Driver>,
    source: Arc<dyn DriverSource>,
    share: Rc<BounceShare>,
    io: Rc<Io>,
}

impl AttachedDriver {
    pub(super) fn new(
        source: &Arc<dyn DriverSource>,
        io: &Rc<Io>,
        engine: Option<EngineKind>,
    ) -> Self {
        let share = io.shared.bounce_budget.share(source);
        let source = Arc::clone(source);
        Self { disk: source.attach(io, engine), source, share, io: Rc::clone(io) }
    }

    /// Reads, and marks the memory in its log, since a library, a server or a thread that writes
    /// there does not. A failed read may have been made in part.
    pub(super) fn read(
        &self,
        offset: u64,
        buffers: Buffers,
    ) -> Request<'_, Result<(), TransferError>> {
        let Some(logged) = buffers.duplicate_if_logged() else {
            return self.disk.read(offset, buffers);
        };
        Box::pin(async move {
            let result = self.disk.read(offset, buffers).await;
            logged.wrote(logged.bytes());
            result
        })
    }

    /// Like [`Disk::route`](super::Disk::route).
    pub(super) fn route(&self, kind: OpKind, offset: u64, buffers: &mut Buffers) -> Route<'_> {
        match self.disk.route_to_file(kind, offset, buffers) {
            Some(FilePosition { file, offset }) => Route::File(file, offset),
            None => Route::SlowPath,
        }
    }

    /// Returns true if data may be lost, so that later flushes fail.
    pub(super) fn may_have_lost(&self) -> bool {
        self.source.state() == DiskState::Lost
    }

    /// Like [`Disk::read_part`](super::Disk::read_part), in units of `block` bytes.
    pub(super) async fn read_part(&self, offset: u64, len: u64, block: u32) -> io::Result<Buffers> {
        let most = self.share.piece_bytes(block as usize);
        let bytes = usize::try_from(len).unwrap_or(usize::MAX).min(most);
        let permit = self.share.take(bytes).await;
        let memory = Buffers::uninitialized(bytes, PAGE, permit)
            .inspect_err(|_| self.io.stats().bounce.failed.add(1))?;
        let part = memory.duplicate();
        self.disk.read(offset, memory).await?;
        Ok(part)
    }
}

/// Memory aligned to a page suits every disk.
const PAGE: usize = 4096;
