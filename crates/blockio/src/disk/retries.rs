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

/// The tries of one op. Progress starts a new one. Hardly any op has some, so they are kept out of
/// its future.
#[derive(Debug, Default)]
pub(super) struct Retries(Option<Box<Tries>>);

#[derive(Debug)]
struct Tries {
    since: Instant,
    pause: Duration,
}

impl Retries {
    /// Whether an op that has ended with `error` may be tried again at all.
    #[inline]
    pub(super) fn are_for(error: &io::Error) -> bool {
        matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN))
    }

    /// Waits for the next try of an op. False: there is to be none, for there were some for so long
    /// that no other will do better.
    pub(super) async fn wait(&mut self, io: &Io) -> bool {
        let now = clock::now();
        let first = || Box::new(Tries { since: now, pause: Duration::ZERO });
        let tries = self.0.get_or_insert_with(first);
        if now.saturating_duration_since(tries.since) >= PATIENCE {
            return false;
        }
        tries.pause = (tries.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
        io.sleep_until(now + tries.pause).await;
        true
    }
}
