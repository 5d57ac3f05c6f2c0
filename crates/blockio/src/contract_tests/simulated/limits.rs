//! Limits, with an exact clock.

use std::time::Instant;

use super::*;
use crate::disk::{LimitGroup, Limits, Rate, Rates, WaitMode};

const SECONDS: u64 = 10;

pub(super) fn per_second(rate: u64) -> Rates {
    Rates { total: Some(Rate { per_second: rate, burst: None }), ..Rates::default() }
}

fn requests(rate: u64) -> Limits {
    Limits { requests: per_second(rate), ..Limits::default() }
}

pub(super) fn null() -> DiskSource {
    DiskSource::null(1 << 20, &DiskOptions::default()).unwrap()
}

/// Reads until `end`, `depth` requests at a time, and counts them.
async fn load(disk: Disk, depth: usize, bytes: usize, end: Instant) -> u64 {
    let (disk, count) = (&disk, &Cell::new(0));
    let one = || async move {
        while clock::now() < end {
            disk.read(0, Buffers::aligned(bytes, 512)).await.unwrap();
            count.set(count.get() + u64::from(clock::now() < end));
        }
    };
    let mut all: FuturesUnordered<_> = (0..depth).map(|_| one()).collect();
    while all.next().await.is_some() {}
    count.get()
}

/// Returns the number of requests that each queue has served. A queue is its disk, its depth, and
/// the bytes of a request.
fn serve(scene: &Scene, queues: &[(&DiskSource, usize, usize)]) -> Vec<u64> {
    serve_on(&[&scene.thread], queues)
}

/// Like `serve`, with the queues on these IoThreads in turn.
fn serve_on(threads: &[&IoThread], queues: &[(&DiskSource, usize, usize)]) -> Vec<u64> {
    let end = clock::now() + Duration::from_secs(SECONDS);
    let counts = Rc::new(RefCell::new(vec![0; queues.len()]));
    let ended = Rc::new(Cell::new(0));
    for (place, &(source, depth, bytes)) in queues.iter().enumerate() {
        let io = threads[place % threads.len()].io();
        let (disk, counts, ended) = (source.attach(io), Rc::clone(&counts), Rc::clone(&ended));
        io.spawn(async move {
            counts.borrow_mut()[place] = load(disk, depth, bytes, end).await;
            ended.set(ended.get() + 1);
        });
    }
    while ended.get() < queues.len() {
        let turns = threads.iter().map(|thread| thread.turn(Wait::Never).unwrap());
        // All threads turn: one may have woken another.
        if turns.fold(true, |are_idle, turn| are_idle & (turn == Activity::Idle)) {
            let next = |thread: &&&IoThread| {
                let next = thread.io().reactor.borrow().next_timer();
                (next.is_none(), next)
            };
            // The clock advances to the first timer.
            threads.iter().min_by_key(next).unwrap().turn(Wait::ForEvent).unwrap();
        }
    }
    counts.take()
}

fn assert_near(seen: u64, expected: u64) {
    assert!(seen.abs_diff(expected) * 50 <= expected, "{seen} of {expected}");
}

/// Checks to 5%: the first queue has the whole of the first burst, a hundredth of all.
fn assert_shares(seen: &[u64], expected: &[u64]) {
    for (seen, expected) in seen.iter().zip(expected) {
        assert!(seen.abs_diff(*expected) * 20 <= *expected, "{seen} of {expected}");
    }
}

#[test]
fn a_limit_is_kept_to_two_in_a_hundred_and_shared_equally_by_queues() {
    let scene = scene(EngineKind::Threads, 1);
    let disk = null();
    for rate in [200, 5_000, 40_000] {
        disk.set_limits(&requests(rate)).unwrap();
        let seen = serve(&scene, &[(&disk, 1, 512), (&disk, 4, 512), (&disk, 128, 512)]);
        assert_near(seen.iter().sum(), rate * SECONDS);
        assert_shares(&seen, &[rate * SECONDS / 3; 3]);
    }
    let bytes = Limits { bytes: per_second(50_000_000), ..Limits::default() };
    disk.set_limits(&bytes).unwrap();
    let seen = serve(&scene, &[(&disk, 8, 4096), (&disk, 8, 65_536)]);
    assert_near(seen[0] * 4096 + seen[1] * 65_536, 50_000_000 * SECONDS);
    // The first queue has had the burst, a tenth of a second.
    let burst = 5_000_000 / 4096;
    assert!(seen[0].abs_diff(seen[1] + burst) < 10, "they take turns: {seen:?}");
}

