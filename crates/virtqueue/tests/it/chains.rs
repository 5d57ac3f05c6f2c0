//! Chains: every layout that the specification allows, and every fault and error.

use std::sync::Arc;

use virtqueue::{
    AnswerPlace, Chain, ChainFault, DeviceQueue, GuestMemory, MAX_INDIRECT_ENTRIES, QueueError,
    SplitQueue, Virtqueue,
};

use crate::ring::{
    BORDER, DESC_TABLE, F_INDIRECT, F_NEXT, F_WRITE, HOLE, Hand, ISLAND, ISLAND_BYTES, Ring,
    contents, new_ring, pop, write_desc,
};

const TABLE: u64 = 0x1_0000;

fn chain_of(buffers: &[(u64, u32, u16)]) -> (Ring, Chain) {
    let mut ring = new_ring(16, false);
    for offset in 0..64_u8 {
        ring.memory.write(ISLAND + u64::from(offset), &[offset]).expect("mapped");
    }
    ring.chain(3, buffers);
    let chain = pop(&mut ring.queue());
    assert_eq!(chain.head, 3);
    (ring, chain)
}

fn error_of(prepare: impl FnOnce(&mut Ring)) -> QueueError {
    let mut ring = new_ring(16, false);
    prepare(&mut ring);
    ring.queue().pop().expect_err("the ring is bad")
}

/// Checks that a bad request has at most a status byte, and returns the address of that byte.
fn status_of(ring: &Ring, mut chain: Chain) -> Option<u64> {
    assert!(chain.readable.is_empty() && chain.readable.iovecs().is_empty());
    assert!(chain.writable.bytes() <= 1);
    let status = chain.writable.take_last_byte()?;
    assert!(chain.writable.is_empty() && chain.writable.take_last_byte().is_none());
    // Find the byte by the change in memory when it is written.
    let ranges = [(0, HOLE), (ISLAND, ISLAND_BYTES)];
    let snapshot = || {
        ranges.map(|(start, len)| {
            let mut bytes = vec![0; usize::try_from(len).expect("64 bits")];
            ring.memory.read(start, &mut bytes).expect("mapped");
            bytes
        })
    };
    status.write(0x11);
    let before = snapshot();
    status.write(0x22);
    let after = snapshot();
    let changed: Vec<u64> = ranges
        .iter()
        .zip(before.iter().zip(&after))
        .flat_map(|((start, _), (before, after))| {
            (*start..).zip(before.iter().zip(after)).filter(|(_, (a, b))| a != b).map(|(at, _)| at)
        })
        .collect();
    let [at] = changed[..] else { panic!("one byte is written, not {changed:?}") };
    Some(at)
}

#[test]
fn a_chain_has_readable_and_then_writable_buffers() {
    let (_, chain) = chain_of(&[
        (ISLAND, 4, 0),
        (ISLAND + 8, 4, 0),
        (ISLAND + 16, 2, F_WRITE),
        (ISLAND + 32, 1, F_WRITE),
    ]);
    assert_eq!(chain.fault, None);
    assert_eq!(contents(&chain.readable), [0, 1, 2, 3, 8, 9, 10, 11]);
    assert_eq!(contents(&chain.writable), [16, 17, 32]);
    assert_eq!(chain.readable.iovecs().len(), 2);
}

#[test]
fn a_header_may_be_split_and_may_share_a_descriptor_with_data() {
    let (_, mut chain) =
        chain_of(&[(ISLAND, 3, 0), (ISLAND + 3, 1, 0), (ISLAND + 4, 20, 0), (ISLAND + 30, 2, 0)]);
    let mut header = [0; 16];
    assert_eq!(chain.readable.copy_to(0, &mut header), 16);
    assert_eq!(header, std::array::from_fn::<u8, 16, _>(|i| u8::try_from(i).unwrap()));
    chain.readable.advance(16);
    assert_eq!(contents(&chain.readable), [16, 17, 18, 19, 20, 21, 22, 23, 30, 31]);
    assert_eq!(chain.readable.copy_to(7, &mut header), 3, "short at the end");
    assert_eq!(&header[..3], [23, 30, 31]);
    assert_eq!(chain.readable.copy_to(10, &mut header), 0);
    assert_eq!(chain.readable.copy_to(usize::MAX, &mut header), 0);
    chain.readable.advance(8);
    assert_eq!(contents(&chain.readable), [30, 31]);
    chain.readable.advance(0);
    assert_eq!(chain.readable.bytes(), 2);
    assert_eq!((chain.readable.ranges(), chain.readable.iovecs().len()), (4, 1));
    let (_, mut chain) = chain_of(&[(ISLAND, 3, 0), (ISLAND, 3, 0)]);
    chain.readable.advance(usize::MAX);
    assert!(contents(&chain.readable).is_empty() && chain.readable.iovecs().is_empty());
    chain.readable.advance(1);
    assert!(chain.readable.take_last_byte().is_none());
}

