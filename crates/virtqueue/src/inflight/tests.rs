//! Processes that die before each of their stores, and accounts that are wrong.

pub(crate) mod world;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::*;
use crate::death::tests as death;
use crate::device_queue::DeviceQueue;
use crate::driver::{Desc, Ring};
use crate::memory::{LocalMemory, MAX_QUEUE_SIZE};
use crate::split::{QueueConfig, SplitQueue};
use world::{GuestDriver, World, die_everywhere};

const SIZE: u16 = 8;
const RING: QueueConfig = QueueConfig {
    size: SIZE,
    desc_table: 0x1000,
    avail_ring: 0x2000,
    used_ring: 0x3000,
    event_idx: false,
    indirect: true,
    next_avail: 0,
};

fn world(seed: u64) -> World {
    World::new(RingLayout::Split, RING, SIZE, seed)
}

fn ring_of(world: &World) -> &Ring<Arc<GuestMemory>> {
    let GuestDriver::Split(driver) = &world.driver else { unreachable!("it is split") };
    driver.ring()
}

#[test]
#[cfg_attr(miri, ignore = "takes long")]
fn nothing_is_lost_or_done_twice_whenever_the_process_dies() {
    die_everywhere(world, 40, |world| assert!(account_of(world).marks().is_empty()));
}

fn fresh() -> World {
    let mut world = world(3);
    let mut life = world.live();
    // Four chains are seen, three are popped, and the second is answered.
    for number in 1..=4 {
        world.driver.offer(&[Desc::writable(0x8000, number)], None);
    }
    let heads: Vec<u16> = (0..3).map(|_| life.queue.pop().unwrap().unwrap().head).collect();
    life.queue.push(heads[1], 2);
    let _ = life.queue.publish();
    world
}

fn account_of(world: &World) -> Account {
    Account::map(&world.region.queue(1, RingLayout::Split).unwrap()).unwrap()
}

#[test]
fn an_account_says_where_to_continue() {
    let world = fresh();
    let (mut queue, recovery) = world.open().unwrap();
    assert_eq!(recovery, Recovery::Known { requests: 3 });
    assert_eq!((queue.base(), queue.available(true).unwrap()), (1, 3));
    for (expected, has_more) in [(1, true), (3, true), (4, false)] {
        assert_eq!(queue.pop().unwrap().unwrap().writable.bytes(), expected);
        assert_eq!(queue.has_recovered(), has_more);
    }
    assert_eq!(queue.base(), 4);
    assert!(queue.pop().unwrap().is_none());
}

#[test]
fn an_account_of_another_ring_is_replaced() {
    // The driver has set up the ring again, from the start or at a later entry.
    for (used_idx, avail_idx) in [(0, 0), (0, 1), (900, 901), (1, 1)] {
        let world = fresh();
        ring_of(&world).put_used_idx(used_idx);
        ring_of(&world).put_avail_idx(avail_idx);
        let (queue, recovery) = world.open().unwrap();
        assert!(matches!(recovery, Recovery::Stale { requests: 3 }), "{used_idx}: {recovery:?}");
        assert_eq!(queue.base(), used_idx.into(), "as the front-end says");
        assert!(!queue.has_recovered());
        drop(queue);
        let (_, recovery) = world.open().unwrap();
        assert_eq!(recovery, Recovery::Known { requests: 0 });
    }
}

/// Some of its old marks are left, and are those of no request.
#[test]
fn a_half_replaced_account_has_no_requests() {
    for (used_idx, ahead) in (0..12).flat_map(|used| [0, 1, 2].map(|ahead| (used, ahead))) {
        let of_other_ring = || {
            let world = fresh();
            ring_of(&world).put_used_idx(used_idx);
            ring_of(&world).put_avail_idx(used_idx + ahead);
            world
        };
        if !matches!(of_other_ring().open().unwrap().1, Recovery::Stale { .. }) {
            continue;
        }
        for stores in 0.. {
            let world = of_other_ring();
            death::after(Some(stores));
            let opened = catch_unwind(AssertUnwindSafe(|| drop(world.open())));
            death::after(None);
            match opened {
                Ok(()) => break,
                Err(panic) if !panic.is::<death::SimulatedDeath>() => resume_unwind(panic),
                Err(_) => {}
            }
            let (queue, recovery) = world.open().unwrap();
            let has_some = matches!(recovery, Recovery::Known { requests: 1.. });
            assert!(
                !has_some && !queue.has_recovered(),
                "{used_idx} {ahead} {stores}: {recovery:?}"
            );
        }
    }
}

