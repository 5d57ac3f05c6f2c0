//! What keeps the memory of lists mapped, and storage for the next lists.

use std::any::Any;
use std::cell::RefCell;
use std::rc::Rc;

use libc::iovec;

/// The storage that a [`Memory`] keeps for later lists, in iovecs: enough for a queue of 1024
/// entries that is full of requests of the usual size, and a bound on what a hostile guest can make
/// us keep.
const MAX_SPARE_IOVECS: usize = 16 * 1024;

/// Receives writes to shared memory by a device or by the kernel on its behalf, as a live migration
/// needs it.
pub trait WriteLog {
    /// `bytes` bytes from `start` on, an address in this process, were written.
    fn wrote(&self, start: *const u8, bytes: usize);
}

/// A counted reference, on one thread, to whatever keeps memory mapped. A clone costs no atomic
/// operation.
///
/// It also keeps the storage of lists that are gone, so that the next ones need no allocation.
#[derive(Clone)]
pub struct Memory(Rc<Shared>);

struct Shared {
    spare: RefCell<Spare>,
    log: Option<Rc<dyn WriteLog>>,
    _owner: Box<dyn Any>,
}

#[derive(Default)]
struct Spare {
    lists: Vec<Vec<iovec>>,
    /// The sum of the capacities.
    iovecs: usize,
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").finish_non_exhaustive()
    }
}

impl Memory {
    /// Memory that stays mapped while `owner` lives.
    pub fn new(owner: impl Any) -> Self {
        Self(Rc::new(Shared { spare: RefCell::default(), log: None, _owner: Box::new(owner) }))
    }

    /// As [`new`](Self::new), and `log` receives everything that is written.
    pub fn with_log(owner: impl Any, log: Rc<dyn WriteLog>) -> Self {
        Self(Rc::new(Shared { spare: RefCell::default(), log: Some(log), _owner: Box::new(owner) }))
    }

    /// The same memory, whose lists also keep `kept`.
    pub(crate) fn keeping(&self, kept: impl Any) -> Self {
        let owner: Box<dyn Any> = Box::new((self.clone(), kept));
        let log = self.0.log.clone();
        Self(Rc::new(Shared { spare: RefCell::default(), log, _owner: owner }))
    }

    /// Memory for lists without ranges.
    pub(crate) fn none() -> Self {
        thread_local! {
            static NONE: Memory = Memory::new(());
        }
        NONE.with(Self::clone)
    }

    /// A list to fill: one that was given back, or a new one.
    #[inline]
    #[must_use]
    pub fn storage(&self) -> Vec<iovec> {
        let mut spare = self.0.spare.borrow_mut();
        let storage = spare.lists.pop().unwrap_or_default();
        spare.iovecs -= storage.capacity();
        storage
    }

    /// Takes storage back for later lists; drops it when enough is kept already.
    #[inline]
    pub(crate) fn recycle(&self, mut storage: Vec<iovec>) {
        let capacity = storage.capacity();
        let mut spare = self.0.spare.borrow_mut();
        if capacity > 0 && spare.iovecs + capacity <= MAX_SPARE_IOVECS {
            storage.clear();
            spare.iovecs += capacity;
            spare.lists.push(storage);
        }
    }

    #[inline]
    pub(crate) fn log(&self) -> Option<&dyn WriteLog> {
        self.0.log.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storage_is_used_again_up_to_a_bound() {
        let memory = Memory::new(());
        memory.recycle(Vec::with_capacity(100));
        let storage = memory.storage();
        assert!(storage.is_empty() && storage.capacity() == 100);
        memory.recycle(Vec::with_capacity(MAX_SPARE_IOVECS / 2));
        memory.recycle(Vec::with_capacity(MAX_SPARE_IOVECS / 2));
        memory.recycle(Vec::with_capacity(1));
        assert_eq!(memory.storage().capacity(), MAX_SPARE_IOVECS / 2, "the last one was kept");
    }
}
