//! How requests of one disk wait, on whichever thread: for their turn, and for a change.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// A line of those who go one after the other.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<Line>);

#[derive(Debug, Default)]
struct Line {
    /// The number of whoever comes next.
    next: u64,
    waiting: VecDeque<(u64, Option<Waker>)>,
}

impl Line {
    /// Numbers ascend.
    fn place_of(&self, number: u64) -> Option<usize> {
        self.waiting.binary_search_by_key(&number, |(number, _)| *number).ok()
    }
}

/// A place in a line, until it is dropped.
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    number: u64,
}

impl Turns {
    /// A place at the end.
    pub(super) fn enter(&self) -> Turn<'_> {
        let mut line = self.line();
        let number = line.next;
        line.next += 1;
        line.waiting.push_back((number, None));
        Turn { turns: self, number }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn<'_> {
    /// Ready when it is at the front.
    pub(super) fn poll(&self, cx: &Context<'_>) -> Poll<()> {
        let mut line = self.turns.line();
        if line.waiting.front().is_some_and(|(first, _)| *first == self.number) {
            return Poll::Ready(());
        }
        let place = line.place_of(self.number);
        let own = place.and_then(|place| line.waiting.get_mut(place));
        let replaced = own.and_then(|(_, waker)| waker.replace(cx.waker().clone()));
        drop(line);
        drop(replaced);
        Poll::Pending
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut line = self.turns.line();
        let was_first = line.waiting.front().is_some_and(|(first, _)| *first == self.number);
        let place = line.place_of(self.number);
        let left = place.and_then(|place| line.waiting.remove(place));
        let next = line.waiting.front_mut().filter(|_| was_first);
        let next = next.and_then(|(_, waker)| waker.take());
        // Wakers run what they like.
        drop(line);
        drop(left);
        if let Some(next) = next {
            next.wake();
        }
    }
}

/// Wakes all who listen.
#[derive(Debug, Default)]
pub(super) struct Bell(Mutex<Listeners>);

#[derive(Debug, Default)]
struct Listeners {
    next: u64,
    wakers: BTreeMap<u64, Waker>,
}

/// Somebody who may listen, until it is dropped.
pub(super) struct Listener<'a> {
    bell: &'a Bell,
    number: u64,
}

impl Bell {
    pub(super) fn listener(&self) -> Listener<'_> {
        let mut listeners = self.listeners();
        let number = listeners.next;
        listeners.next += 1;
        Listener { bell: self, number }
    }

    /// What changes is to be changed before.
    pub(super) fn ring(&self) {
        let wakers = std::mem::take(&mut self.listeners().wakers);
        wakers.into_iter().for_each(|(_, waker)| waker.wake());
    }

    fn listeners(&self) -> MutexGuard<'_, Listeners> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listener<'_> {
    /// The future that is polled with `cx` is woken by the next ring. What it waits for is to be
    /// looked at afterwards.
    pub(super) fn listen(&self, cx: &Context<'_>) {
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
