//! Engine `io_uring`: one ring for submissions, completions and everything the loop waits for.
//!
//! A turn that has to sleep costs one system call, which submits, lets the kernel post finished
//! ops, and waits. Multishot polls in the same ring watch all other eventfds, including that of the
//! pool and Linux AIO. These eventfds are never read.

mod fixed;
mod op_ring;
mod watches;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use iomem::fits;
use rustix::fd::AsFd;
use rustix::io::Errno;

use super::kernel::abi::Setup;
use super::kernel::{Interest, Ring};
use super::retry::Retry;
use super::threads::Threads;
use crate::clock;
use crate::config::IoThreadConfig;
use crate::error::Error;
use crate::file::io_file::NOT_REGISTERED;
use crate::op::{Completer, IoFile, Op, OpKind};
use crate::stats::Stats;
use fixed::FixedFiles;
use op_ring::OpRing;
use watches::{EntryMeaning, Watches};

/// The result of a discard in the ring that the pool must do instead.
const BUSY: i32 = -libc::EBUSY;
const UNSUPPORTED: i32 = -libc::EOPNOTSUPP;

/// The longest wait while the kernel takes no submission entries.
const REFUSED_WAIT: Duration = Duration::from_millis(1);

/// A pause lasts the time spent waiting for polled ops so far, divided by this. A slow device costs
/// little CPU time, and its ops become little slower.
const PAUSE_PART: u32 = 8;
/// The shortest pause. Timers are late by about as much, so shorter ones make no sense.
const PAUSE_MIN: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(10);

/// The time that busy-polling lets deferred completions gather, for each op in the kernel up to
/// [`GRACE_OPS`].
const GRACE_FOR_EACH: Duration = Duration::from_nanos(250);
const GRACE_OPS: usize = 64;

pub(crate) struct IoUring {
    /// The ring for everything but polled ops. The loop sleeps in it.
    main: OpRing,
    /// The ring for reads and writes whose completions are polled for. It takes nothing else.
    polled: Option<OpRing>,
    depth: usize,
    retry: Retry,
    watches: Watches,
    files: FixedFiles,
    /// The time at which busy-polling first saw that the kernel has deferred completions.
    deferred_since: Option<Instant>,
    /// True if devices can discard through the ring (Linux 6.12).
    has_discard: bool,
    gathers_completions: bool,
    pauses: bool,
}

impl IoUring {
    /// Sets up a ring for `config.depth` ops in the kernel, for the calling thread.
    pub(super) fn new(config: &IoThreadConfig, sqpoll: bool, iopoll: bool) -> Result<Self, Error> {
        let unavailable = |error| Error::IoUringUnavailable { error };
        let &IoThreadConfig { depth, embedded, .. } = config;
        let setup = Setup { depth, sqpoll, embedded, polled_beside: None };
        let main = Ring::new(&setup).map_err(unavailable)?;
        let polled = if iopoll {
            let setup = Setup { polled_beside: Some(main.as_fd()), ..setup };
            Some(OpRing::new(Ring::new(&setup).map_err(unavailable)?))
        } else {
            None
        };
        Ok(Self {
            has_discard: main.has_uring_cmd(),
            main: OpRing::new(main),
            polled,
            depth: config.depth as usize,
            retry: Retry::default(),
            watches: Watches::default(),
            files: FixedFiles::default(),
            deferred_since: None,
            gathers_completions: config.gathers_completions,
            pauses: config.pauses,
        })
    }

    fn rings(&mut self) -> impl Iterator<Item = &mut OpRing> {
        [Some(&mut self.main), self.polled.as_mut()].into_iter().flatten()
    }

    pub(super) fn watch(
        &mut self,
        fd: BorrowedFd<'_>,
        token: u64,
        interest: Interest,
    ) -> Result<(), Errno> {
        self.watches.add(&mut self.main.ring, fd, token, interest)
    }

    pub(super) fn unwatch(&mut self, token: u64) {
        self.watches.remove(&mut self.main.ring, token);
    }

    pub(super) fn register_file(&mut self, file: &IoFile) {
        if self.polled.is_some() {
            file.log_not_polled();
        }
        let Some(index) = self.files.take_index() else { return };
        let fd = file.as_raw_fd();
        if self.rings().all(|ring| ring.ring.update_file(index, fd).is_ok()) {
            file.set_registered(fits(index, "a place in the table of files"));
        } else {
            self.unregister(index);
        }
    }

