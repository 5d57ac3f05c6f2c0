//! The write locks of an export whose guest may migrate: held only while its queues run.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use blockio::DiskSource;
use blockio::disk::{LATE_LOCK_PATIENCE, LateLock};
use blockio::executor::{Lock, Turns};
use vhost_user::RunLock;

use crate::spec::{ExportSpec, UnitPlace};

/// The locks of an export's disks. Units come and go while the locks are held.
pub(crate) struct DiskLocks {
    state: Lock<State>,
    /// The longest wait for the lock of a disk that is added.
    patience: Duration,
}

impl Default for DiskLocks {
    fn default() -> Self {
        Self { state: Lock::default(), patience: LATE_LOCK_PATIENCE }
    }
}

#[derive(Default)]
struct State {
    locks: Vec<Placed>,
    /// The turns of users for whom all disks are locked.
    users: Turns,
    /// Locks of removed disks that may have lost data. They stay until the export ends.
    kept: Vec<Arc<LateLock>>,
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
    pub(super) fn for_export(spec: &ExportSpec, disks: &[DiskSource]) -> Option<Arc<Self>> {
        if !spec.settings.late_lock {
            return None;
        }
        let settings = spec.disks();
        let all = spec.device.places().into_iter().zip(settings).zip(disks);
        let locks = all.filter_map(|((place, (_, settings)), disk)| {
            let lock = Arc::new(disk.late_lock().filter(|_| settings.late_lock)?);
            Some(Placed { place, lock })
        });
        let state = State { locks: locks.collect(), ..State::default() };
        Some(Arc::new(Self { state: Lock::new(state), ..Self::default() }))
    }

    /// The places of the disks.
    pub(super) fn places(&self) -> Vec<Option<UnitPlace>> {
        self.state.lock().locks.iter().map(|placed| placed.place).collect()
    }

    /// Returns true while the disks are locked.
    pub(crate) fn are_held(&self) -> bool {
        self.state.lock().users.holder().is_some()
    }

    /// Adds the disk of a new unit, and locks it if the other disks are locked.
    ///
    /// # Errors
    ///
    /// If it stays locked by another program. Then it is not added.
    pub(crate) fn add(&self, place: UnitPlace, disk: &DiskSource) -> Result<(), blockio::Error> {
        let Some(lock) = disk.late_lock() else { return Ok(()) };
        let lock = Arc::new(lock.with_patience(self.patience));
        let holder = {
            let mut state = self.state.lock();
            state.locks.push(Placed { place: Some(place), lock: Arc::clone(&lock) });
            state.users.holder()
        };
        let Some(user) = holder else { return Ok(()) };
        let taken = lock.take(user);
        // The next user locks it with the other disks.
        if self.state.lock().users.holder() != Some(user) {
            return Ok(());
        }
        // The log has the reason if its lock stays.
        taken.inspect_err(|_| drop(self.remove(place)))
    }

    /// Removes the disk of a unit that has no more requests, and unlocks it.
    ///
    /// # Errors
    ///
    /// If written data may be lost. The disk stays locked until the export ends.
    pub(crate) fn remove(&self, place: UnitPlace) -> io::Result<()> {
        let (removed, user) = {
            let mut state = self.state.lock();
            let is_removed = |placed: &mut Placed| placed.place == Some(place);
            let removed: Vec<_> = state.locks.extract_if(.., is_removed).collect();
            (removed, state.users.last())
        };
        let release = |Placed { lock, .. }: Placed| {
            lock.release(user).inspect_err(|_| self.state.lock().kept.push(lock))
        };
        removed.into_iter().map(release).fold(Ok(()), io::Result::and)
    }

    /// The first lock that `taken` does not have. `None`: the user holds all locks.
    fn next(&self, user: u64, taken: &[Placed]) -> io::Result<Option<Placed>> {
        let mut state = self.state.lock();
        if state.users.has_ended(user) {
            return Err(io::Error::other("the front-end left before all disks were locked"));
        }
        let is_new =
            |placed: &&Placed| !taken.iter().any(|taken| Arc::ptr_eq(&taken.lock, &placed.lock));
        let next = state.locks.iter().find(is_new).cloned();
        if next.is_none() {
            state.users.begin(user, ());
        }
        Ok(next)
    }

    /// Takes all locks that `taken` does not have, one by one.
    fn take_rest(&self, user: u64, taken: &mut Vec<Placed>) -> io::Result<()> {
        while let Some(placed) = self.next(user, taken)? {
            placed.lock.take(user).map_err(io::Error::other)?;
            taken.push(placed);
        }
        Ok(())
    }
}

impl RunLock for DiskLocks {
    /// Takes all locks, or none.
    fn take(&self, user: u64) -> io::Result<()> {
        let mut taken = Vec::new();
        self.take_rest(user, &mut taken).inspect_err(|_| {
            // The log has the reason if a lock stays.
            taken.iter().for_each(|placed| drop(placed.lock.release(user)));
        })
    }

