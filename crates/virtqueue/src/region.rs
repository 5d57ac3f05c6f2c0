//! A region of guest memory: its description, its checks and its mapping.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::ptr;
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Statx, StatxFlags, fcntl_get_seals, statx};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::budget::{MappingBudget, Share};
use crate::error::MemoryError;
use crate::sigbus::WatchedMapping;

/// The most regions of a memory map: the number that QEMU asks for with configurable memory slots.
pub const MAX_REGIONS: usize = 509;

/// The largest block size of a file that is taken for a page size: the largest huge page there is.
const MAX_PAGE_SIZE: u64 = 16 << 30;

/// The place of a region of guest memory (vhost-user specification, "Memory region description").
#[derive(Debug, Clone)]
pub struct RegionConfig {
    /// Start in the guest's physical address space.
    pub guest_addr: u64,
    /// Size in bytes, not zero.
    pub size: u64,
    /// Start in the front-end's address space, in which the front-end names ring addresses.
    pub user_addr: u64,
    /// The file to map, open for reading and writing. The map does not keep it open.
    pub file: Arc<File>,
    /// Offset of the region in the file, in bytes. It need not be aligned.
    pub file_offset: u64,
}

/// The rules for mapping regions.
#[derive(Debug, Clone)]
pub struct MappingRules {
    /// The files that may be mapped.
    pub files: MemoryFiles,
    /// The end of the error about a file that may not be mapped, such as "; use memfd". Empty for
    /// none.
    pub advice: &'static str,
    /// The limit on mapped bytes.
    pub budget: MappingBudget,
}

impl Default for MappingRules {
    /// Allows files that cannot make an access wait, without a limit on bytes.
    fn default() -> Self {
        Self { files: MemoryFiles::default(), advice: "", budget: MappingBudget::unlimited() }
    }
}

/// The kinds of files that may be guest memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MemoryFiles {
    /// Files that have seals (memfd, tmpfs, hugetlbfs) and DAX devices. Their pages come from the
    /// kernel alone, so no access waits for a program or a server.
    #[default]
    Sealable,
    /// Any file that can be mapped. An access waits for the owner of the pages, for ever if it is a
    /// FUSE file whose program does not answer. Only for trusted front-ends.
    Any,
}

/// A mapped region. Successive maps share it.
#[derive(Debug)]
pub(crate) struct Region {
    guest_addr: u64,
    size: u64,
    user_addr: u64,
    /// Bytes of the mapping that lie before the region, because offsets of mappings are aligned.
    lead: usize,
    /// `None` for private memory, which cannot be truncated. Dropped before the mapping.
    watched: Option<WatchedMapping>,
    mapping: Mapping,
    /// The mapping's share of the budget, given back after the mapping is gone.
    _share: Option<Share>,
}

impl Region {
    /// Checks the description and maps the file, shared, for reading and writing.
    pub(crate) fn map(config: &RegionConfig, rules: &MappingRules) -> Result<Self, MemoryError> {
        let RegionConfig { guest_addr, size, user_addr, file_offset, .. } = *config;
        let wrap = || MemoryError::AddressWrap { guest_addr, user_addr, file_offset, size };
        check_addresses(guest_addr, user_addr, size, file_offset)?;
        let end = file_offset.checked_add(size).ok_or_else(wrap)?;
        let status = examine(config, rules)?;
        check_file(guest_addr, &status, end, rules.advice)?;

        // hugetlbfs reports its page size as the block size, and neither maps nor unmaps parts of a
        // page. The mapping may pass the end of the file, but nothing beyond the region is touched.
        let page = mapping_alignment(&status);
        let start = file_offset & !(page - 1);
        let length = (end - start).checked_next_multiple_of(page).ok_or_else(wrap)?;
        let share = rules.budget.take(length).map_err(|over| MemoryError::OverBudget {
            guest_addr,
            needed: length,
            what: over.what,
            mapped: over.mapped_bytes,
            limit: over.limit_bytes,
        })?;
        let length = usize::try_from(length).map_err(|_| wrap())?;
        let mapping = Mapping::map_file(&config.file, start, length)
            .map_err(|cause| MemoryError::Map { guest_addr, size, cause })?;
        let lead = usize::try_from(file_offset - start).map_err(|_| wrap())?;
        let watched = Some(WatchedMapping::new(mapping.as_ptr(), mapping.len()));
        Ok(Self { guest_addr, size, user_addr, lead, watched, mapping, _share: Some(share) })
    }

