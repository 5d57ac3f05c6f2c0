//! A small model of changes by commands, and a test of the state file against it: a restart finds
//! the exports as commands have left them, and a base that has changed since takes precedence.

use std::collections::BTreeMap;
use std::fs;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::file::StateFile;
use super::*;
use crate::spec::DeviceSpec;
use crate::spec::command::Removal;

const NONE: Settings = Settings { log: None, poll_max_us: 0, poll_budget: 1 };

/// The number of the disk and the limit at each place of an export. The disk of virtio-blk has no
/// place.
type Disks = BTreeMap<Option<u16>, (u64, u32)>;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Export {
    /// Stands for all settings that commands cannot change.
    read_only: bool,
    disks: Disks,
}

/// Exports by name.
type Exports = BTreeMap<&'static str, Export>;

/// Exports of the base, virtio-scsi devices in capitals, and exports of commands alone.
const BASE: [&str; 3] = ["a", "b", "S"];
const NAMES: [&str; 5] = ["a", "b", "S", "n", "N"];

#[derive(Debug, Clone)]
enum Op {
    Remove(usize),
    /// Adds an export, perhaps read-only, with disks of this number.
    Add(usize, u64, bool),
    SetLimit(usize, u16, u32),
    AddUnit(usize, u16, u64),
    RemoveUnit(usize, u16),
}

fn ops() -> impl Strategy<Value = Op> {
    let (name, lun, number) = (0..NAMES.len(), 0..3_u16, 1..4_u32);
    let size = number.clone().prop_map(u64::from);
    prop_oneof![
        1 => name.clone().prop_map(Op::Remove),
        1 => (name.clone(), size.clone(), any::<bool>()).prop_map(|(n, s, r)| Op::Add(n, s, r)),
        2 => (name.clone(), lun.clone(), number).prop_map(|(n, l, v)| Op::SetLimit(n, l, v)),
        1 => (name.clone(), lun.clone(), size).prop_map(|(n, l, s)| Op::AddUnit(n, l, s)),
        1 => (name, lun).prop_map(|(name, lun)| Op::RemoveUnit(name, lun)),
    ]
}

fn is_scsi(name: &str) -> bool {
    name.chars().all(char::is_uppercase)
}

fn new_export(name: &str, disk: u64, read_only: bool) -> Export {
    let luns: &[_] = if is_scsi(name) { &[Some(0), Some(1)] } else { &[None] };
    Export { read_only, disks: luns.iter().map(|lun| (*lun, (disk, 9))).collect() }
}

/// Carries out an operation. Returns its command, unless it is refused.
fn perform(exports: &mut Exports, op: &Op) -> Option<Command> {
    let (Op::Remove(name)
    | Op::Add(name, ..)
    | Op::SetLimit(name, ..)
    | Op::AddUnit(name, ..)
    | Op::RemoveUnit(name, _)) = op;
    let name = NAMES[*name];
    let spec = |export: &Export| specs(&Exports::from([(name, export.clone())])).remove(0);
    let place = |lun: u16| UnitPlace { target: 0, lun };
    Some(match (op, exports.get_mut(name)) {
        (Op::Add(_, disk, read_only), None) => {
            let export = new_export(name, *disk, *read_only);
            let command = Command::Add(vec![spec(&export)]);
            exports.insert(name, export);
            command
        }
        (Op::Remove(_), Some(_)) => {
            exports.remove(name);
            Command::Remove(Removal::new(name))
        }
        (Op::SetLimit(_, lun, limit), Some(export)) => {
            let lun = is_scsi(name).then_some(*lun);
            export.disks.get_mut(&lun)?.1 = *limit;
            let change = json!({ "limits": { "iops-total": limit } });
            let change = serde_json::from_value(change).unwrap();
            Command::SetDisk(name.to_owned(), lun.map(place), Box::new(change))
        }
        (Op::AddUnit(_, lun, size), Some(export)) if is_scsi(name) => {
            if export.disks.contains_key(&Some(*lun)) {
                return None;
            }
            export.disks.insert(Some(*lun), (*size, 9));
            let DeviceSpec::Scsi(units) = spec(export).device else { unreachable!() };
            let unit = units.into_iter().find(|unit| unit.place() == place(*lun)).unwrap();
            Command::AddUnit(name.to_owned(), Box::new(unit))
        }
        (Op::RemoveUnit(_, lun), Some(export)) if is_scsi(name) => {
            export.disks.remove(&Some(*lun))?;
            Command::RemoveUnit(name.to_owned(), place(*lun))
        }
        _ => return None,
    })
}

fn specs(exports: &Exports) -> Vec<ExportSpec> {
    let file = |disk: u64| json!({ "file": format!("/{disk}") });
    let spec = |(name, Export { read_only, disks }): (&&str, &Export)| {
        let endpoint = json!({ "path": format!("/run/{name}") });
        let spec = match disks.get(&None) {
            Some((disk, limit)) => json!({
                "name": name, "endpoint": endpoint, "device": { "blk": file(*disk) },
                "limits": { "iops-total": limit }, "read-only": read_only,
            }),
            None => {
                let unit = |(lun, (disk, limit)): (&Option<u16>, &(u64, u32))| {
                    let settings = json!({ "limits": { "iops-total": limit } });
                    json!({ "lun": lun, "disk": file(*disk), "settings": settings })
                };
                let units: Vec<Value> = disks.iter().map(unit).collect();
                json!({
                    "name": name, "endpoint": endpoint, "device": { "scsi": units },
                    "read-only": read_only,
                })
            }
        };
        serde_json::from_value(spec).unwrap()
    };
    exports.iter().map(spec).collect()
}

