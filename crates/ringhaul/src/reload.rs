//! SIGHUP: the exports that the configuration file names are made what it says now.
//!
//! Each export is changed on a thread of its own, so that one whose disk or guest hangs holds up no
//! other, and no later SIGHUP either.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::command::{Command, CommandError, NewSize, Removal, Reply};
use crate::config::{Config, ConfigFile};
use crate::daemon::Daemon;
use crate::settings::SettingsChange;
use crate::spec::{DeviceSpec, DiskSpec, ExportSpec, UnitPlace, UnitSpec};

/// How long changes may take before the log says which ones are waited for. They go on.
const PATIENCE: Duration = Duration::from_secs(10);

/// Options that may change while the daemon runs.
const LOG: &str = "log";
const POLL_MAX_US: &str = "poll-max-us";
const POLL_BUDGET: &str = "poll-budget";

/// Has the file read again. Whoever drops it ends the thread that does so.
pub(crate) struct Reload(mpsc::Sender<()>);

impl Reload {
    /// Starts the thread, for a daemon that was started with `config`, and serves these exports of
    /// it or is given them by others.
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
        let served = by_socket(served);
        let mut reloader = Reloader {
            file,
            options: config.options.clone(),
            daemon,
            served: Arc::new(Mutex::new(served)),
        };
        let work = move || {
            while requests.recv().is_ok() {
                // Those that came meanwhile mean the same.
                while requests.try_recv().is_ok() {}
                reloader.reload();
            }
        };
        // Nobody waits for it: it may be waiting for a disk.
        let thread = std::thread::Builder::new().name("ringhaul-reload".into()).spawn(work);
        thread.context("cannot start the thread that reads the configuration again")?;
        Ok(Self(asked))
    }

    /// Begins to do so.
    pub(crate) fn begin(&self) {
        // The thread ends with the daemon.
        let _ = self.0.send(());
    }
}

/// Exports by their sockets, by which commands call them too: a name may change.
type Exports = BTreeMap<String, ExportSpec>;

/// The exports of the file as they are served. Each is changed by whoever has changed it.
type Served = Arc<Mutex<Exports>>;

struct Reloader {
    file: ConfigFile,
    /// Those that hold: the daemon was started with them, or has applied them since.
    options: BTreeMap<String, String>,
    daemon: Weak<Daemon>,
    served: Served,
}

/// What is done to one export.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Change {
    Add(ExportSpec),
    Remove,
    /// Its logical units and sizes, one after the other, after which it is this.
    Alter(Vec<Command>, ExportSpec),
    /// It cannot be changed in this.
    Keep(&'static str),
}

impl Reloader {
    fn reload(&mut self) {
        let path = self.file.path().display().to_string();
        let config = match self.file.read() {
            Ok(config) => config,
            Err(error) => {
                tracing::error!("the configuration is not changed: {error:#}");
                return;
            }
        };
        self.apply_options(&config);
        let changes = differences(&lock(&self.served), &by_socket(&config.exports));
        tracing::info!("{path} is read again; exports to change: {}", changes.len());
        let (removals, others): (Vec<_>, Vec<_>) =
            changes.into_iter().partition(|(_, change)| *change == Change::Remove);
        // What is removed may have the disk or the socket of what is added.
        self.carry_out(removals);
        self.carry_out(others);
        tracing::info!("the configuration of {path} is applied, as far as it can be");
    }

    /// Changes the options that may change while the daemon runs, and says which others have.
    fn apply_options(&mut self, config: &Config) {
        let keys: BTreeSet<&String> = self.options.keys().chain(config.options.keys()).collect();
        let has_changed = |key: &&String| self.options.get(*key) != config.options.get(*key);
        let changed = keys.into_iter().filter(has_changed).cloned();
        let (now, later): (Vec<String>, Vec<String>) =
            changed.partition(|key| may_change(key, config));
        for key in later {
            tracing::warn!("{key} has changed; that takes effect when the daemon is started again");
        }
        let Some(daemon) = self.daemon.upgrade().filter(|_| !now.is_empty()) else { return };
        let has = |key: &str| now.iter().any(|changed| changed == key);
        let change = SettingsChange {
            log: config.options.get(LOG).filter(|_| has(LOG)).map(|option| value_of(option)),
            poll_max_us: has(POLL_MAX_US).then_some(config.args.poll_max_us),
            poll_budget: has(POLL_BUDGET).then_some(config.args.poll_budget),
        };
        match daemon.handle(Command::Set(change)) {
            Ok(_) => {
                for key in now {
                    tracing::info!("{key} has changed, and is applied");
                    match config.options.get(&key) {
                        Some(option) => self.options.insert(key, option.clone()),
                        None => self.options.remove(&key),
                    };
                }
            }
            Err(CommandError::Ending) => {}
            Err(error) => tracing::error!("{} cannot be changed: {error}", now.join(", ")),
        }
    }

