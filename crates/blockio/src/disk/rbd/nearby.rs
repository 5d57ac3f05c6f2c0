//! Keeps the threads of librbd on the CPU of the IoThread while that is faster.
//!
//! An operation wakes four threads one after the other: librbd's, the messenger's, again both. Each
//! does little, so most of the time goes into waking CPUs that sleep. On one CPU they wake each
//! other by a switch, but never run at the same time. Nothing here can see which is better on this
//! machine and under this load, so both are tried.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

use crate::io::Io;
use crate::trial::{Step, Trial};

/// Operations in each span of a trial: two of those of the trial whether to poll beside threads of
/// others, so that each of these has as much of either.
const SPAN_OPS: usize = 512;

/// How many of them the outcome holds for.
const PERIOD_OPS: usize = 64 * SPAN_OPS;

/// After so much time without an operation the IoThread and the others may be anywhere again.
const PAUSE: Duration = Duration::from_millis(100);

/// What librados calls the threads that an operation passes through.
const NAMES: [&str; 2] = ["msgr-worker-", "io_context_pool"];

static OPENINGS: Mutex<Openings> = Mutex::new(Openings { now: 0, begun: 0 });

/// Handles that are being opened.
struct Openings {
    now: u32,
    begun: u64,
}

fn openings() -> MutexGuard<'static, Openings> {
    OPENINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Finds out which threads a handle has brought along: those that were not there before. Where
/// another one is opened at the same time, nobody can tell whose they are.
pub(super) struct Census {
    before: HashSet<i32>,
    /// The number of this one. `None`: there was another one already.
    number: Option<u64>,
}

impl Census {
    pub(super) fn begin() -> Self {
        let mut openings = openings();
        openings.now += 1;
        openings.begun += 1;
        let number = (openings.now == 1).then_some(openings.begun);
        Self { before: threads().unwrap_or_default().into_iter().collect(), number }
    }

    /// The threads of the handle that operations pass through.
    pub(super) fn end(self) -> Vec<Pid> {
        if self.number != Some(openings().begun) {
            return Vec::new();
        }
        let new = threads().unwrap_or_default().into_iter().filter(|id| !self.before.contains(id));
        new.filter(|id| has_part(*id)).filter_map(Pid::from_raw).collect()
    }
}

impl Drop for Census {
    fn drop(&mut self) {
        openings().now -= 1;
    }
}

