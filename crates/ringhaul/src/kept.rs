//! Changes by control commands, kept in a file for the next start (docs/recovery.md).
//!
//! The command line and the configuration file are the base. The file has the differences that
//! commands made from it, each with what the base said at the time. A base that says something else
//! at the next start wins.

pub(crate) mod changes;
pub(crate) mod file;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Result;

use crate::command::Command;
use crate::settings::{Settings, SettingsChange};
use crate::spec::{ExportSpec, UnitPlace};
use changes::{Changes, Merged};
use file::{Locked, StateFile};

/// A part of the daemon that a command has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Touched {
    /// Exports by their names or sockets, as a whole.
    Exports(Vec<String>),
    /// A disk of an export, or the place for one.
    Disk(String, Option<UnitPlace>),
    Settings(SettingsChange),
}

impl Touched {
    /// The part that a command changes, if the change outlives the process.
    pub(crate) fn by(command: &Command) -> Option<Self> {
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
            Command::SetDisk(..) | Command::Set(_) | Command::Resize(..) | Command::Resume(..) => {
                return None;
            }
            Command::Show | Command::Describe(_) | Command::Stats | Command::End(_) => {
                return None;
            }
        })
    }
}

/// The state of a daemon, and the file that has it.
pub(crate) struct Kept(Mutex<Inner>);

struct Inner {
    file: StateFile,
    lock: Locked,
    /// The exports of the command line and of the configuration file.
    base: Vec<ExportSpec>,
    settings: Settings,
    changes: Changes,
    /// The changes in the file.
    written: Changes,
    /// Another process writes the file, or is about to.
    is_closed: bool,
}

/// A state that this process leaves to another one. It writes again when this is dropped.
pub(crate) struct Closed<'a>(&'a Kept);

impl Closed<'_> {
    /// The other process has the file now.
    pub(crate) fn leave(self) {
        std::mem::forget(self);
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        let mut inner = self.0.lock();
        inner.is_closed = false;
        if let Err(error) = inner.write() {
            tracing::error!("{error:#}");
        }
    }
}

impl Kept {
    /// Takes the changes of a file to this base, and writes the file, which is this daemon's from
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
        let is_closed = false;
        let inner = Inner { file, lock, base, settings, changes, written, is_closed };
        Ok((Self(Mutex::new(inner)), merged))
    }

    /// Notes the change of a command, by the exports that are `live` afterwards, and writes it.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub(crate) fn note(
        &self,
        touched: &Touched,
        live: impl FnOnce() -> Vec<ExportSpec>,
    ) -> Result<()> {
        let mut inner = self.lock();
        // Under the lock: of two commands on one thing, the second sees both.
        let live = live();
        let Inner { base, settings, changes, .. } = &mut *inner;
        match touched {
            Touched::Exports(names) => {
                names.iter().for_each(|name| changes.note_export(name, base, &live));
            }
            Touched::Disk(name, place) => changes.note_disk(name, *place, base, &live),
            Touched::Settings(change) => changes.note_settings(change, settings),
        }
        inner.write()
    }

    /// Notes all that is live: another process has made it.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub(crate) fn note_all(&self, live: &[ExportSpec], settings: &SettingsChange) -> Result<()> {
        let mut inner = self.lock();
        let Inner { base, settings: base_settings, changes, .. } = &mut *inner;
        for export in live {
            changes.note_whole(export, base, live);
        }
        if *settings != SettingsChange::default() {
            changes.note_settings(settings, base_settings);
        }
        inner.write()
    }

    /// Heeds the configuration file, which has changed an export of the base or these disks of it.
    /// Changes of commands to the same end. Without `export` the file has removed the export.
    ///
    /// # Errors
    ///
    /// When the state file cannot be written.
    pub(crate) fn rebase(
        &self,
        name: &str,
        export: Option<&ExportSpec>,
        disks: Option<&BTreeSet<Option<UnitPlace>>>,
    ) -> Result<()> {
        let mut inner = self.lock();
        let Inner { base, changes, .. } = &mut *inner;
        changes.rebase(name, export, disks);
        base.retain(|other| !other.is_called(name));
        base.extend(export.cloned());
        inner.write()
    }

    /// The configuration file has changed these settings.
    ///
    /// # Errors
    ///
    /// When the state file cannot be written.
    pub(crate) fn rebase_settings(&self, change: &SettingsChange, now: Settings) -> Result<()> {
        let mut inner = self.lock();
        inner.changes.settings.forget(change);
        inner.settings = now;
        inner.write()
    }

    /// Forgets an export that commands have added, and that is not served. False: there is none.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub(crate) fn forget(&self, name: &str) -> Result<bool> {
        let mut inner = self.lock();
        let before = inner.changes.exports.len();
        inner.changes.exports.retain(|change| !change.adds(name));
        let is_forgotten = inner.changes.exports.len() < before;
        inner.write()?;
        Ok(is_forgotten)
    }

    /// Writes nothing from now on: a process that takes over writes all that is live.
    pub(crate) fn close(&self) -> Closed<'_> {
        self.lock().is_closed = true;
        Closed(self)
    }

    /// The daemon has ended: a file without a change goes.
    pub(crate) fn end(&self) {
        let inner = self.lock();
        if inner.changes.is_empty()
            && let Err(error) = inner.file.remove(&inner.lock)
        {
            tracing::warn!("cannot remove {}: {error}", inner.file.path().display());
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn write(&mut self) -> Result<()> {
        if !self.is_closed && self.changes != self.written {
            self.lock = self.file.write(&self.changes)?;
            self.written = self.changes.clone();
        }
        Ok(())
    }
}

/// The name of a file beside the control socket.
fn beside(control: &Path) -> PathBuf {
    let mut name = control.as_os_str().to_owned();
    name.push(".state");
    name.into()
}

/// The value of `--state` that keeps nothing.
const NONE: &str = "none";

/// The variable with the folder in which a service of systemd keeps its state.
const STATE_DIRECTORY: &str = "STATE_DIRECTORY";

/// The path of the state file of a daemon with these options. `None`: nothing is kept.
///
/// # Errors
///
/// When the working directory is gone.
pub(crate) fn place(state: Option<&Path>, control: Option<&Path>) -> Result<Option<PathBuf>> {
    let folders = std::env::var_os(STATE_DIRECTORY).unwrap_or_default();
    let folder = std::env::split_paths(&folders).next().filter(|path| path.is_absolute());
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
