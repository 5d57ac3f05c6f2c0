//! Packed rings: set-up, chains, events, and drivers that break the rules.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use virtqueue::driver::{Desc, INDIRECT, NEXT, PACKED_START, PackedDriver, WRITE};
use virtqueue::{
    Chain, ChainFault, DeviceQueue, GuestMemory, LocalMemory, MAX_QUEUE_SIZE, PackedQueue,
    QueueConfig, QueueError, RingPart,
};

use crate::ring::{BORDER, DESC_TABLE, HOLE, ISLAND, RANGES, contents};

const DRIVER_EVENTS: u64 = 0x6000;
const DEVICE_EVENTS: u64 = 0x6004;
pub(crate) const TABLE: u64 = 0x9000;
pub(crate) const WRAP: u16 = 1 << 15;
pub(crate) const AVAILABLE: u16 = 1 << 7;
pub(crate) const USED: u16 = 1 << 15;

pub(crate) type Driver = PackedDriver<Arc<GuestMemory>>;

pub(crate) fn config(size: u16, event_idx: bool) -> QueueConfig {
    QueueConfig {
        size,
        desc_table: DESC_TABLE,
        avail_ring: DRIVER_EVENTS,
        used_ring: DEVICE_EVENTS,
        event_idx,
        indirect: true,
        next_avail: PACKED_START,
    }
}

pub(crate) fn open(
    memory: &Arc<GuestMemory>,
    config: QueueConfig,
) -> Result<PackedQueue, QueueError> {
    PackedQueue::new(LocalMemory::new(Arc::clone(memory)), config, config.next_avail)
}

/// A driver with a new ring, and its memory.
pub(crate) fn driver(size: u16, event_idx: bool) -> (Driver, Arc<GuestMemory>) {
    let memory = Arc::new(GuestMemory::anonymous(&RANGES).expect("memory"));
    (Driver::new(Arc::clone(&memory), config(size, event_idx)), memory)
}

/// A new ring, from both sides.
pub(crate) fn pair(config: QueueConfig) -> (Driver, PackedQueue) {
    let memory = Arc::new(GuestMemory::anonymous(&RANGES).expect("memory"));
    let driver = Driver::new(Arc::clone(&memory), config);
    let queue = open(&memory, config).expect("the ring is good");
    (driver, queue)
}

fn pop(queue: &mut PackedQueue) -> Chain {
    queue.pop().expect("the ring is good").expect("a chain is available")
}

/// The error of a pop after `put` has filled a ring of four entries.
fn error_after(put: impl Fn(&mut Driver)) -> QueueError {
    let (mut driver, mut queue) = pair(config(4, false));
    put(&mut driver);
    queue.pop().expect_err("the ring is bad")
}

#[test]
fn a_bad_setup_is_refused() {
    let memory = Arc::new(GuestMemory::anonymous(&RANGES).expect("memory"));
    let error_of = |change: &dyn Fn(&mut QueueConfig)| {
        let mut config = config(5, true);
        change(&mut config);
        open(&memory, config).err()
    };
    assert_eq!(error_of(&|_| ()), None);
    for size in [0, MAX_QUEUE_SIZE + 1] {
        let expected = QueueError::Size { size, max: MAX_QUEUE_SIZE };
        assert_eq!(error_of(&|config| config.size = size), Some(expected));
    }
    for bits in [5, WRAP | 5, WRAP | 0x7fff] {
        let expected = QueueError::Base { slot: bits & !WRAP, size: 5 };
        assert_eq!(error_of(&|config| config.next_avail = bits), Some(expected));
    }
    type Part = (RingPart, fn(&mut QueueConfig, u64), usize, usize);
    let parts: [Part; 3] = [
        (RingPart::DescTable, |config, addr| config.desc_table = addr, 80, 16),
        (RingPart::AvailRing, |config, addr| config.avail_ring = addr, 4, 4),
        (RingPart::UsedRing, |config, addr| config.used_ring = addr, 4, 4),
    ];
    for (part, set, len, align) in parts {
        let addr = HOLE - 64;
        let is_inside = addr + len as u64 <= HOLE;
        let expected = (!is_inside).then_some(QueueError::Unmapped { part, addr, len });
        assert_eq!(error_of(&|config| set(config, addr)), expected);
        assert_eq!(
            error_of(&|config| set(config, HOLE)),
            Some(QueueError::Unmapped { part, addr: HOLE, len })
        );
        let addr = 0x4002;
        let expected = Some(QueueError::Misaligned { part, addr, align });
        assert_eq!(error_of(&|config| set(config, addr)), expected);
    }
}

