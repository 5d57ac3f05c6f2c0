//! The reaction of an engine to a submit that the kernel refuses for lack of room.

use std::time::{Duration, Instant};

/// The first wait before a refused submit is tried again; it doubles up to [`RETRY_MAX`].
const RETRY_MIN: Duration = Duration::from_millis(1);
const RETRY_MAX: Duration = Duration::from_millis(64);
/// The most retries with nothing in the kernel. After them engine `aio` moves its ops to the pool.
pub(super) const RETRIES: u32 = 8;

/// The longest wait while ops are in the kernel. A completion ends it too, but ops of other disks
/// must not wait longer if these ops hang.
const RETRY_BESIDE_OPS: Duration = Duration::from_millis(4);

/// The obstacle to a submit, and the event that ends it.
#[derive(Default)]
enum Blocked {
    #[default]
    No,
    /// The limit of ops in the kernel is reached: only a completion makes room.
    UntilCompletion,
    /// A completion makes room, if ops are in the kernel, and so may time.
    Until(Instant),
}

#[derive(Default)]
pub(super) struct Retry {
    blocked: Blocked,
    /// Refusals in a row with nothing in the kernel.
    refusals: u32,
}

impl Retry {
    /// Returns true if a submit is pointless at `now`.
    pub(super) fn is_blocked(&self, now: Instant) -> bool {
        match self.blocked {
            Blocked::No => false,
            Blocked::UntilCompletion => true,
            Blocked::Until(when) => when > now,
        }
    }

    /// Returns true if a completion or a time ends the wait of the queued ops.
    pub(super) fn awaits_event(&self) -> bool {
        !matches!(self.blocked, Blocked::No)
    }

    /// Records that the limit of ops in the kernel is reached.
    pub(super) fn on_full(&mut self) {
        self.blocked = Blocked::UntilCompletion;
    }

    /// Records that a completion has made room.
    pub(super) fn on_completion(&mut self) {
        self.blocked = Blocked::No;
    }

    /// Records that the kernel had room: it has taken ops, or has rejected one.
    pub(super) fn on_accepted(&mut self) {
        *self = Self::default();
    }

    /// Records that the kernel refused a submit (EAGAIN) with `in_kernel` ops there. Returns true
    /// if, with none there, it has refused for long enough that the pool should take over.
    pub(super) fn on_refused(&mut self, in_kernel: usize, now: Instant) -> bool {
        if in_kernel > 0 {
            self.blocked = Blocked::Until(now + RETRY_BESIDE_OPS);
            return false;
        }
        self.refusals += 1;
        if self.refusals > RETRIES {
            *self = Self::default();
            return true;
        }
        let wait = RETRY_MIN.saturating_mul(1 << (self.refusals - 1)).min(RETRY_MAX);
        self.blocked = Blocked::Until(now + wait);
        false
    }

    /// The time of the next try; `None` if time does not help.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        match self.blocked {
            Blocked::Until(when) => Some(when),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_beside_ops_that_may_hang_has_a_timer() {
        let (mut retry, now) = (Retry::default(), Instant::now());
        for _ in 0..100 {
            assert!(!retry.on_refused(3, now), "the pool takes over although ops are there");
        }
        let when = retry.retry_at().unwrap();
        assert!(when > now && retry.is_blocked(now) && !retry.is_blocked(when));
        retry.on_completion();
        assert!(!retry.is_blocked(now) && retry.retry_at().is_none());
    }

    /// Rare refusals, however many, do not add up to a failure.
    #[test]
    fn only_refusals_in_a_row_give_up() {
        let (mut retry, mut now) = (Retry::default(), Instant::now());
        let mut refuse = |retry: &mut Retry| {
            assert!(!retry.on_refused(0, now));
            let wait = retry.retry_at().unwrap() - now;
            now += wait;
            wait.as_millis()
        };
        for is_last in [false, false, true] {
            let waits = (0..RETRIES).map(|_| refuse(&mut retry)).collect::<Vec<_>>();
            assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 64]);
            if is_last {
                assert!(retry.on_refused(0, Instant::now()), "the pool takes over");
            } else {
                retry.on_accepted();
            }
            assert!(!retry.awaits_event());
        }
    }
}