#[test]
fn an_account_that_makes_no_sense_is_refused() {
    type Spoil = fn(&Account);
    let cases: [(Spoil, InflightError); 4] = [
        (|account| account.store(OFFSET_VERSION, 7), InflightError::Version { version: 7 }),
        (
            |account| account.store(OFFSET_ENTRIES, 16),
            InflightError::OtherSize { entries: 16, expected: SIZE },
        ),
        (
            |account| {
                account.store(OFFSET_USED_IDX, 0);
                account.store(OFFSET_LAST_HEAD, 99);
            },
            InflightError::LinkOutOfRange { head: 99, entries: SIZE },
        ),
        (|_| {}, InflightError::RingTooLong { entries: SIZE, size: 16 }),
    ];
    for (spoil, expected) in cases {
        let world = fresh();
        spoil(&account_of(&world));
        let size = if matches!(expected, InflightError::RingTooLong { .. }) { 16 } else { SIZE };
        let config = QueueConfig { size, ..RING };
        let memory = LocalMemory::new(Arc::clone(&world.memory));
        let account = world.region.queue(1, RingLayout::Split).unwrap();
        let result = SplitQueue::with_inflight(memory, config, &account);
        assert_eq!(result.err(), Some(QueueError::Inflight(expected)));
    }
}

/// The marks are of a longer ring.
#[test]
fn marks_beyond_the_ring_are_of_another_one() {
    let world = fresh();
    let account = account_of(&world);
    account.unmark(account.entry(account.marks()[2].head).unwrap());
    account.mark(account.entry(7).unwrap(), 99);
    let config = QueueConfig { size: 4, ..RING };
    let memory = LocalMemory::new(Arc::clone(&world.memory));
    let queue = world.region.queue(1, RingLayout::Split).unwrap();
    let (_, recovery) = SplitQueue::with_inflight(memory, config, &queue).unwrap();
    assert_eq!(recovery, Recovery::Stale { requests: 3 });
    assert!(account.marks().is_empty());
}

#[test]
fn a_region_has_room_for_its_accounts_and_for_no_others() {
    // An account of 8 split entries has 16 bytes and 8 times 16, rounded up to a multiple of 64.
    assert_eq!(InflightRegion::bytes(RingLayout::Split, 1, 8), 192);
    assert_eq!(InflightRegion::bytes(RingLayout::Split, 3, 128), 3 * (2048 + 64));
    assert_eq!(InflightRegion::bytes(RingLayout::Packed, 2, 128), 2 * (4096 + 64));
    let memory = Arc::new(GuestMemory::anonymous(&[(0, 0x1000)]).unwrap());
    let region = |queues, size| InflightRegion::new(Arc::clone(&memory), queues, size);
    let longest = 0x1000 / 192;
    assert!(region(longest, 8).is_ok());
    let needed = u64::from(longest + 1) * 192;
    assert_eq!(
        region(longest + 1, 8).err(),
        Some(InflightError::TooShort { bytes: 0x1000, needed, queues: longest + 1, queue_size: 8 })
    );
    for (queues, queue_size) in [(0, 8), (1, 0), (1, MAX_QUEUE_SIZE + 1)] {
        assert_eq!(
            region(queues, queue_size).err(),
            Some(InflightError::Shape { queues, queue_size })
        );
    }
    let none = region(2, 8).unwrap().queue(2, RingLayout::Split).err();
    assert_eq!(none, Some(InflightError::NoAccount { index: 2, queues: 2 }));
}

/// Opens an account for a ring of four entries, shorter than the account.
fn open_short(world: &World, avail_idx: u16) -> (Inflight, Recovery) {
    let ring = RingState { size: 4, used_idx: 0, avail_idx };
    Inflight::open(&world.region.queue(1, RingLayout::Split).unwrap(), ring).unwrap()
}

/// A mark there would be of no ring: the next process would forget all requests.
#[test]
fn heads_beyond_the_ring_leave_no_mark() {
    let world = world(0);
    let (mut inflight, recovery) = open_short(&world, 0);
    assert!(matches!(recovery, Recovery::New));
    inflight.seen([3, 4, 7].into_iter());
    let (_, recovery) = open_short(&world, 1);
    assert!(matches!(recovery, Recovery::Known { requests: 1 }), "{recovery:?}");
}

#[test]
fn requests_of_the_previous_process_alone_are_recovered() {
    let world = world(0);
    let (mut inflight, _) = open_short(&world, 0);
    inflight.seen([3, 0, 2].into_iter());
    assert!([0, 2, 3].into_iter().all(|head| !inflight.is_recovered(head)));
    let (mut inflight, _) = open_short(&world, 3);
    let again = [3, 2, 1].map(|left| inflight.recovered_head(left));
    assert_eq!(again, [3, 0, 2], "in the order in which they were seen");
    inflight.seen([1].into_iter());
    assert_eq!([0, 1, 2, 3].map(|head| inflight.is_recovered(head)), [true, false, true, true]);
}

