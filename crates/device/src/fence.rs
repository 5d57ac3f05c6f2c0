//! A barrier between ordinary requests of a queue and users that need the disk alone.

use std::any::Any;
use std::cell::{Cell, RefCell};

/// The waiting chains and waiting users at one queue.
#[derive(Default)]
pub(crate) struct Fence {
    /// Chains in the device that wait for the disk.
    held: Cell<u16>,
    tokens: RefCell<Vec<Token>>,
    /// Number of the last token.
    raised: Cell<u64>,
    later: RefCell<Vec<Later>>,
}

/// A user that waits for all chains that had begun.
struct Token {
    number: u64,
    /// Chains in the device that have begun later, so that the token does not wait for them.
    later: u16,
    _kept: Box<dyn Any>,
}

/// A chain that began while a token was kept.
struct Later {
    head: u16,
    /// Number of the last token that does not wait for this chain.
    after: u64,
}

impl Fence {
    /// Counts one more of the `in_device` chains as waiting for the disk.
    pub(crate) fn hold(&self, in_device: u16) {
        self.held.set(self.held.get() + 1);
        self.look(in_device);
    }

    /// The number of chains that wait for the disk.
    pub(crate) fn held(&self) -> u16 {
        self.held.get()
    }

    /// Makes the chain with this head, which has begun, wait as if it had not.
    pub(crate) fn step_out(&self, head: u16, in_device: u16) {
        self.forget_later(head);
        self.hold(in_device);
    }

    /// Ends the wait of one chain, which may then begin.
    pub(crate) fn release(&self) {
        self.held.set(self.held.get() - 1);
    }

    /// Notes that the chain with this head begins. Tokens kept already do not wait for it.
    pub(crate) fn begin(&self, head: u16) {
        let mut tokens = self.tokens.borrow_mut();
        if !tokens.is_empty() {
            tokens.iter_mut().for_each(|token| token.later += 1);
            self.later.borrow_mut().push(Later { head, after: self.raised.get() });
        }
    }

    /// Notes that a chain with this head was answered, which leaves `in_device` chains. Returns
    /// true if a token still waits.
    ///
    /// A driver may give one head to several chains at once. A token then waits for the last of
    /// them, because chains that began later are only counted.
    pub(crate) fn answered(&self, head: u16, in_device: u16) -> bool {
        self.forget_later(head);
        self.look(in_device)
    }

    fn forget_later(&self, head: u16) {
        let mut later = self.later.borrow_mut();
        if let Some(place) = later.iter().position(|chain| chain.head == head) {
            let after = later.swap_remove(place).after;
            let mut tokens = self.tokens.borrow_mut();
            let meant = tokens.iter_mut().filter(|token| token.number <= after);
            meant.for_each(|token| token.later -= 1);
        }
    }

    /// Keeps `token` until all of the `in_device` chains are answered that do not wait for the
    /// disk.
    pub(crate) fn keep(&self, token: Box<dyn Any>, in_device: u16) {
        self.raised.set(self.raised.get() + 1);
        let token = Token { number: self.raised.get(), later: 0, _kept: token };
        self.tokens.borrow_mut().push(token);
        self.look(in_device);
    }

    /// True if a token waits for answers.
    pub(crate) fn is_awaited(&self) -> bool {
        !self.tokens.borrow().is_empty()
    }

    fn look(&self, in_device: u16) -> bool {
        let mut tokens = self.tokens.borrow_mut();
        tokens.retain(|token| in_device != self.held.get() + token.later);
        if tokens.is_empty() {
            self.later.borrow_mut().clear();
        }
        !tokens.is_empty()
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
        assert!(is_kept() && fence.answered(1, 3));
        fence.hold(3);
        assert!(is_kept(), "one has begun");
        assert!(!fence.answered(2, 2) && !is_kept());
        fence.release();
        fence.keep(Box::new(Rc::clone(&token)), 2);
        assert!(is_kept(), "one goes on");
        assert!(!fence.answered(3, 1) && !is_kept());
        fence.keep(Box::new(Rc::clone(&token)), 1);
        assert!(!is_kept(), "nothing has begun");
    }

    #[test]
    fn who_waits_for_requests_does_not_wait_for_those_that_begin_later() {
        let fence = Fence::default();
        let tokens = [(); 2].map(|()| Rc::new(()));
        let are_kept = || tokens.each_ref().map(|token| Rc::strong_count(token) > 1);
        let keep = |token: usize, in_device| {
            fence.keep(Box::new(Rc::clone(&tokens[token])), in_device);
        };
        keep(0, 1);
        fence.begin(8);
        fence.begin(9);
        keep(1, 3);
        fence.begin(10);
        assert!(fence.answered(9, 3));
        fence.begin(9);
        assert_eq!(are_kept(), [true; 2]);
        assert!(fence.answered(7, 3));
        assert_eq!(are_kept(), [false, true], "8 had begun when the second came");
        // A waiting chain continues.
        fence.hold(4);
        fence.release();
        fence.begin(11);
        assert!(!fence.answered(8, 3));
        assert_eq!(are_kept(), [false; 2]);
        keep(0, 3);
        assert!(fence.answered(11, 2) && fence.answered(9, 1) && !fence.answered(10, 0));
        assert_eq!(are_kept(), [false; 2]);
    }

    /// Two chains of a driver that breaks the rules have the same head.
    #[test]
    fn nobody_waits_for_less_because_a_head_is_used_twice() {
        let (fence, token) = (Fence::default(), Rc::new(()));
        fence.keep(Box::new(Rc::clone(&token)), 1);
        fence.begin(5);
        assert!(fence.answered(5, 1) && Rc::strong_count(&token) == 2);
        assert!(!fence.answered(5, 0) && Rc::strong_count(&token) == 1);
    }
}
