//! Heap memory for buffers.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use std::any::Any;
use std::io;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use libc::iovec;

use crate::list::Buffers;
use crate::memory::Memory;

impl Buffers {
    /// Allocates `bytes` zeroed bytes in one range, aligned to `align` (a power of two).
    ///
    /// # Panics
    ///
    /// If the allocation fails.
    pub fn aligned(bytes: usize, align: usize) -> Self {
        BufferMemory::new(bytes, align).buffers(bytes)
    }

    /// Allocates `bytes` bytes in one range, aligned to `align` (a power of two). The contents are
    /// undefined until they are written. `kept` is dropped right after the memory.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub fn uninitialized(bytes: usize, align: usize, kept: impl Any) -> io::Result<Self> {
        let block = Block::try_new(bytes, align, false)?;
        let range = iovec { iov_base: block.start.as_ptr().cast(), iov_len: bytes };
        let ranges = repeat_range(1, range)?;
        // SAFETY: the block is `bytes` long, lives as long as its owner, the memory, and hands out
        // no references. Fields of a tuple are dropped in order, the block first.
        Ok(unsafe { Self::from_raw_parts(ranges.into(), Memory::new((block, kept))) })
    }

    /// Copies `data` into new memory, in one range.
    pub fn from_vec(data: Vec<u8>) -> Self {
        let buffers = Self::aligned(data.len(), 1);
        buffers.copy_from(0, &data);
        buffers
    }
}

/// Reusable memory for buffers, zeroed at first. Making a list of it allocates nothing once an
/// earlier list was dropped.
pub struct BufferMemory {
    start: NonNull<u8>,
    bytes: usize,
    /// Keeps the block alive.
    memory: Memory,
}

impl BufferMemory {
    /// Allocates `bytes` zeroed bytes, aligned to `align` (a power of two).
    ///
    /// # Panics
    ///
    /// If the allocation fails.
    pub fn new(bytes: usize, align: usize) -> Self {
        let block = Block::try_new(bytes, align, true)
            .unwrap_or_else(|_| panic!("no layout has {bytes} bytes aligned to {align}"));
        Self { start: block.start, bytes, memory: Memory::new(block) }
    }

    /// Returns a list of the first `bytes` bytes, or of all if there are fewer, in one range. Lists
    /// that exist at the same time share the memory.
    pub fn buffers(&self, bytes: usize) -> Buffers {
        let mut ranges = self.memory.storage();
        let bytes = bytes.min(self.bytes);
        ranges.push(iovec { iov_base: self.start.as_ptr().cast(), iov_len: bytes });
        // SAFETY: the range lies in the block, which lives as long as `memory` and hands out no
        // references.
        unsafe { Buffers::from_raw_parts(ranges, self.memory.clone()) }
    }
}

/// A block that stands for any number of its copies in a list. Such lists may only be written to
/// disks.
pub struct RepeatedBlock(Rc<Block>);

impl RepeatedBlock {
    /// Allocates a block of `bytes` zeroes (at least one), aligned to `align` (a power of two).
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub fn zeroes(bytes: usize, align: usize) -> io::Result<Self> {
        Block::try_new(bytes, align, true).map(|block| Self(Rc::new(block)))
    }

    /// Allocates a block of whole copies of `pattern` (not empty), at least `bytes` long, aligned
    /// to `align` (a power of two).
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub fn pattern(pattern: &[u8], bytes: usize, align: usize) -> io::Result<Self> {
        let bytes = bytes.next_multiple_of(pattern.len()).max(pattern.len());
        let repeated = Self::zeroes(bytes, align)?;
        let whole = repeated.buffers(bytes, ())?;
        for at in (0..bytes).step_by(pattern.len()) {
            whole.copy_from(at, pattern);
        }
        Ok(repeated)
    }

    /// Returns a list of `bytes` bytes. `kept` is dropped with the last list made of it.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub fn buffers(&self, bytes: usize, kept: impl Any) -> io::Result<Buffers> {
        let block = &self.0;
        let size = block.layout.size();
        let range = iovec { iov_base: block.start.as_ptr().cast(), iov_len: size };
        let mut ranges = repeat_range(bytes.div_ceil(size), range)?;
        if let Some(last) = ranges.last_mut() {
            last.iov_len = bytes - (bytes - 1) / size * size;
        }
        // SAFETY: each range lies in the block, which lives as long as its owner, the memory, and
        // hands out no references.
        Ok(unsafe { Buffers::from_raw_parts(ranges.into(), Memory::new((Rc::clone(block), kept))) })
    }
}

/// A block of uninitialized memory that another library fills or reads, on any thread.
///
/// The memory lives as long as any clone of the block and any list of it. A caller that stops
/// waiting can drop its lists, and keeps a clone for as long as the library may still write.
#[derive(Clone)]
pub struct LentBlock(Arc<Block>);

