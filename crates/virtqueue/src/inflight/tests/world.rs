//! Processes that serve a queue of either layout, one after another, and may die before each of
//! their stores.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use crate::chain::Chain;
use crate::death::tests as death;
use crate::device_queue::DeviceQueue;
use crate::driver::{Desc, Driver, PACKED_START, PackedDriver, Used};
use crate::error::QueueError;
use crate::inflight::{InflightRegion, Recovery, RingLayout};
use crate::memory::{GuestMemory, LocalMemory};
use crate::split::QueueConfig;
use crate::virtqueue::Virtqueue;

type Memory = Arc<GuestMemory>;

/// The driver's side of a ring.
pub(crate) enum GuestDriver {
    Split(Driver<Memory>),
    Packed(PackedDriver<Memory>),
}

use GuestDriver::{Packed, Split};

/// Calls the method of the driver's layout.
macro_rules! either {
    ($driver:expr, $method:ident($($argument:expr),*)) => {
        match $driver {
            Split(driver) => driver.$method($($argument),*),
            Packed(driver) => driver.$method($($argument),*),
        }
    };
}

impl GuestDriver {
    /// Makes a chain available.
    pub(crate) fn offer(&mut self, buffers: &[Desc], table: Option<u64>) -> u16 {
        let head = either!(self, add(buffers, table));
        either!(self, publish());
        head
    }

    pub(crate) fn take_used(&mut self) -> Option<Used> {
        either!(self, take_used())
    }

    /// The base of a queue that has popped all chains and answered them.
    fn end_base(&self) -> u32 {
        match self {
            Split(driver) => driver.avail_idx().into(),
            Packed(driver) => u32::from(driver.next_avail) * 0x1_0001,
        }
    }
}

/// The state that outlives a process: guest memory with a driver in it, and the region.
pub(in crate::inflight) struct World {
    pub(in crate::inflight) memory: Memory,
    pub(in crate::inflight) driver: GuestDriver,
    pub(in crate::inflight) region: InflightRegion,
    config: QueueConfig,
    layout: RingLayout,
    random: u64,
    /// Requests by their present heads. The number of a request is the length of its buffers.
    waiting: BTreeMap<u32, u32>,
    offered: u32,
    answered: u32,
    /// Requests, in order, that a process has begun and that the driver has no answer to.
    begun: Vec<u32>,
}

/// A process that serves the queue.
pub(in crate::inflight) struct Life {
    pub(in crate::inflight) queue: Virtqueue,
    /// Head and number of each request to answer.
    tasks: Vec<(u16, u32)>,
}

impl World {
    /// A world whose region has room for two rings of this many entries.
    pub(in crate::inflight) fn new(
        layout: RingLayout,
        config: QueueConfig,
        entries: u16,
        seed: u64,
    ) -> Self {
        let memory = Arc::new(GuestMemory::anonymous(&[(0, 0x10000)]).unwrap());
        let region = Arc::new(GuestMemory::anonymous(&[(0, 0x1000)]).unwrap());
        let driver = match layout {
            RingLayout::Split => Split(Driver::new(Arc::clone(&memory), config)),
            RingLayout::Packed => Packed(PackedDriver::new(Arc::clone(&memory), config)),
        };
        Self {
            memory,
            driver,
            region: InflightRegion::new(region, 2, entries).unwrap(),
            config,
            layout,
            random: seed * 2 + 1,
            waiting: BTreeMap::new(),
            offered: 0,
            answered: 0,
            begun: Vec::new(),
        }
    }

    fn below(&mut self, end: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        ((self.random >> 33) as usize) % end
    }

    /// Starts with the places of a front-end that knows nothing about the previous process.
    pub(in crate::inflight) fn open(&self) -> Result<(Virtqueue, Recovery), QueueError> {
        let account = self.region.queue(1, self.layout).unwrap();
        let next_avail = match &self.driver {
            Split(driver) => driver.ring().used_idx(),
            Packed(_) => PACKED_START,
        };
        let config = QueueConfig { next_avail, ..self.config };
        let memory = LocalMemory::new(Arc::clone(&self.memory));
        Virtqueue::with_inflight(memory, self.layout, config, PACKED_START, &account)
    }

    /// Starts a process. Requests that the previous one had begun must come first, in the same
    /// order, except for requests that the driver has an answer to.
    pub(in crate::inflight) fn live(&mut self) -> Life {
        let (queue, recovery) = self.open().unwrap();
        assert!(!matches!(recovery, Recovery::Stale { .. }), "{recovery:?}");
        let mut life = Life { queue, tasks: Vec::new() };
        self.take_answers();
        let before = std::mem::take(&mut self.begun);
        // A device pops as many as are said to be there.
        assert_eq!(usize::from(life.queue.available_now()), self.waiting.len());
        while life.queue.has_recovered() {
            let chain = life.queue.pop().unwrap().unwrap();
            assert!(life.queue.is_recovered(chain.head));
            self.begin(&mut life, &chain);
        }
        // Requests follow that the previous process had not begun: of a split ring all that it had
        // seen, of a packed ring one that it had taken.
        assert!(self.begun.starts_with(&before), "{before:?} became {:?}", self.begun);
        assert!(self.layout == RingLayout::Split || self.begun.len() <= before.len() + 1);
        life
    }

