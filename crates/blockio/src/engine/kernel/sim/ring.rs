//! A ring of a simulated kernel (see `kernel/sim.rs`).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::time::Instant;

use io_uring::{cqueue, opcode, squeue};
use iomem::fits;
use libc::iovec;
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::AsFd;

use super::super::abi::{ENTER_SQ_WAKEUP, Setup, WaitFor, enter_flags, entries_for};
use super::world::{
    Destination, KernelOp, NOW, RingSetup, Signal, SqThread, SubmissionRing, World, is_readable,
    sleep_in, world,
};
use crate::file::op_kind::OpKind;
use crate::stats::Stats;

/// `IORING_CQE_F_MORE`.
const CQE_MORE: u32 = 1 << 1;
/// The user data of `posted` in the epoll instance.
const POSTED: u64 = u64::MAX;

/// A submission entry (`struct io_uring_sqe` of linux/io_uring.h) in words of 64 bits.
type Words = [u64; 8];

pub(in crate::engine) struct Ring {
    world: Rc<dyn World>,
    capacity: usize,
    state: Rc<RingState>,
}

/// The simulated kernel's state of a ring, which lives as long as the kernel has ops of it.
struct RingState {
    /// Readable when the ring is: watches the targets of the ring's polls, and `posted`.
    epoll: OwnedFd,
    /// Its counter is above zero while completions wait.
    posted: OwnedFd,
    setup: RingSetup,
    sqpoll: bool,
    inner: RefCell<Inner>,
}

#[derive(Default)]
struct Inner {
    entries: VecDeque<Words>,
    /// The submission thread sleeps (`IORING_SQ_NEED_WAKEUP`).
    asleep: bool,
    /// Registered files.
    files: Vec<RawFd>,
    /// Registered memory.
    buffers: Vec<Range<usize>>,
    visible: VecDeque<[u64; 2]>,
    deferred: VecDeque<[u64; 2]>,
    polls: Vec<(u64, OwnedFd)>,
}

impl RingState {
    /// Posts a completion.
    fn post(&self, user_data: u64, result: i32, flags: u32) {
        let event = [user_data, u64::from(result.cast_unsigned()) | u64::from(flags) << 32];
        let mut inner = self.inner.borrow_mut();
        // A submission thread defers nothing.
        if self.setup.defers && !self.sqpoll {
            inner.deferred.push_back(event);
        } else {
            inner.visible.push_back(event);
        }
        // The counter cannot overflow in the life of a simulation.
        let _ = rustix::io::write(&self.posted, &1u64.to_ne_bytes());
    }

    /// Turns writes to watched eventfds into completions.
    fn collect(&self, world: &dyn World) {
        let mut events = Vec::with_capacity(64);
        let now = Some(&NOW);
        if epoll::wait(&self.epoll, spare_capacity(&mut events), now).is_err() {
            return;
        }
        for event in events {
            let user_data = event.data.u64();
            if user_data == POSTED {
                continue;
            }
            let ends = world.ends_poll();
            if ends {
                self.remove_poll(user_data);
            }
            self.post(user_data, libc::POLLIN.into(), if ends { 0 } else { CQE_MORE });
        }
    }

    fn remove_poll(&self, user_data: u64) -> bool {
        let polls = &mut self.inner.borrow_mut().polls;
        let Some(place) = polls.iter().position(|(other, _)| *other == user_data) else {
            return false;
        };
        let (_, fd) = polls.swap_remove(place);
        epoll::delete(&self.epoll, &fd).is_ok()
    }
}

impl Ring {
    pub(in crate::engine) fn new(setup: &Setup<'_>) -> io::Result<Self> {
        let &Setup { depth, sqpoll, embedded, polled_beside } = setup;
        assert!(polled_beside.is_none(), "a simulated kernel has no polled rings");
        let world = world().ok_or(io::ErrorKind::Unsupported)?;
        let setup = world.ring(depth);
        let setup = RingSetup { defers: setup.defers && !embedded, ..setup };
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let (Ok(epoll), Ok(posted)) = (epoll::create(CreateFlags::CLOEXEC), eventfd(0, flags))
        else {
            panic!("the simulation has too many files open");
        };
        let added = epoll::add(&epoll, &posted, EventData::new_u64(POSTED), EventFlags::IN);
        added.expect("an eventfd can be watched");
        let inner = RefCell::default();
        let state = Rc::new(RingState { epoll, posted, setup, sqpoll, inner });
        let entries = setup.sq_entries.filter(|_| sqpoll).unwrap_or(entries_for(depth));
        if sqpoll {
            world.run_sq_thread(sq_thread(&state));
        }
        Ok(Self { world, capacity: entries as usize, state })
    }

