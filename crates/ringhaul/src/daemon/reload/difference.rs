//! The differences between the served exports and the configuration file, and the commands that end
//! them.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::spec::command::{Command, NewSize};
use crate::spec::qos::{QosChange, QosSpec};
use crate::spec::rules::{unit_without_rules, without_rules};
use crate::spec::{
    DeviceSpec, DiskSpec, ExportSettings, ExportSpec, UnitPlace, UnitSettings, UnitSpec,
};

/// Exports by their sockets. Commands use the sockets too, because a name may change.
pub(super) type Exports = BTreeMap<String, ExportSpec>;

/// A change of one export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    Add(ExportSpec),
    Remove,
    /// Commands for its logical units, sizes and rules, in order, and the export after them.
    Alter(Vec<Command>, ExportSpec),
    /// A part of the export that cannot be changed.
    Unsupported(String),
}

impl Change {
    /// The export after an addition or alteration.
    pub(super) fn result(&self) -> Option<&ExportSpec> {
        match self {
            Self::Add(spec) | Self::Alter(_, spec) => Some(spec),
            Self::Remove | Self::Unsupported(_) => None,
        }
    }

    pub(super) fn is_unsupported(&self) -> bool {
        matches!(self, Self::Unsupported(_))
    }
}

pub(super) fn by_socket(exports: &[ExportSpec]) -> Exports {
    exports.iter().map(|export| (export.endpoint.to_string(), export.clone())).collect()
}

/// The keys of settings that differ.
fn changed_keys(settings: [ExportSettings; 2]) -> Vec<String> {
    let [before, wanted] = settings.map(|settings| match serde_json::to_value(settings) {
        Ok(Value::Object(keys)) => keys,
        other => unreachable!("settings are an object, and not {other:?}"),
    });
    let differs = |(key, value): (String, Value)| (before.get(&key) != Some(&value)).then_some(key);
    wanted.into_iter().filter_map(differs).collect()
}

/// Applies a command to the specification of its export.
pub(super) fn apply(spec: &mut ExportSpec, change: Command) {
    match (&mut spec.device, change) {
        (DeviceSpec::Scsi(units), Command::AddUnit(_, unit)) => units.push(*unit),
        (DeviceSpec::Scsi(units), Command::RemoveUnit(_, place)) => {
            units.retain(|unit| unit.place() != place);
        }
        (DeviceSpec::Scsi(units), Command::Resize(_, Some(place), size)) => {
            let unit = units.iter_mut().find(|unit| unit.place() == place);
            set_size(&mut unit.expect("what is resized is there").disk, size);
        }
        (DeviceSpec::Blk(disk), Command::Resize(_, None, size)) => set_size(disk, size),
        (DeviceSpec::Blk(_), Command::SetDisk(_, None, change)) => {
            spec.settings.rules = spec.settings.rules.with_change(&change);
        }
        (DeviceSpec::Scsi(units), Command::SetDisk(_, Some(place), change)) => {
            let unit = units.iter_mut().find(|unit| unit.place() == place);
            let settings = &mut unit.expect("what is changed is there").settings;
            let usual = &spec.settings.rules;
            settings.set_rules(&settings.rules(usual).with_change(&change), usual);
        }
        (_, other) => unreachable!("{other:?} is no change of this export"),
    }
}

/// Changes the size of a null disk.
fn set_size(disk: &mut DiskSpec, size: NewSize) {
    match (disk, size.size_bytes) {
        (DiskSpec::Null { size_bytes }, Some(size)) => *size_bytes = size,
        (other, _) => unreachable!("the file gives {other} no other size"),
    }
}

