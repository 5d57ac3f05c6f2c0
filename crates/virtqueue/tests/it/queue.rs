//! The queue itself: set-up, used elements, calls, kicks, and indexes that wrap.

use std::sync::Arc;

use virtqueue::driver::Used;
use virtqueue::{
    DeviceQueue, GuestMemory, InflightRegion, LocalMemory, MAX_QUEUE_SIZE, QueueConfig, QueueError,
    RingLayout, RingPart, SplitQueue,
};

use crate::ring::{
    AVAIL_RING, BORDER, DESC_TABLE, F_WRITE, HOLE, Hand, ISLAND, ISLAND_BYTES, Ring, USED_RING,
    contents, new_ring, pop,
};

const BUFFER: [(u64, u32, u16); 1] = [(ISLAND, 16, F_WRITE)];

fn used(head: u32, bytes: u32) -> Used {
    Used { head, bytes }
}

fn error_of(change: impl FnOnce(&mut QueueConfig)) -> QueueError {
    let mut ring = new_ring(16, true);
    change(&mut ring.config);
    ring.try_queue().expect_err("the set-up is bad")
}

#[test]
fn sizes_are_powers_of_two() {
    for size in [0, 3, 1000, 2 * MAX_QUEUE_SIZE, 32768, u16::MAX] {
        let error = error_of(|config| config.size = size);
        assert_eq!(error, QueueError::Size { size, max: MAX_QUEUE_SIZE });
    }
    for size in [1, 2, 16, MAX_QUEUE_SIZE] {
        let mut ring = new_ring(size, true);
        ring.chain(0, &BUFFER);
        let mut queue = ring.queue();
        assert_eq!(queue.size(), size);
        assert_eq!(pop(&mut queue).head, 0);
    }
}

#[test]
fn parts_of_the_ring_are_aligned_and_in_one_region() {
    use RingPart::{AvailRing, DescTable, UsedRing};
    let misaligned = |part, addr, align| QueueError::Misaligned { part, addr, align };
    let unmapped = |part, addr, len| QueueError::Unmapped { part, addr, len };
    // 16 entries: 256 bytes of descriptors, 4 + 32 + 2 of avail ring, 4 + 128 + 2 of used ring.
    let (desc, avail, used) = (256, 38, 134);

    let addr = DESC_TABLE + 8;
    assert_eq!(error_of(|c| c.desc_table = addr), misaligned(DescTable, addr, 16));
    let addr = AVAIL_RING + 1;
    assert_eq!(error_of(|c| c.avail_ring = addr), misaligned(AvailRing, addr, 2));
    let addr = USED_RING + 2;
    assert_eq!(error_of(|c| c.used_ring = addr), misaligned(UsedRing, addr, 4));

    for addr in [HOLE, HOLE - 16, BORDER - 16, ISLAND - 16, u64::MAX - 15] {
        assert_eq!(error_of(|c| c.desc_table = addr), unmapped(DescTable, addr, desc));
        assert_eq!(error_of(|c| c.avail_ring = addr), unmapped(AvailRing, addr, avail));
        assert_eq!(error_of(|c| c.used_ring = addr), unmapped(UsedRing, addr, used));
    }
}

#[test]
fn a_ring_may_end_with_its_region() {
    let mut ring = new_ring(16, true);
    ring.config.avail_ring = ISLAND + ISLAND_BYTES - 38;
    ring.config.used_ring = HOLE - 136;
    ring.config.desc_table = BORDER - 256;
    ring.queue();
    // Without event idx, the event at the end is not needed.
    ring.config.event_idx = false;
    ring.config.avail_ring += 2;
    ring.queue();
    ring.config.event_idx = true;
    assert!(matches!(ring.try_queue(), Err(QueueError::Unmapped { .. })));
}

#[test]
fn a_host_address_is_checked_for_alignment_too() {
    // A front-end may place a region at any address, so an aligned guest address proves nothing.
    let memory = GuestMemory::anonymous(&[(0x1001, 0x10000)]).unwrap();
    let mut config = new_ring(16, true).config;
    (config.desc_table, config.avail_ring, config.used_ring) = (0x2000, 0x3000, 0x4000);
    let result = SplitQueue::new(LocalMemory::new(Arc::new(memory)), config);
    assert!(matches!(result, Err(QueueError::Misaligned { .. })));
}

