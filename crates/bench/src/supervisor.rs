//! The thread that supervises a phase while the driver threads do the I/O.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::error::BenchError;
use crate::plan::Plan;
use crate::progress::Progress;
use crate::server::{Server, ServerSample, ServerUsage};
use crate::stats::{JobProgress, Notices};
use crate::worker::{Stage, StageCell, Window};

/// The interval for progress and interrupts.
const TICK: Duration = Duration::from_millis(200);

/// The time from the start of the last stage to the message about operations that do not end.
const WARN_AFTER: Duration = Duration::from_secs(5);

/// The purpose of a phase.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Fill,
    Measured,
    ReadBack,
}

/// The outcome of a phase.
pub(crate) struct PhaseOutcome {
    pub(crate) windows: Vec<Window>,
    pub(crate) usage: Option<ServerUsage>,
}

/// The thread that called [`measure`](crate::measure), while the driver threads work: it opens and
/// closes the measured window, samples the server and shows progress.
pub(crate) struct Supervisor<'a> {
    pub(crate) plan: &'a Plan<'a>,
    pub(crate) phase: Phase,
    pub(crate) control: &'a StageCell,
    pub(crate) job_progress: &'a [Arc<JobProgress>],
    pub(crate) server: &'a Server,
    pub(crate) interrupted: &'a AtomicBool,
    pub(crate) notices: &'a Notices,
}

impl Supervisor<'_> {
    /// Waits for the driver threads, which send their results.
    pub(crate) fn watch(
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
            progress.print(stages.overdue(self).as_slice());
            progress.print(&self.notices.take());
            progress.show(self.done());
        }
        progress.finish();
        progress.print(&self.notices.take());
        match failure {
            Some(error) => Err(error),
            None => Ok(PhaseOutcome { windows, usage: stages.usage(self) }),
        }
    }

    fn done(&self) -> (u64, u64) {
        let sums = self.job_progress.iter().map(|job_progress| job_progress.read());
        sums.fold((0, 0), |sum, done| (sum.0 + done.0, sum.1 + done.1))
    }

    /// Returns the message about operations of a disk that do not end. `None` with a server, since
    /// the driver detects a hanging server.
    fn hang_message(&self) -> Option<String> {
        let disk = self.plan.args.filename.as_ref()?.display();
        let count = match self.job_progress.iter().map(|job_progress| job_progress.left()).sum() {
            // A thread that hangs does not publish its count.
            0 => String::new(),
            1 => "one of the ".to_owned(),
            count => format!("{count} "),
        };
        let interrupts = match self.interrupted.load(Ordering::Relaxed) {
            true => "one more interrupt (Ctrl-C) ends",
            false => "two interrupts (Ctrl-C) end",
        };
        Some(format!(
            "waiting for {count}operations of {disk} to end; {interrupts} the program at once, \
             without a result"
        ))
    }

    fn progress(&self) -> Progress {
        let args = self.plan.args;
        let region_bytes = self.plan.region_bytes();
        let jobs = u64::from(args.numjobs.get());
        let (label, time, ios, bytes) = match self.phase {
            Phase::Fill => ("filling", None, None, Some(region_bytes)),
            // The amount written is not worth a walk through the map.
            Phase::ReadBack => ("checking", None, None, None),
            Phase::Measured => (
                args.pattern().name(),
                args.effective_runtime().map(|time| time + args.ramp_time),
                args.number_ios.map(|ios| ios.get().saturating_mul(jobs)),
                args.io_size.map(|bytes| bytes.saturating_mul(jobs)),
            ),
        };
        Progress::new(args.eta, label, (time, ios, bytes))
    }
}

/// Moves a measured phase through its stages. Other phases run to their end.
pub(crate) struct Stages {
    stage: Stage,
    /// The start of the next stage; `None` if only the amount of I/O ends this one.
    next_at: Option<Instant>,
    opened: Option<ServerSample>,
    closed: Option<ServerSample>,
    /// The time of the message about operations that do not end; `None` before the last stage and
    /// after the message.
    warn_at: Option<Instant>,
}

impl Stages {
    pub(crate) fn new(supervisor: &Supervisor<'_>) -> Self {
        let measured = supervisor.phase == Phase::Measured;
        let next_at = measured.then(|| Instant::now() + supervisor.plan.args.ramp_time);
        let mut stages =
            Self { stage: Stage::Ramp, next_at, opened: None, closed: None, warn_at: None };
        stages.advance(supervisor);
        stages
    }

    fn time_left(&self) -> Duration {
        self.next_at.map_or(TICK, |at| at.saturating_duration_since(Instant::now()))
    }

    /// Enters the next stage if it is due.
    fn advance(&mut self, supervisor: &Supervisor<'_>) {
        if supervisor.interrupted.load(Ordering::Relaxed) {
            self.stop(supervisor);
        }
        if self.next_at.is_none_or(|at| at > Instant::now()) {
            return;
        }
        if self.stage == Stage::Ramp {
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
            self.warn_at = Some(Instant::now() + WARN_AFTER);
            self.closed = supervisor.server.sample();
        }
    }

    /// Returns the message about operations that do not end, once it is due.
    fn overdue(&mut self, supervisor: &Supervisor<'_>) -> Option<String> {
        self.warn_at.take_if(|at| *at <= Instant::now())?;
        supervisor.hang_message()
    }

    /// Returns the server's usage over the measured window.
    fn usage(self, supervisor: &Supervisor<'_>) -> Option<ServerUsage> {
        let closed = self.closed.or_else(|| supervisor.server.sample())?;
        Some(closed.since(&self.opened?))
    }
}
