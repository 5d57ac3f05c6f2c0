//! IoThreads as a whole: turns, wakes, stops.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use super::*;
use crate::config::EngineKind;
use crate::disk::{DiskOptions, DiskSource};
use crate::op::OpKind;
use crate::thread::IoThread;
use crate::thread::fairness::{ROUNDS_BETWEEN_SOURCES, ROUNDS_UNTIL_SERVED};
use crate::thread::reactor::{Armed, Source};
use crate::thread::turn::{Activity, Wait};
use iomem::Buffers;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

fn thread(engine: EngineKind) -> IoThread {
    IoThread::new(&IoThreadConfig { engine: engine.into(), depth: 64, ..IoThreadConfig::default() })
        .unwrap()
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn another_thread_wakes_a_sleeping_loop() {
    for engine in [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads] {
        let thread = thread(engine);
        let remote = thread.remote();
        let other = std::thread::spawn(move || {
            for i in 0..1000u32 {
                assert_eq!(remote.call(move |_| i + 1), Some(i + 1));
            }
            remote.post(|io| io.stop());
            remote
        });
        thread.run().unwrap();
        let remote = other.join().unwrap();
        drop(thread);
        assert_eq!(remote.call(|_| ()), None, "a loop that has ended still answers");
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_waker_used_on_another_thread_wakes_its_task() {
    let thread = thread(EngineKind::Threads);
    let flag = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let seen = Arc::clone(&flag);
    let mut started = None;
    let io = Rc::clone(thread.io());
    thread.io().spawn(async move {
        poll_fn(|cx| {
            if seen.load(std::sync::atomic::Ordering::Acquire) {
                return Poll::Ready(());
            }
            if started.is_none() {
                let (waker, flag) = (cx.waker().clone(), Arc::clone(&flag));
                started = Some(std::thread::spawn(move || {
                    flag.store(true, std::sync::atomic::Ordering::Release);
                    waker.wake();
                }));
            }
            Poll::Pending
        })
        .await;
        io.stop();
    });
    thread.run().unwrap();
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn block_on_is_woken_by_its_waker() {
    for engine in [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads] {
        let thread = thread(engine);
        // If the wake is lost, this timer ends the sleep and sets the flag.
        let (guard, is_late) = (Rc::clone(thread.io()), Rc::new(Cell::new(false)));
        let late = Rc::clone(&is_late);
        thread.io().spawn(async move {
            guard.sleep_until(Instant::now() + Duration::from_secs(30)).await;
            late.set(true);
        });
        let (sender, receiver) = std::sync::mpsc::channel::<std::task::Waker>();
        let flag = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let set = Arc::clone(&flag);
        let other = std::thread::spawn(move || {
            let waker = receiver.recv().unwrap();
            set.store(true, std::sync::atomic::Ordering::Release);
            waker.wake();
        });
        let waits = poll_fn(|cx| {
            if flag.load(std::sync::atomic::Ordering::Acquire) {
                return Poll::Ready(());
            }
            // The send fails once the thread has ended.
            let _ = sender.send(cx.waker().clone());
            Poll::Pending
        });
        thread.block_on(waits).unwrap();
        other.join().unwrap();
        thread.turn(Wait::Never).unwrap();
        assert!(!is_late.get(), "{engine}: the wake was not heard");
    }
}

/// Waits until this OS thread sleeps in a system call.
fn wait_for_sleep(thread: rustix::process::Pid) {
    let path = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
    // The state follows the name, which is in brackets.
    let sleeps = || std::fs::read_to_string(&path).unwrap().contains(") S ");
    while !sleeps() {
        std::thread::yield_now();
    }
}

/// Completions make the descriptor readable while the program waits for it.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_embedded_loop_is_woken_by_completions() {
    for sqpoll in [false, true] {
        let engine = EngineConfig::IoUring { sqpoll, iopoll: false };
        let config = IoThreadConfig { engine, depth: 64, embedded: true, ..Default::default() };
        let thread = IoThread::new(&config).unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let file = thread.io().attach_file(&Arc::new(reader.into()), EngineKind::IoUring);
        let io = Rc::clone(thread.io());
        let reads = Rc::new(Cell::new(0));
        let count = Rc::clone(&reads);
        thread.io().spawn(async move {
            for _ in 0..10 {
                let (file, buffers) = (Rc::clone(&file), Buffers::aligned(512, 512));
                let op = io.op(OpKind::Read, &file, 0, buffers);
                assert_eq!(op.await.result.unwrap(), 1);
                count.set(count.get() + 1);
            }
        });
        let this = rustix::thread::gettid();
        for round in 1..=10 {
            while thread.turn(Wait::Never).unwrap() == Activity::Ready {}
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    wait_for_sleep(this);
                    rustix::io::write(&writer, &[1]).unwrap();
                });
                // Without a time-out, after which the loop would check once more: a completion that
                // is not announced hangs.
                let mut descriptors = [PollFd::new(&thread, PollFlags::IN)];
                rustix::io::retry_on_intr(|| poll(&mut descriptors, None)).unwrap();
            });
            while thread.turn(Wait::Never).unwrap() == Activity::Ready {}
            assert_eq!(reads.get(), round);
        }
    }
}