#[test]
fn the_last_byte_is_taken_from_any_descriptor() {
    let (ring, mut chain) = chain_of(&[(ISLAND, 4, F_WRITE), (ISLAND + 8, 2, F_WRITE)]);
    for (left, at) in [(5, 9_u64), (4, 8), (3, 3), (2, 2), (1, 1), (0, 0)] {
        let byte = chain.writable.take_last_byte().expect("bytes are left");
        assert_eq!(chain.writable.bytes(), left);
        assert_eq!(contents(&chain.writable).len(), left);
        byte.write(0xaa);
        let mut written = [0];
        ring.memory.read(ISLAND + at, &mut written).unwrap();
        assert_eq!(written, [0xaa]);
    }
    assert!(chain.writable.take_last_byte().is_none());
}

#[test]
fn segments_are_written_across_descriptors() {
    let (ring, chain) = chain_of(&[(ISLAND, 4, F_WRITE), (ISLAND + 8, 4, F_WRITE)]);
    assert_eq!(chain.writable.copy_from(2, b"abcd"), 4);
    assert_eq!(chain.writable.copy_from(6, b"efgh"), 2, "short at the end");
    assert_eq!(chain.writable.copy_from(8, b"x"), 0);
    let mut bytes = [0; 13];
    ring.memory.read(ISLAND, &mut bytes).unwrap();
    assert_eq!(&bytes, b"\x00\x01ab\x04\x05\x06\x07cdef\x0c");
}

#[test]
fn a_buffer_that_crosses_regions_becomes_two_ranges() {
    let mut ring = new_ring(16, false);
    ring.memory.write(BORDER - 4, b"lefTRight").unwrap();
    ring.chain(0, &[(BORDER - 4, 9, 0), (BORDER - 1, 1, 0), (BORDER, 1, F_WRITE)]);
    let chain = pop(&mut ring.queue());
    assert_eq!(chain.fault, None);
    assert_eq!(contents(&chain.readable), b"lefTRightT");
    let lengths: Vec<usize> = chain.readable.iovecs().iter().map(|iovec| iovec.iov_len).collect();
    assert_eq!(lengths, [4, 5, 1]);
    assert_eq!(contents(&chain.writable), b"R");
}

#[test]
fn a_buffer_may_cross_all_regions_that_there_are() {
    let page = 0x1000;
    let ranges: Vec<(u64, u64)> = (0..509).map(|i| (i * page, page)).collect();
    let mut ring = new_ring(16, false);
    ring.memory = Arc::new(GuestMemory::anonymous(&ranges).unwrap());
    (ring.config.desc_table, ring.config.avail_ring, ring.config.used_ring) = (0, page, 2 * page);
    let (start, end) = (3 * page + 5, 509 * page);
    ring.memory.write(end - 3, b"end").unwrap();
    let len = u32::try_from(end - start).unwrap();
    ring.chain(0, &[(start, len, F_WRITE)]);
    ring.chain(1, &[(start, len + 1, F_WRITE)]);
    let mut queue = ring.queue();
    let chain = pop(&mut queue);
    assert_eq!((chain.fault, chain.writable.iovecs().len()), (None, 506));
    assert!(contents(&chain.writable).ends_with(b"end"));
    let chain = pop(&mut queue);
    assert_eq!(chain.fault, Some(ChainFault::Unmapped { addr: start, len: len + 1 }));

    // Too many pieces are a fault of the request: its list must not grow without bound.
    for index in 0..9 {
        ring.desc(index, (start, len, F_WRITE | F_NEXT, index + 1));
    }
    ring.desc(9, (start + 1, 7, F_WRITE, 0));
    ring.offer(0);
    let mut chain = pop(&mut queue);
    assert!(matches!(chain.fault, Some(ChainFault::TooManyPieces { .. })), "{:?}", chain.fault);
    chain.writable.take_last_byte().expect("the status byte is mapped").write(0x77);
    let mut status = [0];
    ring.memory.read(start + 7, &mut status).unwrap();
    assert_eq!(status, [0x77]);
}

