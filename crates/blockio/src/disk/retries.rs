//! Ops that the kernel puts off, and how long it is asked again.

use std::io;
use std::time::{Duration, Instant};

use crate::clock;
use crate::io_thread::Io;

/// A disk that answers with EAGAIN for so long will not do better: the request fails then.
const PATIENCE: Duration =
    if cfg!(test) { Duration::from_millis(100) } else { Duration::from_secs(5) };
/// The first pause; each that follows is twice as long.
const PAUSE_MIN: Duration = Duration::from_micros(100);
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// The tries of one op. Progress starts a new one.
#[derive(Debug, Default)]
pub(super) struct Retries {
    since: Option<Instant>,
    pause: Duration,
}

impl Retries {
    /// Waits for the next try of an op that has ended with `error`. False: there is to be none, for
    /// the error is of another kind (not `EAGAIN` or `EINTR`) or has come for too long.
    pub(super) async fn wait(&mut self, io: &Io, error: &io::Error) -> bool {
        if !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) {
            return false;
        }
        let now = clock::now();
        let since = *self.since.get_or_insert(now);
        if now.saturating_duration_since(since) >= PATIENCE {
            return false;
        }
        self.pause = (self.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
        io.sleep_until(now + self.pause).await;
        true
    }
}
