//! Retries of ops that the kernel puts off.

use std::io;
use std::time::{Duration, Instant};

use crate::clock;
use crate::thread::io::Io;

/// A disk that answers with EAGAIN for this long will not recover: the request fails then.
const PATIENCE: Duration =
    if cfg!(test) { Duration::from_millis(100) } else { Duration::from_secs(5) };
/// The first pause; each further one is twice as long.
const PAUSE_MIN: Duration = Duration::from_micros(100);
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// The retries of one op. Progress starts a new count. Few ops have any, so they are kept out of
/// its future.
#[derive(Debug, Default)]
pub(crate) struct OpRetries(Option<Box<Attempts>>);

#[derive(Debug)]
struct Attempts {
    since: Instant,
    pause: Duration,
}

impl OpRetries {
    /// Returns true if an op that ended with `error` may be retried at all.
    #[inline]
    pub(crate) fn are_for(error: &io::Error) -> bool {
        matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN))
    }

    /// Waits for the next try of an op. Returns false if it was tried for long enough.
    pub(crate) async fn wait(&mut self, io: &Io) -> bool {
        let now = clock::now();
        let first = || Box::new(Attempts { since: now, pause: Duration::ZERO });
        let tries = self.0.get_or_insert_with(first);
        if now.saturating_duration_since(tries.since) >= PATIENCE {
            return false;
        }
        tries.pause = (tries.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
        io.sleep_until(now + tries.pause).await;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{EngineConfig, IoThreadConfig};
    use crate::thread::IoThread;

    /// On a busy machine each pause is longer than asked for, and so the tries are fewer.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn the_pauses_between_tries_double_until_there_were_enough() {
        let config = IoThreadConfig { engine: EngineConfig::Threads, ..IoThreadConfig::default() };
        let thread = IoThread::new(&config).unwrap();
        let pauses = async {
            let (mut retries, mut pauses) = (OpRetries::default(), Vec::new());
            loop {
                let began = Instant::now();
                if !retries.wait(thread.io()).await {
                    return pauses;
                }
                pauses.push(began.elapsed().as_micros());
            }
        };
        let pauses = thread.block_on(pauses).unwrap();
        assert!((1..=10).contains(&pauses.len()), "{pauses:?}");
        assert!((0..).zip(&pauses).all(|(number, &pause)| pause >= 100 << number), "{pauses:?}");
    }
}
