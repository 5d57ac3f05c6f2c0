//! Changes by control commands, kept in a file for the next start
//! (docs/guide/crash-and-upgrade.md).
//!
//! The command line and the configuration file are the base. The state file records the differences
//! that commands made, each with the base's value at the time. If the base has another value at the
//! next start, the base wins.

pub(crate) mod changes;
pub(crate) mod file;
#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::Result;
use blockio::executor::Lock;

use crate::spec::command::Command;
use crate::spec::settings::{Settings, SettingsChange};
use crate::spec::{ExportSpec, UnitPlace};
use changes::{Changes, Merged};
use file::{Locked, StateFile};

/// The part of the daemon that a command has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ChangedPart {
    /// Whole exports, by their names or sockets.
    Exports(Vec<String>),
    /// A disk of an export, or the place for one.
    Disk(String, Option<UnitPlace>),
    Settings(SettingsChange),
}

impl ChangedPart {
    /// Returns the part that a command changes, if the change outlives the process.
    pub(crate) fn from_command(command: &Command) -> Option<Self> {
        Some(match command {
            Command::Add(specs) => Self::Exports(specs.iter().map(ExportSpec::name).collect()),
            Command::Remove(removal) => Self::Exports(vec![removal.export.clone()]),
            Command::AddUnit(export, unit) => Self::Disk(export.clone(), Some(unit.place())),
            Command::RemoveUnit(export, place) => Self::Disk(export.clone(), Some(*place)),
            Command::SetDisk(export, place, change) if !change.is_empty() => {
                Self::Disk(export.clone(), *place)
            }
            Command::Set(change) if *change != SettingsChange::default() => {
                Self::Settings(change.clone())
            }
            Command::SetDisk(..)
            | Command::Set(_)
            | Command::Resize(..)
            | Command::Resume(..)
            | Command::SaveState(_)
            | Command::LoadState(..)
            | Command::End(_) => return None,
        })
    }
}

/// The changes by commands, and the state file that stores them.
pub(crate) struct SavedState(Lock<Inner>);

struct Inner {
    file: StateFile,
    lock: Locked,
    /// The exports of the command line and of the configuration file.
    base: Vec<ExportSpec>,
    settings: Settings,
    changes: Changes,
    /// The changes in the file.
    written: Changes,
    /// True while another process writes the file, or is about to.
    is_blocked: bool,
}

/// Blocks writes while another process takes over. Dropping it permits writes again.
pub(crate) struct WritesBlocked<'a>(&'a SavedState);

impl WritesBlocked<'_> {
    /// Leaves the file to the process that takes over.
    pub(crate) fn hand_over(self) {
        std::mem::forget(self);
    }
}

impl Drop for WritesBlocked<'_> {
    fn drop(&mut self) {
        let mut inner = self.0.0.lock();
        inner.is_blocked = false;
        if let Err(error) = inner.write() {
            tracing::error!("{error:#}");
        }
    }
}

