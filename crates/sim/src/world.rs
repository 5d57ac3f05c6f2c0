//! The simulated kernel: a clock, future events, disks, and all faults.

mod death;
mod hung;
mod kernel;
mod power;
mod turn;

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::fmt;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::time::Instant;

use blockio::engine::kernel::sim::{KernelOp, Signal, SqThread};
use blockio::op::OpKind;
use iomem::fits;

use crate::content::{SECTOR, initial};
use crate::device::{Answer, Device};
use crate::failure::Failure;
use crate::faults::{Class, Injected, op_len};
use crate::plan::Plan;
use crate::rng::Rng;
use death::{Death, Orphan};
use turn::Turn;
pub(crate) use turn::{Actor, Polls, TurnEnd};

/// The counts that the engines should have.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Counts {
    pub(crate) started: u64,
    pub(crate) rejected: u64,
    /// Tasks of threads, each of which completes its own op.
    pub(crate) threads: u64,
    /// Discards that io_uring could not do, and that had to come again.
    pub(crate) discards_twice: u64,
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A part of an op takes effect: bytes from, to.
    Effect(u64, usize, usize),
    Answer(u64),
    Signal(u64),
    /// A submission thread of io_uring checks for entries.
    SqThread(u64),
    /// A thread works.
    Thread(u64),
}

/// A disk of the simulated kernel.
struct Disk {
    /// The plan of the disk's device.
    plan: Plan,
    /// The descriptor that stands for the disk.
    fd: RawFd,
    device: Device,
    hangs_until: u64,
    /// The disk answers EAGAIN for ever.
    is_stuck: bool,
    injected: Vec<Injected>,
    /// The time of the first error that means a loss: of a flush, or of a write that had to be
    /// stable while earlier writes were not.
    lost_at: Option<u64>,
    /// Ops that the disk does not answer while it hangs.
    held: Option<Vec<u64>>,
}

/// An op in the simulated kernel.
struct Running {
    op: KernelOp,
    disk: usize,
    begin: u64,
    /// Bytes that the op moves.
    moved: usize,
    result: i64,
    error: Option<Class>,
}

/// The most lines of a trace.
const TRACE_LINES_MAX: u32 = 5000;

struct Inner {
    rng: Rng,
    disks: Vec<Disk>,
    ops: BTreeMap<u64, Running>,
    signals: BTreeMap<u64, Signal>,
    sq_threads: BTreeMap<u64, SqThread>,
    threads: BTreeMap<u64, Box<dyn FnOnce()>>,
    /// Time, a random number that orders events of the same time, and the event.
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    next_id: u64,
    refusals_to_come: u64,
    /// Requests to the kernel have no effect: the power is off, or their daemon is dead.
    is_void: bool,
    orphans: BTreeMap<u64, Orphan>,
    failure: Option<Failure>,
    counts: Counts,
}

type Interleaver = Rc<dyn Fn(Actor)>;

pub(crate) struct World {
    plan: Plan,
    start: Instant,
    /// Nanoseconds since `start`.
    now: Cell<u64>,
    sequence: Cell<u64>,
    interleaver: RefCell<Option<Interleaver>>,
    /// Lines of the trace that may still be printed: a run without an end has too many.
    traced: Cell<u32>,
    turn: Turn,
    polls: Cell<Polls>,
    death: Cell<Death>,
    inner: RefCell<Inner>,
}

