//! Reads and writes of a check, and the reasons for its early end.

use std::ops::Range;
use std::time::Instant;

use blockio::{Disk, DiskSource};
use iomem::{Buffers, fits};

use crate::qcow2::consistency::counts::{NO_MEMORY, ODD_TABLE, TOO_MUCH};

/// A smaller read counts as this many bytes, since it takes as long.
pub(crate) const READ_BYTES_MIN: u64 = 16 << 10;

/// The bytes of a table of tables that are read at once.
const PIECE_BYTES: u64 = 1 << 20;

/// Memory for transfers begins at a page.
const PAGE: usize = 4096;

/// The reason for the early end of a check.
pub(super) enum End {
    /// The check is not possible, and the image is opened as it is.
    Skipped(String),
    /// A count is too low: writes could overwrite other data.
    TooLow { offset: u64, count: u64 },
    /// The disk was abandoned before its check had ended.
    Abandoned,
}

impl From<&str> for End {
    fn from(why: &str) -> Self {
        Self::Skipped(why.to_owned())
    }
}

/// Reads and writes the image.
pub(super) struct Reader<'a> {
    pub(super) source: &'a DiskSource,
    pub(super) disk: Disk,
    /// The bytes that may still be read, and the end of the time.
    pub(super) left_bytes: u64,
    pub(super) until: Instant,
}

impl Reader<'_> {
    /// Fails if a table is unaligned or does not lie in the file.
    pub(super) fn check(&self, table: &Range<u64>, cluster_bytes: u64) -> Result<(), End> {
        let is_there = table.start.is_multiple_of(cluster_bytes)
            && table.start > 0
            && table.end <= self.disk.info().size_bytes;
        if is_there { Ok(()) } else { Err(ODD_TABLE.into()) }
    }

    /// Reads bytes of the file, within the bounds.
    pub(super) async fn read(&mut self, offset: u64, bytes: u64) -> Result<Vec<u8>, End> {
        if self.source.is_abandoned() {
            return Err(End::Abandoned);
        }
        if Instant::now() > self.until {
            return Err(TOO_MUCH.into());
        }
        let left = self.left_bytes.checked_sub(bytes.max(READ_BYTES_MIN));
        self.left_bytes = left.ok_or(TOO_MUCH)?;
        let block = u64::from(self.disk.info().logical_block_bytes);
        let whole: usize = fits(bytes.next_multiple_of(block), "bytes in memory");
        let memory = Buffers::uninitialized(whole, PAGE, ()).map_err(|_| NO_MEMORY)?;
        let read = memory.duplicate();
        self.disk.read(offset, memory).await.map_err(|error| failed("read", error.error()))?;
        let mut data = Vec::new();
        data.try_reserve_exact(whole).map_err(|_| NO_MEMORY)?;
        data.resize(fits(bytes, "bytes in memory"), 0);
        read.copy_to(0, &mut data);
        Ok(data)
    }

    pub(super) async fn write(&self, offset: u64, data: &[u8]) -> Result<(), End> {
        let memory = Buffers::uninitialized(data.len(), PAGE, ()).map_err(|_| NO_MEMORY)?;
        memory.copy_from(0, data);
        let written = self.disk.write(offset, memory, false).await;
        written.map_err(|error| failed("written", error.error()))
    }

    /// Makes all earlier writes to the image stable, by any process.
    pub(super) async fn flush(&self) -> Result<(), End> {
        self.disk.flush().await.map_err(|error| failed("flushed", &error))
    }

    pub(super) async fn entries(
        &mut self,
        table: &Range<u64>,
        mut each: impl FnMut(&mut Self, u64, u64) -> Result<(), End>,
    ) -> Result<(), End> {
        let mut at = table.start;
        let mut index = 0;
        while at < table.end {
            let bytes = PIECE_BYTES.min(table.end - at);
            for entry in self.read(at, bytes).await?.as_chunks().0 {
                each(self, index, u64::from_be_bytes(*entry))?;
                index += 1;
            }
            at += bytes;
        }
        Ok(())
    }
}

fn failed(what: &str, error: &std::io::Error) -> End {
    End::Skipped(format!("it cannot be {what}: {error}"))
}
