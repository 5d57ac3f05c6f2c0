//! Data that requests move without an op: zeroes of a hole, decrypted data, copies.
//!
//! No bound of an engine counts such data, and a request for it may be done in one poll. So the
//! bytes of a round are bounded here, for all disks of an IoThread together. Pieces beyond the
//! bound wait for a later round. Disks take turns, and the pieces of a disk wait in order.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::executor::wait_list::WaitList;
use crate::thread::io::Io;

/// The most bytes of a piece. Copying them takes some 50 µs.
pub const COPY_BYTES_MAX: usize = 256 << 10;

/// The key of the one object of its type on an IoThread.
const KEY: usize = 0;

/// The pieces of all disks of an IoThread.
struct CopyRounds {
    io: Rc<Io>,
    /// The most bytes in a round, unless one piece is larger.
    round_bytes: usize,
    /// The round of the loop to which `moved` belongs.
    round: Cell<u64>,
    /// Bytes of the pieces in this round.
    moved: Cell<usize>,
    /// Disks with waiting pieces, in the order of their turns.
    disks: RefCell<VecDeque<Weak<CopyTurns>>>,
    /// True while a waiting piece wakes itself in each round, for all of them.
    has_pacer: Cell<bool>,
}

/// The turns of one disk on an IoThread.
pub struct CopyTurns {
    rounds: Rc<CopyRounds>,
    /// Pieces that wait, with their bytes.
    waiting: RefCell<WaitList<usize>>,
}

/// The place of a piece in line, until it is dropped.
struct WaitingPiece<'a> {
    turns: &'a Rc<CopyTurns>,
    number: u64,
    is_pacer: Cell<bool>,
}

impl CopyTurns {
    /// The turns of a disk on this IoThread, which all of its queues share. `disk` is the state
    /// that its IoThreads share.
    pub fn for_disk<T: ?Sized>(io: &Rc<Io>, disk: &Arc<T>) -> Rc<Self> {
        let key = Arc::as_ptr(disk).cast::<()>().addr();
        io.shared(key).unwrap_or_else(|| {
            let rounds = CopyRounds::for_thread(io);
            let turns = Rc::new(Self { rounds, waiting: RefCell::default() });
            io.share(key, &turns);
            turns
        })
    }

    /// Waits until a piece of this many bytes may be moved. Call it before the piece, and move at
    /// most [`COPY_BYTES_MAX`] bytes then.
    #[inline]
    pub async fn turn(self: &Rc<Self>, bytes: usize) {
        if !self.rounds.has_room(bytes) {
            self.wait(bytes).await;
        }
    }

    #[cold]
    async fn wait(self: &Rc<Self>, bytes: usize) {
        let piece = WaitingPiece::new(self, bytes);
        poll_fn(|cx| piece.poll(cx)).await;
    }
}

impl CopyRounds {
    fn for_thread(io: &Rc<Io>) -> Rc<Self> {
        io.shared(KEY).unwrap_or_else(|| {
            let rounds = Rc::new(Self {
                io: Rc::clone(io),
                round_bytes: io.checks.copies_max(),
                round: Cell::new(0),
                moved: Cell::new(0),
                disks: RefCell::default(),
                has_pacer: Cell::new(false),
            });
            io.share(KEY, &rounds);
            rounds
        })
    }

    /// Counts a piece if it need not wait.
    #[inline]
    fn has_room(&self, bytes: usize) -> bool {
        if !self.disks.borrow().is_empty() {
            return false;
        }
        let round = self.io.stats().rounds.get();
        if self.round.replace(round) != round {
            self.moved.set(0);
        }
        let moved = self.moved.get() + bytes;
        let has_room = moved <= self.round_bytes || moved == bytes;
        if has_room {
            self.moved.set(moved);
        }
        has_room
    }

    /// Lets waiting pieces begin until the next round is full, and wakes one of the rest.
    fn begin_round(&self) {
        // The pieces of the last round have held the loop.
        self.io.checks.make_due();
        self.round.set(self.io.stats().rounds.get());
        self.moved.set(0);
        while let Some(waker) = self.take_next() {
            waker.wake();
        }
        self.wake_next_pacer();
    }

