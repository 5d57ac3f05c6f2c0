//! Engine `aio`: Linux AIO over raw system calls.
//!
//! All disks of this engine share one context. One `io_submit` takes the queued ops of one disk.
//! Completions are read from the ring in userspace (see `aio_ring.rs`), for the first time right
//! after the submit, when a fast device has already finished.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use iomem::fits;

use super::aio_ring::AioRing;
use super::announce::{Announcements, UNANNOUNCED};
use super::kernel::AioContext;
use super::kernel::abi::{
    IOCB_CMD_FDSYNC, IOCB_CMD_PREAD, IOCB_CMD_PREADV, IOCB_CMD_PWRITE, IOCB_CMD_PWRITEV,
    IOCB_FLAG_RESFD, IoEvent, Iocb,
};
use super::retry::Retry;
use super::threads::Threads;
use crate::clock;
use crate::config::{CompletionRing, EngineKind, IoThreadConfig};
use crate::error::Error;
use crate::op::{Completer, Op, OpKind, OpenFile, Slots};

/// The place from which completions are read.
enum Completions {
    Ring(AioRing),
    /// The kernel copies the events out: the ring's header is unknown, or the configuration asks
    /// for this.
    Getevents(Vec<IoEvent>),
}

/// A submit that takes this long has waited for its disk.
const SUBMIT_BLOCKS: Duration = Duration::from_millis(200);

pub(crate) struct Aio {
    context: AioContext,
    completions: Completions,
    has_fdsync: bool,
    depth: usize,
    queued: VecDeque<u32>,
    in_kernel: usize,
    retry: Retry,
    announcements: Announcements,
    iocbs: Vec<Iocb>,
    iocb_addresses: Vec<*mut Iocb>,
}

impl Aio {
    /// Sets up a context for `config.depth` ops in the kernel.
    pub(super) fn new(
        config: &IoThreadConfig,
        completion_ring: CompletionRing,
    ) -> Result<Self, Error> {
        let depth = config.depth;
        let context = AioContext::setup(depth)?;
        let has_fdsync = context.probe_fdsync();
        // SAFETY: the context was just made, and is destroyed only when `self` is dropped.
        let (completions, room) = match unsafe { AioRing::new(context.ring_address()) } {
            Ok(ring) => {
                let room = ring.capacity() - 1;
                (Completions::Ring(ring), room)
            }
            Err(_) => (getevents_from_now_on(depth), depth),
        };
        let completions = match completion_ring {
            CompletionRing::Userspace => completions,
            CompletionRing::Getevents => {
                Completions::Getevents(vec![IoEvent::default(); depth as usize])
            }
        };
        Ok(Self {
            context,
            completions,
            has_fdsync,
            depth: depth.min(room) as usize,
            queued: VecDeque::new(),
            in_kernel: 0,
            retry: Retry::default(),
            announcements: Announcements::new(
                config.harvest_on_submit && config.omits_announcements,
            ),
            iocbs: Vec::new(),
            iocb_addresses: Vec::new(),
        })
    }

    /// Queues an op for the next submit. Returns false if the op is one for the pool.
    pub(super) fn queue(&mut self, slot: u32, op: &Op) -> bool {
        let is_taken = match op.kind {
            _ if has_pool_threads(&op.file) => false,
            OpKind::Read | OpKind::Write { .. } => true,
            OpKind::Flush => self.has_fdsync,
            _ => false,
        };
        if is_taken {
            self.queued.push_back(slot);
        }
        is_taken
    }

    pub(super) fn queued(&self) -> usize {
        self.queued.len()
    }

    pub(super) fn in_kernel(&self) -> usize {
        self.in_kernel
    }

    /// Returns true unless queued ops have nothing to wait for.
    pub(super) fn may_sleep(&self) -> bool {
        self.queued.is_empty() || self.in_kernel > 0 || self.retry.retry_at().is_some()
    }

    pub(super) fn retry_at(&self) -> Option<Instant> {
        let times = [self.retry.retry_at(), self.announcements.check_at()];
        times.into_iter().flatten().min()
    }

    /// Submits queued ops of one disk. Ops that the kernel cannot take go to `threads`.
    pub(super) fn submit(
        &mut self,
        max: usize,
        threads: &mut Threads,
        done: &mut Completer<'_>,
    ) -> bool {
        if self.queued.is_empty() || self.retry.is_blocked(done.now) {
            return false;
        }
        let room = self.depth - self.in_kernel;
        if room == 0 {
            self.retry.on_full();
            return false;
        }
        let has_room = self.submit_batch(self.queued.len().min(room).min(max), threads, done);
        has_room && (!self.queued.is_empty() || threads.queued() > 0)
    }

