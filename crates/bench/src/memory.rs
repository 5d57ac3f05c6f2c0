//! Memory that the driver shares with the server: rings, requests, data.
//!
//! A server may write to it at any time, so all accesses are bounds-checked volatile copies. Seals
//! keep the server from truncating it. A server can thus spoil data, but not this process.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use iomem::fits;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use virtqueue::driver::DriverMemory;
use vm_memory::bitmap::BitmapSlice;
use vm_memory::{ByteValued, FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

/// The form of a request in memory. The device reads the header and writes the response.
#[derive(Clone, Copy)]
pub(crate) struct RequestLayout {
    /// Bytes between the headers of adjacent slots.
    pub(crate) stride: usize,
    pub(crate) header_bytes: u32,
    /// Offset from the header's start.
    pub(crate) response_at: usize,
    pub(crate) response_bytes: u32,
    /// True if data written by the device follows the response, false if it precedes it.
    pub(crate) data_in_last: bool,
}

/// A region, mapped by this process and by the server. Offsets count from its start.
pub(crate) struct SharedMemory {
    file: Arc<File>,
    map: MmapRegion,
}

/// The reason why accesses are in bounds: the region was sized for the layout.
const IN_BOUNDS: &str = "shared memory has room for all that its layout counts";

impl SharedMemory {
    /// The guest address of the first byte. Not 0, which some servers treat as no address.
    /// Different from the address in this process, so that a server that confuses the two fails.
    const GUEST_START: u64 = 1 << 32;

    /// Creates a region of `bytes` zeroes.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = Arc::new(File::from(memfd_create("ringhaul-bench", flags)?));
        file.set_len(u64::try_from(bytes).map_err(io::Error::other)?)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let map = MmapRegion::from_file(FileOffset::from_arc(Arc::clone(&file), 0), bytes)
            .map_err(io::Error::other)?;
        Ok(Self { file, map })
    }

    /// The file of the region, for the server to map.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        to_u64(self.map.size())
    }

    /// The guest address of `offset`, for descriptors.
    #[inline]
    pub(crate) fn guest_addr(&self, offset: usize) -> u64 {
        Self::GUEST_START + to_u64(offset)
    }

    /// The address of `offset` in this process, by which vhost-user locates rings.
    pub(crate) fn user_addr(&self, offset: usize) -> u64 {
        to_u64(self.map.as_ptr().addr() + offset)
    }

    /// The offset of a guest address.
    #[inline]
    pub(crate) fn offset(&self, guest_addr: u64) -> usize {
        fits(guest_addr - Self::GUEST_START, "an offset in shared memory")
    }

    /// `len` bytes at `offset`.
    #[inline]
    pub(crate) fn at(&self, offset: usize, len: usize) -> VolatileSlice<'_, impl BitmapSlice> {
        self.map.get_slice(offset, len).expect(IN_BOUNDS)
    }

    /// Reads a number.
    #[inline]
    pub(crate) fn number<T: ByteValued>(&self, offset: usize) -> T {
        self.map.get_ref(offset).expect(IN_BOUNDS).load()
    }

    /// Writes a number.
    #[inline]
    pub(crate) fn put_number<T: ByteValued>(&self, offset: usize, value: T) {
        self.map.get_ref(offset).expect(IN_BOUNDS).store(value);
    }

    /// A ring's index or flags.
    #[inline]
    fn word(&self, offset: usize) -> &AtomicU16 {
        self.map.get_atomic_ref(offset).expect(IN_BOUNDS)
    }
}

/// Each length of the rings' parts has a branch, which inlining removes.
impl DriverMemory for SharedMemory {
    #[inline]
    fn load(&self, addr: u64, bytes: &mut [u8]) {
        let offset = self.offset(addr);
        if let Ok(word) = <&mut [u8; 2]>::try_from(&mut *bytes) {
            *word = self.word(offset).load(Ordering::Relaxed).to_ne_bytes();
        } else if let Ok(events) = <&mut [u8; 4]>::try_from(&mut *bytes) {
            *events = self.number::<u32>(offset).to_ne_bytes();
        } else if let Ok(element) = <&mut [u8; 8]>::try_from(&mut *bytes) {
            *element = self.number::<u64>(offset).to_ne_bytes();
        } else {
            self.at(offset, bytes.len()).copy_to(bytes);
        }
    }

    #[inline]
    fn store(&self, addr: u64, bytes: &[u8]) {
        let offset = self.offset(addr);
        if let Ok(word) = <[u8; 2]>::try_from(bytes) {
            self.word(offset).store(u16::from_ne_bytes(word), Ordering::Relaxed);
        } else if let Ok(events) = <[u8; 4]>::try_from(bytes) {
            self.put_number(offset, u32::from_ne_bytes(events));
        } else if let Ok(half) = <[u8; 8]>::try_from(bytes) {
            self.put_number(offset, u64::from_ne_bytes(half));
        } else if let Ok(descriptor) = <[u8; 16]>::try_from(bytes) {
            self.put_number(offset, descriptor);
        } else {
            self.at(offset, bytes.len()).copy_from(bytes);
        }
    }
}

#[inline]
fn to_u64(value: usize) -> u64 {
    fits(value, "a place in memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_bytes_are_loaded_at_any_length() {
        let memory = SharedMemory::new(4096).unwrap();
        for len in [1, 2, 4, 8, 16, 51, 64] {
            let data: Vec<_> = (1..=len).collect();
            let addr = memory.guest_addr(128);
            memory.store(addr, &data);
            let mut found = vec![0; data.len()];
            memory.load(addr, &mut found);
            assert_eq!(found, data);
        }
        assert_eq!(memory.number::<u16>(128), 0x0201);
    }

    #[test]
    fn shared_memory_cannot_be_truncated() {
        let memory = SharedMemory::new(8192).unwrap();
        let copy = File::from(memory.fd().try_clone_to_owned().unwrap());
        assert!(copy.set_len(0).is_err());
    }
}
