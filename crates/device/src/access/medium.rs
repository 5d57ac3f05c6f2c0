//! Exclusive use of the medium of a disk, by one command at a time. Commands that waited to pass do
//! so before the next one takes the medium. Commands that want it exclusively take it in order of
//! arrival.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use blockio::executor::Lock;

/// The state of the medium, and the commands that wait for it.
#[derive(Default)]
pub(crate) struct Medium {
    /// Changes only while `waiting` is locked.
    is_taken: AtomicBool,
    /// The command with the medium waits for something itself. Changes only while `waiting` is
    /// locked.
    owner_waits: AtomicBool,
    waiting: Lock<MediumQueue>,
}

#[derive(Default)]
struct MediumQueue {
    last_number: u64,
    /// In order of arrival.
    all: Vec<Waiter>,
}

struct Waiter {
    number: u64,
    claim: Claim,
    waker: Waker,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Claim {
    /// Exclusive use of the medium.
    Medium,
    /// To continue once the medium is free.
    Pass,
    /// To continue now: its wait for the last exclusive use is over.
    PassNow,
}

impl Medium {
    #[inline]
    pub(crate) fn is_taken(&self) -> bool {
        self.is_taken.load(Ordering::Relaxed)
    }

    /// Waits while a command has the medium. Afterwards the caller must begin to use the medium
    /// before it waits for anything else, so that the next exclusive command finds it.
    ///
    /// # Errors
    ///
    /// The error of `check`, which is called while the [owner waits](Self::set_owner_waits): at
    /// first, and at each [recheck](Self::recheck_waiting).
    pub(crate) async fn pass<E>(&self, check: impl FnMut() -> Result<(), E>) -> Result<(), E> {
        self.wait(Claim::Pass, check).await
    }

    /// Takes the medium, until [`release`](Self::release).
    ///
    /// # Errors
    ///
    /// As for [`pass`](Self::pass).
    pub(crate) async fn take<E>(&self, check: impl FnMut() -> Result<(), E>) -> Result<(), E> {
        self.wait(Claim::Medium, check).await
    }

    /// Marks that the command with the medium waits for something itself, maybe for long, or that
    /// this wait has ended.
    pub(crate) fn set_owner_waits(&self, owner_waits: bool) {
        let waiting = self.waiting.lock();
        self.owner_waits.store(owner_waits, Ordering::Relaxed);
        waiting.wake_all();
    }

    /// Makes all waiters repeat their checks.
    pub(crate) fn recheck_waiting(&self) {
        self.waiting.lock().wake_all();
    }

    /// Ends the exclusive use.
    pub(crate) fn release(&self) {
        let mut waiting = self.waiting.lock();
        self.is_taken.store(false, Ordering::Relaxed);
        self.owner_waits.store(false, Ordering::Relaxed);
        for waiter in waiting.all.iter_mut().filter(|waiter| waiter.claim == Claim::Pass) {
            waiter.claim = Claim::PassNow;
            waiter.waker.wake_by_ref();
        }
        self.wake_next(&waiting);
    }

    async fn wait<E>(
        &self,
        claim: Claim,
        mut check: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let mut wait = MediumWait { medium: self, number: None };
        poll_fn(|cx| match wait.poll(claim, cx) {
            Poll::Ready(()) => Poll::Ready(Ok(())),
            // Checked after the waker is stored, so that every later change wakes this task.
            Poll::Pending if self.owner_waits.load(Ordering::Relaxed) => match check() {
                Ok(()) => Poll::Pending,
                Err(error) => Poll::Ready(Err(error)),
            },
            Poll::Pending => Poll::Pending,
        })
        .await
    }

    /// Wakes the waiter that may take the medium, if there is one.
    fn wake_next(&self, waiting: &MediumQueue) {
        if let Some(next) = waiting.next().filter(|_| !self.is_taken()) {
            next.waker.wake_by_ref();
        }
    }
}

impl MediumQueue {
    fn wake_all(&self) {
        self.all.iter().for_each(|waiter| waiter.waker.wake_by_ref());
    }

