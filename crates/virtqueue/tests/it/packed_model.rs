//! Packed rings against a model of the specification, and against any content.

use proptest::prelude::*;
use virtqueue::DeviceQueue;
use virtqueue::driver::{Desc, WRITE};

use crate::packed::{AVAILABLE, Driver, TABLE, USED, WRAP, config, pair};
use crate::ring::{DESC_TABLE, HOLE};

/// A ring as the specification describes it, with the steps of a device one by one.
struct Model {
    /// Buffer id, length and flags of each descriptor.
    ring: Vec<(u16, u32, u16)>,
    wrap: bool,
    next: usize,
}

impl Model {
    /// Uses a chain of `count` descriptors (section 2.8.6: the device writes one used descriptor,
    /// and skips the rest).
    fn write_used(&mut self, id: u16, len: u32, count: usize) {
        let lap = if self.wrap { AVAILABLE | USED } else { 0 };
        self.ring[self.next] = (id, len, lap | if len > 0 { WRITE } else { 0 });
        for _ in 0..count {
            self.next += 1;
            if self.next == self.ring.len() {
                (self.next, self.wrap) = (0, !self.wrap);
            }
        }
    }
}

fn descriptors(driver: &Driver) -> Vec<(u16, u32, u16)> {
    let read = |slot: u16| {
        let mut bytes = [0; 8];
        driver.memory.read(DESC_TABLE + 16 * u64::from(slot) + 8, &mut bytes).expect("mapped");
        let [l0, l1, l2, l3, i0, i1, f0, f1] = bytes;
        let len = u32::from_le_bytes([l0, l1, l2, l3]);
        (u16::from_le_bytes([i0, i1]), len, u16::from_le_bytes([f0, f1]))
    };
    (0..driver.config.size).map(read).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// The ring has exactly the used descriptors that the specification's device writes, and the
    /// driver sees none of a batch before all of it is there.
    #[test]
    fn the_ring_is_that_of_the_specification(
        size in 1..20_u16,
        steps in prop::collection::vec((0..4_u8, any::<u16>(), 0..300_u32), 0..200),
    ) {
        let (mut driver, mut queue) = pair(config(size, false));
        let mut model = Model { ring: descriptors(&driver), wrap: true, next: 0 };
        let mut held: Vec<(u16, usize)> = Vec::new();
        let mut pushed = 0;
        for (step, pick, len) in steps {
            match step {
                0 => {
                    let count = usize::from(pick) % 4 + 1;
                    if driver.room() < count {
                        continue;
                    }
                    let first = usize::from(driver.next_avail & !WRAP);
                    let id = driver.add(&vec![Desc::writable(0x8000, 1); count], None);
                    driver.publish();
                    let now = descriptors(&driver);
                    for at in (first..first + count).map(|at| at % now.len()) {
                        model.ring[at] = now[at];
                    }
                    held.push((id, count));
                }
                1 => drop(queue.pop().expect("the driver is good")),
                2 if usize::from(queue.in_device()) > 0 => {
                    let at = usize::from(pick) % usize::from(queue.in_device());
                    let (id, count) = held.remove(at);
                    queue.push(id, len);
                    model.write_used(id, len, count);
                    pushed += 1;
                    prop_assert!(!driver.has_used(), "a part of a batch is visible");
                }
                _ => {
                    prop_assert_eq!(queue.publish_quietly(), pushed);
                    prop_assert_eq!(descriptors(&driver), model.ring.clone());
                    for _ in 0..std::mem::take(&mut pushed) {
                        prop_assert!(driver.take_used().is_some());
                    }
                    prop_assert!(!driver.has_used());
                }
            }
        }
    }

    /// Nothing that a driver writes makes the queue panic, or read what is not there.
    #[test]
    fn any_ring_is_survived(
        size in 1..9_u16,
        event_idx in any::<bool>(),
        content in prop::collection::vec(any::<u64>(), 20),
        steps in prop::collection::vec((0..8_u8, any::<u16>(), any::<u64>()), 0..100),
    ) {
        let (driver, mut queue) = pair(config(size, event_idx));
        let put = |slot: u16, word: u64| {
            let [a, b, flags, id, ..] = word.to_le_bytes();
            let addr = [0x8000, TABLE, HOLE - 8, u64::MAX][usize::from(a % 4)];
            let len = [0, 1, 16, 48, u32::MAX][usize::from(b % 5)];
            let flags = u16::from(flags) & 0x87 | if id & 1 == 0 { 0 } else { USED };
            driver.put_desc(slot, Desc { addr, len, flags: 0, next: 0 }, u16::from(id % 10), flags);
        };
        for (slot, word) in (0..size).zip(&content) {
            put(slot, *word);
        }
        for (at, word) in content.iter().enumerate() {
            driver.memory.write(TABLE + 8 * at as u64, &word.to_le_bytes()).expect("mapped");
        }
        let mut held = Vec::new();
        for (step, pick, word) in steps {
            match step {
                0 => put(pick % size, word),
                1 => driver.put_driver_events(pick, pick >> 3),
                2 | 3 => match queue.pop() {
                    Ok(Some(chain)) => held.push(chain.head),
                    Ok(None) => {}
                    // The device stops. Chains may still be pushed.
                    Err(_) => break,
                },
                4 if !held.is_empty() => {
                    let id = held.swap_remove(usize::from(pick) % held.len());
                    queue.push(id, u32::from(pick));
                }
                5 => drop(queue.publish()),
                6 => drop(queue.available(pick & 1 == 0)),
                _ => {
                    let _ = queue.enable_kicks();
                    let _ = queue.driver_sleeps();
                    let _ = queue.header::<16>(pick);
                }
            }
            prop_assert_eq!(usize::from(queue.in_device()), held.len());
        }
        held.into_iter().for_each(|id| queue.push(id, 1));
        let _ = queue.publish();
        prop_assert_eq!(queue.in_device(), 0);
    }
}
