//! The times at which a busy loop checks eventfds and sources, so that no source with work waits
//! for long, and at which it checks for late ops.

use std::time::{Duration, Instant};

use crate::io_state::Io;
use crate::late::News;

/// The most rounds, and the most time, without a check of the eventfds while a source is armed: a
/// busy source must not starve armed ones. A check costs less than a hundredth of sixteen rounds,
/// and of this time.
const ROUNDS_BETWEEN_LOOKS: u32 = 16;
const TIME_BETWEEN_LOOKS: Duration = Duration::from_micros(500);

/// The number of rounds between checks of unarmed sources, which take a few loads each.
pub(crate) const ROUNDS_BETWEEN_SOURCES: u32 = 4;

/// The most rounds that begin on an IoThread before the task of a source with work runs. They count
/// from the moment when the source has work, and has written its eventfd if it was asked to.
///
/// The current round may be past the check. An unarmed source is found within four rounds, before
/// one in which its task runs. An armed source is found at the check of the eventfds, which comes
/// after all the rounds between two checks at the latest.
pub const ROUNDS_UNTIL_SERVED: u32 = ROUNDS_BETWEEN_LOOKS + 2;

/// The most bytes, as multiples of [`ByteLimits::round`](crate::ByteLimits::round), that an
/// IoThread gives to the kernel in that time.
///
/// The wait that has just checked also submits. Then come rounds with at most a quarter of such a
/// round, one round that exceeds the quarter, and the wait with the next check.
pub const ROUND_BYTES_UNTIL_SERVED: u64 = 4;

impl Io {
    /// Counts a round since the last check.
    pub(crate) fn count_round(&self) -> u32 {
        let round = self.rounds_since_look.get() + 1;
        self.rounds_since_look.set(round);
        self.stats.rounds.add(1);
        round
    }

    /// True if a check of the eventfds is due.
    #[inline]
    pub(crate) fn look_is_due(&self) -> bool {
        self.rounds_since_look.get() >= ROUNDS_BETWEEN_LOOKS || self.look_is_late.get()
    }

    /// Notes the time of a round's submit and harvest, and the bytes of its large ops. A loop that
    /// checks after each round needs no time.
    #[inline]
    pub(crate) fn round_ends(&self, now: Instant, bytes: usize) {
        if self.rounds_since_look.get() > 1 {
            match self.look_at.get() {
                Some(at) => self.look_is_late.set(now >= at),
                None => self.look_at.set(Some(now + TIME_BETWEEN_LOOKS)),
            }
        }
        // The submit right behind a check makes no further check due: tasks have a round in
        // between.
        if bytes > 0 && self.rounds_since_look.get() > 0 {
            let since_look = self.bytes_since_look.get() + bytes;
            self.bytes_since_look.set(since_look);
            if since_look >= self.look_bytes {
                self.look_is_late.set(true);
            }
        }
    }

    /// Notes that the eventfds were checked, or that a check would have found nothing.
    pub(crate) fn looked(&self) {
        self.rounds_since_look.set(0);
        self.look_at.set(None);
        self.look_is_late.set(false);
        self.bytes_since_look.set(0);
    }

    /// Wakes the tasks of unarmed sources with work, which is not announced.
    pub(crate) fn look_at_sources(&self) {
        let mut executor = self.executor.borrow_mut();
        self.reactor.borrow().look(|task| executor.wake(task));
    }

    /// Checks for late ops, after a harvest: ops that completed while this thread did not run are
    /// not late.
    #[cold]
    pub(crate) fn look_for_late_ops(&self) {
        let mut late = self.late.borrow_mut();
        let ops = self.ops.borrow();
        for news in late.look(self.recently.get(), &ops.slots, &self.stats) {
            match news {
                News::Late { .. } => tracing::warn!("{news}"),
                News::Answers { .. } => tracing::info!("{news}"),
            }
        }
        self.late_due.set(late.due());
    }

    /// The time of the next check for late ops; `None` if no op can be late.
    pub(crate) fn deadline_of_look(&self) -> Option<Instant> {
        let may_be_late = self.ops.borrow().engine.in_kernel() > 0 || self.late.borrow().any();
        may_be_late.then(|| self.late_due.get())
    }
}
