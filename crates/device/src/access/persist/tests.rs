//! Tests of reservations through exports.

use std::fmt::Display;
use std::fs;
use std::time::Instant;

use super::*;
use crate::testing::TIMEOUT;

const PORTS: [PortName; 3] = [PortName([0x31; 8]), PortName([0x32; 8]), PortName([0x33; 8])];
const REGISTER: u8 = 0;
const RESERVE: u8 = 1;
const CLEAR: u8 = 3;
const PREEMPT: u8 = 4;
const PREEMPT_AND_ABORT: u8 = 5;
const WRITE_EXCLUSIVE: u8 = 1;
const EXCLUSIVE_ACCESS_REGISTRANTS_ONLY: u8 = 6;
const APTPL: u8 = 1;

pub(super) fn load(path: PathBuf) -> Result<Arc<Reservations>, FileError> {
    let reservations = Arc::<Reservations>::default();
    drop(reservations.store_in(ReservationStorage::File(path))?);
    Ok(reservations)
}

/// Takes a file that was closed. A child that another test starts has its lock, too, until it runs
/// its program.
pub(in crate::access) fn when_free<T, E: Display>(take: impl Fn() -> Result<T, E>) -> T {
    let start = Instant::now();
    loop {
        match take() {
            Ok(taken) => return taken,
            Err(error) => {
                let is_busy = error.to_string().contains("uses the file");
                assert!(is_busy && start.elapsed() < TIMEOUT, "{error}");
            }
        }
        std::thread::yield_now();
    }
}

/// Sends a command with the bits of byte 20.
fn send(
    nexus: &Attached,
    action: u8,
    scope_and_type: u8,
    keys: [u64; 2],
    bits: u8,
) -> Result<ReserveEffects, Refusal> {
    let cdb = [0x5f, action, scope_and_type, 0, 0, 0, 0, 0, 24, 0];
    let mut list = [0; 24];
    list[..8].copy_from_slice(&keys[0].to_be_bytes());
    list[8..16].copy_from_slice(&keys[1].to_be_bytes());
    list[20] = bits;
    nexus.reserve_out(&cdb, &list)
}

fn read(reservations: &Reservations, action: u8) -> Vec<u8> {
    reservations.reserve_in(&[0x5e, action, 0, 0, 0, 0, 0, 0, 255, 0]).unwrap()
}

fn keys(reservations: &Reservations) -> Vec<u64> {
    let data = read(reservations, 0);
    data[8..].as_chunks().0.iter().map(|key| u64::from_be_bytes(*key)).collect()
}

fn generation(reservations: &Reservations) -> u32 {
    u32::from_be_bytes(*read(reservations, 0).first_chunk().unwrap())
}

/// Three nexuses; the first two are registered with the keys 1 and 2.
fn three(reservations: &Arc<Reservations>, bits: u8) -> [Attached; 3] {
    let nexuses = PORTS.map(|port| reservations.attach(port).unwrap());
    for (nexus, key) in nexuses.iter().zip([1, 2]) {
        assert_eq!(send(nexus, REGISTER, 0, [0, key], bits).unwrap(), ReserveEffects::default());
    }
    nexuses
}

fn conflicts(nexuses: &[Attached; 3]) -> [[bool; 3]; 3] {
    let classes = [CommandClass::Unrestricted, CommandClass::Reads, CommandClass::Writes];
    nexuses.each_ref().map(|nexus| classes.map(|class| nexus.conflicts(class)))
}

#[test]
fn every_nexus_sees_its_permissions_at_once() {
    const FREE: [bool; 3] = [false; 3];
    const NO_WRITES: [bool; 3] = [false, false, true];
    const NOTHING: [bool; 3] = [false, true, true];
    let reservations = Arc::<Reservations>::default();
    let nexuses = three(&reservations, 0);
    assert_eq!(conflicts(&nexuses), [FREE; 3]);
    send(&nexuses[0], RESERVE, WRITE_EXCLUSIVE, [1, 0], 0).unwrap();
    assert_eq!(conflicts(&nexuses), [FREE, NO_WRITES, NO_WRITES]);
    send(&nexuses[1], PREEMPT, EXCLUSIVE_ACCESS_REGISTRANTS_ONLY, [2, 1], 0).unwrap();
    assert_eq!(conflicts(&nexuses), [NOTHING, FREE, NOTHING]);
    send(&nexuses[0], REGISTER, 0, [0, 7], 0).unwrap();
    assert_eq!(conflicts(&nexuses), [FREE, FREE, NOTHING]);
    let [one, two, three] = nexuses;
    drop(three);
    let nexuses = [one, two, reservations.attach(PORTS[2]).unwrap()];
    assert_eq!(conflicts(&nexuses), [FREE, FREE, NOTHING]);
    send(&nexuses[0], CLEAR, 0, [7, 0], 0).unwrap();
    assert_eq!(conflicts(&nexuses), [FREE; 3]);
}

