//! Engine `io_uring`: one ring for submissions, completions and everything the loop waits for.
//!
//! A turn that has to sleep costs one system call, which submits, lets the kernel post what it
//! has finished, and waits. Eventfds of others are watched by multishot polls in the same ring
//! and are never read.

mod fixed;
mod ring;
#[cfg(feature = "sim")]
pub(super) mod sim_ring;
mod watches;

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use io_uring::{cqueue, opcode, squeue, types};
use rustix::fd::AsFd;
use rustix::io::Errno;

use super::retry::Retry;
use super::threads::Threads;
use super::{Completer, TOKEN_ENGINE};
use crate::clock;
use crate::error::Error;
use crate::io_thread::IoThreadConfig;
use crate::op::{OpKind, OpView, Slots};
use fixed::{FixedBuffers, FixedFiles};
#[cfg(not(feature = "sim"))]
use ring::KernelRing as Ring;
use ring::Setup;
#[cfg(feature = "sim")]
use sim_ring::Ring;
use watches::{Seen, Watches};

/// `BLOCK_URING_CMD_DISCARD` of linux/blkdev.h: `_IO(0x12, 0)`.
const BLOCK_URING_CMD_DISCARD: u32 = 0x1200;

/// `MAX_RW_COUNT` of the kernel: a page less than 2 GiB.
const TRANSFER_MAX: u32 = 0x7fff_f000;

/// How long a wait lasts at most while the kernel takes no submission entries.
const REFUSED_WAIT: Duration = Duration::from_millis(1);

/// How long busy-polling lets put-off completions gather, for each op in the kernel up to so many.
const GRACE_FOR_EACH: Duration = Duration::from_nanos(250);
const GRACE_OPS: usize = 64;

pub(crate) struct IoUring {
    ring: Ring,
    depth: usize,
    queued: VecDeque<u32>,
    /// Ops that are in the submission ring or in the kernel.
    in_kernel: usize,
    retry: Retry,
    watches: Watches,
    files: FixedFiles,
    buffers: FixedBuffers,
    /// Empty between harvests; kept so that they allocate nothing.
    entries: Vec<cqueue::Entry>,
    /// When busy-polling saw first that the kernel has put completions off.
    deferred_since: Cell<Option<Instant>>,
    /// Device discards through the ring work since Linux 6.12.
    has_discard: bool,
    threads: Threads,
}

impl IoUring {
    /// Sets up a ring for `config.depth` ops in the kernel, for the calling thread.
    pub(super) fn new(config: &IoThreadConfig, threads: Threads) -> Result<Self, Error> {
        let setup = Setup { depth: config.depth, sqpoll: config.sqpoll };
        let ring = Ring::new(&setup).map_err(|error| Error::IoUringUnavailable { error })?;
        Ok(Self {
            has_discard: ring.has_uring_cmd(),
            ring,
            depth: config.depth as usize,
            queued: VecDeque::new(),
            in_kernel: 0,
            retry: Retry::default(),
            watches: Watches::default(),
            files: FixedFiles::default(),
            buffers: FixedBuffers::default(),
            entries: Vec::new(),
            deferred_since: Cell::new(None),
            threads,
        })
    }

    pub(super) fn watch_own_eventfd(&mut self) -> Result<(), Errno> {
        let fd = self.threads.eventfd();
        self.watches.add(&mut self.ring, fd, TOKEN_ENGINE)
    }

    pub(super) fn watch(&mut self, fd: BorrowedFd<'_>, token: u64) -> Result<(), Errno> {
        self.watches.add(&mut self.ring, fd, token)
    }

    pub(super) fn unwatch(&mut self, token: u64) {
        self.watches.remove(&mut self.ring, token);
    }

    pub(super) fn register_file(&mut self, file: BorrowedFd<'_>) {
        self.files.add(&self.ring, file);
    }

    pub(super) fn unregister_file(&mut self, file: BorrowedFd<'_>) {
        self.files.remove(&self.ring, file);
    }

    pub(super) fn register_memory(&mut self, memory: &[libc::iovec]) -> io::Result<()> {
        self.buffers.add(&self.ring, memory)
    }

    pub(super) fn unregister_memory(&mut self, memory: &[libc::iovec]) {
        self.buffers.remove(&self.ring, memory);
    }

    pub(super) fn queue(&mut self, slot: u32, slots: &Slots) {
        match slots.kind(slot) {
            Some(OpKind::ZeroBlocks { .. }) => self.threads.queue(slot),
            Some(OpKind::DiscardBlocks { .. }) if !self.has_discard => self.threads.queue(slot),
            _ => self.queued.push_back(slot),
        }
    }

