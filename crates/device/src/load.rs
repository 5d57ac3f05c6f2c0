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
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use virtqueue::Chain;

use crate::queue_watch::Shown;

/// Requests of up to this many bytes do not count. The fullest ring has 128 MiB of them.
pub const SMALL_REQUEST_BYTES: usize = 128 << 10;
/// The limit on the bytes of a device's large requests. The last request may exceed it.
const UNANSWERED_BYTES: u64 = 64 << 20;

/// The large requests of a device, on all IoThreads.
pub(crate) struct Load {
    limit: u64,
    bytes: AtomicU64,
    /// Queues that wait for room, in the order of their arrival.
    line: Mutex<Line>,
}

#[derive(Default)]
struct Line {
    came: u64,
    waiting: VecDeque<(u64, Waker)>,
}

/// The large requests of one queue.
pub(crate) struct QueueLoad {
    load: Arc<Load>,
    shown: Arc<Shown>,
    wait: RefCell<Option<Wait>>,
}

/// The place in line of a queue that waits for room, until it is dropped.
struct Wait {
    load: Arc<Load>,
    number: u64,
    /// True if the queue waits because of its own zeroes, false if it waits for the next chain in
    /// its ring.
    is_for_zeroes: bool,
}

/// Bytes of a request, counted until this is dropped.
pub(crate) struct Counted {
    load: Arc<Load>,
    shown: Arc<Shown>,
    bytes: u64,
}

impl Default for Load {
    fn default() -> Self {
        Self::new(UNANSWERED_BYTES)
    }
}

impl Load {
    pub(crate) fn new(limit: u64) -> Self {
        Self { limit, bytes: AtomicU64::new(0), line: Mutex::default() }
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
        let line = self.line();
        let first = line.waiting.front().filter(|_| self.has_room());
        let waker = first.map(|(_, waker)| waker.clone());
        drop(line);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl QueueLoad {
    pub(crate) fn new(load: Arc<Load>, shown: Arc<Shown>) -> Self {
        Self { load, shown, wait: RefCell::default() }
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
        let wait = &mut *self.wait.borrow_mut();
        let mut line = self.load.line();
        let is_first = match wait {
            Some(wait) => line.is_first(wait.number),
            None => line.waiting.is_empty(),
        };
        if !is_first || !self.load.has_room() {
            if wait.is_none() {
                *wait = Some(Wait::new(&self.load, &mut line, waker, false));
            }
            return false;
        }
        drop(line);
        self.count_chain(chain);
        // The next queue in line may have room as well.
        drop(wait.take());
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
        let wait = &mut *self.wait.borrow_mut();
        let mut line = self.load.line();
        let has_room = self.load.has_room();
        if !has_room && wait.is_none() {
            *wait = Some(Wait::new(&self.load, &mut line, waker, true));
        }
        (counted, has_room)
    }

    fn count(&self, bytes: u64) -> Counted {
        self.load.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.shown.bytes.fetch_add(bytes, Ordering::Relaxed);
        Counted { load: Arc::clone(&self.load), shown: Arc::clone(&self.shown), bytes }
    }

    /// True if the queue may pop, because it does not wait for room or has it now.
    pub(crate) fn has_room(&self) -> bool {
        let wait = &mut *self.wait.borrow_mut();
        let Some(waits) = wait else { return true };
        let has_room = self.load.line().is_first(waits.number) && self.load.has_room();
        if has_room && waits.is_for_zeroes {
            *wait = None;
        }
        // A wait for a chain keeps its place until that chain is popped again and admitted.
        has_room
    }

    /// Leaves the line, because the queue pops nothing for now or for good.
    pub(crate) fn leave_line(&self) {
        drop(self.wait.take());
    }
}

impl Line {
    fn is_first(&self, number: u64) -> bool {
        self.waiting.front().is_some_and(|(first, _)| *first == number)
    }
}

impl Wait {
    fn new(load: &Arc<Load>, line: &mut Line, waker: &Waker, is_for_zeroes: bool) -> Self {
        line.came += 1;
        line.waiting.push_back((line.came, waker.clone()));
        Self { load: Arc::clone(load), number: line.came, is_for_zeroes }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        let mut line = self.load.line();
        let place = line.waiting.iter().position(|(number, _)| *number == self.number);
        let left = place.and_then(|place| line.waiting.remove(place));
        drop(line);
        drop(left);
        self.load.wake_first();
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.load.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.shown.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.load.wake_first();
    }
}
