//! What several exports of one disk share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use device::scsi::access::DiskAccess;

/// The disks that are open, by what they are.
#[derive(Default)]
pub(crate) struct DiskAccesses {
    all: Mutex<HashMap<String, Weak<DiskAccess>>>,
    /// Another process hands over those that are new.
    are_awaited: AtomicBool,
}

impl DiskAccesses {
    /// What is new from now on is handed over by another process, or is not.
    pub(crate) fn await_new(&self, are_awaited: bool) {
        self.are_awaited.store(are_awaited, Ordering::Relaxed);
    }

    /// That of the disk with this identity; one without any has its own.
    pub(crate) fn of(&self, identity: &str) -> Arc<DiskAccess> {
        let new = || match self.are_awaited.load(Ordering::Relaxed) {
            true => Arc::new(DiskAccess::awaited()),
            false => Arc::default(),
        };
        if identity.is_empty() {
            return new();
        }
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, access| access.strong_count() > 0);
        if let Some(access) = all.get(identity).and_then(Weak::upgrade) {
            return access;
        }
        let access = new();
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
