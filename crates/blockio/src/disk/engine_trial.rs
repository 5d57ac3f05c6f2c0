//! The choice of the best engine for a disk, by a trial.

use std::future::{Future, poll_fn};
use std::task::Poll;
use std::time::{Duration, Instant};

use crate::config::{EngineKind, IoThreadConfig};
use crate::disk::{Disk, DiskSource};
use crate::error::Error;
use crate::thread::IoThread;
use iomem::{Buffers, fits};

/// A kind of reads in a trial.
#[derive(Debug, Clone, Copy)]
struct Load {
    /// The least bytes of a read; a logical block may have more.
    bytes: u32,
    /// Reads in a round, and the number of them in flight.
    reads: u32,
    at_once: u32,
    /// Rounds for each engine. The fastest one counts, because it is the least disturbed.
    rounds: usize,
    /// A slow disk gets fewer rounds: none begins later than this after the start of the trial.
    until: Duration,
}

const SMALL: Load =
    Load { bytes: 4096, reads: 256, at_once: 32, rounds: 6, until: Duration::from_millis(50) };
/// The size of reads in copies and backups. The kernel may need a thread for them even if small
/// reads need none.
const LARGE: Load =
    Load { bytes: 128 << 10, reads: 16, at_once: 8, rounds: 4, until: Duration::from_millis(90) };
/// The percentage of io_uring's time that Linux AIO must stay below if io_uring needs no kernel
/// threads, or if the disk is a file on a file system. Beside a client it wins less than in a
/// trial, and the first submit that waits for the file system costs more than the gain.
const OTHERWISE_PERCENT: u32 = 67;

/// An engine, and the reason for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The engine.
    pub engine: EngineKind,
    /// The reason in one line without a full stop, for a log.
    pub why: String,
    /// True if a trial has failed, perhaps for a reason that concerns this disk alone.
    pub has_failed: bool,
}

impl Choice {
    fn new(engine: EngineKind, why: impl Into<String>) -> Self {
        Self { engine, why: why.into(), has_failed: false }
    }
}

/// The traits of a disk on which engines depend. Disks with equal traits have the same best engine,
/// so one trial serves all of them. It should use the disk with the most data: the file system
/// alone answers reads of data that was never written.
#[derive(Debug, Clone)]
pub struct TrialKey {
    /// The block device, or the device of the file system.
    device: u64,
    is_block_device: bool,
    direct: bool,
    /// The size in bytes of a small read in the trial.
    block_bytes: u32,
    /// The written part of the disk, in units of 512 bytes.
    allocated: i64,
}

impl TrialKey {
    /// Reads the traits of a disk. `None` if it is like no other disk, or the kernel does not
    /// report them.
    pub fn from_source(source: &DiskSource) -> Option<Self> {
        let status = rustix::fs::fstat(source.open_file()?).ok()?;
        let is_block_device = source.is_block_device();
        let device = if is_block_device { status.st_rdev } else { status.st_dev };
        let info = source.info();
        Some(Self {
            device,
            is_block_device,
            direct: info.direct,
            block_bytes: info.logical_block_bytes.max(4096),
            allocated: status.st_blocks,
        })
    }

    /// Returns true if a trial of one disk serves both.
    pub fn is_like(&self, other: &Self) -> bool {
        let of = |this: &Self| (this.device, this.is_block_device, this.direct, this.block_bytes);
        of(self) == of(other)
    }

    /// The written part of the disk, in units of 512 bytes; 0 for a block device.
    pub fn allocated(&self) -> i64 {
        self.allocated
    }
}

