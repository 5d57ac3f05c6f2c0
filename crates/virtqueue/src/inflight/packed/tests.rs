//! Processes that die before each of their stores, and accounts that are wrong.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;

use super::*;
use crate::chain::Chain;
use crate::death::before_stores;
use crate::death::tests as death;
use crate::driver::{Desc, PACKED_START, PackedDriver};
use crate::inflight::InflightRegion;
use crate::memory::LocalMemory;
use crate::packed::PackedQueue;
use crate::split::QueueConfig;

/// No power of two, and shorter than the account.
const SIZE: u16 = 7;
const ENTRIES: u16 = 9;
const RING: QueueConfig = QueueConfig {
    size: SIZE,
    desc_table: 0x1000,
    avail_ring: 0x2000,
    used_ring: 0x3000,
    event_idx: false,
    indirect: true,
    next_avail: PACKED_START,
};

/// The state that outlives a process: guest memory with a driver in it, and the region.
struct World {
    memory: Arc<GuestMemory>,
    driver: PackedDriver<Arc<GuestMemory>>,
    region: InflightRegion,
    random: u64,
    /// Requests by their present ids. The number of a request is the length of its buffers.
    waiting: BTreeMap<u32, u32>,
    offered: u32,
    answered: u32,
    /// Requests, in order, that a process has begun and that the driver has no answer to.
    begun: Vec<u32>,
}

/// A process that serves the queue.
struct Life {
    queue: PackedQueue,
    /// Id and number of each request to answer.
    tasks: Vec<(u16, u32)>,
}

