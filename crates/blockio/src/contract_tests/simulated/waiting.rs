//! Requests that wait for limits, or because their disk has failed them.

use std::future::ready;
use std::io;
use std::pin::Pin;
use std::time::Instant;

use super::limits::{null, per_second};
use super::*;
use crate::disk::{
    Direction, DiskState, ErrorAction, ErrorPolicy, LimitGroup, Limits, Requester, WaitMode,
};

/// A kernel without space until a given time.
struct FullDisk {
    until: Instant,
    now: Cell<Instant>,
    writes: Cell<u32>,
}

impl World for FullDisk {
    fn now(&self) -> Instant {
        self.now.get()
    }

    fn start(&self, op: KernelOp) -> bool {
        self.writes.set(self.writes.get() + 1);
        let bytes = i64::try_from(op.buffers().bytes()).unwrap();
        let is_full = self.now.get() < self.until;
        // A part of the first write finds space.
        let part = if bytes > 4096 { 4096 } else { -i64::from(libc::ENOSPC) };
        op.answer(if is_full { part } else { bytes }).send();
        true
    }

    fn spin(&self) {
        self.now.set(self.now.get() + Duration::from_micros(1));
    }

    fn sleep(&self, deadline: Option<Instant>, is_over: &dyn Fn() -> bool) {
        if !is_over() {
            let when = deadline.expect("the loop sleeps and nothing will wake it");
            self.now.set(self.now.get().max(when));
        }
    }
}

/// Writes to a disk that has space again after `seconds`. Returns the seconds that this takes, and
/// the result.
fn write_when_full(
    action: ErrorAction,
    seconds: u64,
    happens: impl Fn(&DiskSource, &Disk) + 'static,
) -> (Duration, Result<(), Option<i32>>) {
    let start = Instant::now();
    let until = start + Duration::from_secs(seconds);
    let world = Rc::new(FullDisk { until, now: Cell::new(start), writes: Cell::new(0) });
    let _installed = install(Rc::<FullDisk>::clone(&world));
    let file = tempfile::NamedTempFile::new().unwrap();
    let thread = thread(EngineKind::Threads);
    let source = simulated_file(&file, false);
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
    (clock::now() - start, result)
}

#[test]
fn a_write_without_space_is_held_until_there_is_some_or_its_queue_stops() {
    type Happens = Box<dyn Fn(&DiskSource, &Disk)>;
    let write = |action: ErrorAction, until: u64, happens: Happens| {
        let (took, result) = write_when_full(action, until, happens);
        (took.as_secs(), result)
    };
    let nothing = || -> Happens { Box::new(|_, _| ()) };
    let no_space = Err(Some(libc::ENOSPC));
    assert_eq!(write(ErrorAction::Report, 100, nothing()), (5, no_space));
    assert_eq!(write(ErrorAction::HoldBriefly, 100, nothing()), (20, no_space));
    assert_eq!(write(ErrorAction::HoldBriefly, 10, nothing()).1, Ok(()));
    let stops = |source: &DiskSource, disk: &Disk| {
        assert!(matches!(source.state(), DiskState::Held(_)));
        disk.set_wait_mode(WaitMode::Never);
    };
    assert_eq!(write(ErrorAction::Hold, 100, Box::new(stops)), (5, no_space));
    // The queue stops, but will continue.
    let pauses = |_: &DiskSource, disk: &Disk| disk.set_wait_mode(WaitMode::RetriesOnly);
    assert_eq!(write(ErrorAction::Hold, 10, Box::new(pauses)), (10, Ok(())));
    for action in [ErrorAction::Hold, ErrorAction::Retry] {
        let (took, result) = write(action, 100, Box::new(|source, _| source.resume()));
        assert_eq!(result, Ok(()));
        assert!((100..102).contains(&took), "{took}");
    }
}

/// By themselves such writes are tried again each second.
#[test]
fn a_write_that_is_resumed_is_tried_again_at_once() {
    for action in [ErrorAction::Hold, ErrorAction::HoldBriefly, ErrorAction::Retry] {
        let resumed = write_when_full(action, 5, |source, _| source.resume());
        let waits = write_when_full(action, 5, |_, _| ());
        assert_eq!((&resumed.1, &waits.1), (&Ok(()), &Ok(())));
        let sooner = waits.0.checked_sub(resumed.0);
        assert!(sooner > Some(Duration::from_millis(100)), "{resumed:?} {waits:?}");
    }
}

/// A request that may be cancelled, and the calls that it got.
#[derive(Default)]
struct CancellableRequester {
    is_over: Cell<bool>,
    /// True if the request may not continue.
    is_refused: Cell<bool>,
    asked: RefCell<Vec<&'static str>>,
}

impl Requester for CancellableRequester {
    fn on_wait(&self) {
        self.asked.borrow_mut().push("waits");
    }

    fn check(&self) -> io::Result<()> {
        let error = || io::Error::from_raw_os_error(libc::ECANCELED);
        if self.is_over.get() { Err(error()) } else { Ok(()) }
    }

