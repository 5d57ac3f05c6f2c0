//! The changes of an image, the number of these in its file, and sequential writers.
//!
//! Clusters ahead of a writer get places together with the requested cluster, in one commit, so
//! that the next writes go straight to the file. As many bytes get places ahead as the writer has
//! filled, up to a bound. When a writer ends, at most half of its clusters have no data. They are
//! zeroes, as before.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;

use tokio::sync::Mutex;

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

/// The most bytes that get places ahead of a writer.
const AHEAD_BYTES: u64 = 4 << 20;

/// The most writers that are remembered.
const STREAMS_MAX: usize = 8;

/// The end of the clusters with places, and the number of their bytes.
struct Stream {
    end: u64,
    bytes: u64,
}

/// The writers of an image. The last one to ask comes first.
#[derive(Default)]
pub(super) struct Streams(RefCell<VecDeque<Stream>>);

impl Streams {
    /// Notes that clusters get places for a write, and returns the end of the clusters that may get
    /// places with them.
    pub(super) fn next(&self, clusters: &Range<u64>) -> u64 {
        let mut streams = self.0.borrow_mut();
        let found = streams.iter().position(|stream| stream.end == clusters.start);
        let before = found.and_then(|index| streams.remove(index)).map_or(0, |stream| stream.bytes);
        let ahead = before.min(AHEAD_BYTES);
        let end = clusters.end.saturating_add(ahead);
        streams.push_front(Stream { end, bytes: before + (end - clusters.start) });
        streams.truncate(STREAMS_MAX);
        end
    }

    /// Notes that fewer clusters got places: up to `there`, and not up to `end`.
    pub(super) fn cut(&self, end: u64, there: u64) {
        let mut streams = self.0.borrow_mut();
        if let Some(stream) = streams.iter_mut().find(|stream| stream.end == end) {
            stream.end = there;
            stream.bytes = stream.bytes.saturating_sub(end - there);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// An answered write must survive a kill, so its cluster must be in the tables of the file.
    #[test]
    fn space_is_used_by_others_after_its_commit_only() {
        const CLUSTER: u64 = 512;
        let changes = Changes::default();
        changes.add_range(2 * CLUSTER..4 * CLUSTER);
        changes.add_entries(6 * CLUSTER..8 * CLUSTER, 90 * CLUSTER, CLUSTER);
        for (range, expected) in [
            (0..2, false),
            (0..3, true),
            (3..4, true),
            (4..6, false),
            (5..7, true),
            (7..8, true),
            (8..9, false),
        ] {
            let bytes = range.start * CLUSTER..range.end * CLUSTER;
            assert_eq!(changes.is_uncommitted(&bytes), expected, "{range:?}");
        }
        let entry = |cluster| Entry { at: cluster * CLUSTER, offset: (84 + cluster) * CLUSTER };
        assert_eq!(*changes.entries.borrow(), [entry(6), entry(7)]);
        assert_eq!(changes.made.get(), 2);
    }

    /// After a failed commit imago may use space to which the file still points.
    #[test]
    fn entries_are_written_alone_unless_imago_has_to_write() {
        let changes = Changes::default();
        changes.add_entries(0..512, 0, 512);
        assert!(changes.has_only_entries() && !changes.are_committed());
        changes.failed.set(true);
        assert!(!changes.has_only_entries() && changes.imago_must_write());
        changes.failed.set(false);
        changes.add();
        assert!(!changes.has_only_entries());
        changes.committed.set(2);
        assert!(changes.has_only_entries() && changes.are_committed());
        assert!(!changes.imago_must_write());
        changes.is_imago_behind.set(true);
        assert!(changes.imago_must_write());
    }

    #[test]
    fn the_places_ahead_grow_with_the_filled_clusters_of_a_writer() {
        let streams = Streams::default();
        let mut at = 0;
        for ahead in [0, 1, 3, 4, 4, 4] {
            // A second writer, far behind it.
            streams.next(&(at + 900 * MIB..at + 901 * MIB));
            let end = streams.next(&(at..at + MIB));
            assert_eq!(end - at - MIB, ahead * MIB);
            at = end;
        }
    }

    #[test]
    fn a_writer_that_jumps_gets_no_places_ahead() {
        let streams = Streams::default();
        for at in [0, 2, 9, 5, 7, 20] {
            assert_eq!(streams.next(&(at..at + 1)), at + 1);
        }
    }

    #[test]
    fn a_writer_resumes_where_fewer_clusters_got_places() {
        let streams = Streams::default();
        streams.next(&(0..10));
        let end = streams.next(&(10..20));
        assert_eq!(end, 30);
        streams.cut(end, 25);
        assert_eq!(streams.next(&(25..30)), 30 + 25);
    }

    #[test]
    fn the_oldest_writer_is_forgotten() {
        let streams = Streams::default();
        for writer in 0..=STREAMS_MAX as u64 {
            streams.next(&(writer * MIB..writer * MIB + 1));
        }
        assert_eq!(streams.next(&(1..2)), 2);
        let last = STREAMS_MAX as u64 * MIB + 1;
        assert_eq!(streams.next(&(last..last + 1)), last + 2);
    }
}
