//! Descriptors, used elements, and the memory that they are in.

use std::ops::Deref;

use crate::memory::GuestMemory;

/// The chain continues (virtio 1.3, section 2.7.5).
pub const NEXT: u16 = 1;
/// The device writes the buffer.
pub const WRITE: u16 = 2;
/// The buffer is a table of descriptors.
pub const INDIRECT: u16 = 4;

/// Memory that a driver shares with a device, by guest addresses.
///
/// The implementor decides how an access to unmapped memory ends. In a test it is a mistake of the
/// test, and a panic. A fuzz target, whose rings may be anywhere, ignores it.
///
/// The methods have names of their own. A `write` on a shared pointer to [`GuestMemory`] would be
/// this trait's, which panics, and not the memory's, which returns an error.
pub trait DriverMemory {
    /// Copies from guest memory.
    fn load(&self, addr: u64, bytes: &mut [u8]);

    /// Copies into guest memory. An aligned number is written at once.
    fn store(&self, addr: u64, bytes: &[u8]);
}

/// Panics if the memory is not mapped.
impl DriverMemory for GuestMemory {
    fn load(&self, addr: u64, bytes: &mut [u8]) {
        GuestMemory::read(self, addr, bytes).expect("a driver reads memory that is mapped");
    }

    fn store(&self, addr: u64, bytes: &[u8]) {
        GuestMemory::write(self, addr, bytes).expect("a driver writes memory that is mapped");
    }
}

impl<P: Deref<Target: DriverMemory>> DriverMemory for P {
    fn load(&self, addr: u64, bytes: &mut [u8]) {
        self.deref().load(addr, bytes);
    }

    fn store(&self, addr: u64, bytes: &[u8]) {
        self.deref().store(addr, bytes);
    }
}

/// A descriptor (virtio 1.3, section 2.7.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Desc {
    /// Guest address.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// A combination of [`NEXT`], [`WRITE`] and [`INDIRECT`].
    pub flags: u16,
    /// The index of the next descriptor, if the flags have [`NEXT`].
    pub next: u16,
}

impl Desc {
    /// A buffer for the device to read.
    pub fn readable(addr: u64, len: u32) -> Self {
        Self { addr, len, flags: 0, next: 0 }
    }

    /// A buffer for the device to write.
    pub fn writable(addr: u64, len: u32) -> Self {
        Self { addr, len, flags: WRITE, next: 0 }
    }

    /// An indirect table.
    pub(super) fn table(addr: u64, entries: usize) -> Self {
        let len = entries * 16;
        let len = u32::try_from(len).expect("an indirect table is shorter than 4 GiB");
        Self { addr, len, flags: INDIRECT, next: 0 }
    }

    /// Returns this descriptor, linked to `next`.
    #[must_use]
    pub fn then(self, next: u16) -> Self {
        Self { flags: self.flags | NEXT, next, ..self }
    }

    /// The descriptor as it is in memory.
    pub fn bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// A used element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The head of the chain.
    pub head: u32,
    /// The number of bytes that the device has written.
    pub bytes: u32,
}