    /// Submits the first `count` queued ops, up to the first for another disk. Returns false if the
    /// kernel is full for now.
    fn submit_batch(
        &mut self,
        count: usize,
        threads: &mut Threads,
        done: &mut Completer<'_>,
    ) -> bool {
        if self.divert(threads, done.slots) {
            return true;
        }
        // The loop waits for the eventfd of the pool anyway.
        let fd = self.prepare(count, threads.eventfd().as_raw_fd(), done);
        let (count, began) = (self.iocbs.len(), done.now);
        let blocks_at = began + SUBMIT_BLOCKS;
        done.stats.syscalls.io_submit.add(1);
        done.stats.submit_begins(fd);
        // SAFETY: each address is that of a filled iocb in `iocbs`, and the memory that iocbs name
        // belongs to slots that keep it until the completion (see `op.rs`).
        let result = unsafe { self.context.submit(&mut self.iocb_addresses) };
        done.stats.submit_ends();
        done.now = clock::now();
        if done.now >= blocks_at
            && let Some(file) = self.queued.front().and_then(|&slot| done.slots.file(slot))
        {
            log_blocked_submit(file, done.now, done.now - began);
        }
        match result {
            Ok(accepted) => {
                self.retry.on_accepted();
                self.queued.drain(..accepted.min(count));
                self.in_kernel += accepted;
                self.announcements.submitted(accepted);
                done.stats.count_submit(accepted as u64);
                accepted > 0
            }
            Err(error) => self.refused(error, threads, done),
        }
    }

    /// Moves the queued ops of the first op's disk to the pool if a submit has waited for that disk
    /// since they were queued, here or on another IoThread. Returns true if so.
    fn divert(&mut self, threads: &mut Threads, slots: &Slots) -> bool {
        let first = self.queued.front().and_then(|&slot| slots.file(slot));
        let Some(file) = first.filter(|file| file.blocks_submits()) else { return false };
        self.queued.retain(|&slot| {
            let is_other = !slots.file(slot).is_some_and(|other| std::ptr::eq(other, file));
            if !is_other {
                threads.queue(slot);
            }
            is_other
        });
        true
    }

    /// Fills one iocb for each of the first `count` queued ops, up to the first for another disk.
    /// So the disk that a submit waits for is known. Returns its descriptor.
    fn prepare(&mut self, count: usize, wake: RawFd, done: &mut Completer<'_>) -> RawFd {
        self.iocbs.clear();
        self.iocb_addresses.clear();
        let announced = !self.announcements.are_off();
        let mut file = None;
        for &slot in self.queued.iter().take(count) {
            // Queued slots hold ops: only a completion empties them.
            if let Some(op) = done.slots.submit(slot, done.now) {
                let fd = op.file.as_raw_fd();
                if *file.get_or_insert(fd) != fd {
                    break;
                }
                let mut iocb = iocb(slot, op, fd, wake);
                if !announced {
                    iocb.flags &= !IOCB_FLAG_RESFD;
                    iocb.data |= UNANNOUNCED;
                }
                self.iocbs.push(iocb);
            }
        }
        // Taken only now: a push may have moved the array.
        self.iocb_addresses.extend(self.iocbs.iter_mut().map(std::ptr::from_mut));
        file.unwrap_or(-1)
    }

    /// Handles an `io_submit` that took nothing. Its error concerns the first op alone, or means
    /// that the kernel has no room. Returns true to continue with the rest.
    fn refused(
        &mut self,
        error: libc::c_int,
        threads: &mut Threads,
        done: &mut Completer<'_>,
    ) -> bool {
        if error == libc::EINTR {
            return true;
        }
        if error != libc::EAGAIN {
            self.retry.on_accepted();
            if let Some(slot) = self.queued.pop_front() {
                done.complete(slot, -i64::from(error));
            }
            return true;
        }
        done.stats.submit_again.add(1);
        if self.retry.on_refused(self.in_kernel, done.now) {
            tracing::warn!("Linux AIO accepts no operations (EAGAIN); pool threads take them over");
            self.queued.drain(..).for_each(|slot| threads.queue(slot));
            return true;
        }
        false
    }

