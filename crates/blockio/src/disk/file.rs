//! Disk `file`: a regular file or a block device.

pub(super) mod alignment;
mod attributes;
pub(super) mod lock;
pub(crate) mod opening;
pub(super) mod partial_blocks;
mod retries;
pub(crate) mod size_probe;
pub(crate) mod source;
mod zeroes;

use std::cell::Cell;
use std::io;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

use super::info::{Extent, ExtentKind, TransferError};
use crate::config::EngineKind;
use crate::op::bounce::BounceShare;
use crate::op::{Completion, FileRef, OpKind};
use crate::thread::io::Io;
use alignment::{Alignment, Window};
use iomem::Buffers;
use partial_blocks::{Blocks, Claimed};
use retries::OpRetries;
use size_probe::FileEnd;
use source::FileSource;

impl FileSource {
    pub(super) fn attach(&self, io: Rc<Io>, engine: EngineKind) -> FileDisk {
        let share = io.shared.bounce_budget.share(&self.file);
        let unit = self.align.memory.max(self.align.request) as usize;
        let op_bytes_max = (io.settings.op_bytes_max & !(unit - 1)).max(unit);
        FileDisk {
            file: io.attach_file(&self.file, engine),
            io: Attached(io),
            share,
            is_block_device: self.is_block_device,
            align: self.align,
            end: Arc::clone(&self.end),
            blocks: self.blocks.clone(),
            memory_align: self.align.memory as usize,
            request_align: self.align.request as usize,
            op_bytes_max,
            has_dsync: Cell::new(true),
            has_discard: Cell::new(true),
            has_punch_zeroes: Cell::new(true),
            has_zero_range: Cell::new(true),
            knows_holes: Cell::new(!self.is_block_device),
        }
    }
}

/// A file on one IoThread. Remembers operations that the file system turns out not to support.
pub(super) struct FileDisk {
    share: Rc<BounceShare>,
    /// Dropped before `io`, whose drop checks if this was the last user of the file.
    file: FileRef,
    io: Attached,
    is_block_device: bool,
    align: Alignment,
    /// The end of the file as last seen.
    end: Arc<FileEnd>,
    /// Present if requests may be smaller than the unit of direct I/O.
    blocks: Option<Arc<Blocks>>,
    memory_align: usize,
    request_align: usize,
    /// The most bytes of an op: a multiple of both alignments.
    op_bytes_max: usize,
    has_dsync: Cell<bool>,
    has_discard: Cell<bool>,
    has_punch_zeroes: Cell<bool>,
    has_zero_range: Cell<bool>,
    knows_holes: Cell<bool>,
}

/// An IoThread on which files are attached.
struct Attached(Rc<Io>);

impl Deref for Attached {
    type Target = Io;

    fn deref(&self) -> &Io {
        &self.0
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.0.detach_files();
    }
}

impl FileDisk {
    #[cfg(test)]
    pub(super) fn forget_dsync(&self) {
        self.has_dsync.set(false);
    }

    #[cfg(test)]
    pub(super) fn is_known_to_block(&self) -> bool {
        self.file.blocks_submits()
    }

    /// Returns true if written data may be lost, so that flushes fail.
    pub(super) fn may_have_lost(&self) -> bool {
        self.file.loss().check().is_err()
    }

    pub(super) async fn read(&self, offset: u64, buffers: Buffers) -> Result<(), TransferError> {
        let wanted = buffers.bytes();
        if !self.is_one_op(wanted) || !self.is_aligned(offset, &buffers) {
            return Box::pin(self.move_by_way(OpKind::Read, offset, buffers, None)).await;
        }
        let completion = self.io.op(OpKind::Read, &self.file, offset, buffers).await;
        if completion.is_whole(wanted) {
            completion.buffers.wrote(wanted);
            return Ok(());
        }
        Box::pin(self.finish(OpKind::Read, offset, wanted, completion)).await
    }

