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
    ///
    /// # Errors
    ///
    /// If written data may be lost. The front-end must not continue on another host then, so its
    /// session ends without the answer that it waits for.
    fn release(&self, turn: u64) -> io::Result<()>;
}

/// The number of the last turn.
static TURNS: AtomicU64 = AtomicU64::new(0);

/// The lock of one session.
#[derive(Default)]
pub(super) struct SessionLock {
    state: State,
    /// Rings that start when the lock is taken.
    held_back: Vec<usize>,
    /// True after a failed attempt to take or release the lock, until
    /// [`take_failure`](Self::take_failure).
    has_failed: bool,
}

#[derive(Default)]
enum State {
    #[default]
    Free,
    /// The lock came with the session from another process. The turn has to take it here before a
    /// ring runs, and before it can end.
    Inherited(SessionTurn),
    Taking(SessionTurn, oneshot::Receiver<io::Result<()>>),
    Held(SessionTurn),
    Releasing(oneshot::Receiver<io::Result<()>>),
}

/// A turn of a session with its lock. Dropping it does not end the turn: another process may have
/// taken it over, and the lock with it.
#[derive(Clone)]
struct SessionTurn {
    lock: Arc<dyn RunLock>,
    number: u64,
}

impl SessionTurn {
    fn new(lock: &Arc<dyn RunLock>) -> Self {
        let number = TURNS.fetch_add(1, Ordering::Relaxed) + 1;
        Self { lock: Arc::clone(lock), number }
    }
}

/// The end of a turn. It comes when this is dropped, if it has not come before.
struct Ending {
    turn: Option<SessionTurn>,
    is_inherited: bool,
}

impl Ending {
    /// Begins to end a turn on a thread.
    fn begin(
        turn: SessionTurn,
        is_inherited: bool,
        examiner: &Examiner,
        waker: &Waker,
    ) -> oneshot::Receiver<io::Result<()>> {
        let mut ending = Self { turn: Some(turn), is_inherited };
        let released = examiner.lock(move || ending.run());
        released.wake(waker);
        released
    }

    fn run(&mut self) -> io::Result<()> {
        let Some(SessionTurn { lock, number }) = self.turn.take() else { return Ok(()) };
        if self.is_inherited {
            lock.take(number)?;
        }
        lock.release(number)
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        // The session has ended, and nothing waits for the result.
        let _ = self.run();
    }
}

impl SessionLock {
    pub(super) fn is_held(&self) -> bool {
        matches!(self.state, State::Held(_))
    }

    /// Returns true if another process that continues the session inherits the lock.
    pub(super) fn is_inheritable(&self) -> bool {
        matches!(self.state, State::Held(_) | State::Inherited(_))
    }

    /// Notes that another process has held the lock for the session.
    pub(super) fn inherit(&mut self, lock: &Arc<dyn RunLock>) {
        self.state = State::Inherited(SessionTurn::new(lock));
    }

    /// Has [`poll`](Self::poll) take the lock for a ring.
    pub(super) fn hold_back(&mut self, ring: usize) {
        self.held_back.push(ring);
    }

    /// Returns true once after the lock could not be taken or released.
    pub(super) fn take_failure(&mut self) -> bool {
        std::mem::take(&mut self.has_failed)
    }

    /// Begins to release the lock if it is held.
    pub(super) fn begin_release(&mut self, examiner: &Examiner, waker: &Waker) {
        self.state = match std::mem::take(&mut self.state) {
            State::Held(turn) => State::Releasing(Ending::begin(turn, false, examiner, waker)),
            State::Inherited(turn) => State::Releasing(Ending::begin(turn, true, examiner, waker)),
            other => other,
        };
    }

    /// Ends the turn, in any state. The result comes when the lock is released; `None`: there was
    /// no turn.
    pub(super) fn end(
        self,
        examiner: &Examiner,
        waker: &Waker,
    ) -> Option<oneshot::Receiver<io::Result<()>>> {
        match self.state {
            State::Free => None,
            State::Releasing(released) => Some(released),
            State::Taking(turn, _) | State::Held(turn) => {
                Some(Ending::begin(turn, false, examiner, waker))
            }
            State::Inherited(turn) => Some(Ending::begin(turn, true, examiner, waker)),
        }
    }

    /// Continues to take or release the lock. Ready with the rings that start now: those that were
    /// held back if the lock has just been taken, and otherwise none.
    pub(super) fn poll(
        &mut self,
        lock: &Arc<dyn RunLock>,
        examiner: &Examiner,
        waker: &Waker,
    ) -> Poll<io::Result<Vec<usize>>> {
        self.state = match std::mem::take(&mut self.state) {
            State::Taking(turn, taken) => match taken.check() {
                Poll::Pending => State::Taking(turn, taken),
                Poll::Ready(Some(Ok(()))) => {
                    self.state = State::Held(turn);
                    return Poll::Ready(Ok(std::mem::take(&mut self.held_back)));
                }
                Poll::Ready(failed) => {
                    let text = "its queues cannot run without the lock of the disk";
                    return Poll::Ready(Err(self.fail(text, failed)));
                }
            },
            State::Releasing(released) => match released.check() {
                Poll::Pending => State::Releasing(released),
                Poll::Ready(Some(Ok(()))) => return self.poll(lock, examiner, waker),
                Poll::Ready(failed) => {
                    let text = "its guest must not continue on another host";
                    return Poll::Ready(Err(self.fail(text, failed)));
                }
            },
            State::Held(turn) => {
                self.state = State::Held(turn);
                return Poll::Ready(Ok(Vec::new()));
            }
            state @ (State::Free | State::Inherited(_)) if self.held_back.is_empty() => {
                self.state = state;
                return Poll::Ready(Ok(Vec::new()));
            }
            state @ (State::Free | State::Inherited(_)) => {
                let turn = match state {
                    State::Inherited(turn) => turn,
                    _ => SessionTurn::new(lock),
                };
                let taking = turn.clone();
                let taken = examiner.lock(move || taking.lock.take(taking.number));
                taken.wake(waker);
                self.state = State::Taking(turn, taken);
                // An answer that is there already wakes nothing.
                return self.poll(lock, examiner, waker);
            }
        };
        Poll::Pending
    }

    /// Notes a failed attempt. `None`: there was none.
    fn fail(&mut self, text: &str, failed: Option<io::Result<()>>) -> io::Error {
        self.held_back.clear();
        self.has_failed = true;
        let error = failed.and_then(Result::err);
        let error = error.unwrap_or_else(|| io::Error::other("no thread does it"));
        io::Error::other(format!("{text}: {error}"))
    }
}
