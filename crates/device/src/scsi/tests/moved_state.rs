//! The state of units that moves to another host, as initiators see it there.

use std::path::Path;

use super::blk_guests::BlkGuest;
use super::*;
use crate::MovedState;
use crate::access::ReservationStorage;
use crate::access::persist::{PortName, SHARED_TEXT};
use crate::access::sense::Sense;

const READ_KEYS: [u8; 10] = [0x5e, 0, 0, 0, 0, 0, 0, 0, 255, 0];
const READ_FULL_STATUS: [u8; 10] = [0x5e, 3, 0, 0, 0, 0, 0, 0, 255, 0];
const WRITE_EXCLUSIVE: u8 = 1;

/// A device on another host, with a port of its own name.
fn there(before: &Initiator) -> Initiator {
    before.beside(&UnitOptions { access: Arc::default(), ..options() })
}

/// Registers a key and reserves the unit.
fn reserve(initiator: &mut Initiator, outlives: bool) {
    for (action, kind, keys) in [(0, 0, [0, 7]), (1, WRITE_EXCLUSIVE, [7, 0])] {
        let (cdb, mut list) = reserve_out(action, kind, keys);
        list[20] |= u8::from(outlives && action == 0);
        initiator.good(&cdb, &list, 0);
    }
}

/// The state of a device, as text that has moved.
fn moved(initiator: &Initiator) -> serde_json::Value {
    let state = initiator.device.moved_state().unwrap().unwrap();
    serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap()
}

fn load(initiator: &Initiator, state: &serde_json::Value) -> Result<(), String> {
    let state = MovedState::parse(state).map_err(|error| error.to_string())?;
    let before = moved(initiator);
    let checked = initiator.device.check_moved(&state).map_err(|error| error.to_string());
    assert_eq!(moved(initiator), before, "a check changes nothing");
    let loaded = initiator.device.continue_moved(&state).map_err(|error| error.to_string());
    assert_eq!(checked.is_ok(), loaded.is_ok(), "{checked:?} {loaded:?}");
    assert!(loaded.is_ok() || moved(initiator) == before, "a refusal changes nothing");
    loaded
}

#[test]
fn an_initiator_finds_its_unit_as_it_was() {
    let mut before = Initiator::new();
    reserve(&mut before, false);
    let caching = [&[0; 4][..], &[0x08, 18, 0], &[0; 17]].concat();
    before.good(&[0x15, 0x10, 0, 0, 24, 0], &caching, 0);
    before.unit().attentions.add(Sense::CAPACITY_CHANGED);
    before.access().set_descriptor_sense(true);
    before.access().set_stopped(true);
    Initiator::scsi(&before.device).events().rescan(UNIT);
    let mut after = there(&before);
    load(&after, &moved(&before)).unwrap();
    assert_eq!(after.unit().attentions.pending_codes(), [Sense::CAPACITY_CHANGED.code]);
    let events = |of: &Initiator| Initiator::scsi(&of.device).events().waiting();
    assert_eq!(events(&after), events(&before));
    let access = after.access();
    assert!(access.cache_is_off() && access.has_descriptor_sense() && access.is_stopped());
    access.set_stopped(false);
    drop(access);
    // The attention is reported once.
    assert_eq!(after.run(&[0; 6], &[], 0).status, 2);
    assert_eq!(after.good(&READ_KEYS, &[], 255)[8..], 7_u64.to_be_bytes());
    // It is registered under the name of its port there, and holds the reservation.
    let [here, there] = [&before, &after].map(|of| of.unit().options.port);
    assert_ne!(here, there);
    let status = after.good(&READ_FULL_STATUS, &[], 255);
    assert!(status.windows(8).any(|bytes| bytes == there), "{status:x?}");
    after.good(&cdb10(0x2a, 0, 0, 1), &[1; BLOCK], 0);
    assert_eq!(moved(&after)["units"][0]["access"], {
        let mut expected = moved(&before)["units"][0]["access"].clone();
        let port = serde_json::json!(format!("{:016x}", u64::from_be_bytes(there)));
        expected["is-stopped"] = false.into();
        expected["reservations"]["registry"]["registrations"][0]["port"] = port.clone();
        expected["reservations"]["registry"]["reservation"]["holder"] = port;
        expected
    });
}

