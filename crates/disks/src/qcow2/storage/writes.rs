//! Writes to the file of an image, in their order: see `write_order.rs`.

use std::io;
use std::sync::Arc;
use std::task::Poll;

use imago::Storage as _;

use super::Store;
use crate::qcow2::consistency::table_cache::changes;
use crate::qcow2::consistency::write_order::WaitingWrites;
use crate::qcow2::consistency::write_order::entries::{Changing, Entry};

impl Store {
    /// Makes all waiting writes, in their order.
    pub(in crate::qcow2) async fn write_waiting(&self) -> io::Result<()> {
        self.check_not_refused()?;
        if self.order.is_empty() {
            return Ok(());
        }
        self.count_ahead().await;
        if self.order.needs_flush() {
            self.sync().await?;
        }
        let block_entries = self.order.block_entries();
        if !block_entries.is_empty() {
            self.write_all(block_entries).await?;
            self.order.note_written();
            self.order.drop_block_entries();
            self.sync().await?;
        }
        self.write_all(self.order.pointers()).await?;
        self.order.drop_pointers();
        let fallen = self.order.fallen();
        if !fallen.is_empty() {
            self.sync().await?;
            self.lower(fallen).await?;
        }
        self.order.note_fallen_written();
        Ok(())
    }

    /// Writes blocks with counts that have fallen.
    async fn lower(&self, blocks: WaitingWrites) -> io::Result<()> {
        self.write_all(blocks.clone()).await?;
        blocks.iter().for_each(|(place, counts)| self.order.note_lowered(*place, counts));
        Ok(())
    }

    /// Uncounts the clusters that were counted ahead, before the image comes to rest, and makes
    /// that stable.
    pub(in crate::qcow2) async fn uncount(&self) -> io::Result<()> {
        let over_counted = self.order.all_over_counted();
        self.order.forget_file();
        if !over_counted.is_empty() {
            self.lower(over_counted).await?;
            self.sync().await?;
        }
        Ok(())
    }

    /// Makes all writes at once: none depends on another.
    async fn write_all(&self, held: WaitingWrites) -> io::Result<()> {
        wait_all(held.into_iter().map(|(offset, data)| self.write_table(offset, data))).await
    }

    /// Writes entries to their tables. Each leads to a cluster that was counted ahead and is ready.
    /// Returns false if a commit of all tables must write them.
    pub(in crate::qcow2) async fn write_entries(&self, entries: &[Entry]) -> io::Result<bool> {
        self.check_not_refused()?;
        let Some(tables) = self.order.begin_entries(entries, self.req_align()) else {
            return Ok(false);
        };
        let blocks = tables.iter().flat_map(|changing| {
            changing.blocks.iter().map(move |block| (changing, block.clone()))
        });
        let writes = blocks.map(|(Changing { place, table, .. }, block)| {
            let at = place + block.start as u64;
            self.write_at(&table[block], at)
        });
        let written = wait_all(writes).await;
        self.order.end_entries(if written.is_ok() { tables } else { Vec::new() });
        written.inspect_err(|_| self.order.mark.keep_set())?;
        Ok(true)
    }

    /// Writes the changed blocks of a table.
    async fn write_table(&self, offset: u64, data: Arc<[u8]>) -> io::Result<()> {
        let known = self.order.cached_table(offset).unwrap_or_default();
        self.write_changes(&known, &data, offset).await?;
        self.order.cache_table(offset, data);
        Ok(())
    }

    /// Writes the reference counts of a block that rise.
    pub(super) async fn write_counts(&self, wanted: &[u8], offset: u64) -> io::Result<()> {
        let counts =
            match self.order.cached_table(offset).filter(|known| known.len() == wanted.len()) {
                Some(known) => known,
                None => {
                    let mut counts = vec![0; wanted.len()];
                    self.read_at(&mut counts, offset).await?;
                    counts.into()
                }
            };
        let raised = self.order.raise(offset, &counts, wanted);
        if raised != counts {
            self.write_changes(&counts, &raised, offset).await?;
            self.order.note_counts(offset, wanted, &raised);
            self.order.note_written();
        }
        Ok(())
    }

    /// Writes the blocks of a table that differ from the file. After an error the content of the
    /// file is unknown.
    pub(super) async fn write_changes(
        &self,
        old: &[u8],
        new: &[u8],
        offset: u64,
    ) -> io::Result<()> {
        self.order.forget_table(offset);
        for change in changes(old, new, self.req_align()) {
            let start = offset + change.start as u64;
            self.write_at(&new[change], start).await?;
        }
        Ok(())
    }

    /// Writes data to clusters that were taken ahead.
    pub(in crate::qcow2) async fn write_data(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.check_not_refused()?;
        self.write_at(data, offset).await.inspect_err(|_| self.order.mark.keep_set())
    }

    /// Writes data, or a table that is not known as one.
    pub(super) async fn write_now(&self, data: &[u8], offset: u64) -> io::Result<()> {
        let range = offset..offset + data.len() as u64;
        if self.order.has_ahead() && is_zero(data) && self.order.take_ahead(&range) {
            // The file has these zeroes already, and they are stable.
            self.order.cache_zeroes(offset, data.len());
            return Ok(());
        }
        self.order.remove_ahead(&range);
        self.order.forget_table(offset);
        let written = self.write_at(data, offset).await;
        self.order.note_written();
        written
    }
}

/// Waits for concurrent writes, and returns the last of their errors.
async fn wait_all(
    writes: impl Iterator<Item = impl Future<Output = io::Result<()>>>,
) -> io::Result<()> {
    let mut writes: Vec<_> = writes.map(Box::pin).collect();
    let mut result = Ok(());
    std::future::poll_fn(|context| {
        writes.retain_mut(|write| match write.as_mut().poll(context) {
            Poll::Ready(Ok(())) => false,
            Poll::Ready(error) => {
                result = error;
                false
            }
            Poll::Pending => true,
        });
        if writes.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    result
}

fn is_zero(data: &[u8]) -> bool {
    data.iter().all(|byte| *byte == 0)
}
