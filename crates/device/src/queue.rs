//! One virtqueue of a device: the ring, its eventfds, and the commands that it carries out.

use std::cell::{Cell, RefCell};
use std::error::Error;
use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;

use blockio::{Armed, Io, RegisteredMemory, Source};
use rustix::fd::OwnedFd;
use virtqueue::{Chain, GuestMemory, LocalMemory, QueueConfig, QueueError, SplitQueue};

use crate::call_watch::{CallTrust, Caller};
use crate::events::{Events, QueueFault};
use crate::lists::Lists;
use crate::pending::{Answer, Pending};
use crate::stats::{QueueStats, RequestKind};

/// What a queue starts with.
pub struct QueueSetup {
    /// The memory that the ring's addresses and the driver's buffers are in.
    pub memory: Arc<GuestMemory>,
    /// Where the ring is.
    pub ring: Ring,
    /// Written by the driver when it has made chains available. `None`: the driver never kicks.
    pub kick: Option<OwnedFd>,
    /// An eventfd, added to when the driver should look at the used ring. `None`: the driver polls.
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

impl Ring {
    /// What either side of the ring needs, with or without these two features.
    pub const fn config(self, event_idx: bool, indirect: bool) -> QueueConfig {
        let Self { size, desc_table, avail_ring, used_ring, next_avail } = self;
        QueueConfig { size, desc_table, avail_ring, used_ring, event_idx, indirect, next_avail }
    }
}

/// Why a queue does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The device has no queue of this number.
    #[error("queue {index} is started, but there are {count}")]
    NoSuchQueue {
        /// The number.
        index: u16,
        /// How many there are.
        count: u16,
    },
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
    /// The avail entry that is popped next, as of the last run.
    next_avail: AtomicU16,
    /// There was no room for another chain in the last run.
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

    /// Drops commands, so that a waiting thread learns that there will be no answer.
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

    /// The avail entry that is popped next, as of the queue's last run.
    #[must_use]
    pub fn next_avail(&self) -> u16 {
        self.control.next_avail.load(Ordering::Relaxed)
    }

    /// Whether the queue leaves chains in the ring until it has room for their lists of buffers.
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

    /// As [`stop`](Self::stop), for callers that must not block, such as the loop that serves the
    /// queue.
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

    /// Whether the IoThread has seen all commands for the queue, such as to stop.
    #[must_use]
    pub fn has_heard(&self) -> bool {
        !self.control.pending.load(Ordering::Relaxed)
    }
}

/// What was negotiated for a queue, and how it works.
pub(crate) struct QueueOptions {
    pub(crate) index: u16,
    pub(crate) event_idx: bool,
    pub(crate) indirect: bool,
    pub(crate) notify_batch: bool,
    pub(crate) long_lists_bytes: u64,
    pub(crate) events: Arc<dyn Events>,
    pub(crate) trust: Arc<CallTrust>,
    pub(crate) stats: Arc<QueueStats>,
}

/// A queue on its IoThread.
pub(crate) struct Queue {
    ring: RefCell<SplitQueue>,
    memory: LocalMemory,
    lists: Lists,
    kick: Cell<Option<OwnedFd>>,
    call: RefCell<Option<OwnedFd>>,
    err: RefCell<Option<OwnedFd>>,
    caller: Caller,
    control: Arc<Control>,
    /// Used elements were pushed that the driver does not see yet.
    unpublished: Cell<bool>,
    /// The ring is bad: it is left alone until it is stopped.
    broken: Cell<bool>,
    /// Nothing is popped: the ring is bad, or the lists of another chain have no room.
    halted: Cell<bool>,
    /// An answer takes more than to push it: long lists end, or each has a notify of its own.
    answers_slowly: Cell<bool>,
    /// No more chains are taken, so those that are available do not count as work.
    stopping: Cell<bool>,
    /// Off: each pushed element has its own notify.
    notify_batch: bool,
    index: u16,
    events: Arc<dyn Events>,
    requests: Arc<QueueStats>,
    /// Of the IoThread.
    stats: Arc<blockio::stats::Stats>,
}