impl World {
    fn new(seed: u64) -> Self {
        let memory = Arc::new(GuestMemory::anonymous(&[(0, 0x10000)]).unwrap());
        let region = Arc::new(GuestMemory::anonymous(&[(0, 0x1000)]).unwrap());
        Self {
            driver: PackedDriver::new(Arc::clone(&memory), RING),
            memory,
            region: InflightRegion::new(region, 2, ENTRIES).unwrap(),
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
    fn open(&self) -> Result<(PackedQueue, Recovery), QueueError> {
        let account = self.region.queue(1, RingLayout::Packed).unwrap();
        let memory = LocalMemory::new(Arc::clone(&self.memory));
        PackedQueue::with_inflight(memory, RING, PACKED_START, &account)
    }

    /// Starts a process. Requests that the previous one had begun must come first, in the same
    /// order, except for requests that the driver has an answer to.
    fn live(&mut self) -> Life {
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
        // A request follows that the previous process had taken and not begun.
        assert!(self.begun.starts_with(&before), "{before:?} became {:?}", self.begun);
        assert!(self.begun.len() <= before.len() + 1);
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
        if self.driver.room() < if is_indirect { 1 } else { pieces } {
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
        let table = self.driver.next_head().map(|id| 0x4000 + u64::from(id) * 64);
        let id = self.driver.add(&buffers, table.filter(|_| is_indirect));
        self.waiting.insert(id.into(), number);
        self.driver.publish();
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
                let (id, number) = life.tasks[at];
                life.queue.push(id, number);
                life.tasks.remove(at);
            }
            5 => drop(life.queue.publish_quietly()),
            6 => self.give_back(life),
            7 if self.below(4) == 0 => {
                let _ = life.queue.publish();
                life.queue.unmark_rest();
                *life = self.live();
            }
            _ => self.take_answers(),
        }
    }

    /// Pops a chain and gives it back.
    fn give_back(&mut self, life: &mut Life) {
        let base = life.queue.base();
        if let Some(chain) = life.queue.pop().unwrap() {
            life.queue.put_back(chain.head);
            assert_eq!(life.queue.base(), base);
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
            for (id, number) in life.tasks.drain(..) {
                life.queue.push(id, number);
            }
            let _ = life.queue.publish();
        }
        let _ = life.queue.publish();
        life.queue.unmark_rest();
        assert!(account_of(self).requests().is_empty());
        self.take_answers();
        assert_eq!((self.answered * 3, self.waiting.len()), (self.offered, 0));
        assert_eq!(self.driver.room(), SIZE.into());
        let base = life.queue.base();
        assert_eq!((base & 0xffff, base >> 16), (self.driver.next_avail.into(), base & 0xffff));
    }
}

fn account_of(world: &World) -> PackedAccount {
    PackedAccount::map(&world.region.queue(1, RingLayout::Packed).unwrap()).unwrap()
}

/// Runs processes until all steps are done. The first one dies before store `first`, later ones
/// after a random number of stores. Returns true if any process died.
fn run(seed: u64, first: u32) -> bool {
    let mut world = World::new(seed);
    let mut left = 90;
    let mut lives = 0;
    death::after(Some(first));
    loop {
        let life = catch_unwind(AssertUnwindSafe(|| {
            let mut life = world.live();
            while left > 0 {
                left -= 1;
                world.step(&mut life);
            }
            life
        }));
        match life {
            Ok(mut life) => {
                death::after(None);
                world.finish(&mut life);
                return lives > 0;
            }
            Err(cause) if !cause.is::<death::SimulatedDeath>() => resume_unwind(cause),
            Err(_) => {}
        }
        lives += 1;
        let more: u32 = iomem::fits(world.below(120), "a number");
        death::after((lives < 6).then_some(more));
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes long")]
fn nothing_is_lost_or_done_twice_whenever_the_process_dies() {
    for seed in 0..40 {
        let mut first = 0;
        while run(seed, first) {
            first += 1;
        }
        assert!(first > 50, "it has died before {first} stores only");
    }
}

/// A batch of all descriptors moves the place of the next element by a whole lap: only its wrap
/// counter tells that it has moved.
#[test]
fn a_batch_of_the_whole_ring_is_complete_or_undone() {
    let lap = |world: &mut World, life: &mut Life| {
        for number in 1..=SIZE {
            world.driver.add(&[Desc::writable(0x8000, number.into())], None);
        }
        world.driver.publish();
        let ids: Vec<_> = (0..SIZE).map(|_| life.queue.pop().unwrap().unwrap().head).collect();
        ids.iter().for_each(|id| life.queue.push(*id, 1));
        life.queue.publish_quietly()
    };
    let mut outcomes = [0, 0];
    for stores in 0.. {
        let mut world = World::new(0);
        let mut life = world.live();
        death::after(Some(stores));
        let published = catch_unwind(AssertUnwindSafe(|| lap(&mut world, &mut life)));
        death::after(None);
        let is_visible = world.driver.has_used();
        let (queue, recovery) = world.open().unwrap();
        let is_complete = queue.base() >> 16 == 0;
        assert_eq!(is_visible, is_complete, "{stores}: {recovery:?}");
        outcomes[usize::from(is_visible)] += 1;
        if let Ok(count) = published {
            assert_eq!(count, SIZE);
            break;
        }
    }
    assert!(outcomes.iter().all(|count| *count > SIZE.into()), "{outcomes:?}");
}

/// A ring that the driver has set up again: the account of the earlier one has no meaning.
#[test]
fn an_account_of_another_ring_is_replaced() {
    for answered in 0..2 * SIZE {
        let mut world = World::new(0);
        let mut life = world.live();
        for number in 1..=answered + 2 {
            world.driver.add(&[Desc::writable(0x8000, number.into())], None);
            world.driver.publish();
            let id = life.queue.pop().unwrap().unwrap().head;
            if number <= answered {
                life.queue.push(id, 0);
                let _ = life.queue.publish();
                let _ = world.driver.take_used();
            }
        }
        drop(life);
        world.driver = PackedDriver::new(Arc::clone(&world.memory), RING);
        let (mut queue, recovery) = world.open().unwrap();
        assert_eq!(recovery, Recovery::Stale { requests: 2 }, "{answered}");
        assert_eq!(queue.base(), 0x8000_8000, "as the front-end says");
        world.driver.add(&[Desc::writable(0x8000, 5)], None);
        world.driver.publish();
        assert_eq!(queue.pop().unwrap().unwrap().writable.bytes(), 5);
        drop(queue);
        assert_eq!(world.open().unwrap().1, Recovery::Known { requests: 1 });
    }
}

/// Writes something wrong into an account.
type Spoil = fn(&PackedAccount);

#[test]
fn an_account_that_makes_no_sense_is_refused() {
    let fresh = || {
        let mut world = World::new(3);
        let mut life = world.live();
        world.driver.add(&[Desc::writable(0x8000, 1), Desc::writable(0x8000, 1)], None);
        world.driver.publish();
        life.queue.pop().unwrap().unwrap();
        world
    };
    let error_of = |spoil: Spoil| {
        let world = fresh();
        spoil(&account_of(&world));
        match world.open() {
            Err(error) => error,
            Ok((mut queue, _)) => queue.pop().unwrap_err(),
        }
    };
    let cases: [(Spoil, InflightError); 3] = [
        (|account| account.store(OFFSET_VERSION, 7), InflightError::Version { version: 7 }),
        (
            |account| account.store(OFFSET_ENTRIES, 16),
            InflightError::OtherSize { entries: 16, expected: ENTRIES },
        ),
        (
            |account| account.store(account.entry(0, ENTRY_NEXT), 99),
            InflightError::LinkOutOfRange { head: 99, entries: ENTRIES },
        ),
    ];
    for (spoil, expected) in cases {
        assert_eq!(error_of(spoil), QueueError::Inflight(expected));
    }
    // No descriptors, more than the ring has, or a place that it does not have: of another ring.
    let spoils: [Spoil; 4] = [
        |account| account.store(account.entry(0, ENTRY_COUNT), 0),
        |account| account.store(account.entry(0, ENTRY_COUNT), SIZE + 1),
        |account| account.store(OFFSET_USED, SIZE),
        |account| account.store(account.entry(0, ENTRY_COUNT), u16::MAX),
    ];
    for spoil in spoils {
        let world = fresh();
        spoil(&account_of(&world));
        assert_eq!(world.open().unwrap().1, Recovery::Stale { requests: 1 });
    }
}

/// The front-end changes the list of free entries, between any two stores of the next process.
#[test]
fn an_account_that_changes_while_it_is_opened_keeps_its_requests() {
    for stores in 0.. {
        let mut world = World::new(3);
        let mut life = world.live();
        for number in [3, 4] {
            world.driver.add(&[Desc::writable(0x8000, number)], None);
        }
        world.driver.publish();
        life.queue.pop().unwrap().unwrap();
        drop(life);
        let account = account_of(&world);
        let (left, start) =
            (Cell::new(stores), world.region.queue(1, RingLayout::Packed).unwrap().start);
        let memory = Arc::clone(&account.memory);
        before_stores(Some(Rc::new(move || match left.get() {
            0 => {
                // The entry of the request, as the head of both lists.
                memory.write(start + OFFSET_FREE_HEAD as u64, &[0; 4]).unwrap();
            }
            more => left.set(more - 1),
        })));
        let opened = world.open();
        before_stores(None);
        let (mut queue, recovery) = opened.unwrap();
        if stores == 0 {
            continue;
        }
        assert_eq!(recovery, Recovery::Known { requests: 1 }, "{stores}");
        // The second request does not take the entry of the first.
        assert_eq!([3, 4].map(|_| queue.pop().unwrap().unwrap().writable.bytes()), [3, 4]);
        drop(queue);
        let (mut queue, _) = world.open().unwrap();
        assert_eq!(queue.pop().unwrap().unwrap().writable.bytes(), 3, "{stores}");
        if stores > 20 {
            break;
        }
    }
}
