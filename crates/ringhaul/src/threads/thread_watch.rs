//! Detects and reports IoThreads that do not turn, from another thread and while it lasts.
//!
//! A system call that blocks unexpectedly stops an IoThread and everything that it serves: above
//! all, a submit of Linux AIO to a frozen file system. The IoThread itself can report it only
//! afterwards.
//!
//! An IoThread that sleeps while its disks have operations is woken, so that it reports operations
//! that are not answered; see `watchdog.rs` of blockio.
//!
//! While all IoThreads sleep without operations, the threads that watch them rest. Each leaves a
//! note with each IoThread, which reads it when it wakes, before it does anything else.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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
    /// The turns of all IoThreads when each watcher last asked if it may rest, if all slept then.
    rests: [Option<u64>; Watcher::COUNT],
}

/// A thread that rests while all IoThreads sleep.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Watcher {
    /// The watch of calls and of stuck IoThreads.
    Threads,
    /// The watch of disks.
    Disks,
}

impl Watcher {
    const COUNT: usize = 2;
}

struct Watched {
    name: String,
    remote: Remote,
    turns: u64,
    /// The time since which it does not turn.
    since: Instant,
    is_woken: bool,
    reported_at: Option<Instant>,
    /// True for a watcher whose note the thread has not read.
    has_note: [Arc<AtomicBool>; Watcher::COUNT],
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
        Self { threads: Vec::new(), checked_at: None, rests: [None; Watcher::COUNT] }
    }

    pub(crate) fn add(&mut self, name: String, remote: Remote) {
        self.threads.push(Watched {
            name,
            remote,
            // The thread has just started.
            turns: 0,
            since: Instant::now(),
            is_woken: false,
            reported_at: None,
            has_note: Default::default(),
        });
    }

    /// The turns of all threads together. `None` while one of them has work, so that the state of a
    /// disk may change without a turn.
    pub(crate) fn turns_if_idle(&self) -> Option<u64> {
        let stats = self.threads.iter().map(|thread| thread.remote.stats());
        stats.map(|stats| (stats.is_idle.get() == 1).then(|| stats.turns.get())).sum()
    }

    /// Returns true if `watcher` may rest until `wake` is called: all IoThreads have slept since it
    /// last asked, and the first one that wakes calls `wake`. The watcher asks some time later than
    /// the last time, because an IoThread that was waking then may have missed its note.
    pub(crate) fn may_rest(
        &mut self,
        watcher: Watcher,
        wake: impl Fn() + Clone + Send + 'static,
    ) -> bool {
        let turns = self.turns_if_idle();
        let before = std::mem::replace(&mut self.rests[watcher as usize], turns);
        if turns.is_none() || turns != before {
            return false;
        }
        let mut has_all = true;
        for thread in &self.threads {
            let has_note = &thread.has_note[watcher as usize];
            if !has_note.swap(true, Ordering::Relaxed) {
                has_all = false;
                let (has_note, wake) = (Arc::clone(has_note), wake.clone());
                thread.remote.post_quietly(move |_| {
                    has_note.store(false, Ordering::Relaxed);
                    wake();
                });
            }
        }
        has_all
    }

    /// Checks all threads if it is time. Forgets threads that have ended. Returns true if the
    /// calling thread may rest until it is unparked.
    pub(crate) fn check(&mut self, now: Instant) -> bool {
        let passed = self.checked_at.map(|checked| now.saturating_duration_since(checked));
        if passed.is_some_and(|passed| passed < CHECK_INTERVAL) {
            return false;
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
        let watch = std::thread::current();
        self.may_rest(Watcher::Threads, move || watch.unpark())
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
    use blockio::{EngineConfig, IoThread, IoThreadConfig, Wait};
    use std::sync::atomic::AtomicU64;

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

    /// The whole process may have been stopped, by a debugger or with its machine.
    #[test]
    fn a_thread_is_not_stuck_because_checks_were_missing() {
        let config = IoThreadConfig { engine: EngineConfig::Threads, ..IoThreadConfig::default() };
        let thread = IoThread::new(&config).unwrap();
        let mut watch = ThreadWatch::new();
        watch.add("iothread-0".into(), thread.remote());
        let now = Instant::now();
        watch.check(now);
        watch.threads[0].is_woken = true;
        watch.check(now + 1000 * CHECK_INTERVAL);
        assert_eq!(watch.threads[0].reported_at, None);
    }

    #[test]
    fn watchers_rest_until_an_io_thread_wakes() {
        let config = IoThreadConfig { engine: EngineConfig::Threads, ..IoThreadConfig::default() };
        let threads = [(); 2].map(|()| IoThread::new(&config).unwrap());
        let mut watch = ThreadWatch::new();
        for thread in &threads {
            watch.add("iothread".into(), thread.remote());
        }
        let wakes = Arc::new(AtomicU64::new(0));
        let mut may_rest = |watcher| {
            let wakes = Arc::clone(&wakes);
            let wake = move || {
                wakes.fetch_add(1, Ordering::Relaxed);
            };
            watch.may_rest(watcher, wake)
        };
        let set_idle = |idle| threads.iter().for_each(|it| it.remote().stats().is_idle.set(idle));
        let mut asked = |watcher| [(); 4].map(|()| may_rest(watcher));
        assert_eq!(asked(Watcher::Disks), [false; 4], "they work");
        set_idle(1);
        // The second time they have notes, which a thread may have missed.
        assert_eq!(asked(Watcher::Disks), [false, false, true, true]);
        assert_eq!(asked(Watcher::Threads), [false, false, true, true]);
        for (turns, woken) in [(1, 2), (2, 2)] {
            threads[0].turn(Wait::Never).unwrap();
            let seen = (threads[0].remote().stats().turns.get(), wakes.load(Ordering::Relaxed));
            assert_eq!(seen, (turns, woken), "each watcher is woken once");
        }
        assert_eq!(asked(Watcher::Disks), [false, false, true, true]);
        threads[1].turn(Wait::Never).unwrap();
        assert_eq!(wakes.load(Ordering::Relaxed), 4, "it kept its notes");
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