    /// The next waiter to take a free medium; `None` while waiters are to pass before it.
    fn next(&self) -> Option<&Waiter> {
        let mut all = self.all.iter();
        let is_free = all.all(|waiter| waiter.claim != Claim::PassNow);
        is_free.then(|| self.all.iter().find(|waiter| waiter.claim == Claim::Medium)).flatten()
    }
}

/// A waiter, from before its first poll to its end.
struct MediumWait<'a> {
    medium: &'a Medium,
    number: Option<u64>,
}

impl MediumWait<'_> {
    fn poll(&mut self, claim: Claim, cx: &Context<'_>) -> Poll<()> {
        let mut waiting = self.medium.waiting.lock();
        let number = *self.number.get_or_insert_with(|| {
            waiting.last_number += 1;
            let number = waiting.last_number;
            let claim = match claim {
                Claim::Pass if !self.medium.is_taken() => Claim::PassNow,
                other => other,
            };
            waiting.all.push(Waiter { number, claim, waker: cx.waker().clone() });
            number
        });
        let place = waiting.all.iter().position(|waiter| waiter.number == number);
        let place = place.expect("it waits until it continues");
        let may_go = match waiting.all[place].claim {
            Claim::PassNow => true,
            Claim::Pass => false,
            Claim::Medium => {
                let is_next = waiting.next().is_some_and(|next| next.number == number);
                is_next && !self.medium.is_taken()
            }
        };
        if !may_go {
            waiting.all[place].waker.clone_from(cx.waker());
            return Poll::Pending;
        }
        waiting.all.remove(place);
        self.number = None;
        if claim == Claim::Medium {
            self.medium.is_taken.store(true, Ordering::Relaxed);
        }
        self.medium.wake_next(&waiting);
        Poll::Ready(())
    }
}

impl Drop for MediumWait<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            let mut waiting = self.medium.waiting.lock();
            waiting.all.retain(|waiter| waiter.number != number);
            self.medium.wake_next(&waiting);
        }
    }
}

/// The uses of a task. Each is dated by the number of covers that its queue had made when the use
/// became possible.
#[derive(Clone, Copy)]
pub(crate) struct TaskResources {
    /// Use of the disk; 0 precedes every cover.
    pub(crate) disk_since: u64,
    pub(crate) medium_since: u64,
    /// True if the task uses nothing while it waits, but used the medium before.
    pub(crate) had_medium: bool,
}

/// The date of a use that is not possible.
pub(crate) const NEVER: u64 = u64::MAX;

impl TaskResources {
    /// The uses of a task that begins.
    #[inline(always)]
    pub(crate) const fn medium_since(medium_since: u64) -> Self {
        Self { disk_since: 0, medium_since, had_medium: false }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::pin::{Pin, pin};
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;
    use std::task::Wake;

    use super::*;

    fn anyway() -> Result<(), Infallible> {
        Ok(())
    }

    #[derive(Default)]
    struct Woken(AtomicU32);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A future that is polled when the test wants it to run.
    struct Somebody<'a> {
        future: Pin<Box<dyn Future<Output = Result<(), Infallible>> + 'a>>,
        woken: Arc<Woken>,
    }

    impl<'a> Somebody<'a> {
        fn new(future: impl Future<Output = Result<(), Infallible>> + 'a) -> Self {
            Self { future: Box::pin(future), woken: Arc::default() }
        }

        fn has_resumed(&mut self) -> bool {
            let waker = Waker::from(Arc::clone(&self.woken));
            self.future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready()
        }

        fn was_woken(&self) -> bool {
            self.woken.0.swap(0, Ordering::Relaxed) > 0
        }
    }

