//! State that several exports of one disk share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use blockio::DiskSource;
use blockio::disk::Placement;
use blockio::executor::Lock;
use device::access::DiskAccess;

/// The time that a new export waits for a resize of its disk, before it is refused.
const RESIZE_MAX: Duration = Duration::from_secs(5);

/// The open disks and their shared accesses.
#[derive(Default)]
pub(crate) struct SharedDisks {
    all: Lock<Vec<SharedDisk>>,
    /// True while another process is to hand over the state of new accesses.
    expects_hand_over: AtomicBool,
    /// The time of the last resize of any disk.
    resized: Lock<Option<Instant>>,
    /// The identities of disks that are being resized, once for each resize that runs or waits.
    resizing: Lock<Vec<String>>,
    resize_ended: Condvar,
}

/// A resize in progress. Dropping it ends the resize.
pub(crate) struct Resizing<'a> {
    shared_disks: &'a SharedDisks,
    identity: String,
}

impl Drop for Resizing<'_> {
    fn drop(&mut self) {
        let mut resizing = self.shared_disks.resizing.lock();
        // Only one entry: another export's resize of the same disk may still wait for its turn.
        if let Some(index) = resizing.iter().position(|other| *other == self.identity) {
            resizing.swap_remove(index);
        }
        drop(resizing);
        self.shared_disks.resize_ended.notify_all();
    }
}

/// A disk and the access that its exports share.
struct SharedDisk {
    /// The identity of the disk.
    identity: String,
    /// The name of the disk in messages.
    name: String,
    place: Placement,
    /// True if any of its exports may write.
    is_written: bool,
    access: Weak<DiskAccess>,
}

impl SharedDisks {
    /// Sets if new accesses expect their state from another process.
    pub(crate) fn set_expects_hand_over(&self, expects_hand_over: bool) {
        self.expects_hand_over.store(expects_hand_over, Ordering::Relaxed);
    }

