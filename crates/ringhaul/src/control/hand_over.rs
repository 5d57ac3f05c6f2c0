//! Exports that another process takes over, or that this one does: how they pause and go on.

use std::fs::File;
use std::io;
use std::task::Waker;
use std::time::{Duration, Instant};

use anyhow::Context;
use blockio::DiskSource;
use device::Answer;

use super::export::Export;
use super::handed::{ExportProgress, HandedDisk, HandedExport, Paused};
use super::order::{Answered, ExportSetup, Order};
use crate::command::{CommandError, ExportState};
use crate::export::Endpoint;
use crate::handed_fds::HandedFds;
use crate::vhost_user::Session;

/// How long queues may take to stop. Guests of all exports wait, those whose disks are quick too.
const STOP_MAX: Duration = Duration::from_secs(2);

/// Where a hand-over is at.
pub(super) enum HandOver {
    /// Queues stop.
    Pausing { since: Instant, answer: Answer<Answered<Paused>> },
    /// They have stopped, and the other process has not said that it takes over.
    Paused,
    /// Only the other process may serve, unless this one hears otherwise: it has told the other one
    /// so, or takes over and is yet to be told.
    Theirs,
    /// Queues start, here.
    Resuming(Answer<()>),
}

impl HandOver {
    /// Whether this order has to wait for the end of the hand-over. What ends exports ends the
    /// hand-over first, for as long as they are this process's to end.
    pub(super) fn holds(&self, order: &Order) -> bool {
        match (self, order) {
            (_, Order::HandOver(_)) => false,
            (_, order) if order.changes_nothing() => false,
            (Self::Pausing { .. } | Self::Paused, Order::Stop | Order::Abandon(_)) => false,
            (Self::Pausing { .. } | Self::Paused | Self::Theirs, _) => true,
            (Self::Resuming(_), _) => false,
        }
    }

    /// When it is given up.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Pausing { since, .. } => Some(*since + STOP_MAX),
            Self::Paused | Self::Theirs | Self::Resuming(_) => None,
        }
    }
}

