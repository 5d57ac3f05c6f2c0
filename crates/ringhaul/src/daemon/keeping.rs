//! Keeps changes by commands for the next start, and restores them at a start.

use std::collections::BTreeSet;
use std::sync::{Arc, mpsc};

use anyhow::Result;
use blockio::executor::start_thread;
use disks::open::CancelToken;

use super::Daemon;
use super::adding::{OpeningThread, Restoring};
use crate::daemon::saved_state::changes::Merged;
use crate::daemon::saved_state::{ChangedPart, SavedState};
use crate::log::export_span;
use crate::open::disk::{OpenDisk, PassedFiles};
use crate::spec::command::{Command, CommandError, ExportState, Reply};
use crate::spec::lease_id::lease_id;
use crate::spec::settings::{Settings, SettingsChange};
use crate::spec::{DeviceSpec, ExportSpec, UnitPlace};
use crate::threads::shutdown::Event;

impl Daemon {
    /// Begins to keep the changes by commands.
    pub(crate) fn set_saved_state(&self, state: SavedState) {
        assert!(self.saved_state.set(state).is_ok(), "a process has one state");
    }

    /// The keeper of changes by commands, if they are kept.
    pub(crate) fn saved_state(&self) -> Option<&SavedState> {
        self.saved_state.get()
    }

    /// The present settings.
    ///
    /// # Errors
    ///
    /// When the daemon has ended.
    pub(crate) fn settings(&self) -> Result<Settings, CommandError> {
        self.set(&SettingsChange::default())
    }

    /// Keeps the change by a command, before the command is answered.
    pub(super) fn keep(
        &self,
        part: Option<&ChangedPart>,
        done: Result<Reply, CommandError>,
    ) -> Result<Reply, CommandError> {
        let (Some(state), Some(part)) = (self.saved_state(), part) else { return done };
        match (&done, part) {
            (Ok(_) | Err(CommandError::NotEnded(..)), _) => {}
            (Err(CommandError::Unknown(name)), ChangedPart::Exports(_))
                if state.forget(name).map_err(CommandError::NotSaved)? =>
            {
                return Err(CommandError::Forgotten(name.clone()));
            }
            (Err(_), _) => return done,
        }
        let live = || self.live();
        state.record(part, live).map_err(CommandError::NotSaved)?;
        done
    }

    /// The exports that are served or being opened.
    fn live(&self) -> Vec<ExportSpec> {
        let shown = self.control.show().unwrap_or_default();
        let live = shown.into_iter().filter(|status| status.state != ExportState::Stopping);
        live.map(|status| status.spec).collect()
    }

    /// Keeps the whole state, which an earlier process has made.
    pub(crate) fn keep_all(&self, settings: &SettingsChange) -> Result<()> {
        let Some(state) = self.saved_state() else { return Ok(()) };
        state.record_all(&self.live(), settings)
    }

    /// Carries out a command for the configuration file, whose changes are not kept.
    pub(crate) fn handle_from_config(&self, command: Command) -> Result<Reply, CommandError> {
        self.carry_out(command, &PassedFiles::default())
    }

    /// Notes that the configuration file has changed an export, or these disks of it. `None`: it
    /// has removed the export.
    pub(crate) fn record_config_change(
        &self,
        name: &str,
        export: Option<&ExportSpec>,
        disks: Option<&BTreeSet<Option<UnitPlace>>>,
    ) {
        let Some(state) = self.saved_state() else { return };
        if let Err(error) = state.adopt_base_change(name, export, disks) {
            tracing::error!(export = name, "{error:#}");
        }
    }

    /// Notes that the configuration file has changed settings.
    pub(crate) fn record_config_settings(&self, change: &SettingsChange) {
        let (Some(state), Ok(now)) = (self.saved_state(), self.settings()) else { return };
        if let Err(error) = state.adopt_base_settings(change, now) {
            tracing::error!("{error:#}");
        }
    }

    /// Disconnects the front-ends of a killed daemon that no export has continued.
    pub(crate) fn forget_killed(&self) {
        self.fd_store.iter().for_each(|store| store.forget_killed());
    }

