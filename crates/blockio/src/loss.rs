//! Whether data that was written to a file may be lost: the one place that decides it.
//!
//! Linux reports a failed write-back once for each open file, to the flush or FUA write that looks
//! first, whoever wrote the data. Then the lost pages count as clean, and later flushes succeed.
//! The rule that follows:
//!
//! * A loss is remembered. From then on every flush and every FUA write fails, on all IoThreads,
//!   until the file is opened anew.
//! * A flush that fails is a loss.
//! * A FUA write that fails is answered with its error, which alone is not a loss. But it may
//!   be about other data: it is a loss if writes without FUA were acknowledged that no later flush
//!   has brought to stable storage, or if something was reported as being on stable storage while
//!   the write was in the kernel, or other FUA writes are there with it.
//! * A flush that succeeds waits for the flushes that are in the kernel with it: one of them may
//!   receive the report. FUA writes do not wait, so one of several that are in the kernel together
//!   may succeed while another receives the report of its loss; what comes later fails.
//! * Ops that the kernel refused, or that were interrupted, before the file saw them say nothing.
//!
//! With direct I/O on a block device there is no write-back: each op receives its own errors alone.

use std::future::poll_fn;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Instant;

use crate::op_kind::OpKind;

/// What an op that is not tracked carries.
pub(crate) const NOT_TRACKED: u64 = 0;
/// What a FUA write carries. Flushes have their numbers, which are greater.
const FUA: u64 = 1;

/// Of the word about FUA writes: how many are in the kernel, and whether something was said to be
/// on stable storage since it had none.
const COUNT: u64 = u32::MAX as u64;
const SAID: u64 = 1 << 63;

#[derive(Debug)]
pub(crate) struct Loss {
    /// The errno of the first flush or FUA write after which data may be lost; 0: none so far.
    errno: AtomicI32,
    /// An op may receive an error that concerns others.
    is_shared: bool,
    /// A write without FUA was noted since a flush has begun, so another need not be.
    is_noted: AtomicBool,
    /// FUA writes in the kernel, if reports are shared.
    fua: AtomicU64,
    flushes: Mutex<Flushes>,
}

#[derive(Debug)]
struct Flushes {
    /// The number of the flush that has begun last.
    begun: u64,
    /// That number when a write without FUA was noted last.
    written: u64,
    /// The greatest number of a flush that has succeeded: it covers what was noted before it began.
    succeeded: u64,
    in_kernel: Vec<u64>,
    /// Tasks that wait for the end of all flushes up to a number.
    waiting: Vec<(u64, Waker)>,
    /// When a FUA write failed that was no loss, as far as was known then, and its errno.
    fua_failed: Option<(Instant, i32)>,
}

impl Loss {
    /// `is_shared`: whether an op may receive an error that concerns others.
    pub(crate) fn new(is_shared: bool) -> Self {
        let flushes = Flushes {
            begun: FUA,
            written: 0,
            succeeded: FUA,
            in_kernel: Vec::new(),
            waiting: Vec::new(),
            fua_failed: None,
        };
        Self {
            errno: AtomicI32::new(0),
            is_shared,
            is_noted: AtomicBool::new(false),
            fua: AtomicU64::new(0),
            flushes: Mutex::new(flushes),
        }
    }

