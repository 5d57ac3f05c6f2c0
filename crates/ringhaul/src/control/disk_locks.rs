//! The write locks of an export whose guest may migrate: held only while its queues run.

use std::io;
use std::sync::Arc;

use blockio::DiskSource;
use blockio::disk::LateLock;
use vhost_user::RunLock;

use crate::spec::ExportSpec;

/// The locks of an export's disks.
pub(super) struct DiskLocks(Vec<LateLock>);

impl DiskLocks {
    /// The locks of an export that takes them late. `None` if it locks its disks when it opens
    /// them, or never.
    pub(super) fn of_export(spec: &ExportSpec, disks: &[DiskSource]) -> Option<Arc<dyn RunLock>> {
        let locks = || disks.iter().filter_map(DiskSource::late_lock).collect();
        spec.settings.late_lock.then(|| Arc::new(Self(locks())) as Arc<dyn RunLock>)
    }
}

impl RunLock for DiskLocks {
    fn take(&self, turn: u64) -> io::Result<()> {
        let taken = self.0.iter().try_for_each(|lock| lock.take(turn));
        if taken.is_err() {
            // No queue will run that needs the locks before the failed one.
            self.release(turn);
        }
        taken.map_err(io::Error::other)
    }

    fn release(&self, turn: u64) {
        self.0.iter().for_each(|lock| lock.release(turn));
    }
}

#[cfg(test)]
mod tests {
    use blockio::DiskOptions;

    use super::*;

    #[test]
    fn a_lock_that_fails_leaves_no_other_behind() {
        let disks = [(); 3].map(|()| tempfile::NamedTempFile::new().unwrap());
        let locks = disks.each_ref().map(|disk| {
            disk.as_file().set_len(1 << 20).unwrap();
            let options = DiskOptions { no_lock: true, ..DiskOptions::default() };
            DiskSource::file(disk.path(), &options).unwrap().late_lock().unwrap()
        });
        locks[1].release(1);
        let locks = DiskLocks(locks.into());
        locks.take(1).unwrap_err();
        for disk in &disks {
            let options = DiskOptions { at_once: true, ..DiskOptions::default() };
            DiskSource::file(disk.path(), &options).unwrap();
        }
        locks.take(2).unwrap();
    }
}
