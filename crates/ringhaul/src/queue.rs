//! One virtqueue of a device: the ring, its eventfds, and how it is told to stop.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
#[cfg(feature = "sim")]
use std::sync::atomic::AtomicU16;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;

use blockio::io_thread::{Io, RegisteredMemory};
use blockio::{Armed, Buffers, Source};
use rustix::fd::OwnedFd;
use virtqueue::{Chain, GuestMemory, LocalMemory, QueueConfig, QueueError, Segments, SplitQueue};

use crate::call_watch::{CallTrust, Caller};
use crate::guest_buf::GuestOwner;
use crate::lists::Lists;
use crate::pending::Answer;
pub use crate::pending::Pending;

/// What a queue starts with.
pub struct QueueSetup {
    /// The memory that the ring's addresses and the driver's buffers are in.
    pub memory: Arc<GuestMemory>,
    /// Where the ring is.
    pub ring: Ring,
    /// Written by the driver when it has made chains available. `None`: the driver never kicks.
    pub kick: Option<OwnedFd>,
    /// An eventfd, added to when the driver is to look at the used ring. `None`: the driver polls.
    pub call: Option<OwnedFd>,
    /// An eventfd, added to when the ring is bad.
    pub err: Option<OwnedFd>,
}

/// A split virtqueue's place in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ring {
    /// Entries: a power of two, at most 1024.
    pub size: u16,
    /// Guest address of the descriptor table.
    pub desc_table: u64,
    /// Guest address of the avail ring.
    pub avail_ring: u64,
    /// Guest address of the used ring.
    pub used_ring: u64,
    /// The avail entry to begin with.
    pub next_avail: u16,
}

/// Why a queue does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The ring is not as the specification demands.
    #[error(transparent)]
    Ring(#[from] QueueError),
    /// The queue's IoThread has ended.
    #[error("the IoThread of the queue has ended")]
    ThreadEnded,
}

/// What a running queue can be told.
enum Command {
    SetCall(Option<OwnedFd>),
    SetErr(Option<OwnedFd>),
    /// Stop taking chains, finish those taken, then answer with the next avail entry.
    Stop(Answer<u16>),
}

#[derive(Default)]
struct Control {
    /// Whether there are commands: looked at in each run, without a lock.
    pending: AtomicBool,
    /// Requests that were taken and are not answered, as of the last run.
    requests: AtomicU32,
    inner: Mutex<ControlInner>,
    /// The avail entry that is popped next.
    #[cfg(feature = "sim")]
    next_avail: AtomicU16,
    /// There was no room for another chain in the last run.
    #[cfg(feature = "sim")]
    is_full: AtomicBool,
}

#[derive(Default)]
struct ControlInner {
    commands: Vec<Command>,
    waker: Option<Waker>,
    /// The queue is gone, and with it who would carry out commands.
    is_closed: bool,
}

impl Control {
    fn send(&self, command: Command) {
        let waker = {
            let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            if inner.is_closed {
                return;
            }
            inner.commands.push(command);
            self.pending.store(true, Ordering::Release);
            inner.waker.clone()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Drops commands, so that who waits for an answer hears that there will be none.
    fn close(&self) {
        let commands = {
            let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            inner.is_closed = true;
            std::mem::take(&mut inner.commands)
        };
        drop(commands);
    }
}

/// A running queue, for the thread that controls it. Dropping it does not stop the queue.
pub struct QueueHandle {
    control: Arc<Control>,
}

impl QueueHandle {
    /// Replaces the call eventfd.
    pub fn set_call(&self, call: Option<OwnedFd>) {
        self.control.send(Command::SetCall(call));
    }

    /// Replaces the eventfd for ring errors.
    pub fn set_err(&self, err: Option<OwnedFd>) {
        self.control.send(Command::SetErr(err));
    }

    /// The avail entry that is popped next.
    #[cfg(feature = "sim")]
    #[must_use]
    pub fn next_avail(&self) -> u16 {
        self.control.next_avail.load(Ordering::Relaxed)
    }

    /// Whether the queue leaves chains in the ring until it has room for their lists of buffers.
    #[cfg(feature = "sim")]
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.control.is_full.load(Ordering::Relaxed)
    }

    /// Stops the queue: no more chains are taken, and this returns when all that were taken have
    /// been answered, however long the disk needs. Returns the next avail entry, or `None` when
    /// the IoThread has ended.
    #[must_use]
    pub fn stop(self) -> Option<u16> {
        self.begin_stop().wait()
    }

    /// As [`stop`](Self::stop), for who cannot wait, such as the loop that serves the queue.
    #[must_use]
    pub fn begin_stop(self) -> Pending<u16> {
        let (reply, next_avail) = Pending::new();
        self.control.send(Command::Stop(reply));
        next_avail
    }

    /// What can be seen of the queue from outside its IoThread, also while it stops.
    #[must_use]
    pub fn watch(&self) -> QueueWatch {
        QueueWatch { control: Arc::clone(&self.control) }
    }
}

/// A queue, seen without the help of its IoThread.
#[derive(Clone)]
pub struct QueueWatch {
    control: Arc<Control>,
}

impl QueueWatch {
    /// Requests that were taken and are not answered yet, as of the queue's last run.
    #[must_use]
    pub fn requests(&self) -> u32 {
        self.control.requests.load(Ordering::Relaxed)
    }

