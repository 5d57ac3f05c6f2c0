//! Probes the possible size of a disk without using it: a file by its name, a device by its number.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fmt, io};

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{inotify, statfs};

use super::attributes;
use crate::executor::sync::Lock;

/// The end of a regular file as the last probe saw it. A write beyond it would lengthen a file that
/// was cut while in use, and zeroes would replace the data that is gone.
#[derive(Debug)]
pub(crate) struct FileEnd {
    /// The block that counts as whole if a file ends within it, with zeroes at its end.
    block_bytes: u64,
    bytes: AtomicU64,
    /// The number of times that the size of the disk has changed.
    changes: Lock<u64>,
}

/// Stands for an end that no probe has seen since the disk got its size.
const UNSEEN: u64 = u64::MAX;

impl FileEnd {
    pub(crate) fn unseen(block_bytes: u32) -> Self {
        let block_bytes = block_bytes.into();
        Self { block_bytes, bytes: AtomicU64::new(UNSEEN), changes: Lock::default() }
    }

    /// Returns true if a range goes beyond the end.
    #[inline]
    pub(crate) fn is_exceeded_by(&self, offset: u64, len: u64) -> bool {
        offset.saturating_add(len) > self.bytes.load(Ordering::Relaxed)
    }

    /// The end of the block in which a file of this length ends.
    pub(crate) fn round_up(&self, file_bytes: u64) -> u64 {
        file_bytes.next_multiple_of(self.block_bytes)
    }

    /// Makes the end unknown until the next probe: the disk gets, or has got, another size.
    pub(crate) fn invalidate(&self) {
        let mut changes = self.changes.lock();
        *changes += 1;
        self.bytes.store(UNSEEN, Ordering::Relaxed);
    }

    /// Stores the result of a probe, unless the disk has got another size since the probe began.
    fn probe<E>(&self, probe: impl FnOnce() -> Result<u64, E>) -> Result<u64, E> {
        let changes = || self.changes.lock();
        let before = *changes();
        let len = probe()?;
        let now = changes();
        if *now == before {
            self.bytes.store(self.round_up(len), Ordering::Relaxed);
        }
        Ok(len)
    }
}

/// A probe for the possible size of a disk in use. It neither keeps the file open nor depends on
/// the disk.
pub struct SizeProbe(Probe);

enum Probe {
    Device(u64),
    File { path: PathBuf, device: u64, inode: u64, end: Arc<FileEnd> },
    Other { probe: Box<OtherProbe>, below: Option<Arc<SizeProbe>> },
}

type OtherProbe = dyn Fn() -> io::Result<Option<u64>> + Send + Sync;

/// File systems that announce every change of a file's size: no other host can change it.
const LOCAL_FILE_SYSTEMS: [u32; 5] = [0x0102_1994, 0x5846_5342, 0x9123_683e, 0xef53, 0xf2f5_2010];

/// Becomes readable when a file that is [watched](SizeProbe::watch) has changed.
#[derive(Debug)]
pub struct SizeChanges(OwnedFd);

impl SizeChanges {
    /// Begins without files.
    ///
    /// # Errors
    ///
    /// When the user has too many of these, or no descriptor is left.
    pub fn new() -> io::Result<Self> {
        let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
        Ok(Self(inotify::init(flags)?))
    }
}

impl AsFd for SizeChanges {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl SizeProbe {
    /// A probe of a block device, or of a file, where each probe updates `end`.
    pub(crate) fn new(
        path: &Path,
        metadata: &Metadata,
        is_block_device: bool,
        end: &Arc<FileEnd>,
    ) -> Self {
        Self(match is_block_device {
            true => Probe::Device(metadata.rdev()),
            false => {
                let (device, inode) = (metadata.dev(), metadata.ino());
                Probe::File { path: path.to_owned(), device, inode, end: Arc::clone(end) }
            }
        })
    }

    /// A probe of a disk of another kind. A kind that learns of a new size from its remote end
    /// stores it where this probe finds it.
    pub fn other(probe: impl Fn() -> io::Result<Option<u64>> + Send + Sync + 'static) -> Self {
        Self(Probe::Other { probe: Box::new(probe), below: None })
    }

    /// A probe of a disk whose size follows from the one that `below` probes.
    pub fn above(
        below: Arc<Self>,
        size: impl Fn(u64) -> Option<u64> + Send + Sync + 'static,
    ) -> Self {
        let same = Arc::clone(&below);
        let probe = move || Ok(below.size_bytes()?.and_then(&size));
        Self(Probe::Other { probe: Box::new(probe), below: Some(same) })
    }

