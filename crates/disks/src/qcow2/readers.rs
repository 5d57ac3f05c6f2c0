//! The readers of the place table: requests that go straight to the file of the image. Before
//! space there is released, the owner waits for requests that may still write to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use blockio::driver::ForeignCompleter;
use blockio::executor::Lock;

/// The requests of one IoThread, counted in two rounds. Only that thread counts.
#[derive(Debug, Default)]
pub(super) struct Readers {
    round: AtomicUsize,
    counts: [AtomicUsize; 2],
    waiting: Lock<Option<WaitingOwner>>,
}

struct WaitingOwner(ForeignCompleter);

impl std::fmt::Debug for WaitingOwner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WaitingOwner")
    }
}

/// A request, until its memory is no longer used.
pub(super) struct ReaderGuard {
    readers: Arc<Readers>,
    round: usize,
}

impl ReaderGuard {
    pub(super) fn new(readers: &Arc<Readers>) -> Self {
        let round = readers.round.load(Ordering::Relaxed);
        readers.add(round, 1);
        Self { readers: Arc::clone(readers), round }
    }

    /// Returns true if no [wait](Readers::wait) for this request has begun.
    pub(super) fn is_current_round(&self) -> bool {
        self.round == self.readers.round.load(Ordering::Relaxed)
    }
}

impl Drop for ReaderGuard {
    fn drop(&mut self) {
        self.readers.end(self.round);
    }
}

impl Readers {
    fn add(&self, round: usize, change: isize) -> usize {
        let count = self.counts[round].load(Ordering::Relaxed);
        let count = count.checked_add_signed(change).expect("a use that ends has begun");
        self.counts[round].store(count, Ordering::Relaxed);
        count
    }

    fn end(&self, round: usize) {
        if self.add(round, -1) == 0 && round != self.round.load(Ordering::Relaxed) {
            let waiting = self.waiting.lock().take();
            if let Some(WaitingOwner(completer)) = waiting {
                completer.complete(Ok(0));
            }
        }
    }

    /// Completes `completer` when all requests so far have ended. Call it on the thread that
    /// counts, one wait at a time.
    pub(super) fn wait(&self, completer: ForeignCompleter) {
        let round = self.round.load(Ordering::Relaxed);
        let next = 1 - round;
        assert_eq!(self.counts[next].load(Ordering::Relaxed), 0, "one waits at a time");
        self.round.store(next, Ordering::Relaxed);
        if self.counts[round].load(Ordering::Relaxed) == 0 {
            completer.complete(Ok(0));
        } else {
            *self.waiting.lock() = Some(WaitingOwner(completer));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::task::Poll;

    use blockio::{Activity, IoThread, IoThreadConfig, Wait};
    use iomem::Buffers;

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_wait_covers_only_requests_that_have_begun() {
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let readers = Arc::new(Readers::default());
        for _ in 0..3 {
            let before = [ReaderGuard::new(&readers), ReaderGuard::new(&readers)];
            let (op, completer) = thread.io().foreign_op(Buffers::empty());
            readers.wait(completer);
            drop(ReaderGuard::new(&readers));
            let _after = ReaderGuard::new(&readers);
            let [first, second] = before;
            drop(first);
            while thread.turn(Wait::Never).unwrap() == Activity::Ready {}
            let mut op = Box::pin(op);
            let polled = poll_fn(|context| Poll::Ready(op.as_mut().poll(context).is_pending()));
            assert!(thread.block_on(polled).unwrap(), "it did not wait for all");
            drop(second);
            thread.block_on(op).unwrap().result.unwrap();
            drop(_after);
        }
        let (op, completer) = thread.io().foreign_op(Buffers::empty());
        readers.wait(completer);
        thread.block_on(op).unwrap().result.unwrap();
    }
}