#[test]
fn queues_of_one_disk_on_two_threads_have_equal_shares() {
    let scene = scene(EngineKind::Threads, 6);
    let other = thread(EngineKind::Threads);
    let (disk, threads) = (null(), [&scene.thread, &other]);
    for rate in [200, 5_000] {
        disk.set_limits(&requests(rate)).unwrap();
        let seen = serve_on(&threads, &[(&disk, 1, 512), (&disk, 64, 512)]);
        assert_near(seen.iter().sum(), rate * SECONDS);
        assert_shares(&seen, &[rate * SECONDS / 2; 2]);
    }
    // All queues of a disk in a group take turns, on any thread.
    let group = LimitGroup::default();
    group.set_limits(requests(3000)).unwrap();
    disk.set_limits(&Limits::default()).unwrap();
    disk.join(Some(&group));
    let seen = serve_on(&threads, &[(&disk, 1, 512), (&disk, 64, 512)]);
    assert_near(seen.iter().sum(), 3000 * SECONDS);
    assert_shares(&seen, &[1500 * SECONDS; 2]);
}

#[test]
fn the_disks_of_a_group_have_equal_shares_with_any_queues() {
    let scene = scene(EngineKind::Threads, 2);
    let (one, many) = (null(), null());
    let group = LimitGroup::default();
    group.set_limits(requests(3000)).unwrap();
    one.join(Some(&group));
    many.join(Some(&group));
    let queues = [(&one, 1, 512), (&many, 32, 512), (&many, 2, 512)];
    let seen = serve(&scene, &queues);
    assert_near(seen.iter().sum(), 3000 * SECONDS);
    assert_shares(&seen, &[1500, 750, 750].map(|rate| rate * SECONDS));
    // One disk has limits of its own: the rest is for its neighbour.
    one.set_limits(&requests(300)).unwrap();
    let seen = serve(&scene, &queues);
    assert_near(seen[0], 300 * SECONDS);
    assert_near(seen.iter().sum(), 3000 * SECONDS);
    // The disk leaves the group.
    one.join(None);
    one.set_limits(&requests(100)).unwrap();
    let seen = serve(&scene, &queues);
    assert_near(seen[0], 100 * SECONDS);
    assert_near(seen[1] + seen[2], 3000 * SECONDS);
}

/// Makes a request wait for half a minute, and calls `happens` after a second. Returns the time
/// that the request took.
fn waits(scene: &Scene, source: &DiskSource, happens: impl FnOnce(&Disk) + 'static) -> Duration {
    let start = clock::now();
    let disk = Rc::new(source.attach(scene.io()));
    let waiting = Rc::clone(&disk);
    let took = Rc::new(Cell::new(Duration::ZERO));
    let ended = Rc::clone(&took);
    let io = Rc::clone(scene.io());
    scene.run(async move {
        let request = async {
            // The first write empties the bucket.
            for _ in 0..2 {
                waiting.write(0, Buffers::aligned(65_536, 512), false).await.unwrap();
            }
            ended.set(clock::now() - start);
        };
        let happens = async {
            io.sleep_until(start + Duration::from_secs(1)).await;
            happens(&disk);
        };
        join(request, happens).await;
    });
    took.get()
}

