//! The memory of a guest as its CPUs see it, and the log of the pages that they write.

use std::cell::RefCell;
use std::collections::BTreeSet;

use virtqueue::driver::DriverMemory;
use virtqueue::{GuestMemory, MemoryError};

/// Bytes of guest memory that a bit of a log stands for.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// The pages from `addr` on that hold `bytes` bytes, which are not 0.
pub(crate) fn pages(addr: u64, bytes: u64) -> impl Iterator<Item = u64> {
    addr / PAGE_BYTES..=(addr + bytes - 1) / PAGE_BYTES
}

/// A map of guest memory, which a migration replaces.
pub(crate) struct Ram {
    map: RefCell<GuestMemory>,
    /// The pages that the guest has written since the last look.
    written: RefCell<BTreeSet<u64>>,
}

impl Ram {
    pub(crate) fn new(map: GuestMemory) -> Self {
        Self { map: RefCell::new(map), written: RefCell::default() }
    }

    pub(crate) fn read(&self, addr: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        self.map.borrow().read(addr, bytes)
    }

    pub(crate) fn write(&self, addr: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        self.written.borrow_mut().extend(pages(addr, bytes.len().max(1) as u64));
        self.map.borrow().write(addr, bytes)
    }

    /// Continues in another map.
    pub(crate) fn replace(&self, map: GuestMemory) {
        *self.map.borrow_mut() = map;
    }

    /// Returns the pages that the guest has written since the last call.
    pub(crate) fn take_written(&self) -> BTreeSet<u64> {
        self.written.take()
    }
}

/// Panics if the memory is not mapped.
impl DriverMemory for Ram {
    fn load(&self, addr: u64, bytes: &mut [u8]) {
        self.read(addr, bytes).expect("a driver reads memory that is mapped");
    }

    fn store(&self, addr: u64, bytes: &[u8]) {
        self.write(addr, bytes).expect("a driver writes memory that is mapped");
    }
}
