//! Lists of buffers in memory that others may write.
//!
//! The bytes behind a [`Buffers`] may be shared with another process or be written by the kernel
//! at any moment. No Rust reference to them is ever made: they are reached through raw pointers
//! only, and only copied.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use std::any::Any;
use std::io;
use std::ptr::NonNull;
use std::rc::Rc;

use libc::iovec;

/// The most iovecs that one system call takes (`IOV_MAX`).
pub const IOVECS_MAX: usize = 1024;

/// A list of memory ranges together with whatever keeps them mapped.
///
/// An operation takes it by value and gives it back with its result, so that the kernel never
/// holds a range that nobody owns.
pub struct Buffers {
    iovecs: Vec<iovec>,
    first: usize,
    bytes: usize,
    owner: Rc<dyn Any>,
}

impl std::fmt::Debug for Buffers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffers")
            .field("iovecs", &self.iovecs().len())
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl Buffers {
    /// Makes a list of the ranges `iovecs[first..]`.
    ///
    /// # Safety
    ///
    /// Every range must be mapped and writable (readable is enough for lists that are only
    /// written to a disk) for as long as `owner`, or a clone of it, lives. No Rust reference to
    /// any of the bytes may exist during that time.
    #[must_use]
    pub unsafe fn from_raw_parts(iovecs: Vec<iovec>, first: usize, owner: Rc<dyn Any>) -> Self {
        let bytes = iovecs[first..].iter().map(|range| range.iov_len).sum();
        Self { iovecs, first, bytes, owner }
    }

    /// A list without ranges, for operations that move no data.
    #[must_use]
    pub fn empty() -> Self {
        thread_local! {
            static NOTHING: Rc<()> = Rc::new(());
        }
        let owner: Rc<dyn Any> = NOTHING.with(Rc::clone);
        Self { iovecs: Vec::new(), first: 0, bytes: 0, owner }
    }

    /// Zeroed memory of `bytes` bytes at a multiple of `align` (a power of two), in one range.
    #[must_use]
    pub fn aligned(bytes: usize, align: usize) -> Self {
        let block = Rc::new(AlignedBlock::new(bytes, align));
        let range = iovec { iov_base: block.start.as_ptr().cast(), iov_len: bytes };
        // SAFETY: the block is `bytes` long, lives until the last clone of the `Rc` goes, and
        // hands out no references.
        unsafe { Self::from_raw_parts(vec![range], 0, block) }
    }

    /// Memory of `bytes` bytes at a multiple of `align` (a power of two), in one range. What is in
    /// it is undefined until it is written. `kept` goes when the memory has gone.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn uninitialized(bytes: usize, align: usize, kept: impl Any) -> io::Result<Self> {
        let block = AlignedBlock::try_new(bytes, align, false)?;
        let range = iovec { iov_base: block.start.as_ptr().cast(), iov_len: bytes };
        let ranges = vec_of(1, range)?;
        // SAFETY: as in `aligned`; fields of a tuple are dropped in order, the block first.
        Ok(unsafe { Self::from_raw_parts(ranges, 0, Rc::new((block, kept))) })
    }

    /// Memory with a copy of `data`, in one range.
    #[must_use]
    pub fn from_vec(data: Vec<u8>) -> Self {
        let buffers = Self::aligned(data.len(), 1);
        buffers.copy_from(0, &data);
        buffers
    }

    /// A copy of all the bytes, for set-up and tests.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut data = vec![0; self.bytes];
        self.copy_to(0, &mut data);
        data
    }

    /// Bytes in all ranges together.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The ranges.
    #[must_use]
    pub fn iovecs(&self) -> &[iovec] {
        &self.iovecs[self.first..]
    }

    /// Drops `bytes` bytes from the front, or all of them when there are fewer.
    pub fn advance(&mut self, mut bytes: usize) {
        bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        while bytes > 0 {
            let range = &mut self.iovecs[self.first];
            if bytes < range.iov_len {
                range.iov_base = range.iov_base.cast::<u8>().wrapping_add(bytes).cast();
                range.iov_len -= bytes;
                return;
            }
            bytes -= range.iov_len;
            self.first += 1;
        }
    }

    /// Whether each range starts at a multiple of `addresses` and is a multiple of `lengths` long
    /// (powers of two). Then so is each part of the list that is cut between ranges.
    #[must_use]
    pub fn is_aligned(&self, addresses: usize, lengths: usize) -> bool {
        let bits = |bits, range: &iovec| {
            bits | (range.iov_base.addr() & (addresses - 1)) | (range.iov_len & (lengths - 1))
        };
        self.iovecs().iter().fold(0, bits) == 0
    }

    /// Copies `data` into the list from byte `offset` on, as far as there is room.
    pub fn copy_from(&self, offset: usize, data: &[u8]) {
        self.each_part(offset, data.len(), |done, start, len| {
            let part = &data[done..done + len];
            // SAFETY: `each_part` yields parts of the ranges, which `from_raw_parts` vouches for,
            // and `data` is a Rust slice, so no part of it lies in them.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), start, len) };
        });
    }

    /// Copies the bytes from `offset` on into `data`, as far as there are any.
    pub fn copy_to(&self, offset: usize, data: &mut [u8]) {
        self.each_part(offset, data.len(), |done, start, len| {
            let part = &mut data[done..done + len];
            // SAFETY: as in `copy_from`.
            unsafe { std::ptr::copy_nonoverlapping(start, part.as_mut_ptr(), len) };
        });
    }

    /// Copies the first `len` bytes of `other` over the first bytes of this list. Both may be
    /// parts of the same memory.
    pub fn copy_from_buffers(&self, other: &Self, len: usize) {
        other.each_part(0, len, |done, source, len| {
            self.each_part(done, len, |inner, target, len| {
                // SAFETY: both parts lie in ranges that `from_raw_parts` vouches for, `copy`
                // allows overlap, and `inner + len` is at most the length of the outer part.
                unsafe { std::ptr::copy(source.wrapping_add(inner), target, len) };
            });
        });
    }

    /// Writes zeroes from byte `offset` to the end.
    pub fn zero_from(&self, offset: usize) {
        self.each_part(offset, self.bytes.saturating_sub(offset), |_, start, len| {
            // SAFETY: as in `copy_from`.
            unsafe { std::ptr::write_bytes(start, 0, len) };
        });
    }

    /// Calls `visit(done, start, len)` for each contiguous part of the bytes `offset..offset +
    /// len` that exist; `done` counts the bytes visited before.
    fn each_part(&self, offset: usize, len: usize, mut visit: impl FnMut(usize, *mut u8, usize)) {
        let mut skip = offset;
        let mut done = 0;
        for range in self.iovecs() {
            if done == len {
                return;
            }
            if skip >= range.iov_len {
                skip -= range.iov_len;
                continue;
            }
            let part = (range.iov_len - skip).min(len - done);
            visit(done, range.iov_base.cast::<u8>().wrapping_add(skip), part);
            done += part;
            skip = 0;
        }
    }

    /// Another list of the same memory.
    #[must_use]
    pub(crate) fn again(&self) -> Self {
        Self {
            iovecs: self.iovecs().to_vec(),
            first: 0,
            bytes: self.bytes,
            owner: Rc::clone(&self.owner),
        }
    }

    /// Gives the storage of the list back, for reuse. The ranges in it mean nothing any more.
    #[must_use]
    pub fn into_storage(self) -> Vec<iovec> {
        self.iovecs
    }
}

