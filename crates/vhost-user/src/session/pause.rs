//! The pause of a session between two messages, in which it may be handed over.

use std::io;
use std::task::Poll;
use std::time::Instant;

use super::{End, Session, SessionProgress, Stage};
use crate::passed_fds::PassedFds;
use crate::ring::is_ring_fault;
use crate::session_state::SessionState;

impl Session {
    /// Begins to pause: the session finishes its current message, stops reading, and stops its
    /// queues. The front-end notices only the pause.
    pub fn begin_pause(&mut self) {
        self.pause_requested = true;
    }

    /// Returns true if waiting requests do not delay a pause.
    pub fn keeps_inflight(&self) -> bool {
        self.connection.keeps_inflight()
    }

    /// Returns true if the session has paused.
    pub fn is_paused(&self) -> bool {
        matches!(self.stage, Stage::Paused)
    }

    /// Returns true if another process that continues the session inherits its
    /// [lock](crate::RunLock).
    pub fn passes_lock(&self) -> bool {
        self.connection.passes_lock()
    }

    /// Ends a pause, or cancels one that was to come.
    pub fn begin_resume(&mut self) {
        self.channel.lend(false);
        self.pause_requested = false;
    }

    /// Returns true if all rings that were to start again have.
    pub fn has_resumed(&self) -> bool {
        !matches!(self.stage, Stage::Pausing | Stage::Paused | Stage::Resuming)
    }

    /// Describes the session, which is paused, for another process.
    ///
    /// # Errors
    ///
    /// If no descriptor is left.
    pub fn hand_over(&self, fds: &mut PassedFds) -> io::Result<SessionState> {
        assert!(self.is_paused(), "a queue may run");
        SessionState::new(&self.channel, &self.connection, self.silence.is_none(), fds)
    }

    /// Continues with a pause, or with its end.
    pub(super) fn pause(&mut self, stage: Stage, now: Instant) -> SessionProgress {
        let is_gone = self.channel.is_hung_up();
        if self.pause_requested && !matches!(stage, Stage::Resuming) {
            if is_gone {
                self.connection.stop_remaining();
            }
            let settled = self.connection.settle();
            self.stage = if settled.is_pending() { stage } else { Stage::Paused };
            let Poll::Ready(Err(error)) = settled else { return SessionProgress::Waiting };
            self.end(End::Dropped(error.to_string()));
            return self.progress(now);
        }
        if is_gone {
            self.end(End::Gone(None));
            return self.progress(now);
        }
        if std::mem::take(&mut self.config_changed) {
            self.connection.send_config_change();
        }
        if !matches!(stage, Stage::Resuming) {
            self.connection.begin_resume();
        }
        self.stage = Stage::Resuming;
        match self.connection.resume() {
            Poll::Pending => return SessionProgress::Waiting,
            Poll::Ready(Ok(())) => {}
            Poll::Ready(Err(error)) if is_ring_fault(&error) => {
                self.stage = Stage::Ready;
                return SessionProgress::RingLost(error.to_string());
            }
            Poll::Ready(Err(error)) => {
                self.end(End::Dropped(error.to_string()));
                return self.progress(now);
            }
        }
        self.keep(None);
        self.stage = Stage::Ready;
        SessionProgress::Handled
    }
}