    pub(super) fn unregister_file(&mut self, registered: i32) {
        if let Ok(index) = u32::try_from(registered) {
            self.unregister(index);
        }
    }

    fn unregister(&mut self, index: u32) {
        self.rings().for_each(|ring| drop(ring.ring.update_file(index, NOT_REGISTERED)));
        self.files.give_back(index);
    }

    pub(super) fn register_memory(&mut self, memory: &[libc::iovec]) -> io::Result<()> {
        self.main.register_memory(memory)?;
        let Some(polled) = &mut self.polled else { return Ok(()) };
        polled.register_memory(memory).inspect_err(|_| self.main.unregister_memory(memory))
    }

    pub(super) fn unregister_memory(&mut self, memory: &[libc::iovec]) {
        self.rings().for_each(|ring| ring.unregister_memory(memory));
    }

    /// Queues an op for the next submit. Returns false if the op is one for the pool.
    pub(super) fn queue(&mut self, slot: u32, op: &Op) -> bool {
        match op.kind {
            OpKind::ZeroBlocks { .. } | OpKind::FindExtent { .. } => return false,
            OpKind::DiscardBlocks { .. } if !self.has_discard => return false,
            OpKind::Read | OpKind::Write { .. } => match &mut self.polled {
                Some(polled) if op.file.may_be_polled() => polled.queue(slot),
                _ => self.main.queue(slot),
            },
            _ => self.main.queue(slot),
        }
        true
    }

    pub(super) fn queued(&self) -> usize {
        self.sum(OpRing::queued)
    }

    pub(super) fn in_kernel(&self) -> usize {
        self.sum(OpRing::in_kernel)
    }

    /// Sums up both rings.
    #[inline]
    fn sum(&self, number: impl Fn(&OpRing) -> usize) -> usize {
        number(&self.main) + self.polled.as_ref().map_or(0, &number)
    }

    fn polled_in_kernel(&self) -> usize {
        self.polled.as_ref().map_or(0, OpRing::in_kernel)
    }

    fn unsubmitted(&mut self) -> usize {
        self.rings().map(|ring| ring.ring.unsubmitted()).sum()
    }

    /// Returns true only if the rings are empty, because events of eventfds come by harvest.
    pub(super) fn is_quiet(&self) -> bool {
        self.queued() == 0
            && self.in_kernel() == 0
            && !self.main.ring.has_work()
            && self.watches.arm_at().is_none()
    }

    pub(super) fn has_unannounced_work(&mut self) -> bool {
        // A submission thread makes room without an event. The next wait asks it for room.
        let lacks_entries =
            self.queued() > 0 && self.in_kernel() < self.depth && !self.retry.awaits_event();
        lacks_entries
            || self.polled_in_kernel() > 0
            || self.rings().any(|ring| ring.ring.has_unseen_entries())
    }

    pub(super) fn retry_at(&self) -> Option<Instant> {
        [self.retry.retry_at(), self.watches.arm_at()].into_iter().flatten().min()
    }

    pub(super) fn submit(&mut self, max: usize, done: &mut Completer<'_>) -> bool {
        self.watches.rearm_due(&mut self.main.ring, done.now);
        if self.retry.is_blocked(done.now) {
            return false;
        }
        let pushed = self.push_queued(max, done);
        if pushed == 0 && self.unsubmitted() == 0 {
            return false;
        }
        let result = self.rings().try_for_each(|ring| ring.submit(done.stats));
        done.now = clock::now();
        match result {
            Ok(()) => {
                self.retry.on_accepted();
                pushed > 0 && self.queued() > 0
            }
            Err(error) => self.refused(&error, done),
        }
    }

    /// Fills submission entries for queued ops, as many as `max`, the depth and the rings allow.
    fn push_queued(&mut self, max: usize, done: &mut Completer<'_>) -> usize {
        let in_kernel = self.in_kernel();
        let room = self.depth.saturating_sub(in_kernel).min(max);
        let pushed = self.rings().fold(0, |sum, ring| sum + ring.push(room - sum, done));
        // Entries that an interrupted submit left behind complete only when they are submitted.
        if pushed == 0 && in_kernel >= self.depth && self.queued() > 0 && self.unsubmitted() == 0 {
            self.retry.on_full();
        }
        pushed
    }

