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
    use std::cell::Cell;
    use std::panic::resume_unwind;
    use std::rc::Rc;

    use super::before_stores;

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
}
