//! Keeps the threads of librbd on the CPU of the IoThread while that is faster.
//!
//! An operation wakes four threads one after the other: librbd's, the messenger's, again both. Each
//! does little, so most of the time goes into waking CPUs that sleep. On one CPU they wake each
//! other by a switch, but never run at the same time. Nothing here can see which is better on this
//! machine and under this load, so both are tried.

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::sched_getaffinity;

use super::shared::Shared;
use crate::clock;
use crate::io::Io;
use crate::stay::{Free, Stay};
use crate::trial::{Step, Trial};

/// Operations in each span of a trial: two of those of the trial whether to poll beside threads of
/// others, so that each of these has as much of either.
const SPAN_OPS: usize = 512;

/// How many of them the outcome holds for, and how long at most: for `PERIOD` or, where the trial
/// itself took long because operations do, for `PERIOD_TRIALS` times as long as that. Half of a
/// trial is spent in the slower way, so trials are a small part of all operations.
const PERIOD_OPS: usize = 256 * SPAN_OPS;
const PERIOD: Duration = Duration::from_secs(10);
const PERIOD_TRIALS: u32 = 16;

/// After so much time without an operation the IoThread and the others may be anywhere until one
/// comes sooner after another. The outcome of a trial holds on; a trial begins anew.
const PAUSE: Duration = Duration::from_millis(100);

/// What librados calls the threads that an operation passes through.
const NAMES: [&str; 2] = ["msgr-worker-", "io_context_pool"];

/// How long a handle waits for others that are being opened. Where a cluster is away, they take
/// longer.
const TURN: Duration = Duration::from_secs(5);

static OPENINGS: Mutex<Openings> = Mutex::new(Openings { now: 0, begun: 0 });
static HAS_OPENED: Condvar = Condvar::new();

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
        Self::begin_within(TURN)
    }

    fn begin_within(turn: Duration) -> Self {
        let number = {
            let (mut openings, _) = HAS_OPENED
                .wait_timeout_while(openings(), turn, |openings| openings.now > 0)
                .unwrap_or_else(PoisonError::into_inner);
            openings.now += 1;
            openings.begun += 1;
            (openings.now == 1).then_some(openings.begun)
        };
        Self { before: threads().unwrap_or_default().into_iter().collect(), number }
    }

    /// The threads of the handle that operations pass through.
    pub(super) fn end(self) -> Vec<Pid> {
        let new = threads().unwrap_or_default().into_iter().filter(|id| !self.before.contains(id));
        let found = new.filter_map(Pid::from_raw).filter(|id| has_part(*id)).collect();
        if self.number == Some(openings().begun) {
            return found;
        }
        tracing::debug!("whose the threads of librbd are is not known: several images were opened");
        Vec::new()
    }
}

impl Drop for Census {
    fn drop(&mut self) {
        openings().now -= 1;
        HAS_OPENED.notify_one();
    }
}

