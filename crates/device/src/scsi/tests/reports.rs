//! Reports of a unit on itself and on failures, and the counters.

use super::sharing::{START, STOP};
use super::*;
use crate::stats::RequestKind;

#[test]
fn statistics_count_bytes_of_the_medium() {
    let mut initiator = Initiator::new();
    initiator.good(&cdb10(0x41, 0, 0, 5), &[3; 512], 0);
    let mut list = vec![0, 22, 0, 16, 0, 0, 0, 0];
    list.extend(2_u64.to_be_bytes());
    list.extend([0, 0, 0, 7, 0, 0, 0, 0]);
    initiator.good(&cdb10(0x42, 0, 0, 24), &list, 0);
    initiator.good(&cdb10(0x2f, 0, 0, 9), &[], 0);
    let mut pair = cdb16(0x89, 0, 20, 0);
    pair[13] = 1;
    initiator.good(&pair, &[0; 1024], 0);
    let totals = initiator.device.queue_stats(2).unwrap().totals();
    for (kind, blocks) in [
        (RequestKind::WriteZeroes, 5),
        (RequestKind::Discard, 7),
        (RequestKind::Read, 9),
        (RequestKind::Write, 1),
    ] {
        assert_eq!((totals[kind].requests(), totals[kind].bytes), (1, blocks * 512), "{kind:?}");
    }
}

#[test]
fn sense_data_have_the_format_that_mode_select_chooses() {
    let mut initiator = Initiator::new();
    let read = cdb10(0x28, 0x20, 0, 1);
    let select = |initiator: &mut Initiator, bit: u8| {
        let mut list = vec![0; 4];
        list.extend([0x0a, 10, bit, 0x10, 0, 0, 0, 0, 0xff, 0xff, 0, 0]);
        initiator.good(&[0x55, 0x10, 0, 0, 0, 0, 0, 0, 20, 0], &[vec![0; 4], list].concat(), 0);
    };
    let page = [0x1a, 8, 0x0a, 0, 255, 0];
    assert_eq!(initiator.good(&[0x1a, 8, 0x4a, 0, 255, 0], &[], 255)[4..8], [0x0a, 10, 4, 0]);
    select(&mut initiator, 4);
    assert_eq!(initiator.good(&page, &[], 255)[4..8], [0x0a, 10, 4, 0x10]);
    initiator.run(&read, &[], 512);
    let sense = initiator.raw_sense();
    assert_eq!(sense[..8], [0x72, 5, 0x24, 0, 0, 0, 0, 8]);
    assert_eq!(sense[8..16], [2, 6, 0, 0, 0xc8 | 7, 0, 1, 0]);
    // A command for sense data chooses the format itself.
    assert_eq!(initiator.good(&[3, 0, 0, 0, 18, 0], &[], 18)[0], 0x70);
    select(&mut initiator, 0);
    initiator.run(&read, &[], 512);
    assert_eq!(initiator.raw_sense()[0], 0x70);
    select(&mut initiator, 4);
    initiator.device.reset();
    assert_eq!(initiator.sense(&[0; 6], &[], 0), [6, 0x29, 0], "fixed format after a reset");
    assert_eq!(initiator.good(&page, &[], 255)[6], 0);
}

