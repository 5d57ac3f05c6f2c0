//! SIGHUP: makes the exports of the configuration file match its present content.
//!
//! Each export is changed on a thread of its own, so that an export whose disk or guest hangs
//! delays neither other exports nor a later SIGHUP.

mod difference;

use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use blockio::executor::{Lock, start_thread};

use crate::daemon::Daemon;
use crate::open::parallel::{ParallelCalls, Yield};
use crate::options::config::{Config, ConfigFile};
use crate::options::export::OF_EXPORTS;
use crate::process::service_manager;
use crate::spec::command::{Command, CommandError, Removal};
use crate::spec::rules::{matches_export, matches_unit};
use crate::spec::settings::SettingsChange;
use crate::spec::{DeviceSpec, ExportSpec, UnitPlace};
use crate::threads::ownership::{ChangeGuard, Ownership, PassedOn};
use difference::{Change, Exports, apply, by_socket, differences};

/// The time for changes before the log lists the unfinished ones. They continue.
const PATIENCE: Duration = Duration::from_secs(10);

/// The time for reading the file before the log reports the wait.
const READ_SLOW: Duration = Duration::from_secs(2);

/// The time for reading the file before the reload is cancelled.
const READ_MAX: Duration = Duration::from_secs(10);

/// The most threads that a hanging file system may block.
const READERS_MAX: usize = 4;

/// Options that may change while the daemon runs.
const LOG: &str = "log";
const POLL_MAX_US: &str = "poll-max-us";
const POLL_BUDGET: &str = "poll-budget";

/// Requests the reload of the file. Dropping the last sender ends the reloading thread.
#[derive(Clone)]
pub(crate) struct Reload(mpsc::Sender<ChangeGuard>);

impl Reload {
    /// Starts the thread for a daemon that was started with `config`. `served` are the exports of
    /// the file that the daemon serves now or will receive from a predecessor.
    ///
    /// # Errors
    ///
    /// When the kernel has no thread left.
    pub(crate) fn start(
        file: ConfigFile,
        config: &Config,
        served: &[ExportSpec],
        daemon: Weak<Daemon>,
    ) -> Result<Self> {
        let (asked, requests) = mpsc::channel();
        let mut reloader = Reloader::new(file, config, served, daemon);
        if let Some(daemon) = reloader.daemon.upgrade() {
            let record = Arc::clone(&reloader.record);
            daemon.set_config_exports(move || record.lock().file_exports());
        }
        let work = move || {
            while let Ok(first) = requests.recv() {
                // Requests that arrived in the meantime are met by the same reload.
                let _guards: Vec<ChangeGuard> =
                    iter::once(first).chain(requests.try_iter()).collect();
                reloader.reload();
            }
        };
        // The thread is not joined, because it may be waiting for a disk.
        let thread = start_thread("ringhaul-reload", work);
        thread.context("cannot start the thread that reads the configuration again")?;
        Ok(Self(asked))
    }

    /// Begins a reload, or passes the request on to the process that has taken over.
    pub(crate) fn begin(&self, ownership: &Arc<Ownership>) {
        let asked = self.0.clone();
        // The thread ends with the daemon.
        ownership.change(PassedOn::Reload, move |changing| drop(asked.send(changing)));
    }
}

/// The applied state of the file, shared by the threads that change exports.
type SharedRecord = Arc<Lock<Record>>;

/// The state of the file's exports in the daemon.
#[derive(Default)]
struct Record {
    /// The exports of the file as they are served. The thread that changed an export updates its
    /// entry.
    served: Exports,
    /// Changes that have not ended.
    pending: BTreeMap<String, Change>,
}

/// The entry of a change in progress. Dropping it removes the entry, after a panic too.
struct PendingChange<'a>(&'a Lock<Record>, String);

impl Drop for PendingChange<'_> {
    fn drop(&mut self) {
        self.0.lock().pending.remove(&self.1);
    }
}

struct Reloader {
    file: ConfigFile,
    /// The options of the file in effect, since the start or a later reload.
    options: BTreeMap<String, Vec<String>>,
    daemon: Weak<Daemon>,
    record: SharedRecord,
    /// Counts the threads that read the file: each holds a clone.
    reading: Arc<()>,
}

impl Record {
    /// Forgets exports and units that no longer exist: their disks could not be opened, or a
    /// command removed them and may have put another in the place.
    fn forget_gone(&mut self, shown: &[ExportSpec]) {
        let Self { served, pending } = self;
        served.retain(|export, ours| {
            let Some(other) = shown.iter().find(|other| matches_export(ours, other)) else {
                return false;
            };
            if let (DeviceSpec::Scsi(ours), DeviceSpec::Scsi(others)) =
                (&mut ours.device, &other.device)
                && !pending.contains_key(export)
            {
                ours.retain(|unit| others.iter().any(|other| matches_unit(unit, other)));
            }
            true
        });
    }

    /// The name in the log of the export with this socket.
    fn name_of(&self, socket: &str) -> String {
        let added = match self.pending.get(socket) {
            Some(Change::Add(spec)) => Some(spec),
            _ => None,
        };
        let spec = self.served.get(socket).or(added);
        spec.map_or_else(|| socket.to_owned(), ExportSpec::name)
    }

    /// The exports of the file that are served or being opened.
    fn file_exports(&self) -> Vec<ExportSpec> {
        let added = self.pending.values().filter_map(|change| match change {
            Change::Add(spec) => Some(spec),
            Change::Remove | Change::Alter(..) | Change::Unsupported(_) => None,
        });
        self.served.values().chain(added).cloned().collect()
    }

