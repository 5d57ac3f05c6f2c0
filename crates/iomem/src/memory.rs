//! The owner that keeps the memory of lists mapped, and spare storage for later lists.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use libc::iovec;

/// The most iovecs that one system call takes (`IOV_MAX`).
pub const IOVECS_MAX: usize = 1024;

/// The most spare storage of a [`Memory`], in iovecs. It is enough for a queue of 1024 entries that
/// is full of requests of the usual size. It also bounds the memory that a hostile guest can make
/// us keep.
const MAX_SPARE_IOVECS: usize = 16 * 1024;

/// A log of writes to shared memory by a device, or by the kernel on its behalf. Live migration
/// needs it.
pub trait WriteLog {
    /// Records that `bytes` bytes from `start` on, an address in this process, were written.
    fn wrote(&self, start: *const u8, bytes: usize);
}

/// A counted reference, on one thread, to the owner of mapped memory. A clone costs no atomic
/// operation.
///
/// The memory also keeps the storage of dropped lists, so that later lists need no allocation.
#[derive(Clone)]
pub struct Memory(Rc<MemoryState>);

/// A reference to memory that does not keep it mapped.
#[derive(Debug, Clone)]
pub struct WeakMemory(Weak<MemoryState>);

impl WeakMemory {
    /// Returns the memory, if a list or another owner still has it.
    pub fn upgrade(&self) -> Option<Memory> {
        self.0.upgrade().map(Memory)
    }
}

struct MemoryState {
    spare: RefCell<Spare>,
    /// True if there is a log: the one check that a write without a log makes.
    is_logged: Cell<bool>,
    log: RefCell<Option<Rc<dyn WriteLog>>>,
    /// True if there may be a log by the time at which a write is reported.
    may_be_logged: bool,
    _owner: Box<dyn Any>,
}

#[derive(Default)]
struct Spare {
    #[expect(clippy::vec_box, reason = "a list is made of the box")]
    lists: Vec<Box<Parts>>,
    /// The sum of `storage_iovecs` over all lists.
    iovecs: usize,
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").finish_non_exhaustive()
    }
}

impl Memory {
    /// Makes memory that stays mapped while `owner` lives, and never has a log.
    pub fn new(owner: impl Any) -> Self {
        Self::make(owner, false)
    }

    /// Makes memory that stays mapped while `owner` lives. It has no log until
    /// [`set_log`](Self::set_log).
    pub fn loggable(owner: impl Any) -> Self {
        Self::make(owner, true)
    }

    fn make(owner: impl Any, may_be_logged: bool) -> Self {
        Self(Rc::new(MemoryState {
            spare: RefCell::default(),
            is_logged: Cell::new(false),
            log: RefCell::default(),
            may_be_logged,
            _owner: Box::new(owner),
        }))
    }

    /// Returns a reference that does not keep the memory mapped.
    pub fn downgrade(&self) -> WeakMemory {
        WeakMemory(Rc::downgrade(&self.0))
    }

    /// Sets, replaces or removes the log that receives all writes from now on, through existing
    /// lists too. The previous log receives none afterwards.
    ///
    /// # Panics
    ///
    /// If this is not [`loggable`](Self::loggable) memory.
    pub fn set_log(&self, log: Option<Rc<dyn WriteLog>>) {
        assert!(self.0.may_be_logged, "the memory was made without room for a log");
        self.0.is_logged.set(log.is_some());
        *self.0.log.borrow_mut() = log;
    }

    /// Returns memory for lists without ranges.
    pub(crate) fn none() -> Self {
        thread_local! {
            static NONE: Memory = Memory::new(());
        }
        NONE.with(Self::clone)
    }

    /// Returns empty storage for a list: recycled if there is any, otherwise new.
    #[inline]
    pub fn storage(&self) -> Ranges {
        let mut spare = self.0.spare.borrow_mut();
        let Some(storage) = spare.lists.pop() else { return Ranges::default() };
        spare.iovecs -= storage_iovecs(&storage);
        Ranges::new(storage)
    }

    /// Keeps the storage of a dropped list for later lists, or drops it if there is enough.
    #[inline]
    pub(crate) fn recycle(&self, mut storage: Box<Parts>) {
        storage.kept = None;
        let iovecs = storage_iovecs(&storage);
        let mut spare = self.0.spare.borrow_mut();
        if spare.iovecs + iovecs <= MAX_SPARE_IOVECS {
            storage.iovecs.clear();
            (storage.first, storage.bytes) = (0, 0);
            spare.iovecs += iovecs;
            spare.lists.push(storage);
        }
    }

