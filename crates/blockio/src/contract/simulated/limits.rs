//! Limits, by a clock that is exact.

use std::time::Instant;

use super::*;
use crate::disk::{DiskState, ErrorAction, ErrorPolicy, LimitGroup, Limits, Rate, Rates};

const SECONDS: u64 = 10;

fn per_second(rate: u64) -> Rates {
    Rates { total: Some(Rate { per_second: rate, burst: None }), ..Rates::default() }
}

fn requests(rate: u64) -> Limits {
    Limits { requests: per_second(rate), ..Limits::default() }
}

fn null() -> DiskSource {
    DiskSource::null(1 << 20, &DiskOptions::default()).unwrap()
}

/// Reads until `end`, so many at a time, and counts them.
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

/// How many requests each of these queues has served: its disk, its depth, and its bytes.
fn serve(scene: &Scene, queues: &[(&DiskSource, usize, usize)]) -> Vec<u64> {
    let end = clock::now() + Duration::from_secs(SECONDS);
    let counts = Rc::new(RefCell::new(vec![0; queues.len()]));
    let ended = Rc::new(Cell::new(0));
    for (place, &(source, depth, bytes)) in queues.iter().enumerate() {
        let (disk, counts, ended) =
            (source.attach(scene.io()), Rc::clone(&counts), Rc::clone(&ended));
        scene.io().spawn(async move {
            counts.borrow_mut()[place] = load(disk, depth, bytes, end).await;
            ended.set(ended.get() + 1);
        });
    }
    while ended.get() < queues.len() {
        if scene.thread.turn(Wait::Never).unwrap() == Activity::Idle {
            scene.thread.turn(Wait::ForEvent).unwrap();
        }
    }
    counts.take()
}

fn assert_near(seen: u64, expected: u64) {
    assert!(seen.abs_diff(expected) * 50 <= expected, "{seen} of {expected}");
}

/// Whoever comes first has the whole of the first burst, a hundredth of all.
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
    // The first has had the burst, a tenth of a second.
    let burst = 5_000_000 / 4096;
    assert!(seen[0].abs_diff(seen[1] + burst) < 10, "they take turns: {seen:?}");
}

#[test]
fn the_disks_of_a_group_have_equal_shares_whatever_their_queues() {
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
    // One has limits of its own: what it leaves is for the others.
    one.set_limits(&requests(300)).unwrap();
    let seen = serve(&scene, &queues);
    assert_near(seen[0], 300 * SECONDS);
    assert_near(seen.iter().sum(), 3000 * SECONDS);
    // It leaves the group.
    one.join(None);
    one.set_limits(&requests(100)).unwrap();
    let seen = serve(&scene, &queues);
    assert_near(seen[0], 100 * SECONDS);
    assert_near(seen[1] + seen[2], 3000 * SECONDS);
}

