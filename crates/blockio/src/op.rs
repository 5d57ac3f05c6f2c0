//! Ops, completions and the slot table: the owners of memory and files while the kernel uses them.
//!
//! # Why the kernel never writes to memory that is gone
//!
//! A future can be dropped at any time. An operation that the kernel has started cannot be taken
//! back. So a future never lends memory to the kernel. It gives its [`Op`] away, to a slot:
//!
//! 1. [`Slots::insert`] moves the op in. From now on the slot owns the file and the [`Buffers`],
//!    and the buffers keep their memory mapped.
//! 2. An engine hands the kernel (or a pool thread) addresses found in that slot, and the slot's
//!    index as the token of the completion.
//! 3. [`Slots::complete`] stores the result. Only from then on can the op leave its slot: through
//!    [`Slots::take`] for a future that still waits, or by being dropped on the spot if
//!    [`Slots::abandon`] came first.
//!
//! The iovec array itself lies on the heap and does not move when the slot table grows. So an
//! address in the kernel stays valid until that op's completion, whichever futures, tasks, queues
//! or connections end before. A foreign op, which completes in a library or on a thread, has a slot
//! that owns its memory in the same way. SAFETY comments of engines and pool threads point here;
//! `tests::an_abandoned_op_keeps_its_memory_until_it_completes` tests it.

pub(crate) mod bounce;

use std::io;
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use crate::admission::{Admission, Lanes, OpTable};
use crate::clock::nanoseconds;
use crate::executor::mailbox::TaskKey;
use crate::executor::task::Owner;
pub(crate) use crate::file::io_file::{FileRef, IoFile};
pub use crate::file::op_kind::OpKind;
use crate::file::op_kind::errno_of;
use crate::file::open_file::OpTimes;
pub(crate) use crate::file::open_file::OpenFile;
use crate::file::write_loss::NOT_TRACKED;
use crate::stats::{OpStats, Stats};
use iomem::Buffers;

/// A kernel operation.
#[derive(Debug)]
pub(crate) struct Op {
    /// The operation.
    pub(crate) kind: OpKind,
    /// The file that it acts on.
    pub(crate) file: FileRef,
    /// The first byte in the file.
    pub(crate) offset: u64,
    /// The data, for reads and writes.
    pub(crate) buffers: Buffers,
}

impl Op {
    /// The ranges of memory for one system call: at most [`iomem::IOVECS_MAX`].
    #[inline]
    pub(crate) fn iovecs(&self) -> &[libc::iovec] {
        let iovecs = self.buffers.iovecs();
        iovecs.get(..iomem::IOVECS_MAX).unwrap_or(iovecs)
    }
}

/// An op's result and its buffers.
#[derive(Debug)]
pub struct Completion {
    /// Bytes moved (0 for ops that move none), or the kernel's error.
    pub result: io::Result<usize>,
    /// The buffers of the op.
    pub buffers: Buffers,
}

impl Completion {
    /// Returns true if all of `wanted` bytes were moved.
    #[inline]
    pub(crate) fn is_whole(&self, wanted: usize) -> bool {
        self.result.as_ref().is_ok_and(|&moved| moved >= wanted)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    /// The op is queued or in the kernel.
    Pending,
    /// Like `Pending`, but the future was dropped.
    Abandoned,
    /// The result (a negative errno, or bytes) waits to be taken.
    Done(i64),
}

struct Slot {
    state: State,
    owner: Owner,
    body: Body,
    submitted: Option<Instant>,
    /// The units of the op in its lane; 0 while it is not with the engine.
    units: u32,
    /// The number of [`WriteLossTracker::begin`](crate::file::write_loss::WriteLossTracker::begin).
    tracked: u64,
}

/// The content of a slot.
enum Body {
    Nothing,
    Op(Op),
    /// The memory of a foreign op, which the kernel does not complete.
    Foreign(Buffers),
}

impl Body {
    #[inline]
    fn into_buffers(self) -> Option<Buffers> {
        match self {
            Self::Op(op) => Some(op.buffers),
            Self::Foreign(buffers) => Some(buffers),
            Self::Nothing => None,
        }
    }
}

impl Slot {
    fn new(body: Body, owner: Owner) -> Self {
        Self { state: State::Pending, owner, body, submitted: None, units: 0, tracked: NOT_TRACKED }
    }

