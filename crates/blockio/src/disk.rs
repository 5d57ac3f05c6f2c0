//! Disks: the objects that requests address.
//!
//! A [`DiskSource`] is opened once; each IoThread attaches a [`Disk`] of its own. Above `Disk`, I/O
//! is all or error: this module finishes short reads and writes, reads zeroes at the end of a file,
//! and bounces memory that the device cannot take as it is.

pub(crate) mod driver;
#[doc(hidden)]
pub mod engine_trial;
pub(crate) mod file;
mod folder;
mod foreign;
#[doc(hidden)]
pub mod hand_over;
mod info;
mod late_lock;
mod properties;
pub(crate) mod qos;
mod raw;
mod requests;
#[cfg(ringhaul_sim)]
mod simulated;
mod slow_path;
pub(crate) mod source;

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use iomem::Buffers;

use crate::config::EngineKind;
use crate::op::OpKind;
use crate::op::bounce::BounceShare;
use crate::thread::io::Io;
use driver::{Driver, FilePosition, Route};
use file::FileDisk;
#[doc(hidden)]
pub use file::lock::{find_holders, set_holder_finder};
#[doc(hidden)]
pub use file::opening::open_for_other;
#[doc(hidden)]
pub use file::size_probe::{SizeChanges, SizeProbe};
#[doc(hidden)]
pub use folder::Folder;
pub use info::{
    Abilities, DiskInfo, DiskOptions, DiskState, Extent, ExtentKind, Link, TransferError,
};
#[doc(hidden)]
pub use info::{Placement, WaitTimes};
#[doc(hidden)]
pub use late_lock::{LATE_LOCK_PATIENCE, LateLock, smaller};
pub use qos::LimitGroup;
use qos::SharedState;
use qos::bulk_turns::BulkTurns;
pub use qos::error_policy::{ErrorAction, ErrorPolicy};
pub use qos::limits::{Burst, Direction, Limits, Rate, Rates};
use qos::throttle::Gate;
#[doc(hidden)]
pub use qos::throttle::{Requester, WaitMode};
pub use source::DiskSource;
use source::{DriverSource, SourceKind};

/// A disk on one IoThread.
pub struct Disk {
    /// The facts at the time of opening.
    info: DiskInfo,
    /// The facts that have changed since.
    shared: Arc<SharedState>,
    /// The bits of an offset within a logical block.
    block_mask: u64,
    kind: Kind,
    /// The place where requests wait for limits, and after errors.
    gate: Gate,
    /// The queue for pieces of commands that move much data.
    bulk: Rc<BulkTurns>,
}

/// A disk for a requester that is consulted while a request waits for limits, or for another try.
#[doc(hidden)]
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

impl DiskSource {
    /// Attaches the disk for tasks on `io`.
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

/// A disk of another kind on one IoThread, with its share of the memory there.
struct AttachedDriver {
    disk: Box<dyn Driver>,
    source: Arc<dyn DriverSource>,
    share: Rc<BounceShare>,
    io: Rc<Io>,
}

impl AttachedDriver {
    fn new(source: &Arc<dyn DriverSource>, io: &Rc<Io>, engine: Option<EngineKind>) -> Self {
        let share = io.shared.bounce_budget.share(source);
        let source = Arc::clone(source);
        Self { disk: source.attach(io, engine), source, share, io: Rc::clone(io) }
    }

    /// Reads, and marks the memory in its log, since a library, a server or a thread that writes
    /// there does not. A failed read may have been made in part, and the log may begin or change
    /// while the read is made.
    async fn read(&self, offset: u64, buffers: Buffers) -> Result<(), TransferError> {
        let written = buffers.to_report();
        let result = self.disk.read(offset, buffers).await;
        if let Some(written) = written {
            written.wrote();
        }
        result
    }

    /// Like [`Disk::route`](super::Disk::route).
    fn route(&self, kind: OpKind, offset: u64, buffers: &mut Buffers) -> Route<'_> {
        match self.disk.route_to_file(kind, offset, buffers) {
            Some(FilePosition { file, offset }) => Route::File(file, offset),
            None => Route::SlowPath,
        }
    }

    /// Returns true if data may be lost, so that later flushes fail.
    fn may_have_lost(&self) -> bool {
        self.source.state() == DiskState::Lost
    }

    /// Like [`Disk::read_part`](super::Disk::read_part), in units of `block` bytes.
    async fn read_part(&self, offset: u64, len: u64, block: u32) -> io::Result<Buffers> {
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

impl Disk {
    /// The present facts about the disk.
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

    /// Acts as if the file system of the disk had refused a durable write.
    #[cfg(test)]
    fn forget_dsync(&self) {
        if let Kind::File(disk) = &self.kind {
            disk.forget_dsync();
        }
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

    /// Like [`Driver::route_to_file`], for a layer over this disk.
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

/// Memory aligned to a page suits every disk.
const PAGE: usize = 4096;

#[cfg(test)]
mod flush_tests;
#[cfg(test)]
mod size_tests;
#[cfg(test)]
mod tests;