    pub(super) fn queued(&self) -> usize {
        self.queued.len() + self.threads.queued()
    }

    pub(super) fn in_kernel(&self) -> usize {
        self.in_kernel + self.threads.in_kernel()
    }

    /// Events of eventfds come by harvest, so it is quiet only when the rings are empty.
    pub(super) fn is_quiet(&self) -> bool {
        self.queued() == 0 && self.in_kernel() == 0 && !self.ring.has_anything()
    }

    pub(super) fn has_unsubmitted_entries(&mut self) -> bool {
        self.ring.unsubmitted() > 0
    }

    pub(super) fn retry_at(&self) -> Option<Instant> {
        self.retry.retry_at()
    }

    pub(super) fn submit(&mut self, max: usize, done: &mut Completer<'_>) -> bool {
        let more_jobs = self.threads.submit(max, done);
        if self.retry.is_blocked(done.now) {
            return more_jobs;
        }
        let pushed = self.push_queued(max, done);
        if pushed == 0 && self.ring.unsubmitted() == 0 {
            return more_jobs;
        }
        match self.ring.submit(done.stats) {
            Ok(()) => {
                self.retry.accepted();
                more_jobs || (pushed > 0 && self.queued() > 0)
            }
            Err(error) => self.refused(&error, done) || more_jobs,
        }
    }

    /// Fills submission entries for queued ops, as many as `max`, the depth and the ring allow.
    fn push_queued(&mut self, max: usize, done: &mut Completer<'_>) -> usize {
        let room = self.depth.saturating_sub(self.in_kernel).min(self.ring.room()).min(max);
        let count = self.queued.len().min(room);
        if count == 0 {
            // Entries that an interrupted submit has left behind complete only when they are
            // submitted.
            let all_submitted = self.ring.unsubmitted() == 0;
            if !self.queued.is_empty() && self.in_kernel >= self.depth && all_submitted {
                self.retry.full();
            }
            return 0;
        }
        for slot in self.queued.drain(..count) {
            // Queued slots hold ops: only a completion empties them.
            if let Some(view) = done.slots.view(slot, done.now) {
                let entry = entry(&view, &self.files, &mut self.buffers).user_data(u64::from(slot));
                // SAFETY: the entry's addresses are those of the slot's iovecs and of the memory
                // behind them, and its file is the slot's. The slot keeps all three until the
                // completion that carries its number (see `op.rs`).
                unsafe { self.ring.push(&entry) };
                self.in_kernel += 1;
            }
        }
        done.stats.submitted_at_once.record(count as u64);
        count
    }

    /// Deals with a submit that the kernel did not take. The entries stay in the submission ring.
    /// True: go on at once.
    fn refused(&mut self, error: &io::Error, done: &mut Completer<'_>) -> bool {
        if error.raw_os_error() == Some(libc::EINTR) {
            return true;
        }
        done.stats.submit_again.add(1);
        // EBUSY: completions that the ring had no room for wait to be harvested. What is in the
        // submission ring cannot be taken back, so the pool never takes over: it is tried again.
        let others = self.in_kernel.saturating_sub(self.ring.unsubmitted());
        if self.retry.refused(others, done.now) {
            tracing::warn!("io_uring takes no operations: {error}; they are tried again");
        }
        false
    }

    /// For busy-polling. What the kernel has put off until it is asked costs a system call, so
    /// more is waited for: the longer, the more ops may still join.
    pub(super) fn has_completions(&self, now: Instant) -> bool {
        if self.ring.has_entries() || self.threads.has_completions() {
            return true;
        }
        if !self.ring.has_completions() {
            self.deferred_since.set(None);
            return false;
        }
        let since = self.deferred_since.get().unwrap_or(now);
        self.deferred_since.set(Some(since));
        now.saturating_duration_since(since) >= self.grace()
    }

    fn grace(&self) -> Duration {
        let ops = u32::try_from(self.in_kernel.min(GRACE_OPS)).unwrap_or(0);
        GRACE_FOR_EACH * ops
    }

    /// Asks for what the kernel has put off, unless busy-polling has just found it.
    fn run_deferred(&mut self, done: &Completer<'_>) {
        match self.deferred_since.get() {
            Some(since) if done.now.saturating_duration_since(since) < self.grace() => {}
            _ => {
                self.deferred_since.set(None);
                self.ring.run_deferred(done.stats);
            }
        }
    }

