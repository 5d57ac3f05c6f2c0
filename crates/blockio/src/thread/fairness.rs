//! The times at which a busy loop checks eventfds and sources, so that no source with work waits
//! for long.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// The most rounds, and the most time, without a check of the eventfds while a source is armed: a
/// busy source must not starve armed ones. A check costs less than a hundredth of sixteen rounds,
/// and of this time.
const ROUNDS_BETWEEN_CHECKS: u32 = 16;
const TIME_BETWEEN_CHECKS: Duration = Duration::from_micros(500);

/// The part of a round's bytes after which the eventfds are checked. A quarter of them holds the
/// loop for longer than a check costs.
const CHECK_PART: usize = 4;

/// The part of a round's bytes that tasks may copy.
const COPY_PART: usize = 8;

/// The number of rounds between checks of unarmed sources, which take a few loads each.
pub(crate) const ROUNDS_BETWEEN_SOURCES: u32 = 4;

/// The most rounds that begin on an IoThread before the task of a source with work runs. They count
/// from the moment when the source has work, and has written its eventfd if it was asked to.
///
/// The current round may be past the check. An unarmed source is found within four rounds, before
/// one in which its task runs. An armed source is found at the check of the eventfds, which comes
/// after all the rounds between two checks at the latest.
pub const ROUNDS_UNTIL_SERVED: u32 = ROUNDS_BETWEEN_CHECKS + 2;

/// The most bytes, as multiples of [`ByteLimits::round`](crate::config::ByteLimits::round), that an
/// IoThread gives to the kernel in that time.
///
/// The wait that has just checked also submits. Then come rounds with at most a quarter of such a
/// round, one round that exceeds the quarter, and the wait with the next check.
pub const ROUND_BYTES_UNTIL_SERVED: u64 = 4;

/// The rounds and the bytes since the last check of the eventfds.
pub(crate) struct Checks {
    rounds: Cell<u32>,
    /// Bytes of large ops.
    bytes: Cell<usize>,
    /// The number of bytes after which the next check is due.
    bytes_max: usize,
    copies_max: usize,
    /// When the next check is due; set after some rounds without one.
    due: Cell<Option<Instant>>,
    /// True once that time has come, or `bytes_max` were given to the kernel.
    is_overdue: Cell<bool>,
}

impl Checks {
    /// `round_bytes`: the bytes of a round.
    pub(crate) fn new(round_bytes: usize) -> Self {
        Self {
            rounds: Cell::new(0),
            bytes: Cell::new(0),
            bytes_max: round_bytes / CHECK_PART,
            copies_max: round_bytes / COPY_PART,
            due: Cell::new(None),
            is_overdue: Cell::new(false),
        }
    }

    /// The most bytes that tasks may copy in a round: they hold the loop longer than a submit of as
    /// many bytes.
    pub(crate) fn copies_max(&self) -> usize {
        self.copies_max
    }

    /// Counts a round since the last check.
    #[inline]
    pub(crate) fn count_round(&self) -> u32 {
        let round = self.rounds.get() + 1;
        self.rounds.set(round);
        round
    }

    /// True if a check of the eventfds is due.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.rounds.get() >= ROUNDS_BETWEEN_CHECKS || self.is_overdue.get()
    }

    /// Notes the time of a round's submit and harvest, and the bytes of its large ops. A loop that
    /// checks after each round needs no time.
    #[inline]
    pub(crate) fn end_round(&self, now: Instant, bytes: usize) {
        if self.rounds.get() > 1 {
            match self.due.get() {
                Some(due) if now >= due => self.is_overdue.set(true),
                Some(_) => {}
                None => self.due.set(Some(now + TIME_BETWEEN_CHECKS)),
            }
        }
        // The submit right behind a check makes no further check due: tasks have a round in
        // between.
        if bytes > 0 && self.rounds.get() > 0 {
            let since_check = self.bytes.get() + bytes;
            self.bytes.set(since_check);
            if since_check >= self.bytes_max {
                self.is_overdue.set(true);
            }
        }
    }

    /// Makes the next check due: tasks have held the loop.
    pub(crate) fn make_due(&self) {
        self.is_overdue.set(true);
    }

    /// Notes that the eventfds were checked, or that a check would have found nothing.
    pub(crate) fn note(&self) {
        self.rounds.set(0);
        self.due.set(None);
        self.is_overdue.set(false);
        self.bytes.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tasks that have held the loop make a check due before the end of their round.
    #[test]
    fn a_check_stays_due_until_it_is_made() {
        let (checks, now) = (Checks::new(1 << 20), Instant::now());
        for _ in 0..2 {
            checks.count_round();
            checks.end_round(now, 0);
            assert!(!checks.is_due());
        }
        checks.count_round();
        checks.make_due();
        checks.end_round(now, 0);
        assert!(checks.is_due(), "the end of the round has revoked it");
        checks.note();
        assert!(!checks.is_due());
        for _ in 0..2 {
            checks.count_round();
            checks.end_round(now, 0);
        }
        checks.end_round(now + TIME_BETWEEN_CHECKS, 0);
        assert!(checks.is_due(), "the time has come");
    }
}
