//! All state that a device hands over to another process, as its initiators see it.

use std::fs::File;

use super::*;
use crate::access::ReservationStorage;
use crate::access::sense::Sense;

/// A device in another process that continues `before`, through a text.
fn after(before: &Initiator) -> Initiator {
    let awaited = UnitOptions { access: Arc::new(DiskAccess::for_hand_over()), ..options() };
    let after = before.beside(&awaited);
    let (state, files) = before.device.hand_over().unwrap();
    let text = serde_json::to_string(&state).unwrap();
    let has_file = |files: &[Option<File>]| Vec::from_iter(files.iter().map(Option::is_some));
    let expected = (state.clone(), has_file(&files));
    after.device.resume(serde_json::from_str(&text).unwrap(), files).unwrap();
    let (state, files) = after.device.hand_over().unwrap();
    assert_eq!((state, has_file(&files)), expected, "it is handed over again as it was");
    after
}

#[test]
fn a_unit_that_is_stopped_stays_so() {
    for is_stopped in [false, true] {
        let before = Initiator::new();
        before.access().set_stopped(is_stopped);
        let mut after = after(&before);
        let expected = if is_stopped { [2, 4, 2] } else { [0; 3] };
        assert_eq!(after.run(&[0; 6], &[], 0).sense, expected);
    }
}

#[test]
fn mode_pages_are_as_they_were_selected() {
    for (is_off, has_descriptors) in [(false, true), (true, false), (true, true)] {
        let mut before = Initiator::new();
        let wce = if is_off { 0 } else { 4 };
        let d_sense = if has_descriptors { 4 } else { 0 };
        let caching = [&[0x08, 18, wce][..], &[0; 17]].concat();
        let control = [0x0a, 10, d_sense, 0x10, 0, 0, 0, 0, 0xff, 0xff, 0, 0];
        let list = [&[0; 4][..], &caching, &control].concat();
        let length = u8::try_from(list.len()).unwrap();
        before.good(&[0x15, 0x10, 0, 0, length, 0], &list, 0);
        let mut after = after(&before);
        let pages = after.good(&[0x1a, 8, 0x3f, 0, 255, 0], &[], 255);
        assert_eq!((pages[6], pages[26]), (wce, d_sense), "{is_off} {has_descriptors}");
        after.run(&cdb10(0x28, 0x20, 0, 1), &[], 512);
        let format = if has_descriptors { 0x72 } else { 0x70 };
        assert_eq!(after.raw_sense()[0], format);
        // Without a cache, a write is stable when it is answered.
        let flushes = |of: &Initiator| of.scene.thread.io().stats().flush.ops.get();
        let fua = |of: &Initiator| of.scene.thread.io().stats().write.ops.get();
        let (flushed, written) = (flushes(&after), fua(&after));
        after.good(&cdb10(0x2a, 0, 0, 1), &[1; BLOCK], 0);
        assert_eq!(flushes(&after) - flushed, 0);
        assert_eq!(fua(&after) - written, 1);
    }
}

#[test]
fn pending_attentions_are_reported_in_their_order() {
    let before = Initiator::new();
    for attention in [Sense::CAPACITY_CHANGED, Sense::MODE_CHANGED, Sense::UNITS_CHANGED] {
        before.unit().attentions.add(attention);
    }
    let (mut here, mut there) = (Vec::new(), Vec::new());
    let mut after = after(&before);
    let mut before = before;
    for _ in 0..4 {
        here.push(before.run(&[0; 6], &[], 0).sense);
        there.push(after.run(&[0; 6], &[], 0).sense);
    }
    assert_eq!(there, here);
    assert_eq!((there[0][0], there[3]), (6, [0; 3]), "{there:x?}");
}

#[test]
fn a_reservation_and_its_keys_hold_on() {
    const REGISTER: u8 = 0;
    const RESERVE: u8 = 1;
    const WRITE_EXCLUSIVE: u8 = 1;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("reservations");
    let mut before = Initiator::new();
    let place = ReservationStorage::File(path.clone());
    let _kept = before.access().store_reservations(place).unwrap();
    for (action, kind, keys) in [(REGISTER, 0, [0, 7]), (RESERVE, WRITE_EXCLUSIVE, [7, 0])] {
        let (cdb, mut list) = reserve_out(action, kind, keys);
        // The initiator asks for storage (APTPL).
        list[20] |= u8::from(action == REGISTER);
        before.good(&cdb, &list, 0);
    }
    assert!(path.exists());
    let read_in = |action| [0x5e, action, 0, 0, 0, 0, 0, 0, 255, 0];
    let seen = [0, 1, 3].map(|action| before.good(&read_in(action), &[], 255));
    let mut after = after(&before);
    let now = [0, 1, 3].map(|action| after.good(&read_in(action), &[], 255));
    assert_eq!(now[0][8..], 7_u64.to_be_bytes());
    // Generation, key, scope and type; in the full status the port is that of the new device.
    assert_eq!(now[..2], seen[..2]);
    assert_eq!(now[2][..20], seen[2][..20]);
}

#[test]
fn events_that_wait_for_a_buffer_wait_there() {
    for count in [0, 1, 64, 65] {
        let before = Initiator::new();
        let scsi = Initiator::scsi(&before.device);
        for at in 0..count {
            scsi.events().rescan(UnitAddress { target: 0, lun: at });
        }
        let (events, is_missed) = scsi.events().waiting();
        assert_eq!((events.len(), is_missed), (usize::from(count).min(64), count > 64));
        let after = after(&before);
        assert_eq!(Initiator::scsi(&after.device).events().waiting(), (events, is_missed));
    }
}
