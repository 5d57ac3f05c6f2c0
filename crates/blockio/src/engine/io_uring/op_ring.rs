//! A ring, and the ops that are queued for it or in it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;

use io_uring::{cqueue, opcode, squeue, types};

use super::fixed::FixedBuffers;
use crate::engine::kernel::Ring;
use crate::op::{Completer, Op, OpKind};
use crate::stats::Stats;
use iomem::fits;

/// `BLOCK_URING_CMD_DISCARD` of linux/blkdev.h: `_IO(0x12, 0)`.
const BLOCK_URING_CMD_DISCARD: u32 = 0x1200;

/// `MAX_RW_COUNT` of the kernel: a page less than 2 GiB.
const TRANSFER_MAX: u32 = 0x7fff_f000;

pub(super) struct OpRing {
    pub(super) ring: Ring,
    queued: VecDeque<u32>,
    /// Ops that are in the submission ring or in the kernel.
    in_kernel: usize,
    buffers: FixedBuffers,
    /// Empty between harvests. Kept so that a harvest allocates nothing.
    entries: Vec<cqueue::Entry>,
    /// True if the kernel was entered since the last harvest.
    was_entered: bool,
}

impl OpRing {
    pub(super) fn new(ring: Ring) -> Self {
        Self {
            ring,
            queued: VecDeque::new(),
            in_kernel: 0,
            buffers: FixedBuffers::default(),
            entries: Vec::new(),
            was_entered: false,
        }
    }

    pub(super) fn register_memory(&mut self, memory: &[libc::iovec]) -> io::Result<()> {
        self.buffers.add(&self.ring, memory)
    }

    pub(super) fn unregister_memory(&mut self, memory: &[libc::iovec]) {
        self.buffers.remove(&self.ring, memory);
    }

    pub(super) fn queue(&mut self, slot: u32) {
        self.queued.push_back(slot);
    }

    pub(super) fn queued(&self) -> usize {
        self.queued.len()
    }

    pub(super) fn in_kernel(&self) -> usize {
        self.in_kernel
    }

    /// Fills submission entries for queued ops, as many as `max` and the ring allow.
    pub(super) fn push(&mut self, max: usize, done: &mut Completer<'_>) -> usize {
        let count = self.queued.len().min(self.ring.room()).min(max);
        if count == 0 {
            return 0;
        }
        for slot in self.queued.drain(..count) {
            // Queued slots hold ops: only a completion empties them.
            if let Some(op) = done.slots.submit(slot, done.now) {
                let entry = entry(op, &mut self.buffers).user_data(u64::from(slot));
                // SAFETY: the entry's addresses are those of the slot's iovecs and of the memory
                // behind them, and its file is the slot's. The slot keeps all three until the
                // completion that carries its number (see `op.rs`).
                unsafe { self.ring.push(&entry) };
                self.in_kernel += 1;
            }
        }
        done.stats.count_submit(count as u64);
        count
    }

    /// Waits for room if ops found the submission ring full. Returns true if they may be pushed
    /// now.
    pub(super) fn makes_room(&mut self, stats: &Stats) -> bool {
        !self.queued.is_empty() && self.ring.room() == 0 && self.ring.make_room(Some(stats))
    }

    /// Submits entries, if there are any.
    pub(super) fn submit(&mut self, stats: &Stats) -> io::Result<()> {
        if self.ring.unsubmitted() == 0 {
            return Ok(());
        }
        self.enter(stats)
    }

    /// Enters the kernel without waiting: it takes entries, and posts completions. A polled ring
    /// posts completions only when it is entered.
    pub(super) fn enter(&mut self, stats: &Stats) -> io::Result<()> {
        self.was_entered = true;
        self.ring.submit(stats)
    }

    /// Polls the device of a polled ring. Returns true if completions are visible.
    pub(super) fn has_polled_completions(&mut self, stats: &Stats) -> bool {
        if self.in_kernel == 0 {
            return false;
        }
        // Entries that the kernel refuses now are submitted again in any case.
        self.ring.has_entries() || (self.enter(stats).is_ok() && self.ring.has_entries())
    }

