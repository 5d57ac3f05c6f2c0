//! Answers in the order in which requests were made available.
//!
//! A front-end without an inflight region continues at used idx after its back-end died. That is
//! right only if the answered requests are always the oldest, even if the disk completes them in
//! another order.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use virtqueue::Virtqueue;

/// Answers that wait for earlier requests: the written bytes, by head. `None`: order does not
/// matter.
pub(crate) struct OrderedCompletion(Option<RefCell<BTreeMap<u16, u32>>>);

/// The slow path of a push.
pub(crate) struct PushHooks {
    /// A push takes this path: a barrier counts answers, answers are in order, or each has its own
    /// notify.
    pub(crate) are_due: Cell<bool>,
    pub(crate) in_order: OrderedCompletion,
    /// False: each pushed element has its own notify.
    pub(crate) notify_batch: bool,
}

impl OrderedCompletion {
    pub(crate) fn new(is_on: bool) -> Self {
        Self(is_on.then(RefCell::default))
    }

    pub(crate) fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// The number of answers that wait for earlier requests.
    pub(crate) fn waiting(&self) -> u16 {
        let Some(waiting) = &self.0 else { return 0 };
        iomem::fits(waiting.borrow().len(), "chains of a ring")
    }

    /// Pushes a finished chain once all earlier chains are pushed, then the answers that waited for
    /// it.
    pub(crate) fn push(&self, ring: &mut Virtqueue, head: u16, written_bytes: u32) {
        let Some(waiting) = &self.0 else { return ring.push(head, written_bytes) };
        let waiting = &mut *waiting.borrow_mut();
        if let Some(bytes) = waiting.insert(head, written_bytes) {
            // A driver that uses a head twice has no order.
            ring.push(head, bytes);
        }
        loop {
            let head = ring.in_order_head();
            let Some(bytes) = waiting.remove(&head) else { break };
            ring.push(head, bytes);
        }
    }

    /// Pushes all finished chains when the queue stops: a driver that has overwritten its avail
    /// ring has no order.
    pub(crate) fn flush(&self, ring: &mut Virtqueue) {
        let waiting = self.0.as_ref().map(RefCell::take).unwrap_or_default();
        waiting.into_iter().for_each(|(head, bytes)| ring.push(head, bytes));
    }
}
