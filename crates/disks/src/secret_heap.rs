//! A heap whose memory for secrets stays out of core dumps and of swap, and is wiped when it is
//! freed.
//!
//! Libraries keep keys in memory that they allocate by themselves. A program that has a
//! [`SecretHeap`] as its `#[global_allocator]` serves the allocations of such work from one
//! region. Without it, such memory is like any other.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::hint::black_box;
use std::ptr::{self, NonNull};
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use blockio::executor::Lock;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap_anonymous};

/// The size of the region, which is mapped when a program has its first secret.
const REGION_BYTES: usize = 4 << 20;

/// The smallest block, and the number of sizes, each twice the one before it. Larger memory is that
/// of the program's heap: it has texts and records rather than keys, and is wiped too if the work
/// frees it.
const BLOCK_MIN: usize = 64;
const SIZES: usize = 8;

/// The largest alignment of a block.
const ALIGN_MAX: usize = 4096;

/// The address of the region; 0 until it is mapped.
static START: AtomicUsize = AtomicUsize::new(0);

static BLOCKS: Lock<Blocks> = Lock::new(Blocks { used: 0, free: [0; SIZES] });

thread_local! {
    /// The number of calls of [`with_secrets`] that the thread is in.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// The blocks of the region.
struct Blocks {
    /// The bytes that blocks have taken from the start.
    used: usize,
    /// The address of the first free block of each size. It begins with the address of the next.
    free: [usize; SIZES],
}

/// Runs work that allocates memory for secrets on this thread. Its allocations live until they are
/// freed, on any thread.
pub(crate) fn with_secrets<T>(work: impl FnOnce() -> T) -> T {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            DEPTH.set(DEPTH.get() - 1);
        }
    }
    static MAPPED: Once = Once::new();
    MAPPED.call_once(map);
    DEPTH.set(DEPTH.get() + 1);
    let _leave = Leave;
    work()
}

/// Maps the region. Without memory, secrets have the heap of the program.
fn map() {
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: the kernel chooses a place where nothing is mapped.
    let start = unsafe { mmap_anonymous(ptr::null_mut(), REGION_BYTES, prot, flags) };
    let Ok(start) = start else { return };
    // SAFETY: the pages were mapped above. The calls do not change their contents.
    let kept = unsafe {
        madvise(start, REGION_BYTES, Advice::LinuxDontDump).and(mlock(start, REGION_BYTES))
    };
    if let Err(error) = kept {
        tracing::debug!("cannot keep keys out of swap: {error}; raise the limit (ulimit -l)");
    }
    START.store(start.expose_provenance(), Ordering::Release);
}

/// Returns true if this thread allocates memory for secrets.
pub(crate) fn has_secrets() -> bool {
    // A thread that ends frees memory, too.
    DEPTH.try_with(Cell::get).unwrap_or(0) > 0
}

/// Returns true for a place in the region.
fn is_in_region(place: *mut u8) -> bool {
    place.addr().wrapping_sub(START.load(Ordering::Relaxed)) < REGION_BYTES
}

/// The size of a block for this layout as a power of two, counted from the smallest. `None`: the
/// region has none.
fn size_of(layout: Layout) -> Option<usize> {
    let bytes = layout.size().max(layout.align()).max(BLOCK_MIN).checked_next_power_of_two()?;
    let size = (bytes / BLOCK_MIN).trailing_zeros() as usize;
    (size < SIZES && layout.align() <= ALIGN_MAX).then_some(size)
}

/// Takes a block, which is all zeroes. `None`: the region is full, or was not mapped.
fn take(layout: Layout) -> Option<NonNull<u8>> {
    let (size, start) = (size_of(layout)?, START.load(Ordering::Acquire));
    let bytes = BLOCK_MIN << size;
    if start == 0 {
        return None;
    }
    let mut blocks = BLOCKS.lock();
    let first = blocks.free[size];
    if first != 0 {
        let place = ptr::with_exposed_provenance_mut::<usize>(first);
        // SAFETY: a free block of the region begins with this address, and nothing else uses it.
        blocks.free[size] = unsafe { place.replace(0) };
        return NonNull::new(place.cast());
    }
    let begin = blocks.used.next_multiple_of(bytes.min(ALIGN_MAX));
    if begin + bytes > REGION_BYTES {
        return None;
    }
    blocks.used = begin + bytes;
    NonNull::new(ptr::with_exposed_provenance_mut(start + begin))
}

/// Wipes a block of the region, and frees it.
///
/// # Safety
///
/// [`take`] has returned it for this layout, and nothing uses it any longer.
unsafe fn give(place: *mut u8, layout: Layout) {
    let Some(size) = size_of(layout) else { return };
    // SAFETY: the block has these bytes, as the caller guarantees.
    unsafe { wipe(place, BLOCK_MIN << size) };
    let mut blocks = BLOCKS.lock();
    // SAFETY: as above. Each block has room for an address, and is aligned for it.
    unsafe { place.cast::<usize>().write(blocks.free[size]) };
    blocks.free[size] = place.expose_provenance();
}

/// Overwrites memory that is about to be freed.
///
/// # Safety
///
/// These bytes belong to the caller.
unsafe fn wipe(place: *mut u8, bytes: usize) {
    // SAFETY: as the caller guarantees.
    unsafe { place.write_bytes(0, bytes) };
    // The compiler must not leave the bytes as they are.
    black_box(place);
}