/// Descriptors between the places of both sides are in the device: no answer would come.
#[test]
fn a_queue_continues_at_its_base_with_no_request_in_the_device() {
    let memory = Arc::new(GuestMemory::anonymous(&RANGES).expect("memory"));
    let place = |at: u16| if at < 5 { at } else { WRAP | (at - 5) };
    for next in 3..9 {
        let base = QueueConfig { next_avail: place(next), ..config(5, false) };
        let open = |used| PackedQueue::new(LocalMemory::new(Arc::clone(&memory)), base, used);
        let queue = open(place(next)).expect("all is answered");
        assert_eq!(queue.base(), u32::from(place(next)) * 0x1_0001);
        for descriptors in 1..=next.min(5) {
            let expected = QueueError::NoAccountOfRequests { descriptors };
            assert_eq!(open(place(next - descriptors)).err(), Some(expected));
        }
    }
    let base = QueueConfig { next_avail: 2, ..config(5, false) };
    let opened = PackedQueue::new(LocalMemory::new(memory), base, 3);
    assert_eq!(opened.err(), Some(QueueError::Base { slot: 2, size: 5 }), "nearly two laps");
}

/// A front-end that states 0 for a new ring, before and after its driver has filled it, and a ring
/// that has come to this place.
#[test]
fn a_base_of_zeroes_is_a_new_ring_if_no_lap_has_ended() {
    const SIZE: u16 = 3;
    let zero = QueueConfig { next_avail: 0, ..config(SIZE, false) };
    for offered in 0..=SIZE {
        let (mut driver, _) = driver(SIZE, false);
        for _ in 0..offered {
            driver.add(&[Desc::writable(0x8000, 1)], None);
        }
        driver.publish();
        let mut queue = open(&driver.memory, zero).expect("the ring is good");
        assert_eq!((queue.base(), queue.available(true).expect("good")), (0x8000_8000, offered));
    }
    for later in 0..=SIZE {
        let (mut driver, mut queue) = pair(config(SIZE, false));
        for round in 0..SIZE + later {
            driver.add(&[Desc::writable(0x8000, 1)], None);
            driver.publish();
            if round < SIZE {
                let id = pop(&mut queue).head;
                queue.push(id, 0);
                let _ = queue.publish();
                driver.take_used();
            }
        }
        assert_eq!(queue.base(), 0);
        let mut queue = open(&driver.memory, zero).expect("the ring is good");
        assert_eq!((queue.base(), queue.available(true).expect("good")), (0, later));
    }
}

#[test]
fn chains_span_the_end_of_the_ring_and_come_with_their_buffers() {
    for size in [3, 5, 8] {
        let (mut driver, mut queue) = pair(config(size, false));
        for round in 0..40_u64 {
            let direct = [Desc::readable(0x8000, 3), Desc::writable(0x8010 + round, 5)];
            driver.memory.write(0x8000, &[1, 2, 3]).expect("mapped");
            let id = driver.add(&direct, None);
            // Flags of a table's descriptors other than WRITE have no meaning.
            let odd = Desc { flags: NEXT | INDIRECT, ..Desc::readable(0x8000, 2) };
            let second = driver.add(&[odd, Desc::writable(BORDER - 1, 2)], Some(TABLE));
            assert!(queue.pop().expect("good").is_none(), "nothing is visible");
            driver.publish();
            assert_eq!(queue.available(true).expect("good"), 2);
            let chain = pop(&mut queue);
            assert_eq!((chain.head, contents(&chain.readable)), (id, vec![1, 2, 3]));
            assert_eq!(chain.writable.bytes(), 5);
            assert_eq!(queue.header::<3>(id), Some([1, 2, 3]));
            assert_eq!(queue.available(false).expect("good"), 1);
            let chain = pop(&mut queue);
            assert_eq!((chain.head, chain.readable.bytes()), (second, 2));
            assert_eq!(chain.writable.iovecs().len(), 2, "it crosses regions");
            assert_eq!(queue.header::<2>(second), Some([1, 2]));
            assert_eq!(queue.header::<3>(second), None);
            queue.push(second, 7);
            queue.push(id, 0);
            assert!(!driver.has_used());
            assert_eq!(queue.publish_quietly(), 2);
            let answers = [driver.take_used(), driver.take_used()];
            let answers = answers.map(|used| used.map(|used| (used.head, used.bytes)));
            assert_eq!(answers, [Some((second.into(), 7)), Some((id.into(), 0))]);
            assert_eq!(driver.take_used(), None);
            assert_eq!(driver.room(), usize::from(size));
        }
    }
}

