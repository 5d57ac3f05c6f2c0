//! The choice of an engine for each disk, and the IoThreads with the engines that their disks need.

use std::collections::BTreeMap;
use std::sync::{Arc, Once, mpsc};
use std::time::{Duration, Instant};

use anyhow::Result;
use blockio::disk::engine_trial::{Choice, TrialKey, best_engine};
use blockio::executor::Lock;
use blockio::stats::{OpStats, SIZE_PERCENTILES, Stats};
use blockio::{EngineKind, Remote};
use ringhaul_options::ineffective_warning;
use rustix::thread::sched_getaffinity;

use crate::open::disk::OpenDisk;
use crate::open::parallel::ParallelCalls;
use crate::options::ServeArgs;
use crate::sandbox;
use crate::spec::command::CommandError;
use crate::spec::process::ThreadCpus;
use crate::spec::settings::PollLimits;
use crate::spec::stats::LoopStats;
use crate::threads::IoThreads;
use crate::threads::shutdown::Event;
use crate::threads::thread_watch::ThreadWatch;

/// The time without a finished trial after which the rest are cancelled: their disks hang.
const TRIAL_MAX: Duration = Duration::from_secs(5);

/// Limits the warning to one, however many threads get a ring.
static WARNING: Once = Once::new();

/// Warns if `--sqpoll` has too few CPUs. The kernel's threads and ours spin, and two that share a
/// CPU wait out each other's time slices: a request then takes milliseconds.
fn warn_of_few_cpus(iothreads: usize) {
    let (wanted, allowed) = (2 * iothreads, sched_getaffinity(None).map_or(0, |cpus| cpus.count()));
    if (1..wanted).contains(&(allowed as usize)) {
        tracing::warn!(
            "--sqpoll keeps {wanted} CPUs busy, one for each IoThread and one for its kernel \
             thread, but the daemon may only run on {allowed}: requests may take milliseconds; \
             allow it more CPUs (taskset, cpuset) or leave --sqpoll out"
        );
    }
}

/// An engine and the reason for its choice.
pub(crate) enum EngineChoice {
    AsAsked(EngineKind),
    /// The best one, and the reason.
    Best(EngineKind, String),
}

/// The name of the engine that a disk had in the previous process, and the reason for it.
pub(crate) type PreviousEngine = (Option<String>, Option<String>);

/// Chooses an engine for each disk: the requested one, the one that the disk had in the `previous`
/// process, or the best one in a trial. Disks that are alike share one trial, and all trials run
/// side by side.
pub(crate) fn choose(
    args: &ServeArgs,
    disks: &[OpenDisk],
    previous: &[PreviousEngine],
) -> Vec<EngineChoice> {
    if let Some(engine) = args.engine.kind() {
        return disks.iter().map(|_| EngineChoice::AsAsked(engine)).collect();
    }
    let previous: Option<Vec<EngineChoice>> = previous.iter().map(from_previous).collect();
    if let Some(chosen) = previous
        && chosen.len() == disks.len()
    {
        return chosen;
    }
    let keys: Vec<Option<TrialKey>> =
        disks.iter().map(|disk| TrialKey::from_source(&disk.source)).collect();
    let of_index: Vec<usize> = (0..disks.len()).map(|index| trial_disk(&keys, index)).collect();
    let mut tried = of_index.clone();
    tried.sort_unstable();
    tried.dedup();
    let choices = try_all(disks, &tried);
    let choose = |(index, of): (usize, usize)| match choices[&of].clone() {
        choice if of == index => choice,
        // The failure may be particular to the disk of the trial.
        choice if choice.has_failed => best_engine(&disks[index].source),
        choice => {
            let why = format!("as for {}, which is on the same device", disks[of].name);
            Choice { why, ..choice }
        }
    };
    let chosen = of_index.into_iter().enumerate().map(choose);
    chosen.map(|Choice { engine, why, .. }| EngineChoice::Best(engine, why)).collect()
}

/// Finds the best engine for each of these disks.
fn try_all(disks: &[OpenDisk], tried: &[usize]) -> BTreeMap<usize, Choice> {
    let sources = tried.iter().map(|&index| disks[index].source.clone()).collect();
    let mut trials = ParallelCalls::begin_with_rings(sources, |source, _| best_engine(&source));
    let tried_in_time = std::iter::from_fn(|| trials.next(Some(Instant::now() + TRIAL_MAX)));
    let mut choices: BTreeMap<usize, Choice> =
        tried_in_time.filter_map(|(number, choice)| Some((tried[number], choice.ok()?))).collect();
    for &index in tried {
        choices.entry(index).or_insert_with(|| Choice {
            engine: EngineKind::IoUring,
            why: format!("its trial failed or took longer than {} s", TRIAL_MAX.as_secs()),
            has_failed: false,
        });
    }
    choices
}

