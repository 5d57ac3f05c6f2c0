//! A bound on the bytes of requests that a device has taken and not answered.
//!
//! A request may be as long as a chain, and a ring may hold a thousand of them: a stop would wait
//! until terabytes are moved. So large requests count for their device. While their sum is at the
//! limit, its queues leave further large requests in their rings. Small requests continue.
//!
//! Write-zeroes requests are short themselves. While their zeroes are at the limit, their queue
//! takes nothing.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;

use blockio::executor::Lock;
use virtqueue::Chain;

use crate::queue::buffer_budget::ListBudget;
use crate::queue::queue_status::QueueStatus;

/// Requests of up to this many bytes do not count. The fullest ring has 128 MiB of them.
pub const SMALL_REQUEST_BYTES: usize = 128 << 10;
/// The limit on the bytes of a device's large requests. The last request may exceed it.
const UNANSWERED_BYTES: u64 = 64 << 20;

/// The large requests of a device, on all IoThreads.
pub(crate) struct DataBudget {
    limit: u64,
    bytes: AtomicU64,
    /// Queues that wait for room, in the order of their arrival.
    wait_queue: Lock<WaitQueue>,
}

#[derive(Default)]
struct WaitQueue {
    came: u64,
    waiting: VecDeque<(u64, Waker)>,
}

/// The large requests of one queue.
pub(crate) struct QueueDataBudget {
    budget: Arc<DataBudget>,
    status: Arc<QueueStatus>,
    ticket: RefCell<Option<Ticket>>,
}

/// The place in line of a queue that waits for room, until it is dropped.
struct Ticket {
    budget: Arc<DataBudget>,
    number: u64,
    /// True if the queue waits because of its own zeroes, false if it waits for the next chain in
    /// its ring.
    is_for_zeroes: bool,
}

/// Bytes of a request, counted until this is dropped.
pub(crate) struct Counted {
    budget: Arc<DataBudget>,
    status: Arc<QueueStatus>,
    bytes: u64,
}

/// Limits on the memory of popped chains.
pub(crate) struct Budgets {
    pub(crate) lists: ListBudget,
    pub(crate) data: QueueDataBudget,
}

impl Default for DataBudget {
    fn default() -> Self {
        Self::new(UNANSWERED_BYTES)
    }
}

impl DataBudget {
    pub(crate) fn new(limit: u64) -> Self {
        Self { limit, bytes: AtomicU64::new(0), wait_queue: Lock::default() }
    }

