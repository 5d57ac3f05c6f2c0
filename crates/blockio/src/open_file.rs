//! An open file: whether completions of its reads and writes can be polled for, and whether data
//! that was written to it may be lost.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use rustix::fd::AsFd;

use crate::device::Device;
use crate::op::OpKind;

/// What all ops on one file share, on any IoThread.
#[derive(Debug)]
pub struct OpenFile {
    file: OwnedFd,
    /// For the log; empty when nobody has said.
    path: PathBuf,
    /// Why completions cannot be polled for; nothing as long as they may be.
    not_polled: OnceLock<&'static str>,
    is_told: AtomicBool,
    is_block_device: bool,
    /// What its requests go to, if that takes a bounded number of them and direct I/O leads there.
    device: Option<Arc<Device>>,
    /// A submit of Linux AIO has waited for it.
    blocks: AtomicBool,
    /// Writes go through the page cache.
    is_cached: bool,
    /// There were such that did not wait for stable storage.
    has_cached_writes: AtomicBool,
    /// The errno of the first flush or FUA write after which data may be lost; 0: none so far.
    lost: AtomicI32,
    /// Since when the oldest op is in the kernel that is late; none is, as far as is known.
    late_since: Mutex<Option<Instant>>,
}

impl OpenFile {
    /// A file that `path` led to, opened with `O_DIRECT` or not.
    pub(crate) fn new(file: File, path: &Path, direct: bool) -> Self {
        let not_polled = if !direct {
            Some("it goes through the page cache, and only direct I/O can be polled for")
        } else if has_poll_queues(&file) == Some(false) {
            Some(
                "its device has no queues for that, which some make when asked: nvme.poll_queues=N",
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
        let device = if direct { Device::of(&file) } else { None };
        Self {
            path: path.to_owned(),
            not_polled: place,
            is_block_device,
            device,
            is_cached: !direct,
            ..Self::from(OwnedFd::from(file))
        }
    }

    /// What led to it; empty when nobody has said.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn is_block_device(&self) -> bool {
        self.is_block_device
    }

    pub(crate) fn device(&self) -> Option<&Arc<Device>> {
        self.device.as_ref()
    }

    /// Whether submits of Linux AIO have waited for it.
    #[inline]
    pub(crate) fn blocks(&self) -> bool {
        self.blocks.load(Ordering::Relaxed)
    }

    /// From now on no IoThread gives its ops to Linux AIO. True: nobody knew that before.
    pub(crate) fn set_blocks(&self) -> bool {
        !self.blocks.swap(true, Ordering::Relaxed)
    }

    /// Fails once data that was written may be lost: the kernel reports that to one flush of an
    /// open file, holds the lost pages for clean, and answers later flushes with success. So from
    /// the first such report on, no flush and no FUA write of any IoThread may succeed.
    #[inline]
    pub(crate) fn check_not_lost(&self) -> io::Result<()> {
        match self.lost.load(Ordering::Acquire) {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Takes in that a write is about to be made that may be answered from the page cache.
    #[inline]
    pub(crate) fn note_write(&self) {
        if self.is_cached && !self.has_cached_writes.load(Ordering::Relaxed) {
            self.has_cached_writes.store(true, Ordering::Relaxed);
        }
    }

    /// Takes in that the kernel has answered an op of this kind with `errno`. It is called at the
    /// harvest, so what completed before has been noted before any task goes on.
    #[cold]
    pub(crate) fn op_failed(&self, kind: OpKind, errno: i32) {
        let may_be_lost = match kind {
            OpKind::Flush => !never_reached_the_file(errno),
            // Without room for its own range a write fails alone, and may succeed later. But where
            // earlier writes are only in the page cache, it may be told that these found none.
            OpKind::Write { fua: true } => match errno {
                libc::EFBIG => false,
                libc::ENOSPC | libc::EDQUOT => self.has_cached_writes.load(Ordering::Relaxed),
                _ => !never_reached_the_file(errno),
            },
            _ => false,
        };
        let first =
            || self.lost.compare_exchange(0, errno, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if may_be_lost && first() {
            tracing::error!(
                "{}: a {} failed: {}; data that was written may be lost, so every flush and FUA \
                 write fails from now on; check the disk, then stop this export and start it anew",
                self.path.display(),
                if kind == OpKind::Flush { "flush" } else { "FUA write" },
                io::Error::from_raw_os_error(errno),
            );
        }
    }

    /// As if it were opened anew, which is the way out of a failed flush.
    #[cfg(feature = "sim")]
    pub(crate) fn forget_loss(&self) {
        self.lost.store(0, Ordering::Release);
    }

    /// Since when an op is in the kernel that is late, if one is.
    pub(crate) fn late_since(&self) -> Option<Instant> {
        *self.late_since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_late_since(&self, since: Option<Instant>) {
        *self.late_since.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }

    /// Whether completions may be polled for, as far as is known.
    #[inline]
    pub(crate) fn may_be_polled(&self) -> bool {
        self.not_polled.get().is_none()
    }

    /// From now on completions are not polled for, on any IoThread.
    pub(crate) fn stop_polling(&self, why: &'static str) {
        // What was found out first holds.
        let _ = self.not_polled.set(why);
        self.tell();
    }

    #[cfg(test)]
    pub(crate) fn on_device(file: OwnedFd, device: Option<Arc<Device>>) -> Self {
        Self { device, is_block_device: true, ..Self::from(file) }
    }

    #[cfg(test)]
    pub(crate) fn forget_polling(&mut self) {
        self.not_polled = OnceLock::new();
    }

    /// Says once in the log that completions are not polled for, if so.
    pub(crate) fn tell(&self) {
        if let Some(why) = self.not_polled.get()
            && !self.is_told.swap(true, Ordering::Relaxed)
        {
            tracing::info!("{}: completions are not polled for: {why}", self.path.display());
        }
    }
}

impl From<OwnedFd> for OpenFile {
    fn from(file: OwnedFd) -> Self {
        let (not_polled, is_told) = (OnceLock::new(), AtomicBool::new(false));
        Self {
            file,
            path: PathBuf::new(),
            not_polled,
            is_told,
            is_block_device: false,
            device: None,
            blocks: AtomicBool::new(false),
            is_cached: false,
            has_cached_writes: AtomicBool::new(false),
            lost: AtomicI32::new(0),
            late_since: Mutex::default(),
        }
    }
}

/// Errors of ops that were refused or interrupted before the file saw them.
fn never_reached_the_file(errno: i32) -> bool {
    matches!(
        errno,
        libc::EINTR
            | libc::EAGAIN
            | libc::EINVAL
            | libc::EBADF
            | libc::EFAULT
            | libc::EOPNOTSUPP
            | libc::ENOSYS
            | libc::ECANCELED
    )
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

/// Whether the block device that a file is, or lies on, has queues to poll. Newer kernels refuse
/// polled requests where there are none, older ones complete them by interrupts without a word.
/// `None`: nobody says.
fn has_poll_queues(file: &File) -> Option<bool> {
    let metadata = file.metadata().ok()?;
    let is_device = metadata.file_type().is_block_device();
    let device = if is_device { metadata.rdev() } else { metadata.dev() };
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let folder = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    // A partition has the queues of its disk, in whose folder its own lies.
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
    fn what_cannot_be_polled_for_is_known_at_once_or_learnt() {
        let temp = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
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
    fn a_loss_is_remembered_and_what_is_none_is_not() {
        let (flush, fua) = (OpKind::Flush, OpKind::Write { fua: true });
        let null = || OpenFile::from(OwnedFd::from(File::open("/dev/null").unwrap()));
        let file = null();
        for (kind, errno) in [
            (flush, libc::EINTR),
            (flush, libc::EAGAIN),
            (flush, libc::EINVAL),
            (fua, libc::EOPNOTSUPP),
            (fua, libc::ENOSPC),
            (OpKind::Read, libc::EIO),
            (OpKind::Write { fua: false }, libc::EIO),
            (OpKind::DiscardBlocks { len: 512 }, libc::EIO),
        ] {
            file.op_failed(kind, errno);
            assert!(file.check_not_lost().is_ok(), "{kind:?} {errno}");
        }
        let cached = OpenFile { is_cached: true, ..null() };
        cached.op_failed(fua, libc::ENOSPC);
        cached.note_write();
        cached.op_failed(fua, libc::EFBIG);
        assert!(cached.check_not_lost().is_ok());
        cached.op_failed(fua, libc::ENOSPC);
        assert!(cached.check_not_lost().is_err(), "it may be told of another write");
        for (kind, errno) in [(flush, libc::EIO), (flush, libc::ENOSPC), (fua, libc::EIO)] {
            let file = null();
            file.op_failed(kind, errno);
            // The first is what is told.
            file.op_failed(flush, libc::EDQUOT);
            let error = file.check_not_lost().unwrap_err();
            assert_eq!(error.raw_os_error(), Some(errno), "{kind:?}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_file_system_without_a_device_says_nothing() {
        let temp = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        assert_eq!(has_poll_queues(temp.as_file()), None);
    }
}
