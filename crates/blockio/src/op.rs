//! Ops, completions and the slot table: who owns what while the kernel has it.
//!
//! # Why the kernel never writes to memory that is gone
//!
//! A future can be dropped at any time; an operation that the kernel has started cannot be taken
//! back. So a future never lends memory to the kernel. It gives its [`Op`] away, to a slot:
//!
//! 1. [`Slots::insert`] moves the op in. From now on the slot owns the file and the [`Buffers`],
//!    and the buffers own whatever keeps their memory mapped.
//! 2. An engine hands the kernel (or a pool thread) addresses found in that slot, and the slot's
//!    index as the token to come back with.
//! 3. [`Slots::complete`] stores the result. Only from then on can the op leave its slot, through
//!    [`Slots::take`] for a future that still waits, or by being dropped on the spot when nobody
//!    does ([`Slots::abandon`] came first).
//!
//! The iovec array itself lies on the heap and does not move when the slot table grows. So an
//! address that the kernel was given stays good until that op's completion, whatever futures,
//! tasks, queues or connections come and go. Engines and pool threads point here in their SAFETY
//! comments; `tests::an_abandoned_op_keeps_its_memory_until_it_completes` is the test of it.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use crate::buf::Buffers;
use crate::engine::EngineKind;
pub use crate::io_file::{FileRef, IoFile};
use crate::io_thread::Io;
use crate::lane::{Admission, Lanes, Units};
pub use crate::open_file::OpenFile;
use crate::stats::{OpStats, Stats, nanoseconds};
use crate::task::TaskKey;

/// What the kernel is asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpKind {
    /// Fill the buffers from the file.
    Read,
    /// Write the buffers to the file.
    Write {
        /// Whether the data must be on stable storage before the op completes (`RWF_DSYNC`).
        fua: bool,
    },
    /// Bring all completed writes to stable storage (fdatasync).
    Flush,
    /// `fallocate` with these `FALLOC_FL_*` flags over `len` bytes.
    Fallocate {
        /// Mode flags.
        mode: libc::c_int,
        /// Bytes.
        len: u64,
    },
    /// `BLKDISCARD` over `len` bytes.
    DiscardBlocks {
        /// Bytes.
        len: u64,
    },
    /// `BLKZEROOUT` over `len` bytes.
    ZeroBlocks {
        /// Bytes.
        len: u64,
    },
}

impl OpKind {
    /// Whether it moves data. Everything else is slow, and seldom.
    #[inline]
    pub(crate) fn is_transfer(self) -> bool {
        matches!(self, Self::Read | Self::Write { .. })
    }

    /// What the log calls it.
    pub(crate) fn noun(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write { .. } => "write",
            Self::Flush => "flush",
            Self::Fallocate { .. } => "discard or zeroing",
            Self::DiscardBlocks { .. } => "discard",
            Self::ZeroBlocks { .. } => "zeroing",
        }
    }
}

/// One kernel operation.
#[derive(Debug)]
pub struct Op {
    /// What to do.
    pub kind: OpKind,
    /// Where.
    pub file: FileRef,
    /// From which byte on.
    pub offset: u64,
    /// The data, for reads and writes.
    pub buffers: Buffers,
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
    /// Whether all of `wanted` bytes were moved.
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
    /// As `Pending`, but nobody waits for the result any more.
    Abandoned,
    /// The result (a negative errno, or bytes) waits to be taken.
    Done(i64),
}

struct Slot {
    state: State,
    owner: TaskKey,
    op: Option<Op>,
    submitted: Option<Instant>,
    /// What the op counts as in its lane; 0 while it is not with the engine.
    units: u32,
}

/// The homes of all ops of one IoThread that have not completed.
pub(crate) struct Slots {
    slots: Table,
    free: Vec<u32>,
    pub(crate) lanes: Lanes,
}

#[derive(Default)]
struct Table(Vec<Slot>);

/// What a slot's op is to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    /// The engine is to queue it.
    Queue,
    /// It waits in its lane.
    Wait,
    /// It is to be completed with an error, for its IoThread has ended.
    Cancel,
}

/// A system call's view of an op: everything that the kernel wants to know.
#[derive(Clone, Copy)]
pub(crate) struct OpView {
    pub(crate) kind: OpKind,
    pub(crate) fd: RawFd,
    /// The index under which a ring has the file registered; negative if it has not.
    pub(crate) registered: i32,
    pub(crate) offset: u64,
    pub(crate) iovecs: *const libc::iovec,
    pub(crate) iovecs_len: usize,
}

impl Units for Table {
    fn nature(&self, slot: u32) -> (bool, usize) {
        let op = self.0.get(slot as usize).and_then(|slot| slot.op.as_ref());
        op.map_or((true, 0), |op| (op.kind.is_transfer(), op.buffers.bytes()))
    }

