//! Memory for data that devices cannot take as it is, within a budget for each IoThread.
//!
//! A request with misaligned buffers goes piece by piece through memory that is aligned, and zeroes
//! to write go in pieces too. Each piece takes a [`Permit`] first. The budget is shared equally
//! among the disks of the IoThread, so that a disk that hangs with all of its share takes nothing
//! from its neighbours. The pieces of one disk wait in order.

use std::any::Any;
use std::cell::{Cell, RefCell, RefMut};
use std::future::poll_fn;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::Poll;

use crate::config::BounceConfig;
use crate::executor::semaphore::{Line, release};
use crate::stats::Stats;
use iomem::{Buffers, RepeatedBlock};

/// Bytes of the block that is repeated for any number of zeroes.
const ZEROES_BYTES: usize = 64 << 10;

/// The budget of one IoThread.
pub(crate) struct BounceBudget {
    state: Rc<Budget>,
    /// The shares of disks that are attached, or have pieces in the kernel, by the disk's address.
    shares: RefCell<Vec<(*const (), Weak<BounceShare>)>>,
    zeroes: RefCell<Option<RepeatedBlock>>,
}

struct Budget {
    config: BounceConfig,
    disks: Cell<usize>,
    /// Bytes of each share.
    limit: Cell<usize>,
    in_use: Cell<usize>,
    stats: Arc<Stats>,
}

/// The part of the budget for one disk.
pub struct BounceShare {
    budget: Rc<Budget>,
    /// The pieces, whose units are bytes.
    line: RefCell<Line>,
}

/// The place of a piece in line, and its bytes of the share, until the permit is dropped. It is
/// kept with the memory, so that memory in the kernel counts even after its future was dropped.
pub struct Permit {
    share: Rc<BounceShare>,
    number: u64,
    bytes: usize,
    is_in_use: bool,
}

impl BounceBudget {
    pub(crate) fn new(config: BounceConfig, stats: &Arc<Stats>) -> Self {
        let [disks, limit, in_use] = [0; 3].map(Cell::new);
        let state = Budget { config, disks, limit, in_use, stats: Arc::clone(stats) };
        Self { state: Rc::new(state), shares: RefCell::default(), zeroes: RefCell::default() }
    }

    /// Returns the share of a disk, which is identified by the address of its open file, or of the
    /// shared object of another kind of disk. Each disk has one share.
    pub(crate) fn share<T: ?Sized>(&self, disk: &Arc<T>) -> Rc<BounceShare> {
        let budget = &self.state;
        let mut shares = self.shares.borrow_mut();
        shares.retain(|(_, share)| share.strong_count() > 0);
        let address = Arc::as_ptr(disk).cast::<()>();
        let known = shares.iter().find(|(other, _)| *other == address);
        if let Some(share) = known.and_then(|(_, share)| share.upgrade()) {
            return share;
        }
        budget.set_disks(budget.disks.get() + 1);
        let share = BounceShare { budget: Rc::clone(budget), line: RefCell::new(Line::new(0)) };
        let share = Rc::new(share);
        shares.push((address, Rc::downgrade(&share)));
        share
    }

    /// Returns a list of zeroes, to be read by the kernel only. `kept` is dropped with the list.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn zeroes(&self, bytes: usize, kept: impl Any) -> io::Result<Buffers> {
        let mut zeroes = self.zeroes.borrow_mut();
        let zeroes = match &mut *zeroes {
            Some(zeroes) => zeroes,
            none => none.insert(RepeatedBlock::zeroes(ZEROES_BYTES, ZEROES_BYTES)?),
        };
        zeroes.buffers(bytes, kept)
    }
}

impl BounceShare {
    /// The largest piece to request, a multiple of `align` (a power of two up to the largest
    /// logical block).
    pub fn piece_bytes(&self, align: usize) -> usize {
        let piece = self.part_bytes(self.budget.config.piece_bytes_max);
        (piece & !(align - 1)).max(align)
    }

    /// The smaller of `most` and the bytes of the whole share.
    pub fn part_bytes(&self, most: usize) -> usize {
        self.budget.limit.get().min(most)
    }

