//! Engine `threads`: blocking system calls on a small pool.
//!
//! The pool grows while ops wait and no thread is idle, and a thread that was idle for a while
//! ends. Other engines keep one for the operations that the kernel cannot do asynchronously.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::fd::OwnedFd;

use super::Completer;
use crate::clock;
use crate::lane::pool_threads;
use crate::op::{OpKind, OpView};
use crate::rare::Rare;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Condvar, Eventfd, Mutex, MutexGuard};

/// As many as QEMU's thread pool has: enough to keep a disk array busy. More disks have more.
const THREADS_MAX: usize = 64;
/// A thread without work for this long ends.
const IDLE: Duration = Duration::from_secs(10);
/// A thread makes system calls and nothing else.
const STACK_BYTES: usize = 128 << 10;

/// One op on its way to a pool thread.
pub(crate) struct Job {
    pub(crate) slot: u32,
    pub(crate) view: OpView,
}

// SAFETY: the raw parts of the view, an fd and an iovec array, are owned by the slot that the job
// names until its completion (see `op.rs`), and completing it is the last thing done with them.
unsafe impl Send for Job {}

struct Jobs {
    waiting: VecDeque<Job>,
    threads_max: usize,
    threads: usize,
    idle: usize,
    stop: bool,
}

/// What the pool threads share with their engine.
pub(crate) struct Pool {
    jobs: Mutex<Jobs>,
    work: Condvar,
    done: Mutex<Vec<(u32, i64)>>,
    /// Length of `done`, so that a harvest that finds nothing takes no lock.
    done_len: AtomicUsize,
    wake: Eventfd,
    /// How long a thread stays without work.
    idle_time: Duration,
}

impl Pool {
    pub(crate) fn new(wake: OwnedFd) -> Self {
        Self {
            jobs: Mutex::new(Jobs {
                waiting: VecDeque::new(),
                threads_max: THREADS_MAX,
                threads: 0,
                idle: 0,
                stop: false,
            }),
            work: Condvar::new(),
            done: Mutex::default(),
            done_len: AtomicUsize::new(0),
            wake: Eventfd::new(wake),
            idle_time: IDLE,
        }
    }

    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn done(&self) -> MutexGuard<'_, Vec<(u32, i64)>> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A job that waits for a thread.
    #[cfg(feature = "sim")]
    pub(super) fn take_job(&self) -> Option<Job> {
        self.jobs().waiting.pop_front()
    }

    /// Posts the result of a job. True: the engine must be woken, for nothing was posted before.
    pub(super) fn post(&self, slot: u32, result: i64) -> bool {
        let mut results = self.done();
        results.push((slot, result));
        self.done_len.store(results.len(), Ordering::Release);
        results.len() == 1
    }

    pub(super) fn wake(&self) {
        self.wake.add_one();
    }

    #[cfg(all(test, any(loom, shuttle)))]
    pub(crate) fn eventfd(&self) -> &Eventfd {
        &self.wake
    }

    /// Adds jobs; returns how many threads to start for them.
    pub(crate) fn put(&self, added: impl Iterator<Item = Job>) -> usize {
        let mut jobs = self.jobs();
        jobs.waiting.extend(added);
        let wanted = jobs.waiting.len().saturating_sub(jobs.idle);
        wanted.min(jobs.threads_max.saturating_sub(jobs.threads))
    }

    /// A thread is about to start.
    pub(crate) fn count_thread(&self) {
        self.jobs().threads += 1;
    }

    /// Wakes idle threads for this many jobs.
    pub(crate) fn notify(&self, count: usize) {
        for _ in 0..count {
            self.work.notify_one();
        }
    }

    pub(crate) fn has_completions(&self) -> bool {
        self.done_len.load(Ordering::Acquire) > 0
    }

    /// Swaps what is done with `harvested`, which is empty.
    pub(crate) fn take_done(&self, harvested: &mut Vec<(u32, i64)>) {
        let mut results = self.done();
        std::mem::swap(&mut *results, harvested);
        self.done_len.store(0, Ordering::Relaxed);
    }

    /// Ends the threads once nothing waits.
    pub(crate) fn stop(&self) {
        self.jobs().stop = true;
        self.work.notify_all();
    }
}

/// A pool of threads and the ops that wait for it.
pub(crate) struct Threads {
    pool: Arc<Pool>,
    queued: VecDeque<u32>,
    in_kernel: usize,
    harvested: Vec<(u32, i64)>,
    handles: Vec<JoinHandle<()>>,
    no_thread: Rare,
    stack_bytes: usize,
}

impl Threads {
    pub(super) fn new(wake: OwnedFd) -> Self {
        Self {
            pool: Arc::new(Pool::new(wake)),
            queued: VecDeque::new(),
            in_kernel: 0,
            harvested: Vec::new(),
            handles: Vec::new(),
            no_thread: Rare::default(),
            stack_bytes: STACK_BYTES,
        }
    }

