//! A byte of shared memory, taken from a list for later.

use crate::memory::Memory;

/// A byte of shared memory that may be written. Keeps it mapped.
#[derive(Debug)]
pub struct SharedByte {
    address: *mut u8,
    memory: Memory,
}

impl SharedByte {
    /// The byte at `address`, which is in a range of a list of `memory`.
    #[inline]
    pub(crate) fn new(address: *mut u8, memory: Memory) -> Self {
        Self { address, memory }
    }

    /// Writes the byte.
    #[inline]
    pub fn write(&self, value: u8) {
        // SAFETY: the byte is in a range of a list, which `self.memory` keeps mapped, and a byte
        // needs no alignment.
        unsafe { self.address.write_volatile(value) };
        if self.memory.is_logged() {
            self.memory.report(self.address, 1);
        }
    }
}
