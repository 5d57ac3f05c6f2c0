//! Guest memory: the map, translation of guest addresses, and every access to guest bytes.
//!
//! Guest memory changes under our hands, so nothing here makes a Rust reference to it: bytes are
//! copied with volatile accesses. What other modules get to hold is narrow by construction. A
//! [`HostRanges`] is made by a [`Translator`] from one map, can only shrink afterwards, and keeps
//! that map alive; so its pointers are good for as long as anyone can reach them, and the modules
//! that use it need no `unsafe`.

mod local;
mod translator;

use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use libc::iovec;

use crate::error::MemoryError;
use crate::region::{self, MappingRules, Region, RegionConfig};
use crate::sigbus::losses;

pub use local::LocalMemory;
pub(crate) use translator::{Descriptor, Direction, Translator};

/// Bytes of a descriptor (virtio 1.3, section 2.7.5).
pub(crate) const DESCRIPTOR_BYTES: usize = 16;

/// What translation needs to know of a region; copied into caches.
#[derive(Debug, Clone, Copy)]
struct HostRegion {
    guest_addr: u64,
    size: u64,
    host: *mut u8,
}

// SAFETY: the pointer is only a number here. Those who access what it points to do so with
// volatile or atomic accesses, which is as well defined from several threads as from one, since
// the guest is one more.
unsafe impl Send for HostRegion {}
// SAFETY: as above; a shared HostRegion gives no access of its own.
unsafe impl Sync for HostRegion {}

impl HostRegion {
    const NONE: Self = Self { guest_addr: 0, size: 0, host: ptr::null_mut() };

    /// Bytes from `addr` to the end of the region, and where they are; none when it is elsewhere.
    #[inline]
    fn tail(&self, addr: u64) -> Option<(*mut u8, usize)> {
        let offset = addr.wrapping_sub(self.guest_addr);
        (offset < self.size)
            .then(|| (self.host.wrapping_add(to_usize(offset)), to_usize(self.size - offset)))
    }
}

/// The guest's physical memory as mapped into this process: an immutable set of regions.
///
/// A change makes a new map, which shares the mappings that stay. A mapping goes away with the last
/// map that has it, so whoever keeps a map may go on using its memory.
#[derive(Debug)]
pub struct GuestMemory {
    /// Sorted by guest address, as `regions` is.
    hosts: Vec<HostRegion>,
    regions: Vec<Arc<Region>>,
    /// What [`losses`] said when no region of this map was lost.
    losses: AtomicU64,
}

impl GuestMemory {
    /// Maps the files of all regions, shared, for reading and writing. No descriptor is kept open.
    ///
    /// # Errors
    ///
    /// When there are more than [`MAX_REGIONS`](crate::MAX_REGIONS), or one is empty, wraps,
    /// overlaps another, is longer than its file, is against the rules or cannot be mapped.
    pub fn new(regions: &[RegionConfig], rules: &MappingRules) -> Result<Self, MemoryError> {
        region::check_count(regions.len())?;
        let mapped = regions.iter().map(|config| Region::map(config, rules).map(Arc::new));
        Self::from_regions(mapped.collect::<Result<_, _>>()?)
    }

    /// Private zeroes for pairs of guest address and bytes; front-end addresses are the same.
    ///
    /// # Errors
    ///
    /// As [`GuestMemory::new`].
    pub fn anonymous(ranges: &[(u64, u64)]) -> Result<Self, MemoryError> {
        region::check_count(ranges.len())?;
        let mapped = ranges.iter().map(|&(addr, size)| Region::anonymous(addr, size).map(Arc::new));
        Self::from_regions(mapped.collect::<Result<_, _>>()?)
    }

    /// A map without regions, such as a device has before its front-end adds some.
    pub fn empty() -> Self {
        Self { hosts: Vec::new(), regions: Vec::new(), losses: AtomicU64::new(0) }
    }

    /// This map and one more region.
    ///
    /// # Errors
    ///
    /// As [`GuestMemory::new`].
    pub fn with_region(
        &self,
        config: &RegionConfig,
        rules: &MappingRules,
    ) -> Result<Self, MemoryError> {
        let mut regions = self.regions.clone();
        region::check_count(regions.len() + 1)?;
        regions.push(Arc::new(Region::map(config, rules)?));
        Self::from_regions(regions)
    }