    /// The line, with its limit as of now.
    fn line(&self) -> RefMut<'_, Line> {
        let mut line = self.line.borrow_mut();
        line.set_limit(self.budget.limit.get());
        line
    }

    /// Waits until `bytes` more may be in use, behind all earlier pieces. A single piece need not
    /// wait, regardless of its size: the share may have shrunk since.
    pub async fn take(self: &Rc<Self>, bytes: usize) -> Permit {
        let (number, must_wait) = self.line().enter(bytes);
        let mut permit = Permit { share: Rc::clone(self), number, bytes, is_in_use: false };
        if must_wait {
            self.budget.stats.bounce.waits.add(1);
            poll_fn(|cx| {
                let waits = self.line.borrow_mut().poll(number, cx);
                if waits.is_some() { Poll::Pending } else { Poll::Ready(()) }
            })
            .await;
        }
        self.budget.set_in_use(self.budget.in_use.get() + bytes);
        permit.is_in_use = true;
        permit
    }
}

impl Budget {
    fn set_disks(&self, disks: usize) {
        self.disks.set(disks);
        let BounceConfig { budget_bytes, share_bytes_min, .. } = self.config;
        let equal = budget_bytes / disks.max(1);
        self.limit.set(equal.max(share_bytes_min) / share_bytes_min * share_bytes_min);
    }

    fn set_in_use(&self, bytes: usize) {
        self.in_use.set(bytes);
        let stats = &self.stats.bounce;
        stats.bytes.set(bytes as u64);
        stats.bytes_most.set(stats.bytes_most.get().max(bytes as u64));
    }
}

