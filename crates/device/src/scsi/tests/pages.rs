//! Every field of the data by which a unit describes itself, with logical blocks of each size.

use std::os::unix::fs::FileExt;

use super::*;

const UNMAP_BLOCKS_MAX: u32 = 1 << 20;
const WRITE_SAME_BYTES_MAX: u64 = 32 << 20;

/// Joins successive fields.
fn fields(parts: &[&[u8]]) -> Vec<u8> {
    parts.concat()
}

fn unit_of_blocks(logical: u32) -> Initiator {
    Initiator::with(&DiskOptions { logical_block_bytes: Some(logical), ..DiskOptions::default() })
}

/// Logical blocks of a physical one: 8 or so for small blocks, 1 for large ones.
fn blocks_of_physical(unit: &Initiator, logical: u32) -> u32 {
    unit.unit().source.info().physical_block_bytes / logical
}

/// File systems allocate less than such a block at a time.
#[test]
fn a_block_is_deallocated_if_all_of_it_is() {
    const LOGICAL: u64 = 1 << 16;
    let mut initiator = unit_of_blocks(1 << 16);
    initiator.disk.as_file().write_all_at(&[1; 4096], 2 * LOGICAL + 8192).unwrap();
    let last = BLOCKS * BLOCK as u64 / LOGICAL - 1;
    for (lba, count, state) in [(0, 2, 1), (1, 1, 1), (2, 1, 0), (3, last - 2, 1), (last, 1, 1)] {
        let status = initiator.good(&cdb16(0x9e, 0x12, lba, 24), &[], 24);
        assert_eq!(status[8..16], lba.to_be_bytes());
        let count = u32::try_from(count).unwrap();
        assert_eq!((&status[16..20], status[20]), (&count.to_be_bytes()[..], state), "{lba}");
    }
    let beyond = cdb16(0x9e, 0x12, last + 1, 24);
    assert_eq!(initiator.sense(&beyond, &[], 24), [5, 0x21, 0]);
}

/// A disk of this many blocks of 512 bytes, all of them holes.
fn unit_of(blocks: u64) -> Initiator {
    let disk = NamedTempFile::new().unwrap();
    disk.as_file().set_len(blocks * BLOCK as u64).unwrap();
    Initiator::on(Arc::new(disk), &DiskOptions::default(), options())
}

fn page(initiator: &mut Initiator, code: u8) -> Vec<u8> {
    initiator.good(&[0x12, 1, code, 0, 255, 0], &[], 255)
}

#[test]
fn the_capacity_has_each_field_for_blocks_of_each_size() {
    let bytes = BLOCKS * BLOCK as u64;
    for logical in [512, 4096, 8192] {
        let mut unit = unit_of_blocks(logical);
        let exponent = blocks_of_physical(&unit, logical).ilog2();
        let exponent = u8::try_from(exponent).unwrap();
        let last = bytes / u64::from(logical) - 1;
        let short = u32::try_from(last).unwrap().to_be_bytes();
        let expected = fields(&[&short, &logical.to_be_bytes()]);
        assert_eq!(unit.good(&cdb10(0x25, 0, 0, 0), &[], 8), expected, "{logical}");
        let protection_and_rest = [0, exponent, 0x80, 0];
        let expected =
            fields(&[&last.to_be_bytes(), &logical.to_be_bytes(), &protection_and_rest, &[0; 16]]);
        let answer = unit.good(&cdb16(0x9e, 0x10, 0, 32), &[], 32);
        assert_eq!(answer, expected, "{logical}");
    }
}

/// Guests ask READ CAPACITY (16) only if the short one has its highest value.
#[test]
fn a_disk_that_is_too_large_for_four_bytes_says_so() {
    const LIMIT: u64 = 1 << 32;
    for (blocks, short_last, short_count) in [
        (LIMIT - 1, u32::MAX - 1, u32::MAX),
        (LIMIT, u32::MAX, u32::MAX),
        (LIMIT + 1, u32::MAX, u32::MAX),
        (2 * LIMIT, u32::MAX, u32::MAX),
    ] {
        let mut unit = unit_of(blocks);
        let capacity = unit.good(&cdb10(0x25, 0, 0, 0), &[], 8);
        assert_eq!(capacity, fields(&[&short_last.to_be_bytes(), &[0, 0, 2, 0]]), "{blocks}");
        let capacity = unit.good(&cdb16(0x9e, 0x10, 0, 32), &[], 32);
        assert_eq!(capacity[..8], (blocks - 1).to_be_bytes());
        let sense = unit.good(&[0x1a, 0, 0x0a, 0, 255, 0], &[], 255);
        assert_eq!(sense[4..12], fields(&[&short_count.to_be_bytes(), &[0, 0, 2, 0]]));
        let long = unit.good(&[0x5a, 0x10, 0x0a, 0, 0, 0, 0, 0, 255, 0], &[], 255);
        assert_eq!(long[8..24], fields(&[&blocks.to_be_bytes(), &[0, 0, 0, 0, 0, 0, 2, 0]]));
    }
}

