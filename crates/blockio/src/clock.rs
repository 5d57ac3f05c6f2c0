//! The clock of the loop: the kernel's monotonic clock, unless kernels are simulated.

#[cfg(ringhaul_sim)]
mod sim;

#[cfg(not(ringhaul_sim))]
pub use real::*;
#[cfg(ringhaul_sim)]
pub use sim::*;

/// The kernel's monotonic clock.
#[cfg(not(ringhaul_sim))]
mod real {
    use std::time::{Duration, Instant};

    use rustix::time::{ClockId, clock_gettime};

    /// The time now.
    #[inline]
    #[must_use]
    pub fn now() -> Instant {
        Instant::now()
    }

    /// The CPU time that the calling thread has taken.
    pub(crate) fn thread_cpu() -> Duration {
        clock_gettime(ClockId::ThreadCPUTime).try_into().expect("a thread does not run for ages")
    }

    /// Lets a moment of busy-polling pass.
    #[inline]
    pub(crate) fn spin() {
        std::hint::spin_loop();
    }

    /// A point at which other threads, the kernel and the peer of a ring may act. Only a simulation
    /// uses it: in reality they act at any time.
    #[inline]
    pub(crate) fn yield_to_simulation() {}
}
