//! The consistency of an image after a crash: the order of its writes, its mark, its leaks, and the
//! cache of its tables. This folder imports nothing from the rest of the kind and nothing of imago,
//! only `blockio` for the disk below and `iomem`.

pub(super) mod ahead_clusters;
pub(super) mod bitmaps;
pub(super) mod cache_limit;
pub(super) mod counts;
pub(super) mod header;
pub(super) mod leaks;
pub(super) mod mark;
pub(super) mod metadata_map;
pub(super) mod table_cache;
pub(super) mod write_order;

use blockio::{DiskSource, Error};

/// The error of an image that cannot be used, with the reason.
pub(super) fn refused(source: &DiskSource, reason: String) -> Error {
    source.refused("", &reason)
}