/// The start of the reason for an engine that a previous process has chosen.
const AS_BEFORE: &str = "as in the previous process";

/// Returns the engine that a disk had in the previous process. The reason for it stays: it may be a
/// fault of the machine that a restart mends.
fn from_previous((name, reason): &PreviousEngine) -> Option<EngineChoice> {
    let name = name.as_deref()?;
    let all = [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads];
    let engine = all.into_iter().find(|engine| engine.to_string() == name)?;
    let why = match reason.as_deref() {
        None => AS_BEFORE.to_owned(),
        Some(reason) if reason.starts_with(AS_BEFORE) => reason.to_owned(),
        Some(reason) => format!("{AS_BEFORE}: {reason}"),
    };
    Some(EngineChoice::Best(engine, why))
}

/// Returns the index of the disk whose trial stands for disk `index`: the one with the most data of
/// all disks that are alike.
fn trial_disk(keys: &[Option<TrialKey>], index: usize) -> usize {
    let Some(this) = &keys[index] else { return index };
    let others = keys.iter().enumerate();
    let others = others.filter_map(|(index, other)| Some((index, other.as_ref()?)));
    let like_this = others.filter(|(_, other)| other.is_like(this));
    like_this.max_by_key(|(_, other)| other.allocated()).map_or(index, |(index, _)| index)
}

/// Sets up an engine for a disk on its IoThreads, and makes the disk prefer it: the requested
/// engine, or the best one that works. Waits for these threads.
pub(crate) fn set_up(
    args: &ServeArgs,
    threads: &[Thread],
    (export, disk): (&str, &mut OpenDisk),
    chosen: EngineChoice,
) -> Result<(), CommandError> {
    let (engine, reason) = set_up_engine(args, threads, (export, disk), chosen)?;
    disk.source = disk.source.clone().prefer_engine(engine, &reason);
    Ok(())
}

/// Sets up an engine and returns it with the reason for its choice.
fn set_up_engine(
    args: &ServeArgs,
    threads: &[Thread],
    (export, disk): (&str, &OpenDisk),
    chosen: EngineChoice,
) -> Result<(EngineKind, String), CommandError> {
    let name = &disk.name;
    // A null disk does not use an engine.
    let is_shown = disk.source.has_engine();
    let (engine, why) = match chosen {
        EngineChoice::Best(engine, why) => (engine, why),
        EngineChoice::AsAsked(engine) => {
            add(args, threads, engine)?;
            let waits = engine == EngineKind::Aio && !disk.source.info().direct;
            let but =
                if waits { "; with the page cache its submits wait for the disk" } else { "" };
            let reason = format!("as requested{but}");
            if is_shown {
                tracing::info!(export, "{name}: engine {engine}: {reason}");
            }
            return Ok((engine, reason));
        }
    };
    let mut failed = match add(args, threads, engine) {
        Ok(()) => {
            if is_shown {
                tracing::info!(export, "{name}: engine {engine}: {why}");
            }
            if let Some(what) = ineffective_warning(engine, &args.io_uring_options()) {
                tracing::info!(export, "{name}: {what}");
            }
            return Ok((engine, why));
        }
        Err(CommandError::Failed(error)) => error,
        Err(other) => return Err(other),
    };
    // The trial needed one small ring or context; the threads need more and larger ones.
    for engine in blockio::disk::engine_trial::fallbacks(engine, &disk.source) {
        tracing::warn!(export, "{name}: {failed:#}; falling back to engine {engine}");
        match add(args, threads, engine) {
            Ok(()) => return Ok((engine, format!("{failed:#}"))),
            Err(CommandError::Failed(error)) => failed = error,
            Err(other) => return Err(other),
        }
    }
    Err(failed.into())
}

/// Adds an engine to IoThreads that do not have it.
fn add(args: &ServeArgs, threads: &[Thread], engine: EngineKind) -> Result<(), CommandError> {
    let config = args.engine_config(engine);
    if engine == EngineKind::Threads {
        // This engine is always present.
        return Ok(());
    }
    let mut is_new = false;
    for thread in threads {
        // A stuck thread must not delay exports that need nothing new from it.
        if thread.has(engine) {
            continue;
        }
        let added = thread.remote.call(move |io| {
            // A ring that it may have is enough.
            io.add_engine(config).inspect(|_| {
                if engine == EngineKind::IoUring {
                    sandbox::deny_rings();
                }
            })
        });
        // An IoThread is gone only if the daemon is about to end.
        is_new |= added.ok_or(CommandError::Ending)?.map_err(anyhow::Error::from)?;
        thread.engines.lock().push(engine);
    }
    if is_new && engine == EngineKind::IoUring && args.sqpoll {
        WARNING.call_once(|| warn_of_few_cpus(args.iothreads.into()));
    }
    Ok(())
}

