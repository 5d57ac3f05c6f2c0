//! A write lock that is held only while requests may come, so that their source can move to another
//! process.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{Advice, fadvise, fdatasync};
use rustix::io::Errno;

use super::lock::{Conflict, check_locks, in_use, try_lock, unlock};
use crate::error::Error;
use crate::executor::Lock;
use crate::file::claim::Claim;
use crate::op::{OpKind, OpenFile};

/// The longest wait for the lock. The previous process releases it before requests come here, so
/// there is a wait only after a kill or a mistake.
const LIMIT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(10);

/// The write lock of a file or a block device that was opened without a lock. Its users follow one
/// another, each with a higher number.
#[derive(Debug)]
pub struct LateLock {
    file: Arc<OpenFile>,
    users: Lock<Users>,
}

#[derive(Debug, Default)]
struct Users {
    /// The user for whom the file is locked, with the claim of this lock.
    holder: Option<(u64, Claim)>,
    /// The highest number of a user that needs the lock no more.
    ended: u64,
}

impl LateLock {
    pub(crate) fn new(file: Arc<OpenFile>) -> Self {
        Self { file, users: Lock::default() }
    }

    /// Checks that the file can be locked. Locks nothing.
    ///
    /// # Errors
    ///
    /// If its file system has no locks.
    pub fn check(&self) -> Result<(), Error> {
        check_locks(&self.file).map_err(|error| self.unusable(&without_locks(&error)))
    }

    fn unusable(&self, error: &io::Error) -> Error {
        let reason = format!("it cannot be locked: {error}");
        Error::Unusable { path: self.file.path().to_owned(), reason }
    }

