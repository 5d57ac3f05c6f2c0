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
    fn take(&self, user: u64) -> io::Result<()> {
        self.0.iter().try_for_each(|lock| lock.take(user)).map_err(io::Error::other)
    }

    fn release(&self, user: u64) {
        self.0.iter().for_each(|lock| lock.release(user));
    }
}
