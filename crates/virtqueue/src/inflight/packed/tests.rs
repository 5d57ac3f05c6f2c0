//! Processes that die before each of their stores, and accounts that are wrong.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use super::*;
use crate::death::before_stores;
use crate::death::tests as death;
use crate::device_queue::DeviceQueue;
use crate::driver::{Desc, PACKED_START, PackedDriver};
use crate::inflight::tests::world::{GuestDriver, Life, World, die_everywhere};
use crate::split::QueueConfig;

/// No power of two, and shorter than the account.
const SIZE: u16 = 7;
const ENTRIES: u16 = 9;
const RING: QueueConfig = QueueConfig {
    size: SIZE,
    desc_table: 0x1000,
    avail_ring: 0x2000,
    used_ring: 0x3000,
    event_idx: false,
    indirect: true,
    next_avail: PACKED_START,
};

fn world(seed: u64) -> World {
    World::new(RingLayout::Packed, RING, ENTRIES, seed)
}

fn packed(world: &mut World) -> &mut PackedDriver<Arc<GuestMemory>> {
    let GuestDriver::Packed(driver) = &mut world.driver else { unreachable!("it is packed") };
    driver
}

fn account_of(world: &World) -> PackedAccount {
    PackedAccount::map(&world.region.queue(1, RingLayout::Packed).unwrap()).unwrap()
}

#[test]
#[cfg_attr(miri, ignore = "takes long")]
fn nothing_is_lost_or_done_twice_whenever_the_process_dies() {
    die_everywhere(world, 120, |world| assert!(account_of(world).requests().is_empty()));
}

/// A batch of all descriptors moves the place of the next element by a whole lap: only its wrap
/// counter tells that it has moved.
#[test]
fn a_batch_of_the_whole_ring_is_complete_or_undone() {
    let lap = |world: &mut World, life: &mut Life| {
        for number in 1..=SIZE {
            world.driver.offer(&[Desc::writable(0x8000, number.into())], None);
        }
        let ids: Vec<_> = (0..SIZE).map(|_| life.queue.pop().unwrap().unwrap().head).collect();
        ids.iter().for_each(|id| life.queue.push(*id, 1));
        life.queue.publish_quietly()
    };
    let mut outcomes = [0, 0];
    for stores in 0.. {
        let mut world = world(0);
        let mut life = world.live();
        death::after(Some(stores));
        let published = catch_unwind(AssertUnwindSafe(|| lap(&mut world, &mut life)));
        death::after(None);
        let is_visible = packed(&mut world).has_used();
        let (queue, recovery) = world.open().unwrap();
        let is_complete = queue.base() >> 16 == 0;
        assert_eq!(is_visible, is_complete, "{stores}: {recovery:?}");
        outcomes[usize::from(is_visible)] += 1;
        if let Ok(count) = published {
            assert_eq!(count, SIZE);
            break;
        }
    }
    assert!(outcomes.iter().all(|count| *count > SIZE.into()), "{outcomes:?}");
}

/// A ring that the driver has set up again: the account of the earlier one has no meaning.
#[test]
fn an_account_of_another_ring_is_replaced() {
    for (answered, requests) in (0..2 * SIZE).flat_map(|answered| [(answered, 2), (answered, 0)]) {
        let mut world = world(0);
        let mut life = world.live();
        for number in 1..=answered + requests {
            world.driver.offer(&[Desc::writable(0x8000, number.into())], None);
            let id = life.queue.pop().unwrap().unwrap().head;
            if number <= answered {
                life.queue.push(id, 0);
                let _ = life.queue.publish();
                let _ = world.driver.take_used();
            }
        }
        drop(life);
        *packed(&mut world) = PackedDriver::new(Arc::clone(&world.memory), RING);
        let (mut queue, recovery) = world.open().unwrap();
        // Without requests, only a place that is no start tells one ring from the other.
        let is_start = requests == 0 && answered == 0;
        let expected =
            if is_start { Recovery::Known { requests } } else { Recovery::Stale { requests } };
        assert_eq!(recovery, expected, "{answered}");
        assert_eq!(queue.base(), 0x8000_8000, "as the front-end says");
        world.driver.offer(&[Desc::writable(0x8000, 5)], None);
        assert_eq!(queue.pop().unwrap().unwrap().writable.bytes(), 5);
        drop(queue);
        assert_eq!(world.open().unwrap().1, Recovery::Known { requests: 1 });
    }
}

