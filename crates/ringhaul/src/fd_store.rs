//! Descriptors of front-ends that the service manager keeps while the daemon is away
//! (`FDSTORE` of sd_notify(3)), so that the next process continues when this one was killed.
//!
//! Each connected front-end has a `stash`, a pair of sockets in which its descriptors wait; the
//! manager stores that pair. The first descriptor is a `record` in a memory file, which the
//! `keeper` updates with each message of the front-end. `passed` finds the sessions of a killed
//! process. A process that takes over continues the stashes of the old one, so that the manager has
//! each session at any time.

mod keeper;
mod passed;
mod record;
mod stash;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use anyhow::{Result, ensure};
use blockio::executor::Lock;
use clap::ValueEnum;
use vhost_user::{PassedFds, StateKeeper};

use crate::process::service_manager::{self, STORED_PREFIX};
use crate::spec::ExportSpec;
pub(crate) use keeper::StoredSession;
use keeper::{Keeper, SharedKeeper};
pub(crate) use passed::KilledSession;
use stash::Stash;
pub(crate) use stash::StashState;

/// Values of `--keep-connections`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KeepConnections {
    /// If the service manager states that it stores descriptors.
    Auto,
    /// The service manager stores descriptors.
    On,
    /// A killed daemon loses its front-ends.
    Off,
}

/// The descriptors that the manager keeps for this daemon.
pub struct FdStore {
    /// The number of the next stash.
    next: AtomicU64,
    /// Sessions of a killed process that no export has continued.
    killed: Lock<Vec<KilledSession>>,
}

impl FdStore {
    /// Opens the store, with the descriptors that an earlier process has left in it. `None`: the
    /// manager keeps nothing.
    ///
    /// # Errors
    ///
    /// When it is to keep descriptors, and none listens.
    pub(crate) fn open(
        choice: KeepConnections,
        passed: Vec<(String, OwnedFd)>,
    ) -> Result<Option<Arc<Self>>> {
        let is_present = service_manager::is_present();
        ensure!(
            choice != KeepConnections::On || is_present,
            "--keep-connections on needs a service manager that stores descriptors \
             (FileDescriptorStoreMax= in the unit of systemd), and NOTIFY_SOCKET is not set; use \
             --keep-connections off without one"
        );
        let is_on = match choice {
            KeepConnections::Auto => is_present && service_manager::stores_descriptors(),
            KeepConnections::On => true,
            KeepConnections::Off => false,
        };
        if !is_on {
            if !passed.is_empty() {
                tracing::warn!(
                    "the front-ends of the killed daemon are disconnected, because \
                     --keep-connections is off"
                );
            }
            passed.iter().for_each(|(name, _)| service_manager::forget(name));
            return Ok(None);
        }
        let numbers = passed.iter().filter_map(|(name, _)| passed::number_of(name));
        let next = AtomicU64::new(numbers.max().map_or(0, |last| last.saturating_add(1)));
        let killed = Lock::new(passed::sessions(passed));
        Ok(Some(Arc::new(Self { next, killed })))
    }

    /// A keeper for a session of an export. It continues an earlier stash if there is one.
    ///
    /// # Errors
    ///
    /// When no descriptor is left, or the manager does not take it.
    fn keeper(
        &self,
        export: ExportSpec,
        earlier: Option<StoredSession>,
    ) -> io::Result<SharedKeeper> {
        let new = || {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            StoredSession::new(Stash::new(format!("{STORED_PREFIX}{number}"))?)
        };
        let kept = earlier.map_or_else(new, Ok)?;
        Ok(SharedKeeper::new(kept, export))
    }

    /// Reserves the names up to this one, of a stash of another process.
    fn reserve(&self, name: &str) {
        if let Some(number) = passed::number_of(name) {
            self.next.fetch_max(number.saturating_add(1), Ordering::Relaxed);
        }
    }

    /// Takes the session of a killed process that this export is to continue.
    pub(crate) fn take_killed(&self, export: &ExportSpec) -> Option<KilledSession> {
        let mut killed = self.killed.lock();
        let is_its = |session: &mut KilledSession| session.export.name() == export.name();
        // A process that is killed when it begins to keep a session leaves an older state too.
        let session = killed.extract_if(.., is_its).collect::<Vec<_>>().into_iter().next()?;
        drop(killed);
        if let Some(why) = session.difference(export) {
            let export = export.name();
            tracing::warn!(export, "the front-end of the killed daemon is disconnected: {why}");
            return None;
        }
        Some(session)
    }