    /// Fails once data may be lost.
    #[inline]
    pub(crate) fn check(&self) -> io::Result<()> {
        match self.errno.load(Ordering::Acquire) {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// A flush or FUA write goes to the kernel. Returns what [`ended`](Self::ended) must be given.
    pub(crate) fn begins(&self, kind: OpKind) -> u64 {
        match kind {
            OpKind::Flush => {
                let mut flushes = self.flushes();
                // Whoever sees a write complete from now on notes it: it may be too late for this.
                self.is_noted.store(false, Ordering::SeqCst);
                flushes.begun += 1;
                let number = flushes.begun;
                flushes.in_kernel.push(number);
                number
            }
            OpKind::Write { fua: true } if self.is_shared => {
                self.fua.fetch_add(1, Ordering::AcqRel);
                FUA
            }
            _ => NOT_TRACKED,
        }
    }

    /// The kernel has answered a flush or FUA write; `errno` is 0 if it has succeeded. Called at
    /// the harvest, so what completed before is known before any task goes on. True: from now on
    /// data may be lost.
    pub(crate) fn ended(&self, tracked: u64, kind: OpKind, errno: i32, now: Instant) -> bool {
        match kind {
            OpKind::Flush => self.flush_ended(tracked, errno),
            _ => self.fua_ended(tracked, errno, now),
        }
    }

    fn flush_ended(&self, number: u64, errno: i32) -> bool {
        let is_new = errno != 0 && !never_reached_the_file(errno) && self.remember(errno);
        if errno == 0 && self.is_shared {
            // Before it counts as a success: a FUA write that fails looks in the other order.
            self.said_stable();
        }
        let mut flushes = self.flushes();
        if errno == 0 {
            flushes.succeeded = flushes.succeeded.max(number);
        }
        flushes.in_kernel.retain(|&other| other != number);
        let wakers = flushes.who_may_go_on();
        drop(flushes);
        wakers.into_iter().for_each(Waker::wake);
        is_new
    }

    fn said_stable(&self) {
        let with_it = |word: u64| (word & COUNT > 0).then_some(word | SAID);
        // An error says that there are no FUA writes.
        let _ = self.fua.fetch_update(Ordering::AcqRel, Ordering::Acquire, with_it);
    }

    fn fua_ended(&self, tracked: u64, errno: i32, now: Instant) -> bool {
        let is_told = errno != 0 && errno != libc::EFBIG && !never_reached_the_file(errno);
        let mut flushes = is_told.then(|| self.flushes());
        let is_unflushed = flushes.as_ref().is_some_and(|flushes| flushes.are_outdone());
        let is_beside = tracked == FUA && self.fua_leaves(errno == 0);
        if !is_told {
            return false;
        }
        if is_unflushed || is_beside {
            return self.remember(errno);
        }
        if let Some(flushes) = &mut flushes {
            // A write may have completed without having been seen.
            flushes.fua_failed = Some((now, errno));
        }
        false
    }

    /// Whether others were, or are, in the kernel with a FUA write that leaves it.
    fn fua_leaves(&self, succeeds: bool) -> bool {
        let without_it = |word: u64| {
            let left = (word & COUNT).saturating_sub(1);
            let said = if succeeds { SAID } else { word & SAID };
            Some(if left == 0 { 0 } else { left | said })
        };
        let before = self.fua.fetch_update(Ordering::AcqRel, Ordering::Acquire, without_it);
        before.is_ok_and(|word| word & SAID != 0 || word & COUNT > 1)
    }

    /// Notes that the kernel has answered a write that may not be on stable storage. True: from
    /// now on data may be lost.
    #[inline]
    pub(crate) fn written(&self, submitted: Option<Instant>) -> bool {
        !self.is_noted.load(Ordering::SeqCst) && self.note_written(submitted)
    }

    #[cold]
    fn note_written(&self, submitted: Option<Instant>) -> bool {
        let mut flushes = self.flushes();
        flushes.written = flushes.begun;
        match (flushes.fua_failed, submitted) {
            // It was in the kernel when that FUA write failed, and may be what the error was about.
            (Some((when, errno)), Some(submitted)) if submitted <= when => self.remember(errno),
            (Some(_), _) => false,
            (None, _) => {
                self.is_noted.store(true, Ordering::SeqCst);
                false
            }
        }
    }

    /// After a flush: waits for those that are in the kernel now, where they may have been told
    /// what this one was not.
    pub(crate) fn others(&self) -> Option<u64> {
        let flushes = self.flushes();
        (self.is_shared && !flushes.in_kernel.is_empty()).then_some(flushes.begun)
    }

    /// Waits for the end of all flushes up to a number.
    pub(crate) async fn wait_for(&self, number: u64) {
        poll_fn(|cx| {
            let mut flushes = self.flushes();
            if flushes.are_over(number) {
                return Poll::Ready(());
            }
            let is_known =
                |(other, waker): &(u64, Waker)| *other == number && waker.will_wake(cx.waker());
            if !flushes.waiting.iter().any(is_known) {
                flushes.waiting.push((number, cx.waker().clone()));
            }
            Poll::Pending
        })
        .await;
    }

    /// The file comes from another process, whose writes no flush may have covered.
    pub(crate) fn others_have_written(&self) {
        self.note_written(None);
    }

    /// Data may be lost from now on, as another process has learnt from the file.
    pub(crate) fn inherit(&self, errno: i32) {
        self.remember(errno);
    }

    fn remember(&self, errno: i32) -> bool {
        self.errno.compare_exchange(0, errno, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// As if the file were opened anew, which is the way out. No op may be in the kernel.
    #[cfg(ringhaul_sim)]
    pub(crate) fn forget(&self) {
        self.errno.store(0, Ordering::Release);
        let mut flushes = self.flushes();
        flushes.fua_failed = None;
        flushes.written = 0;
        self.is_noted.store(false, Ordering::SeqCst);
    }

    fn flushes(&self) -> MutexGuard<'_, Flushes> {
        self.flushes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Flushes {
    /// Whether writes were noted that no flush has covered.
    fn are_outdone(&self) -> bool {
        self.written >= self.succeeded
    }

    fn are_over(&self, number: u64) -> bool {
        self.in_kernel.iter().all(|&other| other > number)
    }

    fn who_may_go_on(&mut self) -> Vec<Waker> {
        let waiting = std::mem::take(&mut self.waiting);
        let (over, waiting): (Vec<_>, _) =
            waiting.into_iter().partition(|(number, _)| self.are_over(*number));
        self.waiting = waiting;
        over.into_iter().map(|(_, waker)| waker).collect()
    }
}

/// Errors of ops that were refused or interrupted before the file saw them.
fn never_reached_the_file(errno: i32) -> bool {
    matches!(
        errno,
        libc::EINTR
            | libc::EAGAIN
            | libc::EINVAL
            | libc::EBADF
            | libc::EFAULT
            | libc::EOPNOTSUPP
            | libc::ENOSYS
            | libc::ECANCELED
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::task::{Context, Wake};
    use std::time::Duration;

    const FLUSH: OpKind = OpKind::Flush;
    const FUA_WRITE: OpKind = OpKind::Write { fua: true };

    /// A file of which an op may be told what concerns others, and a clock.
    struct Scene {
        loss: Loss,
        now: Instant,
    }

    impl Scene {
        fn new() -> Self {
            Self { loss: Loss::new(true), now: Instant::now() }
        }

        fn tick(&mut self) -> Instant {
            self.now += Duration::from_millis(1);
            self.now
        }

        fn end(&mut self, kind: OpKind, tracked: u64, errno: i32) -> bool {
            let now = self.tick();
            self.loss.ended(tracked, kind, errno, now)
        }

        fn run(&mut self, kind: OpKind, errno: i32) -> bool {
            let tracked = self.loss.begins(kind);
            self.end(kind, tracked, errno)
        }

        fn write(&mut self) -> bool {
            let submitted = self.tick();
            self.loss.written(Some(submitted))
        }

        fn is_lost(&self) -> bool {
            self.loss.check().is_err()
        }
    }

    #[test]
    fn a_loss_is_remembered_and_what_is_none_is_not() {
        let mut scene = Scene::new();
        for errno in [libc::EINTR, libc::EAGAIN, libc::EINVAL, libc::EOPNOTSUPP] {
            scene.write();
            assert!(!scene.run(FLUSH, errno) && !scene.run(FUA_WRITE, errno), "{errno}");
        }
        assert!(!scene.run(FUA_WRITE, libc::EFBIG) && !scene.is_lost());
        assert!(scene.run(FLUSH, libc::ENOSPC), "it is told");
        assert!(!scene.run(FLUSH, libc::EIO), "it is told once");
        scene.run(FLUSH, 0);
        let error = scene.loss.check().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "the first is remembered");
    }

    #[test]
    fn a_failed_fua_write_is_a_loss_only_of_what_no_flush_has_covered() {
        for errno in [libc::EIO, libc::ENOSPC] {
            let mut scene = Scene::new();
            assert!(!scene.run(FUA_WRITE, 0) && !scene.run(FUA_WRITE, errno));
            assert!(!scene.is_lost(), "there were none but FUA writes");
            scene.write();
            scene.run(FLUSH, 0);
            assert!(!scene.run(FUA_WRITE, errno) && !scene.is_lost(), "all else was flushed");
            let flush = scene.loss.begins(FLUSH);
            scene.write();
            scene.end(FLUSH, flush, 0);
            assert!(scene.run(FUA_WRITE, errno) && scene.is_lost(), "the flush began too early");
        }
    }

    #[test]
    fn a_write_that_was_under_way_when_a_fua_write_failed_may_be_lost() {
        let mut scene = Scene::new();
        let submitted = [scene.tick(), scene.tick()];
        scene.run(FUA_WRITE, libc::EIO);
        assert!(!scene.write() && !scene.write(), "they came later");
        assert!(scene.loss.written(Some(submitted[0])) && scene.is_lost());
        assert!(!scene.loss.written(Some(submitted[1])), "it is told once");
    }

    #[test]
    fn fua_writes_that_are_in_the_kernel_together_may_be_told_of_each_other() {
        for fails_first in [true, false] {
            let mut scene = Scene::new();
            let both = [scene.loss.begins(FUA_WRITE), scene.loss.begins(FUA_WRITE)];
            if !fails_first {
                assert!(!scene.end(FUA_WRITE, both[0], 0));
            }
            assert!(scene.end(FUA_WRITE, both[1], libc::EIO));
        }
        // The same with a flush that has succeeded meanwhile.
        let mut scene = Scene::new();
        let fua = scene.loss.begins(FUA_WRITE);
        scene.write();
        scene.run(FLUSH, 0);
        assert!(scene.end(FUA_WRITE, fua, libc::EIO));
        // On a device each receives only its own errors.
        let mut scene = Scene { loss: Loss::new(false), ..Scene::new() };
        let both = [scene.loss.begins(FUA_WRITE), scene.loss.begins(FUA_WRITE)];
        scene.end(FUA_WRITE, both[0], 0);
        assert!(!scene.end(FUA_WRITE, both[1], libc::EIO));
    }

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_flush_waits_for_those_that_were_in_the_kernel_with_it_and_no_longer() {
        let mut scene = Scene::new();
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&wakes));
        let mut cx = Context::from_waker(&waker);
        let flushes = [(); 3].map(|()| scene.loss.begins(FLUSH));
        scene.end(FLUSH, flushes[1], 0);
        let others = scene.loss.others().expect("two are in the kernel");
        let later = scene.loss.begins(FLUSH);
        let mut poll = |loss: &Loss| {
            let mut future = std::pin::pin!(loss.wait_for(others));
            future.as_mut().poll(&mut cx)
        };
        for flush in [flushes[2], flushes[0]] {
            assert!(poll(&scene.loss).is_pending() && poll(&scene.loss).is_pending());
            assert_eq!(wakes.0.load(Ordering::Relaxed), 0);
            scene.end(FLUSH, flush, 0);
        }
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1, "it waits once");
        assert!(poll(&scene.loss).is_ready());
        scene.end(FLUSH, later, 0);
        assert_eq!(scene.loss.others(), None);
    }
}