    fn on_resume(&self, _: Direction) -> Pin<Box<dyn Future<Output = io::Result<()>> + '_>> {
        self.asked.borrow_mut().push("goes on");
        let error = io::Error::from_raw_os_error(libc::EBADE);
        Box::pin(ready(if self.is_refused.get() { Err(error) } else { Ok(()) }))
    }

    fn on_cancel(&self) {
        self.asked.borrow_mut().push("ends");
    }
}

/// Makes a write wait for a minute because of limits, or because its disk has failed it; or zeroes,
/// because of limits. Calls `happens` after five seconds. Returns the request's result, its
/// seconds, and the calls that it got.
fn wait_for(
    what: &str,
    happens: impl Fn(&DiskSource, &Disk, &CancellableRequester) + 'static,
) -> (Result<(), Option<i32>>, u64, Vec<&'static str>) {
    let start = Instant::now();
    let until = start + Duration::from_secs(if what == "space" { 60 } else { 0 });
    let world = Rc::new(FullDisk { until, now: Cell::new(start), writes: Cell::new(0) });
    let _installed = install(Rc::<FullDisk>::clone(&world));
    let thread = thread(EngineKind::Threads);
    let file = tempfile::NamedTempFile::new().unwrap();
    let source = simulated_file(&file, false);
    if what != "space" {
        let slow = Limits { bytes: per_second(8192 / 60), ..Limits::default() };
        source.set_limits(&slow).unwrap();
    } else {
        let write = ErrorAction::Hold;
        source.set_error_policy(ErrorPolicy { write, ..ErrorPolicy::default() });
    }
    let (disk, wanted) = (source.attach(thread.io()), CancellableRequester::default());
    let request = async {
        let requests = disk.with_requester(&wanted);
        match what {
            "zeroes" => requests.write_zeroes(0, 8192, false).await,
            _ => Ok(requests.write(0, Buffers::aligned(8192, 512), true).await?),
        }
    };
    let result = thread.block_on(async {
        if what != "space" {
            // This write empties the bucket.
            disk.write(0, Buffers::aligned(8192, 512), true).await.unwrap();
        }
        let happens = async {
            thread.io().sleep_until(start + Duration::from_secs(5)).await;
            happens(&source, &disk, &wanted);
        };
        join(request, happens).await.0
    });
    let result = result.unwrap().map_err(|error| error.raw_os_error());
    assert_eq!(source.state(), DiskState::Ready, "nobody waits any more");
    (result, (clock::now() - start).as_secs(), wanted.asked.take())
}

#[test]
fn a_request_that_waits_ends_when_it_is_not_wanted_any_more() {
    for what in ["limits", "space", "zeroes"] {
        let (result, seconds, asked) = wait_for(what, |_, disk, wanted| {
            wanted.is_over.set(true);
            disk.recheck_waiting();
        });
        assert_eq!((result, seconds), (Err(Some(libc::ECANCELED)), 5), "{what}");
        assert_eq!(asked[asked.len() - 2..], ["waits", "ends"], "{what}");
    }
}

/// The tokens that a cancelled request has taken go to later requests.
#[test]
fn a_request_that_ends_while_it_waits_gives_back_its_share() {
    let scene = scene(EngineKind::Threads, 7);
    // Bytes per second of the disk and of its group. With both, the request waits for its group.
    for (own, of_group) in [(Some(512), None), (None, Some(512)), (Some(8192), Some(512))] {
        let (source, group) = (null(), LimitGroup::default());
        let limits = |bytes: Option<u64>| Limits {
            bytes: bytes.map(per_second).unwrap_or_default(),
            ..Limits::default()
        };
        source.set_limits(&limits(own)).unwrap();
        group.set_limits(limits(of_group)).unwrap();
        source.join(Some(&group));
        let (disk, start) = (source.attach(scene.io()), clock::now());
        let io = Rc::clone(scene.io());
        let took = Rc::new(Cell::new(Duration::ZERO));
        let ended = Rc::clone(&took);
        scene.run(async move {
            let write = |bytes| disk.write(0, Buffers::aligned(bytes, 512), false);
            write(5120).await.unwrap();
            let wanted = CancellableRequester::default();
            let unwanted =
                disk.with_requester(&wanted).write(0, Buffers::aligned(1 << 18, 512), false);
            let ends = async {
                io.sleep_until(start + Duration::from_secs(1)).await;
                wanted.is_over.set(true);
                disk.recheck_waiting();
            };
            assert!(join(unwanted, ends).await.0.is_err());
            write(512).await.unwrap();
            ended.set(clock::now() - start);
        });
        // The first write is paid for after 10 seconds.
        assert!((9..=10).contains(&took.get().as_secs()), "{own:?}: {:?}", took.get());
    }
}