impl LentBlock {
    /// Allocates `bytes` bytes.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub fn try_new(bytes: usize) -> io::Result<Self> {
        Block::try_new(bytes, 1, false).map(|block| Self(Arc::new(block)))
    }

    /// The address of the first byte.
    #[must_use]
    pub fn start(&self) -> *mut u8 {
        self.0.start.as_ptr()
    }

    /// Returns a list of the whole block. `kept` is dropped with the last list made of it.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub fn buffers(&self, kept: impl Any) -> io::Result<Buffers> {
        let block = &self.0;
        let range = iovec { iov_base: self.start().cast(), iov_len: block.layout.size() };
        let (ranges, memory) = (repeat_range(1, range)?, Memory::new((Arc::clone(block), kept)));
        // SAFETY: the block has this size and hands out no references. It lives as long as any of
        // its owners, and the memory is one of them.
        Ok(unsafe { Buffers::from_raw_parts(ranges.into(), memory) })
    }
}

fn repeat_range(count: usize, range: iovec) -> io::Result<Vec<iovec>> {
    let mut ranges = Vec::new();
    ranges.try_reserve_exact(count).map_err(|_| no_memory())?;
    ranges.resize(count, range);
    Ok(ranges)
}

fn no_memory() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOMEM)
}

/// Heap memory at a chosen alignment.
struct Block {
    start: NonNull<u8>,
    layout: Layout,
}

impl Block {
    fn try_new(bytes: usize, align: usize, zeroed: bool) -> io::Result<Self> {
        let layout = Layout::from_size_align(bytes.max(1), align).map_err(|_| no_memory())?;
        // SAFETY: the size of the layout is above zero.
        let start = unsafe { if zeroed { alloc_zeroed(layout) } else { alloc(layout) } };
        let start = NonNull::new(start).ok_or_else(no_memory)?;
        Ok(Self { start, layout })
    }
}

// SAFETY: a block is an address and a size. Its bytes are reached through raw pointers only, by
// code that vouches for each access, and any thread may free it.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: `start` came from `alloc` or `alloc_zeroed` with the same layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn a_kept_value_goes_with_the_last_list() {
        struct Canary(Rc<Cell<bool>>);
        impl Drop for Canary {
            fn drop(&mut self) {
                self.0.set(true);
            }
        }
        let gone = Rc::new(Cell::new(false));
        let buffers = Buffers::uninitialized(4096, 512, Canary(Rc::clone(&gone))).unwrap();
        let again = buffers.duplicate();
        drop(buffers);
        assert!(!gone.get(), "another list of the memory is left");
        drop(again);
        assert!(gone.get());
    }

    #[test]
    fn a_lent_block_stays_while_it_is_being_filled() {
        let kept = Rc::new(());
        let block = LentBlock::try_new(4096).unwrap();
        let buffers = block.buffers(Rc::clone(&kept)).unwrap();
        buffers.copy_from(0, &[1; 4096]);
        drop(buffers);
        assert_eq!(Rc::strong_count(&kept), 1, "what the list kept has not gone with it");
        let filling = std::thread::spawn(move || {
            // SAFETY: the block has 4096 bytes, and no other code uses it now.
            unsafe { block.start().add(4095).write(2) };
            block
        });
        let block = filling.join().unwrap();
        let list = block.buffers(()).unwrap();
        drop(block);
        assert_eq!(list.to_vec()[4094..], [1, 2]);
    }

    #[test]
    fn one_block_stands_for_any_number_of_zeroes() {
        let zeroes = RepeatedBlock::zeroes(4096, 4096).unwrap();
        for bytes in [1, 4095, 4096, 4097, 12_288, 12_800] {
            let list = zeroes.buffers(bytes, ()).unwrap();
            assert_eq!(list.bytes(), bytes);
            assert_eq!(list.iovecs().len(), bytes.div_ceil(4096));
            assert_eq!(list.to_vec(), vec![0; bytes]);
        }
    }

    #[test]
    fn a_pattern_is_never_cut_but_at_the_end_of_a_list() {
        for (pattern, block) in [(&b"abc"[..], 9), (b"abcdefghij", 10)] {
            let repeated = RepeatedBlock::pattern(pattern, 8, 512).unwrap();
            for bytes in [1, 9, 10, 29] {
                let list = repeated.buffers(bytes, ()).unwrap();
                let expected: Vec<u8> = pattern.iter().copied().cycle().take(bytes).collect();
                assert_eq!(list.to_vec(), expected);
                assert_eq!(list.iovecs().len(), bytes.div_ceil(block));
            }
        }
    }

    #[test]
    fn memory_that_is_used_again_allocates_no_list() {
        let memory = BufferMemory::new(8192, 4096);
        let first = memory.buffers(10_000);
        assert_eq!(first.bytes(), 8192, "no list is longer than its memory");
        let storage = first.iovecs().as_ptr();
        drop(first);
        assert_eq!(memory.buffers(512).iovecs().as_ptr(), storage);
    }
}
