//! The device and its queues, and what is done to them while they run: what a VMM does, and worse.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use blockio::disk::DiskInfo;
use blockio::stats::{OpStats, Stats};
use blockio::{Activity, CompletionRing, DiskSource, EngineKind, IoThread, IoThreadConfig, Wait};
use ringhaul::blk::BlkDevice;
use ringhaul::blk::config::{
    BlkOptions, F_CONFIG_WCE, F_EVENT_IDX, F_FLUSH, F_INDIRECT_DESC, WRITEBACK_OFFSET,
};
use ringhaul::queue::{Pending, QueueHandle, QueueSetup, StartError};
use virtqueue::GuestMemory;

use crate::failure::Failure;
use crate::guest::Guest;
use crate::plan::Plan;
use crate::request::SERIAL;
use crate::rng::Rng;
use crate::world::{Counts, World};

/// What is done to a device that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// One queue is stopped, to be started again.
    Stop,
    /// All queues are stopped and go on in another map of the memory.
    Remap,
    /// The front-end goes: all queues are stopped and the device is reset.
    Reset,
    /// A call eventfd is replaced.
    SetCall,
    /// The driver switches the write cache.
    Writeback,
    /// The power goes.
    Crash,
    /// The IoThreads end, and others come.
    Kill,
}

pub(crate) struct Thread {
    pub(crate) io_thread: IoThread,
    /// Its last turn said that there is more to do.
    pub(crate) ready: bool,
    /// What it had done by then, and how many turns ago.
    done: u64,
    empty_turns: u32,
}

/// A loop that has so many turns in a row, in which it does nothing but ask for another, spins.
/// Submits that the kernel refuses are tried again a few times at most.
const EMPTY_TURNS_MAX: u32 = 40;

impl Thread {
    /// Takes a turn. Fails when the loop spins.
    pub(crate) fn turn(&mut self) -> Result<(), Failure> {
        let activity = self.io_thread.turn(Wait::Never);
        let activity = activity.map_err(|error| Failure::new("turn", error.to_string()))?;
        self.ready = activity == Activity::Ready;
        let (io, stats) = (self.io_thread.io(), self.io_thread.io().stats());
        let ops = [&stats.read, &stats.write, &stats.flush, &stats.deallocate];
        let done = ops.iter().map(|kind| kind.ops.get()).sum::<u64>()
            + stats.submitted_at_once.sum()
            + stats.syscalls.eventfd_write.get()
            + io.tasks() as u64
            + io.ops() as u64;
        let is_empty = self.ready && std::mem::replace(&mut self.done, done) == done;
        self.empty_turns = if is_empty { self.empty_turns + 1 } else { 0 };
        if self.empty_turns > EMPTY_TURNS_MAX {
            let text = format!("an IoThread did nothing in {EMPTY_TURNS_MAX} turns, but is busy");
            return Err(Failure::new("busy loop", text));
        }
        Ok(())
    }
}

enum Service {
    Stopped(u16),
    Starting(Pending<Result<QueueHandle, StartError>>),
    Running(QueueHandle),
    Stopping(Pending<u16>),
}

pub(crate) struct Stack {
    plan: Plan,
    world: Rc<World>,
    guest: Rc<Guest>,
    pub(crate) threads: Vec<Thread>,
    source: DiskSource,
    device: BlkDevice,
    memory: Arc<GuestMemory>,
    services: Vec<Service>,
    /// What is done once all queues have stopped.
    waiting: Option<Change>,
    /// All queues are to stay stopped.
    ending: bool,
    /// How often a queue was started: each time on another IoThread.
    starts: usize,
    /// There were IoThreads before, and what they counted is gone.
    restarted: bool,
}

