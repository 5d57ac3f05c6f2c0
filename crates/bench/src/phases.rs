//! A run from the connection to the result: fill, measured run, read-back.

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::args::BenchArgs;
use crate::driver::{Device, DeviceFacts, peer_pid};
use crate::error::BenchError;
use crate::job::Job;
use crate::plan::{Plan, check_limits};
use crate::progress::Progress;
use crate::report::{Measured, Report};
use crate::server::{ServerSample, ServerUsage};
use crate::stats::{Counters, Live, Notices};
use crate::verify::BlockMap;
use crate::worker::{Control, Stage, Window, Worker};

/// How often the supervising thread looks at progress and at interrupts.
const TICK: Duration = Duration::from_millis(200);

/// Drives the server as `args` say and returns what was measured.
///
/// Messages about failed I/O and wrong data, and progress, go to standard error.
///
/// # Errors
///
/// When the options do not fit the device, the server cannot be reached, or it goes away.
pub fn measure(args: &BenchArgs) -> Result<Report, BenchError> {
    measure_until(args, &AtomicBool::new(false))
}

/// As [`measure`], but ends early, with what was measured so far, when `interrupted` is set.
pub(crate) fn measure_until(
    args: &BenchArgs,
    interrupted: &AtomicBool,
) -> Result<Report, BenchError> {
    check_limits(args)?;
    let path = &args.socket_path;
    let mut device = {
        let path = path.clone();
        answer_within(args, "handshake", move || Device::connect(&path))?
    };
    let facts = device.facts().clone();
    let plan = Plan::new(args, &facts)?;
    let socket = device.take_socket().map(Arc::new);
    let peer = socket.as_ref().and_then(|socket| peer_pid(socket.as_fd()));
    let server = Server::find(args, peer)?;
    let queues = {
        let shape = plan.shape.clone();
        answer_within(args, "set-up of the virtqueues", move || device.start(&shape))?
    };
    let _pinned = Pinned::apply(args)?;
    let map = args.verify.then(|| {
        let len = plan.region.end - plan.region.start;
        Arc::new(BlockMap::new(plan.region.start, len, plan.block_bytes, run_number()))
    });
    let mut jobs = Vec::new();
    for (index, queue) in queues.into_iter().enumerate() {
        let (map, seed) = (map.clone(), plan.seed(index));
        let job = Job::new(queue, plan.depth, plan.shape.slot_bytes, map, seed);
        jobs.push(job.map_err(|error| setup_failed(&error))?);
    }
    let live = jobs.iter().map(Job::live).collect();
    let workers = make_workers(args, jobs, socket.as_ref()).map_err(|e| setup_failed(&e))?;
    Run { plan: &plan, workers, live, server, interrupted }.execute(&facts, map.as_deref())
}

fn setup_failed(error: &io::Error) -> BenchError {
    BenchError::Run(format!("cannot set up the driver: {error}"))
}

fn make_workers(
    args: &BenchArgs,
    jobs: Vec<Job>,
    socket: Option<&Arc<std::os::fd::OwnedFd>>,
) -> io::Result<Vec<Worker>> {
    let groups: Vec<Vec<Job>> =
        if args.threads { jobs.into_iter().map(|job| vec![job]).collect() } else { vec![jobs] };
    let make = |jobs| Worker::new(jobs, socket.cloned(), args.busy_poll, args.timeout);
    groups.into_iter().map(make).collect()
}

/// Tells runs apart, so that a block which an earlier run left behind is not taken for ours.
fn run_number() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(0) ^ u64::from(std::process::id()).rotate_right(16)
}

/// Does a part of the handshake on a thread of its own, because it blocks for as long as the
/// server does not answer, which is what many do while they serve another client.
fn answer_within<T: Send + 'static>(
    args: &BenchArgs,
    what: &str,
    action: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, BenchError> {
    let (sender, receiver) = mpsc::sync_channel(1);
    thread::spawn(move || sender.send(action()));
    match receiver.recv_timeout(args.timeout) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(cannot_connect(&args.socket_path, what, &error)),
        Err(_) => Err(BenchError::Connect(format!(
            "the server at '{}' has not answered for {} s during the {what}: is another client \
             connected to it?",
            args.socket_path.display(),
            args.timeout.as_secs_f64()
        ))),
    }
}

fn cannot_connect(path: &Path, what: &str, error: &io::Error) -> BenchError {
    let path = path.display();
    BenchError::Connect(match error.kind() {
        io::ErrorKind::NotFound => {
            format!("cannot connect to '{path}': there is no such socket; is the server running?")
        }
        io::ErrorKind::ConnectionRefused => {
            format!("cannot connect to '{path}': no server listens on it")
        }
        io::ErrorKind::PermissionDenied => {
            format!("cannot connect to '{path}': no permission to write to the socket")
        }
        _ => format!("the vhost-user {what} at '{path}' failed: {error}"),
    })
}