/// A heap with a region for secrets.
pub struct SecretHeap<A>(A);

impl<A> SecretHeap<A> {
    /// Serves all other allocations from `heap`.
    pub const fn new(heap: A) -> Self {
        Self(heap)
    }
}

// SAFETY: memory of the region is freed into the region, and all other memory by the inner heap
// that has allocated it. Blocks of the region have the size and alignment of their layouts, and
// belong to one user at a time.
unsafe impl<A: GlobalAlloc> GlobalAlloc for SecretHeap<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if has_secrets()
            && let Some(block) = take(layout)
        {
            return block.as_ptr();
        }
        // SAFETY: the caller guarantees what the inner heap demands.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if has_secrets()
            && let Some(block) = take(layout)
        {
            return block.as_ptr();
        }
        // SAFETY: as above.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        if is_in_region(place) {
            // SAFETY: only `take` returns places in the region, and the caller gives it back.
            return unsafe { give(place, layout) };
        }
        if has_secrets() {
            // SAFETY: the memory belongs to the caller until it is freed below.
            unsafe { wipe(place, layout.size()) };
        }
        // SAFETY: the inner heap has allocated it, because the region has not.
        unsafe { self.0.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, new_bytes: usize) -> *mut u8 {
        if !is_in_region(place) && !has_secrets() {
            // SAFETY: as above.
            return unsafe { self.0.realloc(place, layout, new_bytes) };
        }
        // SAFETY: the caller guarantees a valid size, and memory that it gives back. The new block
        // is another one, with room for the smaller of both sizes. It holds a secret on a thread
        // without other secrets too.
        unsafe {
            let new = Layout::from_size_align_unchecked(new_bytes, layout.align());
            let moved = take(new).map_or_else(|| self.0.alloc(new), NonNull::as_ptr);
            if !moved.is_null() {
                moved.copy_from_nonoverlapping(place, layout.size().min(new_bytes));
                self.dealloc(place, layout);
            }
            moved
        }
    }
}

#[cfg(test)]
mod tests {
    use std::alloc::System;

    use super::*;

    #[global_allocator]
    static HEAP: SecretHeap<System> = SecretHeap::new(System);

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn memory_for_secrets_is_in_no_core_dump_and_no_swap() {
        let (secret, mut grown) = with_secrets(|| (Box::new([7_u8; 100]), vec![7_u8; 10]));
        // It stays in the region, whatever thread makes it grow.
        grown = std::thread::spawn(move || {
            grown.extend([8; 100]);
            grown
        })
        .join()
        .unwrap();
        let plain = Box::new([7_u8; 100]);
        assert!(is_secret(&secret[..]) && !is_secret(&plain[..]));
        // A limit on locked memory may forbid the lock.
        assert!(crate::testing::has_flag(secret.as_ptr().addr(), "lo"));
        assert_eq!((&*grown)[9..12], [7, 8, 8]);
        assert!(is_secret(&grown), "a secret has left its memory");
        let zeroes = with_secrets(|| vec![0_u8; 3000]);
        assert!(is_secret(&zeroes) && zeroes.iter().all(|byte| *byte == 0));
    }

    fn is_secret(memory: &[u8]) -> bool {
        crate::testing::has_flag(memory.as_ptr().addr(), "dd")
    }

    #[test]
    #[cfg_attr(miri, ignore = "reads freed memory")]
    fn freed_secrets_are_wiped() {
        let layout = Layout::from_size_align(4 << 10, 8).unwrap();
        with_secrets(|| {
            // SAFETY: the layout has a size. The region stays mapped, and this test alone uses
            // blocks of this size.
            unsafe {
                let place = HEAP.alloc(layout);
                place.write_bytes(7, layout.size());
                HEAP.dealloc(place, layout);
                let left = std::slice::from_raw_parts(place.add(8), layout.size() - 8);
                assert!(left.iter().all(|byte| *byte == 0));
                let again = HEAP.alloc_zeroed(layout);
                assert_eq!(again, place, "it is not used again");
                let all = std::slice::from_raw_parts(again, layout.size());
                assert!(all.iter().all(|byte| *byte == 0));
                HEAP.dealloc(again, layout);
            }
        });
    }

    #[test]
    fn memory_beyond_the_region_comes_from_the_heap() {
        for bytes in [(8 << 10) + 1, 8 << 20] {
            let large = with_secrets(|| vec![7_u8; bytes]);
            assert!(!is_in_region(large.as_ptr().cast_mut()));
            assert!(large.iter().all(|byte| *byte == 7));
        }
    }

    #[test]
    fn blocks_have_the_alignment_of_their_layout() {
        for align in [1, 8, 64, 512, 4096, 8192] {
            let layout = Layout::from_size_align(100, align).unwrap();
            // SAFETY: the layout has a size, and the memory is freed as it was allocated.
            with_secrets(|| unsafe {
                let places = [0; 3].map(|_| HEAP.alloc(layout));
                for place in places {
                    assert!(place.addr().is_multiple_of(align), "{align}");
                    HEAP.dealloc(place, layout);
                }
            });
        }
    }
}