    /// Whether the IoThread has heard all that the queue was told, such as to stop.
    #[must_use]
    pub fn has_heard(&self) -> bool {
        !self.control.pending.load(Ordering::Relaxed)
    }
}

/// What was negotiated for a queue, and how it works.
pub(crate) struct QueueOptions {
    pub(crate) event_idx: bool,
    pub(crate) indirect: bool,
    pub(crate) notify_batch: bool,
}

/// A queue on its IoThread.
pub(crate) struct Queue {
    ring: RefCell<SplitQueue>,
    guest: GuestOwner,
    lists: Lists,
    kick: Cell<Option<OwnedFd>>,
    call: RefCell<Option<OwnedFd>>,
    err: RefCell<Option<OwnedFd>>,
    caller: Caller,
    control: Arc<Control>,
    /// Used elements were pushed that the driver does not see yet.
    unpublished: Cell<bool>,
    /// The ring made no sense: it is left alone until it is stopped.
    broken: Cell<bool>,
    /// Nothing is popped: the ring is bad, or there is no room for the lists of another chain.
    halted: Cell<bool>,
    /// An answer takes more than to push it: long lists end, or each has a notify of its own.
    answers_slowly: Cell<bool>,
    /// No more chains are taken, so those that are available are no work.
    stopping: Cell<bool>,
    /// Off: each pushed element has its own notify.
    notify_batch: bool,
    stats: Arc<blockio::stats::Stats>,
}

impl Queue {
    pub(crate) fn new(
        setup: QueueSetup,
        io: &Io,
        options: &QueueOptions,
        trust: Arc<CallTrust>,
    ) -> Result<(Self, QueueHandle), StartError> {
        let memory = LocalMemory::new(setup.memory);
        let config = QueueConfig {
            size: setup.ring.size,
            desc_table: setup.ring.desc_table,
            avail_ring: setup.ring.avail_ring,
            used_ring: setup.ring.used_ring,
            event_idx: options.event_idx,
            indirect: options.indirect,
            next_avail: setup.ring.next_avail,
        };
        let ring = SplitQueue::new(memory.clone(), config)?;
        let control = Arc::new(Control::default());
        #[cfg(feature = "sim")]
        control.next_avail.store(ring.next_avail(), Ordering::Relaxed);
        let queue = Self {
            ring: RefCell::new(ring),
            guest: GuestOwner::new(memory),
            lists: Lists::new(Arc::clone(io.stats())),
            kick: Cell::new(setup.kick),
            call: RefCell::new(setup.call),
            err: RefCell::new(setup.err),
            caller: Caller::new(trust),
            control: Arc::clone(&control),
            // A call is forced at the first notify.
            unpublished: Cell::new(true),
            broken: Cell::new(false),
            halted: Cell::new(false),
            answers_slowly: Cell::new(!options.notify_batch),
            stopping: Cell::new(false),
            notify_batch: options.notify_batch,
            stats: Arc::clone(io.stats()),
        };
        Ok((queue, QueueHandle { control }))
    }

    /// The kick eventfd, once, for the reactor.
    pub(crate) fn take_kick(&self) -> Option<OwnedFd> {
        self.kick.take()
    }

    /// Lets commands wake the task that polls with this waker.
    pub(crate) fn set_waker(&self, waker: &Waker) {
        let mut inner = self.control.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.waker = Some(waker.clone());
    }

    /// Carries out commands. Returns whom to answer when the queue is to stop.
    pub(crate) fn take_commands(&self) -> Option<Answer<u16>> {
        if !self.control.pending.load(Ordering::Acquire) {
            return None;
        }
        let commands = {
            let mut inner = self.control.inner.lock().unwrap_or_else(PoisonError::into_inner);
            self.control.pending.store(false, Ordering::Relaxed);
            std::mem::take(&mut inner.commands)
        };
        let mut stop = None;
        for command in commands {
            match command {
                Command::SetCall(call) => {
                    *self.call.borrow_mut() = call;
                    // What was published in between may have called the old eventfd.
                    self.ring.borrow_mut().force_call();
                    self.unpublished.set(true);
                }
                Command::SetErr(err) => {
                    *self.err.borrow_mut() = err;
                    // It may have been on its way when the ring was found to be bad.
                    if self.broken.get() {
                        self.tell_broken();
                    }
                }
                Command::Stop(reply) => stop = Some(reply),
            }
        }
        stop
    }