    pub(super) fn eventfd(&self) -> BorrowedFd<'_> {
        self.pool.wake.as_fd()
    }

    /// So many disks are there now: the lanes let a share of the threads through for each.
    pub(super) fn set_disks(&self, disks: usize) {
        self.pool.jobs().threads_max = pool_threads(disks).max(THREADS_MAX);
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

    pub(super) fn submit(&mut self, max: usize, done: &mut Completer<'_>) -> bool {
        if self.queued.is_empty() || max == 0 {
            return false;
        }
        let count = self.queued.len().min(max);
        let (slots, in_kernel) = (&mut *done.slots, &mut self.in_kernel);
        let now = done.now;
        let wanted = self.pool.put(self.queued.drain(..count).filter_map(|slot| {
            let view = slots.view(slot, now)?;
            *in_kernel += 1;
            Some(Job { slot, view })
        }));
        done.stats.submitted_at_once.record(count as u64);
        #[cfg(feature = "sim")]
        if super::sim::take_jobs(&self.pool) {
            return !self.queued.is_empty();
        }
        self.grow(wanted, done);
        self.pool.notify(count);
        done.now = clock::now();
        !self.queued.is_empty()
    }

    /// Starts `wanted` threads. When the machine gives none and none are there, nobody would ever
    /// serve the jobs, so they fail.
    fn grow(&mut self, wanted: usize, done: &mut Completer<'_>) {
        self.handles.retain(|handle| !handle.is_finished());
        for _ in 0..wanted {
            let pool = Arc::clone(&self.pool);
            self.pool.count_thread();
            let thread = std::thread::Builder::new()
                .name("ringhaul-pool".into())
                .stack_size(self.stack_bytes)
                .spawn(move || pool_thread(&pool));
            match thread {
                Ok(handle) => self.handles.push(handle),
                Err(error) => {
                    self.pool.jobs().threads -= 1;
                    self.fail_jobs_without_threads(&error, done);
                    return;
                }
            }
        }
    }

    fn fail_jobs_without_threads(&mut self, error: &io::Error, done: &mut Completer<'_>) {
        let mut jobs = self.pool.jobs();
        if jobs.threads > 0 {
            return;
        }
        if let Some(left_out) = self.no_thread.permit(done.now) {
            tracing::error!(
                left_out,
                "cannot start a pool thread: {error}; operations fail until one starts"
            );
        }
        for job in jobs.waiting.drain(..) {
            self.in_kernel -= 1;
            done.complete(job.slot, -i64::from(libc::EAGAIN));
        }
    }

    pub(super) fn has_completions(&self) -> bool {
        self.pool.has_completions()
    }

    pub(super) fn harvest(&mut self, done: &mut Completer<'_>) -> u64 {
        if !self.has_completions() {
            return 0;
        }
        self.pool.take_done(&mut self.harvested);
        let count = self.harvested.len();
        self.in_kernel -= count;
        for (slot, result) in self.harvested.drain(..) {
            done.complete(slot, result);
        }
        count as u64
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.pool.stop();
        for handle in self.handles.drain(..) {
            // A pool thread runs system calls only; a panic in one has been printed.
            let _ = handle.join();
        }
    }
}

/// What a thread of the pool does. [`Pool::count_thread`] was told of it.
pub(crate) fn pool_thread(pool: &Pool) {
    while let Some(job) = next_job(pool) {
        if pool.post(job.slot, execute(&job.view)) {
            pool.wake();
        }
    }
}

/// The next job; `None` when this thread is to end.
fn next_job(pool: &Pool) -> Option<Job> {
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
    let offset = i64::try_from(view.offset).unwrap_or(i64::MAX);
    let count = libc::c_int::try_from(view.iovecs_len).unwrap_or(libc::c_int::MAX);
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
                let len = i64::try_from(len).unwrap_or(i64::MAX);
                i64::from(libc::fallocate(view.fd, mode, offset, len))
            }
            OpKind::DiscardBlocks { len } => block_range(view, BLKDISCARD, len),
            OpKind::ZeroBlocks { len } => block_range(view, BLKZEROOUT, len),
        }
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

#[cfg(test)]
mod tests {
    use std::rc::Rc;
    use std::time::Instant;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::buf::Buffers;
    use crate::engine::EngineKind;
    use crate::op::{FileRef, IoFile, Op, Slots};
    use crate::stats::Stats;
    use crate::task::TaskKey;

    struct Bench {
        engine: Threads,
        file: FileRef,
        slots: Slots,
        stats: Stats,
        woken: Vec<TaskKey>,
    }

    impl Bench {
        fn new() -> Self {
            let wake = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
            let file = OwnedFd::from(tempfile::tempfile().unwrap());
            Self {
                engine: Threads::new(wake),
                file: IoFile::alone(Arc::new(file.into())),
                slots: Slots::new(EngineKind::Threads, 64),
                stats: Stats::default(),
                woken: Vec::new(),
            }
        }

        fn submit(&mut self, count: usize) {
            for _ in 0..count {
                let (kind, file) = (OpKind::Read, Rc::clone(&self.file));
                let op = Op { kind, file, offset: 0, buffers: Buffers::aligned(512, 512) };
                let slot = self.slots.insert(op, TaskKey::default());
                self.engine.queue(slot);
            }
            let Self { engine, slots, stats, woken, .. } = self;
            let mut done = Completer { slots, stats, woken, now: Instant::now() };
            engine.submit(usize::MAX, &mut done);
        }

