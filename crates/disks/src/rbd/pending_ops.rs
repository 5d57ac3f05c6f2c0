//! The operations of an image in librbd, with their start times.

use std::io;
use std::time::Instant;

use blockio::clock;
use blockio::driver::{ForeignCompleter, StallLog};
use blockio::executor::Lock;

/// The operations of one image, of all threads.
#[derive(Default)]
pub(super) struct PendingOps(Lock<State>);

#[derive(Default)]
struct State {
    ops: Vec<Option<Op>>,
    free: Vec<usize>,
    /// True if the image is to be abandoned when the cluster is away.
    fails_when_away: bool,
    was_abandoned: bool,
}

struct Op {
    completer: ForeignCompleter,
    since: Instant,
}

/// A summary of the operations that wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AwayState {
    pub(super) since: Instant,
    /// The number of operations.
    pub(super) ops: usize,
}

impl PendingOps {
    /// Keeps the completer of an operation that begins, and returns its number. `None` if the image
    /// was abandoned: then the operation has failed.
    pub(super) fn begin(&self, completer: ForeignCompleter) -> Option<usize> {
        let mut state = self.0.lock();
        if state.was_abandoned {
            drop(state);
            completer.complete(Err(failed()));
            return None;
        }
        let has_ended = state.ops.iter().filter(|op| op.is_none()).count();
        debug_assert_eq!(has_ended, state.free.len(), "each ended operation frees its number");
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

    /// Ends the operation of this number.
    pub(super) fn end(&self, number: usize, result: io::Result<usize>) {
        let op = {
            let mut state = self.0.lock();
            let op = state.ops.get_mut(number).and_then(Option::take);
            assert!(
                op.is_some() || state.was_abandoned,
                "invariant 4: operation {number} ends once"
            );
            state.free.push(number);
            op
        };
        if let Some(op) = op {
            op.completer.complete(result);
        }
    }

    /// Fails all operations, present and later, if the cluster is away, or as soon as
    /// [`abandon_if_away`](Self::abandon_if_away) finds that it is. A cluster that answers carries
    /// them out, and they get its answers. librbd does not cancel them, and keeps the memory that
    /// it was lent for them.
    pub(super) fn abandon(&self) {
        self.0.lock().fails_when_away = true;
        self.abandon_if_away();
    }

    /// Abandons the image if that was requested and the cluster is away.
    pub(super) fn abandon_if_away(&self) {
        let ops: Vec<Op> = {
            let mut state = self.0.lock();
            if !state.fails_when_away || state.away().is_none() {
                return;
            }
            state.was_abandoned = true;
            state.ops.iter_mut().filter_map(Option::take).collect()
        };
        for op in ops {
            op.completer.complete(Err(failed()));
        }
    }

    /// Makes all present operations as old as ones of a cluster that is away.
    #[cfg(test)]
    pub(super) fn make_late(&self) {
        let old = clock::now().checked_sub(StallLog::LATE);
        let mut state = self.0.lock();
        for op in state.ops.iter_mut().flatten() {
            op.since = old.unwrap_or(op.since);
        }
    }

    pub(super) fn was_abandoned(&self) -> bool {
        self.0.lock().was_abandoned
    }

    /// The oldest operation and the number of all, if the cluster counts as away because of its
    /// age.
    pub(super) fn away(&self) -> Option<AwayState> {
        self.0.lock().away()
    }
}

impl State {
    fn away(&self) -> Option<AwayState> {
        let since = self.ops.iter().flatten().map(|op| op.since).min()?;
        let ops = self.ops.iter().flatten().count();
        StallLog::is_late(since, clock::now()).then_some(AwayState { since, ops })
    }
}

/// The error of operations that were abandoned.
fn failed() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

#[cfg(test)]
mod tests {
    use blockio::{Activity, IoThread, IoThreadConfig, Wait};
    use iomem::Buffers;

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn operations_end_or_are_abandoned() {
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let waiting = PendingOps::default();
        let begin = || {
            let (op, completer) = thread.io().foreign_op(Buffers::aligned(512, 512));
            (op, waiting.begin(completer))
        };
        let [(first, one), (second, two), (third, three)] = [begin(), begin(), begin()];
        assert_eq!([one, two, three], [Some(0), Some(1), Some(2)]);
        waiting.end(1, Ok(512));
        assert_eq!(thread.block_on(second).unwrap().result.unwrap(), 512);
        let (fourth, number) = begin();
        assert_eq!(number, Some(1), "a number is used again");
        assert_eq!(waiting.away(), None, "they have just begun");
        // While the cluster answers, operations are waited for.
        waiting.abandon();
        assert!(!waiting.was_abandoned());
        waiting.end(0, Ok(512));
        assert_eq!(thread.block_on(first).unwrap().result.unwrap(), 512);
        let (last, number) = begin();
        assert_eq!(number, Some(0));
        let old = clock::now().checked_sub(StallLog::LATE).unwrap();
        waiting.0.lock().ops[0].as_mut().unwrap().since = old;
        waiting.abandon_if_away();
        for op in [last, third, fourth] {
            let done = thread.block_on(op).unwrap();
            assert_eq!(done.result.unwrap_err().raw_os_error(), Some(libc::EIO));
        }
        // librbd ends them later, without effect. No operation begins from now on.
        (0..3).for_each(|number| waiting.end(number, Ok(512)));
        let (fifth, number) = begin();
        assert!(number.is_none() && waiting.was_abandoned() && waiting.away().is_none());
        assert!(thread.block_on(fifth).unwrap().result.is_err());
        while thread.turn(Wait::Never).unwrap() == Activity::Ready {}
        assert_eq!(thread.io().ops(), 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn the_oldest_operation_dates_the_absence_of_the_cluster() {
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let op = |since| {
            let (_, completer) = thread.io().foreign_op(Buffers::empty());
            Some(Op { completer, since })
        };
        let now = clock::now();
        let old = now.checked_sub(StallLog::LATE).unwrap();
        let waiting = PendingOps::default();
        waiting.0.lock().ops.extend([op(now), None, op(old)]);
        assert_eq!(waiting.away(), Some(AwayState { since: old, ops: 2 }));
        let late = waiting.0.lock().ops[2].take();
        assert_eq!(waiting.away(), None);
        waiting.0.lock().ops[2] = late;
        waiting.abandon_if_away();
        assert!(!waiting.was_abandoned(), "a wanted image waits for its cluster");
        // An image without use is abandoned at once if the cluster is away.
        waiting.abandon();
        assert!(waiting.was_abandoned() && waiting.away().is_none());
    }
}