impl Export {
    /// Describes the export for another process.
    ///
    /// # Errors
    ///
    /// When it is not one that can be handed over now.
    pub(super) fn describe(&self, fds: &mut HandedFds) -> Answered<HandedExport> {
        let name = self.spec.name();
        let state = self.state();
        if state != ExportState::Serving {
            return Err(CommandError::Busy(name, state));
        }
        if let Some(changing) = self.changing.iter().find(|changing| changing.keeps_here) {
            return Err(match changing.place {
                Some(place) => CommandError::UnitBusy(name, place),
                None => CommandError::DiskBusy(name),
            });
        }
        self.check_disks()?;
        self.check_changes()?;
        let describe = |fds: &mut HandedFds| -> io::Result<HandedExport> {
            let endpoint = self.endpoint.as_ref().map(|endpoint| endpoint.hand_over(fds));
            let disks = self.disks.iter().map(|disk| {
                Ok(HandedDisk {
                    file: fds.put_some(format!("disk of {name}"), disk.descriptor())?,
                    size_bytes: disk.info().size_bytes,
                    engine: disk.preferred_engine().map(|engine| engine.to_string()),
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

    /// Refuses to stop queues that would not.
    pub(super) fn check_disks(&self) -> Answered<()> {
        let name = self.spec.name();
        // One that may have lost data may be in any of these states, too.
        let text = if self.disks.iter().any(|disk| disk.late_since().is_some()) {
            format!(
                "the disk of {name} does not answer: its queues would not stop; try again when it \
                 does"
            )
        } else if !self.leaves_waiting()
            && self.disks.iter().any(|disk| disk.failed_waiting().is_some())
        {
            format!(
                "requests of {name} wait because its disk has failed them, and its front-end keeps \
                 no inflight region in which they could be left; try again when the disk takes \
                 them"
            )
        } else {
            return Ok(());
        };
        Err(CommandError::NotNow(anyhow::anyhow!(text)))
    }

    /// Whether requests that wait hold up no queue that stops.
    fn leaves_waiting(&self) -> bool {
        self.session.as_ref().is_none_or(Session::leaves_waiting)
    }

    /// Refuses to hand over disks that may still change by what the next process cannot know.
    pub(super) fn check_changes(&self) -> Answered<()> {
        if !self.disks.iter().any(DiskSource::may_still_change) {
            return Ok(());
        }
        let name = self.spec.name();
        Err(CommandError::NotNow(anyhow::anyhow!(
            "the server of the disk of {name} may still make changes without an answer, and only \
             this process knows that others have to wait for them; try again when the server has \
             answered or closed the connection, or restart it"
        )))
    }

    /// Has its queues stop between two messages. It takes no front-end meanwhile.
    pub(super) fn begin_pause(&mut self) {
        self.is_held = true;
        self.session.iter_mut().for_each(Session::begin_pause);
        self.session_is_ready = self.session.is_some();
    }

    /// Whether nothing happens until it goes on.
    pub(super) fn has_paused(&self) -> bool {
        self.is_held && self.session.as_ref().is_none_or(Session::is_paused)
    }

    /// Has it go on.
    pub(super) fn begin_resume(&mut self) {
        self.is_held = false;
        self.endpoint.iter_mut().for_each(Endpoint::keep);
        self.session.iter_mut().for_each(Session::begin_resume);
        self.session_is_ready = self.session.is_some();
    }

    /// Whether it has gone on.
    pub(super) fn has_resumed(&self) -> bool {
        self.session.as_ref().is_none_or(Session::has_resumed)
    }

    /// How far it has come, while it is paused.
    ///
    /// # Errors
    ///
    /// When no descriptor is left.
    pub(super) fn progress_so_far(&self, fds: &mut HandedFds) -> io::Result<ExportProgress> {
        let session = self.session.as_ref().map(|session| session.hand_over(fds)).transpose()?;
        let losses = self.disks.iter().map(DiskSource::loss).collect();
        let flushed = self.disks.iter().map(DiskSource::is_flushed).collect();
        let mut debts: Vec<_> = self.disks.iter().map(DiskSource::debts).collect();
        if debts.iter().all(Vec::is_empty) {
            debts.clear();
        }
        let (device, files) = self.setup.device.hand_over()?;
        let files = files.iter().map(|file| fds.put_some("reservations", file.as_ref()));
        let reservations = files.collect::<io::Result<_>>()?;
        let (connected, sessions) = (self.connected.elapsed(), self.sessions);
        Ok(ExportProgress {
            session,
            connected,
            sessions,
            losses,
            flushed,
            debts,
            device,
            reservations,
        })
    }

    /// An export that is paused in another process, and here.
    ///
    /// # Errors
    ///
    /// When this process cannot go on with it.
    pub(super) fn take_over(
        (setup, progress): (ExportSetup, ExportProgress),
        id: u64,
        waker: &Waker,
        fds: &mut HandedFds,
        now: Instant,
    ) -> anyhow::Result<Self> {
        let mut export = Self::new(setup, id, waker);
        export.is_held = true;
        export.sessions = progress.sessions;
        let known = progress.losses.into_iter().zip(progress.flushed);
        for (disk, (loss, is_flushed)) in export.disks.iter().zip(known) {
            disk.inherit(loss, is_flushed);
        }
        export.disks.iter().zip(&progress.debts).for_each(|(disk, debts)| disk.owe(debts));
        let files = progress.reservations.into_iter().map(|place| fds.take_some(place));
        let files = files.map(|fd| Ok(fd?.map(File::from))).collect::<io::Result<_>>();
        let device = files.and_then(|files| export.setup.device.go_on(progress.device, files));
        device.with_context(|| format!("cannot go on with the device of {}", export.name()))?;
        if let Some(state) = progress.session {
            let session = Session::take_over(state, export.setup.clone(), fds, now);
            let session = session
                .with_context(|| format!("cannot go on with the front-end of {}", export.name()))?;
            export.session = Some(session);
            export.connected = now.checked_sub(progress.connected).unwrap_or(now);
            export.is_shown = true;
        }
        Ok(export)
    }
}