/// Other threads post while the program waits for the descriptor, or is about to.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_embedded_loop_is_woken_by_posts() {
    for engine in [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads] {
        let config = IoThreadConfig {
            engine: engine.into(),
            depth: 64,
            embedded: true,
            ..IoThreadConfig::default()
        };
        let thread = IoThread::new(&config).unwrap();
        let remote = thread.remote();
        let other = std::thread::spawn(move || {
            (0..1000).for_each(|i| assert_eq!(remote.call(move |_| i), Some(i)));
            remote.post(|io| io.stop());
        });
        let has_ended = || thread.io().state.stopped.get();
        while !has_ended() {
            while thread.turn(Wait::Never).unwrap() == Activity::Ready {}
            if !has_ended() {
                // Without a time-out: a post that is not announced hangs.
                let mut descriptors = [PollFd::new(&thread, PollFlags::IN)];
                rustix::io::retry_on_intr(|| poll(&mut descriptors, None)).unwrap();
            }
        }
        other.join().unwrap();
    }
}

/// All posts before the loop is about to sleep again write its eventfd once.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn all_posts_between_two_sleeps_share_a_wake() {
    let thread = thread(EngineKind::Threads);
    let io = thread.io();
    // Nothing else reads the eventfd.
    let writes = || {
        let mut count = [0; 8];
        let eventfd = io.tasks.mailbox.eventfd();
        rustix::io::read(eventfd, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    };
    for round in 1..=3 {
        std::thread::scope(|scope| {
            let remote = thread.remote();
            scope.spawn(move || (0..100).for_each(|_| assert!(remote.post(|_| ()))));
        });
        assert_eq!(writes(), 1, "round {round}");
        while thread.turn(Wait::Never).unwrap() == Activity::Ready {}
    }
}

/// An op that stays unanswered, on a loop that waits for nothing on its own.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_embedded_loop_states_the_time_to_check_for_late_ops() {
    let thread = thread(EngineKind::IoUring);
    assert_eq!(thread.deadline(), None, "there is nothing to look for");
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let file = thread.io().attach_file(&Arc::new(reader.into()), EngineKind::IoUring);
    let io = Rc::clone(thread.io());
    let is_read = Rc::new(Cell::new(false));
    let done = Rc::clone(&is_read);
    thread.io().spawn(async move {
        let buffers = Buffers::aligned(512, 512);
        let op = io.op(OpKind::Read, &file, 0, buffers);
        assert_eq!(op.await.result.unwrap(), 1);
        done.set(true);
    });
    while thread.turn(Wait::Never).unwrap() == Activity::Ready {}
    let mut deadline = thread.deadline().expect("an op may become late");
    for _ in 0..2 {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: 0, tv_nsec: left.as_nanos().try_into().unwrap() };
        poll(&mut [], Some(&left)).unwrap();
        while thread.turn(Wait::Never).unwrap() == Activity::Ready {}
        let next = thread.deadline().unwrap();
        assert!(next > deadline, "it was not looked");
        deadline = next;
    }
    rustix::io::write(&writer, &[1]).unwrap();
    while !is_read.get() {
        poll(&mut [PollFd::new(&thread, PollFlags::IN)], None).unwrap();
        while thread.turn(Wait::Never).unwrap() == Activity::Ready {}
    }
    assert_eq!(thread.deadline(), None, "there is nothing left to look for");
}