#[test]
fn a_chain_that_is_put_back_is_popped_again() {
    let mut ring = new_ring(4, false);
    for head in [2, 0, 3] {
        ring.chain(head, &BUFFER);
    }
    let mut queue = ring.queue();
    for (in_device, head) in [(0, 2), (1, 0), (2, 3)] {
        assert_eq!(pop(&mut queue).head, head);
        queue.put_back();
        assert_eq!((queue.in_device(), queue.next_avail()), (in_device, in_device));
        assert_eq!(pop(&mut queue).head, head);
    }
    assert_eq!(queue.in_device(), 3);
    assert!(queue.pop().unwrap().is_none());
}

/// Used idx may differ from the avail entry to begin with.
#[test]
fn the_next_head_in_order_is_that_of_the_oldest_chain() {
    for first in [0, 3] {
        let mut ring = new_ring(4, false);
        for head in [2, 0, 3].into_iter().cycle().take(first) {
            ring.chain(head, &BUFFER);
        }
        ring.config.next_avail = u16::try_from(first).unwrap();
        for head in [1, 3, 0] {
            ring.chain(head, &BUFFER);
        }
        check_order(ring.queue());
    }
}

/// An account begins at the used idx, whatever avail entry the front-end gives: that of a front-end
/// from before a kill is old.
#[test]
fn the_next_head_in_order_of_a_killed_process_is_that_of_the_oldest_chain() {
    let mut ring = new_ring(4, false);
    let region = GuestMemory::anonymous(&[(0, 0x1000)]).unwrap();
    let region = InflightRegion::new(Arc::new(region), 1, 4).unwrap();
    let account = region.queue(0, RingLayout::Split).unwrap();
    let open = |ring: &Ring| {
        let memory = LocalMemory::new(Arc::clone(&ring.memory));
        SplitQueue::with_inflight(memory, ring.config, &account).unwrap().0
    };
    let mut before = open(&ring);
    for head in [2, 0, 3] {
        ring.chain(head, &BUFFER);
        assert_eq!(pop(&mut before).head, head);
        before.push(head, 0);
        let _ = before.publish();
    }
    drop(before);
    for head in [1, 3, 0] {
        ring.chain(head, &BUFFER);
    }
    check_order(open(&ring));
}

/// The chains are answered in this order.
fn check_order(mut queue: SplitQueue) {
    (0..3).for_each(|_| drop(pop(&mut queue)));
    for head in [1, 3, 0] {
        assert_eq!(queue.in_order_head(), head);
        queue.push(head, 0);
    }
}

#[test]
fn used_elements_appear_with_publish_and_not_before() {
    let mut ring = new_ring(4, false);
    for head in 0..3 {
        ring.chain(head, &BUFFER);
    }
    let mut queue = ring.queue();
    let heads: Vec<u16> = (0..3).map(|_| pop(&mut queue).head).collect();
    assert_eq!((heads, queue.in_device(), queue.next_avail()), (vec![0, 1, 2], 3, 3));
    assert!(queue.pop().unwrap().is_none());

    queue.push(2, 17);
    queue.push(0, u32::MAX);
    assert_eq!((ring.used_idx(), queue.in_device()), (0, 1));
    assert!(queue.publish());
    assert_eq!(ring.used_idx(), 2);
    assert_eq!([ring.used(0), ring.used(1)], [used(2, 17), used(0, u32::MAX)]);
    queue.push(1, 0);
    assert!(queue.publish());
    assert_eq!((ring.used_idx(), ring.used(2), queue.in_device()), (3, used(1, 0), 0));
}

#[test]
fn a_stopped_queue_resumes_at_its_position() {
    let mut ring = new_ring(8, false);
    ring.config.next_avail = 0xfffe;
    ring.set_avail_idx(0xfffe);
    ring.put_used_idx(0xfffd);
    let mut queue = ring.queue();
    assert!(queue.pop().unwrap().is_none(), "processed once unasked, and nothing there");
    for head in 0..4 {
        ring.chain(head, &BUFFER);
    }
    for head in 0..4 {
        assert_eq!(pop(&mut queue).head, head);
        queue.push(head, 1);
    }
    assert_eq!(queue.next_avail(), 2);
    assert!(queue.publish());
    assert_eq!(ring.used_idx(), 1);
    assert_eq!([ring.used(0xfffd), ring.used(0)], [used(0, 1), used(3, 1)]);
}