    /// Takes the lock for a user, and drops the pages of the file from the page cache: another host
    /// may have written since they were read. Waits ten seconds at most for another user of the
    /// file to release it.
    ///
    /// # Errors
    ///
    /// If the file stays locked, its pages cannot be dropped, or the user has
    /// [released](Self::release) the lock already.
    pub fn take(&self, user: u64) -> Result<(), Error> {
        let (path, end) = (self.file.path(), Instant::now() + LIMIT);
        loop {
            let mut users = self.users.lock();
            if users.ended >= user {
                let reason = "the front-end left before the disk was locked".to_owned();
                return Err(Error::Unusable { path: path.to_owned(), reason });
            }
            let conflict = match self.try_take(users.holder.take()) {
                Ok(Ok(claim)) => {
                    users.holder = Some((user, claim));
                    return Ok(());
                }
                Ok(Err(conflict)) => conflict,
                Err(error) => return Err(self.unusable(&error)),
            };
            drop(users);
            if Instant::now() >= end {
                return Err(in_use(path, &conflict));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Locks the file, which an earlier user of this lock may have locked.
    fn try_take(&self, earlier: Option<(u64, Claim)>) -> io::Result<Result<Claim, Conflict>> {
        if let Some((_, claim)) = earlier {
            return Ok(Ok(claim));
        }
        // Locks of one open file, which two disks may have, are not in each other's way.
        let Some(claim) = Claim::new(&*self.file, true)? else { return Ok(Err(Conflict::Locked)) };
        let locked = try_lock(&self.file, false).map_err(|error| without_locks(&error))?;
        if let Err(conflict) = locked {
            return Ok(Err(conflict));
        }
        if let Err(errno) = fadvise(&*self.file, 0, None, Advice::DontNeed) {
            unlock(&self.file, false);
            return Err(errno.into());
        }
        Ok(Ok(claim))
    }

    /// Ends the use of a user. If the file is locked for that user, data that is still in caches is
    /// written, for the next one may be on another machine. Then the lock is released. It stays if
    /// data may be lost: the next process would report a flush of that data as a success.
    pub fn release(&self, user: u64) {
        let is_holder = |users: &Users| users.holder.as_ref().is_some_and(|(by, _)| *by == user);
        let mut users = self.users.lock();
        users.ended = users.ended.max(user);
        if !is_holder(&users) {
            return;
        }
        // The storage may be slow. A later user may come meanwhile.
        drop(users);
        if let Err(error) = self.sync() {
            let path = self.file.path().display();
            tracing::error!(
                "{path}: the lock stays, because written data may be lost: {error}; do not \
                 continue on another host; repair the storage and start again"
            );
            return;
        }
        let mut users = self.users.lock();
        if is_holder(&users) {
            unlock(&self.file, false);
            users.holder = None;
        }
    }

    /// Writes the caches. Fails, too, if data was lost before.
    fn sync(&self) -> io::Result<()> {
        let loss = self.file.loss();
        let tracked = loss.begin(OpKind::Flush);
        let synced = fdatasync(self.file.as_fd());
        let errno = synced.map_or_else(Errno::raw_os_error, |()| 0);
        loss.end_op(tracked, OpKind::Flush, errno, Instant::now());
        synced?;
        loss.check()
    }
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
    use std::io::IoSliceMut;
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    use rustix::fs::{Mode, OFlags};
    use rustix::io::{ReadWriteFlags, preadv2};

    use super::*;
    use crate::disk::{DiskOptions, DiskSource};

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
            source.release(1);
            taken.join().unwrap().unwrap();
        });
        assert!(!is_free(disk.path()), "the target has it");
        source.release(1);
        target.release(1);
        assert!(is_free(disk.path()));
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn the_end_of_an_earlier_user_changes_nothing() {
        let disk = tempfile::NamedTempFile::new().unwrap();
        disk.as_file().set_len(1 << 20).unwrap();
        let lock = late(disk.path());
        lock.take(1).unwrap();
        lock.take(2).unwrap();
        lock.release(1);
        assert!(!is_free(disk.path()));
        lock.release(2);
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
        let loss = lock.file.loss();
        let tracked = loss.begin(OpKind::Flush);
        loss.end_op(tracked, OpKind::Flush, libc::EIO, Instant::now());
        lock.release(1);
        assert!(!is_free(disk.path()), "the next user would flush without an error");
        lock.take(2).unwrap();
        lock.release(2);
        assert!(!is_free(disk.path()));
    }

    /// The kernel refuses a read lock on a file that is open for writing alone, as some file
    /// systems refuse all locks.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_file_that_cannot_be_locked_has_no_user() {
        let disk = tempfile::NamedTempFile::new().unwrap();
        disk.as_file().set_len(1 << 20).unwrap();
        let written = File::options().write(true).open(disk.path()).unwrap();
        let lock = LateLock::new(Arc::new(OpenFile::new(written, disk.path(), false)));
        let error = lock.take(1).unwrap_err().to_string();
        assert!(error.contains("cannot be locked") && error.contains("--lock off"), "{error}");
        assert!(is_free(disk.path()), "a part of the locks stays behind");
        let file = rustix::fs::open(disk.path(), OFlags::PATH, Mode::empty()).unwrap();
        let lock = LateLock::new(Arc::new(OpenFile::new(file.into(), disk.path(), false)));
        let error = lock.check().unwrap_err().to_string();
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
        let second = LateLock::new(Arc::clone(&first.file));
        first.take(1).unwrap();
        assert!(matches!(second.try_take(None), Ok(Err(Conflict::Locked))));
        first.release(1);
        second.take(3).unwrap();
        second.release(3);
    }

    /// Another host may have written while it had the lock.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn pages_that_were_read_before_the_lock_are_dropped() {
        const TMPFS: i64 = 0x0102_1994;
        let disk = tempfile::NamedTempFile::new().unwrap();
        if rustix::fs::fstatfs(disk.as_file()).unwrap().f_type == TMPFS {
            return;
        }
        disk.as_file().write_all_at(&[7; 4096], 0).unwrap();
        fdatasync(disk.as_file()).unwrap();
        let is_cached = || {
            let mut page = [0; 4096];
            let pages = &mut [IoSliceMut::new(&mut page)];
            preadv2(disk.as_file(), pages, 0, ReadWriteFlags::NOWAIT).is_ok()
        };
        assert!(is_cached());
        late(disk.path()).take(1).unwrap();
        assert!(!is_cached());
    }
}
