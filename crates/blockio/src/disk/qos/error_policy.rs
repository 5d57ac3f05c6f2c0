//! The treatment of requests that a disk fails: reported, retried, or held.

use std::io;
use std::thread::panicking;
use std::time::{Duration, Instant};

use crate::clock;
use crate::executor::sync::Lock;

/// The treatment of failed requests. Always reported are requests that could not succeed, such as
/// one beyond the end of the disk, failed flushes, and writes with data that may be lost.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ErrorPolicy {
    /// For reads.
    pub read: ErrorAction,
    /// For everything else.
    pub write: ErrorAction,
}

/// The treatment of one failed request.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum ErrorAction {
    /// Report the error to the maker of the request.
    #[default]
    Report,
    /// Retry the request, less and less often, until it succeeds. Report errors that cannot pass.
    Retry,
    /// If there is no space left, hold the request until there is some or it is
    /// [resumed](crate::disk::DiskSource::resume). Report other errors.
    Hold,
    /// Like `Hold`, but for 20 seconds at most; then report the error.
    HoldBriefly,
}

/// Shorter than the 30 seconds after which initiators abandon a request.
const BRIEFLY: Duration = Duration::from_secs(20);
/// The first pause; each further one is twice as long, up to the last.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

impl ErrorAction {
    /// The reason for which a request that failed with `error` waits. `None` if it is reported.
    fn on(self, error: &io::Error) -> Option<WaitReason> {
        let errno = error.raw_os_error()?;
        match self {
            Self::Report => None,
            Self::Retry => is_transient(errno).then_some(WaitReason::Retried),
            Self::Hold | Self::HoldBriefly => {
                matches!(errno, libc::ENOSPC | libc::EDQUOT).then_some(WaitReason::Held)
            }
        }
    }

    fn limit(self) -> Option<Duration> {
        (self == Self::HoldBriefly).then_some(BRIEFLY)
    }
}

/// Returns true if an error may be gone at the next try. The listed errors will not be: they
/// concern the request, or this process.
fn is_transient(errno: i32) -> bool {
    use libc::{
        EBADE, EBADF, ECANCELED, EFAULT, EFBIG, EINVAL, ENOSYS, ENOTTY, EOPNOTSUPP, EOVERFLOW,
        EPERM, EROFS, ESHUTDOWN, ESPIPE,
    };
    !matches!(
        errno,
        EBADE
            | EBADF
            | ECANCELED
            | EFAULT
            | EFBIG
            | EINVAL
            | ENOSYS
            | ENOTTY
            | EOPNOTSUPP
            | EOVERFLOW
            | EPERM
            | EROFS
            | ESHUTDOWN
            | ESPIPE
    )
}

/// The reason for which requests wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitReason {
    Retried,
    Held,
}

/// The requests of a disk that wait because it failed them.
#[derive(Debug, Default)]
pub(crate) struct RetryStats(Lock<State>);

#[derive(Debug, Default)]
struct State {
    retried: WaitCount,
    held: WaitCount,
    /// The number of requests that have waited.
    count: u64,
    /// The errno of the last request that began to wait.
    errno: Option<i32>,
}

/// The requests that wait for one reason.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct WaitCount {
    now: u32,
    /// The start of the time for which at least one has waited.
    since: Option<Instant>,
    /// The time that requests have waited up to the last change, all together.
    total: Duration,
    changed: Option<Instant>,
}

impl WaitCount {
    pub(crate) fn begin(&mut self, now: Instant) {
        self.advance(now);
        self.now += 1;
        self.since.get_or_insert(now);
    }

    pub(crate) fn end(&mut self, now: Instant) {
        self.advance(now);
        self.now -= 1;
        if self.now == 0 {
            self.since = None;
        }
    }

    /// The time that requests have waited so far, all together.
    pub(crate) fn total(mut self, now: Instant) -> Duration {
        self.advance(now);
        self.total
    }

    fn advance(&mut self, now: Instant) {
        let since = self.changed.replace(now).unwrap_or(now);
        self.total += now.saturating_duration_since(since) * self.now;
    }
}

impl State {
    fn count_mut(&mut self, why: WaitReason) -> &mut WaitCount {
        match why {
            WaitReason::Retried => &mut self.retried,
            WaitReason::Held => &mut self.held,
        }
    }
}

impl RetryStats {
    /// The reason for which requests wait now, and since when. Held requests take precedence.
    pub(crate) fn current(&self) -> Option<(WaitReason, Instant)> {
        let state = self.0.lock();
        let waiting = [(WaitReason::Held, state.held), (WaitReason::Retried, state.retried)];
        waiting.into_iter().find_map(|(why, waiting)| Some((why, waiting.since?)))
    }

    /// The number of requests that have waited so far, and the errno of the last.
    pub(crate) fn totals(&self) -> (u64, Option<i32>) {
        let state = self.0.lock();
        (state.count, state.errno)
    }

    fn begin(&self, why: WaitReason, errno: i32, now: Instant) {
        let mut state = self.0.lock();
        state.count += 1;
        state.errno = Some(errno);
        state.count_mut(why).begin(now);
    }

    fn end(&self, why: WaitReason) {
        self.0.lock().count_mut(why).end(clock::now());
    }

    /// The time that requests have waited, retried and held ones, all together.
    pub(crate) fn times(&self, now: Instant) -> [Duration; 2] {
        let state = self.0.lock();
        [state.retried.total(now), state.held.total(now)]
    }
}

