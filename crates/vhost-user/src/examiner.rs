//! Threads for work that may take long or hang, on behalf of the front-ends of one export.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Waker;
use std::time::Duration;

use blockio::executor::{Lock, start_thread};
use device::oneshot;
use virtqueue::GuestMemory;

/// The maximum of descriptors that are still open after their messages because a thread hangs. At
/// the maximum no message is read.
const UNCLOSED_MAX: usize = 512;

/// Threads that examine and map memory. If one hangs, the rest serve the next front-end.
const MAP_THREADS: usize = 4;

/// Threads that take and release locks of disks: one for the front-end, and one for the front-end
/// before it.
const LOCK_THREADS: usize = 2;

/// Threads that pass calls on, one per front-end. All but the last are left from earlier
/// front-ends, with a write that hangs.
const RELAYS_MAX: usize = 4;

/// The longest wait of a message for such a thread to end. Without a hanging write the thread only
/// needs a CPU.
pub(super) const RELAY_LIMIT: Duration = Duration::from_secs(1);

/// Unmapping memory in use takes some 0.2 ms for each MiB. Up to this size the last user unmaps it
/// itself, because a thread costs as much.
const UNMAP_AT_ONCE_BYTES: u64 = 16 << 20;

type Job = Box<dyn FnOnce() + Send>;

/// Runs work that may hang. Each export has an examiner, so that none exhausts the threads of
/// another. A thread exists only while it has work.
pub struct Examiner {
    closes: Arc<JobQueue>,
    maps: Arc<JobQueue>,
    unmaps: Arc<JobQueue>,
    locks: Arc<JobQueue>,
    /// Open descriptors of front-ends that no ring, memory or channel has taken over: in messages,
    /// of relayed calls, or to be closed.
    open: AtomicUsize,
    /// The maximum of open descriptors of a front-end, rings and memory included.
    open_max: AtomicUsize,
    relays: Lock<Relays>,
    /// Woken when a descriptor is closed.
    waits_for_room: Lock<Option<Waker>>,
}

/// The threads that pass calls on.
#[derive(Default)]
struct Relays {
    threads: usize,
    /// Woken when a thread has ended.
    waiting: Option<Waker>,
}

impl Default for Examiner {
    fn default() -> Self {
        let queue =
            |name, threads_max| Arc::new(JobQueue { name, threads_max, jobs: Lock::default() });
        Self {
            closes: queue("ringhaul-close", 1),
            maps: queue("ringhaul-map", MAP_THREADS),
            unmaps: queue("ringhaul-unmap", 1),
            locks: queue("ringhaul-lock", LOCK_THREADS),
            open: AtomicUsize::new(0),
            open_max: AtomicUsize::new(usize::MAX),
            relays: Lock::default(),
            waits_for_room: Lock::default(),
        }
    }
}

impl Examiner {
    /// Counts one more open descriptor, until the result is dropped.
    #[cfg(any(test, feature = "testing"))]
    pub fn hold(self: &Arc<Self>) -> impl Sized + use<> {
        Counted::new(Arc::clone(self))
    }

    /// Sets the maximum of open descriptors of a front-end. The eventfds of a ring count twice,
    /// because its queue has them too.
    pub fn set_open_max(&self, open_max: usize) {
        self.open_max.store(open_max, Ordering::Relaxed);
    }

    /// The number of open descriptors that no ring, memory or channel has taken over.
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// The maximum of open descriptors of a front-end.
    pub fn open_max(&self) -> usize {
        self.open_max.load(Ordering::Relaxed)
    }

    /// Returns false if earlier messages have left the maximum of open descriptors, and `waker` is
    /// woken when one is closed. Called between messages.
    pub(super) fn has_room(&self, waker: &Waker) -> bool {
        let mut waiting = self.waits_for_room.lock();
        // Checked under the lock, which a close takes after it has counted.
        let has_room = self.open() < UNCLOSED_MAX.min(self.open_max());
        *waiting = (!has_room).then(|| waker.clone());
        has_room
    }

    /// Returns the reason that new descriptors cannot be kept, if so. Rings and memory have `rings`
    /// descriptors.
    pub(super) fn lacks_room(&self, rings: usize) -> Option<String> {
        (self.open() + rings > self.open_max()).then(|| {
            format!(
                "the export's share of the limit on open files, {}, is used up: raise the limit \
                 (ulimit -n)",
                self.open_max()
            )
        })
    }