    /// Maps private memory of this process, at the same guest and front-end address.
    pub(crate) fn anonymous(guest_addr: u64, size: u64) -> Result<Self, MemoryError> {
        check_addresses(guest_addr, guest_addr, size, 0)?;
        let length = usize::try_from(size).map_err(|_| MemoryError::AddressWrap {
            guest_addr,
            user_addr: guest_addr,
            file_offset: 0,
            size,
        })?;
        let mapping = Mapping::private(length).map_err(|cause| MemoryError::Map {
            guest_addr,
            size,
            cause,
        })?;
        let (user_addr, lead, watched) = (guest_addr, 0, None);
        Ok(Self { guest_addr, size, user_addr, lead, watched, mapping, _share: None })
    }

    /// Start in guest memory.
    pub(crate) fn guest_addr(&self) -> u64 {
        self.guest_addr
    }

    /// Size in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Returns the guest address of front-end address `user_addr`, if that is in this region.
    pub(crate) fn guest_addr_of_user(&self, user_addr: u64) -> Option<u64> {
        let offset = user_addr.checked_sub(self.user_addr)?;
        (offset < self.size).then(|| self.guest_addr + offset)
    }

    /// Returns true if the region has exactly these addresses and this size.
    pub(crate) fn is(&self, guest_addr: u64, user_addr: u64, size: u64) -> bool {
        (self.guest_addr, self.user_addr, self.size) == (guest_addr, user_addr, size)
    }

    /// Returns true if an access has found that the memory behind the region is gone. The contents
    /// are meaningless then.
    pub(crate) fn is_lost(&self) -> bool {
        self.watched.as_ref().is_some_and(WatchedMapping::is_lost)
    }

    /// Start of the region in this process. `size` bytes from there are mapped for as long as the
    /// region lives.
    pub(crate) fn host(&self) -> *mut u8 {
        self.mapping.as_ptr().wrapping_add(self.lead)
    }
}

/// Sorts regions by guest address and checks that they can form one map.
pub(crate) fn sort_and_check(regions: &mut [Arc<Region>]) -> Result<(), MemoryError> {
    check_count(regions.len())?;
    regions.sort_unstable_by_key(|region| region.user_addr);
    check_overlap("front-end", regions, |region| region.user_addr)?;
    regions.sort_unstable_by_key(|region| region.guest_addr);
    check_overlap("guest", regions, |region| region.guest_addr)
}

/// Checks the number of regions before any of them is mapped.
pub(crate) fn check_count(count: usize) -> Result<(), MemoryError> {
    if count > MAX_REGIONS {
        return Err(MemoryError::TooManyRegions { count, max: MAX_REGIONS });
    }
    Ok(())
}

fn check_addresses(
    guest_addr: u64,
    user_addr: u64,
    size: u64,
    file_offset: u64,
) -> Result<(), MemoryError> {
    if size == 0 {
        return Err(MemoryError::EmptyRegion { guest_addr });
    }
    // The end of a region must be a valid number, too, so that no later sum can wrap.
    if guest_addr.checked_add(size).is_none() || user_addr.checked_add(size).is_none() {
        return Err(MemoryError::AddressWrap { guest_addr, user_addr, file_offset, size });
    }
    Ok(())
}

