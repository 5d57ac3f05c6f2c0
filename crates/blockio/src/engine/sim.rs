//! A simulated kernel under the engines.
//!
//! A thread on which a [`World`] is [installed](install) has no kernel of its own for ops: whatever
//! an engine submits becomes a [`KernelOp`] of that world, which carries it out and answers it when
//! it likes, and whose clock is the only one. Engines, slots, disks and the loop are the real ones;
//! so are eventfds. Several IoThreads can live on one such OS thread, to be stepped with
//! [`Wait::Never`](crate::Wait::Never), or with [`Wait::ForEvent`](crate::Wait::ForEvent) if
//! [`World::sleep`] does not wait.
//!
//! A world that makes all its choices from a seed repeats a run from the same seed.

use std::cell::{Cell, RefCell};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use libc::iovec;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::aio_calls::{
    IOCB_CMD_FDSYNC, IOCB_CMD_PREAD, IOCB_CMD_PREADV, IOCB_CMD_PWRITE, IOCB_CMD_PWRITEV,
    IOCB_FLAG_RESFD, IoEvent, Iocb,
};
use super::io_uring::sim_ring::RingState;
pub use super::io_uring::sim_ring::SqThread;
use super::threads::{Job, Pool};
use crate::buf::Buffers;
use crate::op::OpKind;

/// What stands in for the kernel, and for time.
pub trait World {
    /// The time now.
    fn now(&self) -> Instant;

    /// The thread is at a point where others may act: completions may be posted, eventfds written.
    fn preempt(&self);

    /// How the completion ring for `depth` ops is to be.
    fn ring(&self, depth: u32) -> RingSetup;

    /// Decides about a submit of `count` entries, the first for descriptor `first`, with room for
    /// `room` of them: how many are taken, from 1 to the lesser of both, or an errno.
    ///
    /// # Errors
    ///
    /// The errno with which the simulated system call is to fail; it takes nothing then.
    fn admit(&self, first: RawFd, count: usize, room: usize) -> Result<usize, libc::c_int>;

    /// Whether io_uring is to end a multishot poll with the event that it has just seen.
    fn ends_poll(&self) -> bool;

    /// Takes an op. It must be [answered](KernelOp::answer) some time, maybe before this returns.
    /// False: it has been, because the entry of io_uring that it was is bad.
    fn start(&self, op: KernelOp) -> bool;

    /// The thread busy-polls: time must move on, and others may act.
    fn spin(&self);

    /// Lets a submission thread of io_uring run: some time it must [work](SqThread::work), until it
    /// [sleeps](SqThread::sleep) or is gone. It comes here again when it is woken.
    fn run_sq_thread(&self, thread: SqThread);

    /// Moves time on until `is_over` says so, or `deadline` has come. It may return earlier, as if
    /// a signal had come.
    fn sleep(&self, deadline: Option<Instant>, is_over: &dyn Fn() -> bool);
}

/// A completion ring to be.
#[derive(Debug, Clone, Copy)]
pub struct RingSetup {
    /// Places for events, at least 2. One is always left empty.
    pub events: u32,
    /// Whether its header is as the engine knows it.
    pub is_known: bool,
    /// Whether the kernel has `IOCB_CMD_FDSYNC`.
    pub has_fdsync: bool,
    /// Of io_uring: whether completions become visible only when the kernel is entered.
    pub defers: bool,
    /// Of io_uring: whether devices discard through the ring.
    pub has_uring_cmd: bool,
    /// Of io_uring: whether one bad entry does not end a submit.
    pub submits_all: bool,
    /// Of io_uring with a submission thread: submission entries, if not as many as are asked for.
    pub sq_entries: Option<u32>,
}

thread_local! {
    static WORLD: RefCell<Option<Rc<dyn World>>> = const { RefCell::new(None) };
    static PREEMPTING: Cell<bool> = const { Cell::new(false) };
}

/// Has the calling thread's kernel simulated by `world` from now on.
#[must_use = "the world goes when this is dropped"]
pub fn install(world: Rc<dyn World>) -> Installed {
    WORLD.set(Some(world));
    Installed(())
}

/// Keeps a [`World`] installed. Drop it on the thread that installed it, after its IoThreads.
#[derive(Debug)]
pub struct Installed(());