#[test]
fn bad_rings_are_errors() {
    let first = PACKED_START & !WRAP;
    let put = |flags: u16, len: u32, addr: u64| {
        move |driver: &mut Driver| {
            driver.put_desc(first, Desc { addr, len, flags: 0, next: 0 }, 0, AVAILABLE | flags);
        }
    };
    let head = 0;
    assert_eq!(error_after(put(INDIRECT | NEXT, 16, TABLE)), QueueError::IndirectNotAlone { head });
    for len in [0, 15, 17, 16 * 1025] {
        let expected = QueueError::IndirectLength { head, len, max: 1024 };
        assert_eq!(error_after(put(INDIRECT, len, TABLE)), expected);
    }
    let (addr, len) = (HOLE - 16, 32);
    let expected = QueueError::IndirectUnmapped { head, addr, len };
    assert_eq!(error_after(put(INDIRECT, len, addr)), expected);
    // All four descriptors continue.
    let error = error_after(|driver| {
        for slot in (0..4).rev() {
            driver.put_desc(slot, Desc::writable(0x8000, 1), 0, AVAILABLE | NEXT | WRITE);
        }
    });
    assert_eq!(error, QueueError::Loop { head: 0, entries: 4 });
    let error = error_after(|driver| {
        driver.put_desc(1, Desc::readable(TABLE, 16), 0, AVAILABLE | INDIRECT);
        driver.put_desc(0, Desc::readable(0x8000, 1), 0, AVAILABLE | NEXT);
    });
    assert_eq!(error, QueueError::IndirectNotAlone { head: 0 });
    for id in [4, u16::MAX] {
        let error = error_after(|driver| {
            driver.put_desc(0, Desc::readable(0x8000, 1), id, AVAILABLE);
        });
        assert_eq!(error, QueueError::HeadOutOfRange { head: id, entries: 4 });
    }
}

#[test]
fn indirect_tables_need_their_feature() {
    let (mut driver, mut queue) = pair(QueueConfig { indirect: false, ..config(4, false) });
    driver.add(&[Desc::readable(0x8000, 1)], Some(TABLE));
    driver.publish();
    let expected = QueueError::IndirectNotNegotiated { head: 0 };
    assert_eq!(queue.pop().expect_err("not negotiated"), expected);
}

/// The id may be used again as soon as its element is pushed: the driver sees it later.
#[test]
fn an_id_that_the_device_holds_is_refused() {
    let (driver, mut queue) = pair(config(4, false));
    let offer = |slot| driver.put_desc(slot, Desc::writable(0x8000, 1), 3, AVAILABLE | WRITE);
    offer(0);
    offer(1);
    pop(&mut queue);
    assert_eq!(queue.pop().expect_err("held"), QueueError::DuplicateId { id: 3 });
    queue.push(3, 1);
    let _ = queue.publish();
    assert_eq!(pop(&mut queue).head, 3);
}

/// A driver must not offer descriptors that the device holds. The queue does not look at them.
#[test]
fn no_more_descriptors_are_taken_than_the_ring_has() {
    let (driver, mut queue) = pair(config(3, false));
    for slot in 0..3 {
        driver.put_desc(slot, Desc::writable(0x8000, 1), slot, AVAILABLE | WRITE);
    }
    let ids = [0, 1, 2].map(|_| pop(&mut queue).head);
    assert_eq!(ids, [0, 1, 2]);
    for slot in 0..3 {
        driver.put_desc(slot, Desc::writable(0x8000, 1), slot, USED | WRITE);
    }
    assert!(!queue.has_available() && queue.available(true).expect("good") == 0);
    assert!(queue.pop().expect("no error").is_none());
    assert!(!queue.enable_kicks());
    queue.push(1, 0);
    assert!(queue.pop().expect("no error").is_none(), "the driver sees nothing yet");
    let _ = queue.publish();
    assert!(!queue.has_available(), "its place holds a used element");
}