/// Returns the status of the file, if it may be mapped. A FUSE file system need not answer, so no
/// call may reach it before the file is known to be memory.
fn examine(config: &RegionConfig, rules: &MappingRules) -> Result<Statx, MemoryError> {
    let RegionConfig { guest_addr, file, .. } = config;
    let status = |flags| {
        statx(file, c"", AtFlags::EMPTY_PATH | flags, StatxFlags::BASIC_STATS)
            .map_err(|errno| MemoryError::Stat { guest_addr: *guest_addr, cause: errno.into() })
    };
    if rules.files == MemoryFiles::Any {
        return status(AtFlags::empty());
    }
    let known = status(AtFlags::STATX_DONT_SYNC)?;
    if fcntl_get_seals(file).is_ok() || is_dax(&known).unwrap_or(false) {
        return Ok(known);
    }
    Err(MemoryError::NotMemory { guest_addr: *guest_addr, advice: rules.advice })
}

/// Returns true for a DAX device, which is memory with a name in /dev.
fn is_dax(status: &Statx) -> io::Result<bool> {
    if file_type(status) != FileType::CharacterDevice {
        return Ok(false);
    }
    let (major, minor) = (status.stx_rdev_major, status.stx_rdev_minor);
    let kind = std::fs::read_link(format!("/sys/dev/char/{major}:{minor}/subsystem"))?;
    Ok(kind.ends_with("dax"))
}

fn file_type(status: &Statx) -> FileType {
    FileType::from_raw_mode(u32::from(status.stx_mode))
}

fn check_file(
    guest_addr: u64,
    status: &Statx,
    end: u64,
    advice: &'static str,
) -> Result<(), MemoryError> {
    match file_type(status) {
        FileType::RegularFile if status.stx_size < end => {
            let length = status.stx_size;
            Err(MemoryError::FileTooShort { guest_addr, needed: end, length })
        }
        FileType::BlockDevice | FileType::Directory | FileType::Fifo | FileType::Socket => {
            Err(MemoryError::NotMemory { guest_addr, advice })
        }
        // DAX devices and anonymous inodes have no length to check. The kernel refuses to map them
        // past their end.
        _ => Ok(()),
    }
}

fn mapping_alignment(status: &Statx) -> u64 {
    let page = rustix::param::page_size() as u64;
    let block = u64::from(status.stx_blksize);
    let is_file = file_type(status) == FileType::RegularFile;
    if is_file && block.is_power_of_two() && block > page && block <= MAX_PAGE_SIZE {
        block
    } else {
        page
    }
}

fn check_overlap(
    space: &'static str,
    sorted: &[Arc<Region>],
    start: impl Fn(&Region) -> u64,
) -> Result<(), MemoryError> {
    for pair in sorted.windows(2) {
        let (first, second) = (start(&pair[0]), start(&pair[1]));
        if second - first < pair[0].size {
            return Err(MemoryError::Overlap { space, first, second });
        }
    }
    Ok(())
}

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
    /// a multiple of the file's page size. Core dumps leave the bytes out: they are a guest's.
    pub(crate) fn map_file(file: impl AsFd, offset: u64, len: usize) -> io::Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: the kernel chooses a place where nothing is mapped.
        let start =
            unsafe { mmap(ptr::null_mut(), len, prot, flags | MapFlags::NORESERVE, file, offset)? };
        let mapping = Self { start: start.cast(), len };
        // SAFETY: the range is the mapping's own, and the advice does not change its content.
        unsafe { madvise(start, len, Advice::LinuxDontDump)? };
        Ok(mapping)
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

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    /// The kernel's flags of the mapping that begins here.
    fn flags(start: *mut u8) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", start.addr());
        let lines = maps.lines().skip_while(|line| !line.starts_with(&start));
        lines.into_iter().find_map(|line| line.strip_prefix("VmFlags:")).unwrap().to_owned()
    }

    #[test]
    #[cfg_attr(miri, ignore = "it needs the kernel")]
    fn core_dumps_leave_guest_memory_out() {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 1 << 16).unwrap();
        let mapping = Mapping::map_file(&file, 0, 1 << 16).unwrap();
        let flags = flags(mapping.as_ptr());
        assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
    }
}
