//! The chains that a queue takes, and the ones that it leaves in its ring until there is room.

use std::task::Waker;

use virtqueue::Chain;

use super::Queue;
use super::buffer_budget::ListBudget;
use super::data_budget::{Counted, QueueDataBudget};

impl Queue {
    /// Counts a popped chain if its lists are long or its request is large. Returns false if the
    /// device has no room for it now; the chain is then back in the ring.
    #[inline]
    pub(crate) fn admit(&self, chain: &mut Chain) -> bool {
        if QueueDataBudget::is_large(chain) && !self.admit_large(chain) {
            return false;
        }
        if ListBudget::is_long(chain) {
            self.budgets.lists.add(chain);
            self.set_halted();
        }
        true
    }

    #[cold]
    fn admit_large(&self, chain: &mut Chain) -> bool {
        if self.is_recovered(chain.head) {
            // The queue cannot stop before it has taken the chains of an earlier process.
            self.budgets.data.count_chain(chain);
            return true;
        }
        let is_taken = self.budgets.data.admit(chain, &self.waker());
        if !is_taken {
            self.ring.borrow_mut().put_back(chain.head);
            self.set_halted();
        }
        is_taken
    }

    /// Counts zeroes that a request writes, until the result is dropped.
    #[must_use]
    pub(crate) fn count_zeroes(&self, bytes: u64) -> Counted {
        let (counted, has_room) = self.budgets.data.count_zeroes(bytes, &self.waker());
        if !has_room {
            self.set_halted();
        }
        counted
    }

    fn waker(&self) -> Waker {
        let waker = self.control.waker.borrow().clone();
        waker.expect("the queue's task has set it before its first run")
    }
}