#[test]
fn a_refused_command_changes_nothing() {
    let reservations = Arc::<Reservations>::default();
    let nexuses = three(&reservations, 0);
    send(&nexuses[0], RESERVE, WRITE_EXCLUSIVE, [1, 0], 0).unwrap();
    let before = (read(&reservations, 3), conflicts(&nexuses));
    let aptpl = Refusal::Check(Sense::in_list(20, Some(0)));
    for (result, expected) in [
        (send(&nexuses[1], RESERVE, WRITE_EXCLUSIVE, [2, 0], 0), Refusal::Conflict),
        (send(&nexuses[2], PREEMPT, WRITE_EXCLUSIVE, [0, 1], 0), Refusal::Conflict),
        (send(&nexuses[1], REGISTER, 0, [2, 3], APTPL), aptpl),
        (send(&nexuses[1], 8, 0, [2, 3], 0), Refusal::Check(Sense::in_cdb(1, Some(4)))),
    ] {
        assert_eq!(result, Err(expected));
        assert_eq!((read(&reservations, 3), conflicts(&nexuses)), before);
    }
}

#[test]
fn only_nexuses_that_are_attached_hear_and_are_aborted() {
    let reservations = Arc::<Reservations>::default();
    let [one, two, three] = three(&reservations, 0);
    send(&three, REGISTER, 0, [0, 1], 0).unwrap();
    let done = send(&two, PREEMPT_AND_ABORT, WRITE_EXCLUSIVE, [2, 1], 0).unwrap();
    let told = [&one, &three].map(|nexus| (nexus.nexus(), Sense::REGISTRATIONS_PREEMPTED));
    assert_eq!(done.attentions, told);
    assert_eq!(done.aborted, [one.nexus(), three.nexus()]);
    send(&one, REGISTER, 0, [0, 1], 0).unwrap();
    drop(one);
    let done = send(&two, PREEMPT_AND_ABORT, WRITE_EXCLUSIVE, [2, 1], 0).unwrap();
    assert_eq!(done, ReserveEffects::default());
    assert_eq!(keys(&reservations), [2]);
}

#[test]
fn a_registration_waits_for_its_port() {
    let reservations = Arc::<Reservations>::default();
    let [one, two, _three] = three(&reservations, 0);
    send(&one, RESERVE, WRITE_EXCLUSIVE, [1, 0], 0).unwrap();
    let number = one.nexus();
    drop(one);
    assert_eq!(keys(&reservations), [1, 2]);
    assert!(two.conflicts(CommandClass::Writes));
    let again = reservations.attach(PORTS[0]).unwrap();
    assert_ne!(again.nexus(), number);
    assert!(!again.conflicts(CommandClass::Writes));
    send(&again, RESERVE, WRITE_EXCLUSIVE, [1, 0], 0).unwrap();
}

#[test]
fn a_port_attaches_once() {
    let reservations = Arc::<Reservations>::default();
    let attached = reservations.attach(PORTS[0]).unwrap();
    let refused = reservations.attach(PORTS[0]).unwrap_err();
    assert_eq!(refused, PortInUse(PORTS[0]));
    assert!(refused.to_string().starts_with("port 3131313131313131 is attached"));
    drop(attached);
    reservations.attach(PORTS[0]).unwrap();
}