    fn set(&mut self, slot: u32, units: u32) {
        if let Some(slot) = self.0.get_mut(slot as usize) {
            slot.units = units;
        }
    }
}

impl Slots {
    pub(crate) fn new(engine: EngineKind, depth: u32) -> Self {
        Self { slots: Table::default(), free: Vec::new(), lanes: Lanes::new(engine, depth) }
    }

    /// As [`insert`](Self::insert), and says what is to become of the op.
    #[inline]
    pub(crate) fn start(&mut self, op: Op, owner: TaskKey) -> (u32, Start) {
        let (lane, kind, bytes) = (op.file.lane(), op.kind, op.buffers.bytes());
        let index = self.insert(op, owner);
        let start = match self.lanes.admit(lane, index, kind, bytes) {
            Admission::Now(units) => {
                self.slots.0[index as usize].units = units;
                Start::Queue
            }
            Admission::Later => Start::Wait,
            Admission::Never => Start::Cancel,
        };
        (index, start)
    }

    /// Answers an op that never went anywhere.
    pub(crate) fn cancel(&mut self, index: u32) {
        if let Some(slot) = self.slots.0.get_mut(index as usize) {
            slot.state = State::Done(-i64::from(libc::ECANCELED));
        }
    }

    /// An op that waited in its lane and is to be queued now.
    pub(crate) fn next_from_lanes(&mut self) -> Option<u32> {
        self.lanes.next(&mut self.slots)
    }

    /// Moves `op` into a free slot; `owner` is woken when it completes.
    pub(crate) fn insert(&mut self, op: Op, owner: TaskKey) -> u32 {
        let slot = Slot { state: State::Pending, owner, op: Some(op), submitted: None, units: 0 };
        if let Some(index) = self.free.pop() {
            self.slots.0[index as usize] = slot;
            return index;
        }
        self.slots.0.push(slot);
        u32::try_from(self.slots.0.len() - 1).unwrap_or_else(|_| unreachable!("2^32 ops at once"))
    }

    /// The kind of the op in slot `index`.
    #[inline]
    pub(crate) fn kind(&self, index: u32) -> Option<OpKind> {
        self.slots.0.get(index as usize)?.op.as_ref().map(|op| op.kind)
    }

    /// The file of the op in slot `index`.
    pub(crate) fn file(&self, index: u32) -> Option<&OpenFile> {
        self.slots.0.get(index as usize)?.op.as_ref().map(|op| op.file.file())
    }

    fn pending(&self) -> impl Iterator<Item = (&Slot, &Op)> {
        let pending = |slot: &&Slot| matches!(slot.state, State::Pending | State::Abandoned);
        self.slots.0.iter().filter(pending).filter_map(|slot| Some((slot, slot.op.as_ref()?)))
    }

    /// Ops that were submitted and have not completed: file, kind, and when they were submitted.
    pub(crate) fn submitted(&self) -> impl Iterator<Item = (&Arc<OpenFile>, OpKind, Instant)> {
        self.pending().filter_map(|(slot, op)| Some((op.file.shared(), op.kind, slot.submitted?)))
    }

    /// How many ops of `file` have not completed, those in its lane included.
    pub(crate) fn waiting_for(&self, file: &Arc<OpenFile>) -> usize {
        self.pending().filter(|(_, op)| Arc::ptr_eq(op.file.shared(), file)).count()
    }

    /// What to tell the kernel about the op in slot `index`; notes the time of its submit.
    pub(crate) fn view(&mut self, index: u32, now: Instant) -> Option<OpView> {
        let slot = self.slots.0.get_mut(index as usize)?;
        slot.submitted = Some(now);
        let op = slot.op.as_ref()?;
        let iovecs = op.buffers.iovecs();
        Some(OpView {
            kind: op.kind,
            fd: op.file.as_raw_fd(),
            registered: op.file.registered(),
            offset: op.offset,
            iovecs: iovecs.as_ptr(),
            iovecs_len: iovecs.len().min(crate::buf::IOVECS_MAX),
        })
    }

    /// Stores the result of slot `index` and counts it. Returns the task to wake, if any waits.
    pub(crate) fn complete(
        &mut self,
        index: u32,
        result: i64,
        now: Instant,
        stats: &Stats,
    ) -> Option<TaskKey> {
        let slot = self.slots.0.get_mut(index as usize)?;
        let op = slot.op.as_ref()?;
        if result < 0 {
            op.file.op_failed(op.kind, errno_of(result));
        }
        if slot.units > 0 {
            self.lanes.leave(op.file.lane(), slot.units, op.kind);
        }
        record(stats_of(stats, op.kind), result, slot.submitted.map(|then| now - then));
        match slot.state {
            State::Pending => {
                slot.state = State::Done(result);
                Some(slot.owner)
            }
            State::Abandoned => {
                self.release(index);
                None
            }
            State::Free | State::Done(_) => None,
        }
    }

