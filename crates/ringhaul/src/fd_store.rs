//! Descriptors of front-ends that the service manager keeps while the daemon is away
//! (`FDSTORE` of sd_notify(3)), so that the next process continues when this one was killed.
//!
//! Each connected front-end has a `stash`, a pair of sockets in which its descriptors wait; the
//! manager stores that pair. The first descriptor is a `record` in a memory file, which the
//! `keeper` updates with each message of the front-end. `passed` finds the sessions of a killed
//! process.

mod keeper;
mod passed;
mod record;
mod stash;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Result, ensure};
use blockio::executor::Lock;
use clap::ValueEnum;
use vhost_user::StateKeeper;

use crate::process::service_manager::{self, STORED_PREFIX};
use crate::spec::ExportSpec;
use keeper::Keeper;
pub(crate) use passed::KilledSession;

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

    /// A keeper for the sessions of an export.
    ///
    /// # Errors
    ///
    /// When no descriptor is left, or the manager does not take it.
    pub(crate) fn keeper(&self, export: ExportSpec) -> io::Result<Box<dyn StateKeeper>> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(Keeper::new(format!("{STORED_PREFIX}{number}"), export)?))
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

#[cfg(test)]
mod tests;