/// An IoThread, and the engines that were added to it.
#[derive(Clone)]
pub(crate) struct Thread {
    pub(crate) remote: Remote,
    engines: Arc<Lock<Vec<EngineKind>>>,
}

impl Thread {
    fn has(&self, engine: EngineKind) -> bool {
        self.engines.lock().contains(&engine)
    }
}

/// The IoThreads, started for the first export and shared by all.
pub(crate) struct Threads {
    args: Arc<ServeArgs>,
    running: Option<IoThreads>,
    /// The threads in the order of their numbers.
    all: Vec<Thread>,
    serves: bool,
    poll_limits: PollLimits,
    events: mpsc::Sender<Event>,
    watch: Arc<Lock<ThreadWatch>>,
    /// The counters of threads in earlier processes.
    earlier: Vec<LoopStats>,
}

impl Threads {
    pub(crate) fn new(
        args: Arc<ServeArgs>,
        events: mpsc::Sender<Event>,
        watch: Arc<Lock<ThreadWatch>>,
    ) -> Self {
        let poll_limits = args.poll_limits();
        Self {
            args,
            running: None,
            all: Vec::new(),
            serves: false,
            poll_limits,
            events,
            watch,
            earlier: Vec::new(),
        }
    }

    /// Returns the threads in the order of their numbers, and starts them on the first call.
    pub(crate) fn all(&mut self) -> Result<Vec<Thread>> {
        if self.running.is_some() {
            return Ok(self.all.clone());
        }
        let events = self.events.clone();
        let failed = Arc::new(move || drop(events.send(Event::ThreadFailed)));
        let (count, config) = (self.args.iothreads.into(), self.args.io_thread_config());
        let threads = IoThreads::start(count, &config, &failed)?;
        let mut watch = self.watch.lock();
        for (index, remote) in threads.remotes().iter().enumerate() {
            self.all.push(Thread { remote: remote.clone(), engines: Arc::default() });
            watch.add(format!("iothread-{index}"), remote.clone());
        }
        self.running = Some(threads);
        self.post_poll_limits();
        Ok(self.all.clone())
    }

    pub(crate) fn poll_limits(&self) -> PollLimits {
        self.poll_limits
    }

    /// Sets the busy-poll limits of running threads and of threads that are started later.
    pub(crate) fn set_poll_limits(&mut self, limits: PollLimits) {
        self.poll_limits = limits;
        self.post_poll_limits();
    }

    fn post_poll_limits(&self) {
        let limits = self.poll_limits;
        for remote in self.remotes() {
            // Posting to a thread that has ended does nothing, and it needs no limits.
            remote.post(move |io| {
                io.set_poll_limits(limits.max(), limits.budget_percent.into());
            });
        }
    }

    fn remotes(&self) -> impl Iterator<Item = &Remote> {
        self.running.iter().flat_map(|threads| threads.remotes())
    }

    /// Asks every IoThread for a turn. The receiver is disconnected when all have turned or ended.
    pub(crate) fn ask_for_turns(&self) -> mpsc::Receiver<()> {
        let (turning, turns) = mpsc::channel::<()>();
        for remote in self.remotes() {
            let turning = turning.clone();
            remote.post(move |_| drop(turning));
        }
        turns
    }

    /// The counters for the next process: of threads that do not run here, too.
    pub(crate) fn stats_to_hand_over(&self) -> Vec<LoopStats> {
        let mut stats = self.stats();
        let runs = |earlier: &&LoopStats| stats.iter().all(|thread| thread.name != earlier.name);
        let ended: Vec<_> = self.earlier.iter().filter(runs).cloned().collect();
        stats.extend(ended);
        stats
    }

    /// The counters of each thread, and of the threads of this name in earlier processes.
    pub(crate) fn stats(&self) -> Vec<LoopStats> {
        let threads = self.remotes().enumerate();
        let of = |(index, remote): (usize, &Remote)| {
            let mut stats = LoopStats::new(format!("iothread-{index}"), remote.stats());
            if let Some(earlier) = self.earlier.iter().find(|thread| thread.name == stats.name) {
                stats += earlier;
            }
            stats
        };
        threads.map(of).collect()
    }

    /// Sets the counters of threads in earlier processes.
    pub(crate) fn set_earlier(&mut self, earlier: Vec<LoopStats>) {
        self.earlier = earlier;
    }

    /// The CPUs that each thread may run on.
    pub(crate) fn cpus(&self) -> Vec<ThreadCpus> {
        let of = |(index, remote): (usize, &Remote)| ThreadCpus {
            name: format!("iothread-{index}"),
            cpus: remote.stats().allowed_cpus().unwrap_or_default(),
        };
        self.remotes().enumerate().map(of).collect()
    }