/// The thread of an image has no watcher.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_loop_that_watches_itself_wakes_to_check_for_late_ops() {
    const CHECKS: u64 = 5;
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let loops = std::thread::spawn(move || {
        let engine = EngineKind::IoUring.into();
        let config = IoThreadConfig { engine, watches_itself: true, ..Default::default() };
        let thread = IoThread::new(&config).unwrap();
        let io = Rc::clone(thread.io());
        let file = io.attach_file(&Arc::new(reader.into()), EngineKind::IoUring);
        thread.io().spawn(async move {
            let op = io.op(OpKind::Read, &file, 0, Buffers::aligned(512, 512));
            assert_eq!(op.await.result.unwrap(), 1);
            io.stop();
        });
        sender.send(thread.remote()).unwrap();
        thread.run().unwrap();
    });
    let remote = receiver.recv().unwrap();
    let mut turns = 0;
    for _ in 0..600 {
        turns = remote.stats().turns.get();
        if turns > CHECKS {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(remote.stats().is_idle.get(), 0);
    rustix::io::write(&writer, &[1]).unwrap();
    loops.join().unwrap();
    assert!(turns > CHECKS, "it slept on after {turns} turns");
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn timers_come_in_order_and_not_early() {
    let thread = thread(EngineKind::Threads);
    let order = Rc::new(RefCell::new(Vec::new()));
    let start = Instant::now();
    for ms in [30u64, 10, 20] {
        let (io, order) = (Rc::clone(thread.io()), Rc::clone(&order));
        thread.io().spawn(async move {
            let when = start + Duration::from_millis(ms);
            io.sleep_until(when).await;
            assert!(Instant::now() >= when);
            order.borrow_mut().push(ms);
            if order.borrow().len() == 3 {
                io.stop();
            }
        });
    }
    thread.run().unwrap();
    assert_eq!(*order.borrow(), [10, 20, 30]);
}

/// A source whose "ring" is a counter.
#[derive(Default)]
struct Ring {
    work: Cell<u32>,
    armed: Cell<bool>,
    notified: Cell<u32>,
}

impl Source for Ring {
    fn notify(&self) {
        self.notified.set(self.notified.get() + 1);
    }
    fn arm(&self, _: Instant) -> Armed {
        self.armed.set(true);
        if self.work.get() > 0 { Armed::HasWork } else { Armed::Yes }
    }
    fn disarm(&self) {
        self.armed.set(false);
    }
    fn has_work(&self) -> bool {
        self.work.get() > 0
    }
}

/// A loop with a task that takes work from a ring, and that ring's kick.
fn serving() -> (IoThread, Rc<Ring>, rustix::fd::OwnedFd, Rc<Cell<u32>>) {
    let thread = thread(EngineKind::Threads);
    let ring = Rc::new(Ring::default());
    let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let served = Rc::new(Cell::new(0));
    let watched = kick.try_clone().unwrap();
    let (io, source, count) = (Rc::clone(thread.io()), Rc::clone(&ring), Rc::clone(&served));
    thread.io().spawn(async move {
        let id = io.add_source(Rc::<Ring>::clone(&source), Some(watched)).unwrap();
        loop {
            while source.work.get() > 0 {
                source.work.set(source.work.get() - 1);
                count.set(count.get() + 1);
                io.notify_at_end(id);
            }
            io.suspend().await;
        }
    });
    (thread, ring, kick, served)
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn kicks_are_armed_for_sleep_and_notify_comes_once_a_run() {
    let (thread, ring, kick, served) = serving();
    ring.work.set(5);
    assert_eq!(thread.turn(Wait::Never).unwrap(), Activity::Idle);
    assert_eq!((served.get(), ring.notified.get()), (5, 1));
    assert!(ring.armed.get(), "asleep with kicks disarmed");
    for round in 1..=3u32 {
        ring.work.set(2);
        rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
        let mut readable = [PollFd::new(&thread, PollFlags::IN)];
        assert_eq!(poll(&mut readable, None).unwrap(), 1, "an embedding loop sees no kick");
        assert_eq!(thread.turn(Wait::Never).unwrap(), Activity::Ready);
        assert!(!ring.armed.get(), "kicks stay armed while the ring is served");
        assert_eq!(thread.turn(Wait::Never).unwrap(), Activity::Idle);
        assert_eq!((served.get(), ring.notified.get()), (5 + 2 * round, 1 + round));
    }
    let mut kicks = [0; 8];
    rustix::io::read(&kick, &mut kicks).unwrap();
    assert_eq!(u64::from_ne_bytes(kicks), 3, "invariant 6: somebody has read a kick");
}

/// A loop that gets a ring waits for everything in that, and no longer with epoll.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn kicks_and_wakes_are_heard_when_the_waiter_becomes_another() {
    let (thread, ring, kick, served) = serving();
    thread.turn(Wait::Never).unwrap();
    thread.io().add_engine(EngineKind::IoUring.into()).unwrap();
    let slept = thread.io().stats().syscalls.epoll_wait.get();
    // If an event is lost, this timer ends the sleep and sets the flag.
    let (io, is_late) = (Rc::clone(thread.io()), Rc::new(Cell::new(false)));
    let late = Rc::clone(&is_late);
    thread.io().spawn(async move {
        io.sleep_until(Instant::now() + Duration::from_secs(30)).await;
        late.set(true);
    });
    for round in 1..=3 {
        ring.work.set(2);
        rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
        while served.get() < 2 * round {
            assert!(!is_late.get(), "a kick was not heard");
            thread.turn(Wait::ForEvent).unwrap();
            thread.turn(Wait::Never).unwrap();
        }
    }
    let (remote, this) = (thread.remote(), rustix::thread::gettid());
    let other = std::thread::spawn(move || {
        wait_for_sleep(this);
        remote.post(|io| io.stop())
    });
    thread.run().unwrap();
    assert!(other.join().unwrap() && !is_late.get(), "a wake was not heard");
    assert_eq!(thread.io().stats().syscalls.epoll_wait.get(), slept);
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn work_that_comes_without_a_kick_is_found_while_arming() {
    let (thread, ring, _kick, served) = serving();
    assert_eq!(thread.turn(Wait::Never).unwrap(), Activity::Idle);
    ring.work.set(0);
    let io = Rc::clone(thread.io());
    let source = Rc::clone(&ring);
    thread.io().spawn(async move {
        source.work.set(3);
        io.suspend().await;
    });
    // The ring is armed already, so only a kick announces its work. A new ring is checked while
    // arming.
    let (second, fresh, _kick2, served2) = serving();
    fresh.work.set(1);
    second.turn(Wait::Never).unwrap();
    second.turn(Wait::Never).unwrap();
    assert_eq!(served2.get(), 1);
    thread.turn(Wait::Never).unwrap();
    assert_eq!(served.get(), 0);
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn dropping_a_loop_waits_for_the_kernel_and_frees_everything() {
    for engine in [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads] {
        let file = tempfile::NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let options = DiskOptions { direct: true, ..DiskOptions::default() };
        let source = DiskSource::file(file.path(), &options).unwrap();
        let thread = thread(engine);
        let io = Rc::downgrade(thread.io());
        for i in 0..50u64 {
            let disk = source.attach(thread.io());
            thread.io().spawn(async move {
                let data = Buffers::aligned(4096, 4096);
                data.copy_from(0, &[0x5a; 4096]);
                disk.write(i * 4096, data, false).await.unwrap();
                std::future::pending::<()>().await;
            });
        }
        thread.turn(Wait::Never).unwrap();
        drop(thread);
        assert!(io.upgrade().is_none(), "tasks and loop keep each other alive");
        let data = std::fs::read(file.path()).unwrap();
        assert!(data[..50 * 4096].iter().all(|byte| *byte == 0x5a), "a write was lost");
    }
}

/// A source that was kicked is not armed: its driver need not kick again, so only a check finds
/// later work.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_busy_task_does_not_keep_a_source_waiting() {
    for is_armed in [false, true] {
        let (thread, ring, kick, served) = serving();
        thread.turn(Wait::Never).unwrap();
        if !is_armed {
            rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
            while ring.armed.get() {
                thread.turn(Wait::Never).unwrap();
            }
        }
        let io = Rc::clone(thread.io());
        let rounds = Arc::clone(thread.io().stats());
        let (source, count) = (Rc::clone(&ring), Rc::clone(&served));
        thread.io().spawn(async move {
            for _ in 0..1000 {
                let (before, was) = (rounds.rounds.get(), count.get());
                source.work.set(1);
                let mut most = u64::from(ROUNDS_BETWEEN_SOURCES) + 1;
                if source.armed.get() {
                    most = u64::from(ROUNDS_UNTIL_SERVED);
                    rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
                }
                while count.get() == was {
                    let waited = rounds.rounds.get() - before;
                    assert!(waited <= most, "invariant 14: {waited} rounds");
                    io.wake_me();
                    io.suspend().await;
                }
            }
            io.stop();
        });
        thread.run().unwrap();
        assert_eq!(served.get(), 1000);
    }
}