/// The threads of this process.
fn threads() -> std::io::Result<Vec<i32>> {
    let ids = std::fs::read_dir("/proc/self/task")?;
    Ok(ids.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
}

/// Whether operations pass through this thread.
fn has_part(id: i32) -> bool {
    let name = std::fs::read_to_string(format!("/proc/self/task/{id}/comm")).unwrap_or_default();
    NAMES.iter().any(|known| name.starts_with(known))
}

thread_local! {
    static STAYING: RefCell<Staying> = const { RefCell::new(Staying { handles: 0, before: None }) };
}

/// Whether this thread keeps to one CPU.
struct Staying {
    /// Handles whose threads are with it.
    handles: u32,
    /// Where it may be otherwise.
    before: Option<CpuSet>,
}

/// Has this thread stay where it is. Returns that CPU.
fn stay() -> Result<usize, Errno> {
    let cpu = sched_getcpu();
    STAYING.with_borrow_mut(|staying| {
        if staying.handles == 0 {
            staying.before = Some(sched_getaffinity(None)?);
            sched_setaffinity(None, &only(cpu))?;
        }
        staying.handles += 1;
        Ok(cpu)
    })
}

/// Takes a call of [`stay`] back.
fn leave() {
    STAYING.with_borrow_mut(|staying| {
        staying.handles -= 1;
        if staying.handles == 0
            && let Some(before) = staying.before.take()
        {
            // It fails where none of those CPUs is left, and the kernel has chosen others.
            let _ = sched_setaffinity(None, &before);
        }
    });
}

fn only(cpu: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(cpu);
    set
}

/// Where the threads of a handle are, as the IoThread decides that uses it.
pub(super) struct Placement {
    /// Anywhere, and on the CPU of this thread.
    trial: Trial,
    last: Option<Instant>,
    /// Where the threads may be otherwise, while they are here.
    before: Option<CpuSet>,
    /// There is but one CPU, or the kernel has refused, or the thread is somebody else's.
    is_fixed: bool,
}

impl Placement {
    /// For this thread. An IoThread that is part of another loop leaves alone where that runs.
    pub(super) fn new(io: &Io) -> Self {
        let cpus = sched_getaffinity(None).map_or(0, |cpus| cpus.count());
        let is_fixed = io.ops.borrow().engine.is_embedded() || cpus < 2;
        let trial = Trial::new(SPAN_OPS, PERIOD_OPS);
        Self { trial, last: None, before: None, is_fixed }
    }

    /// An operation of these threads has ended.
    pub(super) fn advance(&mut self, threads: &[Pid], now: Instant) {
        if self.is_fixed || threads.is_empty() {
            return;
        }
        let last = self.last.replace(now).unwrap_or(now);
        if now.saturating_duration_since(last) > PAUSE {
            self.trial.begin();
        }
        match self.trial.advance(1, now) {
            Some(Step::Over) => self.trial.begin(),
            Some(Step::Decided { percent }) => {
                tracing::debug!("on one CPU an operation of librbd takes {percent}% of the time");
            }
            Some(Step::Span) | None => {}
        }
        match (self.trial.is_second(), self.before.is_some()) {
            (true, false) => self.gather(threads),
            (false, true) => self.release(threads),
            _ => {}
        }
    }

    /// Brings the threads here.
    #[cold]
    fn gather(&mut self, threads: &[Pid]) {
        let mut gather = || {
            let before = sched_getaffinity(Some(threads[0]))?;
            let here = only(stay()?);
            self.before = Some(before);
            threads.iter().try_for_each(|thread| sched_setaffinity(Some(*thread), &here))
        };
        if let Err(error) = gather() {
            tracing::debug!("threads of librbd cannot be placed: {error}");
            self.is_fixed = true;
            self.release(threads);
        }
    }

    /// Lets the threads go.
    #[cold]
    pub(super) fn release(&mut self, threads: &[Pid]) {
        if let Some(before) = self.before.take() {
            for thread in threads {
                // As in `leave`.
                let _ = sched_setaffinity(Some(*thread), &before);
            }
            leave();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;
    use crate::config::IoThreadConfig;
    use crate::io_thread::IoThread;

    fn cpus(thread: Pid) -> usize {
        sched_getaffinity(Some(thread)).unwrap().count() as usize
    }

    /// A thread with a name of librados, for as long as the sender is there.
    fn start_other() -> (mpsc::Sender<()>, thread::JoinHandle<()>) {
        let (end, ended) = mpsc::channel::<()>();
        let (started, starting) = mpsc::channel();
        let work = move || {
            started.send(()).unwrap();
            let _ = ended.recv();
        };
        let other = thread::Builder::new().name("msgr-worker-9".into()).spawn(work).unwrap();
        starting.recv().unwrap();
        (end, other)
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn threads_are_here_while_that_is_faster() {
        let all = sched_getaffinity(None).unwrap().count() as usize;
        if all < 2 {
            eprintln!("skipped: threads on one CPU or several: there is one CPU");
            return;
        }
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let census = Census::begin();
        let (end, first) = start_other();
        let overlapping = Census::begin();
        let (second_end, second) = start_other();
        assert!(overlapping.end().is_empty(), "somebody else was opening a handle");
        assert!(census.end().is_empty(), "somebody else has begun meanwhile");
        let census = Census::begin();
        let (third_end, third) = start_other();
        let threads = census.end();
        drop(Census::begin());
        let census = Census::begin();
        let (last_end, last) = start_other();
        let other_threads = census.end();
        assert_eq!([threads.len(), other_threads.len()], [1, 1]);
        let own = rustix::thread::gettid();
        let (mut now, mut placement) = (Instant::now(), Placement::new(thread.io()));
        let mut run = |placement: &mut Placement, ops: usize, near: u64, far: u64| {
            for _ in 0..ops {
                let is_near = cpus(threads[0]) == 1;
                now += Duration::from_micros(if is_near { near } else { far });
                placement.advance(&threads, now);
            }
        };
        run(&mut placement, SPAN_OPS, 50, 100);
        assert_eq!([threads[0], own].map(cpus), [1, 1], "one CPU is tried");
        run(&mut placement, SPAN_OPS, 50, 100);
        assert_eq!([threads[0], own].map(cpus), [all, all]);
        run(&mut placement, 4 * SPAN_OPS, 50, 100);
        assert_eq!([threads[0], own].map(cpus), [1, 1], "it is faster");
        // Another handle that this IoThread uses.
        let mut other = Placement::new(thread.io());
        other.gather(&other_threads);
        run(&mut placement, 1, 200_000, 0);
        assert_eq!([threads[0], own].map(cpus), [all, 1], "a pause ends it");
        other.release(&other_threads);
        assert_eq!([other_threads[0], own].map(cpus), [all, all]);
        run(&mut placement, 6 * SPAN_OPS, 100, 50);
        assert_eq!([threads[0], own].map(cpus), [all, all], "it is slower");
        drop([end, second_end, third_end, last_end]);
        for thread in [first, second, third, last] {
            thread.join().unwrap();
        }
    }
}