/// Tries the engines that the kernel offers on `source`, with some thousand reads of 4 KiB and some
/// of 128 KiB, and returns the best. The trial takes at most a tenth of a second, unless a single
/// round takes longer.
///
/// io_uring is the best if it needs no kernel threads, unless Linux AIO is faster by half. It needs
/// them for a disk whose kernel driver cannot take a request without waiting, with one hand-over
/// for each read. Such a block device gets Linux AIO if that was faster, a file on a file system
/// only if it was faster by half. Linux AIO waits in the submit while the file is frozen or its
/// place is looked up, and every disk of the IoThread waits with it. (The time alone proves little:
/// on CPUs that other programs use, engines behave differently from a trial on an idle machine.)
pub fn best_engine(source: &DiskSource) -> Choice {
    if !source.has_engine() {
        return Choice::new(EngineKind::Threads, "the disk has no file and needs no engine");
    }
    let io_uring = Trial::new(EngineKind::IoUring, source);
    if !source.info().direct {
        return match io_uring {
            Ok(_) => Choice::new(EngineKind::IoUring, "asynchronous with the page cache too"),
            Err(error) => Choice::new(
                EngineKind::Threads,
                format!(
                    "{error}; with the page cache, submits of Linux AIO would wait for the disk"
                ),
            ),
        };
    }
    match (io_uring, Trial::new(EngineKind::Aio, source)) {
        (Ok(io_uring), Ok(aio)) => faster(&io_uring, &aio, source.is_block_device()),
        (Ok(_), Err(error)) => Choice::new(EngineKind::IoUring, error.to_string()),
        (Err(error), Ok(_)) => Choice::new(EngineKind::Aio, error.to_string()),
        (Err(first), Err(second)) => {
            Choice::new(EngineKind::Threads, format!("{first}; and {second}"))
        }
    }
}

/// The engines to use if `best` cannot be set up after all, the better first. The last one can
/// always be set up.
pub fn fallbacks(best: EngineKind, source: &DiskSource) -> impl Iterator<Item = EngineKind> {
    // With the page cache, Linux AIO would wait for the disk.
    let aio = source.info().direct.then_some(EngineKind::Aio);
    let all = [Some(EngineKind::IoUring), aio, Some(EngineKind::Threads)];
    all.into_iter().flatten().filter(move |&engine| engine != best)
}

impl IoThread {
    /// Sets up a loop for the calling thread, with the best engine for `source` and the rest of
    /// `config`. Tries the engines on the disk first, as [`best_engine`] does.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    pub fn for_disk(source: &DiskSource, config: &IoThreadConfig) -> Result<Self, Error> {
        let new = |engine: EngineKind| {
            Self::new(&IoThreadConfig { engine: engine.into(), ..config.clone() })
        };
        let best = best_engine(source).engine;
        fallbacks(best, source).fold(new(best), |thread, engine| thread.or_else(|_| new(engine)))
    }
}

/// The fastest time of a round of one load, for each engine.
#[derive(Debug, Clone, Copy)]
struct RoundTimes {
    io_uring: Duration,
    aio: Duration,
}

/// Measures a load. `None` if no time was left for it.
fn times(
    io_uring: &Trial,
    aio: &Trial,
    load: Load,
    start: Instant,
) -> Result<Option<RoundTimes>, Choice> {
    let mut best: Option<RoundTimes> = None;
    for round in 0..load.rounds {
        if start.elapsed() > load.until {
            break;
        }
        match (io_uring.round(load, round), aio.round(load, round)) {
            (Ok(io_uring), Ok(aio)) => {
                let RoundTimes { io_uring: first, aio: second } =
                    best.unwrap_or(RoundTimes { io_uring, aio });
                best = Some(RoundTimes { io_uring: io_uring.min(first), aio: aio.min(second) });
            }
            (first, second) => return Err(choice_after_failure(first.err(), second.err())),
        }
    }
    Ok(best)
}

fn faster(io_uring: &Trial, aio: &Trial, is_block_device: bool) -> Choice {
    let start = Instant::now();
    let mut all = Vec::new();
    let mut figures = String::from("a trial");
    for load in [SMALL, LARGE] {
        let times = match times(io_uring, aio, load, start) {
            Ok(Some(times)) => times,
            Ok(None) => break,
            Err(choice) => return choice,
        };
        figures += &format!(
            "{} of {} reads of {} KiB took {} us with io_uring and {} us with aio",
            if all.is_empty() { "" } else { ", one" },
            load.reads,
            load.bytes >> 10,
            times.io_uring.as_micros(),
            times.aio.as_micros()
        );
        all.push(times);
    }
    let needs_threads = kernel_threads_serve_this_thread();
    let threads = if needs_threads { "needed kernel threads" } else { "needed no kernel threads" };
    if is_aio_worth_it(&all, needs_threads && is_block_device) {
        let why = format!("{figures}; io_uring {threads} to wait for the disk");
        Choice::new(EngineKind::Aio, why)
    } else if needs_threads && is_aio_worth_it(&all, true) {
        let why = format!(
            "{figures}; the gain of aio is too small, because its submits wait for the file system"
        );
        Choice::new(EngineKind::IoUring, why)
    } else {
        Choice::new(EngineKind::IoUring, format!("{figures}; io_uring {threads}"))
    }
}

