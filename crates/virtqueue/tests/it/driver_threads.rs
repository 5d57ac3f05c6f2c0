//! The driver's side of `virtio-driver` on a thread of its own: no wake is lost.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use virtqueue::{DeviceQueue, RingLayout, Virtqueue};

use crate::driver::{Driver, Shape, open, serve, shared_bytes};
use crate::front_end::Connection;

/// The place where two threads sleep. It notices if neither will ever wake.
#[derive(Default)]
struct Bells {
    state: Mutex<BellState>,
    rung: Condvar,
}

#[derive(Default)]
struct BellState {
    /// Kick and call.
    rung: [bool; 2],
    asleep: [bool; 2],
    /// True once nothing is outstanding, so that the device may end.
    done: bool,
}

const KICK: usize = 0;
const CALL: usize = 1;

impl Bells {
    fn ring(&self, bell: usize) {
        self.state.lock().expect("no panic").rung[bell] = true;
        self.rung.notify_all();
    }

    fn finish(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).done = true;
        self.rung.notify_all();
    }

    /// Sleeps until the bell rings. Returns false if all is done.
    fn sleep(&self, bell: usize) -> bool {
        let mut state = self.state.lock().expect("the other thread is well");
        state.asleep[bell] = true;
        while !state.rung[bell] && !state.done {
            let other = 1 - bell;
            assert!(!state.asleep[other] || state.rung[other], "both sleep: a wake was lost");
            state = self.rung.wait(state).expect("the other thread is well");
        }
        state.asleep[bell] = false;
        state.rung[bell] = false;
        !state.done
    }
}

/// Wakes the remaining thread for good when this one ends, even by a failed assertion.
struct Finish<'a>(&'a Bells);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        self.0.finish();
    }
}

/// Runs both sides on threads of their own until the 16-bit indexes have wrapped. Each side sleeps
/// as soon as it may.
fn run_threads(layout: RingLayout, event_idx: bool, size: u16) {
    let requests = match layout {
        RingLayout::Split => 70_000,
        // `virtio-driver` counts descriptors, four for each request, and does not let the number
        // wrap. The ring has gone round hundreds of times by then.
        RingLayout::Packed => 16_000,
    };
    let mut connection = Connection::new();
    let shared = connection.share(shared_bytes(layout, size));
    let (mut driver, config) = Driver::new(shared, layout, size, event_idx);
    let memory = Arc::clone(&driver.memory);
    let bells = Bells::default();
    std::thread::scope(|scope| {
        let device = scope.spawn(|| device_thread(open(memory, layout, config), &bells));
        let finish = Finish(&bells);
        let shape = Shape { to_device: vec![3], from_device: vec![5] };
        let mut completed = 0;
        while completed < requests {
            let batch = driver.next_id % 3 + 1;
            let mut submitted = 0;
            while submitted < batch && driver.next_id < requests && driver.submit(&shape) {
                submitted += 1;
            }
            if submitted > 0 && driver.needs_kick() {
                bells.ring(KICK);
            }
            let got = driver.complete();
            completed += u64::try_from(got).expect("64 bits");
            if got == 0 && submitted == 0 && !driver.enable_calls() {
                assert!(bells.sleep(CALL), "the device has ended");
            }
        }
        drop(finish);
        assert_eq!(device.join().expect("the device is well"), requests);
        assert!(driver.pending.is_empty());
    });
}

fn device_thread(mut queue: Virtqueue, bells: &Bells) -> u64 {
    let _finish = Finish(bells);
    let mut served = 0;
    loop {
        let mut batch = Vec::new();
        while let Some(chain) = queue.pop().expect("the driver is good") {
            batch.push(chain);
        }
        // The last chain comes first, so that completions are out of order.
        for mut chain in batch.into_iter().rev() {
            let written = serve(&mut chain);
            queue.push(chain.head, written);
            served += 1;
        }
        if queue.publish() {
            bells.ring(CALL);
        }
        if !queue.enable_kicks() && !bells.sleep(KICK) {
            return served;
        }
        queue.disable_kicks();
    }
}

#[test]
fn threads_with_event_idx_lose_no_wake() {
    run_threads(RingLayout::Split, true, 16);
    run_threads(RingLayout::Split, true, 256);
}

#[test]
fn threads_with_flags_lose_no_wake() {
    run_threads(RingLayout::Split, false, 16);
    run_threads(RingLayout::Split, false, 256);
}

#[test]
fn threads_with_a_packed_ring_lose_no_wake() {
    for event_idx in [true, false] {
        run_threads(RingLayout::Packed, event_idx, 17);
        run_threads(RingLayout::Packed, event_idx, 250);
    }
}