/// A new ring looks like a later state of the earlier one, so the front-end states its place.
#[test]
fn a_forgotten_account_begins_at_the_stated_place_whenever_the_process_dies() {
    for stores in 0.. {
        let mut world = world(0);
        let mut life = world.live();
        for number in 1..=3 {
            world.driver.offer(&[Desc::writable(0x8000, number)], None);
            let id = life.queue.pop().unwrap().unwrap().head;
            life.queue.push(id, 0);
            let _ = life.queue.publish();
        }
        drop(life);
        *packed(&mut world) = PackedDriver::new(Arc::clone(&world.memory), RING);
        for number in 5..=7 {
            world.driver.offer(&[Desc::writable(0x8000, number)], None);
        }
        let account = world.region.queue(1, RingLayout::Packed).unwrap();
        death::after(Some(stores));
        let opened = catch_unwind(AssertUnwindSafe(|| {
            account.forget();
            drop(world.open().unwrap());
        }));
        death::after(None);
        let (mut queue, _) = world.open().unwrap();
        if stores == 0 {
            assert_eq!(queue.base(), 0x8003_8003, "nothing is forgotten");
        } else {
            assert_eq!(queue.base(), 0x8000_8000, "{stores}");
            assert_eq!(queue.pop().unwrap().unwrap().writable.bytes(), 5, "{stores}");
        }
        if opened.is_ok() {
            assert!(stores > u32::from(ENTRIES), "{stores}");
            return;
        }
    }
}

/// Writes something wrong into an account.
type Spoil = fn(&PackedAccount);

#[test]
fn an_account_that_makes_no_sense_is_refused() {
    let fresh = || {
        let mut world = world(3);
        let mut life = world.live();
        world.driver.offer(&[Desc::writable(0x8000, 1), Desc::writable(0x8000, 1)], None);
        life.queue.pop().unwrap().unwrap();
        world
    };
    let error_of = |spoil: Spoil| {
        let world = fresh();
        spoil(&account_of(&world));
        match world.open() {
            Err(error) => error,
            Ok((mut queue, _)) => queue.pop().unwrap_err(),
        }
    };
    let cases: [(Spoil, InflightError); 3] = [
        (|account| account.store(OFFSET_VERSION, 7), InflightError::Version { version: 7 }),
        (
            |account| account.store(OFFSET_ENTRIES, 16),
            InflightError::OtherSize { entries: 16, expected: ENTRIES },
        ),
        (
            |account| account.store(account.entry(0, ENTRY_NEXT), 99),
            InflightError::LinkOutOfRange { head: 99, entries: ENTRIES },
        ),
    ];
    for (spoil, expected) in cases {
        assert_eq!(error_of(spoil), QueueError::Inflight(expected));
    }
    // No descriptors, more than the ring has, or a place that it does not have: of another ring.
    let spoils: [Spoil; 4] = [
        |account| account.store(account.entry(0, ENTRY_COUNT), 0),
        |account| account.store(account.entry(0, ENTRY_COUNT), SIZE + 1),
        |account| account.store(OFFSET_USED, SIZE),
        |account| account.store(account.entry(0, ENTRY_COUNT), u16::MAX),
    ];
    for spoil in spoils {
        let world = fresh();
        spoil(&account_of(&world));
        assert_eq!(world.open().unwrap().1, Recovery::Stale { requests: 1 });
    }
}

/// The front-end changes the list of free entries, between any two stores of the next process.
#[test]
fn an_account_that_changes_while_it_is_opened_keeps_its_requests() {
    for stores in 0.. {
        let mut world = world(3);
        let mut life = world.live();
        for number in [3, 4] {
            world.driver.offer(&[Desc::writable(0x8000, number)], None);
        }
        life.queue.pop().unwrap().unwrap();
        drop(life);
        let account = account_of(&world);
        let (left, start) =
            (Cell::new(stores), world.region.queue(1, RingLayout::Packed).unwrap().start);
        let memory = Arc::clone(&account.memory);
        before_stores(Some(Rc::new(move || match left.get() {
            0 => {
                // The entry of the request, as the head of both lists.
                memory.write(start + OFFSET_FREE_HEAD as u64, &[0; 4]).unwrap();
            }
            more => left.set(more - 1),
        })));
        let opened = world.open();
        before_stores(None);
        let (mut queue, recovery) = opened.unwrap();
        if stores == 0 {
            continue;
        }
        assert_eq!(recovery, Recovery::Known { requests: 1 }, "{stores}");
        // The second request does not take the entry of the first.
        assert_eq!([3, 4].map(|_| queue.pop().unwrap().unwrap().writable.bytes()), [3, 4]);
        drop(queue);
        let (mut queue, _) = world.open().unwrap();
        assert_eq!(queue.pop().unwrap().unwrap().writable.bytes(), 3, "{stores}");
        if stores > 20 {
            break;
        }
    }
}