/// Returns true if Linux AIO is enough faster for a disk to get it: in the geometric mean of all
/// loads. `any_gain_counts`: any advantage is enough.
fn is_aio_worth_it(all: &[RoundTimes], any_gain_counts: bool) -> bool {
    let percent = if any_gain_counts { 100 } else { OTHERWISE_PERCENT };
    let ratio = |times: &RoundTimes| times.aio.as_secs_f64() / times.io_uring.as_secs_f64();
    let product: f64 = all.iter().map(ratio).product();
    !all.is_empty() && product < (f64::from(percent) / 100.0).powf(all.len() as f64)
}

/// Makes the choice after a failed trial, which counts against its engine. If both failed, the disk
/// is at fault.
fn choice_after_failure(io_uring: Option<Error>, aio: Option<Error>) -> Choice {
    let why = |engine, error| format!("the trial with {engine} failed: {error}");
    let choice = match (io_uring, aio) {
        (Some(error), None) => Choice::new(EngineKind::Aio, why(EngineKind::IoUring, error)),
        (_, Some(error)) => Choice::new(EngineKind::IoUring, why(EngineKind::Aio, error)),
        (None, None) => unreachable!("one of the trials has failed"),
    };
    Choice { has_failed: true, ..choice }
}

/// Returns true if io_uring has started kernel threads for submits of this thread. Their names
/// contain the number of their owner, and they stay for some seconds.
fn kernel_threads_serve_this_thread() -> bool {
    let own = format!("iou-wrk-{}", rustix::thread::gettid().as_raw_nonzero());
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return false };
    tasks.flatten().any(|task| {
        std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim_end() == own)
    })
}

/// A loop of the calling thread with the disk on it.
struct Trial {
    thread: IoThread,
    disk: Disk,
}

impl Trial {
    fn new(engine: EngineKind, source: &DiskSource) -> Result<Self, Error> {
        // A part of the room is kept for other disks.
        let config = IoThreadConfig {
            engine: engine.into(),
            depth: 4 * SMALL.at_once,
            ..IoThreadConfig::default()
        };
        let thread = IoThread::new(&config)?;
        let disk = source.for_probe()?.attach(thread.io());
        Ok(Self { thread, disk })
    }

    /// Measures the time of a round of reads.
    fn round(&self, load: Load, round: usize) -> Result<Duration, Error> {
        let read = |number| {
            let (offset, bytes) = place(&self.disk, load, round, number);
            Box::pin(self.disk.read(offset, Buffers::aligned(bytes, 4096)))
        };
        let start = Instant::now();
        let mut reads: Vec<_> = (0..load.at_once).map(read).collect();
        let mut started = load.at_once;
        let mut result = Ok(());
        let all = poll_fn(|cx| {
            reads.retain_mut(|this| {
                while let Poll::Ready(outcome) = this.as_mut().poll(cx) {
                    result =
                        std::mem::replace(&mut result, Ok(())).and(outcome.map_err(Into::into));
                    if started == load.reads || result.is_err() {
                        return false;
                    }
                    *this = read(started);
                    started += 1;
                }
                true
            });
            if reads.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        });
        self.thread.block_on(all)?;
        result.map_err(|error| Error::System { action: "read from the disk in a trial", error })?;
        Ok(start.elapsed())
    }
}

