//! A request queue as its IoThread has it: its tasks, and the logical units with disks of that
//! thread. Other threads reach all those of a device.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::{AtomicUsize, Ordering};

use blockio::{Disk, Io};

use super::address::{UnitAddress, UnitNumber};
use super::task_set::{How, Left, Tasks, Waiting, Which};
use super::unit::Unit;
use super::units::Units;
use crate::queue::Queue;
use crate::reach::Reach;

/// A logical unit with its disk on this IoThread.
pub(crate) struct LocalUnit {
    /// That of the unit.
    address: UnitAddress,
    pub(crate) unit: Arc<Unit>,
    pub(crate) disk: Disk,
}

/// A request queue, on its IoThread.
pub(crate) struct RequestQueue {
    pub(crate) tasks: Tasks,
    pub(crate) io: Rc<Io>,
    units: Arc<Units>,
    /// Sorted by address.
    local: RefCell<Vec<Rc<LocalUnit>>>,
    /// Where the last request has found its unit.
    found: Cell<usize>,
    /// That of `units` when `local` was made.
    generation: Cell<u64>,
    /// Whether the queue stops.
    is_ending: Cell<bool>,
    ring: OnceCell<Weak<Queue>>,
}

impl RequestQueue {
    fn new(io: &Rc<Io>, queue: &Rc<Queue>, units: Arc<Units>) -> Self {
        Self {
            tasks: Tasks::new(queue.next_avail()),
            io: Rc::clone(io),
            units,
            local: RefCell::default(),
            found: Cell::default(),
            // Units are looked up at the first request.
            generation: Cell::new(u64::MAX),
            is_ending: Cell::new(false),
            ring: OnceCell::from(Rc::downgrade(queue)),
        }
    }

    /// The unit at an address.
    #[inline]
    pub(crate) fn unit(&self, address: UnitAddress) -> Option<Rc<LocalUnit>> {
        if self.generation.get() != self.units.generation() {
            self.refresh();
        }
        let local = self.local.borrow();
        match local.get(self.found.get()) {
            Some(found) if found.address == address => Some(Rc::clone(found)),
            _ => self.find(&local, address),
        }
    }

    fn find(&self, local: &[Rc<LocalUnit>], address: UnitAddress) -> Option<Rc<LocalUnit>> {
        let at = local.binary_search_by_key(&address, |local| local.address).ok()?;
        self.found.set(at);
        Some(Rc::clone(&local[at]))
    }

    #[cold]
    fn refresh(&self) {
        self.generation.set(self.units.generation());
        let attach = |unit: &Arc<Unit>| {
            let same = |local: &&Rc<LocalUnit>| Arc::ptr_eq(&local.unit, unit);
            if let Some(local) = self.local.borrow().iter().find(same) {
                return Rc::clone(local);
            }
            let disk = unit.source.attach(&self.io);
            disk.set_ending(self.is_ending.get());
            Rc::new(LocalUnit { address: unit.address, unit: Arc::clone(unit), disk })
        };
        // Whoever removes a unit has it released here before the disk is closed.
        let local = self.units.look(|all| all.map(attach).collect());
        let before = self.local.replace(local);
        let is_gone =
            |old: &&Rc<LocalUnit>| !self.local.borrow().iter().any(|l| Rc::ptr_eq(l, old));
        before.iter().filter(is_gone).for_each(|gone| gone.disk.set_ending(true));
    }

    /// With `ends`, commands do not wait for limits, nor for a disk that has failed them.
    pub(crate) fn set_ending(&self, ends: bool) {
        self.is_ending.set(ends);
        self.local.borrow().iter().for_each(|local| local.disk.set_ending(ends));
    }

    /// Whether an earlier process had taken the command with this head.
    pub(crate) fn is_done_again(&self, head: u16) -> bool {
        let ring = self.ring.get().and_then(Weak::upgrade);
        ring.is_some_and(|ring| ring.is_done_again(head))
    }

    /// Does what `how` says with tasks, and with those whose chains nobody has popped.
    fn cover(&self, which: Which, how: How, left: Left) {
        let Some(ring) = self.ring.get().and_then(Weak::upgrade) else {
            self.tasks.cover(which, how, 0, left);
            return;
        };
        if self.tasks.cover(which, how, ring.available(), left) {
            // The driver need not have kicked for them, and may never do.
            ring.wake();
        }
    }
}

/// The request queues of a device, for any thread.
#[derive(Default)]
pub(crate) struct RequestQueues(Reach<RequestQueue>);

impl RequestQueues {
    /// Queue `index` starts on this IoThread.
    pub(crate) fn start(
        &self,
        index: u16,
        io: &Rc<Io>,
        queue: &Rc<Queue>,
        units: Arc<Units>,
    ) -> Rc<RequestQueue> {
        let started = Rc::new(RequestQueue::new(io, queue, units));
        self.0.set(index, io, &started);
        started
    }

    /// A driver begins: what queues have left behind that stopped before is not its concern.
    pub(crate) fn begin(&self) {
        self.0.forget_gone();
    }

    /// Releases the disk of a unit that has been removed. The result is ready when no request uses
    /// it any more.
    pub(crate) fn release(&self, unit: UnitNumber) -> Waiting {
        let (waiting, left) = Waiting::new();
        self.0.tell_each(|| {
            let left: Left = left.clone();
            Box::new(move |queue| {
                if let Some(queue) = queue {
                    queue.refresh();
                    queue.tasks.cover(Which::Unit(unit), How::Finish, 0, left);
                }
            })
        });
        waiting
    }

    /// Looks for tasks on all queues, and does what `how` says with them. The result is ready, with
    /// their number, when those have ended that are waited for.
    pub(crate) fn cover(&self, which: Which, how: How) -> Waiting {
        let (waiting, left) = Waiting::new();
        self.0.tell_each(|| {
            let left: Left = left.clone();
            Box::new(move |queue| match queue {
                Some(queue) => queue.cover(which, how, left),
                // It has stopped, and nobody knows what it has left in its ring.
                None => left.lose(),
            })
        });
        waiting
    }
}

#[cfg(test)]
impl RequestQueues {
    /// The most that somebody waits for the tasks of a queue, when all queues have looked.
    pub(crate) fn awaited(&self) -> Arc<AtomicUsize> {
        let awaited = Arc::<AtomicUsize>::default();
        self.0.tell_each(|| {
            let awaited = Arc::clone(&awaited);
            Box::new(move |queue| {
                let here = queue.map_or(0, |queue| queue.tasks.awaited());
                awaited.fetch_max(here, Ordering::Relaxed);
            })
        });
        awaited
    }
}
