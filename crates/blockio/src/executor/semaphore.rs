//! A fair semaphore: users take units of a resource in order of arrival.

use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::task::{Context, Poll, Waker};
use std::thread::panicking;

use crate::executor::sync::{Mutex, MutexGuard};
use crate::executor::wait_list::{WaitList, Waiter};

/// The users and waiters of a semaphore, without a lock. A member is in line from
/// [`enter`](Self::enter) to [`release`].
#[derive(Debug)]
pub(crate) struct Line {
    limit: usize,
    in_use: usize,
    /// Members without their units, which are the values.
    waiters: WaitList<usize>,
}

impl Line {
    /// A line whose members use up to `limit` units at once.
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, in_use: 0, waiters: WaitList::default() }
    }

    /// Sets the limit, which applies to later calls.
    pub(crate) fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// A single member has room, regardless of its units.
    fn has_room(&self, units: usize) -> bool {
        self.in_use == 0 || self.in_use + units <= self.limit
    }

    /// Adds a member at the end. Returns its number, and true if it must wait.
    pub(crate) fn enter(&mut self, units: usize) -> (u64, bool) {
        if self.waiters.is_empty() && self.has_room(units) {
            self.in_use += units;
            return (self.waiters.take_number(), false);
        }
        (self.waiters.push(units), true)
    }

    /// Returns the waker of the last poll if the member must wait, and `None` if it has its units.
    pub(crate) fn poll(&mut self, number: u64, cx: &Context<'_>) -> Option<Option<Waker>> {
        self.waiters.set_waker(number, cx)
    }

    /// Removes a member. Returns it if it waited.
    fn release(&mut self, number: u64, units: usize) -> Option<Waiter<usize>> {
        let waiter = self.waiters.remove(number);
        if waiter.is_none() {
            self.in_use -= units;
        }
        waiter
    }

    /// Gives units to the next waiters while there is room, up to the first that has a waker.
    fn grant(&mut self) -> Option<Waker> {
        loop {
            let units = *self.waiters.front()?;
            if !self.has_room(units) {
                return None;
            }
            self.in_use += units;
            let waker = self.waiters.pop_front();
            if waker.is_some() {
                return waker;
            }
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        debug_assert!(self.in_use == 0 || panicking(), "{} units have no member", self.in_use);
    }
}

/// Removes a member and wakes the members that have its units now. `reach` locks or borrows the
/// line. Wakers may run any code, so none is used or dropped before it is released.
pub(crate) fn release<L>(reach: impl Fn() -> L, number: u64, units: usize)
where
    L: DerefMut<Target = Line>,
{
    let mut line = reach();
    let (gone, mut next) = (line.release(number, units), line.grant());
    drop(line);
    drop(gone);
    while let Some(waker) = next {
        waker.wake();
        next = reach().grant();
    }
}

/// A fair semaphore for users on any threads, who take one unit each.
#[derive(Debug)]
pub struct FairSemaphore(Mutex<Line>);

/// A place in line, and the unit of the semaphore at its front, until this is dropped.
#[derive(Debug)]
pub struct Ticket<S: Deref<Target = FairSemaphore>> {
    semaphore: S,
    number: u64,
}

impl FairSemaphore {
    /// A semaphore of this many units.
    pub fn new(units: usize) -> Self {
        Self(Mutex::new(Line::new(units)))
    }

    /// Takes a place at the end.
    pub(crate) fn enter(&self) -> Ticket<&Self> {
        Ticket::new(self)
    }

