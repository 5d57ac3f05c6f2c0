//! Helpers of unit tests.

use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use tracing::Dispatch;

/// Ends a hopeless wait.
const LIMIT: Duration = Duration::from_secs(30);

/// Collects the lines that a test logs.
#[derive(Clone)]
pub(crate) struct LogCapture(Arc<Mutex<Vec<u8>>>);

impl Default for LogCapture {
    fn default() -> Self {
        ask_all_subscribers();
        Self(Arc::default())
    }
}

/// Lets every test see its own lines. As long as a process has one subscriber, the library asks
/// that of the thread which is the first to log a line, and remembers the answer for all threads.
/// With several it asks all of them.
fn ask_all_subscribers() {
    static FURTHER: OnceLock<[Dispatch; 2]> = OnceLock::new();
    FURTHER.get_or_init(|| [(); 2].map(|()| Dispatch::new(tracing_subscriber::registry())));
}

impl LogCapture {
    /// All lines so far.
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// Collects the lines of a call in the form of the library, without colours.
    pub(crate) fn lines_of(call: impl FnOnce()) -> Vec<String> {
        let kept = Self::default();
        let log = tracing_subscriber::fmt().with_ansi(false).with_writer(kept.clone());
        tracing::subscriber::with_default(log.finish(), call);
        kept.text().lines().map(str::to_owned).collect()
    }
}

impl std::io::Write for LogCapture {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl tracing_subscriber::fmt::MakeWriter<'_> for LogCapture {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_kept_although_another_thread_was_the_first_to_log_it() {
        let log = || tracing::info!("a line");
        let lines = LogCapture::lines_of(|| {
            std::thread::spawn(log).join().unwrap();
            log();
        });
        assert_eq!(lines.len(), 1, "{lines:?}");
    }
}