impl World {
    /// A world with these disks: the plans of their devices, and the descriptors that stand for
    /// them.
    pub(crate) fn new(plan: &Plan, disks: &[(Plan, RawFd)], traced: bool) -> Self {
        let disk = |(index, (plan, fd)): (usize, &(Plan, RawFd))| {
            let end = plan.sectors().saturating_sub(plan.cut_sectors).max(1);
            let device = Device::new(plan.sectors(), end, initial(index));
            let (plan, fd) = (plan.clone(), *fd);
            let held = (plan.hangs > 0).then(Vec::new);
            Disk {
                plan,
                fd,
                device,
                hangs_until: 0,
                is_stuck: false,
                injected: Vec::new(),
                lost_at: None,
                held,
            }
        };
        let inner = Inner {
            rng: Rng::new(plan.seed ^ plan.schedule << 40, 2),
            disks: disks.iter().enumerate().map(disk).collect(),
            ops: BTreeMap::new(),
            signals: BTreeMap::new(),
            sq_threads: BTreeMap::new(),
            threads: BTreeMap::new(),
            events: BinaryHeap::new(),
            next_id: 1,
            refusals_to_come: 0,
            is_void: false,
            orphans: BTreeMap::new(),
            failure: None,
            counts: Counts::default(),
        };
        Self {
            plan: plan.clone(),
            start: Instant::now(),
            now: Cell::new(0),
            sequence: Cell::new(1),
            interleaver: RefCell::new(None),
            turn: Turn::default(),
            polls: Cell::default(),
            death: Cell::default(),
            traced: Cell::new(if traced { TRACE_LINES_MAX } else { 0 }),
            inner: RefCell::new(inner),
        }
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The next number in the order of all actions.
    pub(crate) fn tick(&self) -> u64 {
        self.sequence.set(self.sequence.get() + 1);
        self.sequence.get()
    }

    pub(crate) fn trace(&self, what: impl FnOnce() -> String) {
        let traced = self.traced.get();
        if traced > 0 {
            self.traced.set(traced - 1);
            let micros = self.now.get() / 1000;
            println!("{:>6} {micros:>8} us  {}", self.sequence.get(), what());
        }
    }

    pub(crate) fn set_interleaver(&self, interleaver: Option<Interleaver>) {
        *self.interleaver.borrow_mut() = interleaver;
    }

    /// Ends the run with a failure, unless it has one.
    pub(crate) fn fail(&self, failure: Failure) {
        self.inner.borrow_mut().failure.get_or_insert(failure);
    }

    pub(crate) fn failure(&self) -> Option<Failure> {
        self.inner.borrow().failure.clone()
    }

    /// The time of the first loss of data on this disk, as reported by the kernel.
    pub(crate) fn lost_at(&self, disk: usize) -> Option<u64> {
        self.inner.borrow().disks[disk].lost_at
    }

    /// Forgets the loss, when the file of this disk is opened again.
    pub(crate) fn forget_loss(&self, disk: usize) {
        self.inner.borrow_mut().disks[disk].lost_at = None;
    }

    /// Errors that this disk has injected.
    pub(crate) fn injected(&self, disk: usize) -> Vec<Injected> {
        self.inner.borrow().disks[disk].injected.clone()
    }

    pub(crate) fn counts(&self) -> Counts {
        self.inner.borrow().counts
    }

    /// The present content of a sector of a disk.
    pub(crate) fn content(&self, disk: usize, sector: u64) -> [u8; SECTOR] {
        *self.inner.borrow().disks[disk].device.content(sector)
    }

    /// The time of the next event.
    pub(crate) fn next_event(&self) -> Option<u64> {
        self.inner.borrow().events.peek().map(|Reverse((time, ..))| *time)
    }

    pub(crate) fn nanoseconds(&self, when: Instant) -> u64 {
        let since = when.saturating_duration_since(self.start);
        fits(since.as_nanos(), "a time in nanoseconds")
    }

    pub(crate) fn advance_to(&self, time: u64) {
        self.now.set(self.now.get().max(time));
    }

    pub(crate) fn now_nanoseconds(&self) -> u64 {
        self.now.get()
    }

    /// Advances time to the next event and performs it. Returns false if there is none.
    pub(crate) fn run_event(&self) -> bool {
        let Some(Reverse((time, _, event))) = self.inner.borrow_mut().events.pop() else {
            return false;
        };
        self.advance_to(time);
        match event {
            Event::Effect(id, from, to) => self.effect(id, from, to),
            Event::Answer(id) => self.answer(id),
            Event::SqThread(id) => self.sq_thread(id),
            Event::Thread(id) => {
                let work = self.inner.borrow_mut().threads.remove(&id);
                self.trace(|| format!("kernel: thread {id} runs"));
                if let Some(work) = work {
                    work();
                }
            }
            Event::Signal(id) => {
                let signal = self.inner.borrow_mut().signals.remove(&id);
                self.trace(|| format!("kernel: the eventfd for op {id} is written"));
                if let Some(signal) = signal {
                    signal.send();
                }
            }
        }
        true
    }

    /// Drops ops and eventfds, which refer to this world.
    pub(crate) fn clear(&self) {
        self.set_interleaver(None);
        let mut inner = self.inner.borrow_mut();
        inner.events.clear();
        inner.sq_threads.clear();
        let threads = std::mem::take(&mut inner.threads);
        let _ = (std::mem::take(&mut inner.ops), std::mem::take(&mut inner.signals));
        drop((inner, threads));
    }

    fn effect(&self, id: u64, from: usize, to: usize) {
        let Inner { ops, disks, orphans, .. } = &mut *self.inner.borrow_mut();
        let Some(Running { op, disk, .. }) = ops.get(&id) else {
            if let Some(orphan) = orphans.get(&id) {
                orphan.take_effect(&mut disks[orphan.disk].device, id, from, to);
            }
            return;
        };
        let device = &mut disks[*disk].device;
        let offset = op.offset() + from as u64;
        self.trace(|| format!("kernel: op {id} moves its bytes {from} to {to}"));
        match op.kind() {
            OpKind::Read => {
                let mut bytes = vec![0; to - from];
                device.read(offset, &mut bytes);
                op.buffers().copy_from(from, &bytes);
            }
            OpKind::Write { .. } => {
                let mut bytes = vec![0; to - from];
                op.buffers().copy_to(from, &mut bytes);
                device.write(offset, &bytes, id);
            }
            OpKind::Flush => {}
            _ => device.write(offset, &vec![0; to - from], id),
        }
    }

    fn answer(&self, id: u64) {
        let now = self.tick();
        let mut inner = self.inner.borrow_mut();
        let Inner { ops, disks, rng, counts, is_void, .. } = &mut *inner;
        let Some(Running { op, disk, begin, mut result, error, .. }) = ops.remove(&id) else {
            drop(inner);
            return self.end_orphan(id, now);
        };
        let Disk { device, injected, lost_at, .. } = &mut disks[disk];
        let (kind, offset, len) = (op.kind(), op.offset(), op_len(&op));
        let mut is_lost = false;
        if *is_void {
            result = -i64::from(libc::EIO);
        } else {
            match kind {
                OpKind::Flush if result == 0 => device.flush(begin, rng),
                OpKind::Flush | OpKind::Write { fua: true } if result == -i64::from(libc::EIO) => {
                    is_lost = device.fail_flush(rng) || kind == OpKind::Flush;
                    device.answered(offset, len, id, now, Answer::Error);
                }
                OpKind::Read | OpKind::Flush => {}
                _ => {
                    let answer = match kind {
                        _ if result < 0 => Answer::Error,
                        OpKind::Write { fua: true } => Answer::Durable,
                        _ => Answer::Done,
                    };
                    device.answered(offset, len, id, now, answer);
                }
            }
        }
        let bytes = u64::try_from(result).unwrap_or(0);
        match kind {
            OpKind::Read => counts.read_bytes += bytes,
            OpKind::Write { .. } => counts.written_bytes += bytes,
            OpKind::DiscardBlocks { .. } if op.is_ring_entry() => {
                counts.discards_twice += u64::from(result == -i64::from(libc::EOPNOTSUPP));
            }
            _ => {}
        }
        if let Some(class) = error.filter(|_| !*is_void) {
            // Transient errors are tried again, so often that requests may come between.
            let must_fail = result < 0 && result != -i64::from(libc::EAGAIN);
            let refuses = result == -i64::from(libc::EINVAL);
            let loses = matches!(kind, OpKind::Flush | OpKind::Write { fua: true });
            if is_lost {
                lost_at.get_or_insert(now);
            }
            let len = len as u64;
            let when = now;
            injected.push(Injected { must_fail, class, when, offset, len, refuses, loses });
        }
        self.trace(|| format!("kernel: op {id} is answered with {result}"));
        let signal = op.answer(result);
        if inner.is_void || !inner.rng.chance(self.plan.late_signal) {
            signal.send();
        } else {
            let delay = inner.rng.below(self.plan.latency_us * 1000) + 1;
            inner.signals.insert(id, signal);
            self.schedule(&mut inner, delay, Event::Signal(id));
        }
    }

    /// Lets a submission thread take some entries, or sleep if there are none.
    fn sq_thread(&self, id: u64) {
        let (thread, most, tires) = {
            let Inner { rng, sq_threads, .. } = &mut *self.inner.borrow_mut();
            let Some(thread) = sq_threads.remove(&id) else { return };
            (thread, rng.pick(&[1, 2, 1000]), rng.chance(600))
        };
        self.turn.is_sq_thread.set(true);
        let taken = thread.work(self, most);
        self.turn.is_sq_thread.set(false);
        let Some(taken) = taken else { return };
        self.trace(|| format!("kernel: submission thread {id} takes {taken} entries"));
        if taken == 0 && tires && thread.sleep() {
            self.trace(|| format!("kernel: submission thread {id} sleeps"));
            return;
        }
        let inner = &mut *self.inner.borrow_mut();
        inner.sq_threads.insert(id, thread);
        let delay = inner.rng.between(1, self.plan.latency_us * 1000);
        self.schedule(inner, delay, Event::SqThread(id));
    }

    fn schedule(&self, inner: &mut Inner, delay: u64, event: Event) {
        let tie = inner.rng.next();
        inner.events.push(Reverse((self.now.get() + delay, tie, event)));
    }

    /// Cuts the bytes that an op moves into parts with separate times.
    fn schedule_effects(&self, inner: &mut Inner, id: u64, len: usize, delay: u64) {
        let parts = if inner.rng.chance(self.plan.tear) { inner.rng.between(1, 4) } else { 1 };
        let mut from = 0;
        for part in 1..=parts {
            let share = len * fits::<_, usize>(part, "a part")
                / fits::<_, usize>(parts, "a number of parts");
            let to = if part == parts { len } else { share / SECTOR * SECTOR };
            if to > from {
                let when = inner.rng.below(delay);
                self.schedule(inner, when, Event::Effect(id, from, to));
            }
            from = to.max(from);
        }
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("now", &self.now).finish_non_exhaustive()
    }
}