impl Drop for Installed {
    fn drop(&mut self) {
        WORLD.set(None);
    }
}

pub(super) fn world() -> Option<Rc<dyn World>> {
    WORLD.with_borrow(Clone::clone)
}

/// The simulated time, if there is one.
pub(crate) fn now() -> Option<Instant> {
    WORLD.with_borrow(|world| world.as_ref().map(|world| world.now()))
}

/// Lets the others act. What they do may come here again, which is one of them acting already.
pub(crate) fn preempt() {
    if let Some(world) = world()
        && !PREEMPTING.replace(true)
    {
        world.preempt();
        PREEMPTING.set(false);
    }
}

/// Lets simulated time pass, if there is such.
pub(crate) fn spin() {
    if let Some(world) = world() {
        world.spin();
    }
}

/// Sleeps in simulated time until `fd` is readable or `deadline` has come. Returns the time-out
/// for the look that follows, or `otherwise` if nothing is simulated here.
pub(crate) fn sleep(
    fd: &OwnedFd,
    deadline: Option<Instant>,
    otherwise: Option<Timespec>,
) -> Option<Timespec> {
    let Some(world) = world() else {
        return otherwise;
    };
    if deadline.is_none_or(|when| when > world.now()) {
        world.sleep(deadline, &|| is_readable(fd.as_fd()));
    }
    Some(NOW)
}

pub(super) const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Whether a look at `fd` would find something.
#[must_use]
pub fn is_readable(fd: BorrowedFd<'_>) -> bool {
    poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&NOW)).is_ok_and(|n| n > 0)
}

/// One op that the simulated kernel has.
pub struct KernelOp {
    kind: OpKind,
    fd: RawFd,
    offset: u64,
    buffers: Buffers,
    home: Home,
}

/// Where the answer of an op goes.
pub(super) enum Home {
    /// `wake` is written with the completion, if the op asks for that.
    Ring {
        context: SimContext,
        data: u64,
        wake: Option<Rc<OwnedFd>>,
    },
    Pool {
        pool: Arc<Pool>,
        slot: u32,
    },
    IoUring {
        ring: Rc<RingState>,
        user_data: u64,
    },
}

impl KernelOp {
    /// # Safety
    ///
    /// The iovecs must be readable now, and what they name must stay until the op is answered.
    pub(super) unsafe fn new(
        kind: OpKind,
        fd: RawFd,
        offset: u64,
        iovecs: &[iovec],
        home: Home,
    ) -> Self {
        // SAFETY: the caller says that the memory stays, and nobody makes references to it.
        let buffers = unsafe { Buffers::from_raw_parts(iovecs.to_vec(), 0, Rc::new(())) };
        Self { kind, fd, offset, buffers, home }
    }

    /// What to do.
    #[must_use]
    pub fn kind(&self) -> OpKind {
        self.kind
    }

    /// The file that it is for.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.fd
    }

    /// From which byte of the file on.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The memory to read into or to write from. Not to be used after the answer.
    #[must_use]
    pub fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// Whether it was an entry of io_uring.
    #[must_use]
    pub fn is_ring_entry(&self) -> bool {
        matches!(self.home, Home::IoUring { .. })
    }

    /// Posts the result, bytes or a negative errno, where the engine looks for it. The eventfd is
    /// written when the signal is sent, which must be later.
    #[must_use = "the loop may sleep until the signal is sent"]
    pub fn answer(self, result: i64) -> Signal {
        match self.home {
            Home::Ring { context, data, wake } => {
                context.post(data, result);
                Signal(wake.map(SignalTo::Ring))
            }
            Home::Pool { pool, slot } => {
                let first = pool.post(slot, result);
                Signal(first.then_some(SignalTo::Pool(pool)))
            }
            Home::IoUring { ring, user_data } => {
                ring.post(user_data, i32::try_from(result).unwrap_or(i32::MAX), 0);
                // The ring's own descriptor is readable now.
                Signal(None)
            }
        }
    }
}

/// The eventfd write that follows a completion.
#[must_use = "the loop may sleep until it is sent"]
pub struct Signal(Option<SignalTo>);

enum SignalTo {
    Ring(Rc<OwnedFd>),
    Pool(Arc<Pool>),
}

