//! Turns for equal users of a resource: a few have one, in order of arrival, and the rest wait.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// The turns in progress, and the waits for one, on any threads.
pub(super) struct Turns {
    most: usize,
    line: Mutex<Line>,
}

#[derive(Default)]
struct Line {
    in_progress: usize,
    came: u64,
    /// Keyed by the order of arrival.
    waiting: BTreeMap<u64, Waker>,
}

impl Turns {
    /// Allows `most` turns at a time.
    pub(super) fn new(most: usize) -> Self {
        Self { most, line: Mutex::default() }
    }

    /// Waits for a turn, which lasts until the result is dropped.
    pub(super) async fn next(&self) -> Turn<'_> {
        let came = {
            let mut line = self.line();
            line.came += 1;
            line.came
        };
        let mut turn = Turn { turns: self, came, has_begun: false };
        poll_fn(|cx| turn.poll(cx)).await;
        turn
    }

    /// Wakes the first waiter, if it may begin its turn.
    fn wake_next(&self, line: &Line) {
        if line.in_progress < self.most
            && let Some(next) = line.waiting.values().next()
        {
            next.wake_by_ref();
        }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A turn, or the wait for it.
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    came: u64,
    has_begun: bool,
}

impl Turn<'_> {
    fn poll(&mut self, cx: &Context<'_>) -> Poll<()> {
        let mut line = self.turns.line();
        line.waiting.insert(self.came, cx.waker().clone());
        let is_first = line.waiting.keys().next() == Some(&self.came);
        if !is_first || line.in_progress >= self.turns.most {
            return Poll::Pending;
        }
        line.waiting.remove(&self.came);
        line.in_progress += 1;
        self.has_begun = true;
        self.turns.wake_next(&line);
        Poll::Ready(())
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut line = self.turns.line();
        if self.has_begun {
            line.in_progress -= 1;
        } else {
            line.waiting.remove(&self.came);
        }
        self.turns.wake_next(&line);
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;

    use super::*;

    type Waits<'a> = Pin<Box<dyn Future<Output = Turn<'a>> + 'a>>;

    fn poll<'a>(waits: &mut Waits<'a>) -> Option<Turn<'a>> {
        match waits.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(turn) => Some(turn),
            Poll::Pending => None,
        }
    }

    #[test]
    fn turns_go_in_the_order_in_which_they_were_asked_for() {
        let turns = Turns::new(2);
        let mut all: Vec<Waits<'_>> = (0..5).map(|_| Box::pin(turns.next()) as Waits<'_>).collect();
        let mut begun: Vec<Option<Turn<'_>>> = all.iter_mut().map(poll).collect();
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