    /// Begins to serve the exports of the command line and of the configuration file, with the
    /// changes by commands, and the exports that commands had added.
    ///
    /// # Errors
    ///
    /// When the kernel has no thread left.
    pub(crate) fn begin_restore(self: &Arc<Self>, merged: Merged) -> Result<OpeningThread> {
        let Merged { mut exports, added, units, settings, log_lines, dropped } = merged;
        for (export, text) in log_lines {
            tracing::info!(export, "{text}");
        }
        for (export, text) in dropped {
            report_lost(&export, &text);
        }
        if let Err(error) = self.set(&settings) {
            report_lost("", &format!("settings of control commands: {:#}", error.into_error()));
        }
        let (again, failed) = mpsc::channel();
        let names = added.iter().map(ExportSpec::name).collect();
        for export in added {
            match export.check(self.args.iothreads) {
                Ok(()) => exports.push(export),
                Err(error) => {
                    report_lost(&export.name(), &format!("cannot be restored: {error:#}"))
                }
            }
        }
        let restoring = Restoring { added: names, units: units.clone(), again };
        self.warn_of_unused_sockets(&exports);
        self.fd_store.iter().for_each(|store| store.retain_killed(&exports));
        let opening = self.begin_start(exports, Some(restoring))?;
        let daemon = Arc::clone(self);
        let work = move || {
            for failed in failed {
                daemon.restore_in_part(failed, &units);
            }
        };
        // Without this thread, exports that fail because of a unit are not served.
        if let Err(error) = start_thread("ringhaul-restore", work) {
            tracing::error!("cannot start the thread that restores exports in part: {error}");
        }
        Ok(opening)
    }

    /// Serves an export without the units that a command had added and that cannot be opened.
    fn restore_in_part(
        &self,
        (mut spec, error): (ExportSpec, CommandError),
        of_base: &[(String, UnitPlace)],
    ) {
        let name = spec.name();
        let is_of_base = of_base.iter().any(|(of, _)| *of == name);
        let is_doubtful =
            |place| !is_of_base || of_base.iter().any(|(of, unit)| *of == name && *unit == place);
        let (endpoint, settings) = (spec.endpoint.clone(), spec.settings.clone());
        let mut at_fault = 0;
        if let DeviceSpec::Scsi(units) = &mut spec.device {
            units.retain(|unit| {
                let place = unit.place();
                if !is_doubtful(place) {
                    return true;
                }
                let lease_id = lease_id(&endpoint, Some(place));
                let disk = unit.disk(&settings);
                let opened = export_span(&name)
                    .in_scope(|| OpenDisk::open(&disk, lease_id, &CancelToken::default(), None));
                let Err(error) = opened else { return true };
                report_lost(&name, &format!("unit {place} cannot be restored: {error:#}"));
                at_fault += 1;
                false
            });
        }
        if at_fault == 0 {
            let text = format!("cannot be restored: {:#}", error.into_error());
            return report_lost(&name, &text);
        }
        match self.add_as_they_open(vec![spec], None) {
            Ok(()) | Err(CommandError::Ending | CommandError::HandedOver(_)) => {}
            Err(error) if is_of_base && self.control.cancel_start(&[]) => {
                drop(self.events.send(Event::NotStarted(error.into_error())));
            }
            Err(error) => {
                report_lost(&name, &format!("cannot be restored: {:#}", error.into_error()));
            }
        }
    }
}

/// Logs that a change by commands is lost.
fn report_lost(export: &str, text: &str) {
    if export.is_empty() {
        tracing::warn!("{text}");
    } else {
        tracing::warn!(export, "{text}");
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args, FromArgMatches};
    use serde_json::json;

    use super::*;
    use crate::daemon::saved_state::file::StateFile;
    use crate::options::ServeArgs;
    use crate::socket::inherited::InheritedSockets;
    use crate::spec::command::Removal;

    /// The export ends when its disk has its size. A start before that must not serve it again.
    #[test]
    fn a_removal_that_misses_its_deadline_is_kept() {
        let serve = ServeArgs::augment_args(clap::Command::new("serve"));
        let args = ServeArgs::from_arg_matches(&serve.get_matches_from(["serve"])).unwrap();
        let (daemon, _ending) = Daemon::start(args, InheritedSockets::default()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let export: ExportSpec = serde_json::from_value(json!({
            "name": "vm", "endpoint": { "path": folder.path().join("vm") },
            "device": { "blk": { "null": { "size-bytes": 512 } } },
        }))
        .unwrap();
        let path = folder.path().join("state");
        let (file, changes, _) = StateFile::open(&path).unwrap();
        let (base, settings) = (vec![export.clone()], daemon.settings().unwrap());
        let (state, _) = SavedState::begin(file, changes, base.clone(), settings.clone()).unwrap();
        daemon.set_saved_state(state);
        daemon.handle(Command::Add(base.clone())).unwrap();
        let restored = || StateFile::take_over(&path).unwrap().1.merge(&base, &settings).exports;
        assert_eq!(restored(), base);
        let (_, resizing) = daemon.control.begin_resize("vm".to_owned(), None).unwrap();
        let removal = Removal { deadline_ms: Some(1), ..Removal::new("vm") };
        let missed = daemon.handle(Command::Remove(removal)).unwrap_err();
        assert!(matches!(missed, CommandError::NotEnded(..)), "{missed:?}");
        assert_eq!(restored(), []);
        drop(resizing);
    }
}
