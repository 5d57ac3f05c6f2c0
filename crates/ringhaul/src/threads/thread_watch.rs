//! Detects and reports IoThreads that do not turn, from another thread and while it lasts.
//!
//! A system call that blocks unexpectedly stops an IoThread and everything that it serves: above
//! all, a submit of Linux AIO to a frozen file system. The IoThread itself can report it only
//! afterwards.
//!
//! An IoThread that sleeps while its disks have operations is woken, so that it reports operations
//! that are not answered; see `watchdog.rs` of blockio.

use std::time::{Duration, Instant};

use blockio::Remote;

/// The interval between checks of IoThreads.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// An IoThread that does not turn for this long, although it has work, is stuck.
const STUCK: Duration = Duration::from_secs(3);
/// The interval between reports on a thread that is still stuck.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// The IoThreads that are watched.
pub(crate) struct ThreadWatch {
    threads: Vec<Watched>,
    checked_at: Option<Instant>,
}

struct Watched {
    name: String,
    remote: Remote,
    turns: u64,
    /// The time since which it does not turn.
    since: Instant,
    is_woken: bool,
    reported_at: Option<Instant>,
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Finding {
    Nothing,
    /// The thread sleeps with operations, and must be woken.
    Sleeps,
    /// The thread has not turned for this long.
    Stuck(Duration),
    /// The thread turns again, after this long.
    Resumed(Duration),
}

impl ThreadWatch {
    pub(crate) const fn new() -> Self {
        Self { threads: Vec::new(), checked_at: None }
    }

    pub(crate) fn add(&mut self, name: String, remote: Remote) {
        let (turns, since) = (remote.stats().turns.get(), Instant::now());
        self.threads.push(Watched {
            name,
            remote,
            turns,
            since,
            is_woken: false,
            reported_at: None,
        });
    }

    /// The turns of all threads together. `None` while one of them has work, so that the state of a
    /// disk may change without a turn.
    pub(crate) fn turns_if_idle(&self) -> Option<u64> {
        let stats = self.threads.iter().map(|thread| thread.remote.stats());
        stats.map(|stats| (stats.is_idle.get() == 1).then(|| stats.turns.get())).sum()
    }

    /// Checks all threads if it is time. Forgets threads that have ended.
    pub(crate) fn check(&mut self, now: Instant) {
        let passed = self.checked_at.map(|checked| now.saturating_duration_since(checked));
        if passed.is_some_and(|passed| passed < CHECK_INTERVAL) {
            return;
        }
        self.checked_at = Some(now);
        // Checks were missing: the caller was late, or the process was stopped.
        let is_late = passed.is_none_or(|passed| passed > 2 * CHECK_INTERVAL);
        self.threads.retain_mut(|thread| {
            if is_late {
                (thread.since, thread.is_woken) = (now, false);
            }
            let stats = thread.remote.stats();
            let (turns, is_idle) = (stats.turns.get(), stats.is_idle.get() == 1);
            match thread.find(turns, is_idle, now) {
                Finding::Nothing => true,
                Finding::Sleeps => thread.remote.post(|_| ()),
                Finding::Stuck(time) => {
                    let disk = thread.remote.stats().submits_to();
                    tracing::error!(
                        "{} has been stuck in a system call for {} s and serves no requests: {} \
                         blocks it, or this process was stopped; pin the export of such a disk to \
                         an IoThread of its own (iothread=), or choose another --engine",
                        thread.name,
                        time.as_secs(),
                        disk.map_or("a disk".into(), |path| path.display().to_string())
                    );
                    true
                }
                Finding::Resumed(time) => {
                    tracing::info!("{} continues after {} s", thread.name, time.as_secs());
                    true
                }
            }
        });
    }
}

impl Watched {
    fn find(&mut self, turns: u64, is_idle: bool, now: Instant) -> Finding {
        let time = now.saturating_duration_since(self.since);
        if turns != self.turns {
            let was_stuck = self.reported_at.take().is_some();
            (self.turns, self.since, self.is_woken) = (turns, now, false);
            return if was_stuck { Finding::Resumed(time) } else { Finding::Nothing };
        }
        if !self.is_woken {
            if is_idle {
                self.since = now;
                return Finding::Nothing;
            }
            self.is_woken = true;
            return Finding::Sleeps;
        }
        let is_due = |reported| now.saturating_duration_since(reported) >= REPORT_INTERVAL;
        if time < STUCK || !self.reported_at.is_none_or(is_due) {
            return Finding::Nothing;
        }
        self.reported_at = Some(now);
        Finding::Stuck(time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockio::{EngineConfig, IoThread, IoThreadConfig};

    #[test]
    fn a_thread_that_is_woken_and_does_not_turn_is_stuck() {
        let config = IoThreadConfig { engine: EngineConfig::Threads, ..IoThreadConfig::default() };
        let thread = IoThread::new(&config).unwrap();
        let mut watch = ThreadWatch::new();
        watch.add("iothread-0".into(), thread.remote());
        let watched = &mut watch.threads[0];
        let start = watched.since;
        let at = |second| start + Duration::from_secs(second);
        // The thread may sleep without operations for any time.
        assert_eq!(watched.find(0, true, at(10)), Finding::Nothing);
        // The thread waits for operations, and turns when woken.
        assert_eq!(watched.find(0, false, at(11)), Finding::Sleeps);
        assert_eq!(watched.find(1, false, at(12)), Finding::Nothing);
        // The thread does not turn.
        assert_eq!(watched.find(1, false, at(13)), Finding::Sleeps);
        assert_eq!(watched.find(1, false, at(14)), Finding::Nothing);
        assert_eq!(watched.find(1, false, at(15)), Finding::Stuck(Duration::from_secs(3)));
        assert_eq!(watched.find(1, false, at(16)), Finding::Nothing);
        assert_eq!(watched.find(1, false, at(75)), Finding::Stuck(Duration::from_secs(63)));
        assert_eq!(watched.find(2, false, at(76)), Finding::Resumed(Duration::from_secs(64)));
        assert_eq!(watched.find(3, false, at(77)), Finding::Nothing);
    }

    #[test]
    fn a_thread_that_has_ended_is_forgotten() {
        let config = IoThreadConfig { engine: EngineConfig::Threads, ..IoThreadConfig::default() };
        let thread = IoThread::new(&config).unwrap();
        let mut watch = ThreadWatch::new();
        watch.add("iothread-0".into(), thread.remote());
        let now = Instant::now();
        watch.check(now);
        assert_eq!(watch.threads.len(), 1);
        drop(thread);
        watch.threads[0].is_woken = false;
        watch.check(now + CHECK_INTERVAL);
        assert!(watch.threads.is_empty());
    }
}
