//! Survival of SIGBUS, for mapped memory that its owner takes away.
//!
//! A front-end that truncates the file behind a region makes the next access to it raise SIGBUS,
//! which ends the process. With [`install_sigbus_handler`], private zeroes replace the whole region
//! instead, and the region is marked as lost. A reader of the zeroes finds the mark before it
//! trusts them ([`GuestMemory::is_intact`](crate::GuestMemory::is_intact)). System calls on such
//! memory raise no signal; they fail with EFAULT.
//!
//! The handler finds a region in a table that it reads without a lock: a list of chunks that only
//! grows. An entry that is being changed cannot be of a region in use, so the handler skips it.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libc::{c_int, c_void, siginfo_t};

/// Entries of one chunk of the table. The table grows by chunks.
const CHUNK_ENTRIES: usize = 128;

/// A mapping. Its owner, which took the entry from the free list, sets the fields while `version`
/// is odd.
struct Entry {
    version: AtomicUsize,
    /// Address of the mapping in this process; 0 while the entry is free.
    start: AtomicUsize,
    /// Length in bytes.
    len: AtomicUsize,
    lost: AtomicBool,
    /// The number of faults in the mapping so far.
    faults: AtomicU32,
}

impl Entry {
    const fn free() -> Self {
        Self {
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
            faults: AtomicU32::new(0),
        }
    }

    fn set(&self, start: usize, len: usize) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.lost.store(false, Ordering::Relaxed);
        self.faults.store(0, Ordering::Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// Returns the start and length of the mapping, if `addr` is in it.
    fn find(&self, addr: usize) -> Option<(usize, usize)> {
        let version = self.version.load(Ordering::Acquire);
        let (start, len) = (self.start.load(Ordering::Relaxed), self.len.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let steady = version.is_multiple_of(2) && version == self.version.load(Ordering::Relaxed);
        (steady && addr.wrapping_sub(start) < len).then_some((start, len))
    }
}

struct Chunk {
    entries: [Entry; CHUNK_ENTRIES],
    next: Option<&'static Chunk>,
}

/// The newest chunk. Chunks are never freed.
static CHUNKS: AtomicPtr<Chunk> = AtomicPtr::new(ptr::null_mut());
static FREE: Mutex<Vec<&'static Entry>> = Mutex::new(Vec::new());
/// Incremented with every fault, before the zeroes that replace the lost memory can be read.
static LOSS_COUNT: AtomicU64 = AtomicU64::new(0);
/// The number of regions that have been lost since the process started.
static LOST_REGIONS: AtomicU64 = AtomicU64::new(0);
/// The action for SIGBUS before the handler was installed.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// The number of memory regions that their owners have taken away since the process started.
pub fn lost_regions() -> u64 {
    LOST_REGIONS.load(Ordering::Relaxed)
}

/// A number that changes whenever an access finds memory gone.
#[inline]
pub(crate) fn losses() -> u64 {
    LOSS_COUNT.load(Ordering::Acquire)
}

fn free_entries() -> MutexGuard<'static, Vec<&'static Entry>> {
    FREE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn chunks() -> impl Iterator<Item = &'static Chunk> {
    // SAFETY: the pointer is null, or of a chunk that was complete and leaked before it was stored.
    let newest = unsafe { CHUNKS.load(Ordering::Acquire).as_ref() };
    std::iter::successors(newest, |chunk| chunk.next)
}

/// The entry of a mapping in the table. It must be dropped before the mapping.
pub(crate) struct WatchedMapping(&'static Entry);

impl WatchedMapping {
    /// Enters a mapping of `len` bytes into the table.
    pub(crate) fn new(start: *const u8, len: usize) -> Self {
        let mut free = free_entries();
        if free.is_empty() {
            let next = chunks().next();
            let chunk: &'static Chunk = Box::leak(Box::new(Chunk {
                entries: [const { Entry::free() }; CHUNK_ENTRIES],
                next,
            }));
            CHUNKS.store(ptr::from_ref(chunk).cast_mut(), Ordering::Release);
            free.extend(chunk.entries.iter());
        }
        let last = free.len() - 1;
        let entry = free.swap_remove(last);
        entry.set(start.addr(), len);
        Self(entry)
    }