    /// This map without the region that has exactly these addresses and this size in bytes.
    ///
    /// # Errors
    ///
    /// [`MemoryError::UnknownRegion`] when there is none.
    pub fn without_region(
        &self,
        guest_addr: u64,
        user_addr: u64,
        size: u64,
    ) -> Result<Self, MemoryError> {
        let mut regions = self.regions.clone();
        regions.retain(|region| !region.is(guest_addr, user_addr, size));
        if regions.len() == self.regions.len() {
            return Err(MemoryError::UnknownRegion { guest_addr, user_addr, size });
        }
        Self::from_regions(regions)
    }

    /// The guest address of what the front-end has at `user_addr`, if that is in a region. A
    /// front-end gives ring addresses in this form.
    pub fn guest_addr_of_user(&self, user_addr: u64) -> Option<u64> {
        self.regions.iter().find_map(|region| region.guest_addr_of_user(user_addr))
    }

    /// Where the regions are mapped in this process.
    pub fn host_ranges(&self) -> Vec<iovec> {
        let range = |region: &HostRegion| iovec {
            iov_base: region.host.cast(),
            iov_len: to_usize(region.size),
        };
        self.hosts.iter().map(range).collect()
    }

    /// How many regions the map has.
    pub fn num_regions(&self) -> usize {
        self.regions.len()
    }

    /// Copies from guest memory; the range may go over several regions that touch. An integer that
    /// is aligned in this process is read at once.
    ///
    /// # Errors
    ///
    /// [`MemoryError::Unmapped`] when some of the range is in no region; `dst` may then have been
    /// written in part.
    pub fn read(&self, guest_addr: u64, dst: &mut [u8]) -> Result<(), MemoryError> {
        let mut done = 0;
        self.for_each_piece(guest_addr, dst.len(), |host, len| {
            // SAFETY: `host` is the start of `len` bytes that this map has mapped, and `dst` has
            // as many left because the pieces add up to its length.
            unsafe { copy_out(host, dst[done..].as_mut_ptr(), len) };
            done += len;
        })
    }

    /// Copies into guest memory; the range may go over several regions that touch. An integer that
    /// is aligned in this process is written at once.
    ///
    /// # Errors
    ///
    /// [`MemoryError::Unmapped`] when some of the range is in no region; what lies before it may
    /// then have been written.
    pub fn write(&self, guest_addr: u64, src: &[u8]) -> Result<(), MemoryError> {
        let mut done = 0;
        self.for_each_piece(guest_addr, src.len(), |host, len| {
            // SAFETY: `host` is the start of `len` bytes that this map has mapped, and `src` has
            // as many left because the pieces add up to its length.
            unsafe { copy_in(src[done..].as_ptr(), host, len) };
            done += len;
        })
    }

    /// Whether no access has found memory of this map gone. Once this is false, zeroes may have
    /// been read from it, and what was written is lost. Two loads, unless any map's region is lost.
    #[inline]
    #[must_use]
    pub fn is_intact(&self) -> bool {
        // Read first: what is lost from now on changes the number again.
        let losses = losses();
        losses == self.losses.load(Ordering::Relaxed) || self.look_for_lost(losses)
    }

    #[cold]
    fn look_for_lost(&self, losses: u64) -> bool {
        let intact = !self.regions.iter().any(|region| region.is_lost());
        if intact {
            self.losses.store(losses, Ordering::Relaxed);
        }
        intact
    }

    /// This map without the regions that are lost.
    pub(crate) fn without_lost(&self) -> Result<Self, MemoryError> {
        Self::from_regions(self.regions.iter().filter(|r| !r.is_lost()).cloned().collect())
    }

    /// Where a range is in this process, if it is inside one region. Good while the map lives.
    pub(crate) fn host_of(&self, guest_addr: u64, len: usize) -> Option<*mut u8> {
        let (host, tail) = self.find(guest_addr)?.tail(guest_addr)?;
        (len <= tail).then_some(host)
    }

    fn from_regions(mut regions: Vec<Arc<Region>>) -> Result<Self, MemoryError> {
        region::sort_and_check(&mut regions)?;
        let hosts = regions.iter().map(|region| HostRegion {
            guest_addr: region.guest_addr(),
            size: region.size(),
            host: region.host(),
        });
        Ok(Self { hosts: hosts.collect(), regions, losses: AtomicU64::new(0) })
    }

    #[inline]
    fn find(&self, addr: u64) -> Option<&HostRegion> {
        let above = self.hosts.partition_point(|region| region.guest_addr <= addr);
        let region = self.hosts.get(above.checked_sub(1)?)?;
        (addr - region.guest_addr < region.size).then_some(region)
    }

