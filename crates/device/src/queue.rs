//! One virtqueue of a device: the ring, its eventfds, and the commands that it carries out.

pub(crate) mod batching;
pub(crate) mod buffer_budget;
pub(crate) mod call_watch;
pub(crate) mod data_budget;
pub(crate) mod eventfd;
pub(crate) mod ordered_completion;
pub(crate) mod per_thread;
pub(crate) mod queue_setup;
pub(crate) mod queue_status;
pub(crate) mod queue_task;
pub(crate) mod reports;
pub(crate) mod request_barrier;
mod room;
mod run_ring;
mod source;
mod stop;

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;

use blockio::clock::LoopClock;
use blockio::thread::{RegisteredMemory, Source};
use blockio::{Io, Remote, oneshot};
use rustix::fd::OwnedFd;
use virtqueue::{
    AvailIdx, Chain, DeviceQueue, LocalMemory, QueueError, QueueLog, RingLayout, Virtqueue,
};

use crate::events::{Events, QueueFault};
use crate::stats::QueueStats;
use batching::Batching;
use buffer_budget::ListBudget;
use call_watch::{Caller, Eventfds};
use data_budget::{Budgets, QueueDataBudget};
use ordered_completion::{OrderedCompletion, PushHooks};
use queue_setup::{QueueOptions, QueueSetup, StartError, Stop};
use queue_status::{PendingCommand, QueueStatus, QueueView};
use request_barrier::RequestBarrier;

/// A running queue, for the thread that controls it. Dropping the handle does not stop the queue.
pub struct QueueHandle {
    thread: Remote,
    status: Arc<QueueStatus>,
}

impl QueueHandle {
    /// Replaces the call eventfd.
    pub fn set_call(&self, call: Option<OwnedFd>) {
        self.post(|queue| queue.set_call(call));
    }

    /// Replaces the eventfd for ring errors.
    pub fn set_err(&self, err: Option<OwnedFd>) {
        self.post(|queue| queue.set_err(err));
    }

    /// Sets, replaces or removes the log of written pages while requests are in progress. Once the
    /// result is ready, or `None` because the queue has stopped, the device does not touch the
    /// previous log.
    #[must_use]
    pub fn begin_set_log(&self, log: Option<QueueLog>) -> oneshot::Receiver<()> {
        let (answer, is_set) = oneshot::channel();
        self.post(|queue| {
            queue.ring.borrow_mut().set_log(log);
            answer.send(());
        });
        is_set
    }

    /// Posts `command` to the IoThread, behind earlier commands, and wakes the queue's task. A
    /// command for a queue that is gone is dropped.
    fn post(&self, command: impl FnOnce(&Queue) + Send + 'static) {
        self.status.pending_commands.fetch_add(1, Ordering::Relaxed);
        let pending = PendingCommand(Arc::clone(&self.status));
        // An IoThread that has ended drops the call.
        self.thread.post(move |io| {
            let queue = io.shared::<Queue>(key(&pending.0));
            drop(pending);
            if let Some(queue) = queue {
                command(&queue);
                queue.wake();
            }
        });
    }

    /// The next avail entry to pop, as of the queue's last run.
    pub fn next_avail(&self) -> u16 {
        let [low, high, ..] = self.base().to_le_bytes();
        u16::from_le_bytes([low, high])
    }

    /// The place at which the next start of the ring continues, as of the queue's last run: the
    /// next avail entry, and behind it that of the next used element in a packed ring.
    pub fn base(&self) -> u32 {
        self.status.base.load(Ordering::Relaxed)
    }

    /// True if the queue leaves chains in the ring until there is room for their lists of buffers,
    /// or for the bytes that they move.
    pub fn is_full(&self) -> bool {
        self.status.is_full.load(Ordering::Relaxed)
    }

    /// A view of the queue for other threads, which works while the queue stops, too.
    pub fn view(&self) -> QueueView {
        QueueView { status: Arc::clone(&self.status) }
    }
}

/// The key by which commands from other threads find the queue with this status.
fn key(status: &Arc<QueueStatus>) -> usize {
    Arc::as_ptr(status).addr()
}

/// A queue on its IoThread.
pub(crate) struct Queue {
    ring: RefCell<Virtqueue>,
    memory: LocalMemory,
    eventfds: Eventfds,
    budgets: Budgets,
    control: Control,
    flags: Flags,
    hooks: PushHooks,
    pub(crate) barrier: RequestBarrier,
    batching: RefCell<Batching>,
    reports: Reports,
}

/// The side of a queue that other threads see and command.
struct Control {
    status: Arc<QueueStatus>,
    /// Waker of the queue's task, for commands.
    waker: RefCell<Option<Waker>>,
    /// The request to stop, if there is one.
    stop: RefCell<Option<Stop>>,
}

