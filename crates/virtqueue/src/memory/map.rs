//! The map: the regions of guest memory, and their addresses in this process.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use iomem::{copy_in, copy_out};

use crate::error::MemoryError;
use crate::region::{self, MappingRules, Region, RegionConfig};
use crate::sigbus::losses;

/// The fields of a region that translation needs, copied into caches.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostRegion {
    pub(super) guest_addr: u64,
    pub(super) size: u64,
    pub(super) host: *mut u8,
}

// SAFETY: the pointer is only a number here. Every access through it must allow for concurrent
// accesses by the guest, so it is as well defined from several threads as from one.
unsafe impl Send for HostRegion {}
// SAFETY: as above; a shared HostRegion gives no access of its own.
unsafe impl Sync for HostRegion {}

impl HostRegion {
    pub(super) const NONE: Self = Self { guest_addr: 0, size: 0, host: ptr::null_mut() };

    /// Returns the host address of `addr` and the number of bytes from there to the end of the
    /// region. `None` if `addr` is not in the region.
    #[inline]
    pub(super) fn tail(&self, addr: u64) -> Option<(*mut u8, usize)> {
        let offset = addr.wrapping_sub(self.guest_addr);
        (offset < self.size)
            .then(|| (self.host.wrapping_add(to_usize(offset)), to_usize(self.size - offset)))
    }
}

/// The guest's physical memory as mapped into this process: an immutable set of regions.
///
/// A change makes a new map, which shares the mappings that stay. A mapping goes away with the last
/// map that has it, so the memory stays usable while the map is kept.
#[derive(Debug)]
pub struct GuestMemory {
    /// Sorted by guest address, like `regions`.
    pub(super) hosts: Vec<HostRegion>,
    regions: Vec<Arc<Region>>,
    /// The value of [`losses`] at which no region of this map was lost.
    losses: AtomicU64,
}

impl GuestMemory {
    /// Maps the files of all regions, shared, for reading and writing. No descriptor is kept open.
    ///
    /// # Errors
    ///
    /// If there are more than [`MAX_REGIONS`](crate::MAX_REGIONS), or if one is empty, wraps,
    /// overlaps a neighbour, is longer than its file, is against the rules or cannot be mapped.
    pub fn new(regions: &[RegionConfig], rules: &MappingRules) -> Result<Self, MemoryError> {
        region::check_count(regions.len())?;
        let mapped = regions.iter().map(|config| Region::map(config, rules).map(Arc::new));
        Self::from_regions(mapped.collect::<Result<_, _>>()?)
    }

    /// Maps private zeroes for pairs of guest address and bytes. Front-end addresses equal guest
    /// addresses.
    ///
    /// # Errors
    ///
    /// As for [`GuestMemory::new`].
    pub fn anonymous(ranges: &[(u64, u64)]) -> Result<Self, MemoryError> {
        region::check_count(ranges.len())?;
        let mapped = ranges.iter().map(|&(addr, size)| Region::anonymous(addr, size).map(Arc::new));
        Self::from_regions(mapped.collect::<Result<_, _>>()?)
    }

    /// Makes a map without regions, for a device whose front-end has not added any yet.
    pub fn empty() -> Self {
        Self { hosts: Vec::new(), regions: Vec::new(), losses: AtomicU64::new(0) }
    }

    /// Makes a map of this map's regions and one more.
    ///
    /// # Errors
    ///
    /// As for [`GuestMemory::new`].
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

    /// Makes a map without the region that has exactly these addresses and this size in bytes.
    ///
    /// # Errors
    ///
    /// [`MemoryError::UnknownRegion`] if there is none.
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

    /// Returns the guest address of front-end address `user_addr`, if that is in a region. A
    /// front-end gives ring addresses in this form.
    pub fn guest_addr_of_user(&self, user_addr: u64) -> Option<u64> {
        self.regions.iter().find_map(|region| region.guest_addr_of_user(user_addr))
    }