    /// Returns the changes that turn the served exports into the `wanted` ones, without changes in
    /// progress. Marks the returned ones as in progress.
    fn begin(&mut self, wanted: &Exports) -> Vec<(String, Change)> {
        for (socket, change) in &self.pending {
            if change.result() != wanted.get(socket) {
                tracing::warn!(
                    export = self.name_of(socket),
                    "an earlier change of the export is still in progress; reload again when it \
                     has ended"
                );
            }
        }
        let mut changes = differences(&self.served, wanted);
        changes.retain(|(export, change)| {
            change.is_unsupported() || !self.pending.contains_key(export)
        });
        let begun = changes.iter().filter(|(_, change)| !change.is_unsupported());
        self.pending.extend(begun.cloned());
        changes
    }
}

impl Reloader {
    fn new(file: ConfigFile, config: &Config, served: &[ExportSpec], daemon: Weak<Daemon>) -> Self {
        let record = Record { served: by_socket(served), pending: BTreeMap::new() };
        let options = config.options.clone();
        let record = Arc::new(Lock::new(record));
        Self { file, options, daemon, record, reading: Arc::default() }
    }

    fn reload(&mut self) {
        let _reloading = service_manager::reloading();
        let path = self.file.path().display().to_string();
        let config = match self.read() {
            Ok(config) => config,
            Err(error) => {
                tracing::error!("cannot reload the configuration, so nothing changes: {error:#}");
                service_manager::problem(Some(format!("configuration not reloaded: {error:#}")));
                return;
            }
        };
        service_manager::problem(None);
        self.apply_options(&config);
        let Some(shown) = self.daemon.upgrade().and_then(|daemon| current_exports(&daemon)) else {
            return;
        };
        let changes = {
            let mut record = self.record.lock();
            record.forget_gone(&shown);
            record.begin(&by_socket(&config.exports))
        };
        tracing::info!("reloaded {path}; exports to change: {}", changes.len());
        let (removals, others): (Vec<_>, Vec<_>) =
            changes.into_iter().partition(|(_, change)| *change == Change::Remove);
        // A removed export may hold the disk or the socket of an added one.
        self.carry_out(removals);
        self.carry_out(others);
        tracing::info!("applied the configuration of {path}, as far as possible");
    }

    /// Reads the file on a thread of its own, so that a hanging file system blocks no later reload
    /// and no takeover.
    fn read(&self) -> Result<Config> {
        let (file, (done, result)) = (self.file.clone(), mpsc::channel());
        let (path, seconds) = (self.file.path().display(), READ_MAX.as_secs());
        // One of the owners is this.
        if Arc::strong_count(&self.reading) > READERS_MAX {
            bail!("earlier reads of {path} still hang: its file system does not answer");
        }
        let hangs = Arc::clone(&self.reading);
        let work = move || {
            let _hangs = hangs;
            // The reload may have been cancelled.
            let _ = done.send(file.read());
        };
        let thread = start_thread("ringhaul-config", work);
        thread.context("cannot start the thread that reads the configuration")?;
        if let Ok(config) = result.recv_timeout(READ_SLOW) {
            return config;
        }
        tracing::warn!(
            "reading {path} takes longer than {} s; the reload waits for it",
            READ_SLOW.as_secs()
        );
        result.recv_timeout(READ_MAX - READ_SLOW).unwrap_or_else(|_| {
            Err(anyhow!("cannot read {path} within {seconds} s; reload again when it can be read"))
        })
    }

    /// Applies the file's options that may change at run time, even over later commands, and logs
    /// changes of other options.
    fn apply_options(&mut self, config: &Config) {
        let Some(daemon) = self.daemon.upgrade() else { return };
        let Ok(current) = daemon.settings() else { return };
        let keys: BTreeSet<&String> = self.options.keys().chain(config.options.keys()).collect();
        let differs = |key: &String| match key.as_str() {
            LOG => current.log != config.options.get(LOG).map(|option| value_of(option)),
            POLL_MAX_US => current.poll_max_us != config.args.poll_max_us,
            POLL_BUDGET => current.poll_budget != config.args.poll_budget,
            _ => false,
        };
        let has_changed = |key: &String| self.options.get(key) != config.options.get(key);
        let apart = keys.into_iter().filter(|key| differs(key) || has_changed(key)).cloned();
        let (now, later): (Vec<String>, Vec<String>) =
            apart.partition(|key| may_change(key, config));
        // Options of exports are changed with the exports, or reported there as unchangeable.
        let later = later.iter().filter(|key| !OF_EXPORTS.contains(&key.as_str()));
        for key in later.filter(|key| has_changed(key)) {
            tracing::warn!("{key} has changed; restart the daemon to apply it");
        }
        let has = |key: &str| now.iter().any(|changed| changed == key);
        let change = SettingsChange {
            log: config.options.get(LOG).filter(|_| has(LOG)).map(|option| value_of(option)),
            poll_max_us: has(POLL_MAX_US).then_some(config.args.poll_max_us.into()),
            poll_budget: has(POLL_BUDGET).then_some(config.args.poll_budget.into()),
        };
        match daemon.set(&change) {
            Ok(_) => {
                daemon.record_config_settings(&change);
                for key in now {
                    tracing::info!("{key} has changed and applies now");
                    match config.options.get(&key) {
                        Some(option) => self.options.insert(key, option.clone()),
                        None => self.options.remove(&key),
                    };
                }
            }
            Err(CommandError::Ending | CommandError::HandedOver(_)) => {}
            Err(error) => tracing::error!("{} cannot be changed: {error}", now.join(", ")),
        }
    }