/// The conditions that decide about pops, answers and stops, beside the ring.
struct Flags {
    /// Requests that wait may stay in the inflight region when the queue stops.
    keeps_waiting: bool,
    /// Elements were pushed since the last notify. The notify also checks if the driver wants a
    /// call for elements that were published earlier.
    to_notify: Cell<bool>,
    /// The ring is bad: it is not touched until the queue stops.
    broken: Cell<bool>,
    /// Nothing is popped: the ring is bad, or there is no room for another chain.
    halted: Cell<bool>,
    /// No further chains are taken, so available chains do not count as work.
    stopping: Cell<bool>,
}

/// The receivers of events and counts.
struct Reports {
    index: u16,
    events: Arc<dyn Events>,
    requests: Arc<QueueStats>,
    /// Counters of the IoThread.
    stats: Arc<blockio::stats::Stats>,
    clock: Rc<LoopClock>,
}

impl Queue {
    pub(crate) fn new(
        setup: QueueSetup,
        io: &Io,
        options: QueueOptions,
    ) -> Result<(Rc<Self>, QueueHandle), StartError> {
        let memory = LocalMemory::new(Arc::clone(&setup.memory));
        let keeps_waiting = setup.keeps_waiting();
        let is_in_order = options.in_order && !keeps_waiting;
        if is_in_order && options.layout == RingLayout::Packed {
            return Err(StartError::PackedInOrder);
        }
        let mut ring = setup.open_ring(memory.clone(), &options)?;
        ring.set_prefetch(options.tuning.prefetch);
        ring.set_answer_place(options.answer_place);
        ring.set_log(setup.log);
        let status = Arc::new(QueueStatus::default());
        status.base.store(ring.base(), Ordering::Relaxed);
        let queue = Rc::new(Self {
            ring: RefCell::new(ring),
            memory,
            eventfds: Eventfds {
                kick: Cell::new(setup.kick),
                call: RefCell::new(setup.call),
                err: RefCell::new(setup.err),
                caller: Caller::new(options.trust),
            },
            budgets: Budgets {
                lists: ListBudget::new(options.tuning.long_lists_bytes, Arc::clone(io.stats())),
                data: QueueDataBudget::new(options.data_budget, Arc::clone(&status)),
            },
            control: Control {
                status: Arc::clone(&status),
                waker: RefCell::default(),
                stop: RefCell::default(),
            },
            flags: Flags {
                keeps_waiting,
                // A call is forced at the first notify.
                to_notify: Cell::new(true),
                broken: Cell::new(false),
                halted: Cell::new(false),
                stopping: Cell::new(false),
            },
            hooks: PushHooks {
                // The first push decides.
                are_due: Cell::new(true),
                in_order: OrderedCompletion::new(is_in_order),
                notify_batch: options.tuning.notify_batch,
            },
            barrier: RequestBarrier::default(),
            batching: RefCell::new(Batching::new(options.tuning.run_max)),
            reports: Reports {
                index: options.index,
                events: options.events,
                requests: options.stats,
                stats: Arc::clone(io.stats()),
                clock: io.clock(),
            },
        });
        if let Some(slow) = queue.reports.events.slow_from() {
            queue.set_slow(slow);
        }
        io.share(key(&status), &queue);
        Ok((queue, QueueHandle { thread: io.remote(), status }))
    }

    /// Takes the kick eventfd for the reactor; `None` after the first time.
    pub(crate) fn take_kick(&self) -> Option<OwnedFd> {
        self.eventfds.kick.take()
    }

    /// Sets the waker of the queue's task, which commands wake.
    pub(crate) fn set_waker(&self, waker: &Waker) {
        *self.control.waker.borrow_mut() = Some(waker.clone());
    }

    /// Wakes the queue's task.
    pub(crate) fn wake(&self) {
        if let Some(waker) = &*self.control.waker.borrow() {
            waker.wake_by_ref();
        }
    }

    fn set_call(&self, call: Option<OwnedFd>) {
        *self.eventfds.call.borrow_mut() = call;
        // Elements published in between may have called the old eventfd.
        self.ring.borrow_mut().force_call();
        self.flags.to_notify.set(true);
    }

    fn set_err(&self, err: Option<OwnedFd>) {
        *self.eventfds.err.borrow_mut() = err;
        // The eventfd may have been on its way when the ring turned out to be bad.
        if self.flags.broken.get() {
            self.signal_err();
        }
    }

    /// Shows other threads the number of unanswered requests and the place in the ring. Called once
    /// in a run, even if it served nothing.
    #[inline]
    pub(crate) fn publish_status(&self, requests: usize) {
        let status = &self.control.status;
        status.requests.store(iomem::fits(requests, "a number of chains"), Ordering::Relaxed);
        status.base.store(self.base(), Ordering::Relaxed);
    }