    /// Prepares for the first export that is served. Not done earlier, so that a refused export
    /// logs one line only.
    pub(crate) fn begin_to_serve(&mut self) {
        if !std::mem::replace(&mut self.serves, true)
            && let Some(threads) = &self.running
        {
            threads.prepare_calls();
        }
    }

    pub(crate) fn log_summaries(&self) {
        for (index, remote) in self.remotes().enumerate() {
            tracing::debug!("iothread-{index}: operations: {}", summary_of(remote.stats()));
            let [harvested, submitted] = sizes_of(remote.stats());
            tracing::debug!(
                "iothread-{index}: at 1, 10, 20 ... 90, 99.99%: harvested at once {harvested}; \
                 submitted at once {submitted}"
            );
        }
    }
}

/// Percentiles of the numbers of completions harvested at once and of ops submitted at once.
fn sizes_of(stats: &Stats) -> [String; 2] {
    [&stats.harvested_at_once, &stats.submitted_at_once].map(|histogram| {
        let values = histogram.values();
        SIZE_PERCENTILES.map(|percent| values.percentile(percent).to_string()).join(" ")
    })
}

/// A summary of an IoThread's work in one line.
fn summary_of(stats: &Stats) -> String {
    let of = |name: &str, ops: &OpStats| match (ops.ops.get(), ops.errors.get()) {
        (count, 0) => format!("{count} {name}"),
        (count, errors) => format!("{count} {name} ({errors} failed)"),
    };
    format!(
        "{}, {}, {}, {}; {} not answered for 5 s; {} polled for; {} bounced, with at most {} KiB, \
         {} waits and {} failures of memory; long lists of buffers with at most {} KiB and {} \
         waits; {} completed by other threads, which woke it {} times; {} calls, {} submits, {} \
         waits",
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
        stats.foreign_at_once.sum(),
        stats.woken.get(),
        stats.syscalls.eventfd_write.get(),
        stats.submitted_at_once.count(),
        stats.syscalls.epoll_wait.get() + stats.syscalls.io_uring_enter.get(),
    )
}

#[cfg(test)]
mod tests {
    use blockio::EngineConfig;
    use blockio::config::CompletionRing;
    use clap::{Args, FromArgMatches};

    use super::*;
    use crate::testing::wait_until;

    fn args(options: &[&str]) -> ServeArgs {
        let serve = ServeArgs::augment_args(clap::Command::new("serve"));
        let words = ["serve"].iter().chain(options);
        ServeArgs::from_arg_matches(&serve.get_matches_from(words)).unwrap()
    }

    fn threads(count: &str) -> Threads {
        let args = Arc::new(args(&["--iothreads", count]));
        Threads::new(args, mpsc::channel().0, Arc::new(Lock::new(ThreadWatch::new())))
    }

    #[test]
    fn every_thread_is_shown_and_asked() {
        let mut threads = threads("3");
        assert!(threads.stats().is_empty() && threads.cpus().is_empty());
        threads.all().unwrap();
        let names = ["iothread-0", "iothread-1", "iothread-2"];
        assert!(threads.stats().iter().map(|thread| &*thread.name).eq(names));
        assert!(threads.cpus().iter().map(|thread| &*thread.name).eq(names));
        let turns = || threads.stats().iter().map(|thread| thread.turns).collect::<Vec<_>>();
        let before = turns();
        assert!(threads.ask_for_turns().recv().is_err());
        // The end of a turn counts it.
        wait_until(|| before.iter().zip(turns()).all(|(before, now)| *before < now));
    }

    #[test]
    fn options_of_engines_reach_their_engine() {
        for (options, engine, expected) in [
            (&[][..], EngineKind::IoUring, EngineConfig::IoUring { sqpoll: false, iopoll: false }),
            (
                &["--sqpoll"],
                EngineKind::IoUring,
                EngineConfig::IoUring { sqpoll: true, iopoll: false },
            ),
            (
                &["--iopoll"],
                EngineKind::IoUring,
                EngineConfig::IoUring { sqpoll: false, iopoll: true },
            ),
            (
                &["--completion-ring", "getevents"],
                EngineKind::Aio,
                EngineConfig::Aio { completion_ring: CompletionRing::Getevents },
            ),
            (
                &[],
                EngineKind::Aio,
                EngineConfig::Aio { completion_ring: CompletionRing::Userspace },
            ),
            (&["--iopoll"], EngineKind::Threads, EngineConfig::Threads),
        ] {
            assert_eq!(args(options).engine_config(engine), expected, "{options:?}");
        }
    }
}
