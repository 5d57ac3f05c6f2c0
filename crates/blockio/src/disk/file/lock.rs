//! Locks that keep other writers away from a disk, and their holders.
//!
//! They are compatible with QEMU's programs: byte locks of the open file description
//! (`F_OFD_SETLK`) on the image itself. Byte 100 + n says "I use permission n", byte 200 + n "I do
//! not share permission n"; n is 0 for reading, 1 for writing, 3 for resizing. A program takes read
//! locks on the bytes of its uses and its refusals to share. Only then does it check for locks of
//! other programs on the opposite bytes. So of two programs that come at once, at least one sees
//! the conflict.
//!
//! Far behind these, and behind all data, there is a byte for each user of the disk (see
//! [`DiskOptions::user`](crate::disk::DiskOptions::user)). It excludes only the same user.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use std::{fs, io};

use iomem::fits;

use crate::error::Error;

const READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;
/// The byte for the use of permission 0, and the byte for not sharing it.
const USED: i64 = 100;
const UNSHARED: i64 = 200;

/// The byte of user 0.
const USERS: i64 = 1 << 62;

/// The time for retries. The kernel may keep the file of a killed program open for a while
/// (io_uring does, for some 100 ms), and a device claimed.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(20);

/// A conflict with another user of a file.
#[derive(Debug)]
pub(crate) enum Conflict {
    /// A lock on the file.
    Locked,
    /// A block device that is mounted, or was opened for one program alone.
    Claimed,
    /// An open file of the same user.
    SameUser,
}

/// Runs `open` until it meets no conflict, for two seconds at most. Does not retry if `at_once`, or
/// if this very process is in the way. The same user is always another process.
pub(crate) fn retry_open<T>(
    path: &Path,
    at_once: bool,
    mut open: impl FnMut() -> Result<T, OpenError>,
) -> Result<T, Error> {
    let end = Instant::now() + PATIENCE;
    loop {
        let conflict = match open() {
            Ok(value) => return Ok(value),
            Err(OpenError::Failed(error)) => return Err(error),
            Err(OpenError::Conflict(conflict)) => conflict,
        };
        let is_own = match conflict {
            Conflict::Locked => is_this_process(path, true),
            Conflict::Claimed => is_this_process(path, false),
            Conflict::SameUser => false,
        };
        if Instant::now() >= end || is_own || at_once {
            return Err(in_use(path, &conflict));
        }
        std::thread::sleep(PAUSE);
    }
}

/// The failure of one attempt to open a file.
pub(crate) enum OpenError {
    Conflict(Conflict),
    Failed(Error),
}

pub(crate) fn in_use(path: &Path, conflict: &Conflict) -> Error {
    let (by, is_user_known) = match (conflict, holders(path, matches!(conflict, Conflict::Locked)))
    {
        // Further users may have the file open, too.
        (Conflict::SameUser, _) => (String::new(), false),
        (_, LockHolders::ThisProcess) => ("this daemon, for another export".to_owned(), true),
        (_, LockHolders::Programs(names)) => (names, true),
        (_, LockHolders::Unknown) => {
            let who = "a program that is not visible here, or operations of a killed program";
            (who.to_owned(), false)
        }
    };
    let reason = match conflict {
        Conflict::Locked => format!(
            "it is locked by {by}; end that use first, open the disk read-only in both, or use \
             --lock off if no other program writes to it"
        ),
        Conflict::Claimed => {
            format!("it is busy, mounted or used by another program ({by}); end that use first")
        }
        Conflict::SameUser => "operations of an earlier process of this user may still read from \
                               it into shared memory; they end when the disk answers"
            .to_owned(),
    };
    Error::InUse { path: path.to_owned(), reason, is_user_known }
}

/// Locks the byte of a user in `file`, which must be open for reading.
pub(crate) fn lock_for(file: &File, user: u64) -> Result<(), Conflict> {
    let byte = i64::try_from(user).ok().and_then(|user| USERS.checked_add(user));
    let byte = byte.expect("a user is a number of 62 bits");
    match set_read_lock(file, byte) {
        Ok(()) if is_locked(file, byte) => Err(Conflict::SameUser),
        Err(error) if is_conflict(&error) => Err(Conflict::SameUser),
        // Without locks, users cannot be told apart, as the documentation says.
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Returns true for the error of a byte that another program has locked exclusively.
fn is_conflict(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES))
}