    /// Like `push_queued`, but makes room in rings that are full. A submission thread does not
    /// report that it has taken entries, and all ops in the kernel may belong to a hung disk. A
    /// loop that sleeps on ops without an entry might never wake.
    fn push_before_sleep(&mut self, max: usize, done: &mut Completer<'_>) {
        let mut left = max;
        loop {
            left -= self.push_queued(left, done);
            let has_room = left > 0 && self.in_kernel() < self.depth;
            let stats = done.stats;
            if !has_room || !self.rings().any(|ring| ring.makes_room(stats)) {
                return;
            }
        }
    }

    /// Handles a submit that the kernel did not take. The entries stay in the submission ring.
    /// Returns true to submit again at once.
    fn refused(&mut self, error: &io::Error, done: &mut Completer<'_>) -> bool {
        if error.raw_os_error() == Some(libc::EINTR) {
            return true;
        }
        done.stats.submit_again.add(1);
        // EBUSY: completions that found the ring full wait for a harvest. Entries in the submission
        // ring cannot be taken back, so the pool never takes over: the submit is tried again.
        let others = self.in_kernel().saturating_sub(self.unsubmitted());
        if self.retry.on_refused(others, done.now) {
            tracing::warn!("io_uring does not accept operations: {error}; trying again");
        }
        false
    }

    /// Returns true if busy-polling should end. Posting deferred completions costs a system call,
    /// so they gather first: the longer, the more ops may still join.
    pub(super) fn has_completions(&mut self, now: Instant, stats: &Stats) -> bool {
        if self.main.ring.has_entries() {
            return true;
        }
        if let Some(polled) = &mut self.polled
            && polled.has_polled_completions(stats)
        {
            return true;
        }
        if !self.main.ring.has_completions() {
            self.deferred_since = None;
            return false;
        }
        let since = *self.deferred_since.get_or_insert(now);
        now.saturating_duration_since(since) >= self.grace()
    }

    fn grace(&self) -> Duration {
        if !self.gathers_completions {
            return Duration::ZERO;
        }
        let ops = fits(self.main.in_kernel().min(GRACE_OPS), "a number of ops");
        GRACE_FOR_EACH * ops
    }

    /// Makes the kernel post deferred completions, unless busy-polling still lets them gather.
    fn post_deferred(&mut self, done: &Completer<'_>) {
        match self.deferred_since {
            Some(since) if done.now.saturating_duration_since(since) < self.grace() => {}
            _ => {
                self.deferred_since = None;
                self.main.ring.post_deferred(done.stats);
            }
        }
    }

    /// Harvests both rings. Ops that the kernel refuses here go to `threads`.
    pub(super) fn harvest(
        &mut self,
        threads: &mut Threads,
        done: &mut Completer<'_>,
        events: &mut Vec<u64>,
    ) -> u64 {
        self.post_deferred(done);
        let mut found = 0;
        let mut entries = self.main.begin_harvest();
        for entry in entries.drain(..) {
            match self.watches.classify(&mut self.main.ring, &entry, done.now) {
                EntryMeaning::Op(slot) => {
                    found += 1;
                    self.complete(slot, entry.result(), threads, done);
                }
                EntryMeaning::Event(token) => events.push(token),
                EntryMeaning::Nothing => {}
            }
        }
        self.main.end_harvest(entries, found);
        found += self.harvest_polled(done);
        if found > 0 {
            self.retry.on_completion();
        }
        found as u64
    }

    fn complete(
        &mut self,
        slot: u32,
        result: i32,
        threads: &mut Threads,
        done: &mut Completer<'_>,
    ) {
        let is_discard = |op: &Op| matches!(op.kind, OpKind::DiscardBlocks { .. });
        if matches!(result, BUSY | UNSUPPORTED) && done.slots.op(slot).is_some_and(is_discard) {
            // Kernels before 6.12 discard by ioctl only, and the pool does that. Later ones refuse
            // a discard in the ring during a write to the same page of the page cache; the ioctl
            // waits for the write.
            self.has_discard &= result == BUSY;
            threads.queue(slot);
            return;
        }
        done.complete(slot, i64::from(result));
    }

