//! A driver, a queue and its IoThread, all on the thread of a test.

use std::error::Error;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockio::{EngineKind, IoThread, IoThreadConfig, Wait, oneshot};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use virtqueue::driver::{Desc, Driver, Used};
use virtqueue::{
    AnswerPlace, GuestMemory, InflightAccount, InflightRegion, MappingRules, QueueConfig, Recovery,
    RegionConfig, RingLayout,
};

use crate::blk::config::F_RING_PACKED;
use crate::device::Device;
use crate::events::{Events, QueueFault};
use crate::queue::call_watch::CallTrust;
use crate::queue::data_budget::DataBudget;
use crate::queue::queue_setup::{QueueOptions, QueueSetup, QueueTuning, Ring, StartError};
use crate::queue::queue_task::{self, Handler};
use crate::queue::{Queue, QueueHandle};
use crate::stats::QueueStats;
use crate::unit_address::UnitAddress;

pub(crate) const RING: Ring = Ring {
    size: 64,
    desc_table: 0x1000,
    avail_ring: 0x2000,
    used_ring: 0x3000,
    next_avail: 0,
    next_used: 0,
};
/// The features of a driver that accepts all but packed rings, which its rings are not.
pub(crate) fn split_features(device: &Device) -> u64 {
    device.features() & !(1 << F_RING_PACKED)
}

/// Guest address of the area for buffers.
pub(crate) const DATA: u64 = 0x1_0000;
const MEMORY_BYTES: u64 = 4 << 20;
/// A time-out for waits that would never end.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// Events as lines.
#[derive(Default)]
pub(crate) struct EventLines(Mutex<Vec<String>>);

impl EventLines {
    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }

    fn add(&self, line: String) {
        self.0.lock().unwrap().push(line);
    }
}

impl Events for EventLines {
    fn request_failed(&self, error: &dyn Error) {
        self.add(error.to_string());
    }

    fn queue_stopped(&self, queue: u16, fault: &QueueFault) {
        self.add(format!("queue {queue}: {fault}"));
    }

    fn kick_not_watched(&self, queue: u16, error: &dyn Error) {
        self.add(format!("queue {queue}: its kick cannot be watched: {error}"));
    }

    fn queue_recovered(&self, queue: u16, recovery: Recovery) {
        self.add(format!("queue {queue}: {recovery:?}"));
    }

    fn queue_continued(&self, queue: u16, next_avail: u16) {
        self.add(format!("queue {queue} continues at {next_avail}"));
    }

    fn requests_held(&self, unit: UnitAddress) {
        self.add(format!("held: {unit}"));
    }

    fn memory_not_registered(&self, error: &io::Error) {
        self.add(error.to_string());
    }

    fn call_cut_short(&self) {
        self.add("a call was cut short".into());
    }
}

pub(crate) struct Scene {
    pub(crate) thread: IoThread,
    pub(crate) memory: Arc<GuestMemory>,
    /// The file of the memory.
    pub(crate) memory_file: Arc<File>,
    pub(crate) driver: Driver<Arc<GuestMemory>>,
    pub(crate) events: Arc<EventLines>,
    pub(crate) stats: Arc<QueueStats>,
    pub(crate) err: OwnedFd,
    pub(crate) call: OwnedFd,
    pub(crate) kick: OwnedFd,
    /// Settings of queues that start later.
    pub(crate) inflight: Option<InflightAccount>,
    pub(crate) region_is_own: bool,
    pub(crate) next_avail: u16,
    pub(crate) tuning: QueueTuning,
    pub(crate) in_order: bool,
    pub(crate) data_budget: Arc<DataBudget>,
}

impl Scene {
    pub(crate) fn new() -> Self {
        let config = IoThreadConfig {
            engine: EngineKind::Threads.into(),
            embedded: true,
            ..IoThreadConfig::default()
        };
        let memory_file = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
        let memory_file = Arc::new(File::from(memory_file));
        memory_file.set_len(MEMORY_BYTES).unwrap();
        let region = RegionConfig {
            guest_addr: 0,
            size: MEMORY_BYTES,
            user_addr: 0,
            file: Arc::clone(&memory_file),
            file_offset: 0,
        };
        let memory = Arc::new(GuestMemory::new(&[region], &MappingRules::default()).unwrap());
        let ring = QueueConfig {
            size: RING.size,
            desc_table: RING.desc_table,
            avail_ring: RING.avail_ring,
            used_ring: RING.used_ring,
            event_idx: false,
            indirect: false,
            next_avail: 0,
        };
        Self {
            thread: IoThread::new(&config).unwrap(),
            driver: Driver::new(Arc::clone(&memory), ring),
            memory,
            memory_file,
            events: Arc::default(),
            stats: Arc::default(),
            err: new_eventfd(),
            call: new_eventfd(),
            kick: new_eventfd(),
            inflight: None,
            region_is_own: false,
            next_avail: 0,
            tuning: QueueTuning::default(),
            in_order: false,
            data_budget: Arc::default(),
        }
    }

