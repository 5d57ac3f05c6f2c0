//! An open file, with the knowledge about polled completions, blocking submits and lost data.

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::fd::AsFd;
use tracing::Span;

use crate::executor::sync::Lock;
use crate::file::claim::Claim;
use crate::file::device_queue::Device;
use crate::file::op_kind::{OpKind, errno_of};
use crate::file::write_loss::WriteLossTracker;

/// The time of an op's submission, and of its answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpTimes {
    pub(crate) submitted: Option<Instant>,
    pub(crate) now: Instant,
}

/// The state that all ops on one file share, on any IoThread.
#[derive(Debug)]
pub(crate) struct OpenFile {
    file: OwnedFd,
    /// For the log; empty if unknown.
    path: PathBuf,
    /// The span in which the file was opened, for its lines in the log.
    span: Span,
    /// The reason against polling for completions; unset while polling is allowed.
    not_polled: OnceLock<&'static str>,
    is_logged: AtomicBool,
    is_block_device: bool,
    /// The device of its requests, if it takes a bounded number of them and direct I/O leads there.
    device: Option<Arc<Device>>,
    /// True after a submit of Linux AIO has waited for the file, until that engine is tried again.
    blocks_submits: AtomicBool,
    waits: Lock<SubmitWaits>,
    loss: WriteLossTracker,
    /// The time since when the oldest late op is in the kernel; `None` if no late op is known.
    stalled_since: Lock<Option<Instant>>,
    /// Present for a file that another program has passed.
    claim: Option<Claim>,
}

/// Submits of Linux AIO that waited for a file.
#[derive(Debug, Default)]
struct SubmitWaits {
    times: u32,
    /// The time at which Linux AIO is tried again.
    until: Option<Instant>,
}

/// The time for which a file has pool threads after a submit has waited for it. It is bounded,
/// because a process that was stopped, or kept from running, looks the same from inside. Each
/// repetition multiplies it by this factor.
const POOL_TIME: Duration = Duration::from_secs(600);
const POOL_TIME_GROWS: u32 = 6;
const POOL_TIME_MAX: Duration = Duration::from_secs(30 * 24 * 3600);

impl OpenFile {
    /// Takes the file at `path`, opened with `O_DIRECT` if `direct`.
    pub(crate) fn new(file: File, path: &Path, direct: bool) -> Self {
        let not_polled = if !direct {
            Some("polling needs direct I/O, and the disk uses the page cache")
        } else if has_poll_queues(&file) == Some(false) {
            Some(
                "its device has no queues for polling; some drivers create them on request \
                 (nvme.poll_queues=N)",
            )
        } else {
            None
        };
        let place = OnceLock::new();
        if let Some(why) = not_polled {
            let _ = place.set(why);
        }
        let is_block_device =
            file.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device());
        let device = if direct { Device::for_file(&file) } else { None };
        Self {
            path: path.to_owned(),
            span: Span::current(),
            not_polled: place,
            is_block_device,
            device,
            loss: WriteLossTracker::new(!(direct && is_block_device)),
            ..Self::from(OwnedFd::from(file))
        }
    }

    /// Keeps a claim as long as the file is open.
    pub(crate) fn keep(&mut self, claim: Option<Claim>) {
        self.claim = claim;
    }

    /// The path of the file; empty if unknown.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `log`, whose lines are about the file, in the span in which the file was opened.
    #[cold]
    pub(crate) fn in_span(&self, log: impl FnOnce()) {
        self.span.in_scope(log);
    }

    pub(crate) fn is_block_device(&self) -> bool {
        self.is_block_device
    }

    pub(crate) fn device(&self) -> Option<&Arc<Device>> {
        self.device.as_ref()
    }

    /// Returns true if submits of Linux AIO have waited for it.
    #[inline]
    pub(crate) fn blocks_submits(&self) -> bool {
        self.blocks_submits.load(Ordering::Relaxed)
    }

    /// Keeps the file's ops away from Linux AIO for a time, on all IoThreads. Returns that time, or
    /// `None` if it was so already.
    #[cold]
    pub(crate) fn set_blocks_submits(&self, now: Instant) -> Option<Duration> {
        let mut waits = self.waits.lock();
        if self.blocks_submits() {
            return None;
        }
        let longer = POOL_TIME_GROWS.saturating_pow(waits.times);
        let time = POOL_TIME.saturating_mul(longer).min(POOL_TIME_MAX);
        waits.times += 1;
        waits.until = Some(now + time);
        self.blocks_submits.store(true, Ordering::Relaxed);
        Some(time)
    }

    /// Returns true if the file keeps its pool threads. When the time for them is over and no op is
    /// late, the next ops go to Linux AIO again.
    #[cold]
    pub(crate) fn still_blocks_submits(&self, now: Instant) -> bool {
        let waits = self.waits.lock();
        if waits.until.is_some_and(|until| now < until) || self.stalled_since().is_some() {
            return true;
        }
        self.blocks_submits.store(false, Ordering::Relaxed);
        false
    }

    /// The record of lost data.
    #[inline]
    pub(crate) fn loss(&self) -> &WriteLossTracker {
        &self.loss
    }

    /// Notes the kernel's answer to an op: `result` is bytes or a negative errno, `tracked` the
    /// number of [`WriteLossTracker::begin`].
    #[inline]
    pub(crate) fn record_answer(&self, kind: OpKind, tracked: u64, result: i64, times: OpTimes) {
        let is_lost = match kind {
            OpKind::Read | OpKind::FindExtent { .. } => false,
            OpKind::Flush | OpKind::Write { fua: true } => {
                let errno = if result < 0 { errno_of(result) } else { 0 };
                self.loss.end_op(tracked, kind, errno, times.now)
            }
            _ => result >= 0 && self.loss.note_write(times.submitted),
        };
        if is_lost {
            self.log_loss(kind);
        }
    }

    #[cold]
    fn log_loss(&self, kind: OpKind) {
        let Err(error) = self.loss.check() else { return };
        let what = if kind == OpKind::Flush { "flush" } else { "FUA write" };
        self.in_span(|| {
            tracing::error!(
                "{}: a {what} failed: {error}; written data may be lost, so all further flushes \
                 and FUA writes fail; check the disk, then restart this export",
                self.path.display(),
            );
        });
    }

    /// The time since when a late op is in the kernel, if there is one.
    pub(crate) fn stalled_since(&self) -> Option<Instant> {
        *self.stalled_since.lock()
    }

    pub(crate) fn set_stalled_since(&self, since: Option<Instant>) {
        *self.stalled_since.lock() = since;
    }

    /// Returns true if completions may be polled for, as far as is known.
    #[inline]
    pub(crate) fn may_be_polled(&self) -> bool {
        self.not_polled.get().is_none()
    }

    /// Ends polling for completions of this file, on all IoThreads.
    pub(crate) fn stop_polling(&self, why: &'static str) {
        // The first reason stays.
        let _ = self.not_polled.set(why);
        self.log_not_polled();
    }

    #[cfg(test)]
    pub(crate) fn on_device(file: OwnedFd, device: Option<Arc<Device>>) -> Self {
        Self { device, is_block_device: true, ..Self::from(file) }
    }

    #[cfg(test)]
    pub(crate) fn forget_polling(&mut self) {
        self.not_polled = OnceLock::new();
    }

    /// Logs once if completions are not polled for.
    pub(crate) fn log_not_polled(&self) {
        if let Some(why) = self.not_polled.get()
            && !self.is_logged.swap(true, Ordering::Relaxed)
        {
            self.in_span(|| {
                tracing::info!("{}: cannot poll for completions: {why}", self.path.display());
            });
        }
    }
}

