//! Fields with unsupported values, and lengths that are too short.

use super::*;
use crate::access::sense::Sense;

const WELL_KNOWN: [u8; 8] = [0xc1, 1, 0, 0, 0, 0, 0, 0];

#[test]
fn a_mode_page_that_changes_too_much_is_pointed_to_its_field() {
    let mut initiator = Initiator::new();
    let mut check = |header: usize, list: &[u8], expected: [u8; 3]| {
        let length = u8::try_from(list.len()).unwrap();
        let cdb = match header {
            4 => vec![0x15, 0x10, 0, 0, length, 0],
            _ => vec![0x55, 0x10, 0, 0, 0, 0, 0, 0, length, 0],
        };
        let answer = initiator.run(&cdb, list, 0);
        assert_eq!((answer.sense, answer.specific), ([5, 0x26, 0], expected), "{list:x?}");
    };
    let mut caching = [0; 20];
    caching[..3].copy_from_slice(&[0x08, 18, 4]);
    let mut control = [0; 12];
    control[..10].copy_from_slice(&[0x0a, 10, 0, 0x10, 0, 0, 0, 0, 0xff, 0xff]);
    let mut exceptions = [0; 12];
    exceptions[..2].copy_from_slice(&[0x1c, 10]);
    for (page, at, changed, expected) in [
        (&caching[..], 2, 0x01, [0x88, 0, 2]),
        (&caching, 3, 0x21, [0x88 | 7, 0, 3]),
        (&caching, 3, 0x01, [0x88 | 3, 0, 3]),
        (&caching, 5, 1, [0x80, 0, 4]),
        (&caching, 7, 1, [0x80, 0, 6]),
        (&caching, 11, 1, [0x80, 0, 10]),
        (&caching, 12, 0x20, [0x88 | 5, 0, 12]),
        (&caching, 13, 1, [0x80, 0, 13]),
        (&control, 2, 0x20, [0x88 | 7, 0, 2]),
        (&control, 3, 0x80, [0x88 | 7, 0, 3]),
        (&control, 3, 0x02, [0x88 | 2, 0, 3]),
        (&control, 4, 0x08, [0x88 | 3, 0, 4]),
        (&control, 5, 0x40, [0x88 | 6, 0, 5]),
        (&control, 9, 0x01, [0x80, 0, 8]),
        (&control, 11, 0x01, [0x80, 0, 10]),
        (&exceptions, 2, 0x08, [0x88 | 3, 0, 2]),
        (&exceptions, 3, 0x01, [0x88 | 3, 0, 3]),
        (&exceptions, 7, 0x01, [0x80, 0, 4]),
        (&exceptions, 11, 0x01, [0x80, 0, 8]),
        // An unknown page, and the format of subpages.
        (&control, 0, 0x01, [0x88 | 5, 0, 0]),
        (&control, 0, 0x40, [0x88 | 6, 0, 0]),
        (&control, 1, 0x01, [0x80, 0, 1]),
        (&control, 1, 0x02, [0x80, 0, 1]),
    ] {
        for header in [4, 8] {
            let mut list = [&vec![0; header][..], page].concat();
            list[header + at] ^= changed;
            let [flags, high, low] = expected;
            check(header, &list, [flags, high, low + u8::try_from(header).unwrap()]);
        }
    }
    let block = [0, 0, 8, 0, 0, 0, 2, 0];
    let long = [0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 2, 0];
    for (header, descriptor, at, expected) in [
        (vec![0, 0, 0, 7], &block[1..], 0, 3),
        (vec![0, 0, 0, 0, 0, 0, 0, 16], &long, 0, 6),
        (vec![0, 0, 0, 0, 1, 0, 0, 8], &block, 0, 6),
        (vec![0, 0, 0, 8], &block, 3, 4),
        (vec![0, 0, 0, 8], &block, 4, 8),
        (vec![0, 0, 0, 8], &block, 7, 9),
        (vec![0, 0, 0, 0, 0, 0, 0, 8], &block, 6, 13),
        (vec![0, 0, 0, 0, 1, 0, 0, 16], &long, 15, 20),
        (vec![0, 0, 0, 0, 1, 0, 0, 16], &long, 9, 17),
    ] {
        let mut list = [&header[..], descriptor].concat();
        list[header.len() + at] ^= 0x10;
        check(header.len(), &list, [0x80, 0, expected]);
    }
}

