//! The state of a session that outlives a killed process.

use std::io;
use std::ops::Range;
use std::time::Instant;

use super::{ACK, NACK, Session};
use crate::channel::Message;
use crate::connection::SessionSetup;
use crate::message::Header;
use crate::outcome::Start;
use crate::passed_fds::PassedFds;
use crate::session_state::{SessionState, StateKeeper};

impl Session {
    /// Keeps the state of the session by `keeper` from now on. Where the front-end keeps no
    /// inflight region, rings that start from now on have one that belongs to the state.
    pub fn keep_with(&mut self, keeper: Box<dyn StateKeeper>) {
        self.connection.keeps_own_region = true;
        let before = self.keeper.replace(keeper);
        self.keep(None);
        drop(before);
    }

    /// Returns true if a keeper has the state.
    pub fn is_kept(&self) -> bool {
        self.keeper.is_some()
    }

    /// Keeps no state any longer.
    pub fn stop_keeping(&mut self) {
        self.keeper = None;
    }

    /// Continues a session of a killed process from its last state. It is paused.
    ///
    /// # Errors
    ///
    /// If this device or process cannot continue the session.
    pub fn continue_killed(
        mut state: SessionState,
        setup: SessionSetup,
        fds: &mut PassedFds,
        now: Instant,
    ) -> io::Result<Self> {
        state.add_unused_rings(setup.device.num_queues().into());
        let mut session = Self::take_over(state, setup, fds, now)?;
        session.connection.keeps_own_region = true;
        session.connection.forget_stale_accounts();
        // The process may have sent the answer and died before it noted that. A front-end that has
        // sent its next message has read the answer.
        if session.channel.has_unread() {
            session.channel.forget_output();
        }
        Ok(session)
    }

    /// Keeps the present state. It still has `message`, which is to be carried out. Then makes the
    /// changes to which an earlier state does not fit.
    pub(super) fn keep(&mut self, message: Option<&Message>) {
        if self.keeper.is_some() {
            self.connection.prepare_own_region();
            self.keep_state(message);
        }
        self.connection.forget_stale_accounts();
    }

    /// Keeps a change with its answer before its rings start. If the next process repeated it, they
    /// would start once more at a place behind which this process may have answered requests.
    pub(super) fn keep_change(&mut self, header: Header, rings: &Range<usize>, start: &Start) {
        if !self.connection.is_due(rings.clone()) {
            // The end of the message keeps the change.
            return;
        }
        if !self.is_kept() {
            return self.connection.forget_stale_accounts();
        }
        let wants_ack = self.wants_ack(header);
        let answer = match &start.answer {
            Ok(Some(body)) => Some(&body[..]),
            Ok(None) => wants_ack.then_some(&ACK[..]),
            Err(_) => wants_ack.then_some(&NACK[..]),
        };
        if let Some(body) = answer {
            self.channel.put_answer(header.reply(body.len()), body, None);
        }
        let has_stale_accounts = self.connection.has_stale_accounts();
        self.keep(None);
        if has_stale_accounts {
            // By the first state the next process would forget them once more, after the start.
            self.keep(None);
        }
        self.channel.forget_output();
    }

    fn keep_state(&mut self, message: Option<&Message>) {
        let Some(keeper) = &mut self.keeper else { return };
        keeper.begin();
        let (connection, is_patient) = (&self.connection, self.silence.is_none());
        let sink = &mut **keeper;
        let state = SessionState::for_keeper(&self.channel, connection, is_patient, message, sink);
        keeper.keep(state);
        self.connection.own_region_is_new = false;
    }

    /// Keeps a partly read message.
    pub(super) fn keep_input(&mut self) {
        if self.channel.take_new_input() {
            self.keep(None);
        }
    }

    /// Notes that the answer is sent, or keeps the unsent rest.
    pub(super) fn keep_sent(&mut self) {
        if self.channel.has_output() {
            self.keep(None);
        } else if let Some(keeper) = &mut self.keeper {
            keeper.note_sent();
        }
    }
}

#[cfg(test)]
mod tests;