    /// Like `has_polled_completions`, but does nothing if the kernel was entered since the last
    /// harvest.
    pub(super) fn poll_once(&mut self, stats: &Stats) {
        if !self.was_entered {
            self.has_polled_completions(stats);
        }
    }

    /// Takes the completion entries that are visible. [`end_harvest`](Self::end_harvest) must
    /// follow.
    pub(super) fn begin_harvest(&mut self) -> Vec<cqueue::Entry> {
        self.was_entered = false;
        let mut entries = std::mem::take(&mut self.entries);
        self.ring.take(&mut entries);
        entries
    }

    /// Takes the entries back, of which `ops` were completions of ops.
    pub(super) fn end_harvest(&mut self, entries: Vec<cqueue::Entry>, ops: usize) {
        self.entries = entries;
        assert!(ops <= self.in_kernel, "io_uring has completed {ops} ops of {}", self.in_kernel);
        self.in_kernel -= ops;
    }
}

/// Builds the submission entry of an op, without its slot number.
fn entry(op: &Op, buffers: &mut FixedBuffers) -> squeue::Entry {
    let registered = op.file.registered();
    let (fd, flags) = if registered >= 0 {
        (registered, squeue::Flags::FIXED_FILE)
    } else {
        (op.file.as_raw_fd(), squeue::Flags::empty())
    };
    let (fd, offset) = (types::Fd(fd), op.offset);
    let entry = match (op.kind, op.iovecs()) {
        (OpKind::Read, [range]) => {
            let (start, len) = single(range);
            match buffers.index_of(start, len) {
                Some(index) => opcode::ReadFixed::new(fd, start, len, index).offset(offset).build(),
                None => opcode::Read::new(fd, start, len).offset(offset).build(),
            }
        }
        (OpKind::Read, ranges) => {
            opcode::Readv::new(fd, ranges.as_ptr(), count(ranges)).offset(offset).build()
        }
        (OpKind::Write { fua }, [range]) => {
            let (start, len) = single(range);
            let rw_flags = rw_flags(fua);
            match buffers.index_of(start, len) {
                Some(index) => opcode::WriteFixed::new(fd, start, len, index)
                    .offset(offset)
                    .rw_flags(rw_flags)
                    .build(),
                None => {
                    opcode::Write::new(fd, start, len).offset(offset).rw_flags(rw_flags).build()
                }
            }
        }
        (OpKind::Write { fua }, ranges) => opcode::Writev::new(fd, ranges.as_ptr(), count(ranges))
            .offset(offset)
            .rw_flags(rw_flags(fua))
            .build(),
        (OpKind::Flush, _) => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        (OpKind::Fallocate { mode, len }, _) => {
            opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build()
        }
        // Sent as discards, these ops would destroy data. The ring has no such operation; the pool
        // has.
        (OpKind::ZeroBlocks { .. } | OpKind::FindExtent { .. }, _) => {
            unreachable!("an op of the pool in a ring")
        }
        (OpKind::DiscardBlocks { len }, _) => {
            // The kernel reads the start from `addr` and the length from the command's bytes.
            let mut command = [0; 16];
            command[..8].copy_from_slice(&len.to_ne_bytes());
            opcode::UringCmd16::new(fd, BLOCK_URING_CMD_DISCARD)
                .cmd(command)
                .addr(Some(offset))
                .build()
        }
    };
    entry.flags(flags)
}

/// The address and length of a single range. A length beyond 32 bits is cut to the kernel's limit,
/// and the op comes back short.
fn single(range: &libc::iovec) -> (*mut u8, u32) {
    (range.iov_base.cast(), u32::try_from(range.iov_len).unwrap_or(TRANSFER_MAX))
}

fn count(ranges: &[libc::iovec]) -> u32 {
    fits(ranges.len(), "a count of iovecs")
}

fn rw_flags(fua: bool) -> i32 {
    if fua { libc::RWF_DSYNC } else { 0 }
}