#[test]
fn requests_that_wait_for_limits_continue_when_these_change_or_their_queue_stops() {
    let scene = scene(EngineKind::Threads, 3);
    let slow = Limits { bytes: per_second(65_536 / 32), ..Limits::default() };
    let (second, soon) = (Duration::from_secs(1), Duration::from_millis(1100));
    let disk = null();
    disk.set_limits(&slow).unwrap();
    assert!(waits(&scene, &disk, |_| ()) > 30 * second);
    let (source, none) = (disk.clone(), Limits::default());
    let took = waits(&scene, &disk, move |_| source.set_limits(&none).unwrap());
    assert!((second..soon).contains(&took), "{took:?}");
    disk.set_limits(&slow).unwrap();
    let took = waits(&scene, &disk, |disk| disk.set_wait_mode(WaitMode::Never));
    assert!((second..soon).contains(&took), "{took:?}");
    let group = LimitGroup::default();
    group.set_limits(slow).unwrap();
    let disk = null();
    disk.join(Some(&group));
    let of_group = group.clone();
    let took = waits(&scene, &disk, move |_| of_group.set_limits(none).unwrap());
    assert!((second..soon).contains(&took), "{took:?}");
    group.set_limits(slow).unwrap();
    let source = disk.clone();
    let took = waits(&scene, &disk, move |_| source.join(None));
    assert!((second..soon).contains(&took), "{took:?}");
}

/// If its bytes counted, a discard could keep a group waiting for hours.
#[test]
fn discards_count_as_requests_and_not_by_their_bytes() {
    let scene = scene(EngineKind::Threads, 4);
    let (one, other) = (null(), null());
    let group = LimitGroup::default();
    let slow = Limits { requests: per_second(10), bytes: per_second(512), ..Limits::default() };
    group.set_limits(slow).unwrap();
    one.join(Some(&group));
    other.join(Some(&group));
    let (one, other) = (one.attach(scene.io()), other.attach(scene.io()));
    let start = clock::now();
    let took = Rc::new(Cell::new([Duration::ZERO; 3]));
    let ended = Rc::clone(&took);
    scene.run(async move {
        one.discard(0, 1 << 20).await.unwrap();
        let discarded = clock::now() - start;
        other.discard(0, 1 << 20).await.unwrap();
        let again = clock::now() - start;
        other.write(0, Buffers::aligned(512, 512), false).await.unwrap();
        ended.set([discarded, again, clock::now() - start]);
    });
    let near = |took: Duration, tenths: u32| {
        took.abs_diff(tenths * Duration::from_millis(100)) < Duration::from_millis(20)
    };
    let [discarded, again, written] = took.get();
    assert!(near(discarded, 0) && near(again, 0), "{discarded:?}, {again:?}");
    assert!(near(written, 1), "the third request has its turn: {written:?}");
}

/// Otherwise zeroes would be a way around the limit on bytes.
#[test]
fn zeroes_count_by_their_bytes_as_other_writes_do() {
    let scene = scene(EngineKind::Threads, 6);
    let second = Duration::from_secs(1);
    for requests in [Rates::default(), per_second(1000)] {
        let disk = null();
        disk.set_limits(&Limits { requests, bytes: per_second(65_536), request_bytes: None })
            .unwrap();
        let (disk, start) = (disk.attach(scene.io()), clock::now());
        let took = Rc::new(Cell::new([Duration::ZERO; 3]));
        let ended = Rc::clone(&took);
        scene.run(async move {
            disk.write_zeroes(0, 1 << 18, true).await.unwrap();
            let zeroed = clock::now() - start;
            disk.write_zeroes(0, 1 << 16, false).await.unwrap();
            let again = clock::now() - start;
            disk.write(0, Buffers::aligned(512, 512), false).await.unwrap();
            ended.set([zeroed, again, clock::now() - start]);
        });
        let [zeroed, again, written] = took.get();
        assert!(zeroed < second, "a burst has room for the first: {zeroed:?}");
        assert!((3 * second..5 * second).contains(&again), "{again:?}");
        assert!((4 * second..6 * second).contains(&written), "{written:?}");
    }
}

