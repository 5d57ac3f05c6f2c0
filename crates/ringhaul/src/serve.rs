//! `ringhaul serve`.

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockio::choose::Choice;
use blockio::stats::{OpStats, SIZE_PERCENTILES, Stats};
use blockio::{EngineKind, Remote};
use device::{CallWatch, Device};
use ringhaul_options::without_effect;
use rustix::thread::sched_getaffinity;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::control::{Control, ExportSetup};
use crate::export::Endpoint;
use crate::export_log::ExportLog;
use crate::io_threads::IoThreads;
use crate::memory_limits::MemoryLimits;
use crate::open_disk::OpenDisk;
use crate::options::ServeArgs;
use crate::side_by_side::side_by_side;
use crate::spec::{EndpointSpec, ExportSpec};
use crate::thread_watch::ThreadWatch;

/// A second signal has ended the daemon before its requests were finished.
const EXIT_ABANDONED: u8 = 3;

/// An IoThread has ended by an error.
const EXIT_THREAD_FAILED: u8 = 4;

/// How long exports on other IoThreads may take to finish their requests after that.
const FINISH_MAX: Duration = Duration::from_secs(10);

/// How long the control thread may take to say what is left behind.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Why the daemon ends.
enum End {
    Signal(i32),
    /// The last export has ended.
    Exports,
    /// An IoThread has ended by an error.
    IoThread,
}

/// How it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Clean,
    /// Requests are left behind.
    Abandoned,
    /// An IoThread failed, and the other exports have ended, or had the time.
    ThreadFailed,
}

/// Serves disks until a signal comes or the last export has ended, as that of an inherited
/// connection does when the front-end goes.
///
/// # Errors
///
/// When the daemon cannot start: the caller exits with status 2.
pub fn run(args: &ServeArgs) -> Result<ExitCode> {
    // Before this process has opened anything that could be taken for it.
    let inherited = args.fd.map(Endpoint::inherit).transpose()?;
    // Early, so that no signal is lost.
    let signals = Signals::new(signals_to_take()).context("cannot take over signals")?;
    // Before any front-end shares memory, which it may take away again.
    crate::heap::limit_arenas();
    virtqueue::install_sigbus_handler().context("cannot take over SIGBUS")?;
    // Dropped last: a call that hangs must not keep queues from stopping.
    let stuck = Arc::new(Mutex::new(ThreadWatch::new()));
    let _watch = watch(Arc::clone(&stuck))?;
    crate::descriptor_limit::raise();
    let options = args.io_uring_options();
    args.engine.check_io_uring_options(&options).map_err(anyhow::Error::msg)?;
    let specs = args.exports()?;
    let disks = side_by_side(&specs, OpenDisk::open).into_iter().collect::<Result<Vec<_>>>()?;
    // Before the threads, which say what they chose: what is refused is refused in one line.
    let endpoints = endpoints(&specs, inherited)?;
    let (end, ends) = mpsc::channel();
    let mut engines = Engines::new(args, end.clone(), stuck);
    let sizes = (args.max_guest_memory, args.max_mapped_memory);
    let limits = MemoryLimits::new(sizes.0, sizes.1, args.memory_files.into());
    let choices = side_by_side(&disks, |disk| engine_for(args, disk));
    let (mut exports, mut ready) = (Vec::new(), Vec::new());
    let opened = disks.into_iter().zip(choices);
    for (number, ((spec, (disk, choice)), endpoint)) in
        specs.iter().zip(opened).zip(endpoints).enumerate()
    {
        let mut threads = engines.threads_for(&disk, choice)?;
        // The first queues of all exports would otherwise meet on the first thread.
        let count = threads.len();
        threads.rotate_left(spec.settings.iothread.map_or(number % count, usize::from));
        if spec.settings.iothread.is_some() {
            threads.truncate(1);
        }
        ready.push((disk.name.clone(), serving(spec, &disk)));
        exports.push(set_up_export(disk, endpoint, threads, limits.clone()));
    }
    let signal_handle = signals.handle();
    let signal_thread = pass_on(signals, end.clone())?;
    // The receiver goes only when the daemon ends anyway.
    let control = Control::start(exports, move || drop(end.send(End::Exports)))?;
    for (export, line) in ready {
        tracing::info!(export, "{line}");
    }
    let outcome = wait_for_end(&ends, &control);
    if outcome == Outcome::Clean {
        control.join();
    }
    engines.log_summaries();
    let lost = virtqueue::lost_regions();
    if lost > 0 {
        tracing::warn!("front-ends truncated the files of {lost} memory regions in use");
    }
    signal_handle.close();
    let _ = signal_thread.join();
    let status = match outcome {
        Outcome::Clean => return Ok(ExitCode::SUCCESS),
        Outcome::Abandoned => EXIT_ABANDONED,
        Outcome::ThreadFailed => EXIT_THREAD_FAILED,
    };
    // To end IoThreads is to wait for their ops. The end of the process is not.
    std::mem::forget(engines);
    Ok(ExitCode::from(status))
}

