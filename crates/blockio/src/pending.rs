//! Answers that an IoThread will give, for threads that wait for one, or for many at once.

use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::task::{Poll, Waker};
use std::time::Duration;

/// The waker that the answer wakes. In one place for both sides.
type WakerSlot = Arc<Mutex<Option<Waker>>>;

fn set(slot: &WakerSlot, waker: Option<Waker>) -> Option<Waker> {
    std::mem::replace(&mut *slot.lock().unwrap_or_else(PoisonError::into_inner), waker)
}

/// An answer that another thread will give.
pub struct Pending<T> {
    answer: mpsc::Receiver<T>,
    waker: WakerSlot,
}

/// The side that answers, once. When it is dropped without an answer, there will be none.
pub struct Answer<T> {
    sender: Option<mpsc::SyncSender<T>>,
    waker: WakerSlot,
}

impl<T> Pending<T> {
    /// Both sides of one answer.
    #[must_use]
    pub fn new() -> (Answer<T>, Self) {
        let (sender, answer) = mpsc::sync_channel(1);
        let waker = WakerSlot::default();
        (Answer { sender: Some(sender), waker: Arc::clone(&waker) }, Self { answer, waker })
    }

    /// Waits for the answer. `None` when the IoThread has ended.
    #[must_use]
    pub fn wait(self) -> Option<T> {
        self.answer.recv().ok()
    }

    /// As [`wait`](Self::wait), for at most so long: `Pending` when the answer is not there then.
    pub fn wait_for(&self, time: Duration) -> Poll<Option<T>> {
        match self.answer.recv_timeout(time) {
            Ok(answer) => Poll::Ready(Some(answer)),
            Err(mpsc::RecvTimeoutError::Disconnected) => Poll::Ready(None),
            Err(mpsc::RecvTimeoutError::Timeout) => Poll::Pending,
        }
    }

    /// The answer if it is there. It is given once.
    #[must_use]
    pub fn poll(&self) -> Option<T> {
        self.answer.try_recv().ok()
    }

    /// The answer if it is there, `Ready(None)` when there will be none: the IoThread has ended.
    pub fn check(&self) -> Poll<Option<T>> {
        match self.answer.try_recv() {
            Ok(answer) => Poll::Ready(Some(answer)),
            Err(mpsc::TryRecvError::Disconnected) => Poll::Ready(None),
            Err(mpsc::TryRecvError::Empty) => Poll::Pending,
        }
    }

    /// Has `waker` woken when the answer is there, or there will be none. Look once more after
    /// this: an answer that came before wakes nobody.
    pub fn wake(&self, waker: &Waker) {
        set(&self.waker, Some(waker.clone()));
    }
}

impl<T> Answer<T> {
    /// Whether somebody still has the other side.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        Arc::strong_count(&self.waker) > 1
    }

    /// Gives the answer, and wakes the waiting thread.
    pub fn send(self, value: T) {
        if let Some(sender) = &self.sender {
            // It has room for one. If the waiting side is gone, nobody needs the answer.
            let _ = sender.send(value);
        }
    }
}

impl<T> Drop for Answer<T> {
    fn drop(&mut self) {
        // First: the woken thread must find that there will be no answer, if so.
        self.sender = None;
        if let Some(waker) = set(&self.waker, None) {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicU32);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn an_answer_wakes_once_and_is_there_by_then() {
        let count = Arc::new(Count::default());
        let (answer, pending) = Pending::new();
        pending.wake(&Waker::from(Arc::clone(&count)));
        assert_eq!(pending.check(), Poll::Pending);
        answer.send(7);
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert_eq!(pending.check(), Poll::Ready(Some(7)));
        let (answer, pending) = Pending::new();
        assert_eq!(pending.wait_for(Duration::ZERO), Poll::Pending);
        answer.send(8);
        assert_eq!(pending.wait_for(Duration::MAX), Poll::Ready(Some(8)));
    }

    #[test]
    fn an_answer_that_will_never_come_wakes_too() {
        let count = Arc::new(Count::default());
        let (answer, pending) = Pending::<u16>::new();
        pending.wake(&Waker::from(Arc::clone(&count)));
        drop(answer);
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert_eq!(pending.check(), Poll::Ready(None));
        assert_eq!(pending.wait_for(Duration::MAX), Poll::Ready(None));
        assert_eq!(pending.wait(), None);
    }
}