    /// Disconnects the front-ends of the killed process whose exports are not among these.
    pub(crate) fn retain_killed(&self, exports: &[ExportSpec]) {
        let is_gone = |session: &mut KilledSession| {
            exports.iter().all(|export| export.name() != session.export.name())
        };
        let gone: Vec<_> = self.killed.lock().extract_if(.., is_gone).collect();
        for session in gone {
            let export = session.export.name();
            tracing::warn!(
                export,
                "the front-end of the killed daemon is disconnected: the export is not served any \
                 longer"
            );
        }
    }

    /// Disconnects the remaining front-ends of the killed process.
    pub(crate) fn forget_killed(&self) {
        drop(std::mem::take(&mut *self.killed.lock()));
    }
}

/// The place of the session in the service manager's store.
pub(crate) struct KeptSession {
    /// `None`: the manager keeps nothing.
    store: Option<Arc<FdStore>>,
    /// The keeper of the session.
    keeper: Weak<Lock<Keeper>>,
    /// The stash of the old process, until this one resumes the session.
    handed: Option<HandedStash>,
}

impl KeptSession {
    pub(crate) fn new(store: Option<Arc<FdStore>>) -> Self {
        Self { store, keeper: Weak::new(), handed: None }
    }

    /// Describes the stash for another process, if there is one.
    ///
    /// # Errors
    ///
    /// When no descriptor is left.
    pub(crate) fn hand_over(&self, fds: &mut PassedFds) -> io::Result<Option<StashState>> {
        self.keeper.upgrade().map_or(Ok(None), |keeper| keeper.lock().hand_over(fds))
    }

    /// Takes the stash of the old process, which owns it until this one resumes the session.
    ///
    /// # Errors
    ///
    /// When it was not received.
    pub(crate) fn take_over(
        &mut self,
        stash: Option<StashState>,
        fds: &mut PassedFds,
    ) -> io::Result<()> {
        self.handed = stash.map(|stash| HandedStash::new(stash, fds)).transpose()?;
        if let (Some(store), Some(handed)) = (&self.store, &self.handed) {
            store.reserve(&handed.name);
        }
        Ok(())
    }

    /// The store, if the manager keeps anything.
    pub(crate) fn store(&self) -> Option<&Arc<FdStore>> {
        self.store.as_ref()
    }

    /// Makes the stash of the old process that of this one.
    ///
    /// # Errors
    ///
    /// When the pair is no stash. The service manager forgets it.
    pub(crate) fn open_handed(&mut self) -> io::Result<Option<StoredSession>> {
        let open = |HandedStash { name, ends }| Ok(StoredSession::open(name, ends)?.0);
        self.handed.take().map(open).transpose()
    }

    /// A keeper for the session, which continues an earlier stash if there is one. `None`: the
    /// manager keeps nothing.
    ///
    /// # Errors
    ///
    /// When no descriptor is left, or the manager does not take it.
    pub(crate) fn keeper(
        &mut self,
        export: ExportSpec,
        earlier: Option<StoredSession>,
    ) -> io::Result<Option<Box<dyn StateKeeper>>> {
        let Some(store) = &self.store else { return Ok(None) };
        let keeper = store.keeper(export, earlier)?;
        self.keeper = Arc::downgrade(&keeper.0);
        Ok(Some(Box::new(keeper)))
    }

    /// Returns true if the session survives a kill of this process.
    pub(crate) fn is_kept(&self) -> bool {
        self.keeper.upgrade().is_some_and(|keeper| keeper.lock().is_kept())
    }

    /// Keeps the session with the units of this export from now on.
    pub(crate) fn set_export(&self, export: ExportSpec) {
        if let Some(keeper) = self.keeper.upgrade() {
            keeper.lock().set_export(export);
        }
    }
}

/// A stash of another process, which owns it until this one resumes.
struct HandedStash {
    name: String,
    ends: Vec<OwnedFd>,
}

impl HandedStash {
    /// Takes the ends of the stash.
    ///
    /// # Errors
    ///
    /// When they were not received.
    fn new(state: StashState, fds: &mut PassedFds) -> io::Result<Self> {
        let StashState { name, ends } = state;
        let ends = ends.into_iter().map(|end| fds.take(end)).collect::<io::Result<_>>()?;
        Ok(Self { name, ends })
    }
}

#[cfg(test)]
mod tests;
