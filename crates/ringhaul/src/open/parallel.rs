//! Runs one call per item on a few threads, some of which may hang.

use std::cell::Cell;
use std::collections::{BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use blockio::executor::{Lock, start_thread};

/// The time without a result after which another thread is added, because a call may hang on a
/// disk.
const PATIENCE: Duration = Duration::from_secs(1);

/// Calls that run side by side. As long as calls end, there are at most as many threads as CPUs (or
/// two), so that a call that measures time need not wait for a CPU. Dropping this leaves threads
/// with hanging calls behind.
pub(crate) struct ParallelCalls<T, R> {
    work: Arc<Work<T, R>>,
    done: Option<mpsc::Sender<Message<R>>>,
    results: mpsc::Receiver<Message<R>>,
    unanswered: usize,
    /// The calls in progress that have given way.
    waiting: BTreeSet<usize>,
}

/// The error of a call that panicked.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("ringhaul has a bug: a thread panicked (see the log); please report it")]
pub(crate) struct Panicked;

/// A message from a thread about the call with this number.
enum Message<R> {
    Done(usize, Result<R, Panicked>),
    Yielded(usize),
}

/// The number of a call, and its result.
pub(crate) type Outcome<R> = (usize, Result<R, Panicked>);

/// Reports that the calling closure waits: it keeps its thread, and another thread takes the next
/// item.
pub(crate) type Yield<'a> = &'a dyn Fn();

struct Work<T, R> {
    queue: Lock<VecDeque<(usize, T)>>,
    call: Box<dyn Fn(T, Yield<'_>) -> R + Send + Sync>,
    thread: &'static str,
}

impl<T: Send + 'static, R: Send + 'static> ParallelCalls<T, R> {
    /// Begins to call `call` for each item of `list`.
    pub(crate) fn begin(
        list: Vec<T>,
        call: impl Fn(T, Yield<'_>) -> R + Send + Sync + 'static,
    ) -> Self {
        Self::begin_on(list, Box::new(call), "ringhaul-side")
    }

    /// Like [`begin`](Self::begin), for calls that may make rings of io_uring.
    pub(crate) fn begin_with_rings(
        list: Vec<T>,
        call: impl Fn(T, Yield<'_>) -> R + Send + Sync + 'static,
    ) -> Self {
        Self::begin_on(list, Box::new(call), "ringhaul-rings")
    }

    fn begin_on(
        list: Vec<T>,
        call: Box<dyn Fn(T, Yield<'_>) -> R + Send + Sync>,
        thread: &'static str,
    ) -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let (unanswered, threads) = (list.len(), list.len().min(cpus.max(2)));
        let queue = Lock::new(list.into_iter().enumerate().collect());
        let work = Arc::new(Work { queue, call, thread });
        let (done, results) = mpsc::channel();
        let mut this =
            Self { work, done: Some(done), results, unanswered, waiting: BTreeSet::new() };
        (0..threads).for_each(|_| this.add_thread());
        this
    }

    /// Returns the next result, with its number in the list. `None`: no result is left, or none
    /// came in time.
    pub(crate) fn next(&mut self, until: Option<Instant>) -> Option<Outcome<R>> {
        self.next_of(until, false)
    }

    /// Like [`next`](Self::next), but does not wait for calls that have given way.
    pub(crate) fn next_running(&mut self, until: Option<Instant>) -> Option<Outcome<R>> {
        self.next_of(until, true)
    }

    /// Returns true if all unfinished calls have given way.
    pub(crate) fn all_yielded(&self) -> bool {
        self.unanswered == self.waiting.len()
    }

    fn next_of(&mut self, until: Option<Instant>, is_running: bool) -> Option<Outcome<R>> {
        while self.unanswered > 0 && !(is_running && self.all_yielded()) {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let help = self.done.is_some().then_some(PATIENCE);
            let result = match left.into_iter().chain(help).min() {
                Some(wait) => self.results.recv_timeout(wait),
                None => self.results.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match result {
                Ok(Message::Done(number, result)) => {
                    self.unanswered -= 1;
                    self.waiting.remove(&number);
                    return Some((number, result));
                }
                Ok(Message::Yielded(number)) => drop(self.waiting.insert(number)),
                Err(RecvTimeoutError::Timeout) if left.is_some_and(|left| left.is_zero()) => {
                    return None;
                }
                Err(RecvTimeoutError::Timeout) => self.add_thread(),
                Err(RecvTimeoutError::Disconnected) => {
                    unreachable!("a thread has ended without an answer")
                }
            }
        }
        None
    }

    /// Adds a thread for the remaining items.
    fn add_thread(&mut self) {
        if self.work.is_empty() {
            self.done = None;
        }
        let Some(done) = &self.done else { return };
        if Work::start(&self.work, done).is_err() {
            // Without a thread, the caller runs the items itself.
            Work::run(&self.work, done);
        }
    }
}

impl<T: Send + 'static, R: Send + 'static> Work<T, R> {
    fn start(this: &Arc<Self>, done: &mpsc::Sender<Message<R>>) -> std::io::Result<()> {
        let (work, sender) = (Arc::clone(this), done.clone());
        start_thread(this.thread, move || Self::run(&work, &sender)).map(drop)
    }

    fn run(this: &Arc<Self>, done: &mpsc::Sender<Message<R>>) {
        let mut is_replaced = false;
        while !is_replaced && let Some((number, item)) = this.take() {
            let has_yielded = Cell::new(false);
            let yield_thread = || {
                let _ = done.send(Message::Yielded(number));
                // If no thread can be started, `next` adds one after a while without results.
                has_yielded.set(!this.is_empty() && Self::start(this, done).is_ok());
            };
            // A panic leaves no broken state behind, because each call owns its item.
            let result = catch_unwind(AssertUnwindSafe(|| (this.call)(item, &yield_thread)));
            let result = result.map_err(|_| Panicked);
            is_replaced = has_yielded.get();
            // The receiver may be gone if the call took too long.
            let _ = done.send(Message::Done(number, result));
        }
    }

    fn take(&self) -> Option<(usize, T)> {
        self.queue.lock().pop_front()
    }

    fn is_empty(&self) -> bool {
        self.queue.lock().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn all_are_called_once() {
        for count in [0, 1, 2, 100] {
            let mut calls =
                ParallelCalls::begin((0..count).collect(), |number: usize, _| number * 2);
            let mut results: Vec<_> = std::iter::from_fn(|| calls.next(None)).collect();
            results.sort_unstable_by_key(|(number, _)| *number);
            let doubled = (0..count).map(|number| (number, Ok(number * 2)));
            assert_eq!(results, doubled.collect::<Vec<_>>());
        }
    }

    /// For builds in which a panic does not end the process.
    #[test]
    fn one_that_panics_is_answered_and_holds_up_no_other() {
        let call = |panics: bool, _: Yield<'_>| assert!(!panics, "on purpose");
        let mut calls = ParallelCalls::begin([vec![true; 9], vec![false]].concat(), call);
        let results: Vec<_> = std::iter::from_fn(|| calls.next(None)).collect();
        assert_eq!(results.len(), 10);
        for (number, result) in results {
            assert_eq!(result.is_ok(), number == 9);
        }
    }

    #[test]
    fn disks_that_hang_delay_no_other() {
        let count = std::thread::available_parallelism().map_or(1, usize::from) + 3;
        let all = Arc::new(Barrier::new(count + 1));
        let gate = Arc::clone(&all);
        let call = move |hangs: bool, _: Yield<'_>| {
            if hangs {
                gate.wait();
            }
            hangs
        };
        let list = [vec![true; count], vec![false]].concat();
        let mut calls = ParallelCalls::begin(list, call);
        assert_eq!(calls.next(None), Some((count, Ok(false))));
        assert_eq!(calls.next(Some(Instant::now())), None);
        all.wait();
        assert_eq!(std::iter::from_fn(|| calls.next(None)).count(), count);
    }

    /// Hundreds of disks that have waited for their locks would otherwise each leave a thread.
    #[test]
    fn a_thread_whose_place_was_taken_calls_no_other() {
        let bound = std::thread::available_parallelism().map_or(1, usize::from).max(4);
        let waiting = 8 * bound;
        let gate = Arc::new(Barrier::new(waiting));
        let (running, most) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
        let seen = Arc::clone(&most);
        let call = move |waits: bool, yield_thread: Yield<'_>| {
            if waits {
                yield_thread();
                gate.wait();
                return;
            }
            seen.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            // Other threads run now, if there are more.
            (0..100).for_each(|_| std::thread::yield_now());
            running.fetch_sub(1, Ordering::SeqCst);
        };
        let list = [vec![true; waiting], vec![false; 400]].concat();
        let mut calls = ParallelCalls::begin(list, call);
        assert_eq!(std::iter::from_fn(|| calls.next(None)).count(), waiting + 400);
        let most = most.load(Ordering::SeqCst);
        assert!(most < 4 * bound, "{most} threads");
    }

    /// The disks that a user names first are served first.
    #[test]
    fn calls_begin_in_the_order_of_the_list() {
        let begun = Arc::new(Lock::new(Vec::new()));
        let seen = Arc::clone(&begun);
        // None gives way, so that each thread takes the next one.
        let call = move |number: usize, _: Yield<'_>| seen.lock().push(number);
        let work = Work::<usize, ()> {
            queue: Lock::new((0..100).enumerate().collect()),
            call: Box::new(call),
            thread: "ringhaul-open",
        };
        Work::run(&Arc::new(work), &mpsc::channel().0);
        assert!(begun.lock().iter().copied().eq(0..100), "{:?}", begun.lock());
    }

    #[test]
    fn disks_that_wait_give_their_threads_back() {
        let count = 100;
        let all = Arc::new(Barrier::new(count + 1));
        let gate = Arc::clone(&all);
        let call = move |waits: bool, yield_thread: Yield<'_>| {
            if waits {
                yield_thread();
                gate.wait();
            }
            waits
        };
        let list = [vec![true; count], vec![false]].concat();
        let mut calls = ParallelCalls::begin(list, call);
        assert_eq!(calls.next_running(None), Some((count, Ok(false))));
        assert_eq!(calls.next_running(None), None);
        assert!(calls.all_yielded());
        all.wait();
        assert_eq!(std::iter::from_fn(|| calls.next(None)).count(), count);
    }
}
