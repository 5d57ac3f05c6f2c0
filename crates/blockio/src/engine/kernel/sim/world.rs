//! The substitute for the kernel and for time, and the ops that it gets.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::{Rc, Weak};
use std::thread;
use std::time::Instant;

use libc::iovec;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::clock::{self, Hooks};
use crate::executor::task::as_other_thread;
use crate::file::op_kind::OpKind;
use iomem::{Buffers, Memory};

/// A substitute for the kernel and for time.
pub trait World {
    /// The time now.
    fn now(&self) -> Instant;

    /// Lets the rest of the world act at this point: completions may be posted, eventfds written.
    fn preempt(&self) {}

    /// The form of the completion ring for `depth` ops. Not called without rings.
    fn ring(&self, _depth: u32) -> RingSetup {
        unreachable!("this world has no rings")
    }

    /// Decides about a submit of `count` entries, the first for descriptor `_first`, with room for
    /// `room` of them. Returns the number to take, from 1 to the lesser of both.
    ///
    /// # Errors
    ///
    /// The errno with which the simulated system call is to fail; it takes nothing then.
    fn admit(&self, _first: RawFd, count: usize, room: usize) -> Result<usize, libc::c_int> {
        Ok(count.min(room))
    }

    /// Returns true if io_uring is to end a multishot poll with the event that it has just seen.
    fn ends_poll(&self) -> bool {
        false
    }

    /// Takes an op, which must be [answered](KernelOp::answer) at some time, perhaps before this
    /// returns. Returns false if the op was a bad entry of io_uring, and is answered.
    fn start(&self, op: KernelOp) -> bool;

    /// Called in busy-polling: time must advance, and the rest of the world may act.
    fn spin(&self);

    /// Lets a submission thread of io_uring run. At some time it must [work](SqThread::work), until
    /// it [sleeps](SqThread::sleep) or is gone. Called again when the thread is woken. Not called
    /// without submission threads.
    fn run_sq_thread(&self, _thread: SqThread) {
        unreachable!("this world has no submission threads")
    }

    /// Runs `work` at some time as a thread of its own.
    fn run_thread(&self, work: Box<dyn FnOnce()>) {
        work();
    }

    /// Advances time until `is_over` returns true, or `deadline` has come. May return earlier, as
    /// after a signal.
    fn sleep(&self, deadline: Option<Instant>, is_over: &dyn Fn() -> bool);
}

/// The form of a completion ring.
#[derive(Debug, Clone, Copy)]
pub struct RingSetup {
    /// Places for events, at least 2. One is always left empty.
    pub events: u32,
    /// True if its header is the one that the engine knows.
    pub is_known: bool,
    /// True if the kernel has `IOCB_CMD_FDSYNC`.
    pub has_fdsync: bool,
    /// True if completions of io_uring become visible only when the kernel is entered.
    pub defers: bool,
    /// True if devices discard through io_uring.
    pub has_uring_cmd: bool,
    /// True if a bad entry does not end a submit of io_uring.
    pub submits_all: bool,
    /// Submission entries of io_uring with a submission thread; `None` for as many as are asked
    /// for.
    pub sq_entries: Option<u32>,
}

thread_local! {
    static WORLD: RefCell<Option<Rc<dyn World>>> = const { RefCell::new(None) };
    static PREEMPTING: Cell<bool> = const { Cell::new(false) };
}

/// Simulates the calling thread's kernel with `world` from now on.
#[must_use = "the world goes when this is dropped"]
pub fn install(world: Rc<dyn World>) -> Installed {
    WORLD.set(Some(world));
    clock::simulate(Some(Hooks { now, spin, yield_to_simulation: preempt }));
    Installed(())
}

/// Keeps a [`World`] installed. Drop it on the thread that installed it, after its IoThreads.
#[derive(Debug)]
pub struct Installed(());

impl Drop for Installed {
    fn drop(&mut self) {
        clock::simulate(None);
        WORLD.set(None);
    }
}

pub(super) fn world() -> Option<Rc<dyn World>> {
    WORLD.with_borrow(Clone::clone)
}

fn now() -> Option<Instant> {
    WORLD.with_borrow(|world| world.as_ref().map(|world| world.now()))
}

/// Lets the world act, unless this call comes from such an act.
fn preempt() {
    if let Some(world) = world()
        && !PREEMPTING.replace(true)
    {
        as_other_thread(|| world.preempt());
        PREEMPTING.set(false);
    }
}

fn spin() {
    if let Some(world) = world() {
        as_other_thread(|| world.spin());
    }
}

/// Gives the work of a thread to the simulated kernel, or to a real thread if nothing is simulated.
pub fn start_thread(name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
    match world() {
        Some(world) => world.run_thread(work),
        None => drop(thread::Builder::new().name(name.to_owned()).spawn(work)?),
    }
    Ok(())
}

