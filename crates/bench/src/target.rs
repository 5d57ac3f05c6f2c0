//! The target of a run: a server behind a socket, or a file through an engine.

#![forbid(unsafe_code)]

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use blockio::disk::engine_trial;
use blockio::{DiskOptions, DiskSource, EngineKind, IoThread};
use iomem::fits;
use ringhaul_options::{OnOff, ineffective_warning};

use crate::args::BenchArgs;
use crate::args::engine::EngineArgs;
use crate::device::Device;
use crate::driver::Virtqueue;
use crate::engine_stats::{EngineCounters, Setup};
use crate::engine_worker::EngineWorker;
use crate::error::BenchError;
use crate::job::{Batch, Job};
use crate::peer::peer_pid;
use crate::plan::{DeviceInfo, Plan, TargetKind, UnitInfo};
use crate::server::Server;
use crate::stats::Notices;
use crate::verify::BlockMap;
use crate::vhost_user::{Connection, Options};
use crate::worker::{StageCell, Window, Worker};

/// A target before its jobs are made.
pub(crate) enum Target {
    Socket(PathBuf, Device),
    File(DiskSource, EngineKind),
}

/// The jobs of one thread.
pub(crate) enum Runner {
    Socket(Worker),
    Engine(Box<EngineWorker>),
}

impl Target {
    /// Connects to the server, or finds an engine for `disk` or else for the file of `args`.
    pub(crate) fn open(args: &BenchArgs, disk: Option<DiskSource>) -> Result<Self, BenchError> {
        if let Some(source) = disk {
            return with_engine(args, source);
        }
        if let Some(path) = &args.filename {
            return with_engine(args, open_file(args, path)?);
        }
        let path = args.socket_path.clone().unwrap_or_default();
        let limit = (&*path, args.timeout);
        let BenchArgs { inflight, packed, indirect, .. } = *args;
        let options = Options { inflight, packed, indirect };
        let (socket, kind) = (path.clone(), args.device);
        let connect = move || Device::connect(&socket, kind, options);
        let mut device = answer_within(limit, "vhost-user handshake", connect)?;
        if let Some(choice) = args.unit() {
            let find = move || device.find_units(choice);
            device = answer_within(limit, "search for SCSI units", find)?;
        }
        Ok(Self::Socket(path, device))
    }

    pub(crate) fn info(&self) -> DeviceInfo {
        match self {
            Self::Socket(_, device) => device.info().clone(),
            Self::File(source, _) => {
                let info = source.info();
                let unit = UnitInfo {
                    name: "the disk".to_owned(),
                    disk_bytes: info.size_bytes,
                    logical_block_bytes: info.logical_block_bytes,
                    read_only: info.read_only,
                };
                DeviceInfo {
                    kind: TargetKind::Engine,
                    units: vec![unit],
                    max_queues: MAX_IOTHREADS,
                    can_flush: true,
                    size_max: None,
                    seg_max: None,
                }
            }
        }
    }

    /// Returns the configuration of the engine, if there is one.
    pub(crate) fn setup(&self, args: &BenchArgs) -> Option<Setup> {
        let Self::File(source, engine) = self else { return None };
        Some(Setup {
            engine: source.has_engine().then(|| engine.to_string()),
            direct: source.info().direct,
            iodepth_batch: args.engine.iodepth_batch.map(u32::from),
            poll_max_us: args.engine.poll_max_us,
            sqpoll: args.engine.sqpoll,
            iopoll: args.engine.iopoll,
            completion_ring: args.engine.completion_ring.name(),
            harvest_on_submit: args.engine.harvest_on_submit.is_on(),
            submit_batch: args.engine.submit_batch.is_on(),
        })
    }

    /// Makes the jobs and divides them among threads.
    pub(crate) fn start(
        self,
        plan: &Plan<'_>,
        maps: Option<&Arc<[BlockMap]>>,
    ) -> Result<(Vec<Runner>, Server), BenchError> {
        match self {
            Self::Socket(path, device) => start_queues(&path, device, plan, maps),
            Self::File(source, engine) => {
                let batch = batch_from_args(plan.args);
                let config = plan.args.engine.config(engine, plan.depth);
                let slots = (plan.shape.slots, plan.shape.slot_bytes);
                let make = |index| {
                    let job = Job::new((plan.depth, slots.1), 1, batch, maps.cloned());
                    let (source, seed) = (source.clone(), plan.seed(index));
                    let worker = EngineWorker::new(job, source, config.clone(), slots, seed);
                    Runner::Engine(Box::new(worker))
                };
                Ok(((0..plan.shape.queues).map(make).collect(), Server::this_process()))
            }
        }
    }
}

impl Runner {
    pub(crate) fn jobs(&self) -> &[Job] {
        match self {
            Self::Socket(worker) => &worker.jobs,
            Self::Engine(worker) => worker.job.as_slice(),
        }
    }

    pub(crate) fn jobs_mut(&mut self) -> &mut [Job] {
        match self {
            Self::Socket(worker) => &mut worker.jobs,
            Self::Engine(worker) => worker.job.as_mut_slice(),
        }
    }

    /// The engine's figures in the measured window.
    pub(crate) fn figures(&self) -> Option<&EngineCounters> {
        match self {
            Self::Socket(_) => None,
            Self::Engine(worker) => Some(&worker.figures),
        }
    }

    /// Runs one phase.
    pub(crate) fn run(
        &mut self,
        control: &Arc<StageCell>,
        notices: &Arc<Notices>,
    ) -> Result<Window, BenchError> {
        match self {
            Self::Socket(worker) => worker.run(control, notices),
            Self::Engine(worker) => worker.run(control, notices),
        }
    }
}