#[test]
fn a_restart_keeps_only_persistent_registrations() {
    for (bits, expected) in [(0, &[][..]), (APTPL, &[1, 2])] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.reservations");
        let reservations = load(path.clone()).unwrap();
        let nexuses = three(&reservations, bits);
        send(&nexuses[0], RESERVE, WRITE_EXCLUSIVE, [1, 0], 0).unwrap();
        assert_eq!(generation(&reservations), 2);
        assert_eq!(read(&reservations, 2)[2..4], [1, 0xb0 | bits]);
        drop((nexuses, reservations));

        let reservations = when_free(|| load(path.clone()));
        assert_eq!(keys(&reservations), expected);
        assert_eq!(generation(&reservations), 0);
        assert_eq!(read(&reservations, 2)[2..4], [1, 0xb0 | bits]);
        let stranger = reservations.attach(PORTS[2]).unwrap();
        let holder = reservations.attach(PORTS[0]).unwrap();
        let are_fenced = [&stranger, &holder].map(|nexus| nexus.conflicts(CommandClass::Writes));
        assert_eq!(are_fenced, [bits == APTPL, false]);
    }
}

#[test]
fn a_broken_file_is_an_error_and_stays_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.reservations");
    fs::write(&path, "{}").unwrap();
    let error = load(path.clone()).unwrap_err().to_string();
    assert!(error.contains(&path.display().to_string()), "{error}");
    assert_eq!(fs::read_to_string(path).unwrap(), "{}");
}

#[test]
fn exports_of_a_disk_keep_its_reservations_in_one_place() {
    let directory = tempfile::tempdir().unwrap();
    let [one, other] = ["one", "other"].map(|name| directory.path().join(name));
    let usual = |path: &PathBuf| ReservationStorage::Shared(Some(path.clone()));
    let chosen = |path: &PathBuf| ReservationStorage::File(path.clone());
    for first in [usual(&one), chosen(&one)] {
        let reservations = Arc::<Reservations>::default();
        let _kept = reservations.store_in(first).unwrap();
        for same in [usual(&one), usual(&other), chosen(&one), ReservationStorage::Shared(None)] {
            drop(reservations.store_in(same).unwrap());
        }
        drop(reservations.store_in(ReservationStorage::Existing(other.clone())).unwrap());
        let error = reservations.store_in(chosen(&other)).unwrap_err().to_string();
        for part in ["cannot keep", &other.display().to_string(), &one.display().to_string()] {
            assert!(error.contains(part), "{error}");
        }
    }
    let reservations = Arc::<Reservations>::default();
    let _kept = reservations.store_in(ReservationStorage::Shared(None)).unwrap();
    drop(reservations.store_in(usual(&one)).unwrap());
    let error = reservations.store_in(chosen(&one)).unwrap_err().to_string();
    assert!(error.contains("other exports of the disk use no reservations file"), "{error}");
}

/// A unit that cannot be added, or that was removed.
#[test]
fn the_storage_of_reservations_is_open_again_without_users() {
    let directory = tempfile::tempdir().unwrap();
    let [one, other] = ["one", "other"].map(|name| directory.path().join(name));
    let chosen = |path: &PathBuf| ReservationStorage::File(path.clone());
    for first in [
        chosen(&one),
        ReservationStorage::Shared(Some(one.clone())),
        ReservationStorage::Shared(None),
    ] {
        let reservations = Arc::<Reservations>::default();
        let persists = || reservations.state.lock().persists;
        let kept = reservations.store_in(first.clone()).unwrap();
        assert!(reservations.store_in(chosen(&other)).is_err(), "{first:?}");
        let nexus = reservations.attach(PORTS[0]).unwrap();
        drop(kept);
        assert!(reservations.store_in(chosen(&other)).is_err(), "{first:?}");
        if persists() {
            send(&nexus, REGISTER, 0, [0, 1], APTPL).unwrap();
            drop(nexus);
            assert!(reservations.store_in(chosen(&other)).is_err(), "{first:?}");
            let nexus = reservations.attach(PORTS[0]).unwrap();
            send(&nexus, CLEAR, 0, [1, 0], 0).unwrap();
        } else {
            drop(nexus);
        }
        drop(reservations.store_in(chosen(&other)).unwrap());
        assert!(persists());
        drop(reservations.store_in(ReservationStorage::Shared(None)).unwrap());
        assert!(!persists());
    }
}