    #[inline]
    fn op(&self) -> Option<&Op> {
        match &self.body {
            Body::Op(op) => Some(op),
            Body::Nothing | Body::Foreign(_) => None,
        }
    }
}

/// The slots of all ops of one IoThread, until their results are taken.
pub(crate) struct Slots {
    slots: Table,
    free: Vec<u32>,
    pub(crate) lanes: Lanes,
    /// The number of foreign ops that are not complete.
    foreign: usize,
    /// Wakers of ops that have completed. They are woken when nothing is borrowed.
    pub(crate) wakers: Vec<Waker>,
    /// Memory of abandoned ops. It is dropped when nothing is borrowed, because its owners may run
    /// any code then.
    pub(crate) unwanted: Vec<Buffers>,
}

#[derive(Default)]
struct Table(Vec<Slot>);

/// The next step of an op in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    /// The engine queues the op.
    Queue,
    /// The op waits in its lane.
    Wait,
    /// The op fails with `ECANCELED`: its IoThread has ended.
    Cancel,
}

/// The place for an engine's results and for the tasks that they wake.
pub(crate) struct Completer<'a> {
    pub(crate) slots: &'a mut Slots,
    pub(crate) stats: &'a Stats,
    pub(crate) woken: &'a mut Vec<TaskKey>,
    pub(crate) now: Instant,
}

impl Completer<'_> {
    /// Stores one result: bytes, or a negative errno.
    #[inline]
    pub(crate) fn complete(&mut self, slot: u32, result: i64) {
        if let Some(owner) = self.slots.complete(slot, result, self.now, self.stats) {
            self.woken.push(owner);
        }
    }
}

impl OpTable for Table {
    fn ranges(&self, slot: u32) -> &[libc::iovec] {
        let op = self.0.get(slot as usize).and_then(Slot::op);
        op.map_or(&[], |op| op.buffers.iovecs())
    }

    fn bytes(&self, slot: u32) -> usize {
        self.0.get(slot as usize).and_then(Slot::op).map_or(0, |op| op.buffers.bytes())
    }

    fn set(&mut self, slot: u32, units: u32) {
        if let Some(slot) = self.0.get_mut(slot as usize) {
            slot.units = units;
        }
    }
}

impl Slots {
    /// Makes an empty table, for engines that each take `depth` ops.
    pub(crate) fn new(depth: u32) -> Self {
        let (slots, lanes) = (Table::default(), Lanes::new(depth));
        let (wakers, unwanted) = (Vec::new(), Vec::new());
        Self { slots, free: Vec::new(), lanes, foreign: 0, wakers, unwanted }
    }

    /// Like [`insert`](Self::insert), and returns the next step of the op.
    #[inline]
    pub(crate) fn start(&mut self, op: Op, owner: Owner) -> (u32, Start) {
        let (lane, kind, bytes) = (op.file.lane(), op.kind, op.buffers.bytes());
        let index = self.insert(op, owner);
        let start = match self.lanes.admit(lane, index, (kind, bytes), &self.slots) {
            Admission::Now(units) => {
                self.slots.0[index as usize].units = units;
                Start::Queue
            }
            Admission::Later => Start::Wait,
            Admission::Never => Start::Cancel,
        };
        (index, start)
    }

    /// Completes an op that was never queued, with `ECANCELED`.
    pub(crate) fn cancel(&mut self, index: u32) {
        if let Some(slot) = self.slots.0.get_mut(index as usize) {
            slot.state = State::Done(-i64::from(libc::ECANCELED));
        }
    }

    /// Returns an op that waited in its lane and is to be queued now.
    pub(crate) fn next_from_lanes(&mut self) -> Option<u32> {
        self.lanes.next(&mut self.slots)
    }