    pub(in crate::engine) fn has_uring_cmd(&self) -> bool {
        self.state.setup.has_uring_cmd
    }

    #[expect(clippy::unnecessary_wraps, reason = "as the kernel's ring has it")]
    pub(in crate::engine) fn update_file(&self, index: u32, file: RawFd) -> io::Result<()> {
        let (files, index) = (&mut self.state.inner.borrow_mut().files, index as usize);
        if files.len() <= index {
            files.resize(index + 1, -1);
        }
        files[index] = file;
        Ok(())
    }

    /// # Safety
    ///
    /// The same as for the real ring.
    pub(in crate::engine) unsafe fn update_buffer(
        &self,
        index: u32,
        range: iovec,
    ) -> io::Result<()> {
        let (buffers, index) = (&mut self.state.inner.borrow_mut().buffers, index as usize);
        if buffers.len() <= index {
            buffers.resize(index + 1, 0..0);
        }
        let start = range.iov_base.addr();
        buffers[index] = start..start + range.iov_len;
        Ok(())
    }

    pub(in crate::engine) fn room(&self) -> usize {
        self.capacity - self.unsubmitted()
    }

    pub(in crate::engine) fn unsubmitted(&self) -> usize {
        self.state.inner.borrow().entries.len()
    }

    pub(in crate::engine) fn has_unseen_entries(&self) -> bool {
        let inner = self.state.inner.borrow();
        !inner.entries.is_empty() && (!self.state.sqpoll || inner.asleep)
    }

    /// # Safety
    ///
    /// Memory that the entry points to must stay until the completion with its user data.
    pub(in crate::engine) unsafe fn push(&mut self, entry: &squeue::Entry) {
        assert!(self.room() > 0, "the submission ring is full");
        // SAFETY: an entry is the 64 bytes of a `struct io_uring_sqe`, and nothing else.
        let words = unsafe { std::mem::transmute_copy::<squeue::Entry, Words>(entry) };
        self.state.inner.borrow_mut().entries.push_back(words);
    }

    pub(in crate::engine) fn make_room(&mut self, stats: Option<&Stats>) -> bool {
        if self.room() == 0 {
            let _ = self.enter(usize::MAX, WaitFor::Room, stats);
        }
        self.room() > 0
    }

    pub(in crate::engine) fn submit(&mut self, stats: &Stats) -> io::Result<()> {
        self.enter(usize::MAX, WaitFor::Nothing, Some(stats))
    }

    pub(in crate::engine) fn submit_and_wait(
        &mut self,
        deadline: Option<Instant>,
        stats: &Stats,
    ) -> io::Result<()> {
        self.enter(usize::MAX, WaitFor::Completion, Some(stats))?;
        self.wait(deadline)
    }

    pub(in crate::engine) fn wait_without_submit(&mut self, until: Instant, stats: &Stats) {
        let _ = self.enter(0, WaitFor::Completion, Some(stats));
        let _ = self.wait(Some(until));
    }

    fn wait(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        let is_due = || deadline.is_some_and(|when| when <= self.world.now());
        if !is_due() {
            sleep_in(&*self.world, deadline, self.state.epoll.as_fd());
            self.enter(0, WaitFor::Completion, None)?;
            if self.state.inner.borrow().visible.is_empty() {
                return Err(io::Error::from_raw_os_error(libc::ETIME));
            }
        }
        Ok(())
    }

    /// Like `io_uring_enter` with `IORING_ENTER_GETEVENTS`, without a wait.
    fn enter(&mut self, to_submit: usize, waits: WaitFor, stats: Option<&Stats>) -> io::Result<()> {
        crate::clock::yield_to_simulation();
        let asleep = self.state.sqpoll.then(|| self.state.inner.borrow().asleep);
        let Some(flags) = enter_flags(asleep, waits) else { return Ok(()) };
        if let Some(stats) = stats {
            stats.syscalls.io_uring_enter.add(1);
        }
        crate::clock::yield_to_simulation();
        if self.state.sqpoll {
            self.enter_with_thread(flags, waits);
            return Ok(());
        }
        let count = to_submit.min(self.unsubmitted());
        // A bad entry is answered with a completion, so the descriptor of the first does not
        // matter.
        let result =
            if count > 0 { self.world.admit(-1, count, count).map(Some) } else { Ok(None) };
        for _ in 0..result.unwrap_or(None).unwrap_or(0) {
            if self.state.next_entry(&*self.world) == Some(false) && !self.state.setup.submits_all {
                break;
            }
        }
        self.state.collect(&*self.world);
        let Inner { visible, deferred, .. } = &mut *self.state.inner.borrow_mut();
        visible.append(deferred);
        result.map(|_| ()).map_err(io::Error::from_raw_os_error)
    }

