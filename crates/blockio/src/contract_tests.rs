//! Tests that a future wakes the waker of its last poll (invariant 12 of ARCHITECTURE.md), for each
//! engine of the kernel and, with `--cfg ringhaul_sim`, of a simulated one.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

use futures_util::future::{Either, join, select};
use futures_util::stream::{FuturesUnordered, StreamExt};
use iomem::Buffers;

use crate::clock;
use crate::config::{BounceConfig, EngineKind, IoThreadConfig};
use crate::disk::{Disk, DiskOptions, DiskSource};
use crate::executor::mailbox::NO_TASK;
use crate::executor::notify::Notify;
use crate::executor::semaphore::FairSemaphore;
use crate::executor::task;
use crate::thread::IoThread;
use crate::thread::io::Io;
use crate::thread::task_set::TaskSet;
use crate::thread::turn::{Activity, Wait};

mod foreign;
mod remote_disk;
#[cfg(ringhaul_sim)]
mod simulated;

use foreign::{CompleteForeign, foreign, other_thread};

const ENGINES: [EngineKind; 3] = [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads];
const BYTES: usize = 64 << 10;
const BLOCK: usize = 4096;

fn thread(engine: EngineKind) -> IoThread {
    // Room for two pieces of bounced memory at a time.
    let bounce =
        BounceConfig { budget_bytes: 2 * BLOCK, share_bytes_min: BLOCK, piece_bytes_max: BLOCK };
    let engine = engine.into();
    IoThread::new(&IoThreadConfig { engine, depth: 64, bounce, ..IoThreadConfig::default() })
        .unwrap()
}

/// An IoThread and a disk on it. Each block is filled with its number plus one.
struct Scene {
    /// Dropped before the thread.
    disk: Rc<Disk>,
    thread: IoThread,
    complete: CompleteForeign,
    _file: tempfile::NamedTempFile,
    #[cfg(ringhaul_sim)]
    _installed: Option<crate::engine::kernel::sim::Installed>,
}

impl Scene {
    fn new(engine: EngineKind) -> Self {
        Self::with(engine, &content(), |source| source)
    }

    /// Makes a scene whose disk is `layers` over a file with this content.
    fn with(
        engine: EngineKind,
        content: &[u8],
        layers: impl FnOnce(DiskSource) -> DiskSource,
    ) -> Self {
        let file = tempfile::NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
        std::fs::write(file.path(), content).unwrap();
        let thread = thread(engine);
        let options = DiskOptions { direct: true, ..DiskOptions::default() };
        let source = DiskSource::file(file.path(), &options).unwrap();
        let disk = layers(source).attach(thread.io());
        Self {
            disk: Rc::new(disk),
            thread,
            complete: other_thread(),
            _file: file,
            #[cfg(ringhaul_sim)]
            _installed: None,
        }
    }

    fn io(&self) -> &Rc<Io> {
        self.thread.io()
    }

    /// Runs `future` as a task until it ends. Fails if a wake is lost: then nothing is left to wait
    /// for.
    fn run(&self, future: impl Future<Output = ()> + 'static) {
        let ended = Rc::new(Cell::new(false));
        let end = Rc::clone(&ended);
        self.io().spawn(async move {
            future.await;
            end.set(true);
        });
        while !ended.get() {
            if self.thread.turn(Wait::Never).unwrap() == Activity::Idle && !ended.get() {
                assert!(self.waits_for_something(), "invariant 12: a wake was lost");
                self.thread.turn(Wait::ForEvent).unwrap();
            }
        }
        self.settle();
    }

    fn waits_for_something(&self) -> bool {
        let io = self.io();
        let ops = io.ops.borrow();
        let soon = clock::now() + Duration::from_secs(60);
        ops.engine.queued() + ops.engine.in_kernel() + ops.slots.foreign() > 0
            || io.reactor.borrow().next_timer().is_some_and(|when| when < soon)
            || io.tasks.mailbox.is_posted()
    }