    /// Moves `op` into a free slot; `owner` is woken when it completes.
    pub(crate) fn insert(&mut self, op: Op, owner: Owner) -> u32 {
        self.put(Slot::new(Body::Op(op), owner))
    }

    /// Takes a slot for a foreign op. The slot owns `buffers` until its completion.
    pub(crate) fn insert_foreign(&mut self, buffers: Buffers) -> u32 {
        self.foreign += 1;
        self.put(Slot::new(Body::Foreign(buffers), Owner::default()))
    }

    /// The number of foreign ops that are not complete.
    #[inline]
    pub(crate) fn foreign(&self) -> usize {
        self.foreign
    }

    #[inline]
    fn put(&mut self, slot: Slot) -> u32 {
        if let Some(index) = self.free.pop() {
            self.slots.0[index as usize] = slot;
            return index;
        }
        self.slots.0.push(slot);
        u32::try_from(self.slots.0.len() - 1).unwrap_or_else(|_| unreachable!("2^32 ops at once"))
    }

    /// The op in slot `index`.
    #[inline]
    pub(crate) fn op(&self, index: u32) -> Option<&Op> {
        self.slots.0.get(index as usize)?.op()
    }

    /// The file of the op in slot `index`.
    pub(crate) fn file(&self, index: u32) -> Option<&OpenFile> {
        self.op(index).map(|op| op.file.file())
    }

    fn pending(&self) -> impl Iterator<Item = (&Slot, &Op)> {
        let pending = |slot: &&Slot| matches!(slot.state, State::Pending | State::Abandoned);
        self.slots.0.iter().filter(pending).filter_map(|slot| Some((slot, slot.op()?)))
    }

    /// The ops that were submitted and have not completed: file, kind, and time of submission.
    pub(crate) fn submitted(&self) -> impl Iterator<Item = (&Arc<OpenFile>, OpKind, Instant)> {
        self.pending().filter_map(|(slot, op)| Some((op.file.shared(), op.kind, slot.submitted?)))
    }

    /// The number of ops of `file` that have not completed, including ops in its lane.
    pub(crate) fn pending_of(&self, file: &Arc<OpenFile>) -> usize {
        self.pending().filter(|(_, op)| Arc::ptr_eq(op.file.shared(), file)).count()
    }

    /// Returns the op in slot `index`, and notes that it is submitted now.
    pub(crate) fn submit(&mut self, index: u32, now: Instant) -> Option<&Op> {
        let slot = self.slots.0.get_mut(index as usize)?;
        slot.submitted = Some(now);
        let Body::Op(op) = &slot.body else { return None };
        if op.kind.is_for_stable_storage() && slot.tracked == NOT_TRACKED {
            slot.tracked = op.file.loss().begin(op.kind);
        }
        Some(op)
    }

    /// Stores the result of slot `index` and counts it. Returns the task to wake, if there is one.
    /// A waker to wake goes to `wakers`.
    pub(crate) fn complete(
        &mut self,
        index: u32,
        result: i64,
        now: Instant,
        stats: &Stats,
    ) -> Option<TaskKey> {
        let slot = self.slots.0.get_mut(index as usize)?;
        // A second completion would pass for that of the next op in this slot.
        assert!(
            matches!(slot.state, State::Pending | State::Abandoned),
            "invariant 4: slot {index} completes with {result} and is {:?}: an op completes once",
            slot.state
        );
        match &slot.body {
            Body::Op(op) => {
                let times = OpTimes { submitted: slot.submitted, now };
                op.file.record_answer(op.kind, slot.tracked, result, times);
                if slot.units > 0 {
                    let what = (op.kind, op.buffers.bytes());
                    self.lanes.release(op.file.lane(), slot.units, what);
                }
                let latency_ns = slot.submitted.map(|then| nanoseconds(now - then));
                if let Some(latency_ns) = latency_ns {
                    stats.slow.note_operation(now, latency_ns);
                }
                if let Some(stats) = stats_of(stats, op.kind) {
                    record(stats, result, latency_ns);
                }
            }
            Body::Foreign(_) => self.foreign -= 1,
            Body::Nothing => unreachable!("a slot that is not free owns something"),
        }
        match slot.state {
            State::Pending => {
                slot.state = State::Done(result);
                if let Owner::Key(key) = slot.owner {
                    return Some(key);
                }
                if let Owner::Waker(waker) = std::mem::take(&mut slot.owner) {
                    self.wakers.push(waker);
                }
                None
            }
            State::Abandoned => {
                let buffers = self.release(index).into_buffers();
                self.unwanted.extend(buffers);
                None
            }
            State::Free | State::Done(_) => unreachable!("asserted above"),
        }
    }