    /// Like `io_uring_enter` if a thread takes the entries.
    fn enter_with_thread(&self, flags: u32, waits: WaitFor) {
        let wakes = flags & ENTER_SQ_WAKEUP != 0;
        if wakes && std::mem::take(&mut self.state.inner.borrow_mut().asleep) {
            self.world.run_sq_thread(sq_thread(&self.state));
        }
        if waits == WaitFor::Room && self.room() == 0 {
            // A sleeping thread makes no room, so the wait for it would not end.
            assert!(!self.state.inner.borrow().asleep, "a wait for a thread that sleeps");
            self.state.next_entry(&*self.world);
        }
    }

    /// Posts events of eventfds: with a submission thread the kernel does so on its own.
    fn post_events(&self) {
        if self.state.sqpoll {
            self.state.collect(&*self.world);
        }
    }

    /// Returns true if a completion is visible, or would be after the kernel was entered.
    pub(in crate::engine) fn has_completions(&self) -> bool {
        is_readable(self.state.epoll.as_fd())
    }

    pub(in crate::engine) fn has_entries(&self) -> bool {
        self.post_events();
        !self.state.inner.borrow().visible.is_empty()
    }

    pub(in crate::engine) fn has_work(&self) -> bool {
        self.has_completions() || self.unsubmitted() > 0
    }

    pub(in crate::engine) fn post_deferred(&mut self, stats: &Stats) {
        if self.state.inner.borrow().visible.is_empty() && self.has_completions() {
            let _ = self.enter(0, WaitFor::Nothing, Some(stats));
        }
    }

    pub(in crate::engine) fn take(&mut self, entries: &mut Vec<cqueue::Entry>) {
        crate::clock::yield_to_simulation();
        self.post_events();
        let mut inner = self.state.inner.borrow_mut();
        entries.extend(inner.visible.drain(..).map(|words| {
            // SAFETY: an entry is the 16 bytes of a `struct io_uring_cqe`, and nothing else.
            unsafe { std::mem::transmute::<[u64; 2], cqueue::Entry>(words) }
        }));
        if inner.deferred.is_empty() {
            // No posted completion is left. The read fails if there was none.
            let _ = rustix::io::read(&self.state.posted, &mut [0; 8]);
        }
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.state.epoll.as_fd()
    }
}

fn sq_thread(ring: &Rc<RingState>) -> SqThread {
    let ring = Rc::downgrade(ring);
    SqThread::new(ring)
}

impl SubmissionRing for RingState {
    fn take_entry(self: Rc<Self>, world: &dyn World) -> Option<bool> {
        self.next_entry(world)
    }

    fn sleep(&self) -> bool {
        let inner = &mut *self.inner.borrow_mut();
        inner.asleep = inner.entries.is_empty();
        inner.asleep
    }
}

/// The destination of the result of an entry.
struct EntryDestination {
    ring: Rc<RingState>,
    user_data: u64,
}

impl Destination for EntryDestination {
    fn post(self: Box<Self>, result: i64) -> Signal {
        self.ring.post(self.user_data, fits(result, "the result of an op"), 0);
        // The ring's own descriptor is readable now.
        Signal::none()
    }

    fn is_ring_entry(&self) -> bool {
        true
    }
}

impl RingState {
    /// Takes an entry. `Some(false)` means that it is bad.
    fn next_entry(self: &Rc<Self>, world: &dyn World) -> Option<bool> {
        let entry = self.inner.borrow_mut().entries.pop_front()?;
        Some(self.start(world, &entry))
    }

