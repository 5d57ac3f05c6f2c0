//! Reports to the service manager while the daemon runs: its state in words, and signs of life
//! while every IoThread turns.

use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockio::executor::{Lock, start_thread};

use crate::control::subscribers::{EventReceiver, Subscription};
use crate::daemon::Daemon;
use crate::process::service_manager;
use crate::process::thread_guard::ThreadGuard;

/// The least time between two reports of the state.
const PAUSE: Duration = Duration::from_secs(1);

/// The subscription of the thread. Its end wakes the thread.
type SharedSubscription = Arc<Lock<Option<Subscription>>>;

/// Starts the thread that reports. `None`: no service manager listens.
///
/// # Errors
///
/// When the kernel has no thread left.
pub(super) fn start(daemon: &Arc<Daemon>) -> Result<Option<ThreadGuard>> {
    let is_present = service_manager::is_present();
    let interval = service_manager::watchdog_interval();
    is_present.then(|| begin(daemon, interval, SharedSubscription::default())).transpose()
}

fn begin(
    daemon: &Arc<Daemon>,
    interval: Option<Duration>,
    subscription: SharedSubscription,
) -> Result<ThreadGuard> {
    let (end, ended) = channel::<()>();
    let shared = Arc::clone(&subscription);
    let reporter = Reporter { daemon: Arc::downgrade(daemon), ended, subscription: shared };
    let watchdog = interval.map(|interval| Watchdog { interval, due: Instant::now(), turns: None });
    let thread = start_thread("ringhaul-notify", move || reporter.run(watchdog))
        .context("cannot start the thread that reports to the service manager")?;
    Ok(ThreadGuard::new(thread, move || {
        drop(end);
        drop(subscription.lock().take());
    }))
}

struct Reporter {
    daemon: Weak<Daemon>,
    /// Disconnected at the end.
    ended: Receiver<()>,
    subscription: SharedSubscription,
}

/// Signs of life.
struct Watchdog {
    interval: Duration,
    due: Instant,
    /// Ends when every IoThread has turned. `None`: no turn was asked for.
    turns: Option<Receiver<()>>,
}

impl Reporter {
    fn run(self, mut watchdog: Option<Watchdog>) {
        while let Some(daemon) = self.daemon.upgrade() {
            // A subscriber that falls behind loses its subscription.
            let (subscription, events) = daemon.subscribers().subscribe();
            drop(daemon);
            let mut shared = self.subscription.lock();
            // Checked under the lock, which the end takes later.
            if self.ended.try_recv() == Err(TryRecvError::Disconnected) {
                return;
            }
            let earlier = shared.replace(subscription);
            drop(shared);
            drop(earlier);
            if !self.follow(&events, &mut watchdog) {
                return;
            }
        }
    }

    /// Reports until the subscription ends, or the daemon, in which case it returns false.
    fn follow(&self, events: &EventReceiver, watchdog: &mut Option<Watchdog>) -> bool {
        loop {
            let Some(daemon) = self.daemon.upgrade() else { return false };
            let reported = daemon.report_state();
            if let Some(watchdog) = watchdog {
                watchdog.check(&daemon, Instant::now());
            }
            drop(daemon);
            if reported.is_err() {
                return false;
            }
            // Front-ends that connect and leave in a loop cause one report in a second.
            let pause = watchdog.as_ref().map_or(PAUSE, |watchdog| watchdog.interval.min(PAUSE));
            if self.ended.recv_timeout(pause) == Err(RecvTimeoutError::Disconnected) {
                return false;
            }
            let next = match watchdog {
                Some(watchdog) => {
                    events.events.recv_timeout(watchdog.due.duration_since(Instant::now()))
                }
                None => events.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match next {
                // One report is for all events so far.
                Ok(_) => events.events.try_iter().for_each(drop),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return true,
            }
        }
    }
}

impl Watchdog {
    /// Gives a sign of life if it is due and all IoThreads have turned since the last one.
    fn check(&mut self, daemon: &Daemon, now: Instant) {
        if now < self.due {
            return;
        }
        let has_turned = |turns: &Receiver<()>| turns.try_recv() == Err(TryRecvError::Disconnected);
        if self.turns.as_ref().is_none_or(has_turned) {
            service_manager::alive();
            self.turns = Some(daemon.ask_for_turns());
        }
        self.due = now + self.interval;
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args, FromArgMatches};

    use super::*;
    use crate::daemon::Shutdown;
    use crate::options::ServeArgs;
    use crate::socket::inherited::InheritedSockets;

    fn daemon() -> (Arc<Daemon>, Shutdown) {
        let serve = ServeArgs::augment_args(clap::Command::new("serve"));
        let args = ServeArgs::from_arg_matches(&serve.get_matches_from(["serve"])).unwrap();
        let (daemon, ending) = Daemon::start(args, InheritedSockets::default()).unwrap();
        (Arc::new(daemon), ending)
    }

    /// The manager ends a daemon whose IoThread hangs.
    #[test]
    fn a_sign_of_life_waits_until_every_io_thread_has_turned() {
        let (daemon, _ending) = daemon();
        let (turning, turns) = std::sync::mpsc::channel();
        let now = Instant::now();
        let interval = Duration::from_secs(1);
        let mut watchdog = Watchdog { interval, due: now, turns: Some(turns) };
        let next = |watchdog: &Watchdog| watchdog.turns.as_ref().unwrap().try_recv();
        watchdog.check(&daemon, now);
        assert_eq!(next(&watchdog), Err(TryRecvError::Empty), "it is asked again");
        assert_eq!(watchdog.due, now + interval);
        turning.send(()).unwrap();
        drop(turning);
        // It is not due yet.
        watchdog.check(&daemon, now);
        assert_eq!(next(&watchdog), Ok(()));
        watchdog.check(&daemon, now + interval);
        assert_eq!(watchdog.due, now + 2 * interval);
        let (_turning, turns) = std::sync::mpsc::channel();
        watchdog.turns = None;
        watchdog.check(&daemon, now + 2 * interval);
        assert!(watchdog.turns.replace(turns).is_some(), "each sign asks for turns");
    }

    /// Reports continue with another subscription until the daemon ends.
    #[test]
    fn a_reporter_that_fell_behind_continues() {
        let (daemon, ending) = daemon();
        let (_end, end) = channel();
        let subscription = SharedSubscription::default();
        let reporter = Reporter { daemon: Arc::downgrade(&daemon), ended: end, subscription };
        let ended = || {
            let (subscription, events) = daemon.subscribers().subscribe();
            drop(subscription);
            events
        };
        assert!(reporter.follow(&ended(), &mut None));
        let events = ended();
        drop((ending, daemon));
        assert!(!reporter.follow(&events, &mut None));
    }

    /// Otherwise its thread may be the last owner of the daemon, and close files that it must not.
    #[test]
    fn the_thread_of_reports_ends_before_its_daemon() {
        let (daemon, _ending) = daemon();
        for interval in [None, Some(Duration::from_secs(3600))] {
            let before = Arc::weak_count(&daemon);
            let subscription = SharedSubscription::default();
            let reports = begin(&daemon, interval, Arc::clone(&subscription)).unwrap();
            while subscription.lock().is_none() {
                std::thread::yield_now();
            }
            assert_eq!(Arc::weak_count(&daemon), before + 1);
            drop(reports);
            assert_eq!(Arc::weak_count(&daemon), before, "the thread still runs");
        }
    }
}