#[test]
fn the_limits_have_each_field_for_blocks_of_each_size() {
    for logical in [512_u32, 4096, 8192] {
        let mut unit = unit_of_blocks(logical);
        let source = unit.unit().source.clone();
        let optimal = source.optimal_bytes().unwrap_or(0) / logical;
        let unmap_unit = source.discard_bytes().unwrap_or(logical) / logical;
        let granularity = u16::try_from(blocks_of_physical(&unit, logical)).unwrap();
        let write_same = WRITE_SAME_BYTES_MAX / u64::from(logical);
        let expected = fields(&[
            &[0, 0xb0, 0, 60],
            // WSNZ, and the most blocks of COMPARE AND WRITE.
            &[0, 128],
            &granularity.to_be_bytes(),
            // A transfer has no limit.
            &[0; 4],
            &optimal.to_be_bytes(),
            // Prefetches.
            &[0; 4],
            &UNMAP_BLOCKS_MAX.to_be_bytes(),
            &256_u32.to_be_bytes(),
            &unmap_unit.to_be_bytes(),
            // Their alignment.
            &[0; 4],
            &write_same.to_be_bytes(),
            &[0; 20],
        ]);
        assert_eq!(page(&mut unit, 0xb0), expected, "{logical}");
        assert!(unmap_unit > 0, "a unit of nothing");
    }
}

/// A long block descriptor is announced only if there is one.
#[test]
fn a_mode_header_tells_of_the_block_descriptor_behind_it() {
    let mut unit = Initiator::new();
    for (bits, is_long, bytes) in [(0, 0, 8), (0x08, 0, 0), (0x10, 1, 16), (0x18, 0, 0)] {
        let answer = unit.good(&[0x5a, bits, 0x08, 0, 0, 0, 0, 0, 255, 0], &[], 255);
        assert_eq!((answer[4], &answer[6..8]), (is_long, &[0, bytes][..]), "{bits:#x}");
        assert_eq!(answer.len(), 8 + usize::from(bytes) + 20, "{bits:#x}");
    }
}

#[test]
fn pages_of_a_unit_have_each_field() {
    for is_rotational in [false, true] {
        let disk = NamedTempFile::new().unwrap();
        disk.as_file().set_len(BLOCKS * BLOCK as u64).unwrap();
        let options = UnitOptions { rotational: is_rotational, ..options() };
        let mut unit = Initiator::on(Arc::new(disk), &DiskOptions::default(), options);
        let pages = page(&mut unit, 0);
        assert_eq!(pages[..4], [0, 0, 0, u8::try_from(pages.len() - 4).unwrap()]);
        for code in [0, 0x80, 0x83, 0xb0, 0xb1, 0xb2] {
            assert!(pages[4..].contains(&code), "{code:x} is not named");
        }
        assert!(pages[4..].is_sorted());
        assert_eq!(page(&mut unit, 0x80), fields(&[&[0, 0x80, 0, 6], b"serial"]));
        let names = page(&mut unit, 0x83);
        let naa = fields(&[&[0x01, 0x03, 0, 8], &[0x30, 1, 2, 3, 4, 5, 6, 7]]);
        assert_eq!(names[4..16], naa, "the first name");
        let vendor = fields(&[&[0x02, 0x01, 0, 14], b"Vendor  serial"]);
        assert!(names.windows(vendor.len()).any(|name| name == vendor), "{names:x?}");
        let rate = if is_rotational { [0, 0] } else { [0, 1] };
        assert_eq!(page(&mut unit, 0xb1), fields(&[&[0, 0xb1, 0, 60], &rate, &[0; 58]]));
        assert_eq!(page(&mut unit, 0xb2), [0, 0xb2, 0, 4, 0, 0xe0, 2, 0]);
    }
}

#[test]
fn the_standard_data_have_each_field() {
    let mut unit = Initiator::new();
    let versions = [0x00, 0xa0, 0x04, 0x60, 0x04, 0xc0];
    let expected = fields(&[
        // A disk, not removable, of SPC-4, with hierarchical LUNs; commands are queued.
        &[0, 0, 6, 0x12, 69, 0, 0, 2],
        b"Vendor  Product         1.0 ",
        &[0; 22],
        &versions,
        &[0; 10],
    ]);
    assert_eq!(unit.good(&[0x12, 0, 0, 0, 255, 0], &[], 255), expected);
}

