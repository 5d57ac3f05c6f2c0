//! Helpers of unit tests.

use std::sync::mpsc;
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// Ends a hopeless wait.
const LIMIT: Duration = Duration::from_secs(30);

/// Waits for the work of other threads.
pub(crate) fn wait_until(mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < LIMIT, "it does not happen");
        std::thread::yield_now();
    }
}

/// Calls `wait` on a thread, and returns when the thread sleeps in it. A wake that is lost is then
/// not made up for by a check before the sleep.
pub(crate) fn spawn_asleep<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    wait: impl FnOnce() -> T + Send + 'scope,
) -> ScopedJoinHandle<'scope, T> {
    let (begun, begins) = mpsc::channel();
    let thread = scope.spawn(move || {
        begun.send(rustix::thread::gettid()).unwrap();
        wait()
    });
    let stat = format!("/proc/self/task/{}/stat", begins.recv().unwrap());
    let is_asleep = || std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") S "));
    wait_until(|| thread.is_finished() || is_asleep());
    thread
}