    /// Returns true if one op moves this many bytes; false for 0.
    #[inline]
    fn is_one_op(&self, bytes: usize) -> bool {
        bytes.wrapping_sub(1) < self.op_bytes_max
    }

    /// Returns true if the kernel takes the memory and the place of a request as they are.
    #[inline]
    fn is_aligned(&self, offset: u64, buffers: &Buffers) -> bool {
        offset & (self.request_align as u64 - 1) == 0
            && buffers.is_aligned(self.memory_align, self.request_align)
    }

    /// Claims the blocks of a range, if blocks may be written in part.
    async fn claim(&self, offset: u64, len: u64) -> Option<Rc<Claimed>> {
        match &self.blocks {
            Some(blocks) => Some(Rc::new(blocks.claim(offset, len).await)),
            None => None,
        }
    }

    pub(super) async fn write(
        &self,
        offset: u64,
        buffers: Buffers,
        fua: bool,
    ) -> Result<(), TransferError> {
        if fua && let Err(error) = self.file.loss().check() {
            return Err(TransferError::new(error, buffers));
        }
        let kind = OpKind::Write { fua: fua && self.has_dsync.get() };
        let wanted = buffers.bytes();
        if self.end.is_exceeded_by(offset, wanted as u64) {
            return Err(TransferError::new(behind_the_end(), buffers));
        }
        if self.is_one_op(wanted) && self.blocks.is_none() && self.is_aligned(offset, &buffers) {
            let completion = self.io.op(kind, &self.file, offset, buffers).await;
            if !completion.is_whole(wanted) {
                Box::pin(self.finish(kind, offset, wanted, completion)).await?;
            }
        } else {
            Box::pin(self.write_by_way(kind, offset, buffers)).await?;
        }
        let settled = match fua {
            false => return Ok(()),
            true if self.has_dsync.get() => self.file.loss().check(),
            true => Box::pin(self.flush()).await,
        };
        settled.map_err(|error| TransferError::new(error, Buffers::empty()))
    }

    /// Writes a request that is misaligned, claims its blocks, or takes several ops.
    async fn write_by_way(
        &self,
        kind: OpKind,
        offset: u64,
        buffers: Buffers,
    ) -> Result<(), TransferError> {
        let claimed = self.claim(offset, buffers.bytes() as u64).await;
        self.move_by_way(kind, offset, buffers, claimed).await
    }

    /// Moves a request that is misaligned, or takes several ops.
    async fn move_by_way(
        &self,
        kind: OpKind,
        offset: u64,
        buffers: Buffers,
        claimed: Option<Rc<Claimed>>,
    ) -> Result<(), TransferError> {
        if self.is_aligned(offset, &buffers) {
            self.transfer(kind, offset, buffers).await
        } else {
            self.bounce(kind, offset, buffers, claimed).await
        }
    }

    pub(super) async fn flush(&self) -> io::Result<()> {
        let loss = self.file.loss();
        loss.check()?;
        self.simple(OpKind::Flush, 0).await?;
        // A flush at the same time may have received the report of a loss.
        if let Some(others) = loss.flushes_to_await() {
            Box::pin(loss.wait_for(others)).await;
        }
        loss.check()
    }

    pub(super) fn count_failure(&self, memory: io::Result<Buffers>) -> io::Result<Buffers> {
        memory.inspect_err(|_| self.io.stats().bounce.failed.add(1))
    }

