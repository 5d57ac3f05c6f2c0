//! A request queue on its IoThread: its tasks, and the logical units with their disks on that
//! thread. Other threads reach all request queues of a device.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use blockio::disk::WaitMode;
use blockio::executor::Lock;
use blockio::{Disk, Io};
use virtqueue::AvailIdx;

use super::held::{HeldCommands, LocalHeldCommands};
use super::outcome::{Failure, TaskHandle};
use super::unit::Unit;
use super::units::Units;
use crate::access::task_set::{TaskSelector, Tasks, Treatment, WaitGroup, WaitToken};
use crate::queue::Queue;
use crate::queue::per_thread::PerThread;
use crate::unit_address::{UnitAddress, UnitNumber};

/// A logical unit with its disk on this IoThread.
pub(crate) struct LocalUnit {
    /// A copy of the unit's address.
    address: UnitAddress,
    pub(crate) unit: Arc<Unit>,
    pub(crate) disk: Disk,
}

/// A request queue, on its IoThread.
pub(crate) struct RequestQueue {
    pub(crate) tasks: Tasks,
    pub(crate) io: Rc<Io>,
    units: Arc<Units>,
    /// Units that had a command here, sorted by address.
    local: RefCell<Vec<Rc<LocalUnit>>>,
    /// The index in `local` of the last request's unit.
    found: Cell<usize>,
    /// The generation of `units` when `local` was compared with them.
    generation: Cell<u64>,
    /// The current rule for waits of commands.
    waits: Cell<WaitMode>,
    /// Commands that wait for a unit to be added.
    pub(super) held: LocalHeldCommands,
    queue: Weak<Queue>,
}

impl LocalUnit {
    pub(crate) fn new(unit: &Arc<Unit>, io: &Rc<Io>) -> Self {
        Self { address: unit.address, unit: Arc::clone(unit), disk: unit.source.attach(io) }
    }

    fn set_wait_mode(&self, waits: WaitMode) {
        self.disk.set_wait_mode(waits);
        if waits == WaitMode::Never {
            self.unit.access.recheck_waiting();
        }
    }
}

impl RequestQueue {
    fn new(io: &Rc<Io>, queue: &Rc<Queue>, units: Arc<Units>) -> Self {
        Self {
            tasks: Tasks::new(queue.next_chain()),
            io: Rc::clone(io),
            units,
            local: RefCell::default(),
            found: Cell::default(),
            // Forces a comparison at the first request.
            generation: Cell::new(u64::MAX),
            waits: Cell::default(),
            held: LocalHeldCommands::default(),
            queue: Rc::downgrade(queue),
        }
    }

    /// The unit at an address.
    #[inline(always)]
    pub(crate) fn unit(&self, address: UnitAddress) -> Option<Rc<LocalUnit>> {
        if self.generation.get() != self.units.generation() {
            self.refresh();
        }
        match self.local.borrow().get(self.found.get()) {
            Some(found) if found.address == address => return Some(Rc::clone(found)),
            _ => {}
        }
        self.find(address)
    }

    fn find(&self, address: UnitAddress) -> Option<Rc<LocalUnit>> {
        let local = &mut *self.local.borrow_mut();
        let at = local.binary_search_by_key(&address, |local| local.address).or_else(|at| {
            local.insert(at, self.units.with_unit(address, |unit| self.attach(unit)).ok_or(())?);
            Ok::<_, ()>(at)
        });
        let at = at.ok()?;
        self.found.set(at);
        Some(Rc::clone(&local[at]))
    }

    /// Attaches a unit at its first command here: a queue without commands for it costs no memory.
    /// When the unit is removed, it is released here before the disk is closed.
    #[cold]
    fn attach(&self, unit: &Arc<Unit>) -> Rc<LocalUnit> {
        let local = LocalUnit::new(unit, &self.io);
        local.disk.set_wait_mode(self.waits.get());
        Rc::new(local)
    }

    /// Releases units that no longer exist.
    #[cold]
    fn refresh(&self) {
        self.generation.set(self.units.generation());
        let is_there = |local: &Rc<LocalUnit>| {
            let is_same = |unit: &Arc<Unit>| Arc::ptr_eq(unit, &local.unit);
            self.units.with_unit(local.address, is_same) == Some(true)
        };
        let (there, gone) = self.local.take().into_iter().partition::<Vec<_>, _>(is_there);
        self.local.replace(there);
        gone.iter().for_each(|gone| gone.set_wait_mode(WaitMode::Never));
    }

    /// Sets the rule for waits of commands at their disks, for limits and for retries.
    pub(crate) fn set_wait_mode(&self, waits: WaitMode) {
        self.waits.set(waits);
        self.local.borrow().iter().for_each(|local| local.set_wait_mode(waits));
        self.held.changed.notify_all();
    }

    /// Waits for the unit at an address. The task uses nothing during the wait.
    ///
    /// # Errors
    ///
    /// If the task was aborted, or the queue stops and cannot leave the command for later.
    pub(super) async fn wait_for_unit(
        &self,
        commands: &HeldCommands,
        address: UnitAddress,
        task: TaskHandle<'_>,
    ) -> Result<Rc<LocalUnit>, Failure> {
        self.tasks.suspend(task.number);
        let held = commands.begin(address);
        let listener = self.held.changed.listener();
        let found = poll_fn(|cx| {
            listener.listen(cx);
            if let Err(failure) = task.check() {
                return Poll::Ready(Err(failure));
            }
            if let Some(local) = self.unit(address) {
                return Poll::Ready(Ok(local));
            }
            match self.waits.get() {
                WaitMode::All | WaitMode::Frozen => {}
                WaitMode::RetriesOnly | WaitMode::Never => return Poll::Ready(Err(Failure::Busy)),
            }
            Poll::Pending
        });
        let found = found.await;
        drop(held);
        self.tasks.end_suspended();
        found
    }

