//! Memory for Argon2, of which a header may demand a lot. Disks that are opened at the same time
//! share a bound. They are opened side by side if their memory fits, and otherwise in turn.

use std::io;
use std::sync::{Condvar, PoisonError};

use blockio::executor::Lock;
use zeroize::Zeroize;

use super::no_dump::NoDump;

/// The bound for all disks of the process, in KiB: enough for the largest demand that a header may
/// make, or for several smaller ones.
pub(super) const LIMIT_KIB: u32 = 1 << 20;

/// The memory of this process.
pub(super) static MEMORY: KibBudget = KibBudget::new(LIMIT_KIB);

pub(super) struct KibBudget {
    limit_kib: u32,
    state: Lock<State>,
    changed: Condvar,
}

struct State {
    free_kib: u32,
    /// The number of the next demand, and of the demand that may begin next. In another order,
    /// small demands could keep a large one waiting forever.
    next: u64,
    turn: u64,
}

impl State {
    fn take_number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// Returns true if the demand with this number may begin, which then has the memory.
    fn try_reserve(&mut self, number: u64, kib: u32) -> bool {
        if self.turn != number || self.free_kib < kib {
            return false;
        }
        self.turn += 1;
        self.free_kib -= kib;
        true
    }
}

impl KibBudget {
    const fn new(limit_kib: u32) -> Self {
        let state = State { free_kib: limit_kib, next: 0, turn: 0 };
        Self { limit_kib, state: Lock::new(state), changed: Condvar::new() }
    }

    /// Waits until `kib` KiB are free. A demand for more than there is gets all of it.
    pub(super) fn take(&self, kib: u32) -> Reservation<'_> {
        let kib = kib.min(self.limit_kib);
        let mut state = self.state.lock();
        let number = state.take_number();
        let state = self.changed.wait_while(state, |state| !state.try_reserve(number, kib));
        drop(state.unwrap_or_else(PoisonError::into_inner));
        // The rest may be enough for the next demand.
        self.changed.notify_all();
        Reservation { memory: self, kib }
    }
}

/// Memory that is in use until this is dropped.
pub(super) struct Reservation<'a> {
    memory: &'a KibBudget,
    kib: u32,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.memory.state.lock().free_kib += self.kib;
        self.memory.changed.notify_all();
    }
}

/// The memory itself, which is left out of core dumps, and wiped when dropped. Its content after
/// the last pass gives the key without the passphrase.
pub(super) struct Blocks<T: Zeroize>(NoDump<[T]>);

impl<T: Zeroize + Copy + Default> Blocks<T> {
    pub(super) fn new(count: usize) -> io::Result<Self> {
        NoDump::filled(T::default(), count).map(Self)
    }

    pub(super) fn all(&mut self) -> &mut [T] {
        &mut self.0
    }
}

impl<T: Zeroize> Drop for Blocks<T> {
    fn drop(&mut self) {
        self.0.iter_mut().for_each(Zeroize::zeroize);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn reservations_that_fit_begin_together_and_in_order() {
        let mut state = State { free_kib: 1000, next: 0, turn: 0 };
        let [first, second, third] =
            [state.take_number(), state.take_number(), state.take_number()];
        assert!(state.try_reserve(first, 600));
        assert!(!state.try_reserve(second, 500), "there is not so much");
        assert!(!state.try_reserve(third, 100), "it is not its turn");
        state.free_kib += 600;
        assert!(state.try_reserve(second, 500));
        assert!(state.try_reserve(third, 100), "it fits beside the second one");
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn all_blocks_are_wiped() {
        thread_local!(static WIPED: Cell<u64> = const { Cell::new(0) });
        #[derive(Clone, Copy, Default)]
        struct Block(u64);
        impl Zeroize for Block {
            fn zeroize(&mut self) {
                WIPED.set(WIPED.get() + std::mem::take(&mut self.0));
            }
        }
        let mut blocks = Blocks::<Block>::new(10_000).unwrap();
        blocks.all().iter_mut().for_each(|block| block.0 = 1);
        drop(blocks);
        assert_eq!(WIPED.get(), 10_000);
    }

    #[test]
    fn no_reservation_waits_forever_or_exceeds_the_budget() {
        let (memory, used) = (KibBudget::new(1000), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for kib in [300, 400, 1000, 5000, 500, 200, 1, 700] {
                let (memory, used) = (&memory, &used);
                scope.spawn(move || {
                    for _ in 0..20 {
                        let taken = memory.take(kib);
                        let now = used.fetch_add(taken.kib, Ordering::SeqCst) + taken.kib;
                        assert!(now <= 1000, "{now}");
                        used.fetch_sub(taken.kib, Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!(memory.state.lock().free_kib, 1000);
    }

    /// The demands wake in any order, and begin in that of their numbers.
    #[test]
    fn demands_that_fit_together_begin_when_one_reservation_ends() {
        let memory = KibBudget::new(1000);
        std::thread::scope(|scope| {
            let (begun, all) = mpsc::channel();
            let first = memory.take(1000);
            for _ in 0..16 {
                let (memory, begun) = (&memory, begun.clone());
                // All reservations last until all have begun.
                scope.spawn(move || begun.send(memory.take(10)));
            }
            while memory.state.lock().next < 17 {
                std::thread::yield_now();
            }
            drop(first);
            let limit = Duration::from_secs(30);
            let taken: Vec<_> = (0..16).map_while(|_| all.recv_timeout(limit).ok()).collect();
            assert_eq!(taken.len(), 16, "a demand waits for the end of another one");
        });
    }
}