    /// Holds a disk at its size until a device is made on it. Waits for a resize in progress, and
    /// reads the size again if a resize followed the time at which the disk was `opened`.
    ///
    /// # Errors
    ///
    /// When the new size cannot be determined, or a resize takes longer than [`RESIZE_MAX`].
    pub(crate) fn hold_size<'a>(
        &self,
        access: &'a DiskAccess,
        disk: &DiskSource,
        opened: Instant,
    ) -> Result<MutexGuard<'a, ()>> {
        let is_resizing = |resizing: &mut Vec<String>| {
            resizing.iter().any(|identity| identity == disk.identity())
        };
        let waited =
            self.resize_ended.wait_timeout_while(self.resizing.lock(), RESIZE_MAX, is_resizing);
        let (resizing, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        drop(resizing);
        if waited.timed_out() {
            bail!(
                "a resize of this disk by another export has not ended after {} s; try again when \
                 its `disk.resize` is answered",
                RESIZE_MAX.as_secs()
            );
        }
        let held = access.hold_size();
        if self.resized.lock().is_some_and(|resized| resized >= opened) {
            disk.refresh()?;
        }
        Ok(held)
    }

    /// Registers a resize of the disk that begins now or waits for another.
    pub(crate) fn begin_resize(&self, disk: &DiskSource) -> Resizing<'_> {
        let identity = disk.identity().to_owned();
        if !identity.is_empty() {
            self.resizing.lock().push(identity.clone());
        }
        Resizing { shared_disks: self, identity }
    }

    /// Notes the time of a resize. The caller holds the new size.
    pub(crate) fn record_resize(&self) {
        *self.resized.lock() = Some(Instant::now());
    }

    /// Returns the access of a disk. A disk without identity gets its own.
    ///
    /// # Errors
    ///
    /// When the disk overlaps another open disk and one of them is writable: the state that exports
    /// of one disk share would not protect the two from each other.
    pub(crate) fn access(&self, disk: &DiskSource) -> Result<Arc<DiskAccess>> {
        let new = || match self.expects_hand_over.load(Ordering::Relaxed) {
            true => Arc::new(DiskAccess::for_hand_over()),
            false => Arc::default(),
        };
        let (identity, place) = (disk.identity(), disk.place());
        if identity.is_empty() {
            return Ok(new());
        }
        let is_written = !disk.info().read_only;
        let name = disk.chain_text();
        let mut all = self.all.lock();
        all.retain(|shared| shared.access.strong_count() > 0);
        for other in all.iter().filter(|other| other.identity != identity) {
            if (is_written || other.is_written) && place.overlaps(&other.place) {
                bail!(
                    "cannot serve {name}: it overlaps {}, which is served too, and reservations, \
                     resets and COMPARE AND WRITE would not apply to both; serve parts that do not \
                     overlap, or both read-only",
                    other.name
                );
            }
        }
        if let Some(shared) = all.iter_mut().find(|shared| shared.identity == identity)
            && let Some(access) = shared.access.upgrade()
        {
            shared.is_written |= is_written;
            return Ok(access);
        }
        let (identity, access) = (identity.to_owned(), new());
        all.push(SharedDisk { identity, name, place, is_written, access: Arc::downgrade(&access) });
        Ok(access)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use blockio::DiskOptions;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn file(path: &Path, read_only: bool) -> DiskSource {
        let options = DiskOptions { no_lock: true, read_only, ..DiskOptions::default() };
        DiskSource::file(path, &options).unwrap()
    }

    fn new_file() -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8 * MIB).unwrap();
        file
    }

    #[test]
    fn exports_share_the_access_to_their_disk_while_one_has_it() {
        let shared_disks = SharedDisks::default();
        let of = |disk: &DiskSource| shared_disks.access(disk).unwrap();
        let (a, b) = (new_file(), new_file());
        let null = DiskSource::null(MIB, &DiskOptions::default()).unwrap();
        let one = of(&file(a.path(), false));
        assert!(Arc::ptr_eq(&one, &of(&file(a.path(), true))));
        assert!(!Arc::ptr_eq(&one, &of(&file(b.path(), false))));
        assert!(!Arc::ptr_eq(&of(&null), &of(&null)));
        let gone = Arc::downgrade(&one);
        drop(one);
        assert!(gone.upgrade().is_none());
        drop(of(&file(a.path(), false)));
    }

    /// A resize may hang for as long as its file system does.
    #[test]
    fn a_disk_that_is_being_resized_is_waited_for_and_then_refused() {
        let shared_disks = SharedDisks::default();
        let [disk, other] = [new_file(), new_file()];
        let [disk, other] = [file(disk.path(), false), file(other.path(), false)];
        let settle = |disk: &DiskSource| {
            let access = shared_disks.access(disk).unwrap();
            shared_disks.hold_size(&access, disk, Instant::now()).map(drop)
        };
        let resizing = shared_disks.begin_resize(&disk);
        settle(&other).unwrap();
        let refused = settle(&disk).unwrap_err().to_string();
        assert!(refused.contains("try again when its `disk.resize`"), "{refused}");
        std::thread::scope(|scope| {
            let settles = scope.spawn(|| settle(&disk));
            drop(resizing);
            settles.join().unwrap().unwrap();
        });
    }

    /// The first export of a disk may only read it.
    #[test]
    fn a_disk_that_one_of_its_exports_writes_is_written() {
        let a = new_file();
        let read_part = |offset: u64| DiskSource::raw(file(a.path(), true), offset, None).unwrap();
        let shared_disks = SharedDisks::default();
        let read = shared_disks.access(&file(a.path(), true)).unwrap();
        let beside = shared_disks.access(&read_part(MIB)).unwrap();
        let error = shared_disks.access(&file(a.path(), false)).map(drop).unwrap_err().to_string();
        assert!(error.contains("it overlaps"), "{error}");
        drop(beside);
        let written = shared_disks.access(&file(a.path(), false)).unwrap();
        assert!(Arc::ptr_eq(&read, &written));
        let error = shared_disks.access(&read_part(MIB)).map(drop).unwrap_err().to_string();
        assert!(error.contains("it overlaps"), "{error}");
    }

    #[test]
    fn parts_that_overlap_are_refused_if_one_is_writable() {
        let a = new_file();
        let part = |offset: u64, size: Option<u64>, read_only| {
            let size = size.map(|size| size * MIB);
            DiskSource::raw(file(a.path(), read_only), offset * MIB, size).unwrap()
        };
        let shared_disks = SharedDisks::default();
        let held = shared_disks.access(&part(2, Some(3), false)).unwrap();
        let refused = |disk: &DiskSource| {
            shared_disks.access(disk).err().map(|error| error.to_string()).unwrap_or_default()
        };
        let nested = DiskSource::raw(part(1, None, false), MIB, Some(MIB)).unwrap();
        for other in [
            file(a.path(), false),
            file(a.path(), true),
            part(0, None, false),
            part(4, None, false),
            part(0, Some(3), false),
            part(3, Some(1), true),
            nested,
        ] {
            let text = refused(&other);
            assert!(text.contains("3145728 bytes from 2097152"), "{other:?}: {text}");
        }
        let beside = [part(0, Some(2), false), part(5, None, false), file(new_file().path(), true)];
        for other in &beside {
            assert_eq!(refused(other), "");
        }
        assert!(Arc::ptr_eq(&held, &shared_disks.access(&part(2, Some(3), true)).unwrap()));
        drop(held);
        let whole = shared_disks.access(&file(a.path(), true)).unwrap();
        let read = shared_disks.access(&part(2, Some(3), true)).unwrap();
        assert!(!Arc::ptr_eq(&whole, &read));
        assert!(!refused(&part(6, Some(1), false)).is_empty(), "the whole is read");
    }
    /// An image may store any byte of its disk anywhere in its file.
    #[test]
    #[cfg(feature = "qcow2")]
    fn an_image_is_all_of_its_file() {
        use disks::qcow2::Layer;

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let mut make = std::process::Command::new("qemu-img");
        let made = make.args(["create", "-q", "-f", "qcow2"]).arg(&path).arg("8M").status();
        if made.is_err() {
            eprintln!("skipped: qemu-img is not installed");
            return;
        }
        std::fs::File::options().write(true).open(&path).unwrap().set_len(MIB).unwrap();
        let image = || {
            let options =
                DiskOptions { no_lock: true, holds_image: true, ..DiskOptions::default() };
            let source = DiskSource::file(&path, &options).unwrap();
            disks::qcow2::open(vec![Layer::qcow2(source).unwrap()], false).unwrap()
        };
        let part = |offset| DiskSource::raw(image(), offset * MIB, Some(MIB)).unwrap();
        let shared_disks = SharedDisks::default();
        let is_refused = |disk: &DiskSource| shared_disks.access(disk).is_err();
        let held = shared_disks.access(&image()).unwrap();
        assert!(is_refused(&file(&path, true)) && is_refused(&part(1)));
        drop(held);
        let _held = shared_disks.access(&part(1)).unwrap();
        assert!(is_refused(&part(2)) && is_refused(&file(&path, false)));
    }
}