    /// Makes the completion of slot `index` wake `owner` alone. Returns the previous owner.
    #[inline]
    pub(crate) fn set_owner(&mut self, index: u32, owner: Owner) -> Owner {
        let slot = self.slots.0.get_mut(index as usize);
        slot.map_or_else(Owner::default, |slot| std::mem::replace(&mut slot.owner, owner))
    }

    /// Takes the completion of slot `index`, if it is there.
    #[inline]
    pub(crate) fn take(&mut self, index: u32) -> Option<Completion> {
        let slot = self.slots.0.get_mut(index as usize)?;
        let State::Done(result) = slot.state else {
            return None;
        };
        let buffers = self.release(index).into_buffers()?;
        Some(Completion { result: result_of(result), buffers })
    }

    /// Notes that the future of slot `index` is gone. The op stays until it has completed. Returns
    /// objects that the caller must drop when nothing is borrowed.
    #[must_use]
    pub(crate) fn abandon(&mut self, index: u32) -> (Owner, Option<Buffers>) {
        let owner = self.set_owner(index, Owner::default());
        let buffers = match self.slots.0.get_mut(index as usize).map(|slot| &mut slot.state) {
            Some(state @ State::Pending) => {
                *state = State::Abandoned;
                None
            }
            Some(State::Done(_)) => self.release(index).into_buffers(),
            _ => None,
        };
        (owner, buffers)
    }

    /// Records `EIO` for the flushes and FUA writes in the kernel, whose results will never be
    /// known. Otherwise flushes of other IoThreads might wait for them forever.
    pub(crate) fn fail_tracked(&self, now: Instant) {
        let tracked = self.pending().filter(|(slot, _)| slot.tracked != NOT_TRACKED);
        for (slot, op) in tracked {
            let times = OpTimes { submitted: slot.submitted, now };
            op.file.record_answer(op.kind, slot.tracked, -i64::from(libc::EIO), times);
        }
    }

    /// The number of ops in slots: queued, in the kernel, or completed and not yet taken.
    pub(crate) fn occupied(&self) -> usize {
        self.slots.0.len() - self.free.len()
    }

    fn release(&mut self, index: u32) -> Body {
        let slot = &mut self.slots.0[index as usize];
        slot.state = State::Free;
        self.free.push(index);
        std::mem::replace(&mut slot.body, Body::Nothing)
    }
}

/// Converts a kernel result.
fn result_of(result: i64) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(errno_of(result)))
}

/// The counters for an op. A check for holes has none: it moves no bytes, and its result is not a
/// number of bytes.
fn stats_of(stats: &Stats, kind: OpKind) -> Option<&OpStats> {
    match kind {
        OpKind::Read => Some(&stats.read),
        OpKind::Write { .. } => Some(&stats.write),
        OpKind::Flush => Some(&stats.flush),
        OpKind::Fallocate { .. } | OpKind::DiscardBlocks { .. } | OpKind::ZeroBlocks { .. } => {
            Some(&stats.deallocate)
        }
        OpKind::FindExtent { .. } => None,
    }
}

