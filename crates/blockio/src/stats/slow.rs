//! The causes of slow requests on one IoThread: the last long operation, and the last long wait.

use std::time::{Duration, Instant};

use crate::clock::nanoseconds;
use crate::executor::sync::Lock;
use crate::executor::sync::atomic::{AtomicU64, Ordering};

/// A cause that took long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cause {
    /// The time at which it ended.
    pub ended: Instant,
    /// The time that it took.
    pub took: Duration,
}

/// The last wait and the last operation that took at least the least time. A shorter wait or
/// operation costs one comparison and is not kept.
#[derive(Debug)]
pub struct SlowCauses {
    /// In nanoseconds; the largest number if no time is long.
    least_ns: AtomicU64,
    operation: Lock<Option<Cause>>,
    wait: Lock<Option<Cause>>,
}

impl Default for SlowCauses {
    fn default() -> Self {
        let least_ns = AtomicU64::new(u64::MAX);
        Self { least_ns, operation: Lock::default(), wait: Lock::default() }
    }
}

impl SlowCauses {
    /// Keeps causes of at least this time from now on.
    pub fn set_least(&self, least: Duration) {
        self.least_ns.store(nanoseconds(least), Ordering::Relaxed);
    }

    /// Notes an operation of the kernel that has ended at this time.
    #[inline]
    pub(crate) fn note_operation(&self, ended: Instant, took_ns: u64) {
        if self.is_long(took_ns) {
            keep(&self.operation, ended, took_ns);
        }
    }

    /// Notes a wait for limits or for a retry that has ended at this time.
    pub(crate) fn note_wait(&self, ended: Instant, took: Duration) {
        let took_ns = nanoseconds(took);
        if self.is_long(took_ns) {
            keep(&self.wait, ended, took_ns);
        }
    }

    #[inline]
    fn is_long(&self, ns: u64) -> bool {
        ns >= self.least_ns.load(Ordering::Relaxed)
    }

    /// The last long operation.
    pub fn operation(&self) -> Option<Cause> {
        *self.operation.lock()
    }

    /// The last long wait.
    pub fn wait(&self) -> Option<Cause> {
        *self.wait.lock()
    }
}

#[cold]
fn keep(last: &Lock<Option<Cause>>, ended: Instant, took_ns: u64) {
    *last.lock() = Some(Cause { ended, took: Duration::from_nanos(took_ns) });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_long_causes_are_kept() {
        let causes = SlowCauses::default();
        let (now, ms) = (Instant::now(), Duration::from_millis);
        causes.note_operation(now, u64::MAX - 1);
        assert_eq!(causes.operation(), None, "no time is long");
        causes.set_least(ms(5));
        causes.note_operation(now, 4_999_999);
        causes.note_wait(now, ms(4));
        assert_eq!((causes.operation(), causes.wait()), (None, None));
        causes.note_operation(now, 5_000_000);
        causes.note_wait(now, ms(6));
        assert_eq!(causes.operation(), Some(Cause { ended: now, took: ms(5) }));
        assert_eq!(causes.wait(), Some(Cause { ended: now, took: ms(6) }));
    }
}
