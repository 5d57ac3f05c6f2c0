//! The one place that decides if data written to a file may be lost.
//!
//! Linux reports a failed write-back once for each open file: to the first flush or FUA write that
//! checks, no matter which op wrote the data. Then the lost pages count as clean, and later flushes
//! succeed. Hence the rules:
//!
//! * A loss is remembered. From then on every flush and every FUA write fails, on all IoThreads,
//!   until the file is opened again.
//! * A flush that fails is a loss.
//! * A FUA write that fails is answered with its error, which alone is not a loss. But the error
//!   may be about other data. It is a loss if writes without FUA were acknowledged that no later
//!   flush has brought to stable storage. It is a loss, too, if something was reported as being on
//!   stable storage while the write was in the kernel, or other FUA writes are in the kernel with
//!   it.
//! * A flush that succeeds waits for the flushes that are in the kernel with it: one of them may
//!   receive the report. FUA writes do not wait. So one of several in the kernel together may
//!   succeed while another receives the report of its loss; later ones fail.
//! * Ops that were refused or interrupted before they reached the file prove nothing.
//!
//! With direct I/O on a block device there is no write-back: each op receives its own errors alone.

use std::future::poll_fn;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Instant;

use crate::executor::notify::Notify;
use crate::executor::sync::Lock;
use crate::file::op_kind::OpKind;

/// The number of an op that is not tracked.
pub(crate) const NOT_TRACKED: u64 = 0;
/// The number of a tracked FUA write. Numbers of flushes are greater.
const FUA: u64 = 1;

/// The parts of [`WriteLossTracker::fua`]: the number of FUA writes in the kernel, and a flag. The
/// flag is set if data was reported as stable since there last was none.
const COUNT: u64 = u32::MAX as u64;
const STABLE_REPORTED: u64 = 1 << 63;

#[derive(Debug)]
pub(crate) struct WriteLossTracker {
    /// The errno of the first flush or FUA write after which data may be lost; 0: none so far.
    errno: AtomicI32,
    /// True if an op may receive an error about data of other ops.
    is_shared: bool,
    /// True if a write without FUA was noted since the last flush began: later ones need no note.
    is_noted: AtomicBool,
    /// FUA writes in the kernel, if `is_shared`.
    fua: AtomicU64,
    flushes: Lock<Flushes>,
    /// Wakes tasks that wait for the end of all flushes up to a number.
    ended: Notify<u64>,
}

#[derive(Debug)]
struct Flushes {
    /// The number of the flush that began last.
    begun: u64,
    /// The value of `begun` when a write without FUA was noted last.
    written: u64,
    /// The greatest number of a flush that has succeeded. It covers writes noted before it began.
    succeeded: u64,
    in_kernel: Vec<u64>,
    /// The time and errno of a failed FUA write that was no loss, as far as was known then.
    fua_failed: Option<(Instant, i32)>,
}

impl WriteLossTracker {
    /// `is_shared`: an op may receive an error about data of other ops.
    pub(crate) fn new(is_shared: bool) -> Self {
        let flushes = Flushes {
            begun: FUA,
            written: 0,
            succeeded: FUA,
            in_kernel: Vec::new(),
            fua_failed: None,
        };
        Self {
            errno: AtomicI32::new(0),
            is_shared,
            is_noted: AtomicBool::new(false),
            fua: AtomicU64::new(0),
            flushes: Lock::new(flushes),
            ended: Notify::default(),
        }
    }