    /// Takes turns until the kernel has answered all abandoned ops.
    fn settle(&self) {
        while self.io().ops() > 0 {
            self.thread.turn(Wait::Never).unwrap();
        }
    }
}

fn content() -> Vec<u8> {
    (0..BYTES).map(|at| content_of(at / BLOCK)).collect()
}

fn content_of(block: usize) -> u8 {
    u8::try_from(block + 1).unwrap()
}

/// Reads a block into memory that is misaligned by `shift` bytes.
async fn read(disk: &Disk, block: usize, shift: usize) {
    let mut buffers = Buffers::aligned(BLOCK + shift, BLOCK);
    buffers.advance(shift);
    let view = buffers.duplicate();
    disk.read((block * BLOCK) as u64, buffers).await.unwrap();
    assert_eq!(view.to_vec(), vec![content_of(block); BLOCK]);
}

fn blocks() -> std::ops::Range<usize> {
    0..BYTES / BLOCK
}

async fn unordered(disk: Rc<Disk>) {
    // Every second read waits for its part of the memory for misaligned requests.
    let mut reads: FuturesUnordered<_> =
        blocks().map(|block| read(&disk, block, block % 2 * 512 + block % 2)).collect();
    let mut count = 0;
    while reads.next().await.is_some() {
        count += 1;
    }
    assert_eq!(count, blocks().len());
}

async fn joined(io: Rc<Io>, disk: Rc<Disk>) {
    let soon = clock::now() + Duration::from_millis(1);
    let sleeps = join(io.sleep_until(soon), io.sleep_until(soon + Duration::from_millis(1)));
    let flushes: FuturesUnordered<_> = (0..4).map(|_| disk.flush()).collect();
    let flushes = flushes.for_each(|flushed| {
        flushed.unwrap();
        std::future::ready(())
    });
    join(join(read(&disk, 1, 0), read(&disk, 2, 1)), join(sleeps, flushes)).await;
}

async fn selected(io: Rc<Io>, disk: Rc<Disk>) {
    for round in 0..10 {
        let (first, second) = (pin!(read(&disk, 3, round % 2)), pin!(read(&disk, 4, 0)));
        match select(first, second).await {
            // The loser is dropped at the end of the round.
            Either::Left(_) if round % 3 > 0 => {}
            Either::Left((_, loser)) => loser.await,
            Either::Right((_, loser)) => loser.await,
        }
        let until = clock::now() + Duration::from_secs(3600);
        let reads = pin!(read(&disk, 5, 0));
        match select(reads, pin!(io.sleep_until(until))).await {
            Either::Left(_) => {}
            Either::Right(_) => panic!("an hour has passed"),
        }
    }
}

type Moved = Rc<RefCell<Option<Pin<Box<dyn Future<Output = ()>>>>>>;

/// Polls each future in one task and ends it in another.
async fn moved(io: Rc<Io>, futures: Vec<Pin<Box<dyn Future<Output = ()>>>>) {
    for mut future in futures {
        // Polled once, in this task.
        let is_ready = poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_ready())).await;
        if is_ready {
            continue;
        }
        let (place, ended) = (Moved::default(), Rc::new(Cell::new(false)));
        *place.borrow_mut() = Some(future);
        let (end, this) = (Rc::clone(&ended), io.current_task());
        let other = Rc::clone(&io);
        io.spawn(async move {
            let future = place.borrow_mut().take().unwrap();
            future.await;
            end.set(true);
            other.wake(this);
        });
        while !ended.get() {
            io.suspend().await;
        }
    }
}