/// A request of one disk in a group waits for half a minute; its disk leaves after a second.
#[test]
fn a_disk_that_leaves_its_group_gives_back_the_share_of_its_request() {
    let scene = scene(EngineKind::Threads, 5);
    let (leaves, stays) = (null(), null());
    let group = LimitGroup::default();
    group.set_limits(Limits { bytes: per_second(65_536 / 32), ..Limits::default() }).unwrap();
    leaves.join(Some(&group));
    stays.join(Some(&group));
    let other = stays.attach(scene.io());
    let start = clock::now();
    let took = waits(&scene, &leaves, {
        let leaves = leaves.clone();
        move |_| leaves.join(None)
    });
    assert!(took < Duration::from_secs(2), "{took:?}");
    let (ended, after) = (Rc::new(Cell::new(Duration::ZERO)), start);
    let end = Rc::clone(&ended);
    scene.run(async move {
        other.write(0, Buffers::aligned(512, 512), false).await.unwrap();
        end.set(clock::now() - after);
    });
    // The request that had begun is paid for after 32 seconds.
    let ended = ended.get();
    assert!((30..=32).contains(&ended.as_secs()), "{ended:?}");
}

/// A queue that is filled and stopped many times.
#[test]
fn later_requests_wait_for_requests_that_begin_with_a_stop() {
    let scene = scene(EngineKind::Threads, 4);
    let group = LimitGroup::default();
    for (own, shared) in [(requests(100), Limits::default()), (requests(5000), requests(100))] {
        let disk = null();
        disk.set_limits(&own).unwrap();
        group.set_limits(shared).unwrap();
        disk.join(Some(&group));
        let [stopped, other] = [(); 2].map(|()| disk.attach(scene.io()));
        let io = Rc::clone(scene.io());
        scene.run(async move {
            let (start, count) = (clock::now(), Cell::new(0));
            let one = || async {
                stopped.read(0, Buffers::aligned(512, 512)).await.unwrap();
                count.set(count.get() + 1);
            };
            for _ in 0..10 {
                stopped.set_wait_mode(WaitMode::All);
                let stops = async {
                    io.sleep_until(clock::now() + Duration::from_micros(100)).await;
                    stopped.set_wait_mode(WaitMode::Never);
                    stopped.read(0, Buffers::aligned(512, 512)).await.unwrap();
                };
                let mut all: FuturesUnordered<_> = (0..30).map(|_| one()).collect();
                join(async { while all.next().await.is_some() {} }, stops).await;
            }
            assert_eq!(count.get(), 300);
            assert!(clock::now() - start < Duration::from_secs(1));
            other.read(0, Buffers::aligned(512, 512)).await.unwrap();
            // 10 requests may come at once.
            let took = clock::now() - start;
            assert!((2990..3010).contains(&took.as_millis()), "{took:?}");
        });
    }
}

/// The case of a queue that leaves its requests to another process.
#[test]
fn requests_at_a_shut_gate_delay_no_disk_and_have_no_share() {
    let scene = scene(EngineKind::Threads, 5);
    let (disk, group) = (null(), LimitGroup::default());
    disk.set_limits(&requests(1000)).unwrap();
    group.set_limits(requests(10)).unwrap();
    disk.join(Some(&group));
    let [left, other] = [(); 2].map(|()| disk.attach(scene.io()));
    let io = Rc::clone(scene.io());
    scene.run(async move {
        let start = clock::now();
        let until = |millis| io.sleep_until(start + Duration::from_millis(millis));
        let read = |disk| Disk::read(disk, 0, Buffers::aligned(512, 512));
        let mut waiting: FuturesUnordered<_> = (0..50).map(|_| read(&left)).collect();
        for _ in 0..2 {
            waiting.next().await.unwrap().unwrap();
        }
        let shut = async {
            until(50).await;
            left.set_wait_mode(WaitMode::Frozen);
            read(&other).await.unwrap();
            assert_eq!((clock::now() - start).as_millis(), 100);
            until(1000).await;
        };
        assert!(matches!(select(waiting.next(), pin!(shut)).await, Either::Right(_)));
        left.set_wait_mode(WaitMode::All);
        waiting.next().await.unwrap().unwrap();
        assert_eq!((clock::now() - start).as_millis(), 1000);
        drop(waiting);
        read(&other).await.unwrap();
        assert_eq!((clock::now() - start).as_millis(), 1000);
    });
}
