//! Reads and writes of images with clusters that imago cannot read: see `zstd.rs`.

use std::io;

use imago::Mapping;

use super::Owner;
use crate::qcow2::format::{Format, has_any};
use crate::qcow2::storage::Store;

impl Owner {
    /// Reads from the disk in an image.
    pub(super) async fn read_into(
        &self,
        image: &Format,
        data: &mut [u8],
        offset: u64,
    ) -> io::Result<()> {
        if !self.core.order.is_rounded() {
            return image.read(data, offset).await;
        }
        let mut done = 0;
        while done < data.len() {
            let (at, rest) = (offset + done as u64, &mut data[done..]);
            let (mapping, same) = image.get_mapping(at, rest.len() as u64).await?;
            let bytes: usize = iomem::fits(same.min(rest.len() as u64), "part of a read");
            assert!(bytes > 0, "the disk ends before its size");
            done += match place(&mapping) {
                None => {
                    image.read(&mut rest[..bytes], at).await?;
                    bytes
                }
                Some((store, place)) => {
                    let cluster = store.read_compressed(place).await?;
                    let start: usize =
                        iomem::fits(place % cluster.len() as u64, "a place in a cluster");
                    let bytes = bytes.min(cluster.len() - start);
                    rest[..bytes].copy_from_slice(&cluster[start..start + bytes]);
                    bytes
                }
            };
        }
        Ok(())
    }

    /// Writes some of the first bytes, and returns their number. imago reads none of the old data.
    pub(super) async fn write_decompressed(
        &self,
        image: &Format,
        offset: u64,
        data: &[u8],
    ) -> io::Result<usize> {
        let cluster: usize = iomem::fits(self.core.cluster_bytes, "a cluster");
        let within: usize = iomem::fits(offset % self.core.cluster_bytes, "a place in a cluster");
        if within == 0 && data.len() >= cluster {
            return self.write_found(image, offset, &data[..cluster], true).await;
        }
        let start = offset - within as u64;
        let data = &data[..data.len().min(cluster - within)];
        let all = start..start + cluster as u64;
        if !has_any(image, &all, |mapping| place(mapping).is_some()).await? {
            return self.write_found(image, offset, data, false).await;
        }
        let mut content = vec![0; cluster];
        self.read_into(image, &mut content, start).await?;
        content[within..within + data.len()].copy_from_slice(data);
        let written = self.write_found(image, start, &content, true).await?;
        assert_eq!(written, cluster, "a cluster has one place");
        Ok(data.len())
    }
}

/// The file with a range in Zstandard clusters, and the place of the range in its disk.
fn place<'a>(mapping: &Mapping<'a, Store>) -> Option<(&'a Store, u64)> {
    let Mapping::Special { layer, offset, .. } = mapping else { return None };
    let store = own_file(layer)?;
    store.has_zstd().then_some((store, *offset))
}

/// The file of a layer. imago lists the files of lower layers before it.
fn own_file(layer: &Format) -> Option<&Store> {
    layer.inner().collect_storage_dependencies().pop()
}
