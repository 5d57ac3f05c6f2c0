//! The clock of the loop: the kernel's monotonic clock, unless kernels are simulated.

#[cfg(ringhaul_sim)]
mod sim;

use std::cell::Cell;
use std::time::{Duration, Instant};

#[cfg(not(ringhaul_sim))]
pub use real::*;
#[cfg(ringhaul_sim)]
pub use sim::*;

/// Nanoseconds of `duration`, saturating.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The clock of one loop: the time at its last harvest, or at the end of its last sleep. It is read
/// without a system call.
#[derive(Debug)]
pub struct LoopClock {
    start: Instant,
    now: Cell<Instant>,
    /// The time since `start`.
    now_ns: Cell<u64>,
}

impl LoopClock {
    pub(crate) fn new(now: Instant) -> Self {
        Self { start: now, now: Cell::new(now), now_ns: Cell::new(0) }
    }

    #[inline]
    pub(crate) fn set(&self, now: Instant) {
        self.now.set(now);
        let since = now.saturating_duration_since(self.start);
        self.now_ns.set(since.as_secs() * 1_000_000_000 + u64::from(since.subsec_nanos()));
    }

    /// The time.
    #[inline]
    pub fn recently(&self) -> Instant {
        self.now.get()
    }

    /// The time in nanoseconds since the start of the loop.
    #[inline]
    pub fn nanoseconds(&self) -> u64 {
        self.now_ns.get()
    }
}

/// The kernel's monotonic clock.
#[cfg(not(ringhaul_sim))]
mod real {
    use std::time::{Duration, Instant};

    use rustix::time::{ClockId, clock_gettime};

    /// The time now.
    #[inline]
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
