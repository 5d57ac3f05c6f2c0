//! How a daemon comes to its end.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::command::EndCause;
use crate::control::Control;

/// How long exports on other IoThreads may take to finish their requests when one has failed.
const FINISH_MAX: Duration = Duration::from_secs(10);

/// How long the control thread may take to say what is left behind.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// What brings the end nearer.
pub(crate) enum Event {
    /// The daemon is asked to end.
    Asked(EndCause),
    /// The last export has ended.
    Ended,
    /// Another process goes on with all exports.
    HandedOver(u32),
    /// An IoThread has ended by an error.
    ThreadFailed,
    /// The exports that the daemon was started for cannot be served.
    NotStarted(anyhow::Error),
}

/// How a daemon has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All requests are answered.
    Clean,
    /// Another process goes on with all of it.
    HandedOver,
    /// Requests are left behind.
    Abandoned,
    /// An IoThread failed, and the other exports have ended, or had the time.
    ThreadFailed,
}

/// Waits until all exports have ended, which a signal makes them do. A second one does not let them
/// finish. SIGHUP is never the second: service managers send it together with SIGTERM. If an
/// IoThread ends by an error, the other exports have a while to finish.
///
/// # Errors
///
/// What keeps the daemon from starting, if nobody has asked it to end.
pub(crate) fn wait_for_end(events: &mpsc::Receiver<Event>, control: &Control) -> Result<Outcome> {
    let mut is_stopping = false;
    let mut is_asked = false;
    let mut leaves_at: Option<Instant> = None;
    let end_of = |outcome| {
        control.abandon();
        // However many signals come meanwhile.
        let until = Instant::now() + LAST_WORDS;
        let left = || until.saturating_duration_since(Instant::now());
        while let Ok(Event::Asked(_) | Event::ThreadFailed | Event::NotStarted(_)) =
            events.recv_timeout(left())
            && !left().is_zero()
        {}
        Ok(outcome)
    };
    loop {
        let event = match leaves_at {
            Some(when) => events.recv_timeout(when.saturating_duration_since(Instant::now())),
            None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        let why = match event {
            Ok(Event::Asked(cause @ EndCause::Sighup)) => cause.name(),
            Ok(Event::Asked(_)) if is_asked && leaves_at.is_some() => {
                return end_of(Outcome::ThreadFailed);
            }
            Ok(Event::Asked(_)) if is_asked => return end_of(Outcome::Abandoned),
            Ok(Event::Asked(cause)) => {
                is_asked = true;
                cause.name()
            }
            Ok(Event::ThreadFailed) => {
                leaves_at.get_or_insert(Instant::now() + FINISH_MAX);
                "an IoThread has failed"
            }
            Err(RecvTimeoutError::Timeout) => return end_of(Outcome::ThreadFailed),
            // The control thread's last word, or the daemon itself has gone.
            Ok(Event::Ended) | Err(RecvTimeoutError::Disconnected) => {
                let failed = leaves_at.is_some();
                return Ok(if failed { Outcome::ThreadFailed } else { Outcome::Clean });
            }
            Ok(Event::HandedOver(process)) => {
                tracing::info!("process {process} has taken over");
                return Ok(Outcome::HandedOver);
            }
            Ok(Event::NotStarted(error)) if is_stopping => {
                tracing::warn!("not served: {error:#}");
                continue;
            }
            Ok(Event::NotStarted(error)) => return Err(error),
        };
        if !is_stopping {
            tracing::info!("{why}: finishing requests, then ending");
            control.begin_stop();
            is_stopping = true;
        }
    }
}
