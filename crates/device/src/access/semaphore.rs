//! A fair semaphore: a few users of a resource hold a permit, in order of arrival, and the rest
//! wait.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// The permits in use, and the waits for one, on any threads.
pub(crate) struct FairSemaphore {
    most: usize,
    line: Mutex<Line>,
}

#[derive(Default)]
struct Line {
    in_use: usize,
    came: u64,
    /// Keyed by the order of arrival.
    waiting: BTreeMap<u64, Waker>,
}

impl FairSemaphore {
    /// Creates a semaphore with `most` permits.
    pub(crate) fn new(most: usize) -> Self {
        Self { most, line: Mutex::default() }
    }

    /// Waits for a permit, which is held until the result is dropped.
    pub(crate) async fn acquire(&self) -> Permit<'_> {
        let came = {
            let mut line = self.line();
            line.came += 1;
            line.came
        };
        let mut permit = Permit { semaphore: self, came, is_held: false };
        poll_fn(|cx| permit.poll(cx)).await;
        permit
    }

    /// Wakes the first waiter, if a permit is free.
    fn wake_next(&self, line: &Line) {
        if line.in_use < self.most
            && let Some(next) = line.waiting.values().next()
        {
            next.wake_by_ref();
        }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A permit, or the wait for it.
pub(crate) struct Permit<'a> {
    semaphore: &'a FairSemaphore,
    came: u64,
    is_held: bool,
}

impl Permit<'_> {
    fn poll(&mut self, cx: &Context<'_>) -> Poll<()> {
        let mut line = self.semaphore.line();
        line.waiting.insert(self.came, cx.waker().clone());
        let is_first = line.waiting.keys().next() == Some(&self.came);
        if !is_first || line.in_use >= self.semaphore.most {
            return Poll::Pending;
        }
        line.waiting.remove(&self.came);
        line.in_use += 1;
        self.is_held = true;
        self.semaphore.wake_next(&line);
        Poll::Ready(())
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut line = self.semaphore.line();
        if self.is_held {
            line.in_use -= 1;
        } else {
            line.waiting.remove(&self.came);
        }
        self.semaphore.wake_next(&line);
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;

    use super::*;

    type Waits<'a> = Pin<Box<dyn Future<Output = Permit<'a>> + 'a>>;

    fn poll<'a>(waits: &mut Waits<'a>) -> Option<Permit<'a>> {
        match waits.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(permit) => Some(permit),
            Poll::Pending => None,
        }
    }

    #[test]
    fn permits_are_given_in_the_order_of_the_waits() {
        let semaphore = FairSemaphore::new(2);
        let mut all: Vec<Waits<'_>> =
            (0..5).map(|_| Box::pin(semaphore.acquire()) as Waits<'_>).collect();
        let mut begun: Vec<Option<Permit<'_>>> = all.iter_mut().map(poll).collect();
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
}
