//! Requests of a queue that wait for their disk, which somebody else has to itself, and those who
//! wait for all others.

use std::any::Any;
use std::cell::{Cell, RefCell};

/// Who waits at a queue, and for what.
#[derive(Default)]
pub(crate) struct Fence {
    /// Chains in the device that wait for the disk.
    held: Cell<u16>,
    /// They are dropped when no other chain is in the device.
    tokens: RefCell<Vec<Box<dyn Any>>>,
}

impl Fence {
    /// One more of the chains in the device, `in_device` of them, waits for the disk.
    pub(crate) fn hold(&self, in_device: u16) {
        self.held.set(self.held.get() + 1);
        self.look(in_device);
    }

    /// It goes on.
    pub(crate) fn release(&self) {
        self.held.set(self.held.get() - 1);
    }

    /// Keeps `token` until all `in_device` chains that do not wait for the disk are answered.
    pub(crate) fn keep(&self, token: Box<dyn Any>, in_device: u16) {
        self.tokens.borrow_mut().push(token);
        self.look(in_device);
    }

    /// Whether somebody waits for chains to be answered, of which `in_device` are left.
    pub(crate) fn look(&self, in_device: u16) -> bool {
        if in_device == self.held.get() {
            self.tokens.take();
        }
        !self.tokens.borrow().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    #[test]
    fn who_waits_for_requests_does_not_wait_for_those_that_wait_for_it() {
        let (fence, token) = (Fence::default(), Rc::new(()));
        let is_kept = || Rc::strong_count(&token) > 1;
        fence.hold(1);
        fence.keep(Box::new(Rc::clone(&token)), 4);
        assert!(is_kept() && fence.look(3));
        fence.hold(3);
        assert!(is_kept(), "one has begun");
        assert!(!fence.look(2) && !is_kept());
        fence.release();
        fence.keep(Box::new(Rc::clone(&token)), 2);
        assert!(is_kept(), "one goes on");
        assert!(!fence.look(1) && !is_kept());
        fence.keep(Box::new(Rc::clone(&token)), 1);
        assert!(!is_kept(), "nothing has begun");
    }
}