/// Reservations that initiators have left behind, for an export that is no initiator.
#[test]
fn reservations_that_are_found_hold_and_none_leave_the_place_open() {
    let directory = tempfile::tempdir().unwrap();
    let [path, other] = ["found", "other"].map(|name| directory.path().join(name));
    let find = || {
        let reservations = Arc::<Reservations>::default();
        let kept = reservations.store_in(ReservationStorage::Existing(path.clone()));
        kept.map(|_| reservations)
    };
    let none = find().unwrap();
    assert!(!path.exists());
    let _kept = none.store_in(ReservationStorage::File(other.clone())).unwrap();
    let before = load(path.clone()).unwrap();
    let nexuses = three(&before, APTPL);
    send(&nexuses[0], RESERVE, WRITE_EXCLUSIVE, [1, 0], 0).unwrap();
    assert!(find().is_err(), "another program has it");
    drop((before, nexuses));
    let found = when_free(find);
    assert!(found.excludes_unregistered(CommandClass::Writes));
    assert!(
        found.store_in(ReservationStorage::File(other)).is_err(),
        "two files say who may write"
    );
    drop(found.store_in(ReservationStorage::Shared(Some(path.clone()))).unwrap());
    drop(found);
    // Another file, of which nobody has had the lock.
    fs::remove_file(&path).unwrap();
    fs::write(&path, "{}").unwrap();
    let error = find().unwrap_err().to_string();
    assert!(error.contains("remove it only if no fenced host"), "{error}");
}

#[test]
fn two_programs_do_not_keep_theirs_in_one_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.reservations");
    let [one, other] = [(); 2].map(|()| load(path.clone()).unwrap());
    let nexuses = three(&one, APTPL);
    let error = load(path.clone()).unwrap_err().to_string();
    assert!(error.contains("uses the file; stop that program"), "{error}");
    let nexus = other.attach(PORTS[0]).unwrap();
    let refused = send(&nexus, REGISTER, 0, [0, 1], APTPL);
    assert!(matches!(refused, Err(Refusal::NotSaved(_))), "{refused:?}");
    assert!(keys(&other).is_empty());
    drop((one, nexuses));
    assert_eq!(keys(&when_free(|| load(path.clone()))), [1, 2]);
}

/// The export was attached before the place of the reservations was chosen.
#[test]
fn loaded_reservations_hold_for_earlier_nexuses() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.reservations");
    let reservations = load(path.clone()).unwrap();
    let nexuses = three(&reservations, APTPL);
    send(&nexuses[0], RESERVE, WRITE_EXCLUSIVE, [1, 0], 0).unwrap();
    drop((nexuses, reservations));
    let reservations = Arc::<Reservations>::default();
    let early = reservations.attach(PORTS[2]).unwrap();
    assert!(!early.conflicts(CommandClass::Writes));
    drop(when_free(|| reservations.store_in(ReservationStorage::File(path.clone()))));
    assert!(early.conflicts(CommandClass::Writes));
}

#[test]
fn a_command_that_cannot_be_saved_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.reservations");
    let obstacle = directory.path().join("disk.reservations.new");
    let reservations = load(path.clone()).unwrap();
    let nexuses = three(&reservations, APTPL);
    let before = (read(&reservations, 3), conflicts(&nexuses));
    fs::create_dir(&obstacle).unwrap();
    let refused = send(&nexuses[0], RESERVE, WRITE_EXCLUSIVE, [1, 0], 0);
    assert!(matches!(refused, Err(Refusal::NotSaved(_))), "{refused:?}");
    assert_eq!((read(&reservations, 3), conflicts(&nexuses)), before);
    fs::remove_dir(&obstacle).unwrap();
    send(&nexuses[0], RESERVE, WRITE_EXCLUSIVE, [1, 0], 0).unwrap();
    assert_ne!((read(&reservations, 3), conflicts(&nexuses)), before);
}

#[test]
fn commands_of_several_threads_are_carried_out_one_after_the_other() {
    const TIMES: u32 = 200;
    let reservations = Arc::<Reservations>::default();
    let nexuses = PORTS.map(|port| reservations.attach(port).unwrap());
    std::thread::scope(|scope| {
        for (nexus, key) in nexuses.iter().zip(1..) {
            scope.spawn(move || {
                for _ in 0..TIMES {
                    send(nexus, REGISTER, 0, [0, key], 0).unwrap();
                    // The nexus that reserves second has a conflict.
                    match send(nexus, RESERVE, WRITE_EXCLUSIVE, [key, 0], 0) {
                        Ok(_) => assert!(!nexus.conflicts(CommandClass::Writes)),
                        Err(refusal) => assert_eq!(refusal, Refusal::Conflict),
                    }
                    send(nexus, REGISTER, 0, [key, 0], 0).unwrap();
                }
            });
        }
    });
    assert_eq!(generation(&reservations), 3 * 2 * TIMES);
    assert!(keys(&reservations).is_empty());
    assert_eq!(conflicts(&nexuses), [[false; 3]; 3]);
}