    fn harvest_polled(&mut self, done: &mut Completer<'_>) -> usize {
        let Some(polled) = &mut self.polled else { return 0 };
        polled.poll_once(done.stats);
        let mut entries = polled.begin_harvest();
        let found = entries.len();
        for entry in entries.drain(..) {
            // Only ops have entries in this ring, with their slots as user data.
            let Ok(slot) = u32::try_from(entry.user_data()) else { continue };
            match -entry.result() {
                libc::EOPNOTSUPP => {
                    if let Some(file) = done.slots.file(slot) {
                        file.stop_polling(
                            "its file system or device does not support polling (EOPNOTSUPP)",
                        );
                    }
                    self.main.queue(slot);
                }
                // The device's queues for polling have no room; its normal queues have some.
                libc::EAGAIN => self.main.queue(slot),
                _ => {
                    done.stats.polled.add(1);
                    done.complete(slot, i64::from(entry.result()));
                }
            }
        }
        polled.end_harvest(entries, found);
        found
    }

    pub(super) fn wait(
        &mut self,
        deadline: Option<Instant>,
        max: usize,
        done: &mut Completer<'_>,
    ) -> Result<(), Error> {
        if !self.retry.is_blocked(done.now) {
            self.push_before_sleep(max, done);
        }
        match self.wait_for_rings(deadline, done.stats) {
            Ok(()) => {
                self.retry.on_accepted();
                Ok(())
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR | libc::ETIME) => Ok(()),
                Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => {
                    self.refused(&error, done);
                    let soon = clock::now() + REFUSED_WAIT;
                    let until = deadline.map_or(soon, |deadline| deadline.min(soon));
                    self.main.ring.wait_without_submit(until, done.stats);
                    Ok(())
                }
                _ => Err(Error::System { action: "wait for events in io_uring", error }),
            },
        }
    }

    /// Submits, and waits for the first completion or event in either ring. A polled ring ends no
    /// sleep: while it has ops, both rings are checked in turn.
    fn wait_for_rings(&mut self, deadline: Option<Instant>, stats: &Stats) -> io::Result<()> {
        let main = &mut self.main.ring;
        let Some(polled) = self.polled.as_mut().filter(|ring| ring.in_kernel() > 0) else {
            return main.submit_and_wait(deadline, stats);
        };
        polled.submit(stats)?;
        let since = clock::now();
        let mut pause = Duration::ZERO;
        loop {
            let found = polled.has_polled_completions(stats);
            let until = clock::now() + if found { Duration::ZERO } else { pause };
            let until = deadline.map_or(until, |deadline| deadline.min(until));
            if !pause.is_zero() || main.has_work() {
                match main.submit_and_wait(Some(until), stats) {
                    Err(error) if error.raw_os_error() == Some(libc::ETIME) => {}
                    result => result?,
                }
            }
            let now = clock::now();
            if found || main.has_entries() || deadline.is_some_and(|deadline| deadline <= now) {
                return Ok(());
            }
            let part = (now - since) / PAUSE_PART;
            pause =
                if !self.pauses || part < PAUSE_MIN { Duration::ZERO } else { part.min(PAUSE_MAX) };
        }
    }
}

