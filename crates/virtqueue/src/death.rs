//! Where tests let the process die: before any of the stores that the process after it looks at.

/// Something is about to be stored. Does nothing but in a test of this crate.
#[inline]
pub(crate) fn before_store() {
    #[cfg(test)]
    tests::before_store();
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    /// What it dies of.
    pub(crate) struct Died;

    thread_local! {
        static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
    }

    /// The process dies before it makes one more store than this.
    pub(crate) fn after(stores: Option<u32>) {
        LEFT.set(stores);
    }

    pub(super) fn before_store() {
        match LEFT.get() {
            Some(0) => std::panic::resume_unwind(Box::new(Died)),
            left => LEFT.set(left.map(|left| left - 1)),
        }
    }
}