    /// Makes these changes side by side, and waits for them for a while.
    fn carry_out(&self, changes: Vec<(String, Change)>) {
        let (done, results) = mpsc::channel();
        let mut waits = BTreeMap::new();
        for (number, (export, change)) in changes.into_iter().enumerate() {
            let name = export.clone();
            let (daemon, served) = (Weak::clone(&self.daemon), Arc::clone(&self.served));
            let done = done.clone();
            let work = move || {
                change.carry_out(export, &daemon, &served);
                // Nobody waits any more if it took too long.
                let _ = done.send(number);
            };
            match std::thread::Builder::new().name("ringhaul-change".into()).spawn(work) {
                Ok(_) => drop(waits.insert(number, name)),
                Err(error) => tracing::error!(export = name, "cannot be changed now: {error}"),
            }
        }
        let until = Instant::now() + PATIENCE;
        while !waits.is_empty() {
            match results.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(number) => drop(waits.remove(&number)),
                Err(_) => break,
            }
        }
        for export in waits.values() {
            let seconds = PATIENCE.as_secs();
            tracing::warn!(export, "its change has not ended after {seconds} s, and goes on");
        }
    }
}

impl Change {
    fn carry_out(self, export: String, daemon: &Weak<Daemon>, served: &Served) {
        let Some(daemon) = daemon.upgrade() else { return };
        let result = match self {
            Self::Add(spec) => daemon.handle(Command::Add(vec![spec.clone()])).map(|_| {
                lock(served).insert(export.clone(), spec);
            }),
            Self::Remove => match daemon.handle(Command::Remove(Removal::of(&export))) {
                // Somebody else may have removed it.
                Ok(_) | Err(CommandError::Unknown(_)) => {
                    lock(served).remove(&export);
                    tracing::info!(export, "removed");
                    Ok(())
                }
                Err(error) => Err(error),
            },
            Self::Alter(commands, spec) => {
                let result = alter(&daemon, commands);
                // What was done of it is not done again.
                let now = if result.is_ok() { Some(spec) } else { shown(&daemon, &export) };
                now.into_iter().for_each(|now| drop(lock(served).insert(export.clone(), now)));
                result
            }
            Self::Keep(what) => {
                tracing::warn!(
                    export,
                    "{what} cannot change while it is served; it goes on unchanged; to change it, \
                     take it out of the file, reload, and put it in again"
                );
                Ok(())
            }
        };
        match result {
            Ok(()) | Err(CommandError::Ending) => {}
            Err(error) => tracing::error!(export, "{:#}", error.into_error()),
        }
    }
}

/// An export as it is now, if there is one on this socket.
fn shown(daemon: &Daemon, export: &str) -> Option<ExportSpec> {
    let Ok(Reply::Exports(all)) = daemon.handle(Command::Show) else { return None };
    let mut specs = all.into_iter().map(|status| status.spec);
    specs.find(|spec| spec.endpoint.to_string() == export)
}

/// Changes units of an export. What has failed is tried again by the next SIGHUP.
fn alter(daemon: &Daemon, commands: Vec<Command>) -> Result<(), CommandError> {
    let mut result = Ok(());
    for command in commands {
        let is_removal = matches!(command, Command::RemoveUnit(..));
        match daemon.handle(command) {
            // Somebody else may have removed it.
            Err(CommandError::UnknownUnit(..)) if is_removal => {}
            Err(error) => result = Err(error),
            Ok(_) => {}
        }
    }
    result
}

/// Whether an option may change while the daemon runs. What is logged without one is up to the
/// environment that the daemon was started in.
fn may_change(key: &str, config: &Config) -> bool {
    [POLL_MAX_US, POLL_BUDGET].contains(&key) || key == LOG && config.options.contains_key(LOG)
}

/// The value of an option as it stands on a command line.
fn value_of(option: &str) -> String {
    option.split_once('=').map_or(option, |(_, value)| value).to_owned()
}

