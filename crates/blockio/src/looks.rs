//! When a busy loop looks at eventfds and sources, so that no source with work waits for long.

use std::time::{Duration, Instant};

use crate::io_state::Io;

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

    /// Notes the time at which a round has submitted and harvested. A loop that looks after each
    /// round need not know when.
    #[inline]
    pub(crate) fn round_ends(&self, now: Instant) {
        if self.rounds_since_look.get() > 1 {
            match self.look_at.get() {
                Some(at) => self.look_is_late.set(now >= at),
                None => self.look_at.set(Some(now + TIME_BETWEEN_LOOKS)),
            }
        }
    }

    /// The eventfds have been looked at, or nothing would have been learnt from them.
    pub(crate) fn looked(&self) {
        self.rounds_since_look.set(0);
        self.look_at.set(None);
        self.look_is_late.set(false);
    }

    /// Makes the tasks ready of sources that are not armed and have work: nothing announces it.
    pub(crate) fn look_at_sources(&self) {
        let mut executor = self.executor.borrow_mut();
        self.reactor.borrow().look(|task| executor.wake(task));
    }
}
