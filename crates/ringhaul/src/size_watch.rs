//! Notices when the files and devices behind disks change their size without a command.
//!
//! A disk that grew is passed on to its guest. One that shrank is not: somebody may have cut it by
//! mistake, and the guest would give up what it has there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::command::{Command, CommandError, NewSize};
use crate::control::WatchedDisk;
use crate::daemon::Daemon;
use crate::spec::UnitPlace;

/// How often each disk is looked at.
const INTERVAL: Duration = Duration::from_secs(1);

/// How long others wait for a look that takes its time. It goes on by itself then.
const PATIENCE: Duration = Duration::from_millis(100);

/// The thread that looks at all disks in turn. It ends when this is dropped.
pub(crate) struct SizeWatch {
    end: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl SizeWatch {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// When the kernel has no thread left.
    pub(crate) fn start(daemon: Weak<Daemon>) -> Result<Self> {
        let (end, ended) = mpsc::channel();
        let watch = move || {
            let mut looks = Looks { daemon, looker: None, disks: BTreeMap::new() };
            while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                looks.look_at_all();
            }
        };
        let thread = std::thread::Builder::new().name("ringhaul-sizes".into()).spawn(watch);
        let thread = thread.context("cannot start the thread that watches the sizes of disks")?;
        Ok(Self { end: Some(end), thread: Some(thread) })
    }
}

impl Drop for SizeWatch {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What a look has found, other than the size that the guest knows or has learnt by it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Finding {
    Shrunk(u64),
    Failed(String),
}

/// What is known of a disk.
#[derive(Default)]
struct Known {
    /// A look that has not ended.
    looking: Option<mpsc::Receiver<Option<Finding>>>,
    /// What the last look has found, and whether the log says so.
    finding: Option<(Finding, bool)>,
}

/// The name of an export, and the place of a disk in it.
type Key = (String, Option<UnitPlace>);

struct Looks {
    daemon: Weak<Daemon>,
    /// The thread that looks, which may be waiting for a file system.
    looker: Option<mpsc::Sender<Look>>,
    disks: BTreeMap<Key, Known>,
}

/// One look at one disk, and where its result goes.
struct Look {
    disk: WatchedDisk,
    daemon: Weak<Daemon>,
    found: mpsc::Sender<Option<Finding>>,
}

impl Looks {
    fn look_at_all(&mut self) {
        let watched = self.daemon.upgrade().map(|daemon| daemon.watched_disks());
        let Some(Ok(watched)) = watched else { return };
        let keys: BTreeSet<Key> = watched.iter().map(key_of).collect();
        self.disks.retain(|key, _| keys.contains(key));
        for disk in watched {
            self.look_at(disk);
        }
    }

    fn look_at(&mut self, disk: WatchedDisk) {
        let (key, known) = (key_of(&disk), disk.size_bytes);
        let begun = self.disks.entry(key.clone()).or_default().looking.take();
        let (found, patience) = match begun {
            Some(found) => (found, Duration::ZERO),
            None => match self.begin(disk) {
                Ok(found) => (found, PATIENCE),
                Err(error) => {
                    tracing::warn!("cannot watch the sizes of disks now: {error}");
                    return;
                }
            },
        };
        let state = self.disks.entry(key.clone()).or_default();
        match found.recv_timeout(patience) {
            Ok(finding) => state.take_in(&key, known, finding),
            Err(RecvTimeoutError::Timeout) => {
                state.looking = Some(found);
                if !patience.is_zero() {
                    // The thread ends when the file system has answered. Others have another.
                    self.looker = None;
                }
            }
            Err(RecvTimeoutError::Disconnected) => self.looker = None,
        }
    }

    fn begin(&mut self, disk: WatchedDisk) -> std::io::Result<mpsc::Receiver<Option<Finding>>> {
        let looker = match &self.looker {
            Some(looker) => looker,
            None => self.looker.insert(start_looker()?),
        };
        let (found, finding) = mpsc::channel();
        // A thread that has gone shows in the result.
        let _ = looker.send(Look { disk, daemon: Weak::clone(&self.daemon), found });
        Ok(finding)
    }
}

fn key_of(disk: &WatchedDisk) -> Key {
    (disk.export.clone(), disk.place)
}

impl Known {
    /// Has the log say what was found twice in a row, once: a file that is being written by others
    /// passes through many sizes.
    fn take_in(&mut self, (export, place): &Key, known: u64, finding: Option<Finding>) {
        let Some(finding) = finding else {
            self.finding = None;
            return;
        };
        let is_told = match &mut self.finding {
            Some((last, is_told)) if *last == finding => is_told,
            _ => {
                self.finding = Some((finding, false));
                return;
            }
        };
        if std::mem::replace(is_told, true) {
            return;
        }
        let what = place.map_or("its disk".to_owned(), |place| format!("logical unit {place}"));
        match finding {
            Finding::Shrunk(size) => tracing::warn!(
                export,
                "{what} has shrunk to {size} bytes, and the guest knows {known}; what it reads \
                 beyond is zeroes; enlarge it again, or pass the new size on with `ringhaul ctl`"
            ),
            Finding::Failed(error) => {
                tracing::warn!(export, "{what} may have another size: {error}");
            }
        }
    }
}

/// Starts a thread that looks for as long as it is asked to.
fn start_looker() -> std::io::Result<mpsc::Sender<Look>> {
    let (asked, looks) = mpsc::channel::<Look>();
    let work = move || {
        for Look { disk, daemon, found } in looks {
            // Nobody waits if it took too long.
            let _ = found.send(look(&disk, &daemon));
        }
    };
    std::thread::Builder::new().name("ringhaul-size".into()).spawn(work)?;
    Ok(asked)
}

/// Looks at a disk, and has the daemon pass it on if it has grown. Waits for as long as its file
/// system does.
fn look(disk: &WatchedDisk, daemon: &Weak<Daemon>) -> Option<Finding> {
    let size = match disk.outside.size_bytes() {
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
        // The export has changed or gone meanwhile.
        Ok(_) | Err(_) => None,
    }
}
