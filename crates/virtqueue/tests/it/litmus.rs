//! A test of the fences: two threads write and then read, at the same moment, again and again.
//! Without a full fence on both sides, each can miss the opposite write, even on x86-64. Only
//! optimised code shows it: run the test with `--release`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use virtqueue::driver::{Desc, PackedDriver};
use virtqueue::{DeviceQueue, GuestMemory, LocalMemory, QueueConfig, RingLayout, Virtqueue};

use crate::packed;
use crate::ring::{F_WRITE, Hand, ISLAND, Ring, new_ring};

/// The time limit. Slow machines reach it before the last round.
const BUDGET: Duration = Duration::from_millis(700);
const ROUNDS: u64 = 300_000;

/// A point where two threads meet, as close together in time as possible.
#[derive(Default)]
struct Meeting(AtomicU64);

impl Meeting {
    /// Waits for the `round`th meeting, counted from 1.
    fn meet(&self, round: u64) {
        self.0.fetch_add(1, Ordering::AcqRel);
        let mut spins = 0_u32;
        while self.0.load(Ordering::Acquire) < 2 * round {
            spins += 1;
            if spins.is_multiple_of(1000) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }
}

/// The meetings of a round: after the device has settled its ring, before the race, and after it.
#[derive(Default)]
struct Round {
    settled: Meeting,
    start: Meeting,
    end: Meeting,
    last: AtomicBool,
    device_saw: AtomicBool,
}

/// Releases the waiting thread when this one ends or fails.
struct Leave<'a>(&'a Round);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.0.last.store(true, Ordering::Release);
        for meeting in [&self.0.settled, &self.0.start, &self.0.end] {
            meeting.0.store(u64::MAX / 2, Ordering::Release);
        }
    }
}

/// Runs `driver` and `device` at the same time in each round. Each returns true if it saw the
/// opposite write, and at least one must. `prepare` and `settle` have the ring to themselves.
fn race<D>(
    (mut ring, device_side): (D, Unopened),
    prepare: impl Fn(&mut D, u64),
    driver: impl Fn(&mut D, u64) -> bool,
    device: impl Fn(&mut Virtqueue) -> bool + Send,
    settle: impl Fn(&mut Virtqueue) + Send,
) {
    let state = Round::default();
    let mut missed = None;
    std::thread::scope(|scope| {
        let shared = &state;
        scope.spawn(move || {
            let _leave = Leave(shared);
            let mut queue = device_side.open();
            for round in 1.. {
                settle(&mut queue);
                shared.settled.meet(round);
                shared.start.meet(round);
                if shared.last.load(Ordering::Acquire) {
                    return;
                }
                let saw = device(&mut queue);
                shared.device_saw.store(saw, Ordering::Release);
                shared.end.meet(round);
            }
        });
        let _leave = Leave(shared);
        let began = Instant::now();
        for round in 1.. {
            shared.settled.meet(round);
            if missed.is_some() || round > ROUNDS || began.elapsed() > BUDGET {
                return;
            }
            prepare(&mut ring, round);
            shared.start.meet(round);
            // Start a little later each time, so that all overlaps are tried.
            for _ in 0..round % 24 {
                std::hint::spin_loop();
            }
            let saw = driver(&mut ring, round);
            shared.end.meet(round);
            if !saw && !shared.device_saw.load(Ordering::Acquire) {
                missed = Some(round);
            }
        }
    });
    assert_eq!(missed, None, "invariant 8: in this round each missed what the other wrote");
}

/// The device's side of a ring, before it is opened.
struct Unopened(Arc<GuestMemory>, RingLayout, QueueConfig);

impl Unopened {
    fn open(self) -> Virtqueue {
        let Self(memory, layout, config) = self;
        let memory = LocalMemory::new(memory);
        let queue = Virtqueue::new(memory, layout, config, config.next_avail);
        let mut queue = queue.expect("the ring is good");
        assert!(queue.publish(), "invariant 8: the first call is forced");
        queue
    }
}