impl Stack {
    pub(crate) fn new(
        plan: &Plan,
        world: &Rc<World>,
        guest: &Rc<Guest>,
        disk: OwnedFd,
    ) -> Result<Self> {
        let block = u32::try_from(plan.block_bytes()).unwrap_or(512);
        let info = DiskInfo {
            size_bytes: plan.sectors() * 512,
            logical_block_bytes: block,
            physical_block_bytes: block,
            read_only: plan.read_only > 0,
            direct: plan.direct > 0,
        };
        let (memory_align, request_align) = if plan.direct > 0 { (512, block) } else { (1, 1) };
        let is_block = plan.block_device > 0;
        let source = DiskSource::simulated(disk, info, is_block, memory_align, request_align);
        let mut stack = Self {
            plan: plan.clone(),
            world: Rc::clone(world),
            guest: Rc::clone(guest),
            threads: Vec::new(),
            device: device(plan, &source),
            source,
            memory: Arc::new(guest.layout().map()),
            services: (0..plan.queues).map(|_| Service::Stopped(plan.first_index())).collect(),
            waiting: None,
            ending: false,
            starts: 0,
            restarted: false,
        };
        stack.threads = stack.new_threads()?;
        stack.negotiate();
        Ok(stack)
    }

    fn new_threads(&self) -> Result<Vec<Thread>> {
        let engine = match self.plan.engine {
            0 => EngineKind::Aio,
            1 => EngineKind::Threads,
            _ => EngineKind::IoUring,
        };
        let depth = u32::try_from(self.plan.depth).unwrap_or(1);
        // Time stands still within a turn, so busy-polling would never end.
        let config = IoThreadConfig {
            engine,
            depth,
            poll_max: Duration::ZERO,
            harvest_on_submit: self.plan.no_harvest_on_submit == 0,
            submit_max: u32::try_from(self.plan.submit_max)
                .ok()
                .filter(|m| *m > 0)
                .unwrap_or(u32::MAX),
            completion_ring: if self.plan.getevents > 0 {
                CompletionRing::Getevents
            } else {
                CompletionRing::Userspace
            },
            ..IoThreadConfig::default()
        };
        let threads = (0..self.plan.io_threads).map(|_| {
            let io_thread = IoThread::new(&config)?;
            // Engine io_uring hands its watches to the kernel in the first turn.
            Ok(Thread { io_thread, ready: true, done: 0, empty_turns: 0 })
        });
        threads.collect()
    }

    /// What a driver says before its queues start.
    fn negotiate(&self) {
        let left_out = [
            (F_EVENT_IDX, self.plan.event_idx == 0),
            (F_INDIRECT_DESC, self.plan.indirect == 0),
            (F_FLUSH, self.plan.no_flush > 0),
            (F_CONFIG_WCE, self.plan.no_wce > 0),
        ];
        let left_out = left_out.iter().filter(|(_, is_out)| *is_out);
        let features =
            left_out.fold(self.device.features(), |all, (feature, _)| all & !(1 << feature));
        self.device.set_features(features).expect("only what is offered is negotiated");
        self.note_write_through();
    }

    /// Tells the guest whether writes are on stable storage when they are answered.
    fn note_write_through(&self) {
        let plan = &self.plan;
        let cached = if plan.no_wce == 0 {
            self.device.config_space()[WRITEBACK_OFFSET] == 1
        } else {
            plan.no_flush == 0 && plan.no_write_cache == 0
        };
        self.guest.set_write_through(!cached);
    }

