//! Memory for Argon2, of which a header may demand a lot. Disks that are opened at the same time
//! share a bound. They are opened side by side if their memory fits, and otherwise in turn. Their
//! memory and their keys are left out of core dumps.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::sync::Condvar;

use blockio::executor::Lock;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap_anonymous, munmap};
use zeroize::Zeroize;

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
        let number = self.state.lock().take_number();
        drop(self.state.wait_while(&self.changed, |state| !state.try_reserve(number, kib)));
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

/// A value on pages of its own, which are left out of core dumps (`MADV_DONTDUMP`). A single value
/// stays out of swap, too, as far as the limit on locked memory permits.
pub(super) struct NoDump<T: ?Sized> {
    place: NonNull<T>,
}

// SAFETY: the type owns its value as a `Box` does, and nothing else points to the value.
unsafe impl<T: ?Sized + Send> Send for NoDump<T> {}
// SAFETY: as above; a shared `NoDump` only lends its value, shared.
unsafe impl<T: ?Sized + Sync> Sync for NoDump<T> {}

impl<T> NoDump<T> {
    pub(super) fn new(value: T) -> io::Result<Self> {
        let place = map::<T>(1)?;
        // SAFETY: `map` has mapped these pages. A lock does not change their contents, and ends
        // with the mapping.
        let locked = unsafe { mlock(place.as_ptr().cast(), size_of::<T>()) };
        if let Err(error) = locked {
            tracing::debug!("cannot keep a key out of swap: {error}; raise the limit (ulimit -l)");
        }
        // SAFETY: `map` has room for one value there, and nothing else uses it.
        unsafe { place.write(value) };
        Ok(Self { place })
    }
}

impl<T: Copy> NoDump<[T]> {
    /// Makes `count` copies of a value, at least one.
    pub(super) fn filled(value: T, count: usize) -> io::Result<Self> {
        let start = map(count)?;
        for place in 0..count {
            // SAFETY: `map` has room for `count` values there, and nothing else uses it.
            unsafe { start.add(place).write(value) };
        }
        Ok(Self { place: NonNull::slice_from_raw_parts(start, count) })
    }
}

/// Maps pages with room for `count` values, aligned for them.
fn map<T>(count: usize) -> io::Result<NonNull<T>> {
    const { assert!(size_of::<T>() > 0 && align_of::<T>() <= 4096, "it fits pages") };
    let bytes = count.checked_mul(size_of::<T>()).ok_or(io::ErrorKind::OutOfMemory)?;
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: the kernel chooses a place where nothing is mapped.
    let start = unsafe { mmap_anonymous(ptr::null_mut(), bytes, prot, flags)? };
    // SAFETY: the pages were mapped above. This advice does not change their contents.
    let advised = unsafe { madvise(start, bytes, Advice::LinuxDontDump) };
    if let Err(error) = advised {
        // SAFETY: the pages were mapped above, and nothing points to them.
        let _ = unsafe { munmap(start, bytes) };
        return Err(error.into());
    }
    Ok(NonNull::new(start.cast::<T>()).ok_or(io::ErrorKind::OutOfMemory)?)
}

impl<T: ?Sized> Deref for NoDump<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: a value was put there, which stays until `self` is dropped. A change to it
        // borrows `self` mutably.
        unsafe { self.place.as_ref() }
    }
}

impl<T: ?Sized> DerefMut for NoDump<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { self.place.as_mut() }
    }
}

impl<T: ?Sized> Drop for NoDump<T> {
    fn drop(&mut self) {
        let bytes = size_of_val(&**self);
        // SAFETY: the value was put there on pages of its own, and nothing uses them after this.
        // `munmap` cannot fail for a range that was given by `mmap`.
        unsafe {
            self.place.drop_in_place();
            let _ = munmap(self.place.as_ptr().cast(), bytes);
        }
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

#[cfg(test)]
mod no_dump_tests {
    use super::*;
    use crate::testing::has_flag;

    /// Returns true if the kernel leaves the page with this address out of core dumps.
    fn is_excluded_from_dumps(address: usize) -> bool {
        has_flag(address, "dd")
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_key_stays_out_of_swap() {
        let key = NoDump::new([7_u8; 64]).unwrap();
        assert!(has_flag((&raw const *key).addr(), "lo"));
        let other = Box::new(7_u64);
        assert!(!has_flag((&raw const *other).addr(), "lo"));
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn values_and_lists_of_them_are_in_no_core_dump() {
        let one = NoDump::new(7_u64).unwrap();
        let mut many = NoDump::filled([7_u64; 128], 100).unwrap();
        assert!(is_excluded_from_dumps((&raw const *one).addr()));
        for place in [0, 99] {
            assert!(is_excluded_from_dumps((&raw const many[place]).addr()));
        }
        many[99] = [8; 128];
        assert_eq!((*one, many[98][127], many[99][127]), (7, 7, 8));
        assert!(NoDump::filled([0_u64; 128], usize::MAX / 512).is_err());
        let other = Box::new(7_u64);
        assert!(!is_excluded_from_dumps((&raw const *other).addr()));
    }
}