    fn begin(&mut self, life: &mut Life, chain: &Chain) {
        let number: u32 = iomem::fits(chain.writable.bytes(), "a number");
        assert_eq!(self.waiting.get(&chain.head.into()), Some(&number), "it was answered");
        assert!(!self.begun.contains(&number), "{number} was begun twice");
        self.begun.push(number);
        life.tasks.push((chain.head, number));
    }

    fn take_answers(&mut self) {
        while let Some(used) = self.driver.take_used() {
            let number = self.waiting.remove(&used.head).expect("it was answered before");
            assert_eq!(used.bytes, number);
            self.begun.retain(|begun| *begun != number);
            self.answered += 1;
        }
    }

    /// Makes a request available: one to three descriptors, or an indirect table.
    fn offer(&mut self) {
        let pieces = 1 + self.below(3);
        let is_indirect = self.below(3) == 0;
        if either!(&self.driver, room()) < if is_indirect { 1 } else { pieces } {
            return;
        }
        self.offered += 3;
        let number = self.offered;
        let lengths = match pieces {
            1 => vec![number],
            2 => vec![1, number - 1],
            _ => vec![1, 1, number - 2],
        };
        let buffers: Vec<_> = lengths.iter().map(|len| Desc::writable(0x8000, *len)).collect();
        let head = either!(&self.driver, next_head());
        let table = head.filter(|_| is_indirect).map(|head| 0x4000 + u64::from(head) * 64);
        let head = self.driver.offer(&buffers, table);
        self.waiting.insert(head.into(), number);
    }

    fn step(&mut self, life: &mut Life) {
        match self.below(8) {
            0 | 1 => self.offer(),
            2 => {
                if let Some(chain) = life.queue.pop().unwrap() {
                    self.begin(life, &chain);
                }
            }
            3 | 4 if !life.tasks.is_empty() => {
                let at = self.below(life.tasks.len());
                let (head, number) = life.tasks[at];
                life.queue.push(head, number);
                life.tasks.remove(at);
            }
            5 => drop(life.queue.publish_quietly()),
            6 => Self::give_back(life),
            7 if self.below(3) == 0 => self.stop(life),
            _ => self.take_answers(),
        }
    }

    /// Pops a chain and gives it back.
    fn give_back(life: &mut Life) {
        let base = life.queue.base();
        if let Some(chain) = life.queue.pop().unwrap() {
            life.queue.put_back(chain.head);
            assert_eq!(life.queue.base(), base);
        }
    }

    /// Stops the queue with unanswered requests, and starts it again or goes on.
    fn stop(&mut self, life: &mut Life) {
        let _ = life.queue.publish();
        life.queue.unmark_rest();
        if self.below(3) > 0 {
            *life = self.live();
        }
    }

    fn finish(&mut self, life: &mut Life) {
        loop {
            while let Some(chain) = life.queue.pop().unwrap() {
                self.begin(life, &chain);
            }
            if life.tasks.is_empty() {
                break;
            }
            for (head, number) in life.tasks.drain(..) {
                life.queue.push(head, number);
            }
            let _ = life.queue.publish();
        }
        let _ = life.queue.publish();
        life.queue.unmark_rest();
        self.take_answers();
        assert_eq!((self.answered * 3, self.waiting.len()), (self.offered, 0));
        assert_eq!(either!(&self.driver, room()), usize::from(self.config.size));
        assert_eq!(life.queue.base(), self.driver.end_base());
    }

    /// Runs processes until all steps are done. The first one dies before store `first`, later ones
    /// after a random number of up to `stores` stores. Returns true if any process died.
    fn run(&mut self, first: u32, stores: usize) -> bool {
        let mut left = 90;
        let mut lives = 0;
        death::after(Some(first));
        loop {
            let life = catch_unwind(AssertUnwindSafe(|| {
                let mut life = self.live();
                while left > 0 {
                    left -= 1;
                    self.step(&mut life);
                }
                life
            }));
            match life {
                Ok(mut life) => {
                    death::after(None);
                    self.finish(&mut life);
                    return lives > 0;
                }
                Err(cause) if !cause.is::<death::SimulatedDeath>() => resume_unwind(cause),
                Err(_) => {}
            }
            lives += 1;
            let more: u32 = iomem::fits(self.below(stores), "a number");
            death::after((lives < 6).then_some(more));
        }
    }
}

/// Runs processes in 40 worlds. The first process dies before each of its stores, later ones after
/// up to `stores` stores. `check` checks the account that the last one leaves.
pub(in crate::inflight) fn die_everywhere(
    world: impl Fn(u64) -> World,
    stores: usize,
    check: impl Fn(&World),
) {
    for seed in 0..40 {
        for first in 0.. {
            let mut world = world(seed);
            let has_died = world.run(first, stores);
            check(&world);
            if !has_died {
                assert!(first > 50, "it has died before {first} stores only");
                break;
            }
        }
    }
}
