//! Commands during a hand-over: changes wait for its end, and queries do not.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::json;

use super::{LIMIT, Old};
use crate::spec::UnitPlace;
use crate::spec::command::{Command, NewSize, Removal, StatsReader};
use crate::spec::settings::SettingsChange;

/// The description for the new process would be out of date.
#[test]
fn changes_of_exports_wait_for_the_end_of_a_hand_over() {
    let old = Old::new();
    let scsi = old.path("scsi").display().to_string();
    let disk = json!({ "null": { "size-bytes": 512 } });
    let unit = Box::new(serde_json::from_value(json!({ "lun": 9, "disk": disk })).unwrap());
    let added = json!({ "endpoint": { "path": old.path("new") }, "device": { "blk": disk } });
    let added = serde_json::from_value(added).unwrap();
    let rules = Box::new(serde_json::from_value(json!({ "rerror": "retry" })).unwrap());
    let size = NewSize { size_bytes: Some(2 << 20), shrink: false };
    for change in [
        Command::Resize("vm".to_owned(), None, size),
        Command::SetDisk("vm".to_owned(), None, rules),
        Command::AddUnit(scsi.clone(), unit),
        Command::RemoveUnit(scsi.clone(), UnitPlace { target: 0, lun: 9 }),
        Command::LoadState(scsi, Box::default()),
        Command::Add(vec![added]),
        Command::Remove(Removal::new("idle")),
    ] {
        let (done, ended) = mpsc::channel();
        let shown = format!("{change:?}");
        let handing_over = old.daemon.ownership().begin_hand_over(7).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| done.send(old.daemon.handle(change)));
            let early = ended.recv_timeout(Duration::from_millis(100));
            drop(handing_over);
            assert!(early.is_err(), "{shown} does not wait");
            let result = ended.recv().unwrap();
            assert!(result.is_ok() || shown.starts_with("LoadState"), "{shown}: {result:?}");
        });
    }
}

#[test]
fn queries_and_settings_do_not_wait_for_a_hand_over() {
    let (old, start) = (Old::new(), Instant::now());
    let _handing_over = old.daemon.ownership().begin_hand_over(7).unwrap();
    assert_eq!(old.daemon.exports().unwrap().len(), 3);
    old.daemon.details("vm".to_owned()).unwrap();
    old.daemon.stats(StatsReader::Control).unwrap();
    for command in [
        Command::Set(SettingsChange { poll_max_us: Some(8), ..SettingsChange::default() }),
        Command::SetDisk("vm".to_owned(), None, Box::default()),
        Command::Resume("vm".to_owned(), None),
    ] {
        let shown = format!("{command:?}");
        let done = old.daemon.handle(command);
        assert!(done.is_ok(), "{shown}: {done:?}");
    }
    assert!(start.elapsed() < LIMIT, "a query has waited");
}
