//! The state file: read at a start, replaced with each change, and locked by its daemon.

use std::fs::{File, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

use super::changes::Changes;
use crate::process::folder_of;

/// The format that this version writes, and reads.
const FORMAT: u32 = 1;

/// The longest file, in bytes.
const BYTES_MAX: u64 = 64 << 20;

/// The longest wait for a lock: a process that was killed has it until its last thread has ended.
const KILLED_MAX: Duration = Duration::from_secs(2);

/// The pause between two tries to lock.
const LOOK: Duration = Duration::from_millis(20);

/// Rights that no other user may have.
const OTHERS_WRITE: u32 = 0o022;

/// A state file by its path.
pub(crate) struct StateFile {
    path: PathBuf,
}

/// The file that is there now, locked until this is dropped.
pub(crate) struct Locked(File);

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Written<C> {
    format: u32,
    /// The version of the program, for people.
    version: String,
    #[serde(flatten)]
    changes: C,
}

/// The field that decides the form of the rest.
#[derive(Deserialize)]
struct Format {
    format: u32,
}

impl StateFile {
    /// Opens the file at `path`, for this daemon alone. Waits for another daemon that has it
    /// locked, in case that was killed. The lock holds until the file is [written](Self::write).
    ///
    /// # Errors
    ///
    /// When another daemon has the file, or it cannot be read or understood.
    pub(crate) fn open(path: &Path) -> Result<(Self, Changes, Option<Locked>)> {
        let end = Instant::now() + KILLED_MAX;
        let advice = "choose another --state, or use --state none";
        loop {
            let Some(file) = open(path)? else {
                return Ok((Self { path: path.to_owned() }, Changes::default(), None));
            };
            match try_lock(&file, path) {
                Ok(true) => {
                    let changes = read(&file, path)?;
                    return Ok((Self { path: path.to_owned() }, changes, Some(Locked(file))));
                }
                Ok(false) => {}
                Err(Errno::WOULDBLOCK) if Instant::now() >= end => {
                    bail!("another daemon uses the state file {}; {advice}", path.display());
                }
                Err(Errno::WOULDBLOCK) => std::thread::sleep(LOOK),
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("cannot lock {}; {advice}", path.display()));
                }
            }
        }
    }

    /// Opens the file at `path`, which is still locked by the process that leaves it to this one.
    ///
    /// # Errors
    ///
    /// When it cannot be read or understood.
    pub(crate) fn take_over(path: &Path) -> Result<(Self, Changes)> {
        let file = open(path)?;
        let changes = file.map(|file| read(&file, path)).transpose()?;
        Ok((Self { path: path.to_owned() }, changes.unwrap_or_default()))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Replaces the file. The old one remains until the new one is on stable storage.
    ///
    /// # Errors
    ///
    /// When that fails. The old file remains.
    pub(crate) fn write(&self, changes: &Changes) -> Result<Locked> {
        let written =
            Written { format: FORMAT, version: env!("CARGO_PKG_VERSION").to_owned(), changes };
        let mut text = serde_json::to_vec_pretty(&written)?;
        text.push(b'\n');
        let path = self.path.display();
        self.replace(&text).with_context(|| {
            format!("cannot use the state file {path}; choose another --state, or use --state none")
        })
    }

    fn replace(&self, text: &[u8]) -> Result<Locked> {
        let mut new = self.path.as_os_str().to_owned();
        new.push(".new");
        let new = PathBuf::from(new);
        // A process that was killed may have left a new file.
        match std::fs::remove_file(&new) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let replaced = self.write_new(&new, text);
        if replaced.is_err() {
            let _ = std::fs::remove_file(&new);
        }
        replaced
    }

    fn write_new(&self, new: &Path, text: &[u8]) -> Result<Locked> {
        let mut options = File::options();
        let mut file = options.write(true).create_new(true).mode(0o600).open(new)?;
        // The mode must not depend on the umask.
        file.set_permissions(Permissions::from_mode(0o600))?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        file.write_all(text)?;
        file.sync_all()?;
        std::fs::rename(new, &self.path)?;
        File::open(folder_of(&self.path))?.sync_all()?;
        Ok(Locked(file))
    }

    /// Removes the file that was written last, unless another is in its place.
    ///
    /// # Errors
    ///
    /// When it cannot be removed.
    pub(crate) fn remove(&self, Locked(file): &Locked) -> std::io::Result<()> {
        if is_at(file, &self.path) { std::fs::remove_file(&self.path) } else { Ok(()) }
    }
}