#[test]
fn faults_keep_the_place_of_the_answer() {
    let (mut driver, mut queue) = pair(config(8, false));
    for (chain, fault) in [
        (
            vec![Desc::writable(0x8000, 4), Desc::readable(0x8010, 1), Desc::writable(ISLAND, 2)],
            ChainFault::ReadableAfterWritable,
        ),
        (
            vec![Desc::readable(HOLE - 1, 2), Desc::writable(ISLAND, 2)],
            ChainFault::Unmapped { addr: HOLE - 1, len: 2 },
        ),
    ] {
        for table in [None, Some(TABLE)] {
            let id = driver.add(&chain, table);
            driver.publish();
            let popped = pop(&mut queue);
            assert_eq!((popped.head, popped.fault), (id, Some(fault)));
            assert_eq!((popped.readable.bytes(), popped.writable.bytes()), (0, 1));
            queue.push(id, 1);
            let _ = queue.publish();
            driver.take_used().expect("the whole chain is used");
            assert_eq!(driver.room(), 8);
        }
    }
}

/// Every event of the driver, for batches at every place of two laps.
#[test]
fn a_call_comes_when_its_descriptor_is_used() {
    const SIZE: u16 = 5;
    let wrap = |at: u16| if (at / SIZE).is_multiple_of(2) { WRAP } else { 0 };
    let place = |at: u16| (at % SIZE) | wrap(at);
    for start in 0..2 * SIZE {
        for batch in 1..=SIZE {
            for ahead in 0..2 * SIZE {
                let base = QueueConfig { next_avail: place(start), ..config(SIZE, true) };
                let (mut driver, mut queue) = pair(base);
                assert!(queue.publish(), "the first call is forced");
                driver.put_driver_events(place(start + ahead), 2);
                for _ in 0..batch {
                    driver.add(&[Desc::writable(0x8000, 1)], None);
                }
                driver.publish();
                (0..batch).for_each(|_| {
                    let id = pop(&mut queue).head;
                    queue.push(id, 0);
                });
                // Like a device that checks for a wanted call later.
                queue.publish_quietly();
                assert_eq!(queue.publish(), ahead < batch, "{start} {batch} {ahead}");
            }
        }
    }
}

/// The device may check for a wanted call only after more than a lap. Any event lies behind it.
#[test]
fn a_call_comes_for_every_event_of_more_than_a_lap() {
    const SIZE: u16 = 4;
    for event in 0..2 * SIZE {
        let (mut driver, mut queue) = pair(config(SIZE, true));
        assert!(queue.publish(), "the first call is forced");
        let wrap = if event < SIZE { WRAP } else { 0 };
        driver.put_driver_events((event % SIZE) | wrap, 2);
        for batch in [SIZE, SIZE, 1] {
            for _ in 0..batch {
                driver.add(&[Desc::writable(0x8000, 1)], None);
            }
            driver.publish();
            for _ in 0..batch {
                let id = pop(&mut queue).head;
                queue.push(id, 0);
            }
            assert_eq!(queue.publish_quietly(), batch);
            (0..batch).for_each(|_| assert!(driver.take_used().is_some()));
        }
        assert!(queue.needs_call(), "{event}");
    }
}

#[test]
fn the_flags_of_the_driver_decide_without_an_event() {
    for (event_idx, place, flags, expected) in [
        (false, 0, 0, true),
        (true, 0, 0, true),
        (false, WRAP, 1, false),
        (true, WRAP, 1, false),
        // Not negotiated, or reserved.
        (false, 3, 2, true),
        (true, 3, 3, true),
        // No descriptor of the ring.
        (true, WRAP | 4, 2, true),
    ] {
        let (mut driver, mut queue) = pair(config(4, event_idx));
        let _ = queue.publish();
        driver.put_driver_events(place, flags);
        driver.add(&[Desc::writable(0x8000, 1)], None);
        driver.publish();
        let id = pop(&mut queue).head;
        assert_eq!(queue.driver_sleeps(), expected);
        queue.push(id, 0);
        assert_eq!(queue.publish(), expected, "{event_idx} {place:#x} {flags}");
        assert!(!queue.publish(), "nothing is new");
    }
}

