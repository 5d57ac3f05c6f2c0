//! Records that a killed process has left.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use serde_json::{Value, json};
use vhost_user::{FdIndex, FdSink, PassedFds, SessionState, StateKeeper};

use super::KeptSession;
use super::keeper::{SharedKeeper, StoredSession};
use super::passed::KilledSession;
use super::record::{self, HALF_BYTES, HEADER_BYTES, Record, RecordFile, SENT_BYTES};
use super::stash::{Number, Stash};
use crate::spec::{DeviceSpec, DiskSpec, EndpointSpec, ExportSettings, ExportSpec, UnitSpec};

fn export(device: DeviceSpec) -> ExportSpec {
    ExportSpec {
        name: Some("vm1".to_owned()),
        endpoint: EndpointSpec::Path("/vm.sock".into()),
        device,
        settings: ExportSettings::default(),
    }
}

fn disk(size_bytes: u64) -> DiskSpec {
    DiskSpec::Null { size_bytes }
}

fn session(output: &[u8]) -> SessionState {
    let sample = include_str!("../daemon/format/sample.json");
    let sample: Value = serde_json::from_str(sample).unwrap();
    let mut session = sample["standstill"]["exports"][0]["session"].clone();
    session["channel"]["output"] = json!(output);
    serde_json::from_value(session).unwrap()
}

fn record(number: Number, output: &[u8]) -> Record {
    let export = export(DeviceSpec::Blk(disk(512)));
    Record { export, session: session(output), descriptors: vec![number] }
}

fn damage(file: &RecordFile, offset: u64) {
    let mut byte = [0];
    rustix::io::pread(file.as_fd(), &mut byte, offset).unwrap();
    rustix::io::pwrite(file.as_fd(), &[byte[0] ^ 1], offset).unwrap();
}

fn read(file: &RecordFile) -> Record {
    record::read(file.as_fd()).unwrap().unwrap()
}

fn output_of(record: &Record) -> Value {
    serde_json::to_value(&record.session).unwrap()["channel"]["output"].clone()
}

/// A kill leaves the half that was being written in any state.
#[test]
fn the_newest_whole_record_counts() {
    let mut file = RecordFile::new().unwrap();
    assert!(record::read(file.as_fd()).unwrap().is_none(), "nothing is written");
    for number in 1..=5_u64 {
        file.write(&record(number, &[])).unwrap();
        assert_eq!(read(&file).descriptors, [number]);
    }
    let [newest, older] = [5, 4].map(|number| SENT_BYTES + number % 2 * HALF_BYTES);
    for place in [0, 8, 16, 20, HEADER_BYTES as u64, HEADER_BYTES as u64 + 100] {
        damage(&file, newest + place);
        assert_eq!(read(&file).descriptors, [4], "{place}");
        damage(&file, newest + place);
    }
    damage(&file, newest);
    damage(&file, older);
    let error = record::read(file.as_fd()).unwrap_err().to_string();
    assert!(error.contains("damaged"), "{error}");
}

#[test]
fn a_record_of_another_format_is_refused() {
    let mut file = RecordFile::new().unwrap();
    file.write_as(7, &record(2, &[])).unwrap();
    let error = record::read(file.as_fd()).unwrap_err().to_string();
    assert!(error.contains("format 7, not"), "{error}");
}

/// The front-end must not get an answer twice.
#[test]
fn an_answer_that_was_sent_is_not_in_the_record() {
    let mut file = RecordFile::new().unwrap();
    file.write(&record(2, &[1, 2, 3])).unwrap();
    assert_eq!(output_of(&read(&file)), json!([1, 2, 3]));
    file.note_sent().unwrap();
    assert_eq!(output_of(&read(&file)), json!([]));
    // The next answer differs.
    file.write(&record(2, &[4])).unwrap();
    assert_eq!(output_of(&read(&file)), json!([4]));
}