impl AsFd for IoUring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.main.ring.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::mailbox::{Mailbox, TaskKey};
    use crate::executor::task::Owner;
    use crate::op::Slots;
    use iomem::Buffers;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::OwnedFd;
    use std::rc::Rc;
    use std::sync::Arc;

    /// The first of the descriptor numbers that nothing else here uses.
    const HIGH: i32 = 900;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_watch_that_ends_with_an_error_is_armed_again() {
        let config = IoThreadConfig { depth: 16, ..IoThreadConfig::default() };
        let new = || eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let high = |fd: rustix::fd::OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, HIGH).unwrap();
        let mut engine = IoUring::new(&config, false, false).unwrap();
        let mut threads = Threads::new(&Arc::new(Mailbox::new(new())));
        let watched = high(new());
        engine.watch(watched.as_fd(), 7, Interest::Readable).unwrap();
        // The kernel finds nothing under the number, and then the eventfd.
        drop(watched);
        let mut slots = Slots::new(16);
        let stats = Stats::default();
        let (mut woken, mut events) = (Vec::<TaskKey>::new(), Vec::new());
        let mut round = |engine: &mut IoUring, now| {
            let mut done = Completer { slots: &mut slots, stats: &stats, woken: &mut woken, now };
            engine.submit(usize::MAX, &mut done);
            engine.harvest(&mut threads, &mut done, &mut events);
            events.contains(&7)
        };
        let mut now = Instant::now();
        while engine.retry_at().is_none() {
            round(&mut engine, now);
        }
        assert!(!engine.is_quiet(), "no thread would submit");
        let watched = high(new());
        rustix::io::write(&watched, &1u64.to_ne_bytes()).unwrap();
        while !round(&mut engine, now) {
            now = engine.retry_at().unwrap_or(now);
        }
        assert_eq!(engine.retry_at(), None);
    }

    /// A discard waits for a write to the same page only in the pool, and a kernel that has no
    /// discards in rings is not asked twice.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_discard_that_a_ring_refuses_goes_to_the_pool() {
        let discard = OpKind::DiscardBlocks { len: 4096 };
        let eio = -libc::EIO;
        for (kind, result, goes_to_pool, has_discard) in [
            (discard, UNSUPPORTED, true, false),
            (discard, BUSY, true, true),
            (discard, eio, false, true),
            (discard, 0, false, true),
            (OpKind::Flush, UNSUPPORTED, false, true),
            (OpKind::Flush, BUSY, false, true),
        ] {
            let config = IoThreadConfig { depth: 16, ..IoThreadConfig::default() };
            let mut engine = IoUring::new(&config, false, false).unwrap();
            engine.has_discard = true;
            let mailbox = Mailbox::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
            let mut threads = Threads::new(&Arc::new(mailbox));
            let (mut slots, stats) = (Slots::new(16), Stats::default());
            let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
            let file = IoFile::detached(Arc::new(file.into()));
            let insert = |slots: &mut Slots, kind| {
                let file = Rc::clone(&file);
                let op = Op { kind, file, offset: 0, buffers: Buffers::empty() };
                slots.insert(op, Owner::default())
            };
            let slot = insert(&mut slots, kind);
            assert!(engine.queue(slot, slots.op(slot).unwrap()));
            let (mut woken, now) = (Vec::<TaskKey>::new(), Instant::now());
            let mut done = Completer { slots: &mut slots, stats: &stats, woken: &mut woken, now };
            engine.complete(slot, result, &mut threads, &mut done);
            assert_eq!(threads.queued() == 1, goes_to_pool, "{kind:?}: {result}");
            assert_eq!(engine.queued(), 1, "{kind:?}: {result} goes to the ring again");
            let next = insert(&mut slots, discard);
            let is_taken = engine.queue(next, slots.op(next).unwrap());
            assert_eq!(is_taken, has_discard, "a discard after {kind:?}: {result}");
        }
    }

    /// Otherwise nothing would ever submit it.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_completion_makes_room_for_an_op_above_the_limit() {
        let config = IoThreadConfig { depth: 1, ..IoThreadConfig::default() };
        let mut engine = IoUring::new(&config, false, false).unwrap();
        let mailbox = Mailbox::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let mut threads = Threads::new(&Arc::new(mailbox));
        let (mut slots, stats) = (Slots::new(2), Stats::default());
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let file = IoFile::detached(Arc::new(file.into()));
        for _ in 0..2 {
            let (kind, file) = (OpKind::Flush, Rc::clone(&file));
            let op = Op { kind, file, offset: 0, buffers: Buffers::empty() };
            let slot = slots.insert(op, Owner::default());
            engine.queue(slot, slots.op(slot).unwrap());
        }
        let (mut woken, mut events) = (Vec::<TaskKey>::new(), Vec::new());
        let now = Instant::now();
        let mut done = Completer { slots: &mut slots, stats: &stats, woken: &mut woken, now };
        assert!(engine.submit(usize::MAX, &mut done));
        assert!(!engine.submit(usize::MAX, &mut done) && engine.retry.awaits_event());
        while engine.harvest(&mut threads, &mut done, &mut events) == 0 {}
        assert!(!engine.retry.awaits_event());
        engine.submit(usize::MAX, &mut done);
        assert_eq!((engine.queued(), engine.in_kernel()), (0, 1));
        while engine.harvest(&mut threads, &mut done, &mut events) == 0 {}
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn an_op_that_found_no_entry_is_unannounced_work_until_it_awaits_an_event() {
        let config = IoThreadConfig { depth: 16, ..IoThreadConfig::default() };
        let mut engine = IoUring::new(&config, false, false).unwrap();
        assert!(!engine.has_unannounced_work());
        engine.main.queue(0);
        assert!(engine.has_unannounced_work(), "no event submits it");
        engine.retry.on_full();
        assert!(!engine.has_unannounced_work(), "a completion submits it");
    }
}