impl Signal {
    /// Writes the eventfd.
    pub fn send(self) {
        match self.0 {
            Some(SignalTo::Ring(wake)) => {
                // The counter cannot overflow in the life of a simulation.
                let _ = rustix::io::write(&*wake, &1u64.to_ne_bytes());
            }
            Some(SignalTo::Pool(pool)) => pool.wake(),
            None => {}
        }
    }
}

/// Hands jobs to the simulated kernel in place of pool threads. False when nothing is simulated.
pub(super) fn take_jobs(pool: &Arc<Pool>) -> bool {
    let Some(world) = world() else {
        return false;
    };
    while let Some(Job { slot, view }) = pool.take_job() {
        let iovecs: &[iovec] = match view.iovecs_len {
            0 => &[],
            // SAFETY: the slot owns the iovecs until its completion (see `op.rs`).
            len => unsafe { std::slice::from_raw_parts(view.iovecs, len) },
        };
        let home = Home::Pool { pool: Arc::clone(pool), slot };
        // SAFETY: the slot owns the memory until its completion (see `op.rs`).
        world.start(unsafe { KernelOp::new(view.kind, view.fd, view.offset, iovecs, home) });
    }
    true
}

/// A context of simulated Linux AIO. Clones are of the same context.
#[derive(Clone)]
pub(super) struct SimContext(Rc<Context>);

struct Context {
    world: Rc<dyn World>,
    setup: RingSetup,
    /// The header (8 words of 32 bits), then the events (8 words each).
    words: Box<[AtomicU32]>,
    in_kernel: Cell<u32>,
    wake: RefCell<Option<(RawFd, Rc<OwnedFd>)>>,
}

const HEADER_WORDS: usize = 8;
const EVENT_WORDS: usize = 8;
const WORD_NR: usize = 1;
const WORD_HEAD: usize = 2;
const WORD_TAIL: usize = 3;

impl SimContext {
    /// A context for `depth` ops, if the calling thread's kernel is simulated.
    pub(super) fn new(depth: u32) -> Option<Self> {
        let world = world()?;
        let setup = world.ring(depth);
        let count = HEADER_WORDS + setup.events as usize * EVENT_WORDS;
        let words: Box<[AtomicU32]> = (0..count).map(|_| AtomicU32::new(0)).collect();
        let magic = if setup.is_known { 0xa10a_10a1 } else { 0 };
        for (word, value) in [(WORD_NR, setup.events), (4, magic), (5, 1), (7, 32)] {
            words[word].store(value, Ordering::Relaxed);
        }
        let (in_kernel, wake) = (Cell::new(0), RefCell::new(None));
        Some(Self(Rc::new(Context { world, setup, words, in_kernel, wake })))
    }

    pub(super) fn ring_address(&self) -> usize {
        self.0.words.as_ptr().addr()
    }

    pub(super) fn has_fdsync(&self) -> bool {
        self.0.setup.has_fdsync
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        &self.0.words[index]
    }

    /// Events that the consumer has not freed.
    fn unread(&self) -> u32 {
        let (nr, head) = (self.0.setup.events, self.word(WORD_HEAD).load(Ordering::Acquire));
        // As the kernel does: whatever is written there, it stays within the ring.
        (self.word(WORD_TAIL).load(Ordering::Relaxed) + nr - head % nr) % nr
    }

    /// As `io_submit`.
    ///
    /// # Safety
    ///
    /// As that of [`AioContext::submit`](super::aio_calls::AioContext::submit).
    pub(super) unsafe fn submit(&self, iocbs: &[*mut Iocb]) -> Result<usize, libc::c_int> {
        preempt();
        let used = self.unread() + self.0.in_kernel.get();
        let room = (self.0.setup.events - 1).saturating_sub(used) as usize;
        // SAFETY: the caller says that the addresses are those of filled iocbs.
        let first = iocbs.first().map_or(-1, |&address| unsafe { (*address).fd });
        let taken = if room == 0 {
            Err(libc::EAGAIN)
        } else {
            self.0
                .world
                .admit(first, iocbs.len(), room)
                .map(|taken| taken.min(room).min(iocbs.len()))
        };
        for &address in &iocbs[..taken.unwrap_or(0)] {
            self.0.in_kernel.set(self.0.in_kernel.get() + 1);
            // SAFETY: the caller says that the address is that of a filled iocb.
            let iocb = unsafe { *address };
            // SAFETY: the caller says that the memory stays until the completion.
            self.0.world.start(unsafe { self.op(&iocb) });
        }
        preempt();
        taken
    }