    /// Carries out these changes side by side, and waits for them for at most [`PATIENCE`].
    fn carry_out(&self, changes: Vec<(String, Change)>) {
        let names = changes.iter().map(|(export, _)| self.record.lock().name_of(export));
        let mut waits: BTreeMap<usize, String> = names.enumerate().collect();
        let (daemon, record) = (Weak::clone(&self.daemon), Arc::clone(&self.record));
        let carry_out = move |(export, change): (String, Change), give_way: Yield<'_>| {
            give_way();
            let _pending =
                (!change.is_unsupported()).then(|| PendingChange(&record, export.clone()));
            change.carry_out(export, &daemon, &record);
        };
        let mut calls = ParallelCalls::begin(changes, carry_out);
        let until = Instant::now() + PATIENCE;
        while let Some((number, _)) = calls.next(Some(until)) {
            waits.remove(&number);
        }
        for export in waits.values() {
            let seconds = PATIENCE.as_secs();
            tracing::warn!(export, "its change is not complete after {seconds} s, and continues");
        }
    }
}

impl Change {
    fn carry_out(self, socket: String, daemon: &Weak<Daemon>, record: &SharedRecord) {
        let Some(daemon) = daemon.upgrade() else { return };
        let export = record.lock().name_of(&socket);
        let result = match self {
            Self::Add(spec) => daemon.add_from_config(spec.clone()).map(|_| {
                daemon.record_config_change(&export, Some(&spec), None);
                record.lock().served.insert(socket, spec);
            }),
            Self::Remove => match daemon.handle_from_config(Command::Remove(Removal::new(&socket)))
            {
                // A control command may have removed it already.
                Ok(_) | Err(CommandError::Unknown(_)) => {
                    record.lock().served.remove(&socket);
                    daemon.record_config_change(&export, None, None);
                    tracing::info!(export, "removed");
                    Ok(())
                }
                Err(error) => Err(error),
            },
            Self::Alter(commands, _) => change_units(&daemon, commands, |done| {
                // Recorded per disk: a change that was made is not repeated, and changes by
                // commands are not undone.
                if let Some(spec) = record.lock().served.get_mut(&socket) {
                    let place = place_of(&done);
                    apply(spec, done);
                    daemon.record_config_change(
                        &export,
                        Some(spec),
                        Some(&BTreeSet::from([place])),
                    );
                }
            }),
            Self::Unsupported(what) => {
                tracing::warn!(
                    export,
                    "{what} cannot change while the export is served, and stays unchanged; to \
                     change it, remove the export from the file, reload, add it again, and reload"
                );
                Ok(())
            }
        };
        match result {
            Ok(()) | Err(CommandError::Ending | CommandError::HandedOver(_)) => {}
            Err(error) => tracing::error!(export, "{:#}", error.into_error()),
        }
    }
}

/// All exports as they are now. `None` if the daemon is ending.
fn current_exports(daemon: &Daemon) -> Option<Vec<ExportSpec>> {
    Some(daemon.exports().ok()?.into_iter().map(|status| status.spec).collect())
}

/// Changes units of an export, and calls `done` with each change that was made. The next SIGHUP
/// retries failed changes.
fn change_units(
    daemon: &Daemon,
    commands: Vec<Command>,
    done: impl Fn(Command),
) -> Result<(), CommandError> {
    let mut result = Ok(());
    for command in commands {
        let is_removal = matches!(command, Command::RemoveUnit(..));
        match daemon.handle_from_config(command.clone()) {
            Ok(_) => done(command),
            // A control command may have removed it already.
            Err(CommandError::UnknownUnit(..)) if is_removal => done(command),
            Err(error) => result = Err(error),
        }
    }
    result
}

/// The disk that a command changes.
fn place_of(command: &Command) -> Option<UnitPlace> {
    match command {
        Command::AddUnit(_, unit) => Some(unit.place()),
        Command::RemoveUnit(_, place) => Some(*place),
        Command::Resize(_, place, _) | Command::SetDisk(_, place, _) => *place,
        _ => None,
    }
}

/// Returns true if an option may change while the daemon runs. Without the option `--log` in the
/// file, the start environment decides the log filter.
fn may_change(key: &str, config: &Config) -> bool {
    [POLL_MAX_US, POLL_BUDGET].contains(&key) || key == LOG && config.options.contains_key(LOG)
}

/// The value of an option in command-line form.
fn value_of(options: &[String]) -> String {
    let option = options.first().map_or("", String::as_str);
    option.split_once('=').map_or(option, |(_, value)| value).to_owned()
}

#[cfg(test)]
mod tests {
    use clap::Args;
    use serde_json::json;

    use super::*;
    use crate::daemon::saved_state::SavedState;
    use crate::daemon::saved_state::file::StateFile;
    use crate::options::ServeArgs;
    use crate::socket::inherited::InheritedSockets;
    use crate::spec::command::NewSize;
    use crate::spec::qos::OnError;
    use crate::spec::settings::Settings;
    use crate::spec::{DiskSpec, UnitPlace};

