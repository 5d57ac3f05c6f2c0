//! The lock belongs to an open file, so each replacement is locked before it gets the name. If a
//! file lost the name before it was locked, its owner starts again.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use blockio::file::{check_regular, open_regular};
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use rustix::io::Errno;

const MODE: u32 = 0o600;

/// The file at a path, if there is one. This owner then has it alone.
#[derive(Debug)]
pub(super) struct LockedFile {
    path: PathBuf,
    locked: Option<File>,
}

impl LockedFile {
    /// Locks the file at `path`, if there is one, and reads at most `bytes_max` + 1 bytes of it.
    ///
    /// # Errors
    ///
    /// If there is a file that cannot be read. `ErrorKind::ResourceBusy` if it has another owner.
    pub(super) fn take(path: PathBuf, bytes_max: u64) -> io::Result<(Self, Option<String>)> {
        loop {
            let file = match open(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Ok((Self { path, locked: None }, None));
                }
                opened => opened?,
            };
            if lock(&file, &path)? {
                let mut text = String::new();
                (&file).take(bytes_max + 1).read_to_string(&mut text)?;
                return Ok((Self { path, locked: Some(file) }, Some(text)));
            }
        }
    }

    /// Takes over the file of another process at `path`, if there is one. The lock belongs to the
    /// open file.
    pub(super) fn handed_over(path: PathBuf, locked: Option<File>) -> Self {
        Self { path, locked }
    }

    /// Leaves the file at its place to another owner.
    pub(super) fn release(&mut self) {
        self.locked = None;
    }

    /// The locked file, to be handed over.
    pub(super) fn locked(&self) -> Option<&File> {
        self.locked.as_ref()
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Replaces the content of the file with `text`, durably. Waits for the disk.
    ///
    /// # Errors
    ///
    /// If the file cannot be replaced: it then has its new or its old content. As for
    /// [`take`](Self::take) if another owner has made a file.
    pub(super) fn replace(&mut self, text: &str) -> io::Result<()> {
        let mut new = self.path.clone().into_os_string();
        new.push(".new");
        let new = PathBuf::from(new);
        let file = create(&new)?;
        if !lock(&file, &new)? {
            return Err(busy());
        }
        let written = write(&file, text).and_then(|()| self.rename(&new));
        if written.is_err() {
            // The caller gets the first error, not that of this cleanup.
            let _ = fs::remove_file(&new);
        }
        written?;
        self.locked = Some(file);
        self.sync_directory()
    }

    /// Removes the file durably, if this owner has one.
    ///
    /// # Errors
    ///
    /// Errors of the file system.
    pub(super) fn remove(&mut self) -> io::Result<()> {
        if self.locked.is_some() {
            match fs::remove_file(&self.path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => self.locked = None,
            }
        }
        self.sync_directory()
    }

    /// Moves the file at `new` into place, unless another owner has a file there.
    fn rename(&self, new: &Path) -> io::Result<()> {
        if self.locked.is_some() {
            return fs::rename(new, &self.path);
        }
        match renameat_with(CWD, new, CWD, &self.path, RenameFlags::NOREPLACE) {
            Err(Errno::EXIST) => Err(busy()),
            // Some file systems cannot do that; the lock on the new file must suffice.
            Err(Errno::INVAL | Errno::NOSYS) if !self.path.exists() => fs::rename(new, &self.path),
            renamed => Ok(renamed?),
        }
    }

    /// Makes the name of the file as durable as its content.
    fn sync_directory(&self) -> io::Result<()> {
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
    }
}

/// Creates a new file, in place of one that a crash left behind. A file that a stranger has put
/// there, such as another name of a file of ours, is never written to.
fn create(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(MODE);
    match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        created => return created,
    }
    // A special file of a stranger might never open.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let left = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    remove_left(&left, path)?;
    options.open(path)
}

/// Removes an opened file that a crash left behind at `path`. Another file may be there by now.
fn remove_left(left: &File, path: &Path) -> io::Result<()> {
    if lock(left, path)? { fs::remove_file(path) } else { Err(busy()) }
}

/// Opens for writing if allowed, because network file systems lock no other files.
fn open(path: &Path) -> io::Result<File> {
    // Opening may have an effect on a device: it starts a watchdog and rewinds a tape.
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        let reason = "it is not a regular file";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    }
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
    let file = match options.open(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return open_regular(path),
        opened => opened?,
    };
    check_regular(&file)?;
    Ok(file)
}

/// Locks an opened file. Returns false if the file has lost its name before it was locked.
fn lock(file: &File, path: &Path) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Err(busy()),
        // Some network file systems have no locks; that alone does not make the file unusable.
        Err(Errno::NOLCK | Errno::OPNOTSUPP | Errno::NOSYS | Errno::BADF) => {}
        locked => locked?,
    }
    has_name(file, path)
}

fn busy() -> io::Error {
    let text = "another program, or another disk of this daemon, uses the file";
    io::Error::new(io::ErrorKind::ResourceBusy, text)
}

