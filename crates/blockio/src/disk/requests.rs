//! The requests of a disk.

use std::future::Future;
use std::io;
use std::rc::Rc;

use iomem::{Buffers, RepeatedBlock};

use super::driver::Route;
use super::info::TransferError;
use super::qos::limits::Direction;
use super::qos::throttle::{NoRequester, Requester, STEP_BYTES};
use super::{Disk, Kind, PAGE, Requests};
use crate::op::OpKind;

/// The most bytes of a part that count for limits: the most that a part has by default.
const PART_BYTES: u64 = 256 << 10;

/// The most bytes that are zeroed in one turn.
const ZEROES_BYTES: u64 = 4 << 20;

impl Disk {
    /// The disk for requests about which `requester` is consulted.
    #[doc(hidden)]
    #[inline]
    pub fn with_requester<'a>(&'a self, requester: &'a dyn Requester) -> Requests<'a> {
        Requests { disk: self, requester }
    }

    /// The disk for requests without a requester.
    #[doc(hidden)]
    #[inline]
    pub fn without_requester(&self) -> Requests<'_> {
        self.with_requester(&NoRequester)
    }

    /// Fills all of `buffers` from byte `offset`.
    ///
    /// # Errors
    ///
    /// The error of the kernel, or `EINVAL` for a range that is misaligned or beyond the disk, with
    /// the part of `buffers` that was not filled. The content of that part is undefined.
    #[inline]
    pub fn read(
        &self,
        offset: u64,
        buffers: Buffers,
    ) -> impl Future<Output = Result<(), TransferError>> {
        self.without_requester().read(offset, buffers)
    }

    /// Writes all of `buffers` from byte `offset`. With `fua`, the data is on stable storage when
    /// this returns.
    ///
    /// # Errors
    ///
    /// As for [`read`](Self::read), `EROFS` on a read-only disk, `ENOSPC` when a write cannot
    /// continue, with the part of `buffers` that was not written, or not wholly.
    ///
    /// With `fua` also the error of an earlier [`flush`](Disk::flush), and of a flush after the
    /// write: then nothing is left of `buffers`, and any of it may be lost.
    #[inline]
    pub fn write(
        &self,
        offset: u64,
        buffers: Buffers,
        fua: bool,
    ) -> impl Future<Output = Result<(), TransferError>> {
        self.without_requester().write(offset, buffers, fua)
    }

    /// Reads from byte `offset` into memory of the disk's own: whole logical blocks, at least one
    /// of them, at most `len` bytes.
    ///
    /// The memory is of the [budget for misaligned requests](crate::config::BounceConfig) until the
    /// list is dropped. This waits for its turn in that budget, and among the commands of the disk
    /// that move much data. So do not wait for the disk while you have such a list.
    ///
    /// # Errors
    ///
    /// As for [`read`](Self::read), and `ENOMEM`.
    pub async fn read_part(&self, offset: u64, len: u64) -> io::Result<Buffers> {
        self.without_requester().read_part(offset, len).await
    }

    /// Reads `len` bytes from byte `offset` into new memory. Both are multiples of the logical
    /// block.
    ///
    /// # Errors
    ///
    /// As for [`read`](Self::read).
    pub async fn read_vec(&self, offset: u64, len: usize) -> Result<Vec<u8>, TransferError> {
        let memory = Buffers::aligned(len, PAGE);
        let view = memory.duplicate();
        self.read(offset, memory).await?;
        Ok(view.to_vec())
    }

    /// Discards `len` bytes that are no longer needed. A hint: a disk that cannot use it does
    /// nothing. The content of the range is undefined afterwards.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    pub async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.without_requester().discard(offset, len).await
    }

    /// Makes `len` bytes read as zeroes. With `may_unmap` the space may be given back. A long range
    /// goes piece by piece, among the commands of the disk that move much data: if the disk has no
    /// operation for it, zeroes are written.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    pub async fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> io::Result<()> {
        self.without_requester().write_zeroes(offset, len, may_unmap).await
    }
}

