//! The loop's time where kernels are simulated: the simulation's, which stands still unless it is
//! moved. A thread without a simulated kernel has the real time.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// The simulation's functions for time, and for events while it passes.
#[derive(Clone, Copy)]
pub(crate) struct Hooks {
    pub(crate) now: fn() -> Option<Instant>,
    pub(crate) spin: fn(),
    pub(crate) yield_to_simulation: fn(),
}

thread_local! {
    static HOOKS: std::cell::Cell<Option<Hooks>> = const { std::cell::Cell::new(None) };
}

/// Makes the calling thread use `hooks` from now on; `None`: the kernel's clock again.
pub(crate) fn simulate(hooks: Option<Hooks>) {
    HOOKS.set(hooks);
}

/// The time now.
#[inline]
pub fn now() -> Instant {
    if let Some(now) = HOOKS.get().and_then(|hooks| (hooks.now)()) {
        return now;
    }
    Instant::now()
}

/// The CPU time that the calling thread has taken: none if kernels are simulated.
pub(crate) fn thread_cpu() -> Duration {
    if HOOKS.get().is_some() {
        return Duration::ZERO;
    }
    clock_gettime(ClockId::ThreadCPUTime).try_into().expect("a thread does not run for ages")
}

/// Lets a moment of busy-polling pass.
#[inline]
pub(crate) fn spin() {
    if let Some(hooks) = HOOKS.get() {
        (hooks.spin)();
    }
    std::hint::spin_loop();
}

/// A point at which other threads, the kernel and the peer of a ring may act. Only a simulation
/// uses it: in reality they act at any time.
#[inline]
pub(crate) fn yield_to_simulation() {
    if let Some(hooks) = HOOKS.get() {
        (hooks.yield_to_simulation)();
    }
}
