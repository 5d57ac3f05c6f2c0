//! A thread's reference to guest memory, and storage for its chains.

use std::cell::RefCell;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

use libc::iovec;

use super::{GuestMemory, HostRanges};
use crate::split::MAX_QUEUE_SIZE;

/// The storage that a [`LocalMemory`] keeps for later chains, in iovecs: enough for the largest
/// queue full of requests of the usual size, and a bound on what a hostile guest can make us keep.
const MAX_SPARE_IOVECS: usize = 16 * MAX_QUEUE_SIZE as usize;

/// A thread's own counted reference to a [`GuestMemory`]. A clone costs no atomic operation.
///
/// It also keeps storage of chains that are done, so that the next ones need no allocation.
#[derive(Debug, Clone)]
pub struct LocalMemory(Rc<Local>);

#[derive(Debug)]
struct Local {
    memory: Arc<GuestMemory>,
    spare: RefCell<Spare>,
}

#[derive(Debug, Default)]
struct Spare {
    lists: Vec<Vec<iovec>>,
    /// The sum of the capacities.
    iovecs: usize,
}

impl LocalMemory {
    /// Makes the thread's first reference; the others are clones of it.
    pub fn new(memory: Arc<GuestMemory>) -> Self {
        Self(Rc::new(Local { memory, spare: RefCell::default() }))
    }

    /// The map, to be shared with other threads.
    pub fn shared(&self) -> &Arc<GuestMemory> {
        &self.0.memory
    }

    /// Gives storage back for later chains; drops it when enough is kept already.
    #[inline]
    pub fn recycle(&self, mut storage: Vec<iovec>) {
        let capacity = storage.capacity();
        let mut spare = self.0.spare.borrow_mut();
        if capacity > 0 && spare.iovecs + capacity <= MAX_SPARE_IOVECS {
            storage.clear();
            spare.iovecs += capacity;
            spare.lists.push(storage);
        }
    }

    /// A list to fill: one that was given back, or a new one.
    #[inline]
    pub(super) fn storage(&self) -> Vec<iovec> {
        let mut spare = self.0.spare.borrow_mut();
        let storage = spare.lists.pop().unwrap_or_default();
        spare.iovecs -= storage.capacity();
        storage
    }
}

impl HostRanges {
    /// Ranges that storage is taken for, those that are used up included.
    #[inline]
    pub(crate) fn stored(&self) -> usize {
        self.iovecs.len()
    }
}

impl Deref for LocalMemory {
    type Target = GuestMemory;

    #[inline]
    fn deref(&self) -> &GuestMemory {
        &self.0.memory
    }
}