        /// Waits until no thread has anything to do, and takes all completions.
        fn settle(&mut self) {
            self.wait_for(|jobs| jobs.waiting.is_empty() && jobs.idle == jobs.threads);
            let Self { engine, slots, stats, woken, .. } = self;
            engine.harvest(&mut Completer { slots, stats, woken, now: Instant::now() });
            assert_eq!(engine.in_kernel(), 0, "an op was lost");
        }

        fn wait_for(&self, condition: impl Fn(&Jobs) -> bool) {
            while !condition(&self.engine.pool.jobs()) {
                std::thread::yield_now();
            }
        }

        fn threads(&self) -> usize {
            self.engine.pool.jobs().threads
        }
    }

    /// No file makes a read at an offset wait, so what each thread waits for is to say that it is
    /// done: as good as an op that never ends, until the results are let go.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn ops_that_block_have_a_thread_each_up_to_the_limit() {
        let mut bench = Bench::new();
        for count in [1, 7, THREADS_MAX - 1] {
            let pool = Arc::clone(&bench.engine.pool);
            let results = pool.done();
            // Those that are idle from the round before take jobs first.
            bench.submit(count);
            assert_eq!(bench.threads(), count);
            // Each has taken one and is not back: they run at the same time.
            bench.wait_for(|jobs| jobs.waiting.is_empty() && jobs.idle == 0);
            drop(results);
            bench.settle();
            assert_eq!(bench.threads(), count);
        }

        let pool = Arc::clone(&bench.engine.pool);
        let results = pool.done();
        bench.submit(3 * THREADS_MAX);
        bench.wait_for(|jobs| jobs.waiting.len() == 2 * THREADS_MAX && jobs.idle == 0);
        assert_eq!(bench.threads(), THREADS_MAX);
        bench.submit(1);
        assert_eq!(bench.threads(), THREADS_MAX);
        drop(results);
        bench.settle();
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn ops_that_come_while_ops_block_have_threads_of_their_own() {
        let mut bench = Bench::new();
        let pool = Arc::clone(&bench.engine.pool);
        let results = pool.done();
        for threads in 1..=5 {
            bench.submit(1);
            assert_eq!(bench.threads(), threads);
            bench.wait_for(|jobs| jobs.waiting.is_empty() && jobs.idle == 0);
        }
        drop(results);
        bench.settle();
        // Idle threads serve what comes next.
        bench.submit(1);
        assert_eq!(bench.threads(), 5);
        bench.settle();
    }

    /// Starts a thread that asks `pool` for one job, and gives it that when it waits for one and
    /// nobody will wake it: its time runs out. Returns what it got; `None` if it was too fast.
    fn job_at_time_out(pool: &Arc<Pool>) -> Option<Option<u32>> {
        pool.count_thread();
        let asking = Arc::clone(pool);
        let thread = std::thread::spawn(move || next_job(&asking).map(|job| job.slot));
        let mut is_given = false;
        while !is_given && pool.jobs().threads == 1 {
            let mut jobs = pool.jobs();
            if jobs.idle == 1 {
                let (kind, iovecs) = (OpKind::Flush, std::ptr::null());
                let view =
                    OpView { kind, fd: -1, registered: -1, offset: 0, iovecs, iovecs_len: 0 };
                jobs.waiting.push_back(Job { slot: 7, view });
                is_given = true;
            }
        }
        let job = thread.join().unwrap();
        is_given.then_some(job)
    }

    /// The wait of an idle thread may time out after a job has come for it, and nobody else is
    /// told of that job.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_thread_that_times_out_takes_the_job_that_came_meanwhile() {
        let mut pool = Pool::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        pool.idle_time = Duration::from_millis(20);
        let pool = Arc::new(pool);
        let job = loop {
            if let Some(job) = job_at_time_out(&pool) {
                break job;
            }
        };
        assert_eq!(job, Some(7), "the job was left behind");
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn ops_fail_and_are_counted_as_done_when_no_thread_starts() {
        let mut bench = Bench::new();
        // No machine has room for such a stack.
        bench.engine.stack_bytes = usize::MAX >> 2;
        bench.submit(3);
        assert_eq!((bench.threads(), bench.engine.in_kernel()), (0, 0));
        assert_eq!(bench.stats.read.errors.get(), 3);
        // They go on as soon as one starts.
        bench.engine.stack_bytes = STACK_BYTES;
        bench.submit(2);
        bench.settle();
        assert_eq!((bench.stats.read.ops.get(), bench.stats.read.errors.get()), (5, 3));
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn jobs_wait_for_the_threads_that_there_are_when_no_more_start() {
        let mut bench = Bench::new();
        bench.submit(1);
        bench.settle();
        bench.engine.stack_bytes = usize::MAX >> 2;
        bench.submit(20);
        bench.settle();
        assert_eq!((bench.threads(), bench.stats.read.errors.get()), (1, 0));
        assert_eq!(bench.stats.read.ops.get(), 21);
    }
}