/// A split ring with a chain in its first descriptor.
fn split(event_idx: bool) -> (Ring, Unopened) {
    let mut ring = new_ring(16, event_idx);
    ring.chain(0, &[(ISLAND, 1, F_WRITE)]);
    ring.set_avail_idx(0);
    let device = Unopened(Arc::clone(&ring.memory), RingLayout::Split, ring.config);
    (ring, device)
}

type Packed = PackedDriver<Arc<GuestMemory>>;

fn packed(event_idx: bool) -> (Packed, Unopened) {
    let (driver, memory) = packed::driver(15, event_idx);
    let device = Unopened(memory, RingLayout::Packed, driver.config);
    (driver, device)
}

/// Answers a chain. Returns true if the driver wants a call.
fn answer(queue: &mut Virtqueue) -> bool {
    let chain = queue.pop().expect("the ring is good").expect("one is available");
    queue.push(chain.head, 0);
    // Like a device that checks for a wanted call later.
    queue.publish_quietly();
    queue.publish()
}

/// Answers a chain if the driver has made one available.
fn answer_next(queue: &mut Virtqueue) {
    queue.disable_kicks();
    if let Some(chain) = queue.pop().expect("the ring is good") {
        queue.push(chain.head, 0);
        let _ = queue.publish();
    }
}

/// Makes a chain available in a packed ring, after the answer to the previous one. Returns the
/// place from before.
fn offer(ring: &mut Packed) -> u16 {
    ring.take_used();
    ring.add(&[Desc::writable(ISLAND, 1)], None);
    ring.publish()
}

fn low(round: u64) -> u16 {
    let [low, high, ..] = round.to_le_bytes();
    u16::from_le_bytes([low, high])
}

/// Races a driver that is about to sleep against a device that publishes: a call comes, or the
/// driver sees the used idx.
fn publish_race(event_idx: bool) {
    race(
        split(event_idx),
        |ring, round| {
            // Used idx is round - 1. An earlier event asks for nothing.
            ring.put_used_event(low(round).wrapping_sub(2));
            ring.put_avail_flags(1);
            ring.offer(0);
        },
        move |ring, round| {
            if event_idx {
                ring.put_used_event(low(round).wrapping_sub(1));
            } else {
                ring.put_avail_flags(0);
            }
            fence(Ordering::SeqCst);
            ring.used_idx() == low(round)
        },
        answer,
        |_| (),
    );
}

/// Races a device that is about to sleep against a driver that makes a chain available: a kick
/// comes, or the device sees the avail idx.
fn kick_race(event_idx: bool) {
    race(
        split(event_idx),
        |_, _| (),
        move |ring, round| {
            ring.offer(0);
            fence(Ordering::SeqCst);
            if event_idx {
                ring.avail_event() == low(round).wrapping_sub(1)
            } else {
                ring.used_flags() == 0
            }
        },
        Virtqueue::enable_kicks,
        answer_next,
    );
}

/// Like [`publish_race`], in a packed ring.
fn packed_publish_race(event_idx: bool) {
    race(
        packed(event_idx),
        |ring, _| {
            offer(ring);
            ring.disable_calls();
        },
        |ring, _| {
            // With the fence.
            ring.enable_calls();
            ring.has_used()
        },
        answer,
        |_| (),
    );
}

/// Like [`kick_race`], in a packed ring.
fn packed_kick_race(event_idx: bool) {
    race(
        packed(event_idx),
        |_, _| (),
        |ring, _| {
            let old = offer(ring);
            // With the fence.
            ring.needs_kick(old)
        },
        Virtqueue::enable_kicks,
        answer_next,
    );
}

#[test]
fn a_driver_of_a_packed_ring_that_goes_to_sleep_is_called() {
    packed_publish_race(true);
    packed_publish_race(false);
}

#[test]
fn a_device_of_a_packed_ring_that_goes_to_sleep_is_kicked() {
    packed_kick_race(true);
    packed_kick_race(false);
}

#[test]
fn a_driver_that_goes_to_sleep_is_called() {
    publish_race(true);
    publish_race(false);
}

#[test]
fn a_device_that_goes_to_sleep_is_kicked() {
    kick_race(true);
    kick_race(false);
}