impl From<OwnedFd> for OpenFile {
    fn from(file: OwnedFd) -> Self {
        let (not_polled, is_logged) = (OnceLock::new(), AtomicBool::new(false));
        Self {
            file,
            path: PathBuf::new(),
            span: Span::none(),
            not_polled,
            is_logged,
            is_block_device: false,
            device: None,
            blocks_submits: AtomicBool::new(false),
            waits: Lock::default(),
            loss: WriteLossTracker::new(true),
            stalled_since: Lock::default(),
            claim: None,
        }
    }
}

impl AsFd for OpenFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl AsRawFd for OpenFile {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// Returns true if the block device that a file is, or lies on, has queues to poll. Without queues,
/// newer kernels refuse polled requests, and older ones silently complete them by interrupts.
/// `None` if unknown.
fn has_poll_queues(file: &File) -> Option<bool> {
    let metadata = file.metadata().ok()?;
    let is_device = metadata.file_type().is_block_device();
    let device = if is_device { metadata.rdev() } else { metadata.dev() };
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let folder = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    // A partition has the queues of its disk, whose folder contains the partition's.
    let text = ["queue/io_poll", "../queue/io_poll"]
        .into_iter()
        .find_map(|name| std::fs::read_to_string(folder.join(name)).ok())?;
    Some(text.trim() != "0")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_file_without_polling_is_known_at_once_or_later() {
        let temp = tempfile::NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
        let open =
            |flags| File::options().read(true).custom_flags(flags).open(temp.path()).unwrap();
        assert!(!OpenFile::new(open(0), temp.path(), false).may_be_polled());
        let of_device = has_poll_queues(&open(0));
        let direct = OpenFile::new(open(libc::O_DIRECT), temp.path(), true);
        assert_eq!(direct.may_be_polled(), of_device != Some(false));
        direct.stop_polling("a test says so");
        assert!(!direct.may_be_polled());
    }

    #[test]
    fn a_file_that_blocked_is_tried_again_after_a_time_that_grows() {
        let file = OpenFile::from(OwnedFd::from(File::open("/dev/null").unwrap()));
        let mut now = Instant::now();
        let second = Duration::from_secs(1);
        for times in [1, 6, 36] {
            assert_eq!(file.set_blocks_submits(now), Some(times * POOL_TIME));
            assert_eq!(file.set_blocks_submits(now + second), None, "it is known");
            now += times * POOL_TIME;
            assert!(file.still_blocks_submits(now - second) && file.blocks_submits());
            file.set_stalled_since(Some(now));
            assert!(file.still_blocks_submits(now), "it is hanging just now");
            file.set_stalled_since(None);
            assert!(!file.still_blocks_submits(now) && !file.blocks_submits());
        }
        let longest = (0..40).filter_map(|_| {
            let time = file.set_blocks_submits(now);
            now += POOL_TIME_MAX;
            assert!(!file.still_blocks_submits(now));
            time
        });
        assert_eq!(longest.max(), Some(POOL_TIME_MAX));
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_file_system_without_a_device_says_nothing() {
        let temp = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        assert_eq!(has_poll_queues(temp.as_file()), None);
    }
}
