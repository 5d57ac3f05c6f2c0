//! Reads of clusters that imago cannot read: see `zstd.rs`.

use std::io;

use imago::Storage as _;

use super::Store;
use crate::qcow2::consistency::write_order::{FRONT_BYTES, Roots};
use crate::qcow2::zstd::{CompressedRange, TABLE_OFFSET, cluster_bytes, decompress};

impl Store {
    /// Returns the content of the compressed cluster with this byte of the disk.
    pub(in crate::qcow2) async fn read_compressed(&self, at: u64) -> io::Result<Vec<u8>> {
        let front = self.peek(0, FRONT_BYTES).await?;
        let front: &[u8; FRONT_BYTES] = front.first_chunk().ok_or(io::ErrorKind::UnexpectedEof)?;
        let cluster_bytes = cluster_bytes(front);
        let (cluster, entries) = (at / cluster_bytes, cluster_bytes / 8);
        let first = self.read_entry(Roots::parse(front).l1.start, cluster / entries).await?;
        let entry = self.read_entry(first & TABLE_OFFSET, cluster % entries).await?;
        let compressed = CompressedRange::from_entry(entry, cluster_bytes).ok_or_else(|| {
            io::Error::other(format!("the cluster of byte {at} is no longer compressed"))
        })?;
        let data =
            self.peek(compressed.offset, iomem::fits(compressed.bytes, "two clusters")).await?;
        decompress(&data, iomem::fits(cluster_bytes, "a cluster")).map_err(|error| {
            let CompressedRange { offset, bytes } = compressed;
            io::Error::other(format!(
                "the compressed cluster of byte {at} is damaged, in bytes {offset} to {} of the \
                 file: {error}",
                offset + bytes
            ))
        })
    }

    /// Reads an entry of a table.
    async fn read_entry(&self, table: u64, index: u64) -> io::Result<u64> {
        let bytes = self.peek(table.saturating_add(index * 8), 8).await?;
        Ok(bytes.first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes)))
    }

    /// Reads bytes of the file, covered by waiting writes.
    async fn peek(&self, offset: u64, bytes: usize) -> io::Result<Vec<u8>> {
        let align = self.req_align() as u64;
        let start = offset - offset % align;
        let end =
            offset.checked_add(bytes as u64).and_then(|end| end.checked_next_multiple_of(align));
        let end = end.ok_or(io::ErrorKind::InvalidData)?;
        let mut data = vec![0; iomem::fits(end - start, "bytes in memory")];
        self.read_at(&mut data, start).await?;
        self.order.overlay_waiting(start, &mut data);
        let first: usize = iomem::fits(offset - start, "part of a block");
        Ok(data[first..first + bytes].to_vec())
    }
}