fn record(stats: &OpStats, result: i64, latency_ns: Option<u64>) {
    stats.ops.add(1);
    match u64::try_from(result) {
        Ok(bytes) => stats.bytes.add(bytes),
        Err(_) => stats.errors.add(1),
    }
    if let Some(latency_ns) = latency_ns {
        stats.latency_ns.record(latency_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::OwnedFd;
    use std::rc::Rc;

    fn op(buffers: Buffers) -> Op {
        let file = OwnedFd::from(File::open("/dev/null").unwrap());
        let file = IoFile::detached(Arc::new(file.into()));
        Op { kind: OpKind::Read, file, offset: 0, buffers }
    }

    struct Canary(Rc<std::cell::Cell<bool>>);
    impl Drop for Canary {
        fn drop(&mut self) {
            self.0.set(true);
        }
    }

    #[test]
    fn an_abandoned_op_keeps_its_memory_until_it_completes() {
        let gone = Rc::new(std::cell::Cell::new(false));
        let buffers = Buffers::uninitialized(512, 512, Canary(Rc::clone(&gone))).unwrap();
        let (mut slots, stats) = (Slots::new(64), Stats::default());
        let index = slots.insert(op(buffers), Owner::default());
        drop(slots.abandon(index));
        assert!(!gone.get(), "invariant 3: the memory went while the op was pending");
        assert_eq!(slots.occupied(), 1);
        assert_eq!(slots.complete(index, 0, Instant::now(), &stats), None);
        assert!(!gone.get(), "its owner runs while the slots are borrowed");
        slots.unwanted.clear();
        assert!(gone.get(), "the memory stayed after the completion");
        assert_eq!(slots.occupied(), 0);
    }

    /// A submit that the kernel refuses comes again.
    #[test]
    fn a_flush_is_in_the_kernel_once_from_its_first_submit_to_its_answer() {
        let (mut slots, stats, now) = (Slots::new(64), Stats::default(), Instant::now());
        let flush = Op { kind: OpKind::Flush, ..op(Buffers::empty()) };
        let file = Arc::clone(flush.file.shared());
        let index = slots.insert(flush, Owner::default());
        assert_eq!(file.loss().flushes_to_await(), None);
        slots.submit(index, now);
        let number = file.loss().flushes_to_await();
        slots.submit(index, now);
        assert!(number.is_some() && file.loss().flushes_to_await() == number);
        slots.complete(index, -i64::from(libc::EIO), now, &stats);
        assert_eq!(file.loss().flushes_to_await(), None);
        assert!(file.loss().check().is_err());
    }

    #[test]
    fn lanes_see_the_memory_of_ops_and_of_no_foreign_op() {
        let mut slots = Slots::new(64);
        let memory = || Buffers::aligned(1024, 512);
        let op = slots.insert(op(memory()), Owner::default());
        let foreign = slots.insert_foreign(memory());
        let seen = |slot| {
            let lengths = slots.slots.ranges(slot).iter().map(|range| range.iov_len);
            (lengths.collect::<Vec<_>>(), slots.slots.bytes(slot))
        };
        assert_eq!(seen(op), (vec![1024], 1024));
        assert_eq!(seen(foreign), (vec![], 0));
        assert_eq!(seen(7), (vec![], 0));
    }

    #[test]
    fn a_completion_is_taken_once_and_its_slot_is_used_again() {
        let (mut slots, stats) = (Slots::new(64), Stats::default());
        let index = slots.insert(op(Buffers::empty()), Owner::default());
        let owner = TaskKey { home: 3, child: 4 };
        assert!(slots.take(index).is_none());
        assert!(slots.set_owner(index, Owner::Key(owner)).wakes_same(&Owner::default()));
        let woken = slots.complete(index, -i64::from(libc::ENOSPC), Instant::now(), &stats);
        assert_eq!(woken, Some(owner));
        let completion = slots.take(index).unwrap();
        assert_eq!(completion.result.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        assert!(slots.take(index).is_none());
        assert_eq!(slots.insert(op(Buffers::empty()), Owner::default()), index);
        assert_eq!(stats.read.errors.get(), 1);
    }
}