#[test]
fn mode_pages_that_are_not_there_are_pointed_to() {
    let mut initiator = Initiator::new();
    for (page, subpage, expected) in
        [(0x0a, 1, [0xc0, 0, 3]), (0x1d, 0xff, [0xc8 | 5, 0, 2]), (0x02, 0xff, [0xc8 | 5, 0, 2])]
    {
        let answer = initiator.run(&[0x1a, 0, page, subpage, 255, 0], &[], 255);
        assert_eq!((answer.sense, answer.specific), ([5, 0x24, 0], expected), "{page:x}");
    }
    for page in [0x08, 0x0a, 0x1c, 0x3f] {
        initiator.good(&[0x1a, 0, page, 0xff, 255, 0], &[], 255);
    }
}

#[test]
fn cdb_usage_data_have_only_supported_fields() {
    let mut initiator = Initiator::new();
    let mut usage = |opcode: u8| {
        initiator.good(&[0xa3, 0x0c, 1, opcode, 0, 0, 0, 0, 1, 0, 0, 0], &[], 256)[4..].to_vec()
    };
    assert_eq!(usage(0x1b), [0x1b, 1, 0, 0, 0x07, 0]);
    assert_eq!(usage(0x15), [0x15, 0x10, 0, 0, 0xff, 0]);
    assert_eq!(usage(0x55)[..2], [0x55, 0x10]);
    for (cdb, expected) in [
        ([0x1b, 0, 0, 0, 0x08, 0], [0xc8 | 3, 0, 4]),
        ([0x1b, 0, 0, 0, 0x11, 0], [0xc8 | 7, 0, 4]),
        ([0x15, 0x11, 0, 0, 0, 0], [0xc8, 0, 1]),
        ([0x15, 0, 0, 0, 0, 0], [0xc8 | 4, 0, 1]),
    ] {
        let answer = initiator.run(&cdb, &[], 0);
        assert_eq!((answer.sense, answer.specific), ([5, 0x24, 0], expected), "{cdb:x?}");
    }
}

#[test]
fn reading_the_list_of_luns_clears_its_attention() {
    let mut initiator = Initiator::new();
    let luns = |report, length| [0xa0, 0, report, 0, 0, 0, 0, 0, 0, length, 0, 0];
    let missing = UnitAddress { target: 0, lun: 7 }.bytes();
    for (lun, report, is_heard) in [
        (UNIT.bytes(), 0, true),
        (UNIT.bytes(), 2, true),
        (UNIT.bytes(), 1, false),
        (missing, 0, true),
        (WELL_KNOWN, 2, true),
        (WELL_KNOWN, 1, false),
    ] {
        initiator.unit().attentions.add(Sense::UNITS_CHANGED);
        let answer = initiator.run_at(lun, &luns(report, 64), &[], 64);
        assert_eq!((answer.response, answer.status), (0, 0));
        let expected = if is_heard { [0; 3] } else { [6, 0x3f, 0x0e] };
        assert_eq!(initiator.run(&[0; 6], &[], 0).sense, expected, "{lun:x?} {report}");
    }
    // A report about another target does not inform about these units.
    let elsewhere = UnitAddress { target: 1, ..UNIT };
    let (source, naa) = (DiskSource::null(1 << 20, &DiskOptions::default()).unwrap(), [0x31; 8]);
    let other = UnitOptions { naa, ..options() };
    Initiator::scsi(&initiator.device).add_unit(elsewhere, source, other).unwrap();
    initiator.scene.turn(10);
    let power_on = initiator.run_at(elsewhere.bytes(), &[0; 6], &[], 0);
    assert_eq!(power_on.sense, [6, 0x29, 0]);
    initiator.unit().attentions.add(Sense::UNITS_CHANGED);
    let answer = initiator.run_at(elsewhere.bytes(), &luns(0, 64), &[], 64);
    assert_eq!((answer.response, answer.status), (0, 0));
    assert_eq!(initiator.run(&[0; 6], &[], 0).sense, [6, 0x3f, 0x0e]);
    for length in [0, 4, 15] {
        let answer = initiator.run(&luns(0, length), &[], 64);
        assert_eq!((answer.response, answer.status), (0, 0), "{length}");
        assert_eq!(answer.residual, 64 - u32::from(length), "it is cut, as all data is");
    }
}

#[test]
fn an_unread_attention_is_kept() {
    let mut initiator = Initiator::new();
    let request = |length| [0x03, 0, 0, 0, length, 0];
    initiator.unit().attentions.add(Sense::CAPACITY_CHANGED);
    initiator.good(&request(0), &[], 0);
    assert_eq!(initiator.run(&request(18), &[], 17).response, 1);
    let answer = initiator.run(&request(0xfc), &[], 96);
    assert_eq!((answer.response, answer.status, answer.residual), (0, 0, 96 - 18));
    assert_eq!((answer.data[2], &answer.data[12..14]), (6, &[0x2a, 9][..]));
    assert_eq!(initiator.good(&request(18), &[], 18)[2], 0);
    for cdb in [[0xff; 6], [0x9e, 0x11, 0, 0, 0, 0]] {
        initiator.unit().attentions.add(Sense::CAPACITY_CHANGED);
        assert_eq!(initiator.sense(&cdb, &[], 0), [6, 0x2a, 9], "it comes before all else");
        assert_eq!(initiator.sense(&cdb, &[], 0)[0], 5);
    }
}

