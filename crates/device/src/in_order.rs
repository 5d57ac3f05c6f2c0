//! Answers in the order in which requests were made available.
//!
//! A front-end without an inflight region continues at used idx when its back-end has died. That is
//! right only if used idx counts the first requests, whichever were done first.

use std::cell::RefCell;
use std::collections::BTreeMap;

use virtqueue::SplitQueue;

/// The answers that wait for others, by their heads, with the bytes that were written. None: no
/// answer waits.
pub(crate) struct InOrder(Option<RefCell<BTreeMap<u16, u32>>>);

impl InOrder {
    pub(crate) fn new(is_on: bool) -> Self {
        Self(is_on.then(RefCell::default))
    }

    pub(crate) fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// How many answers wait for others.
    pub(crate) fn waiting(&self) -> u16 {
        let Some(waiting) = &self.0 else { return 0 };
        iomem::fits(waiting.borrow().len(), "chains of a ring")
    }

    /// Pushes a chain that is done, when those before it are, and those that have waited for it.
    pub(crate) fn push(&self, ring: &mut SplitQueue, head: u16, written_bytes: u32) {
        let Some(waiting) = &self.0 else { return ring.push(head, written_bytes) };
        let waiting = &mut *waiting.borrow_mut();
        if let Some(bytes) = waiting.insert(head, written_bytes) {
            // A driver that uses a head twice has no order.
            ring.push(head, bytes);
        }
        while let Some(bytes) = waiting.remove(&ring.head_in_order()) {
            ring.push(ring.head_in_order(), bytes);
        }
    }

    /// Pushes all that is done: the queue stops, and a driver that has written over its avail ring
    /// has no order.
    pub(crate) fn end(&self, ring: &mut SplitQueue) {
        let waiting = self.0.as_ref().map(RefCell::take).unwrap_or_default();
        waiting.into_iter().for_each(|(head, bytes)| ring.push(head, bytes));
    }
}