    /// Returns true if an access has found that the memory is gone.
    pub(crate) fn is_lost(&self) -> bool {
        self.0.lost.load(Ordering::Acquire)
    }
}

impl Drop for WatchedMapping {
    fn drop(&mut self) {
        self.0.set(0, 0);
        free_entries().push(self.0);
    }
}

impl std::fmt::Debug for WatchedMapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WatchedMapping").field("lost", &self.is_lost()).finish_non_exhaustive()
    }
}

/// Lets this process survive accesses to guest memory that its owner has taken away. Call it once,
/// before any guest memory is accessed. Further calls change nothing.
///
/// Any other SIGBUS goes to the previous handler. Without one, it ends the process as usual. A mere
/// notice that a page of memory is damaged (`BUS_MCEERR_AO`) is dropped: the handler of Rust's
/// standard library, for one, would let the next SIGBUS end the process. An access that needs the
/// page raises a signal of its own. A program that installs a handler after this call must pass on
/// signals that it does not know.
///
/// # Errors
///
/// If the kernel refuses the handler.
pub fn install_sigbus_handler() -> io::Result<()> {
    let _one_at_a_time = free_entries();
    if PREVIOUS.get().is_some() {
        return Ok(());
    }
    let mut previous = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: the call only asks for the action, which is written if the result is 0.
    let previous = unsafe {
        if libc::sigaction(libc::SIGBUS, ptr::null(), previous.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        previous.assume_init()
    };
    // SAFETY: all zeroes are a valid action, and the mask is a field of it. The handler takes the
    // arguments that SA_SIGINFO promises, and keeps to the rules for handlers, see `on_sigbus`.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_sigbus;
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        // Set before, because the handler may run as soon as it is installed.
        let _ = PREVIOUS.set(previous);
        libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut())
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Codes of SIGBUS for an access at `si_addr` (siginfo.h).
const BUS_ADRERR: c_int = 2;
const BUS_MCEERR_AR: c_int = 4;
/// A page is known to be damaged and was not accessed. Nothing has to be done.
const BUS_MCEERR_AO: c_int = 5;

/// The most faults of one region that are answered. Threads that access the region at once fault
/// once each. A region that still faults after it was replaced can get no memory from the system.
const FAULTS_MAX: u32 = 1024;

/// The handler. It makes only system calls, and touches only atomics, errno and its arguments.
extern "C" fn on_sigbus(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: `errno` is the thread's own. The kernel passes a valid `info`, in which SIGBUS from
    // an access has an address. The interrupted code must find its errno unchanged.
    unsafe {
        let errno = *libc::__errno_location();
        let code = (*info).si_code;
        let is_access = code == BUS_ADRERR || code == BUS_MCEERR_AR;
        let is_done = code == BUS_MCEERR_AO || is_access && replace((*info).si_addr().addr());
        if !is_done {
            pass_on(signal, info, context);
        }
        *libc::__errno_location() = errno;
    }
}

/// Replaces the region that has `addr` with zeroes. Returns false if no region has it or the
/// replacement fails. Two threads may replace a region at once, because nothing trusts its
/// contents.
fn replace(addr: usize) -> bool {
    let entries = chunks().flat_map(|chunk| chunk.entries.iter());
    let found = entries.filter_map(|entry| Some((entry, entry.find(addr)?))).next();
    let Some((entry, (start, len))) = found else { return false };
    if !entry.lost.swap(true, Ordering::AcqRel) {
        LOST_REGIONS.fetch_add(1, Ordering::Relaxed);
    }
    // Before the zeroes, so that a reader of a zero finds that something was lost, and then the
    // mark. By every thread: the first one to set the mark may be held up before it gets here.
    LOSS_COUNT.fetch_add(1, Ordering::AcqRel);
    if entry.faults.fetch_add(1, Ordering::Relaxed) >= FAULTS_MAX {
        return false;
    }
    map_private_over(start, len) || map_file_over(start, len)
}

/// Maps private memory of this process. Fails where the kernel reserves all memory that might be
/// written (`vm.overcommit_memory` 2) and does not have it.
fn map_private_over(start: usize, len: usize) -> bool {
    map_over(start, len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1)
}

/// Maps a sparse file that belongs to this process alone. The kernel counts only the pages that are
/// touched.
fn map_file_over(start: usize, len: usize) -> bool {
    let Ok(bytes) = libc::off_t::try_from(len) else { return false };
    // SAFETY: the name is a C string, and the descriptor is closed once, here.
    unsafe {
        let file = libc::memfd_create(c"ringhaul-lost".as_ptr(), libc::MFD_CLOEXEC);
        if file < 0 {
            return false;
        }
        let mapped =
            libc::ftruncate(file, bytes) == 0 && map_over(start, len, libc::MAP_SHARED, file);
        libc::close(file);
        mapped
    }
}

fn map_over(start: usize, len: usize, flags: c_int, file: c_int) -> bool {
    // SAFETY: the mapping is that of a region, which lives at least until the access that raised
    // the signal is over. All accesses to it bear any change of its bytes (see `memory.rs`). The
    // new mapping has the same place, and goes with the region's.
    let mapped = unsafe {
        libc::mmap(
            ptr::without_provenance_mut(start),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            flags | libc::MAP_FIXED,
            file,
            0,
        )
    };
    mapped != libc::MAP_FAILED
}

/// Passes the signal on to the previous action.
///
/// # Safety
///
/// Only from a signal handler, with its arguments.
unsafe fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS.get();
    // SAFETY: the address is that of a handler of the kind that its flags state, as the kernel had
    // it. The default action, once restored, takes effect when the access is tried again. A signal
    // that a process sent is raised again, and arrives when the handler returns.
    unsafe {
        match previous {
            Some(action)
                if action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN =>
            {
                if action.sa_flags & libc::SA_SIGINFO != 0 {
                    let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                        std::mem::transmute(action.sa_sigaction);
                    handler(signal, info, context);
                } else {
                    let handler: extern "C" fn(c_int) = std::mem::transmute(action.sa_sigaction);
                    handler(signal);
                }
            }
            _ => {
                libc::signal(signal, libc::SIG_DFL);
                if (*info).si_code <= 0 {
                    libc::raise(signal);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::Mapping;

    const BYTES: usize = 0x4000;

    fn watched() -> (WatchedMapping, Mapping) {
        let mapping = Mapping::private(BYTES).unwrap();
        (WatchedMapping::new(mapping.as_ptr(), mapping.len()), mapping)
    }

    /// The first of two threads is held up between its mark and its count.
    #[test]
    fn a_second_fault_counts_when_the_first_has_only_left_its_mark() {
        let (watched, mapping) = watched();
        watched.0.lost.store(true, Ordering::Release);
        let before = losses();
        assert!(replace(mapping.as_ptr().addr() + 7));
        assert_ne!(losses(), before, "whoever reads a zero now believes it");
        assert!(watched.is_lost());
    }

    #[test]
    fn a_region_that_continues_faulting_is_abandoned() {
        let (_watched, mapping) = watched();
        let faults = std::iter::repeat_with(|| replace(mapping.as_ptr().addr()));
        let answered = faults.take_while(|replaced| *replaced).take(100_000).count();
        assert_eq!(answered, FAULTS_MAX as usize);
        assert!(!replace(mapping.as_ptr().addr().wrapping_sub(1 << 40)), "nobody's address");
    }

    /// The replacement where the kernel refuses private memory that it cannot reserve in full.
    #[test]
    fn a_file_takes_the_place_of_a_region_and_belongs_to_it_alone() {
        let (_first, first) = watched();
        let (_second, second) = watched();
        for mapping in [&first, &second] {
            // SAFETY: the test has mapped these bytes, and no other code knows them.
            unsafe { mapping.as_ptr().write_volatile(1) };
            assert!(map_file_over(mapping.as_ptr().addr(), mapping.len()));
        }
        // SAFETY: as above, for the mappings that took their place.
        unsafe {
            first.as_ptr().add(BYTES - 1).write_volatile(7);
            assert_eq!(first.as_ptr().read_volatile(), 0);
            assert_eq!(second.as_ptr().add(BYTES - 1).read_volatile(), 0);
            assert_eq!(first.as_ptr().add(BYTES - 1).read_volatile(), 7);
        }
    }
}
