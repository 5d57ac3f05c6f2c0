//! The changes of an image, and the number of these in its file.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use tokio::sync::Mutex;

use super::streams::Streams;
use crate::qcow2::consistency::write_order::entries::Entry;

/// The changes of an image since it was opened.
#[derive(Default)]
pub(super) struct Changes {
    /// Numbers of changes: of all, of the last one that is no entry, and of the last one in the
    /// file.
    pub(super) made: Cell<u64>,
    pub(super) last_non_entry: Cell<u64>,
    pub(super) committed: Cell<u64>,
    /// True if entries are in the file, and imago still has to write their tables and counts.
    pub(super) is_imago_behind: Cell<bool>,
    /// True if the last commit has failed, so that imago may use space that the file still points
    /// to.
    pub(super) failed: Cell<bool>,
    /// Ranges that have space since the last commit. Other requests must not use it yet.
    pub(super) uncommitted: RefCell<Vec<Range<u64>>>,
    /// Entries that no commit has written yet.
    pub(super) entries: RefCell<Vec<Entry>>,
    pub(super) streams: Streams,
    /// Held during a commit. The lock of the image comes first.
    pub(super) commit_lock: Mutex<()>,
}

impl Changes {
    /// Notes a change that imago has to write.
    pub(super) fn add(&self) {
        self.made.set(self.made.get() + 1);
        self.last_non_entry.set(self.made.get());
    }

    /// Notes that a range of whole clusters has space, which imago has to write.
    pub(super) fn add_range(&self, range: Range<u64>) {
        self.uncommitted.borrow_mut().push(range);
        self.add();
    }

    /// Notes that a range of whole clusters has space that was counted ahead, from `offset` on.
    pub(super) fn add_entries(&self, range: Range<u64>, offset: u64, cluster: u64) {
        let count = (range.end - range.start) / cluster;
        let entry =
            |index| Entry { at: range.start + index * cluster, offset: offset + index * cluster };
        self.entries.borrow_mut().extend((0..count).map(entry));
        self.uncommitted.borrow_mut().push(range);
        self.made.set(self.made.get() + 1);
    }

    /// True if other requests must not use the space of a range yet.
    pub(super) fn is_uncommitted(&self, range: &Range<u64>) -> bool {
        self.uncommitted.borrow().iter().any(|new| new.start < range.end && range.start < new.end)
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.get()
    }

    /// True if only entries wait for a commit.
    pub(super) fn has_only_entries(&self) -> bool {
        !self.failed.get() && self.last_non_entry.get() <= self.committed.get()
    }

    /// True if imago has to write something before it is closed.
    pub(super) fn imago_must_write(&self) -> bool {
        !self.are_committed() || self.failed.get() || self.is_imago_behind.get()
    }

    /// True if all changes are in the file.
    pub(super) fn are_committed(&self) -> bool {
        self.committed.get() >= self.made.get()
    }
}
