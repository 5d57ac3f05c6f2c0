//! The right to write to a disk, held only while requests may come, so that their source can move
//! to another process.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::fs::{Advice, fadvise, fdatasync};
use rustix::io::Errno;

use super::file::lock::{Conflict, check_locks, in_use, try_lock, unlock};
use super::file::source::FileSource;
use super::source::DiskSource;
use crate::error::Error;
use crate::executor::{Lock, Turns};
use crate::file::claim::Claim;
use crate::op::{OpKind, OpenFile};

/// The usual longest wait for the lock. The previous process releases it before requests come here,
/// so there is a wait only after a kill or a mistake.
pub const LATE_LOCK_PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(10);

/// The right to write to a disk that was opened without a lock: the lock of its file, and the
/// content that its layers keep in memory. Its users follow one another, each with a higher number.
#[derive(Debug)]
pub struct LateLock {
    disk: DiskSource,
    patience: Duration,
    turns: Lock<Turns<HeldLock>>,
}

/// The lock of a disk that a user has.
#[derive(Debug)]
struct HeldLock {
    /// The claim of the lock. `None`: the disk is not in a local file.
    _claim: Option<Claim>,
    /// True if layers have read their content under this lock.
    is_ready: bool,
}

impl LateLock {
    pub(crate) fn new(disk: DiskSource) -> Self {
        Self { disk, patience: LATE_LOCK_PATIENCE, turns: Lock::default() }
    }

    /// Waits this long for another user of the file, instead of [`LATE_LOCK_PATIENCE`].
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Checks that the file can be locked. Locks nothing.
    ///
    /// # Errors
    ///
    /// If its file system has no locks.
    pub fn check(&self) -> Result<(), Error> {
        self.file().map_or(Ok(()), check_locks).map_err(|error| {
            self.unusable(&format!("it cannot be locked: {}", without_locks(&error)))
        })
    }