    /// Makes queues that start from now on mark requests in an inflight region.
    pub(crate) fn mark_requests(&mut self) -> InflightAccount {
        let region = Arc::new(GuestMemory::anonymous(&[(0, 0x1000)]).unwrap());
        let region = InflightRegion::new(region, 1, RING.size).unwrap();
        let account = region.queue(0, RingLayout::Split).unwrap();
        self.inflight.insert(account).clone()
    }

    fn setup(&self) -> QueueSetup {
        let clone = |fd: &OwnedFd| Some(fd.try_clone().unwrap());
        QueueSetup {
            memory: Arc::clone(&self.memory),
            ring: Ring { next_avail: self.next_avail, ..RING },
            inflight: self.inflight.clone(),
            region_is_own: self.region_is_own,
            kick: clone(&self.kick),
            call: clone(&self.call),
            err: clone(&self.err),
            log: None,
        }
    }

    /// Starts queue 3, of no device, with `handler`.
    pub(crate) fn start(&self, handler: impl Handler) -> QueueHandle {
        let options = QueueOptions {
            index: 3,
            takes_requests: true,
            event_idx: false,
            indirect: false,
            layout: RingLayout::Split,
            tuning: self.tuning,
            in_order: self.in_order,
            data_budget: Arc::clone(&self.data_budget),
            answer_place: AnswerPlace::LastByte,
            events: Arc::<EventLines>::clone(&self.events),
            trust: Arc::new(CallTrust::new(Arc::<EventLines>::clone(&self.events))),
            stats: Arc::clone(&self.stats),
            is_new: true,
        };
        let io = self.thread.io();
        let (queue, handle) = Queue::new(self.setup(), io, options).unwrap();
        let task = queue_task::serve(Rc::clone(io), queue, Rc::new(handler));
        io.spawn(async move { task.await.send() });
        handle
    }

    /// Starts a queue of `device`.
    pub(crate) fn start_queue_of(&self, device: &Device, index: u16) -> QueueHandle {
        self.wait(&self.begin_start_queue_of(device, index)).unwrap()
    }

    pub(crate) fn begin_start_queue_of(
        &self,
        device: &Device,
        index: u16,
    ) -> oneshot::Receiver<Result<QueueHandle, StartError>> {
        device.begin_start_queue(index, &self.thread.remote(), self.setup())
    }

    /// Makes a chain available and kicks.
    pub(crate) fn offer(&mut self, buffers: &[Desc]) -> u16 {
        let head = self.offer_without_kick(buffers);
        self.kick();
        head
    }

    /// Makes a chain available without a kick.
    pub(crate) fn offer_without_kick(&mut self, buffers: &[Desc]) -> u16 {
        let head = self.driver.add(buffers, None);
        self.driver.publish();
        head
    }

    /// Kicks without a new chain.
    pub(crate) fn kick(&self) {
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
    }

    /// Takes `count` turns, with or without work.
    pub(crate) fn turn(&self, count: u32) {
        for _ in 0..count {
            self.thread.turn(Wait::Never).unwrap();
        }
    }

    /// Takes turns until there is an answer.
    pub(crate) fn wait<T>(&self, pending: &oneshot::Receiver<T>) -> T {
        let start = Instant::now();
        loop {
            self.turn(1);
            if let Some(answer) = pending.poll() {
                return answer;
            }
            assert!(start.elapsed() < TIMEOUT, "the IoThread does not answer");
            std::thread::yield_now();
        }
    }

    /// Takes turns until the next chain is answered.
    pub(crate) fn answer(&mut self) -> Used {
        let start = Instant::now();
        loop {
            self.turn(1);
            if let Some(used) = self.driver.take_used() {
                return used;
            }
            assert!(start.elapsed() < TIMEOUT, "no chain is answered");
            std::thread::yield_now();
        }
    }
}

pub(crate) fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

/// Reads the counter of an eventfd and resets it.
pub(crate) fn count_of(fd: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    match rustix::io::read(fd, &mut count) {
        Ok(_) => u64::from_ne_bytes(count),
        Err(rustix::io::Errno::AGAIN) => 0,
        Err(error) => panic!("cannot read an eventfd: {error}"),
    }
}