#[test]
fn empty_descriptors_count_but_have_no_range() {
    let (_, chain) = chain_of(&[
        (HOLE, 0, 0),
        (ISLAND, 2, 0),
        (0, 0, 0),
        (u64::MAX, 0, F_WRITE),
        (ISLAND + 4, 1, F_WRITE),
        (HOLE, 0, F_WRITE),
    ]);
    assert_eq!(chain.fault, None);
    assert_eq!(contents(&chain.readable), [0, 1]);
    assert_eq!(contents(&chain.writable), [4]);

    let (_, chain) = chain_of(&[(HOLE, 0, 0)]);
    assert!(chain.fault.is_none() && chain.readable.is_empty() && chain.writable.is_empty());

    let error = error_of(|ring| {
        ring.desc(0, (0, 0, F_NEXT, 0));
        ring.offer(0);
    });
    assert_eq!(error, QueueError::Loop { head: 0, entries: 16 });
}

#[test]
fn a_chain_may_use_the_whole_table() {
    let (_, chain) = {
        let mut ring = new_ring(16, false);
        ring.chain(0, &[(ISLAND, 1, 0); 16]);
        let chain = pop(&mut ring.queue());
        (ring, chain)
    };
    assert_eq!(chain.readable.bytes(), 16);
}

#[test]
fn indirect_tables_may_follow_descriptors_and_be_longer_than_the_queue() {
    let mut ring = new_ring(16, false);
    ring.memory.write(ISLAND, b"header+body").unwrap();
    // An odd address is allowed: the specification requires no alignment.
    for (table, entries) in [(TABLE, 3), (TABLE + 1, 3), (TABLE, MAX_INDIRECT_ENTRIES)] {
        let mut buffers = vec![(ISLAND + 7, 1, 0); usize::from(entries)];
        buffers[0] = (ISLAND + 6, 1, 0);
        ring.table(table, 0, &buffers);
        ring.desc(5, (ISLAND, 6, F_NEXT, 7));
        // The direction of an indirect descriptor has no meaning.
        ring.desc(7, (table, u32::from(entries) * 16, F_INDIRECT | F_WRITE, 0xffff));
        ring.offer(5);
        let mut queue = ring.queue();
        let chain = pop(&mut queue);
        assert_eq!(chain.fault, None);
        let bytes = contents(&chain.readable);
        assert_eq!(bytes.len(), 6 + usize::from(entries));
        assert!(bytes.starts_with(b"header+bb"));
        ring.config.next_avail = queue.next_avail();
    }
}

/// A popped chain is looked at again, in the queue's table or in one of its own.
#[test]
fn the_header_of_a_popped_chain_is_read_again() {
    let mut ring = new_ring(16, false);
    ring.memory.write(ISLAND, b"header+body").unwrap();
    ring.desc(5, (ISLAND, 11, 0, 0));
    ring.offer(5);
    ring.table(TABLE, 0, &[(ISLAND + 1, 7, 0), (ISLAND, 4, 0)]);
    ring.desc(6, (TABLE, 32, F_INDIRECT, 0));
    ring.offer(6);
    ring.desc(7, (HOLE, 11, 0, 0));
    let mut queue = ring.queue();
    assert_eq!((pop(&mut queue).head, pop(&mut queue).head), (5, 6));
    assert_eq!(queue.header(5), Some(*b"header+"));
    assert_eq!(queue.header(6), Some(*b"eader+b"));
    assert_eq!(queue.header::<8>(6), None, "its first buffer is shorter");
    assert_eq!(queue.header::<7>(7), None, "the driver has changed it");
    // A second look pops nothing.
    assert_eq!((queue.in_device(), queue.next_avail()), (2, 2));
}

