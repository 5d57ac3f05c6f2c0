//! The end of a daemon.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::task::Poll;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::control::Control;
use crate::process::service_manager;
use crate::spec::command::EndCause;
use crate::threads::ownership::{PassedOn, Successor};

/// The time that exports on other IoThreads have to finish their requests after one IoThread
/// failed.
const FINISH_MAX: Duration = Duration::from_secs(10);

/// The time that the control thread has to log the requests that are left behind.
const ABANDON_MAX: Duration = Duration::from_secs(1);

/// The time that releasing disks may take before the log reports the wait.
const RELEASE_QUIET: Duration = Duration::from_secs(1);

/// An event that brings the end of the daemon nearer.
pub(crate) enum Event {
    /// A request to end the daemon.
    Requested(EndCause),
    /// The last export has ended.
    Ended,
    /// A takeover by another process. The sender is dropped when the disks are released.
    HandedOver(Arc<Successor>, mpsc::Receiver<()>),
    /// An IoThread has ended with an error.
    ThreadFailed,
    /// The exports of the start cannot be served, and no further exports exist.
    NotStarted(anyhow::Error),
}

/// The way in which a daemon has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All requests are answered.
    Clean,
    /// All exports were handed over to another process.
    HandedOver,
    /// Requests are left behind.
    Abandoned,
    /// An IoThread failed. Exports on other IoThreads have ended, or their time is over.
    ThreadFailed,
}

/// Waits until all exports have ended. A request to end makes them finish, and a second one
/// abandons them. SIGHUP is never the second: service managers send it together with SIGTERM.
/// Requests that arrive after another process has taken over are passed on to it. If an IoThread
/// ends with an error, exports on other IoThreads have [`FINISH_MAX`] to finish.
///
/// # Errors
///
/// The reason that the daemon could not start, unless it was asked to end.
pub(crate) fn wait_for_shutdown(
    events: &mpsc::Receiver<Event>,
    control: &Control,
) -> Result<Outcome> {
    wait_with(events, control, FINISH_MAX)
}

