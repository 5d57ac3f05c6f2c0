//! The time that the loop goes by where kernels are simulated: that of the simulation, which stands
//! still unless it is moved. On a thread without a simulated kernel it is the real one.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// What stands in for time, and for all that happens meanwhile.
#[derive(Clone, Copy)]
pub(crate) struct Hooks {
    pub(crate) now: fn() -> Option<Instant>,
    pub(crate) spin: fn(),
    pub(crate) preempt: fn(),
}

thread_local! {
    static HOOKS: std::cell::Cell<Option<Hooks>> = const { std::cell::Cell::new(None) };
}

/// Has the calling thread go by `hooks` from now on; `None`: by the kernel's clock again.
pub(crate) fn simulate(hooks: Option<Hooks>) {
    HOOKS.set(hooks);
}

/// The time now.
#[inline]
#[must_use]
pub fn now() -> Instant {
    if let Some(now) = HOOKS.get().and_then(|hooks| (hooks.now)()) {
        return now;
    }
    Instant::now()
}

/// The CPU time that the calling thread has taken: none, where kernels are simulated.
pub(crate) fn thread_cpu() -> Duration {
    if HOOKS.get().is_some() {
        return Duration::ZERO;
    }
    clock_gettime(ClockId::ThreadCPUTime).try_into().expect("a thread does not run for ages")
}

/// Busy-polling lets a moment pass.
#[inline]
pub(crate) fn spin() {
    if let Some(hooks) = HOOKS.get() {
        (hooks.spin)();
    }
    std::hint::spin_loop();
}

/// A point at which other threads, the kernel and the other side of a ring may act. A simulation
/// lets them; otherwise there is nothing to do, since they act when they like.
#[inline]
pub(crate) fn preempt() {
    if let Some(hooks) = HOOKS.get() {
        (hooks.preempt)();
    }
}