#[test]
fn an_indirect_table_may_cross_regions() {
    let mut ring = new_ring(16, false);
    ring.memory.write(ISLAND, b"abcd").unwrap();
    let mut queue = ring.queue();
    for table in [BORDER - 16, BORDER - 24, BORDER - 1, BORDER - 47] {
        let buffers = [(ISLAND, 1, 0), (ISLAND + 1, 1, 0), (ISLAND + 2, 2, F_WRITE)];
        ring.table(table, 0, &buffers);
        ring.desc(0, (table, 48, F_INDIRECT, 0));
        ring.offer(0);
        let chain = pop(&mut queue);
        assert_eq!(chain.fault, None);
        assert_eq!(contents(&chain.readable), b"ab");
        assert_eq!(contents(&chain.writable), b"cd");
    }
}

#[test]
fn bad_links_are_errors_of_the_ring() {
    let entries = 16;
    for head in [16, 17, 0xffff] {
        let error = error_of(|ring| ring.offer(head));
        assert_eq!(error, QueueError::HeadOutOfRange { head, entries });
    }
    for next in [16, 0xffff] {
        let error = error_of(|ring| {
            ring.desc(2, (ISLAND, 1, F_NEXT, next));
            ring.offer(2);
        });
        assert_eq!(error, QueueError::NextOutOfRange { head: 2, next, entries });
    }
    for back in 0..3 {
        let error = error_of(|ring| {
            ring.table(DESC_TABLE, 0, &[(ISLAND, 1, 0); 3]);
            ring.desc(2, (ISLAND, 1, F_NEXT, back));
            ring.offer(0);
        });
        assert_eq!(error, QueueError::Loop { head: 0, entries });
    }
}

#[test]
fn bad_indirect_descriptors_are_errors_of_the_ring() {
    let head = 4;
    let indirect = |addr, len, flags| {
        error_of(|ring| {
            ring.table(TABLE, 0, &[(ISLAND, 1, 0); 2]);
            ring.desc(head, (addr, len, F_INDIRECT | flags, 0));
            ring.offer(head);
        })
    };
    assert_eq!(indirect(TABLE, 32, F_NEXT), QueueError::IndirectWithNext { head });
    let max = MAX_INDIRECT_ENTRIES;
    let too_long = u32::from(max) * 16 + 16;
    for len in [0, 1, 15, 17, 33, too_long, 0x10_0000, 0xffff_fff0, u32::MAX] {
        assert_eq!(indirect(TABLE, len, 0), QueueError::IndirectLength { head, len, max });
    }
    for addr in [HOLE - 16, HOLE, ISLAND - 16, u64::MAX - 15, u64::MAX] {
        let len = 32;
        assert_eq!(indirect(addr, len, 0), QueueError::IndirectUnmapped { head, addr, len });
    }

    let in_table = |first, second| {
        error_of(|ring| {
            write_desc(&ring.memory, TABLE, 0, first);
            write_desc(&ring.memory, TABLE, 1, second);
            ring.desc(head, (TABLE, 32, F_INDIRECT, 0));
            ring.offer(head);
        })
    };
    let (buffer, nested) = ((ISLAND, 1, F_NEXT, 1), (TABLE, 32, F_INDIRECT, 0));
    assert_eq!(in_table(nested, buffer), QueueError::NestedIndirect { head });
    assert_eq!(in_table(buffer, nested), QueueError::NestedIndirect { head });
    let out = QueueError::NextOutOfRange { head, next: 2, entries: 2 };
    assert_eq!(in_table((ISLAND, 1, F_NEXT, 2), buffer), out);
    assert_eq!(in_table(buffer, (0, 0, F_NEXT, 0)), QueueError::Loop { head, entries: 2 });

    let error = error_of(|ring| {
        ring.config.indirect = false;
        ring.desc(head, (TABLE, 32, F_INDIRECT, 0));
        ring.offer(head);
    });
    assert_eq!(error, QueueError::IndirectNotNegotiated { head });
}