/// The offset and length in bytes of read `number` of a round. Reads are spread over the disk, at
/// the same places for each engine.
fn place(disk: &Disk, load: Load, round: usize, number: u32) -> (u64, usize) {
    let info = disk.info();
    let bytes = u64::from(info.logical_block_bytes.max(load.bytes)).min(info.size_bytes);
    let places = (info.size_bytes / bytes).max(1);
    let index = (round as u64 * u64::from(load.reads) + u64::from(number))
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        >> 16;
    let bytes = bytes / u64::from(info.logical_block_bytes) * u64::from(info.logical_block_bytes);
    (index % places * bytes, fits(bytes, "the length of a read"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::DiskOptions;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_file_gets_an_engine_that_works() {
        // In the source folder, whose file system has direct I/O as a rule.
        let file = tempfile::NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
        std::fs::write(file.path(), vec![7; 1 << 20]).unwrap();
        let options = DiskOptions { direct: true, ..DiskOptions::default() };
        let source = match DiskSource::file(file.path(), &options) {
            Err(error) => {
                eprintln!("skipped: {error}");
                return;
            }
            Ok(source) => source,
        };
        let choice = best_engine(&source);
        assert!(choice.why.contains("a trial of 256 reads of 4 KiB took"), "{choice:?}");
        assert_ne!(choice.engine, EngineKind::Threads, "{choice:?}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn files_of_one_file_system_are_alike_if_they_are_used_alike() {
        let of = |file: &tempfile::NamedTempFile, direct, block| {
            let logical_block_bytes = Some(block);
            let options = DiskOptions { direct, logical_block_bytes, ..DiskOptions::default() };
            TrialKey::from_source(&DiskSource::file(file.path(), &options).unwrap())
        };
        let new = || {
            let file = tempfile::NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
            file.as_file().set_len(1 << 20).unwrap();
            file
        };
        let (one, other) = (new(), new());
        let is_like = |a: Option<TrialKey>, b: Option<TrialKey>| a.unwrap().is_like(&b.unwrap());
        assert!(is_like(of(&one, true, 512), of(&other, true, 512)));
        assert!(!is_like(of(&one, true, 512), of(&other, false, 512)));
        assert!(!is_like(of(&one, false, 4096), of(&other, false, 8192)));
        std::fs::write(other.path(), vec![7; 1 << 20]).unwrap();
        other.as_file().sync_all().unwrap();
        let allocated = |file| of(file, false, 512).unwrap().allocated();
        assert!(allocated(&other) > allocated(&one));
        let null = DiskSource::null(4096, &DiskOptions::default()).unwrap();
        assert!(TrialKey::from_source(&null).is_none());
    }

    #[test]
    fn an_engine_whose_trial_failed_is_not_chosen() {
        let error = || Some(Error::Options("it does not work".into()));
        assert_eq!(choice_after_failure(error(), None).engine, EngineKind::Aio);
        assert_eq!(choice_after_failure(None, error()).engine, EngineKind::IoUring);
        assert_eq!(choice_after_failure(error(), error()).engine, EngineKind::IoUring);
    }

    #[test]
    fn linux_aio_must_win_by_more_where_its_submits_may_wait() {
        let ms = Duration::from_millis;
        let is_worth_it = |small, large, any| {
            let times = |aio| RoundTimes { io_uring: ms(500), aio: ms(aio) };
            is_aio_worth_it(&[times(small), times(large)], any)
        };
        assert!(is_worth_it(499, 500, true) && is_worth_it(500, 499, true));
        assert!(!is_worth_it(500, 500, true));
        assert!(!is_worth_it(400, 400, false));
        assert!(is_worth_it(300, 300, false));
        // Large reads count as much as small ones.
        assert!(is_worth_it(400, 250, false) && is_worth_it(520, 400, true));
        assert!(!is_worth_it(400, 500, false) && !is_worth_it(450, 600, true));
        assert!(!is_aio_worth_it(&[], true), "nothing was tried");
    }

    #[test]
    fn a_fallback_suits_the_disk() {
        let null = |direct| {
            let options = DiskOptions { direct, ..DiskOptions::default() };
            DiskSource::null(4096, &options).unwrap()
        };
        let of = |best, direct| fallbacks(best, &null(direct)).collect::<Vec<_>>();
        assert_eq!(of(EngineKind::IoUring, true), [EngineKind::Aio, EngineKind::Threads]);
        assert_eq!(of(EngineKind::IoUring, false), [EngineKind::Threads]);
        assert_eq!(of(EngineKind::Aio, true), [EngineKind::IoUring, EngineKind::Threads]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn the_places_of_a_trial_lie_on_the_disk() {
        for size in [512, 4096, 4608, 1 << 20] {
            let source = DiskSource::null(size, &DiskOptions::default()).unwrap();
            let config = IoThreadConfig::default();
            let disk = source.attach(IoThread::new(&config).unwrap().io());
            for (load, number) in [(SMALL, 3), (LARGE, 3), (SMALL, 255), (LARGE, 15)] {
                let (offset, bytes) = place(&disk, load, 3, number);
                assert!(bytes > 0 && offset + bytes as u64 <= size, "{offset} {bytes} {size}");
                assert_eq!(offset % 512, 0);
            }
        }
    }
}