    /// Releases all locks, each if its disk has lost no data.
    fn release(&self, user: u64) -> io::Result<()> {
        let locks = {
            let mut state = self.state.lock();
            state.users.end(user);
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

    /// Locks that wait for no other user of a disk.
    fn impatient() -> DiskLocks {
        DiskLocks { patience: Duration::ZERO, ..DiskLocks::default() }
    }

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
        let locks = impatient();
        locks.add(FIRST, &late(first.path())).unwrap();
        locks.add(SECOND, &late(second.path())).unwrap();
        assert!(is_free(first.path()) && is_free(second.path()) && !locks.are_held());
        let other = late(second.path()).late_lock().unwrap();
        other.take(1).unwrap();
        assert!(locks.take(2).is_err());
        assert!(is_free(first.path()) && !locks.are_held(), "half of the locks stay");
        other.release(1).unwrap();
        locks.take(4).unwrap();
        locks.take(3).unwrap();
        assert!(!is_free(first.path()) && !is_free(second.path()) && locks.are_held());
        locks.release(3).unwrap();
        assert!(locks.are_held(), "an earlier user ends");
        locks.release(4).unwrap();
        assert!(is_free(first.path()) && is_free(second.path()) && !locks.are_held());
    }

    /// The user has said that other programs may use the disk.
    #[test]
    fn a_unit_without_a_lock_is_not_locked_beside_others() {
        let disks = [disk(), disk()];
        let unit = |lun: u16, no_lock: bool| {
            let disk = serde_json::json!({ "file": disks[usize::from(lun)].path() });
            serde_json::json!({ "lun": lun, "disk": disk, "settings": { "no-lock": no_lock } })
        };
        let spec: ExportSpec = serde_json::from_value(serde_json::json!({
            "endpoint": { "path": "/vm" }, "late-lock": true,
            "device": { "scsi": [unit(0, false), unit(1, true)] },
        }))
        .unwrap();
        let sources = [late(disks[0].path()), late(disks[1].path())];
        let locks = DiskLocks::for_export(&spec, &sources).unwrap();
        assert_eq!(locks.places(), [Some(FIRST)]);
        locks.take(1).unwrap();
        assert!(!is_free(disks[0].path()) && is_free(disks[1].path()));
        let never = ExportSpec { settings: crate::spec::ExportSettings::default(), ..spec };
        assert!(DiskLocks::for_export(&never, &sources).is_none());
    }

    #[test]
    fn a_unit_is_locked_from_its_addition_to_its_removal() {
        let [first, second] = [disk(), disk()];
        let locks = DiskLocks::default();
        locks.add(FIRST, &late(first.path())).unwrap();
        locks.take(5).unwrap();
        locks.add(SECOND, &late(second.path())).unwrap();
        assert!(!is_free(second.path()), "it runs beside another program");
        locks.remove(FIRST).unwrap();
        assert!(is_free(first.path()) && !is_free(second.path()));
        locks.release(5).unwrap();
        assert!(is_free(second.path()));
    }

    /// The guest does not get the unit, so the next guest must not wait for its disk.
    #[test]
    fn a_unit_whose_disk_stays_locked_by_another_program_has_no_lock() {
        let [first, second] = [disk(), disk()];
        let locks = impatient();
        locks.add(FIRST, &late(first.path())).unwrap();
        locks.take(1).unwrap();
        let other = late(second.path()).late_lock().unwrap();
        other.take(1).unwrap();
        locks.add(SECOND, &late(second.path())).unwrap_err();
        assert_eq!(locks.places(), [Some(FIRST)]);
        locks.release(1).unwrap();
        locks.take(2).unwrap();
        assert!(locks.are_held());
    }

    /// The first lock is taken for a user, while its front-end leaves and another one comes.
    #[test]
    fn an_attempt_that_outlives_its_turn_holds_nothing() {
        let disks = [disk(), disk()];
        let locks = DiskLocks::default();
        locks.add(FIRST, &late(disks[0].path())).unwrap();
        let mut taken = Vec::new();
        let first = locks.next(1, &taken).unwrap().unwrap();
        first.lock.take(1).unwrap();
        taken.push(first);
        locks.release(1).unwrap();
        let error = locks.next(1, &taken).map(drop).unwrap_err().to_string();
        assert!(error.contains("the front-end left"), "{error}");
        assert!(!locks.are_held() && is_free(disks[0].path()));
        locks.take(2).unwrap();
        locks.add(SECOND, &late(disks[1].path())).unwrap();
        assert!(locks.take(1).is_err(), "the turn has ended");
        assert!(!is_free(disks[0].path()) && !is_free(disks[1].path()));
        locks.release(2).unwrap();
        assert!(!locks.are_held() && is_free(disks[0].path()) && is_free(disks[1].path()));
    }

    /// The log reports that the lock stays.
    #[test]
    fn a_removed_disk_that_may_have_lost_data_stays_locked() {
        for is_in_use in [true, false] {
            let disk = disk();
            let locks = DiskLocks::default();
            let source = late(disk.path());
            locks.add(FIRST, &source).unwrap();
            locks.take(1).unwrap();
            source.hand_over().inherit(Some(libc::EIO), false);
            drop(source);
            assert!(is_in_use || locks.release(1).is_err());
            let error = locks.remove(FIRST).unwrap_err().to_string();
            assert!(error.contains("written data may be lost"), "{error}");
            assert!(!is_free(disk.path()), "another host may continue");
            drop(locks);
            assert!(is_free(disk.path()));
        }
    }
}