impl Drop for State {
    fn drop(&mut self) {
        let waiting = (self.retried.now, self.held.now);
        debug_assert!(waiting == (0, 0) || panicking(), "{waiting:?} requests do not wait");
    }
}

/// The tries of one request that a disk failed.
pub(crate) struct RetryState<'a> {
    retry_stats: &'a RetryStats,
    since: Option<Instant>,
    pause: Duration,
    counted: Option<WaitReason>,
}

impl<'a> RetryState<'a> {
    pub(crate) fn new(retry_stats: &'a RetryStats) -> Self {
        Self { retry_stats, since: None, pause: Duration::ZERO, counted: None }
    }

    /// Counts a failure with `error`. Returns the pause before the next try, or `None` if the error
    /// is to be reported.
    pub(crate) fn record_failure(
        &mut self,
        action: ErrorAction,
        error: &io::Error,
        now: Instant,
    ) -> Option<Duration> {
        let why = action.on(error)?;
        let since = *self.since.get_or_insert(now);
        let left = match action.limit() {
            Some(limit) => (since + limit).checked_duration_since(now)?,
            None => PAUSE_MAX,
        };
        if left.is_zero() {
            return None;
        }
        if self.counted != Some(why) {
            self.end();
            self.retry_stats.begin(why, error.raw_os_error().unwrap_or(0), now);
            self.counted = Some(why);
        }
        self.pause = (2 * self.pause).clamp(PAUSE_MIN, PAUSE_MAX);
        Some(self.pause.min(left))
    }

    fn end(&mut self) {
        if let Some(why) = self.counted.take() {
            self.retry_stats.end(why);
        }
    }
}

impl Drop for RetryState<'_> {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_waiting_request_adds_its_time_even_before_the_end_of_its_wait() {
        let start = clock::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut count = WaitCount::default();
        count.begin(at(1));
        count.begin(at(3));
        assert_eq!(count.total(at(4)), Duration::from_secs(4), "3 s and 1 s");
        count.end(at(5));
        assert_eq!((count.total(at(6)), count.since), (Duration::from_secs(7), Some(at(1))));
        count.end(at(6));
        assert_eq!((count.total(at(100)), count.since), (Duration::from_secs(7), None));
        count.begin(at(100));
        assert_eq!(count.total(at(102)), Duration::from_secs(9));
    }

    #[test]
    fn retried_and_held_requests_have_times_of_their_own() {
        let start = clock::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let retry_stats = RetryStats::default();
        let (mut retried, mut held) =
            (RetryState::new(&retry_stats), RetryState::new(&retry_stats));
        let (eio, full) = (errno(libc::EIO), errno(libc::ENOSPC));
        retried.record_failure(ErrorAction::Retry, &eio, at(1)).unwrap();
        held.record_failure(ErrorAction::Hold, &full, at(2)).unwrap();
        assert_eq!(retry_stats.times(at(5)), [4, 3].map(Duration::from_secs));
    }

    #[test]
    fn a_client_that_was_locked_out_does_not_try_again() {
        // A cluster locks a client out for good; space comes back.
        assert!(!is_transient(libc::ESHUTDOWN));
        assert!(is_transient(libc::ENOSPC) && is_transient(libc::EIO));
    }

    fn errno(number: i32) -> io::Error {
        io::Error::from_raw_os_error(number)
    }

    #[test]
    fn each_action_keeps_the_errors_that_it_is_for() {
        use ErrorAction::{Hold, HoldBriefly, Report, Retry};
        for (number, kept) in [
            (libc::EIO, [false, true, false, false]),
            (libc::ENOSPC, [false, true, true, true]),
            (libc::EDQUOT, [false, true, true, true]),
            (libc::EINVAL, [false; 4]),
            (libc::EROFS, [false; 4]),
            (libc::ECANCELED, [false; 4]),
        ] {
            let retry_stats = RetryStats::default();
            let seen = [Report, Retry, Hold, HoldBriefly].map(|action| {
                let mut tries = RetryState::new(&retry_stats);
                tries.record_failure(action, &errno(number), Instant::now()).is_some()
            });
            assert_eq!(seen, kept, "{number}");
            assert_eq!(retry_stats.current(), None, "they have ended");
        }
    }

    #[test]
    fn pauses_double_and_a_briefly_held_request_is_reported_in_the_end() {
        let (retry_stats, start) = (RetryStats::default(), Instant::now());
        let mut tries = RetryState::new(&retry_stats);
        let mut now = start;
        let mut pauses = Vec::new();
        while let Some(pause) =
            tries.record_failure(ErrorAction::HoldBriefly, &errno(libc::ENOSPC), now)
        {
            pauses.push(pause);
            now += pause;
        }
        assert_eq!(pauses[..3], [10, 20, 40].map(Duration::from_millis));
        assert_eq!(now - start, BRIEFLY);
        assert_eq!(retry_stats.current(), Some((WaitReason::Held, start)));
        // The reason has changed.
        let pause = tries.record_failure(ErrorAction::Retry, &errno(libc::EIO), now).unwrap();
        assert_eq!(pause, PAUSE_MAX);
        assert_eq!(retry_stats.current(), Some((WaitReason::Retried, now)));
        drop(tries);
        assert_eq!((retry_stats.current(), retry_stats.totals()), (None, (2, Some(libc::EIO))));
    }
}
