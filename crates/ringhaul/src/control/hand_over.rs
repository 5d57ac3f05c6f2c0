//! The pause and the resumption of exports in a hand-over between processes.

use std::fs::File;
use std::io;
use std::task::Waker;
use std::time::{Duration, Instant};

use anyhow::Context;
use blockio::DiskSource;
use blockio::disk::hand_over::DiskHandOver;
use device::oneshot;
use vhost_user::{PassedFds, Session};

use super::export::Export;
use super::guest_turns::KEEPS_STATE;
use super::hand_over_state::{ExportProgress, HandedDisk, HandedExport, Paused};
use super::order::{Answered, ExportSetup, OrderKind};
use crate::socket::Endpoint;
use crate::spec::command::{CommandError, ExportState};

/// The time that queues may take to stop. Guests of all exports wait, even with fast disks.
const STOP_MAX: Duration = Duration::from_secs(2);

/// The phase of a hand-over.
pub(super) enum HandOver {
    /// Queues stop.
    Pausing { since: Instant, answer: oneshot::Sender<Answered<Paused>> },
    /// Queues have stopped, and the new process has not yet confirmed the takeover.
    Paused,
    /// Only the new process may serve, unless an order resumes the exports here. The old process
    /// has committed, or the new one waits for that.
    Committed,
    /// Queues start in this process.
    Resuming(oneshot::Sender<()>),
}

impl HandOver {
    /// Returns true if orders of this kind have to wait for the end of the hand-over. Orders that
    /// end exports cancel the hand-over first, as long as the exports are this process's to end.
    pub(super) fn holds(&self, kind: OrderKind) -> bool {
        match (self, kind) {
            (_, OrderKind::Query | OrderKind::HandOver) | (Self::Resuming(_), _) => false,
            (Self::Committed, _) | (_, OrderKind::Change) => true,
            (Self::Pausing { .. } | Self::Paused, OrderKind::End) => false,
        }
    }

    /// The time at which the hand-over is cancelled.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Pausing { since, .. } => Some(*since + STOP_MAX),
            Self::Paused | Self::Committed | Self::Resuming(_) => None,
        }
    }
}

impl Export {
    /// Describes the export for another process.
    ///
    /// # Errors
    ///
    /// When it cannot be handed over now.
    pub(super) fn describe(&self, fds: &mut PassedFds) -> Answered<HandedExport> {
        let name = self.spec.name();
        let state = self.state();
        if state != ExportState::Serving {
            return Err(CommandError::Busy(name, state));
        }
        if let Some(changing) = self.changing.iter().find(|changing| changing.blocks_hand_over) {
            return Err(match changing.place {
                Some(place) => CommandError::UnitBusy(name, place),
                None => CommandError::DiskBusy(name),
            });
        }
        self.check_disks()?;
        self.check_changes()?;
        let describe = |fds: &mut PassedFds| -> io::Result<HandedExport> {
            let endpoint = self.endpoint.as_ref().map(|endpoint| endpoint.hand_over(fds));
            let disks = self.disks.iter().map(|disk| {
                Ok(HandedDisk {
                    file: fds.put_some(format!("disk of {name}"), disk.hand_over().descriptor())?,
                    size_bytes: disk.info().size_bytes,
                    engine: disk.preferred_engine().map(|engine| engine.to_string()),
                    engine_reason: disk.preference().map(|(_, reason)| reason.to_owned()),
                    files: (disk.hand_over().files().iter())
                        .map(|(path, file)| {
                            Ok((path.clone(), fds.put(path.display().to_string(), file)?))
                        })
                        .collect::<io::Result<_>>()?,
                })
            });
            let disks = disks.collect::<io::Result<_>>()?;
            Ok(HandedExport { spec: self.spec_now(), disks, endpoint: endpoint.transpose()? })
        };
        describe(fds).map_err(|error| {
            let text = format!("cannot hand over {name}: {error}");
            CommandError::Failed(anyhow::Error::new(error).context(text))
        })
    }

    /// Refuses a hand-over if queues would not stop, or the state of a guest would be lost.
    pub(super) fn check_disks(&self) -> Answered<()> {
        let name = self.spec.name();
        // A disk that may have lost data may also be in one of these states.
        let text = if self.disks.iter().any(|disk| disk.stalled_since().is_some()) {
            format!(
                "the disk of {name} does not answer, so its queues cannot stop; try again when it \
                 answers"
            )
        } else if !self.keeps_inflight()
            && self.disks.iter().any(|disk| disk.retry_state().is_some())
        {
            format!(
                "failed requests of {name} wait for their retry, and its front-end keeps no \
                 inflight region to hand them over; try again when the disk accepts them"
            )
        } else if self.session.is_none() && self.keeps_state() {
            format!("cannot hand {name} over now: {KEEPS_STATE}; try again when it answers")
        } else {
            return Ok(());
        };
        Err(CommandError::NotNow(anyhow::anyhow!(text)))
    }

    /// Returns true if waiting requests do not delay a queue that stops.
    fn keeps_inflight(&self) -> bool {
        self.session.as_ref().is_none_or(Session::keeps_inflight)
    }

    /// Refuses to hand over disks that a server may still change, because the next process cannot
    /// know of the change.
    pub(super) fn check_changes(&self) -> Answered<()> {
        if !self.disks.iter().any(|disk| disk.hand_over().may_still_change()) {
            return Ok(());
        }
        let name = self.spec.name();
        Err(CommandError::NotNow(anyhow::anyhow!(
            "the server of the disk of {name} may still execute unanswered writes, and only this \
             process delays later writes behind them; try again when the server has answered or \
             closed the connection, or restart the server"
        )))
    }

