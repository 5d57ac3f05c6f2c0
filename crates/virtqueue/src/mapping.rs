//! The mapping of one region into the address space of this process.

use std::io;
use std::os::fd::AsFd;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// Memory for reading and writing. Dropping it unmaps it. The file is not kept open.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: *mut u8,
    len: usize,
}

// SAFETY: the pointer is only a number here, which `as_ptr` hands out. The code that accesses the
// memory vouches for each access (see `memory.rs`).
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared Mapping gives no access of its own.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of a file from `offset` on, shared with its other users. The offset must be
    /// a multiple of the file's page size.
    pub(crate) fn of_file(file: impl AsFd, offset: u64, len: usize) -> io::Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: the kernel chooses a place where nothing is mapped.
        let start =
            unsafe { mmap(ptr::null_mut(), len, prot, flags | MapFlags::NORESERVE, file, offset)? };
        Ok(Self { start: start.cast(), len })
    }

    /// Maps `len` bytes of private zeroes.
    pub(crate) fn private(len: usize) -> io::Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: the kernel chooses a place where nothing is mapped.
        let start =
            unsafe { mmap_anonymous(ptr::null_mut(), len, prot, flags | MapFlags::NORESERVE)? };
        Ok(Self { start: start.cast(), len })
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// The length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: only `self` mapped these bytes, and every holder of a pointer into them keeps the
        // region alive that owns `self`. The call cannot fail for a range from `mmap`.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
    }
}