fn by_socket(exports: &[ExportSpec]) -> Exports {
    exports.iter().map(|export| (export.endpoint.to_string(), export.clone())).collect()
}

/// What is to be done for exports to be as wanted.
fn differences(served: &Exports, wanted: &Exports) -> Vec<(String, Change)> {
    let removed = served.keys().filter(|export| !wanted.contains_key(*export));
    let mut changes: Vec<(String, Change)> =
        removed.map(|export| (export.clone(), Change::Remove)).collect();
    for (export, wanted) in wanted {
        let of_export = match served.get(export) {
            None => vec![Change::Add(wanted.clone())],
            Some(before) => difference(export, before, wanted),
        };
        changes.extend(of_export.into_iter().map(|change| (export.clone(), change)));
    }
    changes
}

/// What is to be done for one to be as wanted, and what cannot be done.
fn difference(export: &str, before: &ExportSpec, wanted: &ExportSpec) -> Vec<Change> {
    let mut changes = Vec::new();
    if before.name != wanted.name {
        changes.push(Change::Keep("its name"));
    }
    if before.settings != wanted.settings {
        changes.push(Change::Keep("how it is served"));
    }
    let commands = match (&before.device, &wanted.device) {
        (DeviceSpec::Blk(disk), DeviceSpec::Blk(other)) => {
            disk_change(export, None, disk, other).map(Vec::from_iter)
        }
        (DeviceSpec::Scsi(units), DeviceSpec::Scsi(others)) => unit_changes(export, units, others),
        _ => Err("its device"),
    };
    match commands {
        Err(what) => changes.push(Change::Keep(what)),
        Ok(commands) if commands.is_empty() => {}
        Ok(commands) => {
            let export = ExportSpec { device: wanted.device.clone(), ..before.clone() };
            changes.push(Change::Alter(commands, export));
        }
    }
    changes
}

/// What is to be done with a disk: that of a null disk may have another size.
fn disk_change(
    name: &str,
    place: Option<UnitPlace>,
    before: &DiskSpec,
    wanted: &DiskSpec,
) -> Result<Option<Command>, &'static str> {
    match (before, wanted) {
        _ if before == wanted => Ok(None),
        (DiskSpec::Null { .. }, &DiskSpec::Null { size_bytes }) => {
            let size = NewSize { size_bytes: Some(size_bytes), shrink: true };
            Ok(Some(Command::Resize(name.to_owned(), place, size)))
        }
        _ => Err("its disk"),
    }
}

/// What is to be done with logical units: they come, go, and change their size.
fn unit_changes(
    name: &str,
    before: &[UnitSpec],
    wanted: &[UnitSpec],
) -> Result<Vec<Command>, &'static str> {
    let at = |units: &[UnitSpec], place| units.iter().find(|unit| unit.place() == place).cloned();
    let mut commands = Vec::new();
    for unit in before.iter().filter(|unit| at(wanted, unit.place()).is_none()) {
        commands.push(Command::RemoveUnit(name.to_owned(), unit.place()));
    }
    for unit in wanted {
        match at(before, unit.place()) {
            None => commands.push(Command::AddUnit(name.to_owned(), Box::new(unit.clone()))),
            Some(other) if other.settings != unit.settings => return Err("a logical unit"),
            Some(other) => {
                let change = disk_change(name, Some(unit.place()), &other.disk, &unit.disk);
                commands.extend(change.map_err(|_| "the disk of a logical unit")?);
            }
        }
    }
    Ok(commands)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::ExportSpec;

    fn exports(texts: &[&str]) -> Exports {
        let export = |text: &&str| serde_json::from_str::<ExportSpec>(text).unwrap();
        by_socket(&texts.iter().map(export).collect::<Vec<_>>())
    }

    const BLK: &str =
        r#"{"endpoint": {"path": "/a"}, "device": {"blk": {"null": {"size-bytes": 512}}}}"#;

    #[test]
    fn what_differs_is_changed_if_it_can_be() {
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
            (&two, two.replace("/x", "/y"), "the disk of a logical unit"),
            (BLK, BLK.replace(r#""device""#, r#""read-only": true, "device""#), "how it is served"),
            (BLK, BLK.replace(r#""device""#, r#""name": "vm", "device""#), "its name"),
            (BLK, scsi("").replace("/b", "/a"), "its device"),
        ] {
            assert_eq!(only(before, &after), Change::Keep(expected));
        }
    }
}