/// A guest must not continue on another disk.
#[test]
fn only_the_same_export_continues_a_session() {
    let unit =
        |lun, bytes| UnitSpec { target: 0, lun, disk: disk(bytes), settings: Default::default() };
    let blk = |bytes| export(DeviceSpec::Blk(disk(bytes)));
    let scsi = |units| export(DeviceSpec::Scsi(units));
    let elsewhere = ExportSpec { endpoint: EndpointSpec::Path("/b".into()), ..blk(512) };
    for (before, now, is_same) in [
        (blk(512), blk(512), true),
        (blk(512), blk(1024), false),
        (blk(512), elsewhere, false),
        (blk(512), scsi(vec![unit(0, 512)]), false),
        (scsi(vec![unit(0, 512)]), scsi(vec![unit(0, 512)]), true),
        // Commands add and remove units.
        (scsi(vec![unit(0, 512)]), scsi(vec![unit(0, 512), unit(1, 512)]), true),
        (scsi(vec![unit(0, 512), unit(1, 512)]), scsi(vec![unit(0, 512)]), true),
        (scsi(vec![unit(0, 512), unit(1, 512)]), scsi(vec![unit(1, 1024)]), false),
    ] {
        let killed = KilledSession::new(before, session(&[]));
        assert_eq!(killed.difference(&now).is_none(), is_same, "{}", now.summary());
    }
}

/// Returns the descriptors of a stash as the next process finds them, and the stash.
fn reopen(stash: &Stash) -> (Stash, BTreeMap<Number, OwnedFd>) {
    Stash::open("test".to_owned(), stash.copies().into()).unwrap()
}

fn counted(count: u32) -> OwnedFd {
    eventfd(count, EventfdFlags::NONBLOCK).unwrap()
}

fn count_of(fd: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    rustix::io::read(fd, &mut count).unwrap();
    rustix::io::write(fd, &count).unwrap();
    u64::from_ne_bytes(count)
}

/// More descriptors than the kernel has room for in single messages.
#[test]
fn a_stash_keeps_the_descriptors_in_use() {
    let mut stash = Stash::new_unstored("test".to_owned()).unwrap();
    let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
    let socket = stash.put(one.as_fd()).unwrap();
    let numbers: Vec<Number> = (0..3000)
        .map(|count| {
            let number = stash.put(counted(count + 1).as_fd()).unwrap();
            // Every third one stays in use.
            stash.tidy(|it| it % 6 == 2).unwrap();
            number
        })
        .collect();
    assert!(numbers.iter().all(|number| number % 2 == 0) && socket % 2 == 1);
    for round in 0..2 {
        let (next, found) = reopen(&stash);
        for (count, number) in numbers.iter().enumerate() {
            let fd = found.get(number);
            assert!(fd.is_some() || number % 6 != 2, "round {round}: {number} is lost");
            assert!(
                fd.is_none_or(|fd| count_of(fd) == count as u64 + 1),
                "round {round}: {number}"
            );
        }
        assert!(found.len() < 1500 && found.contains_key(&socket), "{}", found.len());
        stash = next;
    }
    assert!(stash.put(other.as_fd()).unwrap() > socket);
    let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
    let error = stash.put(file.as_fd()).unwrap_err().to_string();
    assert!(error.contains("only sealable memory"), "{error}");
}

/// A process may be killed after any of its system calls.
#[test]
fn a_kill_while_a_stash_is_put_together_loses_nothing() {
    for calls in 0..60 {
        let mut stash = Stash::new_unstored("test".to_owned()).unwrap();
        let numbers = [1, 2, 3, 4, 5].map(|count| stash.put(counted(count).as_fd()).unwrap());
        let is_done = stash.compact_until_killed(calls);
        let (again, _) = reopen(&stash);
        let (_, found) = reopen(&again);
        assert!(found.keys().eq(&numbers), "after {calls} calls: {found:?}");
        assert!((1..).zip(found.values()).all(|(count, fd)| count_of(fd) == count));
        if is_done {
            assert!(calls > 10);
            return;
        }
    }
    panic!("it does not end");
}