    /// Watches for changes of the size. Returns false if the kernel does not announce all of them,
    /// so that probes must find them. May wait for as long as a file system does.
    pub fn watch(&self, changes: &SizeChanges) -> bool {
        match &self.0 {
            Probe::Device(_) | Probe::Other { below: None, .. } => false,
            Probe::Other { below: Some(below), .. } => below.watch(changes),
            Probe::File { path, device, inode, .. } => {
                let is_local = statfs(path).is_ok_and(|it| {
                    u32::try_from(it.f_type).is_ok_and(|kind| LOCAL_FILE_SYSTEMS.contains(&kind))
                });
                let flags = inotify::WatchFlags::MODIFY;
                // Another file may have the name now.
                let is_the_file = || {
                    std::fs::metadata(path)
                        .is_ok_and(|data| (data.dev(), data.ino()) == (*device, *inode))
                };
                is_local && inotify::add_watch(changes, path, flags).is_ok() && is_the_file()
            }
        }
    }

    /// The size in bytes. `None` if it is unknown, for example because the file has lost its name.
    /// May wait for as long as a file system does.
    ///
    /// # Errors
    ///
    /// If the kernel does not report the size.
    pub fn size_bytes(&self) -> io::Result<Option<u64>> {
        match &self.0 {
            Probe::Device(number) => Ok(attributes::size_bytes(*number)),
            Probe::File { path, device, inode, end } => {
                let probe = || match std::fs::metadata(path) {
                    Ok(data) if (data.dev(), data.ino()) == (*device, *inode) => Ok(data.len()),
                    Ok(_) => Err(None),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => Err(None),
                    Err(error) => Err(Some(error)),
                };
                match end.probe(probe) {
                    Ok(len) => Ok(Some(len)),
                    Err(error) => error.map_or(Ok(None), Err),
                }
            }
            Probe::Other { probe, .. } => probe(),
        }
    }
}

impl fmt::Debug for SizeProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Probe::Device(number) => write!(f, "SizeProbe(device {number})"),
            Probe::File { path, .. } => write!(f, "SizeProbe({})", path.display()),
            Probe::Other { .. } => f.write_str("SizeProbe(other)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::{FileEnd, SizeChanges, SizeProbe};
    use crate::disk::{DiskOptions, DiskSource};

    /// The size may be the one from before the change.
    #[test]
    fn a_probe_beside_a_change_leaves_the_end_unknown() {
        let end = FileEnd::unseen(4096);
        let probe = |is_changed: bool| {
            let probed = end.probe(|| {
                if is_changed {
                    end.invalidate();
                }
                Ok::<_, ()>(4000)
            });
            assert_eq!(probed, Ok(4000));
            end.is_exceeded_by(4096, 1)
        };
        assert_eq!([probe(true), probe(false), probe(true)], [false, true, false]);
        assert!(!end.is_exceeded_by(0, 4096), "the last block is whole");
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_file_is_known_by_its_name_for_as_long_as_it_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let [path, other] = ["disk", "other"].map(|name| folder.path().join(name));
        std::fs::write(&path, [0; 512]).unwrap();
        let source = DiskSource::file(&path, &DiskOptions::default()).unwrap();
        let outside = source.size_probe().unwrap();
        assert_eq!(outside.size_bytes().unwrap(), Some(512));
        std::fs::write(&path, [0; 1024]).unwrap();
        assert_eq!(outside.size_bytes().unwrap(), Some(1024));
        assert_eq!(source.info().size_bytes, 512, "it was only looked at");
        std::fs::rename(&path, &other).unwrap();
        assert_eq!(outside.size_bytes().unwrap(), None);
        std::fs::write(&path, [0; 2048]).unwrap();
        assert_eq!(outside.size_bytes().unwrap(), None, "it is another file");
        let null = DiskSource::null(512, &DiskOptions::default()).unwrap();
        assert!(null.size_probe().is_none());
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn the_kernel_announces_changes_of_local_files_alone() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, [0; 512]).unwrap();
        let source = DiskSource::file(&path, &DiskOptions::default()).unwrap();
        let file = source.size_probe().unwrap();
        let half = SizeProbe::above(std::sync::Arc::clone(&file), |size| Some(size / 2));
        let is_announced = |changes: &SizeChanges| {
            let mut polled = [PollFd::new(changes, PollFlags::IN)];
            poll(&mut polled, Some(&Timespec::default())).unwrap() == 1
        };
        for probe in [&*file, &half] {
            let changes = SizeChanges::new().unwrap();
            assert!(probe.watch(&changes) && !is_announced(&changes));
            std::fs::File::options().write(true).open(&path).unwrap().set_len(1024).unwrap();
            assert!(is_announced(&changes), "{probe:?}");
        }
        assert_eq!(half.size_bytes().unwrap(), Some(512));
        std::fs::rename(&path, folder.path().join("other")).unwrap();
        std::fs::write(&path, [0; 512]).unwrap();
        assert!(!file.watch(&SizeChanges::new().unwrap()), "another file has the name");
        let changes = SizeChanges::new().unwrap();
        let opened = std::fs::File::open("/proc/self/status").unwrap();
        let other = SizeProbe::new(
            std::path::Path::new("/proc/self/status"),
            &opened.metadata().unwrap(),
            false,
            &std::sync::Arc::new(FileEnd::unseen(512)),
        );
        assert!(!other.watch(&changes) && !SizeProbe::other(|| Ok(None)).watch(&changes));
    }
}
