//! The kernel's monotonic clock.

use std::time::Instant;

/// The time now.
#[inline]
#[must_use]
pub fn now() -> Instant {
    Instant::now()
}

/// Busy-polling lets a moment pass.
#[inline]
pub(crate) fn spin() {
    std::hint::spin_loop();
}

/// A point at which other threads, the kernel and the other side of a ring may act. A simulation
/// lets them; otherwise there is nothing to do, since they act when they like.
#[inline]
pub(crate) fn preempt() {}
