//! A driver thread: the loop that keeps the queues of its jobs full.

#![forbid(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use iomem::fits;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use crate::args::BenchArgs;
use crate::driver::Virtqueue;
use crate::error::BenchError;
use crate::job::{Job, Pass};
use crate::stats::Notices;
use crate::vhost_user::Connection;

/// The interval at which a waiting thread checks the stage and whether the server is gone or stuck.
pub(crate) const TICK: Duration = Duration::from_millis(100);

/// The stage of a phase, which the supervising thread sets for all driver threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Stage {
    /// I/O runs and is not counted.
    Ramp,
    /// I/O runs and is counted.
    Measuring,
    /// No new I/O is made; requests in flight are awaited.
    Stopping,
}

/// Holds the stage of a phase.
#[derive(Debug)]
pub(crate) struct StageCell(AtomicU8);

impl StageCell {
    const STAGES: [Stage; 3] = [Stage::Ramp, Stage::Measuring, Stage::Stopping];

    pub(crate) fn new(stage: Stage) -> Self {
        let control = Self(AtomicU8::new(0));
        control.set(stage);
        control
    }

    pub(crate) fn set(&self, stage: Stage) {
        let index = Self::STAGES.iter().position(|other| *other == stage).unwrap_or(0);
        self.0.store(fits(index, "the number of a stage"), Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> Stage {
        Self::STAGES[usize::from(self.0.load(Ordering::Relaxed))]
    }
}

/// The jobs of one thread and its event sources.
pub(crate) struct Worker {
    pub(crate) jobs: Vec<Job>,
    /// The queues of the jobs, in the same order.
    queues: Vec<Virtqueue>,
    epoll: OwnedFd,
    /// Fires each [`TICK`].
    timer: OwnedFd,
    connection: Arc<Connection>,
    busy_poll: bool,
    /// Delay between a call and the check of the rings.
    wake_delay: Duration,
    timeout: Duration,
    clock: Instant,
    /// The last time at which requests completed, or were made with none in flight.
    progress_at_ns: u64,
    checked_at_ns: u64,
    stage: Stage,
    window: Window,
}

/// The measured part of a phase, by the clock of one thread.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    pub(crate) start: Instant,
    pub(crate) end: Instant,
}

/// The source of a ready event.
const CALL: u64 = 0;
const TIMER: u64 = 1;
const SOCKET: u64 = 2;

impl Worker {
    /// Takes jobs. A server that goes away is noticed through `connection`.
    pub(crate) fn new(
        jobs: Vec<(Job, Virtqueue)>,
        connection: Arc<Connection>,
        args: &BenchArgs,
    ) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let tick = Timespec::try_from(TICK).map_err(io::Error::other)?;
        let ticks = Itimerspec { it_interval: tick, it_value: tick };
        timerfd_settime(&timer, TimerfdTimerFlags::empty(), &ticks)?;
        // Edge-triggered, so that not every call needs a read. Calls add up in their eventfd, which
        // is read when the measured window closes.
        let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &timer, epoll::EventData::new_u64(TIMER), edge)?;
        let (jobs, queues): (Vec<_>, Vec<_>) = jobs.into_iter().unzip();
        for queue in &queues {
            let call = queue.call_fd();
            epoll::add(&epoll, call, epoll::EventData::new_u64(CALL), edge)?;
        }
        let data = epoll::EventData::new_u64(SOCKET);
        epoll::add(&epoll, connection.socket(), data, epoll::EventFlags::RDHUP)?;
        let clock = Instant::now();
        Ok(Self {
            jobs,
            queues,
            epoll,
            timer,
            connection,
            busy_poll: args.busy_poll,
            wake_delay: Duration::from_micros(args.wake_delay),
            timeout: args.timeout,
            clock,
            progress_at_ns: 0,
            checked_at_ns: 0,
            stage: Stage::Ramp,
            window: Window { start: clock, end: clock },
        })
    }

    /// Runs one phase until all sources are exhausted or `control` stops it, and then until nothing
    /// is in flight.
    pub(crate) fn run(
        &mut self,
        control: &StageCell,
        notices: &Notices,
    ) -> Result<Window, BenchError> {
        self.drive(control, notices).map_err(|error| {
            let in_flight: usize = self.jobs.iter().map(Job::in_flight).sum();
            BenchError::Run(format!(
                "the server failed with {in_flight} requests in flight: {error}"
            ))
        })
    }

    fn drive(&mut self, control: &StageCell, notices: &Notices) -> io::Result<Window> {
        self.stage = Stage::Ramp;
        // By default the kernel wakes sleepers up to 50 µs late, which an open loop would show as
        // latency.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        let now_ns = self.now_ns();
        self.progress_at_ns = now_ns;
        self.jobs.iter_mut().for_each(|job| job.begin_arrivals(now_ns));
        for queue in &mut self.queues {
            queue.disarm();
        }
        let mut idle_spins = 0_u32;
        loop {
            let stage = control.get();
            if stage != self.stage {
                self.enter(stage)?;
            }
            if self.has_work() {
                idle_spins = 0;
                self.turn(notices)?;
            } else if self.is_finished() {
                break;
            } else if self.busy_poll {
                idle_spins = idle_spins.wrapping_add(1);
                self.spin(idle_spins)?;
            } else {
                self.sleep()?;
            }
        }
        if self.stage == Stage::Measuring {
            self.enter(Stage::Stopping)?;
        }
        Ok(self.window)
    }

    /// Makes one pass over the queues, with one reading of the clock.
    fn turn(&mut self, notices: &Notices) -> io::Result<()> {
        let pass = Pass {
            now_ns: self.now_ns(),
            recording: self.stage == Stage::Measuring,
            stopping: self.stage == Stage::Stopping,
            notices,
        };
        let idle = self.jobs.iter().all(|job| job.in_flight() == 0);
        let mut completed = 0;
        for (job, queue) in self.jobs.iter_mut().zip(&mut self.queues) {
            completed += job.turn(queue, &pass)?;
        }
        if completed > 0 || idle {
            self.progress_at_ns = pass.now_ns;
        }
        if completed > 0 {
            // Blocks that one job has released may be the ones that block another.
            self.unblock();
        }
        Ok(())
    }

    fn has_work(&self) -> bool {
        let stopping = self.stage == Stage::Stopping;
        self.queues.iter().any(Virtqueue::has_completions)
            || (!stopping && self.jobs.iter().any(|job| job.can_refill(|| self.now_ns())))
    }

    fn is_finished(&self) -> bool {
        let stopping = self.stage == Stage::Stopping;
        self.jobs.iter().all(|job| job.in_flight() == 0 && (stopping || job.is_exhausted()))
    }

    /// Opens or closes the measured window.
    fn enter(&mut self, stage: Stage) -> io::Result<()> {
        let now = Instant::now();
        for (job, queue) in self.jobs.iter_mut().zip(&mut self.queues) {
            let calls = queue.take_calls()?;
            if self.stage == Stage::Measuring {
                job.counters.calls += calls;
            }
        }
        match stage {
            Stage::Measuring => self.window = Window { start: now, end: now },
            _ if self.stage == Stage::Measuring => self.window.end = now,
            _ => {}
        }
        self.stage = stage;
        Ok(())
    }

    /// Waits for a call, unless a request completes while calls are being enabled.
    fn sleep(&mut self) -> io::Result<()> {
        if self.retry_blocked() {
            return Ok(());
        }
        let mut completed = false;
        for queue in &mut self.queues {
            completed |= queue.arm();
        }
        let outcome = if completed { Ok(false) } else { self.wait() };
        for queue in &mut self.queues {
            queue.disarm();
        }
        if outcome? { self.check_server() } else { Ok(()) }
    }

    /// Sleeps until an event or until a request is due. Returns true after any event other than a
    /// call.
    fn wait(&self) -> io::Result<bool> {
        /// The most events taken at once; the rest come with the next wait.
        const EVENTS: usize = 16;
        let mut events = [const { MaybeUninit::uninit() }; EVENTS];
        let timeout = match self.until_refill() {
            // epoll has a resolution of milliseconds only.
            Some(left) => {
                let left = Timespec::try_from(left).map_err(io::Error::other)?;
                let mut fds = [PollFd::new(&self.epoll, PollFlags::IN)];
                if let Err(error) = poll(&mut fds, Some(&left))
                    && error != Errno::INTR
                {
                    return Err(error.into());
                }
                Some(Timespec { tv_sec: 0, tv_nsec: 0 })
            }
            None => None,
        };
        match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Ok((ready, _)) => {
                if ready.iter().any(|event| event.data.u64() == CALL) {
                    self.delay();
                }
                if ready.iter().any(|event| event.data.u64() == TIMER) {
                    // The kernel rearms a periodic timer only when it is read. The number of
                    // expirations, even 0, does not matter.
                    let _ = rustix::io::read(&self.timer, &mut [0; 8]);
                }
                Ok(ready.iter().any(|event| event.data.u64() != CALL))
            }
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// The time until a job of an open loop makes a request; `None` if none will before another
    /// event.
    fn until_refill(&self) -> Option<Duration> {
        let stopping = self.stage == Stage::Stopping;
        let next_ns = self.jobs.iter().filter_map(Job::refill_at_ns).min();
        let next_ns = next_ns.filter(|_| !stopping)?;
        Some(Duration::from_nanos(next_ns.saturating_sub(self.now_ns())))
    }

    /// Simulates the time that a slower machine needs to wake a driver.
    fn delay(&self) {
        let until = Instant::now() + self.wake_delay;
        while Instant::now() < until {
            std::hint::spin_loop();
        }
    }

    /// Waits a moment without sleeping, and at times runs [`check_server`](Self::check_server).
    fn spin(&mut self, idle_spins: u32) -> io::Result<()> {
        /// Empty passes between two readings of the clock.
        const SPINS_PER_CHECK: u32 = 1024;
        std::hint::spin_loop();
        if !idle_spins.is_multiple_of(SPINS_PER_CHECK) || self.retry_blocked() {
            return Ok(());
        }
        let now = self.now_ns();
        if Duration::from_nanos(now.saturating_sub(self.checked_at_ns)) < TICK {
            return Ok(());
        }
        self.checked_at_ns = now;
        self.check_server()
    }

    /// Unblocks the jobs if all of them wait for blocks that other threads' requests have claimed:
    /// completions of these would not wake this thread. Returns true if it did.
    fn retry_blocked(&mut self) -> bool {
        let waits = |job: &Job| job.in_flight() > 0 || job.refill_at_ns().is_some();
        if self.jobs.iter().any(waits) || self.stage == Stage::Stopping {
            return false;
        }
        self.unblock();
        std::thread::yield_now();
        true
    }

    fn unblock(&mut self) {
        for job in &mut self.jobs {
            job.unblock();
        }
    }

    /// Checks that the server has neither disconnected nor stalled.
    ///
    /// # Errors
    ///
    /// If it has.
    fn check_server(&mut self) -> io::Result<()> {
        if self.connection.is_closed()? {
            return Err(io::Error::other("it has closed the connection or died"));
        }
        let waiting = self.jobs.iter().any(|job| job.in_flight() > 0);
        let stuck_for = Duration::from_nanos(self.now_ns().saturating_sub(self.progress_at_ns));
        if waiting && stuck_for > self.timeout {
            let seconds = self.timeout.as_secs_f64();
            let text = format!("it has completed nothing for {seconds} s (see --timeout)");
            return Err(io::Error::other(text));
        }
        Ok(())
    }

    fn now_ns(&self) -> u64 {
        fits(self.clock.elapsed().as_nanos(), "a time in nanoseconds")
    }
}