#[test]
fn a_bad_request_keeps_its_status_byte_if_that_is_mapped() {
    let read = (ISLAND, 16, 0);
    let data = (ISLAND + 0x100, 0x100, F_WRITE);
    let status = (ISLAND + 0x300, 4, F_WRITE);
    let unmapped = |addr, len| ChainFault::Unmapped { addr, len };
    let long = u32::MAX - 1;
    type Case<'a> = (&'a [(u64, u32, u16)], ChainFault, Option<u64>);
    let cases: &[Case<'_>] = &[
        // A device-readable buffer is not mapped, wholly or in part.
        (&[(HOLE, 16, 0), data, status], unmapped(HOLE, 16), Some(ISLAND + 0x303)),
        (&[(HOLE - 8, 16, 0), data, status], unmapped(HOLE - 8, 16), Some(ISLAND + 0x303)),
        (&[(u64::MAX, 16, 0), data, status], unmapped(u64::MAX, 16), Some(ISLAND + 0x303)),
        // A device-writable buffer is not mapped: before the status and as the status.
        (&[read, (HOLE, 8, F_WRITE), status], unmapped(HOLE, 8), Some(ISLAND + 0x303)),
        (&[read, data, (HOLE, 1, F_WRITE)], unmapped(HOLE, 1), None),
        (&[read, data, (u64::MAX - 1, 2, F_WRITE)], unmapped(u64::MAX - 1, 2), None),
        (&[read, data, (u64::MAX, 2, F_WRITE)], unmapped(u64::MAX, 2), None),
        // The last buffer is mapped at one end only.
        (&[read, data, (HOLE - 1, 2, F_WRITE)], unmapped(HOLE - 1, 2), None),
        (&[read, data, (ISLAND - 1, 4, F_WRITE)], unmapped(ISLAND - 1, 4), Some(ISLAND + 2)),
        // The first fault counts, and so does the last status byte.
        (&[(HOLE, 1, 0), (HOLE + 1, 1, 0), data, (HOLE + 2, 1, F_WRITE)], unmapped(HOLE, 1), None),
        // An empty buffer at the end has no last byte.
        (&[(HOLE, 1, 0), status, (HOLE, 0, F_WRITE)], unmapped(HOLE, 1), Some(ISLAND + 0x303)),
        // There is no device-writable buffer at all.
        (&[read, (HOLE, 1, 0)], unmapped(HOLE, 1), None),
        // The order is wrong. The last device-writable buffer comes before the fault or after it.
        (&[read, data, read], ChainFault::ReadableAfterWritable, Some(ISLAND + 0x1ff)),
        (&[read, data, read, status], ChainFault::ReadableAfterWritable, Some(ISLAND + 0x303)),
        (&[read, status, (0, 0, 0)], ChainFault::ReadableAfterWritable, Some(ISLAND + 0x303)),
        (&[(0, 0, F_WRITE), read], ChainFault::ReadableAfterWritable, None),
        (&[data, (HOLE, long, F_WRITE)], unmapped(HOLE, long), None),
    ];
    for (buffers, fault, expected) in cases {
        let (ring, chain) = chain_of(buffers);
        assert_eq!(chain.fault, Some(*fault), "{buffers:x?}");
        assert_eq!(status_of(&ring, chain), *expected, "{buffers:x?}");
        // In an indirect table: the whole chain, and all of it except for the first buffer.
        for direct in 0..buffers.len().min(2) {
            let mut ring = new_ring(16, false);
            let (first, rest) = buffers.split_at(direct);
            ring.table(TABLE, 0, rest);
            let table_bytes = u32::try_from(16 * rest.len()).unwrap();
            for &(addr, len, flags) in first {
                ring.desc(0, (addr, len, flags | F_NEXT, 1));
            }
            let head = u16::try_from(direct).unwrap();
            ring.desc(head, (TABLE, table_bytes, F_INDIRECT, 0));
            ring.offer(0);
            let chain = pop(&mut ring.queue());
            assert_eq!(chain.fault, Some(*fault), "{direct} direct of {buffers:x?}");
            assert_eq!(status_of(&ring, chain), *expected, "{direct} direct of {buffers:x?}");
        }
    }
}

#[test]
fn a_bad_request_in_an_indirect_table_is_answered_too() {
    let mut ring = new_ring(16, false);
    ring.table(TABLE, 0, &[(HOLE, 16, 0), (ISLAND, 8, F_WRITE), (ISLAND + 99, 1, F_WRITE)]);
    ring.desc(1, (TABLE, 48, F_INDIRECT, 0));
    ring.desc(0, (HOLE + 1, 1, F_NEXT, 1));
    ring.offer(0);
    ring.chain(2, &[(ISLAND, 1, 0)]);
    let mut queue = ring.queue();
    let chain = pop(&mut queue);
    assert_eq!(chain.fault, Some(ChainFault::Unmapped { addr: HOLE + 1, len: 1 }));
    assert_eq!(status_of(&ring, chain), Some(ISLAND + 99));
    // The next chain is not affected.
    let chain = pop(&mut queue);
    assert_eq!((chain.fault, chain.readable.bytes(), chain.writable.bytes()), (None, 1, 0));
}

