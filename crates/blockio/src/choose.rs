//! Which engine is the best for a disk: found out by a trial.

use std::future::{Future, poll_fn};
use std::task::Poll;
use std::time::{Duration, Instant};

use crate::config::{EngineKind, IoThreadConfig};
use crate::disk::{Disk, DiskSource};
use crate::error::Error;
use crate::io_thread::IoThread;
use iomem::{Buffers, fits};

/// Reads in a round of the trial, and how many of them are in flight.
const READS: u32 = 256;
const IN_FLIGHT: u32 = 32;
/// Rounds for each engine; the fastest one counts, which is the least disturbed.
const ROUNDS: usize = 6;
/// For a file on a file system Linux AIO must take less than this share of the time of io_uring in
/// percent: what it wins is lost with the first submit that waits for the file system.
const OF_FILE_PERCENT: u32 = 67;
/// A slow disk gets fewer rounds: its engine does not matter anyway.
const TRIAL_MAX: Duration = Duration::from_millis(100);

/// An engine, and why it is the best.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The engine.
    pub engine: EngineKind,
    /// One line without a full stop, for a log.
    pub why: String,
    /// A trial has failed, which may be for what this disk alone has.
    pub has_failed: bool,
}

impl Choice {
    fn new(engine: EngineKind, why: impl Into<String>) -> Self {
        Self { engine, why: why.into(), has_failed: false }
    }
}

/// What engines do better or worse for: disks that agree in it have the same best engine, so that
/// one trial is enough for all of them. It should be that of the one with the most data, for the
/// file system alone answers reads of what was never written.
#[derive(Debug, Clone)]
pub struct Alike {
    /// The block device, or that of the file system.
    device: u64,
    is_block_device: bool,
    direct: bool,
    /// What a read of the trial is made of.
    block_bytes: u32,
    /// How much of it was written, in units of 512 bytes.
    allocated: i64,
}

impl Alike {
    /// Of a disk. `None`: it is like no other, or the kernel does not tell.
    #[must_use]
    pub fn of(source: &DiskSource) -> Option<Self> {
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

    /// Whether a trial of one disk is enough for both.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        let of = |this: &Self| (this.device, this.is_block_device, this.direct, this.block_bytes);
        of(self) == of(other)
    }

    /// How much of the disk was written, in units of 512 bytes; 0 for a block device.
    #[must_use]
    pub fn allocated(&self) -> i64 {
        self.allocated
    }
}

/// Tries the engines that the kernel offers on `source`, with some thousand reads of 4 KiB, and
/// names the best. It takes a tenth of a second at most, unless a single read takes longer.
///
/// io_uring is the best where it needs no kernel threads. A disk whose kernel driver cannot take a
/// request without waiting is served by such threads, one hand-over for each read; then Linux AIO
/// has it if it was faster, and a file on a file system if it was faster by half: Linux AIO waits
/// in the submit while such a file is frozen or its place is looked up, and every disk of the
/// IoThread with it. (The time alone says little: with others on the same CPUs, engines behave
/// differently from a trial on an idle machine.)
#[must_use]
pub fn best_engine(source: &DiskSource) -> Choice {
    if !source.has_engine() {
        return Choice::new(EngineKind::Threads, "the disk has no file, and needs no engine");
    }
    let io_uring = Trial::new(EngineKind::IoUring, source);
    if !source.info().direct {
        return match io_uring {
            Ok(_) => Choice::new(EngineKind::IoUring, "it is asynchronous with the page cache too"),
            Err(error) => Choice::new(
                EngineKind::Threads,
                format!("{error}; and Linux AIO would wait for the disk with the page cache"),
            ),
        };
    }
    match (io_uring, Trial::new(EngineKind::Aio, source)) {
        (Ok(io_uring), Ok(aio)) => faster(io_uring, aio, source.is_block_device()),
        (Ok(_), Err(error)) => Choice::new(EngineKind::IoUring, error.to_string()),
        (Err(error), Ok(_)) => Choice::new(EngineKind::Aio, error.to_string()),
        (Err(first), Err(second)) => {
            Choice::new(EngineKind::Threads, format!("{first}; and {second}"))
        }
    }
}

/// The engines to be used in place of `best` when it cannot be set up after all, the better first.
/// The last one always can.
pub fn fallbacks(best: EngineKind, source: &DiskSource) -> impl Iterator<Item = EngineKind> {
    // With the page cache, Linux AIO would wait for the disk.
    let aio = source.info().direct.then_some(EngineKind::Aio);
    let all = [Some(EngineKind::IoUring), aio, Some(EngineKind::Threads)];
    all.into_iter().flatten().filter(move |&engine| engine != best)
}

fn faster(io_uring: Trial, aio: Trial, is_block_device: bool) -> Choice {
    let (mut of_io_uring, mut of_aio) = (Duration::MAX, Duration::MAX);
    let start = Instant::now();
    for round in 0..ROUNDS {
        if start.elapsed() > TRIAL_MAX {
            break;
        }
        match (io_uring.round(round), aio.round(round)) {
            (Ok(first), Ok(second)) => {
                of_io_uring = of_io_uring.min(first);
                of_aio = of_aio.min(second);
            }
            (first, second) => return of_failed_trials(first.err(), second.err()),
        }
    }
    let figures = format!(
        "a trial of {READS} reads took {} us with io_uring and {} us with aio",
        of_io_uring.as_micros(),
        of_aio.as_micros()
    );
    if !kernel_threads_serve_this_thread() {
        Choice::new(EngineKind::IoUring, format!("{figures}; io_uring needed no kernel threads"))
    } else if is_aio_worth_it(of_io_uring, of_aio, is_block_device) {
        let why = format!("{figures}; io_uring needed kernel threads to wait for the disk");
        Choice::new(EngineKind::Aio, why)
    } else if of_aio < of_io_uring {
        let why = format!("{figures}; its submits wait for the file system, so that is too little");
        Choice::new(EngineKind::IoUring, why)
    } else {
        let why = format!("{figures}; io_uring was as fast although it needed kernel threads");
        Choice::new(EngineKind::IoUring, why)
    }
}

