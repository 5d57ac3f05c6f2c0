//! Changes that one process writes to the file and the next one reads, without a daemon.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};

use rustix::fs::{CWD, FlockOperation, Mode, flock, mkfifoat};
use rustix::io::Errno;
use serde_json::{Value, json};

use super::*;
use crate::daemon::saved_state::file::Locked;
use crate::testing::spawn_asleep;

/// An export of a null disk for virtio-blk, with these limits.
fn blk(name: &str, limits: Value) -> ExportSpec {
    let endpoint = json!({ "path": format!("/run/{name}") });
    let device = json!({ "blk": { "null": { "size-bytes": 512 } } });
    let spec = json!({ "name": name, "endpoint": endpoint, "device": device, "limits": limits });
    serde_json::from_value(spec).unwrap()
}

/// An export `vm` for virtio-scsi, with units of these LUNs and sizes in bytes.
fn scsi(units: &[(u16, u64)]) -> ExportSpec {
    let unit = |&(lun, size): &(u16, u64)| {
        let disk = json!({ "null": { "size-bytes": size } });
        json!({ "lun": lun, "disk": disk })
    };
    let units: Vec<Value> = units.iter().map(unit).collect();
    let endpoint = json!({ "path": "/run/vm" });
    let spec = json!({ "name": "vm", "endpoint": endpoint, "device": { "scsi": units } });
    serde_json::from_value(spec).unwrap()
}

fn settings(log: Option<&str>, poll_max_us: u16, poll_budget: u8) -> Settings {
    Settings { log: log.map(str::to_owned), poll_max_us, poll_budget }
}

/// Starts a process with this base.
fn start(path: &Path, base: &[ExportSpec], settings: &Settings) -> (SavedState, Merged) {
    let (file, changes, locked): (_, _, Option<Locked>) = StateFile::open(path).unwrap();
    let begun = SavedState::begin(file, changes, base.to_vec(), settings.clone()).unwrap();
    drop(locked);
    begun
}

fn limits_of(export: &ExportSpec) -> Value {
    serde_json::to_value(export).unwrap()["limits"].clone()
}

/// LUNs and sizes of the units of an export.
fn units_of(export: &ExportSpec) -> Vec<(u64, u64)> {
    let spec = serde_json::to_value(export).unwrap();
    let units = spec["device"]["scsi"].as_array().unwrap();
    let unit = |unit: &Value| {
        let size = unit["disk"]["null"]["size-bytes"].as_u64();
        (unit["lun"].as_u64().unwrap(), size.unwrap())
    };
    units.iter().map(unit).collect()
}

fn place(lun: u16) -> UnitPlace {
    UnitPlace { target: 0, lun }
}

/// A base with another value of one setting drops the change of this setting alone.
#[test]
fn each_setting_holds_until_the_base_says_another_one_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let base = settings(Some("info"), 32, 20);
    let set = SettingsChange {
        log: Some("debug".to_owned()),
        poll_max_us: Some(7),
        poll_budget: Some(3),
    };
    for (now, kept) in [
        (base.clone(), set.clone()),
        (settings(Some("warn"), 32, 20), SettingsChange { log: None, ..set.clone() }),
        (settings(None, 32, 20), SettingsChange { log: None, ..set.clone() }),
        (settings(Some("info"), 33, 20), SettingsChange { poll_max_us: None, ..set.clone() }),
        (settings(Some("info"), 32, 21), SettingsChange { poll_budget: None, ..set.clone() }),
    ] {
        let (state, merged) = start(&path, &[], &base);
        assert_eq!(merged.settings, SettingsChange::default());
        state.record(&ChangedPart::Settings(set.clone()), Vec::new).unwrap();
        drop(state);
        let (state, merged) = start(&path, &[], &now);
        assert_eq!(merged.settings, kept, "{now:?}");
        assert_eq!(merged.dropped.len(), usize::from(kept != set), "{now:?}");
        drop(state);
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn settings_of_the_configuration_file_end_settings_of_commands() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let base = settings(None, 32, 20);
    let (state, _) = start(&path, &[], &base);
    let change = |poll_max_us, poll_budget| SettingsChange { log: None, poll_max_us, poll_budget };
    state.record(&ChangedPart::Settings(change(Some(7), Some(3))), Vec::new).unwrap();
    let of_file = settings(None, 50, 20);
    state.adopt_base_settings(&change(Some(50), None), of_file.clone()).unwrap();
    drop(state);
    let (state, merged) = start(&path, &[], &of_file);
    assert_eq!((merged.settings, merged.dropped), (change(None, Some(3)), vec![]), "it is no loss");

    // A later command changes the setting of the file, and holds while that is in the file.
    state.adopt_base_settings(&change(Some(60), None), settings(None, 60, 20)).unwrap();
    state.record(&ChangedPart::Settings(change(Some(9), None)), Vec::new).unwrap();
    drop(state);
    let (_state, merged) = start(&path, &[], &settings(None, 60, 20));
    assert_eq!((merged.settings, merged.dropped), (change(Some(9), Some(3)), vec![]));
}