    fn exports(texts: &[&str]) -> Exports {
        let export = |text: &&str| serde_json::from_str::<ExportSpec>(text).unwrap();
        by_socket(&texts.iter().map(export).collect::<Vec<_>>())
    }

    const BLK: &str =
        r#"{"endpoint": {"path": "/a"}, "device": {"blk": {"null": {"size-bytes": 512}}}}"#;

    #[test]
    fn differences_become_changes_where_possible() {
        let scsi = |units: &str| {
            format!(r#"{{"endpoint": {{"path": "/b"}}, "device": {{"scsi": [{units}]}}}}"#)
        };
        let unit = |lun: u16, disk: &str| format!(r#"{{"lun": {lun}, "disk": {disk}}}"#);
        let (file, null) = (r#"{"file": "/x"}"#, r#"{"null": {"size-bytes": 512}}"#);
        let two = scsi(&[unit(0, file), unit(1, null)].join(","));
        let place = |lun| UnitPlace { target: 0, lun };
        let larger = NewSize { size_bytes: Some(1024), shrink: true };
        let bigger_null = null.replace("512", "1024");

        assert_eq!(differences(&exports(&[BLK, &two]), &exports(&[&two, BLK])), []);
        let change = differences(&exports(&[BLK]), &exports(&[&two]));
        assert_eq!(change[0], ("/a".to_owned(), Change::Remove));
        assert!(matches!(&change[1], (export, Change::Add(_)) if export == "/b"));

        let only = |before: &str, after: &str| {
            let mut changes = differences(&exports(&[before]), &exports(&[after]));
            assert_eq!(changes.len(), 1, "{changes:?}");
            changes.remove(0).1
        };
        let commands = |before: &str, after: &str| match only(before, after) {
            Change::Alter(commands, export) => {
                assert_eq!(by_socket(&[export]), exports(&[after]));
                commands
            }
            other => panic!("{other:?}"),
        };
        let resized = BLK.replace("512", "1024");
        assert_eq!(commands(BLK, &resized), [Command::Resize("/a".into(), None, larger)]);
        let after = scsi(&[unit(1, &bigger_null), unit(2, null)].join(","));
        let expected = commands(&two, &after);
        assert_eq!(expected[0], Command::RemoveUnit("/b".into(), place(0)));
        assert_eq!(expected[1], Command::Resize("/b".into(), Some(place(1)), larger));
        assert!(matches!(&expected[2], Command::AddUnit(_, unit) if unit.lun == 2));

        for (before, after, expected) in [
            (BLK, BLK.replace(null, file), "its disk"),
            (&two, two.replace("/x", "/y"), "the disk of unit 0:0"),
            (
                BLK,
                BLK.replace(r#""device""#, r#""read-only": true, "device""#),
                "the settings read-only",
            ),
            (BLK, BLK.replace(r#""device""#, r#""name": "vm", "device""#), "its name"),
            (BLK, scsi("").replace("/b", "/a"), "its device"),
            (&two, two.replace(r#""lun": 1"#, r#""lun": 1, "settings": {"read-only": true}"#), {
                "how unit 0:1 is shown"
            }),
        ] {
            assert_eq!(only(before, &after), Change::Unsupported(expected.to_owned()));
        }
    }

    #[test]
    fn an_impossible_change_blocks_no_other_change() {
        let changes = |before: &str, after: &str| {
            let changes = differences(&exports(&[before]), &exports(&[after]));
            let kept = changes.iter().filter_map(|(_, change)| match change {
                Change::Unsupported(what) => Some(what.clone()),
                _ => None,
            });
            let made = changes.iter().filter_map(|(_, change)| match change {
                Change::Alter(commands, export) => Some((commands.clone(), export.clone())),
                _ => None,
            });
            (kept.collect::<Vec<_>>(), made.collect::<Vec<_>>())
        };
        let limited = |text: &str| text.replacen('{', r#"{"limits": {"iops-total": 7}, "#, 1);
        let (null, file) = (r#"{"null": {"size-bytes": 512}}"#, r#"{"file": "/x"}"#);
        let (kept, made) = changes(BLK, &limited(&BLK.replace(null, file)));
        assert_eq!(kept, ["its disk"]);
        let [(commands, export)] = &made[..] else { panic!("{made:?}") };
        assert!(matches!(&commands[..], [Command::SetDisk(_, None, _)]));
        assert_eq!(by_socket(std::slice::from_ref(export)), exports(&[&limited(BLK)]));

        let scsi = |units: &str| {
            format!(r#"{{"endpoint": {{"path": "/b"}}, "device": {{"scsi": [{units}]}}}}"#)
        };
        let unit = |lun: u16, disk: &str, settings: &str| {
            format!(r#"{{"lun": {lun}, "disk": {disk}, "settings": {{{settings}}}}}"#)
        };
        let rules = r#""limits": {"iops-total": 7}"#;
        let before = [unit(0, null, ""), unit(1, null, ""), unit(2, null, "")].join(",");
        let after = [
            unit(0, file, rules),
            unit(1, &null.replace("512", "1024"), r#""read-only": true"#),
            unit(3, null, ""),
        ];
        let (kept, made) = changes(&scsi(&before), &scsi(&after.join(",")));
        assert_eq!(kept, ["the disk of unit 0:0", "how unit 0:1 is shown"]);
        let [(commands, export)] = &made[..] else { panic!("{made:?}") };
        assert!(
            matches!(
                &commands[..],
                [
                    Command::RemoveUnit(_, UnitPlace { lun: 2, .. }),
                    Command::SetDisk(_, Some(UnitPlace { lun: 0, .. }), _),
                    Command::Resize(_, Some(UnitPlace { lun: 1, .. }), _),
                    Command::AddUnit(_, added),
                ] if added.lun == 3
            ),
            "{commands:?}"
        );
        let aim = [unit(0, null, rules), unit(1, &null.replace("512", "1024"), "")];
        let aim = scsi(&[&aim[..], &after[2..]].concat().join(","));
        assert_eq!(by_socket(std::slice::from_ref(export)), exports(&[&aim]));
    }

    /// The usual limits of an export change with a unit that is added and has none of its own.
    #[test]
    fn a_unit_that_is_added_has_the_usual_rules_of_the_file() {
        let scsi = |iops: u32, units: &str| {
            format!(
                r#"{{"endpoint": {{"path": "/b"}}, "device": {{"scsi": [{units}]}},
                    "limits": {{"iops-total": {iops}}}, "rerror": "retry"}}"#
            )
        };
        let unit =
            |lun: u16| format!(r#"{{"lun": {lun}, "disk": {{"null": {{"size-bytes": 512}}}}}}"#);
        let (before, after) = (scsi(5, &unit(0)), scsi(9, &(unit(0) + "," + &unit(1))));
        let made = differences(&exports(&[&before]), &exports(&[&after]));
        let [(_, Change::Alter(commands, _))] = &made[..] else { panic!("{made:?}") };
        let added = commands.iter().find_map(|command| match command {
            Command::AddUnit(_, unit) => Some(unit),
            _ => None,
        });
        let settings = serde_json::to_value(&added.unwrap().settings).unwrap();
        assert_eq!(settings["limits"]["iops-total"], 9, "{settings}");
        assert_eq!(settings["rerror"], "retry", "{settings}");
    }

    /// Rules of the export and of a unit change side by side.
    #[test]
    fn each_unit_has_its_own_rules_after_a_change_of_the_usual_ones() {
        let scsi = |iops: u32, rerror: &str, unit: &str| {
            format!(
                r#"{{"endpoint": {{"path": "/b"}}, "limits": {{"iops-total": {iops}}},
                    "device": {{"scsi": [
                        {{"lun": 0, "disk": {{"null": {{"size-bytes": 512}}}}}},
                        {{"lun": 1, "disk": {{"null": {{"size-bytes": 512}}}}, "settings":
                            {{{unit}"limits": {{"iops-total": 9}}, "rerror": "{rerror}"}}}}]}}}}"#
            )
        };
        let rules = |before: &str, after: &str| {
            let (served, wanted) = (exports(&[before]), exports(&[after]));
            let changes = differences(&served, &wanted);
            let made = changes.into_iter().find_map(|(_, change)| match change {
                Change::Alter(commands, _) => Some(commands),
                _ => None,
            });
            let mut spec = served["/b"].clone();
            made.into_iter().flatten().for_each(|command| apply(&mut spec, command));
            let usual = &spec.settings.rules;
            let DeviceSpec::Scsi(units) = &spec.device else { unreachable!("it has units") };
            let rules = units.iter().map(|unit| unit.settings.rules(usual));
            rules.map(|rules| (rules.limits.iops_total, rules.rerror)).collect::<Vec<_>>()
        };
        let before = scsi(5, "report", "");
        assert_eq!(
            rules(&before, &scsi(7, "report", "")),
            [(Some(7), OnError::Report), (Some(9), OnError::Report)]
        );
        for unit in ["", r#""read-only": true, "#] {
            assert_eq!(
                rules(&before, &scsi(5, "retry", unit)),
                [(Some(5), OnError::Report), (Some(9), OnError::Retry)]
            );
        }
    }

    /// A daemon with the exports of a file, and the reloader of the file.
    struct Scene {
        folder: tempfile::TempDir,
        daemon: Arc<Daemon>,
        _ending: crate::daemon::Shutdown,
        reloader: Reloader,
    }

    impl Scene {
        /// Serves the returned exports of the file, and tells the reloader that all of them are
        /// served.
        fn new(before: &str, serves: impl FnOnce(&Config) -> Vec<ExportSpec>) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("ringhaul.toml");
            let serve = ServeArgs::augment_args(clap::Command::new("serve"));
            let program = clap::Command::new("ringhaul").subcommand(serve);
            let arguments = ["ringhaul", "serve", "--config", "ringhaul.toml"].map(Into::into);
            let file = ConfigFile::new(&path, program, arguments.to_vec(), 2);
            std::fs::write(&path, in_folder(before, &folder)).unwrap();
            let config = file.read().unwrap();
            let (daemon, ending) =
                Daemon::start(config.args.clone(), InheritedSockets::default()).unwrap();
            let daemon = Arc::new(daemon);
            daemon.handle(Command::Add(serves(&config))).unwrap();
            let weak = Arc::downgrade(&daemon);
            let reloader = Reloader::new(file, &config, &config.exports, weak);
            Self { folder, daemon, _ending: ending, reloader }
        }

        fn reload(&mut self, text: &str) {
            let path = self.folder.path().join("ringhaul.toml");
            std::fs::write(path, in_folder(text, &self.folder)).unwrap();
            self.reloader.reload();
            // On a busy machine `reload` returns before all changes have ended.
            while !self.reloader.record.lock().pending.is_empty() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }

        fn names(&self) -> Vec<String> {
            current_exports(&self.daemon).unwrap().iter().map(ExportSpec::name).collect()
        }

        fn socket(&self) -> String {
            in_folder("FOLDER/b", &self.folder)
        }

        /// Adds a unit to the export of [`scsi`], like a control client.
        fn add_unit(&self, unit: &str) {
            let unit = Box::new(serde_json::from_str(unit).unwrap());
            self.daemon.handle(Command::AddUnit(self.socket(), unit)).unwrap();
        }

        fn remove_unit(&self, lun: u16) {
            let place = UnitPlace { target: 0, lun };
            self.daemon.handle(Command::RemoveUnit(self.socket(), place)).unwrap();
        }

        fn luns(&self) -> Vec<u16> {
            let exports = current_exports(&self.daemon).unwrap();
            let DeviceSpec::Scsi(units) = &exports[0].device else { panic!("{exports:?}") };
            let mut luns: Vec<u16> = units.iter().map(|unit| unit.lun).collect();
            luns.sort_unstable();
            luns
        }

        fn poll_max_us(&self, change: Option<u16>) -> u16 {
            let change =
                SettingsChange { poll_max_us: change.map(Into::into), ..SettingsChange::default() };
            self.daemon.handle(Command::Set(change)).unwrap();
            self.daemon.settings().unwrap().poll_max_us
        }
    }

    fn in_folder(text: &str, folder: &tempfile::TempDir) -> String {
        text.replace("FOLDER", &folder.path().display().to_string())
    }

    fn blk(name: &str) -> String {
        format!(
            "[[export]]\nname = \"{name}\"\nendpoint = {{ path = \"FOLDER/{name}\" }}\n\
             device = {{ blk = {{ null = {{ size-bytes = 512 }} }} }}\n"
        )
    }

    /// An export with these units.
    fn scsi(units: &str) -> String {
        format!("[[export]]\nendpoint = {{ path = \"FOLDER/b\" }}\ndevice.scsi = [{units}]\n")
    }

    fn unit(lun: u16, disk: &str) -> String {
        format!("{{ lun = {lun}, disk = {disk} }}, ")
    }

    const NULL: &str = "{ null = { size-bytes = 512 } }";

    /// The disk is locked until the export before has ended.
    #[test]
    fn a_disk_goes_from_a_removed_export_to_one_that_is_added() {
        let text = |name: &str| {
            let disk = "{ file = \"FOLDER/disk\" }";
            blk(name).replace(NULL, disk)
        };
        let mut scene = Scene::new(&text("a"), |config| {
            let DeviceSpec::Blk(DiskSpec::File(path)) = &config.exports[0].device else {
                panic!("{:?}", config.exports)
            };
            std::fs::write(path, [0; 512]).unwrap();
            config.exports.clone()
        });
        // Names sort before and behind the one of the export before.
        for name in ["b", "a", "c"] {
            scene.reload(&text(name));
            assert_eq!(scene.names(), [name]);
        }
    }

    /// Each reload would otherwise leave a thread behind.
    #[test]
    fn readers_that_hang_refuse_a_further_reader_from_some_number_on() {
        let scene = Scene::new(&blk("a"), |_| Vec::new());
        let mut hanging = Vec::new();
        for _ in 0..READERS_MAX {
            assert!(scene.reloader.read().is_ok(), "{} readers hang", hanging.len());
            // Its reader ends after it has answered.
            crate::testing::wait_until(|| {
                Arc::strong_count(&scene.reloader.reading) == 1 + hanging.len()
            });
            hanging.push(Arc::clone(&scene.reloader.reading));
        }
        let error = format!("{:#}", scene.reloader.read().map(drop).unwrap_err());
        assert!(error.contains("ringhaul.toml still hang"), "{error}");
        hanging.pop();
        assert!(scene.reloader.read().is_ok());
    }

    #[test]
    fn an_export_that_is_not_served_is_added_again() {
        let both = blk("served") + &blk("late");
        // The disk of the second export could not be opened.
        let mut scene = Scene::new(&both, |config| config.exports[..1].to_vec());
        scene.reload(&both);
        assert_eq!(scene.names(), ["served", "late"]);
    }

    #[test]
    fn an_export_of_a_command_in_its_place_stays() {
        let file = blk("a");
        let mut scene = Scene::new(&file, |config| config.exports.clone());
        scene.daemon.handle(Command::Remove(Removal::new("a"))).unwrap();
        let other = BLK.replace("/a", "FOLDER/a").replacen('{', r#"{"name": "other", "#, 1);
        let other = serde_json::from_str(&in_folder(&other, &scene.folder)).unwrap();
        scene.daemon.handle(Command::Add(vec![other])).unwrap();
        scene.reload(&file);
        assert_eq!(scene.names(), ["other"]);
        scene.reload("");
        assert_eq!(scene.names(), ["other"]);
    }

    #[test]
    fn only_failed_changes_are_tried_again() {
        let mut scene = Scene::new(&scsi(&unit(0, NULL)), |config| config.exports.clone());
        let file = "{ file = \"FOLDER/disk\" }";
        let wanted = scsi(&(unit(0, NULL) + &unit(1, NULL) + &unit(2, file)));
        scene.reload(&wanted);
        let left = || {
            let config = scene.reloader.file.read().unwrap();
            let record = scene.reloader.record.lock();
            differences(&record.served, &by_socket(&config.exports))
        };
        let [(_, Change::Alter(commands, _))] = &left()[..] else { panic!("{:?}", left()) };
        assert!(matches!(&commands[..], [Command::AddUnit(_, unit)] if unit.lun == 2));
        std::fs::write(scene.folder.path().join("disk"), [0; 512]).unwrap();
        scene.reload(&wanted);
        let config = scene.reloader.file.read().unwrap();
        let record = scene.reloader.record.lock();
        assert_eq!(differences(&record.served, &by_socket(&config.exports)), []);
    }

    #[test]
    fn a_unit_that_cannot_be_added_keeps_no_later_one_away() {
        let mut scene = Scene::new(&scsi(&unit(0, NULL)), |config| config.exports.clone());
        let file = "{ file = \"FOLDER/none\" }";
        scene.reload(&scsi(&(unit(0, NULL) + &unit(1, file) + &unit(2, NULL))));
        assert_eq!(scene.luns(), [0, 2]);
    }

    /// A control command may be faster than the reload.
    #[test]
    fn an_export_that_has_gone_is_removed_from_the_record() {
        let scene = Scene::new(&blk("a"), |config| config.exports.clone());
        scene.daemon.handle(Command::Remove(Removal::new("a"))).unwrap();
        let (socket, record) = (in_folder("FOLDER/a", &scene.folder), &scene.reloader.record);
        Change::Remove.carry_out(socket, &Arc::downgrade(&scene.daemon), record);
        assert!(record.lock().served.is_empty());
    }

    #[test]
    fn a_unit_of_a_command_stays_when_a_change_fails_in_part() {
        let mut scene = Scene::new(&scsi(&unit(0, NULL)), |config| config.exports.clone());
        scene.add_unit(r#"{"lun": 7, "disk": {"null": {"size-bytes": 512}}}"#);
        let (larger, file) = (NULL.replace("512", "1024"), "{ file = \"FOLDER/none\" }");
        let wanted = scsi(&(unit(0, &larger) + &unit(1, NULL) + &unit(2, file)));
        scene.reload(&wanted);
        scene.reload(&wanted);
        scene.reload(&scsi(&unit(0, &larger)));
        assert_eq!(scene.luns(), [0, 7]);
        let record = scene.reloader.record.lock();
        let config = scene.reloader.file.read().unwrap();
        assert_eq!(differences(&record.served, &by_socket(&config.exports)), []);
    }

    #[test]
    fn a_unit_that_others_have_put_in_its_place_is_left_alone() {
        let (one, two) = (unit(0, NULL), unit(0, NULL) + &unit(1, NULL));
        let mut scene = Scene::new(&scsi(&two), |config| config.exports.clone());
        scene.remove_unit(1);
        scene.add_unit(
            r#"{"lun": 1, "settings": {"read-only": true}, "disk": {"null": {"size-bytes": 512}}}"#,
        );
        scene.reload(&scsi(&one));
        assert_eq!(scene.luns(), [0, 1]);
        // A unit that was removed is missing.
        scene.remove_unit(0);
        scene.reload(&scsi(&one));
        assert_eq!(scene.luns(), [0, 1]);
    }

    #[test]
    fn only_null_disks_are_the_same_with_any_size() {
        let export = |disk: &str| {
            let mut export = exports(&[BLK]).remove("/a").unwrap();
            export.device = DeviceSpec::Blk(DiskSpec::parse(disk).unwrap());
            export
        };
        for (one, other, is_same) in [
            ("null:512", "null:1024", true),
            ("file,path=/a", "file,path=/a", true),
            ("file,path=/a", "file,path=/b", false),
            ("file,path=/a", "null:512", false),
            ("raw,offset=512,over=/a", "raw,offset=512,over=/a", true),
            ("raw,offset=512,over=/a", "raw,offset=1024,over=/a", false),
            ("raw,size=512,over=/a", "raw,size=1024,over=/a", false),
            ("raw,over=/a", "raw,over=/b", false),
            ("raw,over=raw,over=/a", "raw,over=raw,size=512,over=/a", false),
            ("raw,size=512,over=null:512", "raw,size=512,over=null:1024", true),
        ] {
            assert_eq!(matches_export(&export(one), &export(other)), is_same, "{one} {other}");
        }
    }

    #[test]
    fn a_change_that_has_not_ended_is_not_begun_again() {
        let mut record = Record { served: exports(&[BLK]), pending: BTreeMap::new() };
        assert_eq!(record.begin(&Exports::new()), [("/a".to_owned(), Change::Remove)]);
        assert_eq!(record.begin(&Exports::new()), []);
        assert_eq!(record.begin(&exports(&[BLK])), []);
        record.pending.clear();
        assert_eq!(record.begin(&Exports::new()).len(), 1);
    }

    /// A change in progress may have removed a unit that it adds again.
    #[test]
    fn units_that_are_gone_are_forgotten_unless_a_change_is_in_progress() {
        let scsi = |luns: &[u16]| {
            let unit = |lun: &u16| json!({ "lun": lun, "disk": { "null": { "size-bytes": 512 } } });
            let units: Vec<_> = luns.iter().map(unit).collect();
            json!({ "endpoint": { "path": "/b" }, "device": { "scsi": units } }).to_string()
        };
        let (both, one) = (exports(&[BLK, &scsi(&[0, 1])]), exports(&[BLK, &scsi(&[0])]));
        let shown: Vec<ExportSpec> = one.values().cloned().collect();
        let mut record = Record { served: both.clone(), pending: BTreeMap::new() };
        record.pending.insert("/b".to_owned(), Change::Remove);
        record.forget_gone(&shown);
        assert_eq!(record.served, both);
        record.pending.clear();
        record.forget_gone(&shown);
        assert_eq!(record.served, one);
        record.forget_gone(&shown[..1]);
        assert_eq!(record.served, exports(&[BLK]));
    }

    /// The exports of a restart with the present file, by name, and the lines in the log about
    /// changes by commands.
    fn restart(scene: &Scene) -> (Vec<ExportSpec>, Vec<(String, String)>, SettingsChange) {
        let state = scene.folder.path().join("state");
        let (_, mut changes) = StateFile::take_over(&state).unwrap();
        let config = scene.reloader.file.read().unwrap();
        let settings = Settings {
            log: None,
            poll_max_us: config.args.poll_max_us,
            poll_budget: config.args.poll_budget,
        };
        let merged = changes.merge(&config.exports, &settings);
        let mut exports = [merged.exports, merged.added].concat();
        exports.sort_by_key(ExportSpec::name);
        let lines = [merged.log_lines, merged.dropped].concat();
        (exports.iter().map(ExportSpec::named).collect(), lines, merged.settings)
    }

    fn served(scene: &Scene) -> Vec<ExportSpec> {
        let mut exports = current_exports(&scene.daemon).unwrap();
        exports.sort_by_key(ExportSpec::name);
        exports
    }

    /// The file's changes to an export or a setting end the changes by commands to it.
    #[test]
    fn a_restart_after_a_reload_serves_the_same_exports() {
        let limited =
            |name: &str, iops: u32| format!("{}limits = {{ iops-total = {iops} }}\n", blk(name));
        let file = |poll: u32, a: &str, c: &str| format!("poll-max-us = {poll}\n{a}{c}");
        let before = file(30, &limited("a", 1), &limited("c", 1));
        let mut scene = Scene::new(&before, |config| config.exports.clone());
        let config = scene.reloader.file.read().unwrap();
        let settings = scene.daemon.settings().unwrap();
        let settings = Settings { poll_max_us: config.args.poll_max_us, ..settings };
        let (state, changes, _) = StateFile::open(&scene.folder.path().join("state")).unwrap();
        let (state, _) = SavedState::begin(state, changes, config.exports, settings).unwrap();
        scene.daemon.set_saved_state(state);
        let set_limit = |scene: &Scene, name: &str, iops: u64| {
            let change = serde_json::from_value(json!({ "limits": { "iops-total": iops } }));
            let command = Command::SetDisk(name.to_owned(), None, Box::new(change.unwrap()));
            scene.daemon.handle(command).unwrap();
        };
        let remove = |scene: &Scene, name: &str| {
            scene.daemon.handle(Command::Remove(Removal::new(name))).unwrap();
        };
        let check = |scene: &Scene, step: &str, lines: usize| {
            let (exports, told, settings) = restart(scene);
            assert_eq!(exports, served(scene), "{step}");
            assert_eq!(told.len(), lines, "{step}: {told:?}");
            settings
        };
        set_limit(&scene, "a", 5);
        set_limit(&scene, "c", 5);
        assert_eq!(scene.poll_max_us(Some(40)), 40);
        let set = check(&scene, "commands", 2);
        assert_eq!(set.poll_max_us, Some(40));
        scene.reload(&file(50, &limited("a", 9), &limited("c", 1)));
        let set = check(&scene, "the file changes one limit and the setting", 1);
        assert_eq!(set, SettingsChange::default());
        remove(&scene, "c");
        check(&scene, "a command removes an export", 1);
        scene.reload(&file(50, &limited("a", 9), ""));
        check(&scene, "the file removes it too", 0);
        scene.reload(&file(50, &limited("a", 9), &limited("c", 1)));
        check(&scene, "the file adds it again", 0);
        set_limit(&scene, "c", 5);
        scene.reload(&file(50, &limited("a", 9), ""));
        check(&scene, "the file removes a changed export", 0);
        set_limit(&scene, "a", 7);
        check(&scene, "a command changes the export of the new file", 1);
    }

    /// A later reload tries the change again.
    #[test]
    fn a_change_that_panics_is_no_longer_pending() {
        let scene = Scene::new(&blk("a"), |config| config.exports.clone());
        let socket = in_folder("FOLDER/a", &scene.folder);
        let spec = scene.reloader.record.lock().served[&socket].clone();
        // No reload alters an export by this command.
        let change = Change::Alter(vec![Command::Set(SettingsChange::default())], spec);
        scene.reloader.record.lock().pending.insert(socket.clone(), change.clone());
        scene.reloader.carry_out(vec![(socket, change)]);
        while !scene.reloader.record.lock().pending.is_empty() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_file_overrides_settings_of_commands() {
        let mut scene = Scene::new("poll-max-us = 7\n", |_| Vec::new());
        assert_eq!(scene.poll_max_us(Some(9)), 9);
        scene.reload("poll-max-us = 7\n");
        assert_eq!(scene.poll_max_us(None), 7);
        // The option returns to its default, as if never named, and is left alone from then on.
        scene.reload("");
        let usual = scene.poll_max_us(None);
        assert_ne!(usual, 7);
        scene.poll_max_us(Some(usual + 1));
        scene.reload("");
        assert_eq!(scene.poll_max_us(None), usual + 1);
    }
}
