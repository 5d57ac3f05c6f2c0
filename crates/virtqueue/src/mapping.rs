//! A stretch of this process' address space that holds one region.

use std::io;
use std::os::fd::AsFd;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// Memory for reading and writing, mapped until it is dropped. Nothing of the file is kept open.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: *mut u8,
    len: usize,
}

// SAFETY: the pointer is only a number here, which `as_ptr` hands out; those who access what it
// points to answer for that (see `memory.rs`).
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared Mapping gives no access of its own.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of a file from `offset` on, shared with its other users. The offset is
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

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: these bytes were mapped by `self` and by nobody else, and whoever has a pointer
        // into them keeps the region alive that owns `self`. It cannot fail for a range that was
        // given by `mmap`.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
    }
}