/// Sleeps in simulated time until `fd` is readable or `deadline` has come. Returns the time-out for
/// the wait that follows, or `otherwise` if nothing is simulated here.
pub(in crate::engine) fn sleep(
    fd: &OwnedFd,
    deadline: Option<Instant>,
    otherwise: Option<Timespec>,
) -> Option<Timespec> {
    let Some(world) = world() else {
        return otherwise;
    };
    if deadline.is_none_or(|when| when > world.now()) {
        sleep_in(&*world, deadline, fd.as_fd());
    }
    Some(NOW)
}

/// Calls [`World::sleep`], which is over when `fd` is readable.
pub(super) fn sleep_in(world: &dyn World, deadline: Option<Instant>, fd: BorrowedFd<'_>) {
    as_other_thread(|| world.sleep(deadline, &|| is_readable(fd)));
}

pub(super) const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Returns true if `fd` is readable now.
#[must_use]
pub fn is_readable(fd: BorrowedFd<'_>) -> bool {
    poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&NOW)).is_ok_and(|n| n > 0)
}

/// An op in the simulated kernel.
pub struct KernelOp {
    kind: OpKind,
    fd: RawFd,
    offset: u64,
    buffers: Buffers,
    destination: Box<dyn Destination>,
}

/// The destination of the result of an op.
pub(super) trait Destination {
    /// Posts the result, bytes or a negative errno.
    fn post(self: Box<Self>, result: i64) -> Signal;

    /// Returns true if the op was an entry of io_uring.
    fn is_ring_entry(&self) -> bool {
        false
    }

    /// Returns true if the kernel does its part of the op in the submit.
    fn holds_submitter(&self) -> bool {
        true
    }
}

impl KernelOp {
    /// # Safety
    ///
    /// The iovecs must be readable now, and the memory that they name must stay until the op is
    /// answered.
    pub(super) unsafe fn new(
        kind: OpKind,
        fd: RawFd,
        offset: u64,
        iovecs: &[iovec],
        destination: Box<dyn Destination>,
    ) -> Self {
        // SAFETY: the caller promises that the memory stays, and nothing makes references to it.
        let buffers = unsafe { Buffers::from_raw_parts(iovecs.to_vec().into(), Memory::new(())) };
        Self { kind, fd, offset, buffers, destination }
    }

    /// The kind of the op.
    #[must_use]
    pub fn kind(&self) -> OpKind {
        self.kind
    }

    /// The descriptor of the file.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.fd
    }

    /// The first byte of the op in the file.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The memory to read into or to write from. Not to be used after the answer.
    #[must_use]
    pub fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// Returns true if the op was an entry of io_uring.
    #[must_use]
    pub fn is_ring_entry(&self) -> bool {
        self.destination.is_ring_entry()
    }

    /// Returns true if the kernel's part of the op takes the IoThread's time in the submit, and not
    /// the time of a pool thread.
    #[must_use]
    pub fn holds_submitter(&self) -> bool {
        self.destination.holds_submitter()
    }

    /// Posts the result, bytes or a negative errno, to the place that the engine harvests. Sending
    /// the signal afterwards writes the eventfd.
    #[must_use = "the loop may sleep until the signal is sent"]
    pub fn answer(self, result: i64) -> Signal {
        self.destination.post(result)
    }
}

/// The eventfd write that follows a completion.
#[must_use = "the loop may sleep until it is sent"]
pub struct Signal(Option<Box<dyn FnOnce()>>);

impl Signal {
    pub(super) fn new(write: impl FnOnce() + 'static) -> Self {
        Self(Some(Box::new(write)))
    }

    pub(super) fn none() -> Self {
        Self(None)
    }

    /// Writes the eventfd.
    pub fn send(self) {
        if let Some(write) = self.0 {
            write();
        }
    }
}

/// The submission thread of a ring of io_uring.
pub struct SqThread(Weak<dyn SubmissionRing>);

/// A ring whose entries a thread takes.
pub(super) trait SubmissionRing {
    /// Takes an entry, if there is one. `Some(false)` means that it is bad.
    fn take_entry(self: Rc<Self>, world: &dyn World) -> Option<bool>;

    /// Puts the thread to sleep if there are no entries, and must then be woken. Returns true if it
    /// sleeps.
    fn sleep(&self) -> bool;
}

impl SqThread {
    pub(super) fn new(ring: Weak<dyn SubmissionRing>) -> Self {
        Self(ring)
    }

    /// Takes at most `most` entries. Returns their number; `None` if the ring is gone.
    #[must_use]
    pub fn work(&self, world: &dyn World, most: usize) -> Option<usize> {
        let ring = self.0.upgrade()?;
        Some((0..most).take_while(|_| Rc::clone(&ring).take_entry(world).is_some()).count())
    }

    /// Goes to sleep if there are no entries, and must then be woken. Returns true if it sleeps or
    /// the ring is gone.
    #[must_use]
    pub fn sleep(&self) -> bool {
        self.0.upgrade().is_none_or(|ring| ring.sleep())
    }
}