/// An export that a command has added may not be restored, because its disk is gone.
#[test]
fn a_forgotten_export_is_not_restored_again() {
    let folder = tempfile::tempdir().unwrap();
    let (path, none) = (folder.path().join("state"), settings(None, 0, 1));
    let base = [blk("base", json!({}))];
    let (state, _) = start(&path, &base, &none);
    let live = [blk("one", json!({})), blk("two", json!({})), base[0].clone()];
    for name in ["one", "two"] {
        state.record(&ChangedPart::Exports(vec![name.to_owned()]), || live.to_vec()).unwrap();
    }
    assert!(state.forget("one").unwrap());
    assert!(!state.forget("one").unwrap() && !state.forget("base").unwrap());
    drop(state);
    let (_state, merged) = start(&path, &base, &none);
    let names: Vec<String> = merged.added.iter().map(ExportSpec::name).collect();
    assert_eq!((&merged.exports[..], names), (&base[..], vec!["two".to_owned()]));
}

/// The file of a daemon without changes would only surprise the user.
#[test]
fn the_file_goes_at_the_end_unless_it_has_changes() {
    let folder = tempfile::tempdir().unwrap();
    let (path, none) = (folder.path().join("state"), settings(None, 0, 1));
    let one = ChangedPart::Exports(vec!["one".to_owned()]);
    let (state, _) = start(&path, &[], &none);
    assert!(path.exists(), "it is locked from the start");
    state.end();
    assert!(!path.exists());
    drop(state);
    let (state, _) = start(&path, &[], &none);
    state.record(&one, || vec![blk("one", json!({}))]).unwrap();
    state.end();
    assert!(path.exists());
    // The file of another daemon in its place.
    state.record(&one, Vec::new).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, "").unwrap();
    state.end();
    assert!(path.exists());
}

/// Each change replaces the file, and with it the lock.
#[test]
fn one_daemon_has_the_file_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let (path, none) = (folder.path().join("state"), settings(None, 0, 1));
    let (state, _) = start(&path, &[], &none);
    let lock = || flock(fs::File::open(&path).unwrap(), FlockOperation::NonBlockingLockShared);
    for name in ["one", "two"] {
        assert_eq!(lock(), Err(Errno::WOULDBLOCK));
        let part = ChangedPart::Exports(vec![name.to_owned()]);
        state.record(&part, || vec![blk(name, json!({}))]).unwrap();
    }
    let error = StateFile::open(&path).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("another daemon uses"), "{error:#}");
    // A process that was killed may end a moment later.
    std::thread::scope(|scope| {
        let waits = spawn_asleep(scope, || StateFile::open(&path).map(|_| ()));
        drop(state);
        waits.join().unwrap().unwrap();
    });
    // A daemon that takes over reads it while the old one has it.
    let (_state, _) = start(&path, &[], &none);
    let (_, changes) = StateFile::take_over(&path).unwrap();
    assert!(changes.exports.iter().any(|change| change.adds("two")));
}

/// Such a file may hang, or change while the daemon reads it.
#[test]
fn a_file_of_another_kind_or_format_is_refused_and_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let refused = || format!("{:#}", StateFile::open(&path).map(|_| ()).unwrap_err());
    mkfifoat(CWD, &path, Mode::from_raw_mode(0o600)).unwrap();
    assert!(refused().contains("is not a regular file"), "{}", refused());
    fs::remove_file(&path).unwrap();
    let export = serde_json::to_value(blk("one", json!({}))).unwrap();
    let added = json!({ "before": null, "now": export });
    let neither = json!({ "before": null, "now": null });
    let written = |format: u32, exports: Value| {
        let settings = json!({});
        json!({ "format": format, "version": "1", "settings": settings, "exports": exports })
    };
    for (state, words) in [
        (written(2, json!([])), "has format 2"),
        (written(1, json!([added, added])), "twice"),
        (written(1, json!([neither])), "cannot read the state file"),
    ] {
        fs::write(&path, state.to_string()).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert!(refused().contains(words), "{state}: {}", refused());
        assert_eq!(fs::read_to_string(&path).unwrap(), state.to_string());
    }
}