/// The limit of `ringhaul serve`.
const MAX_IOTHREADS: usize = 256;

fn batch_from_args(args: &BenchArgs) -> Batch {
    match args.engine.iodepth_batch {
        None => Batch { min: 1, max: EngineArgs::DEFAULT_BATCH },
        Some(batch) => {
            let batch = fits(batch.get(), "a batch");
            Batch { min: batch, max: batch }
        }
    }
}

fn open_file(args: &BenchArgs, path: &Path) -> Result<DiskSource, BenchError> {
    let options = DiskOptions {
        direct: args.engine.direct.is_none_or(OnOff::is_on),
        // Read-only admits other readers, and a disk that its owner has made read-only.
        read_only: !args.pattern().writes() && !args.verify,
        no_lock: !args.engine.lock.is_on(),
        logical_block_bytes: None,
        ..DiskOptions::default()
    };
    DiskSource::file(path, &options).map_err(|error| {
        let advice = if options.direct { " (--direct off)" } else { "" };
        BenchError::Connect(format!(
            "{error}{}",
            if advises_page_cache(&error) { advice } else { "" }
        ))
    })
}

fn with_engine(args: &BenchArgs, source: DiskSource) -> Result<Target, BenchError> {
    let asked = args.engine.engine.kind();
    let mut engine = asked.unwrap_or_else(|| engine_trial::best_engine(&source).engine);
    let mut tried = try_engine(args, engine);
    // The trial that chose the engine had room for fewer operations.
    for other in engine_trial::fallbacks(engine, &source).filter(|_| asked.is_none()) {
        let Err(error) = tried else { break };
        tracing::warn!("{error}; falling back to engine {other}");
        (engine, tried) = (other, try_engine(args, other));
    }
    tried.map_err(|error| BenchError::Connect(error.to_string()))?;
    if let Some(warning) = ineffective_warning(engine, &args.engine.io_uring_options()) {
        tracing::warn!("engine {engine}; {warning}");
    }
    Ok(Target::File(source, engine))
}

/// Returns true if an error advises against direct I/O.
fn advises_page_cache(error: &blockio::Error) -> bool {
    error.to_string().contains("page cache")
}

/// Sets up an IoThread, so that an unavailable engine fails before the run.
fn try_engine(args: &BenchArgs, engine: EngineKind) -> Result<(), blockio::Error> {
    let depth = args.depth().get().min(u32::from(u16::MAX));
    IoThread::new(&args.engine.config(engine, depth)).map(drop)
}

fn start_queues(
    path: &Path,
    device: Device,
    plan: &Plan<'_>,
    maps: Option<&Arc<[BlockMap]>>,
) -> Result<(Vec<Runner>, Server), BenchError> {
    let args = plan.args;
    let connection = Arc::clone(device.connection());
    let server = Server::find(args, peer_pid(connection.socket()))?;
    let queues = {
        let shape = plan.shape.clone();
        let limit = (path, args.timeout);
        answer_within(limit, "set-up of the virtqueues", move || device.start(&shape))?
    };
    let mut jobs = Vec::new();
    for (index, mut queue) in queues.into_iter().enumerate() {
        let (slots, units) = ((plan.depth, plan.shape.slot_bytes), plan.regions.len());
        let mut job = Job::new(slots, units, Batch::ALL, maps.cloned());
        job.fill(&mut queue, plan.seed(index)).map_err(|error| setup_failed(&error))?;
        jobs.push((job, queue));
    }
    let workers = make_workers(args, jobs, &connection).map_err(|e| setup_failed(&e))?;
    Ok((workers.into_iter().map(Runner::Socket).collect(), server))
}

pub(crate) fn setup_failed(error: &io::Error) -> BenchError {
    BenchError::Run(format!("cannot set up the driver: {error}"))
}

fn make_workers(
    args: &BenchArgs,
    jobs: Vec<(Job, Virtqueue)>,
    connection: &Arc<Connection>,
) -> io::Result<Vec<Worker>> {
    let groups: Vec<Vec<_>> =
        if args.threads { jobs.into_iter().map(|job| vec![job]).collect() } else { vec![jobs] };
    let make = |jobs| Worker::new(jobs, Arc::clone(connection), args);
    groups.into_iter().map(make).collect()
}

/// Does a part of the handshake on a thread of its own. It blocks while the server does not answer,
/// as many servers do while they serve another client.
fn answer_within<T: Send + 'static>(
    (path, limit): (&Path, Duration),
    what: &str,
    action: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, BenchError> {
    let (sender, receiver) = mpsc::sync_channel(1);
    thread::spawn(move || sender.send(action()));
    match receiver.recv_timeout(limit) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(cannot_connect(path, what, &error)),
        Err(_) => Err(BenchError::Connect(format!(
            "the server at {} has not answered for {} s during the {what}; it may serve another \
             client; disconnect that client first",
            path.display(),
            limit.as_secs_f64()
        ))),
    }
}

fn cannot_connect(path: &Path, what: &str, error: &io::Error) -> BenchError {
    let path = path.display();
    BenchError::Connect(match error.kind() {
        io::ErrorKind::NotFound => {
            format!("cannot connect to {path}: there is no such socket; start the server first")
        }
        io::ErrorKind::ConnectionRefused => {
            format!("cannot connect to {path}: no server listens on it; start one")
        }
        io::ErrorKind::PermissionDenied => {
            format!("cannot connect to {path}: Permission denied; check the socket's permissions")
        }
        _ => format!("the {what} at {path} failed: {error}"),
    })
}