impl<'a> Requests<'a> {
    /// The disk itself.
    pub fn disk(self) -> &'a Disk {
        self.disk
    }

    /// See [`Disk::read`].
    ///
    /// # Errors
    ///
    /// As for [`Disk::read`].
    #[expect(clippy::manual_async_fn, reason = "an `async fn` moves its parameters once more")]
    pub fn read(
        self,
        offset: u64,
        buffers: Buffers,
    ) -> impl Future<Output = Result<(), TransferError>> + use<'a> {
        async move {
            let mut buffers = buffers;
            let end = offset.wrapping_add(buffers.bytes() as u64);
            let is_short = buffers.bytes() <= STEP_BYTES;
            let route = match is_short && self.disk.is_direct(offset, end) {
                true => self.disk.route(OpKind::Read, offset, &mut buffers),
                false => Route::SlowPath,
            };
            match route {
                Route::SlowPath => self.read_slow(offset, buffers).await,
                Route::Done => {
                    buffers.wrote(buffers.bytes());
                    Ok(())
                }
                Route::File(file, offset) => match file.read(offset, buffers).await {
                    Err(unfinished) => self.read_again(end, unfinished).await,
                    done => done,
                },
            }
        }
    }

    /// See [`Disk::read_part`].
    ///
    /// # Errors
    ///
    /// As for [`Disk::read_part`], and the error with which the requester
    /// [ends](super::Requester::check_piece) the command.
    pub async fn read_part(self, offset: u64, len: u64) -> io::Result<Buffers> {
        self.disk.check(offset, len)?;
        if len == 0 {
            return Ok(Buffers::empty());
        }
        let block = self.disk.info.logical_block_bytes;
        let bytes = len.min(PART_BYTES);
        self.pass(Direction::Read, (offset, len), bytes).await?;
        self.in_turn(Direction::Read, (offset, len), bytes, |turn| async move {
            let mut part = match &self.disk.kind {
                Kind::File(disk) => disk.read_part(offset, len, block).await,
                Kind::Null => null_part(len, block),
                Kind::Driver(driver) => driver.read_part(offset, len, block).await,
            }?;
            part.keep(Rc::new(turn));
            Ok(part)
        })
        .await
    }

    /// See [`Disk::write`].
    ///
    /// # Errors
    ///
    /// As for [`Disk::write`].
    pub async fn write(
        self,
        offset: u64,
        mut buffers: Buffers,
        fua: bool,
    ) -> Result<(), TransferError> {
        let end = offset.wrapping_add(buffers.bytes() as u64);
        let is_short = buffers.bytes() <= STEP_BYTES;
        let route = match is_short && !self.disk.info.read_only && self.disk.is_direct(offset, end)
        {
            true => self.disk.route(OpKind::Write { fua }, offset, &mut buffers),
            false => Route::SlowPath,
        };
        match route {
            Route::SlowPath => self.write_slow(offset, buffers, fua).await,
            Route::Done => Ok(()),
            Route::File(file, offset) => match file.write(offset, buffers, fua).await {
                Err(unfinished) => self.write_again(end, fua, unfinished).await,
                done => done,
            },
        }
    }

    /// See [`Disk::discard`].
    ///
    /// # Errors
    ///
    /// As for [`Disk::discard`].
    pub async fn discard(self, offset: u64, len: u64) -> io::Result<()> {
        self.disk.check_write(offset, len)?;
        // A discard moves no bytes, but its range could make later requests wait forever.
        self.govern(Direction::Write, (offset, len), 0, || async move {
            match &self.disk.kind {
                Kind::File(disk) if len > 0 => disk.discard(offset, len).await,
                Kind::Driver(driver) if len > 0 => driver.disk.discard(offset, len).await,
                _ => Ok(()),
            }
        })
        .await
    }

    /// See [`Disk::write_zeroes`].
    ///
    /// # Errors
    ///
    /// As for [`Disk::write_zeroes`], and the error with which the requester
    /// [ends](super::Requester::check_piece) the command.
    pub async fn write_zeroes(self, offset: u64, len: u64, may_unmap: bool) -> io::Result<()> {
        self.disk.check_write(offset, len)?;
        self.pass(Direction::Write, (offset, len), len).await?;
        let end = offset + len;
        let mut start = offset;
        while start < end {
            // Pieces begin where blocks of the device do.
            let next = (start - start % ZEROES_BYTES + ZEROES_BYTES).min(end);
            let piece = (start, next - start);
            self.in_turn(Direction::Write, piece, piece.1, |_turn| async move {
                match &self.disk.kind {
                    Kind::File(disk) => disk.write_zeroes(start, piece.1, may_unmap).await,
                    Kind::Null => Ok(()),
                    Kind::Driver(driver) => {
                        driver.disk.write_zeroes(start, piece.1, may_unmap).await
                    }
                }
            })
            .await?;
            start = next;
        }
        Ok(())
    }
}

/// The most bytes of a [part of a null disk](null_part), unless a logical block is larger.
const NULL_PART_BYTES: usize = 64 << 10;

/// A part of a null disk, in units of `block` bytes.
fn null_part(len: u64, block: u32) -> io::Result<Buffers> {
    let block = block as usize;
    let bytes = usize::try_from(len).unwrap_or(usize::MAX).min(NULL_PART_BYTES);
    RepeatedBlock::zeroes(block, block)?.buffers(bytes.max(block), ())
}