impl Drop for BounceShare {
    fn drop(&mut self) {
        self.budget.set_disks(self.budget.disks.get() - 1);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.is_in_use {
            let budget = &self.share.budget;
            budget.set_in_use(budget.in_use.get() - self.bytes);
        }
        release(|| self.share.line(), self.number, self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::Pin;
    use std::task::{Context, Waker};

    use super::*;
    use crate::{IoThread, IoThreadConfig};

    const KIB: usize = 1 << 10;

    fn thread(budget_bytes: usize) -> IoThread {
        let bounce = BounceConfig { budget_bytes, ..BounceConfig::default() };
        IoThread::new(&IoThreadConfig { bounce, ..IoThreadConfig::default() }).unwrap()
    }

    fn file() -> Arc<crate::file::open_file::OpenFile> {
        let file = std::fs::File::open("/dev/null").unwrap();
        Arc::new(std::os::fd::OwnedFd::from(file).into())
    }

    fn poll<F: Future>(future: Pin<&mut F>) -> Option<F::Output> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    }

    #[test]
    fn pieces_wait_in_order_and_dropped_ones_are_skipped() {
        let thread = thread(128 * KIB);
        let io = thread.io();
        let share = io.shared.bounce_budget.share(&file());
        let take = |kib: usize| Box::pin(share.take(kib * KIB));
        let first = poll(take(100).as_mut()).unwrap();
        let mut gone = take(50);
        assert!(poll(gone.as_mut()).is_none());
        let mut waiting = [take(60), take(10), take(60), take(8)];
        // Behind a piece without room, a piece that would have room waits too.
        assert!(waiting.iter_mut().all(|future| poll(future.as_mut()).is_none()));
        drop(gone);
        drop(first);
        let [mut second, third, mut fourth, mut fifth] = waiting;
        let second = poll(second.as_mut()).unwrap();
        assert!(poll(fourth.as_mut()).is_none() && poll(fifth.as_mut()).is_none());
        // It was granted, and is never polled again.
        drop(third);
        drop(fourth);
        let fifth = poll(fifth.as_mut()).expect("the one who went away is in the way");
        let stats = &io.stats().bounce;
        assert_eq!((stats.bytes.get(), stats.waits.get()), (68 << 10, 5));
        assert_eq!(stats.bytes_most.get(), 100 << 10);
        drop((second, fifth));
        assert_eq!(stats.bytes.get(), 0);
    }

    #[test]
    fn a_disk_that_hangs_keeps_nothing_from_its_neighbours() {
        let thread = thread(256 * KIB);
        let io = thread.io();
        let files = [file(), file()];
        let hung = io.shared.bounce_budget.share(&files[0]);
        let taken: Vec<Permit> = (0..4)
            .map(|_| poll(Box::pin(hung.take(64 * KIB)).as_mut()).expect("its own share"))
            .collect();
        // A neighbour comes: it has its part at once, and the parts of both are smaller.
        let good = io.shared.bounce_budget.share(&files[1]);
        assert!(Rc::ptr_eq(&good, &io.shared.bounce_budget.share(&files[1])));
        let all = poll(Box::pin(good.take(128 * KIB)).as_mut()).expect("its share");
        let (mut more, mut next) = (Box::pin(good.take(4 * KIB)), Box::pin(hung.take(64 * KIB)));
        assert!(poll(more.as_mut()).is_none() && poll(next.as_mut()).is_none());
        drop(all);
        assert!(poll(more.as_mut()).is_some());
        drop(taken);
        let mut next = [Some(next), None, None].map(|next| {
            let mut next = next.unwrap_or_else(|| Box::pin(hung.take(64 * KIB)));
            (poll(next.as_mut()), next)
        });
        assert_eq!(next.each_ref().map(|(permit, _)| permit.is_some()), [true, true, false]);
        next[0].0 = None;
        assert!(poll(next[2].1.as_mut()).is_some());
        drop(next);
        assert_eq!(io.stats().bounce.bytes.get(), 0);
    }

    #[test]
    fn shares_are_whole_units_and_never_nothing() {
        let thread = thread(1 << 20);
        let io = thread.io();
        let files: Vec<_> = (0..100).map(|_| file()).collect();
        let shares: Vec<_> = files.iter().map(|file| io.shared.bounce_budget.share(file)).collect();
        let BounceConfig { share_bytes_min, piece_bytes_max, .. } = BounceConfig::default();
        assert_eq!(shares[0].piece_bytes(512), share_bytes_min);
        assert_eq!(shares[99].piece_bytes(1 << 16), 1 << 16);
        drop(shares);
        let alone = io.shared.bounce_budget.share(&files[7]);
        assert!(Rc::ptr_eq(&alone, &io.shared.bounce_budget.share(&files[7])));
        assert_eq!(
            (alone.piece_bytes(512), alone.part_bytes(usize::MAX)),
            (piece_bytes_max, 1 << 20)
        );
    }

    #[test]
    fn pieces_are_whole_blocks() {
        for (piece_bytes_max, align, expected) in
            [(10_000, 512, 9728), (10_000, 4096, 8192), (4095, 4096, 4096), (8192, 8192, 8192)]
        {
            let bounce = BounceConfig { piece_bytes_max, ..BounceConfig::default() };
            let config = IoThreadConfig { bounce, ..IoThreadConfig::default() };
            let thread = IoThread::new(&config).unwrap();
            let share = thread.io().shared.bounce_budget.share(&file());
            assert_eq!(share.piece_bytes(align), expected, "{piece_bytes_max} {align}");
        }
    }

    #[test]
    fn zeroes_are_one_block_over_and_over() {
        let thread = thread(1 << 20);
        let io = thread.io();
        let share = io.shared.bounce_budget.share(&file());
        for bytes in [512, ZEROES_BYTES, ZEROES_BYTES + 512, 4 * ZEROES_BYTES] {
            let permit = poll(Box::pin(share.take(bytes)).as_mut()).unwrap();
            let zeroes = io.shared.bounce_budget.zeroes(bytes, permit).unwrap();
            assert_eq!(zeroes.to_vec(), vec![0; bytes]);
            let starts = zeroes.iovecs().iter().map(|range| range.iov_base.addr());
            assert_eq!(starts.collect::<std::collections::BTreeSet<_>>().len(), 1);
            assert_eq!(io.stats().bounce.bytes.get(), bytes as u64);
        }
        assert_eq!(io.stats().bounce.bytes.get(), 0);
    }
}
