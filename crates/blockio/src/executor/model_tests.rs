//! Models of shared state. loom runs each through every schedule (and every value that a weak
//! atomic may read) up to a bound; shuttle runs larger ones through many random schedules.
//!
//! A lost wake shows as a deadlock: the thread that sleeps on the modelled eventfd is the last. The
//! checkers have no clock, so idle pool threads do not end here.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;

use crate::engine::pool::{Job, OpView, Pool, pool_thread};
use crate::executor::mailbox::{Mailbox, OpResult, Posted, TaskKey};
use crate::executor::notify::Notify;
use crate::executor::semaphore::FairSemaphore;
use crate::executor::sync::atomic::{AtomicU32, Ordering};
use crate::executor::task;
use crate::op::OpKind;
use crate::stats::Counter;
use crate::thread::foreign_op::ForeignCompleter;

#[cfg(loom)]
use loom::thread;
#[cfg(shuttle)]
use shuttle::thread;

/// The size of the models, which grows if not every schedule is tried.
const SCALE: u32 = if cfg!(loom) { 1 } else { 4 };

fn explore(model: impl Fn() + Send + Sync + 'static) {
    #[cfg(loom)]
    {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(2);
        builder.check(model);
    }
    #[cfg(shuttle)]
    shuttle::check_random(model, 5_000);
}

fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn new_mailbox() -> Arc<Mailbox> {
    Arc::new(Mailbox::new(new_eventfd()))
}

/// The tasks in posts that were taken from a mailbox.
fn numbers(posted: Posted) -> Vec<u32> {
    posted.woken.into_iter().map(|key| key.home).collect()
}

/// Sleeps like the loop: only if the mailbox is still empty after it was armed.
fn sleep(mailbox: &Mailbox) {
    mailbox.arm();
    if !mailbox.has_anything() {
        mailbox.eventfd().wait();
    }
}

fn sleep_and_take(mailbox: &Mailbox, taken: &mut Vec<u32>) {
    sleep(mailbox);
    if mailbox.is_posted() {
        taken.extend(numbers(mailbox.take()));
    }
}

#[test]
fn every_foreign_wake_is_seen() {
    explore(|| {
        let wakes = new_mailbox();
        let posters: Vec<_> = (0..2 * SCALE)
            .map(|poster| {
                let wakes = Arc::clone(&wakes);
                thread::spawn(move || {
                    for post in 0..SCALE {
                        assert!(wakes.post(|posted| {
                            posted.woken.push(TaskKey::task(poster * SCALE + post))
                        }));
                    }
                })
            })
            .collect();
        let mut taken = Vec::new();
        while taken.len() < (2 * SCALE * SCALE) as usize {
            sleep_and_take(&wakes, &mut taken);
        }
        for poster in posters {
            poster.join().unwrap();
        }
        taken.sort_unstable();
        assert!(taken.into_iter().eq(0..2 * SCALE * SCALE), "each comes once");
    });
}

/// At most one post wakes the loop for each time that it armed the mailbox, regardless of the
/// number and kind of posts. At first the mailbox is armed.
#[test]
fn posts_share_a_wake() {
    const POSTERS: u32 = 3 * SCALE;

    explore(|| {
        let mailbox = new_mailbox();
        let posters: Vec<_> = (0..POSTERS)
            .map(|poster| {
                let mailbox = Arc::clone(&mailbox);
                thread::spawn(move || {
                    if poster % 2 == 0 {
                        assert!(mailbox.post(|posted| posted.woken.push(TaskKey::task(poster))));
                    } else if mailbox.put_result(poster, 0) {
                        mailbox.wake();
                    }
                })
            })
            .collect();
        let (mut taken, mut results, mut arms) = (Vec::new(), Vec::new(), 1);
        while taken.len() + results.len() < POSTERS as usize {
            sleep_and_take(&mailbox, &mut taken);
            let mut harvested = Vec::new();
            mailbox.take_results(&mut harvested);
            results.append(&mut harvested);
            arms += 1;
        }
        for poster in posters {
            poster.join().unwrap();
        }
        assert!(mailbox.eventfd().writes() <= arms, "it was woken without need");
        taken.extend(results.into_iter().map(|(slot, _)| slot));
        taken.sort_unstable();
        assert!(taken.into_iter().eq(0..POSTERS), "each comes once");
    });
}

