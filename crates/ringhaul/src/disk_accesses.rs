//! What several exports of one disk share.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use anyhow::{Context, Result};
use device::scsi::access::DiskAccess;

/// The disks that logical units have open, by what they are.
#[derive(Default)]
pub(crate) struct DiskAccesses(Mutex<HashMap<String, Weak<DiskAccess>>>);

impl DiskAccesses {
    /// That of the disk with this identity; one without any has its own. `reservations` is where
    /// its persistent reservations are kept, if they can be.
    ///
    /// # Errors
    ///
    /// When that file cannot be used.
    pub(crate) fn of(
        &self,
        identity: &str,
        reservations: Option<PathBuf>,
    ) -> Result<Arc<DiskAccess>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, access| access.strong_count() > 0);
        if let Some(access) = all.get(identity).and_then(Weak::upgrade) {
            return Ok(access);
        }
        let access = match reservations {
            Some(path) => DiskAccess::load(path).context("persistent reservations")?,
            None => DiskAccess::volatile(),
        };
        if !identity.is_empty() {
            all.insert(identity.to_owned(), Arc::downgrade(&access));
        }
        Ok(access)
    }
}