/// The bytes that a program locks, and the bytes on which locks of other programs are in its way.
fn bytes(read_only: bool) -> [Vec<i64>; 2] {
    let (used, unshared): (&[i64], &[i64]) =
        if read_only { (&[READ], &[WRITE]) } else { (&[READ, WRITE, RESIZE], &[WRITE, RESIZE]) };
    [[USED, UNSHARED], [UNSHARED, USED]].map(|[of_used, of_unshared]| {
        let used = used.iter().map(|n| of_used + n);
        used.chain(unshared.iter().map(|n| of_unshared + n)).collect()
    })
}

/// Locks `file`, which must be open for reading. Returns false if its file system has no locks.
/// After a conflict it has no locks: a file that another program has opened stays open, and would
/// be taken for the holder of the lock.
pub(crate) fn lock(file: &impl AsRawFd, path: &Path, read_only: bool) -> Result<bool, Conflict> {
    let locked = try_lock(file, read_only).map(|locked| locked.map(|()| true));
    locked.unwrap_or_else(|error| {
        // Some network file systems have no locks; that alone does not make the file unusable.
        tracing::warn!(
            "{}: it cannot be locked: {error}; make sure that no other program writes to it",
            path.display()
        );
        Ok(false)
    })
}

/// Like [`lock`], with an error of the file system as an error.
pub(crate) fn try_lock(file: &impl AsRawFd, read_only: bool) -> io::Result<Result<(), Conflict>> {
    let [own, opposite] = bytes(read_only);
    let locked = lock_bytes(file, &own, &opposite);
    if !matches!(locked, Ok(Ok(()))) {
        unlock(file, read_only);
    }
    locked
}

/// Releases the locks of [`lock`].
pub(crate) fn unlock(file: &impl AsRawFd, read_only: bool) {
    let [own, _] = bytes(read_only);
    for byte in own {
        // Fails only if the file system has no locks.
        let _ = set_lock(file, libc::F_UNLCK, byte);
    }
}

fn lock_bytes(
    file: &impl AsRawFd,
    own: &[i64],
    opposite: &[i64],
) -> io::Result<Result<(), Conflict>> {
    for byte in own {
        match set_read_lock(file, *byte) {
            Ok(()) => {}
            Err(error) if is_conflict(&error) => return Ok(Err(Conflict::Locked)),
            Err(error) => return Err(error),
        }
    }
    let is_free = !opposite.iter().any(|byte| is_locked(file, *byte));
    Ok(if is_free { Ok(()) } else { Err(Conflict::Locked) })
}