#[test]
fn posts_before_the_close_are_not_lost() {
    explore(|| {
        let wakes = new_mailbox();
        let posters: Vec<_> = (0..2 * SCALE)
            .map(|poster| {
                let wakes = Arc::clone(&wakes);
                thread::spawn(move || wakes.post(|posted| posted.woken.push(TaskKey::task(poster))))
            })
            .collect();
        let mut taken = Vec::new();
        if wakes.is_posted() {
            taken.extend(numbers(wakes.take()));
        }
        taken.extend(numbers(wakes.close()));
        for (poster, handle) in (0..).zip(posters) {
            let accepted = handle.join().unwrap();
            assert_eq!(accepted, taken.contains(&poster), "the poster is told the truth");
        }
    });
}

/// A completer wakes the loop by completing its foreign op or by being dropped. After the loop's
/// end the memory is freed anyway, and the completer is notified.
#[test]
fn each_foreign_op_completes_once() {
    const OPS: u32 = 2 * SCALE;

    explore(|| {
        let mailbox = new_mailbox();
        let complete = |slot: u32| {
            let completer = ForeignCompleter::new(&mailbox, slot);
            thread::spawn(move || slot % 2 == 1 || completer.complete(Ok(slot as usize)))
        };
        let threads: Vec<_> = (0..OPS).map(complete).collect();
        let mut completed = Vec::new();
        while completed.len() < OPS as usize {
            sleep(&mailbox);
            let mut harvested = Vec::new();
            mailbox.take_results(&mut harvested);
            completed.append(&mut harvested);
        }
        let late = complete(2 * OPS);
        drop(mailbox.close());
        for thread in threads {
            assert!(thread.join().unwrap(), "the loop was there");
        }
        let was_there = late.join().unwrap();
        let mut rest = Vec::new();
        mailbox.take_results(&mut rest);
        assert_eq!(rest, [(2 * OPS, i64::from(2 * OPS))], "its memory is lost; told {was_there}");
        completed.sort_unstable();
        let result = |slot| if slot % 2 == 1 { -i64::from(libc::EIO) } else { i64::from(slot) };
        assert!(completed.into_iter().eq((0..OPS).map(|slot| (slot, result(slot)))));
    });
}

/// An op that the kernel refuses: no file has this descriptor.
fn job(slot: u32) -> Job {
    const NO_FILE: RawFd = -1;
    let iovecs = std::ptr::null();
    let view = OpView { kind: OpKind::Flush, fd: NO_FILE, offset: 0, iovecs, iovecs_len: 0 };
    Job { slot, view }
}

/// The engine's part of a pool, without slots.
struct PoolUser {
    pool: Arc<Pool>,
    threads: Vec<thread::JoinHandle<()>>,
    done: Vec<OpResult>,
}

impl PoolUser {
    fn new() -> Self {
        let pool = Arc::new(Pool::new(new_mailbox()));
        Self { pool, threads: Vec::new(), done: Vec::new() }
    }

    fn mailbox(&self) -> &Arc<Mailbox> {
        &self.pool.mailbox
    }

    fn submit(&mut self, slots: std::ops::Range<u32>) {
        let count = slots.len();
        for _ in 0..self.pool.put(slots.map(job)) {
            self.pool.count_thread();
            let pool = Arc::clone(&self.pool);
            self.threads.push(thread::spawn(move || pool_thread(&pool)));
        }
        self.pool.notify(count);
    }

    fn harvest(&mut self) {
        if self.mailbox().has_results() {
            let mut harvested = Vec::new();
            self.mailbox().take_results(&mut harvested);
            self.done.append(&mut harvested);
        }
    }

    fn wait_for(&mut self, count: usize) {
        while self.done.len() < count {
            sleep(self.mailbox());
            self.harvest();
        }
    }

    fn stop(self) -> Vec<u32> {
        self.pool.stop();
        for thread in self.threads {
            thread.join().unwrap();
        }
        let mut slots: Vec<u32> = self.done.iter().map(|&(slot, _)| slot).collect();
        slots.sort_unstable();
        slots
    }
}

#[test]
fn every_op_of_the_pool_completes_once() {
    explore(|| {
        let mut user = PoolUser::new();
        user.submit(0..SCALE);
        user.submit(SCALE..2 * SCALE);
        user.wait_for(2 * SCALE as usize);
        assert!(user.stop().into_iter().eq(0..2 * SCALE));
    });
}

#[test]
fn idle_threads_take_the_next_job() {
    explore(|| {
        let mut user = PoolUser::new();
        for round in 0..2 * SCALE {
            user.submit(round..round + 1);
            user.wait_for(round as usize + 1);
        }
        assert!(user.stop().into_iter().eq(0..2 * SCALE));
    });
}