    /// Returns the guest address of host address `host`, if that is in a region. A log of writes
    /// needs it, for bytes written through a list of buffers.
    pub fn guest_addr_of_host(&self, host: *const u8) -> Option<u64> {
        let offset = |region: &HostRegion| host.addr().checked_sub(region.host.addr());
        self.hosts.iter().find_map(|region| {
            let offset = offset(region)? as u64;
            (offset < region.size).then(|| region.guest_addr + offset)
        })
    }

    /// The number of bytes in all regions.
    pub fn bytes(&self) -> u64 {
        self.hosts.iter().map(|region| region.size).sum()
    }

    /// The guest address behind the last region; 0 without regions.
    pub fn end(&self) -> u64 {
        self.hosts.last().map_or(0, |region| region.guest_addr + region.size)
    }

    /// The number of regions.
    pub fn num_regions(&self) -> usize {
        self.regions.len()
    }

    /// Copies from guest memory. The range may cross regions that touch. An integer that is aligned
    /// in this process is read at once.
    ///
    /// # Errors
    ///
    /// [`MemoryError::Unmapped`] if part of the range is in no region. `dst` may have been written
    /// in part.
    pub fn read(&self, guest_addr: u64, dst: &mut [u8]) -> Result<(), MemoryError> {
        let mut done = 0;
        self.for_each_piece(guest_addr, dst.len(), |host, len| {
            // SAFETY: `host` is the start of `len` bytes that this map has mapped, and `dst` has
            // as many left because the pieces add up to its length.
            unsafe { copy_out(host, dst[done..].as_mut_ptr(), len) };
            done += len;
        })
    }

    /// Copies into guest memory. The range may cross regions that touch. An integer that is aligned
    /// in this process is written at once.
    ///
    /// # Errors
    ///
    /// [`MemoryError::Unmapped`] if part of the range is in no region. The bytes before it may have
    /// been written.
    pub fn write(&self, guest_addr: u64, src: &[u8]) -> Result<(), MemoryError> {
        let mut done = 0;
        self.for_each_piece(guest_addr, src.len(), |host, len| {
            // SAFETY: `host` is the start of `len` bytes that this map has mapped, and `src` has
            // as many left because the pieces add up to its length.
            unsafe { copy_in(src[done..].as_ptr(), host, len) };
            done += len;
        })
    }

    /// Returns true if no access has found memory of this map gone. Otherwise, reads may have
    /// returned zeroes, and writes are lost. Takes two loads, unless any map's region is lost.
    #[inline]
    pub fn is_intact(&self) -> bool {
        // Load this first: a later loss changes the number again.
        let losses = losses();
        losses == self.losses.load(Ordering::Relaxed) || self.check_regions(losses)
    }

    #[cold]
    fn check_regions(&self, losses: u64) -> bool {
        let intact = !self.regions.iter().any(|region| region.is_lost());
        if intact {
            self.losses.store(losses, Ordering::Relaxed);
        }
        intact
    }

    /// Makes a map without the regions that are lost.
    pub(crate) fn without_lost(&self) -> Result<Self, MemoryError> {
        Self::from_regions(self.regions.iter().filter(|r| !r.is_lost()).cloned().collect())
    }

    /// Returns the host address of a range inside one region. It is good while the map lives.
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
    pub(super) fn find(&self, addr: u64) -> Option<&HostRegion> {
        let above = self.hosts.partition_point(|region| region.guest_addr <= addr);
        let region = self.hosts.get(above.checked_sub(1)?)?;
        (addr - region.guest_addr < region.size).then_some(region)
    }

    pub(super) fn for_each_piece(
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
            // Regions end below 2^64, so the address after a piece cannot wrap.
            addr += len as u64;
        }
        Ok(())
    }
}

/// Converts a guest address or a length, which always fits.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "usize is 64 bits wide, see lib.rs")]
pub(super) fn to_usize(value: u64) -> usize {
    value as usize
}