#[test]
fn commands_report_the_units() {
    let mut initiator = Initiator::new();
    let one =
        |opcode, action: u8, options| [0xa3, 0x0c, options, opcode, 0, action, 0, 0, 1, 0, 0, 0];
    let answer = initiator.good(&one(0x28, 0, 1), &[], 256);
    assert_eq!(answer[..6], [0, 3, 0, 10, 0x28, 0x18]);
    assert_eq!(initiator.good(&one(0x9e, 0x10, 2), &[], 256)[..6], [0, 3, 0, 16, 0x9e, 0x10]);
    assert_eq!(initiator.good(&one(0x9e, 0x11, 3), &[], 256), [0, 1, 0, 0]);
    assert_eq!(initiator.sense(&one(0x9e, 0, 1), &[], 256), [5, 0x24, 0]);
    let mut all = |options| {
        let cdb = [0xa3, 0x0c, options, 0, 0, 0, 0, 0, 16, 0, 0, 0];
        initiator.good(&cdb, &[], 4096)[4..].to_vec()
    };
    let (plain, timed) = (all(0), all(0x80));
    assert_eq!(plain.len() / 8, timed.len() / 20);
    for (plain, timed) in plain.chunks(8).zip(timed.chunks(20)) {
        assert_eq!((plain[5] & 2, timed[5]), (0, plain[5] | 2), "{plain:x?} {timed:x?}");
        assert_eq!((&timed[..5], &timed[6..8]), (&plain[..5], &plain[6..8]));
        assert_eq!(timed[8..10], [0, 10], "the length of the timeouts");
    }
    let tmfs = [0xa3, 0x0d, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0];
    assert_eq!(initiator.good(&tmfs, &[], 4), [0xdc, 0x03, 0, 0]);
    let capacity = initiator.good(&cdb10(0x25, 0, 0, 0), &[], 8);
    assert_eq!(capacity, [0, 0, 7, 255, 0, 0, 2, 0]);
    let mut long = cdb16(0x9e, 0x10, 0, 32);
    assert_eq!(initiator.good(&long, &[], 32)[..12], [0, 0, 0, 0, 0, 0, 7, 255, 0, 0, 2, 0]);
    long[1] = 0x12;
    let status = initiator.good(&long, &[], 32);
    assert_eq!((status[3], &status[8..20]), (20, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0][..]));
    let log = |page: u8| vec![0x4d, 0, 0x40 | page, 0, 0, 0, 0, 0, 255, 0];
    assert_eq!(initiator.good(&log(0), &[], 255), [0, 0, 0, 2, 0, 0x2f]);
    assert_eq!(initiator.good(&log(0x2f), &[], 255)[..8], [0xaf, 0, 0, 8, 0, 0, 3, 4]);
    assert_eq!(initiator.sense(&log(0x0d), &[], 255), [5, 0x24, 0]);
    for page in [0, 0x80, 0x83, 0xb0, 0xb1, 0xb2] {
        let answer = initiator.good(&[0x12, 1, page, 0, 255, 0], &[], 255);
        assert_eq!((answer[1], answer.len()), (page, usize::from(answer[3]) + 4));
    }
    assert_eq!(initiator.sense(&[0x12, 1, 0x84, 0, 255, 0], &[], 255), [5, 0x24, 0]);
    assert_eq!(initiator.sense(&[0x12, 0, 0x80, 0, 255, 0], &[], 255), [5, 0x24, 0]);
}

/// A command with a service action is found by both numbers, and another one by zero at most.
#[test]
fn a_report_of_one_command_is_about_no_other() {
    const IN_OPTIONS: Option<bool> = None;
    let mut unit = Initiator::new();
    for (options, opcode, action, expected) in [
        (1, 0x28, 0_u16, Some(true)),
        (1, 0xff, 0, Some(false)),
        (1, 0x9e, 0x10, IN_OPTIONS),
        (2, 0x28, 0, IN_OPTIONS),
        (2, 0x9e, 0x10, Some(true)),
        (2, 0x9e, 0x11, Some(false)),
        (2, 0x9e, 0x110, Some(false)),
        (2, 0xff, 0, Some(false)),
        (3, 0x28, 0, Some(true)),
        (3, 0x28, 1, Some(false)),
        (3, 0x28, 0x100, Some(false)),
        (3, 0x9e, 0x10, Some(true)),
        (3, 0x9e, 0x11, Some(false)),
        (3, 0x9e, 0x110, Some(false)),
        (3, 0xff, 0, Some(false)),
        (4, 0x28, 0, IN_OPTIONS),
        (7, 0x28, 0, IN_OPTIONS),
    ] {
        let name = format!("{options} {opcode:x} {action:x}");
        let [high, low] = action.to_be_bytes();
        for timeouts in [0, 0x80] {
            let cdb = [0xa3, 0x0c, options | timeouts, opcode, high, low, 0, 0, 1, 0, 0, 0];
            let answer = unit.run(&cdb, &[], 256);
            let Some(is_supported) = expected else {
                let sense = (answer.sense, answer.specific);
                assert_eq!(sense, ([5, 0x24, 0], [0xc8 | 2, 0, 2]), "{name}");
                continue;
            };
            let (support, bytes) = match (is_supported, timeouts) {
                (false, _) => (1, 0),
                (true, 0) => (3, answer.data[3]),
                (true, _) => (0x83, answer.data[3] + 12),
            };
            assert_eq!((answer.status, answer.data[1]), (0, support), "{name}");
            assert_eq!(answer.data.len(), 4 + usize::from(bytes), "{name}");
        }
    }
}