    fn start(self: &Rc<Self>, world: &dyn World, entry: &Words) -> bool {
        let head = entry[0].to_ne_bytes();
        let (code, user_data) = (head[0], entry[4]);
        let fd = RawFd::from_ne_bytes([head[4], head[5], head[6], head[7]]);
        match code {
            opcode::PollAdd::CODE => self.add_poll(fd, user_data),
            opcode::PollRemove::CODE => {
                if self.remove_poll(entry[2]) {
                    self.post(entry[2], -libc::ECANCELED, 0);
                }
                self.post(user_data, 0, 0);
            }
            _ => {
                let is_fixed =
                    squeue::Flags::from_bits_retain(head[1]).contains(squeue::Flags::FIXED_FILE);
                let fd = if is_fixed { self.file(fd) } else { fd };
                // SAFETY: the caller of `push` vouched for the memory that the entry points to.
                let op = unsafe { self.op(code, fd, entry) };
                return world.start(op);
            }
        }
        true
    }

    fn file(&self, index: RawFd) -> RawFd {
        let index = fits::<_, usize>(index, "the index of a file");
        self.inner.borrow().files.get(index).copied().unwrap_or(-1)
    }

    fn add_poll(&self, fd: RawFd, user_data: u64) {
        // SAFETY: the descriptor is only duplicated, and the next line finds out if it is open.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let Ok(fd) = rustix::io::dup(fd) else {
            // The file was closed while its entry was on the way.
            return self.post(user_data, -libc::EBADF, 0);
        };
        let flags = EventFlags::IN | EventFlags::ET;
        if epoll::add(&self.epoll, &fd, EventData::new_u64(user_data), flags).is_err() {
            // The number belongs to something else now.
            return self.post(user_data, -libc::EBADF, 0);
        }
        self.inner.borrow_mut().polls.push((user_data, fd));
    }

    /// # Safety
    ///
    /// Memory that the entry points to must stay until its completion.
    unsafe fn op(self: &Rc<Self>, code: u8, fd: RawFd, entry: &Words) -> KernelOp {
        let (offset, address, user_data) = (entry[1], entry[2], entry[4]);
        let (len, flags) = (entry[3] & u64::from(u32::MAX), entry[3] >> 32);
        let fua = flags & u64::from(libc::RWF_DSYNC.unsigned_abs()) != 0;
        let address_bytes = fits(address, "an address");
        let base = std::ptr::with_exposed_provenance_mut::<libc::c_void>(address_bytes);
        let (kind, offset) = match code {
            opcode::Read::CODE | opcode::Readv::CODE | opcode::ReadFixed::CODE => {
                (OpKind::Read, offset)
            }
            opcode::Write::CODE | opcode::Writev::CODE | opcode::WriteFixed::CODE => {
                (OpKind::Write { fua }, offset)
            }
            opcode::Fsync::CODE => (OpKind::Flush, 0),
            opcode::Fallocate::CODE => {
                let mode = fits(len, "a length");
                (OpKind::Fallocate { mode, len: address }, offset)
            }
            opcode::UringCmd16::CODE => (OpKind::DiscardBlocks { len: entry[6] }, address),
            other => panic!("the engine submits an entry with opcode {other}"),
        };
        let len = fits(len, "a length");
        if matches!(code, opcode::ReadFixed::CODE | opcode::WriteFixed::CODE) {
            let index = fits(entry[5] & 0xffff, "the index of a buffer");
            self.check_registered(index, address_bytes, len);
        }
        let single = [iovec { iov_base: base, iov_len: len }];
        let iovecs: &[iovec] = match code {
            // SAFETY: the address and length of a vectored entry are those of its iovecs.
            opcode::Readv::CODE | opcode::Writev::CODE => unsafe {
                std::slice::from_raw_parts(base.cast_const().cast(), len)
            },
            _ if matches!(kind, OpKind::Read | OpKind::Write { .. }) => &single,
            _ => &[],
        };
        let destination = Box::new(EntryDestination { ring: Rc::clone(self), user_data });
        // SAFETY: the caller promises that the memory stays until the completion.
        unsafe { KernelOp::new(kind, fd, offset, iovecs, destination) }
    }

    /// Like the kernel, checks that memory which an entry names is registered.
    fn check_registered(&self, index: usize, address: usize, len: usize) {
        let buffers = &self.inner.borrow().buffers;
        let inside = |range: &Range<usize>| range.start <= address && address + len <= range.end;
        assert!(
            buffers.get(index).is_some_and(inside),
            "the engine says that memory is registered under {index}, but it is not"
        );
    }
}
