//! The operations of an image that librbd has, and since when.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::clock;
use crate::foreign_op::ForeignCompleter;

/// How long a cluster may take for an operation before it counts as away.
const AWAY: Duration = Duration::from_secs(5);

/// The operations of one image, of all threads.
#[derive(Default)]
pub(super) struct Waiting(Mutex<State>);

#[derive(Default)]
struct State {
    ops: Vec<Option<Op>>,
    free: Vec<usize>,
    was_given_up: bool,
}

struct Op {
    completer: ForeignCompleter,
    since: Instant,
}

/// What there is to say of those that wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Oldest {
    pub(super) since: Instant,
    /// How many there are.
    pub(super) ops: usize,
}

impl Waiting {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the completer of an operation that begins, and returns its number. `None`: the image
    /// was given up, and the operation has failed.
    pub(super) fn begin(&self, completer: ForeignCompleter) -> Option<usize> {
        let mut state = self.state();
        if state.was_given_up {
            drop(state);
            completer.complete(Err(failed()));
            return None;
        }
        let op = Some(Op { completer, since: clock::now() });
        Some(match state.free.pop() {
            Some(number) => {
                state.ops[number] = op;
                number
            }
            None => {
                state.ops.push(op);
                state.ops.len() - 1
            }
        })
    }

    /// The operation of this number has ended.
    pub(super) fn end(&self, number: usize, result: io::Result<usize>) {
        let op = {
            let mut state = self.state();
            let op = state.ops.get_mut(number).and_then(Option::take);
            assert!(
                op.is_some() || state.was_given_up,
                "invariant 4: operation {number} ends once"
            );
            state.free.push(number);
            op
        };
        if let Some(op) = op {
            op.completer.complete(result);
        }
    }

    /// Fails all operations, and all that come. Their memory stays for ever: librbd does not take
    /// them back.
    pub(super) fn give_up(&self) {
        let ops: Vec<Op> = {
            let mut state = self.state();
            state.was_given_up = true;
            state.ops.iter_mut().filter_map(Option::take).collect()
        };
        ops.into_iter().for_each(|op| op.completer.give_up());
    }

    pub(super) fn was_given_up(&self) -> bool {
        self.state().was_given_up
    }

    /// The oldest of the operations, if the cluster counts as away for it.
    pub(super) fn away(&self) -> Option<Oldest> {
        let now = clock::now();
        let state = self.state();
        let since = state.ops.iter().flatten().map(|op| op.since).min()?;
        let ops = state.ops.iter().flatten().count();
        (now.saturating_duration_since(since) >= AWAY).then_some(Oldest { since, ops })
    }
}

/// How operations fail that were given up.
fn failed() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}