    /// Bytes of all counted requests.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn has_room(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) < self.limit
    }

    /// Wakes the first queue in line, if there is room.
    fn wake_first(&self) {
        let wait_queue = self.wait_queue.lock();
        let first = wait_queue.waiting.front().filter(|_| self.has_room());
        let waker = first.map(|(_, waker)| waker.clone());
        drop(wait_queue);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl QueueDataBudget {
    pub(crate) fn new(budget: Arc<DataBudget>, status: Arc<QueueStatus>) -> Self {
        Self { budget, status, ticket: RefCell::default() }
    }

    /// True if a chain holds a large request.
    #[inline]
    pub(crate) fn is_large(chain: &Chain) -> bool {
        chain.readable.bytes() + chain.writable.bytes() > SMALL_REQUEST_BYTES
    }

    /// Counts the large request of a popped chain until its lists are dropped. Returns false if
    /// there is no room: the caller puts the chain back, and `waker` is woken when there is room.
    #[cold]
    pub(crate) fn admit(&self, chain: &mut Chain, waker: &Waker) -> bool {
        let ticket = &mut *self.ticket.borrow_mut();
        let mut wait_queue = self.budget.wait_queue.lock();
        let is_first = match ticket {
            Some(ticket) => wait_queue.is_first(ticket.number),
            None => wait_queue.waiting.is_empty(),
        };
        if !is_first || !self.budget.has_room() {
            if ticket.is_none() {
                *ticket = Some(Ticket::new(&self.budget, &mut wait_queue, waker, false));
            }
            return false;
        }
        drop(wait_queue);
        self.count_chain(chain);
        // The next queue in line may have room as well.
        drop(ticket.take());
        true
    }

    /// Counts the large request of a chain regardless of the limit.
    #[cold]
    pub(crate) fn count_chain(&self, chain: &mut Chain) {
        let bytes = chain.readable.bytes() + chain.writable.bytes();
        let counted = Rc::new(self.count(bytes as u64));
        chain.readable.keep(counted.clone());
        chain.writable.keep(counted);
    }

    /// Counts the zeroes of a request. The second value is false if they are at the limit: the
    /// queue takes nothing until there is room, when `waker` is woken.
    #[must_use]
    pub(crate) fn count_zeroes(&self, bytes: u64, waker: &Waker) -> (Counted, bool) {
        let counted = self.count(bytes);
        let ticket = &mut *self.ticket.borrow_mut();
        let mut wait_queue = self.budget.wait_queue.lock();
        let has_room = self.budget.has_room();
        if !has_room && ticket.is_none() {
            *ticket = Some(Ticket::new(&self.budget, &mut wait_queue, waker, true));
        }
        (counted, has_room)
    }

    fn count(&self, bytes: u64) -> Counted {
        self.budget.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.status.bytes.fetch_add(bytes, Ordering::Relaxed);
        Counted { budget: Arc::clone(&self.budget), status: Arc::clone(&self.status), bytes }
    }

    /// True if the queue may pop, because it does not wait for room or has it now.
    pub(crate) fn has_room(&self) -> bool {
        let ticket = &mut *self.ticket.borrow_mut();
        let Some(waits) = ticket else { return true };
        let has_room =
            self.budget.wait_queue.lock().is_first(waits.number) && self.budget.has_room();
        if has_room && waits.is_for_zeroes {
            *ticket = None;
        }
        // A wait for a chain keeps its place until that chain is popped again and admitted.
        has_room
    }

    /// Leaves the line, because the queue pops nothing for now or for good.
    pub(crate) fn cancel_wait(&self) {
        drop(self.ticket.take());
    }
}

impl WaitQueue {
    fn is_first(&self, number: u64) -> bool {
        self.waiting.front().is_some_and(|(first, _)| *first == number)
    }
}

impl Ticket {
    fn new(
        budget: &Arc<DataBudget>,
        wait_queue: &mut WaitQueue,
        waker: &Waker,
        is_for_zeroes: bool,
    ) -> Self {
        wait_queue.came += 1;
        wait_queue.waiting.push_back((wait_queue.came, waker.clone()));
        Self { budget: Arc::clone(budget), number: wait_queue.came, is_for_zeroes }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut wait_queue = self.budget.wait_queue.lock();
        let place = wait_queue.waiting.iter().position(|(number, _)| *number == self.number);
        let left = place.and_then(|place| wait_queue.waiting.remove(place));
        drop(wait_queue);
        drop(left);
        self.budget.wake_first();
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.budget.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.status.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.budget.wake_first();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// A queue that waits sleeps. Its own events may never come.
    #[test]
    fn each_way_to_room_wakes_the_first_queue_in_line() {
        let budget = Arc::new(DataBudget::new(100));
        let woken = [(); 3].map(|()| Arc::<Woken>::default());
        let take_woken = || woken.each_ref().map(|woken| woken.0.swap(false, Ordering::Relaxed));
        let queues = [(); 3].map(|()| QueueDataBudget::new(Arc::clone(&budget), Arc::default()));
        let mut counted = Vec::new();
        for ((queue, woken), bytes) in queues.iter().zip(&woken).zip([100, 0, 0]) {
            let (bytes, has_room) = queue.count_zeroes(bytes, &Arc::clone(woken).into());
            assert!(!has_room);
            counted.push(bytes);
        }
        assert_eq!(take_woken(), [false; 3]);
        counted.clear();
        assert_eq!(take_woken(), [true, false, false], "requests have ended");
        assert!(!queues[1].has_room(), "it passes the first");
        assert!(queues[0].has_room());
        assert_eq!(take_woken(), [false, true, false], "the first has its room");
        queues[1].cancel_wait();
        assert_eq!(take_woken(), [false, false, true], "the second has left the line");
        assert!(queues[2].has_room() && budget.wait_queue.lock().waiting.is_empty());
    }
}
