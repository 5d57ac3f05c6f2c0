//! Guarantees for programs that wait for an IoThread's descriptor, or for its end.

use std::cell::Cell;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Waker};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::*;
use crate::disk::{DiskOptions, DiskSource};
use crate::executor::task::Owner;
use crate::thread::IoThread;
use crate::thread::io::Io;
use crate::thread::reactor::{Armed, Source};
use crate::thread::turn::{Activity, Wait};
use iomem::Buffers;

const ENGINES: [EngineKind; 3] = [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads];

fn thread(engine: EngineKind) -> IoThread {
    let config =
        IoThreadConfig { engine: engine.into(), embedded: true, ..IoThreadConfig::default() };
    IoThread::new(&config).unwrap()
}

fn turn_until_idle(thread: &IoThread) {
    while thread.turn(Wait::Never).unwrap() == Activity::Ready {}
}

fn wait_readable(thread: &IoThread) -> bool {
    let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
    poll(&mut [PollFd::new(thread, PollFlags::IN)], Some(&limit)).unwrap() > 0
}

/// A program that waits for the descriptor alone would miss the timer.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_timer_of_a_task_is_a_deadline_until_its_turn() {
    for engine in ENGINES {
        let thread = thread(engine);
        let io = Rc::clone(thread.io());
        turn_until_idle(&thread);
        assert_eq!((thread.work_deadline(), thread.deadline()), (None, None), "{engine}");
        let when = crate::clock::now() + std::time::Duration::from_secs(3600);
        io.spawn({
            let io = Rc::clone(&io);
            async move {
                io.wake_me_at(when);
                io.suspend().await;
            }
        });
        turn_until_idle(&thread);
        let deadlines = (thread.work_deadline(), thread.deadline());
        assert_eq!(deadlines, (Some(when), Some(when)), "{engine}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn calls_between_turns_are_announced_after_a_block_on() {
    for engine in ENGINES {
        let thread = thread(engine);
        turn_until_idle(&thread);
        let called = Arc::new(AtomicU64::new(0));
        for round in 1..=3 {
            let (remote, count) = (thread.remote(), Arc::clone(&called));
            let call = move |_: &Rc<Io>| {
                count.fetch_add(1, Ordering::Relaxed);
            };
            assert!(std::thread::spawn(move || remote.post(call)).join().unwrap());
            // `block_on` harvests the ring, which takes the event of the call out of it.
            thread.block_on(async {}).unwrap();
            assert!(wait_readable(&thread), "{engine}: nothing announces the call");
            turn_until_idle(&thread);
            assert_eq!(called.load(Ordering::Relaxed), round, "{engine}");
        }
    }
}

/// A source that records if it is armed.
struct ArmedFlag(Cell<bool>);

impl Source for ArmedFlag {
    fn notify(&self) {}

    fn arm(&self, _: Instant) -> Armed {
        self.0.set(true);
        Armed::Yes
    }

    fn disarm(&self) {
        self.0.set(false);
    }

    fn has_work(&self) -> bool {
        false
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn sources_are_armed_when_there_is_nothing_to_do() {
    let thread = thread(EngineKind::Threads);
    let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let source = Rc::new(ArmedFlag(Cell::new(false)));
    let (io, adds) = (Rc::clone(thread.io()), Rc::<ArmedFlag>::clone(&source));
    let kicked = kick.try_clone().unwrap();
    thread.io().spawn(async move {
        io.add_source(adds, Some(kicked)).unwrap();
        loop {
            io.suspend().await;
            // A program may poll the awaited event with a waker of its own.
            io.tasks.running.wake(Owner::Waker(Waker::noop().clone()));
        }
    });
    turn_until_idle(&thread);
    for _ in 0..3 {
        assert!(source.0.get(), "the driver is told not to kick, and nobody looks");
        rustix::io::write(&kick, &1_u64.to_ne_bytes()).unwrap();
        assert!(wait_readable(&thread));
        turn_until_idle(&thread);
    }
    assert!(source.0.get(), "the driver is told not to kick, and nobody looks");
}

/// Records, when it is dropped, the number of completed reads.
struct ReadsAtDrop(Arc<Stats>, Arc<AtomicU64>);

impl Drop for ReadsAtDrop {
    fn drop(&mut self) {
        self.1.store(self.0.read.ops.get(), Ordering::Relaxed);
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_call_that_is_dropped_at_the_end_leaves_no_op_behind() {
    for engine in ENGINES {
        let file = tempfile::NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
        std::fs::write(file.path(), vec![7; 1 << 20]).unwrap();
        file.as_file().sync_all().unwrap();
        let options = DiskOptions { direct: true, ..DiskOptions::default() };
        let source = DiskSource::file(file.path(), &options).unwrap();
        let thread = thread(engine);
        let disk = source.attach(thread.io());
        let reads = Arc::new(AtomicU64::new(u64::MAX));
        let told = ReadsAtDrop(Arc::clone(thread.io().stats()), Arc::clone(&reads));
        let mut read = pin!(disk.read(0, Buffers::aligned(1 << 20, 4096)));
        let _ = read.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(thread.remote().post(move |_| drop(told)));
        drop(thread);
        assert_eq!(reads.load(Ordering::Relaxed), 1, "{engine}: it was in the kernel");
    }
}