    /// True if an earlier process took the command with this head.
    pub(crate) fn is_recovered(&self, head: u16) -> bool {
        self.queue.upgrade().is_some_and(|queue| queue.is_recovered(head))
    }

    /// Covers tasks as `treatment` says, and chains that are not popped: the chains before number
    /// `until`, or all available ones.
    fn cover(
        &self,
        selector: TaskSelector,
        treatment: Treatment,
        until: Option<u16>,
        token: WaitToken,
    ) {
        let Some(queue) = self.queue.upgrade() else {
            self.tasks.cover(selector, treatment, 0, token);
            self.recheck_waiting(treatment);
            return;
        };
        let available = i64::from(queue.available());
        // Later chains may have come, and may have been popped. No ring has 2^15 entries.
        let next_chain = queue.next_chain();
        let ahead = |until: u16| i64::from(until.wrapping_sub(next_chain).cast_signed());
        let ahead = until.map_or(available, |until| ahead(until).min(available));
        if queue.is_broken() && until != Some(next_chain) {
            // The next owner of the queue may carry out the rest of its ring.
            token.mark_lost();
        }
        if self.tasks.cover(selector, treatment, ahead, token) {
            // The driver need not have kicked for these chains, and may never do so.
            queue.wake();
        }
        self.recheck_waiting(treatment);
    }

    /// Wakes tasks that may have been aborted while they wait for limits, for a retry or for the
    /// medium.
    fn recheck_waiting(&self, treatment: Treatment) {
        let aborts = matches!(treatment, Treatment::Abort(_) | Treatment::AbortBegun(_));
        if aborts && self.tasks.suspended() > 0 {
            self.held.changed.notify_all();
            for local in self.local.borrow().iter() {
                local.disk.recheck_waiting();
                local.unit.access.recheck_waiting();
            }
        }
    }
}

/// The request queues of a device, for any thread.
#[derive(Default)]
pub(crate) struct RequestQueues {
    queues: PerThread<RequestQueue>,
    /// The progress of the driver, by queue index.
    avail_idx: Lock<BTreeMap<u16, AvailIdx>>,
}

impl RequestQueues {
    /// Starts queue `index` on this IoThread.
    pub(crate) fn start(
        &self,
        index: u16,
        io: &Rc<Io>,
        queue: &Rc<Queue>,
        units: Arc<Units>,
    ) -> Rc<RequestQueue> {
        let started = Rc::new(RequestQueue::new(io, queue, units));
        self.avail_idx.lock().insert(index, queue.avail_idx());
        self.queues.insert(index, io, &started);
        started
    }

    /// Forgets queues that stopped earlier: their remaining chains do not concern a new driver.
    pub(crate) fn begin(&self) {
        self.queues.remove_dropped();
    }

    /// Wakes commands that wait for a unit, after a unit was added.
    pub(crate) fn wake_held(&self) {
        self.queues.post_each(|_| {
            Box::new(|queue| {
                if let Some(queue) = queue {
                    queue.held.changed.notify_all();
                }
            })
        });
    }

    /// Releases the disk of a removed unit. The result is ready when no request uses the disk.
    pub(crate) fn release(&self, unit: UnitNumber) -> WaitGroup {
        let (waiting, token) = WaitGroup::new();
        self.queues.post_each(|_| {
            let token: WaitToken = token.clone();
            Box::new(move |queue| {
                if let Some(queue) = queue {
                    queue.refresh();
                    queue.tasks.cover(TaskSelector::Unit(unit), Treatment::AwaitAll, 0, token);
                }
            })
        });
        waiting
    }

    /// Covers tasks on all queues as `treatment` says. Chains that the driver makes available later
    /// are no tasks. The result is ready, with the number of tasks found, when the awaited ones
    /// have ended.
    pub(crate) fn cover(&self, selector: TaskSelector, treatment: Treatment) -> WaitGroup {
        let (waiting, token) = WaitGroup::new();
        let avail_idx = self.avail_idx.lock();
        self.queues.post_each(|index| {
            let token: WaitToken = token.clone();
            let until = avail_idx.get(&index).and_then(AvailIdx::load);
            Box::new(move |queue| match queue {
                Some(queue) => queue.cover(selector, treatment, until, token),
                // The queue has stopped, and the rest of its ring is unknown.
                None => token.mark_lost(),
            })
        });
        waiting
    }
}

#[cfg(test)]
impl RequestQueues {
    /// The most waits for tasks of one queue, once all queues have reported.
    pub(crate) fn awaited(&self) -> Arc<AtomicUsize> {
        self.most(|queue| queue.tasks.awaited())
    }

    /// The most units attached to one queue, once all queues have reported.
    pub(crate) fn attached(&self) -> Arc<AtomicUsize> {
        self.most(|queue| queue.local.borrow().len())
    }

    fn most(&self, count: fn(&RequestQueue) -> usize) -> Arc<AtomicUsize> {
        let most = Arc::<AtomicUsize>::default();
        self.queues.post_each(|_| {
            let most = Arc::clone(&most);
            Box::new(move |queue| {
                let here = queue.map_or(0, count);
                most.fetch_max(here, Ordering::Relaxed);
            })
        });
        most
    }
}