/// An earlier process may have been killed while it wrote the file.
#[test]
fn a_new_file_that_was_left_is_replaced_and_none_is_left_after_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let (path, new) = (folder.path().join("state"), folder.path().join("state.new"));
    fs::write(&new, "half").unwrap();
    let (state, _) = start(&path, &[], &settings(None, 0, 1));
    assert!(!new.exists());
    // The place of the file is a folder, which is not replaced.
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let part = ChangedPart::Exports(vec!["one".to_owned()]);
    assert!(state.record(&part, || vec![blk("one", json!({}))]).is_err());
    assert!(!new.exists());
}

/// A command names one disk, and all of its group have the limits.
#[test]
fn limits_of_a_group_are_kept_for_all_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let of_group = |iops: u32| json!({ "group": "g", "iops-total": iops });
    let exports = |iops: u32, own: u32| {
        let other = blk("other", json!({ "iops-total": own }));
        [blk("one", of_group(iops)), blk("two", of_group(iops)), other]
    };
    let base = exports(100, 1);
    let (state, _) = start(&path, &base, &settings(None, 0, 1));
    let part = ChangedPart::Disk("one".to_owned(), None);
    // Only what the command has changed is kept.
    state.record(&part, || exports(200, 2).to_vec()).unwrap();
    drop(state);
    let (_state, merged) = start(&path, &base, &settings(None, 0, 1));
    let limits: Vec<Value> = merged.exports.iter().map(limits_of).collect();
    assert_eq!(limits, [of_group(200), of_group(200), json!({ "iops-total": 1 })]);
}

/// The units of one export, and those of others, may be in one group.
#[test]
fn limits_of_a_group_are_kept_for_each_unit_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let exports = |iops: u32| {
        let of_group = json!({ "group": "g", "iops-total": iops });
        let unit = |lun: u16| {
            json!({ "lun": lun, "disk": { "null": { "size-bytes": 512 } }, "settings": {
                "limits": of_group, "rerror": "report", "werror": "hold-briefly" } })
        };
        let spec = json!({ "name": "vm", "endpoint": { "path": "/run/vm" },
            "device": { "scsi": [unit(0), unit(1)] } });
        [serde_json::from_value(spec).unwrap(), blk("one", of_group.clone())]
    };
    let base = exports(100);
    let (state, _) = start(&path, &base, &settings(None, 0, 1));
    let part = ChangedPart::Disk("vm".to_owned(), Some(place(0)));
    state.record(&part, || exports(200).to_vec()).unwrap();
    drop(state);
    let (_state, merged) = start(&path, &base, &settings(None, 0, 1));
    assert_eq!(merged.exports, exports(200));
}

/// One command changes the limits of an export of the base, and the next one removes it.
#[test]
fn an_export_that_was_changed_and_then_removed_stays_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (path, none) = (folder.path().join("state"), settings(None, 0, 1));
    let limits = |iops: u32| json!({ "iops-total": iops });
    let base = [blk("one", limits(1)), blk("two", limits(2))];
    let (state, _) = start(&path, &base, &none);
    let live = [blk("one", limits(5)), blk("two", limits(2))];
    state.record(&ChangedPart::Disk("one".to_owned(), None), || live.to_vec()).unwrap();
    let exports = ChangedPart::Exports(vec!["one".to_owned()]);
    state.record(&exports, || base[1..].to_vec()).unwrap();
    drop(state);
    for _ in 0..2 {
        let (_state, merged) = start(&path, &base, &none);
        assert_eq!((&merged.exports[..], merged.dropped), (&base[1..], vec![]));
        assert_eq!(merged.log_lines.len(), 1, "{:?}", merged.log_lines);
    }
    // It is added again, first with other limits, and then as it was.
    let (state, _) = start(&path, &base, &none);
    for export in [&live[0], &base[0]] {
        let now = [base[1].clone(), export.clone()];
        state.record(&exports, || now.to_vec()).unwrap();
    }
    drop(state);
    let (_state, merged) = start(&path, &base, &none);
    assert_eq!((&merged.exports[..], merged.log_lines), (&base[..], vec![]));
}

