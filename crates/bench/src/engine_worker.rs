//! Drives a file or block device through an engine of `blockio`, with one IoThread for each job:
//! the loop that serves virtqueues, without them.

#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use blockio::{BufferMemory, Disk, DiskSource, Io as IoHandle, IoThread, IoThreadConfig, TaskSet};
use iomem::fits;

use crate::engine_stats::{EngineCounters, EngineSample};
use crate::error::BenchError;
use crate::job::{Completed, Job, Pass, Queue};
use crate::pattern::{Io, Op};
use crate::stats::Notices;
use crate::worker::{Stage, StageCell, TICK, Window};

/// Alignment of the memory of each slot.
const MEMORY_ALIGN: usize = 4096;

/// A job and the configuration of its IoThread.
pub(crate) struct EngineWorker {
    /// `None` while a phase runs, and after a loop that failed.
    pub(crate) job: Option<Job>,
    source: DiskSource,
    config: IoThreadConfig,
    slots: usize,
    slot_bytes: usize,
    seed: u64,
    /// The figures of the last phase with a measured window.
    pub(crate) figures: EngineCounters,
}

impl EngineWorker {
    pub(crate) fn new(
        job: Job,
        source: DiskSource,
        config: IoThreadConfig,
        (slots, slot_bytes): (usize, usize),
        seed: u64,
    ) -> Self {
        let figures = EngineCounters::default();
        Self { job: Some(job), source, config, slots, slot_bytes, seed, figures }
    }

    /// Runs one phase until the source is exhausted or `control` stops it, and then until nothing
    /// is in flight. The IoThread lives as long as the phase.
    pub(crate) fn run(
        &mut self,
        control: &Arc<StageCell>,
        notices: &Arc<Notices>,
    ) -> Result<Window, BenchError> {
        let Some(mut job) = self.job.take() else {
            return Err(BenchError::Run("the job was lost in an earlier phase".to_owned()));
        };
        let failed = |error: blockio::Error| BenchError::Run(format!("the IoThread: {error}"));
        let thread = IoThread::new(&self.config).map_err(failed)?;
        let io = Rc::clone(thread.io());
        let mut queue = EngineQueue::new(self.source.attach(&io), self.slots, self.slot_bytes);
        let filled = job.fill(&mut queue, self.seed);
        filled.map_err(|error| BenchError::Run(format!("cannot set up the memory: {error}")))?;
        let clock = Instant::now();
        let task = JobTask {
            job,
            queue,
            io: Rc::clone(&io),
            control: Arc::clone(control),
            notices: Arc::clone(notices),
            clock,
            stage: Stage::Ramp,
            window: Window { start: clock, end: clock },
            opened: None,
            figures: EngineCounters::default(),
        };
        let outcome = Rc::new(Cell::new(None));
        let place = Rc::clone(&outcome);
        io.spawn(async move {
            let handle = Rc::clone(&task.io);
            place.set(Some(task.run().await));
            handle.stop();
        });
        thread.run().map_err(failed)?;
        let Some((task, result)) = outcome.take() else {
            return Err(BenchError::Run("the IoThread has ended without a result".to_owned()));
        };
        self.job = Some(task.job);
        if task.opened.is_some() {
            self.figures = task.figures;
        }
        result.map_err(|error| BenchError::Run(format!("the engine failed: {error}")))?;
        Ok(task.window)
    }
}

/// The state of a job's task.
struct JobTask {
    job: Job,
    queue: EngineQueue,
    io: Rc<IoHandle>,
    control: Arc<StageCell>,
    notices: Arc<Notices>,
    clock: Instant,
    stage: Stage,
    window: Window,
    /// The IoThread's counters when the measured window opened.
    opened: Option<EngineSample>,
    figures: EngineCounters,
}

impl JobTask {
    async fn run(mut self) -> (Self, io::Result<()>) {
        let mut requests = TaskSet::new(Rc::clone(&self.io));
        let mut next_tick = Instant::now();
        let result = loop {
            let turn = poll_fn(|cx| {
                requests.run_woken(cx);
                Poll::Ready(self.turn(cx, &mut requests, request))
            });
            if let Err(error) = turn.await {
                break Err(error);
            }
            if self.is_finished() {
                break Ok(());
            }
            if self.has_work() {
                // In the next run, after this one's submit and harvest.
                self.io.wake_me();
            }
            let now = Instant::now();
            if next_tick <= now {
                next_tick = now + TICK;
                self.io.wake_me_at(next_tick);
            }
            self.io.suspend().await;
        };
        requests.finish().await;
        if self.stage == Stage::Measuring {
            self.enter(Stage::Stopping);
        }
        (self, result)
    }

