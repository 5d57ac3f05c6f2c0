//! What an engine does when the kernel refuses a submit for lack of room.

use std::time::{Duration, Instant};

/// The first wait before a refused submit is tried again; it doubles up to [`RETRY_MAX`].
const RETRY_MIN: Duration = Duration::from_millis(1);
const RETRY_MAX: Duration = Duration::from_millis(64);
/// After this many refusals in a row, with nothing in the kernel, the pool takes the ops.
pub(super) const RETRIES: u32 = 8;

/// With ops in the kernel a completion ends the wait, but if they hang, the ops of other disks must
/// not wait for them for longer than this.
const RETRY_BESIDE_OPS: Duration = Duration::from_millis(4);

/// Why the kernel takes no more ops for now, and what ends that.
#[derive(Default)]
enum Blocked {
    #[default]
    No,
    /// As many ops are in the kernel as may be: only a completion makes room.
    UntilCompletion,
    /// A completion makes room, if there are ops to complete, and so may time.
    Until(Instant),
}

#[derive(Default)]
pub(super) struct Retry {
    blocked: Blocked,
    /// Refusals in a row with nothing in the kernel.
    refusals: u32,
}

impl Retry {
    /// Whether a submit makes no sense yet.
    pub(super) fn is_blocked(&self, now: Instant) -> bool {
        match self.blocked {
            Blocked::No => false,
            Blocked::UntilCompletion => true,
            Blocked::Until(when) => when > now,
        }
    }

    /// As many ops are in the kernel as it may have.
    pub(super) fn full(&mut self) {
        self.blocked = Blocked::UntilCompletion;
    }

    /// A completion has made room.
    pub(super) fn completed(&mut self) {
        self.blocked = Blocked::No;
    }

    /// The kernel had room: it has taken ops, or has found fault with one.
    pub(super) fn accepted(&mut self) {
        *self = Self::default();
    }

    /// The kernel has refused a submit (EAGAIN) with `in_kernel` ops there. True: it has done so
    /// for long enough, with nothing there, that the pool should take over.
    pub(super) fn refused(&mut self, in_kernel: usize, now: Instant) -> bool {
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

    /// When the next try is due, if time may help.
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
            assert!(!retry.refused(3, now), "the pool takes over although ops are there");
        }
        let when = retry.retry_at().unwrap();
        assert!(when > now && retry.is_blocked(now) && !retry.is_blocked(when));
        retry.completed();
        assert!(!retry.is_blocked(now) && retry.retry_at().is_none());
    }
}