/// Keeps this thread, and those that it starts, on the CPUs asked for; puts it back when dropped.
struct Pinned(Option<CpuSet>);

impl Pinned {
    fn apply(args: &BenchArgs) -> Result<Self, BenchError> {
        let Some(cpus) = &args.cpus_allowed else {
            return Ok(Self(None));
        };
        let before = sched_getaffinity(None).ok();
        sched_setaffinity(None, &cpus.to_set()).map_err(|error| {
            BenchError::Usage(format!("--cpus_allowed: cannot run on these CPUs: {error}"))
        })?;
        Ok(Self(before))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // Nothing depends on it any more if this fails.
            let _ = sched_setaffinity(None, before);
        }
    }
}

/// The process whose expenses are counted.
pub(crate) struct Server {
    pid: Option<u32>,
}

impl Server {
    fn find(args: &BenchArgs, peer: Option<u32>) -> Result<Self, BenchError> {
        if let Some(pid) = args.server_pid {
            ServerSample::take(pid.get()).map_err(|error| {
                BenchError::Usage(format!("--server-pid={pid}: cannot read its counters: {error}"))
            })?;
            return Ok(Self { pid: Some(pid.get()) });
        }
        let pid = peer.filter(|pid| *pid != std::process::id());
        let pid = pid.filter(|pid| ServerSample::take(*pid).is_ok());
        if pid.is_none() {
            eprintln!(
                "warning: the server's process is not visible from here, so its CPU time is not \
                 counted; give --server-pid"
            );
        }
        Ok(Self { pid })
    }

    fn sample(&self) -> Option<ServerSample> {
        ServerSample::take(self.pid?).ok()
    }
}

/// What a phase is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Fill,
    Measured,
    ReadBack,
}

/// What came out of a phase.
struct PhaseOutcome {
    windows: Vec<Window>,
    usage: Option<ServerUsage>,
}

/// A run that is ready to go.
struct Run<'a> {
    plan: &'a Plan<'a>,
    workers: Vec<Worker>,
    live: Vec<Arc<Live>>,
    server: Server,
    interrupted: &'a AtomicBool,
}

impl Run<'_> {
    fn execute(
        mut self,
        facts: &DeviceFacts,
        map: Option<&BlockMap>,
    ) -> Result<Report, BenchError> {
        let args = self.plan.args;
        let notices = Notices::default();
        if args.verify && !args.rw.writes() {
            self.phase(Phase::Fill, &notices)?;
            if self.is_interrupted() {
                return Err(BenchError::Run("interrupted before anything was measured".into()));
            }
        }
        let outcome = self.phase(Phase::Measured, &notices)?;
        if args.verify && args.rw.writes() && !self.is_interrupted() {
            self.phase(Phase::ReadBack, &notices)?;
        }
        let mut counters = Counters::new();
        for job in self.workers.iter().flat_map(|worker| &worker.jobs) {
            counters.merge(&job.counters);
        }
        let start = outcome.windows.iter().map(|window| window.start).min();
        let end = outcome.windows.iter().map(|window| window.end).max();
        let elapsed = start.zip(end).map_or(Duration::ZERO, |(start, end)| end - start);
        Ok(Report::new(&Measured {
            plan: self.plan,
            facts,
            counters: &counters,
            elapsed,
            server_pid: self.server.pid,
            usage: outcome.usage.as_ref(),
            verify_block_bytes: map.map(BlockMap::block_bytes),
            interrupted: self.is_interrupted(),
        }))
    }

    fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// Runs one phase on all driver threads.
    fn phase(&mut self, phase: Phase, notices: &Notices) -> Result<PhaseOutcome, BenchError> {
        let plan = self.plan;
        let jobs = self.workers.iter_mut().flat_map(|worker| &mut worker.jobs);
        for (index, job) in jobs.enumerate() {
            let (source, flush_every) = match phase {
                Phase::Fill => (plan.fill(index), 0),
                Phase::Measured => (plan.workload(index), plan.args.fsync),
                Phase::ReadBack => (plan.read_back(index), 0),
            };
            job.begin(source, flush_every);
        }
        let control = &Control::new(Stage::Warming);
        let supervisor = Supervisor {
            plan,
            phase,
            control,
            live: &self.live,
            server: &self.server,
            interrupted: self.interrupted,
            notices,
        };
        // Before the threads start, so that a run without ramp time is counted from its first I/O.
        let stages = Stages::new(&supervisor);
        let workers = &mut self.workers;
        thread::scope(|scope| {
            let (sender, receiver) = mpsc::channel();
            for worker in workers.iter_mut() {
                let sender = sender.clone();
                let name = "bench-driver".to_owned();
                thread::Builder::new()
                    .name(name)
                    .spawn_scoped(scope, move || sender.send(worker.run(control, notices)))
                    .map_err(|error| {
                        control.set(Stage::Stopping);
                        setup_failed(&error)
                    })?;
            }
            drop(sender);
            supervisor.watch(stages, &receiver)
        })
    }
}