impl SavedState {
    /// Applies the changes of a file to this base and writes the file, which this daemon owns from
    /// now on. Returns the exports and settings to begin with.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub(crate) fn begin(
        file: StateFile,
        mut changes: Changes,
        base: Vec<ExportSpec>,
        settings: Settings,
    ) -> Result<(Self, Merged)> {
        let merged = changes.merge(&base, &settings);
        let lock = file.write(&changes)?;
        let written = changes.clone();
        let is_blocked = false;
        let inner = Inner { file, lock, base, settings, changes, written, is_blocked };
        Ok((Self(Lock::new(inner)), merged))
    }

    /// Notes the change of a command, given the exports that are `live` afterwards, and writes it.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub(crate) fn record(
        &self,
        part: &ChangedPart,
        live: impl FnOnce() -> Vec<ExportSpec>,
    ) -> Result<()> {
        let mut inner = self.0.lock();
        // Read under the lock: of two commands that touch one export, the second sees both changes.
        let live = live();
        let Inner { base, settings, changes, .. } = &mut *inner;
        match part {
            ChangedPart::Exports(names) => {
                names.iter().for_each(|name| changes.record_export(name, base, &live));
            }
            ChangedPart::Disk(name, place) => changes.record_disk(name, *place, base, &live),
            ChangedPart::Settings(change) => changes.record_settings(change, settings),
        }
        inner.write()
    }

    /// Notes all live exports and settings, which another process has set up.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub(crate) fn record_all(&self, live: &[ExportSpec], settings: &SettingsChange) -> Result<()> {
        let mut inner = self.0.lock();
        let Inner { base, settings: base_settings, changes, .. } = &mut *inner;
        for export in live {
            changes.record_whole(export, base, live);
        }
        if *settings != SettingsChange::default() {
            changes.record_settings(settings, base_settings);
        }
        inner.write()
    }

    /// Adopts a change of the configuration file to an export of the base, or to these disks of it.
    /// Changes by commands to the same parts are dropped. Without `export`, the file has removed
    /// the export.
    ///
    /// # Errors
    ///
    /// When the state file cannot be written.
    pub(crate) fn adopt_base_change(
        &self,
        name: &str,
        export: Option<&ExportSpec>,
        disks: Option<&BTreeSet<Option<UnitPlace>>>,
    ) -> Result<()> {
        let mut inner = self.0.lock();
        let Inner { base, changes, .. } = &mut *inner;
        changes.adopt_base_change(name, export, disks);
        base.retain(|other| !other.is_called(name));
        base.extend(export.cloned());
        inner.write()
    }

    /// Adopts a change of the configuration file to these settings.
    ///
    /// # Errors
    ///
    /// When the state file cannot be written.
    pub(crate) fn adopt_base_settings(&self, change: &SettingsChange, now: Settings) -> Result<()> {
        let mut inner = self.0.lock();
        inner.changes.settings.forget(change);
        inner.settings = now;
        inner.write()
    }

    /// Forgets an export that commands have added and that is not served. Returns false if there is
    /// none.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub(crate) fn forget(&self, name: &str) -> Result<bool> {
        let mut inner = self.0.lock();
        let before = inner.changes.exports.len();
        inner.changes.exports.retain(|change| !change.adds(name));
        let is_forgotten = inner.changes.exports.len() < before;
        inner.write()?;
        Ok(is_forgotten)
    }

    /// Stops writing the file: a process that takes over writes the whole live state.
    pub(crate) fn block_writes(&self) -> WritesBlocked<'_> {
        self.0.lock().is_blocked = true;
        WritesBlocked(self)
    }

    /// Removes the file at the end of the daemon if it has no changes.
    pub(crate) fn end(&self) {
        let inner = self.0.lock();
        if inner.changes.is_empty()
            && let Err(error) = inner.file.remove(&inner.lock)
        {
            tracing::warn!("cannot remove {}: {error}", inner.file.path().display());
        }
    }
}

impl Inner {
    fn write(&mut self) -> Result<()> {
        if !self.is_blocked && self.changes != self.written {
            self.lock = self.file.write(&self.changes)?;
            self.written = self.changes.clone();
        }
        Ok(())
    }
}

/// The path of the state file beside the control socket.
fn beside(control: &Path) -> PathBuf {
    let mut name = control.as_os_str().to_owned();
    name.push(".state");
    name.into()
}

/// The value of `--state` that disables the state file.
const NONE: &str = "none";

/// The variable with the folder in which a service of systemd keeps its state.
const STATE_DIRECTORY: &str = "STATE_DIRECTORY";

/// The path of the state file of a daemon with these options. `None`: there is no state file.
///
/// # Errors
///
/// When the working directory is gone.
pub(crate) fn place(state: Option<&Path>, control: Option<&Path>) -> Result<Option<PathBuf>> {
    place_in(state, control, &std::env::var_os(STATE_DIRECTORY).unwrap_or_default())
}

/// Like [`place`], for a service with state in these `folders`.
fn place_in(
    state: Option<&Path>,
    control: Option<&Path>,
    folders: &OsStr,
) -> Result<Option<PathBuf>> {
    let folder = std::env::split_paths(folders).next().filter(|path| path.is_absolute());
    let path = match (state, control) {
        (Some(path), _) if path.as_os_str() == NONE => return Ok(None),
        (Some(path), _) => path.to_owned(),
        (None, None) => return Ok(None),
        (None, Some(control)) => match (folder, control.file_name()) {
            (Some(folder), Some(name)) => beside(&folder.join(name)),
            _ => beside(control),
        },
    };
    Ok(Some(std::path::absolute(path)?))
}