    /// Takes completions and makes new requests, which are submitted at the end of the run.
    fn turn<F: Future<Output = ()>>(
        &mut self,
        cx: &mut Context<'_>,
        requests: &mut TaskSet<F>,
        make: fn(Rc<JobDisk>, EngineRequest) -> F,
    ) -> io::Result<()> {
        let stage = self.control.get();
        if stage != self.stage {
            self.enter(stage);
        }
        let pass = Pass {
            now_ns: fits(self.clock.elapsed().as_nanos(), "a time in nanoseconds"),
            recording: self.stage == Stage::Measuring,
            stopping: self.stage == Stage::Stopping,
            notices: &self.notices,
        };
        self.job.turn(&mut self.queue, &pass)?;
        for request in self.queue.started.drain(..) {
            requests.spawn(cx, make(Rc::clone(&self.queue.shared), request));
        }
        Ok(())
    }

    /// Returns true if the job can do something without waiting for a completion.
    fn has_work(&mut self) -> bool {
        let stopping = self.stage == Stage::Stopping;
        if !stopping && self.job.in_flight() == 0 && !self.job.is_exhausted() {
            // Requests of another job hold all of this job's blocks. Their completions would not
            // wake this task.
            self.job.unblock();
            std::thread::yield_now();
        }
        // `--rate_iops` excludes `--filename`, so the loop is closed and needs no time.
        let can_refill = self.job.can_refill(|| 0);
        !self.queue.shared.done.borrow().is_empty() || (!stopping && can_refill)
    }

    fn is_finished(&self) -> bool {
        let stopping = self.stage == Stage::Stopping;
        self.job.in_flight() == 0 && (stopping || self.job.is_exhausted())
    }

    /// Opens or closes the measured window.
    fn enter(&mut self, stage: Stage) {
        let now = Instant::now();
        match (stage, &self.opened) {
            (Stage::Measuring, _) => {
                self.window = Window { start: now, end: now };
                self.opened = Some(EngineSample::take(self.io.stats()));
            }
            (_, Some(opened)) if self.stage == Stage::Measuring => {
                self.window.end = now;
                self.figures = EngineSample::take(self.io.stats()).since(opened);
            }
            _ => {}
        }
        self.stage = stage;
    }
}

/// The queue of a job with futures as requests.
struct EngineQueue {
    shared: Rc<JobDisk>,
    /// Requests queued in this pass.
    started: Vec<EngineRequest>,
}

/// State shared by the requests of a job.
struct JobDisk {
    disk: Disk,
    /// The memory of the requests, indexed by slot.
    slots: Box<[BufferMemory]>,
    done: RefCell<VecDeque<Completed>>,
}

struct EngineRequest {
    slot: u32,
    op: Op,
    offset: u64,
    len: usize,
}

impl EngineQueue {
    fn new(disk: Disk, slots: usize, slot_bytes: usize) -> Self {
        let slots = (0..slots).map(|_| BufferMemory::new(slot_bytes, MEMORY_ALIGN)).collect();
        let done = RefCell::new(VecDeque::new());
        Self { shared: Rc::new(JobDisk { disk, slots, done }), started: Vec::new() }
    }
}

impl JobDisk {
    fn slot(&self, slot: u32) -> io::Result<&BufferMemory> {
        let slot = usize::try_from(slot).ok().and_then(|index| self.slots.get(index));
        slot.ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }
}

/// A request, from its queueing to its completion.
async fn request(shared: Rc<JobDisk>, request: EngineRequest) {
    let EngineRequest { slot, op, offset, len } = request;
    let Ok(memory) = shared.slot(slot) else { return };
    let result = if op == Op::Flush {
        shared.disk.flush().await
    } else {
        let buffers = memory.buffers(len);
        match op {
            Op::Write => shared.disk.write(offset, buffers, false).await.map_err(Into::into),
            _ => shared.disk.read(offset, buffers).await.map_err(Into::into),
        }
    };
    let errno = |error: io::Error| -error.raw_os_error().unwrap_or(libc::EIO);
    let result = result.map_or_else(errno, |()| 0);
    shared.done.borrow_mut().push_back(Completed { slot, result });
}

impl Queue for EngineQueue {
    fn queue(&mut self, slot: u32, io: &Io) -> io::Result<()> {
        self.shared.slot(slot)?;
        let len = fits(io.len, "the length of a request");
        self.started.push(EngineRequest { slot, op: io.op, offset: io.offset, len });
        Ok(())
    }

    fn store(&mut self, slot: u32, data: &[u8]) -> io::Result<()> {
        self.shared.slot(slot)?.buffers(data.len()).copy_from(0, data);
        Ok(())
    }

    fn load(&self, slot: u32, data: &mut [u8]) -> io::Result<()> {
        self.shared.slot(slot)?.buffers(data.len()).copy_to(0, data);
        Ok(())
    }

    fn next_completion(&mut self) -> io::Result<Option<Completed>> {
        Ok(self.shared.done.borrow_mut().pop_front())
    }

    fn kick_if_needed(&mut self) -> io::Result<bool> {
        Ok(false)
    }

    /// Results are negative errnos.
    fn describe_error(&self, done: &Completed) -> String {
        io::Error::from_raw_os_error(-done.result).to_string()
    }

    fn unit_name(&self, _: u16) -> Option<String> {
        None
    }
}
