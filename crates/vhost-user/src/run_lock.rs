//! The lock that a session holds while its queues run.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, Waker};

use device::oneshot;

use super::examiner::Examiner;

/// A lock that a session holds while any of its queues may run: the right to write to its disks.
/// Both calls may wait, and are made on threads of their own.
pub trait RunLock: Send + Sync {
    /// Takes the lock for a turn, whose number is above that of earlier ones.
    ///
    /// # Errors
    ///
    /// If it is not free in time, or the turn has ended already. Nothing stays locked then.
    fn take(&self, turn: u64) -> io::Result<()>;

    /// Ends a turn, which may not have the lock yet.
    fn release(&self, turn: u64);
}

/// The number of the last turn.
static TURNS: AtomicU64 = AtomicU64::new(0);

/// The lock of one session.
#[derive(Default)]
pub(super) struct SessionLock {
    state: State,
    /// Rings that start when the lock is taken.
    held_back: Vec<usize>,
    /// True after an attempt that failed, until [`take_failure`](Self::take_failure).
    has_failed: bool,
}

#[derive(Default)]
enum State {
    #[default]
    Free,
    Taking(Turn, oneshot::Receiver<io::Result<()>>),
    Held(Turn),
    Releasing(Turn, oneshot::Receiver<()>),
}

/// A turn of a session with its lock. Dropping it does not end the turn: another process may have
/// taken it over, and the lock with it.
#[derive(Clone)]
struct Turn {
    lock: Arc<dyn RunLock>,
    number: u64,
}

/// Ends a turn when it is dropped.
struct Ended(Turn);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.lock.release(self.0.number);
    }
}

impl SessionLock {
    pub(super) fn is_held(&self) -> bool {
        matches!(self.state, State::Held(_))
    }

    /// Has [`poll`](Self::poll) take the lock for a ring.
    pub(super) fn hold_back(&mut self, ring: usize) {
        self.held_back.push(ring);
    }

    /// Returns true once after the lock could not be taken.
    pub(super) fn take_failure(&mut self) -> bool {
        std::mem::take(&mut self.has_failed)
    }

    /// Begins to release the lock if it is held.
    pub(super) fn begin_release(&mut self, examiner: &Examiner, waker: &Waker) {
        self.state = match std::mem::take(&mut self.state) {
            State::Held(turn) => {
                let ended = Ended(turn.clone());
                let released = examiner.lock(move || drop(ended));
                released.wake(waker);
                State::Releasing(turn, released)
            }
            other => other,
        };
    }

    /// Ends the turn, in any state. The result comes when the lock is released; `None`: there was
    /// no turn.
    pub(super) fn end(
        &mut self,
        examiner: &Examiner,
        waker: &Waker,
    ) -> Option<oneshot::Receiver<()>> {
        self.held_back.clear();
        let turn = match std::mem::take(&mut self.state) {
            State::Free => return None,
            State::Releasing(_, released) => return Some(released),
            State::Taking(turn, _) | State::Held(turn) => turn,
        };
        let ended = Ended(turn);
        let released = examiner.lock(move || drop(ended));
        released.wake(waker);
        Some(released)
    }

    /// Continues to take or release the lock. Ready with the rings that start now: those that were
    /// held back if the lock has just been taken, and otherwise none.
    pub(super) fn poll(
        &mut self,
        lock: &Arc<dyn RunLock>,
        examiner: &Examiner,
        waker: &Waker,
    ) -> Poll<io::Result<Vec<usize>>> {
        match std::mem::take(&mut self.state) {
            State::Taking(turn, taken) => match taken.check() {
                Poll::Pending => self.state = State::Taking(turn, taken),
                Poll::Ready(Some(Ok(()))) => {
                    self.state = State::Held(turn);
                    return Poll::Ready(Ok(std::mem::take(&mut self.held_back)));
                }
                Poll::Ready(failed) => {
                    self.held_back.clear();
                    self.has_failed = true;
                    let no_thread = || io::Error::other("no thread takes the lock");
                    let error = failed.and_then(Result::err);
                    return Poll::Ready(Err(error.unwrap_or_else(no_thread)));
                }
            },
            State::Releasing(turn, released) if released.check().is_pending() => {
                self.state = State::Releasing(turn, released);
            }
            State::Held(turn) => {
                self.state = State::Held(turn);
                return Poll::Ready(Ok(Vec::new()));
            }
            State::Free | State::Releasing(..) if self.held_back.is_empty() => {
                return Poll::Ready(Ok(Vec::new()));
            }
            State::Free | State::Releasing(..) => {
                let number = TURNS.fetch_add(1, Ordering::Relaxed) + 1;
                let (turn, taking) = (Turn { lock: Arc::clone(lock), number }, Arc::clone(lock));
                let taken = examiner.lock(move || taking.take(number));
                taken.wake(waker);
                self.state = State::Taking(turn, taken);
                // An answer that is there already wakes nothing.
                return self.poll(lock, examiner, waker);
            }
        }
        Poll::Pending
    }
}