    /// Takes the completion of slot `index` out, or makes `owner` the one to wake later.
    pub(crate) fn take(&mut self, index: u32, owner: TaskKey) -> Option<Completion> {
        let slot = self.slots.0.get_mut(index as usize)?;
        slot.owner = owner;
        let State::Done(result) = slot.state else {
            return None;
        };
        let op = self.release(index)?;
        Some(Completion { result: result_of(result), buffers: op.buffers })
    }

    /// Says that nobody waits for slot `index` any more. Its op stays until it has completed.
    pub(crate) fn abandon(&mut self, index: u32) {
        match self.slots.0.get_mut(index as usize).map(|slot| &mut slot.state) {
            Some(state @ State::Pending) => *state = State::Abandoned,
            Some(State::Done(_)) => drop(self.release(index)),
            _ => {}
        }
    }

    /// Ops in slots: queued, in the kernel, or completed and not yet taken.
    pub(crate) fn occupied(&self) -> usize {
        self.slots.0.len() - self.free.len()
    }

    fn release(&mut self, index: u32) -> Option<Op> {
        let slot = &mut self.slots.0[index as usize];
        slot.state = State::Free;
        self.free.push(index);
        slot.op.take()
    }
}

/// An op on its way. Dropping it does not take the op back: its slot keeps everything that the
/// kernel uses until the completion.
pub struct OpFuture<'a> {
    io: &'a Io,
    state: OpState,
}

enum OpState {
    New(Op),
    Waiting(u32),
    Taken,
}

impl<'a> OpFuture<'a> {
    pub(crate) fn new(io: &'a Io, op: Op) -> Self {
        Self { io, state: OpState::New(op) }
    }
}

impl Future for OpFuture<'_> {
    type Output = Completion;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Completion> {
        let slot = match std::mem::replace(&mut self.state, OpState::Taken) {
            OpState::New(op) => self.io.start_op(op),
            OpState::Waiting(slot) => slot,
            OpState::Taken => return Poll::Pending,
        };
        if let Some(completion) = self.io.take_completion(slot) {
            return Poll::Ready(completion);
        }
        self.state = OpState::Waiting(slot);
        Poll::Pending
    }
}

impl Drop for OpFuture<'_> {
    fn drop(&mut self) {
        if let OpState::Waiting(slot) = self.state {
            self.io.abandon_op(slot);
        }
    }
}

/// A kernel result as Rust has it.
fn result_of(result: i64) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(errno_of(result)))
}

/// The errno in a result that is negative.
fn errno_of(result: i64) -> i32 {
    i32::try_from(-result).unwrap_or(libc::EIO)
}

fn stats_of(stats: &Stats, kind: OpKind) -> &OpStats {
    match kind {
        OpKind::Read => &stats.read,
        OpKind::Write { .. } => &stats.write,
        OpKind::Flush => &stats.flush,
        _ => &stats.deallocate,
    }
}

fn record(stats: &OpStats, result: i64, latency: Option<std::time::Duration>) {
    stats.ops.add(1);
    match u64::try_from(result) {
        Ok(bytes) => stats.bytes.add(bytes),
        Err(_) => stats.errors.add(1),
    }
    if let Some(latency) = latency {
        stats.latency_ns.record(nanoseconds(latency));
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
        let file = IoFile::alone(Arc::new(file.into()));
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
        let owner = Rc::new(Canary(Rc::clone(&gone)));
        // SAFETY: the list has no ranges.
        let buffers = unsafe { Buffers::from_raw_parts(Vec::new(), 0, owner) };
        let (mut slots, stats) = (Slots::new(EngineKind::Threads, 64), Stats::default());
        let index = slots.insert(op(buffers), TaskKey::default());
        slots.abandon(index);
        assert!(!gone.get(), "the memory went while the op was pending");
        assert_eq!(slots.occupied(), 1);
        assert_eq!(slots.complete(index, 0, Instant::now(), &stats), None);
        assert!(gone.get(), "the memory stayed after the completion");
        assert_eq!(slots.occupied(), 0);
    }

    #[test]
    fn a_completion_is_taken_once_and_its_slot_is_used_again() {
        let (mut slots, stats) = (Slots::new(EngineKind::Threads, 64), Stats::default());
        let index = slots.insert(op(Buffers::empty()), TaskKey::default());
        assert!(slots.take(index, TaskKey::default()).is_none());
        let owner = TaskKey { task: 3, child: 4 };
        assert!(slots.take(index, owner).is_none());
        let woken = slots.complete(index, -i64::from(libc::ENOSPC), Instant::now(), &stats);
        assert_eq!(woken, Some(owner));
        let completion = slots.take(index, owner).unwrap();
        assert_eq!(completion.result.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        assert!(slots.take(index, owner).is_none());
        assert_eq!(slots.insert(op(Buffers::empty()), owner), index);
        assert_eq!(stats.read.errors.get(), 1);
    }
}