    /// Checks for completions without a system call. Always false if the ring cannot be read.
    pub(super) fn has_completions(&self) -> bool {
        match &self.completions {
            Completions::Ring(ring) => self.in_kernel > 0 && ring.has_events(),
            Completions::Getevents(_) => false,
        }
    }

    pub(super) fn harvest(&mut self, done: &mut Completer<'_>) -> u64 {
        if self.in_kernel == 0 {
            return 0;
        }
        let (announcements, stats) = (&mut self.announcements, done.stats);
        let mut deliver = |event: IoEvent| {
            // `prepare` has put the slot into the iocb, perhaps with a mark.
            if let Ok(slot) = u32::try_from(announcements.completed(event.data)) {
                done.complete(slot, event.res);
            }
        };
        let count = match &mut self.completions {
            Completions::Ring(ring) => match ring.consume(&mut deliver) {
                Ok(count) => count,
                Err(_) => {
                    let depth = fits(self.depth, "the depth of a context");
                    self.completions = getevents_from_now_on(depth);
                    return self.harvest(done);
                }
            },
            Completions::Getevents(events) => {
                stats.syscalls.io_getevents.add(1);
                let events = self.context.getevents(events);
                events.iter().for_each(|event| deliver(*event));
                events.len() as u64
            }
        };
        let completed: usize = fits(count, "a count of ops");
        let in_kernel = self.in_kernel;
        assert!(completed <= in_kernel, "Linux AIO has completed {completed} ops of {in_kernel}");
        self.in_kernel -= completed;
        if count > 0 {
            self.retry.on_completion();
        }
        self.announcements.harvested(self.in_kernel, done.now);
        count
    }
}

#[inline]
fn has_pool_threads(file: &OpenFile) -> bool {
    file.blocks_submits() && file.still_blocks_submits(clock::now())
}

#[cold]
fn log_blocked_submit(file: &OpenFile, now: Instant, waited: Duration) {
    if let Some(time) = file.set_blocks_submits(now) {
        file.in_span(|| {
            tracing::warn!(
                "{}: a submit blocked for {} ms and delayed every disk of the IoThread (or this \
                 process was stopped); pool threads serve this disk for {} minutes, then Linux \
                 AIO again",
                file.path().display(),
                waited.as_millis(),
                time.as_secs() / 60
            );
        });
    }
}

/// Builds the iocb for the op in `slot`, whose completion writes the eventfd `wake`.
fn iocb(slot: u32, op: &Op, fd: RawFd, wake: RawFd) -> Iocb {
    let (buf, nbytes, single) = match op.iovecs() {
        [range] => (range.iov_base as u64, range.iov_len as u64, true),
        ranges => (ranges.as_ptr() as u64, ranges.len() as u64, false),
    };
    let (opcode, rw_flags) = match op.kind {
        OpKind::Read => (if single { IOCB_CMD_PREAD } else { IOCB_CMD_PREADV }, 0),
        OpKind::Write { fua } => (
            if single { IOCB_CMD_PWRITE } else { IOCB_CMD_PWRITEV },
            if fua { libc::RWF_DSYNC } else { 0 },
        ),
        _ => {
            let opcode = IOCB_CMD_FDSYNC;
            return Iocb { data: slot.into(), opcode, fd, ..Iocb::announced(wake) };
        }
    };
    let offset = fits(op.offset, "the offset of an op");
    let data = slot.into();
    Iocb { data, rw_flags, opcode, fd, buf, nbytes, offset, ..Iocb::announced(wake) }
}