/// Starts the thread that passes signals on.
fn pass_on(mut signals: Signals, end: mpsc::Sender<End>) -> Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name("ringhaul-signal".into())
        .spawn(move || {
            for signal in &mut signals {
                let _ = end.send(End::Signal(signal));
            }
        })
        .context("cannot start the thread for signals")
}

/// Signals that end the daemon. One that was ignored from the start, as by `nohup`, stays so.
fn signals_to_take() -> Vec<i32> {
    let mut signals = vec![SIGTERM, SIGINT];
    if !is_ignored(SIGHUP) {
        signals.push(SIGHUP);
    }
    signals
}

fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 << (signal - 1) != 0)
}

/// The sockets of all exports. Only the first may be on one that was inherited.
fn endpoints(specs: &[ExportSpec], mut inherited: Option<Endpoint>) -> Result<Vec<Endpoint>> {
    let endpoint = |spec: &ExportSpec| match &spec.endpoint {
        EndpointSpec::Path(path) => Endpoint::bind(path),
        EndpointSpec::Fd(fd) => {
            inherited.take().with_context(|| format!("descriptor {fd} serves another export"))
        }
    };
    specs.iter().map(endpoint).collect()
}

fn set_up_export(
    disk: OpenDisk,
    endpoint: Endpoint,
    threads: Vec<Remote>,
    limits: MemoryLimits,
) -> ExportSetup {
    let OpenDisk { name, source, options, .. } = disk;
    let log = Arc::new(ExportLog::new(name));
    let device = Device::blk(source, options, Arc::<ExportLog>::clone(&log));
    ExportSetup { log, device, endpoint, threads, limits }
}

/// Watches calls, and beside them the IoThreads.
fn watch(threads: Arc<Mutex<ThreadWatch>>) -> Result<CallWatch> {
    let look = move |now| threads.lock().unwrap_or_else(PoisonError::into_inner).look(now);
    Ok(CallWatch::start(look)?)
}

/// The line that says that an export is served.
fn serving(spec: &ExportSpec, disk: &OpenDisk) -> String {
    match &spec.endpoint {
        EndpointSpec::Path(path) => format!("{}; serving on {}", disk.summary, path.display()),
        EndpointSpec::Fd(_) => format!("{}; serving on an inherited socket", disk.summary),
    }
}

