//! The write locks of an export whose guest may migrate: held only while its queues run.

use std::io;
use std::sync::Arc;

use blockio::DiskSource;
use blockio::disk::LateLock;
use blockio::executor::Lock;
use vhost_user::RunLock;

use crate::spec::{ExportSpec, UnitPlace};

/// The locks of an export's disks. Units come and go while the locks are held.
#[derive(Default)]
pub(crate) struct DiskLocks(Lock<State>);

#[derive(Default)]
struct State {
    locks: Vec<Placed>,
    /// The user for whom all disks are locked.
    holder: Option<u64>,
}

/// The lock of the disk at a place.
#[derive(Clone)]
struct Placed {
    place: Option<UnitPlace>,
    lock: Arc<LateLock>,
}

impl DiskLocks {
    /// The locks of an export that takes them late. `None` if it locks its disks when it opens
    /// them, or never.
    pub(super) fn of_export(spec: &ExportSpec, disks: &[DiskSource]) -> Option<Arc<Self>> {
        if !spec.settings.late_lock {
            return None;
        }
        let settings = spec.disks();
        let all = spec.device.places().into_iter().zip(settings).zip(disks);
        let locks = all.filter_map(|((place, (_, settings)), disk)| {
            let lock = Arc::new(disk.late_lock().filter(|_| settings.late_lock)?);
            Some(Placed { place, lock })
        });
        let state = State { locks: locks.collect(), holder: None };
        Some(Arc::new(Self(Lock::new(state))))
    }

    /// Returns true while the disks are locked.
    pub(crate) fn are_held(&self) -> bool {
        self.0.lock().holder.is_some()
    }

    /// Adds the disk of a new unit, and locks it if the other disks are locked.
    ///
    /// # Errors
    ///
    /// If it stays locked by another program. Then it is not added.
    pub(crate) fn add(&self, place: UnitPlace, disk: &DiskSource) -> Result<(), blockio::Error> {
        let Some(lock) = disk.late_lock().map(Arc::new) else { return Ok(()) };
        let holder = {
            let mut state = self.0.lock();
            state.locks.push(Placed { place: Some(place), lock: Arc::clone(&lock) });
            state.holder
        };
        let Some(user) = holder else { return Ok(()) };
        let taken = lock.take(user);
        // The next user locks it with the other disks.
        if self.0.lock().holder != Some(user) {
            return Ok(());
        }
        taken.inspect_err(|_| self.remove(place))
    }

    /// Removes the disk of a unit that has no more requests, and unlocks it.
    pub(crate) fn remove(&self, place: UnitPlace) {
        let mut state = self.0.lock();
        let holder = state.holder;
        let (removed, kept) = state.locks.drain(..).partition(|placed| placed.place == Some(place));
        state.locks = kept;
        drop(state);
        let removed: Vec<Placed> = removed;
        if let Some(user) = holder {
            removed.iter().for_each(|placed| drop(placed.lock.release(user)));
        }
    }

    /// The first lock that `is_taken` does not have.
    fn next(&self, user: u64, taken: &[Placed]) -> Option<Placed> {
        let mut state = self.0.lock();
        let is_new =
            |placed: &&Placed| !taken.iter().any(|taken| Arc::ptr_eq(&taken.lock, &placed.lock));
        let next = state.locks.iter().find(is_new).cloned();
        if next.is_none() {
            state.holder = Some(user);
        }
        next
    }
}

impl RunLock for DiskLocks {
    /// Takes all locks, or none.
    fn take(&self, user: u64) -> io::Result<()> {
        let mut taken = Vec::new();
        while let Some(placed) = self.next(user, &taken) {
            if let Err(error) = placed.lock.take(user) {
                // The log has the reason if a lock stays.
                taken.iter().for_each(|placed: &Placed| drop(placed.lock.release(user)));
                return Err(io::Error::other(error));
            }
            taken.push(placed);
        }
        Ok(())
    }

    /// Releases all locks, each if its disk has lost no data.
    fn release(&self, user: u64) -> io::Result<()> {
        let locks = {
            let mut state = self.0.lock();
            state.holder = state.holder.filter(|holder| *holder != user);
            state.locks.clone()
        };
        let released = locks.iter().map(|placed| placed.lock.release(user));
        released.fold(Ok(()), io::Result::and)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use blockio::DiskOptions;

    use super::*;

    const FIRST: UnitPlace = UnitPlace { target: 0, lun: 0 };
    const SECOND: UnitPlace = UnitPlace { target: 0, lun: 1 };

    fn late(path: &Path) -> DiskSource {
        let options = DiskOptions { no_lock: true, late_lock: true, ..DiskOptions::default() };
        DiskSource::file(path, &options).unwrap()
    }

    fn is_free(path: &Path) -> bool {
        let options = DiskOptions { at_once: true, ..DiskOptions::default() };
        DiskSource::file(path, &options).is_ok()
    }

    fn disk() -> tempfile::NamedTempFile {
        let disk = tempfile::NamedTempFile::new().unwrap();
        disk.as_file().set_len(1 << 20).unwrap();
        disk
    }

    #[test]
    fn all_disks_are_locked_or_none() {
        let [first, second] = [disk(), disk()];
        let locks = DiskLocks::default();
        locks.add(FIRST, &late(first.path())).unwrap();
        locks.add(SECOND, &late(second.path())).unwrap();
        assert!(is_free(first.path()) && is_free(second.path()) && !locks.are_held());
        let other = late(second.path()).late_lock().unwrap();
        other.take(1).unwrap();
        assert!(locks.take(2).is_err());
        assert!(is_free(first.path()) && !locks.are_held(), "half of the locks stay");
        other.release(1).unwrap();
        locks.take(3).unwrap();
        assert!(!is_free(first.path()) && !is_free(second.path()) && locks.are_held());
        locks.release(2).unwrap();
        assert!(locks.are_held(), "an earlier user ends");
        locks.release(3).unwrap();
        assert!(is_free(first.path()) && is_free(second.path()) && !locks.are_held());
    }

    #[test]
    fn a_unit_is_locked_from_its_addition_to_its_removal() {
        let [first, second] = [disk(), disk()];
        let locks = DiskLocks::default();
        locks.add(FIRST, &late(first.path())).unwrap();
        locks.take(5).unwrap();
        locks.add(SECOND, &late(second.path())).unwrap();
        assert!(!is_free(second.path()), "it runs beside another program");
        locks.remove(FIRST);
        assert!(is_free(first.path()) && !is_free(second.path()));
        locks.release(5).unwrap();
        assert!(is_free(second.path()));
    }
}