/// Zeroed memory for buffers that are used again and again: making a list of it allocates nothing
/// if it gets the storage of an earlier one.
pub struct BufferMemory {
    block: Rc<AlignedBlock>,
}

impl BufferMemory {
    /// Memory of `bytes` bytes at a multiple of `align` (a power of two).
    #[must_use]
    pub fn new(bytes: usize, align: usize) -> Self {
        Self { block: Rc::new(AlignedBlock::new(bytes, align)) }
    }

    /// A list of the first `bytes` bytes, or of all when there are fewer, in one range. `storage`
    /// may come from [`Buffers::into_storage`]. Lists that exist at the same time are of the same
    /// memory.
    #[must_use]
    pub fn buffers(&self, bytes: usize, mut storage: Vec<iovec>) -> Buffers {
        let bytes = bytes.min(self.block.layout.size());
        storage.clear();
        storage.push(iovec { iov_base: self.block.start.as_ptr().cast(), iov_len: bytes });
        let owner: Rc<dyn Any> = Rc::<AlignedBlock>::clone(&self.block);
        // SAFETY: the range lies in the block, which lives until the last clone of the `Rc` goes,
        // and hands out no references.
        unsafe { Buffers::from_raw_parts(storage, 0, owner) }
    }
}

/// One block of zeroes that stands for any number of them, in lists that are only written to disks.
pub(crate) struct Zeroes(Rc<AlignedBlock>);

impl Zeroes {
    /// A block of `bytes` bytes (not zero) at a multiple of `align` (a power of two).
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new(bytes: usize, align: usize) -> io::Result<Self> {
        AlignedBlock::try_new(bytes, align, true).map(|block| Self(Rc::new(block)))
    }

    /// A list of `bytes` zeroes. `kept` goes when the list has gone.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn buffers(&self, bytes: usize, kept: impl Any) -> io::Result<Buffers> {
        let block = &self.0;
        let size = block.layout.size();
        let range = iovec { iov_base: block.start.as_ptr().cast(), iov_len: size };
        let mut ranges = vec_of(bytes.div_ceil(size), range)?;
        if let Some(last) = ranges.last_mut() {
            last.iov_len = bytes - (bytes - 1) / size * size;
        }
        // SAFETY: each range lies in the block, which lives until the last clone of the `Rc` goes,
        // and hands out no references.
        Ok(unsafe { Buffers::from_raw_parts(ranges, 0, Rc::new((Rc::clone(block), kept))) })
    }
}

