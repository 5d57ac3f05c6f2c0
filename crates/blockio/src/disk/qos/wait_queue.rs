//! Lets requests of one disk wait, on any thread: for their turn, and for a change.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// A fair semaphore: members of a line go one by one, or a few at once.
#[derive(Debug)]
pub struct FairSemaphore {
    line: Mutex<Line>,
    at_once: usize,
}

impl Default for FairSemaphore {
    fn default() -> Self {
        Self::new(1)
    }
}

#[derive(Debug, Default)]
struct Line {
    /// The number of the next member.
    next: u64,
    waiting: VecDeque<(u64, Option<Waker>)>,
}

impl Line {
    /// The place of a member; numbers ascend.
    fn place_of(&self, number: u64) -> Option<usize> {
        self.waiting.binary_search_by_key(&number, |(number, _)| *number).ok()
    }
}

/// A place in a line, until it is dropped.
pub struct Ticket<T: Deref<Target = FairSemaphore>> {
    turns: T,
    number: u64,
}

impl FairSemaphore {
    /// A line of which this many members go at once.
    pub fn new(at_once: usize) -> Self {
        Self { line: Mutex::default(), at_once }
    }

    /// Takes a place at the end.
    pub fn enter(&self) -> Ticket<&Self> {
        Ticket::new(self)
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Deref<Target = FairSemaphore>> Ticket<T> {
    /// Takes a place at the end, for an owner of the line.
    pub(crate) fn new(turns: T) -> Self {
        let mut line = turns.line();
        let number = line.next;
        line.next += 1;
        line.waiting.push_back((number, None));
        drop(line);
        Self { turns, number }
    }

    /// Ready when the place is at the front.
    pub fn poll(&self, cx: &Context<'_>) -> Poll<()> {
        let mut line = self.turns.line();
        let place = line.place_of(self.number);
        if place.is_some_and(|place| place < self.turns.at_once) {
            return Poll::Ready(());
        }
        let own = place.and_then(|place| line.waiting.get_mut(place));
        let replaced = own.and_then(|(_, waker)| waker.replace(cx.waker().clone()));
        drop(line);
        drop(replaced);
        Poll::Pending
    }
}

impl<T: Deref<Target = FairSemaphore>> Drop for Ticket<T> {
    fn drop(&mut self) {
        let mut line = self.turns.line();
        let place = line.place_of(self.number);
        let left = place.and_then(|place| line.waiting.remove(place));
        // The member that has moved up to the front.
        let last = self.turns.at_once - 1;
        let has_gone = place.is_some_and(|place| place <= last);
        let next = line.waiting.get_mut(last).filter(|_| has_gone);
        let next = next.and_then(|(_, waker)| waker.take());
        // Wakers may run any code, so the lock is released first.
        drop(line);
        drop(left);
        if let Some(next) = next {
            next.wake();
        }
    }
}

/// Wakes all listeners.
#[derive(Debug, Default)]
pub(crate) struct Bell(Mutex<Listeners>);

#[derive(Debug, Default)]
struct Listeners {
    next: u64,
    wakers: BTreeMap<u64, Waker>,
}

/// A place for a task that may listen, until it is dropped.
pub(crate) struct Listener<'a> {
    bell: &'a Bell,
    number: u64,
}

impl Bell {
    pub(crate) fn listener(&self) -> Listener<'_> {
        let mut listeners = self.listeners();
        let number = listeners.next;
        listeners.next += 1;
        Listener { bell: self, number }
    }

    /// Wakes all listeners. The change that they wait for must be made before.
    pub(crate) fn ring(&self) {
        let wakers = std::mem::take(&mut self.listeners().wakers);
        wakers.into_iter().for_each(|(_, waker)| waker.wake());
    }

    fn listeners(&self) -> MutexGuard<'_, Listeners> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listener<'_> {
    /// Makes the next ring wake the future that is polled with `cx`. The future must check its
    /// condition after this call.
    pub(crate) fn listen(&self, cx: &Context<'_>) {
        let waker = cx.waker().clone();
        let mut listeners = self.bell.listeners();
        let replaced = listeners.wakers.insert(self.number, waker);
        drop(listeners);
        drop(replaced);
    }
}

impl Drop for Listener<'_> {
    fn drop(&mut self) {
        let mut listeners = self.bell.listeners();
        let left = listeners.wakers.remove(&self.number);
        drop(listeners);
        drop(left);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

    use super::*;

    struct Woken(AtomicU32);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn so_many_go_at_once_and_whoever_moves_up_is_woken() {
        for at_once in 1..4 {
            let woken = Arc::new(Woken(AtomicU32::new(0)));
            let waker = Waker::from(Arc::clone(&woken));
            let cx = Context::from_waker(&waker);
            let turns = FairSemaphore::new(at_once);
            let mut line: Vec<_> = (0..8).map(|_| turns.enter()).collect();
            let ready = |line: &[Ticket<&FairSemaphore>]| {
                line.iter().take_while(|turn| turn.poll(&cx).is_ready()).count()
            };
            assert_eq!(ready(&line), at_once);
            assert!(line[at_once].poll(&cx).is_pending());
            // A waiting member goes away, so none moves to the front.
            line.remove(at_once);
            assert!(line[at_once].poll(&cx).is_pending());
            assert_eq!(woken.0.load(Ordering::Relaxed), 0);
            for gone in 1..=2 {
                line.remove(at_once - 1);
                assert_eq!(woken.0.load(Ordering::Relaxed), gone);
                assert!(line[at_once - 1].poll(&cx).is_ready());
                assert!(line[at_once].poll(&cx).is_pending());
            }
            assert_eq!(ready(&line), at_once);
        }
    }
}