#[test]
fn the_first_publish_and_forced_ones_call() {
    for event_idx in [false, true] {
        let mut ring = new_ring(8, event_idx);
        ring.put_avail_flags(1);
        ring.put_used_event(0x4000);
        let mut queue = ring.queue();
        assert!(queue.publish(), "a call is forced after start, even without elements");
        assert!(!queue.publish());
        ring.chain(0, &BUFFER);
        pop(&mut queue);
        queue.push(0, 0);
        assert!(!queue.publish(), "the driver wants none");
        queue.force_call();
        assert!(queue.publish());
        assert!(!queue.publish());
        assert_eq!(ring.used_idx(), 1);
    }
}

#[test]
fn without_event_idx_a_flag_suppresses_calls() {
    let mut ring = new_ring(8, false);
    // The place of the event, which must not be read.
    ring.put_used_event(0);
    let mut queue = ring.queue();
    assert!(queue.publish());
    for (flags, expected) in [(0, true), (1, false), (0xfffe, true), (0xffff, false)] {
        ring.put_avail_flags(flags);
        ring.chain(0, &BUFFER);
        pop(&mut queue);
        queue.push(0, 0);
        assert_eq!(queue.publish(), expected, "flags {flags:#x}");
    }
}

#[test]
fn with_event_idx_the_event_decides_through_the_whole_wrap() {
    let mut ring = new_ring(8, true);
    ring.put_avail_flags(1);
    let mut queue = ring.queue();
    assert!(queue.publish());
    let mut used_idx = 0_u16;
    for round in 0..70_000_u32 {
        // Batches of 1 to 4, and an event before, in, at the end of or behind the batch.
        let batch = u16::try_from(round % 4).unwrap() + 1;
        let ahead = u16::try_from(round % 7).unwrap();
        let event = used_idx.wrapping_add(ahead).wrapping_sub(1);
        for head in 0..batch {
            ring.chain(head, &BUFFER);
        }
        ring.put_used_event(event);
        for head in 0..batch {
            assert_eq!(pop(&mut queue).head, head);
            queue.push(head, 0);
        }
        // An event of E asks for a call when the element with index E is published.
        let expected = (1..=batch).contains(&ahead);
        assert_eq!(queue.publish(), expected, "used idx {used_idx}, {batch} more, event {event}");
        used_idx = used_idx.wrapping_add(batch);
        assert_eq!(ring.used_idx(), used_idx);
    }
}

#[test]
fn kicks_are_enabled_by_the_event_or_the_flag() {
    let mut ring = new_ring(8, true);
    let mut queue = ring.queue();
    assert_eq!(ring.used_flags(), 0, "the flag has no meaning with event idx");
    assert!(!queue.enable_kicks());
    assert_eq!(ring.avail_event(), 0);
    ring.chain(0, &BUFFER);
    assert!(queue.has_available());
    assert!(queue.enable_kicks(), "a chain came before kicks were enabled");
    pop(&mut queue);
    assert!(!queue.has_available());
    queue.disable_kicks();
    assert_eq!(ring.avail_event(), 0, "stale");
    assert!(!queue.enable_kicks());
    assert_eq!((ring.avail_event(), ring.used_flags()), (1, 0));

    let mut ring = new_ring(8, false);
    let mut queue = ring.queue();
    assert_eq!(ring.used_flags(), 1, "kicks start disabled");
    assert!(!queue.enable_kicks());
    assert_eq!(ring.used_flags(), 0);
    queue.disable_kicks();
    assert_eq!(ring.used_flags(), 1);
    ring.chain(0, &BUFFER);
    ring.chain(1, &BUFFER);
    assert!(queue.enable_kicks());
    pop(&mut queue);
    assert!(queue.has_available() && queue.enable_kicks(), "one is left, though none is new");
    pop(&mut queue);
    assert!(!queue.has_available() && !queue.enable_kicks());
}

#[test]
fn avail_idx_is_read_only_when_chains_run_out() {
    let mut ring = new_ring(8, false);
    let mut queue = ring.queue();
    ring.chain(0, &BUFFER);
    ring.chain(1, &BUFFER);
    pop(&mut queue);
    // A driver that takes chains back is not noticed before the announced chains are popped.
    ring.set_avail_idx(0x7777);
    pop(&mut queue);
    assert!(matches!(queue.pop(), Err(QueueError::AvailIndex { avail_idx: 0x7777, .. })));
}