fn moved_futures(
    io: &Rc<Io>,
    disk: &Rc<Disk>,
    complete: &CompleteForeign,
) -> Vec<Pin<Box<dyn Future<Output = ()>>>> {
    let own = Rc::clone(disk);
    let mut set = TaskSet::new(Rc::clone(io));
    let of_set = Rc::clone(disk);
    let [sleeper, line] = [(); 2].map(|()| Rc::clone(io));
    vec![
        Box::pin(in_line(line)),
        Box::pin(foreign(Rc::clone(io), Rc::clone(complete))),
        Box::pin(async move { read(&own, 6, 0).await }),
        Box::pin(unordered(Rc::clone(disk))),
        Box::pin(async move {
            for block in blocks() {
                let disk = Rc::clone(&of_set);
                set.start(async move { read(&disk, block, 0).await }).await;
            }
            set.finish().await;
        }),
        Box::pin(async move {
            sleeper.sleep_until(clock::now() + Duration::from_millis(1)).await;
        }),
    ]
}

/// Runs sets in sets, and sets among other futures. Each set has its own futures.
async fn nested(io: Rc<Io>, disk: Rc<Disk>) {
    let set_of = |depth: usize| {
        let (io, disk) = (Rc::clone(&io), Rc::clone(&disk));
        async move {
            let mut outer = TaskSet::new(Rc::clone(&io));
            for _ in 0..depth {
                let (io, disk) = (Rc::clone(&io), Rc::clone(&disk));
                outer
                    .start(async move {
                        let mut inner = TaskSet::new(io);
                        for block in blocks() {
                            let disk = Rc::clone(&disk);
                            inner.start(async move { read(&disk, block, 0).await }).await;
                        }
                        inner.finish().await;
                    })
                    .await;
            }
            outer.finish().await;
        }
    };
    join(set_of(2), set_of(3)).await;
    let mut sets: FuturesUnordered<_> = (1..4).map(set_of).collect();
    while sets.next().await.is_some() {}
}