    fn for_each_piece(
        &self,
        guest_addr: u64,
        len: usize,
        mut piece: impl FnMut(*mut u8, usize),
    ) -> Result<(), MemoryError> {
        let (mut addr, mut left) = (guest_addr, len);
        while left > 0 {
            let (host, tail) = self
                .find(addr)
                .and_then(|region| region.tail(addr))
                .ok_or(MemoryError::Unmapped { addr })?;
            let len = left.min(tail);
            piece(host, len);
            left -= len;
            // Regions end below 2^64, so what follows the end of a piece is an address too.
            addr += len as u64;
        }
        Ok(())
    }
}

/// A descriptor table whose mapping was checked.
#[derive(Debug, Clone, Copy)]
struct Table {
    guest_addr: u64,
    entries: u16,
    /// Null when the table must be read byte by byte, as it crosses regions or is not aligned.
    host: *const u64,
}

impl Table {
    /// Reads entry `index`, each byte once; none when the table has no such entry. `memory` is the
    /// map that the table was found in.
    #[inline]
    fn read(&self, memory: &GuestMemory, index: u16) -> Option<Descriptor> {
        if index >= self.entries {
            return None;
        }
        let index = usize::from(index);
        if self.host.is_null() {
            return self.read_bytes(memory, index);
        }
        // SAFETY: the table was found to have `entries` descriptors of two aligned words within
        // one region of `memory`, which the translator that has both keeps mapped, and `index` is
        // less than that.
        let words = unsafe {
            let words = self.host.add(index * (DESCRIPTOR_BYTES / size_of::<u64>()));
            [words.read_volatile(), words.add(1).read_volatile()]
        };
        Some(Descriptor::from_words(words))
    }
}

/// Ranges of this process that are guest memory, and what keeps them mapped.
#[derive(Debug)]
pub(crate) struct HostRanges {
    iovecs: Vec<iovec>,
    /// Those before it are used up.
    first: usize,
    /// What is left.
    bytes: usize,
    memory: LocalMemory,
}

impl HostRanges {
    /// The ranges that are left; none is empty.
    #[inline]
    pub(crate) fn as_slice(&self) -> &[iovec] {
        self.iovecs.get(self.first..).unwrap_or_default()
    }

    /// The sum of their lengths.
    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// What keeps the ranges mapped.
    #[inline]
    pub(crate) fn memory(&self) -> &LocalMemory {
        &self.memory
    }

    /// Copies from `offset` on until `dst` is full or the ranges end; returns bytes.
    #[inline]
    pub(crate) fn read(&self, offset: usize, dst: &mut [u8]) -> usize {
        self.for_each_piece(offset, dst.len(), |host, done, len| {
            let dst = &mut dst[done..done + len];
            // SAFETY: `host` is the start of `len` bytes of these ranges, which are mapped guest
            // memory, kept so by `self.memory`.
            unsafe { copy_out(host, dst.as_mut_ptr(), dst.len()) };
        })
    }

    /// Copies to `offset` and on until `src` or the ranges end; returns bytes.
    #[inline]
    pub(crate) fn write(&self, offset: usize, src: &[u8]) -> usize {
        self.for_each_piece(offset, src.len(), |host, done, len| {
            let src = &src[done..done + len];
            // SAFETY: as in `read`, the other way round.
            unsafe { copy_in(src.as_ptr(), host, src.len()) };
        })
    }

    /// Drops bytes from the front, at most all.
    #[inline]
    pub(crate) fn advance(&mut self, bytes: usize) {
        let mut left = bytes.min(self.bytes);
        self.bytes -= left;
        while let Some(range) = self.iovecs.get_mut(self.first) {
            if left < range.iov_len {
                range.iov_base = range.iov_base.wrapping_byte_add(left);
                range.iov_len -= left;
                return;
            }
            left -= range.iov_len;
            self.first += 1;
        }
    }

    /// Takes the last byte off.
    #[inline]
    pub(crate) fn take_last_byte(&mut self) -> Option<GuestByte> {
        // An empty range is never kept, so while a byte is left the last range has one.
        self.bytes = self.bytes.checked_sub(1)?;
        let range = self.iovecs.last_mut()?;
        range.iov_len -= 1;
        let host = range.iov_base.cast::<u8>().wrapping_add(range.iov_len);
        if range.iov_len == 0 {
            self.iovecs.pop();
        }
        Some(GuestByte { host, memory: self.memory.clone() })
    }

