//! The same for many things at once, on a few threads, of which some may hang.

use std::collections::VecDeque;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long nothing may be answered before another thread helps: one may wait for a disk that
/// hangs.
const PATIENCE: Duration = Duration::from_secs(1);

/// Calls that are made side by side. There are no more threads than CPUs for as long as calls end,
/// because what is measured meanwhile should not wait for one. Threads whose calls hang are left
/// behind when this is dropped.
pub(crate) struct SideBySide<T, R> {
    work: Arc<Work<T, R>>,
    done: Option<mpsc::Sender<(usize, R)>>,
    results: mpsc::Receiver<(usize, R)>,
    unanswered: usize,
}

struct Work<T, R> {
    left: Mutex<VecDeque<(usize, T)>>,
    call: Box<dyn Fn(T) -> R + Send + Sync>,
}

impl<T: Send + 'static, R: Send + 'static> SideBySide<T, R> {
    /// Begins to call `call` for each of `list`.
    pub(crate) fn begin(list: Vec<T>, call: impl Fn(T) -> R + Send + Sync + 'static) -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let (unanswered, threads) = (list.len(), list.len().min(cpus.max(2)));
        let left = Mutex::new(list.into_iter().enumerate().collect());
        let work = Arc::new(Work { left, call: Box::new(call) });
        let (done, results) = mpsc::channel();
        let mut this = Self { work, done: Some(done), results, unanswered };
        (0..threads).for_each(|_| this.add_thread());
        this
    }

    /// The next result, with its number in the list. `None`: all were there, or it did not come in
    /// time.
    pub(crate) fn next(&mut self, until: Option<Instant>) -> Option<(usize, R)> {
        while self.unanswered > 0 {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let help = self.done.is_some().then_some(PATIENCE);
            let result = match left.into_iter().chain(help).min() {
                Some(wait) => self.results.recv_timeout(wait),
                None => self.results.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match result {
                Ok(result) => {
                    self.unanswered -= 1;
                    return Some(result);
                }
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

    /// Starts one more thread, for what is left.
    fn add_thread(&mut self) {
        if self.work.is_empty() {
            self.done = None;
        }
        let Some(done) = &self.done else { return };
        let (work, sender) = (Arc::clone(&self.work), done.clone());
        let thread = std::thread::Builder::new().name("ringhaul-side".into());
        if thread.spawn(move || work.run(&sender)).is_err() {
            // Where there can be no thread, this one does it.
            self.work.run(done);
        }
    }
}

impl<T, R> Work<T, R> {
    fn run(&self, done: &mpsc::Sender<(usize, R)>) {
        while let Some((number, item)) = self.take() {
            // Nobody waits any more for what took too long.
            let _ = done.send((number, (self.call)(item)));
        }
    }

    fn take(&self) -> Option<(usize, T)> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    fn is_empty(&self) -> bool {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn all_are_called_once() {
        for count in [0, 1, 2, 100] {
            let mut calls = SideBySide::begin((0..count).collect(), |number: usize| number * 2);
            let mut results: Vec<_> = std::iter::from_fn(|| calls.next(None)).collect();
            results.sort_unstable();
            assert_eq!(results, (0..count).map(|number| (number, number * 2)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn those_that_hang_hold_up_no_other() {
        let count = std::thread::available_parallelism().map_or(1, usize::from) + 3;
        let all = Arc::new(Barrier::new(count + 1));
        let gate = Arc::clone(&all);
        let call = move |hangs: bool| {
            if hangs {
                gate.wait();
            }
            hangs
        };
        let list = [vec![true; count], vec![false]].concat();
        let mut calls = SideBySide::begin(list, call);
        assert_eq!(calls.next(None), Some((count, false)));
        assert_eq!(calls.next(Some(Instant::now())), None);
        all.wait();
        assert_eq!(std::iter::from_fn(|| calls.next(None)).count(), count);
    }
}