#[test]
fn a_thick_unit_neither_has_nor_names_unmapping_commands() {
    let one = |opcode: u8| [0xa3, 0x0c, 1, opcode, 0, 0, 0, 0, 1, 0, 0, 0];
    let all = [0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0];
    let capacity = cdb16(0x9e, 0x10, 0, 32);
    let limits = [0x12, 1, 0xb0, 0, 64, 0];
    let provisioning = [0x12, 1, 0xb2, 0, 8, 0];
    for discard in [true, false] {
        let disk = NamedTempFile::new().unwrap();
        disk.as_file().set_len(BLOCKS * BLOCK as u64).unwrap();
        let options = UnitOptions { discard, ..options() };
        let mut unit = Initiator::on(Arc::new(disk), &DiskOptions::default(), options);
        let is_unmap = |command: &[u8]| command[0] == 0x42;
        let names_it = unit.good(&all, &[], 4096)[4..].chunks(8).any(is_unmap);
        assert_eq!(names_it, discard);
        assert_eq!(unit.good(&one(0x42), &[], 256)[1], if discard { 3 } else { 1 });
        for opcode in [0x41, 0x93] {
            assert_eq!(unit.good(&one(opcode), &[], 256)[5] & 8 != 0, discard);
        }
        assert_eq!(unit.good(&capacity, &[], 32)[14] & 0x80 != 0, discard);
        assert_eq!(unit.good(&limits, &[], 64)[20..24] != [0; 4], discard);
        // UNMAP and both lengths of WRITE SAME, thin; unmapped blocks have any content.
        let [e0, e1] = if discard { [0xe0, 2] } else { [0; 2] };
        assert_eq!(unit.good(&provisioning, &[], 8), [0, 0xb2, 0, 4, 0, e0, e1, 0]);
        let status = unit.good(&cdb16(0x9e, 0x12, 7, 64), &[], 64);
        let mut expected = [0; 24];
        expected[3] = 20;
        expected[8..16].copy_from_slice(&7_u64.to_be_bytes());
        expected[16..20].copy_from_slice(&u32::try_from(BLOCKS - 7).unwrap().to_be_bytes());
        expected[20] = discard.into();
        assert_eq!(status, expected, "all is a hole, or mapped where nothing can be unmapped");
        unit.good(&cdb16(0x8a, 0, 16, 8), &[1; 8 * BLOCK], 0);
        let status = unit.good(&cdb16(0x9e, 0x12, 16, 64), &[], 64);
        assert_eq!((status[15], status[20]), (16, 0));
        assert!(!discard || status[19] == 8 && status[16..19] == [0; 3], "{status:?}");
        assert_eq!(unit.sense(&cdb16(0x9e, 0x12, BLOCKS, 64), &[], 64), [5, 0x21, 0]);
        unit.good(&STOP, &[], 0);
        assert_eq!(unit.sense(&cdb16(0x9e, 0x12, 7, 64), &[], 64), [2, 4, 2]);
        unit.good(&START, &[], 0);
        let unmap = unit.run(&cdb10(0x42, 0, 0, 0), &[], 0);
        let same = unit.run(&cdb10(0x41, 8, 0, 1), &[0; BLOCK], 0);
        let expected = if discard { [[0; 3]; 2] } else { [[5, 0x20, 0], [5, 0x24, 0]] };
        assert_eq!([unmap.sense, same.sense], expected);
    }
}