#[test]
fn the_newest_session_of_an_export_is_found() {
    let mut passed = Vec::new();
    for (number, descriptor) in [(7, 2), (10, 2), (9, 4), (8, 2)] {
        let mut stash = Stash::new_unstored("test".to_owned()).unwrap();
        let mut file = RecordFile::new().unwrap();
        stash.put(file.as_fd()).unwrap();
        stash.put(counted(number).as_fd()).unwrap();
        if number < 10 {
            file.write(&record(descriptor, &[])).unwrap();
        }
        passed.extend(stash.copies().map(|end| (format!("rh-{number}"), end)));
    }
    passed.push(("rh-11".to_owned(), counted(0)));
    // The newest one was not kept yet, and the one before lacks a descriptor.
    let found: Vec<u64> = super::passed::sessions(passed)
        .into_iter()
        .map(|mut session| count_of(&session.fds.take(FdIndex::new(0)).unwrap()))
        .collect();
    assert_eq!(found, [8, 7]);
}

/// A closed descriptor and a new one may have the same number. The next process would wait for the
/// kicks of a queue at a wrong eventfd.
#[test]
fn a_descriptor_with_the_number_of_an_earlier_one_is_another() {
    let stash = Stash::new_unstored("test".to_owned()).unwrap();
    let ends = stash.copies();
    let kept = StoredSession::new(stash).unwrap();
    let mut keeper = SharedKeeper::new(kept, export(DeviceSpec::Blk(disk(512))));
    let (mut reused, lasting) = (counted(1), counted(2));
    let mut keep = |fds: &[&OwnedFd]| {
        keeper.begin();
        for fd in fds {
            let _ = keeper.put("test", fd.as_fd()).unwrap();
        }
        keeper.keep(Ok(session(&[])));
    };
    keep(&[&reused, &lasting]);
    keep(&[&lasting]);
    rustix::io::dup3(counted(3), &mut reused, rustix::io::DupFlags::CLOEXEC).unwrap();
    keep(&[&reused, &lasting]);
    let passed = ends.map(|end| ("rh-1".to_owned(), end)).into();
    let mut found = super::passed::sessions(passed);
    assert_eq!(found.len(), 1);
    for (index, count) in [(0, 3), (1, 2)] {
        assert_eq!(count_of(&found[0].fds.take(FdIndex::new(index)).unwrap()), count);
    }
}

/// A message that is being carried out stays in the record, and an answer that was sent does not
/// come back.
#[test]
fn a_change_of_units_keeps_the_last_state() {
    let stash = Stash::new_unstored("test".to_owned()).unwrap();
    let ends = stash.copies();
    let [before, after] = [512, 1024].map(|bytes| export(DeviceSpec::Blk(disk(bytes))));
    let mut keeper = SharedKeeper::new(StoredSession::new(stash).unwrap(), before.clone());
    keeper.0.lock().set_export(before.clone());
    keeper.begin();
    let _ = keeper.put("test", counted(1).as_fd()).unwrap();
    keeper.keep(Ok(session(&[3])));
    let check = |expected: &ExportSpec, output: Value| {
        let copies = ends.iter().map(|end| ("rh-1".to_owned(), end.try_clone().unwrap()));
        let mut found = super::passed::sessions(copies.collect());
        assert_eq!(found[0].export.summary(), expected.summary());
        assert_eq!(count_of(&found[0].fds.take(FdIndex::new(0)).unwrap()), 1);
        let state = serde_json::to_value(found[0].state.take().unwrap()).unwrap();
        assert_eq!(state["channel"]["output"], output);
    };
    keeper.0.lock().set_export(after.clone());
    check(&after, json!([3]));
    keeper.note_sent();
    keeper.0.lock().set_export(before.clone());
    check(&before, json!([]));
}