/// Opens a file that no user but this one and root can write to. `None`: it does not exist.
fn open(path: &Path) -> Result<Option<File>> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
    let file = match File::options().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let metadata = file.metadata()?;
    let wrong = |what: &str| {
        format!(
            "the state file {} {what}, who could name disks in it; remove it, choose another \
             --state, or use --state none",
            path.display()
        )
    };
    if !metadata.is_file() {
        bail!("{} is not a regular file; choose another --state", path.display());
    }
    if ![0, geteuid().as_raw()].contains(&metadata.uid()) {
        bail!(wrong("belongs to another user"));
    }
    if metadata.mode() & OTHERS_WRITE != 0 {
        bail!(wrong("can be written by other users"));
    }
    Ok(Some(file))
}

/// Locks a file that was opened at `path`. Returns false if another has replaced it before.
fn try_lock(file: &File, path: &Path) -> Result<bool, Errno> {
    flock(file, FlockOperation::NonBlockingLockExclusive)?;
    Ok(is_at(file, path))
}

fn read(file: &File, path: &Path) -> Result<Changes> {
    let wrong = || {
        format!(
            "cannot read the state file {}; move it away, or ignore it with --state none",
            path.display()
        )
    };
    let mut text = Vec::new();
    file.take(BYTES_MAX).read_to_end(&mut text).with_context(wrong)?;
    let Format { format } = serde_json::from_slice(&text).with_context(wrong)?;
    if format != FORMAT {
        bail!(
            "the state file {} has format {format}, and this version supports format {FORMAT}; \
             start the version that wrote it, or ignore it with --state none",
            path.display()
        );
    }
    let Written { changes, .. } =
        serde_json::from_slice::<Written<Changes>>(&text).with_context(wrong)?;
    changes.check().with_context(wrong)?;
    Ok(changes)
}

/// Returns true if the path leads to this file.
fn is_at(file: &File, path: &Path) -> bool {
    let place = std::fs::symlink_metadata(path);
    let identity = |metadata: &std::fs::Metadata| (metadata.dev(), metadata.ino());
    matches!((file.metadata(), place), (Ok(file), Ok(there)) if identity(&file) == identity(&there))
}

#[cfg(test)]
mod tests {
    use ringhaul_kit::file_trace::trace_writes;

    use super::*;

    /// Two daemons would have the state otherwise: the lock of a replaced file keeps out no other.
    #[test]
    fn the_lock_of_a_replaced_file_is_no_lock() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let state = StateFile { path: path.clone() };
        drop(state.write(&Changes::default()).unwrap());
        let earlier = open(&path).unwrap().unwrap();
        assert_eq!(try_lock(&earlier, &path), Ok(true));
        let _locked = state.write(&Changes::default()).unwrap();
        assert_eq!(try_lock(&earlier, &path), Ok(false));
        let now = open(&path).unwrap().unwrap();
        assert_eq!(try_lock(&now, &path), Err(Errno::WOULDBLOCK));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(try_lock(&earlier, &path), Ok(false));
    }

    /// A loss of power leaves the old file or the new one.
    #[test]
    fn a_file_is_stable_before_it_has_its_name_and_the_name_before_the_answer() {
        let name = "daemon::saved_state::file::tests::\
                    a_file_is_stable_before_it_has_its_name_and_the_name_before_the_answer";
        let traced = trace_writes(name, |folder| {
            let state = StateFile { path: folder.join("state") };
            drop(state.write(&Changes::default()).unwrap());
        });
        let Some(calls) = traced.unwrap() else { return };
        let expected = ["open state.new", "sync state.new", "rename state.new", "open .", "sync ."];
        assert_eq!(calls, expected);
    }
}