/// The changes that turn the served exports into the wanted ones.
pub(super) fn differences(served: &Exports, wanted: &Exports) -> Vec<(String, Change)> {
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

/// The changes that turn one export into the wanted one, and the parts that cannot be changed.
fn difference(export: &str, before: &ExportSpec, wanted: &ExportSpec) -> Vec<Change> {
    let mut changes = Vec::new();
    if before.name() != wanted.name() {
        changes.push(Change::Unsupported("its name".to_owned()));
    }
    let settings = [before, wanted].map(|spec| without_rules(&spec.settings));
    if settings[0] != settings[1] {
        let keys = changed_keys(settings).join(", ");
        changes.push(Change::Unsupported(format!("the settings {keys}")));
    }
    let mut kept = Vec::new();
    let (commands, device) = match (&before.device, &wanted.device) {
        (DeviceSpec::Blk(disk), DeviceSpec::Blk(other)) => {
            let (resize, device) = match disk_change(export, None, disk, other) {
                Ok(resize) => (resize, &wanted.device),
                Err(CannotChange) => {
                    kept.push("its disk".to_owned());
                    (None, &before.device)
                }
            };
            let rules = [before, wanted].map(|spec| &spec.settings.rules);
            let rules = rules_change(export, None, rules);
            (resize.into_iter().chain(rules).collect(), device.clone())
        }
        (DeviceSpec::Scsi(_), DeviceSpec::Scsi(_)) => {
            unit_changes(export, before, wanted, &mut kept)
        }
        _ => {
            kept.push("its device".to_owned());
            (Vec::new(), before.device.clone())
        }
    };
    changes.extend(kept.into_iter().map(Change::Unsupported));
    if !commands.is_empty() {
        let rules = wanted.settings.rules.clone();
        let settings = ExportSettings { rules, ..before.settings.clone() };
        changes.push(Change::Alter(commands, ExportSpec { device, settings, ..before.clone() }));
    }
    changes
}

/// The error about a disk that cannot be changed while it is served.
struct CannotChange;

/// The command that changes a disk. Only a null disk can be changed, in its size.
fn disk_change(
    name: &str,
    place: Option<UnitPlace>,
    before: &DiskSpec,
    wanted: &DiskSpec,
) -> Result<Option<Command>, CannotChange> {
    match (before, wanted) {
        _ if before == wanted => Ok(None),
        (DiskSpec::Null { .. }, &DiskSpec::Null { size_bytes }) => {
            let size = NewSize { size_bytes: Some(size_bytes), shrink: true };
            Ok(Some(Command::Resize(name.to_owned(), place, size)))
        }
        _ => Err(CannotChange),
    }
}

/// The command that changes the rules of a disk.
fn rules_change(
    name: &str,
    place: Option<UnitPlace>,
    [before, wanted]: [&QosSpec; 2],
) -> Option<Command> {
    let change = || {
        let change = Box::new(QosChange::diff(before, wanted));
        Command::SetDisk(name.to_owned(), place, change)
    };
    (before != wanted).then(change)
}

/// The commands that add, remove and change logical units. Adds differences that cannot be changed
/// to `kept`. Also returns the device after the commands.
fn unit_changes(
    name: &str,
    before: &ExportSpec,
    wanted: &ExportSpec,
    kept: &mut Vec<String>,
) -> (Vec<Command>, DeviceSpec) {
    let (DeviceSpec::Scsi(before_all), DeviceSpec::Scsi(wanted_all)) =
        (&before.device, &wanted.device)
    else {
        return (Vec::new(), before.device.clone());
    };
    let at = |units: &[UnitSpec], place| units.iter().find(|unit| unit.place() == place).cloned();
    let (mut commands, mut units) = (Vec::new(), Vec::new());
    for unit in before_all.iter().filter(|unit| at(wanted_all, unit.place()).is_none()) {
        commands.push(Command::RemoveUnit(name.to_owned(), unit.place()));
    }
    for unit in wanted_all {
        let (place, mut unit) = (unit.place(), unit.clone());
        let Some(other) = at(before_all, place) else {
            units.push(unit.clone());
            // The usual rules of the served export may be the file's earlier ones.
            unit.settings.set_rules_in_full(&unit.settings.rules(&wanted.settings.rules));
            commands.push(Command::AddUnit(name.to_owned(), Box::new(unit)));
            continue;
        };
        if unit_without_rules(&other.settings) != unit_without_rules(&unit.settings) {
            kept.push(format!("how unit {place} is shown"));
            let UnitSettings { limits, rerror, werror, .. } = unit.settings;
            unit.settings = UnitSettings { limits, rerror, werror, ..other.settings.clone() };
        }
        match disk_change(name, Some(place), &other.disk, &unit.disk) {
            Ok(resize) => commands.extend(resize),
            Err(CannotChange) => {
                kept.push(format!("the disk of unit {place}"));
                unit.disk = other.disk.clone();
            }
        }
        let old = other.settings.rules(&before.settings.rules);
        let new = unit.settings.rules(&wanted.settings.rules);
        commands.extend(rules_change(name, Some(place), [&old, &new]));
        units.push(unit);
    }
    (commands, DeviceSpec::Scsi(units))
}