    /// Takes the lock for a user. Then drops the pages of the file from the page cache, has layers
    /// read their tables, and takes over a larger size: another process may have written since
    /// these were read. Waits for another user of the file to release it, for ten seconds at most
    /// unless [`with_patience`](Self::with_patience) says otherwise.
    ///
    /// # Errors
    ///
    /// If the disk stays locked, its content cannot be used, or the user has
    /// [released](Self::release) the lock already.
    pub fn take(&self, user: u64) -> Result<(), Error> {
        let end = Instant::now() + self.patience;
        loop {
            let mut turns = self.turns.lock();
            if turns.has_ended(user) {
                return Err(self.unusable("the front-end left before the disk was locked"));
            }
            let conflict = match turns.take().map_or_else(|| self.try_take(), |held| Ok(Ok(held))) {
                Ok(Ok(held)) => return self.prepare(user, held, &mut turns),
                Ok(Err(conflict)) => conflict,
                Err(error) => return Err(self.unusable(&format!("it cannot be locked: {error}"))),
            };
            drop(turns);
            if let Some(file) = self.file()
                && Instant::now() >= end
            {
                return Err(in_use(file.path(), &conflict));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Locks the file, for no user yet.
    fn try_take(&self) -> io::Result<Result<(u64, HeldLock), Conflict>> {
        let held = |claim| (0, HeldLock { _claim: claim, is_ready: false });
        let Some(source) = self.disk.local() else { return Ok(Ok(held(None))) };
        let file = &*source.file;
        // Locks of one open file, which two disks may have, are not in each other's way.
        let Some(claim) = Claim::new(file, true)? else { return Ok(Err(Conflict::Locked)) };
        let locked = try_lock(file, false).map_err(|error| without_locks(&error))?;
        if let Err(conflict) = locked {
            return Ok(Err(conflict));
        }
        if let Err(errno) = fadvise(file, 0, None, Advice::DontNeed) {
            unlock(file, false);
            return Err(errno.into());
        }
        source.set_exclusive(true);
        Ok(Ok(held(Some(claim))))
    }

    /// Has layers read their content for the user of a new lock. If that fails, the lock is
    /// released, but not a lock that a loss of data has kept from an earlier user.
    fn prepare(
        &self,
        user: u64,
        (earlier, held): (u64, HeldLock),
        turns: &mut Turns<HeldLock>,
    ) -> Result<(), Error> {
        if !held.is_ready {
            let begun = self.disk.hand_over().begin_use().and_then(|()| self.adopt_size());
            if let Err(error) = begun {
                // The log has the reason if it stays.
                let _ = self.end(earlier, held, turns);
                return Err(error);
            }
        }
        turns.begin(user.max(earlier), HeldLock { is_ready: true, ..held });
        Ok(())
    }

    /// Takes over a larger size, on which the first request may rely, and leaves its
    /// [announcement](DiskSource::announced_bytes) to the owner of the disk. Refuses a smaller
    /// size: the front-end knows the larger one.
    fn adopt_size(&self) -> Result<(), Error> {
        let info = self.disk.info();
        let known = info.size_bytes;
        let now = match self.disk.has_engine() {
            true => self.disk.probe_size()?,
            // A server announces its size. An image refuses a smaller one by itself.
            false => self.disk.covered_bytes()?,
        };
        if now < known {
            return Err(self.unusable(&smaller(now, known)));
        }
        let now = now - now % u64::from(info.logical_block_bytes);
        if now > known {
            self.disk.shared.set_announced(false);
            self.disk.adopt_size(now);
        }
        Ok(())
    }

    /// Ends the use of a user. If the disk is locked for that user, data and tables that are still
    /// in caches are written, for the next one may be on another machine. Then the lock is
    /// released. It stays if data may be lost: the next process would report a flush of that data
    /// as a success. A lock that has stayed after an earlier user is tried again.
    ///
    /// # Errors
    ///
    /// If data may be lost. The next process must not begin: the disk may have no lock that keeps
    /// it away.
    pub fn release(&self, user: u64) -> io::Result<()> {
        let mut turns = self.turns.lock();
        if let Some((user, held)) = turns.end(user) {
            self.end(user, held, &mut turns)?;
        }
        Ok(())
    }

    /// Ends a use, and releases the lock if no data is lost.
    fn end(&self, user: u64, held: HeldLock, turns: &mut Turns<HeldLock>) -> io::Result<()> {
        let ended = self.disk.hand_over().end_use();
        let Err(error) = ended.map_err(io::Error::other).and(self.sync()) else {
            self.unlock();
            return Ok(());
        };
        turns.begin(user, HeldLock { is_ready: false, ..held });
        let disk = self.disk.chain_text();
        let text = format!(
            "{disk}: the lock stays, because written data may be lost: {error}; do not continue on \
             another host; repair the storage and start again"
        );
        tracing::error!("{text}");
        Err(io::Error::other(text))
    }

    fn unlock(&self) {
        if let Some(source) = self.disk.local() {
            source.set_exclusive(false);
            unlock(&source.file, false);
        }
    }

    /// Writes the caches. Fails, too, if data was lost before.
    fn sync(&self) -> io::Result<()> {
        let Some(file) = self.file() else { return Ok(()) };
        let loss = file.loss();
        let tracked = loss.begin(OpKind::Flush);
        let synced = fdatasync(file.as_fd());
        let errno = synced.map_or_else(Errno::raw_os_error, |()| 0);
        loss.end_op(tracked, OpKind::Flush, errno, Instant::now());
        synced?;
        loss.check()
    }

    fn file(&self) -> Option<&OpenFile> {
        self.disk.local().map(|FileSource { file, .. }| &**file)
    }

    fn unusable(&self, reason: &str) -> Error {
        self.disk.refused("", reason)
    }
}

/// The reason to refuse a disk that has become smaller.
pub fn smaller(now: u64, known: u64) -> String {
    format!(
        "it has {now} bytes, and the front-end knows it with {known}; restore its size, or start \
         this daemon and the front-end again"
    )
}

/// Adds advice to the error of a file system that refuses locks.
fn without_locks(error: &io::Error) -> io::Error {
    io::Error::other(format!(
        "{error}; use a file system with byte locks, or --lock off if no other program writes to \
         the disk"
    ))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use std::sync::Arc;

    use rustix::fs::{Mode, OFlags};

    use super::*;
    use crate::disk::DiskOptions;
    use crate::disk::source::SourceKind;

    fn late(path: &Path) -> LateLock {
        let options = DiskOptions { no_lock: true, ..DiskOptions::default() };
        DiskSource::file(path, &options).unwrap().late_lock().unwrap()
    }

    fn is_free(path: &Path) -> bool {
        let options = DiskOptions { at_once: true, ..DiskOptions::default() };
        DiskSource::file(path, &options).is_ok()
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn one_user_after_the_other_has_the_file() {
        let disk = tempfile::NamedTempFile::new().unwrap();
        disk.as_file().set_len(1 << 20).unwrap();
        let [source, target] = [(); 2].map(|()| late(disk.path()));
        assert!(is_free(disk.path()), "an open file has no lock");
        source.take(1).unwrap();
        assert!(!is_free(disk.path()));
        std::thread::scope(|scope| {
            let taken = scope.spawn(|| target.take(1));
            source.release(1).unwrap();
            taken.join().unwrap().unwrap();
        });
        assert!(!is_free(disk.path()), "the target has it");
        source.release(1).unwrap();
        target.release(1).unwrap();
        assert!(is_free(disk.path()));
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn the_end_of_an_earlier_user_changes_nothing() {
        let disk = tempfile::NamedTempFile::new().unwrap();
        disk.as_file().set_len(1 << 20).unwrap();
        let lock = late(disk.path());
        lock.take(2).unwrap();
        lock.take(1).unwrap();
        lock.release(1).unwrap();
        assert!(!is_free(disk.path()));
        lock.release(2).unwrap();
        let error = lock.take(2).unwrap_err().to_string();
        assert!(error.contains("left before"), "{error}");
        assert!(is_free(disk.path()), "a late lock stays behind");
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_loss_of_data_keeps_the_lock() {
        let disk = tempfile::NamedTempFile::new().unwrap();
        disk.as_file().set_len(1 << 20).unwrap();
        let lock = late(disk.path());
        lock.take(1).unwrap();
        lose_data(&lock);
        let error = lock.release(1).unwrap_err().to_string();
        assert!(error.contains("written data may be lost"), "{error}");
        assert!(!is_free(disk.path()), "the next user would flush without an error");
        lock.take(2).unwrap();
        lock.release(2).unwrap_err();
        assert!(!is_free(disk.path()));
    }

    /// Another host would have the disk, and not its data.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_lock_that_a_loss_keeps_outlasts_a_user_who_is_refused() {
        for is_lost_before in [true, false] {
            let disk = tempfile::NamedTempFile::new().unwrap();
            disk.as_file().set_len(1 << 20).unwrap();
            let lock = late(disk.path());
            if is_lost_before {
                lock.take(1).unwrap();
            }
            lose_data(&lock);
            assert_eq!(lock.release(1).is_err(), is_lost_before);
            disk.as_file().set_len(1 << 19).unwrap();
            lock.take(2).unwrap_err();
            assert!(!is_free(disk.path()));
            lock.release(2).unwrap_err();
            assert!(!is_free(disk.path()));
        }
    }

    fn lose_data(lock: &LateLock) {
        let loss = lock.file().unwrap().loss();
        let tracked = loss.begin(OpKind::Flush);
        loss.end_op(tracked, OpKind::Flush, libc::EIO, Instant::now());
    }

    /// The kernel refuses a read lock on a file that is open for writing alone, as some file
    /// systems refuse all locks.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_file_that_cannot_be_locked_has_no_user() {
        let disk = tempfile::NamedTempFile::new().unwrap();
        disk.as_file().set_len(1 << 20).unwrap();
        let on = |file: File| {
            let mut source = late(disk.path()).disk;
            let SourceKind::File(opened) = &mut source.kind else { unreachable!("it is a file") };
            opened.file = Arc::new(OpenFile::new(file, disk.path(), false));
            LateLock::new(source)
        };
        let lock = on(File::options().write(true).open(disk.path()).unwrap());
        let error = lock.take(1).unwrap_err().to_string();
        assert!(error.contains("cannot be locked") && error.contains("--lock off"), "{error}");
        assert!(is_free(disk.path()), "a part of the locks stays behind");
        let file = rustix::fs::open(disk.path(), OFlags::PATH, Mode::empty()).unwrap();
        let error = on(file.into()).check().unwrap_err().to_string();
        assert!(error.contains("cannot be locked"), "{error}");
        late(disk.path()).check().unwrap();
    }

    /// The locks of one open file are not in each other's way.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn one_open_file_has_one_user_at_a_time() {
        let disk = tempfile::NamedTempFile::new().unwrap();
        disk.as_file().set_len(1 << 20).unwrap();
        let first = late(disk.path());
        let second = LateLock::new(first.disk.clone());
        first.take(1).unwrap();
        assert!(matches!(second.try_take(), Ok(Err(Conflict::Locked))));
        first.release(1).unwrap();
        second.take(3).unwrap();
        second.release(3).unwrap();
    }

    /// The front-end would read beyond the end.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_file_that_has_become_smaller_is_refused() {
        let disk = tempfile::NamedTempFile::new().unwrap();
        disk.as_file().set_len(1 << 20).unwrap();
        let lock = late(disk.path());
        disk.as_file().set_len(1 << 19).unwrap();
        let error = lock.take(1).unwrap_err().to_string();
        assert!(error.contains("524288 bytes") && error.contains("with 1048576"), "{error}");
        assert!(is_free(disk.path()), "a refused lock stays");
        disk.as_file().set_len(1 << 21).unwrap();
        lock.take(2).unwrap();
        assert!(lock.disk.is_exclusive());
        lock.release(2).unwrap();
        assert!(!lock.disk.is_exclusive() && is_free(disk.path()));
    }

    /// The first request may use the new space, and the owner must still announce it.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_larger_file_is_used_at_once_and_announced_later() {
        let disk = tempfile::NamedTempFile::new().unwrap();
        let sizes = |lock: &LateLock| (lock.disk.info().size_bytes, lock.disk.announced_bytes());
        disk.as_file().set_len(1 << 20).unwrap();
        let lock = late(disk.path());
        for (user, size) in [(1, 1 << 20), (2, 1 << 21), (3, 1 << 22)] {
            disk.as_file().set_len(size).unwrap();
            lock.take(user).unwrap();
            assert_eq!(sizes(&lock), (size, 1 << 20));
            lock.release(user).unwrap();
        }
        lock.disk.note_announcement();
        assert_eq!(sizes(&lock), (1 << 22, 1 << 22));
    }

    /// The bytes that this thread has read from disks, and not from the page cache.
    fn bytes_from_disks() -> u64 {
        let counters = std::fs::read_to_string("/proc/thread-self/io").unwrap_or_default();
        let bytes = counters.lines().find_map(|line| line.strip_prefix("read_bytes: "));
        bytes.map_or(0, |bytes| bytes.parse().unwrap())
    }

    /// Another host may have written while it had the lock.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn pages_that_were_read_before_the_lock_are_dropped() {
        let disk = tempfile::NamedTempFile::new().unwrap();
        disk.as_file().write_all_at(&[7; 4096], 0).unwrap();
        fdatasync(disk.as_file()).unwrap();
        // RWF_NOWAIT does not tell: it starts to read an absent page, and finds it if the disk is
        // faster than this thread.
        let is_cached = || {
            let before = bytes_from_disks();
            disk.as_file().read_exact_at(&mut [0; 4096], 0).unwrap();
            bytes_from_disks() == before
        };
        fadvise(disk.as_file(), 0, None, Advice::DontNeed).unwrap();
        if is_cached() {
            return; // The file system has no disk, or another thread reads it.
        }
        assert!(is_cached());
        late(disk.path()).take(1).unwrap();
        assert!(!is_cached());
    }
}