#[test]
fn the_well_known_unit_has_a_few_commands_and_its_port_as_a_name() {
    let mut initiator = Initiator::new();
    let mut run = |cdb: &[u8]| initiator.run_at(WELL_KNOWN, cdb, &[], 64);
    assert_eq!(run(&[0x12, 1, 0, 0, 64, 0]).data, [0x1e, 0, 0, 2, 0, 0x83]);
    let name = [0x1e, 0x83, 0, 8, 0x01, 0x14, 0, 4, 0, 0, 0, 1];
    assert_eq!(run(&[0x12, 1, 0x83, 0, 64, 0]).data, name);
    assert_eq!(run(&[0x12, 1, 0x80, 0, 64, 0]).sense, [5, 0x24, 0]);
    assert_eq!(run(&[0; 6]).status, 0);
    assert_eq!(run(&[0, 1, 0, 0, 0, 0]).sense, [5, 0x24, 0]);
    for cdb in [cdb10(0x28, 0xff, 0, 1), vec![0xa3, 0x1f, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]] {
        assert_eq!(run(&cdb).sense, [5, 0x20, 0], "{cdb:x?}");
    }
}

#[test]
fn commands_that_are_longer_than_their_buffer_are_refused() {
    let mut initiator = Initiator::new();
    // `cdb_size`, which follows `sense_size`.
    initiator.device.write_config(24, &6_u32.to_le_bytes()).unwrap();
    let mut run = |cdb: [u8; 6], room: u32| {
        let mut request = vec![0; 19 + 6];
        request[..8].copy_from_slice(&UNIT.bytes());
        request[19..].copy_from_slice(&cdb);
        initiator.scene.memory.write(DATA, &request).unwrap();
        let request = Desc::readable(DATA, 25);
        initiator.scene.offer(&[request, Desc::writable(RESPONSE, RESPONSE_BYTES + room)]);
        initiator.end()
    };
    assert_eq!(run([0x28, 0, 0, 0, 0, 0], 0).sense, [5, 0x20, 0]);
    assert_eq!(run([0x9e, 0x10, 0, 0, 0, 0], 0).sense, [5, 0x20, 0]);
    let answer = run([0x08, 0, 0, 0, 1, 0], 512);
    assert_eq!((answer.status, answer.data.len()), (0, 512));
}

#[test]
fn a_disk_without_a_block_has_a_capacity_even_so() {
    let mut initiator = Initiator::new();
    initiator.unit().source.cut_off(100);
    assert_eq!(initiator.good(&cdb10(0x25, 0, 0, 0), &[], 8), [0, 0, 0, 0, 0, 0, 2, 0]);
    assert_eq!(initiator.good(&cdb16(0x9e, 0x10, 0, 32), &[], 32)[..9], [0; 9]);
    for cdb in [cdb10(0x28, 0, 0, 1), cdb16(0x9e, 0x12, 0, 24)] {
        assert_eq!(initiator.sense(&cdb, &[], 512), [5, 0x21, 0], "{cdb:x?}");
    }
}

#[test]
fn a_log_page_has_one_form_and_starts_at_its_first_parameter() {
    let mut initiator = Initiator::new();
    for (byte, pointer) in [(2, 2), (3, 3), (5, 5), (6, 5)] {
        let mut cdb = vec![0x4d, 0, 0x40, 0, 0, 0, 0, 0, 255, 0];
        cdb[byte] |= 1;
        let answer = initiator.run(&cdb, &[], 255);
        assert_eq!((answer.status, answer.sense), (2, [5, 0x24, 0]), "byte {byte}");
        assert_eq!(answer.specific[1..], [0, pointer], "byte {byte}");
    }
}

/// Asking for sense data is no use of the medium.
#[test]
fn a_stopped_unit_says_so_when_it_is_asked() {
    let mut initiator = Initiator::new();
    for (start, expected) in [(0, [2, 4, 2]), (1, [0, 0, 0])] {
        initiator.good(&[0x1b, 0, 0, 0, start, 0], &[], 0);
        let data = initiator.good(&[0x03, 0, 0, 0, 18, 0], &[], 18);
        assert_eq!([data[2], data[12], data[13]], expected);
    }
}
