//! Linux AIO of a simulated kernel (see `kernel/sim.rs`).

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};

use iomem::fits;
use libc::iovec;

use super::world::{Destination, KernelOp, RingSetup, Signal, World, world};
use crate::clock;
use crate::engine::kernel::abi::{
    IOCB_CMD_FDSYNC, IOCB_CMD_PREAD, IOCB_CMD_PREADV, IOCB_CMD_PWRITE, IOCB_CMD_PWRITEV,
    IOCB_FLAG_RESFD, IoEvent, Iocb,
};
use crate::error::Error;
use crate::file::op_kind::OpKind;

/// A context of simulated Linux AIO. Clones share it.
#[derive(Clone)]
pub(in crate::engine) struct AioContext(Rc<Context>);

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

impl AioContext {
    /// Sets up a context for `depth` ops.
    pub(in crate::engine) fn setup(depth: u32) -> Result<Self, Error> {
        let error = || Error::AioUnavailable { error: io::ErrorKind::Unsupported.into() };
        let world = world().ok_or_else(error)?;
        let setup = world.ring(depth);
        let count = HEADER_WORDS + setup.events as usize * EVENT_WORDS;
        let words: Box<[AtomicU32]> = (0..count).map(|_| AtomicU32::new(0)).collect();
        let magic = if setup.is_known { 0xa10a_10a1 } else { 0 };
        for (word, value) in [(WORD_NR, setup.events), (4, magic), (5, 1), (7, 32)] {
            words[word].store(value, Ordering::Relaxed);
        }
        let (in_kernel, wake) = (Cell::new(0), RefCell::new(None));
        Ok(Self(Rc::new(Context { world, setup, words, in_kernel, wake })))
    }

    pub(in crate::engine) fn ring_address(&self) -> usize {
        self.0.words.as_ptr().addr()
    }

    pub(in crate::engine) fn probe_fdsync(&self) -> bool {
        self.0.setup.has_fdsync
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        &self.0.words[index]
    }

    /// The number of events that the consumer has not freed.
    fn unread(&self) -> u32 {
        let (nr, head) = (self.0.setup.events, self.word(WORD_HEAD).load(Ordering::Acquire));
        // As in the kernel, any value of the head stays within the ring.
        (self.word(WORD_TAIL).load(Ordering::Relaxed) + nr - head % nr) % nr
    }

    /// Like `io_submit`.
    ///
    /// # Safety
    ///
    /// The same as for the real `AioContext::submit`.
    pub(in crate::engine) unsafe fn submit(
        &self,
        iocbs: &mut [*mut Iocb],
    ) -> Result<usize, libc::c_int> {
        clock::yield_to_simulation();
        let used = self.unread() + self.0.in_kernel.get();
        let room = (self.0.setup.events - 1).saturating_sub(used) as usize;
        // SAFETY: the caller promises that each address is that of a filled iocb.
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
            // SAFETY: the caller promises that the address is that of a filled iocb.
            let iocb = unsafe { *address };
            // SAFETY: the caller promises that the memory stays until the completion.
            self.0.world.start(unsafe { self.op(&iocb) });
        }
        clock::yield_to_simulation();
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
            // SAFETY: `buf` and `nbytes` of a vectored iocb are an array of iovecs.
            _ => unsafe {
                std::slice::from_raw_parts(address.cast_const().cast(), to_usize(iocb.nbytes))
            },
        };
        let wake = (iocb.flags & IOCB_FLAG_RESFD != 0).then(|| self.wake(iocb.resfd));
        let destination = RingDestination { context: self.clone(), data: iocb.data, wake };
        let offset = fits(iocb.offset, "the offset of an op");
        // SAFETY: the caller promises that the memory stays until the completion.
        unsafe { KernelOp::new(kind, iocb.fd, offset, iovecs, Box::new(destination)) }
    }

    /// Duplicates the eventfd of an op for the kernel, because the engine may close its own early.
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

    /// Like `io_getevents` without a wait.
    pub(in crate::engine) fn getevents<'a>(&self, events: &'a mut [IoEvent]) -> &'a [IoEvent] {
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

/// Converts addresses and lengths: engine `aio` is for 64-bit machines.
fn to_usize(value: u64) -> usize {
    fits(value, "an address or a length")
}

/// The destination of the result of an op.
struct RingDestination {
    context: AioContext,
    data: u64,
    /// The eventfd to write with the completion, if the op asks for that.
    wake: Option<Rc<OwnedFd>>,
}

impl Destination for RingDestination {
    fn post(self: Box<Self>, result: i64) -> Signal {
        self.context.post(self.data, result);
        let Some(wake) = self.wake else { return Signal::none() };
        Signal::new(move || {
            // The counter cannot overflow in the life of a simulation.
            let _ = rustix::io::write(&*wake, &1u64.to_ne_bytes());
        })
    }
}