    /// Returns true if a write is to be [reported](Self::report).
    #[inline]
    pub(crate) fn is_logged(&self) -> bool {
        self.0.is_logged.get()
    }

    /// Returns true if there may be a log now or later.
    #[inline]
    pub(crate) fn may_be_logged(&self) -> bool {
        self.0.may_be_logged
    }

    /// Reports a write to the log, if there is one.
    #[cold]
    pub(crate) fn report(&self, start: *const u8, bytes: usize) {
        if let Some(log) = &*self.0.log.borrow() {
            log.wrote(start, bytes);
        }
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        let iovecs: usize = self.lists.iter().map(|storage| storage_iovecs(storage)).sum();
        debug_assert_eq!(self.iovecs, iovecs, "the sum is that of the lists");
        debug_assert!(iovecs <= MAX_SPARE_IOVECS, "{iovecs} iovecs are spare");
        let is_empty = |parts: &Parts| {
            let is_used = parts.memory.is_some() || parts.kept.is_some();
            !is_used && parts.iovecs.is_empty() && (parts.first, parts.bytes) == (0, 0)
        };
        debug_assert!(self.lists.iter().all(|parts| is_empty(parts)), "a spare list has content");
    }
}

/// The size of a list's storage in iovecs: the capacity for ranges, and the list itself.
#[inline]
fn storage_iovecs(storage: &Parts) -> usize {
    storage.iovecs.capacity() + size_of::<Parts>() / size_of::<iovec>()
}

/// The parts of a list. They stay in one place, so that a list moves as one pointer.
#[derive(Default)]
pub(crate) struct Parts {
    pub(crate) iovecs: Vec<iovec>,
    /// The index of the first range that is not used up.
    pub(crate) first: usize,
    /// The number of bytes left.
    pub(crate) bytes: usize,
    /// `None` while the storage belongs to no list.
    pub(crate) memory: Option<Memory>,
    /// The values held by [`Buffers::keep`](crate::Buffers::keep).
    pub(crate) kept: Option<Rc<dyn Any>>,
}

/// Ranges that become a list with [`Buffers::from_raw_parts`](crate::Buffers::from_raw_parts).
#[derive(Default)]
pub struct Ranges(Box<Parts>);

impl Ranges {
    /// Wraps storage that has no ranges and belongs to no list.
    #[inline]
    pub(crate) fn new(parts: Box<Parts>) -> Self {
        debug_assert!(parts.iovecs.is_empty() && parts.memory.is_none());
        Self(parts)
    }

    /// Appends a range.
    #[inline]
    pub fn push(&mut self, range: iovec) {
        self.0.bytes += range.iov_len;
        self.0.iovecs.push(range);
    }

    /// Drops all ranges.
    pub fn clear(&mut self) {
        self.0.iovecs.clear();
        self.0.bytes = 0;
    }

    /// The ranges, in order.
    pub fn iovecs(&self) -> &[iovec] {
        &self.0.iovecs
    }

    /// The number of bytes in all ranges.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    #[inline]
    pub(crate) fn into_parts(self) -> Box<Parts> {
        self.0
    }
}

impl From<Vec<iovec>> for Ranges {
    fn from(iovecs: Vec<iovec>) -> Self {
        let bytes = iovecs.iter().map(|range| range.iov_len).sum();
        Self(Box::new(Parts { iovecs, bytes, ..Parts::default() }))
    }
}

impl std::fmt::Debug for Ranges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (ranges, bytes) = (self.0.iovecs.len(), self.0.bytes);
        f.debug_struct("Ranges").field("iovecs", &ranges).field("bytes", &bytes).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn storage(capacity: usize) -> Box<Parts> {
        Box::new(Parts { iovecs: Vec::with_capacity(capacity), ..Parts::default() })
    }

    #[test]
    fn storage_is_used_again_up_to_a_bound() {
        let memory = Memory::new(());
        let taken = || memory.storage().into_parts().iovecs.capacity();
        memory.recycle(storage(100));
        assert_eq!(taken(), 100);
        assert_eq!(taken(), 0, "it was the only one");
        let half = MAX_SPARE_IOVECS / 2 - storage_iovecs(&Parts::default());
        memory.recycle(storage(half));
        memory.recycle(storage(half));
        memory.recycle(storage(1));
        assert_eq!(taken(), half, "no more than that is kept");
    }
}