/// The name of an export is its socket by default.
#[test]
fn an_export_is_kept_without_a_name_that_repeats_its_socket() {
    let folder = tempfile::tempdir().unwrap();
    let none = settings(None, 0, 1);
    let path = |number: u8| folder.path().join(number.to_string());
    let spec =
        |name: Option<&str>| ExportSpec { name: name.map(str::to_owned), ..blk("a", json!({})) };
    let names = [(None, None), (Some("/run/a"), None), (Some("b"), Some("b"))];
    for (number, (name, kept)) in (0..).zip(names) {
        let live = [spec(name)];
        for is_whole in [false, true] {
            let (state, _) = start(&path(number), &[], &none);
            match is_whole {
                true => state.record_all(&live, &SettingsChange::default()).unwrap(),
                false => {
                    let part = ChangedPart::Exports(vec![live[0].name()]);
                    state.record(&part, || live.to_vec()).unwrap();
                }
            }
            drop(state);
            let (_state, merged) = start(&path(number), &[], &none);
            assert_eq!(merged.added, [spec(kept)], "{name:?} {is_whole}");
            fs::remove_file(path(number)).unwrap();
        }
    }
}

/// The second export has the socket of the first, whose removal is recorded late.
#[test]
fn an_export_that_was_removed_by_its_socket_is_not_restored_beside_its_successor() {
    let folder = tempfile::tempdir().unwrap();
    let (path, none) = (folder.path().join("state"), settings(None, 0, 1));
    let [first, second] = ["first", "second"]
        .map(|name| ExportSpec { name: Some(name.to_owned()), ..blk("a", json!({})) });
    let (state, _) = start(&path, &[], &none);
    for (name, live) in [("first", &first), ("second", &second), ("/run/a", &second)] {
        let part = ChangedPart::Exports(vec![name.to_owned()]);
        state.record(&part, || vec![live.clone()]).unwrap();
    }
    drop(state);
    let (_state, merged) = start(&path, &[], &none);
    assert_eq!(merged.added, [second]);
}

/// A process that takes over writes the file. If it does not take over, the changes in the meantime
/// are written.
#[test]
fn a_state_that_is_left_to_another_process_is_written_if_that_gives_up() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let (state, _) = start(&path, &[], &settings(None, 0, 1));
    let add = |name: &str, live: &[ExportSpec]| {
        state.record(&ChangedPart::Exports(vec![name.to_owned()]), || live.to_vec()).unwrap();
    };
    let text = || fs::read_to_string(&path).unwrap();
    let (one, two, three) = (blk("one", json!({})), blk("two", json!({})), blk("three", json!({})));
    let closed = state.block_writes();
    add("one", std::slice::from_ref(&one));
    assert!(!text().contains("one"), "the file is another process's");
    drop(closed);
    assert!(text().contains("one"));
    add("two", &[one.clone(), two.clone()]);
    assert!(text().contains("two"), "it is this process's again");
    state.block_writes().hand_over();
    add("three", &[one, two, three]);
    assert!(!text().contains("three"));
}

#[test]
fn a_change_that_cannot_be_written_is_no_success() {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("inner");
    fs::create_dir(&inner).unwrap();
    let (state, _) = start(&inner.join("state"), &[], &settings(None, 0, 1));
    fs::remove_dir_all(&inner).unwrap();
    let part = ChangedPart::Exports(vec!["one".to_owned()]);
    let error = state.record(&part, || vec![blk("one", json!({}))]).unwrap_err();
    assert!(format!("{error:#}").contains("choose another --state"), "{error:#}");
}