/// The exports with which a process begins.
fn begun(merged: &Merged) -> Exports {
    let number = |value: &Value| value.as_u64().unwrap();
    let disk = |disk: &Value, limits: &Value| {
        let limit = u32::try_from(number(&limits["iops-total"])).unwrap();
        (disk["file"].as_str().unwrap()[1..].parse().unwrap(), limit)
    };
    let export = |spec: &ExportSpec| {
        let name = *NAMES.iter().find(|name| spec.is_called(name)).unwrap();
        let spec = serde_json::to_value(spec).unwrap();
        let disks = match spec["device"]["scsi"].as_array() {
            None => Disks::from([(None, disk(&spec["device"]["blk"], &spec["limits"]))]),
            Some(units) => {
                let unit = |unit: &Value| {
                    let lun = u16::try_from(number(&unit["lun"])).unwrap();
                    (Some(lun), disk(&unit["disk"], &unit["settings"]["limits"]))
                };
                units.iter().map(unit).collect()
            }
        };
        (name, Export { read_only: spec["read-only"].as_bool().unwrap(), disks })
    };
    merged.exports.iter().chain(&merged.added).map(export).collect()
}

/// Returns true if a command has put another export in the place of one.
fn is_replaced(before: &Export, now: &Export) -> bool {
    let disk = |export: &Export| export.disks.get(&None).map(|(disk, _)| *disk);
    before.read_only != now.read_only || disk(before) != disk(now)
}

/// The disks of an export of the base that commands and the base have changed.
fn merged_disks(old: &Disks, now: &Disks, new: &Disks) -> Disks {
    let places = new.keys().chain(old.keys()).chain(now.keys());
    let disk = |place: &Option<u16>| match (place, old.get(place), now.get(place), new.get(place)) {
        // Commands do not change the disk of virtio-blk.
        (None, Some((_, old)), Some((_, now)), Some((disk, new))) => {
            Some((*disk, if old == new { *now } else { *new }))
        }
        (_, old, now, new) => if old == new { now } else { new }.copied(),
    };
    places.filter_map(|place| Some((*place, disk(place)?))).collect()
}

/// The exports at a base that has changed since the commands.
fn at_new_base(before: &Exports, now: &Exports, base: &Exports) -> Exports {
    let is_of_base = |name: &str, export: &Export| {
        before.get(name).is_some_and(|before| !is_replaced(before, export))
    };
    let mut all = Exports::new();
    for (name, new) in base {
        let export = match (before.get(name), now.get(name)) {
            (Some(old), None) if old == new => continue,
            (Some(old), Some(now)) if is_of_base(name, now) => {
                let disks = merged_disks(&old.disks, &now.disks, &new.disks);
                Export { disks, ..new.clone() }
            }
            (Some(old), Some(now)) if old == new => now.clone(),
            _ => new.clone(),
        };
        all.insert(name, export);
    }
    for (name, export) in now.iter().filter(|(name, export)| !is_of_base(name, export)) {
        all.entry(name).or_insert_with(|| export.clone());
    }
    all
}

fn start(path: &Path, base: &Exports) -> (SavedState, Merged) {
    let (file, changes, locked) = StateFile::open(path).unwrap();
    let begun = SavedState::begin(file, changes, specs(base), NONE).unwrap();
    drop(locked);
    begun
}

fn base() -> Exports {
    BASE.iter().map(|name| (*name, new_export(name, 1, false))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None, cases: 100, ..ProptestConfig::default()
    })]

    #[test]
    fn a_restart_restores_the_exports_as_commands_have_left_them(
        commands in prop::collection::vec(ops(), 1..12),
        changes in prop::collection::vec(ops(), 0..6),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let mut live = base();
        let (mut state, _) = start(&path, &base());
        for op in &commands {
            let Some(command) = perform(&mut live, op) else { continue };
            let part = ChangedPart::from_command(&command).unwrap();
            state.record(&part, || specs(&live)).unwrap();
            drop(state);
            let (again, merged) = start(&path, &base());
            prop_assert_eq!(begun(&merged), live.clone(), "after {:?}", op);
            prop_assert_eq!(&merged.dropped, &vec![]);
            state = again;
        }
        drop(state);

        // A process that takes over writes the whole live state, which it has not recorded.
        let taken = folder.path().join("taken");
        let is_live = |(name, export): &(&'static str, Export)| {
            live.get(name).is_some_and(|now| !is_replaced(export, now))
        };
        let base_then: Exports = base().into_iter().filter(is_live).collect();
        let settings = SettingsChange { poll_max_us: Some(7), ..SettingsChange::default() };
        let (state, _) = start(&taken, &base_then);
        state.record_all(&specs(&live), &settings).unwrap();
        drop(state);
        let (_state, merged) = start(&taken, &base_then);
        prop_assert_eq!(begun(&merged), live.clone());
        prop_assert_eq!(merged.settings, settings);

        // The process before it had changes that are not in the file.
        let mut unrecorded = live.clone();
        for (name, export) in &mut unrecorded {
            export.disks.values_mut().for_each(|(_, limit)| *limit = 7);
            if is_scsi(name) {
                export.disks.entry(Some(2)).or_insert((5, 9));
            }
        }
        let copy = folder.path().join("copy");
        fs::copy(&path, &copy).unwrap();
        let (state, _) = start(&copy, &base());
        state.record_all(&specs(&unrecorded), &SettingsChange::default()).unwrap();
        drop(state);
        let (_state, merged) = start(&copy, &base());
        prop_assert_eq!(begun(&merged), unrecorded);

        let mut changed = base();
        for op in &changes {
            perform(&mut changed, op);
        }
        for restart in 0..2 {
            let (_state, merged) = start(&path, &changed);
            let expected = at_new_base(&base(), &live, &changed);
            prop_assert_eq!(begun(&merged), expected, "restart {} at {:?}", restart, changed);
        }
    }
}