/// Returns true if `file` is locked for writing, as another process was to lock it when it opened
/// it. Sets its locks again, which fails if the file system has none. Waits for programs that hold
/// locks for a moment while they try to lock the file.
pub(crate) fn is_still_locked(file: &File) -> bool {
    let [own, opposite] = bytes(false);
    if own.into_iter().any(|byte| set_read_lock(file, byte).is_err()) {
        return false;
    }
    let end = Instant::now() + PATIENCE;
    loop {
        if !opposite.iter().any(|byte| is_locked(file, *byte)) {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
}

/// Checks that the file system of `file` has locks.
pub(crate) fn check_locks(file: &impl AsRawFd) -> io::Result<()> {
    find_lock(file, UNSHARED + WRITE).map(drop)
}

fn byte_lock(kind: libc::c_int, byte: i64) -> libc::flock {
    libc::flock {
        l_type: fits(kind, "a kind of lock"),
        l_whence: 0,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    }
}

fn set_read_lock(file: &impl AsRawFd, byte: i64) -> io::Result<()> {
    set_lock(file, libc::F_RDLCK, byte)
}

fn set_lock(file: &impl AsRawFd, kind: libc::c_int, byte: i64) -> io::Result<()> {
    let lock = byte_lock(kind, byte);
    // SAFETY: the descriptor is open, and the kernel reads the structure only during the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Returns true if another open file has a lock on the byte.
fn is_locked(file: &impl AsRawFd, byte: i64) -> bool {
    find_lock(file, byte).is_ok_and(|found| found)
}

fn find_lock(file: &impl AsRawFd, byte: i64) -> io::Result<bool> {
    let mut lock = byte_lock(libc::F_WRLCK, byte);
    // SAFETY: the descriptor is open, and the kernel uses the structure only during the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(libc::c_int::from(lock.l_type) != libc::F_UNLCK),
    }
}

/// The programs that use a file.
pub(crate) enum LockHolders {
    ThisProcess,
    /// Programs with their process ids, or the use of a device by the kernel, as text.
    Programs(String),
    Unknown,
}

/// The most programs that are named.
const NAMED_MAX: usize = 3;

/// Returns true if this process has `path` open, and locked if `is_locked`.
pub(crate) fn is_this_process(path: &Path, is_locked: bool) -> bool {
    fs::canonicalize(path).is_ok_and(|path| has_open("self", &path, is_locked))
}

/// Finds the programs that have `path` open, and locked if `is_locked`, as far as this process may
/// see them.
pub(crate) fn holders(path: &Path, is_locked: bool) -> LockHolders {
    let Ok(path) = fs::canonicalize(path) else { return LockHolders::Unknown };
    if has_open("self", &path, is_locked) {
        return LockHolders::ThisProcess;
    }
    let mut names: Vec<String> = use_by_kernel(&path).into_iter().collect();
    names.extend(match FINDER.get() {
        Some(find) => find(&path, is_locked),
        None => find_holders(&path, is_locked),
    });
    names.truncate(NAMED_MAX);
    if names.is_empty() { LockHolders::Unknown } else { LockHolders::Programs(names.join(", ")) }
}

/// Finds the programs that have a file open, and locked if the second argument is true.
type Finder = Box<dyn Fn(&Path, bool) -> Vec<String> + Send + Sync>;

/// The finder of a process that must not inspect other processes itself.
static FINDER: OnceLock<Finder> = OnceLock::new();

/// Makes errors about files in use name the programs that `find` finds: a process in a sandbox
/// cannot inspect other processes, and asks one outside. The first call counts.
pub fn set_holder_finder(find: impl Fn(&Path, bool) -> Vec<String> + Send + Sync + 'static) {
    let _ = FINDER.set(Box::new(find));
}

/// Finds the programs that have the file at `path`, a canonical path, open, and locked if
/// `is_locked`, as far as this process may see them. Returns their names with their process ids.
pub fn find_holders(path: &Path, is_locked: bool) -> Vec<String> {
    let mut names = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(process) = name.to_str().filter(|name| name.parse::<u32>().is_ok()) else {
            continue;
        };
        if has_open(process, path, is_locked) {
            let program = fs::read_link(format!("/proc/{process}/exe")).unwrap_or_default();
            let program = program.file_name().unwrap_or_default().to_string_lossy();
            names.push(format!("{program} (process {process})"));
        }
    }
    names
}

/// The kernel's use of a block device: a mount visible here, or a device that it is a part of.
fn use_by_kernel(path: &Path) -> Option<String> {
    let data = fs::metadata(path).ok().filter(|data| data.file_type().is_block_device())?;
    let (major, minor) = (libc::major(data.rdev()), libc::minor(data.rdev()));
    let number = format!("{major}:{minor}");
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    if let Some(place) = mounted_on(&mounts, &number) {
        return Some(format!("mounted on {place}"));
    }
    let holders = fs::read_dir(format!("/sys/dev/block/{number}/holders"));
    let holder = holders.ok()?.flatten().next()?;
    Some(format!("a part of {}", holder.file_name().to_string_lossy()))
}

/// The mount point of the device with this number; see proc_pid_mountinfo(5).
fn mounted_on<'a>(mounts: &'a str, number: &str) -> Option<&'a str> {
    let mut mounts = mounts.lines().map(|line| line.split(' '));
    mounts.find_map(|mut fields| (fields.nth(2)? == number).then(|| fields.nth(1))?)
}

/// Returns true if a process has `path` open, and locked if `is_locked`. The links are read, not
/// followed: a file system that hangs cannot hold this up.
fn has_open(process: &str, path: &Path, is_locked: bool) -> bool {
    let folder = fs::read_dir(format!("/proc/{process}/fd"));
    folder.into_iter().flatten().flatten().any(|entry| {
        let is_path = fs::read_link(entry.path()).is_ok_and(|target| target == path);
        is_path && (!is_locked || has_lock(process, &entry.file_name().to_string_lossy()))
    })
}