#[test]
fn a_request_checks_for_changes_before_it_resumes() {
    for what in ["limits", "space", "zeroes"] {
        let (result, _, asked) = wait_for(what, |_, _, wanted| wanted.is_refused.set(true));
        assert_eq!((result, &asked[..2]), (Err(Some(libc::EBADE)), &["waits", "goes on"][..]));
        let (result, ..) = wait_for(what, |source, _, _| source.cut_off(4096));
        assert_eq!(result, Err(Some(libc::EINVAL)), "{what}: it is beyond the end");
        let (result, seconds, asked) = wait_for(what, |_, _, _| ());
        assert_eq!((result, asked.last()), (Ok(()), Some(&"goes on")), "{what}");
        assert!((59..62).contains(&seconds), "{what}: {seconds}");
    }
}

/// The next process begins with it.
#[test]
fn a_request_that_is_left_does_not_begin_before_its_queue_continues() {
    let start = Instant::now();
    let world = Rc::new(FullDisk { until: start, now: Cell::new(start), writes: Cell::new(0) });
    let _installed = install(Rc::<FullDisk>::clone(&world));
    let thread = thread(EngineKind::Threads);
    let source = null();
    let slow = Limits { bytes: per_second(8192 / 60), ..Limits::default() };
    source.set_limits(&slow).unwrap();
    let disk = source.attach(thread.io());
    let write = || disk.write(0, Buffers::aligned(8192, 512), false);
    let at = |seconds| thread.io().sleep_until(start + Duration::from_secs(seconds));
    let goes_on = thread.block_on(async {
        write().await.unwrap();
        let leaves = async {
            at(5).await;
            disk.set_wait_mode(WaitMode::Frozen);
            at(100).await;
            disk.set_wait_mode(WaitMode::All);
        };
        let one = async {
            write().await.unwrap();
            clock::now() - start
        };
        join(one, leaves).await.0
    });
    assert!(goes_on.is_ok_and(|waited| waited >= Duration::from_secs(100)));
}

/// The disk has space again before the queue stops, and the next process makes the write.
#[test]
fn a_write_that_is_held_is_not_made_before_its_queue_continues() {
    for over_part in [false, true] {
        let start = Instant::now();
        let after = |millis| start + Duration::from_millis(millis);
        let (until, now) = (after(4500), Cell::new(start));
        let _installed = install(Rc::new(FullDisk { until, now, writes: Cell::new(0) }));
        let thread = thread(EngineKind::Threads);
        let file = tempfile::NamedTempFile::new().unwrap();
        let source = simulated_file(&file, false);
        let source = if over_part { DiskSource::raw(source, 0, None).unwrap() } else { source };
        source.set_error_policy(ErrorPolicy { write: ErrorAction::Hold, ..ErrorPolicy::default() });
        let disk = source.attach(thread.io());
        let ended = thread.block_on(async {
            let write = async {
                disk.write(0, Buffers::aligned(4096, 512), true).await.unwrap();
                clock::now()
            };
            let leaves = async {
                // Between two tries, which come each second.
                thread.io().sleep_until(after(5000)).await;
                disk.set_wait_mode(WaitMode::Frozen);
                thread.io().sleep_until(after(100_000)).await;
                disk.set_wait_mode(WaitMode::All);
            };
            join(write, leaves).await.0
        });
        assert!(ended.is_ok_and(|ended| ended >= after(100_000)), "over a part: {over_part}");
    }
}

/// Durable writes fail for good when data is lost. Other writes still wait for space.
#[test]
fn a_write_that_nothing_can_make_good_is_not_tried_again() {
    let (eio, ok) = ((Err(Some(libc::EIO)), false), (Ok(()), true));
    for case in 0..8 {
        let [over_part, is_limited, fua] = [1, 2, 4].map(|bit| case & bit != 0);
        let start = Instant::now();
        let (until, now) = (start + Duration::from_millis(2500), Cell::new(start));
        let _installed = install(Rc::new(FullDisk { until, now, writes: Cell::new(0) }));
        let thread = thread(EngineKind::Threads);
        let file = tempfile::NamedTempFile::new().unwrap();
        let source = simulated_file(&file, false);
        let source = if over_part { DiskSource::raw(source, 0, None).unwrap() } else { source };
        source.set_error_policy(ErrorPolicy { write: ErrorAction::Retry, ..Default::default() });
        if is_limited {
            // Far above the write, which then goes another way.
            source.set_limits(&Limits { bytes: per_second(1 << 40), ..Limits::default() }).unwrap();
        }
        source.hand_over().inherit(Some(libc::EIO), false);
        let disk = source.attach(thread.io());
        let result = thread.block_on(async {
            let write = async {
                let result = disk.write(0, Buffers::aligned(512, 512), fua).await;
                let result = result.map_err(|unfinished| unfinished.error().raw_os_error());
                (result, clock::now() >= until)
            };
            let ends = async {
                thread.io().sleep_until(start + Duration::from_secs(5)).await;
                disk.set_wait_mode(WaitMode::Never);
            };
            join(write, ends).await.0
        });
        assert_eq!(result.unwrap(), if fua { eio } else { ok }, "{case}");
    }
}
