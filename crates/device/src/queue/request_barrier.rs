//! A barrier between ordinary requests of a queue and users that need the disk alone.

use std::any::Any;
use std::cell::{Cell, RefCell};

/// The waiting chains and waiting users at one queue.
#[derive(Default)]
pub(crate) struct RequestBarrier {
    /// Requests must check if they may use the disk.
    pub(crate) checks_access: Cell<bool>,
    /// Chains in the device that wait for the disk.
    waiting: Cell<u16>,
    tokens: RefCell<Vec<Token>>,
    /// Number of the last token.
    last_number: Cell<u64>,
    later: RefCell<Vec<LaterChain>>,
}

/// A user that waits for all chains that had begun.
struct Token {
    number: u64,
    /// Chains in the device that have begun later, so that the token does not wait for them.
    begun_later: u16,
    _kept: Box<dyn Any>,
}

/// A chain that began while a token was kept.
struct LaterChain {
    head: u16,
    /// Number of the last token that does not wait for this chain.
    last_exempt: u64,
}

impl RequestBarrier {
    /// Counts one more of the `in_device` chains as waiting for the disk.
    pub(crate) fn add_waiting(&self, in_device: u16) {
        self.waiting.set(self.waiting.get() + 1);
        self.release_tokens(in_device);
    }

    /// The number of chains that wait for the disk.
    pub(crate) fn waiting(&self) -> u16 {
        self.waiting.get()
    }

    /// Makes the chain with this head, which has begun, wait as if it had not.
    pub(crate) fn suspend(&self, head: u16, in_device: u16) {
        self.remove_later(head);
        self.add_waiting(in_device);
    }

    /// Ends the wait of one chain, which may then begin.
    pub(crate) fn resume(&self) {
        self.waiting.set(self.waiting.get() - 1);
    }

    /// Notes that the chain with this head begins. Tokens kept already do not wait for it.
    pub(crate) fn begin(&self, head: u16) {
        let mut tokens = self.tokens.borrow_mut();
        if !tokens.is_empty() {
            tokens.iter_mut().for_each(|token| token.begun_later += 1);
            self.later.borrow_mut().push(LaterChain { head, last_exempt: self.last_number.get() });
        }
    }

    /// Notes that a chain with this head was answered, which leaves `in_device` chains. Returns
    /// true if a token still waits.
    ///
    /// A driver may give one head to several chains at once. A token then waits for the last of
    /// them, because chains that began later are only counted.
    pub(crate) fn answered(&self, head: u16, in_device: u16) -> bool {
        self.remove_later(head);
        self.release_tokens(in_device)
    }

    fn remove_later(&self, head: u16) {
        let mut later = self.later.borrow_mut();
        if let Some(place) = later.iter().position(|chain| chain.head == head) {
            let last_exempt = later.swap_remove(place).last_exempt;
            let mut tokens = self.tokens.borrow_mut();
            let meant = tokens.iter_mut().filter(|token| token.number <= last_exempt);
            meant.for_each(|token| token.begun_later -= 1);
        }
    }

    /// Keeps `token` until all of the `in_device` chains are answered that do not wait for the
    /// disk.
    pub(crate) fn add_token(&self, token: Box<dyn Any>, in_device: u16) {
        self.last_number.set(self.last_number.get() + 1);
        let token = Token { number: self.last_number.get(), begun_later: 0, _kept: token };
        self.tokens.borrow_mut().push(token);
        self.release_tokens(in_device);
    }

    /// True if a token waits for answers.
    pub(crate) fn has_tokens(&self) -> bool {
        !self.tokens.borrow().is_empty()
    }

    fn release_tokens(&self, in_device: u16) -> bool {
        let mut tokens = self.tokens.borrow_mut();
        tokens.retain(|token| in_device != self.waiting.get() + token.begun_later);
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
    fn a_wait_for_requests_excludes_requests_that_wait_for_it() {
        let (barrier, token) = (RequestBarrier::default(), Rc::new(()));
        let is_kept = || Rc::strong_count(&token) > 1;
        barrier.add_waiting(1);
        barrier.add_token(Box::new(Rc::clone(&token)), 4);
        assert!(is_kept() && barrier.answered(1, 3));
        barrier.add_waiting(3);
        assert!(is_kept(), "one has begun");
        assert!(!barrier.answered(2, 2) && !is_kept());
        barrier.resume();
        barrier.add_token(Box::new(Rc::clone(&token)), 2);
        assert!(is_kept(), "one goes on");
        assert!(!barrier.answered(3, 1) && !is_kept());
        barrier.add_token(Box::new(Rc::clone(&token)), 1);
        assert!(!is_kept(), "nothing has begun");
    }

    /// Both would wait for ever.
    #[test]
    fn a_wait_ends_when_the_last_request_begins_to_wait_for_it() {
        let (barrier, token) = (RequestBarrier::default(), Rc::new(()));
        barrier.add_token(Box::new(Rc::clone(&token)), 2);
        barrier.suspend(7, 2);
        assert_eq!(Rc::strong_count(&token), 2, "another is not answered");
        barrier.suspend(8, 2);
        assert_eq!(Rc::strong_count(&token), 1);
    }

    /// Otherwise it would count twice, and the wait would end too early.
    #[test]
    fn a_later_request_that_begins_to_wait_shortens_no_wait() {
        let (barrier, token) = (RequestBarrier::default(), Rc::new(()));
        barrier.add_token(Box::new(Rc::clone(&token)), 1);
        barrier.begin(8);
        barrier.suspend(8, 2);
        assert_eq!(Rc::strong_count(&token), 2, "the earlier one is not answered");
        assert!(!barrier.answered(7, 1));
        assert_eq!(Rc::strong_count(&token), 1);
    }

    #[test]
    fn a_wait_for_requests_excludes_later_ones() {
        let barrier = RequestBarrier::default();
        let tokens = [(); 2].map(|()| Rc::new(()));
        let are_kept = || tokens.each_ref().map(|token| Rc::strong_count(token) > 1);
        let keep = |token: usize, in_device| {
            barrier.add_token(Box::new(Rc::clone(&tokens[token])), in_device);
        };
        keep(0, 1);
        barrier.begin(8);
        barrier.begin(9);
        keep(1, 3);
        barrier.begin(10);
        assert!(barrier.answered(9, 3));
        barrier.begin(9);
        assert_eq!(are_kept(), [true; 2]);
        assert!(barrier.answered(7, 3));
        assert_eq!(are_kept(), [false, true], "8 had begun when the second came");
        // A waiting chain continues.
        barrier.add_waiting(4);
        barrier.resume();
        barrier.begin(11);
        assert!(!barrier.answered(8, 3));
        assert_eq!(are_kept(), [false; 2]);
        keep(0, 3);
        assert!(barrier.answered(11, 2) && barrier.answered(9, 1) && !barrier.answered(10, 0));
        assert_eq!(are_kept(), [false; 2]);
    }

    /// Two chains of a driver that breaks the rules have the same head.
    #[test]
    fn a_reused_head_shortens_no_wait() {
        let (barrier, token) = (RequestBarrier::default(), Rc::new(()));
        barrier.add_token(Box::new(Rc::clone(&token)), 1);
        barrier.begin(5);
        assert!(barrier.answered(5, 1) && Rc::strong_count(&token) == 2);
        assert!(!barrier.answered(5, 0) && Rc::strong_count(&token) == 1);
    }
}