/// The note stands behind the accounts of any layout that the region may have.
#[test]
fn a_note_is_for_the_next_process_if_there_is_room() {
    let [split, packed] = [RingLayout::Split, RingLayout::Packed]
        .map(|layout| InflightRegion::bytes_with_note(layout, 2, SIZE));
    for (bytes, has_room) in [
        (split, true),
        (split - 1, false),
        (packed, true),
        (packed - 1, false),
        (packed - 64, false),
        (packed - 65, true),
    ] {
        let memory = Arc::new(GuestMemory::anonymous(&[(0, bytes)]).unwrap());
        let region = || InflightRegion::new(Arc::clone(&memory), 2, SIZE).unwrap();
        assert_eq!(region().note(), None);
        for value in [0, 1, 7] {
            region().set_note(value);
            assert_eq!(region().note(), has_room.then_some(value), "{bytes}");
        }
        let ring = RingState { size: SIZE, used_idx: 0, avail_idx: 0 };
        let account = region().queue(1, RingLayout::Split).unwrap();
        let (_, recovery) = Inflight::open(&account, ring).unwrap();
        assert!(matches!(recovery, Recovery::New), "a note is no part of an account");
    }
}

/// Otherwise requests of a driver that is gone would come again, or the account of one layout would
/// be taken for that of another. The process may die at each store.
#[test]
fn accounts_are_new_when_the_layout_changes() {
    let bytes = InflightRegion::bytes_with_note(RingLayout::Packed, 2, SIZE);
    let versions = |memory: &GuestMemory, layout| {
        [0, 1].map(|index| {
            let mut version = [0; 2];
            let start = InflightRegion::bytes(layout, index, SIZE);
            memory.read(start + 8, &mut version).unwrap();
            u16::from_ne_bytes(version)
        })
    };
    let both = [RingLayout::Split, RingLayout::Packed];
    for [first, second] in [both, [both[1], both[0]]] {
        for stores in 0.. {
            let memory = Arc::new(GuestMemory::anonymous(&[(0, bytes)]).unwrap());
            let region = InflightRegion::new(Arc::clone(&memory), 2, SIZE).unwrap();
            region.queue(0, first).unwrap();
            // The content means something to both layouts.
            let content = vec![1; usize::try_from(bytes - 64).unwrap()];
            memory.write(0, &content).unwrap();
            region.queue(1, first).unwrap();
            assert_eq!(versions(&memory, second), [0x101; 2], "its layout is the same");
            death::after(Some(stores));
            let died = catch_unwind(AssertUnwindSafe(|| region.queue(0, second).unwrap()));
            death::after(None);
            region.queue(1, second).unwrap();
            assert_eq!(versions(&memory, second), [0; 2], "{first:?} {stores}");
            memory.write(0, &content).unwrap();
            region.queue(0, second).unwrap();
            assert_eq!(versions(&memory, second), [0x101; 2], "the change is over");
            if died.is_ok() {
                assert_eq!(stores, 3, "two accounts and the note");
                break;
            }
        }
    }
}

#[test]
fn a_region_is_forgotten_for_all_layouts() {
    let bytes = InflightRegion::bytes_with_note(RingLayout::Split, 2, SIZE);
    let memory = Arc::new(GuestMemory::anonymous(&[(0, bytes)]).unwrap());
    let region = InflightRegion::new(Arc::clone(&memory), 2, SIZE).unwrap();
    assert!(region.has_room(RingLayout::Split) && !region.has_room(RingLayout::Packed));
    assert!(matches!(region.queue(0, RingLayout::Packed), Err(InflightError::TooShort { .. })));
    let ring = RingState { size: SIZE, used_idx: 0, avail_idx: 4 };
    let open = |index| {
        let account = region.queue(index, RingLayout::Split).unwrap();
        Inflight::open(&account, ring).unwrap()
    };
    let recoveries = || [0, 1].map(|index| open(index).1);
    for negotiated in [RingLayout::Packed, RingLayout::Split] {
        [0, 1].into_iter().for_each(|index| open(index).0.seen([3, 1].into_iter()));
        region.set_note(7);
        assert_eq!(recoveries(), [Recovery::Known { requests: 2 }; 2]);
        region.forget(negotiated);
        assert_eq!(recoveries(), [Recovery::New; 2], "{negotiated:?}");
        assert_eq!(region.note(), Some(7));
    }
}