#[test]
fn mode_pages_have_each_field_for_blocks_of_each_size() {
    let control = |d_sense, rest: [u8; 9]| fields(&[&[0x0a, 10, d_sense], &rest]);
    for (logical, has_cache, read_only) in
        [(512_u32, true, false), (4096, true, false), (512, false, false), (4096, true, true)]
    {
        let disk = NamedTempFile::new().unwrap();
        disk.as_file().set_len(BLOCKS * BLOCK as u64).unwrap();
        let disk_options =
            DiskOptions { logical_block_bytes: Some(logical), read_only, ..DiskOptions::default() };
        let options = UnitOptions { write_cache: has_cache, ..options() };
        let mut unit = Initiator::on(Arc::new(disk), &disk_options, options);
        let wce = if has_cache { 4 } else { 0 };
        let caching = fields(&[&[0x08, 18, wce], &[0; 17]]);
        let exceptions = fields(&[&[0x1c, 10], &[0; 10]]);
        // WP, and DPO with FUA.
        let specific = if read_only { 0x90 } else { 0x10 };
        let fixed = [0x10, 0, 0, 0, 0, 0xff, 0xff, 0, 0];
        for (values, d_sense, rest) in [(0, 0, fixed), (0x40, 4, [0; 9]), (0x80, 0, fixed)] {
            let pages = fields(&[&caching, &control(d_sense, rest), &exceptions]);
            let blocks = u32::try_from(BLOCKS * BLOCK as u64 / u64::from(logical)).unwrap();
            let descriptor = fields(&[&blocks.to_be_bytes(), &logical.to_be_bytes()]);
            let length = u8::try_from(3 + 8 + pages.len()).unwrap();
            let expected = fields(&[&[length, 0, specific, 8], &descriptor, &pages]);
            let answer = unit.good(&[0x1a, 0, values | 0x3f, 0, 255, 0], &[], 255);
            assert_eq!(answer, expected, "{logical} {values:x}");
            // Without a descriptor, in the long form.
            let length = u8::try_from(6 + pages.len()).unwrap();
            let expected = fields(&[&[0, length, 0, specific, 0, 0, 0, 0], &pages]);
            let answer = unit.good(&[0x5a, 8, values | 0x3f, 0, 0, 0, 0, 0, 255, 0], &[], 255);
            assert_eq!(answer, expected, "{logical} {values:x}");
        }
        // With a descriptor of a long number of blocks.
        let long = unit.good(&[0x5a, 0x10, 0x08, 0, 0, 0, 0, 0, 255, 0], &[], 255);
        let blocks = BLOCKS * BLOCK as u64 / u64::from(logical);
        let descriptor = fields(&[&blocks.to_be_bytes(), &[0; 4], &logical.to_be_bytes()]);
        let header = [0, 6 + 16 + 20, 0, specific, 1, 0, 0, 16];
        assert_eq!(long, fields(&[&header, &descriptor, &caching]));
    }
}

/// Values that MODE SELECT has changed are no defaults.
#[test]
fn defaults_of_mode_pages_stay_when_current_values_change() {
    let mut unit = Initiator::new();
    let sense = |unit: &mut Initiator, values: u8| {
        let answer = unit.good(&[0x1a, 8, values | 0x3f, 0, 255, 0], &[], 255);
        // WCE and D_SENSE, of the first and the second page.
        (answer[4 + 2] & 4 != 0, answer[4 + 20 + 2] & 4 != 0)
    };
    let changes = [([0x08, 18, 0], 20, (false, false)), ([0x0a, 10, 4], 12, (false, true))];
    for (start, bytes, expected) in changes {
        let mut list = vec![0; 4];
        list.extend(start);
        list.resize(4 + bytes, 0);
        if start[0] == 0x0a {
            // Fields that cannot be changed.
            list[4..][3..10].copy_from_slice(&[0x10, 0, 0, 0, 0, 0xff, 0xff]);
        }
        let length = u8::try_from(list.len()).unwrap();
        unit.good(&[0x15, 0x10, 0, 0, length, 0], &list, 0);
        assert_eq!(sense(&mut unit, 0), expected, "the current values");
        assert_eq!(sense(&mut unit, 0x40), (true, true), "the changeable bits");
        assert_eq!(sense(&mut unit, 0x80), (true, false), "the defaults");
    }
}