    /// Finds holes of a file. A file system without holes has data only.
    pub(super) async fn block_status(&self, offset: u64, len: u64) -> io::Result<Extent> {
        if !self.knows_holes.get() {
            return Ok(Extent::data(len));
        }
        match self.simple(OpKind::FindExtent { len }, offset).await {
            Ok(result) => {
                let (bytes, is_hole) = OpKind::extent_of(result);
                let kind = if is_hole { ExtentKind::Hole } else { ExtentKind::Data };
                Ok(Extent { bytes, kind })
            }
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) || is_unsupported(&error) => {
                self.knows_holes.set(false);
                Ok(Extent::data(len))
            }
            Err(error) => Err(error),
        }
    }

    async fn simple(&self, kind: OpKind, offset: u64) -> io::Result<usize> {
        let mut retries = OpRetries::default();
        loop {
            match self.io.op(kind, &self.file, offset, Buffers::empty()).await.result {
                Err(error)
                    if OpRetries::are_for(&error) && Box::pin(retries.wait(&self.io)).await => {}
                other => return other,
            }
        }
    }

    /// Moves all bytes of `buffers`, whose memory is aligned: the one home of requests larger than
    /// an op. One op ends before the next begins, so ready tasks of the loop run between them.
    async fn transfer(
        &self,
        kind: OpKind,
        mut offset: u64,
        mut buffers: Buffers,
    ) -> Result<(), TransferError> {
        let unit = self.memory_align.max(self.request_align);
        while buffers.bytes() > self.op_bytes_max {
            let piece = buffers.prefix(self.op_bytes_max, unit);
            let bytes = piece.bytes();
            if let Err(unfinished) = self.transfer_piece(kind, offset, piece).await {
                return Err(unfinished.within(buffers, bytes));
            }
            buffers.advance(bytes);
            offset += bytes as u64;
            self.io.yield_once().await;
        }
        self.transfer_piece(kind, offset, buffers).await
    }

    /// Moves all bytes of `buffers`, at most as many as an op may have.
    async fn transfer_piece(
        &self,
        mut kind: OpKind,
        offset: u64,
        buffers: Buffers,
    ) -> Result<(), TransferError> {
        if kind == (OpKind::Write { fua: true }) && !self.has_dsync.get() {
            // An earlier piece found that out; the caller flushes after the write.
            kind = OpKind::Write { fua: false };
        }
        let wanted = buffers.bytes();
        if wanted == 0 {
            return Ok(());
        }
        let completion = self.io.op(kind, &self.file, offset, buffers).await;
        self.finish(kind, offset, wanted, completion).await
    }

    /// Continues after an op that should have moved `wanted` bytes: the one home of short
    /// transfers.
    async fn finish(
        &self,
        mut kind: OpKind,
        mut offset: u64,
        mut wanted: usize,
        mut completion: Completion,
    ) -> Result<(), TransferError> {
        let mut retries = OpRetries::default();
        loop {
            let mut buffers = completion.buffers;
            if kind == OpKind::Read {
                // An op that failed or moved less may have written any part of its memory.
                buffers.wrote(wanted);
            }
            match completion.result {
                Ok(moved) => {
                    retries = OpRetries::default();
                    let moved = moved.min(wanted);
                    // Direct I/O can continue only at a multiple of its alignment.
                    let part = moved & !(self.request_align - 1);
                    let usable = if moved == wanted { moved } else { part };
                    if usable == 0 {
                        let result = self.nothing_moved(kind, offset, moved, &buffers);
                        return result.map_err(|error| TransferError::new(error, buffers));
                    }
                    buffers.advance(usable);
                    offset += usable as u64;
                }
                Err(error) => {
                    let waits = OpRetries::are_for(&error);
                    if waits && Box::pin(retries.wait(&self.io)).await {
                        // Try again.
                    } else if kind == (OpKind::Write { fua: true }) && is_unsupported(&error) {
                        // The caller sees `has_dsync` and flushes after the write.
                        self.has_dsync.set(false);
                        kind = OpKind::Write { fua: false };
                    } else {
                        return Err(TransferError::new(error, buffers));
                    }
                }
            }
            wanted = buffers.bytes();
            if wanted == 0 {
                return Ok(());
            }
            completion = self.io.op(kind, &self.file, offset, buffers).await;
        }
    }

    /// The result of an op at `offset` that moved only `moved` bytes, after which direct I/O cannot
    /// continue.
    fn nothing_moved(
        &self,
        kind: OpKind,
        offset: u64,
        moved: usize,
        buffers: &Buffers,
    ) -> io::Result<()> {
        match kind {
            _ if self.is_block_device => Err(behind_the_end()),
            OpKind::Read => {
                // The file ends here. Zeroes complete its last block. Beyond that they would be
                // wrong: the file was cut while in use.
                let last_block_end = self.end.round_up(offset + moved as u64);
                if offset + buffers.bytes() as u64 > last_block_end {
                    return Err(behind_the_end());
                }
                buffers.zero_from(moved);
                Ok(())
            }
            _ => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        }
    }

    /// Allocates memory that the kernel takes, within the budget. Dropping it releases `claimed`.
    async fn own_memory(&self, bytes: usize, claimed: Option<Rc<Claimed>>) -> io::Result<Buffers> {
        let permit = self.share.take(bytes).await;
        let align = self.memory_align.max(512);
        self.count_failure(Buffers::uninitialized(bytes, align, (permit, claimed)))
    }

    /// Like [`Disk::read_part`](super::Disk::read_part), in units of `block` bytes.
    pub(super) async fn read_part(&self, offset: u64, len: u64, block: u32) -> io::Result<Buffers> {
        let unit = self.request_align.max(block as usize);
        let most = self.share.piece_bytes(unit);
        let left = usize::try_from(len).unwrap_or(usize::MAX);
        let window = Window::new(offset, left, most, unit);
        let memory = self.own_memory(window.bytes, None).await?;
        let mut part = memory.duplicate();
        self.transfer(OpKind::Read, window.start, memory).await?;
        part.advance(window.lead);
        part.truncate(window.piece);
        Ok(part)
    }

    /// Moves `buffers` through aligned memory, piece by piece and in whole blocks. A write reads
    /// the rest of its blocks first. `claimed` is released when no piece of a write is in the
    /// kernel, even if the task is dropped earlier.
    async fn bounce(
        &self,
        kind: OpKind,
        mut offset: u64,
        mut buffers: Buffers,
        claimed: Option<Rc<Claimed>>,
    ) -> Result<(), TransferError> {
        if buffers.bytes() > 0 {
            self.io.stats().bounced.add(1);
        }
        while buffers.bytes() > 0 {
            let most = self.share.piece_bytes(self.request_align);
            let window = Window::new(offset, buffers.bytes(), most, self.request_align);
            let bounce = match self.own_memory(window.bytes, claimed.clone()).await {
                Ok(bounce) => bounce,
                Err(error) => return Err(TransferError::new(error, buffers)),
            };
            // The transfer uses up its list, but not the memory: keep a second list of it.
            let mut view = bounce.duplicate();
            view.advance(window.lead);
            let mut result = Ok(());
            if kind != OpKind::Read {
                if window.is_part() {
                    result = self.transfer(OpKind::Read, window.start, bounce.duplicate()).await;
                }
                view.copy_from_buffers(&buffers, window.piece);
            }
            if result.is_ok() {
                result = self.transfer(kind, window.start, bounce).await;
                if kind != OpKind::Read
                    && let Err(unfinished) = &result
                {
                    let written = window.bytes - unfinished.rest().bytes();
                    buffers.advance(written.saturating_sub(window.lead).min(window.piece));
                }
            }
            if let Err(unfinished) = result {
                let (error, _) = unfinished.into_parts();
                return Err(TransferError::new(error, buffers));
            }
            if kind == OpKind::Read {
                buffers.copy_from_buffers(&view, window.piece);
            }
            buffers.advance(window.piece);
            offset += window.piece as u64;
        }
        Ok(())
    }
}

/// The error of devices for bytes behind their end. A device that has shrunk or died moves nothing,
/// and zeroes would be wrong.
fn behind_the_end() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY | libc::ENODEV)
    )
}
