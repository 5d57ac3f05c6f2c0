//! Limits, by a clock that is exact.

use std::future::ready;
use std::io;
use std::pin::Pin;
use std::time::Instant;

use super::*;
use crate::disk::{
    Direction, DiskState, ErrorAction, ErrorPolicy, LimitGroup, Limits, Rate, Rates, Requester,
};

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

fn simulated_file(file: &tempfile::NamedTempFile) -> DiskSource {
    let info = DiskInfo {
        size_bytes: BYTES as u64,
        logical_block_bytes: 512,
        physical_block_bytes: 512,
        read_only: false,
        direct: true,
    };
    let descriptor = OwnedFd::from(file.reopen().unwrap());
    DiskSource::simulated(descriptor, info, false, 512, 512)
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
    let source = simulated_file(&file);
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

/// A request that somebody may not want any more, and what it was asked.
#[derive(Default)]
struct Wanted {
    is_over: Cell<bool>,
    /// It may go on.
    is_refused: Cell<bool>,
    asked: RefCell<Vec<&'static str>>,
}

impl Requester for Wanted {
    fn waits(&self) {
        self.asked.borrow_mut().push("waits");
    }

    fn check(&self) -> io::Result<()> {
        let error = || io::Error::from_raw_os_error(libc::ECANCELED);
        if self.is_over.get() { Err(error()) } else { Ok(()) }
    }

    fn goes_on(&self, _: Direction) -> Pin<Box<dyn Future<Output = io::Result<()>> + '_>> {
        self.asked.borrow_mut().push("goes on");
        let error = io::Error::from_raw_os_error(libc::EBADE);
        Box::pin(ready(if self.is_refused.get() { Err(error) } else { Ok(()) }))
    }

    fn ends(&self) {
        self.asked.borrow_mut().push("ends");
    }
}

/// Has a write wait for a minute because of limits, or because its disk has failed it. Returns how
/// it ends if this happens after five seconds, how long that takes, and what it was asked.
fn wait_for(
    what: &str,
    happens: impl Fn(&DiskSource, &Disk, &Wanted) + 'static,
) -> (Result<(), Option<i32>>, u64, Vec<&'static str>) {
    let start = Instant::now();
    let until = start + Duration::from_secs(if what == "limits" { 0 } else { 60 });
    let world = Rc::new(Full { until, now: Cell::new(start), writes: Cell::new(0) });
    let _installed = install(Rc::<Full>::clone(&world));
    let thread = thread(EngineKind::Threads);
    let file = tempfile::NamedTempFile::new().unwrap();
    let source = simulated_file(&file);
    if what == "limits" {
        let slow = Limits { bytes: per_second(8192 / 60), ..Limits::default() };
        source.set_limits(&slow).unwrap();
    } else {
        let write = ErrorAction::Hold;
        source.set_error_policy(ErrorPolicy { write, ..ErrorPolicy::default() });
    }
    let (disk, wanted) = (source.attach(thread.io()), Wanted::default());
    let write = disk.asking(&wanted).write(0, Buffers::aligned(8192, 512), true);
    let result = thread.block_on(async {
        if what == "limits" {
            // It empties the bucket.
            disk.write(0, Buffers::aligned(8192, 512), true).await.unwrap();
        }
        let happens = async {
            thread.io().sleep_until(start + Duration::from_secs(5)).await;
            happens(&source, &disk, &wanted);
        };
        join(write, happens).await.0
    });
    let result = result.unwrap().map_err(|unfinished| unfinished.error().raw_os_error());
    assert_eq!(source.state(), DiskState::Ready, "nobody waits any more");
    (result, (clock::now() - start).as_secs(), wanted.asked.take())
}

#[test]
fn a_request_that_waits_ends_when_it_is_not_wanted_any_more() {
    for what in ["limits", "space"] {
        let (result, seconds, asked) = wait_for(what, |_, disk, wanted| {
            wanted.is_over.set(true);
            disk.look_at_waiting();
        });
        assert_eq!((result, seconds), (Err(Some(libc::ECANCELED)), 5), "{what}");
        assert_eq!(asked[asked.len() - 2..], ["waits", "ends"], "{what}");
    }
}

#[test]
fn what_has_changed_while_a_request_waited_is_looked_at_before_it_goes_on() {
    for (what, smaller) in [("limits", Some(libc::EINVAL)), ("space", Some(libc::EINVAL))] {
        let (result, _, asked) = wait_for(what, |_, _, wanted| wanted.is_refused.set(true));
        assert_eq!((result, &asked[..2]), (Err(Some(libc::EBADE)), &["waits", "goes on"][..]));
        let (result, ..) = wait_for(what, |source, _, _| source.cut_off(4096));
        assert_eq!(result, Err(smaller), "{what}: it is beyond the end");
        let (result, seconds, asked) = wait_for(what, |_, _, _| ());
        assert_eq!((result, asked.last()), (Ok(()), Some(&"goes on")), "{what}");
        assert!((59..62).contains(&seconds), "{what}: {seconds}");
    }
}

/// Of a disk that is no file, whose writes fail for good when data is lost.
#[test]
fn a_write_that_nothing_can_make_good_is_not_tried_again() {
    let start = Instant::now();
    let world = Rc::new(Full { until: start, now: Cell::new(start), writes: Cell::new(0) });
    let _installed = install(Rc::<Full>::clone(&world));
    let thread = thread(EngineKind::Threads);
    let file = tempfile::NamedTempFile::new().unwrap();
    let source = DiskSource::raw(simulated_file(&file), 0, None).unwrap();
    source.set_error_policy(ErrorPolicy { write: ErrorAction::Retry, ..ErrorPolicy::default() });
    source.inherit(Some(libc::EIO), false);
    let disk = source.attach(thread.io());
    let result = thread.block_on(async {
        let write = async {
            let result = disk.write(0, Buffers::aligned(512, 512), true).await;
            (result.unwrap_err().error().raw_os_error(), clock::now() - start)
        };
        let ends = async {
            thread.io().sleep_until(start + Duration::from_secs(5)).await;
            disk.set_ending(true);
        };
        join(write, ends).await.0
    });
    let (errno, took) = result.unwrap();
    assert_eq!((errno, took.as_secs()), (Some(libc::EIO), 0));
}