fn vec_of(count: usize, range: iovec) -> io::Result<Vec<iovec>> {
    let mut ranges = Vec::new();
    ranges.try_reserve_exact(count).map_err(|_| no_memory())?;
    ranges.resize(count, range);
    Ok(ranges)
}

fn no_memory() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOMEM)
}

/// Heap memory at a chosen alignment.
struct AlignedBlock {
    start: NonNull<u8>,
    layout: Layout,
}

impl AlignedBlock {
    /// Zeroed memory.
    fn new(bytes: usize, align: usize) -> Self {
        Self::try_new(bytes, align, true)
            .unwrap_or_else(|_| panic!("there is no room for {bytes} bytes at {align}"))
    }

    fn try_new(bytes: usize, align: usize, zeroed: bool) -> io::Result<Self> {
        let layout = Layout::from_size_align(bytes.max(1), align).map_err(|_| no_memory())?;
        // SAFETY: the layout has a size above zero.
        let start = unsafe { if zeroed { alloc_zeroed(layout) } else { alloc(layout) } };
        let start = NonNull::new(start).ok_or_else(no_memory)?;
        Ok(Self { start, layout })
    }
}

impl Drop for AlignedBlock {
    fn drop(&mut self) {
        // SAFETY: `start` came from `alloc` or `alloc_zeroed` with the same layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A list over one block, cut at the given lengths.
    fn scattered(lengths: &[usize]) -> Buffers {
        let block = Rc::new(AlignedBlock::new(lengths.iter().sum(), 512));
        let mut at = block.start.as_ptr();
        let mut iovecs = Vec::new();
        for &len in lengths {
            iovecs.push(iovec { iov_base: at.cast(), iov_len: len });
            at = at.wrapping_add(len);
        }
        // SAFETY: the ranges are parts of the block, which the list owns.
        unsafe { Buffers::from_raw_parts(iovecs, 0, block) }
    }

    proptest! {
        #[test]
        fn a_scattered_list_behaves_like_one_slice(
            lengths in proptest::collection::vec(0usize..9, 1..12),
            offset in 0usize..40, skip in 0usize..40,
            data in proptest::collection::vec(any::<u8>(), 0..40),
        ) {
            let mut list = scattered(&lengths);
            let total: usize = lengths.iter().sum();
            let mut model = vec![0u8; total];
            list.copy_from(offset, &data);
            for (i, byte) in data.iter().enumerate() {
                if let Some(slot) = model.get_mut(offset + i) { *slot = *byte; }
            }
            prop_assert_eq!(list.to_vec(), model.clone());
            list.advance(skip);
            let rest = model.split_off(skip.min(total));
            prop_assert_eq!(list.bytes(), rest.len());
            prop_assert_eq!(list.to_vec(), rest.clone());
            let copy = Buffers::aligned(rest.len(), 1);
            copy.copy_from_buffers(&list, rest.len());
            prop_assert_eq!(copy.to_vec(), rest.clone());
            list.zero_from(offset);
            let mut zeroed = rest;
            zeroed.iter_mut().skip(offset).for_each(|byte| *byte = 0);
            prop_assert_eq!(list.to_vec(), zeroed);
        }
    }

    #[test]
    fn lists_of_one_memory_show_the_same_bytes() {
        let memory = BufferMemory::new(1024, 512);
        let mut list = memory.buffers(1024, Vec::new());
        assert!(list.is_aligned(512, 512));
        list.copy_from(0, b"data");
        list.advance(1000);
        let again = memory.buffers(4, list.into_storage());
        assert_eq!(again.to_vec(), b"data");
        assert_eq!(memory.buffers(2000, Vec::new()).bytes(), 1024);
    }

    #[test]
    fn alignment_looks_at_every_start_and_length() {
        assert!(scattered(&[512, 1024]).is_aligned(512, 512));
        // The misaligned one is neither the first nor the second.
        assert!(!scattered(&[512, 1024, 100, 412]).is_aligned(4, 512));
        assert!(!scattered(&[512, 1024, 100, 412]).is_aligned(512, 4));
        assert!(scattered(&[512, 1024, 100, 412]).is_aligned(4, 4));
        // Ranges that a device with blocks of 4096 and memory of 4 does not take.
        assert!(!scattered(&[512, 3584]).is_aligned(4, 4096));
        let mut list = scattered(&[1024]);
        list.advance(8);
        assert!(!list.is_aligned(512, 512));
        assert!(list.is_aligned(8, 8));
    }
}