/// The configuration file changes one unit. Commands had changed that unit and two more.
#[test]
fn a_unit_that_the_configuration_file_changes_is_its_own_and_others_stay() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let (base, none) = (scsi(&[(0, 512), (1, 512)]), settings(None, 0, 1));
    let (state, _) = start(&path, std::slice::from_ref(&base), &none);
    // A command had put other disks at 0 and 1, and added 2.
    let live = scsi(&[(0, 1024), (1, 1024), (2, 1024)]);
    for lun in 0..3 {
        let part = ChangedPart::Disk("vm".to_owned(), Some(place(lun)));
        state.record(&part, || vec![live.clone()]).unwrap();
    }
    let of_file = scsi(&[(0, 2048), (1, 512)]);
    let changed = BTreeSet::from([Some(place(0))]);
    state.adopt_base_change("vm", Some(&of_file), Some(&changed)).unwrap();
    drop(state);
    let (state, merged) = start(&path, std::slice::from_ref(&of_file), &none);
    let mut units = units_of(&merged.exports[0]);
    units.sort_unstable();
    assert_eq!(units, [(0, 2048), (1, 1024), (2, 1024)]);
    assert_eq!(merged.units, [("vm".to_owned(), place(2))]);
    // The file has removed the export, and with it all changes.
    state.adopt_base_change("vm", None, None).unwrap();
    drop(state);
    let (_state, merged) = start(&path, std::slice::from_ref(&of_file), &none);
    assert_eq!(units_of(&merged.exports[0]), [(0, 2048), (1, 512)]);
}

/// The file names disks, so a user who can write to it could have them served.
#[test]
fn a_state_file_of_strangers_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let (state, _) = start(&path, &[], &settings(None, 0, 1));
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    drop(state);
    let refused = || match StateFile::open(&path) {
        Ok(_) => panic!("it was opened"),
        Err(error) => format!("{error:#}"),
    };
    for mode in [0o620, 0o602] {
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        let error = refused();
        assert!(error.contains("can be written by other users"), "{mode:o}: {error}");
    }
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    assert!(StateFile::open(&path).is_ok(), "others may read it");
    let real = folder.path().join("real");
    fs::rename(&path, &real).unwrap();
    symlink(&real, &path).unwrap();
    assert!(refused().contains("cannot read"), "a link was followed");
    if rustix::process::geteuid().is_root() {
        fs::remove_file(&path).unwrap();
        fs::rename(&real, &path).unwrap();
        chown(&path, Some(12_345), None).unwrap();
        let error = refused();
        assert!(error.contains("belongs to another user"), "{error}");
    }
}

/// A restart would undo the change otherwise.
#[test]
fn commands_that_change_a_part_of_the_daemon_are_kept() {
    let place = UnitPlace { target: 3, lun: 5 };
    let disk = |place| Some(ChangedPart::Disk("vm".to_owned(), place));
    let limits = json!({ "limits": { "iops-total": 7 } });
    let change = SettingsChange { poll_max_us: Some(7), ..SettingsChange::default() };
    let unit = json!({ "target": 3, "lun": 5, "disk": "/disk" });
    for (command, part) in [
        (json!({ "add-unit": ["vm", unit] }), disk(Some(place))),
        (json!({ "remove-unit": ["vm", { "target": 3, "lun": 5 }] }), disk(Some(place))),
        (json!({ "set-disk": ["vm", { "target": 3, "lun": 5 }, limits] }), disk(Some(place))),
        (json!({ "set-disk": ["vm", null, limits] }), disk(None)),
        (json!({ "set-disk": ["vm", null, {}] }), None),
        (json!({ "set": { "poll-max-us": 7 } }), Some(ChangedPart::Settings(change))),
        (json!({ "set": {} }), None),
        (json!({ "remove": { "export": "vm" } }), {
            Some(ChangedPart::Exports(vec!["vm".to_owned()]))
        }),
    ] {
        let parsed: Command = serde_json::from_value(command.clone()).unwrap();
        assert_eq!(ChangedPart::from_command(&parsed), part, "{command}");
    }
}

#[test]
fn the_state_is_beside_the_control_socket_unless_an_option_or_the_manager_says_where() {
    let of = |state: Option<&str>, control: Option<&str>, folders: &str| {
        let place = place_in(state.map(Path::new), control.map(Path::new), folders.as_ref());
        place.unwrap().map(|path| path.display().to_string())
    };
    let control = Some("/run/vm/control");
    for (state, control, folders, expected) in [
        (None, control, "", Some("/run/vm/control.state")),
        (None, control, "/var/lib/a:/var/lib/b", Some("/var/lib/a/control.state")),
        (None, control, "relative", Some("/run/vm/control.state")),
        (None, None, "/var/lib/a", None),
        (Some("/s"), control, "/var/lib/a", Some("/s")),
        (Some("none"), control, "/var/lib/a", None),
    ] {
        assert_eq!(of(state, control, folders).as_deref(), expected, "{folders}");
    }
}
