//! `ringhaul serve`.

use std::process::ExitCode;
use std::sync::mpsc;

use anyhow::{Context, Result};
use blockio::choose::Choice;
use blockio::stats::{OpStats, SIZE_PERCENTILES, Stats};
use blockio::{EngineKind, Remote};
use ringhaul_bench::without_effect;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::sched_getaffinity;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::blk::BlkDevice;
use crate::call_watch::CallWatch;
use crate::export::{Endpoint, Export};
use crate::io_threads::IoThreads;
use crate::memory_limits::MemoryLimits;
use crate::options::{EndpointSpec, ExportSpec, OpenDisk, ServeArgs};

/// Why the daemon ends.
enum End {
    Signal(i32),
    ExportEnded,
}

/// Serves disks until a signal comes or the last export has ended, as that of an inherited
/// connection does when the front-end goes.
///
/// # Errors
///
/// When the daemon cannot start: the caller exits with status 2.
pub fn run(args: &ServeArgs) -> Result<ExitCode> {
    // First of all, so that a signal that comes early is not lost.
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("cannot take over signals")?;
    // Before any front-end shares memory, which it may take away again.
    virtqueue::install_sigbus_handler().context("cannot take over SIGBUS")?;
    // A guest may pass the limit on the size of files.
    crate::file_limit::survive().context("cannot ignore SIGXFSZ")?;
    // Dropped last: a call that hangs must not keep queues from stopping.
    let _watch = CallWatch::start()?;
    raise_descriptor_limit();
    let options = args.io_uring_options();
    args.engine.check_io_uring_options(&options).map_err(anyhow::Error::msg)?;
    let specs = args.exports()?;
    let disks = specs.iter().map(ExportSpec::open_disk).collect::<Result<Vec<_>>>()?;
    // Before the threads, which say what they chose: what is refused is refused in one line.
    let endpoints = specs.iter().map(endpoint).collect::<Result<Vec<_>>>()?;
    let mut engines = Engines::new(args);
    let limits = MemoryLimits::new(args.max_guest_memory, args.max_mapped_memory);
    let (end, ends) = mpsc::channel();
    let mut exports = Vec::new();
    for (number, ((spec, disk), endpoint)) in specs.iter().zip(disks).zip(endpoints).enumerate() {
        let mut threads = engines.threads_for(&disk)?;
        // The first queues of all exports would otherwise meet on the first thread.
        let count = threads.len();
        threads.rotate_left(number % count);
        exports.push(start_export(spec, disk, endpoint, threads, &limits, &end)?);
    }
    let signal_handle = signals.handle();
    let signal_thread = std::thread::Builder::new()
        .name("ringhaul-signal".into())
        .spawn(move || {
            for signal in &mut signals {
                let _ = end.send(End::Signal(signal));
            }
        })
        .context("cannot start the thread for signals")?;
    wait_for_end(&ends, exports.len());
    exports.into_iter().for_each(Export::stop);
    engines.log_summaries();
    let lost = virtqueue::lost_regions();
    if lost > 0 {
        tracing::warn!("front-ends truncated the files of {lost} memory regions in use");
    }
    drop(engines);
    signal_handle.close();
    let _ = signal_thread.join();
    Ok(ExitCode::SUCCESS)
}

fn endpoint(spec: &ExportSpec) -> Result<Endpoint> {
    match &spec.endpoint {
        EndpointSpec::Path(path) => Endpoint::bind(path),
        EndpointSpec::Fd(fd) => Endpoint::inherit(*fd),
    }
}

fn start_export(
    spec: &ExportSpec,
    disk: OpenDisk,
    endpoint: Endpoint,
    threads: Vec<Remote>,
    limits: &MemoryLimits,
    end: &mpsc::Sender<End>,
) -> Result<Export> {
    let OpenDisk { source, options, summary } = disk;
    let name = options.name.clone();
    let device = BlkDevice::new(source, options);
    let ended = end.clone();
    let export = Export::start(&name, device, endpoint, threads, limits.clone(), move || {
        // The receiver goes only when the daemon ends anyway.
        let _ = ended.send(End::ExportEnded);
    })?;
    match &spec.endpoint {
        EndpointSpec::Path(path) => {
            tracing::info!(export = name, "{summary}; serving on {}", path.display())
        }
        EndpointSpec::Fd(_) => {
            tracing::info!(export = name, "{summary}; serving on an inherited socket")
        }
    }
    Ok(export)
}

/// Waits for a signal, or until all `exports` have ended by themselves.
fn wait_for_end(ends: &mpsc::Receiver<End>, exports: usize) {
    for _ in 0..exports {
        match ends.recv() {
            Ok(End::ExportEnded) => {}
            Ok(End::Signal(signal)) => {
                let signal = if signal == SIGINT { "SIGINT" } else { "SIGTERM" };
                tracing::info!("{signal}: finishing requests, then ending");
                return;
            }
            Err(mpsc::RecvError) => return,
        }
    }
}

