//! The thread that checks the sizes of disks. It may have to wait for a file system.

use std::io;
use std::sync::mpsc;
use std::sync::{Arc, Weak};

use blockio::disk::SizeChanges;
use blockio::executor::start_thread;

use crate::control::WatchedDisk;
use crate::daemon::Daemon;
use crate::spec::command::{Command, CommandError, NewSize};

/// The result of a check, except a size that the guest knows or has just received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Finding {
    Shrunk(u64),
    Failed(String),
}

/// Work of the thread that checks sizes.
pub(super) enum Job {
    One(Check),
    /// Answers true if no size has changed.
    All(Arc<Vec<WatchedDisk>>, mpsc::Sender<bool>),
    /// Watches sizes that have not changed. Answers with the means to wait for a change.
    Watch(Arc<Vec<WatchedDisk>>, mpsc::Sender<Option<Announced>>),
}

/// Changes of sizes that the kernel announces.
pub(super) struct Announced {
    /// `None`: the kernel announces none now.
    pub(super) changes: Option<SizeChanges>,
    /// True if it announces all.
    pub(super) is_complete: bool,
}

/// A check of one disk, with the channel for its result.
pub(super) struct Check {
    pub(super) disk: WatchedDisk,
    pub(super) daemon: Weak<Daemon>,
    pub(super) found: mpsc::Sender<Option<Finding>>,
}

/// Starts a thread that checks disks until the sender is dropped.
pub(super) fn start_checker() -> io::Result<mpsc::Sender<Job>> {
    let (requests, jobs) = mpsc::channel::<Job>();
    let work = move || {
        for job in jobs {
            // The receiver may be gone if the check took too long.
            match job {
                Job::One(Check { disk, daemon, found }) => {
                    let _ = found.send(check(&disk, &daemon));
                }
                Job::All(disks, found) => {
                    let _ = found.send(disks.iter().all(is_unchanged));
                }
                Job::Watch(disks, announced) => {
                    let _ = announced.send(announce(&disks));
                }
            }
        }
    };
    start_thread("ringhaul-size", work)?;
    Ok(requests)
}

/// Watches the sizes of disks. `None` if one has changed before.
fn announce(disks: &[WatchedDisk]) -> Option<Announced> {
    let probes = || disks.iter().filter_map(|disk| disk.size_probe.as_ref());
    // Without it, checks find the changes.
    let changes = SizeChanges::new().ok();
    let is_complete = changes.as_ref().map_or(disks.is_empty(), |changes| {
        // All are watched, also behind one that cannot be.
        probes().filter(|probe| !probe.watch(changes)).count() == 0
    });
    disks.iter().all(is_unchanged).then_some(Announced { changes, is_complete })
}

/// Returns true if a disk has the size that its drivers know, or its size is not known now.
fn is_unchanged(disk: &WatchedDisk) -> bool {
    let size = disk.size_probe.as_ref().map_or(Ok(None), |probe| probe.size_bytes());
    size.is_ok_and(|size| size.is_none_or(|size| size == disk.size_bytes))
}

/// Checks the size of a disk, and resizes it for its guest if it has grown. Blocks for as long as
/// the file system does.
fn check(disk: &WatchedDisk, daemon: &Weak<Daemon>) -> Option<Finding> {
    let size = match disk.size_probe.as_ref()?.size_bytes() {
        Ok(size) => size?,
        Err(error) => return Some(Finding::Failed(error.to_string())),
    };
    if size < disk.size_bytes {
        return Some(Finding::Shrunk(size));
    }
    if size == disk.size_bytes {
        return None;
    }
    let daemon: Arc<Daemon> = daemon.upgrade()?;
    let resize = Command::Resize(disk.export.clone(), disk.place, NewSize::default());
    match daemon.handle(resize) {
        Err(CommandError::Failed(error)) => Some(Finding::Failed(format!("{error:#}"))),
        // The export has changed or ended in the meantime.
        Ok(_) | Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_compared_with_that_of_the_drivers() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        for (known, finding) in [
            (4096, None),
            (4608, Some(Finding::Shrunk(4096))),
            (8192, Some(Finding::Shrunk(4096))),
            // The daemon has ended.
            (3584, None),
        ] {
            let disk = WatchedDisk::for_file(file.path(), known);
            assert_eq!(check(&disk, &Weak::new()), finding, "{known}");
            assert_eq!(is_unchanged(&disk), known == 4096, "{known}");
            assert_eq!(announce(&[disk]).is_some(), known == 4096, "{known}");
        }
        let unknown = WatchedDisk { size_probe: None, ..WatchedDisk::for_file(file.path(), 1) };
        assert!(is_unchanged(&unknown) && check(&unknown, &Weak::new()).is_none());
        assert!(announce(&[]).unwrap().is_complete);
    }
}
