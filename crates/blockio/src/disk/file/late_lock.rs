//! A write lock that is held only while requests may come, so that their source can move to another
//! process.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::fdatasync;
use rustix::io::Errno;

use super::lock::{in_use, lock, unlock};
use crate::error::Error;
use crate::executor::Lock;
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
    /// The user for whom the file is locked.
    holder: Option<u64>,
    /// The highest number of a user that needs the lock no more.
    ended: u64,
}

impl LateLock {
    pub(crate) fn new(file: Arc<OpenFile>) -> Self {
        Self { file, users: Lock::default() }
    }

    /// Takes the lock for a user. Waits ten seconds at most for another program to release it.
    ///
    /// # Errors
    ///
    /// If another program keeps its lock, or the user has [released](Self::release) the lock
    /// already.
    pub fn take(&self, user: u64) -> Result<(), Error> {
        let (path, end) = (self.file.path(), Instant::now() + LIMIT);
        loop {
            let mut users = self.users.lock();
            if users.ended >= user {
                let reason = "its user has ended before it was locked".to_owned();
                return Err(Error::Unusable { path: path.to_owned(), reason });
            }
            let conflict = match lock(&self.file, path, false) {
                Ok(_) => {
                    users.holder = Some(user);
                    return Ok(());
                }
                Err(conflict) => conflict,
            };
            drop(users);
            if Instant::now() >= end {
                return Err(in_use(path, &conflict));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Ends the use of a user. If the file is locked for that user, data that is still in caches is
    /// written, for the next one may be on another machine. Then the lock is released. It stays if
    /// data may be lost: the next process would report a flush of that data as a success.
    pub fn release(&self, user: u64) {
        let mut users = self.users.lock();
        users.ended = users.ended.max(user);
        if users.holder != Some(user) {
            return;
        }
        if let Err(error) = self.sync() {
            let path = self.file.path().display();
            tracing::error!(
                "{path}: the lock stays, because written data may be lost: {error}; do not \
                 continue on another host; repair the storage and start again"
            );
            return;
        }
        unlock(&self.file, false);
        users.holder = None;
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

#[cfg(test)]
mod tests {
    use std::path::Path;

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
        assert!(error.contains("has ended"), "{error}");
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
}
