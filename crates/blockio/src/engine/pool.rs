//! The threads that run blocking system calls, and the state that they share with the loop.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::executor::mailbox::Mailbox;
use crate::executor::sync::{Condvar, Mutex, MutexGuard};
use crate::op::{Op, OpKind};
use iomem::fits;

/// The size of QEMU's thread pool: enough to keep a disk array busy. More disks raise the limit.
pub(super) const THREADS_MAX: usize = 64;
/// A thread ends after this long without work.
const IDLE: Duration = Duration::from_secs(10);

/// A pool thread's view of an op.
#[derive(Clone, Copy)]
pub(crate) struct OpView {
    pub(crate) kind: OpKind,
    pub(crate) fd: RawFd,
    pub(crate) offset: u64,
    pub(crate) iovecs: *const libc::iovec,
    pub(crate) iovecs_len: usize,
}

impl OpView {
    pub(super) fn new(op: &Op) -> Self {
        let (fd, iovecs) = (op.file.as_raw_fd(), op.iovecs());
        let (iovecs, iovecs_len) = (iovecs.as_ptr(), iovecs.len());
        Self { kind: op.kind, fd, offset: op.offset, iovecs, iovecs_len }
    }
}

/// An op on its way to a pool thread.
pub(crate) struct Job {
    pub(crate) slot: u32,
    pub(crate) view: OpView,
}

// SAFETY: the slot that the job names owns the raw parts of the view, an fd and an iovec array,
// until its completion (see `op.rs`). Completing it is the last thing done with them.
unsafe impl Send for Job {}

pub(super) struct Jobs {
    pub(super) waiting: VecDeque<Job>,
    pub(super) threads_max: usize,
    pub(super) threads: usize,
    pub(super) idle: usize,
    stop: bool,
}

/// The state that pool threads share with their engine.
pub(crate) struct Pool {
    jobs: Mutex<Jobs>,
    work: Condvar,
    /// The destination of results.
    pub(crate) mailbox: Arc<Mailbox>,
    /// The time after which an idle thread ends.
    pub(super) idle_time: Duration,
}

impl Pool {
    pub(crate) fn new(mailbox: Arc<Mailbox>) -> Self {
        Self {
            jobs: Mutex::new(Jobs {
                waiting: VecDeque::new(),
                threads_max: THREADS_MAX,
                threads: 0,
                idle: 0,
                stop: false,
            }),
            work: Condvar::new(),
            mailbox,
            idle_time: IDLE,
        }
    }

    pub(super) fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds jobs. Returns the number of threads to start for them.
    pub(crate) fn put(&self, added: impl Iterator<Item = Job>) -> usize {
        let mut jobs = self.jobs();
        jobs.waiting.extend(added);
        let wanted = jobs.waiting.len().saturating_sub(jobs.idle);
        wanted.min(jobs.threads_max.saturating_sub(jobs.threads))
    }

    /// Counts a thread that is about to start.
    pub(crate) fn count_thread(&self) {
        self.jobs().threads += 1;
    }

    /// Wakes idle threads for this many jobs.
    pub(crate) fn notify(&self, count: usize) {
        for _ in 0..count {
            self.work.notify_one();
        }
    }

    /// Ends the threads once no job waits.
    pub(crate) fn stop(&self) {
        self.jobs().stop = true;
        self.work.notify_all();
    }
}

/// The main function of a pool thread, which [`Pool::count_thread`] has counted.
pub(crate) fn pool_thread(pool: &Pool) {
    while let Some(job) = next_job(pool) {
        if pool.mailbox.put_result(job.slot, execute(&job.view)) {
            pool.mailbox.wake();
        }
    }
}

/// Waits for the next job; `None` if this thread must end.
pub(super) fn next_job(pool: &Pool) -> Option<Job> {
    let mut jobs = pool.jobs();
    loop {
        if let Some(job) = jobs.waiting.pop_front() {
            return Some(job);
        }
        if jobs.stop {
            jobs.threads -= 1;
            return None;
        }
        jobs.idle += 1;
        let (guard, wait) =
            pool.work.wait_timeout(jobs, pool.idle_time).unwrap_or_else(PoisonError::into_inner);
        jobs = guard;
        jobs.idle -= 1;
        if wait.timed_out() && jobs.waiting.is_empty() {
            jobs.threads -= 1;
            return None;
        }
    }
}

/// Runs one op to its end. Returns bytes, 0, or a negative errno.
fn execute(view: &OpView) -> i64 {
    loop {
        let result = execute_once(view);
        if result >= 0 {
            return result;
        }
        let error = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        if error != libc::EINTR {
            return -i64::from(error);
        }
    }
}

fn execute_once(view: &OpView) -> i64 {
    let offset = fits(view.offset, "the offset of an op");
    let count = fits(view.iovecs_len, "a count of iovecs");
    // SAFETY: the slot of this op owns the file and the iovecs, and the memory behind these,
    // until the completion that is posted after this call (see `op.rs`).
    unsafe {
        match view.kind {
            OpKind::Read => libc::preadv(view.fd, view.iovecs, count, offset) as i64,
            OpKind::Write { fua } => {
                let flags = if fua { libc::RWF_DSYNC } else { 0 };
                libc::pwritev2(view.fd, view.iovecs, count, offset, flags) as i64
            }
            OpKind::Flush => i64::from(libc::fdatasync(view.fd)),
            OpKind::Fallocate { mode, len } => {
                let len = fits(len, "the length of an op");
                i64::from(libc::fallocate(view.fd, mode, offset, len))
            }
            OpKind::DiscardBlocks { len } => block_range(view, BLKDISCARD, len),
            OpKind::ZeroBlocks { len } => block_range(view, BLKZEROOUT, len),
            OpKind::FindExtent { len } => find_extent(view.fd, view.offset, len),
        }
    }
}

/// Finds the end of the data or hole at `offset`. Everything beyond the end of the file counts as a
/// hole, as it reads.
///
/// # Safety
///
/// The file must be open. Its position changes, which nothing else may use.
unsafe fn find_extent(fd: RawFd, offset: u64, len: u64) -> i64 {
    let start: i64 = fits(offset, "the offset of an op");
    // SAFETY: the caller promises that the file is open; no memory is involved.
    let seek = |whence| unsafe { libc::lseek(fd, start, whence) };
    let data = seek(libc::SEEK_DATA);
    let is_end = data < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ENXIO);
    let (found, is_hole) = match data {
        _ if is_end => (i64::MAX, true),
        _ if data == start => (seek(libc::SEEK_HOLE), false),
        _ => (data, true),
    };
    match u64::try_from(found) {
        // The data became a hole between the two calls.
        Ok(end) if end <= offset => OpKind::extent_result(len, false),
        Ok(end) => OpKind::extent_result(len.min(end - offset), is_hole),
        Err(_) => found,
    }
}

/// `_IO(0x12, 119)` and `_IO(0x12, 127)` of linux/fs.h.
const BLKDISCARD: libc::c_ulong = 0x1277;
const BLKZEROOUT: libc::c_ulong = 0x127f;

/// # Safety
///
/// The view's file must be open.
unsafe fn block_range(view: &OpView, request: libc::c_ulong, len: u64) -> i64 {
    let range = [view.offset, len];
    // SAFETY: both requests read two 64-bit numbers from the address given.
    i64::from(unsafe { libc::ioctl(view.fd, request as _, range.as_ptr()) })
}