/// Programs that change a page send the rest as they found it, or say that it stays.
#[test]
fn a_block_descriptor_may_leave_the_number_of_blocks_as_it_is() {
    let mut unit = Initiator::new();
    let [short, long] = [0x00_u8, 0x10].map(|bits| {
        let cdb = [0x5a, bits, 0x08, 0, 0, 0, 0, 0, 255, 0];
        unit.good(&cdb, &[], 255)
    });
    for (mut list, count, length_at) in [(short, 4, 5), (long, 8, 12)] {
        list[..2].fill(0);
        list[3] = 0;
        let select = [0x55, 0x10, 0, 0, 0, 0, 0, 0, u8::try_from(list.len()).unwrap(), 0];
        unit.good(&select, &list, 0);
        let blocks = list[8..8 + count].to_vec();
        for byte in [0, 0xff] {
            list[8..8 + count].fill(byte);
            unit.good(&select, &list, 0);
        }
        for (at, byte, names) in [(0, 1, 0), (count - 1, 1, 0), (length_at, 1, length_at)] {
            list[8..8 + count].copy_from_slice(&blocks);
            list[8 + at] ^= byte;
            let answer = unit.run(&select, &list, 0);
            let place = u8::try_from(8 + names).unwrap();
            assert_eq!((answer.sense, answer.specific), ([5, 0x26, 0], [0x80, 0, place]), "{at}");
            list[8 + at] ^= byte;
        }
    }
}

/// A stop writes the cache of the unit back, unless the initiator asks for the opposite (SBC-4,
/// section 5.31).
#[test]
fn a_unit_that_stops_is_flushed_unless_that_is_not_wanted() {
    const NO_FLUSH: u8 = 4;
    const START: u8 = 1;
    for (bits, expected) in [(0, 1), (NO_FLUSH, 0), (START, 0), (START | NO_FLUSH, 0)] {
        let mut unit = Initiator::new();
        let flushes = |unit: &Initiator| unit.scene.thread.io().stats().flush.ops.get();
        unit.good(&cdb10(0x2a, 0, 0, 1), &[7; BLOCK], 0);
        let before = flushes(&unit);
        unit.good(&[0x1b, 0, 0, 0, bits, 0], &[], 0);
        assert_eq!(flushes(&unit) - before, expected, "{bits}");
    }
}

/// INFORMATION is the offset of the first byte that differs, at any place.
#[test]
fn a_miscompare_names_the_first_byte_that_differs() {
    const LARGE: usize = 700 * BLOCK;
    const FAR: u64 = DATA + 0x4_0000;
    let mut unit = Initiator::new();
    unit.good(&cdb10(0x2a, 0, 0, 2), &[5; 2 * BLOCK], 0);
    let mut compare = cdb16(0x89, 0, 0, 0);
    compare[13] = 2;
    for at in [0, 511, 512, 700, 1023] {
        let mut pair = vec![5; 4 * BLOCK];
        pair[at] = 6;
        assert_eq!(unit.sense(&compare, &pair, 0), [0xe, 0x1d, 0], "{at}");
        let information = fields(&[&[0xf0, 0, 0xe], &u32::try_from(at).unwrap().to_be_bytes()]);
        assert_eq!(unit.raw_sense()[..7], information, "COMPARE AND WRITE, {at}");
        assert_eq!(unit.sense(&cdb10(0x2f, 2, 0, 2), &pair[..2 * BLOCK], 0), [0xe, 0x1d, 0]);
        assert_eq!(unit.raw_sense()[..7], information, "VERIFY, {at}");
    }
    // More data than is compared at once.
    let mut compare = |at: Option<usize>| {
        let mut other = vec![0; LARGE];
        if let Some(at) = at {
            other[at] = 1;
        }
        unit.put(UNIT.bytes(), &cdb10(0x2f, 2, 100, 700), &[], 0);
        unit.scene.memory.write(FAR, &other).unwrap();
        unit.scene.offer(&[
            Desc::readable(DATA, u32::try_from(REQUEST_BYTES).unwrap()),
            Desc::readable(FAR, u32::try_from(LARGE).unwrap()),
            Desc::writable(RESPONSE, RESPONSE_BYTES),
        ]);
        (unit.end().sense, unit.raw_sense())
    };
    assert_eq!(compare(None).0, [0; 3]);
    for at in [1, 300_000, LARGE - 1] {
        let (sense, raw) = compare(Some(at));
        assert_eq!(sense, [0xe, 0x1d, 0], "{at}");
        assert_eq!(raw[3..7], u32::try_from(at).unwrap().to_be_bytes(), "{at}");
    }
}