    /// Counts the next piece, if the round has room, and returns its waker.
    fn take_next(&self) -> Option<Waker> {
        let mut disks = self.disks.borrow_mut();
        loop {
            let disk = disks.front()?.upgrade();
            let mut waiting = disk.as_ref().map(|disk| disk.waiting.borrow_mut());
            let Some((waiting, bytes)) = waiting.as_mut().and_then(|waiting| {
                let bytes = *waiting.front()?;
                Some((waiting, bytes))
            }) else {
                disks.pop_front();
                continue;
            };
            let moved = self.moved.get() + bytes;
            if moved > self.round_bytes && moved != bytes {
                return None;
            }
            self.moved.set(moved);
            let waker = waiting.pop_front();
            disks.rotate_left(1);
            if waker.is_some() {
                return waker;
            }
        }
    }

    /// Wakes a waiting piece, which then is the pacer unless there is one.
    fn wake_next_pacer(&self) {
        let first = |disk: &Weak<CopyTurns>| disk.upgrade()?.waiting.borrow().first_waker();
        let waker = self.disks.borrow().iter().find_map(first);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<'a> WaitingPiece<'a> {
    fn new(turns: &'a Rc<CopyTurns>, bytes: usize) -> Self {
        let number = {
            let mut waiting = turns.waiting.borrow_mut();
            if waiting.is_empty() {
                // An entry of a disk whose last piece has left may still be there.
                let mut disks = turns.rounds.disks.borrow_mut();
                let turns = Rc::downgrade(turns);
                if !disks.iter().any(|disk| disk.ptr_eq(&turns)) {
                    disks.push_back(turns);
                }
            }
            waiting.push(bytes)
        };
        Self { turns, number, is_pacer: Cell::new(false) }
    }

    /// Ready once the piece was counted.
    fn poll(&self, cx: &Context<'_>) -> Poll<()> {
        let rounds = &self.turns.rounds;
        if self.is_pacer.take() {
            rounds.has_pacer.set(false);
            // The piece looks for its own turn below. A wake would poll it once more in the next
            // round, and each poll of a pacer begins a round.
            let no_wake = Context::from_waker(Waker::noop());
            drop(self.turns.waiting.borrow_mut().set_waker(self.number, &no_wake));
            rounds.begin_round();
        }
        let before = self.turns.waiting.borrow_mut().set_waker(self.number, cx);
        if before.is_none() {
            return Poll::Ready(());
        }
        if !rounds.has_pacer.replace(true) {
            self.is_pacer.set(true);
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }
}

impl Drop for WaitingPiece<'_> {
    fn drop(&mut self) {
        let gone = self.turns.waiting.borrow_mut().remove(self.number);
        drop(gone);
        if self.is_pacer.get() {
            self.turns.rounds.has_pacer.set(false);
            self.turns.rounds.wake_next_pacer();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;

    use super::*;
    use crate::{IoThread, IoThreadConfig, TaskSet, Wait};

    const PIECES: usize = 32;
    const ROUND_BYTES: usize = 1 << 20;

    /// Starts tasks that move pieces, and returns the numbers of moved pieces.
    fn start(io: &Rc<Io>, tasks: usize, bytes: usize) -> Vec<Rc<Cell<usize>>> {
        let disk = Arc::new(());
        let begin = || {
            let (turns, moved) = (CopyTurns::for_disk(io, &disk), Rc::new(Cell::new(0)));
            let (count, disk) = (Rc::clone(&moved), Arc::clone(&disk));
            io.spawn(async move {
                for _ in 0..PIECES {
                    turns.turn(bytes).await;
                    count.set(count.get() + 1);
                }
                drop(disk);
            });
            moved
        };
        (0..tasks).map(|_| begin()).collect()
    }

    fn sum(moved: &[Rc<Cell<usize>>]) -> usize {
        moved.iter().map(|moved| moved.get()).sum()
    }

    #[test]
    fn a_turn_moves_a_bounded_number_of_bytes_for_any_number_of_requests() {
        for bytes in [4096, COPY_BYTES_MAX, 3 * ROUND_BYTES] {
            let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
            let io = Rc::clone(thread.io());
            let moved = [start(&io, 50, bytes), start(&io, 50, bytes)].concat();
            let mut most = 0;
            while io.tasks() > 0 {
                let before = sum(&moved);
                thread.turn(Wait::Never).unwrap();
                most = most.max((sum(&moved) - before) * bytes);
            }
            // The pieces of a round, and those of the next one before its check.
            assert!(most <= 2 * ROUND_BYTES.max(bytes), "{most} bytes in a turn of {bytes}");
            assert_eq!(sum(&moved), 100 * PIECES);
        }
    }

    /// The requests of a queue are futures of one task, which is polled for each wake of them.
    #[test]
    fn a_turn_moves_a_bounded_number_of_bytes_for_the_requests_of_a_queue() {
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let io = Rc::clone(thread.io());
        let (disk, moved) = (Arc::new(()), Rc::new(Cell::new(0)));
        let request = || {
            let (turns, moved) = (CopyTurns::for_disk(&io, &disk), Rc::clone(&moved));
            async move {
                for _ in 0..20 * PIECES {
                    turns.turn(COPY_BYTES_MAX).await;
                    moved.set(moved.get() + COPY_BYTES_MAX);
                }
            }
        };
        let requests = [request(), request(), request()];
        let mut set = TaskSet::new(Rc::clone(&io));
        io.spawn(async move {
            let mut requests = requests.into_iter();
            poll_fn(|cx| {
                requests.by_ref().for_each(|request| set.spawn(cx, request));
                Poll::Ready(())
            })
            .await;
            set.finish().await;
        });
        while io.tasks() > 0 {
            let before = moved.get();
            thread.turn(Wait::Never).unwrap();
            let bytes = moved.get() - before;
            // The pieces of a round, those of the next one before its check, and pieces that got
            // their turn in a round and run in the next.
            assert!(bytes <= 3 * ROUND_BYTES, "{bytes} bytes in a turn");
        }
        assert_eq!(moved.get(), 3 * 20 * PIECES * COPY_BYTES_MAX);
    }

    #[test]
    fn requests_of_a_disk_advance_together_and_disks_take_turns() {
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let io = Rc::clone(thread.io());
        let many = start(&io, 100, COPY_BYTES_MAX);
        let one = start(&io, 1, COPY_BYTES_MAX);
        while io.tasks() > 0 {
            thread.turn(Wait::Never).unwrap();
            let [least, most] = [
                many.iter().map(|moved| moved.get()).min().unwrap(),
                many.iter().map(|moved| moved.get()).max().unwrap(),
            ];
            // The first request fills the first round.
            assert!(most <= least + 5, "{least} and {most} pieces of two requests");
            let alone = sum(&one);
            if alone < PIECES && alone > 0 {
                // A round has four pieces, and the disks take turns.
                assert!(sum(&many) <= 4 * alone + 8, "{} pieces beside {alone}", sum(&many));
            }
        }
        assert_eq!((sum(&many), sum(&one)), (100 * PIECES, PIECES));
    }

    #[test]
    fn a_request_that_is_dropped_leaves_the_line() {
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let io = Rc::clone(thread.io());
        let disk = Arc::new(());
        let turns = CopyTurns::for_disk(&io, &disk);
        let mut cx = Context::from_waker(Waker::noop());
        assert!(pin!(turns.turn(ROUND_BYTES)).poll(&mut cx).is_ready());
        let mut pacer = Box::pin(turns.turn(ROUND_BYTES));
        let mut next = Box::pin(turns.turn(ROUND_BYTES));
        let mut last = Box::pin(turns.turn(ROUND_BYTES));
        assert!(pacer.as_mut().poll(&mut cx).is_pending());
        assert!(next.as_mut().poll(&mut cx).is_pending());
        let moved = start(&io, 3, ROUND_BYTES);
        drop((pacer, next));
        assert!(last.as_mut().poll(&mut cx).is_pending(), "it paces now");
        assert!(last.as_mut().poll(&mut cx).is_ready());
        while io.tasks() > 0 {
            thread.turn(Wait::Never).unwrap();
        }
        assert_eq!(sum(&moved), 3 * PIECES);
    }
}
