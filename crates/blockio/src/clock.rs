//! The time that the loop goes by.
//!
//! It is the kernel's monotonic clock. With the feature `sim`, on a thread whose kernel is
//! simulated, it is the simulation's, and stands still unless that moves it.

use std::time::Instant;

/// The time now.
#[inline]
#[must_use]
pub fn now() -> Instant {
    #[cfg(feature = "sim")]
    if let Some(now) = crate::engine::sim::now() {
        return now;
    }
    Instant::now()
}

/// Busy-polling lets a moment pass.
#[inline]
pub(crate) fn spin() {
    #[cfg(feature = "sim")]
    crate::engine::sim::spin();
    std::hint::spin_loop();
}

/// A point at which other threads, the kernel and the other side of a ring may act. A simulation
/// lets them; otherwise there is nothing to do, since they act when they like.
#[inline]
pub(crate) fn preempt() {
    #[cfg(feature = "sim")]
    crate::engine::sim::preempt();
}