    /// Goes on with what IoThreads have answered meanwhile.
    pub(crate) fn advance(&mut self) -> Result<(), Failure> {
        for (index, service) in self.services.iter_mut().enumerate() {
            let next = match service {
                Service::Starting(pending) => pending.poll().map(|started| {
                    let handle = started.map_err(|e| Failure::new("no start", e.to_string()))?;
                    self.world.trace(|| format!("control: queue {index} runs"));
                    Ok(Service::Running(handle))
                }),
                Service::Stopping(pending) => pending.poll().map(|next_avail| {
                    self.world.trace(|| format!("control: queue {index} stopped at {next_avail}"));
                    let (used, _) = self.guest.indexes(index);
                    if used != next_avail {
                        let text = format!(
                            "queue {index} has taken {next_avail} chains and answered {used}"
                        );
                        return Err(Failure::new("bad stop", text));
                    }
                    Ok(Service::Stopped(next_avail))
                }),
                _ => None,
            };
            if let Some(next) = next {
                *service = next?;
            }
        }
        match self.waiting {
            Some(change) if self.is_stopped() => {
                self.waiting = None;
                self.change_stopped(change)
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.services.iter().all(|service| matches!(service, Service::Stopped(_)))
    }

    /// No queue is on its way from one state to another, and nothing waits for that.
    pub(crate) fn is_settled(&self) -> bool {
        let on_the_way = |s: &Service| matches!(s, Service::Starting(_) | Service::Stopping(_));
        self.waiting.is_none() && !self.services.iter().any(on_the_way)
    }

    /// Queues that can be started.
    pub(crate) fn startable(&self) -> impl Iterator<Item = usize> {
        let is_open = self.waiting.is_none() && !self.ending;
        let stopped = |s: &Service| is_open && matches!(s, Service::Stopped(_));
        let queues = self.services.iter().enumerate().filter(move |(_, s)| stopped(s));
        queues.map(|(index, _)| index).collect::<Vec<_>>().into_iter()
    }

    pub(crate) fn start(&mut self, queue: usize) {
        let Service::Stopped(next_avail) = self.services[queue] else { return };
        let (kick, call) = self.guest.eventfds(queue);
        let setup = QueueSetup {
            memory: Arc::clone(&self.memory),
            ring: self.guest.layout().ring(queue, next_avail),
            kick,
            call,
            err: None,
        };
        let thread = self.starts % self.threads.len();
        self.starts += 1;
        self.world.trace(|| format!("control: queue {queue} is started on IoThread {thread}"));
        let remote = self.threads[thread].io_thread.remote();
        self.services[queue] = Service::Starting(self.device.begin_start_queue(&remote, setup));
    }

    fn stop(&mut self, queue: usize) {
        let service = &mut self.services[queue];
        *service = match std::mem::replace(service, Service::Stopped(0)) {
            Service::Running(handle) => Service::Stopping(handle.begin_stop()),
            other => other,
        };
    }

    /// Stops all queues for good.
    pub(crate) fn stop_all(&mut self) {
        self.ending = true;
        (0..self.services.len()).for_each(|queue| self.stop(queue));
    }

    fn running(&self) -> Vec<usize> {
        let services = self.services.iter().enumerate();
        let running = services.filter(|(_, service)| matches!(service, Service::Running(_)));
        running.map(|(index, _)| index).collect()
    }

    pub(crate) fn can_change(&self, change: Change) -> bool {
        match change {
            Change::Crash | Change::Kill => !self.ending,
            Change::Writeback => self.plan.no_wce == 0,
            Change::Stop | Change::SetCall => !self.ending && !self.running().is_empty(),
            Change::Remap | Change::Reset => {
                !self.ending && self.is_settled() && !self.running().is_empty()
            }
        }
    }

    pub(crate) fn change(&mut self, change: Change, rng: &mut Rng) -> Result<(), Failure> {
        match change {
            Change::Stop => self.stop(rng.pick(&self.running())),
            Change::SetCall => {
                let queue = rng.pick(&self.running());
                let call = self.guest.replace_call(queue);
                if let Service::Running(handle) = &self.services[queue] {
                    handle.set_call(call);
                }
            }
            Change::Writeback => {
                let value = rng.next().to_le_bytes()[0] & 1;
                // Before the device takes it, the guest may not count on it.
                self.guest.set_write_through(false);
                let written = self.device.write_config(WRITEBACK_OFFSET, &[value]);
                written.map_err(|error| Failure::new("config", error.to_string()))?;
                self.note_write_through();
            }
            Change::Remap | Change::Reset => {
                (0..self.services.len()).for_each(|queue| self.stop(queue));
                self.waiting = Some(change);
            }
            Change::Crash | Change::Kill => return self.restart(change == Change::Crash),
        }
        Ok(())
    }

    /// What is done when all queues are stopped.
    fn change_stopped(&mut self, change: Change) -> Result<(), Failure> {
        self.check_memory()?;
        if change == Change::Reset {
            self.device.reset();
            self.negotiate();
        }
        self.memory = Arc::new(self.guest.layout().map());
        self.world.trace(|| "control: a new memory map".to_owned());
        Ok(())
    }

    /// The IoThreads end with whatever is out, and start again with what is on the disk: all of it,
    /// or, if the power is lost, what was on stable storage.
    fn restart(&mut self, power_lost: bool) -> Result<(), Failure> {
        if power_lost {
            self.world.power_off();
        }
        self.services.clear();
        self.threads.clear();
        self.guest.check()?;
        self.check_memory()?;
        if power_lost {
            self.world.power_on();
        } else {
            // So that what is found there now is also what a later loss of power must leave.
            self.world.settle();
        }
        self.guest.check_left(power_lost)?;
        self.guest.reboot();
        self.restarted = true;
        self.waiting = None;
        self.device = device(&self.plan, &self.source);
        let first = self.plan.first_index();
        self.services = (0..self.plan.queues).map(|_| Service::Stopped(first)).collect();
        self.threads = self.new_threads().map_err(|e| Failure::new("no start", e.to_string()))?;
        self.negotiate();
        Ok(())
    }

    fn check_memory(&self) -> Result<(), Failure> {
        match Arc::strong_count(&self.memory) {
            1 => Ok(()),
            count => {
                let text = format!("{} references to a memory map that nobody uses", count - 1);
                Err(Failure::new("leak", text))
            }
        }
    }

    /// All queues are stopped: nothing is left of them.
    pub(crate) fn check_balance(&self) -> Result<(), Failure> {
        self.check_memory()?;
        for (index, thread) in self.threads.iter().enumerate() {
            let io = thread.io_thread.io();
            if io.ops() != 0 || io.tasks() != 0 {
                let text = format!("IoThread {index}: {} ops, {} tasks", io.ops(), io.tasks());
                return Err(Failure::new("leak", text));
            }
        }
        // A discard that io_uring cannot do goes to the kernel twice, and is one op.
        let tries_twice = self.plan.engine == 2 && self.plan.no_punch > 0;
        if self.restarted || (tries_twice && self.plan.block_device > 0) {
            return Ok(());
        }
        let all: Vec<_> =
            self.threads.iter().map(|t| Arc::clone(t.io_thread.io().stats())).collect();
        check_counts(&all, self.world.counts())
    }

    pub(crate) fn describe(&self) -> String {
        let mut text = String::new();
        for (index, thread) in self.threads.iter().enumerate() {
            let io = thread.io_thread.io();
            text += &format!("\n  IoThread {index}: {} ops, {} tasks", io.ops(), io.tasks());
        }
        for (index, service) in self.services.iter().enumerate() {
            let state = match service {
                Service::Stopped(_) => "stopped",
                Service::Starting(_) => "starting",
                Service::Running(_) => "running",
                Service::Stopping(_) => "stopping",
            };
            text += &format!("\n  queue {index} is {state}");
        }
        text
    }

    /// Leaves the IoThreads as they are, for they might not end.
    pub(crate) fn forget(&mut self) {
        std::mem::take(&mut self.threads).into_iter().for_each(std::mem::forget);
    }
}

fn device(plan: &Plan, source: &DiskSource) -> BlkDevice {
    let options = BlkOptions {
        name: "sim".into(),
        serial: SERIAL.into(),
        num_queues: u16::try_from(plan.queues).unwrap_or(1),
        queue_size: plan.queue_size(),
        write_cache: plan.no_write_cache == 0,
        notify_batch: plan.no_notify_batch == 0,
        fixed_buffers: plan.fixed_buffers > 0,
    };
    BlkDevice::new(source.clone(), options)
}

/// Whether the IoThreads have counted what the kernel has.
fn check_counts(all: &[Arc<Stats>], counts: Counts) -> Result<(), Failure> {
    let sum = |of: &dyn Fn(&Stats) -> u64| all.iter().map(|stats| of(stats)).sum::<u64>();
    let kinds: [fn(&Stats) -> &OpStats; 4] =
        [|s| &s.read, |s| &s.write, |s| &s.flush, |s| &s.deallocate];
    let ops = kinds.iter().map(|kind| sum(&|stats| kind(stats).ops.get())).sum::<u64>();
    let checks = [
        ("ops", ops, counts.started + counts.rejected),
        ("submitted ops", sum(&|stats| stats.submitted_at_once.sum()), counts.started),
        ("harvested ops", sum(&|stats| stats.harvested_at_once.sum()), counts.started),
        ("bytes read", sum(&|stats| stats.read.bytes.get()), counts.read_bytes),
        ("bytes written", sum(&|stats| stats.write.bytes.get()), counts.written_bytes),
    ];
    for (what, counted, expected) in checks {
        if counted != expected {
            let text = format!("{what}: {counted} were counted, {expected} were there");
            return Err(Failure::new("bad count", text));
        }
    }
    Ok(())
}