/// The threads of this process.
fn threads() -> std::io::Result<Vec<i32>> {
    let ids = std::fs::read_dir("/proc/self/task")?;
    Ok(ids.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
}

/// Whether this is a thread that operations pass through. One that has ended may have left its
/// number to another.
fn has_part(thread: Pid) -> bool {
    let path = format!("/proc/self/task/{}/comm", thread.as_raw_nonzero());
    let name = std::fs::read_to_string(path).unwrap_or_default();
    NAMES.iter().any(|known| name.starts_with(known))
}

/// Where an IoThread and the threads of its images are. There is one for each IoThread that has
/// images.
pub(super) struct Nearby {
    placement: RefCell<Placement>,
    images: RefCell<Vec<Weak<Shared>>>,
}

impl Nearby {
    /// That of this IoThread.
    pub(super) fn of(io: &Io) -> Rc<Self> {
        let key = (&raw const OPENINGS).addr();
        io.kept(key).unwrap_or_else(|| {
            let placement = RefCell::new(Placement::new(io));
            let nearby = Rc::new(Self { placement, images: RefCell::default() });
            io.keep(key, &nearby);
            nearby
        })
    }

    /// This IoThread has one more disk of an image, whose threads a trial is to include.
    pub(super) fn join(&self, io: &Rc<Io>, image: &Arc<Shared>) {
        self.placement.borrow_mut().release();
        image.add_user(io);
        self.images.borrow_mut().push(Arc::downgrade(image));
    }

    /// Takes a [`join`](Self::join) back. The threads are let go, before another IoThread may bring
    /// them to it.
    pub(super) fn leave(&self, io: &Rc<Io>, image: &Arc<Shared>) {
        self.placement.borrow_mut().release();
        let mut images = self.images.borrow_mut();
        let is_it = |other: &Weak<Shared>| std::ptr::eq(other.as_ptr(), Arc::as_ptr(image));
        let place = images.iter().position(is_it);
        images.swap_remove(place.expect("a disk has joined when it was made"));
        image.remove_user(io);
    }

    /// An operation of an image has ended.
    pub(super) fn advance(self: &Rc<Self>, io: &Rc<Io>, image: &Shared) {
        let has_gathered = {
            let mut placement = self.placement.borrow_mut();
            if placement.is_fixed || image.image.threads().is_empty() {
                return;
            }
            if image.is_divided() {
                // Nobody knows for which of its IoThreads the threads work.
                if placement.has_one_of(image.image.threads()) {
                    placement.release();
                }
                return;
            }
            placement.advance(clock::now(), || self.threads())
        };
        if has_gathered {
            io.spawn(wait_for_pause(Rc::clone(self), Rc::clone(io)));
        }
    }

    /// The threads of the images that only this IoThread uses.
    fn threads(&self) -> Vec<Pid> {
        let images = self.images.borrow();
        let images = images.iter().filter_map(Weak::upgrade).filter(|image| !image.is_divided());
        let threads: HashSet<Pid> =
            images.flat_map(|image| image.image.threads().to_vec()).collect();
        threads.into_iter().collect()
    }
}

/// Lets the threads go when there are no operations any more.
async fn wait_for_pause(nearby: Rc<Nearby>, io: Rc<Io>) {
    let look = || nearby.placement.borrow_mut().release_at(clock::now());
    while let Some(until) = look() {
        io.wake_me_at(until);
        io.suspend().await;
    }
}

/// Decides whether threads are with the one that made this.
struct Placement {
    /// Anywhere, and on the CPU of this thread.
    trial: Trial,
    last: Instant,
    /// When the first operation of the trial ended.
    began: Option<Instant>,
    /// Until when the outcome of the trial holds.
    holds_until: Option<Instant>,
    gathered: Option<Gathered>,
    /// A task waits for a pause.
    is_watched: bool,
    /// There is but one CPU, or the kernel has refused, or the thread is somebody else's.
    is_fixed: bool,
}

/// Threads that are on the CPU of this one.
struct Gathered {
    stay: Stay,
    /// With how they run otherwise.
    threads: Vec<(Pid, Free)>,
}

impl Drop for Gathered {
    fn drop(&mut self) {
        for (thread, before) in self.threads.iter().filter(|(thread, _)| has_part(*thread)) {
            self.stay.let_go(Some(*thread), before);
        }
    }
}

impl Placement {
    /// For this thread. An IoThread that is part of another loop leaves alone where that runs.
    fn new(io: &Io) -> Self {
        let cpus = sched_getaffinity(None).map_or(0, |cpus| cpus.count());
        Self {
            trial: Trial::new(SPAN_OPS, PERIOD_OPS),
            last: clock::now(),
            began: None,
            holds_until: None,
            gathered: None,
            is_watched: false,
            is_fixed: io.ops.borrow().engine.is_embedded() || cpus < 2,
        }
    }

    /// An operation of `threads` has ended. True: they were brought here, and somebody has to
    /// watch for a pause.
    fn advance(&mut self, now: Instant, threads: impl FnOnce() -> Vec<Pid>) -> bool {
        let last = std::mem::replace(&mut self.last, now);
        let is_after_pause = now.saturating_duration_since(last) > PAUSE;
        if self.holds_until.map_or(is_after_pause, |until| now > until) {
            self.begin();
        }
        let began = *self.began.get_or_insert(now);
        match self.trial.advance(1, now) {
            Some(Step::Over) => self.begin(),
            Some(Step::Decided { percent }) => {
                let trial = now.saturating_duration_since(began);
                self.holds_until = Some(now + PERIOD.max(PERIOD_TRIALS * trial));
                tracing::debug!("on one CPU an operation of librbd takes {percent}% of the time");
            }
            Some(Step::Span) | None => {}
        }
        match (self.trial.is_second(), self.gathered.is_some()) {
            // One that comes alone is not worth it.
            (true, false) if !is_after_pause => self.gather(&threads()),
            (false, true) => self.gathered = None,
            _ => {}
        }
        self.gathered.is_some() && !std::mem::replace(&mut self.is_watched, true)
    }

    fn begin(&mut self) {
        (self.began, self.holds_until) = (None, None);
        self.trial.begin();
    }

    /// Brings the threads here.
    #[cold]
    fn gather(&mut self, threads: &[Pid]) {
        if threads.is_empty() {
            return;
        }
        match Stay::begin() {
            Ok(stay) => {
                let threads = threads.iter().filter(|thread| has_part(**thread));
                let threads = threads.filter_map(|thread| Some((*thread, stay.bring(*thread)?)));
                self.gathered = Some(Gathered { threads: threads.collect(), stay });
            }
            Err(error) => {
                tracing::debug!("threads of librbd cannot be placed: {error}");
                self.is_fixed = matches!(error, Errno::BUSY | Errno::PERM | Errno::ACCESS);
                self.begin();
            }
        }
    }

    fn has_one_of(&self, threads: &[Pid]) -> bool {
        let mut here = self.gathered.iter().flat_map(|gathered| &gathered.threads);
        here.any(|(thread, _)| threads.contains(thread))
    }

    /// Lets the threads go, and forgets what was found out.
    fn release(&mut self) {
        self.gathered = None;
        self.begin();
    }

    /// Lets the threads go if there was a pause. Otherwise, if they are here, when it is to be
    /// looked again.
    fn release_at(&mut self, now: Instant) -> Option<Instant> {
        let until = self.last + PAUSE;
        if now >= until {
            self.gathered = None;
        }
        self.is_watched = self.gathered.is_some();
        self.is_watched.then_some(until)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use rustix::thread::gettid;

    use super::*;
    use crate::config::IoThreadConfig;
    use crate::io_thread::IoThread;
    use crate::policy::{self, Policy};

    /// On one CPU it waits for its turn.
    fn cpus(thread: Pid) -> usize {
        let cpus = sched_getaffinity(Some(thread)).unwrap().count() as usize;
        let expected = if cpus == 1 { Policy::Batch } else { Policy::Other };
        assert!(policy::has(Some(thread), expected), "{cpus} CPUs, and not {expected:?}");
        cpus
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

    /// Has so many operations end, which take as many microseconds if the thread is `near`, or
    /// `far` from here.
    fn run(placement: &mut Placement, thread: Pid, ops: usize, [near, far]: [u64; 2]) {
        for _ in 0..ops {
            let micros = if cpus(thread) == 1 { near } else { far };
            let now = placement.last + Duration::from_micros(micros);
            placement.advance(now, || vec![thread]);
        }
    }

    /// Images that are opened together wait for each other.
    fn check_turns() {
        let first = Census::begin();
        let (told, ids) = mpsc::channel();
        let second = thread::spawn(move || {
            told.send(gettid()).unwrap();
            Census::begin().number.is_some()
        });
        let path = format!("/proc/self/task/{}/stat", ids.recv().unwrap().as_raw_nonzero());
        while !std::fs::read_to_string(&path).expect("it has not waited").contains(") S ") {
            thread::yield_now();
        }
        drop(first);
        assert!(second.join().unwrap(), "it was not alone");
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn threads_are_here_while_that_is_faster() {
        let all = sched_getaffinity(None).unwrap().count() as usize;
        if all < 2 {
            eprintln!("skipped: threads on one CPU or several: there is one CPU");
            return;
        }
        check_turns();
        let io_thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let census = Census::begin();
        let (first_end, first) = start_other();
        let overlapping = Census::begin_within(Duration::ZERO);
        let (second_end, second) = start_other();
        assert!(overlapping.end().is_empty(), "somebody else was opening a handle");
        assert!(census.end().is_empty(), "somebody else has begun meanwhile");
        let census = Census::begin();
        let (third_end, third) = start_other();
        let threads = census.end();
        assert_eq!(threads.len(), 1);
        let (thread, own) = (threads[0], gettid());
        let both = || [thread, own].map(cpus);
        let mut placement = Placement::new(io_thread.io());
        run(&mut placement, thread, SPAN_OPS, [50, 100]);
        assert_eq!(both(), [1, 1], "one CPU is tried");
        // What this thread starts is free.
        let (told, cpus_of_new) = mpsc::channel();
        let tell = move || told.send(cpus(gettid())).unwrap();
        io_thread.io().start_thread("new", tell).unwrap();
        assert_eq!(cpus_of_new.recv().unwrap(), all);
        run(&mut placement, thread, SPAN_OPS, [50, 100]);
        assert_eq!(both(), [all, all]);
        run(&mut placement, thread, 4 * SPAN_OPS, [50, 100]);
        assert_eq!(both(), [1, 1], "it is faster");
        assert!(placement.has_one_of(&threads) && !placement.has_one_of(&[own]));
        assert_eq!(placement.release_at(placement.last), Some(placement.last + PAUSE));
        assert_eq!((both(), placement.release_at(placement.last + PAUSE)), ([1, 1], None));
        assert_eq!(both(), [all, all], "a pause ends it");
        run(&mut placement, thread, 2, [200_000; 2]);
        assert_eq!(both(), [all, all], "those that come alone are left where they are");
        run(&mut placement, thread, 1, [50; 2]);
        assert_eq!(both(), [1, 1], "the outcome still holds");
        run(&mut placement, thread, 6, [2_000_000; 2]);
        assert_eq!(both(), [all, all], "it is old");
        run(&mut placement, thread, 6 * SPAN_OPS, [100, 50]);
        assert_eq!(both(), [all, all], "it is slower");
        run(&mut placement, thread, 2 * SPAN_OPS - 1, [100, 20_000]);
        assert_eq!(both(), [1, 1], "it is tried again, because the outcome is old");
        placement.release();
        assert_eq!(both(), [all, all]);
        run(&mut placement, thread, 6 * SPAN_OPS + 1, [4_000, 8_000]);
        let until = placement.holds_until.unwrap();
        run(&mut placement, thread, 12 * SPAN_OPS, [4_000, 8_000]);
        assert_eq!(placement.holds_until, Some(until), "half of the time goes into trials");
        drop([first_end, second_end, third_end]);
        for thread in [first, second, third] {
            thread.join().unwrap();
        }
    }
}