/// Futures take turns at a semaphore and wait for a notify, whoever polls them.
async fn in_line(io: Rc<Io>) {
    let (semaphore, notify) = (FairSemaphore::new(2), Notify::default());
    let (begun, ended) = (Cell::new(0), Cell::new(0));
    let members = |round: u32| {
        let (io, semaphore, notify, begun, ended) = (&io, &semaphore, &notify, &begun, &ended);
        async move {
            let ticket = semaphore.acquire().await;
            begun.set(begun.get() + 1);
            assert!(begun.get() - ended.get() <= 2);
            io.sleep_until(clock::now() + Duration::from_micros(100)).await;
            ended.set(ended.get() + 1);
            drop(ticket);
            notify.notify_all();
            let listener = notify.listener();
            poll_fn(|cx| {
                listener.listen(cx);
                if ended.get() > round { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        }
    };
    let mut all: FuturesUnordered<_> = (0..8).map(members).collect();
    // This one leaves the line while it waits.
    let soon = pin!(io.sleep_until(clock::now() + Duration::from_micros(150)));
    drop(select(pin!(semaphore.acquire()), soon).await);
    while all.next().await.is_some() {}
    join(join(members(0), members(1)), join(members(2), members(3))).await;
}

/// A suspended future continues when its task is woken, regardless of the poller.
async fn suspended(io: Rc<Io>) {
    let suspends = |rounds: usize| {
        let io = Rc::clone(&io);
        async move {
            for _ in 0..rounds {
                io.wake_me();
                io.suspend().await;
                io.wake_me_at(clock::now() + Duration::from_micros(100));
                io.suspend().await;
            }
        }
    };
    let mut all: FuturesUnordered<_> = (1..5).map(suspends).collect();
    while all.next().await.is_some() {}
}

fn check(scene: &Scene) {
    let (io, disk, complete) = (scene.io(), &scene.disk, &scene.complete);
    scene.run(unordered(Rc::clone(disk)));
    scene.run(joined(Rc::clone(io), Rc::clone(disk)));
    scene.run(selected(Rc::clone(io), Rc::clone(disk)));
    scene.run(moved(Rc::clone(io), moved_futures(io, disk, complete)));
    scene.run(foreign(Rc::clone(io), Rc::clone(complete)));
    scene.run(nested(Rc::clone(io), Rc::clone(disk)));
    scene.run(suspended(Rc::clone(io)));
    scene.run(in_line(Rc::clone(io)));
    scene.thread.block_on(unordered(Rc::clone(disk))).unwrap();
    scene.thread.block_on(joined(Rc::clone(io), Rc::clone(disk))).unwrap();
    scene.thread.block_on(foreign(Rc::clone(io), Rc::clone(complete))).unwrap();
    scene.thread.block_on(nested(Rc::clone(io), Rc::clone(disk))).unwrap();
    scene.thread.block_on(in_line(Rc::clone(io))).unwrap();
    scene.settle();
    assert_eq!((io.ops(), io.tasks()), (0, 0), "something is left");
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn futures_keep_their_contract_with_each_engine() {
    for engine in ENGINES {
        check(&Scene::new(engine));
        // A part of a part of a disk.
        let beside = [vec![0; 3 * BLOCK], content(), vec![0; BLOCK]].concat();
        check(&Scene::with(engine, &beside, |file| {
            let part = DiskSource::raw(file, BLOCK as u64, None).unwrap();
            DiskSource::raw(part, 2 * BLOCK as u64, Some(BYTES as u64)).unwrap()
        }));
        check(&Scene::with(engine, &content(), |_| remote_disk::disk(&content())));
    }
}

/// A wake on the loop's own thread takes no lock and writes no eventfd.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn wakes_within_a_turn_need_no_mailbox() {
    let scene = Scene::new(EngineKind::Threads);
    let io = Rc::clone(scene.io());
    scene.run(async move {
        let (mut rounds, mut wakers) = (0, VecDeque::new());
        poll_fn(|cx| {
            wakers.push_back(cx.waker().clone());
            rounds += 1;
            if rounds == 100 {
                return Poll::Ready(());
            }
            wakers[0].wake_by_ref();
            assert!(!io.tasks.mailbox.is_posted(), "it was posted");
            Poll::Pending
        })
        .await;
    });
    // Outside of a turn, the loop may sleep.
    let waker = task::waker(&scene.io().tasks.mailbox, NO_TASK);
    waker.wake();
    assert!(scene.io().tasks.mailbox.is_posted());
}

/// The waker of a future in a set names the future.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_waker_polls_one_future_of_its_set() {
    let scene = Scene::new(EngineKind::Threads);
    let polls = Rc::new(RefCell::new([0; 4]));
    let (io, counts) = (Rc::clone(scene.io()), Rc::clone(&polls));
    scene.run(async move {
        let mut set = TaskSet::new(Rc::clone(&io));
        let wakers = Rc::new(RefCell::new(Vec::new()));
        let go_on = Rc::new(Cell::new(false));
        for child in 0..4 {
            let (polls, wakers, go_on) =
                (Rc::clone(&counts), Rc::clone(&wakers), Rc::clone(&go_on));
            set.start(poll_fn(move |cx| {
                polls.borrow_mut()[child] += 1;
                wakers.borrow_mut().push(cx.waker().clone());
                if go_on.get() { Poll::Ready(()) } else { Poll::Pending }
            }))
            .await;
        }
        let second = wakers.borrow()[1].clone();
        // From another thread, then from this one.
        std::thread::scope(|scope| drop(scope.spawn(|| second.wake_by_ref())));
        let wake = |waker: &Waker| waker.wake_by_ref();
        for round in 0..2 {
            io.suspend().await;
            poll_fn(|cx| {
                set.run_woken(cx);
                Poll::Ready(())
            })
            .await;
            assert_eq!(*counts.borrow(), [1, 2 + round, 1, 1]);
            wake(&second);
        }
        go_on.set(true);
        wakers.borrow().iter().for_each(wake);
        set.finish().await;
    });
    assert_eq!(polls.borrow().iter().filter(|&&polls| polls == 2).count(), 3);
}