#[test]
fn a_chain_without_an_end_leaves_nothing_in_the_next() {
    let mut ring = new_ring(16, false);
    ring.table(DESC_TABLE, 0, &[(ISLAND, 1, 0), (ISLAND, 1, F_WRITE)]);
    ring.desc(1, (ISLAND, 1, F_NEXT | F_WRITE, 99));
    ring.offer(0);
    let mut queue = ring.queue();
    queue.pop().expect_err("the chain leads out of the table");
    ring.desc(1, (ISLAND, 5, F_WRITE, 0));
    let chain = pop(&mut queue);
    assert_eq!((chain.readable.bytes(), chain.writable.bytes()), (1, 5));
}

#[test]
fn a_chain_of_four_gibibytes_is_too_long() {
    let bytes = 0x4000_0000;
    let big = 0x10_0000_0000;
    let mut ring = new_ring(16, false);
    // Memory that is never touched costs nothing.
    let ranges: Vec<_> = crate::ring::RANGES.into_iter().chain([(big, bytes)]).collect();
    ring.memory = Arc::new(GuestMemory::anonymous(&ranges).unwrap());
    let quarter = u32::try_from(bytes).unwrap();
    let parts = |last| {
        [(big, quarter, 0), (big, quarter, 0), (big, quarter, F_WRITE), (big, last, F_WRITE)]
    };
    ring.chain(0, &parts(quarter - 1));
    ring.chain(4, &parts(quarter));
    let mut queue = ring.queue();
    let chain = pop(&mut queue);
    assert_eq!(chain.fault, None);
    let sum = chain.readable.bytes() + chain.writable.bytes();
    assert_eq!(u32::try_from(sum), Ok(u32::MAX));

    let mut chain = pop(&mut queue);
    assert_eq!(chain.fault, Some(ChainFault::TooLong { bytes: sum + 1 }));
    assert_eq!((chain.readable.bytes(), chain.writable.bytes()), (0, 1));
    chain.writable.take_last_byte().expect("a status byte").write(0x42);
    let mut status = [0; 2];
    ring.memory.read(big + bytes - 2, &mut status).unwrap();
    assert_eq!(status, [0, 0x42]);

    let mut queue = Virtqueue::Split(ring.queue());
    queue.set_answer_place(AnswerPlace::Front);
    queue.pop().expect("the ring is good");
    let chain = queue.pop().expect("the ring is good").expect("a chain is available");
    assert_eq!(chain.fault, Some(ChainFault::TooLong { bytes: sum + 1 }));
    assert_eq!((chain.readable.bytes(), chain.writable.bytes()), (0, 0x8000_0000));
}

#[test]
fn storage_is_reused() {
    let mut ring = new_ring(16, false);
    let mut queue = ring.queue();
    let mut next_lists = |queue: &mut SplitQueue| -> Vec<_> {
        ring.chain(0, &[(ISLAND, 1, 0), (ISLAND, 1, F_WRITE)]);
        let chain = pop(queue);
        queue.push(0, 0);
        [&chain.readable, &chain.writable].map(|list| list.iovecs().as_ptr()).into()
    };
    let mut lists: Vec<_> = (0..20).flat_map(|_| next_lists(&mut queue)).collect();
    lists.sort_unstable();
    lists.dedup();
    assert_eq!(lists.len(), 4, "two are in the chain, two in the queue");
}

#[test]
fn lists_keep_memory_mapped() {
    let (ring, mut chain) = chain_of(&[(ISLAND, 4, 0), (ISLAND + 8, 4, F_WRITE)]);
    let memory = Arc::downgrade(&ring.memory);
    drop(ring);
    let status = chain.writable.take_last_byte().expect("a byte");
    let Chain { readable, writable, memory: map, .. } = chain;
    assert_eq!(contents(&readable), [0, 1, 2, 3]);
    drop(map);
    drop(readable);
    drop(writable);
    status.write(1);
    assert!(memory.upgrade().is_some());
    drop(status);
    assert!(memory.upgrade().is_none(), "unmapped with the last user");
}
