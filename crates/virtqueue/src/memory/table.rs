//! Descriptor tables in guest memory.

#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
use std::arch::asm;
use std::ptr;

use super::map::GuestMemory;

/// The largest size of a queue in entries. The specification allows up to 32768.
pub const MAX_QUEUE_SIZE: u16 = 1024;

/// The most descriptors of an indirect table. The specification allows as many as the queue size.
/// Linux makes tables as long as the device allows segments, regardless of the queue size.
pub const MAX_INDIRECT_ENTRIES: u16 = 1024;

/// Bytes of a descriptor (virtio 1.3, section 2.7.5).
pub(crate) const DESCRIPTOR_BYTES: usize = 16;

/// The buffer is a table of descriptors (virtio 1.3, section 2.7.5).
pub(crate) const DESC_F_INDIRECT: u16 = 4;

/// Prefetches a line of memory that is soon read, and often written then: a header, beside which
/// drivers put the place of the answer.
#[inline]
pub(super) fn prefetch(host: *const u8) {
    // SAFETY: the instruction is a hint. It accesses nothing, and wrong addresses do no harm.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    unsafe {
        asm!("prefetchw [{}]", in(reg) host, options(nostack, preserves_flags, readonly));
    }
    // SAFETY: as above.
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    unsafe {
        asm!("prfm pstl1keep, [{}]", in(reg) host, options(nostack, preserves_flags, readonly));
    }
    #[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri))]
    let _ = host;
}

/// A descriptor, read once from a table in guest memory (virtio 1.3, section 2.7.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

impl Descriptor {
    /// Decodes the two words of a descriptor, which are little-endian as loaded.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "takes the fields of a word apart")]
    pub(crate) fn from_words([low, high]: [u64; 2]) -> Self {
        let (addr, rest) = (u64::from_le(low), u64::from_le(high));
        Self { addr, len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
    }

    /// Returns the descriptor of a packed ring that was decoded as one of a split ring. The two
    /// last fields have changed places, and the buffer id is in place of the link (virtio 1.3,
    /// section 2.8.13).
    #[inline]
    pub(crate) fn of_packed(self) -> Self {
        Self { flags: self.next, next: self.flags, ..self }
    }
}

/// A descriptor table whose mapping was checked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Table {
    guest_addr: u64,
    pub(super) entries: u16,
    /// Null if the table must be read byte by byte, because it crosses regions or is not aligned.
    host: *const u64,
}

impl Table {
    /// Makes a table. `host` is the address of all entries if they are within one region.
    #[inline]
    pub(super) fn new(guest_addr: u64, entries: u16, host: Option<*mut u8>) -> Self {
        let aligned = host.filter(|host| host.addr().is_multiple_of(align_of::<u64>()));
        Self {
            guest_addr,
            entries,
            host: aligned.map_or(ptr::null(), |host| host.cast_const().cast()),
        }
    }

    /// Reads entry `index`, each byte once. `None` if the table has no such entry. `memory` must be
    /// the map that the table was found in.
    #[inline]
    pub(super) fn read(&self, memory: &GuestMemory, index: u16) -> Option<Descriptor> {
        if index >= self.entries {
            return None;
        }
        let index = usize::from(index);
        if self.host.is_null() {
            return self.read_bytes(memory, index);
        }
        // SAFETY: the table was found to have `entries` descriptors of two aligned words within one
        // region of `memory`. The translator that has both keeps the region mapped, and `index` is
        // less than `entries`.
        let words = unsafe {
            let words = self.host.add(index * (DESCRIPTOR_BYTES / size_of::<u64>()));
            [words.read_volatile(), words.add(1).read_volatile()]
        };
        Some(Descriptor::from_words(words))
    }

    /// Prefetches entry `index`, which the table need not have.
    #[inline]
    pub(super) fn prefetch(&self, index: u16) {
        let words = usize::from(index) * (DESCRIPTOR_BYTES / size_of::<u64>());
        prefetch(self.host.wrapping_add(words).cast());
    }

    /// Returns true if both tables have the same address.
    #[inline]
    pub(super) fn is(&self, other: &Self) -> bool {
        self.guest_addr == other.guest_addr
    }

    #[cold]
    fn read_bytes(&self, memory: &GuestMemory, index: usize) -> Option<Descriptor> {
        let (mut low, mut high) = ([0; size_of::<u64>()], [0; size_of::<u64>()]);
        let addr = self.guest_addr + (index * DESCRIPTOR_BYTES) as u64;
        memory.read(addr, &mut low).ok()?;
        memory.read(addr + low.len() as u64, &mut high).ok()?;
        Some(Descriptor::from_words([u64::from_ne_bytes(low), u64::from_ne_bytes(high)]))
    }
}