/// True if the name leads to this file, and not to a replacement.
fn has_name(file: &File, path: &Path) -> io::Result<bool> {
    let own = file.metadata()?;
    match fs::symlink_metadata(path).and_then(|_| fs::metadata(path)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        found => found.map(|found| (found.dev(), found.ino()) == (own.dev(), own.ino())),
    }
}

fn write(mut file: &File, text: &str) -> io::Result<()> {
    file.set_permissions(Permissions::from_mode(MODE))?;
    file.set_len(0)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use ringhaul_kit::file_trace::trace_writes;

    use super::super::tests::when_free;
    use super::*;

    fn take(path: &Path) -> io::Result<(LockedFile, Option<String>)> {
        LockedFile::take(path.to_owned(), 100)
    }

    fn is_busy<T>(result: io::Result<T>) -> bool {
        result.is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
    }

    /// The file may be a stranger's.
    #[test]
    fn a_link_in_the_place_of_a_new_file_is_not_written_to() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let (secret, new) = (path("secret"), path("file.new"));
        let (mut own, _) = take(&path("file")).unwrap();
        fs::write(&secret, "of root").unwrap();
        fs::hard_link(&secret, &new).unwrap();
        own.replace("a").unwrap();
        assert_eq!(fs::read_to_string(&secret).unwrap(), "of root");
        assert_eq!(fs::read_to_string(path("file")).unwrap(), "a");
        std::os::unix::fs::symlink(&secret, &new).unwrap();
        assert!(own.replace("b").is_err());
        assert_eq!(fs::read_to_string(&secret).unwrap(), "of root");
        // A file that another process is about to use stays.
        fs::remove_file(&new).unwrap();
        let theirs = File::create(&new).unwrap();
        assert!(lock(&theirs, &new).unwrap());
        assert!(is_busy(own.replace("c")) && new.exists());
    }

    #[test]
    fn a_file_has_one_owner_from_its_first_content_to_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let (mut one, none) = take(&path).unwrap();
        let (mut other, _) = take(&path).unwrap();
        assert_eq!(none, None, "nobody has what is not there");
        for text in ["a", "b"] {
            one.replace(text).unwrap();
            assert!(is_busy(take(&path)) && is_busy(other.replace("c")));
            other.remove().unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        drop(one);
        let (mut next, text) = when_free(|| take(&path));
        assert_eq!(text.as_deref(), Some("b"));
        assert!(is_busy(take(&path)));
        next.remove().unwrap();
        other.replace("d").unwrap();
        assert!(is_busy(next.replace("e")) && is_busy(take(&path)));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    /// Its owner has replaced it after it was opened here.
    #[test]
    fn a_file_that_has_lost_its_name_is_not_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let [path, other] = ["file", "other"].map(|name| directory.path().join(name));
        for name in [&path, &other] {
            fs::write(name, name.to_str().unwrap()).unwrap();
        }
        let file = open(&path).unwrap();
        assert!(lock(&file, &path).unwrap());
        fs::rename(&other, &path).unwrap();
        assert!(!lock(&file, &path).unwrap());
        assert!(is_busy(remove_left(&file, &path)));
        assert_eq!(fs::read_to_string(&path).unwrap(), other.to_str().unwrap());
        fs::remove_file(&path).unwrap();
        assert!(!lock(&file, &path).unwrap());
        fs::write(&path, "").unwrap();
        remove_left(&open(&path).unwrap(), &path).unwrap();
        assert!(!path.exists());
    }

    /// From the beginning, and however a file was made.
    #[test]
    fn no_other_user_reads_or_writes_a_new_file() {
        let directory = tempfile::tempdir().unwrap();
        let [path, open] = ["file", "open"].map(|name| directory.path().join(name));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        for _ in 0..2 {
            // The second file takes the place of the first.
            drop(create(&path).unwrap());
            assert_eq!(mode(&path), MODE);
        }
        let file = File::create(&open).unwrap();
        file.set_permissions(Permissions::from_mode(0o666)).unwrap();
        write(&file, "text").unwrap();
        assert_eq!(mode(&open), MODE);
    }

    /// A loss of power leaves the old file or the new one.
    #[test]
    fn a_file_is_stable_before_it_has_its_name_and_the_name_before_the_answer() {
        let name = "access::persist::locked_file::tests::\
                    a_file_is_stable_before_it_has_its_name_and_the_name_before_the_answer";
        let traced = trace_writes(name, |folder| {
            let (mut own, _) = take(&folder.join("file")).unwrap();
            own.replace("a").unwrap();
            own.replace("b").unwrap();
            own.remove().unwrap();
        });
        let Some(calls) = traced.unwrap() else { return };
        let replaced = ["open file.new", "sync file.new", "rename file.new", "open .", "sync ."];
        let expected = [&replaced[..], &replaced, &["unlink file", "open .", "sync ."]].concat();
        assert_eq!(calls, expected);
    }
}