#[test]
fn kicks_are_asked_for_at_the_next_place() {
    let (mut driver, mut queue) = pair(config(3, true));
    assert_eq!(driver.device_events().1, 1, "a queue that starts wants none");
    for at in 0..20_u16 {
        assert!(!queue.enable_kicks());
        let place = (at % 3) | if (at / 3).is_multiple_of(2) { WRAP } else { 0 };
        assert_eq!(driver.device_events(), (place, 2));
        driver.add(&[Desc::writable(0x8000, 1)], None);
        let old = driver.publish();
        assert!(driver.needs_kick(old));
        assert!(queue.enable_kicks(), "a chain is there already");
        queue.disable_kicks();
        assert!(!driver.needs_kick(old));
        let id = pop(&mut queue).head;
        assert!(!queue.enable_kicks());
        let next = at + 1;
        let place = (next % 3) | if (next / 3).is_multiple_of(2) { WRAP } else { 0 };
        assert_eq!(driver.device_events(), (place, 2), "behind a chain that is not used yet");
        queue.push(id, 0);
        let _ = queue.publish();
        driver.take_used().expect("it is visible");
    }
    let (mut driver, mut queue) = pair(config(3, false));
    let _ = queue.enable_kicks();
    driver.add(&[Desc::writable(0x8000, 1)], None);
    let old = driver.publish();
    assert_eq!((driver.device_events(), driver.needs_kick(old)), ((0, 0), true));
}

/// A driver that breaks the rules: a count of chains that are gone would stay for ever.
#[test]
fn chains_that_the_driver_takes_back_are_not_counted() {
    let (mut driver, mut queue) = pair(config(4, false));
    for _ in 0..3 {
        driver.add(&[Desc::writable(0x8000, 1)], None);
    }
    driver.publish();
    assert_eq!(queue.available(true).expect("good"), 3);
    (0..3).for_each(|slot| driver.put_desc(slot, Desc::writable(0x8000, 1), slot, 0));
    assert!(queue.pop().expect("no error").is_none());
    assert_eq!(
        (queue.available(false).expect("good"), queue.available(true).expect("good")),
        (0, 0)
    );
}

/// The queue pops chains of a full ring all the time, and used elements come into their places.
#[test]
fn other_threads_learn_the_progress_while_the_queue_is_busy() {
    const SIZE: u16 = 1000;
    let (mut driver, mut queue) = pair(config(SIZE, false));
    let avail_idx = queue.avail_idx();
    // The chains that the driver begins to make available, and that it has.
    let (begun, done) = <(AtomicU32, AtomicU32)>::default();
    let offer = |driver: &mut Driver| {
        let count = begun.fetch_add(1, Ordering::Relaxed);
        let pieces = usize::try_from(count % 3).expect("a length") + 1;
        driver.add(&vec![Desc::writable(0x8000, 1); pieces], None);
        driver.publish();
        done.store(count + 1, Ordering::Release);
    };
    while driver.room() >= 3 {
        offer(&mut driver);
    }
    let low = |count: u32| u16::try_from(count & 0xffff).expect("16 bits");
    std::thread::scope(|scope| {
        let looks = scope.spawn(|| {
            for _ in 0..300 {
                let least = done.load(Ordering::Acquire);
                let chains = avail_idx.load().expect("the queue is there");
                let most = begun.load(Ordering::Relaxed) - least;
                assert!(chains.wrapping_sub(low(least)) <= low(most), "{least} {chains} {most}");
            }
        });
        while !looks.is_finished() {
            let id = pop(&mut queue).head;
            queue.push(id, 0);
            let _ = queue.publish();
            driver.take_used().expect("it is visible");
            if driver.room() >= 3 {
                offer(&mut driver);
            }
        }
    });
    assert!(begun.load(Ordering::Relaxed) > u32::from(SIZE), "the ring was not busy");
}

#[test]
fn other_threads_learn_the_progress_of_the_driver() {
    let (mut driver, mut queue) = pair(config(5, false));
    let avail_idx = queue.avail_idx();
    for round in 0..30 {
        assert_eq!(avail_idx.load(), Some(queue.next_chain()));
        driver.add(&[Desc::writable(0x8000, 1), Desc::writable(0x8000, 1)], None);
        driver.add(&[Desc::writable(0x8000, 1)], None);
        driver.publish();
        assert_eq!(avail_idx.load(), Some(queue.next_chain() + 2), "{round}");
        for left in [1, 0] {
            let id = pop(&mut queue).head;
            assert_eq!(avail_idx.load(), Some(queue.next_chain() + left));
            if left == 1 {
                queue.put_back(id);
                assert_eq!(avail_idx.load(), Some(queue.next_chain() + 2));
                pop(&mut queue);
            }
            queue.push(id, 0);
            let _ = queue.publish();
            driver.take_used().expect("it is visible");
        }
    }
    let (memory, len) = (Arc::clone(&driver.memory), driver.config.size);
    drop((driver, queue, memory));
    assert_eq!((avail_idx.load(), len), (None, 5), "the map is gone");
}
