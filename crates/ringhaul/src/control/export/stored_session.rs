//! Front-ends that outlive a killed daemon, because the service manager keeps their descriptors.

use std::time::Instant;

use vhost_user::Session;

use super::Export;
use crate::fd_store::{KilledSession, StoredSession};
use crate::socket::Endpoint;

impl Export {
    /// Asks the service manager to keep the session from now on, in an earlier stash if there is
    /// one.
    pub(in crate::control) fn keep_session(&mut self, earlier: Option<StoredSession>) {
        if self.kept.store().is_none() {
            return;
        }
        if self.endpoint.as_ref().and_then(Endpoint::listener).is_none() {
            if self.session.is_some() {
                self.log.warn(&format_args!(
                    "the front-end does not survive a kill of the daemon: its connection is that \
                     of --fd, which ends with the process; let the daemon listen at a path \
                     (--socket-path)"
                ));
            }
            return;
        }
        let spec = self.spec_now();
        let Some(session) = &mut self.session else { return };
        match self.kept.keeper(spec, earlier) {
            Ok(keeper) => keeper.into_iter().for_each(|keeper| session.keep_with(keeper)),
            Err(error) => self.log.warn(&format_args!(
                "the front-end does not survive a kill of the daemon: the service manager cannot \
                 keep its descriptors: {error}"
            )),
        }
    }

    /// Keeps the session with the present units of the export from now on.
    pub(super) fn keep_units(&self) {
        self.kept.set_export(self.spec_now());
    }

    /// Continues to keep the session after a hand-over, in the stash of the other process.
    pub(in crate::control) fn keep_handed_session(&mut self) {
        let earlier = self.kept.open_handed().unwrap_or_else(|error| {
            self.log.warn(&format_args!(
                "the descriptors that the last process stored are not understood, and are stored \
                 again: {error}"
            ));
            None
        });
        self.keep_session(earlier);
    }

    /// Asks the service manager to forget the session: another process continues it, and stores it
    /// again.
    pub(in crate::control) fn stop_keeping(&mut self) {
        self.session.iter_mut().for_each(Session::stop_keeping);
    }

    /// Continues with the front-end that was connected when the last daemon was killed.
    pub(in crate::control) fn continue_killed(&mut self, now: Instant) {
        let Some(store) = self.kept.store() else { return };
        let Some(mut killed) = store.take_killed(&self.spec) else { return };
        self.setup.rules = self.limits.front_end_rules();
        let KilledSession { state, fds, kept, .. } = &mut killed;
        let (state, kept) = (state.take(), kept.take());
        match state.map(|state| Session::continue_killed(state, self.setup.clone(), fds, now)) {
            Some(Ok(session)) => {
                (self.session, self.connected) = (Some(session), now);
                self.sessions += 1;
                self.is_connection_logged = true;
                self.keep_session(kept);
                self.session.iter_mut().for_each(Session::begin_resume);
                self.session_is_ready = true;
                let export = self.log.name();
                tracing::info!(export, "continues with the front-end of the killed daemon");
            }
            Some(Err(error)) => self.log.warn(&format_args!(
                "cannot continue with the front-end of the killed daemon, which is disconnected: \
                 {error}"
            )),
            None => {}
        }
    }
}