    /// # Safety
    ///
    /// The memory that the iocb names must stay until the op is answered.
    unsafe fn op(&self, iocb: &Iocb) -> KernelOp {
        let fua = iocb.rw_flags & libc::RWF_DSYNC != 0;
        let kind = match iocb.opcode {
            IOCB_CMD_PREAD | IOCB_CMD_PREADV => OpKind::Read,
            IOCB_CMD_PWRITE | IOCB_CMD_PWRITEV => OpKind::Write { fua },
            IOCB_CMD_FDSYNC => OpKind::Flush,
            other => panic!("the engine submits an iocb with opcode {other}"),
        };
        let address = std::ptr::with_exposed_provenance_mut::<libc::c_void>(to_usize(iocb.buf));
        let single = [iovec { iov_base: address, iov_len: to_usize(iocb.nbytes) }];
        let iovecs: &[iovec] = match iocb.opcode {
            IOCB_CMD_FDSYNC => &[],
            IOCB_CMD_PREAD | IOCB_CMD_PWRITE => &single,
            // SAFETY: of a vectored iocb `buf` and `nbytes` are an array of iovecs.
            _ => unsafe {
                std::slice::from_raw_parts(address.cast_const().cast(), to_usize(iocb.nbytes))
            },
        };
        let wake = (iocb.flags & IOCB_FLAG_RESFD != 0).then(|| self.wake(iocb.resfd));
        let home = Home::Ring { context: self.clone(), data: iocb.data, wake };
        let offset = u64::try_from(iocb.offset).unwrap_or(u64::MAX);
        // SAFETY: the caller says that the memory stays until the completion.
        unsafe { KernelOp::new(kind, iocb.fd, offset, iovecs, home) }
    }

    /// The kernel holds the eventfd of an op itself, so that it may be closed meanwhile.
    fn wake(&self, fd: RawFd) -> Rc<OwnedFd> {
        let mut cached = self.0.wake.borrow_mut();
        if let Some((of, wake)) = &*cached
            && *of == fd
        {
            return Rc::clone(wake);
        }
        // SAFETY: the engine that submits has the eventfd open.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let wake = rustix::io::dup(borrowed).expect("the simulation has too many files open");
        let wake = Rc::new(wake);
        *cached = Some((fd, Rc::clone(&wake)));
        wake
    }

    /// Puts an event into the ring, then moves the tail.
    fn post(&self, data: u64, result: i64) {
        let (nr, tail) = (self.0.setup.events, self.word(WORD_TAIL).load(Ordering::Relaxed));
        assert!(self.unread() < nr - 1, "the completion ring overflows");
        let first = HEADER_WORDS + tail as usize * EVENT_WORDS;
        let event = [data, 0, result.cast_unsigned(), 0];
        let halves = event.iter().flat_map(|word| {
            let [a, b, c, d, e, f, g, h] = word.to_ne_bytes();
            [u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h])]
        });
        for (index, half) in halves.enumerate() {
            self.word(first + index).store(half, Ordering::Relaxed);
        }
        self.word(WORD_TAIL).store((tail + 1) % nr, Ordering::Release);
        self.0.in_kernel.set(self.0.in_kernel.get() - 1);
    }

    /// As `io_getevents` without a wait.
    pub(super) fn getevents<'a>(&self, events: &'a mut [IoEvent]) -> &'a [IoEvent] {
        let nr = self.0.setup.events;
        let count = events.len().min(self.unread() as usize);
        for event in &mut events[..count] {
            let head = self.word(WORD_HEAD).load(Ordering::Relaxed);
            let first = HEADER_WORDS + head as usize * EVENT_WORDS;
            let word = |index: usize| {
                let half = |index| u64::from(self.word(first + index).load(Ordering::Relaxed));
                half(2 * index) | half(2 * index + 1) << 32
            };
            *event = IoEvent { data: word(0), obj: 0, res: word(2).cast_signed(), res2: 0 };
            self.word(WORD_HEAD).store((head + 1) % nr, Ordering::Relaxed);
        }
        &events[..count]
    }
}

/// Addresses and lengths fit: engine `aio` is for 64-bit machines.
fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}