fn getevents_from_now_on(depth: u32) -> Completions {
    tracing::warn!(
        "the completion ring of Linux AIO has an unknown layout; engine {} uses io_getevents \
         instead, with one system call for each check",
        EngineKind::Aio
    );
    Completions::Getevents(vec![IoEvent::default(); depth as usize])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::mailbox::{Mailbox, TaskKey};
    use crate::executor::task::Owner;
    use crate::op::{FileRef, IoFile, Op};
    use crate::stats::Stats;
    use iomem::{Buffers, RepeatedBlock};
    use rustix::event::{EventfdFlags, eventfd};
    use std::io;
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::OpenOptionsExt;
    use std::rc::Rc;
    use std::sync::Arc;

    struct Bench {
        engine: Aio,
        threads: Threads,
        slots: Slots,
        stats: Stats,
        woken: Vec<TaskKey>,
    }

    /// The kernel shows no flags of an op that it has.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn an_op_is_described_as_the_kernel_wants_it() {
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        let file = IoFile::detached(Arc::new(file.into()));
        let one = || Buffers::aligned(8192, 4096);
        let several = || RepeatedBlock::zeroes(4096, 4096).unwrap().buffers(8192, ()).unwrap();
        let (durable, plain) = (OpKind::Write { fua: true }, OpKind::Write { fua: false });
        for (kind, buffers, opcode, rw_flags) in [
            (OpKind::Read, one(), IOCB_CMD_PREAD, 0),
            (OpKind::Read, several(), IOCB_CMD_PREADV, 0),
            (plain, one(), IOCB_CMD_PWRITE, 0),
            (plain, several(), IOCB_CMD_PWRITEV, 0),
            (durable, one(), IOCB_CMD_PWRITE, libc::RWF_DSYNC),
            (durable, several(), IOCB_CMD_PWRITEV, libc::RWF_DSYNC),
            (OpKind::Flush, Buffers::empty(), IOCB_CMD_FDSYNC, 0),
        ] {
            let ranges = buffers.iovecs().len();
            let op = Op { kind, file: Rc::clone(&file), offset: 12_288, buffers };
            let iocb = iocb(5, &op, 6, 7);
            assert_eq!((iocb.opcode, iocb.rw_flags), (opcode, rw_flags), "{kind:?}, {ranges}");
            assert_eq!((iocb.data, iocb.fd, iocb.resfd), (5, 6, 7), "{kind:?}, {ranges}");
            let (offset, length) = match ranges {
                0 => (0, 0),
                1 => (12_288, 8192),
                _ => (12_288, ranges as u64),
            };
            assert_eq!((iocb.offset, iocb.nbytes), (offset, length), "{kind:?}, {ranges}");
        }
    }

    impl Bench {
        fn new(depth: u32) -> Self {
            let wake = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
            let config = IoThreadConfig { depth, ..IoThreadConfig::default() };
            Self {
                engine: Aio::new(&config, CompletionRing::Userspace).unwrap(),
                threads: Threads::new(&Arc::new(Mailbox::new(wake))),
                slots: Slots::new(depth),
                stats: Stats::default(),
                woken: Vec::new(),
            }
        }

        fn queue(&mut self, file: &FileRef, kind: OpKind, offset: u64) -> u32 {
            let buffers = match kind {
                OpKind::Read | OpKind::Write { .. } => Buffers::aligned(4096, 4096),
                _ => Buffers::empty(),
            };
            let op = Op { kind, file: Rc::clone(file), offset, buffers };
            let slot = self.slots.insert(op, Owner::default());
            if !self.engine.queue(slot, self.slots.op(slot).unwrap()) {
                self.threads.queue(slot);
            }
            slot
        }

        fn round(&mut self) {
            let Self { engine, threads, slots, stats, woken } = self;
            let mut done = Completer { slots, stats, woken, now: Instant::now() };
            while threads.submit(usize::MAX, &mut done)
                || engine.submit(usize::MAX, threads, &mut done)
            {}
            threads.harvest(&mut done);
            engine.harvest(&mut done);
        }

        fn ops(&self) -> usize {
            let Self { engine, threads, .. } = self;
            engine.queued() + engine.in_kernel() + threads.queued() + threads.in_kernel()
        }

        fn finish(&mut self) {
            while self.ops() > 0 {
                self.round();
                std::thread::yield_now();
            }
        }

        fn result(&mut self, slot: u32) -> io::Result<usize> {
            self.slots.take(slot).unwrap().result
        }
    }

    fn file(direct: bool) -> (tempfile::NamedTempFile, FileRef) {
        // In the build folder: the system's temporary folder may be a tmpfs without direct I/O.
        let path = tempfile::NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
        path.as_file().set_len(1 << 20).unwrap();
        let flags = if direct { libc::O_DIRECT } else { 0 };
        let file =
            std::fs::File::options().read(true).write(true).custom_flags(flags).open(path.path());
        (path, IoFile::detached(Arc::new(OwnedFd::from(file.unwrap()).into())))
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn more_ops_than_the_context_holds_all_complete() {
        let (_path, file) = file(true);
        let mut bench = Bench::new(4);
        let slots: Vec<u32> =
            (0..100).map(|i| bench.queue(&file, OpKind::Read, i * 4096)).collect();
        bench.round();
        assert!(bench.engine.in_kernel() <= 4);
        bench.finish();
        for slot in slots {
            assert_eq!(bench.result(slot).unwrap(), 4096);
        }
        assert_eq!(bench.slots.occupied(), 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn ops_that_are_queued_when_their_disk_is_found_to_block_go_to_the_pool() {
        let ((_one, hung), (_other, well)) = (file(true), file(true));
        let mut bench = Bench::new(64);
        let slots: Vec<u32> = (0..20)
            .map(|i| bench.queue(if i % 2 == 0 { &hung } else { &well }, OpKind::Read, 0))
            .collect();
        assert!(hung.set_blocks_submits(Instant::now()).is_some());
        bench.finish();
        for slot in slots {
            assert_eq!(bench.result(slot).unwrap(), 4096);
        }
        assert_eq!(bench.stats.syscalls.io_submit.get(), 1, "one submit has all of the neighbour");
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_rejected_op_fails_alone() {
        let (_path, file) = file(true);
        let write_only = std::fs::File::options().write(true).open(_path.path()).unwrap();
        let write_only = IoFile::detached(Arc::new(OwnedFd::from(write_only).into()));
        let mut bench = Bench::new(64);
        let slots: Vec<u32> = (0..9)
            .map(|i| bench.queue(if i % 4 == 0 { &write_only } else { &file }, OpKind::Read, 0))
            .collect();
        bench.finish();
        for (i, slot) in slots.into_iter().enumerate() {
            match bench.result(slot) {
                Ok(bytes) => assert!(i % 4 != 0 && bytes == 4096),
                Err(error) => {
                    assert!(i % 4 == 0, "op {i} failed: {error}");
                    assert_eq!(error.raw_os_error(), Some(libc::EBADF));
                }
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn io_getevents_serves_a_ring_that_cannot_be_read() {
        let (_path, file) = file(true);
        let mut bench = Bench::new(16);
        bench.engine.completions = getevents_from_now_on(16);
        let slots: Vec<u32> = (0..40).map(|i| bench.queue(&file, OpKind::Read, i * 4096)).collect();
        bench.finish();
        for slot in slots {
            assert_eq!(bench.result(slot).unwrap(), 4096);
        }
        assert!(bench.stats.syscalls.io_getevents.get() > 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn the_kernel_here_gives_a_readable_ring_and_fdsync() {
        let (_path, file) = file(true);
        let mut bench = Bench::new(16);
        assert!(matches!(bench.engine.completions, Completions::Ring(_)));
        assert!(bench.engine.has_fdsync);
        let write = bench.queue(&file, OpKind::Write { fua: true }, 0);
        let flush = bench.queue(&file, OpKind::Flush, 0);
        bench.finish();
        assert_eq!(bench.result(write).unwrap(), 4096);
        assert_eq!(bench.result(flush).unwrap(), 0);
        assert_eq!(bench.stats.syscalls.io_getevents.get(), 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn no_timer_stays_behind_an_op_that_was_refused_and_then_failed() {
        let (_path, file) = file(true);
        let mut bench = Bench::new(16);
        let slot = bench.queue(&file, OpKind::Read, 0);
        let Bench { engine, threads, slots, stats, woken } = &mut bench;
        let mut done = Completer { slots, stats, woken, now: Instant::now() };
        assert!(!engine.refused(libc::EAGAIN, threads, &mut done) && engine.retry_at().is_some());
        assert!(engine.refused(libc::EBADF, threads, &mut done));
        assert_eq!(engine.retry_at(), None, "an idle loop would not sleep");
        assert_eq!(bench.result(slot).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_kernel_without_room_is_asked_again_and_in_the_end_the_pool_serves() {
        let (_path, file) = file(true);
        let mut bench = Bench::new(16);
        let slot = bench.queue(&file, OpKind::Read, 0);
        let mut now = Instant::now();
        let mut waits = Vec::new();
        while bench.threads.in_kernel() == 0 {
            let Bench { engine, threads, slots, stats, woken } = &mut bench;
            let mut done = Completer { slots, stats, woken, now };
            if engine.refused(libc::EAGAIN, threads, &mut done) {
                threads.submit(usize::MAX, &mut done);
            }
            if let Some(when) = engine.retry_at() {
                assert!(when > now, "a retry must not spin");
                waits.push(when - now);
                now = when;
            }
            assert!(
                waits.len() <= crate::engine::retry::RETRIES as usize,
                "the pool never took over"
            );
        }
        assert!(waits.is_sorted() && waits.len() == crate::engine::retry::RETRIES as usize);
        bench.finish();
        assert_eq!(bench.result(slot).unwrap(), 4096);
    }
}
