//! Memory that is left out of core dumps.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// A value on pages of its own, which are left out of core dumps (`MADV_DONTDUMP`).
pub(super) struct NoDump<T: ?Sized> {
    place: NonNull<T>,
}

// SAFETY: the type owns its value as a `Box` does, and nothing else points to the value.
unsafe impl<T: ?Sized + Send> Send for NoDump<T> {}
// SAFETY: as above; a shared `NoDump` only lends its value, shared.
unsafe impl<T: ?Sized + Sync> Sync for NoDump<T> {}

impl<T> NoDump<T> {
    pub(super) fn new(value: T) -> io::Result<Self> {
        let place = map(1)?;
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
    use super::*;

    /// Returns true if the kernel leaves the page with this address out of core dumps.
    fn is_excluded_from_dumps(address: usize) -> bool {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_there = false;
        for line in maps.lines() {
            let bounds = line.split_whitespace().next().and_then(|range| range.split_once('-'));
            let number = |text| usize::from_str_radix(text, 16).ok();
            if let Some((start, end)) = bounds.and_then(|(a, b)| Some((number(a)?, number(b)?))) {
                is_there = (start..end).contains(&address);
            } else if is_there && let Some(flags) = line.strip_prefix("VmFlags:") {
                return flags.split_whitespace().any(|flag| flag == "dd");
            }
        }
        panic!("nothing is mapped there");
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