/// Like [`wait_for_shutdown`], with this time after the failure of an IoThread.
fn wait_with(
    events: &mpsc::Receiver<Event>,
    control: &Control,
    finish_max: Duration,
) -> Result<Outcome> {
    let (mut is_stopping, mut leaves_at) = (false, None::<Instant>);
    // Asked by a cause that counts towards the second time; asked by any cause.
    let (mut is_asked, mut is_asked_once) = (false, false);
    let abandon = |outcome, is_asked| {
        let abandoned = control.abandon();
        // A fixed deadline: events that arrive in the meantime do not extend it.
        let until = Instant::now() + ABANDON_MAX;
        let left = || until.saturating_duration_since(Instant::now());
        loop {
            match events.recv_timeout(left()) {
                Ok(Event::HandedOver(to, left)) => return Ok(release_to(&to, &left, is_asked)),
                Ok(Event::Requested(_) | Event::ThreadFailed | Event::NotStarted(_))
                    if !left().is_zero() => {}
                // Both requests came at once, and no export was left to abandon.
                Ok(Event::Ended)
                    if outcome == Outcome::Abandoned
                        && abandoned.check() != Poll::Ready(Some(true)) =>
                {
                    return Ok(Outcome::Clean);
                }
                _ => return Ok(outcome),
            }
        }
    };
    loop {
        let event = match leaves_at {
            Some(when) => events.recv_timeout(when.saturating_duration_since(Instant::now())),
            None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        let why = match event {
            Ok(Event::Requested(cause)) => {
                let may_be_second = !matches!(cause, EndCause::Sighup | EndCause::Predecessor);
                if may_be_second && std::mem::replace(&mut is_asked, true) {
                    return abandon(unless_failed(leaves_at, Outcome::Abandoned), true);
                }
                is_asked_once = true;
                cause.name()
            }
            Ok(Event::ThreadFailed) => {
                leaves_at.get_or_insert(Instant::now() + finish_max);
                "an IoThread has failed"
            }
            Err(RecvTimeoutError::Timeout) => return abandon(Outcome::ThreadFailed, is_asked_once),
            // The last export has ended, or the daemon was dropped.
            Ok(Event::Ended) | Err(RecvTimeoutError::Disconnected) => {
                return Ok(unless_failed(leaves_at, Outcome::Clean));
            }
            Ok(Event::HandedOver(to, left)) => return Ok(release_to(&to, &left, is_asked_once)),
            Ok(Event::NotStarted(error)) if is_stopping => {
                tracing::warn!("not served: {error:#}");
                continue;
            }
            Ok(Event::NotStarted(error)) => return Err(error),
        };
        if !is_stopping {
            service_manager::stopping();
            tracing::info!("{why}: finishing requests, then ending");
            control.begin_stop();
            is_stopping = true;
        }
    }
}

/// The outcome, unless the failure of an IoThread has set a deadline.
fn unless_failed(leaves_at: Option<Instant>, outcome: Outcome) -> Outcome {
    if leaves_at.is_some() { Outcome::ThreadFailed } else { outcome }
}

/// Leaves the exports to the process that has taken over, and asks it to end if this one was asked
/// to. Waits until the disks are released, because the new process waits for that. Requests that
/// arrive in the meantime are passed on at once.
fn release_to(successor: &Successor, left: &mpsc::Receiver<()>, is_asked: bool) -> Outcome {
    tracing::info!("process {} has taken over", successor.process);
    if is_asked {
        successor.pass_on(PassedOn::End);
    }
    if left.recv_timeout(RELEASE_QUIET) == Err(RecvTimeoutError::Timeout) {
        tracing::info!(
            "this process ends when its disks are released, which may wait for their servers"
        );
        // The release has its own time-out.
        let _ = left.recv();
    }
    Outcome::HandedOver
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read};
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::threads::ownership::Ownership;

    /// Any number of requests from any cause: after a takeover the new process is the one to end.
    #[test]
    fn late_requests_are_passed_on() {
        use EndCause::{Predecessor, Sighup, Sigterm};
        for (causes, passed_on) in [
            (&[][..], 0),
            (&[Sigterm][..], 1),
            (&[Sighup][..], 1),
            (&[Predecessor, Sigterm][..], 1),
            (&[Sigterm, Sigterm, Sigterm][..], 1),
        ] {
            let control = Control::start(|| {}).unwrap();
            let (sender, events) = mpsc::channel();
            causes.iter().for_each(|cause| sender.send(Event::Requested(*cause)).unwrap());
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let ownership = Ownership::default();
            let (_, left) = mpsc::channel();
            let tell = |successor| sender.send(Event::HandedOver(successor, left)).unwrap();
            ownership.transfer(7, ours, tell);
            let outcome = wait_for_shutdown(&events, &control).unwrap();
            assert_eq!(outcome, Outcome::HandedOver, "{causes:?}");
            drop((ownership, events));
            let mut text = String::new();
            theirs.read_to_string(&mut text).unwrap();
            assert_eq!(text.lines().filter(|line| line.contains("end")).count(), passed_on);
        }
    }

    /// Two requests may arrive at once, and nothing is left behind in that case.
    #[test]
    fn two_requests_at_once_end_an_idle_process() {
        let (sender, events) = mpsc::channel();
        let ended = sender.clone();
        let control = Control::start(move || drop(ended.send(Event::Ended))).unwrap();
        for cause in [EndCause::Sigterm, EndCause::Sigint] {
            sender.send(Event::Requested(cause)).unwrap();
        }
        assert_eq!(wait_for_shutdown(&events, &control).unwrap(), Outcome::Clean);
    }

    /// Service managers send SIGHUP together with SIGTERM, and exports that are being opened may
    /// fail at that moment.
    #[test]
    fn an_end_is_clean_although_more_events_come() {
        let control = Control::start(|| {}).unwrap();
        let (sender, events) = mpsc::channel();
        let failed = || Event::NotStarted(anyhow::anyhow!("it cannot be opened"));
        for cause in [EndCause::Sigterm, EndCause::Sighup, EndCause::Predecessor] {
            sender.send(Event::Requested(cause)).unwrap();
            sender.send(failed()).unwrap();
        }
        sender.send(Event::Ended).unwrap();
        assert_eq!(wait_for_shutdown(&events, &control).unwrap(), Outcome::Clean);
        sender.send(failed()).unwrap();
        let error = wait_for_shutdown(&events, &control).unwrap_err();
        assert_eq!(error.to_string(), "it cannot be opened");
    }

    /// Threads may fail one by one, for as long as the daemon runs.
    #[test]
    fn a_further_failure_of_a_thread_does_not_delay_the_end() {
        let control = Control::start(|| {}).unwrap();
        let (sender, events) = mpsc::channel();
        std::thread::scope(|scope| {
            let fails = scope.spawn(move || {
                let start = Instant::now();
                while start.elapsed() < Duration::from_secs(30) {
                    if sender.send(Event::ThreadFailed).is_err() {
                        return true;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                false
            });
            let outcome = wait_with(&events, &control, Duration::from_millis(100)).unwrap();
            assert_eq!(outcome, Outcome::ThreadFailed);
            drop(events);
            assert!(fails.join().unwrap(), "it waits for the last failure");
        });
    }

    /// A disk may be released late, for example because of a lock in a cluster. Until then, the new
    /// process must not serve exports that were told to end.
    #[test]
    fn it_is_passed_on_before_disks_are_left() {
        let control = Control::start(|| {}).unwrap();
        let (sender, events) = mpsc::channel();
        let (leaving, left) = mpsc::channel();
        let (ours, theirs) = UnixStream::pair().unwrap();
        // A missing request must be an error, not a hang.
        theirs.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let ownership = Ownership::default();
        let asked = || sender.send(Event::Requested(EndCause::Sigterm)).unwrap();
        ownership.run_or_pass_on(PassedOn::End, asked);
        ownership.transfer(7, ours, |successor| {
            sender.send(Event::HandedOver(successor, left)).unwrap()
        });
        std::thread::scope(|scope| {
            let control = &control;
            let ends = scope.spawn(move || wait_for_shutdown(&events, control).unwrap());
            let mut lines = BufReader::new(theirs).lines();
            assert!(lines.next().unwrap().unwrap().contains("end"));
            ownership.run_or_pass_on(PassedOn::End, || panic!("it is the other process's"));
            assert!(lines.next().unwrap().unwrap().contains("end"));
            assert!(!ends.is_finished(), "disks are not left");
            drop(leaving);
            assert_eq!(ends.join().unwrap(), Outcome::HandedOver);
        });
    }
}