impl Queue {
    pub(crate) fn new(
        setup: QueueSetup,
        io: &Io,
        options: QueueOptions,
    ) -> Result<(Self, QueueHandle), StartError> {
        let memory = LocalMemory::new(setup.memory);
        let config = setup.ring.config(options.event_idx, options.indirect);
        let ring = SplitQueue::new(memory.clone(), config)?;
        let control = Arc::new(Control::default());
        control.next_avail.store(ring.next_avail(), Ordering::Relaxed);
        let queue = Self {
            ring: RefCell::new(ring),
            memory,
            lists: Lists::new(options.long_lists_bytes, Arc::clone(io.stats())),
            kick: Cell::new(setup.kick),
            call: RefCell::new(setup.call),
            err: RefCell::new(setup.err),
            caller: Caller::new(options.trust),
            control: Arc::clone(&control),
            // A call is forced at the first notify.
            unpublished: Cell::new(true),
            broken: Cell::new(false),
            halted: Cell::new(false),
            answers_slowly: Cell::new(!options.notify_batch),
            stopping: Cell::new(false),
            notify_batch: options.notify_batch,
            index: options.index,
            events: options.events,
            requests: options.stats,
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

    /// Lets others see how many requests are not answered, and where the ring is. Once in a run,
    /// whatever it served.
    #[inline]
    pub(crate) fn show(&self, requests: usize) {
        let Ok(requests) = u32::try_from(requests) else { unreachable!("a ring has 1024 chains") };
        self.control.requests.store(requests, Ordering::Relaxed);
        self.control.next_avail.store(self.next_avail(), Ordering::Relaxed);
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

    /// Halts while there is no room. When a chain of this queue is answered, its task continues.
    fn set_halted(&self) {
        let has_room = self.lists.has_room();
        self.halted.set(self.broken.get() || !has_room);
        self.control.is_full.store(!has_room, Ordering::Relaxed);
    }

    /// The next chain; `None` when there is none, no room for one, or the ring is bad.
    #[inline]
    pub(crate) fn pop(&self) -> Result<Option<Chain>, QueueError> {
        if self.halted.get() {
            return Ok(None);
        }
        self.ring.borrow_mut().pop()
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

    /// Counts a request that succeeded and is about to be pushed, and its bytes.
    #[inline]
    pub(crate) fn count(&self, kind: RequestKind, bytes: u64) {
        self.requests.count(kind, bytes);
    }

    /// Counts a request that is about to be pushed with an error status, and reports it.
    #[cold]
    pub(crate) fn fail(&self, kind: RequestKind, error: &dyn Error) {
        self.requests.count_error(kind);
        self.events.request_failed(error);
    }

    /// Leaves the ring alone from now on, because it is bad.
    #[cold]
    pub(crate) fn ring_is_bad(&self, error: QueueError) {
        self.set_broken(&QueueFault::Ring(error));
    }

    /// Gives a chain back that has no room for a status. It cannot be answered, so the queue stops.
    #[cold]
    pub(crate) fn push_unanswered(&self, head: u16) {
        self.requests.count_error(RequestKind::Other);
        self.push(head, 0);
        self.set_broken(&QueueFault::NoStatus { head });
    }

    /// Leaves the ring alone from now on, and reports that. The other queues continue.
    #[cold]
    pub(crate) fn set_broken(&self, fault: &QueueFault) {
        self.events.queue_stopped(self.index, fault);
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

    /// Has the engine keep the pages of the memory map at hand, until the result is dropped. An
    /// engine that cannot continues without.
    pub(crate) fn register_memory(&self, io: &Rc<Io>) -> io::Result<RegisteredMemory> {
        io.register_memory(self.memory.whole())
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
