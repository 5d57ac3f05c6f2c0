//! Where tests and the simulation let the process die: before any of the stores that the process
//! after it looks at.

/// Something is about to be stored. Nothing is done then otherwise.
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

    /// Has this called on the calling thread before each of these stores.
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
    use std::cell::Cell;
    use std::panic::resume_unwind;
    use std::rc::Rc;

    use super::before_stores;

    /// What it dies of.
    pub(crate) struct Died;

    /// The process dies before it makes one more store than this.
    pub(crate) fn after(stores: Option<u32>) {
        let Some(stores) = stores else { return before_stores(None) };
        let left = Cell::new(stores);
        before_stores(Some(Rc::new(move || match left.get() {
            0 => resume_unwind(Box::new(Died)),
            more => left.set(more - 1),
        })));
    }
}