/// The kernel cannot write to memory that lost its file, so it stops there.
#[test]
fn a_read_that_fails_halfway_says_so_by_residual_and_address() {
    const ROOM: u32 = 64 * 512;
    const KEPT: u64 = RESPONSE + 0x2000;
    let mut initiator = Initiator::new();
    std::fs::write(initiator.disk.path(), vec![7; 2048 * BLOCK]).unwrap();
    let mut request = vec![0; REQUEST_BYTES];
    request[..8].copy_from_slice(&UNIT.bytes());
    request[19..29].copy_from_slice(&cdb10(0x28, 0, 100, 64));
    initiator.scene.memory.write(DATA, &request).unwrap();
    initiator.scene.memory_file.set_len(KEPT).unwrap();
    let request = Desc::readable(DATA, u32::try_from(REQUEST_BYTES).unwrap());
    initiator.scene.offer(&[request, Desc::writable(RESPONSE, RESPONSE_BYTES + ROOM)]);
    let used = initiator.scene.answer();
    let blocks = u32::try_from((KEPT - RESPONSE) / 512).unwrap() - 1;
    assert_eq!(used.bytes, RESPONSE_BYTES + blocks * 512);
    let mut seen = vec![0; used.bytes as usize];
    initiator.scene.memory.read(RESPONSE, &mut seen).unwrap();
    assert_eq!(seen[4..8], (ROOM - blocks * 512).to_le_bytes());
    let sense = initiator.raw_sense();
    assert_eq!((sense[0], sense[2], sense[12]), (0xf0, 3, 0x11));
    assert_eq!(sense[3..7], (100 + blocks).to_be_bytes());
    assert_eq!(seen[RESPONSE_BYTES as usize..], vec![7; blocks as usize * 512]);
}

/// The kernel cannot read such memory either.
#[test]
fn a_write_that_fails_halfway_names_the_block_where_it_did() {
    const BYTES: u32 = 64 * 512;
    const KEPT: u64 = RESPONSE + 0x4000;
    const WRITTEN: u32 = 16;
    let mut initiator = Initiator::new();
    let mut request = vec![0; REQUEST_BYTES];
    request[..8].copy_from_slice(&UNIT.bytes());
    request[19..29].copy_from_slice(&cdb10(0x2a, 0, 100, 64));
    initiator.scene.memory.write(DATA, &request).unwrap();
    initiator.scene.memory_file.set_len(KEPT).unwrap();
    let request = Desc::readable(DATA, u32::try_from(REQUEST_BYTES).unwrap());
    let data = Desc::readable(KEPT - u64::from(WRITTEN) * 512, BYTES);
    initiator.scene.offer(&[request, data, Desc::writable(RESPONSE, RESPONSE_BYTES)]);
    initiator.scene.answer();
    let sense = initiator.raw_sense();
    assert_eq!((sense[0], sense[2], sense[12]), (0xf0, 3, 0x0c));
    assert_eq!(sense[3..7], (100 + WRITTEN).to_be_bytes());
}

/// The device copies such data itself, into memory that is gone.
#[test]
fn data_that_does_not_arrive_is_no_success() {
    const KEPT: u64 = RESPONSE + 0x2000;
    virtqueue::install_sigbus_handler().unwrap();
    let mut initiator = Initiator::new();
    let mut request = vec![0; REQUEST_BYTES];
    request[..8].copy_from_slice(&UNIT.bytes());
    request[19..25].copy_from_slice(&[0x12, 0, 0, 0, 36, 0]);
    initiator.scene.memory.write(DATA, &request).unwrap();
    initiator.scene.memory_file.set_len(KEPT).unwrap();
    let request = Desc::readable(DATA, u32::try_from(REQUEST_BYTES).unwrap());
    let response = Desc::writable(RESPONSE, RESPONSE_BYTES);
    initiator.scene.offer(&[request, response, Desc::writable(KEPT, 36)]);
    let used = initiator.scene.answer();
    assert_eq!(used.bytes, RESPONSE_BYTES);
    let mut seen = [0; 12];
    initiator.scene.memory.read(RESPONSE, &mut seen).unwrap();
    assert_eq!((u32::from_le_bytes(seen[4..8].try_into().unwrap()), seen[10]), (36, 2));
    let sense = initiator.raw_sense();
    assert_eq!((sense[2], sense[12]), (4, 0x44));
}

/// The used length counts the bytes for the driver.
#[test]
fn a_write_returns_no_data() {
    let mut initiator = Initiator::new();
    for (cdb, out, room, bytes) in [
        (cdb10(0x2a, 0, 0, 1), vec![1; BLOCK], 0, 0),
        (cdb10(0x28, 0, 0, 1), vec![], 512, 512),
        (vec![0; 6], vec![], 0, 0),
    ] {
        initiator.begin(UNIT.bytes(), &cdb, &out, room);
        assert_eq!(initiator.scene.answer().bytes, RESPONSE_BYTES + bytes, "{cdb:x?}");
    }
}