#[test]
fn an_avail_idx_too_far_ahead_is_an_error() {
    let mut ring = new_ring(8, false);
    let mut queue = ring.queue();
    for avail_idx in [9, 0x8000, 0xffff] {
        ring.set_avail_idx(avail_idx);
        let error = queue.pop().expect_err("more chains than entries");
        assert_eq!(error, QueueError::AvailIndex { avail_idx, next_avail: 0, size: 8 });
    }
    for head in 0..8 {
        ring.desc(head, (ISLAND, 1, 0, 0));
    }
    ring.set_avail_idx(8);
    pop(&mut queue);
}

/// Chains that were seen count as taken. An avail idx that takes some back makes a bad ring, not a
/// lower count.
#[test]
fn an_avail_idx_that_goes_back_is_an_error() {
    for start in [0_u16, 0xfffe] {
        for back in 1..4 {
            let mut ring = new_ring(8, false);
            ring.config.next_avail = start;
            ring.set_avail_idx(start);
            for head in 0..4 {
                ring.chain(head, &BUFFER);
            }
            let mut queue = ring.queue();
            assert_eq!(pop(&mut queue).head, 0);
            assert_eq!(queue.available(true), Ok(3));
            let avail_idx = start.wrapping_add(4 - back);
            ring.set_avail_idx(avail_idx);
            let error = queue.available(true).expect_err("it went back");
            let next_avail = start.wrapping_add(4);
            assert_eq!(error, QueueError::AvailIndex { avail_idx, next_avail, size: 8 });
            assert!(queue.available(true).is_err());
        }
    }
}

#[test]
fn more_chains_than_the_queue_has_entries_are_an_error() {
    let mut ring = new_ring(4, false);
    let mut queue = ring.queue();
    for _ in 0..4 {
        ring.chain(0, &BUFFER);
        pop(&mut queue);
    }
    assert!(queue.pop().unwrap().is_none());
    ring.chain(0, &BUFFER);
    let error = queue.pop().expect_err("four are in the device");
    assert_eq!(error, QueueError::TooManyChains { available: 1, in_device: 4, size: 4 });
    // A chain that was popped can still be answered.
    queue.push(0, 0);
    assert!(queue.publish());
    assert_eq!(queue.in_device(), 3);
}

#[test]
fn memory_can_change_under_a_queue() {
    let mut ring = new_ring(8, true);
    ring.chain(0, &[(ISLAND, 8, 0), (ISLAND + 8, 8, F_WRITE)]);
    ring.chain(2, &[(ISLAND, 8, F_WRITE)]);
    let mut queue = ring.queue();
    let old = pop(&mut queue);

    // A copy of all memory at new host addresses, as after a hot plug that moved everything.
    let moved = GuestMemory::anonymous(&crate::ring::RANGES).unwrap();
    let mut bytes = vec![0; usize::try_from(BORDER).unwrap()];
    ring.memory.read(0, &mut bytes).unwrap();
    moved.write(0, &bytes).unwrap();
    moved.write(ISLAND, b"new data").unwrap();

    let without_ring = GuestMemory::anonymous(&[(ISLAND, ISLAND_BYTES)]).unwrap();
    let refused = queue.set_memory(LocalMemory::new(Arc::new(without_ring)));
    assert!(matches!(refused, Err(QueueError::Unmapped { part: RingPart::DescTable, .. })));

    let before = std::mem::replace(&mut ring.memory, Arc::new(moved));
    queue.set_memory(LocalMemory::new(Arc::clone(&ring.memory))).unwrap();
    let new = pop(&mut queue);
    assert_eq!((new.head, contents(&new.writable)), (2, b"new data".to_vec()));
    queue.push(0, 0);
    queue.push(2, 0);
    assert!(queue.publish());
    assert_eq!(ring.used_idx(), 2);

    // The old chain still uses the old memory, and keeps it.
    old.writable.copy_from(0, b"answered");
    let mut answer = [0; 8];
    before.read(ISLAND + 8, &mut answer).unwrap();
    assert_eq!(&answer, b"answered");
    assert!(Arc::strong_count(&before) > 1);
    drop(old);
    assert_eq!(Arc::strong_count(&before), 1);
}