    /// Fails once data may be lost, with the errno of the op that found the loss.
    #[inline]
    pub(crate) fn check(&self) -> io::Result<()> {
        match self.errno.load(Ordering::Acquire) {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Notes that a flush or FUA write goes to the kernel. Returns its number for
    /// [`end_op`](Self::end_op).
    pub(crate) fn begin(&self, kind: OpKind) -> u64 {
        match kind {
            OpKind::Flush => {
                let mut flushes = self.flushes.lock();
                // Writes that complete from now on are noted again: this flush may not cover them.
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

    /// Notes the kernel's answer to a flush or FUA write; `errno` is 0 for success. Called at the
    /// harvest, so that earlier completions are known before any task continues. Returns true if
    /// data may be lost from now on, and was not before.
    pub(crate) fn end_op(&self, tracked: u64, kind: OpKind, errno: i32, now: Instant) -> bool {
        match kind {
            OpKind::Flush => self.end_flush(tracked, errno),
            _ => self.end_fua(tracked, errno, now),
        }
    }

    fn end_flush(&self, number: u64, errno: i32) -> bool {
        let is_new = errno != 0 && !never_reached_the_file(errno) && self.remember(errno);
        if errno == 0 && self.is_shared {
            // Before the flush counts as a success: a FUA write that fails checks in the opposite
            // order.
            self.mark_stable_reports();
        }
        let mut flushes = self.flushes.lock();
        if errno == 0 {
            flushes.succeeded = flushes.succeeded.max(number);
        }
        flushes.in_kernel.retain(|&other| other != number);
        let first = flushes.first_in_kernel();
        drop(flushes);
        self.ended.notify_where(|&awaited| awaited < first);
        is_new
    }

    fn mark_stable_reports(&self) {
        let with_it = |word: u64| (word & COUNT > 0).then_some(word | STABLE_REPORTED);
        // An error means that there are no FUA writes.
        let _ = self.fua.fetch_update(Ordering::AcqRel, Ordering::Acquire, with_it);
    }

    fn end_fua(&self, tracked: u64, errno: i32, now: Instant) -> bool {
        let is_report = errno != 0 && errno != libc::EFBIG && !never_reached_the_file(errno);
        let mut flushes = is_report.then(|| self.flushes.lock());
        let is_unflushed = flushes.as_ref().is_some_and(|flushes| flushes.has_uncovered_writes());
        let is_beside = tracked == FUA && self.uncount_fua(errno == 0);
        if !is_report {
            return false;
        }
        if is_unflushed || is_beside {
            return self.remember(errno);
        }
        if let Some(flushes) = &mut flushes {
            // A write may have completed that was not harvested yet.
            flushes.fua_failed = Some((now, errno));
        }
        false
    }

    /// Takes a FUA write out of the count. Returns true if other FUA writes are in the kernel with
    /// it, or data was reported as stable while it was there.
    fn uncount_fua(&self, succeeds: bool) -> bool {
        let without_it = |word: u64| {
            let left = (word & COUNT).saturating_sub(1);
            let reported = if succeeds { STABLE_REPORTED } else { word & STABLE_REPORTED };
            Some(if left == 0 { 0 } else { left | reported })
        };
        let before = self.fua.fetch_update(Ordering::AcqRel, Ordering::Acquire, without_it);
        before.is_ok_and(|word| word & STABLE_REPORTED != 0 || word & COUNT > 1)
    }

    /// Notes the kernel's answer to a write that may not be on stable storage. Returns true if data
    /// may be lost from now on, and was not before.
    #[inline]
    pub(crate) fn note_write(&self, submitted: Option<Instant>) -> bool {
        !self.is_noted.load(Ordering::SeqCst) && self.record_write(submitted)
    }

    #[cold]
    fn record_write(&self, submitted: Option<Instant>) -> bool {
        let mut flushes = self.flushes.lock();
        flushes.written = flushes.begun;
        match (flushes.fua_failed, submitted) {
            // The write was in the kernel when the FUA write failed, and the error may be about it.
            (Some((when, errno)), Some(submitted)) if submitted <= when => self.remember(errno),
            (Some(_), _) => false,
            (None, _) => {
                self.is_noted.store(true, Ordering::SeqCst);
                false
            }
        }
    }

    /// Returns the number up to which a flush that has succeeded must wait for the flushes in the
    /// kernel: one of them may have received the report. `None` if there is none to wait for.
    pub(crate) fn flushes_to_await(&self) -> Option<u64> {
        let flushes = self.flushes.lock();
        (self.is_shared && !flushes.in_kernel.is_empty()).then_some(flushes.begun)
    }

    /// Waits for the end of all flushes up to a number.
    pub(crate) async fn wait_for(&self, number: u64) {
        let listener = self.ended.listener_with(number);
        poll_fn(|cx| {
            listener.listen(cx);
            let has_ended = number < self.flushes.lock().first_in_kernel();
            if has_ended { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Notes that another process used the file: perhaps no flush has covered its writes.
    pub(crate) fn note_foreign_writes(&self) {
        self.record_write(None);
    }

    /// Records a loss that another process found.
    pub(crate) fn inherit(&self, errno: i32) {
        self.remember(errno);
    }

    fn remember(&self, errno: i32) -> bool {
        self.errno.compare_exchange(0, errno, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Forgets a loss, as opening the file again does. No op may be in the kernel.
    #[cfg(ringhaul_sim)]
    pub(crate) fn forget(&self) {
        self.errno.store(0, Ordering::Release);
        let mut flushes = self.flushes.lock();
        flushes.fua_failed = None;
        flushes.written = 0;
        self.is_noted.store(false, Ordering::SeqCst);
    }
}

impl Flushes {
    /// Returns true if writes were noted that no flush has covered.
    fn has_uncovered_writes(&self) -> bool {
        self.written >= self.succeeded
    }

    /// The number of the first flush in the kernel. All flushes before it have ended.
    fn first_in_kernel(&self) -> u64 {
        self.in_kernel.iter().copied().min().unwrap_or(u64::MAX)
    }
}

/// Returns true for errors of ops that were refused or interrupted before they reached the file.
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
    use std::task::{Context, Wake, Waker};
    use std::time::Duration;

    const FLUSH: OpKind = OpKind::Flush;
    const FUA_WRITE: OpKind = OpKind::Write { fua: true };

    /// A file whose ops may receive errors about data of other ops, and a clock.
    struct Scene {
        loss: Arc<WriteLossTracker>,
        now: Instant,
    }

    impl Scene {
        fn new() -> Self {
            Self { loss: Arc::new(WriteLossTracker::new(true)), now: Instant::now() }
        }

        fn tick(&mut self) -> Instant {
            self.now += Duration::from_millis(1);
            self.now
        }

        fn end(&mut self, kind: OpKind, tracked: u64, errno: i32) -> bool {
            let now = self.tick();
            self.loss.end_op(tracked, kind, errno, now)
        }

        fn run(&mut self, kind: OpKind, errno: i32) -> bool {
            let tracked = self.loss.begin(kind);
            self.end(kind, tracked, errno)
        }

        fn write(&mut self) -> bool {
            let submitted = self.tick();
            self.loss.note_write(Some(submitted))
        }

        fn is_lost(&self) -> bool {
            self.loss.check().is_err()
        }
    }

    #[test]
    fn only_a_loss_is_remembered() {
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
    fn a_failed_fua_write_is_a_loss_only_of_data_without_a_flush() {
        for errno in [libc::EIO, libc::ENOSPC] {
            let mut scene = Scene::new();
            assert!(!scene.run(FUA_WRITE, 0) && !scene.run(FUA_WRITE, errno));
            assert!(!scene.is_lost(), "there were none but FUA writes");
            scene.write();
            scene.run(FLUSH, 0);
            assert!(!scene.run(FUA_WRITE, errno) && !scene.is_lost(), "all else was flushed");
            let flush = scene.loss.begin(FLUSH);
            scene.write();
            scene.end(FLUSH, flush, 0);
            assert!(scene.run(FUA_WRITE, errno) && scene.is_lost(), "the flush began too early");
        }
    }

    /// Writes are noted once for each flush, also if they begin while it is in the kernel.
    #[test]
    fn a_flush_covers_no_write_that_ends_after_it_began() {
        for is_during in [true, false] {
            let mut scene = Scene::new();
            scene.write();
            let flush = scene.loss.begin(FLUSH);
            if is_during {
                scene.write();
            }
            scene.end(FLUSH, flush, 0);
            if !is_during {
                scene.write();
            }
            assert!(scene.run(FUA_WRITE, libc::EIO) && scene.is_lost(), "{is_during}");
        }
    }

    #[test]
    fn a_write_that_was_under_way_when_a_fua_write_failed_may_be_lost() {
        let mut scene = Scene::new();
        let submitted = [scene.tick(), scene.tick()];
        scene.run(FUA_WRITE, libc::EIO);
        assert!(!scene.write() && !scene.write(), "they came later");
        assert!(scene.loss.note_write(Some(submitted[0])) && scene.is_lost());
        assert!(!scene.loss.note_write(Some(submitted[1])), "it is told once");
    }

    /// With direct I/O on a block device an op receives its own errors alone.
    #[test]
    fn a_flush_waits_for_others_only_if_they_may_have_its_report() {
        for is_shared in [true, false] {
            let loss = WriteLossTracker::new(is_shared);
            assert_eq!(loss.flushes_to_await(), None);
            let flush = loss.begin(FLUSH);
            assert_eq!(loss.flushes_to_await(), is_shared.then_some(flush));
            loss.end_op(flush, FLUSH, 0, Instant::now());
            assert_eq!(loss.flushes_to_await(), None);
        }
    }

    /// The process before may have left writes without a flush.
    #[test]
    fn a_failed_fua_write_may_be_about_writes_of_another_process() {
        for is_flushed in [false, true] {
            let mut scene = Scene::new();
            scene.loss.note_foreign_writes();
            if is_flushed {
                scene.run(FLUSH, 0);
            }
            assert_eq!(scene.run(FUA_WRITE, libc::EIO), !is_flushed);
            assert_eq!(scene.is_lost(), !is_flushed);
        }
    }

    #[test]
    fn fua_writes_that_are_in_the_kernel_together_may_be_told_of_each_other() {
        for fails_first in [true, false] {
            let mut scene = Scene::new();
            let both = [scene.loss.begin(FUA_WRITE), scene.loss.begin(FUA_WRITE)];
            if !fails_first {
                assert!(!scene.end(FUA_WRITE, both[0], 0));
            }
            assert!(scene.end(FUA_WRITE, both[1], libc::EIO));
        }
        // The same with flushes that have succeeded in between.
        for flushes in 1..4 {
            let mut scene = Scene::new();
            let fua = scene.loss.begin(FUA_WRITE);
            scene.write();
            (0..flushes).for_each(|_| assert!(!scene.run(FLUSH, 0)));
            assert!(scene.end(FUA_WRITE, fua, libc::EIO), "{flushes}");
        }
        // On a device each op receives only its own errors.
        let loss = Arc::new(WriteLossTracker::new(false));
        let mut scene = Scene { loss, ..Scene::new() };
        let both = [scene.loss.begin(FUA_WRITE), scene.loss.begin(FUA_WRITE)];
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
    fn a_flush_waits_only_for_flushes_that_were_in_the_kernel_with_it() {
        for order in [[0, 2], [2, 0]] {
            let mut scene = Scene::new();
            let wakes = Arc::new(Wakes::default());
            let waker = Waker::from(Arc::clone(&wakes));
            let mut cx = Context::from_waker(&waker);
            let flushes = [(); 3].map(|()| scene.loss.begin(FLUSH));
            scene.end(FLUSH, flushes[1], 0);
            let others = scene.loss.flushes_to_await().expect("two are in the kernel");
            let later = scene.loss.begin(FLUSH);
            let loss = Arc::clone(&scene.loss);
            let mut future = std::pin::pin!(loss.wait_for(others));
            for flush in order {
                assert!(future.as_mut().poll(&mut cx).is_pending());
                assert!(future.as_mut().poll(&mut cx).is_pending());
                assert_eq!(wakes.0.load(Ordering::Relaxed), 0);
                scene.end(FLUSH, flushes[flush], 0);
            }
            assert_eq!(wakes.0.load(Ordering::Relaxed), 1, "it waits once");
            assert!(future.as_mut().poll(&mut cx).is_ready());
            scene.end(FLUSH, later, 0);
            assert_eq!(scene.loss.flushes_to_await(), None);
        }
    }
}
