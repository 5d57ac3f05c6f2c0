//! Memory that no core dump has.

use std::io;
use std::ops::Deref;
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// A value on pages of its own, which are left out of core dumps (`MADV_DONTDUMP`).
pub(super) struct Undumped<T> {
    place: NonNull<T>,
}

// SAFETY: it owns its value as a `Box` does, and nothing else points to that.
unsafe impl<T: Send> Send for Undumped<T> {}
// SAFETY: as above; a shared `Undumped` only lends its value, shared.
unsafe impl<T: Sync> Sync for Undumped<T> {}

impl<T> Undumped<T> {
    const BYTES: usize = size_of::<T>();

    pub(super) fn new(value: T) -> io::Result<Self> {
        const { assert!(size_of::<T>() > 0 && align_of::<T>() <= 4096, "it fits pages") };
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: the kernel chooses a place where nothing is mapped.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), Self::BYTES, prot, flags)? };
        let place = NonNull::new(start.cast::<T>()).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: the pages were mapped above. This advice changes nothing about what they have.
        let advised = unsafe { madvise(start, Self::BYTES, Advice::LinuxDontDump) };
        if let Err(error) = advised {
            // SAFETY: the pages were mapped above, and nothing points to them.
            let _ = unsafe { munmap(start, Self::BYTES) };
            return Err(error.into());
        }
        // SAFETY: the pages were mapped above for reading and writing, are large enough, begin at a
        // multiple of every alignment that was let in, and are nobody else's.
        unsafe { place.write(value) };
        Ok(Self { place })
    }
}

impl<T> Deref for Undumped<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: `new` has put a value there, which stays until `self` is dropped, and nobody has
        // it to change.
        unsafe { self.place.as_ref() }
    }
}

impl<T> Drop for Undumped<T> {
    fn drop(&mut self) {
        // SAFETY: `new` has put the value there and mapped the pages, and nothing uses them after
        // this. It cannot fail for a range that was given by `mmap`.
        unsafe {
            self.place.drop_in_place();
            let _ = munmap(self.place.as_ptr().cast(), Self::BYTES);
        }
    }
}