/// Both processes of a takeover may be killed at any moment.
#[test]
fn a_session_that_is_handed_over_stays_in_its_stash() {
    let stash = Stash::new_unstored("rh-1".to_owned()).unwrap();
    let ends = stash.copies();
    let copies = || ends.iter().map(|end| end.try_clone().unwrap()).collect::<Vec<_>>();
    let keep = |keeper: &mut SharedKeeper, fd: &OwnedFd, output: u8| {
        keeper.begin();
        let _ = keeper.put("test", fd.as_fd()).unwrap();
        keeper.keep(Ok(session(&[output])));
    };
    let check = |count: u64, output: u8| {
        let passed = copies().into_iter().map(|end| ("rh-1".to_owned(), end)).collect();
        let mut found = super::passed::sessions(passed);
        assert_eq!(found.len(), 1);
        assert_eq!(count_of(&found[0].fds.take(FdIndex::new(0)).unwrap()), count);
        let state = serde_json::to_value(found[0].state.take().unwrap()).unwrap();
        assert_eq!(state["channel"]["output"], json!([output]));
    };
    let device = export(DeviceSpec::Blk(disk(512)));
    let kept = StoredSession::new(stash).unwrap();
    let mut old = SharedKeeper::new(kept, device.clone());
    (1..4).for_each(|output| keep(&mut old, &counted(1), output));
    let mut fds = PassedFds::default();
    let state = old.0.lock().hand_over(&mut fds).unwrap().unwrap();
    let mut handed = KeptSession::new(None);
    handed.take_over(Some(state), &mut fds).unwrap();
    check(1, 3);
    let mut new = SharedKeeper::new(handed.open_handed().unwrap().unwrap(), device);
    check(1, 3);
    keep(&mut new, &counted(2), 4);
    check(2, 4);
}

/// Descriptors of earlier processes would keep a guest's old memory, and reach the limit on
/// descriptors in sockets.
#[test]
fn a_stash_does_not_grow_from_process_to_process() {
    let stash = Stash::new_unstored("rh-1".to_owned()).unwrap();
    let ends = stash.copies();
    let open = || {
        let ends = ends.iter().map(|end| end.try_clone().unwrap()).collect();
        StoredSession::open("rh-1".to_owned(), ends).unwrap()
    };
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let device = export(DeviceSpec::Blk(disk(512)));
    let mut kept = StoredSession::new(stash).unwrap();
    for process in 1..5 {
        let (file, connection) = (counted(process), socket.try_clone().unwrap());
        let mut keeper = SharedKeeper::new(kept, device.clone());
        keeper.begin();
        let _ = keeper.put("connection", connection.as_fd()).unwrap();
        let _ = keeper.put("kick", file.as_fd()).unwrap();
        keeper.keep(Ok(session(&[])));
        let others;
        (kept, others) = open();
        let passed = ends.iter().map(|end| ("rh-1".to_owned(), end.try_clone().unwrap()));
        let mut found = super::passed::sessions(passed.collect());
        let kick = found[0].fds.take(FdIndex::new(1)).unwrap();
        assert_eq!(count_of(&kick), u64::from(process));
        assert_eq!(others.len(), 2, "of process {process}: {others:?}");
    }
}

/// A process that is killed when it begins to keep a session leaves an older state too.
#[test]
fn an_export_continues_its_newest_session_and_no_other() {
    let killed = |name: &str, output: u8| {
        let export =
            ExportSpec { name: Some(name.to_owned()), ..export(DeviceSpec::Blk(disk(512))) };
        KilledSession::new(export, session(&[output]))
    };
    let (next, all) = (Default::default(), vec![killed("a", 3), killed("b", 2), killed("a", 1)]);
    let store = super::FdStore { next, killed: blockio::executor::Lock::new(all) };
    let take = |name: &str| {
        let state = store.take_killed(&killed(name, 0).export)?.state?;
        Some(serde_json::to_value(&state).unwrap()["channel"]["output"][0].clone())
    };
    assert_eq!(take("a"), Some(json!(3)));
    assert_eq!(take("a"), None, "it would continue a session that is over");
    store.retain_killed(&[killed("b", 0).export]);
    assert_eq!(take("b"), Some(json!(2)));
    *store.killed.lock() = vec![killed("a", 1)];
    store.retain_killed(&[killed("b", 0).export]);
    assert_eq!(take("a"), None, "its export is gone");
}
