//! Waiters in order of arrival, each with its waker: the list of a semaphore and of a notify.
//!
//! The list has no lock of its own. It returns wakers instead of using or dropping them, because
//! either may run any code: the owner of the list does so when it has released its lock.

use std::collections::VecDeque;
use std::ops::Range;
use std::task::{Context, Waker};
use std::thread::panicking;

/// Waiters with a value each. Storage is used again: it allocates only when the list grows.
#[derive(Debug)]
pub(crate) struct WaitList<T> {
    /// The number of the next waiter.
    next: u64,
    /// Sorted by number.
    waiters: VecDeque<Waiter<T>>,
}

#[derive(Debug)]
pub(crate) struct Waiter<T> {
    number: u64,
    value: T,
    /// The waker of the last poll, until it is used.
    waker: Option<Waker>,
}

impl<T> Drop for WaitList<T> {
    fn drop(&mut self) {
        debug_assert!(self.waiters.is_empty() || panicking(), "a waiter outlives its list");
    }
}

impl<T> Default for WaitList<T> {
    fn default() -> Self {
        Self { next: 0, waiters: VecDeque::new() }
    }
}

impl<T> WaitList<T> {
    /// Takes the number of a waiter that need not wait.
    pub(crate) fn take_number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// Adds a waiter at the end, and returns its number.
    pub(crate) fn push(&mut self, value: T) -> u64 {
        let number = self.take_number();
        self.waiters.push_back(Waiter { number, value, waker: None });
        number
    }

    /// Returns true if no waiter is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// The value of the first waiter.
    pub(crate) fn front(&self) -> Option<&T> {
        self.waiters.front().map(|first| &first.value)
    }

    /// The waker of the first waiter.
    pub(crate) fn first_waker(&self) -> Option<Waker> {
        self.waiters.front()?.waker.clone()
    }

    /// Removes the first waiter, and returns its waker.
    pub(crate) fn pop_front(&mut self) -> Option<Waker> {
        self.waiters.pop_front()?.waker
    }

    /// Removes a waiter, unless it has gone.
    pub(crate) fn remove(&mut self, number: u64) -> Option<Waiter<T>> {
        self.waiters.remove(self.place_of(number)?)
    }

    /// Makes `cx` the last poll of a waiter. Returns the waker of the poll before, or `None` if the
    /// waiter has gone.
    pub(crate) fn set_waker(&mut self, number: u64, cx: &Context<'_>) -> Option<Option<Waker>> {
        let place = self.place_of(number)?;
        let waker = &mut self.waiters.get_mut(place)?.waker;
        if waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            return Some(None);
        }
        Some(waker.replace(cx.waker().clone()))
    }

    /// Takes the first waker of these waiters for which `is_meant` holds, with the number of its
    /// waiter.
    pub(crate) fn take_waker(
        &mut self,
        numbers: Range<u64>,
        is_meant: impl Fn(&T) -> bool,
    ) -> Option<(u64, Waker)> {
        let from = self.waiters.partition_point(|waiter| waiter.number < numbers.start);
        let meant = self.waiters.range_mut(from..);
        meant.take_while(|waiter| waiter.number < numbers.end).find_map(|waiter| {
            let waker = waiter.waker.take_if(|_| is_meant(&waiter.value))?;
            Some((waiter.number, waker))
        })
    }

    /// The numbers of all waiters up to now.
    pub(crate) fn numbers(&self) -> Range<u64> {
        0..self.next
    }

    fn place_of(&self, number: u64) -> Option<usize> {
        self.waiters.binary_search_by_key(&number, |waiter| waiter.number).ok()
    }
}