/// Polls until ready, and sleeps in between like a loop.
fn wait(mut poll: impl FnMut(&Context<'_>) -> Poll<()>) {
    let mailbox = new_mailbox();
    let waker = task::waker(&mailbox, TaskKey::task(0));
    while poll(&Context::from_waker(&waker)).is_pending() {
        sleep_and_take(&mailbox, &mut Vec::new());
    }
}

/// The unit of a semaphore goes from thread to thread. One of them leaves the line early.
#[test]
fn a_unit_is_used_by_one_thread_at_a_time() {
    explore(|| {
        let shared = Arc::new((FairSemaphore::new(1), AtomicU32::new(0)));
        let users: Vec<_> = (0..2 * SCALE)
            .map(|user| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let (semaphore, users) = &*shared;
                    let ticket = semaphore.enter();
                    if user == 0 && ticket.poll(&Context::from_waker(Waker::noop())).is_pending() {
                        return;
                    }
                    wait(|cx| ticket.poll(cx));
                    assert_eq!(users.fetch_add(1, Ordering::Relaxed), 0);
                    users.fetch_sub(1, Ordering::Relaxed);
                })
            })
            .collect();
        for user in users {
            user.join().unwrap();
        }
    });
}

#[test]
fn a_listener_misses_no_change() {
    explore(|| {
        let shared = Arc::new((Notify::default(), AtomicU32::new(0)));
        let listeners: Vec<_> = (0..SCALE)
            .map(|_| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let (notify, changes) = &*shared;
                    let listener = notify.listener();
                    wait(|cx| {
                        listener.listen(cx);
                        let is_over = changes.load(Ordering::Relaxed) == 2;
                        if is_over { Poll::Ready(()) } else { Poll::Pending }
                    });
                })
            })
            .collect();
        for _ in 0..2 {
            shared.1.fetch_add(1, Ordering::Relaxed);
            shared.0.notify_all();
        }
        for listener in listeners {
            listener.join().unwrap();
        }
    });
}

#[test]
fn a_counter_never_goes_back() {
    explore(|| {
        let counter = Arc::new(Counter::default());
        let reader = {
            let counter = Arc::clone(&counter);
            thread::spawn(move || {
                let first = counter.get();
                let second = counter.get();
                assert!(first <= second && second <= u64::from(2 * SCALE));
            })
        };
        for _ in 0..2 * SCALE {
            counter.add(1);
        }
        reader.join().unwrap();
        assert_eq!(counter.get(), u64::from(2 * SCALE));
    });
}

/// A front-end connects, has requests served and finished, and connects again; its thread and the
/// pool post to one mailbox.
#[cfg(shuttle)]
#[test]
fn sessions_stop_finish_and_start_again() {
    use shuttle::sync::mpsc::channel;

    const SESSIONS: u32 = 3;
    const REQUESTS: u32 = 4;
    const STOP: u32 = u32::MAX;
    const END: u32 = u32::MAX - 1;

    explore(|| {
        let mut user = PoolUser::new();
        let wakes = Arc::clone(user.mailbox());
        let (answer, answers) = channel();
        let front_end = {
            let wakes = Arc::clone(&wakes);
            thread::spawn(move || {
                for session in 1..=SESSIONS {
                    for request in 0..REQUESTS {
                        let slot = (session - 1) * REQUESTS + request;
                        assert!(wakes.post(|posted| posted.woken.push(TaskKey::task(slot))));
                    }
                    assert!(wakes.post(|posted| posted.woken.push(TaskKey::task(STOP))));
                    let done = answers.recv().unwrap();
                    assert_eq!(done, (session * REQUESTS) as usize, "a request was left behind");
                }
                assert!(wakes.post(|posted| posted.woken.push(TaskKey::task(END))));
            })
        };
        let (mut submitted, mut stopping, mut ending) = (0, false, false);
        while !ending {
            sleep(&wakes);
            user.harvest();
            let posted = if wakes.is_posted() { numbers(wakes.take()) } else { Vec::new() };
            for task in posted {
                match task {
                    STOP => stopping = true,
                    END => ending = true,
                    slot => {
                        submitted += 1;
                        user.submit(slot..slot + 1);
                    }
                }
            }
            if stopping && user.done.len() == submitted {
                stopping = false;
                answer.send(submitted).unwrap();
            }
        }
        drop(wakes.close());
        assert!(!wakes.post(|_| ()), "nobody looks any more");
        front_end.join().unwrap();
        assert!(user.stop().into_iter().eq(0..SESSIONS * REQUESTS));
    });
}
