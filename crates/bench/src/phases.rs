//! A run from the connection to the result: fill, measured run, read-back.

#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blockio::DiskSource;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::args::BenchArgs;
use crate::engine_stats::{EngineCounters, Setup};
use crate::error::BenchError;
use crate::job::Job;
use crate::plan::{DeviceInfo, Plan, check_limits};
use crate::report::{Measured, Report};
use crate::server::Server;
use crate::stats::{Counters, JobProgress, Notices};
use crate::supervisor::{Phase, PhaseOutcome, Stages, Supervisor};
use crate::target::{Runner, Target, setup_failed};
use crate::verify::BlockMap;
use crate::worker::{Stage, StageCell};

/// Drives the server, or the file, according to `args` and returns the result.
///
/// Messages about failed I/O and wrong data, and progress, go to standard error.
///
/// # Errors
///
/// If the options do not fit the device, the server cannot be reached or goes away, or the file
/// cannot be used.
pub fn measure(args: &BenchArgs) -> Result<Report, BenchError> {
    measure_until(args, None, &AtomicBool::new(false))
}

/// Like [`measure`], but drives `disk`, if there is one. Once `interrupted` is set, ends early with
/// the result so far.
pub(crate) fn measure_until(
    args: &BenchArgs,
    disk: Option<DiskSource>,
    interrupted: &AtomicBool,
) -> Result<Report, BenchError> {
    check_limits(args)?;
    let target = Target::open(args, disk)?;
    let info = target.info();
    let plan = Plan::new(args, &info)?;
    let setup = target.setup(args);
    let _pinned = Pinned::apply(args)?;
    let maps = args.verify.then(|| make_maps(&plan));
    let (runners, server) = target.start(&plan, maps.as_ref())?;
    let job_progress = runners.iter().flat_map(Runner::jobs).map(Job::job_progress).collect();
    let run = Run { plan: &plan, runners, job_progress, server, interrupted };
    run.execute(&info, setup.as_ref())
}

/// Makes the verification map of each unit.
fn make_maps(plan: &Plan<'_>) -> Arc<[BlockMap]> {
    let run = run_number();
    let make = |(region, run): (&Range<u64>, u64)| {
        BlockMap::new(region.start, region.end - region.start, plan.block_bytes, run)
    };
    plan.regions.iter().zip((0..).map(|unit| run.wrapping_add(unit))).map(make).collect()
}

/// Distinguishes runs, so that a block left by an earlier run does not pass for a new one.
fn run_number() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(0) ^ u64::from(std::process::id()).rotate_right(16)
}

/// Binds this thread, and the threads that it starts, to the given CPUs. Restores the affinity when
/// dropped.
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
            // Nothing depends on the affinity now, so a failure is ignored.
            let _ = sched_setaffinity(None, before);
        }
    }
}

/// A run that is ready to start.
struct Run<'a> {
    plan: &'a Plan<'a>,
    runners: Vec<Runner>,
    job_progress: Vec<Arc<JobProgress>>,
    server: Server,
    interrupted: &'a AtomicBool,
}

impl Run<'_> {
    fn execute(mut self, info: &DeviceInfo, setup: Option<&Setup>) -> Result<Report, BenchError> {
        let args = self.plan.args;
        let notices = Arc::new(Notices::default());
        if args.verify && !args.pattern().writes() {
            self.phase(Phase::Fill, &notices)?;
            if self.is_interrupted() {
                return Err(BenchError::Run("interrupted before anything was measured".into()));
            }
        }
        let outcome = self.phase(Phase::Measured, &notices)?;
        if args.verify && args.pattern().writes() && !self.is_interrupted() {
            self.phase(Phase::ReadBack, &notices)?;
        }
        let mut counters = Counters::new();
        for job in self.runners.iter().flat_map(Runner::jobs) {
            counters.merge(&job.counters);
        }
        let mut figures = EngineCounters::default();
        self.runners.iter().filter_map(Runner::figures).for_each(|more| figures.merge(more));
        let start = outcome.windows.iter().map(|window| window.start).min();
        let end = outcome.windows.iter().map(|window| window.end).max();
        let elapsed = start.zip(end).map_or(Duration::ZERO, |(start, end)| end - start);
        Ok(Report::new(&Measured {
            plan: self.plan,
            info,
            counters: &counters,
            engine: setup.map(|setup| (setup, &figures)),
            elapsed,
            server_pid: self.server.pid,
            usage: outcome.usage.as_ref(),
            verify_block_bytes: args.verify.then_some(self.plan.block_bytes),
            interrupted: self.is_interrupted(),
        }))
    }

    fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// Runs one phase on all driver threads.
    fn phase(&mut self, phase: Phase, notices: &Arc<Notices>) -> Result<PhaseOutcome, BenchError> {
        let plan = self.plan;
        let jobs = self.runners.iter_mut().flat_map(Runner::jobs_mut);
        for (index, job) in jobs.enumerate() {
            let (source, flush_every, arrivals) = match phase {
                Phase::Fill => (plan.fill(index), 0, None),
                Phase::Measured => (plan.workload(index), plan.args.fsync, plan.arrivals(index)),
                Phase::ReadBack => (plan.read_back(index), 0, None),
            };
            job.begin(source, flush_every, arrivals);
        }
        let control = &Arc::new(StageCell::new(Stage::Ramp));
        let supervisor = Supervisor {
            plan,
            phase,
            control,
            job_progress: &self.job_progress,
            server: &self.server,
            interrupted: self.interrupted,
            notices,
        };
        // Before the threads start, so that a run without ramp time is counted from its first I/O.
        let stages = Stages::new(&supervisor);
        let runners = &mut self.runners;
        thread::scope(|scope| {
            let (sender, receiver) = mpsc::channel();
            for runner in runners.iter_mut() {
                let sender = sender.clone();
                let name = "bench-driver".to_owned();
                thread::Builder::new()
                    .name(name)
                    .spawn_scoped(scope, move || sender.send(runner.run(control, notices)))
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

#[cfg(test)]
mod tests {
    use blockio::DiskOptions;

    use super::*;
    use crate::args::tests::parse_only;

    /// A null disk answers reads without data. The memory of a read may still hold the last write,
    /// which is the expected data, so the driver overwrites it before the read.
    #[test]
    fn a_disk_that_transfers_no_data_fails_verification() {
        for (pattern, depth, size) in
            [("read", 1, "4k"), ("rw", 1, "4k"), ("randread", 4, "64k"), ("randrw", 4, "64k")]
        {
            let disk = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
            let words = format!(
                "--filename null --rw={pattern} --bs=4k --size={size} --iodepth={depth} \
                 --number_ios=64 --verify --eta=never"
            );
            let args = parse_only(&words).unwrap();
            let report = measure_until(&args, Some(disk), &AtomicBool::new(false)).unwrap();
            assert!(report.failed() && report.verify_mismatches > 0, "{words}");
            assert_eq!(report.verified_blocks, 0, "{words}");
        }
    }
}
