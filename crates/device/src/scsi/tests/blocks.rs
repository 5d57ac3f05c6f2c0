//! Commands that compare, fill or deallocate blocks.

use super::*;

#[test]
fn verify_compares_and_says_where_bytes_differ() {
    let mut initiator = Initiator::new();
    initiator.good(&cdb10(0x2a, 0, 0, 2), &[5; 1024], 0);
    initiator.good(&cdb10(0x2f, 0, 0, 2), &[], 0);
    initiator.good(&cdb10(0x2f, 2, 0, 2), &[5; 1024], 0);
    initiator.good(&cdb10(0x2f, 6, 0, 2), &[5; 512], 0);
    let mut other = [5; 1024];
    other[700] = 6;
    assert_eq!(initiator.sense(&cdb10(0x2f, 2, 0, 2), &other, 0), [0xe, 0x1d, 0]);
    assert_eq!(initiator.sense(&cdb10(0x2f, 6, 1, 2), &[5; 512], 0), [0xe, 0x1d, 0]);
    assert_eq!(initiator.sense(&cdb10(0x2f, 4, 0, 2), &[5; 512], 0), [5, 0x24, 0]);
    // A write has a block for each block of the medium.
    for bytes_to_check in [4, 6] {
        let write = cdb10(0x2e, bytes_to_check, 0, 1);
        assert_eq!(initiator.sense(&write, &[5; 512], 0), [5, 0x24, 0]);
    }
    initiator.good(&cdb10(0x2e, 2, 4, 1), &[9; 512], 0);
    assert_eq!(initiator.on_disk(4), [9; BLOCK]);
}

#[test]
fn write_same_and_unmap_change_their_ranges() {
    let mut initiator = Initiator::new();
    initiator.good(&cdb10(0x41, 0, 0, 5), &[3; 512], 0);
    assert_eq!((initiator.on_disk(4), initiator.on_disk(5)), (vec![3; 512], vec![0; 512]));
    initiator.good(&cdb16(0x93, 0x09, 1, 1), &[], 0);
    assert_eq!((initiator.on_disk(0), initiator.on_disk(1)), (vec![3; 512], vec![0; 512]));
    let mut list = vec![0, 22, 0, 16, 0, 0, 0, 0];
    list.extend(2_u64.to_be_bytes());
    list.extend([0, 0, 0, 1, 0, 0, 0, 0]);
    initiator.good(&cdb10(0x42, 0, 0, 24), &list, 0);
    list[8..16].copy_from_slice(&BLOCKS.to_be_bytes());
    assert_eq!(initiator.sense(&cdb10(0x42, 0, 0, 24), &list, 0), [5, 0x21, 0]);
    initiator.good(&cdb10(0x42, 0, 0, 0), &[], 0);
    assert_eq!(initiator.sense(&cdb10(0x42, 0, 0, 4), &[0; 4], 0), [5, 0x1a, 0]);
}

#[test]
fn only_as_much_of_an_unmap_list_counts_as_may_be_used() {
    let mut initiator = Initiator::new();
    let mut list = vec![0; 0xffff];
    let cdb = cdb10(0x42, 0, 0, 0xffff);
    for (descriptors, pointer) in [(0, None), (256, None), (257, Some(2_u16))] {
        list[2..4].copy_from_slice(&u16::to_be_bytes(descriptors * 16));
        let answer = initiator.run(&cdb, &list, 0);
        let Some(pointer) = pointer else {
            assert_eq!((answer.response, answer.status, answer.residual), (0, 0, 0));
            continue;
        };
        let [high, low] = pointer.to_be_bytes();
        assert_eq!((answer.sense, answer.specific), ([5, 0x26, 0], [0x80, high, low]));
    }
    assert_eq!(initiator.run(&cdb, &list[1..], 0).response, 1, "the list is shorter than said");
}

#[test]
fn compare_and_write_writes_only_after_a_match() {
    let mut initiator = Initiator::new();
    let cdb = |blocks: u8| {
        let mut cdb = cdb16(0x89, 0, 3, 0);
        cdb[13] = blocks;
        cdb
    };
    let pair = |expected: u8, wanted: u8| [[expected; BLOCK], [wanted; BLOCK]].concat();
    initiator.good(&cdb(1), &pair(0, 7), 0);
    assert_eq!(initiator.on_disk(3), [7; BLOCK]);
    let mut wrong = pair(7, 9);
    wrong[5] = 1;
    assert_eq!(initiator.sense(&cdb(1), &wrong, 0), [0xe, 0x1d, 0]);
    assert_eq!(initiator.on_disk(3), [7; BLOCK]);
    // After each of them, other commands may continue.
    initiator.good(&cdb10(0x28, 0, 3, 1), &[], 512);
    assert_eq!(initiator.sense(&cdb(129), &[0; 512], 0), [5, 0x24, 0]);
    assert_eq!(initiator.run(&cdb(1), &[0; 1023], 0).response, 1);
    initiator.good(&cdb(0), &[], 0);
}