/// A request that has to wait for a minute, and what happens to its disk after a second.
fn waits(scene: &Scene, source: &DiskSource, happens: impl FnOnce(&Disk) + 'static) -> Duration {
    let start = clock::now();
    let disk = Rc::new(source.attach(scene.io()));
    let waiting = Rc::clone(&disk);
    let took = Rc::new(Cell::new(Duration::ZERO));
    let ended = Rc::clone(&took);
    let io = Rc::clone(scene.io());
    scene.run(async move {
        let request = async {
            // The first empties the bucket.
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
fn requests_that_wait_for_limits_go_on_when_these_change_or_their_queue_stops() {
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
    let took = waits(&scene, &disk, |disk| disk.set_ending(true));
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

/// A kernel without space until then.
struct Full {
    until: Instant,
    now: Cell<Instant>,
    writes: Cell<u32>,
}

impl World for Full {
    fn now(&self) -> Instant {
        self.now.get()
    }

    fn preempt(&self) {}

    fn ring(&self, _: u32) -> RingSetup {
        unreachable!("its engine has threads")
    }

    fn admit(&self, _: RawFd, count: usize, _: usize) -> Result<usize, libc::c_int> {
        Ok(count)
    }

    fn ends_poll(&self) -> bool {
        false
    }

    fn start(&self, op: KernelOp) -> bool {
        self.writes.set(self.writes.get() + 1);
        let bytes = i64::try_from(op.buffers().bytes()).unwrap();
        let is_full = self.now.get() < self.until;
        // A part of the first finds space.
        let part = if bytes > 4096 { 4096 } else { -i64::from(libc::ENOSPC) };
        op.answer(if is_full { part } else { bytes }).send();
        true
    }

    fn spin(&self) {
        self.now.set(self.now.get() + Duration::from_micros(1));
    }

    fn run_sq_thread(&self, _: SqThread) {
        unreachable!("no ring has a submission thread");
    }

    fn run_thread(&self, work: Box<dyn FnOnce()>) {
        work();
    }

    fn sleep(&self, deadline: Option<Instant>, is_over: &dyn Fn() -> bool) {
        if !is_over() {
            let when = deadline.expect("the loop sleeps and nothing will wake it");
            self.now.set(self.now.get().max(when));
        }
    }
}

/// How long a write takes on a disk that has space again after so many seconds, and how it ends.
fn write_when_full(
    action: ErrorAction,
    seconds: u64,
    happens: impl Fn(&DiskSource, &Disk) + 'static,
) -> (u64, Result<(), Option<i32>>) {
    let start = Instant::now();
    let until = start + Duration::from_secs(seconds);
    let world = Rc::new(Full { until, now: Cell::new(start), writes: Cell::new(0) });
    let _installed = install(Rc::<Full>::clone(&world));
    let file = tempfile::NamedTempFile::new().unwrap();
    let thread = thread(EngineKind::Threads);
    let info = DiskInfo {
        size_bytes: BYTES as u64,
        logical_block_bytes: 512,
        physical_block_bytes: 512,
        read_only: false,
        direct: true,
    };
    let descriptor = OwnedFd::from(file.reopen().unwrap());
    let source = DiskSource::simulated(descriptor, info, false, 512, 512);
    source.set_error_policy(ErrorPolicy { write: action, ..ErrorPolicy::default() });
    let disk = source.attach(thread.io());
    let result = thread.block_on(async {
        let write = async { disk.write(0, Buffers::aligned(8192, 512), true).await };
        let happens = async {
            thread.io().sleep_until(start + Duration::from_secs(5)).await;
            happens(&source, &disk);
        };
        join(write, happens).await.0
    });
    let result = result.unwrap().map_err(|unfinished| unfinished.error().raw_os_error());
    assert_eq!(source.state(), DiskState::Ready, "nobody waits any more");
    drop(disk);
    ((clock::now() - start).as_secs(), result)
}

#[test]
fn a_write_without_space_is_held_until_there_is_some_or_its_queue_stops() {
    let nothing = |_: &DiskSource, _: &Disk| ();
    let no_space = Err(Some(libc::ENOSPC));
    assert_eq!(write_when_full(ErrorAction::Report, 100, nothing), (5, no_space));
    assert_eq!(write_when_full(ErrorAction::HoldBriefly, 100, nothing), (20, no_space));
    assert_eq!(write_when_full(ErrorAction::HoldBriefly, 10, nothing).1, Ok(()));
    let stops = |source: &DiskSource, disk: &Disk| {
        assert!(matches!(source.state(), DiskState::Held(_)));
        disk.set_ending(true);
    };
    assert_eq!(write_when_full(ErrorAction::Hold, 100, stops), (5, no_space));
    for action in [ErrorAction::Hold, ErrorAction::Retry] {
        let (took, result) = write_when_full(action, 100, |source, _| source.resume());
        assert_eq!(result, Ok(()));
        assert!((100..102).contains(&took), "{took}");
    }
}