/// The thread that called [`measure`], while the driver threads work: it opens and closes the
/// measured window, samples the server and shows progress.
struct Supervisor<'a> {
    plan: &'a Plan<'a>,
    phase: Phase,
    control: &'a Control,
    live: &'a [Arc<Live>],
    server: &'a Server,
    interrupted: &'a AtomicBool,
    notices: &'a Notices,
}

impl Supervisor<'_> {
    fn watch(
        &self,
        mut stages: Stages,
        results: &Receiver<Result<Window, BenchError>>,
    ) -> Result<PhaseOutcome, BenchError> {
        let mut progress = self.progress();
        let mut windows = Vec::new();
        let mut failure = None;
        loop {
            match results.recv_timeout(stages.time_left().min(TICK)) {
                Ok(Ok(window)) => windows.push(window),
                Ok(Err(error)) => {
                    failure.get_or_insert(error);
                    self.control.set(Stage::Stopping);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            stages.advance(self);
            progress.say(&self.notices.take());
            progress.show(self.done());
        }
        progress.finish();
        progress.say(&self.notices.take());
        match failure {
            Some(error) => Err(error),
            None => Ok(PhaseOutcome { windows, usage: stages.usage(self) }),
        }
    }

    fn done(&self) -> (u64, u64) {
        let sums = self.live.iter().map(|live| live.read());
        sums.fold((0, 0), |sum, done| (sum.0 + done.0, sum.1 + done.1))
    }

    fn progress(&self) -> Progress {
        let args = self.plan.args;
        let region_bytes = self.plan.region.end - self.plan.region.start;
        let jobs = u64::from(args.numjobs.get());
        let (label, time, ios, bytes) = match self.phase {
            Phase::Fill => ("filling", None, None, Some(region_bytes)),
            // How much has been written is not worth a walk through the map.
            Phase::ReadBack => ("checking", None, None, None),
            Phase::Measured => (
                args.rw.name(),
                args.effective_runtime().map(|time| time + args.ramp_time),
                args.number_ios.map(|ios| ios.get().saturating_mul(jobs)),
                args.io_size.map(|bytes| bytes.saturating_mul(jobs)),
            ),
        };
        Progress::new(args.eta, label, (time, ios, bytes))
    }
}

/// Moves a measured phase through its stages; lets the others run to their end.
struct Stages {
    stage: Stage,
    /// When the next stage begins; `None` when only the amount of I/O ends this one.
    next_at: Option<Instant>,
    opened: Option<ServerSample>,
    closed: Option<ServerSample>,
}

impl Stages {
    fn new(supervisor: &Supervisor<'_>) -> Self {
        let measured = supervisor.phase == Phase::Measured;
        let next_at = measured.then(|| Instant::now() + supervisor.plan.args.ramp_time);
        let mut stages = Self { stage: Stage::Warming, next_at, opened: None, closed: None };
        stages.advance(supervisor);
        stages
    }

    fn time_left(&self) -> Duration {
        self.next_at.map_or(TICK, |at| at.saturating_duration_since(Instant::now()))
    }

    /// Goes to the next stage if its time has come.
    fn advance(&mut self, supervisor: &Supervisor<'_>) {
        if supervisor.interrupted.load(Ordering::Relaxed) {
            self.stop(supervisor);
        }
        if self.next_at.is_none_or(|at| at > Instant::now()) {
            return;
        }
        if self.stage == Stage::Warming {
            self.opened = supervisor.server.sample();
            self.stage = Stage::Measuring;
            supervisor.control.set(self.stage);
            let runtime = supervisor.plan.args.effective_runtime();
            self.next_at = runtime.map(|time| Instant::now() + time);
        } else {
            self.stop(supervisor);
        }
    }

    fn stop(&mut self, supervisor: &Supervisor<'_>) {
        self.next_at = None;
        if self.stage != Stage::Stopping {
            self.stage = Stage::Stopping;
            supervisor.control.set(self.stage);
            self.closed = supervisor.server.sample();
        }
    }

    /// Returns what the server spent while the measured window was open.
    fn usage(self, supervisor: &Supervisor<'_>) -> Option<ServerUsage> {
        let closed = self.closed.or_else(|| supervisor.server.sample())?;
        Some(closed.since(&self.opened?))
    }
}
