//! What several exports of one disk share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use device::scsi::access::DiskAccess;

/// The disks that are open, by what they are.
#[derive(Default)]
pub(crate) struct DiskAccesses(Mutex<HashMap<String, Weak<DiskAccess>>>);

impl DiskAccesses {
    /// That of the disk with this identity; one without any has its own.
    pub(crate) fn of(&self, identity: &str) -> Arc<DiskAccess> {
        if identity.is_empty() {
            return Arc::default();
        }
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, access| access.strong_count() > 0);
        if let Some(access) = all.get(identity).and_then(Weak::upgrade) {
            return access;
        }
        let access = Arc::default();
        all.insert(identity.to_owned(), Arc::downgrade(&access));
        access
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_share_what_belongs_to_their_disk_while_one_has_it() {
        let accesses = DiskAccesses::default();
        let one = accesses.of("a");
        assert!(Arc::ptr_eq(&one, &accesses.of("a")));
        assert!(!Arc::ptr_eq(&one, &accesses.of("b")));
        assert!(!Arc::ptr_eq(&accesses.of(""), &accesses.of("")));
        let gone = Arc::downgrade(&one);
        drop(one);
        assert!(gone.upgrade().is_none());
        drop(accesses.of("a"));
    }
}