    /// Begins to stop its queues between two messages. Until the export resumes, no front-end is
    /// accepted.
    pub(super) fn begin_pause(&mut self) {
        self.is_handing_over = true;
        self.session.iter_mut().for_each(Session::begin_pause);
        self.session_is_ready = self.session.is_some();
    }

    /// Returns true if the export is at rest until it resumes.
    pub(super) fn has_paused(&self) -> bool {
        let is_paused = self.session.as_ref().is_none_or(Session::is_paused);
        self.is_handing_over && is_paused && !self.keeps_state()
    }

    /// Returns true while the state of a guest that has left is being kept: the next process must
    /// have it.
    pub(super) fn keeps_state(&self) -> bool {
        let has_turn = self.session.as_ref().is_some_and(Session::passes_lock);
        self.turns.as_ref().is_some_and(|turns| !turns.are_settled(has_turn))
    }

    /// Begins to resume.
    pub(super) fn begin_resume(&mut self) {
        self.is_handing_over = false;
        self.turns.iter().for_each(|turns| turns.resume());
        self.endpoint.iter_mut().for_each(Endpoint::keep);
        self.keep_handed_session();
        self.session.iter_mut().for_each(Session::begin_resume);
        self.session_is_ready = self.session.is_some();
    }

    /// Returns true if the export has resumed.
    pub(super) fn has_resumed(&self) -> bool {
        self.session.as_ref().is_none_or(Session::has_resumed)
    }

    /// Describes its progress, while it is paused.
    ///
    /// # Errors
    ///
    /// When no descriptor is left.
    pub(super) fn progress_so_far(&self, fds: &mut PassedFds) -> io::Result<ExportProgress> {
        let session = self.session.as_ref().map(|session| session.hand_over(fds)).transpose()?;
        let disks = self.disks.iter().map(DiskSource::hand_over);
        let losses = disks.clone().map(DiskHandOver::loss).collect();
        let flushed = disks.clone().map(DiskHandOver::is_flushed).collect();
        let mut debts: Vec<_> = disks.map(DiskHandOver::debts).collect();
        if debts.iter().all(Vec::is_empty) {
            debts.clear();
        }
        let (device, files) = self.setup.device.hand_over()?;
        let files = files.iter().map(|file| fds.put_some("reservations", file.as_ref()));
        let reservations = files.collect::<io::Result<_>>()?;
        let (connected, sessions) = (self.connected.elapsed(), self.sessions);
        let stash = self.kept.hand_over(fds)?;
        Ok(ExportProgress {
            session,
            connected,
            sessions,
            losses,
            flushed,
            debts,
            totals: Some(self.setup.device.totals()),
            counters: Some(self.counters()),
            turns: self.turns.as_ref().map(|turns| turns.hand_over()),
            device,
            reservations,
            stash,
        })
    }

    /// Takes over an export that is paused in another process. It stays paused.
    ///
    /// # Errors
    ///
    /// When this process cannot continue it.
    pub(super) fn take_over(
        (setup, progress): (ExportSetup, ExportProgress),
        waker: &Waker,
        fds: &mut PassedFds,
        now: Instant,
    ) -> anyhow::Result<Self> {
        let mut export = Self::new(setup, waker);
        export.is_handing_over = true;
        export.sessions = progress.sessions;
        let known = progress.losses.into_iter().zip(progress.flushed);
        for (disk, (loss, is_flushed)) in export.disks.iter().zip(known) {
            disk.hand_over().inherit(loss, is_flushed);
        }
        for (disk, debts) in export.disks.iter().zip(&progress.debts) {
            disk.hand_over().set_debts(debts);
        }
        progress.totals.into_iter().for_each(|totals| export.setup.device.add_totals(totals));
        export.earlier = progress.counters.unwrap_or_default();
        if let (Some(turns), Some(states)) = (&export.turns, progress.turns) {
            turns.take_over(states);
        }
        let files = progress.reservations.into_iter().map(|place| fds.take_some(place));
        let files = files.map(|fd| Ok(fd?.map(File::from))).collect::<io::Result<_>>();
        let device = files.and_then(|files| export.setup.device.resume(progress.device, files));
        device.with_context(|| format!("cannot continue with the device of {}", export.name()))?;
        if let Some(state) = progress.session {
            let session = Session::take_over(state, export.setup.clone(), fds, now);
            let session = session.with_context(|| {
                format!("cannot continue with the front-end of {}", export.name())
            })?;
            export.session = Some(session);
            export.connected = now.checked_sub(progress.connected).unwrap_or(now);
            export.is_connection_logged = true;
        }
        export.kept.take_over(progress.stash, fds).with_context(|| {
            format!("cannot take over the stored descriptors of {}", export.name())
        })?;
        Ok(export)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A query never waits, and an end does not wait for a process that may hang.
    #[test]
    fn orders_wait_only_where_the_hand_over_is_at_stake() {
        use OrderKind::{Change, End, HandOver as Step, Query};
        let kinds = [Query, Step, Change, End];
        let pausing = || HandOver::Pausing { since: Instant::now(), answer: oneshot::channel().0 };
        for (phase, holds) in [
            (pausing(), [false, false, true, false]),
            (HandOver::Paused, [false, false, true, false]),
            (HandOver::Committed, [false, false, true, true]),
            (HandOver::Resuming(oneshot::channel().0), [false; 4]),
        ] {
            assert_eq!(kinds.map(|kind| phase.holds(kind)), holds);
            let is_limited = matches!(phase, HandOver::Pausing { .. });
            assert_eq!(phase.deadline().is_some(), is_limited);
        }
    }
}