    pub(super) fn harvest(&mut self, done: &mut Completer<'_>, happened: &mut Vec<u64>) -> u64 {
        let from_pool = self.threads.harvest(done);
        self.run_deferred(done);
        let mut found = 0;
        let mut entries = std::mem::take(&mut self.entries);
        self.ring.take(&mut entries);
        for entry in entries.drain(..) {
            match self.watches.take_in(&mut self.ring, &entry) {
                Seen::Op(slot) => {
                    found += 1;
                    self.complete(slot, entry.result(), done);
                }
                Seen::Event(token) => happened.push(token),
                Seen::Nothing => {}
            }
        }
        self.entries = entries;
        self.in_kernel = self.in_kernel.saturating_sub(found);
        if found > 0 {
            self.retry.completed();
        }
        from_pool + found as u64
    }

    fn complete(&mut self, slot: u32, result: i32, done: &mut Completer<'_>) {
        if result == -libc::EOPNOTSUPP
            && matches!(done.slots.kind(slot), Some(OpKind::DiscardBlocks { .. }))
        {
            // Kernels before 6.12 discard by ioctl only, and the pool does that.
            self.has_discard = false;
            self.threads.queue(slot);
            return;
        }
        done.complete(slot, i64::from(result));
    }

    pub(super) fn wait(
        &mut self,
        deadline: Option<Instant>,
        max: usize,
        done: &mut Completer<'_>,
    ) -> Result<(), Error> {
        self.threads.submit(max, done);
        if !self.retry.is_blocked(done.now) {
            self.push_queued(max, done);
        }
        match self.ring.submit_and_wait(deadline, done.stats) {
            Ok(()) => {
                self.retry.accepted();
                Ok(())
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR | libc::ETIME) => Ok(()),
                Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => {
                    self.refused(&error, done);
                    let soon = clock::now() + REFUSED_WAIT;
                    let until = deadline.map_or(soon, |deadline| deadline.min(soon));
                    self.ring.only_wait(until, done.stats);
                    Ok(())
                }
                _ => Err(Error::System { action: "wait for events in io_uring", error }),
            },
        }
    }
}

impl AsFd for IoUring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}

/// The submission entry of an op, without its slot number.
fn entry(view: &OpView, files: &FixedFiles, buffers: &mut FixedBuffers) -> squeue::Entry {
    let (fd, flags) = match files.index_of(view.fd) {
        Some(index) => (index, squeue::Flags::FIXED_FILE),
        None => (view.fd, squeue::Flags::empty()),
    };
    let (fd, offset) = (types::Fd(fd), view.offset);
    let entry = match view.kind {
        OpKind::Read if view.iovecs_len == 1 => {
            let (start, len) = single(view);
            match buffers.index_of(start, len) {
                Some(index) => opcode::ReadFixed::new(fd, start, len, index).offset(offset).build(),
                None => opcode::Read::new(fd, start, len).offset(offset).build(),
            }
        }
        OpKind::Read => opcode::Readv::new(fd, view.iovecs, count(view)).offset(offset).build(),
        OpKind::Write { fua } => {
            let rw_flags = if fua { libc::RWF_DSYNC } else { 0 };
            if view.iovecs_len == 1 {
                let (start, len) = single(view);
                match buffers.index_of(start, len) {
                    Some(index) => opcode::WriteFixed::new(fd, start, len, index)
                        .offset(offset)
                        .rw_flags(rw_flags)
                        .build(),
                    None => {
                        opcode::Write::new(fd, start, len).offset(offset).rw_flags(rw_flags).build()
                    }
                }
            } else {
                opcode::Writev::new(fd, view.iovecs, count(view))
                    .offset(offset)
                    .rw_flags(rw_flags)
                    .build()
            }
        }
        OpKind::Flush => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        OpKind::Fallocate { mode, len } => {
            opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build()
        }
        OpKind::DiscardBlocks { len } | OpKind::ZeroBlocks { len } => {
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

/// The one range of a list of one. A transfer of more than the kernel takes at once is cut, and
/// comes back short.
fn single(view: &OpView) -> (*mut u8, u32) {
    // SAFETY: a list of one iovec has a first.
    let range = unsafe { *view.iovecs };
    (range.iov_base.cast(), u32::try_from(range.iov_len).unwrap_or(TRANSFER_MAX))
}

fn count(view: &OpView) -> u32 {
    u32::try_from(view.iovecs_len).unwrap_or(u32::MAX)
}
