//! Discards and zeroes of a file, and the operations for them that its file system turns out to
//! lack.

use std::cell::Cell;
use std::io;
use std::rc::Rc;

use super::partial_blocks::Claimed;
use super::{FileDisk, behind_the_end, is_unsupported};
use crate::op::OpKind;

impl FileDisk {
    pub(in crate::disk) async fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        if !self.has_discard.get() {
            return Ok(());
        }
        // A hint: blocks of the device that are not wholly in the range stay.
        let Some((offset, len)) = self.align.whole_ranges(offset, len) else { return Ok(()) };
        let _claimed = self.claim(offset, len).await;
        let kind = if self.is_block_device {
            OpKind::DiscardBlocks { len }
        } else {
            OpKind::Fallocate { mode: libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, len }
        };
        self.try_feature(&self.has_discard, kind, offset).await.map(|_| ())
    }

    pub(in crate::disk) async fn write_zeroes(
        &self,
        offset: u64,
        len: u64,
        may_unmap: bool,
    ) -> io::Result<()> {
        if self.end.is_exceeded_by(offset, len) {
            return Err(behind_the_end());
        }
        let claimed = self.claim(offset, len).await;
        let Some((start, whole)) = self.align.whole_ranges(offset, len) else {
            return self.write_zero_bytes(offset, len, claimed).await;
        };
        self.write_zero_bytes(offset, start - offset, claimed.clone()).await?;
        self.zero_range(start, whole, may_unmap, claimed.clone()).await?;
        let end = start + whole;
        self.write_zero_bytes(end, offset + len - end, claimed).await
    }

    /// Zeroes whole blocks of the device.
    async fn zero_range(
        &self,
        offset: u64,
        len: u64,
        may_unmap: bool,
        claimed: Option<Rc<Claimed>>,
    ) -> io::Result<()> {
        let punch =
            OpKind::Fallocate { mode: libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, len };
        if may_unmap && self.try_feature(&self.has_punch_zeroes, punch, offset).await? {
            return Ok(());
        }
        let zero = if self.is_block_device {
            OpKind::ZeroBlocks { len }
        } else {
            OpKind::Fallocate { mode: libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE, len }
        };
        if self.try_feature(&self.has_zero_range, zero, offset).await? {
            return Ok(());
        }
        self.write_zero_bytes(offset, len, claimed).await
    }

    pub(in crate::disk) async fn write_zero_bytes(
        &self,
        mut offset: u64,
        mut len: u64,
        claimed: Option<Rc<Claimed>>,
    ) -> io::Result<()> {
        let kind = OpKind::Write { fua: false };
        while len > 0 {
            let most = self.share.piece_bytes(self.request_align);
            let piece = self.align.piece(offset, len, most);
            if piece & (self.request_align - 1) == 0 {
                let permit = self.share.take(piece).await;
                let zeroes =
                    self.count_failure(self.io.shared.bounce_budget.zeroes(piece, permit))?;
                self.transfer(kind, offset, zeroes).await?;
            } else {
                // A part of a block: the memory that counts is that of the bounce.
                let zeroes = self.count_failure(self.io.shared.bounce_budget.zeroes(piece, ()))?;
                self.bounce(kind, offset, zeroes, claimed.clone()).await?;
            }
            offset += piece as u64;
            len -= piece as u64;
        }
        Ok(())
    }

    /// Runs `kind` unless `has` is false. Returns false, from then on, if the kernel, the file
    /// system or the device does not support it.
    async fn try_feature(&self, has: &Cell<bool>, kind: OpKind, offset: u64) -> io::Result<bool> {
        if !has.get() {
            return Ok(false);
        }
        match self.simple(kind, offset).await {
            Ok(_) => Ok(true),
            Err(error) if is_unsupported(&error) => {
                has.set(false);
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}