    /// Halts while there is no room, and returns true if it does. The queue's task checks again
    /// when a chain of this queue is answered.
    #[cold]
    fn set_halted(&self) -> bool {
        // A queue stops only after it has taken the chains of an earlier process. Until then its
        // waiting requests do not know of the stop, so they may never make room.
        let has_recovered =
            self.control.stop.borrow().is_some() && self.ring.borrow().has_recovered();
        let has_room =
            (self.budgets.lists.has_room() && self.budgets.data.has_room()) || has_recovered;
        self.control.status.is_full.store(!has_room, Ordering::Relaxed);
        self.flags.halted.set(self.flags.broken.get() || !has_room);
        self.flags.halted.get()
    }

    /// True if nothing is popped now.
    #[inline]
    fn is_halted(&self) -> bool {
        self.flags.halted.get() && self.set_halted()
    }

    /// The next chain; `None` if there is none, there is no room, or the ring is bad.
    #[inline]
    pub(crate) fn pop(&self) -> Result<Option<Chain>, QueueError> {
        if self.is_halted() { Ok(None) } else { self.ring.borrow_mut().pop() }
    }

    /// True if an earlier process has seen the chain with this head and not answered it: that
    /// process may have carried out the request.
    pub(crate) fn is_recovered(&self, head: u16) -> bool {
        self.ring.borrow().is_recovered(head)
    }

    /// Ends the service after all requests are done. Chains that were seen and not popped are left
    /// for the next start of the queue.
    pub(crate) fn finish(&self) {
        self.hooks.in_order.flush(&mut self.ring.borrow_mut());
        self.notify();
        if !self.flags.broken.get() {
            self.ring.borrow_mut().unmark_rest();
        }
    }

    /// Answers a chain. The driver sees it after the next publish.
    #[inline]
    pub(crate) fn push(&self, head: u16, written_bytes: u32) {
        probe::probe!(ringhaul, push, self.number(), head, written_bytes);
        self.flags.to_notify.set(true);
        if self.hooks.are_due.get() {
            return self.push_with_hooks(head, written_bytes);
        }
        self.ring.borrow_mut().push(head, written_bytes);
    }

    #[cold]
    fn push_with_hooks(&self, head: u16, written_bytes: u32) {
        self.hooks.in_order.push(&mut self.ring.borrow_mut(), head, written_bytes);
        let has_tokens = self.barrier.answered(head, self.not_done());
        let is_usual = self.hooks.notify_batch && !self.hooks.in_order.is_on();
        self.hooks.are_due.set(has_tokens || !is_usual);
        if !self.hooks.notify_batch {
            self.notify();
        }
    }

    /// Makes requests check their access from now on, and keeps `token` until the requests that
    /// have begun are answered.
    pub(crate) fn raise_barrier(&self, token: Box<dyn Any>) {
        self.barrier.checks_access.set(true);
        self.barrier.add_token(token, self.not_done());
        self.hooks.are_due.set(true);
    }

    /// Chains that were popped and not pushed.
    #[inline]
    pub(crate) fn in_device(&self) -> u16 {
        self.ring.borrow().in_device()
    }

    /// Popped chains that are not done. The rest of [`in_device`](Self::in_device) waits for its
    /// turn to be pushed.
    pub(crate) fn not_done(&self) -> u16 {
        self.in_device() - self.hooks.in_order.waiting()
    }

    #[inline]
    pub(crate) fn is_broken(&self) -> bool {
        self.flags.broken.get()
    }

    pub(crate) fn accepts_chains(&self) -> bool {
        !self.flags.broken.get() && !self.flags.stopping.get()
    }

    /// A view of the driver's avail idx for other threads.
    pub(crate) fn avail_idx(&self) -> AvailIdx {
        self.ring.borrow_mut().avail_idx()
    }

    /// The number of chains that were not popped and will be.
    pub(crate) fn available(&self) -> u16 {
        if self.flags.broken.get() { 0 } else { self.ring.borrow_mut().available_now() }
    }

    /// Reports the fault and no longer touches the ring. All other queues continue.
    #[cold]
    pub(crate) fn set_broken(&self, fault: &QueueFault) {
        self.reports.events.queue_stopped(self.reports.index, fault);
        self.flags.broken.set(true);
        self.flags.halted.set(true);
        self.budgets.data.cancel_wait();
        self.signal_err();
    }

    fn signal_err(&self) {
        if let Some(err) = &*self.eventfds.err.borrow() {
            self.eventfds.caller.add_one(err);
        }
    }

    #[inline]
    pub(crate) fn has_to_notify(&self) -> bool {
        self.flags.to_notify.get()
    }

    /// The number of the next chain.
    pub(crate) fn next_chain(&self) -> u16 {
        self.ring.borrow().next_chain()
    }

    /// The place at which the next start of the ring continues.
    #[inline]
    pub(crate) fn base(&self) -> u32 {
        self.ring.borrow().base()
    }

    /// Registers the memory map with the engine, so that it keeps the pages at hand until the
    /// result is dropped. An engine that cannot do so works without.
    pub(crate) fn register_memory(&self, io: &Rc<Io>) -> io::Result<RegisteredMemory> {
        io.register_memory(self.memory.whole())
    }
}