/// Returns true if `/proc` shows a lock of this descriptor that keeps other programs away. Some
/// programs only read a file that another has locked.
fn has_lock(process: &str, descriptor: &str) -> bool {
    let info = fs::read_to_string(format!("/proc/{process}/fdinfo/{descriptor}"));
    info.is_ok_and(|info| {
        let mut locks = info.lines().filter(|line| line.starts_with("lock:"));
        locks.any(|lock| !is_of_user(lock))
    })
}

/// Returns true for a lock of [`lock_for`], which a disk without a lock has too. The last two
/// fields of the line are the first and the last byte of the lock.
fn is_of_user(lock: &str) -> bool {
    let first = lock.split_whitespace().rev().nth(1).and_then(|byte| byte.parse::<i64>().ok());
    first.is_some_and(|byte| byte >= USERS)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise a disk that a killed daemon has left in use is lost at the next start.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_file_that_could_not_be_locked_has_no_locks() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let open = || File::options().read(true).write(true).open(named.path()).unwrap();
        let (first, second) = (open(), open());
        let is_held = |file: &File| has_lock("self", &file.as_raw_fd().to_string());
        for (of_first, of_second) in [(false, false), (false, true), (true, false)] {
            lock(&first, named.path(), of_first).unwrap();
            assert!(lock(&second, named.path(), of_second).is_err());
            assert!(is_held(&first) && !is_held(&second), "{of_first} {of_second}");
            bytes(of_first)[0]
                .iter()
                .for_each(|byte| set_lock(&first, libc::F_UNLCK, *byte).unwrap());
        }
        assert!(lock(&second, named.path(), false).unwrap() && is_held(&second));
    }

    /// A caller may pass a file that it has never locked.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_file_that_is_checked_for_its_lock_has_it() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let open = || File::options().read(true).write(true).open(named.path()).unwrap();
        let (first, second) = (open(), open());
        assert!(is_still_locked(&first));
        assert!(matches!(lock(&second, named.path(), false), Err(Conflict::Locked)));
        assert!(matches!(lock(&second, named.path(), true), Err(Conflict::Locked)));
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_user_excludes_only_its_own_opens() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let open = || File::open(named.path()).unwrap();
        let (first, second) = (open(), open());
        let last = (1 << 62) - 1;
        for user in [0, 7, last] {
            lock_for(&first, user).unwrap();
        }
        lock(&first, named.path(), true).unwrap();
        lock(&second, named.path(), true).unwrap();
        lock_for(&second, 8).unwrap();
        for user in [0, 7, last] {
            assert!(matches!(lock_for(&second, user), Err(Conflict::SameUser)), "{user}");
        }
        drop(first);
        lock_for(&second, 7).unwrap();
    }

    /// Otherwise a daemon that waits for a lock takes itself for the holder.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn the_lock_of_a_user_is_no_lock_of_the_disk() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let file = File::options().read(true).write(true).open(named.path()).unwrap();
        let is_held = || has_lock("self", &file.as_raw_fd().to_string());
        lock_for(&file, 0).unwrap();
        assert!(!is_held());
        lock(&file, named.path(), false).unwrap();
        assert!(is_held());
        unlock(&file, false);
        assert!(!is_held());
    }

    #[test]
    fn a_disk_in_use_is_tried_once_on_request() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let mut tries = 0;
        let refused = retry_open(named.path(), true, || {
            tries += 1;
            Err::<(), _>(OpenError::Conflict(Conflict::SameUser))
        });
        assert!(matches!(refused, Err(Error::InUse { is_user_known: false, .. })), "{refused:?}");
        assert_eq!(tries, 1);
    }
}

#[cfg(test)]
mod holder_tests {
    use super::*;

    #[test]
    fn mounts_are_found_by_the_number_of_their_device() {
        let mounts = "22 1 254:0 / / rw - ext4 /dev/vda rw\n\
                      30 22 7:12 /sub /mnt rw,relatime shared:1 - xfs /dev/loop12 rw\n";
        assert_eq!(mounted_on(mounts, "7:12"), Some("/mnt"));
        assert_eq!(mounted_on(mounts, "7:1"), None);
    }
}
