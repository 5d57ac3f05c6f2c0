//! When a busy loop looks at eventfds and sources, so that no source with work waits for long; and
//! the look for late ops.

use std::time::{Duration, Instant};

use crate::io_state::Io;
use crate::late::News;

/// After this many rounds without a look at the eventfds, or this much time, the loop looks if any
/// source is armed: one that is always busy must not starve the others. One look in sixteen rounds
/// is below a hundredth of their cost, and so is one in this time.
const ROUNDS_BETWEEN_LOOKS: u32 = 16;
const TIME_BETWEEN_LOOKS: Duration = Duration::from_micros(500);

/// How often the loop looks at the sources that are not armed, which is a few loads for each.
pub(crate) const ROUNDS_BETWEEN_SOURCES: u32 = 4;

/// The most rounds that begin on an IoThread between the moment when a source has work, and has
/// written its eventfd if it was asked to, and the moment when its task runs.
///
/// The current round may be past the look. A source that is not armed is seen within four
/// rounds, before one in which its task runs. One that is armed is seen when the eventfds are
/// looked at, which is at the latest after all the rounds between two looks.
pub const ROUNDS_UNTIL_SERVED: u32 = ROUNDS_BETWEEN_LOOKS + 2;

/// The most bytes, as multiples of [`ByteLimits::round`](crate::ByteLimits::round), that an
/// IoThread gives to the kernel in that time.
///
/// The wait that has just looked submits, too. Rounds follow with a quarter of that at most, one
/// that exceeds the quarter, and the wait that looks next.
pub const ROUND_BYTES_UNTIL_SERVED: u64 = 4;

impl Io {
    /// Counts a round since the last look.
    pub(crate) fn count_round(&self) -> u32 {
        let round = self.rounds_since_look.get() + 1;
        self.rounds_since_look.set(round);
        self.stats.rounds.add(1);
        round
    }

    /// Whether it is time for a look at the eventfds.
    #[inline]
    pub(crate) fn look_is_due(&self) -> bool {
        self.rounds_since_look.get() >= ROUNDS_BETWEEN_LOOKS || self.look_is_late.get()
    }

    /// Notes the time at which a round has submitted and harvested, and the bytes of its large ops.
    /// A loop that looks after each round need not know when.
    #[inline]
    pub(crate) fn round_ends(&self, now: Instant, bytes: usize) {
        if self.rounds_since_look.get() > 1 {
            match self.look_at.get() {
                Some(at) => self.look_is_late.set(now >= at),
                None => self.look_at.set(Some(now + TIME_BETWEEN_LOOKS)),
            }
        }
        // The submit right behind a look makes no other one due: tasks have a round in between.
        if bytes > 0 && self.rounds_since_look.get() > 0 {
            let since_look = self.bytes_since_look.get() + bytes;
            self.bytes_since_look.set(since_look);
            if since_look >= self.look_bytes {
                self.look_is_late.set(true);
            }
        }
    }

    /// The eventfds have been looked at, or nothing would have been learnt from them.
    pub(crate) fn looked(&self) {
        self.rounds_since_look.set(0);
        self.look_at.set(None);
        self.look_is_late.set(false);
        self.bytes_since_look.set(0);
    }

    /// Makes the tasks ready of sources that are not armed and have work: nothing announces it.
    pub(crate) fn look_at_sources(&self) {
        let mut executor = self.executor.borrow_mut();
        self.reactor.borrow().look(|task| executor.wake(task));
    }

    /// After a harvest: what has completed while this thread did not run is not late.
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

    /// When late ops are to be looked for, if there may be some.
    pub(crate) fn deadline_of_look(&self) -> Option<Instant> {
        let may_be_late = self.ops.borrow().engine.in_kernel() > 0 || self.late.borrow().any();
        may_be_late.then(|| self.late_due.get())
    }
}
