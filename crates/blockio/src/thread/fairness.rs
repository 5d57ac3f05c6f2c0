//! The times at which a busy loop checks eventfds and sources, so that no source with work waits
//! for long, and at which it checks for late ops.

use std::time::{Duration, Instant};

use crate::thread::io_state::Io;
use crate::watchdog::stalled_ops::StallReport;

/// The most rounds, and the most time, without a check of the eventfds while a source is armed: a
/// busy source must not starve armed ones. A check costs less than a hundredth of sixteen rounds,
/// and of this time.
const ROUNDS_BETWEEN_CHECKS: u32 = 16;
const TIME_BETWEEN_CHECKS: Duration = Duration::from_micros(500);

/// The number of rounds between checks of unarmed sources, which take a few loads each.
pub(crate) const ROUNDS_BETWEEN_SOURCES: u32 = 4;

/// The most rounds that begin on an IoThread before the task of a source with work runs. They count
/// from the moment when the source has work, and has written its eventfd if it was asked to.
///
/// The current round may be past the check. An unarmed source is found within four rounds, before
/// one in which its task runs. An armed source is found at the check of the eventfds, which comes
/// after all the rounds between two checks at the latest.
pub const ROUNDS_UNTIL_SERVED: u32 = ROUNDS_BETWEEN_CHECKS + 2;

/// The most bytes, as multiples of [`ByteLimits::round`](crate::ByteLimits::round), that an
/// IoThread gives to the kernel in that time.
///
/// The wait that has just checked also submits. Then come rounds with at most a quarter of such a
/// round, one round that exceeds the quarter, and the wait with the next check.
pub const ROUND_BYTES_UNTIL_SERVED: u64 = 4;

impl Io {
    /// Counts a round since the last check.
    pub(crate) fn count_round(&self) -> u32 {
        let round = self.rounds_since_check.get() + 1;
        self.rounds_since_check.set(round);
        self.stats.rounds.add(1);
        round
    }

    /// True if a check of the eventfds is due.
    #[inline]
    pub(crate) fn check_is_due(&self) -> bool {
        self.rounds_since_check.get() >= ROUNDS_BETWEEN_CHECKS || self.check_is_overdue.get()
    }

    /// Notes the time of a round's submit and harvest, and the bytes of its large ops. A loop that
    /// checks after each round needs no time.
    #[inline]
    pub(crate) fn end_round(&self, now: Instant, bytes: usize) {
        if self.rounds_since_check.get() > 1 {
            match self.check_at.get() {
                Some(at) => self.check_is_overdue.set(now >= at),
                None => self.check_at.set(Some(now + TIME_BETWEEN_CHECKS)),
            }
        }
        // The submit right behind a check makes no further check due: tasks have a round in
        // between.
        if bytes > 0 && self.rounds_since_check.get() > 0 {
            let since_check = self.bytes_since_check.get() + bytes;
            self.bytes_since_check.set(since_check);
            if since_check >= self.check_bytes {
                self.check_is_overdue.set(true);
            }
        }
    }

    /// Notes that the eventfds were checked, or that a check would have found nothing.
    pub(crate) fn note_check(&self) {
        self.rounds_since_check.set(0);
        self.check_at.set(None);
        self.check_is_overdue.set(false);
        self.bytes_since_check.set(0);
    }

    /// Wakes the tasks of unarmed sources with work, which is not announced.
    pub(crate) fn poll_sources(&self) {
        let mut executor = self.executor.borrow_mut();
        self.reactor.borrow().poll_unarmed(|task| executor.wake(task));
    }

    /// Checks for late ops, after a harvest: ops that completed while this thread did not run are
    /// not late.
    #[cold]
    pub(crate) fn check_stalled_ops(&self) {
        let mut stalled = self.stalled.borrow_mut();
        let ops = self.ops.borrow();
        for report in stalled.check(self.recently.get(), &ops.slots, &self.stats) {
            match report {
                StallReport::Late { .. } => tracing::warn!("{report}"),
                StallReport::Answers { .. } => tracing::info!("{report}"),
            }
        }
        self.stall_check_due.set(stalled.due());
    }

    /// The time of the next check for late ops; `None` if no op can be late.
    pub(crate) fn next_stall_check(&self) -> Option<Instant> {
        let may_be_late =
            self.ops.borrow().engine.in_kernel() > 0 || !self.stalled.borrow().is_empty();
        may_be_late.then(|| self.stall_check_due.get())
    }
}