    /// Returns true if a [`RelaySlot`] is free. If none is, `waker` is woken when one becomes free.
    pub(super) fn has_relay_slot(&self, waker: &Waker) -> bool {
        let mut relays = self.relays.lock();
        let is_free = relays.threads < RELAYS_MAX;
        relays.waiting = (!is_free).then(|| waker.clone());
        is_free
    }

    /// Closes the descriptors in `value` on a thread.
    pub(super) fn close<T: Send + 'static>(&self, value: T) {
        self.closes.run(Box::new(move || drop(value)));
    }

    /// Calls `map` on a thread. It is not called if the caller drops the result before.
    pub(super) fn map<T: Send + 'static>(
        &self,
        map: impl FnOnce() -> T + Send + 'static,
    ) -> oneshot::Receiver<T> {
        run_awaited(&self.maps, map)
    }

    /// Calls `lock`, which takes or releases locks of disks, like [`map`](Self::map).
    pub(super) fn lock<T: Send + 'static>(
        &self,
        lock: impl FnOnce() -> T + Send + 'static,
    ) -> oneshot::Receiver<T> {
        run_awaited(&self.locks, lock)
    }

    /// Unmaps memory of which the caller has the last reference, on a thread if it is large. The
    /// result comes when it is unmapped; `None`: it is unmapped on return.
    pub(super) fn unmap(&self, memory: Arc<GuestMemory>) -> Option<oneshot::Receiver<()>> {
        if memory.bytes() <= UNMAP_AT_ONCE_BYTES {
            return None;
        }
        let (answer, pending) = oneshot::channel();
        self.unmaps.run(Box::new(move || {
            drop(memory);
            answer.send(());
        }));
        Some(pending)
    }
}

/// Calls `job` on a thread of this queue, unless the caller has dropped the result by then.
fn run_awaited<T: Send + 'static>(
    queue: &Arc<JobQueue>,
    job: impl FnOnce() -> T + Send + 'static,
) -> oneshot::Receiver<T> {
    let (answer, pending) = oneshot::channel();
    queue.run(Box::new(move || {
        if answer.is_awaited() {
            answer.send(job());
        }
    }));
    pending
}

/// An open descriptor of a front-end, counted until this is dropped.
pub(super) struct Counted(Arc<Examiner>);

impl Counted {
    pub(super) fn new(examiner: Arc<Examiner>) -> Self {
        examiner.open.fetch_add(1, Ordering::Relaxed);
        Self(examiner)
    }