    /// Lets others see how many requests are not answered. Once in a run, whatever it served.
    #[inline]
    pub(crate) fn show_requests(&self, count: usize) {
        // A queue has at most 1024 chains.
        self.control.requests.store(u32::try_from(count).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// Counts the lists of a chain that was popped.
    #[inline]
    pub(crate) fn count_lists(&self, chain: &Chain) {
        if Lists::are_long(chain) {
            self.lists.add(chain);
            self.answers_slowly.set(true);
            self.set_halted();
        }
    }

    /// Halts while there is no room. A chain of this queue that is answered makes its task go on.
    fn set_halted(&self) {
        let has_room = self.lists.has_room();
        self.halted.set(self.broken.get() || !has_room);
        #[cfg(feature = "sim")]
        self.control.is_full.store(!has_room, Ordering::Relaxed);
    }

    /// The next chain; `None` when there is none, no room for one, or the ring is bad.
    #[inline]
    pub(crate) fn pop(&self) -> Result<Option<Chain>, QueueError> {
        if self.halted.get() {
            return Ok(None);
        }
        let popped = self.ring.borrow_mut().pop();
        #[cfg(feature = "sim")]
        self.control.next_avail.store(self.next_avail(), Ordering::Relaxed);
        popped
    }

    /// Answers a chain. The driver sees it after the next notify.
    #[inline]
    pub(crate) fn push(&self, head: u16, written_bytes: u32) {
        self.ring.borrow_mut().push(head, written_bytes);
        self.unpublished.set(true);
        if self.answers_slowly.get() {
            self.after_push(head);
        }
    }

    #[cold]
    fn after_push(&self, head: u16) {
        let has_lists = self.lists.remove(head);
        self.set_halted();
        self.answers_slowly.set(has_lists || !self.notify_batch);
        if !self.notify_batch {
            self.notify();
        }
    }

    /// Takes no more chains from now on.
    pub(crate) fn set_stopping(&self) {
        self.stopping.set(true);
    }

    pub(crate) fn takes_chains(&self) -> bool {
        !self.broken.get() && !self.stopping.get()
    }

    /// Leaves the ring alone from now on, and tells the front-end.
    pub(crate) fn set_broken(&self) {
        self.broken.set(true);
        self.halted.set(true);
        self.tell_broken();
    }

    fn tell_broken(&self) {
        if let Some(err) = &*self.err.borrow() {
            self.caller.add_one(err);
        }
    }

    #[inline]
    pub(crate) fn has_unpublished(&self) -> bool {
        self.unpublished.get()
    }

    pub(crate) fn next_avail(&self) -> u16 {
        self.ring.borrow().next_avail()
    }

    /// Segments of a chain as buffers for a disk.
    #[inline]
    pub(crate) fn buffers(&self, segments: Segments) -> Buffers {
        self.guest.buffers(segments)
    }

    /// Has the engine keep the pages of the memory map at hand, until the result is dropped. An
    /// engine that cannot goes on without.
    pub(crate) fn register_memory(&self, io: &Rc<Io>) -> io::Result<RegisteredMemory> {
        io.register_memory(self.guest.whole())
    }

    /// Takes used buffers back, for their storage.
    #[inline]
    pub(crate) fn recycle(&self, buffers: Buffers) {
        self.guest.recycle(buffers);
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.control.close();
    }
}

impl Source for Queue {
    fn notify(&self) {
        self.unpublished.set(false);
        if self.ring.borrow_mut().publish()
            && let Some(call) = &*self.call.borrow()
        {
            self.stats.syscalls.eventfd_write.add(1);
            self.caller.add_one(call);
        }
    }

    fn arm(&self) -> Armed {
        if self.halted.get() || self.stopping.get() {
            Armed::Full
        } else if self.ring.borrow_mut().enable_kicks() {
            Armed::HasWork
        } else {
            Armed::Yes
        }
    }

    fn disarm(&self) {
        self.ring.borrow_mut().disable_kicks();
    }

    fn has_work(&self) -> bool {
        !self.halted.get() && !self.stopping.get() && self.ring.borrow().has_available()
    }
}

/// Keeps a source for as long as it is in scope.
pub(crate) struct Registration {
    pub(crate) io: Rc<Io>,
    pub(crate) id: blockio::SourceId,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.io.remove_source(self.id);
    }
}
