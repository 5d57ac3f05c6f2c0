//! Event idx against a model that counts in 64 bits, from any start and over any wrap.

use proptest::prelude::*;
use virtqueue::DeviceQueue;

use crate::ring::{F_WRITE, Hand, ISLAND, new_ring, pop};

const SIZE: u16 = 8;
const BUFFER: [(u64, u32, u16); 1] = [(ISLAND, 16, F_WRITE)];

/// A step of the driver or the device.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// The driver adds this many chains, as far as there is room.
    Add(u64),
    /// The device pops this many chains, as far as they are there.
    Pop(u64),
    /// The device pushes this many chains, as far as it has them.
    Push(u64),
    /// The device makes pushed elements visible.
    PublishQuietly,
    /// The device publishes. The event is at this distance from the last publication.
    Publish(i64),
    EnableKicks,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let few = 1..=u64::from(SIZE);
    let distance =
        prop_oneof![-2..=i64::from(SIZE) + 2, -0x8001_i64..=-0x7ffe, 0x7ffe_i64..=0x7fff,];
    let step = prop_oneof![
        few.clone().prop_map(Step::Add),
        few.clone().prop_map(Step::Pop),
        few.prop_map(Step::Push),
        Just(Step::PublishQuietly),
        distance.prop_map(Step::Publish),
        Just(Step::EnableKicks),
    ];
    prop::collection::vec(step, 1..200)
}

/// Start values from which an index wraps soon, and any other values.
fn start() -> impl Strategy<Value = u16> {
    const EDGES: &[u16] = &[0, 0x7ff0, 0x8000, 0xfff0, 0xffff];
    prop_oneof![prop::sample::select(EDGES), any::<u16>()]
}

/// Returns the 16 bits of a position that an index shows.
fn low(position: u64) -> u16 {
    u16::try_from(position & 0xffff).expect("16 bits")
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn calls_and_kicks_match_indexes_that_do_not_wrap(
        first_avail in start(),
        first_used in start(),
        steps in steps(),
    ) {
        let mut ring = new_ring(SIZE, true);
        ring.config.next_avail = first_avail;
        ring.set_avail_idx(first_avail);
        ring.put_used_idx(first_used);
        let mut queue = ring.queue();
        prop_assert!(queue.publish(), "the first is forced");
        // Far from zero, so that an event may lie before the start.
        let mut added = (1 << 32) + u64::from(first_avail);
        let mut popped = added;
        let mut pushed = (1 << 32) + u64::from(first_used);
        // The used position at the last check for a call, and the one that the driver sees.
        let (mut published, mut visible) = (pushed, pushed);
        let mut heads = std::collections::VecDeque::new();
        for step in steps {
            let in_device = heads.len() as u64;
            match step {
                Step::Add(count) => {
                    let room = u64::from(SIZE) - in_device - (added - popped);
                    for _ in 0..count.min(room) {
                        ring.chain(low(added) % SIZE, &BUFFER);
                        added += 1;
                    }
                }
                Step::Pop(count) => for _ in 0..count.min(added - popped) {
                    heads.push_back(pop(&mut queue).head);
                    popped += 1;
                },
                Step::Push(count) => for _ in 0..count.min(in_device) {
                    queue.push(heads.pop_front().expect("it was counted"), 0);
                    pushed += 1;
                },
                Step::PublishQuietly => {
                    prop_assert_eq!(u64::from(queue.publish_quietly()), pushed - visible);
                    visible = pushed;
                    prop_assert_eq!(ring.used_idx(), low(visible));
                }
                Step::Publish(distance) => {
                    let event = published.checked_add_signed(distance).expect("far from zero");
                    ring.put_used_event(low(event));
                    let wanted = (published..pushed).contains(&event);
                    prop_assert_eq!(queue.driver_sleeps(), wanted || event == pushed);
                    prop_assert_eq!(queue.publish(), wanted, "event {}", event);
                    (published, visible) = (pushed, pushed);
                    prop_assert_eq!(ring.used_idx(), low(published));
                }
                Step::EnableKicks => {
                    prop_assert_eq!(queue.enable_kicks(), added > popped);
                    prop_assert_eq!(ring.avail_event(), low(popped));
                }
            }
            prop_assert_eq!(queue.next_avail(), low(popped));
            prop_assert_eq!(queue.has_available(), added > popped);
        }
    }
}

/// The flag of the avail ring decides where event idx was not negotiated.
#[test]
fn a_driver_without_event_idx_is_awaited_unless_its_flag_forbids_calls() {
    const NO_INTERRUPT: u16 = 1;
    let mut ring = new_ring(SIZE, false);
    let mut queue = ring.queue();
    assert!(queue.publish(), "the first is forced");
    for (flags, driver_sleeps) in [(0, true), (NO_INTERRUPT, false), (0, true)] {
        ring.put_avail_flags(flags);
        ring.chain(0, &BUFFER);
        let head = pop(&mut queue).head;
        queue.push(head, 0);
        assert_eq!(queue.driver_sleeps(), driver_sleeps);
        assert_eq!(queue.publish(), driver_sleeps);
    }
}

/// Its elements count as compared with the driver's event.
#[test]
fn a_forced_call_is_for_all_elements_before_it() {
    let mut ring = new_ring(SIZE, true);
    ring.chain(0, &BUFFER);
    let mut queue = ring.queue();
    let head = pop(&mut queue).head;
    queue.push(head, 0);
    assert!(queue.publish(), "the first call is forced");
    assert!(!queue.needs_call());
    queue.force_call();
    assert!(queue.needs_call() && !queue.needs_call());
}