#[test]
fn an_unmap_of_too_many_blocks_is_pointed_to_their_number() {
    let most = 1 << 20;
    let disk = NamedTempFile::new().unwrap();
    disk.as_file().set_len((most + 8) * BLOCK as u64).unwrap();
    let mut initiator = Initiator::on(Arc::new(disk), &DiskOptions::default(), options());
    let mut list = vec![0, 38, 0, 32, 0, 0, 0, 0];
    for (lba, blocks) in [(0_u64, 8_u32), (8, u32::try_from(most).unwrap())] {
        list.extend(lba.to_be_bytes());
        list.extend(blocks.to_be_bytes());
        list.extend([0; 4]);
    }
    let answer = initiator.run(&cdb10(0x42, 0, 0, 40), &list, 0);
    assert_eq!((answer.sense, answer.specific), ([5, 0x26, 0], [0x80, 0, 8 + 16 + 8]));
}

#[test]
fn a_block_that_is_to_be_written_over_and_over_is_there_whole() {
    let mut initiator = Initiator::new();
    for cdb in [cdb10(0x41, 0, 3, 1), cdb16(0x93, 0, 3, 1), cdb10(0x41, 8, 3, 1)] {
        for bytes in [0, 1, BLOCK - 1] {
            let answer = initiator.run(&cdb, &vec![9; bytes], 0);
            assert_eq!((answer.response, answer.residual as usize), (1, bytes), "{cdb:x?}");
        }
        assert_eq!(initiator.sense(&cdb, &[9; BLOCK + 1], 0), [5, 0x24, 0], "{cdb:x?}");
    }
    assert_eq!(initiator.on_disk(3), [0; BLOCK]);
}

#[test]
fn all_blocks_from_one_on_are_at_least_that_one() {
    let mut initiator = Initiator::new();
    let end = u32::try_from(BLOCKS).unwrap();
    for (lba, expected) in [(end - 1, [0; 3]), (end, [5, 0x21, 0])] {
        let long = u64::from(lba);
        for cdb in [cdb10(0x41, 0, lba, 0), cdb16(0x93, 0, long, 0), cdb16(0x93, 8, long, 0)] {
            assert_eq!(initiator.run(&cdb, &[3; BLOCK], 0).sense, expected, "{cdb:x?}");
        }
        for cdb in [cdb10(0x35, 0, lba, 0), cdb16(0x91, 0, long, 0)] {
            assert_eq!(initiator.run(&cdb, &[], 0).sense, expected, "{cdb:x?}");
        }
    }
}

#[test]
fn verified_data_are_on_the_medium_first() {
    let flushes = |initiator: &Initiator| initiator.scene.thread.io().stats().flush.ops.get();
    let mut initiator = Initiator::new();
    for (cdb, out, expected) in [
        (cdb10(0x2f, 0, 0, 0), 0, 0),
        (cdb10(0x2f, 0, 0, 2), 0, 1),
        (cdb16(0x8f, 2, 0, 2), 2 * BLOCK, 2),
        (cdb10(0x2f, 6, 0, 2), BLOCK, 3),
    ] {
        initiator.good(&cdb, &vec![0; out], 0);
        assert_eq!(flushes(&initiator), expected, "{cdb:x?}");
    }
    let end = u32::try_from(BLOCKS).unwrap();
    assert_eq!(initiator.sense(&cdb10(0x2f, 0, end, 1), &[], 0), [5, 0x21, 0]);
    assert_eq!(flushes(&initiator), 3);
    let read_only = DiskOptions { read_only: true, ..DiskOptions::default() };
    let mut initiator = Initiator::with(&read_only);
    initiator.good(&cdb10(0x2f, 0, 0, 2), &[], 0);
    assert_eq!(flushes(&initiator), 0, "nothing is in a cache");
}

#[test]
fn blocks_of_each_size_are_written_over_and_over() {
    for block in [512_u32, 4096, 8192] {
        let disk_options =
            DiskOptions { logical_block_bytes: Some(block), ..DiskOptions::default() };
        let mut initiator = Initiator::with(&disk_options);
        let block: usize = block.try_into().unwrap();
        let pattern: Vec<u8> = (0..block).map(|at| u8::try_from(at % 251).unwrap()).collect();
        initiator.good(&cdb10(0x41, 0, 1, 3), &pattern, 0);
        let zeroes = vec![0; block];
        let expected = [&zeroes, &pattern, &pattern, &pattern, &zeroes].map(|part| &part[..]);
        let seen = std::fs::read(initiator.disk.path()).unwrap();
        assert!(seen[..5 * block] == expected.concat(), "{block}");
        // A difference in the last byte alone is not zero.
        let mut last = zeroes.clone();
        last[block - 1] = 1;
        initiator.good(&cdb10(0x41, 0, 2, 1), &last, 0);
        let seen = std::fs::read(initiator.disk.path()).unwrap();
        assert!(seen[2 * block..3 * block] == last);
        initiator.good(&cdb10(0x41, 0, 2, 1), &zeroes, 0);
        let seen = std::fs::read(initiator.disk.path()).unwrap();
        assert!(seen[2 * block..3 * block] == zeroes);
    }
}