    /// The storage, the index of the first iovec that is left, and what keeps them mapped.
    #[inline]
    pub(crate) fn into_raw_parts(self) -> (Vec<iovec>, usize, LocalMemory) {
        let mut this = ManuallyDrop::new(self);
        let iovecs = std::mem::take(&mut this.iovecs);
        // SAFETY: `this` is not dropped, so its field may be moved out, once.
        let memory = unsafe { ptr::read(&raw const this.memory) };
        (iovecs, this.first, memory)
    }

    /// Calls `piece` with a host address, the bytes before it and its length, for each range that
    /// has some of the `len` bytes at `offset`; returns the bytes.
    #[inline]
    fn for_each_piece(
        &self,
        mut offset: usize,
        len: usize,
        mut piece: impl FnMut(*mut u8, usize, usize),
    ) -> usize {
        let mut done = 0;
        for range in self.as_slice() {
            if done == len {
                break;
            }
            if offset >= range.iov_len {
                offset -= range.iov_len;
                continue;
            }
            let count = (len - done).min(range.iov_len - offset);
            piece(range.iov_base.cast::<u8>().wrapping_add(offset), done, count);
            done += count;
            offset = 0;
        }
        done
    }
}

impl Drop for HostRanges {
    #[inline]
    fn drop(&mut self) {
        if self.iovecs.capacity() > 0 {
            self.memory.recycle(std::mem::take(&mut self.iovecs));
        }
    }
}

/// One byte of guest memory that the device may write; keeps it mapped.
#[derive(Debug)]
pub struct GuestByte {
    host: *mut u8,
    memory: LocalMemory,
}

impl GuestByte {
    /// Writes the byte. The driver sees it at the latest when the chain's used element is
    /// published.
    #[inline]
    pub fn write(&self, value: u8) {
        // SAFETY: the byte is in a region of `self.memory`, which keeps it mapped, and a byte
        // needs no alignment.
        unsafe { self.host.write_volatile(value) };
    }

    /// What keeps the byte mapped.
    pub fn memory(&self) -> &LocalMemory {
        &self.memory
    }
}

/// Guest addresses and lengths fit.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "usize is 64 bits wide, see lib.rs")]
fn to_usize(value: u64) -> usize {
    value as usize
}

/// Copies from memory that others may be writing; reads each byte once, and in pieces as large as
/// alignment allows, up to a word.
///
/// # Safety
///
/// `src` must be the start of `len` bytes mapped for reading, `dst` of `len` bytes that belong to
/// the caller alone.
#[inline]
unsafe fn copy_out(mut src: *const u8, mut dst: *mut u8, mut len: usize) {
    while len > 0 {
        let count = piece(src.addr(), len);
        // SAFETY: `count` bytes are left of both, and `src` is aligned to `count`. Both pointers
        // advance by what was copied.
        unsafe {
            match count {
                8 => dst.cast::<u64>().write_unaligned(src.cast::<u64>().read_volatile()),
                4 => dst.cast::<u32>().write_unaligned(src.cast::<u32>().read_volatile()),
                2 => dst.cast::<u16>().write_unaligned(src.cast::<u16>().read_volatile()),
                _ => dst.write(src.read_volatile()),
            }
            (src, dst) = (src.add(count), dst.add(count));
        }
        len -= count;
    }
}

/// Copies into memory that others may be reading; writes each byte once, and in pieces as large as
/// alignment allows, up to a word.
///
/// # Safety
///
/// `src` must be the start of `len` bytes that nobody writes, `dst` of `len` bytes mapped for
/// writing.
#[inline]
unsafe fn copy_in(mut src: *const u8, mut dst: *mut u8, mut len: usize) {
    while len > 0 {
        let count = piece(dst.addr(), len);
        // SAFETY: as in `copy_out`, the other way round.
        unsafe {
            match count {
                8 => dst.cast::<u64>().write_volatile(src.cast::<u64>().read_unaligned()),
                4 => dst.cast::<u32>().write_volatile(src.cast::<u32>().read_unaligned()),
                2 => dst.cast::<u16>().write_volatile(src.cast::<u16>().read_unaligned()),
                _ => dst.write_volatile(src.read()),
            }
            (src, dst) = (src.add(count), dst.add(count));
        }
        len -= count;
    }
}

/// The bytes to copy at once at a guest address in this process, of `len` that are left.
#[inline]
fn piece(addr: usize, len: usize) -> usize {
    [8, 4, 2].into_iter().find(|&size| len >= size && addr.is_multiple_of(size)).unwrap_or(1)
}
