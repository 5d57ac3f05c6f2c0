//! Sets the mark of the image, and brings it to rest: see `mark.rs`.

use std::io;
use std::sync::atomic::Ordering;

use blockio::disk::DiskState;
use imago::Storage as _;

use super::Owner;
use crate::qcow2::consistency::leaks;
use crate::qcow2::consistency::mark::MarkState;

impl Owner {
    /// Marks the image, and makes the mark stable, before any of its tables or data change.
    pub(super) async fn mark(&self) -> io::Result<()> {
        let (core, mark) = (&self.core, &self.core.order.mark);
        let is_known = !matches!(mark.state(), MarkState::Unknown | MarkState::Clear);
        if is_known && !mark.delays_writes() {
            return Ok(());
        }
        let _image = self.image().await?.write().await;
        let delays_writes = mark.delays_writes();
        if mark.state() == MarkState::LeaksToFree {
            self.free_leaks().await?;
        }
        if mark.state() == MarkState::Clear {
            assert!(core.order.is_empty(), "tables have changed without a mark");
            core.top.write_mark(true).await?;
            core.top.sync().await?;
            mark.set_state(MarkState::Set);
        } else if mark.has_autoclear() {
            core.top.change_front(|_| ()).await?;
            core.top.sync().await?;
        }
        if delays_writes {
            // Writes may go straight to the file from now on.
            mark.set_autoclear(false);
            core.table.forget(&(0..core.size_bytes.load(Ordering::Relaxed)));
        }
        Ok(())
    }

    /// Frees the leaks of the last user, before any table of counts is in memory.
    async fn free_leaks(&self) -> io::Result<()> {
        let (core, mark) = (&self.core, &self.core.order.mark);
        let Some(header) = core.layers[0].header.as_ref() else { return Ok(()) };
        if core.leaked == Some(0) {
            // The last user may have been killed before its mark was stable.
            core.top.sync().await?;
            mark.set_state(MarkState::Set);
            return Ok(());
        }
        let is_freed = leaks::free(&self.io, core.source(), header, &leaks::BOUNDS).await;
        mark.set_state(match is_freed.map_err(io::Error::other)? {
            true => MarkState::Clear,
            false => MarkState::Inherited,
        });
        Ok(())
    }

    /// Like [`quiesce`](Self::quiesce), for the last time. Does nothing if another process may use
    /// the image already.
    pub(super) async fn shut_down(&self) {
        if !self.is_handed_over.get() {
            self.quiesce().await;
        }
    }

    /// Like [`quiesce`](Self::quiesce). Another process may take over until the next change.
    pub(super) async fn hand_over(&self) {
        self.is_handed_over.set(true);
        self.quiesce().await;
        // An earlier call may still be writing the header.
        if let Some(image) = self.image.get() {
            drop(image.write().await);
        }
    }

    /// Removes the mark if nothing can be leaked. No flush makes that stable: a mark that stays
    /// costs only a check, and an end is to be quick.
    async fn quiesce(&self) {
        if let Err(error) = self.try_quiesce().await {
            tracing::debug!("{} stays marked: {error}", self.core.name());
        }
    }

    async fn try_quiesce(&self) -> io::Result<()> {
        let core = &self.core;
        let is_marked = || core.order.mark.state() == MarkState::Set;
        // A disk that does not answer now would delay the end.
        let may_quiesce = || self.jobs.get() == 0 && core.source().state() == DiskState::Ready;
        let is_sure = || !self.changes.has_failed() && !core.order.mark.must_stay_set();
        if !is_marked() || !may_quiesce() || !is_sure() {
            return Ok(());
        }
        let _counting = self.counting.lock().await;
        let image = self.image().await?.write().await;
        if self.changes.imago_must_write() || !core.order.is_empty() {
            self.commit_to(&image).await?;
        }
        let is_quiescent =
            || is_marked() && self.jobs.get() == 0 && is_sure() && core.order.refusal().is_none();
        if is_quiescent() {
            core.top.uncount().await?;
        }
        // A job may have begun while counts were written.
        if is_quiescent() {
            assert!(core.order.is_empty(), "what waits is written by a commit");
            // If the write fails, the mark may be there or not, so the next change sets it again.
            core.order.mark.set_state(MarkState::Clear);
            core.top.write_mark(false).await?;
        }
        Ok(())
    }
}
