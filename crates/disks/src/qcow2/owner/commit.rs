//! Commits of changes to the file. Many changes share a commit.
//!
//! A commit that only gives clusters of the disk places that were counted ahead is written as
//! entries, beside jobs that use the tables. For any other commit imago writes its tables, while no
//! job uses them.

use std::io;
use std::sync::atomic::Ordering;

use super::Owner;
use crate::qcow2::consistency::write_order::entries::Entry;
use crate::qcow2::format::Format;
use crate::qcow2::place_table::Place;

impl Owner {
    /// Commits all changes so far.
    pub(super) async fn commit(&self) -> io::Result<()> {
        let wanted = self.changes.made.get();
        let is_done = || self.changes.committed.get() >= wanted && self.core.order.is_empty();
        if is_done() {
            return Ok(());
        }
        // Jobs of the same round share the commit.
        self.io.next_round().await;
        if is_done() || self.commit_entries().await? {
            return Ok(());
        }
        let image = self.image().await?.write().await;
        if is_done() {
            return Ok(());
        }
        self.commit_to(&image).await
    }

    /// Writes the entries of all changes. Returns false if other changes wait, or imago has to
    /// write them.
    pub(super) async fn commit_entries(&self) -> io::Result<bool> {
        let changes = &self.changes;
        let _lock = changes.commit_lock.lock().await;
        if !changes.has_only_entries() || !self.core.order.is_empty() {
            return Ok(false);
        }
        if changes.are_committed() {
            return Ok(true);
        }
        let (made, ranges) = (changes.made.get(), changes.uncommitted.borrow().len());
        let entries = changes.entries.borrow().clone();
        changes.is_imago_behind.set(true);
        match self.core.top.write_entries(&entries).await {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(error) => {
                changes.failed.set(true);
                return Err(error);
            }
        }
        changes.uncommitted.borrow_mut().drain(..ranges);
        changes.entries.borrow_mut().drain(..entries.len());
        self.end_commit(made, &entries);
        Ok(true)
    }

    /// Commits all changes through imago.
    pub(super) async fn commit_to(&self, image: &Format) -> io::Result<()> {
        let changes = &self.changes;
        let _lock = changes.commit_lock.lock().await;
        let made = changes.made.get();
        changes.failed.set(true);
        image.flush().await?;
        self.core.top.write_waiting().await?;
        assert_eq!(changes.made.get(), made, "nothing changes during a commit");
        changes.failed.set(false);
        changes.is_imago_behind.set(false);
        changes.uncommitted.borrow_mut().clear();
        let entries = changes.entries.take();
        self.end_commit(made, &entries);
        Ok(())
    }

    /// Notes the number of changes in the file. Requests may use the space of the entries now.
    fn end_commit(&self, made: u64, entries: &[Entry]) {
        let core = &self.core;
        for Entry { at, offset } in entries {
            let size = core.size_bytes.load(Ordering::Relaxed);
            let place = Place::Data { layer: 0, offset: *offset, writable: true };
            core.table.set(*at, core.cluster_bytes.min(size.saturating_sub(*at)), place);
        }
        self.changes.committed.set(made);
        core.committed.fetch_add(1, Ordering::Release);
    }

    /// Commits waiting changes, before a job that is alone with the image takes or releases space.
    pub(super) async fn commit_waiting(&self, image: &Format) -> io::Result<()> {
        match self.commit_entries().await? {
            true => Ok(()),
            false => self.commit_to(image).await,
        }
    }
}
