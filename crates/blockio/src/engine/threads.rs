//! Engine `threads`: blocking system calls on a small pool.
//!
//! The pool grows while ops wait and no thread is idle, and a thread that was idle for a while
//! ends. Other engines keep a pool for operations that the kernel cannot do asynchronously.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use super::kernel;
use super::pool::{Job, OpView, Pool, THREADS_MAX, pool_thread};
use crate::admission::pool_threads;
use crate::clock;
use crate::executor::mailbox::{Mailbox, OpResult};
use crate::op::Completer;
use crate::watchdog::RateLimit;

/// Small, because a thread only makes system calls.
const STACK_BYTES: usize = 128 << 10;

/// A pool of threads and the ops that wait for it.
pub(crate) struct Threads {
    pool: Arc<Pool>,
    queued: VecDeque<u32>,
    in_kernel: usize,
    harvested: Vec<OpResult>,
    handles: Vec<JoinHandle<()>>,
    no_thread: RateLimit,
    stack_bytes: usize,
}

impl Threads {
    pub(super) fn new(mailbox: &Arc<Mailbox>) -> Self {
        Self {
            pool: Arc::new(Pool::new(Arc::clone(mailbox))),
            queued: VecDeque::new(),
            in_kernel: 0,
            harvested: Vec::new(),
            handles: Vec::new(),
            no_thread: RateLimit::default(),
            stack_bytes: STACK_BYTES,
        }
    }

    /// The eventfd that is written when there are completions and the loop may sleep.
    pub(super) fn eventfd(&self) -> BorrowedFd<'_> {
        self.pool.mailbox.eventfd().as_fd()
    }

    /// Adapts the limit on threads to this number of disks: lanes admit a share of the threads for
    /// each.
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
            let view = OpView::new(slots.submit(slot, now)?);
            *in_kernel += 1;
            Some(Job { slot, view })
        }));
        done.stats.count_submit(count as u64);
        if kernel::simulate_jobs(&self.pool) {
            return !self.queued.is_empty();
        }
        self.grow(wanted, done);
        self.pool.notify(count);
        done.now = clock::now();
        !self.queued.is_empty()
    }

    /// Starts `wanted` threads. If the machine gives none and the pool has none, the jobs fail,
    /// because no thread would ever serve them.
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
        self.pool.mailbox.has_results()
    }

    pub(super) fn harvest(&mut self, done: &mut Completer<'_>) -> u64 {
        if !self.has_completions() {
            return 0;
        }
        self.pool.mailbox.take_results(&mut self.harvested);
        let (count, foreign) = (self.harvested.len(), done.slots.foreign());
        for (slot, result) in self.harvested.drain(..) {
            done.complete(slot, result);
        }
        let foreign = foreign - done.slots.foreign();
        if foreign > 0 {
            done.stats.foreign_at_once.record(foreign as u64);
        }
        self.in_kernel -= count - foreign;
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

#[cfg(test)]
mod tests {
    use std::rc::Rc;
    use std::time::{Duration, Instant};

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fd::OwnedFd;

    use super::*;
    use crate::engine::pool::{Jobs, next_job};
    use crate::executor::mailbox::TaskKey;
    use crate::executor::task::Owner;
    use crate::op::{FileRef, IoFile, Op, OpKind, Slots};
    use crate::stats::Stats;
    use iomem::Buffers;

    fn new_mailbox() -> Arc<Mailbox> {
        Arc::new(Mailbox::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap()))
    }

    struct Bench {
        engine: Threads,
        file: FileRef,
        slots: Slots,
        stats: Stats,
        woken: Vec<TaskKey>,
    }

    impl Bench {
        fn new() -> Self {
            let file = OwnedFd::from(tempfile::tempfile().unwrap());
            Self {
                engine: Threads::new(&new_mailbox()),
                file: IoFile::detached(Arc::new(file.into())),
                slots: Slots::new(64),
                stats: Stats::default(),
                woken: Vec::new(),
            }
        }

        fn submit(&mut self, count: usize) {
            for _ in 0..count {
                let (kind, file) = (OpKind::Read, Rc::clone(&self.file));
                let op = Op { kind, file, offset: 0, buffers: Buffers::aligned(512, 512) };
                let slot = self.slots.insert(op, Owner::default());
                self.engine.queue(slot);
            }
            let Self { engine, slots, stats, woken, .. } = self;
            let mut done = Completer { slots, stats, woken, now: Instant::now() };
            engine.submit(usize::MAX, &mut done);
        }

        /// Waits until no thread has a job, and takes all completions.
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

    /// No file makes a read at an offset wait, so each thread blocks on reporting its result. Until
    /// the test unlocks the results, that is as good as an op that never ends.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn ops_that_block_have_a_thread_each_up_to_the_limit() {
        let mut bench = Bench::new();
        for count in [1, 7, THREADS_MAX - 1] {
            let pool = Arc::clone(&bench.engine.pool);
            let results = pool.mailbox.inbox();
            // Threads that are idle from the round before take jobs first.
            bench.submit(count);
            assert_eq!(bench.threads(), count);
            // Each thread has taken a job and is not back: the ops run at the same time.
            bench.wait_for(|jobs| jobs.waiting.is_empty() && jobs.idle == 0);
            drop(results);
            bench.settle();
            assert_eq!(bench.threads(), count);
        }

        let pool = Arc::clone(&bench.engine.pool);
        let results = pool.mailbox.inbox();
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
        let results = pool.mailbox.inbox();
        for threads in 1..=5 {
            bench.submit(1);
            assert_eq!(bench.threads(), threads);
            bench.wait_for(|jobs| jobs.waiting.is_empty() && jobs.idle == 0);
        }
        drop(results);
        bench.settle();
        // Idle threads serve the next op.
        bench.submit(1);
        assert_eq!(bench.threads(), 5);
        bench.settle();
    }

    /// Starts a thread that asks `pool` for one job. Adds the job without a wake while the thread
    /// waits, so the wait times out. Returns the thread's result; `None` if it was too fast.
    fn job_at_time_out(pool: &Arc<Pool>) -> Option<Option<u32>> {
        pool.count_thread();
        let asking = Arc::clone(pool);
        let thread = std::thread::spawn(move || next_job(&asking).map(|job| job.slot));
        let mut is_given = false;
        while !is_given && pool.jobs().threads == 1 {
            let mut jobs = pool.jobs();
            if jobs.idle == 1 {
                let (kind, iovecs) = (OpKind::Flush, std::ptr::null());
                let view = OpView { kind, fd: -1, offset: 0, iovecs, iovecs_len: 0 };
                jobs.waiting.push_back(Job { slot: 7, view });
                is_given = true;
            }
        }
        let job = thread.join().unwrap();
        is_given.then_some(job)
    }

    /// The wait of an idle thread may time out after a job has come for it, and no other
    /// thread wakes for that job.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_thread_that_times_out_takes_the_job_that_has_just_come() {
        let mut pool = Pool::new(new_mailbox());
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
        // Ops succeed again as soon as a thread starts.
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

    /// Otherwise a pool that was idle starts no thread for its next job.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_thread_that_ends_is_not_counted_any_more() {
        let mut pool = Pool::new(new_mailbox());
        pool.idle_time = Duration::from_millis(1);
        for is_stopped in [false, true] {
            if is_stopped {
                pool.stop();
            }
            pool.count_thread();
            assert!(next_job(&pool).is_none());
            let jobs = pool.jobs();
            assert_eq!((jobs.threads, jobs.idle), (0, 0), "stopped: {is_stopped}");
        }
    }
}
