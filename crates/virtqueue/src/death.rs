//! A hook before each store that the next process relies on. Tests and the simulation let the
//! process die there.

/// Does nothing: only tests and the simulation have a hook.
#[cfg(not(any(test, ringhaul_sim)))]
#[inline]
pub(crate) fn before_store() {}

#[cfg(any(test, ringhaul_sim))]
pub(crate) use hooked::before_store;
#[cfg(any(test, ringhaul_sim))]
pub use hooked::before_stores;

#[cfg(any(test, ringhaul_sim))]
mod hooked {
    use std::cell::RefCell;
    use std::rc::Rc;

    type Hook = Rc<dyn Fn()>;

    thread_local! {
        static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
    }

    /// Sets the hook that the calling thread runs before each of these stores. `None` removes it.
    pub fn before_stores(hook: Option<Hook>) {
        HOOK.set(hook);
    }

    pub(crate) fn before_store() {
        if let Some(hook) = HOOK.with_borrow(Clone::clone) {
            hook();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::{Cell, RefCell};
    use std::panic::resume_unwind;
    use std::rc::Rc;
    use std::sync::Arc;

    use super::before_stores;
    use crate::memory::{DirtyLog, GuestMemory, QueueLog};

    /// The payload of the panic that stands for a death.
    pub(crate) struct SimulatedDeath;

    /// Lets the process die after this number of stores, right before the next one. `None`: never.
    pub(crate) fn after(stores: Option<u32>) {
        let Some(stores) = stores else { return before_stores(None) };
        let left = Cell::new(stores);
        before_stores(Some(Rc::new(move || match left.get() {
            0 => resume_unwind(Box::new(SimulatedDeath)),
            more => left.set(more - 1),
        })));
    }

    const PAGE_BYTES: usize = 4096;
    const PAGES: usize = 16;

    /// A front-end that copies marked pages, and takes their marks away, before each store.
    pub(crate) struct Follower {
        memory: Arc<GuestMemory>,
        marks: Arc<GuestMemory>,
        copies: RefCell<Vec<Vec<u8>>>,
    }

    impl Follower {
        /// Follows the first pages of `memory`.
        pub(crate) fn new(memory: &Arc<GuestMemory>) -> Rc<Self> {
            let marks = Arc::new(GuestMemory::anonymous(&[(0, PAGE_BYTES as u64)]).unwrap());
            let copies = RefCell::new(vec![Vec::new(); PAGES]);
            Rc::new(Self { memory: Arc::clone(memory), marks, copies })
        }

        /// A log of writes to a ring whose used ring, or device events, are at this address.
        pub(crate) fn log(&self, used_ring: u64) -> QueueLog {
            let log = Arc::new(DirtyLog::new(Arc::clone(&self.marks), 8).unwrap());
            QueueLog { log, marks_data: false, used_ring: Some(used_ring) }
        }

        fn page(&self, page: usize) -> Vec<u8> {
            let mut bytes = [0; PAGE_BYTES];
            self.memory.read((page * PAGE_BYTES) as u64, &mut bytes).unwrap();
            bytes.into()
        }

        fn copy_marked(&self) {
            let mut marks = [0; PAGES / 8];
            self.marks.read(0, &mut marks).unwrap();
            self.marks.write(0, &[0; PAGES / 8]).unwrap();
            for page in (0..PAGES).filter(|page| marks[page / 8] & 1 << (page % 8) != 0) {
                self.copies.borrow_mut()[page] = self.page(page);
            }
        }

        /// Runs `write`, and checks that the copies are whole in the end.
        pub(crate) fn check(self: &Rc<Self>, write: impl FnOnce()) {
            self.copy_marked();
            for (page, copy) in self.copies.borrow_mut().iter_mut().enumerate() {
                *copy = self.page(page);
            }
            let follower = Rc::clone(self);
            before_stores(Some(Rc::new(move || follower.copy_marked())));
            write();
            before_stores(None);
            self.copy_marked();
            for (page, copy) in self.copies.borrow().iter().enumerate() {
                assert!(*copy == self.page(page), "page {page} was copied too early or never");
            }
        }
    }
}