fn is_aio_worth_it(of_io_uring: Duration, of_aio: Duration, is_block_device: bool) -> bool {
    let percent = if is_block_device { 100 } else { OF_FILE_PERCENT };
    of_aio < of_io_uring.saturating_mul(percent) / 100
}

/// A trial that failed says something about its engine, or, when both failed, about the disk.
fn of_failed_trials(io_uring: Option<Error>, aio: Option<Error>) -> Choice {
    let why = |engine, error| format!("the trial with {engine} failed: {error}");
    let choice = match (io_uring, aio) {
        (Some(error), None) => Choice::new(EngineKind::Aio, why(EngineKind::IoUring, error)),
        (_, Some(error)) => Choice::new(EngineKind::IoUring, why(EngineKind::Aio, error)),
        (None, None) => unreachable!("one of the trials has failed"),
    };
    Choice { has_failed: true, ..choice }
}

/// Whether io_uring has started kernel threads for what this thread has submitted. They bear the
/// number of their owner in their names and stay for some seconds.
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
            depth: 4 * IN_FLIGHT,
            ..IoThreadConfig::default()
        };
        let thread = IoThread::new(&config)?;
        let disk = source.attach(thread.io());
        Ok(Self { thread, disk })
    }

    /// How long [`READS`] reads take.
    fn round(&self, round: usize) -> Result<Duration, Error> {
        let read = |number| {
            let (offset, bytes) = place(&self.disk, round, number);
            Box::pin(self.disk.read(offset, Buffers::aligned(bytes, 4096)))
        };
        let start = Instant::now();
        let mut reads: Vec<_> = (0..IN_FLIGHT).map(read).collect();
        let mut started = IN_FLIGHT;
        let mut result = Ok(());
        let all = poll_fn(|cx| {
            reads.retain_mut(|this| {
                while let Poll::Ready(outcome) = this.as_mut().poll(cx) {
                    result =
                        std::mem::replace(&mut result, Ok(())).and(outcome.map_err(Into::into));
                    if started == READS || result.is_err() {
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

/// Where read `number` of a round is, and how many bytes it has: spread over the disk, the same
/// places for each engine.
fn place(disk: &Disk, round: usize, number: u32) -> (u64, usize) {
    let info = disk.info();
    let bytes = u64::from(info.logical_block_bytes.max(4096)).min(info.size_bytes);
    let places = (info.size_bytes / bytes).max(1);
    let index = (round as u64 * u64::from(READS) + u64::from(number))
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
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![7; 1 << 20]).unwrap();
        let options = DiskOptions { direct: true, ..DiskOptions::default() };
        let Ok(source) = DiskSource::file(file.path(), &options) else {
            return; // The file system has no direct I/O.
        };
        let choice = best_engine(&source);
        assert!(choice.why.contains("a trial of"), "{choice:?}");
        assert_ne!(choice.engine, EngineKind::Threads, "{choice:?}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn files_of_one_file_system_are_alike_if_they_are_used_alike() {
        let of = |file: &tempfile::NamedTempFile, direct, block| {
            let logical_block_bytes = Some(block);
            let options = DiskOptions { direct, logical_block_bytes, ..DiskOptions::default() };
            Alike::of(&DiskSource::file(file.path(), &options).unwrap())
        };
        let new = || {
            let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
            file.as_file().set_len(1 << 20).unwrap();
            file
        };
        let (one, other) = (new(), new());
        let is_like = |a: Option<Alike>, b: Option<Alike>| a.unwrap().is_like(&b.unwrap());
        assert!(is_like(of(&one, true, 512), of(&other, true, 512)));
        assert!(!is_like(of(&one, true, 512), of(&other, false, 512)));
        assert!(!is_like(of(&one, false, 4096), of(&other, false, 8192)));
        std::fs::write(other.path(), vec![7; 1 << 20]).unwrap();
        other.as_file().sync_all().unwrap();
        let allocated = |file| of(file, false, 512).unwrap().allocated();
        assert!(allocated(&other) > allocated(&one));
        let null = DiskSource::null(4096, &DiskOptions::default()).unwrap();
        assert!(Alike::of(&null).is_none());
    }

    #[test]
    fn an_engine_whose_trial_failed_is_not_chosen() {
        let error = || Some(Error::Options("it does not work".into()));
        assert_eq!(of_failed_trials(error(), None).engine, EngineKind::Aio);
        assert_eq!(of_failed_trials(None, error()).engine, EngineKind::IoUring);
        assert_eq!(of_failed_trials(error(), error()).engine, EngineKind::IoUring);
    }

    #[test]
    fn linux_aio_must_win_by_more_where_its_submits_may_wait() {
        let ms = Duration::from_millis;
        assert!(is_aio_worth_it(ms(500), ms(499), true));
        assert!(!is_aio_worth_it(ms(500), ms(500), true));
        assert!(!is_aio_worth_it(ms(500), ms(400), false));
        assert!(is_aio_worth_it(ms(500), ms(300), false));
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
            for number in 0..READS {
                let (offset, bytes) = place(&disk, 3, number);
                assert!(bytes > 0 && offset + bytes as u64 <= size, "{offset} {bytes} {size}");
                assert_eq!(offset % 512, 0);
            }
        }
    }
}