    #[test]
    fn waiting_users_pass_before_another_takes_the_medium() {
        let medium = Medium::default();
        assert!(Somebody::new(medium.take(anyway)).has_resumed() && medium.is_taken());
        let mut passes = [(); 2].map(|()| Somebody::new(medium.pass(anyway)));
        let mut takes = [(); 2].map(|()| Somebody::new(medium.take(anyway)));
        assert!(!passes.iter_mut().chain(&mut takes).any(Somebody::has_resumed));
        medium.release();
        assert_eq!(passes.each_ref().map(Somebody::was_woken), [true; 2]);
        assert_eq!(takes.each_ref().map(Somebody::was_woken), [false; 2]);
        // The last user wants the medium again at once.
        let mut again = Somebody::new(medium.take(anyway));
        assert!(passes[0].has_resumed() && !again.has_resumed() && !takes[0].has_resumed());
        assert!(Somebody::new(medium.pass(anyway)).has_resumed(), "nobody has it");
        assert!(passes[1].has_resumed() && takes[0].was_woken());
        assert!(!again.has_resumed() && !takes[1].has_resumed() && takes[0].has_resumed());
        let mut last = Somebody::new(medium.pass(anyway));
        assert!(medium.is_taken() && !last.has_resumed());
        for next in [&mut takes[1], &mut again] {
            medium.release();
            assert!(!medium.is_taken());
            if last.was_woken() {
                assert!(!next.has_resumed() && last.has_resumed());
            }
            assert!(next.was_woken() && next.has_resumed());
        }
        medium.release();
        assert!(!medium.is_taken() && medium.waiting.lock().all.is_empty());
    }

    #[test]
    fn dropped_users_are_not_waited_for() {
        let medium = Medium::default();
        assert!(Somebody::new(medium.take(anyway)).has_resumed());
        let mut pass = Somebody::new(medium.pass(anyway));
        let mut takes = [(); 2].map(|()| Somebody::new(medium.take(anyway)));
        assert!(!pass.has_resumed() && !takes.iter_mut().any(Somebody::has_resumed));
        medium.release();
        drop(pass);
        let [first, mut second] = takes;
        assert!(first.was_woken());
        drop(first);
        assert!(second.was_woken() && second.has_resumed());
        medium.release();
        assert!(medium.waiting.lock().all.is_empty());
    }

    /// A command with the medium may wait for long, and some commands cannot wait.
    #[test]
    fn waiters_check_themselves_only_while_the_owner_waits() {
        let medium = Medium::default();
        let wake = |user: &Arc<Woken>| user.0.swap(0, Ordering::Relaxed) > 0;
        let context = |woken: &Arc<Woken>| Waker::from(Arc::clone(woken));
        assert!(Somebody::new(medium.take(anyway)).has_resumed());
        let is_refused = AtomicBool::new(true);
        let check = || if is_refused.load(Ordering::Relaxed) { Err(()) } else { Ok(()) };
        let (first, second) = (Arc::<Woken>::default(), Arc::<Woken>::default());
        let mut pass = Box::pin(medium.pass(check));
        let mut poll =
            |woken: &Arc<Woken>| pass.as_mut().poll(&mut Context::from_waker(&context(woken)));
        assert_eq!(poll(&first), Poll::Pending, "the owner does not wait");
        // The task of the waiter may move to another waker.
        assert_eq!(poll(&second), Poll::Pending);
        is_refused.store(false, Ordering::Relaxed);
        medium.set_owner_waits(true);
        assert!(wake(&second) && !wake(&first));
        assert_eq!(poll(&second), Poll::Pending, "it may wait");
        is_refused.store(true, Ordering::Relaxed);
        medium.recheck_waiting();
        assert!(wake(&second));
        assert_eq!(poll(&second), Poll::Ready(Err(())));
        drop(pass);
        // The next owner does not wait.
        medium.release();
        assert!(Somebody::new(medium.take(anyway)).has_resumed());
        let mut pass = pin!(medium.pass(check));
        assert_eq!(pass.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Pending);
        medium.set_owner_waits(true);
        medium.set_owner_waits(false);
        assert_eq!(pass.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Pending);
    }
}