    pub(super) fn examiner(&self) -> &Arc<Examiner> {
        &self.0
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
        let waiting = self.0.waits_for_room.lock().take();
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// The right to have one thread that passes calls on, until this is dropped.
pub(super) struct RelaySlot(Arc<Examiner>);

impl RelaySlot {
    /// Returns `None` if there are too many such threads.
    pub(super) fn take(examiner: &Arc<Examiner>) -> Option<Self> {
        let mut relays = examiner.relays.lock();
        if relays.threads >= RELAYS_MAX {
            return None;
        }
        relays.threads += 1;
        Some(Self(Arc::clone(examiner)))
    }
}

impl Drop for RelaySlot {
    fn drop(&mut self) {
        let mut relays = self.0.relays.lock();
        relays.threads -= 1;
        let waiting = relays.waiting.take();
        drop(relays);
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// Jobs of one kind, and the threads that run them.
struct JobQueue {
    name: &'static str,
    threads_max: usize,
    jobs: Lock<Jobs>,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    /// Threads, each of which has a job or is about to take one.
    threads: usize,
}

impl JobQueue {
    fn run(self: &Arc<Self>, job: Job) {
        let mut jobs = self.jobs.lock();
        jobs.waiting.push_back(job);
        if jobs.threads == self.threads_max {
            return;
        }
        let this = Arc::clone(self);
        // If no thread can be started, the jobs wait for the next call.
        if start_thread(self.name, move || while this.run_next() {}).is_ok() {
            jobs.threads += 1;
        }
    }

    /// Returns false if no job is left.
    fn run_next(&self) -> bool {
        let mut jobs = self.jobs.lock();
        let Some(job) = jobs.waiting.pop_front() else {
            jobs.threads -= 1;
            return false;
        };
        drop(jobs);
        job();
        true
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use super::*;

    pub(crate) fn wait_until(mut is_so: impl FnMut() -> bool) {
        let start = Instant::now();
        while !is_so() {
            assert!(start.elapsed() < Duration::from_secs(30), "it does not happen");
            std::thread::yield_now();
        }
    }

    /// A job that ends when the sender is dropped.
    fn hang() -> (Job, mpsc::Sender<()>) {
        let (sender, receiver) = mpsc::channel::<()>();
        (Box::new(move || receiver.recv().unwrap_or_default()), sender)
    }

    fn hang_in(queue: &Arc<JobQueue>) -> mpsc::Sender<()> {
        let (job, sender) = hang();
        queue.run(job);
        wait_until(|| queue.jobs.lock().waiting.is_empty());
        sender
    }

    fn answer_of<T>(pending: &oneshot::Receiver<T>) -> T {
        let mut answer = None;
        wait_until(|| {
            answer = answer.take().or_else(|| pending.poll());
            answer.is_some()
        });
        answer.unwrap()
    }

    /// Returns an examiner whose closing thread hangs until the sender is dropped.
    pub(crate) fn hung() -> (Arc<Examiner>, mpsc::Sender<()>) {
        let examiner = Arc::new(Examiner::default());
        let sender = hang_in(&examiner.closes);
        (examiner, sender)
    }

    impl Examiner {
        /// The number of jobs that wait for the closing thread.
        pub(crate) fn closes(&self) -> usize {
            self.closes.jobs.lock().waiting.len()
        }

        pub(crate) fn is_idle(&self) -> bool {
            let queues = [&self.closes, &self.maps, &self.unmaps];
            self.relays.lock().threads == 0
                && queues.iter().all(|queue| queue.jobs.lock().threads == 0)
        }
    }

    #[test]
    fn a_hanging_job_holds_up_no_other_kind() {
        let (examiner, _close) = hung();
        let _unmap = hang_in(&examiner.unmaps);
        assert_eq!(answer_of(&examiner.map(|| 7)), 7);
        let mut hung: Vec<_> = (1..MAP_THREADS).map(|_| hang_in(&examiner.maps)).collect();
        assert_eq!(answer_of(&examiner.map(|| 8)), 8);
        // All threads hang. A job whose result was dropped is not begun later.
        hung.push(hang_in(&examiner.maps));
        let (sender, begun) = mpsc::channel();
        let (given_up, last) = (sender.clone(), sender);
        drop(examiner.map(move || given_up.send("given up")));
        let last = examiner.map(move || last.send("the last"));
        drop(hung);
        assert!(last.wait().is_some());
        assert_eq!(begun.iter().collect::<Vec<_>>(), ["the last"]);
    }

    /// A queue needs copies of its descriptors when it starts.
    #[test]
    fn descriptors_of_rings_count_beside_the_open_ones() {
        let examiner = Arc::new(Examiner::default());
        assert!(examiner.lacks_room(1 << 20).is_none(), "there is no limit at first");
        examiner.set_open_max(10);
        let held: Vec<_> = (0..4).map(|_| examiner.hold()).collect();
        assert_eq!(examiner.open(), 4);
        for (rings, lacks) in [(0, false), (6, false), (7, true), (100, true)] {
            let why = examiner.lacks_room(rings);
            assert_eq!(why.is_some(), lacks, "{rings}");
            assert!(why.is_none_or(|why| why.contains("open files, 10, is used up")));
        }
        drop(held);
        assert!(examiner.lacks_room(10).is_none());
    }

    #[test]
    fn much_memory_is_unmapped_on_another_thread() {
        let examiner = Examiner::default();
        let unmap = hang_in(&examiner.unmaps);
        let memory = |bytes| Arc::new(GuestMemory::anonymous(&[(0, bytes)]).unwrap());
        assert!(examiner.unmap(memory(1 << 20)).is_none());
        let large = memory(1 << 30);
        let seen = Arc::downgrade(&large);
        let pending = examiner.unmap(large).unwrap();
        assert!(seen.upgrade().is_some() && pending.poll().is_none(), "it is unmapped at once");
        drop(unmap);
        assert_eq!(pending.wait(), Some(()));
        assert!(seen.upgrade().is_none());
    }
}
