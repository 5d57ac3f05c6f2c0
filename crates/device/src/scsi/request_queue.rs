//! A request queue as its IoThread has it: its tasks, and the logical units with disks of that
//! thread. Other threads reach all those of a device.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use blockio::{Disk, Io, Remote};

use super::address::UnitAddress;
use super::task_set::{How, Left, Tasks, Waiting, Which};
use super::unit::Unit;
use super::units::Units;
use crate::queue::Queue;

/// A logical unit with its disk on this IoThread.
pub(crate) struct LocalUnit {
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
    /// That of `units` when `local` was made.
    generation: Cell<u64>,
    ring: OnceCell<Weak<Queue>>,
}

impl RequestQueue {
    fn new(io: &Rc<Io>, queue: &Rc<Queue>, units: Arc<Units>) -> Self {
        Self {
            tasks: Tasks::default(),
            io: Rc::clone(io),
            units,
            local: RefCell::default(),
            // Units are looked up at the first request.
            generation: Cell::new(u64::MAX),
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
        let at = local.binary_search_by_key(&address, |local| local.unit.address).ok()?;
        Some(Rc::clone(&local[at]))
    }

    #[cold]
    fn refresh(&self) {
        self.generation.set(self.units.generation());
        let attach = |unit: Arc<Unit>| {
            let same = |local: &&Rc<LocalUnit>| Arc::ptr_eq(&local.unit, &unit);
            if let Some(local) = self.local.borrow().iter().find(same) {
                return Rc::clone(local);
            }
            Rc::new(LocalUnit { disk: unit.source.attach(&self.io), unit })
        };
        let local = self.units.all().into_values().map(attach).collect();
        *self.local.borrow_mut() = local;
    }

    /// Avail entries of chains that were not popped: the first, and the one behind the last.
    fn chains(&self) -> [u16; 2] {
        self.ring.get().and_then(Weak::upgrade).map_or([0, 0], |queue| queue.chains())
    }
}

thread_local! {
    /// The request queues of this thread, for calls that come from others.
    static QUEUES: RefCell<Vec<(usize, Weak<RequestQueue>)>> = const { RefCell::new(Vec::new()) };
}

/// Numbers of queues that have started, in the whole process.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// The request queues of a device, for any thread: by index, the number of the last one that has
/// started, and its thread.
#[derive(Default)]
pub(crate) struct RequestQueues(Mutex<BTreeMap<u16, (usize, Remote)>>);

impl RequestQueues {
    /// Queue `index` starts on this IoThread.
    pub(crate) fn start(
        &self,
        index: u16,
        io: &Rc<Io>,
        queue: &Rc<Queue>,
        units: Arc<Units>,
    ) -> Rc<RequestQueue> {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let started = Rc::new(RequestQueue::new(io, queue, units));
        QUEUES.with_borrow_mut(|queues| {
            queues.retain(|(_, queue)| queue.strong_count() > 0);
            queues.push((number, Rc::downgrade(&started)));
        });
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        running.insert(index, (number, io.remote()));
        started
    }

    /// Has the thread of each queue do something with it. What was for queues that have gone is
    /// dropped.
    fn tell_each(&self, mut call: impl FnMut() -> Box<dyn FnOnce(&RequestQueue) + Send>) {
        let running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for &(number, ref thread) in running.values() {
            let call = call();
            thread.post(move |_| {
                let find = |queues: &Vec<(usize, Weak<RequestQueue>)>| {
                    queues.iter().find(|(other, _)| *other == number)?.1.upgrade()
                };
                if let Some(queue) = QUEUES.with_borrow(find) {
                    call(&queue);
                }
            });
        }
    }

    /// Releases disks whose units have been removed.
    pub(crate) fn refresh(&self) {
        self.tell_each(|| Box::new(RequestQueue::refresh));
    }

    /// Looks for tasks on all queues, and does what `how` says with them. The result is ready, with
    /// their number, when those have ended that are waited for.
    pub(crate) fn cover(&self, which: Which, how: How) -> Waiting {
        let (waiting, left) = Waiting::new();
        self.tell_each(|| {
            let left: Left = left.clone();
            Box::new(move |queue| queue.tasks.cover(which, how, queue.chains(), left))
        });
        waiting
    }
}