/// The reservations do not change for any user, and no third process can take the file.
#[test]
fn reservations_are_handed_over_with_their_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("reservations");
    for bits in [APTPL, 0] {
        let before = load(path.clone()).unwrap();
        let nexuses = three(&before, bits);
        send(&nexuses[0], RESERVE, WRITE_EXCLUSIVE, [1, 0], 0).unwrap();
        let after = Arc::new(Reservations::for_hand_over());
        drop(after.store_in(ReservationStorage::File(path.clone())).unwrap());
        let others = PORTS.map(|port| after.attach(port).unwrap());
        let (state, file) = before.hand_over().unwrap();
        let text = serde_json::to_string(&state).unwrap();
        after.take_over(serde_json::from_str(&text).unwrap(), file).unwrap();
        assert_eq!(conflicts(&others), conflicts(&nexuses));
        for action in 0..=3 {
            assert_eq!(
                read(&after, action),
                read(&before, action),
                "PERSISTENT RESERVE IN {action}"
            );
        }
        assert_eq!(after.hand_over().unwrap().0, state, "the next process gets the same");
        drop((nexuses, before));
        assert_eq!(load(path.clone()).is_err(), bits == APTPL, "somebody else has the file");
        send(&others[1], REGISTER, 0, [2, 9], APTPL).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap().matches("0009").count(), 1);
        send(&others[1], CLEAR, 0, [9, 0], 0).unwrap();
        send(&others[1], REGISTER, 0, [0, 9], 0).unwrap();
        assert!(!path.exists());
    }
}

/// The next process would otherwise take the old content of the file for the new one.
#[test]
fn a_file_whose_change_failed_is_written_again_after_a_hand_over() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("reservations");
    let before = load(path.clone()).unwrap();
    let nexuses = three(&before, APTPL);
    let kept = fs::read_to_string(&path).unwrap();
    let obstacle = folder.path().join("reservations.new");
    fs::create_dir(&obstacle).unwrap();
    send(&nexuses[0], RESERVE, WRITE_EXCLUSIVE, [1, 0], 0).unwrap_err();
    fs::remove_dir(&obstacle).unwrap();
    let after = Arc::new(Reservations::for_hand_over());
    drop(after.store_in(ReservationStorage::File(path.clone())).unwrap());
    let theirs = PORTS.map(|port| after.attach(port).unwrap());
    let (state, file) = before.hand_over().unwrap();
    after.take_over(state.clone(), file).unwrap();
    assert_eq!(after.hand_over().unwrap().0, state, "the next process gets the same");
    // As if the failed change had reached the file.
    fs::write(&path, "half of it").unwrap();
    send(&theirs[0], REGISTER, 0, [1, 1], APTPL).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), kept);
}

/// A later export of the disk must not choose another place.
#[test]
fn the_place_of_reservations_is_handed_over() {
    let folder = tempfile::tempdir().unwrap();
    let [path, other] = ["one", "other"].map(|name| folder.path().join(name));
    for (place, is_fixed) in [
        (None, false),
        (Some(ReservationStorage::Existing(path.clone())), false),
        (Some(ReservationStorage::Shared(None)), true),
        (Some(ReservationStorage::File(path)), true),
    ] {
        let before = Arc::<Reservations>::default();
        let kept = place.clone().map(|place| before.store_in(place).unwrap());
        let nexus = before.attach(PORTS[0]).unwrap();
        let after = Arc::new(Reservations::for_hand_over());
        let _other_nexus = after.attach(PORTS[0]).unwrap();
        let (state, file) = before.hand_over().unwrap();
        after.take_over(state.clone(), file).unwrap();
        assert_eq!(after.hand_over().unwrap().0, state, "{place:?}");
        drop((kept, nexus, before));
        let chosen = after.store_in(ReservationStorage::File(other.clone()));
        assert_eq!(chosen.is_err(), is_fixed, "{place:?}");
    }
}