    /// Waits for a unit, which is in use until the result is dropped.
    pub async fn acquire(&self) -> Ticket<&Self> {
        let ticket = self.enter();
        ticket.ready().await;
        ticket
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Deref<Target = FairSemaphore>> Ticket<S> {
    /// Takes a place at the end, for an owner of the semaphore.
    pub(crate) fn new(semaphore: S) -> Self {
        let (number, _) = semaphore.line().enter(1);
        Self { semaphore, number }
    }

    /// Ready when the place has a unit.
    pub(crate) fn poll(&self, cx: &Context<'_>) -> Poll<()> {
        let waits = self.semaphore.line().poll(self.number, cx);
        if waits.is_some() { Poll::Pending } else { Poll::Ready(()) }
    }

    /// Waits until the place has a unit.
    pub(crate) async fn ready(&self) {
        std::future::poll_fn(|cx| self.poll(cx)).await;
    }
}

impl<S: Deref<Target = FairSemaphore>> Drop for Ticket<S> {
    fn drop(&mut self) {
        release(|| self.semaphore.line(), self.number, 1);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::pin::Pin;
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
    fn units_are_bounded_and_the_next_member_is_woken() {
        for at_once in 1..4 {
            let woken = Arc::new(Woken(AtomicU32::new(0)));
            let waker = Waker::from(Arc::clone(&woken));
            let cx = Context::from_waker(&waker);
            let semaphore = FairSemaphore::new(at_once);
            let mut line: Vec<_> = (0..8).map(|_| semaphore.enter()).collect();
            let ready = |line: &[Ticket<&FairSemaphore>]| {
                line.iter().take_while(|ticket| ticket.poll(&cx).is_ready()).count()
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

    type Wait<'a> = Pin<Box<dyn Future<Output = Ticket<&'a FairSemaphore>> + 'a>>;

    fn poll<'a>(wait: &mut Wait<'a>) -> Option<Ticket<&'a FairSemaphore>> {
        match wait.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(ticket) => Some(ticket),
            Poll::Pending => None,
        }
    }

    #[test]
    fn units_are_given_in_the_order_of_the_waits() {
        let semaphore = FairSemaphore::new(2);
        let mut all: Vec<Wait<'_>> =
            (0..5).map(|_| Box::pin(semaphore.acquire()) as Wait<'_>).collect();
        let mut begun: Vec<_> = all.iter_mut().map(poll).collect();
        assert_eq!(begun.iter().flatten().count(), 2);
        begun[1] = None;
        assert!(poll(&mut all[3]).is_none(), "another came before");
        begun[2] = poll(&mut all[2]);
        assert!(begun[2].is_some() && poll(&mut all[3]).is_none());
        // An abandoned wait delays no later one.
        drop(all.remove(3));
        begun[0] = None;
        assert!(poll(&mut all[3]).is_some());
    }

    #[test]
    fn a_member_is_woken_by_its_last_waker() {
        let [first, last] = [(); 2].map(|()| Arc::new(Woken(AtomicU32::new(0))));
        let semaphore = FairSemaphore::new(1);
        let [ahead, ticket] = [(); 2].map(|()| semaphore.enter());
        for woken in [&first, &last] {
            let waker = Waker::from(Arc::clone(woken));
            assert!(ticket.poll(&Context::from_waker(&waker)).is_pending());
        }
        drop(ahead);
        let wakes = [first, last].map(|woken| woken.0.load(Ordering::Relaxed));
        assert_eq!(wakes, [0, 1], "invariant 12");
    }

    /// A wait is abandoned after it was granted its unit, and before it was polled again.
    #[test]
    fn an_abandoned_wait_passes_its_unit_on() {
        let woken = Arc::new(Woken(AtomicU32::new(0)));
        let waker = Waker::from(Arc::clone(&woken));
        let cx = Context::from_waker(&waker);
        let semaphore = FairSemaphore::new(1);
        let [first, second, third, fourth] = [(); 4].map(|()| semaphore.enter());
        assert!(second.poll(&cx).is_pending() && fourth.poll(&cx).is_pending());
        drop(first);
        drop(second);
        assert_eq!(woken.0.load(Ordering::Relaxed), 1, "the third was never polled");
        drop(third);
        assert_eq!(woken.0.load(Ordering::Relaxed), 2);
        assert!(fourth.poll(&cx).is_ready());
    }

    #[test]
    fn units_go_to_all_waiters_that_have_room_up_to_the_first_without() {
        let woken = Arc::new(Woken(AtomicU32::new(0)));
        let waker = Waker::from(Arc::clone(&woken));
        let cx = Context::from_waker(&waker);
        let line = RefCell::new(Line::new(8));
        let numbers = [5, 4, 2, 2, 1].map(|units| line.borrow_mut().enter(units).0);
        let waits = |member: usize| line.borrow_mut().poll(numbers[member], &cx).is_some();
        assert!(!waits(0));
        // The third is not polled before it has its units.
        assert!([1, 3, 4].into_iter().all(waits));
        release(|| line.borrow_mut(), numbers[0], 5);
        assert_eq!(woken.0.load(Ordering::Relaxed), 2);
        assert!(![1, 2, 3].into_iter().any(waits) && waits(4));
        line.borrow_mut().set_limit(3);
        release(|| line.borrow_mut(), numbers[1], 4);
        assert!(waits(4));
        release(|| line.borrow_mut(), numbers[2], 2);
        assert!(!waits(4) && woken.0.load(Ordering::Relaxed) == 3);
        release(|| line.borrow_mut(), numbers[3], 2);
        release(|| line.borrow_mut(), numbers[4], 1);
        // A single member has room, regardless of its units.
        let [large, small] = [100, 1].map(|units| line.borrow_mut().enter(units));
        assert_eq!((large.1, small.1), (false, true));
        release(|| line.borrow_mut(), large.0, 100);
        release(|| line.borrow_mut(), small.0, 1);
    }
}
