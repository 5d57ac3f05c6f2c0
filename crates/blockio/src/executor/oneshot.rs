//! Answers that an IoThread will give, for threads that wait for one, or for many at once.

use std::sync::{Arc, mpsc};
use std::task::{Poll, Waker};
use std::time::Duration;

use crate::executor::sync::Lock;

/// The waker that the answer wakes, shared by both sides.
type WakerSlot = Arc<Lock<Option<Waker>>>;

fn set(slot: &WakerSlot, waker: Option<Waker>) -> Option<Waker> {
    std::mem::replace(&mut *slot.lock(), waker)
}

/// The receiving side of an answer from another thread.
pub struct Receiver<T> {
    answer: mpsc::Receiver<T>,
    waker: WakerSlot,
}

/// The side that answers, once. Dropping it without an answer means that there will be none.
pub struct Sender<T> {
    sender: Option<mpsc::SyncSender<T>>,
    waker: WakerSlot,
}

/// Makes both sides of one answer.
#[must_use]
pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let (sender, answer) = mpsc::sync_channel(1);
    let waker = WakerSlot::default();
    (Sender { sender: Some(sender), waker: Arc::clone(&waker) }, Receiver { answer, waker })
}

impl<T> Receiver<T> {
    /// Waits for the answer. `None` if the IoThread has ended.
    #[must_use]
    pub fn wait(self) -> Option<T> {
        self.answer.recv().ok()
    }

    /// Like [`wait`](Self::wait), for at most `time`. `Pending` if there is no answer by the end.
    pub fn wait_for(&self, time: Duration) -> Poll<Option<T>> {
        match self.answer.recv_timeout(time) {
            Ok(answer) => Poll::Ready(Some(answer)),
            Err(mpsc::RecvTimeoutError::Disconnected) => Poll::Ready(None),
            Err(mpsc::RecvTimeoutError::Timeout) => Poll::Pending,
        }
    }

    /// Returns the answer if it is there. It can be taken once.
    #[must_use]
    pub fn poll(&self) -> Option<T> {
        self.answer.try_recv().ok()
    }

    /// Returns the answer if it is there. `Ready(None)` if there will be none: the IoThread has
    /// ended.
    pub fn check(&self) -> Poll<Option<T>> {
        match self.answer.try_recv() {
            Ok(answer) => Poll::Ready(Some(answer)),
            Err(mpsc::TryRecvError::Disconnected) => Poll::Ready(None),
            Err(mpsc::TryRecvError::Empty) => Poll::Pending,
        }
    }

    /// Makes the answer, or its definite absence, wake `waker`. Check once more after this call: an
    /// earlier answer wakes nothing.
    pub fn wake(&self, waker: &Waker) {
        set(&self.waker, Some(waker.clone()));
    }
}

impl<T> Sender<T> {
    /// Returns true if the receiving side still exists.
    pub fn is_awaited(&self) -> bool {
        Arc::strong_count(&self.waker) > 1
    }

    /// Gives the answer, and wakes the waiting thread.
    pub fn send(self, value: T) {
        if let Some(sender) = &self.sender {
            // The channel has room for one answer. Without a receiver the answer is dropped.
            let _ = sender.send(value);
        }
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        // First, so that the woken thread finds that there will be no answer if none was sent.
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
        let (answer, pending) = channel();
        pending.wake(&Waker::from(Arc::clone(&count)));
        assert_eq!(pending.check(), Poll::Pending);
        answer.send(7);
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert_eq!(pending.check(), Poll::Ready(Some(7)));
        let (answer, pending) = channel();
        assert_eq!(pending.wait_for(Duration::ZERO), Poll::Pending);
        answer.send(8);
        assert_eq!(pending.wait_for(Duration::MAX), Poll::Ready(Some(8)));
    }

    #[test]
    fn an_answer_that_will_never_come_wakes_too() {
        let count = Arc::new(Count::default());
        let (answer, pending) = channel::<u16>();
        pending.wake(&Waker::from(Arc::clone(&count)));
        drop(answer);
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert_eq!(pending.check(), Poll::Ready(None));
        assert_eq!(pending.wait_for(Duration::MAX), Poll::Ready(None));
        assert_eq!(pending.wait(), None);
    }
}