#[test]
fn a_state_that_does_not_fit_is_refused_with_the_reason() {
    let mut before = Initiator::new();
    reserve(&mut before, false);
    let good = moved(&before);
    let after = there(&before);
    load(&after, &good).unwrap();
    let with = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut state = good.clone();
        change(&mut state);
        load(&after, &state).unwrap_err()
    };
    type Change = fn(&mut serde_json::Value);
    let cases: [(Change, &str); 13] = [
        (|state| *state = "text".into(), "no such state"),
        (|state| state["format"] = "other".into(), "its format is \"other\""),
        (|state| state["version"] = 2.into(), "only version 1 is supported"),
        (|state| drop(state["missed-events"].take()), "invalid type: null"),
        (|state| state["more"] = 1.into(), "unknown field `more`"),
        (|state| state["units"][0]["lun"] = 7.into(), "has a unit 0:7, which is missing here"),
        (|state| state["units"] = serde_json::json!([]), "has no unit 0:1"),
        (
            |state| {
                // Another unit may stand between the two.
                let (unit, mut other) = (state["units"][0].clone(), state["units"][0].clone());
                other["lun"] = 7.into();
                state["units"] = serde_json::json!([unit, other, unit]);
            },
            "a unit twice; use the output",
        ),
        (|state| state["units"][0]["serial"] = "x".into(), "set serial=x here"),
        (|state| state["units"][0]["wwn"] = "3000000000000000".into(), "wwn=3000000000000000"),
        (|state| state["units"][0]["port"] = "x".into(), "\"x\" is not a port"),
        (
            |state| state["units"][0]["attentions"] = serde_json::json!(vec![[41, 0]; 17]),
            "too many events or unit attentions",
        ),
        (
            |state| {
                let registry = &mut state["units"][0]["access"]["reservations"]["registry"];
                registry["registrations"] = serde_json::json!([]);
            },
            "the holder of its reservation is not registered",
        ),
    ];
    for (change, expected) in cases {
        let error = with(&change);
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

#[test]
fn reservations_of_other_users_of_the_disk_are_not_lost() {
    let before = Initiator::new();
    let state = moved(&before);
    let access = Arc::<DiskAccess>::default();
    let after = before.beside(&UnitOptions { access: Arc::clone(&access), ..options() });
    let neighbour = access.attach(PortName([9; 8])).unwrap();
    assert!(load(&after, &state).unwrap_err().contains("another export here uses the same disk"));
    drop(neighbour);
    load(&after, &state).unwrap();
}

fn in_file(access: &Arc<DiskAccess>, path: &Path) -> crate::access::StorageGuard {
    access.store_reservations_later(ReservationStorage::File(path.to_owned())).unwrap()
}

/// A disk that is not locked late keeps the file.
#[test]
fn a_turn_that_has_not_begun_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("reservations");
    let mut initiator = Initiator::new();
    let place = || ReservationStorage::File(path.clone());
    let _kept = initiator.access().store_reservations(place()).unwrap();
    reserve(&mut initiator, true);
    initiator.access().end_use(1);
    let there = Arc::<DiskAccess>::default();
    assert!(there.store_reservations(place()).is_err(), "it is in use");
}

/// Both hosts have the file, beside the disk.
#[test]
fn reservations_in_a_file_belong_to_the_host_that_uses_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("reservations");
    let mut before = Initiator::new();
    let mut after = there(&before);
    let (here, there) = (before.access(), after.access());
    let _kept = [in_file(&here, &path), in_file(&there, &path)];
    here.begin_use(1).unwrap();
    reserve(&mut before, true);
    assert!(there.begin_use(1).is_err(), "it is in use");
    here.begin_use(2).unwrap();
    here.end_use(2);
    assert!(there.begin_use(1).is_err(), "one of two guests uses it");
    let state = moved(&before);
    assert!(path.exists());
    here.end_use(1);
    there.begin_use(1).unwrap();
    assert!(here.begin_use(1).is_err());
    // The port that holds the reservation has another name here, unless the state says so.
    let write = cdb10(0x2a, 0, 0, 1);
    assert_eq!(after.run(&write, &[1; BLOCK], 0).status, 0x18, "a reservation conflict");
    load(&after, &state).unwrap();
    let _attentions = after.run(&[0; 6], &[], 0);
    after.good(&write, &[1; BLOCK], 0);
    // The initiator gives up APTPL, and goes back.
    let (cdb, list) = reserve_out(0, 0, [7, 8]);
    after.good(&cdb, &list, 0);
    assert!(!path.exists());
    there.end_use(1);
    here.begin_use(1).unwrap();
    assert_eq!(before.good(&READ_KEYS, &[], 255).len(), 8, "a key that is gone");
    assert!(here.begin_use(1).is_ok(), "it has it already");
}

#[test]
fn reservations_that_outlive_the_daemon_need_a_file_there() {
    let folder = tempfile::tempdir().unwrap();
    let mut before = Initiator::new();
    let here = before.access();
    let _kept = in_file(&here, &folder.path().join("reservations"));
    here.begin_use(1).unwrap();
    reserve(&mut before, true);
    let after = there(&before);
    let error = load(&after, &moved(&before)).unwrap_err();
    assert!(error.contains("unit 0:1") && error.contains("reservations=PATH"), "{error}");
}

/// The guest of such a device would go on with reservations that it does not know.
#[test]
fn a_disk_that_a_virtio_blk_device_shares_takes_no_state() {
    let (before, after) = (Initiator::new(), Initiator::new());
    let state = moved(&before);
    let guest = BlkGuest::beside(&after);
    let refused = load(&after, &state).unwrap_err();
    assert!(refused.contains(SHARED_TEXT), "{refused}");
    drop(guest);
    load(&after, &state).unwrap();
}