/// Waits until all exports have ended, which a signal makes them do. A second one does not let them
/// finish. SIGHUP is never the second: service managers send it together with SIGTERM. If an
/// IoThread ends by an error, the other exports have a while to finish.
fn wait_for_end(ends: &mpsc::Receiver<End>, control: &Control) -> Outcome {
    let mut is_stopping = false;
    let mut is_asked = false;
    let mut leaves_at: Option<Instant> = None;
    let end_of = |outcome| {
        control.abandon();
        // However many signals come meanwhile.
        let until = Instant::now() + LAST_WORDS;
        let left = || until.saturating_duration_since(Instant::now());
        while let Ok(End::Signal(_) | End::IoThread) = ends.recv_timeout(left())
            && !left().is_zero()
        {}
        outcome
    };
    loop {
        let end = match leaves_at {
            Some(when) => ends.recv_timeout(when.saturating_duration_since(Instant::now())),
            None => ends.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected),
        };
        let why = match end {
            Ok(End::Signal(SIGHUP)) => "SIGHUP",
            Ok(End::Signal(_)) if is_asked && leaves_at.is_some() => {
                return end_of(Outcome::ThreadFailed);
            }
            Ok(End::Signal(_)) if is_asked => return end_of(Outcome::Abandoned),
            Ok(End::Signal(signal)) => {
                is_asked = true;
                if signal == SIGINT { "SIGINT" } else { "SIGTERM" }
            }
            Ok(End::IoThread) => {
                leaves_at.get_or_insert(Instant::now() + FINISH_MAX);
                "an IoThread has failed"
            }
            Err(mpsc::RecvTimeoutError::Timeout) => return end_of(Outcome::ThreadFailed),
            // Whoever sends has an end: it is the control thread's last word.
            Ok(End::Exports) | Err(mpsc::RecvTimeoutError::Disconnected) => {
                return if leaves_at.is_some() { Outcome::ThreadFailed } else { Outcome::Clean };
            }
        };
        if !is_stopping {
            tracing::info!("{why}: finishing requests, then ending");
            control.begin_stop();
            is_stopping = true;
        }
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

/// How an engine came to be chosen for a disk.
enum Engine {
    AsAsked(EngineKind),
    Best(Choice),
}

/// The engine that was asked for, or the one that a trial finds best.
fn engine_for(args: &ServeArgs, disk: &OpenDisk) -> Engine {
    let best = || Engine::Best(blockio::choose::best_engine(&disk.source));
    args.engine.kind().map_or_else(best, Engine::AsAsked)
}

/// The IoThreads: a set of them for each engine that a disk needs.
struct Engines<'a> {
    args: &'a ServeArgs,
    running: Vec<(EngineKind, IoThreads)>,
    end: mpsc::Sender<End>,
    stuck: Arc<Mutex<ThreadWatch>>,
}

impl<'a> Engines<'a> {
    fn new(args: &'a ServeArgs, end: mpsc::Sender<End>, stuck: Arc<Mutex<ThreadWatch>>) -> Self {
        Self { args, running: Vec::new(), end, stuck }
    }

    /// The threads for a disk, with the engine that was asked for or the best that works.
    fn threads_for(&mut self, disk: &OpenDisk, engine: Engine) -> Result<Vec<Remote>> {
        let name = &disk.name;
        let Choice { engine, why } = match engine {
            Engine::Best(choice) => choice,
            Engine::AsAsked(engine) => {
                let threads = self.threads(engine)?;
                let waits = engine == EngineKind::Aio && !disk.source.info().direct;
                let but =
                    if waits { "; with the page cache its submits wait for the disk" } else { "" };
                tracing::info!(export = name, "engine {engine}: as requested{but}");
                return Ok(threads);
            }
        };
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
        let end = self.end.clone();
        let failed = Arc::new(move || drop(end.send(End::IoThread)));
        let threads = IoThreads::start(count, &self.args.io_thread_config(engine), &failed)?;
        let remotes = threads.remotes().to_vec();
        let mut stuck = self.stuck.lock().unwrap_or_else(PoisonError::into_inner);
        for (index, remote) in remotes.iter().enumerate() {
            stuck.add(format!("iothread-{index}"), remote.clone());
        }
        self.running.push((engine, threads));
        Ok(remotes)
    }

    fn log_summaries(&self) {
        let threads = self.running.iter().flat_map(|(_, threads)| threads.remotes());
        for (index, remote) in threads.enumerate() {
            tracing::info!("iothread-{index}: operations: {}", summary_of(remote.stats()));
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
        "{}, {}, {}, {}; {} not answered for 5 s; {} polled for; {} bounced, with at most {} KiB, \
         {} waits and {} failures of memory; long lists of buffers with at most {} KiB and {} \
         waits; {} calls, {} submits, {} waits",
        of("reads", &stats.read),
        of("writes", &stats.write),
        of("flushes", &stats.flush),
        of("discards and zeroings", &stats.deallocate),
        stats.late.get(),
        stats.polled.get(),
        stats.bounced.get(),
        stats.bounce.bytes_most.get() >> 10,
        stats.bounce.waits.get(),
        stats.bounce.failed.get(),
        stats.lists.bytes_most.get() >> 10,
        stats.lists.waits.get(),
        stats.syscalls.eventfd_write.get(),
        stats.submitted_at_once.count(),
        stats.syscalls.epoll_wait.get() + stats.syscalls.io_uring_enter.get(),
    )
}
