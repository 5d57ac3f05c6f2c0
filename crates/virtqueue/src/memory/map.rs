//! The map: which regions there are, and where they are in this process.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use iomem::{copy_in, copy_out};

use crate::error::MemoryError;
use crate::region::{self, MappingRules, Region, RegionConfig};
use crate::sigbus::losses;

/// What translation needs to know of a region; copied into caches.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostRegion {
    pub(super) guest_addr: u64,
    pub(super) size: u64,
    pub(super) host: *mut u8,
}

// SAFETY: the pointer is only a number here. Those who access what it points to do so with
// volatile or atomic accesses, which is as well defined from several threads as from one, since
// the guest is one more.
unsafe impl Send for HostRegion {}
// SAFETY: as above; a shared HostRegion gives no access of its own.
unsafe impl Sync for HostRegion {}

impl HostRegion {
    pub(super) const NONE: Self = Self { guest_addr: 0, size: 0, host: ptr::null_mut() };

    /// Bytes from `addr` to the end of the region, and where they are; none when it is elsewhere.
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
    /// Sorted by guest address, as `regions` is.
    pub(super) hosts: Vec<HostRegion>,
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

    /// The guest address of what this process has at `host`, if that is in a region: of a byte that
    /// was written through a list of buffers, for a log of writes.
    pub fn guest_addr_of_host(&self, host: *const u8) -> Option<u64> {
        let offset = |region: &HostRegion| host.addr().checked_sub(region.host.addr());
        self.hosts.iter().find_map(|region| {
            let offset = offset(region)? as u64;
            (offset < region.size).then(|| region.guest_addr + offset)
        })
    }

    /// Bytes of all regions together.
    pub fn bytes(&self) -> u64 {
        self.hosts.iter().map(|region| region.size).sum()
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
            // Regions end below 2^64, so what follows the end of a piece is an address too.
            addr += len as u64;
        }
        Ok(())
    }
}

/// Guest addresses and lengths fit.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "usize is 64 bits wide, see lib.rs")]
pub(super) fn to_usize(value: u64) -> usize {
    value as usize
}