/// A front-end may bring a descriptor for each of 509 memory regions and three for each queue,
/// more than the usual soft limit of 1024.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!("cannot raise the limit on open files: {error}");
    }
}

/// With `--sqpoll` the kernel's threads and ours spin, and two that share a CPU wait out each
/// other's time slices: a request then takes milliseconds.
fn warn_of_few_cpus(iothreads: usize) {
    let (wanted, allowed) = (2 * iothreads, sched_getaffinity(None).map_or(0, |cpus| cpus.count()));
    if (1..wanted).contains(&(allowed as usize)) {
        tracing::warn!(
            "--sqpoll keeps {wanted} CPUs busy, one for each IoThread and one for its kernel \
             thread, and the daemon may run on {allowed}: requests may take milliseconds; allow \
             it more CPUs (taskset, cpuset) or leave --sqpoll out"
        );
    }
}

/// The IoThreads: a set of them for each engine that a disk needs.
struct Engines<'a> {
    args: &'a ServeArgs,
    running: Vec<(EngineKind, IoThreads)>,
}

impl<'a> Engines<'a> {
    fn new(args: &'a ServeArgs) -> Self {
        Self { args, running: Vec::new() }
    }

    /// The threads for a disk, with the engine that was asked for or the best that works.
    fn threads_for(&mut self, disk: &OpenDisk) -> Result<Vec<Remote>> {
        let name = &disk.options.name;
        if let Some(engine) = self.args.engine.kind() {
            let threads = self.threads(engine)?;
            let waits = engine == EngineKind::Aio && !disk.source.info().direct;
            let but =
                if waits { "; with the page cache its submits wait for the disk" } else { "" };
            tracing::info!(export = name, "engine {engine}: as asked{but}");
            return Ok(threads);
        }
        let Choice { engine, why } = blockio::choose::best_engine(&disk.source);
        let mut failed = match self.threads(engine) {
            Ok(threads) => {
                tracing::info!(export = name, "engine {engine}: {why}");
                if let Some(what) = without_effect(engine, &self.args.io_uring_options()) {
                    tracing::info!(export = name, "{what}");
                }
                return Ok(threads);
            }
            Err(error) => error,
        };
        // The trial had room for one small ring or context, and there are more and larger ones.
        for engine in blockio::choose::fallbacks(engine, &disk.source) {
            tracing::warn!(export = name, "{failed:#}; falling back to engine {engine}");
            match self.threads(engine) {
                Ok(threads) => return Ok(threads),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    fn threads(&mut self, engine: EngineKind) -> Result<Vec<Remote>> {
        if let Some((_, threads)) = self.running.iter().find(|(kind, _)| *kind == engine) {
            return Ok(threads.remotes().to_vec());
        }
        let count = usize::from(self.args.iothreads);
        if engine == EngineKind::IoUring && self.args.sqpoll {
            warn_of_few_cpus(count);
        }
        let threads = IoThreads::start(count, &self.args.io_thread_config(engine))?;
        let remotes = threads.remotes().to_vec();
        self.running.push((engine, threads));
        Ok(remotes)
    }

    fn log_summaries(&self) {
        let threads = self.running.iter().flat_map(|(_, threads)| threads.remotes());
        for (index, remote) in threads.enumerate() {
            tracing::info!("iothread-{index}: {}", summary_of(remote.stats()));
            let [harvested, submitted] = sizes_of(remote.stats());
            tracing::info!(
                "iothread-{index}: at 1, 10, 20 ... 90, 99.99%: harvested at once {harvested}; \
                 submitted at once {submitted}"
            );
        }
    }
}

/// How many completions were harvested at once, and how many ops submitted.
fn sizes_of(stats: &Stats) -> [String; 2] {
    [&stats.harvested_at_once, &stats.submitted_at_once].map(|histogram| {
        let values = histogram.values();
        SIZE_PERCENTILES.map(|percent| values.percentile(percent).to_string()).join(" ")
    })
}

/// What an IoThread did, in one line.
fn summary_of(stats: &Stats) -> String {
    let of = |name: &str, ops: &OpStats| match (ops.ops.get(), ops.errors.get()) {
        (count, 0) => format!("{count} {name}"),
        (count, errors) => format!("{count} {name} ({errors} failed)"),
    };
    format!(
        "{}, {}, {}, {}; {} polled for; {} bounced, with at most {} KiB, {} waits and {} failures \
         of memory; {} calls, {} submits, {} waits",
        of("reads", &stats.read),
        of("writes", &stats.write),
        of("flushes", &stats.flush),
        of("discards and zeroings", &stats.deallocate),
        stats.polled.get(),
        stats.bounced.get(),
        stats.bounce.bytes_most.get() >> 10,
        stats.bounce.waits.get(),
        stats.bounce.failed.get(),
        stats.syscalls.eventfd_write.get(),
        stats.submitted_at_once.count(),
        stats.syscalls.epoll_wait.get() + stats.syscalls.io_uring_enter.get(),
    )
}
